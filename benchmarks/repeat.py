"""How far do repeated calls of `bs_find` differ? Each with a `seed` of its own: another order of the items.

    python benchmarks/repeat.py --full --data FOLDER    # Some minutes on one core

Digits: `digits_learner(16)` with new weights, and `learn.bs_find(2e-3, n_epoch=30)`, as in the reference; and for 15 epochs, where a trial costs about as
much as it may. The noise scale is what the plan reckons with. Settings: ten tasks of `kinds.py` at the rates below, on this processor and with steps that are
flat up to 4 times today's batch, three calls each from the same weights. FOLDER holds mnist/, fashion_mnist/, adult/, rossmann/ and cifar10_jpg/."""
import math

import numpy as np
from fastai_bs.__main__ import digits_learner

from frame import main, md_table, measured
from keeps import devices, step_times
from kinds import learner, others

rates = dict(rows=0.016, conv_sgd=0.1, cifar_sgd=0.025, table_sgd=0.04, rossmann_sgd=6.25e-4, autoencoder_sgd=0.4, autoencoder=4e-3, masks=0.016,
             digits_long=4e-3, table_long=1e-3)

def call(t, learn, lr, n_epoch, seed, times=None, **key):
    "A row for one call"
    if t.has(seed=seed, **key): return
    with learn.no_bar(): p = learn.bs_find(lr, n_epoch=n_epoch, seed=seed, step_times=times, show_plot=False)
    t.add(**key, seed=seed, noise_scale=p.facts.noise, bs=p.bs, exact=p.choice.option.epochs)

def run(args, t):
    learn = digits_learner(16)
    for name,n_epoch in (('digits',30),('digits_15',15)):
        for seed in args.seeds or range(5 if args.quick else 60): call(t, learn, 2e-3, n_epoch, seed, task=name, device='here')
    for name in list(rates)[:1 if args.quick else None]:
        task = others[name].load(args.data)
        learn = learner(task, task.bs, 0)
        for device in ('here','flat_4'):
            for seed in (1,2,3): call(t, learn, rates[name], task.epochs[0], seed, step_times(task.bs, devices[device]), task=name, device=device)

def within(vals, factor): # Of those that are known
    "The share within `factor` of the median"
    return np.nanmean(abs(np.log(vals/np.nanmedian(vals)))<=math.log(factor)+1e-9)*np.isfinite(vals).mean()

def settings(df):
    "A row for each setting: the sizes and epochs of its calls, and whether they agree"
    df = df[~df.task.isin(['digits','digits_15'])]
    rows = df.groupby(['task','device'], sort=False).agg(sizes=('bs',list), exact=('exact',list)).reset_index()
    same_size = [max(o)<=2*min(o) for o in rows.sizes]
    same_epochs = [max(o)<=1.25*min(o) for o in rows.exact]
    return rows.assign(same_size=same_size, same_epochs=same_epochs)

def page(df):
    digits,brief,each = df[df.task=='digits'],df[df.task=='digits_15'],settings(df)
    noise,bs = digits.noise_scale,digits.bs
    low,mid,high = np.nanquantile(noise, [0.05,0.5,0.95])
    def _sizes(bs): return ', '.join(f'{b:.0f} ({c} times)' for b,c in zip(*np.unique(bs, return_counts=True)))
    rows = [('median', f'{mid:.0f} items'), ('from 5% to 95%', f'{low:.0f} to {high:.0f}'), ('within a factor of two of the median', f'{within(noise, 2):.1%}'),
            ('not known', f'{noise.isna().mean():.1%}')]
    of = [[r.task,r.device.replace('_', ' '),', '.join(map(str, r.sizes)),', '.join(f'{o:.2f}' for o in r.exact)] for r in each.itertuples()]
    return f"""# Repeated calls

{len(digits)} calls of `learn.bs_find(2e-3, n_epoch=30, seed=...)` on the digits, {len(brief)} for 15 epochs, and three each in {len(each)} other settings:
`benchmarks/repeat.py` says how.

{measured(df)}

{md_table(['digits: noise scale that the plan reckons with', ''], rows)}

The batch size of the plan is within a power of two of its median in {within(bs, 2):.1%}: {_sizes(bs)}. For 15 epochs a trial
costs about the most that it may, or more: {_sizes(brief.bs)}.

Settings: the three sizes are within a factor of two in {each.same_size.sum()} of {len(each)}, and the epochs within a quarter in {each.same_epochs.sum()}.

{md_table(['task','steps','batch sizes','epochs, before they are rounded'], of)}"""

if __name__=='__main__': main(__doc__, ['repeat'], run, page)
