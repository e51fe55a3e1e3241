"""How far do repeated calls of `bs_find` differ? 200 of them on the digits, each with a `seed` of its own: another order of the items.

    python benchmarks/repeat.py --out benchmarks/repeat.md     # Some minutes on one core

One learner, `digits_learner(16)`, with new weights; `learn.bs_find(2e-2, n_epoch=5)`, as in the README. The noise scale is what the plan reckons with:
the estimate, or the lower end of its interval where there is none; one that is not known counts as outside."""
import argparse, math, platform
from datetime import date
from pathlib import Path

import numpy as np
import torch
import fastai
from fastai_bs import __version__
from fastai_bs.all import * # noqa: F403 bs_find
from fastai_bs.__main__ import digits_learner

def plans(n):
    "Of each call: the noise scale, NaN where it is not known; whether it is an estimate; and the batch size"
    learn,rows = digits_learner(16),[]
    for seed in range(n):
        with learn.no_bar(): p = learn.bs_find(2e-2, n_epoch=5, seed=seed, show_plot=False)
        rows.append((p.noise_known, not p.is_bound, p.bs))
        print(seed, *rows[-1], flush=True)
    return np.array(rows).T

def within(vals, factor): # Of those that are known
    "The share within `factor` of the median"
    return np.nanmean(abs(np.log(vals/np.nanmedian(vals)))<=math.log(factor)+1e-9)*np.isfinite(vals).mean()

def report(noise, estimated, bs):
    low,mid,high = np.nanquantile(noise, [0.05,0.5,0.95])
    sizes = ', '.join(f'{b:.0f} ({c} times)' for b,c in zip(*np.unique(bs, return_counts=True)))
    return f"""# Repeated calls

{len(bs)} calls of `learn.bs_find(2e-2, n_epoch=5, seed=...)` on the digits: `benchmarks/repeat.py` says how.

{date.today()}, fastai_bs {__version__}, fastai {fastai.__version__}, torch {torch.__version__}, Python {platform.python_version()}, CPU

| noise scale that the plan reckons with | |
|---|---|
| median | {mid:.0f} items |
| from 5% to 95% | {low:.0f} to {high:.0f} |
| within a factor of two of the median | {within(noise, 2):.1%} |
| an estimate, and not the lower end of an interval | {np.mean(estimated):.1%} |
| not known | {np.isnan(noise).mean():.1%} |

The batch size of the plan is within a power of two of its median in {within(bs, 2):.1%}: {sizes}.
"""

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--calls', type=int, default=200)
    p.add_argument('--out', type=Path, help="file to save the table to as well")
    args = p.parse_args()
    if args.calls<1: p.error(f"--calls must be at least 1, got {args.calls}")
    torch.set_num_threads(1)
    text = report(*plans(args.calls))
    print(text)
    if args.out is not None: args.out.write_text(text)

if __name__=='__main__': main()
