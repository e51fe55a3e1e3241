"Small learners and measures that several test files share"
import math
import random
import warnings
from contextlib import contextmanager
from functools import cache, partial
from itertools import combinations, product

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from fastai.callback.core import Callback, CancelStepException, TrainEvalCallback
from fastai.callback.fp16 import MixedPrecision
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import CastToTensor, Learner, Recorder, load_learner
from fastai.optimizer import SGD
from fastai.torch_core import defaults, set_seed

# The process

def autocast_state():
    "How deep contexts are nested, what is on in which precision, and whether casts are kept"
    depth = torch.autocast_increment_nesting()-1
    torch.autocast_decrement_nesting()
    return depth, [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ('cpu','cuda')], torch.is_autocast_cache_enabled()

def set_autocast_state(state):
    depth,on,keeps = state
    for d,(enabled,dtype) in zip(('cpu','cuda'), on): torch.set_autocast_enabled(d, enabled); torch.set_autocast_dtype(d, dtype)
    torch.set_autocast_cache_enabled(keeps)
    while autocast_state()[0]<depth: torch.autocast_increment_nesting()
    while autocast_state()[0]>depth: torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()

def _set_deterministic(o): torch.use_deterministic_algorithms(o[0], warn_only=o[1])
def _set_cudnn(o): torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark = o

process = { # What there is one of, how it is read and how it is set
    'autocast': (autocast_state,set_autocast_state), 'grad mode': (torch.is_grad_enabled,torch.set_grad_enabled),
    'default dtype': (torch.get_default_dtype,torch.set_default_dtype),
    'default device': (torch.get_default_device,lambda d: torch.set_default_device(None if d.type=='cpu' else d)),
    'number of threads': (torch.get_num_threads,torch.set_num_threads),
    'deterministic algorithms': (lambda: (torch.are_deterministic_algorithms_enabled(),torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic),
    'flags of cuDNN': (lambda: (torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark),_set_cudnn),
    'defaults.callbacks': (lambda: list(defaults.callbacks),lambda o: setattr(defaults, 'callbacks', o))}

@contextmanager
def as_it_was():
    "Begins with the same random numbers each time; what is left changed in the process is put back, and is an error"
    was,rng = {nm: get() for nm,(get,_) in process.items()},(random.getstate(),np.random.get_state(),torch.get_rng_state())
    set_seed(0)
    try: yield
    finally:
        left = [nm for nm,(get,_) in process.items() if get()!=was[nm]]
        for nm in left: process[nm][1](was[nm])
        random.setstate(rng[0]); np.random.set_state(rng[1]); torch.set_rng_state(rng[2])
    assert not left, f"left changed: {', '.join(left)}"

@cache
def no_bf16_lstm():
    "Why an LSTM in bfloat16 cannot run here, or None: oneDNN has it for some CPUs only"
    try:
        with torch.autocast('cpu', dtype=torch.bfloat16): nn.LSTM(2,3)(torch.zeros(1,1,2))
    except RuntimeError as e: return str(e)

# Cases

def pairwise(*axes, where=lambda *case: True):
    """Few cases `(a, b, ...)` of the product of `axes`, in its order: any two values of two axes that are together in a case `where` holds are together
    in one of these. Each in turn is the one with the most pairs that are new"""
    cases = [c for c in product(*map(range, map(len, axes))) if where(*(a[i] for a,i in zip(axes,c)))]
    pairs = {c: set(combinations(enumerate(c), 2)) or {c} for c in cases}
    todo,chosen = set().union(*pairs.values()),[]
    while todo:
        chosen.append(max(cases, key=lambda c: len(pairs[c]&todo)))
        todo -= pairs[chosen[-1]]
    return [tuple(a[i] for a,i in zip(axes,c)) for c in sorted(chosen)]

# Tasks and learners

def regression(n, n_in=5, n_out=2, dtype=torch.float64, seed=0):
    "`n` items `(x, y)`"
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n_in, n_out, generator=g, dtype=dtype)
    x = torch.randn(n, n_in, generator=g, dtype=dtype)
    return list(zip(x, x@w + torch.randn(n, n_out, generator=g, dtype=dtype)))

def loaders(items, bs, valid=None, **kwargs):
    "fastai loaders without workers, in the order of `items` unless `shuffle`"
    return DataLoaders(DataLoader(items, bs=bs, num_workers=0, **kwargs), DataLoader(valid or items[:2], bs=2, num_workers=0), device='cpu')

def mlp(n_in=5, n_out=2, n_hid=4, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(n_in,n_hid), nn.Tanh(), nn.Linear(n_hid,n_out)).to(dtype)

class Float32Loss(Callback):
    "Let Recorder, which smooths in float32, follow a float64 loss"
    order = 40
    def after_batch(self): self.learn.loss = self.learn.loss.float()

class ScaledLoss(Callback):
    "As `MixedPrecision`, without its float16, which no CPU has"
    order = MixedPrecision.order
    def __init__(self, **kwargs): self.kwargs = kwargs
    def before_fit(self): self.learn.scaler,self.scales = GradScaler('cpu', **self.kwargs),[]
    def before_backward(self): self.learn.loss_grad = self.learn.scaler.scale(self.loss_grad)
    def before_step(self):
        self.skipped = True
        self.scales.append(self.learn.scaler.get_scale())
        self.learn.scaler.step(self)
        if self.skipped: raise CancelStepException
    def after_step(self): self.learn.scaler.update()
    def after_fit(self): self.learn.scaler = None
    @property
    def param_groups(self): return self.opt.param_groups
    def step(self): self.skipped = False

class RaiseAt(Callback):
    """Raises `exc` at `event`: in micro-batches `at` (one, several, or any) of the training in `epoch` (or any), unless the event is not one of a batch;
    `times` at most. How often it was, is in `raised`"""
    def __init__(self, event, exc, at=None, epoch=None, order=0, times=math.inf):
        self.event,self.exc,self.at,self.at_epoch,self.order,self.times,self.raised = event,exc,at,epoch,order,times,0
        setattr(self, event, self._raise)
    def due(self):
        if self.event in ('before_fit','before_epoch','before_train','after_train','before_validate','after_validate','after_epoch','after_cancel_validate',
                          'after_cancel_fit','after_fit'): return True
        at = [self.at] if isinstance(self.at, int) else self.at
        return self.learn.training and (at is None or self.iter in at) and self.at_epoch in (None,self.epoch)
    def _raise(self):
        if self.raised>=self.times or not self.due(): return
        self.raised += 1
        raise self.exc('the one')

momentum_sgd = partial(SGD, mom=0.9)

def quiet_learner(dls, model, loss_func=None, opt_func=momentum_sgd, cbs=None, **kwargs):
    "A learner without progress bar or log; it records"
    learn = Learner(dls, model, loss_func=loss_func or nn.MSELoss(), opt_func=opt_func, default_cbs=False,
                    cbs=[TrainEvalCallback, Recorder, CastToTensor, Float32Loss], **kwargs)
    learn.logger = lambda *args: None
    return learn.add_cbs(cbs)

def flat(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def distance(a, b):
    "Largest difference between two learners' parameters, relative to the largest parameter"
    a,b = flat(a),flat(b)
    return ((a-b).abs().max()/b.abs().max()).item()

def exported(learn, path):
    "`learn` after another epoch, `load` and `export`, as `load_learner` gives it back; it was saved before that epoch"
    learn.save('it')
    saved = flat(learn).clone()
    learn.fit(1, 0.1)
    assert not torch.equal(saved, flat(learn))
    learn.load('it')
    assert torch.equal(saved, flat(learn))
    learn.export('it.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return load_learner(path/'it.pkl')

__all__ = ['as_it_was','autocast_state','no_bf16_lstm','pairwise','process','RaiseAt','exported','ScaledLoss',
    'momentum_sgd','regression','loaders','mlp','Float32Loss','quiet_learner','flat','distance','set_seed']
