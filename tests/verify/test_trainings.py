"Short trainings of `bs_verify`: which there are, how long and at which rate, and the losses of one"
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.optimizer import SGD
from fastai_bs.all import GradAccum, ScaledLR
from fastai_bs.finder.cycle import rate_at
from fastai_bs.finder import options
from fastai_bs.finder.facts import Device
from fastai_bs.finder.options import today_as_is
from fastai_bs.learner.loop import callback_of
from fastai_bs.verify.compare import least_dof, parts
from fastai_bs.verify.trainings import short_training, Trials
from helpers import changes, picture, regression
from plans import secs
from verify.test_bs_verify import at_trial, interrupt, reg_learner, verify

pytestmark = [pytest.mark.usefixtures('short','short_find'), pytest.mark.filterwarnings('ignore')]

# Which there are

class Spy(Callback):
    "What each training does: items, rates and batches of it"
    order,run_valid = 70,False
    fits = []
    def before_fit(self):
        accum = callback_of(self.learn, GradAccum)
        Spy.fits.append(dict(n_acc=accum.sizes.n_acc(self.learn, 0) if accum else 1, bs=self.dls.train.bs, lrs=[], items=[]))
    def before_batch(self):
        Spy.fits[-1]['lrs'].append(self.opt.hypers[-1]['lr'])
        Spy.fits[-1]['items'] += self.yb[0][:,0].tolist()

@pytest.mark.parametrize('cbs,bs', [((),4), ((GradAccum(2),ScaledLR(4)),8)], ids=['plain','accumulated'])
def test_trials_are_annealed_from_here_at_the_rule_s_rates(cbs, bs):
    Spy.fits = []
    learn = reg_learner(cbs=[*cbs,Spy()], opt_func=partial(SGD, mom=0.9))
    v = verify(learn, lr=1e-4, sizes=[bs,2*bs], rates=(0.5,2), n_epoch=12)
    assert v.planned.at(2*bs).scaled_lr>v.planned.lr
    fits = [o for o in Spy.fits if max(o['lrs'], default=0)>0][-len(v.df):] # A validation begins a fit, too
    trials,first_items = Trials(learn, v.planned, 12, 'time', v.tried),{}
    for row,fit in zip(v.df.to_dict('records'), fits):
        p,n = v.planned.at(row['bs']),row['n_acc']
        assert (row['micro_bs'],n)==(p.micro_bs,p.n_acc)==(fit['bs'],fit['n_acc'])
        assert row['items']==len(fit['items'])
        assert row['lr']==pytest.approx(p.scaled_lr*row['factor'])
        assert row['steps']==trials.n_steps(row['bs'], row['part'])
        rates = row['lr']*np.array([rate_at(i/row['steps']) for i in range(row['steps'])])
        assert np.allclose(fit['lrs'][::n][:row['steps']], rates, rtol=1e-4) # Windows tile the epoch
        first_items.setdefault(row['run'], set()).add(tuple(fit['items'][:8]))
    assert set(v.df.factor)=={0.5,2.}
    assert set(v.df.part)<=set(parts)
    assert all(len(o)==1 for o in first_items.values())  # All arms alike, each run anew
    assert len(set.union(*first_items.values()))==len(first_items)>1

def test_trials_of_equal_time_take_as_long(monkeypatch):
    monkeypatch.setattr('fastai_bs.finder.bs_find.device_of', lambda *args: Device(times=secs(4, 8, 16, 32), spread=0.01)) # The same on any machine
    v = verify(reg_learner(256), sizes=[8,16,32], rates=(1,3), n_epoch=4, n_runs=2)
    whole,time = v.df[v.df.part==1],v.n_epoch*today_as_is(v.planned.facts).epoch_time
    step_time = {o.bs: o.step_time for o in v.planned.options}
    for o in whole.itertuples(): assert o.steps*step_time[o.bs]==pytest.approx(time, abs=step_time[o.bs]*(1+4*math.ceil(o.items/256)))
    assert whole.bs.nunique()==3
    assert 4 in whole.bs.values
    assert set(whole.run)=={1,2,3}
    assert v.spread.dof>=least_dof
    assert v.verdict!='unknown'
    assert set(v.df[v.df.part<1].run)=={0}
    assert v.df[v.df.part==1/16].groupby('bs').factor.nunique().tolist()==[2]*4
    assert len(v.df[v.df.part==1/4])==4
    steps = v.df.groupby(['bs','part']).steps.first().unstack()
    for part in parts[:2]: assert np.allclose(steps[part].dropna(), (part*steps[1.]).loc[steps[part].dropna().index].fillna(steps[part]), atol=1)

def test_trials_of_equal_items_see_as_many():
    v = verify(reg_learner(), n_epoch=9.5, n_runs=2, equal='items')
    assert set(v.df.part)=={1.}
    assert set(v.df['items'])=={608}
    assert v.df.bs.tolist()==[4,8,16]*3
    assert (v.n_epoch,v.planned.facts.today.n_epoch)==(9.5,10) # A plan is for whole epochs
    assert v.critical_bs in (4,8,16)
    assert v.critical_range[0]<=v.critical_bs<=v.critical_range[1]
    assert v.verdict!='unknown'

def test_trials_of_a_plan_are_trained_as_planned(monkeypatch):
    "Today's training and the plan's, as often as tells something: its rate, its epochs and its weight decay, whole trainings only"
    ran = at_trial(monkeypatch, 0, interrupt)
    monkeypatch.setattr(options, '_same_loss_epochs', lambda facts, noise, bs, epoch: 10. if bs==facts.today.bs else 14.)
    learn = reg_learner()
    was = picture(learn)
    v = verify(learn, sizes=[16], n_epoch=10, n_runs=2, rates=None, equal='plan')
    plan = v.planned.at(16)
    expected = {(4,160,0.01,v.planned.facts.today.wd),(16,4*plan.n_epoch,plan.scaled_lr,plan.wd)}
    assert plan.n_epoch==14
    assert {(o.micro_bs*o.n_acc,o.n_steps,o.lr,o.wd) for o in ran}==expected
    assert len(v.df)==8
    assert (v.df.part==1).all()
    assert v.verdict!='unknown'
    assert v.rates==(1,)
    assert v.bs in (4,16)
    assert v.epochs==v.plan.n_epoch
    assert changes(was, picture(learn))==[]

# One training

def test_the_training_loss_is_that_of_the_last_tenth():
    learn,losses = reg_learner(),[]
    class Losses(Callback):
        run_valid = False
        def after_loss(self): losses.append(self.learn.loss.item())
    learn.add_cb(Losses())
    t = short_training(learn, 4, 1, 0.01, 100, 0, 20)
    assert t.train_loss==pytest.approx(np.mean(losses[90:]), rel=1e-6)
    assert t.items==400

def test_validation_is_of_items_from_all_over_the_set_at_the_end():
    "Sorted by class, as it may be; and of the model as it is then"
    learn,seen,other = reg_learner(valid=regression(1000, dtype=torch.float32, seed=2)),[],reg_learner()
    class Seen(Callback):
        def before_batch(self): seen.append((self.training,self.yb[0][:,0].tolist()))
        def after_validate(self): other.model.load_state_dict(self.learn.model.state_dict())
    learn.add_cb(Seen())
    t = short_training(learn, 4, 1, 0.01, 40, 0, 100) # Two and a half epochs, without a validation on the way
    trains = [o for o,_ in seen]
    assert trains==sorted(trains, reverse=True)
    assert sum(trains)==40
    order = [y[0].item() for _,y in learn.dls.valid.dataset]
    at = [order.index(y) for is_training,items in seen if not is_training for y in items]
    assert len(at)==100
    assert min(at)==0
    assert max(at)==999
    assert max(np.diff(at))<=11
    x,y = (torch.stack(o) for o in zip(*(learn.dls.valid.dataset[i] for i in at)))
    assert t.valid_loss==pytest.approx(nn.MSELoss()(other.model(x), y).item(), rel=1e-5)
