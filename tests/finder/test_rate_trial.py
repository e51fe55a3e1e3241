"A short training at another rate: it leaves no trace, tells a rate that diverges, and has a say in the plan"
import math
from dataclasses import replace

import numpy as np
import pytest
from torch import nn
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import Adam

from fastai_bs.schedule.scaled_lr import rates, rule_name
from fastai_bs.finder import bs_find as finder
from fastai_bs.finder import rate_trial
from fastai_bs.all import GradAccum, linear_scaling, ScaledLR
from fastai_bs.finder.advice import cautions
from fastai_bs.finder.facts import Device, RateTrial, unfrozen_lr
from fastai_bs.finder.options import option_of
from fastai_bs.finder.rate_trial import _factor_that_holds, cycle_steps, losses_along, LossesOfFifths
from fastai_bs.utils.text import num
from helpers import changes, loaders, mlp, momentum_sgd, picture, quiet_learner, regression
from plans import facts_of, secs

pytestmark = pytest.mark.usefixtures('short')

def without_valid():
    return DataLoaders(*(DataLoader(o, bs=4, shuffle=True, num_workers=0) for o in (regression(400),[])), device='cpu')
def learner(cbs=None, dls=None, opt_func=Adam):
    return quiet_learner(dls or loaders(regression(400), 4, shuffle=True), mlp(), opt_func=opt_func, cbs=cbs)
def find(learn, lr=1e-3, **kwargs): return learn.bs_find(lr, num_it=60, n_batch=2, show_plot=False, **kwargs)

own = {'nothing': lambda: [], 'its own': lambda: [GradAccum(2),ScaledLR(4, linear_scaling)]}

class Count(Callback):
    "Micro-batches, optimizer steps and validations"
    order = 90
    def __init__(self): self.seen = dict(micro=0, steps=0, valid=0)
    def before_batch(self): self.seen['micro' if self.training else 'valid'] += 1
    def after_step(self): self.seen['steps'] += 1

@pytest.mark.parametrize('cbs,n_steps', [(own['nothing'],1),(own['its own'],7)])
def test_a_short_cycle_leaves_the_learner_as_it_was(cbs, n_steps):
    "After so many steps of `n_acc` micro-batches, without a validation"
    learn = learner([*cbs(),Count()])
    learn.fit(1, 1e-3)
    learn.count.seen = dict(micro=0, steps=0, valid=0)
    seen,was = learn.count.seen,picture(learn)
    assert math.isfinite(losses_along(learn, 8, 3, 1e-3, n_steps)[-1])
    n = dict(seen)
    seen.update(micro=0, steps=0, valid=0)
    assert n in ({'micro': 3*n_steps, 'steps': n_steps, 'valid': 0}, seen)
    assert changes(was, picture(learn))==[]

@pytest.mark.parametrize('n_steps', [1,3,5,7,20])
@pytest.mark.parametrize('n_acc', [1,2])
def test_losses_of_each_fifth(n_steps, n_acc):
    "Means over the micro-batches that have a loss; at a rate of 0 all weights are the first ones"
    seen = []
    def _loss(pred, y):
        loss = nn.functional.mse_loss(pred, y)
        if len(seen)%7==3: loss = loss*math.nan
        seen.append(loss.item())
        return loss.reshape(n_acc*[1]) # Some losses have a dimension
    got = losses_along(quiet_learner(loaders(regression(80), 4), mlp(), _loss), 4, n_acc, 0., n_steps)
    assert len(seen)==n_acc*n_steps
    fifths = [math.ceil(5*(i//n_acc+1)/n_steps)-1 for i in range(len(seen))] # The first step beyond a fifth begins the next one
    for k in range(5):
        of_fifth = [o for o,j in zip(seen, fifths) if j==k and o==o]
        assert got[k]==pytest.approx(np.mean(of_fifth) if of_fifth else math.nan, nan_ok=True)

def test_a_loss_that_is_not_finite_is_refused():
    def _loss(pred, y): return (pred-y).square().mean()*math.nan
    assert _factor_that_holds(quiet_learner(loaders(regression(40), 4), mlp(), _loss), 4, 1, 1e-3, [2.], 5) is None

@pytest.mark.parametrize('lr,factors,found', [(1e-3,[2.,30.],30.),(1e-3,[30.,1e5],30.),(0.03,[1e4,1e5],None)])
def test_a_rate_that_diverges_is_refused(lr, factors, found): assert _factor_that_holds(learner(), 8, 2, lr, factors, 20)==found

scripted = [({1: [1.], 2: [1.], 4: [0.9]},4,3),({1: [1.], 2: [1.01], 4: [0.97]},2,3), # Clearly better than at the rule's rate, or not
    ({1: [1.,1.], 2: [1.1,0.9], 4: [0.1]},2,4),({1: [1.,1.], 2: [1.1,1.], 4: [0.1]},None,4), # Another order of the items; near the edge no higher one is tried
    ({1: [1.], 2: [1.11], 4: [0.1]},None,2),({1: [1.], 2: [math.inf], 4: [0.1]},None,2),({1: [1.], 2: [0.9], 4: [math.inf]},2,3), # Fails by more
    ({1: [-1.], 2: [-1.01], 4: [-1.2]},4,3),
    # With the loss around the peak of the rate
    ({1: [1.,1.], 2: [(0.5,1.06),(0.5,1.05)], 4: [0.1]},None,4),({1: [1.,1.], 2: [(0.5,1.06),(0.5,1.03)], 4: [0.1]},2,4),
    ({1: [1.], 2: [(0.5,1.11)], 4: [0.1]},None,2),({1: [1.], 2: [(0.5,1.04)], 4: [(0.1,1.1)]},2,3),
    ({1: [1.], 2: [(0.5,math.nan)], 4: [(0.1,math.nan)]},4,3)]

@pytest.mark.parametrize('losses,found,n', scripted)
def test_which_factor_holds(losses, found, n, monkeypatch):
    "By the losses of the short cycles at each factor, in the first order and in the second"
    asked = []
    def _losses_along(learn, micro_bs, n_acc, lr, n_steps, seed=None):
        assert (micro_bs,n_acc,n_steps)==(8,2,20)
        asked.append((lr,seed))
        o = losses[round(lr/1e-3)][0 if seed is None else 1]
        end,around_peak = o if isinstance(o, tuple) else (o,1.)
        return np.array([3.,around_peak,2.,2.,end])
    monkeypatch.setattr(rate_trial, 'losses_along', _losses_along)
    assert _factor_that_holds(None, 8, 2, 1e-3, [2.,4.], 20)==found
    assert len(asked)==len(set(asked))==n
    if n==4: # Without a second order
        asked.clear()
        assert _factor_that_holds(None, 8, 2, 1e-3, [2.,4.], 20, again=False) is None
        assert len(asked)==2

# In a plan

@pytest.fixture
def known(monkeypatch):
    "A noise scale and a device for which larger batches are faster, whatever was measured"
    real = finder.measured_of
    def _measured_of(*args): return replace(real(*args), noise_scale=200., ci=(150.,260.), n_windows=30, loss_rose=False)
    monkeypatch.setattr(finder, 'measured_of', _measured_of)
    monkeypatch.setattr(finder, 'device_of', lambda *args: Device(times=secs(4, 8, 16, 32), spread=0.01))

@pytest.fixture
def asked(monkeypatch):
    "Sizes whose rate was tried; each of `answers` to one of them, then the last"
    sizes = []
    def _answers(holds):
        def _factor_that_holds(learn, micro_bs, n_acc, lr, factors, n_steps, again):
            assert again==(not sizes)
            assert 1<factors[0]<factors[-1]
            assert len(factors)==2
            assert n_steps>=1
            sizes.append(micro_bs*n_acc)
            return {True: factors[0], False: None, 'low': factors[1]}[holds(len(sizes))]
        monkeypatch.setattr(rate_trial, '_factor_that_holds', _factor_that_holds)
        return sizes
    return _answers

def test_sizes_at_which_the_rate_fails_are_out(known, asked):
    "Each is asked for once, in descending order; after two today's size stays, or a smaller one"
    sizes = asked(lambda n: False)
    plan = find(learner(), n_epoch=20)
    assert len(sizes)==rate_trial.most_trials==2
    assert plan.facts.trial.gave_up
    assert plan.table.bs.max()==plan.facts.today.bs
    assert sizes==sorted(set(sizes), reverse=True)
    assert plan.facts.trial.failed==sizes[-1]>plan.bs
    assert plan.table.bs.max()<plan.facts.trial.failed
    assert plan.facts.trial.held==plan.facts.today.bs>=plan.bs
    assert rule_name(plan.at(2*plan.facts.today.bs).rule)=='no_scaling'

def test_a_smaller_size_at_which_the_rate_holds(known, asked):
    sizes = asked(lambda n: n==2)
    plan = find(learner(), n_epoch=20)
    assert len(sizes)==2
    assert not plan.facts.trial.gave_up
    assert (plan.facts.trial.failed,plan.facts.trial.held)==tuple(sizes)
    assert plan.bs==sizes[1]
    assert rule_name(plan.rule)=='adam_gain'
    gain = (200/4+1)/(200/plan.bs+1)
    assert plan.scaled_lr==pytest.approx(1e-3*min(gain**0.5*(1+max(0, 2-plan.bs/4/gain)/5), gain**(2/3)))
    assert not plan.facts.trial.low

@pytest.mark.parametrize('reach', [1.,0.01])
def test_epochs_that_are_saved_make_no_rate_low(reach, monkeypatch):
    "32 items need 1.4 times the epochs of 4: steps enough for a low rate, also where a batch reaches little and no epoch more is planned"
    tried = []
    monkeypatch.setattr(rate_trial, '_factor_that_holds', lambda learn, micro_bs, n_acc, lr, factors, *_, **kwargs: tried.append(factors) or factors[0])
    facts = facts_of(4, noise_scale=60., ci=(50.,70.), times=secs(4, 32), n_epoch=20, n_train=4000, reach=reach, growth=0.5)
    trial = rate_trial.try_rate(learner(), facts)
    assert trial.held==32
    assert option_of(facts, facts.noise, 32).n_epoch==(20 if reach<1 else 29)
    assert [len(o) for o in tried]==[1]
    assert not trial.low

@pytest.mark.parametrize('n_epoch,n_steps', [(20,30), (1,16), (0.5,8)])
def test_a_short_cycle_is_no_longer_than_the_training(n_epoch, n_steps):
    "Else as long as 65 of today's steps, 20 at least: 10.4 and 22.8 ms with 4 and 128 items"
    facts = facts_of(4, noise_scale=1e5, ci=(9e4,2e5), times=secs(4, 128), n_epoch=n_epoch, n_train=2000, has_n_epoch=False)
    assert cycle_steps(facts, option_of(facts, facts.noise, 128))==n_steps

@pytest.mark.parametrize('kwargs,lr', [(dict(lr=0.01, lr_factor=3.),0.03), (dict(lr=0.01, freeze_epochs=1, frozen=0.005),unfrozen_lr(0.01)),
                                       (dict(lr=0.01, adam=False, sums=True),0.01/8)])
def test_a_rate_is_tried_from_that_which_trains_today(kwargs, lr, monkeypatch):
    "Also where a ScaledLR scales it, `fine_tune` takes another, or the loss is a sum"
    tried = []
    monkeypatch.setattr(rate_trial, '_factor_that_holds', lambda learn, micro_bs, n_acc, lr, *args, **kwargs: tried.append(lr))
    rate_trial.try_rate(learner(), facts_of(4, noise_scale=60., ci=(50.,70.), times=secs(4, 32), n_epoch=20, n_train=4000, **kwargs))
    assert rates(tried[0])==pytest.approx(rates(lr))

def test_a_rate_that_is_low(known, asked):
    "Grows by the gain itself, and is told first"
    sizes = asked(lambda n: 'low')
    plan = find(learner(), n_epoch=20)
    factor = (200/4+1)/(200/plan.bs+1)
    assert len(sizes)==1
    assert plan.facts.trial.low
    assert (plan.facts.trial.held,rule_name(plan.rule))==(plan.bs,'adascale_gain')
    assert plan.scaled_lr==pytest.approx(1e-3*factor)
    assert next(cautions(plan))==(
        f"Your rate looks low: in a short training the loss fell faster at {num(factor)} times that rate. Find it again, for example by lr_find.")
    smaller,larger = plan.at(plan.bs//2),plan.at(2*plan.bs)
    assert rule_name(smaller.rule)=='adascale_gain'  # What was not tried is not advised
    assert rule_name(larger.rule)=='no_scaling'

@pytest.mark.parametrize('opt_func', [Adam,momentum_sgd])
def test_where_today_s_size_stays_no_higher_rate_is_advised(opt_func, known, asked, monkeypatch):
    monkeypatch.setattr(finder, 'device_of', lambda *args: Device(times=tuple((bs,0.01*bs,0.) for bs in (4, 8, 16, 32)), spread=0.01))
    sizes = asked(lambda n: True)
    plan = find(learner(opt_func=opt_func), n_epoch=20)
    assert sizes==[]
    assert plan.verdict=='stay'
    assert rule_name(plan.at(16).rule)=='no_scaling'
    assert (plan.table.lr==plan.lr).all()

@pytest.mark.parametrize('opt_func,rule', [(Adam,'no_scaling'),(momentum_sgd,'adascale_gain')])
def test_with_fixed_weights_no_rate_is_tried(opt_func, rule, known, asked):
    sizes = asked(lambda n: True)
    plan = find(learner(opt_func=opt_func), lr=0)
    assert sizes==[]
    assert plan.bs>plan.facts.today.bs
    assert plan.facts.trial==RateTrial()
    assert rule_name(plan.rule)==rule

@pytest.mark.parametrize('cbs,dls,error', [(own['nothing'],without_valid,None),(own['its own'],None,KeyboardInterrupt)])
def test_nobody_can_tell_that_a_rate_was_tried(cbs, dls, error, known, monkeypatch):
    "Also where it was cut off"
    was_after_loss,n = LossesOfFifths.after_loss,[]
    def _after_loss(self):
        n.append(1)
        if error and len(n)==5: raise error('the one')
        was_after_loss(self)
    monkeypatch.setattr(LossesOfFifths, 'after_loss', _after_loss)
    learn = learner(cbs(), dls and dls())
    was = picture(learn)
    if error:
        with pytest.raises(error, match='the one'): find(learn, n_epoch=20)
    else: assert find(learn, n_epoch=20).facts.trial!=RateTrial()
    assert changes(was, picture(learn))==[]
    assert n
