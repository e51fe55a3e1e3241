"""How far do repeated calls of `bs_find` differ? 200 of them on the digits, each with a `seed` of its own: another order of the items.

    python benchmarks/repeat.py --full     # Some minutes on one core

One learner, `digits_learner(16)`, with new weights; `learn.bs_find(2e-2, n_epoch=5)`, as in the README. The noise scale is what the plan reckons with:
the estimate, or the lower end of its interval where there is none; one that is not known counts as outside."""
import math

import numpy as np
from fastai_bs.__main__ import digits_learner

from frame import main, md_table, measured

def run(args, t):
    learn = digits_learner(16)
    for seed in args.seeds or range(10 if args.quick else 200):
        if t.has(seed=seed): continue
        with learn.no_bar(): p = learn.bs_find(2e-2, n_epoch=5, seed=seed, show_plot=False)
        t.add(seed=seed, noise_scale=p.facts.noise, estimated=not p.facts.measured.is_bound, bs=p.bs)

def within(vals, factor): # Of those that are known
    "The share within `factor` of the median"
    return np.nanmean(abs(np.log(vals/np.nanmedian(vals)))<=math.log(factor)+1e-9)*np.isfinite(vals).mean()

def page(df):
    noise,bs = df.noise_scale,df.bs
    low,mid,high = np.nanquantile(noise, [0.05,0.5,0.95])
    sizes = ', '.join(f'{b:.0f} ({c} times)' for b,c in zip(*np.unique(bs, return_counts=True)))
    rows = [('median', f'{mid:.0f} items'), ('from 5% to 95%', f'{low:.0f} to {high:.0f}'), ('within a factor of two of the median', f'{within(noise, 2):.1%}'),
            ('an estimate, and not the lower end of an interval', f'{df.estimated.mean():.1%}'), ('not known', f'{noise.isna().mean():.1%}')]
    return f"""# Repeated calls

{len(df)} calls of `learn.bs_find(2e-2, n_epoch=5, seed=...)` on the digits: `benchmarks/repeat.py` says how.

{measured(df)}

{md_table(['noise scale that the plan reckons with', ''], rows)}

The batch size of the plan is within a power of two of its median in {within(bs, 2):.1%}: {sizes}."""

if __name__=='__main__': main(__doc__, ['repeat'], run, page)
