"`unchanged`: whatever happens in the block, the learner and the random numbers are as they were"
import contextlib
import random
import signal
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader as TorchDataLoader, RandomSampler
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam
from fastcore.foundation import L

from fastai_bs.all import unchanged
from fastai_bs.learner import snapshot
from fastai_bs.verify.window_gradients import FixedDraws
from helpers import autocast_state, changes, loaders, mlp, picture, quiet_learner, regression

class Holder(Callback):
    "A callback with state of every kind"
    def __init__(self):
        self.n,self.a_list,self.a_dict,self.a_deque = 0,[1,[2]],{'x': {'y': 1}},deque([1,2], maxlen=3)
        self.ordered,self.a_default,self.counter,self.an_l,self.a_tuple = OrderedDict(b=1, a=2),defaultdict(list,
            k=[1]),Counter('aab'),L(1,2),([1],torch.ones(2))
        self.rng,self.gen,self.np_gen,self.np_rng = random.Random(1),torch.Generator().manual_seed(1),np.random.default_rng(1),np.random.RandomState(1)
        self.a_set,self.an_array,self.fixed = {1,2},np.zeros(3),np.ones(3)
        self.fixed.flags.writeable = False # As pandas hands them out

    def stir(self):
        "Change each of them in place, and then put another in its place"
        self.n += 1
        self.a_list[1].append(3); self.a_list.insert(0, 5)
        self.a_dict['x']['y'] = 2; self.a_dict['z'] = 3
        self.a_deque.extend([7,8])
        self.ordered.move_to_end('b'); del self.ordered['a']
        self.a_default['new'].append(1); self.a_default['k'].append(2)
        self.counter.update('b')
        self.an_l.append(3)
        self.a_tuple[0].append(2); self.a_tuple[1].add_(1)
        self.a_set.add(3)
        self.an_array += 1
        self.rng.random(); torch.rand(1, generator=self.gen); self.np_gen.random(); self.np_rng.rand()
        for k in list(vars(self)):
            if k!='learn': setattr(self, k, None)
        self.fresh = 1

class Net(nn.Module):
    "Buffers of every kind, and tensors that are plain attributes"
    def __init__(self, n_out=2):
        super().__init__()
        self.lin,self.bn = nn.Linear(5,n_out),nn.BatchNorm1d(5)
        self.register_buffer('kept', torch.zeros(n_out))
        self.register_buffer('passing', torch.zeros(n_out), persistent=False)
        self.register_buffer('wide', torch.ones(1).expand(4))
        self.state,self.states = torch.zeros(n_out),[torch.zeros(1),{'h': torch.zeros(1)}]
    def forward(self, x):
        res = self.lin(self.bn(x)) + self.kept + self.passing + self.state + self.states[0]
        self.kept.add_(0.1); self.passing.add_(0.1)
        self.state = res.detach().mean(0)
        self.states[0] = self.states[0]+0.1; self.states[1]['h'].add_(1)
        return res

def net_learner(n=64, **kwargs):
    torch.manual_seed(0)
    return quiet_learner(loaders(regression(n, dtype=torch.float32), 8, shuffle=True), Net(), **kwargs)

def _train(learn): learn.fit(1, 0.1)
def _stir(learn): learn.holder.stir()
def _rngs(learn): random.random(); np.random.rand(); torch.rand(1)
def _swap_model(learn): learn.model = nn.DataParallel(learn.model)
def _swap_opt(learn): learn.create_opt()
def _swap_loaders(learn): learn.dls.loaders = [learn.dls.train.new(bs=2), learn.dls.valid]
def _swap_loader(learn): learn.dls.loaders[0] = learn.dls.train.new(bs=2)
def _iterate(learn): list(learn.dls.train)
def _callbacks(learn): learn.remove_cb(learn.holder); learn.add_cb(Callback(after_fit=lambda self: None)); learn.recorder.run = False
def _freeze(learn):
    for p in learn.model.lin.parameters(): p.requires_grad_(False)
def _flags(learn): learn.model.eval(); learn.model.lin.train()
def _grads(learn):
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
def _no_grads(learn):
    for p in learn.model.parameters(): p.grad = None
def _hook(learn): learn.model.register_forward_hook(lambda *a: None)
def _hooks_of_parameters(learn):
    "On one that had some, and on one that had none"
    learn.model.lin.weight._backward_hooks.clear()
    for p in learn.model.parameters(): p.register_hook(lambda g: 2*g); p.register_post_accumulate_grad_hook(lambda p: None)
def _shape(learn): learn.model.kept.set_(torch.ones(3)); learn.model.wide = torch.zeros(4)
def _layer(learn): learn.model.extra = nn.Linear(2,2); del learn.model.lin
def _half(learn): learn.model.half()
def _autocast(learn):
    for _ in range(2): torch.autocast('cpu', dtype=torch.bfloat16).__enter__()
def _default_dtype(learn): torch.set_default_dtype(torch.float64)

happenings = [_train, _stir, _rngs, _swap_model, _swap_opt, _swap_loaders, _swap_loader, _iterate, _callbacks, _freeze, _flags, _grads,
    _hook, _hooks_of_parameters, _no_grads, _shape, _layer, _half, _autocast, _default_dtype]

def _new(learn): pass
def _once(learn): learn.fit(1, 0.1)
def _uneven(learn):
    "Gradients of every kind: none, zero and not zero"
    learn.fit(1, 0.1)
    learn.model.lin.weight.grad.fill_(2.)
    learn.model.bn.bias.grad = None

states = [(_new,None),(_uneven,ValueError),(_once,None),(_new,KeyboardInterrupt),(_uneven,None)]

@pytest.mark.parametrize('happens,before,error', [(f,*states[i%5]) for i,f in enumerate(happenings)], ids=lambda o: getattr(o, '__name__', str(o)).strip('_'))
def test_all_is_as_it_was(happens, before, error):
    learn = net_learner(cbs=Holder(), opt_func=Adam)
    before(learn)
    learn.model.lin.weight.register_hook(lambda g: None)
    was = picture(learn)
    if error is None:
        with unchanged(learn):
            happens(learn)
            assert changes(was, picture(learn))
    else:
        with pytest.raises(error, match='the one'), unchanged(learn):
            happens(learn)
            raise error('the one')
    assert changes(was, picture(learn))==[]

class Average:
    "Of the weights: no module and no callback"
    def __init__(self, ps): self.shadow,self.n,self.dtype,self.decay = [p.detach().clone() for p in ps],0,torch.float32,lambda n: 1-1/(n+1)
    def update(self, ps):
        self.n += 1
        self.last = self.n
        for s,p in zip(self.shadow, ps): s.lerp_(p.detach(), self.decay(self.n))

class KeepsAverage(Callback):
    def __init__(self, average): self.average = average
    def after_step(self): self.average.update(self.model.parameters())

def test_an_object_of_ones_own_that_a_callback_holds_is_put_back():
    "Before its first update and after some"
    learn = net_learner()
    learn.add_cb(KeepsAverage(Average(learn.model.parameters())))
    for _ in range(2):
        was = picture(learn)
        with unchanged(learn): learn.fit(1, 0.1)
        assert changes(was, picture(learn))==[]
        learn.fit(1, 0.1)
    assert learn.keeps_average.average.n>0

class Balances:
    "A loss with a running mean"
    def __init__(self): self.mean = torch.zeros(())
    def loss(self, pred, y, k=1.):
        loss = nn.functional.mse_loss(pred, y)
        self.mean = self.mean+0.1*(loss.detach()-self.mean)
        return k*loss/(1+self.mean)

@pytest.mark.parametrize('bound', [lambda o: o.loss, lambda o: partial(o.loss, k=2.), lambda o: partial(Balances.loss, o)], ids=['method','partial','argument'])
@pytest.mark.parametrize('block', [unchanged,snapshot.pass_unchanged])
def test_what_a_loss_is_bound_to_is_put_back(block, bound):
    state = Balances()
    learn = net_learner()
    learn.loss_func = bound(state)
    state.loss(torch.ones(2), torch.zeros(2))
    was = state.mean.clone()
    with block(learn): learn.loss_func(torch.ones(2), torch.full((2,), 3.))
    assert torch.equal(state.mean, was)

class Connection:
    def __init__(self): self.lock,self.n_sent = threading.Lock(),0

def test_an_object_that_holds_more_than_values_is_left_alone():
    "A thread may be at work on it"
    learn = net_learner(cbs=Holder())
    conn = learn.holder.connection = Connection()
    with unchanged(learn): conn.n_sent += 1
    assert learn.holder.connection is conn
    assert conn.n_sent==1

def test_lazy_parameters_are_refused():
    learn = quiet_learner(loaders(regression(8, dtype=torch.float32), 4), nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match='lazy parameters without a shape yet: pass one batch through it first'), unchanged(learn): pass
    learn.model(torch.randn(2,5))
    with unchanged(learn): _train(learn)
    assert learn.opt is None

def test_items_are_not_copied():
    "The data set stays out of it, however large"
    class Untouchable(list):
        def __iter__(self): raise AssertionError('went through the data')
    items = Untouchable(regression(16, dtype=torch.float32))
    learn = Learner(DataLoaders(TorchDataLoader(items, batch_size=4), TorchDataLoader(items, batch_size=4)), mlp(dtype=torch.float32), loss_func=nn.MSELoss())
    with unchanged(learn): pass

def test_a_failing_restoration_does_not_stop_the_others():
    "Each is asked for, whatever became of the one before"
    class Stubborn(random.Random):
        def setstate(self, state): raise RuntimeError('will not')
    class Last(Callback):
        def __init__(self): self.rng = Stubborn(1)
    learn = net_learner(cbs=Last())
    before = torch.get_rng_state()
    w = learn.model.lin.weight.detach().clone()
    with pytest.raises(RuntimeError, match='will not'), unchanged(learn): _train(learn)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(learn.model.lin.weight, w)
    assert learn.opt is None

# Interrupts

@contextmanager
def at_each_line(fs, f):
    "Call `f` before each line of the functions `fs` that runs in the block"
    def _line(frame, event, arg):
        if event=='line': f()
        return _line
    codes,own = {o.__code__ for o in fs},sys.gettrace()
    sys.settrace(lambda frame, event, arg: _line if frame.f_code in codes else None)
    try: yield
    finally: sys.settrace(own)

def test_an_interrupt_while_it_is_put_back_stops_nothing():
    "In 30 places, one after another: the call is made again, and the interrupt is raised at the end"
    learn = net_learner(cbs=Holder(), opt_func=Adam)
    learn.fit(1, 0.1)
    was,n,calls = picture(learn),0,[snapshot._refill,snapshot._put_back,snapshot._set_autocast]
    def _count():
        nonlocal n
        n += 1
        if n==at: raise KeyboardInterrupt
    def _tried():
        with at_each_line(calls, _count), unchanged(learn):
            for f in (_grads, _freeze, _flags, _stir, _swap_opt, _swap_loaders, _swap_model, _rngs, _autocast): f(learn)
            learn.extra,learn.lr_finder = [1],True
            del learn.cbs
    at = 0
    _tried()
    assert n>1000
    assert changes(was, picture(learn))==[]
    for at in np.linspace(1, n, 30).astype(int):
        n = 0
        with pytest.raises(KeyboardInterrupt): _tried()
        assert changes(was, picture(learn))==[], at

def test_modes_that_are_left_on_are_left():
    "As by an interrupt of their own end: they are off before tensors are put back, and those from before the block stay"
    learn = net_learner()
    learn.fit(1, 0.1)
    was = picture(learn)
    with BaseTorchFunctionMode() as own:
        with unchanged(learn):
            _grads(learn)
            for o in (FakeTensorMode(),FixedDraws(),BaseTorchFunctionMode()): o.__enter__()
        assert torch.overrides._get_current_function_mode_stack()==[own]
        assert _get_current_dispatch_mode_stack()==[]
    assert changes(was, picture(learn))==[]

def test_an_interrupt_that_was_caught_lets_the_next_one_in():
    with pytest.raises(KeyboardInterrupt), snapshot.one_interrupt():
        try: signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt: signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

def test_ctrl_c_waits_for_the_end_of_the_block():
    "The handler that was there is asked then; other threads get none"
    said,own = [],signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), snapshot.interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        said.append('the end')
    assert said==['the end']
    assert signal.getsignal(signal.SIGINT) is own
    def _in_thread():
        with snapshot.interrupts_wait(): said.append(signal.getsignal(signal.SIGINT))
    thread = threading.Thread(target=_in_thread)
    thread.start()
    thread.join()
    assert said[1] is own

def _ends_well(manager):
    with manager as learn:
        if learn: _grads(learn)

def _is_interrupted(manager):
    with manager as learn:
        if learn: _grads(learn)
        raise KeyboardInterrupt

def pressed(f, manager, *places):
    "Press Ctrl-C in `f(manager)` at these of the steps of Python that begin and end a block; return the interrupt, if any, and each step's function"
    ours,theirs,names = {snapshot.Undo.close.__code__,unchanged.__wrapped__.__code__},{contextlib.__file__,signal.__file__},[]
    def _step(frame, event, arg):
        if event=='opcode':
            names.append(frame.f_code.co_name)
            if len(names) in places: signal.getsignal(signal.SIGINT)(signal.SIGINT, frame) # As Python calls it there
        return _step
    def _call(frame, event, arg):
        code = frame.f_code
        if not (code in ours or code.co_filename in theirs or code.co_filename==snapshot.__file__ and code.co_name in ('__enter__','__exit__')): return
        frame.f_trace_opcodes = True
        return _step
    own,error = sys.gettrace(),None
    sys.settrace(_call)
    try: f(manager)
    except KeyboardInterrupt as e: error = e # Kept, as a notebook keeps it: no generator is closed because its traceback goes
    finally: sys.settrace(own)
    return error,names

@pytest.mark.parametrize('make', [snapshot.interrupts_wait,snapshot.one_interrupt,unchanged], ids=lambda o: o.__name__)
def test_an_interrupt_at_any_step_that_begins_or_ends_a_block_is_raised_and_leaves_nothing(make):
    "Once and twice, in a block that ends well or by another one: the handler is the caller's, and the learner is as it was"
    learn,is_whole,own = net_learner(),make is unchanged,signal.getsignal(signal.SIGINT)
    was,n = picture(learn),count()
    def _try(f, *places):
        error,names = pressed(f, make(learn) if is_whole else make(), *places)
        assert signal.getsignal(signal.SIGINT) is own, (f,places)
        if is_whole and next(n)%10==0: assert changes(was, picture(learn))==[], (f,places) # What is left changed stays so
        assert error or not places and f is _ends_well, (f,places)
        return names
    names = _try(_ends_well)
    every = dict(unchanged=7, close=100) # These have very many
    for i in [i for i,nm in enumerate(names, 1) if i%every.get(nm, 1)==0]:
        _try(_ends_well, i)
        _try(_ends_well, i, i+1+i%7)
        if not is_whole or i%5==0:
            _try(_is_interrupted, i)
            _try(_is_interrupted, i, i+1+i%7)
    assert changes(was, picture(learn))==[]

def test_a_seed_holds_in_the_block_alone(seed=2**40):
    "Loaders draw the same on all ranks, everything else does not; afterwards what would have been drawn next comes"
    gen = torch.Generator()
    items = regression(20)
    dl = TorchDataLoader(items, batch_size=4, sampler=RandomSampler(items, generator=gen))
    dl.numpys = np.random.default_rng(0),np.random.RandomState(0)
    learn = quiet_learner(DataLoaders(dl, loaders(items, 4, shuffle=True).train, device='cpu'), mlp())
    learn.dls.loaders[1].rng.seed(7)
    def _drawn():
        mine = [torch.rand(3, generator=gen).tolist(), learn.dls.loaders[1].rng.random(), dl.numpys[0].random(), dl.numpys[1].rand()]
        return mine,(torch.rand(3).tolist(),random.random(),np.random.rand())
    def _in_block(*args):
        was = picture(learn)
        with unchanged(learn, *args): res = _drawn()
        assert changes(was, picture(learn))==[]
        return res
    (mine,others),(same,apart),(more,too) = _in_block(seed, 0),_in_block(seed, 1),_in_block(seed+1, 0)
    assert mine==same
    assert (mine,others)==_in_block(seed)
    assert all(a!=b for a,b in zip(others, apart))
    assert all(a!=b for a,b in zip([*mine,*others], [*more,*too]))
    assert _in_block(None)==_in_block()==_drawn()

def test_parameters_keep_their_memory_and_aliases():
    "A tensor that shares memory with a parameter still does"
    learn = net_learner()
    view = learn.model.lin.weight.data[0]
    with unchanged(learn):
        learn.model.half()
        learn.model.lin.weight.data.fill_(7)
    learn.model.lin.weight.data.fill_(3)
    assert view.tolist()==[3]*5

def test_open_autocast_context_stays_open():
    "Only what was opened in the block is closed"
    learn = net_learner()
    with torch.autocast('cpu', dtype=torch.float16):
        was = autocast_state()
        assert was[0]==1
        assert was[1][0]==(True, torch.float16)
        with unchanged(learn):
            _autocast(learn)
            assert autocast_state()[0]==3
        assert autocast_state()==was
    assert autocast_state()[0]==0
