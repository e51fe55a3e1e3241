"""Does the plan of `learn.bs_find` predict the clock? Time to a fixed training loss at batch sizes from 16 to 2048

    python benchmarks/prediction.py --full --data FOLDER     # FOLDER/{mnist,fashion_mnist}/*.gz; some twenty minutes on one core"""
import math, time
from types import SimpleNamespace
from unittest.mock import patch
import numpy as np
from scipy import optimize, stats
from torch import nn
from fastai.callback.core import Callback, CancelFitException, CancelValidException
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastai.torch_core import set_seed
from fastai_bs.all import ScaledLR, adascale_gain, linear_scaling
from fastai_bs.finder.formulas import fit_step_time, steps_needed

from frame import TensorLoader, digits28, main, md_table, measured

base_bs,sizes,seeds,tau = 64,[2**i for i in range(4,12)],range(3),4000 # tau: items that the smoothed loss looks back on, at any batch size

def images(data, name):
    "Training set, images with mean 0 and standard deviation 1"
    x,y = digits28(data, name)[0]
    x = x[:,None].float()
    return (x-x.mean())/x.std(), y.long()

def convnet():
    return nn.Sequential(nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(784, 10))

# `noise_scale` is what the rule of the runs is given, the median of a first reading with three seeds, drawn up before the runs
setups = {'MNIST': SimpleNamespace(folder='mnist', target=0.10, noise_scale=800),
          'Fashion-MNIST': SimpleNamespace(folder='fashion_mnist', target=0.40, noise_scale=120)}
base_lr = 0.05
# The pair of rules: batches tuned at 64, with the rule's noise scale and epochs of warmup
arms = {'linear_scaling': (None,0), 'adascale_gain at 500': (500,0), 'adascale_gain at 800': (800,0),
        'linear_scaling, warmup': (None,0.5), 'adascale_gain at 800, warmup': (800,0.5)}

class ToLoss(Callback):
    "Ends the fit when the smoothed training loss is down to `target`, or after `most` items; keeps both clocks and, with `curve`, each step"
    order,run_valid = 90,False # After all that belongs to a step
    def __init__(self, target=-math.inf, most=math.inf, curve=False): self.target,self.most,self.curve = target,most,curve
    def before_fit(self):
        self.steps = self.items = self.sum = self.weight = 0
        self.rows,self.start = [],(time.perf_counter(),time.process_time())
    def after_batch(self):
        n,loss = len(self.yb[0]),self.learn.loss.item()
        keep = math.exp(-n/tau)
        self.steps,self.items = self.steps+1,self.items+n
        self.sum,self.weight = keep*self.sum+(1-keep)*loss, keep*self.weight+1-keep
        self.smoothed = self.sum/self.weight
        if self.curve: self.rows.append(dict(steps=self.steps, items=self.items, loss=loss))
        if self.smoothed<=self.target or self.items>=self.most or not math.isfinite(loss): raise CancelFitException
    def before_validate(self): raise CancelValidException
    def after_fit(self): self.wall,self.process = time.perf_counter()-self.start[0],time.process_time()-self.start[1]

def learner(items, bs, seed):
    set_seed(seed)
    dls = DataLoaders(TensorLoader(*items, bs, shuffle=True), TensorLoader(*(o[:bs] for o in items), bs), device='cpu')
    return Learner(dls, convnet(), loss_func=nn.CrossEntropyLoss(), opt_func=SGD)

def fit(learn, to, cbs=(), n_epoch=100):
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, base_lr, cbs=[to, *cbs])
    return to

def scaled(noise_scale, warmup_epochs):
    return ScaledLR(base_bs, adascale_gain if noise_scale else linear_scaling, warmup_epochs=warmup_epochs, noise_scale=noise_scale)

def to_target(s, items, bs, seed, n_most=20):
    "A row: what it took to get to the target"
    sc = scaled(s.noise_scale, 0.5 if bs>base_bs else 0) # A warmup where the rate is to grow; for smaller batches it would be a decay
    to = fit(learner(items, bs, seed), ToLoss(s.target, n_most*len(items[1])), [sc])
    return [dict(bs=bs, lr=base_lr*sc.factor, noise_scale=s.noise_scale, steps=to.steps, items=to.items, wall=to.wall, process=to.process,
                 loss=to.smoothed, reached=to.smoothed<=s.target)]

def curve(items, bs, arm, seed):
    "Every other step of two epochs"
    return [dict(bs=bs, **o) for o in fit(learner(items, bs, seed), ToLoss(curve=True), [scaled(*arms[arm])], n_epoch=2).rows if o['steps']%2==0]

# When the plan is drawn up: after so many epochs at the base rate
readings = {'plan after half an epoch': 0.5, 'plan on new weights': 0}

def plan(items, reading, seed):
    "A row per batch size; sizes that are not in the plan's table get the plan's own formulas"
    learn = learner(items, base_bs, seed)
    if readings[reading]: fit(learn, ToLoss(most=len(items[1])*readings[reading]))
    with learn.no_bar(), patch('time.perf_counter', time.process_time): # Other work ran on the machine
        p = learn.bs_find(base_lr, show_plot=False)
    table,noise = p.table.set_index('bs'),p.facts.noise
    timed,secs,_ = zip(*p.facts.device.times)
    a,c = fit_step_time(timed, secs)
    rows = []
    for bs in sorted({*sizes, p.bs}):
        known = bs in table.index
        secs = table.step_time[bs] if known else a+c*bs
        rel = table.time[bs] if known else secs*steps_needed(bs, noise)/(table.step_time[base_bs]*steps_needed(base_bs, noise))
        rows.append(dict(bs=bs, lr=base_lr*p.rule(bs/base_bs), noise_scale=p.noise_scale, low=p.ci[0], high=p.ci[1], step_time=secs, in_table=known,
                         time=rel, chosen=bs==p.bs))
    return rows

# What is run, and the report

def jobs(data, seeds):
    "Part, what, batch size and seed"
    yield from (('run','adascale_gain',bs,seed) for seed in seeds for bs in sizes)
    yield from (('plan',o,0,seed) for seed in seeds for o in readings)
    if data=='MNIST': yield from (('curve',o,bs,seed) for bs in (1024,2048) for seed in seeds for o in arms)

def run(args, t):
    for data,s in setups.items():
        items = images(args.data, s.folder)
        if args.quick: items,s = [o[:12_000] for o in items],SimpleNamespace(**{**vars(s), 'target': 3*s.target})
        for part,what,bs,seed in jobs(data, args.seeds or seeds[:1] if args.quick else args.seeds or seeds):
            if part not in args.parts or t.has(part=part, data=data, what=what, seed=seed, **dict(bs=bs) if bs else {}): continue
            rows = to_target(s, items, bs, seed) if part=='run' else plan(items, what, seed) if part=='plan' else curve(items, bs, what, seed)
            t.add_all([dict(part=part, data=data, what=what, seed=seed, **o) for o in rows])

def medians(df, data):
    "A row per batch size: medians over the seeds; a run that did not get there took for ever"
    runs = df[(df.part=='run') & (df.data==data)].copy()
    runs.loc[runs.reached!=True, ['steps','items','wall','process']] = np.inf # noqa: E712 A column with gaps
    res = runs.groupby('bs')[['lr','steps','items','wall','process']].median().assign(n=runs.groupby('bs').reached.sum())
    for o in readings:
        plans = df[(df.part=='plan') & (df.data==data) & (df.what==o)]
        res[o] = plans.groupby('bs').time.median()
        res[f'{o}, in table'] = plans.groupby('bs').in_table.sum()>0
    return res

def number(v, spec): return 'not reached' if np.isinf(v) else format(v, spec)

def table(m):
    heads = ['batch','learning rate','steps','examples','over the fewest','process s','wall s',"time over 64's",*readings,'runs there']
    rows = []
    for bs,r in m.iterrows():
        told = [f"{r[o]:.2f}{'' if r[f'{o}, in table'] else ' *'}" for o in readings]
        rows.append((bs, f'{r.lr:.3g}', number(r.steps, '.0f'), number(r['items'], ',.0f'), number(r['items']/m['items'].min(), '.2f'),
                     number(r.process, '.1f'), number(r.wall, '.1f'), number(r.process/m.process[base_bs], '.2f'), *told, f'{r.n:.0f} of 3'))
    return md_table(heads, rows)

def verdict(df, data, m):
    "Per reading: noise scales, rank correlation, the batch chosen and what it costs"
    heads = ['reading','noise scales of the three plans','rank correlation, process / wall','each plan alone, process',"within the plan's own table, process",
             'batches chosen','measured time over the best, process / wall']
    rows = []
    for o in readings:
        plans = df[(df.part=='plan') & (df.data==data) & (df.what==o)]
        scales = ', '.join(f'{r.noise_scale:.0f} [{r.low:.0f}, {r.high:.0f}]' for _,r in plans.groupby('seed').first().iterrows())
        rho,own = {k: stats.spearmanr(m[k], m[o])[0] for k in ('process','wall')},m[m[f'{o}, in table']]
        each = ', '.join(f"{stats.spearmanr(m.process, d.set_index('bs').time[m.index])[0]:.2f}" for _,d in plans.groupby('seed'))
        chosen = plans[plans.chosen==True].bs.astype(int).tolist() # noqa: E712 A column with gaps
        over = lambda bs: ' / '.join(f'{100*(m[k].get(bs, np.nan)/m[k].min()-1):+.0f}%' for k in ('process','wall'))
        rows.append((o, scales, f"{rho['process']:.2f} / {rho['wall']:.2f}", each, f'{stats.spearmanr(own.process, own[o])[0]:.2f} of {len(own)}',
                     ', '.join(map(str, chosen)), '; '.join(f'{bs}: {over(bs)}' for bs in sorted(set(chosen)))))
    return md_table(heads, rows)

def fit_examples(m):
    "E_min and B_noise of E_min*(1 + B/B_noise), by least squares of the logarithms; and measured over fitted"
    ok = m[np.isfinite(m['items'])]
    f = lambda b, log_e, log_n: log_e + np.log1p(b/np.exp(log_n))
    (log_e,log_n),_ = optimize.curve_fit(f, ok.index.to_numpy(float), np.log(ok['items'].to_numpy(float)), p0=(np.log(5e4), np.log(300)))
    off = ok['items']/np.exp(f(ok.index.to_numpy(float), log_e, log_n))
    return np.exp(log_e),np.exp(log_n),off

def plot(df):
    "Measured and predicted time per data set; the pair of curves"
    import matplotlib.pyplot as plt
    fig,axs = plt.subplots(1, len(setups)+1, figsize=(15,4.2), layout='constrained')
    for ax,data in zip(axs, setups):
        m,runs = medians(df, data),df[(df.part=='run') & (df.data==data) & (df.reached==True)] # noqa: E712
        ax.plot(m.index, m.process/m.process[base_bs], 'o-', color='black', label='measured, median')
        ax.plot(runs.bs, runs.process/m.process[base_bs], '.', color='C7', label='each run')
        for o,color in zip(readings, ('C0','C1')): ax.plot(m.index, m[o], 's--', color=color, ms=4, label=o)
        ax.set(title=f'{data}: time to a loss of {setups[data].target:.2f}', xlabel='batch size', ylabel=f'over that of {base_bs}', xscale='log', yscale='log')
        ax.set_xticks(sizes, sizes)
        ax.set_yticks([0.5,1,2,5,10], ['0.5','1','2','5','10'])
        ax.minorticks_off()
        ax.legend()
    ax = axs[-1]
    for nm,color in zip(('linear_scaling','adascale_gain at 500'), ('C3','C0')):
        for seed,d in df[(df.part=='curve') & (df.what==nm) & (df.bs==1024)].groupby('seed'):
            ax.plot(d['items']/6e4, d.loss, color=color, alpha=0.8, lw=1.2, label=nm if seed==0 else None)
    ax.set(title='MNIST at 1024, no warmup', xlabel='epochs', ylabel='training loss', yscale='log')
    ax.set_yticks([0.2,0.5,1,2,5,10], ['0.2','0.5','1','2','5','10'])
    ax.minorticks_off()
    ax.legend()
    return fig

def last_losses(df):
    rows = []
    for bs in (1024,2048):
        for arm in arms:
            d = df[(df.part=='curve') & (df.bs==bs) & (df.what==arm)].groupby('seed').loss
            rows.append((bs, arm, ', '.join(f'{o:.1f}' for o in d.max()), ', '.join(f'{o.tail(5).mean():.2f}' for _,o in d)))
    return md_table(['batch','rule','highest loss, seeds 0 to 2','loss at the end of two epochs'], rows)

lost_at = 1.5 # Loss at the end of the curves; a guess has 2.3

def findings(df):
    "What the tables say, in words"
    ms = {data: medians(df, data) for data in setups}
    plans = {(data,o): df[(df.part=='plan') & (df.data==data) & (df.what==o)] for data in setups for o in readings}
    rho = {o: ', '.join(f'{stats.spearmanr(m.process, m[o])[0]:.2f} on {data}' for data,m in ms.items()) for o in readings}
    over = {o: max(ms[data].process[p.bs[p.chosen==True]].max()/ms[data].process.min()-1 for (data,of),p in plans.items() if of==o) # noqa: E712
            for o in readings}
    scales = {o: ', '.join(f"{plans[data,o].groupby('seed').noise_scale.first().median():.0f} on {data}" for data in setups) for o in readings}
    needed = ', '.join(f'{fit_examples(m)[1]:.0f}, or {fit_examples(m[m.index<=512])[1]:.0f} up to 512, on {data}' for data,m in ms.items())
    after,new = readings
    far = [(data,bs,m.process[bs]/m.process[base_bs]/m[after][bs]) for data,m in ms.items() for bs in m.index]
    worst = ', '.join(f'{data} at {bs} {r:.1f} times' for data,bs,r in far if r>1.5)
    there = df[df.part=='run'].reached.eq(True)
    ends = df[df.part=='curve'].groupby(['bs','what','seed']).loss.apply(lambda o: o.tail(5).mean())
    lost = {bs: ', '.join(f'{(ends[bs,arm]>lost_at).sum()} by {arm.replace(",", " with")}' for arm in arms) for bs in (1024,2048)}
    return f"""* Does the plan rank the batch sizes as the process clock does? Rank correlations when it is drawn up after half an epoch: {rho[after]}; on new
  weights: {rho[new]}. The batches that it chose take at most {over[after]:.0%} and {over[new]:.0%} longer than the best.
* Its noise scales, medians of three plans: after half an epoch {scales[after]}; on new weights {scales[new]}. Those of the examples needed: {needed}.
* Where it fails, time measured over that of the plan after half an epoch, beyond 1.5: {worst}. The gain rule's rates there are more than the network stands at
  the beginning, warmup or not: the loss jumps (last table), and epochs are lost. {(~there).sum()} of {len(there)} runs did not get to the target.
* Runs lost in the last table, of three seeds (their loss ends above {lost_at}): at 1024 {lost[1024]}; at 2048 {lost[2048]}.
* Two things in `bs_find` were changed when the runs were known: it took its steps with the mean of windows of 20 micro-batches, at the same rate, and it
  pooled the first half of the windows too. Both made it rank the sizes worse here."""

def section(df, data):
    m = medians(df, data)
    (e,n,off),(e2,n2,off2) = fit_examples(m),fit_examples(m[m.index<=512])
    return f"""## {data}, to a smoothed training loss of {setups[data].target:.2f}

{table(m)}

{verdict(df, data, m)}

Examples needed grew as {e:,.0f} (1 + batch/{n:.0f}): measured over fitted, by batch, {', '.join(f'{o:.2f}' for o in off)}.
Up to 512 alone, as {e2:,.0f} (1 + batch/{n2:.0f}): {', '.join(f'{o:.2f}' for o in off2)}."""

def page(df):
    sections = '\n\n'.join(section(df, o) for o in setups)
    slower = (df.wall/df.process)[df.part=='run']
    return f"""# {__doc__.splitlines()[0]}

A convolutional network of 9,226 parameters (two convolutions with stride 2, one linear layer) on 60,000 images, SGD without momentum or weight
decay at a constant rate, 0.05 at batch 64; other sizes through `ScaledLR(64, adascale_gain)` with noise scales of 800 and 120 items, and half an epoch of
warmup where the rate grows. Time until the training loss, an exponential mean over 4,000 items at any batch size, is down to the target, 20 epochs at most (a
run that was not there by then counts as infinite); medians of three seeds, one thread, no validation. Other work ran on the machine: `process s` is the clock
to read, and the plan was given that clock too; wall seconds are {slower.min():.1f} to {slower.max():.1f} times
as many. The plans are of batch 64, by `learn.bs_find(0.05)`
after half an epoch at the base rate, and on new weights; their columns are `time` of `plan.table`, medians of three seeds; a star marks a size that is in none
of the tables, by the plan's formulas instead. The runs' noise scales are medians of an earlier reading, in which `bs_find` had 2 micro-batches to a window and
trained with their mean. When to draw up the plan and the warmup were settled after single runs (seed 0) had shown the examples needed.
{measured(df)} `results/prediction.csv` holds the runs, `prediction.py` is the program.

{sections}

## A pair of rules on MNIST

{last_losses(df)}

## What it says

{findings(df)}

![Time predicted and measured, and the two rules](prediction.png)"""

if __name__=='__main__': main(__doc__, ['prediction'], run, page, plot, parts=('run','plan','curve'))
