"Verifications that never ran: what `bs_verify` would have seen, were the loss a function of the size"
import math

import numpy as np
import pandas as pd
from fastai_bs.finder.facts import Device, Facts, Measured, Today
from fastai_bs.finder.plan import plan_of
from fastai_bs.verify.result import BatchVerification
from fastai_bs.verify.trainings import fit_at

def planned_of(bs=256, n_train=50_000):
    "A plan for `bs` items, with 64 today"
    times = tuple((bs,2e-3+3e-5*bs,1e-4) for bs in (8,16,32,64,128,256,512))
    today = Today(bs=64, micro_bs=64, lr=0.01, n_train=n_train, n_epoch=5, has_n_epoch=True, adam=True, wd=0.01)
    measured = Measured(1000., (900.,1100.), n_windows=30, n_seen=360, n_passes=0.5)
    return plan_of(Facts(today, measured, Device(times, spread=0.01)), bs)

def trial(losses, n_runs=4, sd=1e-3, planned=None, valid=True, seed=0, **kwargs):
    "Sizes with their losses over today's, each trained as planned; what an order of the items does, it does to all sizes"
    planned,rng,rows = planned or planned_of(max(losses, default=256)),np.random.default_rng(seed),[]
    for run in range(1, n_runs+1):
        of_run = 0.1*rng.normal()
        for bs,times in {64: 1., **losses}.items():
            fit,loss = fit_at(planned, bs),0.5*times*math.exp(of_run+sd*rng.normal())
            o = fit.option
            rows.append(dict(bs=bs, run=run, micro_bs=o.micro_bs, n_acc=o.n_acc, lr=fit.lr, steps=fit.n_steps, items=round(fit.n_epoch*o.epoch.items),
                             seconds=fit.n_steps*o.step_time, train_loss=0.9*loss, valid_loss=loss if valid else math.nan))
    return BatchVerification(pd.DataFrame(rows), planned, **kwargs)
