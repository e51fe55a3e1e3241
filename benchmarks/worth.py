"""How many epochs does a larger batch need to end where today's training does? Ground truth, on many kinds of tasks, and what plans say of it.

    python benchmarks/worth.py --full --data FOLDER [--parts gru ...]    # Some hours on one core

Today's is `fit_one_cycle(epochs, lr)` at the rate that is best for it by its validation loss, in steps of two. With `k` times the batch, each training is run
at today's rate, at the root of `k` times and at `k` times that rate, for 1, 1.5, 2.2, 3.4 and 5 times the epochs, until the loss on the training set is down
to today's at one of the rates. Between the last two lengths the epochs that it takes are interpolated, by logarithms. Nothing of `bs_find` is used. `w` is
what a step of the larger batch is worth, in steps of today's. Weight decay goes with rate and steps, as in a plan. The second table has what `bs_find` says
where steps are flat up to 4 and 16 times today's batch (from keeps.py, at the best rate), always at the root of `k` times the rate: epochs before they are
rounded up to whole ones. SGD has a momentum of 0.9. FOLDER holds mnist/, fashion_mnist/, adult/, rossmann/, tinyshakespeare/, imdb_sample/ and
cifar10_jpg/."""
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from fastai.optimizer import Adam, SGD
from fastai_bs.schedule.rules import decay_factor

from frame import main, md_table, measured
from kinds import best_rate, fitted, learner, others as tasks

seeds,ks,lengths = (0,1),(2,4,8,16),(1,1.5,2.25,3.4,5)

# Trainings

def trained(task, k, factor, n_epoch, lr, seed):
    "Losses at the end of a training with `k` times the batch"
    learn,epochs = learner(task, k*task.bs, seed),task.epochs[0]
    n = len(task.train[0])
    steps_now,steps = (n_epoch*math.ceil(n/bs) for n_epoch,bs in ((epochs,task.bs),(n_epoch,k*task.bs)))
    if task.opt is Adam: learn.wd = 0.01*decay_factor(steps_now/steps, factor)
    res = fitted(task, learn, n_epoch, factor*lr)
    return {o: res[o] if math.isfinite(res[o]) else math.inf for o in ('train','valid')}

def epochs_needed(table, name, task, k, lr, seed, today):
    "Train longer and longer, at three rates, until the training loss is down to today's"
    for length in lengths:
        n_epoch,rows = max(1, round(length*task.epochs[0])),[]
        for factor in (1.,k**0.5,float(k)):
            key = dict(part='trained', task=name, seed=seed, k=k, factor=float(f'{factor:.4g}'), n_epoch=n_epoch)
            if not table.has(**key): table.add(**key, lr=lr, **trained(task, k, factor, n_epoch, lr, seed))
        df = table.df
        rows = df[(df.part=='trained') & (df.task==name) & (df.seed==seed) & (df.k==k) & (df.n_epoch==n_epoch)]
        if (rows.train<=today).any(): return

def run(args, table, _):
    for name,task in tasks.items():
        if args.parts and name not in args.parts: continue
        if args.quick: task.n //= 4
        task.load(args.data)
        for seed in args.seeds or (seeds[:1] if args.quick else seeds):
            lr = best_rate(table, name, task, task.epochs[0])
            key = dict(part='today', task=name, seed=seed)
            if not table.has(**key): table.add(**key, k=1, factor=1., n_epoch=task.epochs[0], lr=lr, **trained(task, 1, 1., task.epochs[0], lr, seed))
            df = table.df
            today = df[(df.part=='today') & (df.task==name) & (df.seed==seed)].train.iloc[0]
            for k in ks[1:2] if args.quick else ks: epochs_needed(table, name, task, k, lr, seed, today)

# The page

def needed(df, name, seed, k):
    "Epochs over today's, and the factor on the rate, at which the training loss is today's; `inf` where no length was enough"
    mine = df[(df.task==name) & (df.seed==seed)]
    today = mine[mine.part=='today']
    rows = mine[(mine.part=='trained') & (mine.k==k)]
    if not len(today) or not len(rows): return None
    best = rows.loc[rows.groupby('n_epoch').train.idxmin()].sort_values('n_epoch')
    loss,n_now = today.train.iloc[0],today.n_epoch.iloc[0]
    there = best[best.train<=loss]
    if not len(there): return math.inf,best.factor.iloc[-1],rows.n_epoch.nunique()==len(lengths)
    last,before = there.iloc[0],best[best.n_epoch<there.n_epoch.iloc[0]]
    if not len(before): return last.n_epoch/n_now,last.factor,True
    prev = before.iloc[-1]
    part = math.log(prev.train/loss)/math.log(prev.train/last.train) if last.train>0 else 1.
    return prev.n_epoch/n_now*(last.n_epoch/prev.n_epoch)**part,last.factor,True

def found(df):
    "A row for each task and k, over the seeds"
    rows = []
    for name in tasks:
        for k in ks:
            of_seeds = [o for seed in sorted(df.seed.unique()) if (o := needed(df, name, seed, k)) and o[2]]
            if of_seeds: rows.append(dict(task=name, k=k, epochs=np.exp(np.mean([math.log(o[0]) for o in of_seeds])), least=min(o[0] for o in of_seeds),
                                          most=max(o[0] for o in of_seeds), factor=np.mean([o[1] for o in of_seeds]), n=len(of_seeds)))
    return pd.DataFrame(rows)

def _worth(k, epochs):
    "Write what a step is worth by whole trainings"
    if math.isnan(epochs): return ''
    if math.isinf(epochs): return f'under {k/lengths[-1]:.1f}'
    return f'{k} or more' if epochs<=1 else f'{k/epochs:.1f}'

def said(df):
    "A row for each task and device: the ratio of sizes of a plan and its epochs over today's, each plan's own and the mean"
    df = df[(df.part=='plan') & (df.kind=='best') & df.device.isin(['flat_4','flat_16']) & df.task.isin(list(tasks))]
    df = df[df.epochs==df.task.map(lambda o: tasks[o].epochs[0])]
    df = df.assign(k=df.bs/df.task.map(lambda o: tasks[o].bs), ratio=df.exact/df.epochs)
    order = {nm: i for i,nm in enumerate([*tasks,'flat_4','flat_16'])}
    return df[df.k>1].sort_values(['task','device','seed'], key=lambda o: o if o.name=='seed' else o.map(order))

def page(df, kept):
    res,plans = found(df),said(kept)
    def _cell(o):
        if math.isinf(o.most): return f'over {lengths[-1]}'
        return f'{o.epochs:.2f} ({o.least:.2f} to {o.most:.2f}), w = {_worth(o.k, o.epochs)}, rate x {o.factor:.1f}'
    table,of_plans = [],[]
    for name,of in res.groupby('task', sort=False):
        task,cells = tasks[name],{o.k: _cell(o) for o in of.itertuples()}
        lr = df[(df.task==name) & (df.part=='today')].lr.iloc[0]
        nm = name+(' (settled on)' if task.settled else '')
        table.append([nm,f'{task.n} in {task.bs} x {task.epochs[0]}',f'{lr:.3g}',*(cells.get(k, '') for k in ks)])
        mine = plans[plans.task==name]
        def _texts(device): return ', '.join(f'{o.ratio:.2f} at k = {o.k:.0f}' for o in mine[mine.device==device].itertuples()) # noqa: B023
        if len(mine): of_plans.append([nm,_texts('flat_4'),_texts('flat_16')])
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}',' '.join(__doc__.split('\n\n')[2].split()),measured(pd.concat([df,kept[kept.task.isin(list(tasks))]])),
        "Epochs over today's (the seeds), what a step is worth, and the factor on the rate; at most 1 where one length of today's was enough already.",
        md_table(['task','items, batch, epochs','rate',*(f'k = {k}' for k in ks)], table),
        '![Epochs over today\'s against the ratio of batch sizes, and what plans say](worth.png)', '## What plans say',
        "Epochs over today's, a plan for each seed; where none is given, the plan stays.",
        md_table(['task','flat up to 4 times','flat up to 16 times'], of_plans)])

def draw(df, kept):
    "Epochs over today's against k, a line for each task, dashed where it is trained by SGD; crosses are what plans say"
    fig,ax = plt.subplots(figsize=(8,5.2), layout='constrained')
    ax.plot(ks, ks, color='grey', ls=':', label='a larger batch helps nothing')
    colors,plans = plt.get_cmap('tab20').colors,said(kept)
    for color,(name,of) in zip(colors, found(df).groupby('task', sort=False)):
        of = of[np.isfinite(of.epochs)]
        ax.plot(of.k, of.epochs, 'o--' if tasks[name].opt is SGD else 'o-', ms=4, color=color, label=name)
        mine = plans[plans.task==name].groupby('k').ratio.mean()
        ax.plot(mine.index, mine, 'x', ms=8, mew=2, color=color)
    ax.plot([], [], 'kx', ms=8, mew=2, label='what plans say')
    ax.set(xscale='log', yscale='log', xlabel='batch size over today\'s, k', ylabel="epochs over today's", ylim=(0.9,6))
    ax.set_xticks(ks, ks)
    ax.set_yticks((1,1.5,2,3,5), (1,1.5,2,3,5))
    ax.minorticks_off()
    ax.legend(fontsize='small', loc='upper left', bbox_to_anchor=(1,1))
    return fig

if __name__=='__main__': main(__doc__, ['worth','keeps'], run, page, draw, parts=tasks)
