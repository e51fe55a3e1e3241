"""A second device, 'acc', that computes on the CPU: without a GPU it shows what goes wrong on one

It refuses to mix devices, as a GPU does; it has random numbers of its own; and it counts each wait, by the line of our package or of fastai that asked for
it: for a number (`item`, `tolist`, `bool`), for a shape (`nonzero`, indexing by a mask), for a copy to main memory and for one from there, which waits too.

`start` registers it for good, and what asks torch for an accelerator then finds it: so `@on_acc` runs a test in another process, where all such tests follow
each other, and nothing changes in that of other tests. What the device has not: a `torch.Generator`, as no backend in Python can have one (its random numbers
are `torch.acc.get_rng_state`); fastai's types, as `as_subclass` returns the tensor itself; operations in place that change a shape; sparse tensors, streams,
a memory of its own, and so neither DDP's reducer nor what asks for free memory.
"""
import copy
import sys
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from helpers import as_it_was
from gloo_ranks import context, on_ranks

register = getattr(backend_registration, '_setup_privateuseone_for_python_backend', None)
device = torch.device('cpu') # `start` makes it the second one
waits = Counter() # By operation and line, since it was cleared

# Who waits

_tools = 'fastai.torch_core','fastai.metrics' # Of fastai, that others call

def _asked_by():
    "The innermost line that is our package's or fastai's"
    f,tool = sys._getframe(2),None
    while f is not None:
        nm,at = f.f_globals.get('__name__', ''),f"{f.f_code.co_filename.rpartition('/')[2]}:{f.f_lineno} {f.f_code.co_name}"
        if nm.startswith('fastai_bs.'): return at
        if nm.startswith(_tools): tool = tool or f'fastai {at}'
        elif nm.startswith('fastai.'): return f'fastai {at}'
        f = f.f_back
    return tool or 'elsewhere'

_copies = {'_to_copy','copy_'} # Between devices
_takes_numbers = {'fill_','masked_fill','masked_fill_','index_put_'} # From main memory, tensors without dimensions, as operations by elements do
_by_mask = {'index','index_put_'}

def _waits(func, nm, args, crosses):
    if nm in _copies: return crosses
    if nm in _by_mask: return any(o is not None and o.dtype in (torch.bool,torch.uint8) for o in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags

# Tensors

class AccTensor(Tensor):
    "Of the device; its numbers are in `cpu_`"
    __torch_function__ = torch._C._disabled_torch_function_impl
    @staticmethod
    def __new__(cls, cpu):
        res = Tensor._make_wrapper_subclass(cls, cpu.shape, strides=cpu.stride(), storage_offset=cpu.storage_offset(), dtype=cpu.dtype, device=device)
        res.cpu_ = cpu
        return res
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): return run(func, args, kwargs or {})

    @property
    def data(self): return self.detach()
    @data.setter
    def data(self, o): # torch would take the shape alone
        Tensor.data.__set__(self, o)
        self.cpu_ = o.cpu_
    def as_subclass(self, cls): return self
    @staticmethod
    def _before_cast(t): return SimpleNamespace(as_subclass=lambda cls: t) # To this type fastai would cast what it brings to main memory
    def data_ptr(self): return self.cpu_.data_ptr()
    def untyped_storage(self): return self.cpu_.untyped_storage()
    def tolist(self): return self.cpu().tolist()
    def numpy(self, *args, **kwargs): raise TypeError(f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() first")
    __array__ = numpy
    def _more(self): return {k: v for k,v in vars(self).items() if k!='cpu_'} # Is it a parameter?
    def __deepcopy__(self, memo):
        if id(self) not in memo: memo[id(self)] = _made_of(self.cpu_.clone(), self._more(), self.requires_grad, copy.deepcopy(self.grad, memo))
        return memo[id(self)]
    def __reduce_ex__(self, protocol): return _made_of,(self.cpu_, self._more(), self.requires_grad)
    def __repr__(self, **kwargs): return f'acc({self.cpu_!r})'

def _made_of(cpu, attrs, requires_grad, grad=None):
    res = AccTensor(cpu)
    vars(res).update(attrs)
    res.requires_grad_(requires_grad).grad = grad
    return res

# Operations

def _each(f, o):
    "`o`, with `f` of each tensor in its place"
    if isinstance(o, Tensor): return f(o)
    if isinstance(o, dict): return {k: _each(f, v) for k,v in o.items()}
    return type(o)(_each(f, v) for v in o) if isinstance(o, (list,tuple)) else o

def run(func, args, kwargs):
    "On the CPU, where no two devices are mixed"
    nm,tensors = func.overloadpacket.__name__,[]
    def _cpu(t):
        tensors.append(t)
        return t.cpu_ if isinstance(t, AccTensor) else t
    cpu_args,cpu_kwargs = _each(_cpu, args),_each(_cpu, kwargs)
    there,to = any(isinstance(t, AccTensor) for t in tensors),kwargs.get('device')
    to_acc = there if to is None else torch.device(to).type=='acc'
    if not there and not to_acc: return func(*args, **kwargs)
    if func.namespace=='c10d': raise RuntimeError(f'No backend type associated with device type {device.type}') # As gloo says of one that it does not know

    numbers = torch.Tag.pointwise in func.tags or nm in _takes_numbers
    if there and nm not in _copies and any(not isinstance(t, AccTensor) and (t.ndim or not numbers) for t in tensors): raise RuntimeError(
        f"Expected all tensors to be on the same device, but {func} got {', '.join(f'{tuple(t.shape)} on {t.device}' for t in tensors)}")
    crosses = bool(tensors) and (to_acc!=there or len({isinstance(t, AccTensor) for t in tensors})>1)
    if _waits(func, nm, args, crosses): waits[nm, _asked_by()] += 1

    if to is not None: cpu_kwargs['device'] = 'cpu'
    with rng.used() if torch.Tag.nondeterministic_seeded in func.tags else nullcontext(): res = func(*cpu_args, **cpu_kwargs)
    if nm=='copy_': return args[0]
    if nm=='_to_copy' and any(res is t for t in cpu_args): res = res.clone() # Already there for the CPU, but not for us
    if not to_acc: return res
    given = {id(t.cpu_): t for t in tensors if isinstance(t, AccTensor)} # Operations in place return what they were given
    def _wrapped(o):
        t = given.get(id(o))
        if t is None: return AccTensor(o)
        if t.shape!=o.shape: raise NotImplementedError(f"{func} changes the shape of a tensor of {device} in place")
        return t
    return _each(_wrapped, res)

class Factories(TorchDispatchMode):
    "Operations without a tensor of the device come by here"
    def __torch_dispatch__(self, func, types, args=(), kwargs=None): return run(func, args, kwargs or {})

# `torch.tensor(..., device=...)` makes and fills its tensor behind the back of `Factories`

def _empty_strided(*args, **kwargs): return AccTensor(torch.empty_strided(*args, **{**kwargs, 'device': 'cpu'}))

def _copy_from(src, dst, non_blocking=False):
    waits['tensor', _asked_by()] += 1
    dst.cpu_.copy_(src)
    return dst

def _autocast(nm, dtype, *args):
    "What autocast does on a GPU with the operations it knows; double precision it leaves alone"
    dtype = dtype or torch.get_autocast_dtype('acc')
    with torch.autocast('acc', enabled=False):
        return getattr(torch.ops.aten, nm)(*(o.to(dtype) if isinstance(o, Tensor) and o.is_floating_point() and o.dtype!=torch.float64 else o for o in args))

# The device

class Rng:
    "Its random numbers"
    def __init__(self): self.seed(0)
    def seed(self, seed): self.state = torch.Generator().manual_seed(seed).get_state()
    @contextmanager
    def used(self):
        cpus = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try: yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(cpus)
rng = Rng()

class Module:
    "What `torch.cuda` is for CUDA"
    def is_initialized(self): return True
    def is_available(self): return True
    def _is_in_bad_fork(self): return False
    def current_device(self): return 0
    def device_count(self): return 1
    def get_rng_state(self, device=None): return rng.state.clone()
    def set_rng_state(self, state, device=None): rng.state = state.clone()
    def manual_seed_all(self, seed): rng.seed(seed)
    def get_amp_supported_dtype(self): return [torch.float16,torch.bfloat16]
    def synchronize(self, device=None): waits['synchronize', _asked_by()] += 1

aten,everywhere = torch.library.Library('aten', 'IMPL'),torch.library.Library('_', 'IMPL')

def start():
    "Register the device, for the rest of this process"
    global device
    register('acc', Module())
    device = torch.device('acc:0')
    torch.__future__.set_swap_module_params_on_conversion(True) # `model.to(device)` keeps its parameters, and which of them are tied
    aten.impl('empty_strided', _empty_strided, 'PrivateUse1')
    aten.impl('_copy_from', _copy_from, 'PrivateUse1')
    everywhere.fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')
    for nm in ('linear','conv2d'): aten.impl(nm, partial(_autocast, nm, None), 'AutocastPrivateUse1')
    for nm in ('mse_loss','cross_entropy_loss'): aten.impl(nm, partial(_autocast, nm, torch.float32), 'AutocastPrivateUse1')
    Factories().__enter__()

# A process that has it

def _call(rank, module, name, args, kwargs):
    if not hasattr(torch, 'acc'): start()
    with as_it_was(): getattr(import_module(module), name)(*args, **kwargs)

def _serve(conn):
    torch.set_num_threads(1)
    while True:
        try: call = conn.recv()
        except EOFError: return # The tests are through
        error = None
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try: _call(0, *call)
            except BaseException: error = traceback.format_exc()
        conn.send(error)

@cache
def _server():
    here,there = context.Pipe()
    context.Process(target=_serve, args=(there,), daemon=True).start()
    there.close()
    return here

def on_acc(f, world=1):
    "The test `f` in another process, or on several ranks, with the device"
    @wraps(f)
    def _test(*args, **kwargs):
        if hasattr(torch, 'acc'): return f(*args, **kwargs)
        if register is None: pytest.skip("this torch has no backends in Python: 2.14 and later do")
        call = f.__module__,f.__name__,args,kwargs
        if world>1:
            on_ranks(_call, world, *call)
            return
        _server().send(call)
        assert _server().poll(300), "it hangs"
        error = _server().recv()
        if error: raise AssertionError(error)
    return _test
