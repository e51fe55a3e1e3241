"""Which learner, with which of our tools, beside which companion: each two of them together in a cell that is tried out, and checked by a number

`python tests/support/matrix.py` tries all cells and writes docs/matrix.md; with `DEVICE=cuda` it tries them on a GPU, and the page stays."""
import argparse
import contextlib
import io
import math
import os
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache, reduce
from multiprocessing import get_context
from operator import add
from pathlib import Path
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from fastai.callback.core import Callback, CancelBatchException, CancelStepException, CancelValidException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import ParamScheduler
from fastai.fp16_utils import convert_network
from fastai.learner import SkipToEpoch
from fastai.torch_core import find_bs, set_seed
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale, ScaledLR
from fastai_bs.finder.timing import StepTimer
from helpers import as_it_was, changes, pairwise, picture, process
from oracle import moments_of_micros
from zoo import Learners, companions, device, does_not_apply, lr, models, n_targets

page = Path(__file__).resolve().parents[2]/'docs'/'matrix.md'

# By hand

class Micro(NamedTuple):
    "A micro-batch"
    items:int
    elems:int # That its loss averages over
    grads:list # Of each parameter, or `None`

    @property
    def flat(self): return torch.cat([(g.to_dense() if g.is_sparse else g).double().flatten() for g in self.grads if g is not None])

def mean_of(micros):
    "The gradient of all of them: their mean, weighted by elements"
    n = sum(o.elems for o in micros)
    parts = ([g*(o.elems/n) for o,g in zip(micros,gs) if g is not None] for gs in zip(*(o.grads for o in micros)))
    return [reduce(add, o) if o else None for o in parts]

def moments_of(micros, scale=1.):
    "`(tr_sigma, g_sq)` of a window"
    return moments_of_micros([o.flat.cpu()/scale for o in micros], [o.elems for o in micros])

def scale_of(learn):
    "What mixed precision multiplies the loss by"
    if getattr(learn, 'scaler', None) is not None: return learn.scaler.get_scale()
    return getattr(getattr(learn, 'non_native_mixed_precision', None), 'loss_scale', 1.)

def goes_on(learn):
    "Is this fit to go on where the one before ended?"
    return any(isinstance(cb, SkipToEpoch) for cb in learn.cbs)

class ByHand(Callback):
    "Accumulates, slow and obvious: all gradients of a window are kept, and its step gets their mean, with the hyper-parameters of its first micro-batch"
    order,run_valid = MixedPrecision.order-3,False
    def __init__(self, n_acc): self.n_acc = n_acc
    moments = ()
    def before_fit(self): self.moments,self.micros = [*self.moments] if goes_on(self.learn) else [],[]
    def before_train(self): self.micros,self.n_done = [],0
    def after_pred(self):
        if not self.micros: self.hypers = [dict(h) for h in self.opt.hypers]
    def after_backward(self):
        ps = list(self.learn.model.parameters())
        self.micros.append(Micro(find_bs(self.learn.yb), n_targets(self.learn), [None if p.grad is None else p.grad.clone() for p in ps]))
        for p in ps: p.grad = None
    def before_step(self):
        if len(self.micros)<self.n_acc and self.iter<self.n_iter-1 and not self.ends: raise CancelBatchException
        if len(self.micros)>1: self.moments.append(moments_of(self.micros, scale_of(self.learn)))
        for p,g in zip(self.learn.model.parameters(), mean_of(self.micros)): p.grad = g
        for nm in self.hypers[0]: self.opt.set_hyper(nm, [h[nm] for h in self.hypers])
        self.micros,self.n_done = [],self.n_done+1
    ends = False
    def after_batch(self):
        self.learn.pct_train = (self.epoch + self.n_done/math.ceil(self.n_iter/self.n_acc))/self.n_epoch
    def after_train(self):
        "A window is open where somebody ended the epoch"
        if not self.micros: return
        self.ends = True
        self.learn._with_events(self.learn._step, 'step', CancelStepException)
        self.opt.zero_grad()
        self.ends = False

class Reseed(Callback):
    "Draws anew from the micro-batch `at` of each fit on"
    order,run_valid = -60,False
    def __init__(self, at): self.at = at
    def before_fit(self): self.is_done = False
    def before_batch(self):
        if self.is_done or self.iter<self.at: return
        self.is_done = True
        set_seed(11)

class WithoutFirst(ByHand):
    "Leaves out the first step of each fit"
    def before_fit(self):
        super().before_fit()
        self.is_first = True
    def before_step(self):
        super().before_step()
        if not self.is_first: return
        self.is_first = False
        for p in self.learn.model.parameters(): p.grad = None
        raise CancelBatchException

class ScaledByHand(Callback):
    "The rate of each step times `1+(k-1)*min(1,t)`, `t` in epochs"
    order,run_valid = ParamScheduler.order+1,False
    def __init__(self, k): self.k = k
    def before_batch(self):
        self.own = [h['lr'] for h in self.opt.hypers]
        self.opt.set_hyper('lr', [o*(1+(self.k-1)*min(1, self.epoch+self.iter/self.n_iter)) for o in self.own])
    def after_batch(self): self.opt.set_hyper('lr', self.own)

class Collect(Callback):
    "All micro-batches by epoch, at fixed weights"
    order,run_valid = MixedPrecision.order-3,False
    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def before_validate(self): raise CancelValidException
    def before_backward(self):
        for p in self.learn.model.parameters(): p.grad = None
    def after_backward(self):
        grads = [None if p.grad is None else p.grad.clone()/scale_of(self.learn) for p in self.learn.model.parameters()]
        self.epochs[-1].append(Micro(find_bs(self.learn.yb), n_targets(self.learn), grads))

class Sizes(Callback):
    "Items of each micro-batch, and the number of steps"
    order = 1000
    def before_fit(self): self.items,self.n_steps = [],0
    def before_batch(self):
        if self.training: self.items.append(find_bs(self.learn.yb))
    def after_step(self): self.n_steps += 1

class OutOfMemory(Callback):
    "A device that holds `limit` items"
    order = 1000
    def __init__(self, limit): self.limit,self.n = limit,0
    def after_pred(self):
        if not self.training or find_bs(self.learn.yb)<=self.limit: return
        self.n += 1
        raise torch.OutOfMemoryError('CUDA out of memory, as on a device that is full')

# What a training leaves

def weights(learn): return torch.cat([p.detach().float().cpu().flatten() for p in learn.model.parameters()])

def _files(): return sorted(re.sub(r'\d+', '0', str(p)) for p in Path('.').rglob('*') if p.is_file())

def _loader(dl):
    known = set(vars(dl))-{'_DataLoader__idxs'} # A note of the latest epoch's order
    return type(dl).__name__,getattr(dl, 'bs', getattr(dl, 'batch_size', None)),len(dl),sorted(known)

_on_recorder = {'noise','schedule'} # Where plots find what was measured

def traces(learn):
    "All that should be the same whoever took part in the training, as `{what: how it is}`"
    mods,ps = list(learn.model.modules()),list(learn.model.parameters())
    return {'attributes': sorted(vars(learn)), 'callbacks': [(type(cb).__name__,cb.run,sorted(set(vars(cb))-_on_recorder)) for cb in learn.cbs.sorted('order')],
        'hooks': [len(getattr(m, nm)) for m in mods for nm in ('_forward_hooks','_forward_pre_hooks','_backward_hooks','_backward_pre_hooks')] +
                 [len(getattr(p, nm, None) or ()) for p in ps for nm in ('_backward_hooks','_post_accumulate_grad_hooks')],
        'modules': [(type(m).__name__,m.training,sorted(vars(m)),m.momentum if isinstance(m, _BatchNorm) else 0) for m in mods],
        'parameters': [(p.dtype,p.requires_grad) for p in ps], 'gradients': [bool((p.grad.to_dense() if p.grad.is_sparse else p.grad).any())
                                                                             for p in ps if p.grad is not None],
        'loss': type(learn.loss_func).__name__, 'optimizer': (type(learn.opt).__name__,sorted(learn.opt.hypers[0]),[len(o) for o in learn.opt.param_lists]),
        'loaders': list(map(_loader, learn.dls.loaders)), 'epochs': len(learn.recorder.values), 'files': _files(),
        'process': [get() for get,_ in process.values()]}

class Ran(NamedTuple):
    "A training that is over"
    start:torch.Tensor # Weights before
    end:torch.Tensor # Weights after
    traces:dict
    lrs:list
    cb:object

@contextlib.contextmanager
def own_folder():
    was = os.getcwd()
    with tempfile.TemporaryDirectory() as d:
        os.chdir(d)
        try: yield
        finally: os.chdir(was)

class Cell(NamedTuple):
    model:str
    entry:str
    companion:str

    @property
    def kind(self): return models[self.model]
    @property
    def with_(self): return companions[self.companion]
    @property
    def exact(self): return self.kind.exact and self.with_.exact # Is the large batch's training the same?
    @property
    def learners(self): return Learners(self.model, self.companion)
    @property
    def settings(self): return dict(count=self.kind.count) if self.kind.count else {}

    def run(self, *cbs, n=None, bs=4, learn=None):
        "A training, with what it leaves"
        learn = learn or self.learners.make(n, bs)
        start = weights(learn).clone()
        with own_folder():
            self.learners.train(learn, cbs)
            return Ran(start, weights(learn).clone(), traces(learn), list(map(float, learn.recorder.lrs)), cbs[0] if cbs else None)

@lru_cache(16)
def reference(model, companion, way=None, k=None, n=None, bs=4):
    "A training without our tools, with what is done by hand, or with `GradAccum`, to which others are compared"
    cell = Cell(model, None, companion)
    cbs = [] if way is None else [way(k, **cell.settings)] if way is GradAccum else [way(k)]
    return cell.run(*cbs, n=n, bs=bs)

def of(cell, *args, **kwargs): return reference(cell.model, cell.companion, *args, **kwargs)

# How it is checked

def apart(a, b):
    "How far weights are apart, over the way that they went"
    way = (b.end-b.start).abs().max()
    assert way>1e-4, "the training does not move"
    return ((a.end-b.end).abs().max()/way).item()

def same(a, b, tol=0., what=''):
    d = apart(a, b)
    assert d<=tol, f"weights{what} are {d:.3g} of their way apart, more than {tol:g}"
    return d

def nothing_left(a, b):
    "No trace that a training without our tools would not have left"
    for k,v in a.traces.items():
        if k=='gradients': assert not any(v), "gradients are left"
        else: assert v==b.traces[k], f"{k}: {[o for o in v if o not in b.traces[k]]} where {[o for o in b.traces[k] if o not in v]} was" \
            if isinstance(v, list) else f"{k}: {v} where {b.traces[k]} was"

def close(a, b, tol, what):
    a,b = np.asarray(a, float),np.asarray(b, float)
    assert a.shape==b.shape, f"{what}: {a.shape} numbers, not {b.shape}"
    assert len(a), f"{what}: none"
    d = np.abs(a-b).max()/np.abs(b).max()
    assert d<=tol, f"{what} {d:.3g} apart, more than {tol:g}"
    return d

def untouched(cell, f, *cbs):
    "What `f(learn)` returns; the learner is as it was, and a training after it as without it"
    learn = cell.learners.make()
    learn.add_cbs(cbs)
    with own_folder():
        set_seed(7)
        before = picture(learn)
        try: res = f(learn)
        finally:
            left = [o for o in changes(before, picture(learn)) if "['dynamo_ctx']" not in o] # torch's own notes of what it has compiled
            assert not left, f"changed: {left[:5]}"
            assert not (left := _files()), f"files: {left}"
    learn.remove_cbs(cbs)
    same(after := cell.run(learn=learn), of(cell), what=' after a training that follows')
    nothing_left(after, of(cell))
    return res

def own_count(cell): return [GradAccum(1, **cell.settings)] if cell.settings else [] # For a loss that needs one

# Our tools

def grad_accum(cell):
    "Weights after a training are those of the large batch's training; where items depend on each other in a batch, those of accumulation by hand"
    ran = cell.run(GradAccum(2, **cell.settings))
    nothing_left(ran, of(cell))
    d = same(ran, of(cell, ByHand, 2), cell.with_.tol)
    assert apart(ran, of(cell))>d, "not accumulated"
    if cell.exact: d = same(ran, of(cell, bs=8), cell.with_.tol, ', of the large batch,')
    return f"weights {d:.1e} from {'the large batch' if cell.exact else 'accumulation by hand'}"

def split(cell):
    "Memory runs out in the first micro-batch; without the step of that window, weights are those of accumulation by hand with micro-batches half as large"
    oom = OutOfMemory(2)
    accum = GradAccum(2, on_oom='split', **cell.settings)
    ran = cell.run(accum, oom, Reseed(2), n=20)
    assert oom.n==1+(cell.kind.tunes), f"{oom.n} errors"
    assert accum.n_lost==1, f"{accum.n_lost} windows lost"
    nothing_left(ran, cell.run(n=20))
    k,bs = (2,4) if cell.companion=='ShortEpoch' else (4,2) # An epoch of micro-batches half as large ends elsewhere
    d = same(ran, cell.run(WithoutFirst(k), Reseed(k), n=20, bs=bs), cell.with_.tol)
    return f"weights {d:.1e} from accumulation by hand"

def noise_scale(cell):
    "Moments of every window are those by hand, and no bit of the training changes; without `GradAccum` too, in parts of a batch"
    noise = NoiseScale()
    ran = cell.run(noise, GradAccum(2, **cell.settings))
    same(ran, of(cell, GradAccum, 2), what=' beside GradAccum')
    nothing_left(ran, of(cell))
    by_hand = np.array(of(cell, ByHand, 2).cb.moments).T
    d = max(close(noise.moments[nm], m, 5*cell.with_.tol, nm) for nm,m in zip(('tr_sigma','g_sq'), by_hand))
    said = f"moments {d:.1e} from those by hand, no bit of the weights changed"
    return f"{said}; in parts of a batch {noise_in_parts(cell)}"

def noise_in_parts(cell):
    noise = NoiseScale(every=2, n_micro=2)
    try: same(cell.run(noise, *own_count(cell)), of(cell), what=' in parts')
    except (ValueError,TypeError) as e:
        expect_refusal(cell, 'NoiseScale in parts', str(e))
        return f"refused: {e}"
    assert len(noise.rows)>1
    assert np.isfinite(noise.moments.tr_sigma).all()
    return "finite"

def scaled_lr(cell):
    "The rate of every step is the formula's, and weights are those of a training at these rates"
    ran = cell.run(ScaledLR(2, warmup_epochs=1))
    nothing_left(ran, of(cell))
    by_hand = of(cell, ScaledByHand, 2)
    d = close(ran.lrs, by_hand.lrs, 1e-12, 'rates')
    assert close(ran.lrs, of(cell).lrs, 10, '')>0.1, "not scaled"
    same(ran, by_hand, cell.with_.tol)
    return f"rates {d:.0e} from the formula"

def batch_schedule(cell):
    "At one size weights are those of `GradAccum` to the bit; where the micro-batch grows, they are those of accumulation"
    one = cell.run(BatchSchedule({0: 8}, max_micro_bs=4, **cell.settings))
    same(one, of(cell, GradAccum, 2))
    nothing_left(one, of(cell))
    sizes,accumulated = Sizes(),Sizes()
    grown = cell.run(BatchSchedule({0: 4, 1: 8}, **cell.settings), sizes)
    nothing_left(grown, of(cell))
    by_accum = cell.run(GradAccum({0: 1, 1: 2}, **cell.settings), accumulated)
    most,now = max(sizes.items),max(accumulated.items) # The last fit's
    assert most==8 or accumulated.n_steps<=1, f"{most} items at most"
    if not cell.exact: return f"as GradAccum(2) to the bit; micro-batches of {most} instead of {now} items"
    d = same(grown, by_accum, cell.with_.tol, ', grown,')
    return f"as GradAccum(2) to the bit; grown micro-batches {d:.1e} from accumulated ones"

def bs_find(cell):
    "Moments of every window are those by hand, from the gradients of its micro-batches"
    plan = untouched(cell, lambda learn: learn.bs_find(0, num_it=18, n_batch=3, tol=0, show_plot=False), *own_count(cell))
    learn,collect = cell.learners.make(),Collect()
    set_seed(7)
    learn.remove_cb(CSVLogger)
    learn.lr_finder = None # Trackers keep still
    learn.fit(6, 0., cbs=collect)
    rows,epochs = [],iter(collect.epochs)
    micros = next(epochs)
    for n in plan.df.n_items:
        if len(micros)<2: micros = next(epochs) # Of one alone no noise can be measured, and no window crosses an epoch
        window = [o for o,so_far in zip(micros, np.cumsum([o.items for o in micros])) if so_far<=n]
        rows.append(moments_of(window))
        micros = micros[len(window):]
    tol = 5*cell.with_.tol
    d = max(close(plan.df[nm], m, tol, nm) for nm,m in zip(('tr_sigma','g_sq'), np.array(rows).T))
    low,high = plan.ci
    assert low<=plan.noise_scale<=high or math.isnan(plan.noise_scale), f"{plan.noise_scale} not in [{low}, {high}]"
    return f"moments {d:.1e} from those by hand, the learner as it was"

def max_bs_find(cell):
    "Where 7 items fit, it says 7"
    res = untouched(cell, lambda learn: learn.max_bs_find(max_bs=12), OutOfMemory(7))
    assert res==7, f"{res} where 7 fit"
    return "7 items where 7 fit, the learner as it was"

def memory_report(cell):
    "Bytes of parameters and buffers are those counted by hand, and rows add up"
    report = untouched(cell, lambda learn: learn.memory_report())
    model = cell.learners.make().model
    if cell.companion=='NonNativeMixedPrecision': model = convert_network(model, torch.float16)
    for nm,ts in (('parameters',model.parameters()),('buffers',model.buffers())):
        n = sum({t.data_ptr(): t.numel()*t.element_size() for t in ts}.values())
        assert report.bytes[nm]==n, f"{nm}: {report.bytes[nm]} bytes, not {n}"
    assert report.bytes['activations']>0
    assert report.per_item['activations']>0
    rows = report.bytes.drop('total').dropna()
    assert rows.sum()==report.bytes['total']
    return f"{report.bytes['parameters']:.0f} bytes of parameters, the learner as it was"

def check_accum(cell):
    "The error is rounding where accumulation is exact by nature, and where BatchNorm is in the way it is named"
    check = untouched(cell, lambda learn: learn.check_accum(2), *own_count(cell))
    if cell.exact or cell.kind.exact and cell.companion=='ShortEpoch':
        assert check.same, f"not the same: {check}"
        return f"the same: {check.error:.1e}"
    assert math.isfinite(check.error)
    has_bn = any(isinstance(m, _BatchNorm) for m in cell.learners.make().model.modules())
    assert check.same or check.reasons or has_bn, f"no reason given: {check}"
    if has_bn: assert not check.same and any(o.key=='batchnorm' for o in check.reasons), f"BatchNorm is not named: {check}"
    return f"{'the same' if check.same else 'not the same'}: {check.error:.1e}" + (f", {str(check.reasons[0])[:60]}..." if check.reasons else '')

def bs_verify(cell):
    "Today's training and a planned one, of twice its size, end with finite losses, after their epochs"
    def _verified(learn):
        plan = learn.bs_find(lr, n_epoch=14, noise_scale=100, step_times={4: 0.1, 8: 0.2}, show_plot=False)
        return learn.bs_verify(plan.at(8), n_runs=1)
    res = untouched(cell, _verified, *own_count(cell))
    df = res.df
    assert df.bs.tolist()==[4,8] and np.isfinite(df.valid_loss).all() and np.isfinite(df.train_loss).all(), str(df)
    for bs,n in zip(df.bs, df['items']):
        o = res.planned.at(bs).choice.option
        assert abs(n-o.trained_epochs*o.epoch.items)<=8, f"{n} items with {bs}"
    return f"losses {df.valid_loss.min():.3g} and {df.valid_loss.max():.3g}, the learner as it was"

entries = {'GradAccum': grad_accum, "GradAccum(on_oom='split')": split, 'NoiseScale': noise_scale, 'ScaledLR': scaled_lr, 'BatchSchedule': batch_schedule,
    'bs_find': bs_find, 'max_bs_find': max_bs_find, 'memory_report': memory_report, 'check_accum': check_accum,
    'bs_verify': bs_verify}

# What is refused, and in which words; by entry and model or companion

_no_parts = "AWD_LSTM goes on from the batch before, item by item, so GradAccum\\(on_oom='split'\\) cannot run it in parts: use on_oom='raise'"
_binds = "binds the items of a batch together, so NoiseScale cannot cut it into parts: use GradAccum"
expected = {("GradAccum(on_oom='split')",'AWD-LSTM language model'): _no_parts, ("GradAccum(on_oom='split')",'text classifier'): _no_parts,
    ("GradAccum(on_oom='split')",'a step of its own'):
        "a loop of its own \\(_do_one_batch\\), which GradAccum\\(on_oom='split'\\) cannot run in parts: use on_oom='raise'",
    ('NoiseScale in parts','a step of its own'): "a loop of its own \\(_do_one_batch\\), and NoiseScale cannot tell how it would train on a part",
    ('NoiseScale in parts','MixUp'): _binds, ('NoiseScale in parts','CutMix'): _binds,
    ('bs_verify','ShortEpoch'): "must take all its .* optimizer steps, but took .* in batches of .*: remove the callback that cancels batches"}

def expect_refusal(cell, entry, said):
    "An error where it is not"
    for who in (cell.model,cell.companion):
        if re.search(expected.get((entry,who), '(?!)'), said): return
    raise AssertionError(f"refused: {said}")

def try_cell(cell):
    "`(state, words)`: 'works', 'refused' or 'fails'"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(), as_it_was():
            warnings.simplefilter('ignore')
            try:
                of(cell) # What fails without us is no failure of ours
                return 'works',entries[cell.entry](cell)
            except (ValueError,TypeError) as e:
                expect_refusal(cell, cell.entry, str(e))
                return 'refused',str(e)
            finally: plt.close('all')
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt): raise
        return 'fails',f"{type(e).__name__}: {e}\n{traceback.format_exc(limit=-6)}"

def is_refused(entry, who): return (entry,who) in expected

def cells():
    "Any two of model, entry and companion that can be together are so in one of these, and what is refused is in one of its own"
    def _where(m, e, c):
        ends_elsewhere = e=="GradAccum(on_oom='split')" and c=='ShortEpoch' and not models[m].exact # There is nothing to compare it with
        return not (does_not_apply(m, c) or is_refused(e, m) or is_refused(e, c) or ends_elsewhere)
    res = pairwise(list(models), list(entries), list(companions), where=_where)
    res += [(who,e,'none') if who in models else ('plain torch loaders',e,who) for e,who in expected if e in entries]
    return sorted((Cell(*o) for o in res), key=lambda o: (list(models).index(o.model),list(companions).index(o.companion))) # For the references' sake

always = [*(Cell('plain torch loaders', *o) for o in (
    ('bs_verify','none'), ('BatchSchedule','torch.compile (aot_eager)'), # What is dear, as cheap as can be
    ("GradAccum(on_oom='split')",'MixUp'), # Where a number says more than most
    ("GradAccum(on_oom='split')",'bf16'), ('GradAccum','NonNativeMixedPrecision'), ('NoiseScale','NonNativeMixedPrecision'))), # What once failed
    Cell('a step of its own', 'NoiseScale', 'none')]

_costly = {'bs_verify': 8., 'bs_find': 2., "GradAccum(on_oom='split')": 2., 'NoiseScale': 1.5, 'check_accum': 1.5, 'max_bs_find': 1.5}

def sample(
    n=34, # Cells
):
    "Those of `always`, and the cheapest few in which each model, entry and companion is, and as many different pairs of them as can be"
    def _cost(o): return o.kind.cost*o.with_.cost*_costly.get(o.entry, 1.)
    def _pairs(o): return {(a,b) for a in o for b in o if a<b}
    res,left = list(always),[o for o in cells() if o not in always]
    while len(res)<n:
        values,pairs = {v for o in res for v in o},{p for o in res for p in _pairs(o)}
        res.append(max(left, key=lambda o: (len(set(o)-values)/_cost(o), len(_pairs(o)-pairs)/_cost(o))))
        left.remove(res[-1])
    return res

def timed(cell):
    torch.set_num_threads(1)
    if device.type=='cuda': # To the bit is asked for
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark = True,False
    matplotlib.use('Agg')
    StepTimer.patience,StepTimer.most = 0.2,2 # What steps take does not matter here
    begin = time.perf_counter()
    state,words = try_cell(cell)
    return dict(**cell._asdict(), state=state, words=words, seconds=round(time.perf_counter()-begin, 2))

# The page

def _how(o):
    "What a cell says of two of its three: works, or the words of a refusal"
    words = o['words'].split('refused: ')[-1] if 'refused: ' in o['words'] else o['words'] if o['state']=='refused' else ''
    return re.sub(r"^Exception occured in .*? when calling event .*?:\s*", '', words).strip()

def _table(rows, cols, found, notes):
    "As Markdown: `found(row, col)` gives the cells of a pair, and those in which it is refused say why"
    def _cell(r, c):
        if not (os_ := found(r, c)): return '–'
        marks = sorted({notes.setdefault(_how(o), len(notes)+1) for o in os_ if _how(o) and _is_of(o, r, c)})
        state = 'fails' if any(o['state']=='fails' for o in os_) else 'works' if any(o['state']=='works' for o in os_) else 'refused'
        return state + ''.join(f' <sup>{i}</sup>' for i in marks)
    return '\n'.join([f"| | {' | '.join(cols)} |", f"|---|{'---|'*len(cols)}", *(f"| {r} | {' | '.join(_cell(r, c) for c in cols)} |" for r in rows)])

def _is_of(o, *pair):
    "Is what is refused in that cell refused for these two?"
    entry = o['entry'] if o['state']=='refused' else 'NoiseScale in parts'
    return o['entry'] in pair and any(is_refused(entry, who) for who in pair)

def text(done):
    "The page"
    def _found(nms): return lambda r, c: [o for o in done if (o[nms[0]],o[nms[1]])==(r,c)]
    notes,ways = {},{nm: f"`{nm}`" for nm in entries}
    names = dict(model=list(models), entry=list(entries), companion=list(companions))
    tables = [_table(names[a], names[b], _found((a,b)), notes) for a,b in (('model','entry'),('companion','entry'),('companion','model'))]
    why = {}
    for m in models:
        for c in companions:
            if does_not_apply(m, c): why.setdefault(does_not_apply(m, c), []).append(f"{c} with {m}")
    n = Counter(o['state'] for o in done)
    words = '\n'.join(f"{i}. {w}" for w,i in notes.items())
    left = '\n'.join(f"- {', '.join(pairs)}: {reason}" for reason,pairs in why.items())
    how = '\n'.join(f"- {ways[nm]}: {f.__doc__[0].lower()+f.__doc__[1:]}" for nm,f in entries.items())
    return f"""# What goes with what

What this package brings was tried with {len(models)} kinds of learners and beside {len(companions)-1} companions of theirs, in {len(done)} small trainings
in which any two of the three meet at least once. `make matrix` runs them and writes this page: {n['works']} work, {n['refused']} are refused in words,
{n['fails']} fail. That it works is said by a number:

{how}

Whatever it is, callbacks, loaders, hooks, BatchNorm's momenta, attributes, files and the process must be left as a training without it leaves them; after all
that only looks (`bs_find`, `max_bs_find`, `memory_report`, `check_accum`, `bs_verify`) the learner and all random numbers are the same to the bit, and so
is the training that follows. Half precision is that of a CPU here; `torch.compile` is of its backend `aot_eager`, none of `inductor` and its modes.

## Learners

{tables[0]}

## Companions

{tables[1]}

## Companions with learners

{tables[2]}

## Notes

What is refused, in the words of the error; a cell that "works" with a note works in the way that the note names.

{words}

## What does not apply

{left}
"""

def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument('-n', type=int, default=2, help="processes")
    ap.add_argument('--only', nargs='*', default=[], help="cells of these models, entries and companions, without writing the page")
    args = ap.parse_args(argv)
    cells_in_order = cells()
    todo = [c for c in cells_in_order if not args.only or any(o in c for o in args.only)]
    done,begin = [],time.perf_counter()
    with ProcessPoolExecutor(args.n, mp_context=get_context('spawn')) as pool:
        for i,fut in enumerate(as_completed([pool.submit(timed, c) for c in todo])):
            o = fut.result()
            done.append(o)
            print(f"{i+1:4}/{len(todo)} {o['seconds']:6.1f} s  {o['state']:8} {o['model']} | {o['entry']} | {o['companion']}" +
                  (f"\n{o['words']}" if o['state']!='works' else ''), flush=True)
    if not args.only and device.type=='cpu': page.write_text(text(sorted(done, key=lambda o: cells_in_order.index((o['model'],o['entry'],o['companion'])))))
    n = Counter(o['state'] for o in done)
    print(f"{len(done)} cells in {(time.perf_counter()-begin)/60:.1f} minutes: {dict(n)}")
    return 1 if n['fails'] else 0

if __name__=='__main__':
    import sys
    from matrix import main as run # Not as `__main__`, so that both processes know the classes by one name
    sys.exit(run())
