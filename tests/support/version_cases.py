"""What `compare_versions.py` runs in each of the two versions: small trainings and measurements, as `{name: numbers}`

Only public names of `fastai_bs.all` are used, so that a case runs in any version. A clock that the model and the optimizer move forward takes the place
of `time.perf_counter`: what a step costs is then the same in each run.
"""
import math
import numbers
import os
import tempfile
import time
import warnings
from functools import partial

import matplotlib
import numpy as np
import pandas as pd
import torch

matplotlib.use('Agg')

class Clock:
    "Seconds in powers of two, which add up without rounding"
    def __init__(self): self.now = 0.
    def __call__(self): return self.now

clock = Clock()
time.perf_counter = clock # Before the package is imported, which may take the function itself

from fastai.callback.core import Callback # noqa: E402
from fastai.callback.schedule import SchedCos # noqa: E402
from fastai.torch_core import set_seed # noqa: E402
import fastai.distributed # noqa: E402,F401 (it adds distrib_ctx)
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale, ScaledLR, adascale_gain, linear_scaling, sqrt_scaling # noqa: E402
from zoo import Learners, lr, models # noqa: E402

conv,flat,groups = 'tiny convnet, BatchNorm','plain torch loaders','fine_tune with freezing'
rnns = 'AWD-LSTM language model','text classifier'
# A kind of learner of the zoo, and a companion
learners = {**{nm: (nm,'none') for nm in models}, **{f'convnet, {o}': (conv,o) for o in ('MixUp','label smoothing','GradientClip',"torch's AdamW")},
            'tied weights': (flat,'tied weights')}

def made(nm, n=22, bs=4):
    learn = Learners(*learners[nm]).make(n, bs)
    if nm==groups: learn.unfreeze()
    return learn

# What a case gives

def trained(learn, cbs=(), n_epoch=2, lr=lr, cycle=True):
    "Parameters and buffers after a training, and the losses and rates that were recorded"
    set_seed(1)
    if cycle: learn.fit_one_cycle(n_epoch, lr, cbs=list(cbs))
    else: learn.fit(n_epoch, lr, cbs=list(cbs))
    res = {f'weights.{k}': v.detach().cpu().numpy().copy() for k,v in learn.model.state_dict().items()}
    return {**res, 'losses': np.array([float(o) for o in learn.recorder.losses]), 'lrs': np.array([float(o) for o in learn.recorder.lrs])}

def of_frame(df, prefix):
    "The numbers of a data frame, by column"
    return {f'{prefix}.{k}': df[k].to_numpy(float) for k in df if pd.api.types.is_numeric_dtype(df[k])}

def of_value(path, o):
    "The numbers in `o`, by path"
    if isinstance(o, dict): return {p: v for k,x in o.items() for p,v in of_value(f'{path}.{k}', x).items()}
    if isinstance(o, (list,tuple)): return {p: v for i,x in enumerate(o) for p,v in of_value(f'{path}.{i}', x).items()}
    if isinstance(o, slice): return of_value(path, [o.start,o.stop])
    if o is None: return {path: np.array(math.nan)}
    return {path: np.array(o, float)} if isinstance(o, (numbers.Number,np.generic)) else {}

def noise_of(noise): return {**of_value('noise_scale', noise.noise_scale), **of_value('ci', noise.ci), **of_frame(noise.df, 'df')}

# Along a training

def accum_args(nm): return dict(count=models[nm].count) if nm in models and models[nm].count else {}

def accumulate(nm, *args, **kwargs): return trained(made(nm), [GradAccum(*args, **kwargs, **accum_args(nm))])

class OutOfMemory:
    "Memory for no more than `most` items in training"
    def __init__(self, most): self.most = most
    def __call__(self, model, args):
        if model.training and len(args[0])>self.most: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

def split(nm):
    learn = made(nm)
    learn.model.register_forward_pre_hook(OutOfMemory(2))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return trained(learn, [GradAccum(2, on_oom='split', **accum_args(nm))])

def schedule(nm, **kwargs): return trained(made(nm), [BatchSchedule(**kwargs)], n_epoch=3)

def noise(nm, n_acc=3, **kwargs):
    cb = NoiseScale(**kwargs)
    res = trained(made(nm), [*([GradAccum(n_acc, **accum_args(nm))] if n_acc>1 else []), cb], n_epoch=3)
    return {**res, **noise_of(cb)}

def scaled(nm, lr=lr, cycle=True, **kwargs): return trained(made(nm), [GradAccum(3), ScaledLR(4, **kwargs)], n_epoch=3, lr=lr, cycle=cycle)

# Finding, applying, verifying

class StepCost(Callback):
    "What an optimizer step costs beside its micro-batches"
    def after_step(self): clock.now += 2**-8

def pass_cost(model, args):
    "A forward pass costs more where a graph is kept"
    clock.now += (2**-7 + len(args[0])*2**-11)*(3 if torch.is_grad_enabled() else 1)

def timed(nm, n=256, bs=8):
    learn = made(nm, n, bs)
    learn.model.register_forward_pre_hook(pass_cost)
    set_seed(2)
    return learn.add_cb(StepCost())

def find(nm, lr=lr, cbs=(), **kwargs):
    learn = timed(nm).add_cbs(list(cbs))
    plan = learn.bs_find(lr, show_plot=False, seed=3, **kwargs)
    measured = {} if plan.df is None else of_frame(plan.df, 'df') # A plan by short trainings has no windows
    return {**of_value('plan', plan.to_dict()), **of_frame(plan.table, 'table'), **measured, **trained(learn, n_epoch=1, lr=0.01)}

def apply(nm, at=None, **kwargs):
    learn = timed(nm)
    plan = learn.bs_find(lr, show_plot=False, seed=3, n_epoch=2, **kwargs)
    if at: plan = plan.at(at)
    plan.apply(learn)
    res = trained(learn, n_epoch=1, lr=plan.lr)
    plan.undo(learn)
    return {**res, **{f'after undo.{k}': v for k,v in trained(learn, n_epoch=1).items()}}

def verify(nm, **kwargs):
    learn = timed(nm)
    res = learn.bs_verify(learn.bs_find(lr, show_plot=False, seed=3, n_epoch=2).at(16), **kwargs)
    found = {**of_frame(res.table, 'table'), **of_frame(res.df, 'df'), **of_value('bs', res.bs)}
    return {**found, **trained(learn, n_epoch=1, lr=0.01)}

def check(nm):
    learn = made(nm)
    args = accum_args(nm)
    return {'error': np.array(learn.check_accum(GradAccum(4, **args) if args else 4).error), **trained(learn)}

def largest(nm):
    "The largest micro-batch on a device that holds 37 items"
    learn = made(nm, 256)
    learn.model.register_forward_pre_hook(OutOfMemory(37))
    return of_value('max_bs', learn.max_bs_find())

# Two ranks

def _rank(r, folder, nm, kind):
    os.environ.update(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE='2', MASTER_ADDR='localhost', MASTER_PORT='29501', CUDA_VISIBLE_DEVICES='')
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    torch.distributed.init_process_group('gloo', init_method=f'file://{folder}/store', rank=r, world_size=2)
    learn,cb = made(nm),NoiseScale()
    cbs = dict(accum=[GradAccum(3)], noise=[GradAccum(2),cb], scaled=[GradAccum(2),ScaledLR(4)])[kind]
    with learn.distrib_ctx(cpu=True, sync_bn=False): res = trained(learn, cbs)
    if kind=='noise': res.update(noise_of(cb))
    np.savez(f'{folder}/{r}.npz', **res)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

def ranks(nm, kind):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,nm,kind), nprocs=2)
        return {f'rank {r}.{k}': v for r in range(2) for k,v in np.load(f'{folder}/{r}.npz').items()}

# All cases

cases = {}
for nm in learners:
    cases[f'GradAccum(3): {nm}'] = partial(accumulate, nm, 3)
    cases[f'GradAccum(bs=8): {nm}'] = partial(accumulate, nm, bs=8)
    cases[f'GradAccum({{0:1,1:2}}): {nm}'] = partial(accumulate, nm, {0: 1, 1: 2})
    cases[f'NoiseScale, windows: {nm}'] = partial(noise, nm)
    cases[f'check_accum: {nm}'] = partial(check, nm)
    if nm not in (*rnns, 'a step of its own', 'convnet, MixUp'): cases[f"on_oom='split': {nm}"] = partial(split, nm)
for nm in (flat,'transformer','tied weights'): cases[f'NoiseScale, parts: {nm}'] = partial(noise, nm, 1, every=2)
for nm in (flat,"convnet, torch's AdamW",groups):
    for rule in (linear_scaling,sqrt_scaling): cases[f'ScaledLR, {rule.__name__}: {nm}'] = partial(scaled, nm, rule=rule)
    cases[f'ScaledLR, constant rate, no warmup: {nm}'] = partial(scaled, nm, cycle=False, warmup_epochs=0)
cases['ScaledLR, slice'] = partial(scaled, groups, lr=slice(0.005, 0.05))
cases['ScaledLR, weight decay not scaled'] = partial(scaled, flat, scale_wd=False)
cases['ScaledLR, adascale_gain'] = partial(scaled, flat, rule=adascale_gain, noise_scale=20.)
for nm in (flat,conv,"convnet, torch's AdamW"):
    cases[f'BatchSchedule, by epoch: {nm}'] = partial(schedule, nm, bs={0: 4, 1: 8, 2: 16})
    cases[f'BatchSchedule, by progress: {nm}'] = partial(schedule, nm, bs=SchedCos(4, 16), rule=sqrt_scaling, max_micro_bs=8)
for nm in (flat,conv,"convnet, torch's AdamW",'transformer',groups):
    cases[f'bs_find: {nm}'] = partial(find, nm)
    cases[f'bs_find, n_epoch=5: {nm}'] = partial(find, nm, n_epoch=5)
cases['bs_find, fixed weights'] = partial(find, flat, lr=0)
cases['bs_find, max_bs=16'] = partial(find, flat, max_bs=16)
cases['bs_find, slice'] = partial(find, groups, lr=slice(0.005, 0.05), n_epoch=3)
cases['bs_find beside GradAccum'] = lambda: find(conv, cbs=[GradAccum(2)], n_epoch=3)
for nm in (flat,"convnet, torch's AdamW"):
    cases[f'plan.apply: {nm}'] = partial(apply, nm)
    cases[f'plan.at(32).apply: {nm}'] = partial(apply, nm, 32, max_bs=16)
    cases[f'bs_verify: {nm}'] = partial(verify, nm)
cases["bs_verify, one's own size"] = partial(verify, flat, sizes=[32])
cases['max_bs_find'] = partial(largest, flat)
for kind in ('accum','noise','scaled'):
    for nm in (flat,'transformer'): cases[f'two ranks, {kind}: {nm}'] = partial(ranks, nm, kind)
