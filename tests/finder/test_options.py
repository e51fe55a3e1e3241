"One training for each batch size: how it is made up, its rate, decay, epochs and seconds"
import math
from dataclasses import replace

import pytest
from fastai_bs.all import no_scaling, sqrt_scaling
from fastai_bs.finder.facts import Trial
from fastai_bs.finder.formulas import whole_epochs
from fastai_bs.finder.options import today_as_is, option_of, options_of, rule_of, sizes_of, table_of
from plans import facts_of, for_adam, gain, readings, secs

inf,nan = math.inf,math.nan
def approx(v): return pytest.approx(v, rel=1e-12, abs=0, nan_ok=True)

five = secs(25, 50, 100, 200, 400)

def fixed(noise_scale=100., bs=100, **kwargs):
    "For SGD at the present weights, without step times"
    return facts_of(bs, **{**dict(noise_scale=noise_scale, ci=(0.8*noise_scale,1.3*noise_scale), lr=0.1, adam=False, n_train=100_000, n_epoch=100,
                                  moved=False, cool=None, times=(), spread=nan), **kwargs})

def cycle(noise_scale=100., **kwargs): return fixed(noise_scale, **{**readings(), 'moved': True, **kwargs}) # After a mock cycle
def option(facts, bs): return option_of(facts, facts.noise, bs)

# Sizes

def test_sizes_go_up_to_8_times_the_noise_scale_and_two_fit_in_an_epoch():
    assert sizes_of(fixed(bs=25, times=five), 100.)==[25,50,100,200,400,800]
    assert sizes_of(fixed(bs=25, times=five, n_train=500), 100.)==[25,50,100,200]
    assert sizes_of(fixed(bs=25, times=five), nan)==[25,50,100,200,400]

@pytest.mark.parametrize('trial,sizes', [(Trial(50), [25,50,100,200,400,800]), (Trial(failed=200), [25,50,100]), (Trial(50, failed=200), [25,50]),
                                         (Trial(200, 90., 99), [50,100,200]), (Trial(100, 90., 99, failed=400), [50,100])])
def test_sizes_that_were_not_tried_are_left_out(trial, sizes):
    "Above the largest that was tried, or one that was of no use; and smaller ones than today's where a larger one is what was tried"
    facts = fixed(bs=50, times=five, trial=trial)
    assert sizes_of(facts, 100.)==sizes
    assert sizes_of(facts, 100., also=[400])==sorted({*sizes,400})

# Micro-batches

@pytest.mark.parametrize('times,noise,split,step_time', [
    (secs(32, 64, 128),100.,(128,1),0.0228), (secs(32, 64, 128),nan,(32,4),4*0.0122+0.001), # Without a noise scale all stays
    (secs(32, 64, 128, c=0., opt=0.01),100.,(32,4),0.01),                                   # All of a step is done once
    (((32,0.0102,0.),(128,0.04,0.)),100.,(32,4),0.0408), (((32,0.0104,0.),(128,0.04,0.)),100.,(128,1),0.04), # It must gain 3%
    ((),100.,(32,4),nan)])
def test_today_s_batch_keeps_its_micro_batches_unless_others_gain(times, noise, split, step_time):
    "Four of 32 are one step of the optimizer"
    o = option_of(fixed(bs=128, micro_bs=32, times=times), noise, 128)
    assert (o.micro_bs,o.n_acc,o.step_time)==(*split,approx(step_time))
    assert o.changes==(split!=(32,4))
    assert math.isnan(o.fit_time)==math.isnan(step_time)

# The rate

@pytest.mark.parametrize('adam,noise,name,factor', [(False,100.,'adascale_gain',2.5),(False,nan,'linear_scaling',4),(True,100.,'no_scaling',1)])
def test_rule_at_fixed_weights(adam, noise, name, factor):
    facts = fixed(bs=25, adam=adam, times=five)
    rule = rule_of(facts, noise, 100)
    assert getattr(rule, 'func', rule).__name__==name
    assert option_of(facts, noise, 100).lr_factor==approx(factor)
    assert rule_of(facts, noise, 25)(1)==1

@pytest.mark.parametrize('adam', [False,True])
def test_the_root_is_advised_where_larger_sizes_were_tried_or_asked_for(adam):
    "Also for a size of one's own beyond them; smaller batches need no trial"
    facts = cycle(bs=50, times=five, adam=adam, trial=Trial(100, 90., 99, failed=400))
    for bs in (75,100,101,200,399,400,800): assert rule_of(facts, 100., bs) is sqrt_scaling
    assert option_of(facts, 100., 50).lr_factor==1
    smaller = rule_of(facts, 100., 25)
    if adam: assert smaller is no_scaling
    else: assert smaller(0.5)==approx(gain(25, 100., 50))
    failed = replace(facts, trial=Trial(failed=100))
    assert rule_of(failed, 100., 99)(2)==approx((for_adam if adam else gain)(100, 100., 50)) # Not tried at all: by the noise scale
    assert rule_of(failed, 100., 100) is sqrt_scaling

@pytest.mark.parametrize('adam,by_sum', [(False,1/4),(True,1.)])
def test_a_loss_that_sums_takes_as_much_of_the_rate_as_its_gradient_grows(adam, by_sum):
    "Adam divides by it anyway"
    sums,mean = (option(cycle(bs=25, times=five, adam=adam, sums=o), 100) for o in (True,False))
    assert sums.lr_factor==approx(mean.lr_factor*by_sum)
    assert sums.rule(4)==approx(mean.rule(4))

# Weight decay

@pytest.mark.parametrize('adam,has_n_epoch', [(False,True),(True,True),(True,False)])
def test_the_sum_of_rate_times_decay_stays(adam, has_n_epoch):
    "Batch, rate and epochs: 4 times, 2.5 times or what Adam makes of it, and 8 of 5 epochs"
    facts = cycle(bs=25, times=five, adam=adam, n_epoch=5, has_n_epoch=has_n_epoch, wd=0.01)
    by = for_adam(100, 100., 25) if adam else 2.5
    o = option(facts, 100)
    assert o.trained_epochs==8
    assert o.wd_factor==approx(4/(by*8/5))
    of_a_third = replace(facts, today=replace(facts.today, wd_factor=1/3)) # A ScaledLR makes a third of it today
    assert option(of_a_third, 100).wd_factor==approx(o.wd_factor/3)
    of_three = replace(facts, today=replace(facts.today, n_epoch=3)) # 4.8 are 5, where they are to be whole
    assert option(of_three, 100).wd_factor==approx(4/(by*(5 if has_n_epoch else 4.8)/3))

@pytest.mark.parametrize('kwargs,noise,bs', [
    (dict(wd_factor=1/3),100.,25), (dict(wd=None),100.,100)])
def test_decay_stays_where_nothing_changes_or_there_is_none(kwargs, noise, bs):
    assert option_of(cycle(**{**dict(bs=25, times=five, n_epoch=5, adam=True, wd=0.01), **kwargs}), noise, bs).wd_factor==1

def test_a_size_whose_epochs_are_not_known_decays_as_much_in_those_of_today():
    "At twice the rate in a quarter of the steps; a ScaledLR(scale_wd=False) halves it, and the plan takes its place"
    facts = cycle(bs=25, times=five, n_epoch=5, adam=True, wd=0.01, wd_factor=0.5)
    for noise in (nan,inf): assert option_of(facts, noise, 100).wd_factor==approx(0.5*4/option_of(facts, noise, 100).lr_factor)
    split = option_of(replace(facts, today=replace(facts.today, bs=100)), nan, 100) # In one micro-batch in place of four
    assert (split.changes,split.n_acc) in ((True,1),(False,4))
    if split.changes: assert split.wd_factor==0.5

@pytest.mark.parametrize('adam', [False,True])
def test_the_root_is_the_rule_for_a_size_that_was_asked_for_and_never_tried(adam):
    "As in a training of too few steps for any trial; at fixed weights no training was asked for"
    facts = cycle(bs=25, times=five, adam=adam, n_epoch=1)
    assert rule_of(facts, nan, 100) is sqrt_scaling
    assert rule_of(replace(facts, measured=replace(facts.measured, moved=False)), nan, 100) is not sqrt_scaling

# Epochs

@pytest.mark.parametrize('n_train,drops_last,bs,items,steps', [(500,True,128,384,3),(500,True,64,448,7),(650,False,320,650,3),(650,False,64,650,11)])
def test_an_option_counts_what_the_loader_gives(n_train, drops_last, bs, items, steps):
    "As many items as the same loss needs, the same sum of lr*wd over the steps, and the seconds of these steps"
    times = tuple((o,0.001*o+0.01,0.01) for o in (16,64,128,320))
    facts = cycle(bs=16, n_train=n_train, drops_last=drops_last, n_epoch=7, wd=0.01, times=times)
    o,now = option(facts, bs),today_as_is(facts)
    items_now = 496 if drops_last else 650
    steps_now = math.ceil(items_now/16)
    assert o.epochs*items==approx(7*items_now*(100+bs)/116)
    assert o.n_epoch==whole_epochs(o.epochs)
    assert o.trained_steps==o.n_epoch*steps
    assert o.wd_factor*o.lr_factor*o.trained_steps==approx(7*steps_now)
    assert o.epoch_time==pytest.approx(items*0.001+steps*0.01)
    assert now.fit_time==pytest.approx(7*(items_now*0.001+steps_now*0.01))

# Seconds

def test_the_time_of_a_fit_has_whole_epochs_validations_and_starts():
    "8 epochs of 20 s with 100 items, 5 of 50 s with 25; a validation and a start in each"
    facts = fixed(bs=25, times=((25,0.0125,0.001),(100,0.02,0.001)), n_epoch=5, valid_time=2., epoch_start=1.)
    assert option(facts, 100).fit_time==pytest.approx(8*23)
    assert today_as_is(facts).fit_time==pytest.approx(5*53)

@pytest.mark.parametrize('has_n_epoch,charged', [(True,2),(False,1.25)])
def test_what_is_cut_off_an_epoch_is_no_gain(has_n_epoch, charged):
    "(450+300)/(450+150) = 1.25 epochs of 40 steps"
    facts = fixed(450., bs=150, n_epoch=1, times=((150,0.02,0.),(300,0.024,0.)), n_train=12_000, has_n_epoch=has_n_epoch)
    o = option(facts, 300)
    assert o.epochs==1.25
    assert o.fit_time==pytest.approx(charged*40*0.024)

# The table

def test_the_table_has_a_row_for_each_option():
    facts = cycle(bs=25, times=five, adam=True, lr=[0.01,0.1], lr_factor=3., trial=Trial(100))
    df = table_of(facts, options_of(facts, facts.noise)).set_index('bs')
    assert df.index.tolist()==[25,50,100,200,400,800]
    assert df.lr.tolist()==approx([0.3*k**0.5 for k in (1,2,4,8,16,32)])
    assert df.steps.tolist()==approx([1+100/bs for bs in df.index])
    assert df.examples.tolist()==approx([1+bs/100 for bs in df.index])
    assert df.time.tolist()==approx(list(df.steps*df.step_time/(5*0.0125)))

def test_todays_batch_is_made_of_micro_batches_that_ran():
    "One of a size between them is for a size of one's own choice"
    facts = facts_of(24, micro_bs=8, times=secs(8, 16, 32))
    assert option_of(facts, 512., 24).micro_bs==8
    assert option_of(facts, 512., 20).micro_bs==20
