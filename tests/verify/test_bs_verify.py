"`learn.bs_verify`: that nobody can tell it was called, interrupts, failures, what it finds and what it refuses"
import inspect
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import Adam, SGD
from fastai.torch_core import trainable_params

from fastai_bs.all import batch_size
from fastai_bs.finder.facts import Trial
from fastai_bs.utils.text import time_text
from fastai_bs.verify import trainings
from helpers import changes, loaders, mlp, picture, quiet_learner, RaiseAt, regression
from gloo_ranks import on_ranks
from plans import replanned
from test_bs_find import _after_training, _nothing, convnet_learner, learners, plain_training, training

pytestmark = pytest.mark.filterwarnings('ignore')

def plan_for(learn, bs=8, n_epoch=5, noise=20., **kwargs):
    "A plan whose rate is scaled by the noise scale, without a step timed or tried"
    times = {2**i: 2e-3*2**i for i in range(7)}
    plan = learn.bs_find(**{**dict(lr=0.01, n_epoch=n_epoch, noise_scale=noise, step_times=times, show_plot=False), **kwargs})
    return replanned(plan, trial=Trial()).at(bs)

def verify(learn, bs=8, sizes=(16,), n_runs=1, **kwargs): return learn.bs_verify(plan_for(learn, bs, **kwargs), sizes, n_runs)

def two_groups(model): return [list(o.parameters()) for o in model if list(o.parameters())]

def reg_learner(n=64, bs=4, valid=None, opt_func=Adam, cbs=None, splitter=trainable_params, **kwargs):
    dls = loaders(regression(n, dtype=torch.float32), bs, valid=valid or regression(20, dtype=torch.float32, seed=1), shuffle=True, **kwargs)
    return quiet_learner(dls, mlp(dtype=torch.float32), opt_func=opt_func, cbs=cbs, splitter=splitter)

def at_training(monkeypatch, number, act):
    "Call `act` before training `number` (`None`: each) that `bs_verify` runs; return the list of the arguments of all that began"
    real,begun = trainings.train,[]
    def _call(*args):
        begun.append(SimpleNamespace(**inspect.signature(real).bind(*args).arguments))
        if number in (len(begun),None): act(begun[-1])
        return real(*args)
    monkeypatch.setattr(trainings, 'train', _call)
    return begun

# Nobody can tell it was called

@pytest.mark.slow
@pytest.mark.parametrize('nm,first', [('awd_lstm',_nothing), ('scaled_lr',_after_training)])
def test_a_verification_cannot_be_noticed(nm, first):
    mock = partial(verify, bs=dict(awd_lstm=4).get(nm, 32), sizes=None, n_epoch=10)
    assert changes(plain_training(nm, first), training(learners[nm], first, mock))==[]

def failing(learn, error, event, number):
    "Let a training of `bs_verify` raise an exception"
    cb,plan = RaiseAt(event, error, range(1, 99)),plan_for(learn, 16, n_epoch=20)
    with pytest.MonkeyPatch.context() as m, pytest.raises(error, match='the one'):
        begun = at_training(m, number, lambda _: learn.add_cb(cb))
        try: learn.bs_verify(plan)
        finally: learn.remove_cb(cb)
    assert len(begun)==number

@pytest.mark.slow
@pytest.mark.parametrize('error,event,number', [(KeyboardInterrupt,'after_backward',1), (ValueError,'after_fit',2)])
def test_an_exception_in_any_training_leaves_nothing_behind(error, event, number):
    assert changes(plain_training('convnet', _nothing), training(convnet_learner, mock=partial(failing, error=error, event=event, number=number)))==[]

# What is trained

def test_today_s_and_the_planned_training_run_as_often_as_tells_something():
    "Four times each; the learner is as it was"
    learn = reg_learner()
    was,plan = picture(learn),plan_for(learn)
    v = learn.bs_verify(plan)
    assert v.planned is plan
    assert v.df.bs.tolist()==[4,8]*4
    assert v.df.run.tolist()==[1,1,2,2,3,3,4,4]
    assert v.verdict!='unknown'
    assert changes(was, picture(learn))==[]

def test_a_rate_is_planned_for_first(short):
    v = reg_learner().bs_verify(0.01, np.array([16,32]), n_runs=1, n_epoch=6)
    today = v.planned.facts.today
    assert (today.lr,today.n_epoch,today.has_n_epoch)==(0.01,6,True)
    assert set(v.df.bs)=={4,16,32,v.planned.bs}

def test_it_says_how_long_it_takes(capsys):
    learn = reg_learner(cbs=ProgressCallback())
    plan = plan_for(learn)
    with learn.no_logging(): learn.bs_verify(plan)
    secs = 4*(80*0.008+8*plan.n_epoch*0.016)
    assert f'bs_verify takes about {time_text(secs)}: 4 trainings as planned with each batch size of 4 and 8\n' in capsys.readouterr().out

# What it finds

def test_without_a_validation_set_the_training_loss_decides():
    dls = DataLoaders(DataLoader(regression(64, dtype=torch.float32), bs=4, num_workers=0), DataLoader([], bs=4, num_workers=0), device='cpu')
    v = verify(quiet_learner(dls, mlp(dtype=torch.float32), opt_func=Adam))
    assert v.df.valid_loss.isna().all()
    assert v.df.train_loss.notna().all()
    assert v.decided_by=='train_loss'

class NanAt(Callback):
    "The loss of a batch size is NaN while it is trained"
    def __init__(self, *sizes): self.sizes = sizes
    def after_loss(self):
        if self.training and batch_size(self.learn) in self.sizes: self.learn.loss = self.learn.loss_grad = self.learn.loss_grad*math.nan

def test_a_size_whose_loss_is_nan_once_is_out():
    "As its other runs were lucky; today's must have one"
    learn = reg_learner()
    plan = plan_for(learn)
    learn.add_cb(NanAt(16))
    with pytest.MonkeyPatch.context() as m:
        at_training(m, None, lambda o: setattr(learn.nan_at, 'sizes', [16] if o.run==2 else []))
        v = learn.bs_verify(plan, [16], n_runs=2)
    assert v.left_out==((16,'loss'),)
    assert v.table.bs.tolist()==[4,8]
    assert v.n_runs==3
    assert 'ended with a loss' in ' '.join(repr(v).split())
    learn.nan_at.sizes = [4]
    with pytest.raises(ValueError, match="Today's training, with batches of 4, must end with a loss that is finite"): learn.bs_verify(plan, n_runs=1)

def test_a_size_that_does_not_fit_is_out(monkeypatch):
    "It is tried once; that of today's must fit"
    too_large = [16]
    def _too_large(training):
        if training.fit.bs in too_large: raise torch.OutOfMemoryError('CUDA out of memory')
    begun = at_training(monkeypatch, None, _too_large)
    v = verify(reg_learner(), n_runs=2)
    assert v.left_out==((16,'memory'),)
    assert [o.fit.bs for o in begun]==[4,8,16,4,8,4,8]
    assert 'does not fit in memory' in ' '.join(repr(v).split())
    too_large += [4,8]
    with pytest.raises(torch.OutOfMemoryError): verify(reg_learner())

def _verified_on_rank(r):
    learn = reg_learner(128)
    with learn.distrib_ctx(cpu=True, sync_bn=False), learn.no_bar():
        plan = plan_for(learn, 16, n_epoch=2)
        was = picture(learn)
        v = learn.bs_verify(plan)
        return v.bs_now,v.verdict,v.bs,v.df.to_dict('list'),changes(was, picture(learn))

@pytest.mark.slow
@pytest.mark.xdist_group('ranks')
def test_ranks_verify_the_same():
    "By the seconds of the slowest, too"
    first,second = on_ranks(_verified_on_rank, 2)
    assert first==second
    assert first[0]==8
    assert first[1]!='unknown'
    assert first[3]['items'][0]==256
    assert first[-1]==[]

def test_what_fine_tune_takes_is_said_before_with_its_frozen_epochs(capsys):
    "A frozen step takes as long here, and only one of the validations is run"
    learn = reg_learner(splitter=two_groups)
    plan = plan_for(learn, how='fine_tune').at(8)
    device = replace(plan.facts.device, frozen=1., valid_time=7., times=((4,1.,0.),(8,1.,0.)))
    learn.add_cb(ProgressCallback())
    v = learn.bs_verify(replanned(plan, device=device), n_runs=1)
    assert v.table.steps.tolist()==[16+80,8*(plan.freeze_epochs+plan.n_epoch)]
    assert f"bs_verify takes about {time_text(v.table.steps.sum()+2*7)}" in capsys.readouterr().out

# What is refused

def at_rest(learn): return plan_for(learn, lr=0, noise=None)
def applied(learn):
    plan = plan_for(learn)
    plan.apply(learn)
    return plan

bad = [(lambda o: 'x', {}, TypeError, "`plan` must be a BatchPlan of learn.bs_find, or the learning rate to make one for, got 'x'"),
    (lambda o: 0.01, {}, TypeError, r'`n_epoch` must be given with a learning rate, got 0.01 alone: write learn.bs_verify\(0.01, n_epoch=5\)'),
    (lambda o: None, {}, TypeError, r'got None alone: write learn.bs_verify\(None, n_epoch=5\)'),
    (lambda o: 0.01, dict(sizes=5), TypeError, '`n_epoch` must be given with a learning rate'), # Of habit, for five epochs
    (lambda o: 0.01, dict(n_epoch=4.5), TypeError, 'whole number of epochs, got 4.5'),
    (plan_for, dict(n_epoch=5), TypeError, '`n_epoch` must be left out with a plan, which is for its own number of epochs, got 5'),
    (plan_for, dict(sizes=16), TypeError, '`sizes` must be a list of batch sizes in items, as .* got 16'),
    (plan_for, dict(sizes=[]), TypeError, '`sizes` must be a list'),
    (plan_for, dict(sizes=[8,1.5]), TypeError, '`sizes` must be a whole number of items, got 1.5'),
    (plan_for, dict(sizes=[8,640]), ValueError, '640'),
    (plan_for, dict(n_runs=0), ValueError, '`n_runs` must be at least 1 training, got 0'),
    (partial(plan_for, bs=4), {}, ValueError, r"The plan stays at today's 4, so there is no other training to compare with: give sizes=\[8\]"),
    (partial(plan_for, bs=4), dict(sizes=[4]), ValueError, "The plan stays at today's 4"),
    (partial(plan_for, bs=4, n_epoch=2), {}, ValueError, "to compare with: make the loader's batches smaller, or make a plan for more than 2 epochs"),
    (partial(plan_for, n_epoch=2), dict(sizes=[64]), ValueError, 'must have 10 optimizer steps or more, got 64 with fewer'),
    (partial(plan_for, n_epoch=None), {}, ValueError, r'must be for a number of epochs, got one without: .* learn.bs_find\(0.01, n_epoch=5\)'),
    (lambda o: plan_for(reg_learner(bs=8), 16), {}, ValueError, "must be for this learner's batches of 4 items, got one for batches of 8: make a plan"),
    (lambda o: plan_for(reg_learner(opt_func=SGD)), {}, ValueError, "This plan is for SGD"),
    (at_rest, {}, ValueError, 'must be for a training, got one for a learning rate of 0')]

@pytest.mark.parametrize('make,kwargs,error,match', bad, ids=range(len(bad)))
def test_bad_arguments_are_refused(make, kwargs, error, match, short):
    "Before anything has changed"
    learn = reg_learner()
    plan,was = make(learn),picture(learn)
    with pytest.raises(error, match=match): learn.bs_verify(plan, **kwargs)
    assert changes(was, picture(learn))==[]

def test_an_applied_plan_is_to_be_taken_back_first():
    learn = reg_learner()
    plan = applied(learn)
    with pytest.raises(ValueError, match=r'got one for batches of 4: call plan.undo\(learn\) first'): learn.bs_verify(plan)
    plan.undo(learn)
    assert learn.bs_verify(plan, n_runs=1).df.bs.tolist()==[4,8]

@pytest.mark.parametrize('how', ['fit_one_cycle','fine_tune'])
def test_pictures_are_normalised_as_planned(how):
    "Trainings with larger micro-batches than today's 8 have BatchNorm see as few items, in frozen epochs too"
    class Look(Callback):
        def before_batch(self):
            if self.training: seen.add((len(self.x),hasattr(self.learn, 'ghost_batch_norm')))
    learn = convnet_learner()
    plan = plan_for(learn, 16, n_epoch=12, how=how) # Fewer make too few steps to be planned
    learn.add_cb(Look())
    seen = set()
    learn.bs_verify(plan, n_runs=1)
    assert seen=={(8,False),(16,True)}
