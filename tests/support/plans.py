"Plans that were never measured, of any measurement, device and training"
import math
from dataclasses import replace

import pandas as pd
from hypothesis import strategies as st
from fastai_bs.finder.cycle import places, rate_at
from fastai_bs.finder.facts import Device, Facts, Measured, Today, Trial
from fastai_bs.finder.plan import BatchPlan
from fastai_bs.finder.plan import plan_of as plan_of_facts
from fastai_bs.noise.estimator import NoiseEstimate

def secs(*sizes, a=0.01, c=0.0001, opt=0.001):
    "Step times of a device where a step takes `a + c*bs` seconds, `opt` of them the optimizer"
    return tuple((m,a+c*m,opt) for m in sizes)

# The rules for the rate, written anew: factors from `base_bs` to `bs`

def gain(bs, noise, base_bs): return (noise/base_bs+1)/(noise/bs+1) # AdaScale's
def for_adam(bs, noise, base_bs):
    g = gain(bs, noise, base_bs)
    return min(g**0.5*(1+max(0, 2-bs/base_bs/g)/5), g**(2/3))

def readings():
    "What a mock cycle says of the noise scale on its cool stretch"
    return dict(cool=NoiseEstimate(400., (340.,500.), 30))

def window_rows(n=30):
    "What is known of `n` windows along a mock cycle, all alike"
    pct = places(n)
    return pd.DataFrame(dict(pct=pct, rate=rate_at(pct), step=range(1, n+1), n_items=40, n_elems=40.,
                             tr_sigma=100., g_sq=1., noise_scale=100., low=80., high=130., mean_tr_sigma=100.,
                             mean_g_sq=1.))

def _plain_plan(bs, n_ranks):
    "The values of a plan about which there is nothing else to say: 5 epochs of 50,000 items with Adam, after a mock cycle"
    today = dict(bs=bs, micro_bs=bs//n_ranks, lr=0.01, n_train=50_000, n_epoch=5, has_n_epoch=True, n_ranks=n_ranks, adam=True)
    measured = dict(noise_scale=512., ci=(430.,640.), n_windows=30, n_seen=360, n_passes=0.5, **readings())
    return {Today: today, Measured: measured, Device: dict(times=secs(16, 32, 64, 128, 256), spread=0.01), BatchPlan: dict(df=window_rows())}

def _parts(bs, n_ranks, kwargs):
    "The values of a plan with `kwargs` in the one that has a field of that name"
    parts = _plain_plan(bs, n_ranks)
    for nm,v in kwargs.items():
        owner, = [cls for cls in parts if nm in cls.__dataclass_fields__]
        parts[owner][nm] = v
    return parts

def facts_of(bs=64, n_ranks=1, trial=None, **kwargs):
    "Facts whose `kwargs` go to the value that has a field of that name; `trial` is a value of its own"
    parts = _parts(bs, n_ranks, kwargs)
    return Facts(*(cls(**parts[cls]) for cls in (Today,Measured,Device)), trial or Trial())

def plan_of(bs=64, n_ranks=1, trial=None, **kwargs):
    "The plan that follows from `facts_of`"
    return plan_of_facts(facts_of(bs, n_ranks, trial, **kwargs), **_parts(bs, n_ranks, kwargs)[BatchPlan])

def replanned(plan, **parts):
    "Plan anew from other facts, for the same choice of one's own"
    return plan_of_facts(replace(plan.facts, **parts), plan.bs if plan.choice.reason=='chosen' else None, plan.df, plan.took)

@st.composite
def plans(draw):
    "A strategy: any measurement on any device, as today or with a size of one's own choice"
    def _between(a, b): return math.exp(draw(st.floats(math.log(a), math.log(b))))
    def _one_of(*values): return draw(st.sampled_from(values))
    micro_bs,n_acc,n_ranks = _one_of(3,8,25,64),_one_of(1,1,2,5),_one_of(1,1,2)
    bs = micro_bs*n_acc*n_ranks
    noise = _one_of(0., math.inf, *3*[_between(1, 6e4)])
    low = _one_of(0.,0.3,0.9)*(noise if noise<math.inf else _between(1, 1e4))
    high = math.inf if noise==math.inf or _one_of(True,False) else noise*_one_of(1.1,3.)+1e-3
    step,item,once = _between(1e-4, 0.1),_between(1e-6, 1e-2),_one_of(0.,0.3,0.9)
    sizes = [o for o in (micro_bs//4,micro_bs//2,micro_bs,2*micro_bs,4*micro_bs,8*micro_bs)[:draw(st.integers(3, 6))] if o]
    busy = _one_of(0.,0.,0.02,0.3)
    times = tuple((o,(step+item*o)*math.exp(busy*draw(st.floats(-1, 1))),once*step) for o in sizes)
    n_epoch = _one_of(0.3,1,2.5,5,40)
    has_rate,is_cycle = _one_of(True,False),_one_of(True,False)
    kwargs = dict(readings() if is_cycle else dict(cool=None), moved=is_cycle)
    trial = _one_of(Trial(), Trial(bs), Trial(bs, failed=2*bs), Trial(4*bs, 3.*bs, 10.), Trial(2*bs, 0.5*bs, 10., failed=4*bs),
                    Trial(4*bs, 0.5*bs, 10., failed=4*bs), Trial(8*bs, 1e4*bs, 10.),
                    *(Trial(bs, skipped=4*bs, hoped_noise=8.*bs, saving=o, cost=4.) for o in (5.,-1.)))
    plan = plan_of(bs, n_ranks, noise_scale=noise, ci=(low,high), micro_bs=micro_bs, n_windows=_one_of(9,10,30), times=_one_of(times,times,times,()),
        adam=_one_of(True,False), sums=_one_of(False,False,True), spread=_one_of(math.nan,0.,0.05,0.4), n_train=_one_of(2*bs,1000,10**6),
        n_epoch=n_epoch, has_n_epoch=n_epoch%1==0 and _one_of(True,False), drops_last=_one_of(False,True), lr_factor=_one_of(1.,1.,3.),
        wd_factor=_one_of(1.,1.,1/3), has_lr=has_rate, lr=_one_of(0.1,slice(1e-3,1e-2),[1e-3,1e-2]),
        wd=_one_of(None,0.01),
        freeze_epochs=_one_of(0,0,1), frozen=step/2, trained=_one_of(1.,0.25), loss_rose=_one_of(False,False,False,True), pairs=_one_of(*[False]*5,True),
        n_passes=_one_of(0.5,14.), valid_time=_one_of(0.,2.), took=_one_of(math.nan,45.), too_large=_one_of(None,16*micro_bs),
        failed=_one_of((),((16*micro_bs,'ValueError: no'),)), trial=trial, **kwargs)
    return plan.at(_one_of(*plan.table.bs)) if draw(st.integers(0, 3))==0 else plan
