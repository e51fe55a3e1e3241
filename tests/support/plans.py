"Plans that were never measured, one for each situation that a plan may find itself in"
import math

import pandas as pd
from fastai_bs.finder.mock_cycle import places
from fastai_bs.noise.estimator import NoiseEstimate
from fastai_bs.finder.plan import BatchPlan

inf,nan = math.inf,math.nan
along = pd.DataFrame(dict(step=range(1,31), n_items=40, n_elems=40., tr_sigma=100., g_sq=1., noise_scale=100., low=80., high=130., mean_tr_sigma=100.,
                          mean_g_sq=1.))

def secs(*sizes, a=0.01, c=0.0001, opt=0.001):
    "As timed on a device where a step takes `a + c*bs` seconds, `opt` of them the optimizer"
    return tuple((m,a+c*m,opt) for m in sizes)

five = secs(16, 32, 64, 128, 256)

def plan_of(noise_scale=512., ci=(430.,640.), n_ranks=1, **kwargs):
    "Measured along a mock cycle, of 5 epochs of 50,000 items with Adam; nothing is special about it"
    now = kwargs.get('bs_now', 64)
    return BatchPlan(**{**dict(noise_scale=noise_scale, ci=ci, n_ranks=n_ranks, base_bs=now, bs_now=now, micro_now=now//n_ranks, base_lr=0.01, n_windows=30,
        trend=0, n_train=50_000, n_seen=360, n_passes=0.5, moved=True, loss_rose=False, level=0.95, df=along, adam=True, times=five, spread=0.01, epochs_now=5,
        epochs_given=True, cool=NoiseEstimate(400., (340.,500.), 30),
        at_peak=NoiseEstimate(45., (40.,52.), 8), at_end=NoiseEstimate(900., (700.,1300.), 7)), **kwargs})

def rises(by=100., n=60, **kwargs):
    "Along a mock cycle the noise scale rises evenly by a factor, measured without error"
    pct = places(n)
    return pd.DataFrame(dict(step=range(n), pct=pct, n_items=40, n_elems=40., tr_sigma=40., g_sq=by**-pct)).assign(**kwargs)

def fixed(noise_scale=512., ci=(430.,640.), **kwargs):
    "Measured at the present weights, with `bs_find(0)`"
    return plan_of(noise_scale, ci, **{**dict(cool=None, at_peak=None, at_end=None, moved=False, rate_given=False), **kwargs})

sgd = dict(adam=False, base_lr=0.1)
tight = dict(noise_scale=100., ci=(90.,110.)) # With `five` and 16 items more or less, 128 items are the fastest

situations = { # Without an argument each time, so that nobody changes another's
    'larger, with Adam': lambda: plan_of(),
    'larger, with SGD': lambda: plan_of(**sgd),
    'smaller': lambda: plan_of(40., (33.,48.), bs_now=256),
    'stay: nothing is faster': lambda: plan_of(**tight, bs_now=128),
    'stay: a small gain': lambda: plan_of(100., (90.,110.), bs_now=64, times=((64,0.0164,0.001),(128,0.0232,0.001))),
    'a noisy clock': lambda: plan_of(spread=0.8),
    'the same size in one micro-batch': lambda: plan_of(70., (60.,75.), micro_now=16, times=secs(16, 32, 64)),
    'by accumulation': lambda: plan_of(times=secs(16, 32, 64, opt=0.0095, c=0.00005), too_large=128),
    'today accumulates in vain': lambda: plan_of(100., (80.,130.), bs_now=128, micro_now=32, times=secs(16, 32, 64)),
    'no upper end': lambda: plan_of(700., (209.,inf)),
    'at least': lambda: plan_of(inf, (209.,inf)),
    'unknown': lambda: plan_of(inf, (0.,inf)),
    'unknown after many passes': lambda: plan_of(inf, (0.,inf), n_train=500, n_passes=14.),
    'too few windows': lambda: plan_of(n_windows=4, n_enough=800),
    'no noise': lambda: plan_of(0., (0.,0.2)),
    'no step times': lambda: plan_of(times=()),
    'a choice, larger': lambda: plan_of(**sgd).at(512),
    'a choice, slower than today': lambda: plan_of(**tight).at(16),
    "a choice: today's": lambda: plan_of().at(64),
    'a choice without a noise scale': lambda: plan_of(inf, (0.,inf)).at(256),
    'present weights': lambda: fixed(),
    'present weights, rising': lambda: fixed(40., (33.,48.), bs_now=256, trend=1, **sgd),
    'neither rate nor n_epoch': lambda: plan_of(base_lr=0.001, rate_given=False, epochs_given=False, epochs_now=1.),
    'rates for each group': lambda: plan_of(adam=False, base_lr=slice(1e-4,1e-2), trained=0.25),
    'one pass: rounding tells': lambda: plan_of(epochs_now=1, noise_scale=150., ci=(130.,180.)),
    'validations take the gain': lambda: plan_of(valid_time=20., epochs_given=False, epochs_now=1.),
    'a low rate': lambda: plan_of(rate_held=128, rate_low=True),
    'one pass: rounding takes the gain': lambda: plan_of(60., (50.,70.), bs_now=256, epochs_now=1),
    'a tiny set, many passes': lambda: plan_of(100., (80.,130.), n_train=800, bs_now=16, n_passes=8.5, n_workers=2),
    'four ranks': lambda: plan_of(2000., (1500.,2600.), n_ranks=4, bs_now=256),
    'out of memory, one size failed': lambda: plan_of(times=secs(32, 64), too_large=256, failed=((128,'ValueError: no'),)),
    'max_bs': lambda: plan_of(times=secs(16, 32, 64, 128), max_bs=128),
    'it took longer than an epoch': lambda: plan_of(took=45.),
    'a loss over pairs': lambda: plan_of(pairs=True),
    'a batch that grows': lambda: plan_of(df=rises(1000.)),
    'a batch that grows, as far as can be told': lambda: plan_of(df=rises(1e5, g_sq=lambda o: o.g_sq.where(o.pct<0.93, -o.g_sq)), **sgd),
    'a batch that need not grow': lambda: plan_of(df=rises(3.)),
    'a summed loss with SGD': lambda: plan_of(sums=True, **sgd),
    'the rate is too high': lambda: plan_of(loss_rose=True, **sgd)}
