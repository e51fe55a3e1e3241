"`BatchPlan`: what is said about a measured noise scale, sentence by sentence, what follows for this device, how it is drawn, and how it is carried out"
import dataclasses
import json
import math
import random
import re
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, RandomSampler, SubsetRandomSampler
from fastcore.foundation import L
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, TfmdDL
from fastai.data.load import DataLoader
from fastai.optimizer import Adam
from fastai_bs.accumulate import GradAccum
from fastai_bs.lr import ScaledLR
from fastai_bs.noise import NoiseScale
from fastai_bs.plan import BatchPlan
from fastai_bs.step_time import balanced_bs
from fastai_bs.scaling import linear_scaling, sqrt_scaling
from helpers import changes, loaders, picture, quiet_learner, random_states, regression

inf,nan = math.inf,math.nan
approx = lambda v: pytest.approx(v, rel=1e-12, abs=0)

def rows(n=30, noise_scale=100., low=80., high=130., n_items=40):
    return pd.DataFrame(dict(step=range(1,n+1), n_items=n_items, n_elems=float(n_items), tr_sigma=noise_scale, g_sq=1., noise_scale=noise_scale,
        low=low, high=high, mean_tr_sigma=noise_scale, mean_g_sq=1.))

def make(noise_scale=100., ci=(80.,130.), **kwargs):
    "A plan about which there is nothing else to say"
    now = kwargs.get('bs_now', kwargs.get('base_bs', 100))
    return BatchPlan(**{**dict(noise_scale=noise_scale, ci=ci, base_bs=now, bs_now=now, micro_now=now, base_lr=0.1, n_windows=30,
        trend=0, n_train=100_000, n_seen=50, n_passes=1., moved=False, loss_rose=False, level=0.95, df=rows()), **kwargs})

def secs(*sizes, a=0.01, c=0.0001, opt=0.001):
    "As timed on a device where a step takes `a + c*bs` seconds, `opt` of them the optimizer"
    return tuple((m,a+c*m,opt) for m in sizes)

five = secs(25, 50, 100, 200, 400) # With them 100 items are the fastest at a noise scale of 100: (100*0.01/0.0001)**0.5

# Of plans whose weights did not move; has a test of its own
present = " It is the noise scale at the present weights and tends to rise, also as the learning rate falls: measure again later."

def test_advice_is_about_todays_batch_size():
    "Not about the one that the learning rate belongs to, where a ScaledLR makes them differ"
    plan = make(base_bs=16, bs_now=100)
    assert plan.advice==make().advice and '100' in plan.advice and repr(plan).split('\n')[0].endswith('base_bs=16, bs_now=100)')
    assert [o for o in plan.plot()[0].get_legend_handles_labels()[1] if 'today' in o]==["today's batch size, 100"]

@pytest.mark.parametrize('noise_scale,bs',
    [(0,1),(0.3,1),(1,1),(1.4,1),(1.5,2),(3,4),(45,32),(46,64),(90.5,64),(90.6,128),(1000,1024),(1e7,2**23),(-3.,1),(inf,None),(nan,None)])
def test_balanced_bs(noise_scale, bs): assert balanced_bs(noise_scale)==bs==make(noise_scale).balanced_bs

def test_balanced_bs_is_within_2_42_of_both_minima():
    "S = S_min (1 + r/B) steps and E = E_min (1 + B/r) examples"
    r = np.geomspace(1.01, 1e5, 970)
    b = np.array([balanced_bs(o) for o in r])
    assert max((1+r/b).max(), (1+b/r).max())<2.42

# Sentence by sentence

few = "Only 9 windows were measured, too few for advice: run longer, with num_it=200 say, or take smaller windows with n_batch."
within = "Today's batch of {} items is as large as the noise scale, within its interval."
below = "Today's batch of {} items is below the noise scale: up to there, a larger one takes fewer steps for little more data."
above = "Today's batch of {} items is above the noise scale: a smaller batch learns the same from fewer examples."
later = "It is the noise scale of this part of the training and tends to rise, also as the learning rate falls: measure again later."
no_noise = "There is no noise in the gradient, as if all items were alike: any batch size takes the same steps, so use the smallest batch."
unknown = "The noise scale cannot be known from these data: run longer, with num_it=200 say."
at_least = "The noise scale is at least {} items; these data do not bound it from above, so run longer, with num_it=200 say."
rose = "The loss rose during the mock training, so the learning rate may be too high for this to mean much."
moved_on = "The noise scale {} during the mock training; this is the value of its last {} windows, so measure again later in training."
passes = "The measurement went through the training set {} times, so it speaks of these {} items only."
small_set = "The training set of {} items is small beside the noise scale: within it that is {}."
part = "Of the parameters {} are frozen, and the advice is about the rest: measure again when they are unfrozen."

advice = dict(
    few_windows=(dict(n_windows=9, trend=1, moved=True, n_passes=1.2, times=five, too_large=800, trained=0.5), few),
    few_windows_of_few_items=(dict(n_windows=9, n_passes=9.), few.replace('say,', 'say, or measure on more items,')),
    few_windows_and_loss_rose=(dict(n_windows=9, loss_rose=True), f"{rose} {few}"),
    ten_windows=(dict(n_windows=10), within.format(100)),
    longer=(dict(n_windows=9, n_seen=171), few.replace('200', '684')),
    within=(dict(), within.format(100)),
    within_at_lower_end=(dict(bs_now=80), within.format(80)),
    within_at_upper_end=(dict(bs_now=130), within.format(130)),
    below=(dict(bs_now=79), below.format(79)),
    below_by_far=(dict(bs_now=1), "Today's batch of 1 item is below the noise scale: up to there, a larger one takes fewer steps for little more data."),
    above=(dict(bs_now=131), above.format(131)),
    above_and_falling=(dict(bs_now=512, trend=-1), f"{above.format(512)} {moved_on.format('fell', 30)}"),
    below_and_rising=(dict(bs_now=32, trend=1), f"{below.format(32)} {moved_on.format('rose', 30)}"),
    large_numbers=(dict(noise_scale=1e6, ci=(9e5,1.2e6), bs_now=12345, n_train=10**8), below.format(12345)),
    no_noise=(dict(noise_scale=0., ci=(0.,0.9), moved=True), no_noise),
    hardly_any_noise=(dict(noise_scale=1.9, ci=(1.8,2.), bs_now=16), above.format(16)),
    noise_of_one_item=(dict(noise_scale=0.7, ci=(0.5,1.), bs_now=1), "Today's batch of 1 item is as large as the noise scale, within its interval."),
    unbounded=(dict(noise_scale=300., ci=(60.,inf), moved=True), at_least.format(60)),
    unbounded_from_a_single_item=(dict(noise_scale=300., ci=(1.,inf)), at_least.format(1).replace('1 items', '1 item')),
    unbounded_and_rising=(dict(noise_scale=300., ci=(60.,inf), trend=1, bs_now=512), f"{at_least.format(60)} {moved_on.format('rose', 30)}"),
    unbounded_after_many_passes=(dict(noise_scale=300., ci=(61.26,inf), n_passes=2.),
            f"{at_least.format(61.3).replace('say', 'say, or measure on more items')} {passes.format(2, 100_000)}"),
    no_estimate=(dict(noise_scale=inf, ci=(60.,inf), n_train=100), at_least.format(60)),
    unknown=(dict(noise_scale=inf, ci=(0.,inf), moved=True, times=five, too_large=800), unknown),
    unknown_and_rising=(dict(noise_scale=inf, ci=(0.,inf), trend=1, n_windows=22), f"{unknown} {moved_on.format('rose', 22)}"),
    loss_rose=(dict(noise_scale=inf, ci=(0.,inf), moved=True, loss_rose=True), f"{rose} {unknown}"),
    moved=(dict(moved=True), f"{within.format(100)} {later}"),
    rose=(dict(moved=True, trend=1, n_windows=15), f"{within.format(100)} {moved_on.format('rose', 15)}"),
    fell=(dict(trend=-1, n_windows=15), f"{within.format(100)} {moved_on.format('fell', 15)}"),
    frozen=(dict(trained=0.2493), f"{within.format(100)} {part.format('75.1%')}"),
    nearly_all_frozen=(dict(trained=0.00123, moved=True), f"{within.format(100)} {later} {part.format('99.9%')}"),
    passes=(dict(n_passes=13.37, n_train=500), f"{within.format(100)} {passes.format(13.4, 500)}"),
    passes_once_and_a_half=(dict(n_passes=1.5), within.format(100)),
    small_set=(dict(n_train=200), f"{within.format(100)} {small_set.format(200, 66.7)}"),
    not_small_set=(dict(n_train=400), within.format(100)),
    several=(dict(bs_now=32, moved=True, n_passes=4., n_train=100, trained=0.5, loss_rose=True),
            f"{rose} {below.format(32)} {later} {part.format('50%')} {passes.format(4, 100)} {small_set.format(100, 50)}"))

@pytest.mark.parametrize('kwargs,words', advice.values(), ids=advice)
def test_advice(kwargs, words): assert make(**kwargs).advice.replace(present, '')==words

# What the step times say, with figures by hand. On the device of `secs`, at a noise scale of 100, (1 + 100/bs)*(0.01 + 0.0001*bs) is
# 0.0625 s at 25 items, 0.045 at 50, 0.04 at 100, 0.045 at 200, 0.0625 at 400

leave = "On this device today's batch is predicted to be the fastest: leave it."
but_leave = "But on this device today's batch is predicted to be the fastest: leave it."
other = "On this device {} items a step, as {}, are predicted to reach the same loss in {} of the time, at {} by {}."
fastest_from = "Over the interval of the noise scale the fastest is from {} to {}."
if_anything = "For a noise scale above {} the fastest is larger, if anything."
do_not = "Do not accumulate: on this device that costs more time for the examples than it saves in steps."
not_beyond = "Do not accumulate beyond it: on this device that costs more time for the examples than it saves in steps."
memory = "Micro-batches of {} items did not fit in memory, {} did."
to_100 = other.format(100, 'one micro-batch', '64%', 'a learning rate of 0.25', 'adascale_gain') # (1+100/25)/(1+100/100) = 2.5 times 0.1
to_50 = other.format(50, 'one micro-batch', '72%', 'a learning rate of 0.0667', 'adascale_gain') # (1+100/100)/(1+100/50) = 2/3

device = dict(
    leave=(dict(times=five), f"{within.format(100)} {leave}"),
    larger=(dict(bs_now=25, times=five), f"{below.format(25)} {to_100}"),
    smaller=(dict(bs_now=400, times=five), f"{above.format(400)} "
            f"{other.format(100, 'one micro-batch', '64%', 'a learning rate of 0.0625', 'adascale_gain')}"), # 1.25/2
    smaller_and_rising=(dict(bs_now=400, times=five, trend=1), f"{above.format(400)} "
            f"{other.format(100, 'one micro-batch', '64%', 'a learning rate of 0.0625', 'adascale_gain')} "
            f"{moved_on.format('rose', 30)[:-1]}, before you make the batch smaller."),
    larger_and_rising=(dict(bs_now=25, times=five, trend=1), f"{below.format(25)} {to_100} {moved_on.format('rose', 30)}"),
    adam=(dict(bs_now=25, times=five, adam=True), f"{below.format(25)} " # (100/25)**0.5
            f"{other.format(100, 'one micro-batch', '64%', 'a learning rate of 0.2', 'capped_sqrt_scaling')}"),
    slice_of_rates=(dict(bs_now=25, times=five, base_lr=slice(1e-3,1e-2)), f"{below.format(25)} "
            f"{other.format(100, 'one micro-batch', '64%', 'learning rates of slice(0.0025, 0.025)', 'adascale_gain')}"),
    slice_of_one=(dict(bs_now=25, times=five, base_lr=slice(1e-2)), f"{below.format(25)} "
            f"{other.format(100, 'one micro-batch', '64%', 'learning rates of slice(0.025)', 'adascale_gain')}"),
    list_of_rates=(dict(bs_now=25, times=five, base_lr=[1e-4,1e-3,1e-2]), f"{below.format(25)} "
            f"{other.format(100, 'one micro-batch', '64%', 'learning rates of [0.00025, 0.0025, 0.025]', 'adascale_gain')}"),
    one_rate_that_is_whole=(dict(bs_now=25, times=five, base_lr=1), f"{below.format(25)} {to_100.replace('0.25', '2.5')}"),
    rate_of_a_scaled_learner=(dict(bs_now=25, base_bs=100, times=five), f"{below.format(25)} {to_100.replace('0.25', '0.1')}"),
    # 50 items: 3*0.015 s; today's 100 as 4 x 25: 2*(4*0.0115+0.001) = 0.094
    do_not_accumulate=(dict(bs_now=100, micro_now=25, times=secs(25, 50)), f"{within.format(100)} "
            f"{other.format(50, 'one micro-batch', '48%', 'a learning rate of 0.0667', 'adascale_gain')} {do_not}"),
    not_beyond=(dict(bs_now=25, times=secs(25, 50), ci=(95.,105.)), f"{below.format(25)} {to_50.replace('0.0667', '0.167')} {not_beyond}"),
    not_beyond_todays=(dict(bs_now=50, times=secs(25, 50), ci=(95.,105.)), f"{below.format(50)} {but_leave} {not_beyond}"),
    # With 8 of 10 ms spent once a step: at 400, 50 items 9*0.015 = 0.135 s, 2 x 50 5*0.022 = 0.11, 4 x 50 3*0.036 = 0.108; today's 25 17*0.0125 = 0.2125
    accumulate=(dict(noise_scale=400., ci=(390.,410.), bs_now=25, times=secs(25, 50, opt=0.008)), f"{below.format(25)} "
            f"{other.format(100, '2 x 50', '52%', 'a learning rate of 0.34', 'adascale_gain')}"), # 4*425/500
    accumulate_as_before=(dict(noise_scale=400., ci=(390.,410.), bs_now=100, micro_now=50, times=secs(25, 50, opt=0.008)), f"{below.format(100)} {but_leave}"),
    out_of_memory=(dict(times=five, too_large=800), f"{within.format(100)} {leave} {memory.format(800, 400)}"),
    out_of_memory_and_not_beyond=(dict(bs_now=50, times=secs(25, 50), ci=(95.,105.), too_large=100),
            f"{below.format(50)} {but_leave} {not_beyond} {memory.format(100, 50)}"),
    # (bs_low*a/c)**0.5 is 45 at 20 and 224 at 500
    range=(dict(times=five, ci=(20.,500.)), f"{within.format(100)} {leave} {fastest_from.format(50, 200)}"),
    range_from_todays=(dict(times=five, ci=(90.,500.)), f"{within.format(100)} {leave} {fastest_from.format(100, 200)}"),
    range_to_todays=(dict(times=five, ci=(20.,110.)), f"{within.format(100)} {leave} {fastest_from.format(50, 100)}"),
    # Of 81 items at least: 50 items 2.62*0.015 = 0.0393 s, 100 1.81*0.02 = 0.0362; today's 25 4.24*0.0125 = 0.053
    no_upper_end=(dict(noise_scale=300., bs_now=25, times=five, ci=(81.,inf)), f"{at_least.format(81)} " # 4*106/181 = 2.34
            f"{to_100.replace('64%', '68%').replace('0.25', '0.234')} {if_anything.format(81)}"),
    no_estimate=(dict(noise_scale=inf, times=five, ci=(81.,inf)), f"{at_least.format(81)} {leave} {if_anything.format(81)}"),
    few_steps_left=(dict(bs_now=25, times=five, n_train=1_999), f"{below.format(25)} {to_100} "
            "With 100 items a step, only 20 steps are left in an epoch: train for more epochs, or keep the batch smaller."),
    enough_steps_left=(dict(bs_now=25, times=five, n_train=2_000), f"{below.format(25)} {to_100}"),
    few_steps_today=(dict(times=five, n_train=1_000), f"{within.format(100)} {leave}"),
    all_at_once=(dict(bs_now=100, micro_now=25, times=secs(25, 50), ci=(20.,500.), too_large=100, moved=True, n_passes=4., n_train=399, trained=0.1,
            loss_rose=True),
            f"{rose} {within.format(100)} {other.format(50, 'one micro-batch', '48%', 'a learning rate of 0.0667', 'adascale_gain')} "
            f"{do_not} {memory.format(100, 50)} {later} {part.format('90%')} {passes.format(4, 399)} {small_set.format(399, 80)}"))

@pytest.mark.parametrize('kwargs,words', device.values(), ids=device)
def test_advice_about_this_device(kwargs, words): assert re.sub(apply_it, '', make(**kwargs).advice).replace(present, '')==words

apply_it = r' After plan\.apply\(learn\) go on saying (.+?), which is scaled for you\.(?= |$)'

@pytest.mark.parametrize('kwargs,says', [({},'0.1'), (dict(base_lr=slice(1e-3,1e-2)),'slice(0.001, 0.01)'), (dict(base_lr=[1e-4,1e-2]),'[0.0001, 0.01]')])
def test_advice_says_what_rate_to_go_on_with(kwargs, says):
    "`plan.lr` would be scaled twice"
    assert re.findall(apply_it, make(bs_now=25, times=five, **kwargs).advice)==[says]

def test_advice_says_where_the_rate_is_from():
    words = make(bs_now=25, times=five, rate_given=False).advice
    assert "No rate was given, so that is 0.1, the learner's own, scaled: after plan.apply(learn) say the one you train with." in words
    assert not re.findall(apply_it, words)

@pytest.mark.parametrize('rate_given', [True,False])
def test_nothing_is_scaled_where_the_batch_stays(rate_given):
    words = make(times=five, rate_given=rate_given).advice
    assert 'fastest: leave it' in words and 'plan.apply' not in words

@pytest.mark.parametrize('ci,n_passes,words', [
    ((60.,inf), 11., "The noise scale is at least 60 items; these data do not bound it from above, and more passes through the same 500 items will not help: "
                     "take more of them."),
    ((0.,inf), 11., "The noise scale cannot be known from these data, and more passes through the same 500 items will not help: take more of them."),
    ((0.,inf), 10., unknown.replace('say', 'say, or measure on more items'))])
def test_advice_after_many_passes(ci, n_passes, words):
    assert make(noise_scale=inf, ci=ci, n_passes=n_passes, n_train=500).advice.startswith(words)

@pytest.mark.parametrize('kwargs,there', [(dict(n_workers=2, n_train=1_999),True), (dict(n_workers=0, n_train=1_999),False), (dict(n_workers=2),False)])
def test_advice_about_workers(kwargs, there):
    "In short epochs"
    assert ("the start of the loader's workers weighs more" in make(bs_now=25, times=five, **kwargs).advice)==there

@pytest.mark.parametrize('part,words', [(0.5,'50%'), (0.996,'0.4%'), (0.0949,'90.5%'), (0.004,'99.6%')])
def test_parts_in_percent(part, words): assert f"Of the parameters {words} are frozen" in make(trained=part).advice

@pytest.mark.parametrize('kwargs,there', [({},True), (dict(moved=True),False), (dict(trend=1),False), (dict(ci=(80.,inf)),False),
    (dict(noise_scale=0.5, ci=(0.,0.9)),False), (dict(n_windows=9),False)])
def test_advice_of_weights_that_did_not_move(kwargs, there): assert (present in make(**kwargs).advice)==there

@pytest.mark.parametrize('kwargs,words', [
    (dict(sums=True), "The loss is a sum over items, so its gradient grows with the batch by itself: divide the learning rate given here by the ratio of the "
                      "batch sizes, or take the mean as the loss."),
    (dict(failed=((200,'ValueError: no'),(400,'KeyError: 3'))),
     "Micro-batches of 200, 400 items could not be run, so nothing is known of them (ValueError: no)."),
    (dict(failed=((200,'ValueError: '+'no '*50),)), "no no ...)."),
    (dict(noise_scale=300., ci=(290.,310.), max_bs=150), "Larger micro-batches were not tried, for max_bs=150.")])
def test_advice_about_what_is_special(kwargs, words):
    timed = dict(times=secs(50, 100), micro_now=100)
    assert words in make(**timed, **kwargs).advice and words not in make(**timed).advice

@pytest.mark.parametrize('kwargs', [dict(sums=True, adam=True), dict(max_bs=1000), dict(max_bs=None)])
def test_nothing_special(kwargs): assert make(times=secs(50, 100), micro_now=100, **kwargs).advice==make(times=secs(50, 100), micro_now=100).advice

@pytest.mark.parametrize('n_train,there', [(10_000,True), (200,False)])
def test_larger_than_what_was_compared(n_train, there):
    "Where an epoch does not hold two larger batches, there is nothing larger to speak of"
    plan = make(inf, (1000.,inf), times=secs(50, 100), micro_now=100, n_train=n_train)
    assert ('the fastest is larger, if anything' in plan.advice)==there

@pytest.mark.parametrize('n_windows,n_enough,n_it', [(3,500,500), (3,None,200), (9,120,120), (20,120,200), (20,500,500)])
def test_how_much_longer(n_windows, n_enough, n_it):
    assert f'num_it={n_it} say' in make(inf, (10.,inf), n_windows=n_windows, n_enough=n_enough).advice
    assert 'Only 1 window was measured' in make(n_windows=1).advice

# The batch size

@pytest.mark.parametrize('noise_scale,ci,n_windows,known', [(100.,(80.,130.),10,100.), (100.,(80.,130.),9,nan), (100.,(0.,130.),30,100.), (0.,(0.,0.5),30,0.),
    (100.,(80.,inf),30,80.), (inf,(80.,inf),30,80.), (100.,(0.,inf),30,nan), (inf,(0.,inf),30,nan), (100.,(80.,inf),9,nan), (nan,(0.,inf),0,nan)])
def test_the_noise_scale_that_it_reckons_with(noise_scale, ci, n_windows, known):
    assert make(noise_scale, ci, n_windows=n_windows, times=five).noise_known==pytest.approx(known, nan_ok=True)

@pytest.mark.parametrize('noise_scale,ci,bs,bs_range', [(100.,(80.,130.),100,(100,100)), (25.,(6.,99.),50,(25,100)), (400.,(101.,1600.),200,(100,400)),
    (7.,(0.,30.),25,(25,50)), (300.,(80.,inf),100,(100,None)), (0.,(0.,0.),25,(25,25)), (inf,(0.,inf),100,(100,100)), (1e5,(9e4,1.1e5),400,(400,400))])
def test_fastest_batch_size(noise_scale, ci, bs, bs_range):
    "The root of noise_scale*a/c, here 100 items, among those that are there; today's where nothing is known"
    plan = make(noise_scale, ci, times=five)
    assert plan.bs==bs and plan.bs_range==bs_range and type(plan.bs) is int

@pytest.mark.parametrize('slower,bs', [(1.049,50), (1.051,100)])
def test_the_smallest_of_those_within_5_percent(slower, bs):
    "Half the batch takes 3/2 of the steps"
    assert make(times=((50,slower*0.02/1.5,0.),(100,0.02,0.))).bs==bs

@pytest.mark.parametrize('slower,micro_bs,n_acc', [(1.049,100,1), (1.051,50,2)])
def test_the_largest_micro_batch_within_5_percent(slower, micro_bs, n_acc):
    "100 items in one, or as 2 x 50 where that is clearly faster"
    plan = make(ci=(99.,101.), times=((50,0.11,0.01),(100,slower*0.21,0.01)))
    assert (plan.table.micro_bs.iloc[1],plan.table.n_acc.iloc[1])==(micro_bs,n_acc)

def test_micro_batches_of_the_plan():
    plan = make(400., (390.,410.), bs_now=25, times=secs(25, 50, opt=0.008))
    assert (plan.bs,plan.micro_bs,plan.n_acc)==(100,50,2) and type(plan.micro_bs) is type(plan.n_acc) is int

@pytest.mark.parametrize('noise_scale,bs', [(100.,100), (190.,200), (50.,100), (0.,100), (3000.,3200), (1e9,100*2**23)])
def test_without_step_times_the_one_nearest_to_the_noise_scale(noise_scale, bs):
    "On a log scale, reached by accumulation"
    plan = make(noise_scale, (0.9*noise_scale,1.1*noise_scale), n_train=10**11)
    assert (plan.bs,plan.micro_bs,plan.n_acc,plan.bs_range)==(bs,100,bs//100,(bs,bs)) and plan.table.step_time.isna().all() and plan.table.time.isna().all()
    assert all(math.isnan(o) for o in plan.step_time) and 'On this device' not in plan.advice and 'Step time' not in repr(plan)

# The table, against the formulas

def candidates(times, micro_now, bs_now, noise, n_train):
    sizes = {m for m,*_ in times} or {micro_now}
    bs = max(sizes)*2
    while bs<=8*max([bs_now]+[noise]*(noise==noise)):
        sizes.add(bs)
        bs *= 2
    return sorted({o for o in sizes if 2*o<=n_train}|{bs_now})

def way(bs, plan):
    "Seconds, micro-batch, n_acc: with the largest micro-batch that takes no more than 5% above the fastest"
    ways = [((math.ceil(bs/m)-1)*(t-opt)+t,m,math.ceil(bs/m)) for m,t,opt in plan.times if bs%m==0]
    if (plan.bs_now,plan.micro_now)==(bs,plan.micro_now): # The last micro-batch of today's window may be short, and takes its share of the time
        ways += [(bs/m*(t-opt)+opt,m,math.ceil(bs/m)) for m,t,opt in plan.times if m==plan.micro_now]
    if not ways: return nan,min(bs, plan.micro_now),math.ceil(bs/plan.micro_now)
    return max((o for o in ways if o[0]<=1.05*min(ways)[0]), key=lambda o: o[1])

def gain(bs, noise, base): return bs/base*(base+noise)/(bs+noise) if noise<inf else bs/base
def capped(bs, noise, base): return math.sqrt(min(bs, noise)/min(base, noise)) if noise else 1.
def surge(bs, noise, base): return math.sqrt(bs/base)*(base+noise)/(bs+noise)

tables = dict(plain=dict(times=five), accumulated=dict(times=secs(8, 16, 32), bs_now=128, micro_now=32),
    optimizer_part=dict(times=secs(16, 32, 64, opt=0.0095, c=0.00005), bs_now=64), scaled=dict(times=five, base_bs=25, bs_now=100),
    ragged=dict(times=secs(9, 18, 36, 72), bs_now=50, micro_now=18), odd=dict(times=secs(3, 7, 15, 30), bs_now=15),
    adam=dict(times=five, adam=True, base_bs=32, bs_now=100), no_times=dict(), no_times_accumulated=dict(bs_now=96, micro_now=32),
    small_set=dict(times=five, n_train=399), smaller_set=dict(times=five, n_train=150), largest_is_half=dict(times=five, n_train=800),
    no_upper_end=dict(times=five, ci=(60.,inf)), unknown=dict(times=five, ci=(0.,inf)), few_windows=dict(times=five, n_windows=9),
    no_noise=dict(times=five, noise_scale=0., ci=(0.,0.5)), much_noise=dict(times=five, noise_scale=1e4, ci=(9e3,1.1e4)),
    slice=dict(times=five, base_lr=slice(1e-3,1e-2), bs_now=200), list=dict(times=five, base_lr=[1e-3,1e-2], bs_now=50),
    uneven=dict(times=((25,0.02,0.001),(50,0.021,0.015),(100,0.05,0.001),(200,0.04,0.002))))

@pytest.mark.parametrize('kwargs', tables.values(), ids=tables)
def test_table(kwargs):
    plan = make(**kwargs)
    df,noise,now,base,n = plan.table,plan.noise_known,plan.bs_now,plan.base_bs,len(plan.table)
    assert list(df.columns)==['bs','micro_bs','n_acc','lr','steps','examples','step_time','time','linear_scaling','adascale_gain','sqrt_scaling',
        'capped_sqrt_scaling','surge_scaling']
    assert df.bs.tolist()==candidates(plan.times, plan.micro_now, now, noise, plan.n_train) and now in df.bs.values
    ways = [way(bs, plan) for bs in df.bs]
    same = lambda col, v: np.testing.assert_allclose(df[col].astype(float), np.array(v, dtype=float), rtol=1e-12, err_msg=col)
    same('step_time', [o[0] for o in ways])
    assert df.micro_bs.tolist()==[o[1] for o in ways] and df.n_acc.tolist()==[o[2] for o in ways]
    lr = plan.base_lr
    lr = lr.stop if isinstance(lr, slice) else lr[-1] if isinstance(lr, list) else lr
    same('linear_scaling', lr*df.bs/base)
    same('sqrt_scaling', lr*(df.bs/base)**0.5)
    if math.isnan(noise):
        assert df[['steps','examples','time','adascale_gain','capped_sqrt_scaling','surge_scaling']].isna().all().all()
        return same('lr', df.linear_scaling)
    same('steps', 1+noise/df.bs)
    same('examples', 1+df.bs/noise if noise else [inf]*n)
    secs_now = (1+noise/now)*way(now, plan)[0]
    same('time', [(1+noise/bs)*o[0]/secs_now for bs,o in zip(df.bs, ways)])
    for nm,f in (('adascale_gain',gain),('capped_sqrt_scaling',capped),('surge_scaling',surge)): same(nm, [lr*f(bs, noise, base) for bs in df.bs])
    shown = float(f'{noise:.3g}') # The rule has three digits of the noise scale
    same('lr', [lr*(capped if plan.adam else gain)(bs, shown, base) for bs in df.bs])
    if plan.times: assert plan.bs==min(bs for bs,t in zip(df.bs, df.time) if t<=1.05*df.time.min())

@pytest.mark.parametrize('n_train,largest', [(100_000,800), (1600,800), (1599,400), (401,200), (199,100), (50,100)])
def test_an_epoch_holds_two_batches_at_least(n_train, largest):
    "But for today's; and accumulation goes to 8 times the noise scale, or today's batch, at most"
    assert make(times=five, n_train=n_train).table.bs.max()==largest

def test_eight_times_todays_batch():
    assert make(10., (9.,11.), times=five).table.bs.max()==800 and make(10., (9.,11.), times=five, bs_now=25).table.bs.max()==400
    assert make(100., (90.,110.), micro_now=25, times=secs(25)).table.bs.tolist()==[25,50,100,200,400,800]
    assert make(99., (90.,110.), micro_now=25, times=secs(25), bs_now=25).table.bs.tolist()==[25,50,100,200,400]

def test_step_time():
    "Least squares of the relative errors: none, on the device of `secs`"
    a,c,error = make(times=five).step_time
    assert (a,c)==(pytest.approx(0.01),pytest.approx(0.0001)) and error==pytest.approx(0, abs=1e-9)

# The learning rate

@pytest.mark.parametrize('adam,ci,name,factor', [(False,(80.,130.),'adascale_gain',2.5), (False,(50.,inf),'adascale_gain',4*75/150),
    (False,(0.,inf),'linear_scaling',4.), (True,(80.,130.),'capped_sqrt_scaling',2.), (True,(49.,inf),'capped_sqrt_scaling',1.4),
    (True,(0.,inf),'sqrt_scaling',2.)])
def test_rule(adam, ci, name, factor):
    "By optimizer; without a noise scale the plain one. From 25 to 100 items"
    plan = make(ci=ci, adam=adam, bs_now=25, times=five)
    assert plan.rule_name==name and plan.rule(4)==approx(factor)
    if math.isfinite(ci[1]): assert plan.lr==approx(0.1*factor)
    if ci==(0.,inf): assert plan.rule is (sqrt_scaling if adam else linear_scaling) and plan.lr==0.1

def test_the_rule_has_three_digits_of_the_noise_scale():
    "As the code shows it: whoever pastes that trains at the same rate"
    for adam in (False,True): assert make(123.456, adam=adam, base_bs=25).rule.keywords==dict(noise_scale=123., base_bs=25)

@pytest.mark.parametrize('base_lr,lr', [(0.1,0.25), (1,2.5), (0.,0.), (slice(1e-3,1e-2),slice(2.5e-3,2.5e-2)), (slice(None,1e-2),slice(None,2.5e-2)),
    (slice(0.,1e-2),slice(0.,2.5e-2)), ([1e-3,1e-2],[2.5e-3,2.5e-2]), ((1e-3,1e-2),[2.5e-3,2.5e-2]), (L(1e-3,1e-2),[2.5e-3,2.5e-2]),
    (np.array([1e-3,1e-2]),[2.5e-3,2.5e-2]), ([0.1],[0.25])], ids=str)
def test_learning_rate(base_lr, lr):
    plan = make(bs_now=25, times=five, base_lr=base_lr)
    parts = lambda o: [o.start,o.stop] if isinstance(o, slice) else list(o) if isinstance(o, list) else [o]
    assert type(plan.lr) is type(lr) and [v and pytest.approx(v) for v in parts(lr)]==parts(plan.lr)
    assert plan.table.lr[plan.table.bs==100].item()==pytest.approx(parts(lr)[-1]) # Of the last parameter group

# In words

@pytest.mark.parametrize('value,shown',
    [(0,'0'),(0.00123,'0.00123'),(0.5,'0.5'),(1,'1'),(3.14159,'3.14'),(9.999,'10'),(99.96,'100'),(10,'10'),(100,'100'),(1234.5,'1230'),(1e6,'1000000'),
    (inf,'inf'),(nan,'nan')])
def test_numbers_of_three_digits(value, shown): assert f'noise_scale={shown} [' in repr(make(value, (0.,inf)))

def test_repr():
    plan = make(512.3, (430.1,640.7), bs_now=64, base_lr=1e-3, times=secs(32, 64, 128, 256, c=1e-5))
    head,*rest = repr(plan).split('\n')
    assert head=='BatchPlan(noise_scale=512 [430, 641], balanced_bs=512, bs=256, micro_bs=256, n_acc=1, lr=0.003, base_bs=64)' # 4*576/768
    rest = ' '.join(o.strip() for o in rest)
    assert rest.startswith(plan.advice+' Step time here: 10 ms + 0.01 ms per item, within ')
    assert rest.endswith('%; without rounding the fastest is from 656 to 800 items.') # (430.1*0.01/0.00001)**0.5
    assert max(map(len, repr(plan).split('\n')[1:]))<=110
    assert repr(make(inf, (0.,inf)))==("BatchPlan(noise_scale=inf [0, inf], balanced_bs=None, bs=100, micro_bs=100, n_acc=1, lr=0.1, base_bs=100)\n"
        f"  {unknown}")
    assert repr(make(base_lr=slice(1e-3,1e-2))).startswith('BatchPlan(noise_scale=100 [80, 130], balanced_bs=128, bs=100, micro_bs=100, n_acc=1, '
        'lr=slice(0.001, 0.01), base_bs=100)\n')

def test_repr_of_the_step_time():
    "Nothing where two sizes at most ran, as nobody knows how good the fit is"
    for n in (0,1,2): assert 'Step time' not in repr(make(times=secs(25, 50, 100)[:n], bs_now=25))
    times = ((25,0.0125,0.),(50,0.015,0.),(100,0.03,0.))
    a,c,error = make(times=times).step_time
    x = np.array([[1/t,m/t] for m,t,_ in times])
    (by_a,by_c),(ss,),*_ = np.linalg.lstsq(x, np.ones(3), rcond=None)
    assert (a,c,error)==(pytest.approx(by_a),pytest.approx(by_c),pytest.approx(ss**0.5))
    text = ' '.join(repr(make(times=times)).split())
    assert f"Step time here: {1e3*a:.3g} ms + {1e3*c:.3g} ms per item, within {100*error:.2g}%; without rounding the fastest is from" in text
    assert 'without rounding' not in repr(make(ci=(0.,inf), times=five)) and 'Step time here: 10 ms' in repr(make(ci=(0.,inf), times=five))

def _cells(html): return [r.split('<td>')[1].split('</td>')[0] for r in html.split('<tr>') if '<td>' in r]

def test_repr_html():
    html = make(bs_now=25, times=five)._repr_html_()
    assert _cells(html)==['25 (today)','50','100 (fastest)','200','400','800'] # A power of two is not among them
    assert _cells(make(150., bs_now=64, times=secs(32, 64, 128, 256, c=0.001))._repr_html_())==['32 (fastest)','64 (today)','128 (balanced)','256','512','1024']
    assert 'step_time (s)' in html and "time (today's = 1)" in html and 'surge_scaling' not in html and 'NaN' not in html
    assert '<th>lr</th>' in html and '<td>0.25</td>' in html

def test_repr_html_is_escaped():
    html = make(bs_now=25, times=five)._repr_html_()
    assert 'Today&#x27;s batch of 25 items' in html and "Today's batch" not in html

def test_repr_html_without_step_times_and_without_a_noise_scale():
    for plan in (make(), make(inf, (0.,inf)), make(times=five, ci=(0.,inf))):
        html = plan._repr_html_()
        assert 'NaN' not in html and 'None' not in html.split('<table')[1] and html.count('<p>')==3

@pytest.mark.parametrize('kwargs', [dict(times=five, too_large=800), dict(), dict(noise_scale=inf, ci=(0.,inf)), dict(base_lr=slice(1e-3,1e-2)),
    dict(base_lr=np.array([1e-3,1e-2]), bs_now=25, times=five), dict(base_lr=L(1e-3,1e-2)), dict(base_lr=np.float32(0.1)),
    dict(adam=True, times=five)], ids=str)
def test_to_dict(kwargs):
    plan = make(**kwargs)
    d = json.loads(json.dumps(plan.to_dict()))
    fields = {f.name for f in dataclasses.fields(plan)}-{'df'}
    assert set(d)==fields|{'balanced_bs','bs','bs_range','micro_bs','n_acc','rule_name','lr','step_time','advice','code'}
    for nm in ('noise_scale','base_bs','bs_now','micro_now','n_windows','trend','n_train','n_seen','n_passes','moved','loss_rose','level','adam','trained',
               'too_large','balanced_bs','bs','micro_bs','n_acc','rule_name','advice','code'): assert d[nm]==getattr(plan, nm)
    assert d['ci']==list(plan.ci) and d['bs_range']==list(plan.bs_range) and d['times']==[list(o) for o in plan.times]
    assert all(a==b or math.isnan(b) for a,b in zip(d['step_time'], plan.step_time))
    for nm in ('lr','base_lr'):
        v = getattr(plan, nm)
        assert d[nm]==([v.start,v.stop] if isinstance(v, slice) else list(v) if isinstance(v, (list,L,np.ndarray)) else v)

def test_a_plan_is_a_record():
    "It cannot be altered, and compares by identity: it holds a data frame"
    plan = make()
    with pytest.raises(dataclasses.FrozenInstanceError): plan.noise_scale = 1.
    assert plan==plan and plan!=make() and len({plan,make()})==2
    other = dataclasses.replace(plan, times=five)
    assert other.bs==100 and len(other.table)==6 and plan.table.step_time.isna().all() # Nothing that was worked out is carried over

def test_columns(): assert list(NoiseScale().df.columns)==list(make().df.columns)

# The plot

def _band(ax, i=0): return ax.collections[i].get_paths()[0].vertices
def _line(ax, label): return next(o for o in ax.lines if o.get_label().startswith(label))
def _labels(ax): return {t.get_text() for t in ax.get_legend().get_texts()}

def _drawn(ax, tmp_path):
    "The picture, and that every number on it is one that its axes can show"
    ax = np.ravel(ax)
    ax[0].figure.savefig(tmp_path/'plot.png', dpi=40)
    for o in ax[0].figure.axes:
        assert all(np.isfinite(v) and v>0 for v in o.get_ylim())
        for v in (*(line.get_xydata() for line in o.lines if line.get_transform()==o.transData), *(p.vertices for c in o.collections for p in c.get_paths())):
            assert np.isfinite(v).all() and (v>0).all()
    return plt.imread(tmp_path/'plot.png')

def test_plot_has_two_panels(tmp_path):
    ax = make(times=five).plot()
    assert len(ax)==2 and ax[0].figure is ax[1].figure and _drawn(ax, tmp_path).std()>0
    assert [o.get_xlabel() for o in ax]==['items measured','batch size (items)']

def test_plot_of_the_noise_scale():
    df = rows(30, noise_scale=np.linspace(50,150,30), low=np.linspace(20,100,30), high=np.linspace(300,200,30))
    ax,_ = make(df=df, bs_now=64).plot()
    assert (ax.get_yscale(),ax.get_xlabel(),ax.get_ylabel())==('log','items measured','gradient noise scale (items)')
    assert np.allclose(_line(ax, 'noise scale, moving mean').get_xydata(), np.c_[np.arange(1,31)*40, df.noise_scale])
    assert list(_line(ax, "today's batch size, 64").get_ydata())==[64,64]
    assert _labels(ax)=={'noise scale, moving mean (lags)','its interval',"today's batch size, 64",'the plan: 100 [80, 130] at 95%',
        'noise: tr_sigma (right)','signal: g_sq (right)'}
    bottom,top = ax.get_ylim()
    assert bottom<20 and top>300 and (_band(ax)[:,1].min(),_band(ax)[:,1].max())==(20,300)

def test_plot_of_the_last_stretch():
    "The plan's own value and its interval, whole, over the windows that it speaks of"
    ax,_ = make(1000., (600.,2500.), n_windows=12).plot()
    x,y = _line(ax, 'the plan').get_data()
    assert list(x)==[19*40,30*40] and list(y)==[1000,1000]
    band = _band(ax, 1)
    assert (band[:,1].min(),band[:,1].max())==(600,2500) and (band[:,0].min(),band[:,0].max())==(760,1200)
    assert ax.get_ylim()[0]<80 and ax.get_ylim()[1]>2500

def test_plot_of_a_stretch_without_upper_end():
    "The band leaves the picture at the top"
    ax,_ = make(300., (60.,inf)).plot()
    assert _band(ax, 1)[:,1].min()==60 and _band(ax, 1)[:,1].max()>=ax.get_ylim()[1]>300

@pytest.mark.parametrize('noise_scale,ci', [(inf,(60.,inf)), (0.,(0.,1.)), (inf,(0.,inf))])
def test_plot_of_a_value_that_no_log_axis_shows(noise_scale, ci, tmp_path):
    ax = make(noise_scale, ci, times=five).plot()
    assert not any(o.get_label().startswith('the plan') for o in ax[0].lines)
    _drawn(ax, tmp_path)

@pytest.mark.parametrize('kwargs', [tables[nm] for nm in ('plain','accumulated','ragged','scaled','adam','uneven')])
def test_plot_of_time_and_examples(kwargs, tmp_path):
    "The lines are the table's, the band is the time at the two ends of the interval, and the three batch sizes are marked"
    plan = make(**kwargs)
    _,ax = axs = plan.plot()
    df,now = plan.table,plan.table.bs.tolist().index(plan.bs_now)
    assert np.allclose(_line(ax, 'time').get_xydata(), df[['bs','time']]) and _line(ax, 'time').get_ydata()[now]==1
    assert np.allclose(_line(ax, 'examples').get_xydata(), np.c_[df.bs, (100+df.bs)/(100+plan.bs_now)])
    ends = [(1+r/df.bs)*df.step_time/((1+r/plan.bs_now)*df.step_time[now]) for r in plan.ci]
    band,n = _band(ax),len(df) # Along the lower edge, and back along the upper one
    points = {(round(x, 6),round(y, 9)) for x,y in band}
    assert points=={(round(x, 6),round(y, 9)) for e in ends for x,y in zip(df.bs.astype(float), e)} and len(ax.collections)==1 and n>2
    for label,x in ((f"today's, {plan.bs_now}",plan.bs_now),('balanced, 128',128)):
        line = _line(ax, label)
        assert line.get_label()==label and list(line.get_xdata())==[x,x]
    star = _line(ax, 'fastest')
    assert star.get_label()==f'fastest, {plan.bs}' and np.allclose(star.get_xydata(), [[plan.bs, df.time[df.bs==plan.bs].item()]])
    assert (ax.get_xscale(),ax.get_yscale())==('log','log') and ax.get_xticks().tolist()==df.bs.tolist() and len(ax.get_xticks(minor=True))==0
    assert [o.get_text() for o in ax.get_xticklabels()]==[str(o) for o in df.bs]
    _drawn(axs, tmp_path)

def test_plot_of_what_is_known():
    "No band without an upper end, no times where none ran, no examples without noise"
    lines = lambda plan: [o.split(',')[0] for o in plan.plot()[1].get_legend_handles_labels()[1]]
    assert lines(make(times=five))==["today's",'balanced','time to a given loss','fastest','examples']
    unbounded = make(300., (80.,inf), times=five)
    assert lines(unbounded)==["today's",'balanced','time to a given loss','fastest','examples'] and not unbounded.plot()[1].collections
    assert lines(make())==["today's",'balanced','examples']
    assert lines(make(0., (0.,0.5), times=five))==["today's",'balanced','time to a given loss','fastest']
    assert lines(make(inf, (0.,inf), times=five))==["today's"]

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('nm', ['no_times_accumulated','smaller_set','no_upper_end','unknown','few_windows','no_noise','much_noise','list'])
def test_plots_are_drawn_without_a_warning(nm, tmp_path): _drawn(make(**tables[nm]).plot(), tmp_path)

def test_plot_on_given_axes():
    "Two for both panels, one for the first alone"
    _,axs = plt.subplots(1,3)
    assert make(times=five).plot(axs[1]) is axs[1] and axs[1].get_xlabel()=='items measured' and len(axs[1].lines)>=3
    both = make(times=five).plot(ax=axs[[0,2]])
    assert both[0] is axs[0] and both[1] is axs[2] and [o.get_xlabel() for o in both]==['items measured','batch size (items)']
    one = np.array([plt.figure().add_subplot()])
    assert make(times=five).plot(one) is one and one[0].get_xlabel()=='items measured'
    assert len(plt.get_fignums())==2

holes = dict(nan=dict(noise_scale=nan, low=nan, high=nan), unbounded=dict(high=inf), no_estimate=dict(noise_scale=inf, low=30., high=inf),
    nothing_known=dict(noise_scale=inf, low=0., high=inf), no_noise=dict(noise_scale=0., low=0., high=0.))

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('hole', holes.values(), ids=holes)
def test_plot_with_rows_that_say_nothing(hole, tmp_path):
    df = rows()
    df.loc[:4,list(hole)] = list(hole.values())
    ax = make(df=df).plot()[0]
    ax.figure.savefig(tmp_path/'plot.png', dpi=40)
    known = np.isfinite(df.noise_scale) & (df.noise_scale>0)
    assert _line(ax, 'noise scale, moving mean').get_ydata().tolist()==[100.]*known.sum() and ax.get_ylim()==(40, 260) # A few low ends apart do not move it
    assert np.isfinite(_band(ax)).all()

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('hole', holes.values(), ids=holes)
def test_plot_of_nothing_else(hole, tmp_path):
    "Where no row says anything, today's batch size is still drawn"
    df = rows()
    df[list(hole)] = list(hole.values())
    ax = make(df=df).plot()[0]
    ax.figure.savefig(tmp_path/'plot.png', dpi=40)
    assert list(_line(ax, "today's batch size, 100").get_ydata())==[100,100] and np.isfinite(_line(ax, 'noise scale, moving mean').get_ydata()).all()

def test_plot_without_a_row(tmp_path):
    "Today's batch size, and nothing of a noise scale"
    axs = make(nan, (0.,inf), n_windows=0, df=rows(0)).plot()
    _drawn(axs, tmp_path)
    assert list(_line(axs[0], "today's batch size, 100").get_ydata())==[100,100]
    assert not any(o.get_label().startswith('the plan') or len(o.get_xdata()) and o.get_label().startswith('noise scale') for o in axs[0].lines)

# Carrying it out

def net_learner(dls=None, n=96, bs=8, cbs=None, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4,2))
    return quiet_learner(dls or loaders(regression(n, dtype=torch.float32), bs, shuffle=True), model, cbs=cbs, **kwargs)

def small(noise_scale=64., micro_now=8, times=((4,0.01,0.),(8,0.01,0.),(16,0.01,0.),(32,0.011,0.)), **kwargs):
    "Of 8 items a step; 32 are the fastest, in one micro-batch"
    return make(noise_scale, kwargs.pop('ci', (60.,70.)), bs_now=kwargs.pop('bs_now', 8), micro_now=micro_now, times=times, n_train=96, **kwargs)

def accumulated(**kwargs): return small(**{**dict(noise_scale=1000., ci=(990.,1010.), times=((4,0.01,0.009),(8,0.011,0.009))), **kwargs}) # As n x 8

def accums(learn): return [cb for cb in learn.cbs if isinstance(cb, (GradAccum,GradientAccumulation,ScaledLR))]

def test_these_plans():
    assert [(p.bs,p.micro_bs,p.n_acc) for p in (small(),accumulated())]==[(32,32,1),(32,8,4)]

def test_cbs_are_fresh_each_time():
    plan = accumulated()
    (accum,scaled),others = plan.cbs,plan.cbs
    assert type(accum) is GradAccum and accum.n_acc==4 and type(scaled) is ScaledLR and scaled.base_bs==8
    assert scaled.rule.keywords==dict(noise_scale=1000., base_bs=8)
    assert not {*map(id, (accum,scaled))} & {*map(id, others)}

class Twice(DataLoader):
    "A loader whose items come from its own method"
    def create_item(self, s): return tuple(2*o for o in super().create_item(s))

@pytest.mark.parametrize('cls,kwargs', [(DataLoader,dict(shuffle=True, drop_last=True)), (DataLoader,dict(shuffle=False)),
    (Twice,dict(shuffle=False, drop_last=True)), (TfmdDL,dict(shuffle=False, after_item=lambda o: o+1)),
    (TfmdDL,dict(shuffle=True, after_batch=lambda o: o*3))])
def test_apply_keeps_the_settings_of_the_loader(cls, kwargs):
    "The same items, transforms and order in larger batches; the validation loader stays what it is"
    items = regression(90, dtype=torch.float32)
    dls = DataLoaders(cls(items, bs=8, num_workers=0, **kwargs), DataLoader(items[:8], bs=8, num_workers=0), device='cpu')
    was,valid = dls.train,dls.valid
    learn = small().apply(net_learner(dls))
    now = learn.dls.train
    assert type(now) is cls and now is not was and now.bs==32 and was.bs==8 and learn.dls.valid is valid and now.dataset is was.dataset
    assert dls.train is was # Others may share it
    assert all(getattr(now, nm)==getattr(was, nm) for nm in ('shuffle','drop_last','num_workers','n','device'))
    batches = lambda dl: torch.cat([b[0] for b in dl])
    if not kwargs.get('shuffle'):
        n = 64 if kwargs.get('drop_last') else 90
        assert torch.equal(batches(now)[:n], batches(was)[:n]) and len(batches(now))==n
    else:
        firsts = sorted(batches(now)[:,0].tolist())
        if not kwargs.get('drop_last'): assert firsts==sorted(batches(was)[:,0].tolist())
        else: assert len(firsts)==len({*firsts} & {x[0].item() for x,_ in items})==64 # Each once
    assert [len(b[0]) for b in now][:2]==[32,32] and len(now)==(2 if kwargs.get('drop_last') else 3)

def test_apply_on_torch_loaders():
    "With their sampler and generator, which are where they were"
    items = regression(96, dtype=torch.float32)
    gen = torch.Generator().manual_seed(3)
    for sampler in (RandomSampler(items, generator=gen), SubsetRandomSampler(range(50), generator=gen)):
        dl = TorchDataLoader(items, batch_size=8, sampler=sampler, drop_last=True, generator=torch.Generator().manual_seed(4), collate_fn=list)
        state = gen.get_state(),dl.generator.get_state()
        learn = small().apply(net_learner(DataLoaders(dl, dl)))
        now = learn.dls.train
        assert now.batch_size==32 and now.sampler is sampler and now.dataset is items and now.drop_last
        assert now.collate_fn is list and now.generator is dl.generator
        assert learn.dls.valid is dl and dl.batch_size==8
        assert torch.equal(gen.get_state(), state[0]) and torch.equal(dl.generator.get_state(), state[1])

class OwnLoader:
    "Neither fastai's nor torch's, with a way to change the batch size"
    def __init__(self, items, bs): self.items,self.bs,self.dataset = items,bs,items
    def new(self, bs): return OwnLoader(self.items, bs)
    def __len__(self): return -(-len(self.items)//self.bs)
    def __iter__(self):
        for i in range(0, len(self.items), self.bs): yield tuple(torch.stack(o) for o in zip(*self.items[i:i+self.bs]))

def test_apply_on_a_loader_of_ones_own():
    items = regression(96, dtype=torch.float32)
    learn = small().apply(net_learner(DataLoaders(OwnLoader(items, 8), OwnLoader(items, 8))))
    assert learn.dls.train.bs==32 and learn.dls.train.items is items and learn.dls.valid.bs==8
    learn.fit(1, 0.1)

@pytest.mark.parametrize('plan', [small, accumulated])
def test_apply_draws_no_random_number(plan):
    learn,plan = net_learner(cbs=GradAccum(2)),plan()
    was,rng = random_states(),learn.dls.train.rng.getstate()
    assert plan.apply(learn) is learn and random_states()==was and learn.dls.train.rng.getstate()==rng

@pytest.mark.parametrize('plan', [small, accumulated])
def test_applied_twice_is_once(plan):
    def losses(n):
        learn,p = net_learner(),plan()
        loader = p.apply(learn).dls.train
        for _ in range(n): p.apply(learn)
        assert learn.dls.train is loader and [type(cb) for cb in accums(learn)]==[GradAccum,ScaledLR] and len(learn.cbs)==len(net_learner().cbs)+2
        torch.manual_seed(1)
        random.seed(1)
        learn.dls.train.rng.seed(1)
        learn.fit(2, p.base_lr)
        return learn.recorder.losses
    assert losses(0)==losses(2)

def test_apply_where_the_loader_is_right_leaves_it():
    learn = net_learner()
    loader = learn.dls.train
    assert accumulated().apply(learn).dls.train is loader

def count(learn): return learn.yb[0].numel()

@pytest.mark.parametrize('cbs', [GradAccum(3), GradientAccumulation(16), [GradAccum({0: 2}),ScaledLR(4, sqrt_scaling)], ScaledLR(4),
    [GradientAccumulation(16),ScaledLR(4, warmup_epochs=0)], GradAccum])
def test_apply_takes_the_place_of(cbs):
    plan,noise,mine = accumulated(),NoiseScale(),Callback()
    learn = plan.apply(net_learner(cbs=L(cbs)+[noise,mine]))
    accum,scaled = accums(learn)
    assert (type(accum),accum.n_acc,accum.count,accum.fix_bn)==(GradAccum,4,None,True) and (scaled.base_bs,scaled.rule_name)==(8,'adascale_gain')
    assert noise in learn.cbs and mine in learn.cbs and learn.grad_accum is accum and learn.scaled_lr is scaled

def test_apply_is_for_learners():
    with pytest.raises(TypeError, match='A plan is applied to a Learner, got DataLoaders'): accumulated().apply(net_learner().dls)

def test_apply_keeps_what_the_models_own_accumulation_knows():
    "How its loss counts, and what its BatchNorm is to do; at the next application too"
    learn = net_learner(cbs=GradAccum(2, count=count, fix_bn=False))
    for _ in range(2):
        accum,_ = accums(accumulated().apply(learn))
        assert accum.count is count and accum.fix_bn is False and accum.n_acc==4

class Fixed:
    "Batches, and no way to have them larger"
    bs = 8
    def __len__(self): return 12
    def __iter__(self): return iter([])

@pytest.mark.parametrize('dl', [Fixed(), TorchDataLoader(regression(96), batch_sampler=[[0,1],[2,3]]), TorchDataLoader(regression(96), batch_size=None)],
    ids=['own','batch_sampler','no_batches'])
def test_a_loader_that_cannot_change_is_refused_before_anything_has_changed(dl):
    learn = net_learner(DataLoaders(dl, dl), cbs=[GradAccum(2),ScaledLR(8)])
    was = picture(learn)
    with pytest.raises(ValueError, match=f'A training loader of type {type(dl).__name__} cannot be given batches of 32 items: make one that has them'):
        small().apply(learn)
    assert changes(was, picture(learn))==[]

def test_a_torch_loader_with_a_batch_sampler_of_ones_own_is_refused():
    "And one whose batches are today's is taken as it is"
    items = regression(96, dtype=torch.float32)
    class Own(BatchSampler): pass
    dl = TorchDataLoader(items, batch_sampler=Own(RandomSampler(items), 8, False))
    learn = net_learner(DataLoaders(dl, dl))
    with pytest.raises(ValueError, match='cannot be given batches of 32'): small().apply(learn)

class Steps(Callback):
    "Notes what each optimizer step was made with"
    order,run_valid = 90,False
    def before_fit(self): self.items,self.lrs,self.n = [],[],0
    def before_batch(self): self.n += len(self.x)
    def after_step(self):
        self.items.append(self.n)
        self.lrs.append([h['lr'] for h in self.opt.hypers])
        self.n = 0

def halves(model): return [list(model[:2].parameters()),list(model[2:].parameters())]

@pytest.mark.parametrize('plan', [small, accumulated])
@pytest.mark.parametrize('base_lr', [0.01, slice(1e-3,1e-2), [1e-3,1e-2]], ids=str)
def test_a_fit_as_planned(plan, base_lr):
    "Steps of `bs` items at `lr`, once the warmup of a tenth of the fit is behind; Recorder shows that rate"
    plan = plan(base_lr=base_lr)
    learn = plan.apply(net_learner(cbs=Steps(), splitter=halves, opt_func=partial(Adam)))
    with pytest.warns(UserWarning, match='is a rule for SGD'): learn.fit(10, plan.base_lr)
    assert learn.steps.items==[32]*30 and plan.bs==32
    lr = plan.lr
    lr = [lr.start,lr.stop] if isinstance(lr, slice) else lr if isinstance(lr, list) else [lr]*2
    assert learn.steps.lrs[-1]==pytest.approx(lr) and learn.steps.lrs[3]==pytest.approx(lr)
    assert learn.steps.lrs[0]==pytest.approx([o/plan.rule(4) for o in lr]) # At the start of the warmup, the rate of 8 items
    assert learn.recorder.lrs[-1]==pytest.approx(lr[-1])

@pytest.mark.parametrize('plan', [small(base_lr=0.02), accumulated(base_lr=0.02), small(base_lr=slice(1e-3,1e-2)), accumulated(base_lr=[1e-3,1e-2]),
    small(ci=(0.,inf)), small(adam=True), small(noise_scale=123.456), small(base_bs=4),
    accumulated(adam=True, ci=(0.,inf), bs_now=24)], ids=lambda p: p.code[25:100])
@pytest.mark.filterwarnings('ignore:.*is a rule for SGD')
def test_the_code_does_what_apply_does(plan):
    "Pasted where everything is imported, on a learner with loaders of `micro_bs`: the same rates and items a step"
    def pasted(learn):
        scope = dict(learn=learn, n_epoch=3)
        exec('from fastai_bs.all import *', scope)
        exec(plan.code, scope)
    assert plan.code.endswith(f'# with dls of bs={plan.micro_bs}') and '\n' not in plan.code
    learn = lambda bs: net_learner(bs=bs, cbs=Steps(), splitter=halves)
    here,there = learn(plan.micro_bs),plan.apply(learn(8))
    pasted(here)
    there.fit_one_cycle(3, plan.base_lr)
    assert here.steps.lrs==there.steps.lrs and here.steps.items==there.steps.items==[plan.bs]*len(here.steps.items) and len(here.steps.items)==288//plan.bs

def test_code():
    assert accumulated(base_lr=slice(1e-3,1e-2)).code==("learn.fit_one_cycle(n_epoch, slice(0.001, 0.01), cbs=[GradAccum(4), "
        "ScaledLR(8, adascale_gain, noise_scale=1000)]) # with dls of bs=8")
    assert small(ci=(0.,inf), base_lr=[0.1,0.2]).code==(
        "learn.fit_one_cycle(n_epoch, [0.1, 0.2], cbs=[GradAccum(1), ScaledLR(8, linear_scaling)]) # with dls of bs=8")
    assert small(adam=True, noise_scale=1234567., ci=(1.,inf), times=()).code.endswith("ScaledLR(8, capped_sqrt_scaling, noise_scale=1)]) # with dls of bs=8")
