"`BatchPlan`: what a measured noise scale says about the batch size on this device"
import dataclasses
import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
from fastcore.foundation import L
from hypothesis import given, settings
from fastai_bs.all import GradAccum, no_scaling, ScaledLR
from fastai_bs.finder.advice import cautions, good_to_know
from fastai_bs.finder.plan import RateTrial
from fastai_bs.finder.formulas import whole_epochs
from fastai_bs.schedule.scaled_lr import rates, scale_lr
from plans import plan_of, plans, readings, secs, window_rows

inf,nan = math.inf,math.nan
def approx(v): return pytest.approx(v, rel=1e-12, abs=0, nan_ok=True)

five = secs(25, 50, 100, 200, 400) # With them 100 items are the fastest at a noise scale of 100: (100*0.01/0.0001)**0.5

def fixed(noise_scale=100., ci=(80.,130.), bs=100, **kwargs):
    "A plan for SGD at the present weights, without step times"
    return plan_of(bs, **{**dict(noise_scale=noise_scale, ci=ci, lr=0.1, adam=False, n_train=100_000, n_epoch=100, n_seen=50, n_passes=1., moved=False,
                                 cool=None, at_peak=None, at_end=None, times=(), spread=nan), **kwargs})

def cycle(**kwargs): return fixed(**{**readings(), 'moved': True, **kwargs}) # After a mock cycle

def changed(plan, part, **kwargs): return dataclasses.replace(plan, **{part: dataclasses.replace(getattr(plan, part), **kwargs)})

def gain(bs, noise, base_bs): return (noise/base_bs+1)/(noise/bs+1) # AdaScale's
def for_adam(bs, noise, base_bs):
    g = gain(bs, noise, base_bs)
    return min(g**0.5*(1+max(0, 2-bs/base_bs/g)/5), g**(2/3))

# What is known

@pytest.mark.parametrize('kwargs,known,verdict', [
    (dict(), 100., 'stay'),
    (dict(noise_scale=inf, ci=(60.,inf)), 60., 'stay'), # The lower end, where there is no estimate
    (dict(noise_scale=300., ci=(0.,inf)), nan, 'unknown'),
    (dict(noise_scale=inf, ci=(0.,inf)), nan, 'unknown'),
    (dict(noise_scale=0., ci=(0.,0.5)), 0., 'stay'),
    (dict(n_windows=10), 100., 'stay'),
    (dict(n_windows=9, loss_rose=True), nan, 'short'),
    (dict(loss_rose=True), nan, 'too_high'),
    (dict(pairs=True, n_windows=9), nan, 'pairs')])
def test_what_is_known(kwargs, known, verdict):
    plan = fixed(**kwargs)
    assert plan.noise_known==approx(known)
    assert plan.is_known==(not math.isnan(known))
    assert plan.verdict==verdict
    assert plan.bs==100
    assert not plan.changes
    if not plan.is_known:
        assert plan.balanced_bs is None
        assert plan.lr==plan.scaled_lr==0.1
        assert plan.table.time.isna().all()

# Step times

def test_what_is_done_once_is_part_of_a_step():
    "A step of 4 micro-batches has one step of the optimizer"
    plan = fixed(bs=25, times=secs(25, a=0.01, c=0., opt=0.009))
    assert plan.step_time_at(25)==approx(0.01)
    assert plan.step_time_at(100)==approx(4*0.001+0.009)
    a,c,error = fixed(times=five).step_time_line
    assert (a,c)==(pytest.approx(0.01),pytest.approx(0.0001))
    assert error<1e-6

def test_today_in_other_micro_batches():
    plan = plan_of(128, noise_scale=100., ci=(80.,130.), micro_bs=32, times=secs(32, 64, 128))
    assert (plan.verdict,plan.bs,plan.micro_bs,plan.n_acc)==('split',128,128,1)
    assert plan.changes
    assert plan.time_ratio<1
    assert plan.n_epoch==5
    assert plan.lr_factor==plan.wd_factor==1
    assert changed(plan, 'measured', n_windows=9).micro_bs==32 # As today, where nothing is known

# The size

# At a noise scale of 100 a batch of 100 items needs 2 steps where 200 need 1.5 and 400 1.25
def relative(*ratios): return tuple((bs,0.04*ratio/steps,0.) for bs,ratio,steps in zip((100,200,400), ratios, (2,1.5,1.25)))

@pytest.mark.parametrize('kwargs,fastest,bs,reason', [
    (dict(bs=25), 100, 100, None), # 50 take 0.045/0.04 as long
    (dict(bs=400), 100, 100, None), # And so do 200
    (dict(bs=25, noise_scale=300.), 200, 100, None), # 0.08/0.075, and 0.105/0.075 with 50
    (dict(bs=128, times=secs(32, 64, 128, 256)), 128, 128, 'slower'),
    (dict(bs=100), 100, 100, 'slower'),
    (dict(bs=100, noise_scale=300.), 200, 200, None), # A gain of 0.08/0.075
    (dict(bs=100, noise_scale=300., spread=0.07), 100, 100, 'error'), # Not for a clock that errs as much
    (dict(bs=100, times=relative(1, 0.95, 0.9)), 400, 200, None), # A tenth more at most, and less than today's
    (dict(bs=100, times=relative(1, 0.98, 0.9)), 400, 400, None), # Here 200 gain nothing
    (dict(bs=100, times=relative(1, 0.98, 0.92)), 400, 100, 'little'), # Four times the batch is to save a tenth
    (dict(bs=100, times=relative(1, 0.98, 0.98)), 100, 100, 'gain'),
    (dict(bs=100, times=relative(1)), 100, 100, 'single')])
def test_of_sizes_about_as_fast_the_one_nearest_to_todays(kwargs, fastest, bs, reason):
    noise = kwargs.get('noise_scale', 100.)
    plan = fixed(ci=(0.99*noise,1.01*noise), n_epoch=1000, **{'times': five, 'spread': 0., **kwargs})
    assert (plan.fastest,plan.fastest_fit,plan.bs)==(fastest,bs,bs)
    low,high = plan.bs_range
    assert low<=bs<=high
    assert low<=fastest<=high
    if reason:
        assert plan.stays_for==reason
        assert plan.verdict=='stay'
    else: assert plan.verdict=='use'

def test_the_size_is_chosen_by_whole_epochs():
    "What 1.3 epochs would save of 1 is lost where there must be 2: (450+300)/(450+150) = 1.25 of 300 items each"
    plan = fixed(450., (440.,460.), bs=150, n_epoch=1, times=((150,0.02,0.),(300,0.024,0.)), n_train=12_000)
    assert plan.fastest==300
    assert plan.n_epoch_exact==1
    assert plan.epochs_at(300)==1.25
    assert plan.bs==150
    assert plan.stays_for=='little'
    assert changed(plan, 'today', n_epoch=4).bs==300 # 5 epochs
    assert changed(plan, 'today', has_n_epoch=False).bs==300 # No epochs were asked for

@pytest.mark.parametrize('valid_time,epoch_start,bs,has_n_epoch', [(30.,0.,25,True),(0.,30.,25,False),(9.,9.,100,True),(10.,11.,25,False)])
def test_validations_count_in_the_choice(valid_time, epoch_start, bs, has_n_epoch):
    "8 epochs of 20 s with 100 items, 5 of 50 s with 25: three validations and starts more cost up to 90 s, and four times the batch is to save a tenth"
    plan = fixed(bs=25, times=((25,0.0125,0.001),(100,0.02,0.001)), n_epoch=5, has_n_epoch=has_n_epoch, valid_time=valid_time, epoch_start=epoch_start)
    beside = valid_time+epoch_start
    planned,today = 8*(20+beside),5*(50+beside)
    assert plan.bs==bs
    assert plan.fastest==100
    assert plan.at(100).duration==pytest.approx((planned,today))
    assert plan.at(100).time_ratio==pytest.approx(planned/today)

def test_the_time_of_fine_tune():
    "8 epochs of 20 s with 100 items and two frozen ones of 5 s, 5 of 50 s with 25 and one of 12.5 s; a validation after each"
    plan = fixed(bs=25, times=((25,0.0125,0.001),(100,0.02,0.001)), n_epoch=5, has_n_epoch=True, valid_time=1., freeze_epochs=1, frozen=0.0125/4)
    assert plan.bs==100
    assert plan.n_epoch==8
    assert plan.freeze_epochs==2
    assert plan.duration==pytest.approx((8*21+2*6,5*51+13.5))
    assert plan.at(25).freeze_epochs==1
    assert plan.time_ratio==pytest.approx(180/268.5)

# Rate and weight decay

@pytest.mark.parametrize('adam,ci,name,factor', [(False,(80.,130.),'adascale_gain',2.5),(False,(0.,inf),'linear_scaling',4),(True,(80.,130.),'no_scaling',1)])
def test_rule_at_fixed_weights(adam, ci, name, factor):
    plan = fixed(bs=25, ci=ci, adam=adam, lr=slice(1e-3,1e-2), times=five).at(100)
    assert plan.rule_name==name
    assert plan.lr==slice(1e-3,1e-2)
    assert (plan.scaled_lr.start,plan.scaled_lr.stop)==(approx(1e-3*factor),approx(1e-2*factor))
    assert plan.rule_at(25)(1)==1

@pytest.mark.parametrize('adam', [False,True])
def test_a_higher_rate_is_advised_where_it_was_tried(adam):
    "Up to the size at which it held, and below the one at which it failed; for smaller batches it needs no trial"
    plan = cycle(bs=50, times=five, adam=adam, rate=RateTrial(held=100, failed=400))
    for bs in (50,100): assert plan.rule_at(bs)(bs/50)==approx((for_adam if adam else gain)(bs, 100., 50))
    for bs in (101,200,399,400,800): assert plan.rule_at(bs) is no_scaling
    assert (plan.rule_at(25) is no_scaling) if adam else plan.rule_at(25)(0.5)==approx(gain(25, 100., 50))
    assert plan.table.bs.tolist()==[25,50,100,200]
    assert plan.at(400).table.bs.tolist()==[25,50,100,200,400]
    assert plan.at(400).rule is no_scaling
    failed = dataclasses.replace(plan, rate=RateTrial(failed=100))
    assert failed.rule_at(99) is not no_scaling
    assert failed.rule_at(100) is no_scaling
    assert failed.table.bs.tolist()==[25,50]
    assert failed.bs==50
    assert failed.stays_for=='rate'

def test_a_rate_that_is_low_grows_as_for_sgd():
    plan = cycle(bs=25, times=five, adam=True, rate=RateTrial(held=100, low=True))
    assert (plan.bs,plan.rule_name)==(100,'adascale_gain')
    assert plan.scaled_lr==approx(0.1*gain(100, 100., 25))
    assert plan.lr==0.1
    as_ever = dataclasses.replace(plan, rate=RateTrial(held=100))
    assert as_ever.rule_name=='adam_gain'
    assert as_ever.scaled_lr==approx(0.1*for_adam(100, 100., 25))
    assert plan.at(200).rule is no_scaling # It was not tried there

@pytest.mark.parametrize('wd', [0.01,[0.01,0.1]])
@pytest.mark.parametrize('adam,has_n_epoch', [(False,True),(True,True),(True,False)])
def test_weight_decay(wd, adam, has_n_epoch):
    "Batch, rate and epochs: 4 times, 2.5 times or what Adam makes of it, and 8 of 5 epochs; not where nothing changes, nor where none is known"
    plan = cycle(bs=25, base_bs=50, times=five, adam=adam, n_epoch=5, has_n_epoch=has_n_epoch, wd=wd)
    assert plan.bs==100
    assert plan.n_epoch==8
    by = for_adam(100, 100., 25) if adam else 2.5
    factor = 4/(by*8/5)
    assert plan.wd_factor==approx(factor)
    assert L(plan.wd)==L([approx(factor*o) for o in L(wd)])
    assert plan.at(25).wd_factor==1
    assert plan.at(25).wd==wd
    assert changed(plan, 'today', wd_factor=1/3).wd_factor==approx(factor/3) # A ScaledLR makes a third of it today
    without = changed(plan, 'today', wd=None)
    assert without.wd_factor==1
    assert without.wd is None
    whole = changed(plan, 'today', n_epoch=3) # 4.8 are 5, where they are to be whole
    assert whole.wd_factor==approx(4/(by*(5 if has_n_epoch else 4.8)/3))

@pytest.mark.parametrize('kwargs,saves', [
    (dict(growth=0.), False), (dict(growth=0.25), False), (dict(reach=0.12), True), (dict(reach=0.13), False), (dict(adam=False), False),
    (dict(rate=RateTrial(failed=50)), False), # At no larger size may the rate be scaled
    (dict(noise_scale=70., rate=RateTrial(100, low=True)), True),
    (dict(noise_scale=1e4, ci=(9e3,2e4)), True), # As many as today are left
    (dict(n_epoch=1, n_train=6000), True)]) # 80 steps of 100 items are left
def test_a_higher_rate_saves_epochs_where_a_batch_reaches_little(kwargs, saves):
    plan = cycle(**{**dict(bs=25, times=five, adam=True, reach=0.01, growth=1.), **kwargs}) # Batches of 100 reach 4 times as much
    growth = (plan.noise_scale+100)/(plan.noise_scale+25)
    factor = min(for_adam(100, plan.noise_scale, 25), 2) if saves else 1 # A low rate has a higher factor, and saves no more
    if plan.rate.low: factor = 2
    now = plan.today.n_epoch
    left = max(now, 8000/plan.today.n_train)
    assert plan.epochs_at(100)==approx(max(left, now*growth/factor**0.5))
    assert plan.epochs_at(25)==now
    assert plan.epochs_at(12)<now
    assert any('few of the parameters' in o for o in good_to_know(plan.at(100)))==(saves and now*growth>1.05*left)

# What the loader gives

@pytest.mark.parametrize('n_train,drops_last,bs,items,steps', [(500,True,128,384,3),(500,True,64,448,7),(650,False,320,650,3),(650,False,64,650,11)])
def test_a_plan_counts_what_the_loader_gives(n_train, drops_last, bs, items, steps):
    "As many items as the same loss needs, the same sum of lr*wd over the steps, and the seconds of these steps"
    times = tuple((o,0.001*o+0.01,0.01) for o in (16,64,128,320))
    plan = cycle(bs=16, n_train=n_train, drops_last=drops_last, n_epoch=7, wd=0.01, times=times, rate=RateTrial(held=1000)).at(bs)
    now = 496 if drops_last else 650
    assert plan.n_epoch_exact*items==approx(7*now*(100+bs)/116)
    assert plan.n_epoch==whole_epochs(plan.n_epoch_exact)
    assert plan.steps==plan.n_epoch*steps
    assert plan.wd*plan.scaled_lr*plan.steps==approx(0.01*0.1*7*math.ceil(now/16))
    assert plan.duration==pytest.approx((plan.n_epoch*(items*0.001+steps*0.01),7*(now*0.001+math.ceil(now/16)*0.01)))

def test_a_training_of_few_steps_has_no_plan():
    "But for a size of one's own choice, which says so"
    def _plan(n_epoch, **kwargs): return cycle(bs=25, n_train=1000, n_epoch=n_epoch, times=five, has_n_epoch=True, noise_scale=30., ci=(25.,35.), **kwargs)
    few = _plan(1)
    assert few.steps_now==40
    assert few.verdict=='few_steps'
    assert not few.is_known
    assert not few.changes
    assert few.bs==25
    assert _plan(2).is_known
    assert _plan(1, ) is not few
    assert changed(few, 'today', has_n_epoch=False).is_known
    assert few.at(50).verdict=='use'
    assert next(cautions(few.at(50)))=="This training has only 40 optimizer steps, too few for a plan."

# The rate that the optimizer sees

@pytest.mark.parametrize('adam', [False,True])
def test_a_scaled_rate_of_today_is_what_a_plan_begins_with(adam):
    "Where nothing changes the learner's own callback scales the rate, else those of the plan do, from today's size on"
    plan = cycle(bs=25, base_bs=5, lr_factor=3., own_cbs=('GradAccum','ScaledLR'), times=five, adam=adam, rate=RateTrial(held=200))
    by = for_adam(100, 100., 25) if adam else gain(100, 100., 25)
    assert plan.bs==100
    assert plan.lr==approx(0.3)
    assert plan.base_bs==25
    assert plan.lr_factor==approx(by)
    assert plan.scaled_lr==approx(0.3*by)
    assert plan.code.startswith('learn.remove_cbs([GradAccum, ScaledLR]).fit_one_cycle(')
    assert 'ScaledLR(25, ' in plan.code
    assert plan.table.lr.values==approx([0.3*plan.lr_factor_at(bs) for bs in plan.table.bs])
    stays = plan.at(25)
    assert (stays.lr,stays.base_bs,stays.lr_factor,stays.cbs)==(0.1,5,1,[])
    assert stays.scaled_lr==approx(0.3)
    assert 'cbs' not in stays.code

def test_a_loss_that_sums():
    "Its gradient grows with the batch, so that SGD takes as much less of it; for Adam nothing changes"
    def _plan(**kwargs): return cycle(bs=25, times=five, sums=True, wd=0.1, n_epoch=100, rate=RateTrial(held=200), **kwargs)
    plan = _plan()
    assert plan.bs==100
    assert plan.lr==approx(0.1/4)
    assert plan.lr_factor==approx(2.5/4)
    assert plan.scaled_lr==approx(0.1*2.5/4)
    assert f'{plan.n_epoch}, 0.025,' in plan.code
    assert plan.cbs[0].factor_at(100)==approx(2.5)
    assert plan.wd*plan.scaled_lr*plan.steps==approx(0.1*0.1*100*4000)
    assert _plan(adam=True).lr==0.1
    assert changed(_plan(adam=True), 'today', sums=False).scaled_lr==_plan(adam=True).scaled_lr

# A size of one's own choice

@pytest.mark.parametrize('bs,micro_bs,n_acc', [(300,100,3),(75,25,3),(2000,400,5),(np.int64(50),50,1),(25,25,1)])
def test_at(bs, micro_bs, n_acc):
    plan = fixed(bs=25, times=five)
    chosen = plan.at(bs)
    assert (chosen.bs,chosen.micro_bs,chosen.n_acc,chosen.chosen)==(bs,micro_bs,n_acc,bs)
    assert type(chosen.bs) is int
    assert plan.chosen is None
    assert chosen.n_epoch_exact==approx(100*(100+bs)/125)
    assert chosen.scaled_lr==approx(0.1*gain(bs, 100., 25))
    assert bs in chosen.table.bs.values
    assert chosen.verdict==('stay' if bs==25 else 'use')
    assert chosen.fastest==plan.fastest
    if bs==25: assert chosen.stays_for=='chosen'
    accum,scaled = ([cb for cb in chosen.cbs if isinstance(cb, o)] for o in (GradAccum,ScaledLR))
    assert [o.n_acc for o in accum]==([n_acc] if n_acc>1 else [])  # What changes nothing is left out
    assert [o.base_bs for o in scaled]==([25] if bs!=25 else [])
    assert all(one is not other for one,other in zip(chosen.cbs, chosen.cbs))

@pytest.mark.parametrize('bs,exc', [(0,ValueError),('64',TypeError),(26,ValueError),(200_000,ValueError)])
def test_at_refuses(bs, exc):
    with pytest.raises(exc): fixed(bs=25, times=secs(25, 50)).at(bs)

# All of it, for any measurement

powers = [2**i for i in range(40)]

@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans())
def test_all_of_a_plan_follows_from_one_number(plan):
    noise,t,now = plan.noise_known,plan.today,plan.bs_now
    known = plan.is_known
    assert plan.bs==plan.micro_bs*plan.n_acc*t.n_ranks or plan.bs==now
    growth = (noise+plan.bs)/(noise+now) if known else 1
    saved = min(plan.lr_factor, (plan.bs/now)**0.5)**0.5 if known and t.adam and plan.bs>now and plan.reach_at(plan.bs)<0.5 else 1
    def _in_epoch(micro_bs, n_acc):
        share = math.ceil(t.n_train/t.n_ranks)
        n_micro = share//micro_bs if t.drops_last else math.ceil(share/micro_bs)
        return (n_micro*micro_bs*t.n_ranks if t.drops_last else t.n_train),math.ceil(n_micro/n_acc)
    (items_now,steps_now),(items,steps) = _in_epoch(t.micro_bs, now//t.n_ranks//t.micro_bs),_in_epoch(plan.micro_bs, plan.n_acc)
    assert plan.has_few_steps==(t.has_n_epoch and t.n_epoch*steps_now<80)
    assert not (plan.has_few_steps and known)
    left = max(t.n_epoch, 80/steps) # Today's epochs and 80 steps are left
    same = t.n_epoch*growth*items_now/items
    assert plan.n_epoch_exact==pytest.approx(min(same, max(left, same/saved)))
    assert type(plan.n_epoch) is int
    assert plan.steps==plan.epochs*steps
    # The rates: what is passed, what the optimizer sees, and over what it sees today
    by = now/plan.bs if t.sums and not t.adam else 1
    rate,seen,now_seen = (rates(o)[-1] for o in (plan.lr,plan.scaled_lr,scale_lr(t.lr, t.lr_factor)))
    assert seen==pytest.approx(now_seen*plan.lr_factor)
    assert plan.lr_factor==pytest.approx(by*plan.rule(plan.bs/now))
    if plan.changes:
        scaled, = [cb for cb in plan.cbs if isinstance(cb, ScaledLR)] or [None]
        assert rate==pytest.approx(now_seen*by)
        assert seen==pytest.approx(rate*(scaled.factor_at(plan.bs) if scaled else 1))
        assert plan.base_bs==now
        if t.wd and known: assert plan.wd*seen*plan.steps==pytest.approx(t.wd*t.wd_factor*now_seen*t.n_epoch*steps_now)
    else: assert plan.lr==t.lr and plan.cbs==[] and plan.wd==t.wd and plan.base_bs==(t.base_bs or now)
    assert plan.n_epoch==whole_epochs(plan.n_epoch_exact)
    assert plan.epochs==(plan.n_epoch if t.has_n_epoch and t.n_epoch>=1 else plan.n_epoch_exact)
    # The verdict
    changes = plan.bs!=now,plan.micro_bs!=t.micro_bs
    if plan.verdict in ('use','split','stay'): assert plan.verdict==('use' if changes[0] else 'split' if changes[1] else 'stay')
    else: assert not known and not plan.chosen and not any(changes)
    assert plan.changes==(plan.verdict in ('use','split'))
    # The range
    low,high = plan.bs_range
    assert low in powers
    assert high is None or high in powers and high>=low
    assert (high is None)==(known and math.isinf(plan.ci[1]) and bool(plan.timed))
    if not plan.chosen: assert low<=plan.bs<=(high or inf)
    # The size, and what it takes
    if plan.timed and known and not plan.chosen:
        def _time(bs, step_time):
            more = (noise+bs)/(noise+now)
            micro_bs,n_acc = plan.table.set_index('bs').loc[bs,['micro_bs','n_acc']].astype(int)
            items,_ = _in_epoch(micro_bs, n_acc)
            n = t.n_epoch*more*items_now/items
            n_frozen = t.freeze_epochs and max(1, round(t.freeze_epochs*n/t.n_epoch))
            if plan.in_whole_epochs and bs!=now: n = max(n, whole_epochs(n))
            secs = plan.epoch_time_at(bs)
            assert secs<=1.0001*(items/bs+2)*step_time # Two steps more at most, for what is not whole
            return (n+n_frozen*plan.frozen_part)*secs + (n+n_frozen)*plan.device.valid_time
        took = {bs: _time(bs, secs) for bs,secs in zip(plan.table.bs, plan.table.step_time)}
        good = [bs for bs,secs in took.items() if secs<=1.1*min(took.values()) and secs<=took[now]/max(1+plan.least_gain, 1.05**abs(np.log2(bs/now)))]
        assert plan.bs==(min(good, key=lambda bs: max(bs/now, now/bs)) if good else now)
        assert plan.verdict!='use' or plan.time_ratio<1
        if plan.verdict=='stay': assert plan.time_ratio==approx(1)
    if plan.rate.gave_up: assert plan.chosen or plan.bs<=now
    if plan.rate.failed: assert plan.chosen or plan.bs<plan.rate.failed or plan.bs<=now
    json.dumps(plan.to_dict(), allow_nan=False)

# A record

def test_to_dict():
    plan = plan_of(noise_scale=inf, ci=(209.,inf), lr=slice(1e-3,1e-2), spread=nan, failed=((512,'ValueError: no'),))
    d = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert d['noise_scale'] is None
    assert d['ci']==[209.,None]
    assert d['verdict']==plan.verdict
    assert d['bs']==plan.bs
    assert d['today']['micro_bs']==64
    assert d['device']['failed']==[[512,'ValueError: no']]
    assert d['rate']==dict(held=None, failed=None, gave_up=False, low=False)
    assert 'df' not in d

# Drawn

@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close('all')

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('kwargs', [dict(times=()), dict(noise_scale=inf, ci=(60.,inf)), dict(cool=None, at_peak=None, at_end=None),
    dict(df=window_rows(0))], ids=lambda o: ','.join(o))
def test_plots_are_drawn_without_a_warning(kwargs, tmp_path):
    axs = plan_of(**kwargs).plot()
    axs[0].figure.savefig(tmp_path/'plan.png')
    assert len(axs)==2
    assert not math.isnan(axs[0].get_ylim()[1])

