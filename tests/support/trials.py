"Trials that never ran: what `bs_verify` would have seen, were the loss a function of size, rate and length"
import math

import numpy as np
import pandas as pd
from fastai_bs.verify.result import BatchVerification
from plans import plan_of

nan = math.nan

def valley(best=128, depth=0.05, rate=0.2, best_rate=1., to=None):
    "A loss with one best size, and a best factor on the rate; at shorter lengths the best size may be another one, `to`"
    def _loss(bs, factor, part):
        at = to if to and part<1 else best
        return 0.5*(1+(1-part))*math.exp(depth*math.log2(bs/at)**2 + rate*math.log(factor/best_rate, 3)**2)
    return _loss

def trial(loss, sizes=(32,64,128,256), rates=(1/3,1,3), whole=None, n_runs=3, sd=0.01, equal='time', n_epoch=5, found=None, parts=(1/16,1/4,1.), valid=True,
          seed=0, short_runs=1, step_time=lambda bs: 2e-3+3e-5*bs, **kwargs):
    """Each size with each rate at the first of `parts`, with its best rate at the others; `whole` of the sizes come to the whole length, which each of them has
    `n_runs` of; `short_runs` of shorter ones"""
    found,rng = found or plan_of(1000., (900.,1100.)),np.random.default_rng(seed) # Of which 256 are planned
    whole = sizes if whole is None else whole
    n_train = found.n_train
    rows,curves = [],[]
    plans = {bs: found.at(bs) for bs in sizes} # A plan works out its table once
    of_run = 0.1*rng.normal(size=max(n_runs, short_runs))
    def _add(bs, factor, part, run):
        steps = part*n_epoch*n_train/64*(step_time(64)/step_time(bs) if equal=='time' else 64/bs)
        secs,l = steps*step_time(bs),loss(bs, factor, part)*math.exp(of_run[run]+sd*rng.normal())
        plan = plans[bs]
        rows.append(dict(bs=bs, micro_bs=plan.micro_bs, n_acc=plan.n_acc, lr=0.01*plan.rule(bs/64)*factor, factor=factor, part=part, run=run, items=steps*bs,
                         steps=round(steps), seconds=secs, expected=secs, train_loss=0.9*l, valid_loss=l if valid else nan))
        t = np.arange(1, 51)/50
        curves.extend(dict(bs=bs, factor=factor, part=part, run=run, seconds=secs*o, loss=l*(1+4*math.exp(-5*o))) for o in t)
    for part in parts:
        for bs in sizes if part<1 else whole:
            for factor in rates if part==parts[0] and part<1 else [min(rates, key=lambda f: loss(bs, f, part))]:
                for run in range(n_runs if part==1 else short_runs): _add(bs, factor, part, run)
    return BatchVerification(**{**dict(df=pd.DataFrame(rows), curves=pd.DataFrame(curves), found=found, equal=equal, n_epoch=n_epoch, n_train=n_train,
                                       rates=rates, left_out=(), took=61., interrupted=False), **kwargs})
