"fastai's private methods as `loop` knows them: each test fails when fastai changes one, by name, signature or order"
import inspect
import pickle
from contextlib import contextmanager, nullcontext

import pytest
import torch
import fastai.torch_core
from fastai.callback.core import Callback, CancelEpochException
from fastai.callback.schedule import ParamScheduler, fit_one_cycle # noqa: F401, it adds the method
from fastai.distributed import DistributedDL
from fastai.learner import Learner, SkipToEpoch
from fastai_bs.learner.loop import (ScopedCallback, fastai_on_ranks, fastais_one_batch, first_epoch, fit_method,
                            method_by, optimizer_step, overridden_step, with_values)
from helpers import flat, loaders, mlp, noted, quiet_learner, RaiseAt, regression

signatures = {
    '_do_epoch_train': ['self'], '_do_epoch': ['self'], '_with_events': ['self','f','event_type','ex','final'], '_split': ['self','b'],
    '_set_device': ['self','b'], 'one_batch': ['self','i','b'], 'all_batches': ['self'], '_do_one_batch': ['self'], '_do_grad_opt': ['self'],
    '_backward': ['self'], '_step': ['self'], '_do_fit': ['self'], '__call__': ['self','event_name'], '_call_one': ['self','event_name']}

def test_signatures_of_fastais_methods_are_as_known(): assert {nm: list(inspect.signature(getattr(Learner, nm)).parameters) for nm in signatures}==signatures

# The order of calls and events

parts = '_do_epoch_train','all_batches','one_batch','_set_device','_split','_do_one_batch','_do_grad_opt','_backward','_step','_do_epoch_validate'

def logged(log):
    "A class of learners that writes down its calls and events"
    def _method(nm):
        own = getattr(Learner, nm)
        def f(self, *args, **kwargs):
            log.append(nm)
            return own(self, *args, **kwargs)
        return f
    def _call(self, events):
        log.extend([events] if isinstance(events, str) else events)
        return Learner.__call__(self, events)
    return type('Logged', (Learner,), {**{nm: _method(nm) for nm in parts}, '__call__': _call})

def learner(cls=None, cbs=None, n=8, bs=4):
    learn = quiet_learner(loaders(regression(n), bs), mlp(), cbs=cbs)
    if cls: learn.__class__ = cls
    return learn

one_train_batch = ['one_batch','_set_device','_split','before_batch','_do_one_batch','after_pred','after_loss','_do_grad_opt',
                   'before_backward','_backward','after_backward','before_step','_step','after_step','after_batch']
one_valid_batch = ['one_batch','_set_device','_split','before_batch','_do_one_batch','after_pred','after_loss','after_batch']

def test_order_of_the_loop_is_as_known():
    "All of a fit of one epoch with two batches"
    log = []
    learner(logged(log)).fit(1, 0.1)
    assert log==['before_fit','before_epoch','_do_epoch_train','before_train','all_batches',*2*one_train_batch,'after_train',
                 '_do_epoch_validate','before_validate','all_batches',*one_valid_batch,'after_validate','after_epoch','after_fit']

# Each of our functions, within a fit

class Once(Callback):
    "Calls `f(learn)` in place of the first batch's step"
    order = 70
    def __init__(self, f): self.f,self.done = f,False
    def before_step(self):
        if self.done: return
        self.done = True
        self.f(self.learn)

def test_an_optimizer_step_has_its_events_and_zeroes_nothing():
    log,known = [],[]
    def f(learn):
        known.append(flat(learn).clone())
        log.clear()
        optimizer_step(learn)
        known.append(flat(learn).clone())
        assert all(p.grad.any() for p in learn.model.parameters()) # Not zeroed
        assert log==['before_step','_step','after_step']
    learner(logged(log), Once(f)).fit(1, 0.1)
    assert len(known)==2
    assert not torch.equal(*known)

class Twice:
    "Each batch of training for a second time"
    def __init__(self, learn): self.learn,self.seen = learn,[]
    def __call__(self, i, b):
        self.seen.append((i,len(b)))
        for _ in range(1+self.learn.training): fastais_one_batch(self.learn, i, b)

def test_a_method_stands_in_until_the_block_ends():
    learn,plain = learner(n=12),learner(n=12)
    f = Twice(learn)
    with method_by(learn, 'one_batch', f):
        learn.fit(1, 0.1)
        learn.logger = print # Not that of `quiet_learner`
        assert isinstance(pickle.loads(pickle.dumps(learn)).one_batch, Twice)
    assert 'one_batch' not in vars(learn)
    assert f.seen==[(0,2),(1,2),(2,2),(0,2)]
    plain.fit(1, 0.1)
    assert len(learn.recorder.losses)==2*len(plain.recorder.losses)==6
    with pytest.raises(KeyError), method_by(learn, 'one_batch', lambda i, b: {}[i]): learn.fit(1, 0.1)
    assert 'one_batch' not in vars(learn)

@pytest.mark.parametrize('nm', ['one_batch','_step'])
def test_a_loop_of_ones_own_is_seen(nm):
    learn = learner()
    assert overridden_step(learn) is None
    setattr(learn, nm, getattr(learn, nm))
    assert overridden_step(learn)==nm
    delattr(learn, nm)
    learn.__class__ = type('Own', (Learner,), {nm: lambda self, *args: None})
    assert overridden_step(learn)==nm

@pytest.mark.parametrize('nm,names', [('fit',['fit']),('fit_one_cycle',['fit_one_cycle']),('fit_flat_cos',['fit_flat_cos']),('fine_tune',['fine_tune']*2)])
def test_the_method_that_trains_is_known_by_name(nm, names):
    learn = learner()
    cb,seen = noted('before_fit', fit_method)
    learn.add_cb(cb)
    getattr(learn, nm)(1)
    assert seen==names

def test_the_first_epoch_is_the_start_epoch():
    found = []
    class Look(Callback):
        def before_fit(self): found.append(first_epoch(self.learn))
    learner(cbs=Look()).fit(3, 0.1)
    learner(cbs=Look()).fit(3, 0.1, start_epoch=2)
    assert found==[0,2]
    assert SkipToEpoch(5)._skip_to==5

# Scopes

class Scoped(ScopedCallback):
    def __init__(self, log, nm, order=0, fails=False): self.log,self.nm,self.order,self.fails = log,nm,order,fails
    @property
    def name(self): return self.nm
    @contextmanager
    def scope(self):
        self.log.append(f'{self.nm} in')
        try: yield
        finally: self.log.append(f'{self.nm} out')
    def after_batch(self):
        if self.fails: raise KeyError('mine')

@pytest.mark.parametrize('fails', [False, True])
def test_scopes_open_and_close_in_their_order(fails):
    "One of a callback that is off stays closed, and all where an epoch is skipped"
    log = []
    learn = learner(cbs=[Scoped(log, 'b', 2, fails), Scoped(log, 'a', 1), off := Scoped(log, 'off')])
    off.run = False
    with pytest.raises(KeyError) if fails else nullcontext(): learn.fit(2, 0.1)
    assert log==['a in','b in','b out','a out']*(1 if fails else 2)
    learn.fit(1, 0.1, cbs=RaiseAt('before_epoch', CancelEpochException, order=70))
    assert len(log)==(4 if fails else 8)
    assert not {'_do_epoch_train','_with_events'} & set(vars(learn))

def test_callbacks_are_removed_while_the_fit_goes_on():
    "Where an exception is handled, as fastai's `WandbCallback` does with predictions that it cannot show"
    class Goes(Callback): pass
    class Handles(Callback):
        def after_epoch(self):
            try: raise KeyError
            except KeyError: self.learn.remove_cb(Goes)
    log = []
    learn = learner(cbs=[Scoped(log, 'a'), Goes(), Handles()])
    learn.fit(2, 0.1)
    assert log==['a in','a out']*2
    assert not hasattr(learn, 'goes')

# What fastai sends between ranks

def test_exchanges_between_ranks_are_replaced_until_the_block_ends():
    "The names that are looked up at each call, and both are put back after an error"
    own = fastai.torch_core.maybe_gather,DistributedDL._broadcast
    assert list(inspect.signature(own[0]).parameters)==['x','axis']
    assert list(inspect.signature(own[1]).parameters)==['self','t','rank']
    assert any('maybe_gather' in c.co_names for c in fastai.torch_core.to_detach.__code__.co_consts if inspect.iscode(c))
    assert '_broadcast' in DistributedDL.get_idxs.__code__.co_names
    with pytest.raises(KeyError), fastai_on_ranks():
        with fastai_on_ranks():
            assert fastai.torch_core.maybe_gather is not own[0]
            assert DistributedDL._broadcast is not own[1]
        assert fastai.torch_core.maybe_gather is not own[0]
        assert DistributedDL._broadcast is not own[1]
        raise KeyError
    assert (fastai.torch_core.maybe_gather,DistributedDL._broadcast)==own

# Put back, whatever comes in between

class Pressed:
    "Ctrl-C comes right after the `at`-th setting of an attribute, and the one after it"
    at = None
    def __setattr__(self, nm, v):
        object.__setattr__(self, nm, v)
        if type(self).at is not None:
            type(self).at -= 1
            if type(self).at in (0,-1): raise KeyboardInterrupt

@pytest.mark.parametrize('at', [1,2,3,4,5])
def test_values_are_put_back_after_interrupts(at, monkeypatch):
    "Two of them while they are set or put back"
    o = Pressed()
    o.a,o.b = 1,2
    monkeypatch.setattr(Pressed, 'at', at)
    with pytest.raises(KeyboardInterrupt) if at<5 else nullcontext(), with_values(o, a=3, b=4): pass
    assert (o.a,o.b)==(1,2)

def test_a_method_is_put_back_after_an_interrupt(monkeypatch):
    "No stand-in is left"
    o = Pressed()
    monkeypatch.setattr(Pressed, 'at', 1)
    with pytest.raises(KeyboardInterrupt), method_by(o, 'f', len): pass
    assert vars(o)=={}
