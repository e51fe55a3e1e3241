"Trials that never ran: what `bs_verify` would have seen, were the loss a function of size, rate and length"
import math

import numpy as np
import pandas as pd
from fastai_bs.finder.facts import Device, Facts, Measured, Today
from fastai_bs.finder.plan import plan_of
from fastai_bs.verify.result import BatchVerification

def step_time(bs): return 2e-3+3e-5*bs # Seconds

def planned_of(lr=0.01, adam=True, n_train=50_000, **kwargs):
    "What `bs_find` would have planned beforehand, with 64 items today"
    times = tuple((bs,step_time(bs),1e-4) for bs in (8,16,32,64,128,256,512))
    today = Today(bs=64, micro_bs=64, lr=lr, n_train=n_train, n_epoch=5, has_n_epoch=True, adam=adam, wd=0.01, **kwargs)
    measured = Measured(1000., (900.,1100.), n_windows=30, n_seen=360, n_passes=0.5)
    return plan_of(Facts(today, measured, Device(times, spread=0.01)))

def valley(best=128, depth=0.05, best_rate=1.):
    "A loss with one best size, and a best factor on the rate"
    def _loss(bs, factor, part): return 0.5*(2-part)*math.exp(depth*math.log2(bs/best)**2 + 0.2*math.log(factor/best_rate, 3)**2)
    return _loss

def steps(losses):
    "A loss for each size, 0.5 for those that aren't named, times a factor"
    return lambda bs,factor,part: 0.5*losses.get(bs, 1.)

def trial(loss, sizes=(32,64,128,256), rates=(1/3,1,3), whole=None, n_runs=4, sd=0.005, equal='time', n_epoch=5, planned=None, valid=True, seed=0, **kwargs):
    "Each size with each rate at 1/16 of the length, with its best one at 1/4; `whole` of them `n_runs` times for the whole length"
    planned,rng = planned or planned_of(),np.random.default_rng(seed)
    of_run = 0.1*rng.normal(size=n_runs+1) # What an order of the items does to all sizes
    rows = []
    def _add(bs, factor, part, run):
        n_train,plan = planned.facts.today.n_train,planned.at(bs)
        n = part*n_epoch*n_train/64*(step_time(64)/step_time(bs) if equal=='time' else 64/bs)
        secs,l = n*step_time(bs),loss(bs, factor, part)*math.exp(of_run[run]+sd*rng.normal())
        name = dict(bs=bs, factor=factor, part=part, run=run)
        rows.append(dict(**name, micro_bs=plan.micro_bs, n_acc=plan.n_acc, lr=factor*plan.scaled_lr, items=n*bs, steps=round(n), seconds=secs,
                         train_loss=0.9*l, valid_loss=l if valid else math.nan))
    best = {bs: min(rates, key=lambda f: loss(bs, f, 1.)) for bs in sizes}
    for bs in sizes:
        for factor in rates: _add(bs, factor, 1/16, 0)
        _add(bs, best[bs], 1/4, 0)
    for run in range(1, n_runs+1):
        for bs in sizes if whole is None else whole: _add(bs, best[bs], 1., run)
    return BatchVerification(**{**dict(df=pd.DataFrame(rows), planned=planned, equal=equal, n_epoch=n_epoch, rates=rates, took=61.),
                                **kwargs})
