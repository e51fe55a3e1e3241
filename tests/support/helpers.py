"Small learners and measures that several test files share"
import json
import math
import random
import warnings
from collections import deque
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from fastai.callback.core import Callback, CancelStepException, TrainEvalCallback
from fastai.callback.fp16 import MixedPrecision
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.learner import CastToTensor, Learner, Recorder, load_learner
from fastai.optimizer import SGD
from fastai.torch_core import defaults, set_seed # noqa: F401, tests take it from here

# Where the tests are

root = Path(__file__).resolve().parent.parent.parent

def cells_of(path):
    "`(type, source)` of each cell of a notebook"
    return [(c['cell_type'],''.join(c['source'])) for c in json.loads(Path(path).read_text())['cells']]

def needs(*paths):
    "Mark of tests of files that a checkout has, and the source distribution may not have"
    return pytest.mark.skipif(not all((root/o).exists() for o in paths), reason=f"in a checkout only: {', '.join(paths)}")

# The process

def _bits(t): return t.detach().as_subclass(Tensor).cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()

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

def _set_profiler(on):
    if not on: torch.autograd._disable_profiler()

def _set_deterministic(o): torch.use_deterministic_algorithms(o[0], warn_only=o[1])
def _set_cudnn(o): torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark = o

process = { # What there is one of, how it is read and how it is set
    'autocast': (autocast_state,set_autocast_state), 'grad mode': (torch.is_grad_enabled,torch.set_grad_enabled),
    'profiler': (torch.autograd._profiler_enabled,_set_profiler),
    'default dtype': (torch.get_default_dtype,torch.set_default_dtype),
    'default device': (lambda: torch.empty(0).device,lambda d: torch.set_default_device(None if d.type=='cpu' else d)),
    'number of threads': (torch.get_num_threads,torch.set_num_threads),
    'deterministic algorithms': (lambda: (torch.are_deterministic_algorithms_enabled(),torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic),
    'flags of cuDNN': (lambda: (torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark),_set_cudnn),
    'defaults.callbacks': (lambda: list(defaults.callbacks),lambda o: setattr(defaults, 'callbacks', o))}

def seed_torch(seed):
    "`torch.manual_seed`, which on a machine without a GPU writes down each time where it was called from, to seed it later: a millisecond"
    if torch.cuda.is_available(): torch.manual_seed(seed)
    else: torch.default_generator.manual_seed(seed)

@contextmanager
def as_it_was(failed=lambda: False):
    "Begins with the same random numbers each time; what is left changed in the process is put back, and is an error, unless the test has `failed` anyway"
    was,rng = {nm: get() for nm,(get,_) in process.items()},(random.getstate(),np.random.get_state(),torch.get_rng_state())
    random.seed(0); np.random.seed(0); seed_torch(0)
    try: yield
    finally:
        left = [nm for nm,(get,_) in process.items() if get()!=was[nm]]
        for nm in left: process[nm][1](was[nm])
        random.setstate(rng[0]); np.random.set_state(rng[1]); torch.set_rng_state(rng[2])
    assert not left or failed(), f"left changed: {', '.join(left)}"

def random_states():
    "Of all generators of the process, to be compared with `==`"
    return random.getstate(),repr(np.random.get_state()),_bits(torch.get_rng_state())

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

def two_of(i): return torch.tensor([i/40,1.-i/40])
def one_of(i): return torch.tensor([(i*7%11)/11])

def listed(n=24, bs=2):
    "Loaders that can be exported, by functions that can be found where this package is not"
    return Datasets(range(n+8), [[two_of],[one_of]], splits=[range(n),range(n,n+8)]).dataloaders(bs=bs, num_workers=0, shuffle=False, device='cpu')

def mlp(n_in=5, n_out=2, n_hid=4, dtype=torch.float64, seed=0):
    seed_torch(seed)
    return nn.Sequential(nn.Linear(n_in,n_hid), nn.Tanh(), nn.Linear(n_hid,n_out)).to(dtype)

def tokens(n, ignored=0., n_tok=7, length=4, kept=None, pad=-100, seed=0):
    """`n` items `(x, y)` of `length` tokens each; a target often is the token before. A target does not count where it is `pad`: each by chance, `ignored` of
    them, and all but the first `kept(i)` of item `i`. `pad` may be one of the tokens, which then never counts"""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(n_tok, (n,length), generator=g)
    y = torch.where(torch.rand(n, length, generator=g)<0.3, x.roll(1,1), torch.randint(n_tok, (n,length), generator=g))
    gone = torch.rand(n, length, generator=g)<ignored
    if kept: gone |= torch.arange(length)>=torch.tensor([kept(i) for i in range(n)])[:,None]
    return list(zip(x, y.masked_fill(gone, pad)))

def n_kept(items, pad=-100):
    "How many targets count, in each of `items`"
    return torch.stack([(y!=pad).sum() for _,y in items])

class Swap(nn.Module):
    "Classes where torch's loss looks for them"
    def forward(self, x): return x.transpose(1,2)

def token_model(n_tok=7, tied=True, last=False, seed=0):
    "Logits `(batch, class, token)`, or `(batch, token, class)` where classes are `last`; where `tied`, input and output layer share their weights"
    seed_torch(seed)
    model = nn.Sequential(nn.Embedding(n_tok,4), nn.Linear(4,4), nn.Tanh(), nn.Linear(4,n_tok,bias=False), *([] if last else [Swap()]))
    if tied: model[3].weight = model[0].weight
    return model.double()

def token_task(n, ignored=0., n_tok=7, tied=True, last=False, pad=-100, loss_func=nn.CrossEntropyLoss, **kwargs):
    "Items of `tokens`, a model for them in float64, and a loss for which `pad` does not count"
    return tokens(n, ignored, n_tok, pad=pad, **kwargs),token_model(n_tok, tied, last),loss_func(ignore_index=pad)

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

class Overflowing(ScaledLoss):
    "As float16 would above 512"
    def before_backward(self):
        super().before_backward()
        if self.learn.scaler.get_scale()>512: self.learn.loss_grad = self.loss_grad*float('inf')

def noted(event, f):
    "A callback, and the list of what `f` says of the learner at `event` of the training, after all other callbacks; `unchanged` knows of no such list"
    seen = []
    cb = Callback(**{event: lambda self: seen.append(f(self.learn))})
    cb.order,cb.run_valid = 1000,False
    return cb,seen

def hypers(learn): return [dict(h) for h in learn.opt.hypers] # Of all groups
def peak_lr(learn): return learn.opt.hypers[-1]['lr'] # Of the last group

class SkipSteps(Callback):
    "Cancels the optimizer steps of these numbers, counted from 0 over the fit"
    order,run_valid = MixedPrecision.order-3,False # Right after GradAccum
    def __init__(self, *steps, exc=CancelStepException): self.steps,self.exc = steps,exc
    def before_fit(self): self.n = -1
    def before_step(self):
        self.n += 1
        if self.n in self.steps: raise self.exc

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

def halves(model): return [list(model[:2].parameters()), list(model[2:].parameters())] # Two parameter groups

def flat(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def distance(a, b):
    "Largest difference between two learners' parameters, relative to the largest parameter"
    a,b = flat(a),flat(b)
    return ((a-b).abs().max()/b.abs().max()).item()

# What a learner is, before and after

_plain = (type(None), bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device)
_walked = ('fastai', 'torch', 'fastcore.foundation', 'fastcore.xtras', 'helpers', 'test_', 'matrix', 'zoo')

def picture(learn, ids=True, only=None):
    """All that `learn` (or its attributes `only`) and the process hold, as `{path: what is there}`: values bit by bit and, with `ids`, which object it is.
    Without them two learners can be compared"""
    res,seen = {},{}
    def _id(o): return id(o) if ids else type(o).__name__
    def _walk(path, o):
        if isinstance(o, _plain): res[path] = repr(o); return
        if id(o) in seen: res[path] = 'as at', seen[id(o)][1]; return
        seen[id(o)] = o,path
        res[path] = _id(o)
        if isinstance(o, Tensor):
            res[path] = _id(o), o.dtype, tuple(o.shape), o.stride(), o.requires_grad, (o.data_ptr() if ids else None), _bits(o)
            if o.is_leaf: _walk(f'{path}.grad', o.grad)
            for nm in ('_backward_hooks','_post_accumulate_grad_hooks'): _walk(f'{path}.{nm}', getattr(o, nm) or None) # Hooks that went leave an empty one
        elif isinstance(o, np.ndarray): res[path] = _id(o), o.tobytes()
        elif isinstance(o, random.Random): res[path] = _id(o), o.getstate()
        elif isinstance(o, torch.Generator): res[path] = _id(o), _bits(o.get_state())
        elif isinstance(o, np.random.Generator): res[path] = _id(o), repr(o.bit_generator.state)
        elif isinstance(o, np.random.RandomState): res[path] = _id(o), repr(o.get_state())
        elif isinstance(o, (set,frozenset)): res[path] = _id(o), sorted(map(repr, o))
        elif isinstance(o, dict):
            res[path] = _id(o), [repr(k) if isinstance(k, _plain) else _id(k) for k in o]
            for i,(k,v) in enumerate(o.items()): _walk(f'{path}[{repr(k) if isinstance(k, _plain) else i}]', v)
        elif isinstance(o, (list,tuple,deque)):
            res[path] = _id(o), len(o)
            for i,v in enumerate(o): _walk(f'{path}[{i}]', v)
        elif hasattr(o, '__dict__') and not isinstance(o, type) and type(o).__module__.startswith(_walked) and not path.endswith("['_iterator']"):
            _walk(path+'.', vars(o))
    if only is None: _walk('', learn)
    else:
        for k in only: _walk(f".['{k}']", vars(learn).get(k))
    res['process'] = *random_states(),autocast_state(),torch.get_default_dtype()
    if ids: res[None] = seen # Keeps what is pictured alive, so that no id is used again
    return res

def changes(a, b):
    "The paths at which two pictures differ; wall-clock times aside"
    return [k for k in {**a, **b} if k is not None and a.get(k)!=b.get(k) and not k.endswith(("['start_epoch']", "['log']")) and "['log']." not in k]

def left_behind(learn):
    "The `picture` of what a training leaves behind in `learn` and the process, whatever callbacks there were; to be compared with another learner's"
    return picture(learn, ids=False, only=('model','opt','loss','xb','yb'))

def needs_export():
    "Skip a test in which fastai could not do its part"
    if version('fasttransform')=='0.0.2': pytest.skip("fastai itself cannot export `Datasets` with fasttransform 0.0.2")

def exported(learn, path):
    "`learn` after another epoch, `load` and `export`, as `load_learner` gives it back; it was saved before that epoch"
    needs_export()
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
