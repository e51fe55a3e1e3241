"""What a batch that grows in place of the falling rate pays, against the best fixed size and fit_one_cycle: three tasks.

    python benchmarks/grows.py --full --data FOLDER     # An hour on one core; its parts one after another, `--parts` for some of them

* once: each arm at three rates and more where the best is at an edge, one seed
* seeds: three seeds at the best rate, also for the time of today's training
* bounds: growth to 128 and to 256 on MNIST, three seeds

FOLDER as for pays.py, whose tasks, step times and grid of fixed sizes these are."""
import math, time

import numpy as np
import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import SchedCos
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.torch_core import set_seed
import fastai_bs.all as bs # With bs_find
from fastai_bs.all import BatchSchedule, sqrt_scaling

import pays
from frame import Table, about_cols, main, md_table, measured
from pays import base_bs, tasks

names = 'mnist','fashion','rossmann'
epochs,n_parts = 4,8 # Of today's training; the loader's epochs are halves of them, so that micro-batches can grow
cols = ['arm','task','lr','seed','steps','items','process','predicted','noise_scale','saves','bound','most','train','valid']
table = Table('grows')

class Stream:
    "Items in one random order after another"
    def __init__(self, items): self.items,self.left = items,torch.empty(0, dtype=torch.long)
    def take(self, n):
        while len(self.left)<n: self.left = torch.cat([self.left, torch.randperm(len(self.items[0]))])
        idx,self.left = self.left[:n],self.left[n:]
        return tuple(o[idx] for o in self.items)

class StreamLoader:
    "`n` items of a stream; `new` is how fastai's loaders have it"
    def __init__(self, stream, bs, n): self.stream,self.bs,self.n,self.dataset = stream,bs,n,stream.items[0]
    def __len__(self): return math.ceil(self.n/self.bs)
    def new(self, bs=None): return StreamLoader(self.stream, bs or self.bs, self.n)
    def __iter__(self):
        for i in range(0, self.n, self.bs): yield self.stream.take(min(self.bs, self.n-i))

def learner(task, n_items, seed):
    set_seed(seed)
    loader = StreamLoader(Stream(task.train), base_bs, round(n_items/n_parts))
    return Learner(DataLoaders(loader, loader, device='cpu'), task.model(), loss_func=task.loss, cbs=pays.NoValidation())

def growing(bs, most, pct_start=0.25, div_final=1e5):
    "A `BatchSchedule` for `fit_one_cycle`: from `bs` up to `most` items it divides by what one-cycle would multiply the rate by"
    fall = SchedCos(1, 1/div_final)
    def size(pct): return min(bs/fall((pct-pct_start)/(1-pct_start)), most) if pct>pct_start else bs
    schedule = BatchSchedule(size, sqrt_scaling, base_bs=bs)
    # The nearest number of micro-batches, not the next lower
    schedule.sizes.n_acc_of = lambda items, micro_bs: max(1, min(round(items/micro_bs), int(most/micro_bs)))
    return schedule

def seconds(name):
    "Function of a batch size: processor seconds of a step, as measured for the fixed sizes"
    df = pays.rows('time', name)
    return lambda n: float(np.exp(np.interp(math.log(n), np.log(df.bs), np.log(df.process))))

class Steps(Callback):
    "Batch size of each optimizer step, and the time that it takes by those measured"
    order = 1000
    def __init__(self, secs): self.secs,self.sizes = secs,[]
    def after_step(self): self.sizes.append((bs.batch_size(self.learn),self.learn.dls.train.bs))
    @property
    def predicted(self): return sum(n/micro*self.secs(micro) for n,micro in self.sizes)

class Plateau(Callback):
    "As `ReduceLROnPlateau`, but the batch doubles where the rate would fall: after an epoch that has not improved the validation loss by `min_delta`"
    order = 1001
    def __init__(self, task, patience=1, min_delta=0.): self.task,self.patience,self.min_delta = task,patience,min_delta
    def before_fit(self): self.best,self.wait = math.inf,0
    def after_epoch(self):
        loss = pays.loss_of(self.task, self.learn.model, self.task.valid)
        improves = loss<self.best-self.min_delta
        if improves: self.best = loss
        self.wait = 0 if improves else self.wait+1
        if self.wait<self.patience: return
        self.learn.dls.train.bs *= 2 # Of the next epoch
        self.wait = 0

def plan_of(learn, task, lr):
    "Of today's training, in whole epochs; nothing is left of the measurement"
    dls,learn.dls = learn.dls,DataLoaders(pays.EpochLoader(task.train, base_bs), pays.EpochLoader(task.valid, 1000), device='cpu')
    try:
        with learn.no_bar(): return learn.bs_find(lr, n_epoch=epochs, show_plot=False)
    finally: learn.dls = dls

def train(name, task, arm, lr, seed, share=1.):
    "A row: a training with `share` of the items of today's"
    learn = learner(task, share*epochs*task.n, seed)
    steps,cbs,found = Steps(seconds(name)),[],{}
    if arm=='plateau': cbs = [Plateau(task)]
    if arm=='grow':
        plan = plan_of(learn, task, lr)
        cbs,found = [growing(base_bs, min(plan.facts.measured_noise, task.n))],dict(noise_scale=plan.noise_scale)
    if arm in bounds: cbs = [growing(base_bs, bounds[arm])]
    fit = learn.fit if arm=='plateau' else learn.fit_one_cycle
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): fit(n_parts, lr, cbs=[steps,*cbs])
    secs = time.process_time()-start
    today = epochs*task.n/base_bs*seconds(name)(base_bs)
    some = [o[:10_000] for o in task.train]
    return dict(steps=len(steps.sizes), items=share, process=secs, predicted=steps.predicted/today, **found, most=max(n for n,_ in steps.sizes),
                train=pays.loss_of(task, learn.model, some), valid=pays.loss_of(task, learn.model, task.valid))

def add_run(name, task, arm, lr, seed):
    "With the items of today's training, unless it was run; its row"
    df = rows()
    done = df[(df.task==name) & (df.arm==arm) & (df.seed==seed) & (abs(np.log(df.lr/lr))<0.01)]
    if len(done): return done.iloc[0]
    row = dict(arm=arm, task=name, lr=lr, seed=seed, **train(name, task, arm, lr, seed))
    table.add(**row)
    return row

def equal_time(name, task, arm, lr, seed):
    "With as many items as take the time of today's training, by the run with today's items"
    df,first,what = rows(),add_run(name, task, arm, lr, seed),f'{arm}, equal time'
    if arm!='grow' or ((df.task==name) & (df.arm==what) & (df.seed==seed) & (abs(np.log(df.lr/lr))<0.01)).any(): return
    table.add(arm=what, task=name, lr=lr, seed=seed, **train(name, task, arm, lr, seed, 1/first['predicted']))

def rows():
    df = table.df
    return df.reindex(columns=[*dict.fromkeys([*cols, *df])])

arms = 'today','grow','plateau'
bounds = {'grow to 128': 128, 'grow to 256': 256}
factors = [10**(i/2) for i in range(-3, 5)] # Of the rate that is best at 64

def tried(name, arm, lr):
    "Losses by factor, of the first seed"
    df = rows()
    df = df[(df.task==name) & (df.arm==arm) & (df.seed==0)]
    return {i: (r.train,r.valid) for r in df.itertuples() for i,f in enumerate(factors) if abs(math.log(r.lr/(lr*f)))<0.01}

def best_of(done, k): return min(done, key=lambda i: done[i][k] if math.isfinite(done[i][k]) else math.inf)

def once(name, task, arm):
    lr = pays.best_lr(name, epochs)
    while True:
        done = tried(name, arm, lr)
        best = {best_of(done, k) for k in (0,1)} if done else {3}
        wanted = sorted({i+d for i in best for d in (-1,0,1)} & set(range(len(factors))) - set(done))
        if not wanted: break
        for i in wanted: add_run(name, task, arm, lr*factors[i], 0)

def bounded(name, task):
    "Growth to other bounds, at the rate that is best for the training loss without growth"
    lr,done = pays.best_lr(name, epochs),tried(name, 'today', pays.best_lr(name, epochs))
    for arm in bounds:
        for seed in (0,1,2): add_run(name, task, arm, lr*factors[best_of(done, 0)], seed)

def again(name, task, arm):
    "All seeds at the rate that is best by the validation loss, and at the one that is by the training loss"
    lr,done = pays.best_lr(name, epochs),tried(name, arm, pays.best_lr(name, epochs))
    for i in {best_of(done, k) for k in (0,1)}:
        for seed in (0,1,2): equal_time(name, task, arm, lr*factors[i], seed)

# What came of it

titles = {'today': 'fit_one_cycle at 64', 'best fixed size': 'best fixed size', 'grow': 'growth', 'plateau': 'fit, doubled on a plateau',
          'grow, equal time': 'growth',
          'grow to 128': 'growth to 128', 'grow to 256': 'growth to 256'}

def at_best(name, arm, by):
    "The runs of an arm at the rate whose first seed ends with the lowest loss; of one for equal time the rate is that with today's items"
    df,of = rows(),'today' if arm in bounds else arm.split(',')[0]
    df = df[df.task==name]
    first = df[(df.arm==of) & (df.seed==0)]
    lr = first.lr[first[by].idxmin()]
    return df[(df.arm==arm) & (abs(np.log(df.lr/lr))<0.01)]

def fixed(name, by):
    "The best fixed size of the grid, all sizes at equal time and at their best rate; as `at_best`"
    df = pays.rows('grid', name)
    df = pd.concat([df[df.epochs==epochs], pays.rows('seeds', name)[lambda o: o.epochs==epochs]])
    best = pays.best(name, epochs) # By the validation loss: at that rate there are three seeds
    runs = {bs: df[(df.bs==bs) & (abs(np.log(df.lr/r.lr))<0.01)] for bs,r in best.iterrows()}
    bs = min((o for o in runs if len(runs[o])==3), key=lambda o: runs[o][by].mean())
    return bs,runs[bs]

def with_spread(o): return f'{o.mean():.4g} ± {o.std():.2g}' if len(o)>1 else f'{o.mean():.4g}'

def over(runs, others, by):
    "Mean of a column over that of another arm's runs, of the seeds that both have"
    return runs[by][runs.seed.isin(others.seed)].mean()/others[by][others.seed.isin(runs.seed)].mean()

def line(what, runs, today, by, size=None):
    more = lambda o: over(runs, today, o)-1
    most = size or ' to '.join(dict.fromkeys(f'{o:.0f}' for o in (runs.most.min(),runs.most.max())))
    time = ['',''] if size else [f'{runs.predicted.mean():.2f}',f"{over(runs, today, 'process'):.2f}"]
    return [what,most,f'{runs.lr.iloc[0]:.2g}',f'{runs.steps.mean():.0f}',f"{more('steps'):+.0%}",*time,with_spread(runs[by]),f'{more(by):+.1%}',len(runs)]

heads = ['','largest batch','rate','steps','over today','time, by step times','time, measured','loss','over today','seeds']

def tables(name):
    res = []
    for by,what in (('train','training'),('valid','validation')):
        today = at_best(name, 'today', by)
        bs,best = fixed(name, by)
        run = [(arm,at_best(name, arm, by)) for arm in (*arms,*bounds)]
        same = [line(titles[arm], o, today, by) for arm,o in run if len(o)] # Other bounds were tried at one rate, and on one task
        fast = [line(f'best fixed size, {bs}', best, today, by, size=bs)]
        fast += [line(titles['grow'], at_best(name, 'grow, equal time', by), today, by)]
        res += [f'### {what.capitalize()} loss','',"With the items of today's training:",'',md_table(heads, same),'',
                "In the time of today's training, by step times, without what callbacks take:",'',md_table(heads, fast),'']
    return res

about = f"""Trainings by `fit_one_cycle` with fastai's Adam (wd 0.01), new weights, one thread, for {epochs} epochs at 64 or as long as those
take. Tasks, models, step times and the grid of fixed sizes are those of [pays.md](pays.md). Each arm at the best of three rates
around the one that is best at 64, or of more where the best was at an edge; then two more seeds at it (on Rossmann four, of
today's and of growth). The rate of the fixed sizes is the best of five by the validation loss. Items come in one random order
after another, in {n_parts} epochs of the loader, so that micro-batches can grow. *Growth* is the recipe of the guide
[A batch that grows](../nbs/guides/growing.ipynb), up to the noise scale of `bs_find`, whose time is not in the table. Time by step times is the sum over the
steps of what those of fixed sizes took in pays.md, without what callbacks take, and other work on the machine does not count. The
time measured is the processor time of these runs: callbacks are in it, and other work slows it down. Both are over today's. What is
over today's is of the seeds that both have; ± is the standard deviation over seeds. *Doubled on a plateau* is `fit` at a constant rate, with
fastai's defaults of `ReduceLROnPlateau`: after each epoch of the loader that does not improve the validation loss, the batch doubles in place of a
fall of the rate."""

def findings():
    def _each(arm, other, by, text): return ', '.join(text(n, at_best(n, arm, by), other(n, by)) for n in names)
    def _today(n, by): return at_best(n, 'today', by)
    less = _each('grow', _today, 'train', lambda n,g,t: f"{n} {1-over(g, t, 'steps'):.0%} (training loss {over(g, t, 'train')-1:+.1%})")
    same = _each('grow, equal time', _today, 'valid', lambda n,g,t: f"{n} {over(g, t, 'valid')-1:+.1%} (in {over(g, t, 'process'):.2f} of the time, measured)")
    first = _today('mnist', 'train')
    def _grown(n, t): return over(at_best(n, 'grow', 'valid'), t, 'valid')-1
    plateau = _each('plateau', _today, 'valid', lambda n,p,t: f"{n} {over(p, t, 'valid')-1:+.0%} (growth {_grown(n, t):+.1%})")
    other = ', '.join(f"to {bounds[arm]} {1-over(o, first, 'steps'):.0%} ({over(o, first, 'train')-1:+.1%})"
                      for arm in bounds for o in [at_best('mnist', arm, 'train')])
    return [f"* A batch that grows where the rate would fall takes fewer optimizer steps for the same items: {less}. MNIST's small loss does not stand "
            f"that much: growth {other}.",
            f"* In the time of today's training, by step times, without what callbacks take, its validation loss is {same}.",
            "* The best fixed size beats it at equal time but for the noise of the seeds: find that first. Schedules by the noise scale, as a plan or the "
            "training itself measured it, were tried too. They were no better than the best fixed size on any of the three, and went.",
            f"* A batch that doubles on a plateau, at a constant rate, ends with this validation loss over today's, with the same items: {plateau}. "
            "It is not in the package.",
            '','![Loss against optimizer steps](grows.png)']

def draw(_):
    import matplotlib.pyplot as plt
    fig,axs = plt.subplots(1, 3, figsize=(12,4), layout='constrained')
    for ax,name in zip(axs, names):
        bs,best = fixed(name, 'valid')
        shown = [arm for arm in titles if arm!='best fixed size' and arm not in bounds]
        arms = [(titles[arm]+(', equal time' if 'time' in arm else ''),at_best(name, arm, 'valid')) for arm in shown]
        for i,(what,runs) in enumerate([('best fixed size, equal time',best),*arms]):
            ax.plot(runs.steps, runs.valid, 'o', color=f'C{i}', mfc='none' if 'equal time' in what else None, label=what)
        ax.set(title=pays.titles[name].split(':')[0], xlabel='optimizer steps', xscale='log')
    axs[0].set_ylabel('validation loss, each seed')
    fig.legend(*axs[0].get_legend_handles_labels(), loc='outside lower center', ncols=4, frameon=False)
    return fig

def noted(df):
    "When and with what, and for how many runs nothing of it was kept"
    n = df.reindex(columns=about_cols).isna().all(axis=1).sum()
    return f"{measured(df)} Date, versions and machine were not kept for {n} of {len(df)} runs." if n else measured(df)

def page(df):
    text = [f'# {__doc__.splitlines()[0]}','',' '.join(f'{about} {noted(df)}'.split()),'','## In short','',*findings()]
    for name in names: text += ['',f"## {pays.titles[name].split(':')[0]}",'',*tables(name)]
    return '\n'.join(text)

def run(args, own):
    global table, names
    table = own
    if args.quick: names = names[:1]
    for name in names:
        task = tasks[name].load(args.data)
        if args.quick: task.n,task.train = 12_000,[o[:12_000] for o in task.train]
        for part in args.parts:
            if part=='bounds' and name=='mnist': bounded(name, task)
            elif part!='bounds':
                for arm in arms: (once if part=='once' else again)(name, task, arm)

if __name__=='__main__': main(__doc__, ['grows'], run, page, draw, parts=('once','seeds','bounds'))
