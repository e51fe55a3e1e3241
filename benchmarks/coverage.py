"""How often does the 95% interval of the noise scale hold the truth?

Simulates windows of K=20 micro-batches of items drawn afresh, with a known gradient and a known covariance of the items'
gradients, and measures each experiment's windows with `fastai_bs.noise.estimator` as `NoiseScale` does. A line of the table is a setting:

* items: how many a micro-batch holds, and what they are: `gaussian`; `t3`, a multivariate Student t
  with 3 degrees of freedom; `lognormal`, Gaussian items times a lognormal scale (sigma 1)
* covariance: the eigenvalues; `1/k, 100` is 1, 1/2, ... 1/100. The true gradient is spread evenly over these directions, or lies
  along the first, the noisiest
* noise scale over items in a window, windows per experiment, and `beta`, what is left of a window's weight at each later one
* covered: share of the experiments whose interval holds the truth (one without upper end may); unbounded: share without an upper end;
  low > truth: share whose lower end is above the truth; estimate: median of estimated over true noise scale

The second table is of `along`, the interval for a path on which the weights move, as `bs_find` has it for the cool end of its mock cycle, with windows of
10 micro-batches; there the noise scale stands still, or rises `rises`-fold along the path, and the truth is the mean covariance over the mean squared gradient.

    python benchmarks/coverage.py --full     # Some minutes on one core"""
import numpy as np
import pandas as pd
import scipy
from fastai_bs.noise.estimator import Pool, along, moments_of_sums

from frame import main, md_table, measured

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
    total = n*np.einsum('ekd,ekd->ek', x, x).astype(float).sum(1)
    return *moments_of_sums(K, K*n, total, np.einsum('ed,ed->e', mean, mean).astype(float)),np.full(n_experiments, K*n)

def shares(truth, noise_scale, low, high):
    "Of the experiments, in percent; and the median of estimated over true noise scale"
    covered = (low<=truth) & (truth<=high)
    return dict({nm: round(100*float(o.mean()), 3) for nm,o in (('covered',covered),('unbounded',np.isinf(high)),('above',low>truth))},
                estimate=float(np.median(noise_scale)/truth), numpy=np.__version__, scipy=scipy.__version__)

def coverage(rng, n_experiments, n, items, spectrum, towards, rel, n_windows, beta):
    pool = Pool(beta)
    for _ in range(n_windows):
        tr_sigma,g_sq,N = windows(rng, n_experiments, n, items, spectra[spectrum], towards, rel)
        pool.add(tr_sigma, g_sq, N[0])
    return shares(rel*K*n, pool.noise_scale, *pool.interval())

def coverage_along(rng, n_experiments, rel, rises, n_windows, spectrum, K=10, n=64):
    rels = rel*np.geomspace(1/rises, 1, n_windows) # The noise scale rises as the gradient falls
    T,g,N = (np.stack(o, 1) for o in zip(*(windows(rng, n_experiments, n, 'gaussian', spectra[spectrum], 'all', o, K) for o in rels)))
    frames = [pd.DataFrame(dict(tr_sigma=t, g_sq=s, n_elems=m, n_items=m)) for t,s,m in zip(T, g, N)]
    return shares(K*n/(1/rels).mean(), *np.array([(e.noise_scale,*e.ci) for e in map(along, frames)]).T)

paths = [(rel,rises,n,'1/k, 100') for rel in (0.2,1,5) for rises in (1,10) for n in (15,30,60)] + [(1,1,n,'1/k, 3') for n in (15,30,60)]

tested = [(0.05,30,1), (1,30,1), (10,100,1), (1,50,0.99)]
near_gaussian = [(rel,k,1) for rel in (0.05,1,10,50) for k in (10,30,100) if (rel,k,1) not in tested]
some = [(0.05,30,1), (1,10,1), (1,30,1), (1,100,1), (10,100,1)]
settings = [(64,'gaussian','1/k, 100','all',*o) for o in tested+near_gaussian] + [(64,'gaussian','1/k, 100','first',*o) for o in tested] + [
    (64,'gaussian',spectrum,'all',*o) for spectrum in ('1/k, 3','1') for o in some] + [
    (n,items,'1/k, 100','all',*o) for items in ('t3','lognormal') for n in (64,4) for o in some]
cols,cols_along = ('n','items','covariance','gradient','noise','windows','beta'),('noise','rises','windows','covariance')

def run(args, table, table_along):
    todo = (table,coverage,cols,settings,4000,()),(table_along,coverage_along,cols_along,paths,1000,(1,)) # Experiments; and what sets the random numbers apart
    for seed in args.seeds or [0]:
        for t,f,nms,all_of,n,more in todo:
            n = n//40 if args.quick else n
            for i,o in enumerate(all_of):
                if not t.has(**(key := dict(zip(nms, o), experiments=n, seed=seed))): t.add(**key, **f(np.random.default_rng([seed,*more,i]), n, *o))

def page(df, along):
    def _shares(o): return f'{o.covered:.1f}%',f'{o.unbounded:.1f}%',f'{o.above:.1f}%',f'{o.estimate:.2f}'
    told = 'covered','unbounded','low > truth','estimate'
    def _said(df): return f"{df.experiments.iloc[0]} experiments a setting, seed {' and '.join(map(str, df.seed.unique()))}"
    rows = [(f'{o.n} {o.items}',o.covariance,o.gradient,f'{o.noise:g}',o.windows,f'{o.beta:g}',*_shares(o)) for o in df.itertuples()]
    rows_along = [(o.covariance,f'{o.noise:g}',o.rises,o.windows,*_shares(o)) for o in along.itertuples()]
    return f"""# Coverage of the 95% interval

{_said(df)}, windows of {K} micro-batches, whose items have a known gradient and a known covariance.

* items: how many a micro-batch holds, and how they are distributed: Gaussian, Student's t with 3 degrees of freedom, or with a lognormal scale
* covariance: its eigenvalues, `1/k, 100` is 1, 1/2, ... 1/100; gradient: spread evenly over these directions, or along the first, the noisiest
* noise/window: the noise scale over the items of a window; windows: in an experiment; beta: what is left of a window's weight at each later one
* covered: experiments whose interval holds the truth, one without an upper end may; unbounded: those without an upper end; low > truth: those whose lower
  end is above it; estimate: median of estimated over true noise scale

The first four lines are those that the tests hold: 92 to 98% covered, low > truth in at most 5%; none
unbounded at a noise scale of a window and below, at most 30% at ten times that.

{measured(df, 'numpy', 'scipy')}

{md_table(['items','covariance','gradient','noise/window','windows','beta',*told], rows)}

## Along a path

The interval for a path on which the weights move, as `bs_find` has it for the cool end of its mock cycle: the noise scale stands still, or rises `rises`-fold
along it. {_said(along)}. {measured(along, 'numpy', 'scipy')}

{md_table(['covariance','noise/window','rises','windows',*told], rows_along)}"""

if __name__=='__main__': main(__doc__, ['coverage','coverage_along'], run, page)
