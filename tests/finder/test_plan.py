"`BatchPlan`: what a user reads of a choice, and that all of it follows from one number"
import dataclasses
import json
import math

import numpy as np
import pytest
from fastcore.foundation import L
from hypothesis import given, settings
from fastai_bs.all import GradAccum, ScaledLR
from fastai_bs.finder.advice import cautions
from fastai_bs.finder.facts import Trial
from fastai_bs.finder.formulas import whole_epochs
from fastai_bs.schedule.scaled_lr import rates, scale_lr
from plans import for_adam, gain, plan_of, plans, readings, replanned, secs

inf,nan = math.inf,math.nan
def approx(v): return pytest.approx(v, rel=1e-12, abs=0, nan_ok=True)

five = secs(25, 50, 100, 200, 400) # With them 100 items are the fastest at a noise scale of 100: (100*0.01/0.0001)**0.5

def fixed(noise_scale=100., ci=(80.,130.), bs=100, **kwargs):
    "A plan for SGD at the present weights, without step times"
    return plan_of(bs, **{**dict(noise_scale=noise_scale, ci=ci, lr=0.1, adam=False, n_train=100_000, n_epoch=100, n_seen=50, n_passes=1., moved=False,
                                 cool=None, times=(), spread=nan), **kwargs})

def cycle(**kwargs): return fixed(**{**readings(), 'moved': True, **kwargs}) # After a mock cycle

def changed(plan, part, **kwargs): return replanned(plan, **{part: dataclasses.replace(getattr(plan.facts, part), **kwargs)})

# What is read of a choice

@pytest.mark.parametrize('kwargs,verdict', [(dict(),'stay'), (dict(n_windows=9),'short'), (dict(pairs=True),'pairs'), (dict(bs=25, times=five),'use')])
def test_a_plan_that_changes_nothing_says_what_is_used_today(kwargs, verdict):
    plan = fixed(**kwargs)
    assert plan.verdict==verdict
    if verdict=='use': return
    assert plan.bs==100
    assert plan.lr==plan.scaled_lr==0.1
    assert plan.lr_factor==1
    assert plan.n_epoch==100
    assert plan.cbs==[]

def test_today_in_other_micro_batches():
    plan = plan_of(128, noise_scale=100., ci=(80.,130.), micro_bs=32, times=secs(32, 64, 128))
    assert (plan.verdict,plan.bs,plan.micro_bs,plan.n_acc)==('split',128,128,1)
    assert plan.n_epoch==5
    assert plan.lr_factor==1
    assert plan.duration.planned<plan.duration.today
    assert changed(plan, 'measured', n_windows=9).micro_bs==32 # As today, where nothing is known

def test_duration_is_that_of_the_planned_fit_and_of_today_s():
    "8 epochs of 20 s with 100 items and two frozen ones of 5 s, 5 of 50 s with 25 and one of 12.5 s; a validation after each"
    plan = fixed(bs=25, times=((25,0.0125,0.001),(100,0.02,0.001)), n_epoch=5, valid_time=1., freeze_epochs=1, frozen=0.0125/4)
    assert (plan.bs,plan.n_epoch,plan.freeze_epochs)==(100,8,2)
    assert plan.duration==pytest.approx((8*21+2*6,5*51+13.5))
    assert plan.at(25).freeze_epochs==1
    without = changed(plan, 'today', has_n_epoch=False)
    assert without.duration==pytest.approx(plan.duration)

@pytest.mark.parametrize('adam,ci,name,factor', [(False,(80.,130.),'adascale_gain',2.5),(False,(0.,inf),'linear_scaling',4),(True,(80.,130.),'no_scaling',1)])
def test_a_slice_of_rates_is_scaled_at_both_ends(adam, ci, name, factor):
    plan = fixed(bs=25, ci=ci, adam=adam, lr=slice(1e-3,1e-2), times=five).at(100)
    assert plan.to_dict()['rule_name']==name
    assert plan.lr==slice(1e-3,1e-2)
    assert (plan.scaled_lr.start,plan.scaled_lr.stop)==(approx(1e-3*factor),approx(1e-2*factor))

@pytest.mark.parametrize('wd', [0.01,[0.01,0.1]])
@pytest.mark.parametrize('adam', [False,True])
def test_weight_decay_is_scaled_for_each_group(wd, adam):
    "Batch, rate and epochs: 4 times, 2.5 times or what Adam makes of it, and 8 of 5 epochs; not where nothing changes, nor where none is known"
    plan = cycle(bs=25, base_bs=50, times=five, adam=adam, n_epoch=5, wd=wd)
    assert plan.bs==100
    assert plan.n_epoch==8
    factor = 4/((for_adam(100, 100., 25) if adam else 2.5)*8/5)
    assert L(plan.wd)==L([approx(factor*o) for o in L(wd)])
    assert plan.at(25).wd==wd
    assert changed(plan, 'today', wd=None).wd is None

# The rate that the optimizer sees

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('adam', [False,True])
def test_a_scaled_rate_of_today_is_what_a_plan_begins_with(adam):
    "Where nothing changes the learner's own callback scales the rate, else those of the plan do, from today's size on"
    plan = cycle(bs=25, base_bs=5, lr_factor=3., own_cbs=('GradAccum','ScaledLR'), times=five, adam=adam, trial=Trial(100, 100., 400_000))
    by = 2
    assert plan.bs==100
    assert plan.lr==approx(0.3)
    assert plan.base_bs==25
    assert plan.lr_factor==approx(by)
    assert plan.scaled_lr==approx(0.3*by)
    assert plan.code.startswith('learn.remove_cbs([GradAccum, ScaledLR]).fit_one_cycle(')
    assert 'ScaledLR(25, ' in plan.code
    assert plan.table.lr.values==approx([0.3*o.lr_factor for o in plan.options])
    stays = plan.at(25)
    assert (stays.lr,stays.base_bs,stays.lr_factor,stays.cbs)==(0.1,5,1,[])
    assert stays.scaled_lr==approx(0.3)
    assert 'cbs' not in stays.code

@pytest.mark.usefixtures('any_growth')
def test_a_loss_that_sums():
    "Its gradient grows with the batch, so that SGD takes as much less of it; for Adam nothing changes"
    def _plan(**kwargs): return cycle(bs=25, times=five, sums=True, wd=0.1, n_epoch=100, trial=Trial(200), **kwargs)
    plan = _plan()
    assert plan.bs==100
    assert plan.lr==approx(0.1/4)
    assert plan.lr_factor==approx(2/4)
    assert plan.scaled_lr==approx(0.1*2/4)
    assert f'{plan.n_epoch}, 0.025,' in plan.code
    assert plan.cbs[0].factor_at(100)==approx(2)
    assert plan.wd*plan.scaled_lr*plan.choice.option.trained_steps==approx(0.1*0.1*100*4000)
    assert _plan(adam=True).lr==0.1
    assert changed(_plan(adam=True), 'today', sums=False).scaled_lr==_plan(adam=True).scaled_lr

# A size of one's own choice

@pytest.mark.parametrize('bs,micro_bs,n_acc', [(300,300,1),(75,75,1),(2000,400,5),(np.int64(1200),400,3),(25,25,1)])
def test_a_size_of_one_s_own_choice_comes_with_all_else(bs, micro_bs, n_acc):
    plan = fixed(bs=25, times=five)
    chosen = plan.at(bs)
    assert (chosen.bs,chosen.micro_bs,chosen.n_acc)==(bs,micro_bs,n_acc)
    assert type(chosen.bs) is int
    assert chosen.to_dict()['chosen']==bs
    assert plan.to_dict()['chosen'] is None
    assert chosen.choice.option.epochs==approx(100*(100+bs)/125)
    assert chosen.scaled_lr==approx(0.1*gain(bs, 100., 25))
    assert bs in chosen.table.bs.values
    assert chosen.verdict==('stay' if bs==25 else 'use')
    accum,scaled = ([cb for cb in chosen.cbs if isinstance(cb, o)] for o in (GradAccum,ScaledLR))
    assert [o.n_acc for o in accum]==([n_acc] if n_acc>1 else [])
    assert [o.base_bs for o in scaled]==([25] if bs!=25 else []) # What changes nothing is left out
    assert all(one is not other for one,other in zip(chosen.cbs, chosen.cbs))

def test_a_choice_of_one_s_own_stays_where_facts_change():
    chosen = fixed(bs=25, times=five).at(300)
    assert changed(chosen, 'today', n_epoch=50).bs==300
    assert changed(chosen, 'today', n_epoch=50).n_epoch==whole_epochs(50*400/125)

@pytest.mark.parametrize('bs,exc', [(0,ValueError),('64',TypeError),(51,ValueError),(200_000,ValueError)])
def test_a_size_that_cannot_be_made_is_refused(bs, exc):
    with pytest.raises(exc): fixed(bs=25, times=secs(25, 50)).at(bs)

def test_a_rate_that_stays_needs_no_callback():
    plan = fixed(bs=25, adam=True, times=five)
    assert plan.at(50).cbs==[]
    assert [type(cb) for cb in plan.at(1200).cbs]==[GradAccum]

@pytest.mark.usefixtures('any_growth')
def test_a_size_that_was_not_tried_has_the_root_too_and_is_named():
    plan = cycle(bs=25, times=five, adam=True, trial=Trial(100, 100., 400_000))
    assert (plan.bs,plan.lr)==(100,0.1)
    assert plan.scaled_lr==approx(0.2)
    assert plan.at(200).scaled_lr==approx(0.1*8**0.5)
    told = ("200 was not tried: its rate is scaled to 0.283 by sqrt_scaling, and its epochs follow from smaller ones. If the loss rises, pass a lower rate "
        "than 0.1.")
    assert told in ' '.join(plan.at(200).details().split())

def test_the_line_to_paste_has_the_decay_that_apply_sets():
    "Also where an earlier plan may have set another one; as exactly as the rate"
    plan = cycle(bs=25, times=five, adam=True, wd=0.01, trial=Trial(100, 100., 400_000))
    assert f'wd={plan.wd:.15g}' in plan.code and plan.wd!=0.01
    stays = cycle(bs=25, times=five, adam=True, wd=0.01, noise_scale=nan, ci=(nan,nan), n_windows=None, cool=None)
    for has_plan in (False,True):
        at = changed(stays, 'today', has_plan=has_plan, wd_factor=0.5).at(100)
        assert (at.choice.option.wd_factor,'wd=0.01' in at.code)==(approx(1),has_plan)

def test_a_training_of_few_steps_has_a_plan_for_a_size_of_one_s_own_choice_only():
    few = cycle(bs=25, n_train=1000, n_epoch=1, times=five, noise_scale=30., ci=(25.,35.))
    assert few.verdict=='few_steps'
    assert few.bs==25
    assert few.at(50).verdict=='use'
    assert next(cautions(few.at(50)))==("This training has only 40 optimizer steps, too few for a plan (80 at least): train as it is, "
                                        "or with a smaller batch, which makes more steps.")

# All of it, for any measurement

def in_epoch(today, micro_bs, n_acc):
    "Items and optimizer steps of an epoch"
    share = math.ceil(today.n_train/today.n_ranks)
    n_micro = share//micro_bs if today.drops_last else math.ceil(share/micro_bs)
    return (n_micro*micro_bs*today.n_ranks if today.drops_last else today.n_train),math.ceil(n_micro/n_acc)

@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans())
def test_epochs_follow_from_one_number(plan):
    f,t,now = plan.facts,plan.facts.today,plan.facts.today.bs
    noise = f.measured_noise if plan.bs<now else f.noise
    assert plan.bs==plan.micro_bs*plan.n_acc*t.n_ranks or plan.bs==now
    (items_now,steps_now),(items,_) = in_epoch(t, t.micro_bs, now//t.n_ranks//t.micro_bs),in_epoch(t, plan.micro_bs, plan.n_acc)
    is_few = t.has_n_epoch and t.n_epoch*steps_now<80
    assert not (is_few and f.can_plan)
    growth = (noise+plan.bs)/(noise+now)*items_now/items if math.isfinite(noise) and plan.bs!=now else 1
    exact = plan.choice.option.epochs
    assert exact==pytest.approx(t.n_epoch*growth)
    assert type(plan.n_epoch) is int
    assert plan.n_epoch==whole_epochs(exact)

@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans())
def test_rates_and_decay_follow_from_one_number(plan):
    "What is passed, what the optimizer sees, and over what it sees today"
    f,t,now = plan.facts,plan.facts.today,plan.facts.today.bs
    by = now/plan.bs if t.sums and not t.adam else 1
    rate,seen,now_seen = (rates(o)[-1] for o in (plan.lr,plan.scaled_lr,scale_lr(t.lr, t.lr_factor)))
    assert seen==pytest.approx(now_seen*plan.lr_factor)
    assert plan.lr_factor==pytest.approx(by*plan.rule(plan.bs/now))
    if plan.verdict not in ('use','split'):
        assert plan.lr==t.lr
        assert plan.cbs==[]
        assert plan.wd==t.wd
        assert plan.base_bs==(t.base_bs or now)
        return
    scaled, = [cb for cb in plan.cbs if isinstance(cb, ScaledLR)] or [None]
    assert rate==pytest.approx(now_seen*by)
    assert seen==pytest.approx(rate*(scaled.factor_at(plan.bs) if scaled else 1))
    assert plan.base_bs==now
    if not (t.wd and f.can_plan): return
    _,steps_now = in_epoch(t, t.micro_bs, now//t.n_ranks//t.micro_bs)
    _,steps = in_epoch(t, plan.micro_bs, plan.n_acc)
    exact = plan.choice.option.epochs
    n_steps = (plan.n_epoch if t.has_n_epoch else exact)*steps
    assert plan.wd*seen*n_steps==pytest.approx(t.wd*t.wd_factor*now_seen*t.n_epoch*steps_now)

@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans())
def test_the_verdict_is_what_changes(plan):
    f,t = plan.facts,plan.facts.today
    size,split = plan.bs!=t.bs,plan.micro_bs!=t.micro_bs
    if f.can_plan or plan.choice.reason=='chosen': assert plan.verdict==('use' if size else 'split' if split else 'stay')
    else:
        assert plan.verdict==f.no_plan_for
        assert not size
        assert not split
    assert plan.choice.reason=='chosen' or plan.bs<=t.bs or f.trial.permits_size(plan.bs)

@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans())
def test_a_plan_promises_the_time_of_its_steps(plan):
    f,t,o = plan.facts,plan.facts.today,plan.choice.option
    if not f.device.timed: return
    items,_ = in_epoch(t, o.micro_bs, o.n_acc)
    assert o.epoch_time<=1.0001*(items/o.bs+2)*o.step_time # Two steps more at most, for what is not whole
    planned,today = plan.duration
    if plan.verdict=='stay': assert o.fit_time==approx(today)
    if plan.verdict=='use' and plan.choice.reason!='chosen': assert o.fit_time<today
    n_epoch = plan.n_epoch if t.has_n_epoch else o.epochs # Without a number of epochs none is rounded
    assert planned>=n_epoch*(o.epoch_time+f.device.valid_time)*(1-1e-12)

# A record

@settings(max_examples=50, deadline=None, derandomize=True)
@given(plans())
def test_every_plan_is_strict_json(plan): json.dumps(plan.to_dict(), allow_nan=False)

def test_to_dict():
    plan = plan_of(noise_scale=inf, ci=(209.,inf), lr=slice(1e-3,1e-2), spread=nan, failed=((512,'ValueError: no'),))
    d = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert d['noise_scale'] is None
    assert d['ci']==[209.,None]
    assert d['verdict']==plan.verdict
    assert d['reason']==plan.choice.reason
    assert d['bs']==plan.bs
    assert d['today']['micro_bs']==64
    assert d['device']['failed']==[[512,'ValueError: no']]
    assert d['trial']==dict(largest=None, noise=None, n_short=None, failed=None, skipped=None, hoped_noise=None, saving=None, cost=None)
    assert 'df' not in d

def test_today_s_batch_in_larger_micro_batches_needs_no_noise_scale():
    plan = plan_of(64, noise_scale=nan, ci=(nan,nan), n_windows=None, cool=None, micro_bs=16, times=secs(16, 32, 64))
    assert (plan.verdict,plan.bs,plan.micro_bs,plan.n_epoch)==('split',64,64,5)
    assert plan.scaled_lr==plan.facts.today.lr
