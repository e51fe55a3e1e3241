"""What the sources of this package claim, and what comes of it here: a row for each, its figure from results/, and the script to measure it anew.

    python benchmarks/claims.py"""
from frame import main, md_table

not_run = 'not run yet'

def span(o, spec):
    low,high = f'{o.min():{spec}}',f'{o.max():{spec}}'
    return low if low==high else f'{low} to {high}'

# A figure from the rows of a CSV, in words

def memory(d):
    return (f"what stays is counted to the byte in {d.exact.sum()} of {len(d)} trainings; {span((d.begins-d.report)/d.begins, '.0%')} of an item's bytes "
            "is not seen")

def accumulation(d):
    of = {e: d[d.epoch==e] for e in (1,2,3)}
    accuracy,loss = (' / '.join(f'{o[k].mean():{spec}}' for o in of.values()) for k,spec in (('accuracy','.1f'),('loss','.3f')))
    return f"{accuracy}%, loss {loss}, means of {d.seed.nunique()} seeds"

def uncut(d): return f"after 100 steps {span(d.apart_100, '.1e')} of the weights' norm apart"

def last(d): return d[d.epoch==d.epoch.max()]

def goyal(d):
    from goyal import difference, last_errors
    errors = last_errors(d)
    arms = ('8x unscaled','8x linear, no warmup','8x linear, warmup','32x linear, warmup','32x gain, warmup')
    return '; '.join(f'{o}: {difference(errors[o], errors.base)}' for o in arms)+' points'

def stepped(d):
    from goyal import difference, last_errors
    errors = last_errors(d)
    return '; '.join(f'{o}: {difference(errors[o], errors.base)}' for o in errors if o!='base')+f' points, {len(errors)} seeds'

def gains(d):
    errors = last(d).groupby('arm').error.mean()
    return f"8 times the rate: {errors['8x unscaled']-errors['8x linear, warmup']:.2f} points less test error than at the small batch's"

def lenet(d): return '; '.join(f'{o.arm}: {o.accuracy:.2f}%' for o in last(d[d.dtype=='float32']).itertuples())

def resnet(d): return '; '.join(f'{arm}: {o.accuracy.mean():.2f} ± {o.accuracy.std():.2f}%' for arm,o in last(d).groupby('arm', sort=False))

def reductions(d):
    ours,fastais = (d[d.accumulation.str.contains(o)].reductions for o in ('GradAccum','GradientAccumulation'))
    return f"{span(ours, 'd')} in an epoch of 3 windows, fastai's GradientAccumulation {span(fastais, 'd')}"

def ranks(d):
    d = last(d[d.dtype=='float64'])
    return f"in double precision {d.apart.max():.1e} of the weights' norm apart in the end" if d.apart.notna().any() else not_run

def copies(d):
    one,most = d[d.distinct==1],d[d.distinct==d.distinct.max()]
    return (f"noise scale {one.noise_scale.max():.2g} with copies of one, {span(most.noise_scale, '.0f')} with {d.distinct.max():,} different ones; the plan "
            f"for copies of one: {span(one.plan_bs, 'd')} (today 32)")

def mnist(d):
    d = d[d.seed.astype(str)=='all']
    first,end = (d[d.stretch==o].noise_scale for o in ('first tenth of epoch 1','epoch 3'))
    return f"{span(first, '.0f')} in the first tenth of an epoch, {span(end, '.0f')} in the third"

def held(d):
    d = d[d.noise>0]
    return f"intervals of 95% cover {span(d.covered, '.1f')}% in {len(d)} simulations; the estimate's mean is {span(d.estimate, '.3f')} of the truth"

def rossmann_noise(d): return '; '.join(f'{o.noise_scale:.0f} [{o.low:.0f}, {o.high:.0f}] for {o.epochs} epochs: batch {o.bs}' for o in d.itertuples())

def rossmann(d):
    from rossmann_cycles import ends, lr
    res = []
    for n,of in d[abs(d.lr/lr-1)<1e-3].groupby('rows'):
        last = {arm: ends(o).set_index('seed').assign(seconds=o.groupby('seed').seconds.sum()) for arm,o in of.groupby('arm')}
        for arm in (o for o in ('large','plan') if o in last and 'today' in last):
            over = {k: (last[arm][k]/last['today'][k]).dropna() for k in ('seconds','train_loss','valid_loss','exp_rmspe')}
            what = '512' if arm=='large' else f"the plan's {last[arm].epochs.iloc[0]} of {last[arm].bs.iloc[0]} for 5"
            seeds = len(over['seconds'])
            res.append(f"{n:,} rows, {seeds} seed{'s'*(seeds>1)}, {what} over 64: time of all three cycles {over['seconds'].mean():.2f}, "
                       + ', '.join(f"{k.replace('_', ' ')} {v.mean():.3f}" for k,v in over.items() if k!='seconds'))
    return '; '.join(res) or not_run

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
    ('With 10,000 copies of one sample a larger batch only costs more',course,copies,'diversity','diversity.py'),
    ('The noise scale from consecutive batches is right, and three other ways are not',finder,held,'coverage','coverage.py'),
    ('MNIST: a noise scale from about 50 to about 900',finder,mnist,'noise_mnist','noise_mnist.py'),
    ('Rossmann: a noise scale near 500, so batch 512',finder,rossmann_noise,'rossmann_plans','rossmann.py'),
    ('Rossmann: a quarter of the time, better losses and metric after three cycles',finder,rossmann,'rossmann_cycles','rossmann_cycles.py'),
    ('k times the batch at k times the rate after a warmup loses nothing; unscaled, or without warmup, it does','Goyal et al. 2017',goyal,'goyal','goyal.py'),
    ('The same with a rate that goes down in steps, after a warmup of 5 epochs','Goyal et al. 2017',stepped,'goyal_steps','goyal.py')]

def text_of(figure, df): return figure(df) if len(df) else not_run

def page(*dfs):
    lines = [(claim,source,text_of(figure, df),f'[`{script}`]({script})'+(f', [page]({script[:-3]}.md)' if len(df) else ''))
             for (claim,source,figure,_,script),df in zip(rows, dfs)]
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}', md_table(['claim','source','here','command'], lines),
        "Each page says what was run, with which seeds, and when. What is shown by a lesson and not by a figure: BatchNorm in micro-batches and GroupNorm in "
        "its place ([gradient accumulation](../nbs/33_accumulation.ipynb)), the four ways to the noise scale ([the noise "
        "scale](../nbs/32_four_ways.ipynb)), a tabular, a collab and a text model from start to end ([models](../nbs/31_models.ipynb)), weight decay and "
        "momentum beside a scaled rate ([learning rate](../nbs/34_learning_rate.ipynb))."])

if __name__=='__main__': main(__doc__, [o[3] for o in rows], lambda *_: None, page)
