"`learn.bs_verify`: that nobody can tell it was called, interrupts, failures, what it finds and what it refuses"
import inspect
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD

from fastai_bs.all import batch_size, BatchPlan, GradAccum, ScaledLR, sqrt_scaling
from fastai_bs.finder.cycle import rate_at
from fastai_bs.finder import bs_find
from fastai_bs.finder.facts import Trial
from fastai_bs.verify import trainings
from helpers import changes, loaders, mlp, picture, quiet_learner, RaiseAt, regression, set_seed
from gloo_ranks import on_ranks
from test_bs_find import _after_training, _nothing, convnet_learner, learners, plain_training, training

pytestmark = [pytest.mark.usefixtures('short','short_find'), pytest.mark.filterwarnings('ignore')]

def verify(learn, **kwargs): return learn.bs_verify(**{**dict(lr=0.01, n_epoch=5, sizes=[8,16], rates=(1,), n_runs=1), **kwargs})

def reg_learner(n=64, bs=4, valid=None, opt_func=Adam, cbs=None, **kwargs):
    dls = loaders(regression(n, dtype=torch.float32), bs, valid=valid or regression(20, dtype=torch.float32, seed=1), shuffle=True, **kwargs)
    return quiet_learner(dls, mlp(dtype=torch.float32), opt_func=opt_func, cbs=cbs)

def at_trial(monkeypatch, number, act):
    "Call `act` before training `number` (`None`: each) that `bs_verify` runs; return the list of the arguments of all that began"
    real,begun = trainings.short_training,[]
    def _call(*args):
        begun.append(SimpleNamespace(**inspect.signature(real).bind(*args).arguments))
        if number in (len(begun),None): act(begun[-1])
        return real(*args)
    monkeypatch.setattr(trainings, 'short_training', _call)
    return begun

def interrupt(_): raise KeyboardInterrupt

# Nobody can tell it was called

@pytest.mark.slow
@pytest.mark.parametrize('nm,first', [('awd_lstm',_nothing), ('scaled_lr',_after_training)])
def test_a_verification_cannot_be_noticed(nm, first):
    mock = partial(verify, sizes=[2,4], n_epoch=3) if nm=='awd_lstm' else partial(verify, sizes=[16,32], n_epoch=10)
    assert changes(plain_training(nm, first), training(learners[nm], first, mock))==[]

def failing(learn, error, event, trial):
    "Let a training of `bs_verify` raise an exception"
    cb = RaiseAt(event, error, range(1, 99))
    with pytest.MonkeyPatch.context() as m, pytest.raises(error, match='the one'):
        begun = at_trial(m, trial, lambda _: learn.add_cb(cb))
        try: verify(learn)
        finally: learn.remove_cb(cb)
    assert len(begun)==trial

@pytest.mark.slow
@pytest.mark.parametrize('error,event,trial', [(KeyboardInterrupt,'after_backward',1), (ValueError,'after_fit',2)])
def test_an_exception_in_any_trial_leaves_nothing_behind(error, event, trial):
    "Before two sizes were trained for the whole length an interrupt passes on"
    assert changes(plain_training('convnet', _nothing), training(convnet_learner, mock=partial(failing, error=error, event=event, trial=trial)))==[]

@pytest.mark.parametrize('trial,sizes', [(3,[4,8]),(6,[4,8,16,4,8])])
def test_an_interrupt_keeps_what_was_trained(trial, sizes, monkeypatch):
    begun = at_trial(monkeypatch, trial, interrupt)
    learn = reg_learner()
    was = picture(learn)
    v = verify(learn, equal='items', n_runs=2)
    assert len(begun)==trial
    assert v.interrupted
    assert v.df.bs.tolist()==sizes
    assert 'interrupted' in v.advice
    assert v.n_runs==1
    assert v.left_out==(((16,'interrupt'),) if trial==3 else ())
    assert changes(was, picture(learn))==[]

@pytest.mark.parametrize('equal,trial', [('items',Trial()),('plan',Trial(4))])
def test_trials_find_out_which_rates_hold(equal, trial, monkeypatch):
    "So all sizes begin with the rule's rate, whatever `bs_find` has tried; but a plan is trained as it is"
    monkeypatch.setattr(bs_find, 'try_sizes', lambda learn, facts: replace(facts, trial=Trial(4)))
    assert verify(reg_learner(), equal=equal, sizes=[4,8]).planned.facts.trial==trial

# What is advised

@pytest.mark.parametrize('equal', ['time','items','plan'])
def test_what_is_advised_was_tried(equal):
    "Its rate and its weight decay; and today's training has the rate that a ScaledLR on the learner gives it"
    learn = reg_learner(cbs=ScaledLR(1, sqrt_scaling), opt_func=partial(Adam, wd=0.3))
    with pytest.MonkeyPatch.context() as m:
        ran = at_trial(m, None, lambda _: None)
        v = verify(learn, sizes=[16], n_epoch=20, n_runs=2, equal=equal)
    assert v.planned.facts.today.lr_factor==2
    for bs in (4,16):
        vars(v)['bs'] = bs # Whatever was found
        plan = v.plan
        (lr,wd), = {(o.lr,o.wd) for o in ran if o.micro_bs*o.n_acc==bs}
        assert plan.facts.today.has_n_epoch==(equal=='plan') # The epochs of a trial are not planned
        assert plan.wd==(0.3 if wd is None else wd)
        assert plan.lr==(0.01 if bs==4 else 0.02)
        assert plan.scaled_lr==lr>=0.02

def test_a_plan_that_stays_has_no_size_to_try(monkeypatch):
    monkeypatch.setattr(BatchPlan, 'bs', property(lambda self: self.facts.today.bs))
    with pytest.raises(ValueError, match="The plan stays at today's 4, so there is no other size to try"): verify(reg_learner(), sizes=None, equal='plan')

# What it finds

def test_without_a_validation_set_the_training_loss_decides():
    dls = DataLoaders(DataLoader(regression(64, dtype=torch.float32), bs=4, num_workers=0), DataLoader([], bs=4, num_workers=0), device='cpu')
    v = verify(quiet_learner(dls, mlp(dtype=torch.float32), opt_func=Adam))
    assert v.df.valid_loss.isna().all()
    assert v.df.train_loss.notna().all()
    assert v.decided_by=='train_loss'

class NanAt(Callback):
    "The loss of a batch size is NaN while it is trained, in the trials alone"
    def __init__(self, *sizes): self.sizes = sizes
    def after_loss(self):
        is_mock = hasattr(self.learn, 'mock_windows')
        if self.training and not is_mock and batch_size(self.learn) in self.sizes and self.opt.hypers[-1]['lr']>0: self.learn.loss = self.learn.loss*math.nan

def test_a_size_whose_loss_is_nan_is_out():
    v = verify(reg_learner(cbs=NanAt(16)))
    assert v.left_out==((16,'loss'),)
    assert set(v.table.bs)=={4,8}
    assert 'of it ended with a loss' in v.advice

def test_a_size_that_does_not_fit_is_out(monkeypatch):
    def _too_large(training):
        if training.micro_bs*training.n_acc==16: raise torch.OutOfMemoryError('CUDA out of memory')
    at_trial(monkeypatch, None, _too_large)
    v = verify(reg_learner())
    assert v.left_out==((16,'memory'),)
    assert 'does not fit in memory' in v.advice

def _verified_on_rank(r):
    learn = reg_learner(256)
    with learn.distrib_ctx(cpu=True, sync_bn=False), learn.no_bar():
        was = picture(learn)
        v = learn.bs_verify(1e-2, n_epoch=2, sizes=[16], rates=(1,), equal='items')
        return v.bs_now,v.verdict,v.df.valid_loss.tolist(),set(v.df['items']),changes(was, picture(learn))

@pytest.mark.slow
@pytest.mark.xdist_group('ranks')
def test_ranks_verify_the_same():
    first,second = on_ranks(_verified_on_rank, 2)
    assert first==second
    assert first[0]==8
    assert first[1]!='unknown'
    assert first[-1]==[]
    assert min(first[3])==max(first[3])

@pytest.mark.slow
def test_the_critical_batch_size_of_a_noisy_quadratic_is_found(short_find, monkeypatch):
    "Whose losses are known, by the moments of the weights along the one-cycle"
    monkeypatch.setattr(Learner, 'bs_find', short_find)
    h,sizes = torch.logspace(0, -1.5, 10),[16,64,128,256]
    x = torch.randn(3000, 10, generator=torch.Generator().manual_seed(0))
    class Quad(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((10,), 3.))
        def forward(self, x): return self.w-x
    def loss(d, y): return (0.5*h*d**2).sum(1).mean()
    set_seed(0)
    learn = quiet_learner(loaders([(o,torch.zeros(1)) for o in x-x.mean(0)], 16, shuffle=True), Quad(), loss_func=loss, opt_func=partial(SGD, mom=0.),
                          cbs=GradAccum(1, count=lambda learn: len(learn.x)))
    v = learn.bs_verify(0.3, n_epoch=1, sizes=sizes, rates=(1,3), equal='items')
    def _exact_loss(bs, lr):
        n,hs = round(3000/bs),h.double().numpy()
        mean,var,losses = np.full(10, 3.),np.zeros(10),[]
        for i in range(n):
            losses.append((0.5*hs*(mean**2+var+1)).sum())
            r = lr*rate_at(i/n)
            mean,var = (1-r*hs)*mean,(1-r*hs)**2*var+r**2*hs**2/bs
        return np.mean(losses[min(math.ceil(0.9*n), n-1):])
    best = critical = math.inf
    for bs in sizes:
        exact = min(_exact_loss(bs, lr) for lr in set(v.df.lr[v.df.bs==bs]))
        if exact<=1.01*best: critical = bs
        best = min(best, exact)
    assert critical/2<=v.critical_bs<=2*critical
    assert set(v.df[v.df.part==1].bs)==set(sizes)

# What is refused

bad = [(dict(lr=[0.,1.]), ValueError, '`lr` must be above 0'), (dict(n_epoch='x'), TypeError, '`n_epoch` must be'),
    (dict(n_epoch=0.5), ValueError, 'take n_epoch=2.5 or more'), (dict(n_epoch=4.5, equal='plan'), TypeError, 'whole number of epochs, got 4.5'),
    (dict(sizes=16), TypeError, '`sizes` must be a list'),
    (dict(sizes=[8,1.5]), TypeError, '`sizes` must be a whole number of items, got 1.5'),
    (dict(sizes=[8,640]), ValueError, '`sizes` must be at most the 64 items'),
    (dict(rates=()), TypeError, '`rates` must be a list'), (dict(rates=(1,0)), ValueError, '`rates` must be factors'),
    (dict(equal='steps'), ValueError, "`equal` must be 'time', 'items' or 'plan', got 'steps'"),
    (dict(n_runs=0), ValueError, '`n_runs` must be at least 1 training, got 0')]

@pytest.mark.parametrize('kwargs,error,match', bad, ids=[str(o[0]) for o in bad])
def test_bad_arguments_are_refused(kwargs, error, match):
    learn = reg_learner()
    was = picture(learn)
    with pytest.raises(error, match=match): verify(learn, **kwargs)
    assert changes(was, picture(learn))==[]

def test_a_loss_that_is_nan_at_all_sizes_is_an_error():
    with pytest.raises(ValueError, match='No training of the batch sizes 4, 8, 16 ended with a loss that is finite'): verify(reg_learner(cbs=NanAt(4, 8, 16)))
