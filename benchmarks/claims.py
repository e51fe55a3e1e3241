"""What the sources of this package claim, and whether it holds here: a row for each, its figure from results/, and the script to measure it anew.

    python benchmarks/claims.py"""
from functools import partial

from frame import main, md_table

not_run = 'not run yet'

def span(o, spec):
    low,high = f'{o.min():{spec}}',f'{o.max():{spec}}'
    return low if low==high else f'{low} to {high}'

def held(rule, *oks): return f"{'yes' if all(oks) else 'in part' if any(oks) else 'no'}: {rule}"

# Of the rows of a CSV: a figure in words, and whether the claim holds by a rule

def memory(d):
    ratio = (d.traced/d.peak).groupby(d.model).agg(['min','max'])
    fine = ratio['min'].ge(0.9) & ratio['max'].le(1.05)
    return (f"a step traced by these has {span(ratio[fine].stack(), '.2f')} of the allocator's peak in {fine.sum()} of {len(fine)} models",
            held('0.9 to 1.05 in all', *fine))

def accumulation(d):
    of = [d[d.epoch==e] for e in (1,2,3)]
    accuracy,loss = ([o[k].mean() for o in of] for k in ('accuracy','loss'))
    text = f"{' / '.join(f'{o:.1f}' for o in accuracy)}%, loss {' / '.join(f'{o:.3f}' for o in loss)}, means of {d.seed.nunique()} seeds"
    return text,held('within a point and 0.02', *(abs(a-b)<=1 for a,b in zip(accuracy, (84.8,90.1,92.0))),
                     *(abs(a-b)<=0.02 for a,b in zip(loss, (0.528,0.340,0.281))))

def uncut(d): return f"after 100 steps {span(d.apart_100, '.1e')} of the weights' norm apart",held('at most 1e-6', *(d.apart_100<=1e-6))

def last(d): return d[d.epoch==d.epoch.max()]

def over_base(d):
    "Test error of each arm minus the base's, in points: in words, and the mean and half its 95% interval"
    from goyal import difference, interval, last_errors
    errors = last_errors(d)
    minus = {arm: (errors[arm]-errors.base).dropna() for arm in errors if arm!='base'}
    return {arm: difference(errors[arm], errors.base) for arm in minus},{arm: (o.mean(),interval(o)) for arm,o in minus.items()}

def goyal(d):
    said,minus = over_base(d)
    arms = '8x unscaled','8x linear, no warmup','8x linear, warmup','32x linear, warmup','32x gain, warmup'
    return '; '.join(f'{o}: {said[o]}' for o in arms)+' points',as_goyal(minus, ('8x linear, warmup','32x linear, warmup'), arms[:2])

def stepped(d):
    said,minus = over_base(d)
    text = '; '.join(f'{o}: {v}' for o,v in said.items())+f' points, {d.seed.nunique()} seeds'
    return text,as_goyal(minus, ('8x linear, warmup of 5 epochs',), ('8x unscaled','8x linear, no warmup'))

def as_goyal(minus, scaled, others):
    return held('scaled with warmup at most 0.5 points more, the others more by their intervals', *(minus[o][0]<=0.5 for o in scaled),
                *(minus[o][0]>minus[o][1] for o in others))

def gains(d):
    from goyal import difference, interval, last_errors
    errors = last_errors(d)
    a,b = errors['8x linear, warmup'],errors['8x unscaled']
    text = f"8 times the rate minus the small batch's: {difference(a, b)} points of test error"
    return text,held('less by its interval', (a-b).mean()<-interval((a-b).dropna()))

def lenet(d):
    of = last(d[d.dtype=='float32'])
    text = '; '.join(f'{o.arm}: {o.accuracy:.2f}%' for o in of.itertuples())
    return f'{text}, one seed; float32, whose rounding grows',held('within a point', *(abs(of.accuracy-of.accuracy.iloc[0])[1:]<=1))

def resnet(d):
    of = {arm: o.accuracy for arm,o in last(d).groupby('arm', sort=False)}
    base = of['one process, 256'].mean()
    return ('; '.join(f'{arm}: {o.mean():.2f} ± {o.std():.2f}%' for arm,o in of.items()),
            held('within a point of one device', *(abs(of[o].mean()-base)<=1 for o in of if o.endswith('2 x 256'))))

def swings(d):
    late = d[d.epoch>d.epoch.max()/2].groupby(['arm','seed']).accuracy.std().groupby('arm').mean()
    at = {lr: late[nm] for lr,nm in ((0.2,'one process, 512 as 2 x 256'),(0.1,'one process, 512 as 2 x 256, rate as before'))}
    text = f"over the last half of the epochs {at[0.2]:.1f} points at 0.2, {at[0.1]:.1f} at 0.1, batch 512 both times"
    return text,held('less at the lower rate', at[0.1]<at[0.2])

def reductions(d):
    ours,fastais,bare = (d[d.accumulation.str.contains(o)].reductions for o in ('GradAccum','GradientAccumulation','bare loop'))
    return (f"{span(ours, 'd')} in an epoch of 3 windows; fastai's GradientAccumulation {span(fastais, 'd')}, accelerate's own loop {span(bare, 'd')}",
            held('one in a window', *(ours==3)))

def ranks(d):
    d = d[d.dtype=='float64']
    return (f"a step's loss differs by at most {d.apart.max():.1e} in {d.epoch.max()} epochs in double precision",held('at most 1e-8', d.apart.max()<=1e-8))

def copies(d):
    one,most = d[d.distinct==1],d[d.distinct==d.distinct.max()]
    smallest = one.plan_bs<=2
    rest = '' if smallest.all() else f", {span(one.plan_bs[~smallest], 'd')} with the others"
    return (f"noise scale {one.noise_scale.max():.2g} with copies of one, {span(most.noise_scale, '.0f')} with {d.distinct.max():,} different ones; with "
            f"copies of one the smallest batch, 2, is planned with {smallest.sum()} of {len(one)} seeds{rest}",
            held('noise scale 0, smallest batch', *(one.noise_scale==0), *smallest))

def mnist(d):
    d = d[d.seed.astype(str)=='all']
    first,end = (d[d.stretch==o].noise_scale for o in ('first tenth of epoch 1','epoch 3'))
    return (f"{span(first, '.0f')} in the first tenth of an epoch, {span(end, '.0f')} in the third",
            held('within a factor of 3', *(50/3<=o<=150 for o in first), *(300<=o<=2700 for o in end)))

def coverage(d):
    d = d[d.noise>0]
    return (f"intervals of 95% cover {span(d.covered, '.1f')}% in {len(d)} simulations, under 90% in {(d.covered<90).sum()}; the estimate's median is "
            f"{span(d.estimate, '.3f')} of the truth",held('at least 90%, median within 10%', *(d.covered>=90), *(abs(d.estimate-1)<=0.1)))

def rossmann_noise(plans, along):
    of = {nm: along[along.part==nm].noise_scale for nm in ('noise_windows','noise')}
    text = '; '.join(f'{o.noise_scale:.0f} [{o.low:.0f}, {o.high:.0f}] for {o.epochs} epoch{"s"*(o.epochs>1)}: batch {o.bs}' for o in plans.itertuples())
    return (f"over a whole one-cycle, as `bs_find` plans: {text}; along an epoch at the constant rate {span(of['noise_windows'], '.0f')} in steps of 1280, as "
            f"the article's 20 batches of 64, and {span(of['noise'], '.0f')} in steps of 64",
            held('500 in the interval of the whole; 250 to 1000 along an epoch', *((plans.low<=500) & (plans.high>=500)),
                 *(all(o.between(250, 1000)) for o in of.values())))

def rossmann(d):
    from rossmann_cycles import best_rate, by_arm, lr, over_today
    res,oks = [],[]
    for n,of in d.groupby('rows'):
        n_rates,ways = of.groupby('arm').lr.nunique(),[("at the article's rate",lambda arm: lr)]
        if n_rates.max()>1: ways.append((f"each at the best of {span(n_rates, 'd')} rates",partial(best_rate, of)))
        for said,rate_of in ways:
            done = by_arm(of, rate_of)
            for arm,over in over_today(done).items():
                what = {'large': '512', 'planned': 'as each plan has it'}.get(arm, f"the plan's {done[arm].epochs.iloc[0]} of {done[arm].bs.iloc[0]} for 5")
                time,seeds = over.pop('seconds').mean(),len(done[arm])
                res.append(f"{n:,} rows, {said}, {what} over 64: time {time:.2f}, "
                           + ', '.join(f"{k.replace('_', ' ')} {pm(v)}" for k,v in over.items()) + f" ({seeds} seed{'s'*(seeds>1)})")
                if arm=='large': oks.append(time<=0.45 and all(v.mean()<=1.02 for v in over.values()))
    return '<br>'.join(res),held('512 in at most 0.45 of the time, losses and metric at most 1.02', *oks)

def pm(o): return f'{o.mean():.2f}' + (f' ± {o.std():.2f}' if len(o)>1 else '')

# Claim; source; figure; CSV; script
tutorial,course,finder = 'accumulation tutorial','course on several GPUs','batch size finder'
rows = [
    ('A batch cut into micro-batches, gradients averaged, is the uncut batch',tutorial,uncut,'mnist_accumulation','mnist_accumulation.py'),
    ('MNIST with batch 64 as 2 x 32: 84.8 / 90.1 / 92.0%, loss 0.528 / 0.340 / 0.281',tutorial,accumulation,'mnist_accumulation',
     'mnist_accumulation.py'),
    ("Parameters, optimizer and activations make a step's memory, and the batch the activations",tutorial,memory,'memory','memory.py'),
    ('The learning rate is raised with the larger batch',tutorial,gains,'goyal','goyal.py'),
    ('The mean over devices is that of the whole batch',course,ranks,'ranks_lenet','ranks.py'),
    ('One reduction per optimizer step suffices',course,reductions,'ranks_reductions','ranks.py'),
    ('LeNet on Fashion-MNIST on one device and on two: the same',course,lenet,'ranks_lenet','ranks.py'),
    ('ResNet-18 on Fashion-MNIST: one device 256 at 0.1, two devices 512 at 0.2',course,resnet,'ranks_resnet','ranks.py'),
    ('Validation accuracy that swings is mostly the learning rate',course,swings,'ranks_resnet','ranks.py'),
    ('With 10,000 copies of one sample a larger batch only costs more',course,copies,'diversity','diversity.py'),
    ('The noise scale from consecutive batches is right, and three other ways are not',finder,coverage,'coverage','coverage.py'),
    ('MNIST: a noise scale from about 50 to about 900',finder,mnist,'noise_mnist','noise_mnist.py'),
    ('Rossmann: a noise scale near 500, so batch 512',finder,rossmann_noise,'rossmann_plans rossmann_noise','rossmann.py'),
    ('Rossmann: a quarter of the time, better losses and metric after three cycles',finder,rossmann,'rossmann_cycles','rossmann_cycles.py'),
    ('k times the batch at k times the rate after a warmup loses nothing; unscaled, or without warmup, it does','Goyal et al. 2017',goyal,'goyal','goyal.py'),
    ('The same with a rate that goes down in steps, after a warmup of 5 epochs','Goyal et al. 2017',stepped,'goyal_steps','goyal.py')]

names = [*dict.fromkeys(o for *_,csvs,_ in rows for o in csvs.split())]

def page(*dfs):
    tables,lines = dict(zip(names, dfs)),[]
    for claim,source,figure,csvs,script in rows:
        of = [tables[o] for o in csvs.split()]
        text,verdict = figure(*of) if all(map(len, of)) else (not_run,'')
        lines.append((claim,source,text,verdict,f'[`{script}`]({script}), [page]({script[:-3]}.md)'))
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}', md_table(['claim','source','here','held','command'], lines),
        "Held: by the rule beside it, for each of its figures (yes), some (in part) or none (no). ± is the standard deviation over seeds, in rows of "
        "`goyal.py` half a 95% interval of the mean difference. Each page says what was run, "
        "with which seeds, and when.",
        "What is shown by a lesson or a test and not by a figure: BatchNorm in micro-batches and GroupNorm in its place ([gradient "
        "accumulation](../nbs/guides/accumulation.ipynb)), clipping of the window's mean gradient (the same), the four ways to the noise scale ([the noise "
        "scale](../nbs/guides/noise_scale.ipynb)), a tabular, a collab and a text model from start to end ([how to choose](../nbs/guides/choose.ipynb)), "
        "weight decay and momentum beside a scaled rate ([learning rate](../nbs/guides/learning_rate.ipynb)), one shuffle dealt out to all ranks "
        "(`tests/whole/test_ranks.py`). That more devices do not load data faster is not measured."])

if __name__=='__main__': main(__doc__, names, lambda *_: None, page)
