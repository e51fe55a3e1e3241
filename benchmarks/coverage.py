"""How often does the 95% interval of the noise scale hold the truth?

Simulates windows of K=20 micro-batches of items drawn afresh, with a known gradient and a known covariance of the items'
gradients, and measures each experiment's windows with `fastai_bs.estimator` as `NoiseScale` does. A line of the table is a setting:

* items: how many a micro-batch holds, and what they are: `gaussian`; `t3`, a multivariate Student t
  with 3 degrees of freedom; `lognormal`, Gaussian items times a lognormal scale (sigma 1)
* covariance: the eigenvalues; `1/k, 100` is 1, 1/2, ... 1/100. The true gradient is spread evenly over these directions, or lies
  along the first, the noisiest
* noise scale over items in a window, windows per experiment, and `beta`, what is left of a window's weight at each later one
* covered: share of the experiments whose interval holds the truth (one without upper end may); unbounded: share without an upper end;
  low > truth: share whose lower end is above the truth; estimate: median of estimated over true noise scale

The second table is of `along`, the interval for a path on which the weights move, as `bs_find` has it for the cool end of its mock cycle, with windows of
10 micro-batches; there the noise scale stands still, or rises `rises`-fold along the path, and the truth is the mean covariance over the mean squared gradient.

Run as `python benchmarks/coverage.py --out benchmarks/coverage.md`: some minutes on one core.
"""
import argparse, platform
from datetime import date
from pathlib import Path

import numpy as np
import scipy
from fastai_bs import __version__
from fastai_bs.estimator import Pool, along, window_moments

K = 20 # Micro-batches in a window
spectra = {'1/k, 100': 1/np.arange(1,101), '1/k, 3': 1/np.arange(1,4), '1': np.ones(1)}

def mean_sq_scale(rng, items, n, size):
    "Mean over the `n` items of a micro-batch of the squared scale that multiplies each; 1 on average"
    if items=='gaussian': return np.ones(size)
    if items=='t3': return (1/rng.chisquare(3, (*size,n))).mean(-1) # The covariance of a t3 is 3 times its scale matrix, and E[3/chi²] is 3
    return np.exp(2*rng.standard_normal((*size,n), dtype=np.float32)-2).mean(-1)

def windows(rng, n_experiments, n, items, eigs, towards, rel, K=K):
    "`tr_sigma` and `g_sq` of a window for each experiment"
    g = np.full(len(eigs), len(eigs)**-0.5) if towards=='all' else np.eye(len(eigs))[0]
    g = g*np.sqrt(eigs.sum()/(rel*K*n))
    x = rng.standard_normal((n_experiments,K,len(eigs)), dtype=np.float32)*np.sqrt(eigs/n, dtype=np.float32)
    x *= np.sqrt(mean_sq_scale(rng, items, n, (n_experiments,K)))[...,None].astype(np.float32)
    x += g.astype(np.float32)
    mean = x.mean(1)
    return window_moments(np.full((n_experiments,K), n), np.einsum('ekd,ekd->ek', x, x), np.einsum('ed,ed->e', mean, mean))

def coverage(rng, n_experiments, n, items, spectrum, towards, rel, n_windows, beta):
    "A line of the table"
    truth,pool = rel*K*n,Pool(beta)
    for _ in range(n_windows):
        tr_sigma,g_sq,N = windows(rng, n_experiments, n, items, spectra[spectrum], towards, rel)
        pool.add(tr_sigma, g_sq, N[0])
    low,high = pool.interval()
    covered = ((low<=truth) & (truth<=high)).mean()
    return (f'{n} {items}', spectrum, towards, f'{rel:g}', n_windows, f'{beta:g}', f'{covered:.1%}', f'{np.isinf(high).mean():.1%}',
            f'{(low>truth).mean():.1%}', f'{np.median(pool.noise_scale)/truth:.2f}')

def coverage_along(rng, n_experiments, rel, rises, n_windows, spectrum, K=10, n=64):
    "A line of the second table"
    rels = rel*np.geomspace(1/rises, 1, n_windows) # The noise scale rises as the gradient falls
    T,g,N = (np.stack(o, 1) for o in zip(*(windows(rng, n_experiments, n, 'gaussian', spectra[spectrum], 'all', o, K) for o in rels)))
    truth = K*n/(1/rels).mean()
    ns,low,high = np.array([along(*o) for o in zip(T, g, N)]).T
    covered = ((low<=truth) & (truth<=high)).mean()
    return spectrum,f'{rel:g}',rises,n_windows,f'{covered:.1%}',f'{np.isinf(high).mean():.1%}',f'{(low>truth).mean():.1%}',f'{np.median(ns)/truth:.2f}'

paths = [(rel,rises,n,'1/k, 100') for rel in (0.2,1,5) for rises in (1,10) for n in (15,30,60)] + [(1,1,n,'1/k, 3') for n in (15,30,60)]
columns_along = 'covariance','noise/window','rises','windows','covered','unbounded','low > truth','estimate'

tested = [(0.05,30,1), (1,30,1), (10,100,1), (1,50,0.99)]
near_gaussian = [(rel,k,1) for rel in (0.05,1,10,50) for k in (10,30,100) if (rel,k,1) not in tested]
some = [(0.05,30,1), (1,10,1), (1,30,1), (1,100,1), (10,100,1)]
settings = [(64,'gaussian','1/k, 100','all',*o) for o in tested+near_gaussian] + [(64,'gaussian','1/k, 100','first',*o) for o in tested] + [
    (64,'gaussian',spectrum,'all',*o) for spectrum in ('1/k, 3','1') for o in some] + [
    (n,items,'1/k, 100','all',*o) for items in ('t3','lognormal') for n in (64,4) for o in some]
columns = 'items','covariance','gradient','noise/window','windows','beta','covered','unbounded','low > truth','estimate'

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--experiments', type=int, default=4000, help="experiments in each setting")
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--out', type=Path, help="file to save the table to as well")
    args = p.parse_args()
    if args.experiments<1: p.error(f"--experiments must be at least 1, got {args.experiments}")
    lines = [columns, ['---']*len(columns)]
    for o in lines: print('|', *(f'{c} |' for c in o))
    for i,setting in enumerate(settings):
        lines.append(coverage(np.random.default_rng([args.seed,i]), args.experiments, *setting))
        print('|', *(f'{c} |' for c in lines[-1]), flush=True)
    lines_along = [columns_along, ['---']*len(columns_along)]
    for i,setting in enumerate(paths):
        lines_along.append(coverage_along(np.random.default_rng([args.seed,1,i]), args.experiments, *setting))
        print('|', *(f'{c} |' for c in lines_along[-1]), flush=True)
    if args.out is None: return
    head = [f"# Coverage of the 95% interval\n\n{args.experiments} experiments a setting, seed {args.seed}, windows of {K} micro-batches: "
            "`benchmarks/coverage.py` says what the columns mean. The first four lines are those that the tests hold: 92 to 98% covered, low > truth in at "
            "most 5%; none unbounded at a noise scale of a window and below, at most 30% at ten times that.\n",
            f"{date.today()}, fastai_bs {__version__}, Python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}\n"]
    def _table(lines): return [f"| {' | '.join(map(str,o))} |" for o in lines]
    args.out.write_text('\n'.join([*head, *_table(lines), '', '## Along a path', '', *_table(lines_along)])+'\n')

if __name__=='__main__': main()
