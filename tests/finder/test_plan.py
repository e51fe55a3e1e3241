"`BatchPlan`: what is said about a measured noise scale, sentence by sentence, what follows for this device, how it is drawn, and how it is carried out"
import dataclasses
import json
import math
import random
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, RandomSampler, SubsetRandomSampler
from fastcore.foundation import L
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, TfmdDL
from fastai.data.load import DataLoader
from fastai.optimizer import Adam
from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.finder.advice import advice
from fastai_bs.finder.mock_cycle import cool_stretch, places, rate_at
from fastai_bs.noise.estimator import NoiseEstimate
from fastai_bs.noise.estimator import along
from fastai_bs.schedule.scaled_lr import ScaledLR
from fastai_bs.noise.noise_scale import NoiseScale
from fastai_bs.finder.plan import BatchPlan
from fastai_bs.plan_text import details, numbers_text, step_time_text
from fastai_bs.finder.steps import Duration, balanced_bs, examples_needed, steps_needed, whole_epochs
from fastai_bs.utils.text import num, percent, rate_text, with_interval
from fastai_bs.schedule.rules import adascale_gain, linear_scaling, no_scaling, sqrt_scaling
from helpers import changes, loaders, momentum_sgd, picture, quiet_learner, random_states, regression

inf,nan = math.inf,math.nan
approx = lambda v: pytest.approx(v, rel=1e-12, abs=0)

def rows(n=30, noise_scale=100., low=80., high=130., n_items=40):
    return pd.DataFrame(dict(step=range(1,n+1), n_items=n_items, n_elems=float(n_items), tr_sigma=noise_scale, g_sq=1., noise_scale=noise_scale,
        low=low, high=high, mean_tr_sigma=noise_scale, mean_g_sq=1.))

def make(noise_scale=100., ci=(80.,130.), **kwargs):
    "A plan about which there is nothing else to say"
    now = kwargs.get('bs_now', kwargs.get('base_bs', 100))
    return BatchPlan(**{**dict(noise_scale=noise_scale, ci=ci, base_bs=now, bs_now=now, micro_now=now, base_lr=0.1, n_windows=30,
        trend=0, n_train=100_000, n_seen=50, n_passes=1., moved=False, loss_rose=False, level=0.95, df=rows(), epochs_now=100, epochs_given=True), **kwargs})

def cycle(**kwargs):
    "One that was measured along a mock cycle"
    return make(**{**dict(moved=True, cool=NoiseEstimate(90., (72.,117.), 30), at_peak=NoiseEstimate(45., (40.,52.), 8),
                               at_end=NoiseEstimate(300., (210.,900.), 7)), **kwargs})

def secs(*sizes, a=0.01, c=0.0001, opt=0.001):
    "As timed on a device where a step takes `a + c*bs` seconds, `opt` of them the optimizer"
    return tuple((m,a+c*m,opt) for m in sizes)

five = secs(25, 50, 100, 200, 400) # With them 100 items are the fastest at a noise scale of 100: (100*0.01/0.0001)**0.5

# Sentences that have tests of their own: of plans whose weights did not move, and on many passes
present = " This is for the present weights: measure again later, as the noise scale tends to rise."
many = r" The same (\d+) items pass (\d+) times: watch the validation loss, which may be best with a smaller batch\."

def everything(plan): return [*advice(plan),*details(plan)]

def told(plan, *kinds): return ' '.join(o.text for o in everything(plan) if o.kind in kinds)

def said(plan): return re.sub(many, '', told(plan, 'do', 'why', 'caution')).replace(present, '')

def rate(plan): return told(plan, 'how').split(' How sure')[0]

def sure(plan): return told(plan, 'how').partition('How sure: ')[2]

def test_advice_is_about_todays_batch_size():
    "Not about the one that the learning rate belongs to, where a ScaledLR makes them differ"
    plan = make(base_bs=16, bs_now=100)
    assert told(plan, 'do', 'why', 'caution')==told(make(), 'do', 'why', 'caution') and '100' in plan.advice and 'base_bs=16, bs_now=100)' in numbers_text(plan)
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

not_timed = "Stay at {0}: how other sizes compare is open, as timing takes two batches of {0} in a row, which never came."

few = "Stay at 100 until you have measured for longer: 9 windows are too few to tell the noise scale."
lies = "The noise scale is about 100 items (80 to 130) at the present weights, and today's {} {}."
within,below,above = (lies.replace('{}.', f'{o}.') for o in ('lies within that', 'is below it', 'is above it'))
larger = "A larger batch takes fewer steps for little more data."
smaller = "A smaller batch learns the same from fewer examples."
no_noise = "There is next to no noise in the gradient, as if all items were alike: any batch size takes the same steps."
unknown = "Stay at 100 until you have measured for longer: so far the noise scale cannot be told."
at_least = "The noise scale is at least {} at the present weights, and today's {} {}."
open_above = "The noise scale is about 300 items ({} or more) at the present weights, and today's {} {}."
longer = "The noise scale may be larger still: num_it=200 would tell more."
other_items = "The noise scale may be larger still: only other items would tell more."
rose = "Stay at {} until you have measured with a lower rate: at 0.1 the loss rose during the mock training."
may_rise = "The learning rate may be too high: the loss rose during the mock training."
rising = "The noise scale rose during the measurement: measure again later, as a larger batch may pay by then."
falling = "The noise scale fell during the measurement: measure again later, as a smaller batch may do by then."
passes = "The measurement took {} passes through these {} items, so it speaks of them alone."
small_set = "For these {} items alone, count on a noise scale of {}."
part = "Of the parameters {} are frozen: measure again when you unfreeze them."
untimed = "Today's step could not be timed, so whether this saves time is open."
use = "Use {} (today {}): 100 epochs of {} become {} of {}."
use_400 = use.format('400 as 4 x 100', 100, 100, 175, 400) # (300+400)/(300+100)

sentences = dict(
    few_windows=(dict(n_windows=9, trend=1, moved=True, n_passes=1.2, times=five, too_large=800, trained=0.5), few),
    few_windows_of_a_cycle=(dict(cool=NoiseEstimate(90., (72.,117.), 9), n_windows=9), few),
    few_windows_and_loss_rose=(dict(n_windows=9, loss_rose=True), f"{few} {may_rise}"),
    ten_windows=(dict(n_windows=10), f"{not_timed.format(100)} {within.format(100)}"),
    within=(dict(), f"{not_timed.format(100)} {within.format(100)}"),
    within_at_lower_end=(dict(bs_now=80), f"{not_timed.format(80)} {within.format(80)}"),
    within_at_upper_end=(dict(bs_now=130), f"{not_timed.format(130)} {within.format(130)}"),
    below=(dict(bs_now=79), f"{not_timed.format(79)} {below.format(79)}"),
    below_by_far=(dict(bs_now=1), f"{use.format('128 as 128 x 1', 1, 1, 226, 128)} {below.format(1)} {larger} {untimed}"),
    above=(dict(bs_now=131), f"{not_timed.format(131)} {above.format(131)}"),
    above_and_falling=(dict(bs_now=512, trend=-1), f"{not_timed.format(512)} {above.format(512)} {falling}"),
    below_and_rising=(dict(bs_now=32, trend=1), f"{use.format('128 as 4 x 32', 32, 32, 173, 128)} {below.format(32)} {larger} {untimed} {rising}"),
    large_numbers=(dict(noise_scale=1e6, ci=(9e5,1.2e6), bs_now=12345, n_train=10**8), f"{use.format('790080 as 64 x 12345', 12345, 12345, 177, 790080)} "
            f"{below.format(12345).replace('100 items (80 to 130)', '1000000 items (900000 to 1200000)')} {larger} {untimed}"),
    no_noise=(dict(noise_scale=0., ci=(0.,0.9)), f"{not_timed.format(100)} {no_noise}"),
    hardly_any_noise=(dict(noise_scale=1.9, ci=(1.8,2.), bs_now=16),
        f"{not_timed.format(16)} {above.format(16).replace('100 items (80 to 130)', '1.9 items (1.8 to 2)')}"),
    noise_of_one_item=(dict(noise_scale=0.7, ci=(0.5,1.), bs_now=1),
        f"{not_timed.format(1)} {within.format(1).replace('100 items (80 to 130)', '0.7 items (0.5 to 1)')}"),
    no_lower_end=(dict(ci=(0.,130.)), f"{not_timed.format(100)} {within.format(100).replace('80 to 130', '130 at most')}"),
    unbounded=(dict(noise_scale=300., ci=(60.,inf)), f"{use_400} {open_above.format(60, 100, 'lies within that')} {untimed} {longer}"),
    unbounded_and_above=(dict(noise_scale=300., ci=(60.,inf), bs_now=4000),
        f"{not_timed.format(4000)} {open_above.format(60, 4000, 'lies within that')} {longer}"),
    unbounded_and_below=(dict(noise_scale=300., ci=(160.,inf)), f"{use_400} {open_above.format(160, 100, 'is below it')} {larger} {untimed} {longer}"),
    unbounded_after_passes=(dict(noise_scale=300., ci=(61.26,inf), n_passes=101.),
            f"{use_400} {open_above.format(61.3, 100, 'lies within that')} {untimed} {passes.format(101, 100_000)} {other_items}"),
    no_estimate=(dict(noise_scale=inf, ci=(60.,inf), n_train=100),
        f"{not_timed.format(100)} {at_least.format('60 items', 100, 'may be above or below it')} {longer}"),
    no_estimate_but_a_single_item=(dict(noise_scale=inf, ci=(1.,inf), bs_now=1),
            f"{not_timed.format(1)} {at_least.format('1 item', 1, 'may be above or below it')} {longer}"),
    no_estimate_and_rising=(dict(noise_scale=inf, ci=(60.,inf), trend=1),
            f"{not_timed.format(100)} {at_least.format('60 items', 100, 'may be above or below it')} {rising} {longer}"),
    no_estimate_but_both_ends=(dict(noise_scale=inf, ci=(77.,130.)), # The length of a training bounds what the measurement does not
            f"{not_timed.format(100)} {within.format(100).replace('about 100 items (80 to 130)', 'between 77 and 130 items')}"),
    unknown=(dict(noise_scale=inf, ci=(0.,inf), times=five, too_large=800), unknown),
    unknown_with_an_estimate=(dict(noise_scale=300., ci=(0.,inf), times=five), unknown),
    unknown_and_rising=(dict(noise_scale=inf, ci=(0.,inf), trend=1, n_windows=22), unknown),
    loss_rose=(dict(noise_scale=inf, ci=(0.,inf), loss_rose=True), rose.format(100)),
    rose=(dict(trend=1, n_windows=15), f"{not_timed.format(100)} {within.format(100)} {rising}"),
    fell=(dict(trend=-1, n_windows=15), f"{not_timed.format(100)} {within.format(100)} {falling}"),
    frozen=(dict(trained=0.2493), f"{not_timed.format(100)} {within.format(100)} {part.format('75.1%')}"),
    nearly_all_frozen=(dict(trained=0.00123), f"{not_timed.format(100)} {within.format(100)} {part.format('99.9%')}"),
    passes=(dict(n_passes=13.37, n_train=500, epochs_now=13), f"{not_timed.format(100)} {within.format(100)} {passes.format(13.4, 500)}"),
    passes_once_and_a_half=(dict(n_passes=1.5, epochs_now=1), f"{not_timed.format(100)} {within.format(100)}"),
    small_set=(dict(n_train=200), f"{not_timed.format(100)} {within.format(100)} {small_set.format(200, 66.7)}"),
    not_small_set=(dict(n_train=400), f"{not_timed.format(100)} {within.format(100)}"),
    several=(dict(bs_now=32, n_passes=4., n_train=100, trained=0.5, epochs_now=3),
            f"{not_timed.format(32)} {below.format(32)} {small_set.format(100, 50)} {passes.format(4, 100)} {part.format('50%')}"),
    several_and_loss_rose=(dict(bs_now=32, n_passes=4., n_train=100, trained=0.5, loss_rose=True), rose.format(32)))

@pytest.mark.parametrize('kwargs,words', sentences.values(), ids=sentences)
def test_advice(kwargs, words): assert said(make(**kwargs))==words

open_end,nothing = NoiseEstimate(inf, (60.,inf), 8),NoiseEstimate(nan, (0.,inf), 0)
seen = "In the mock training the noise scale was {}; the plan's is for the whole of the training."

@pytest.mark.parametrize('kwargs,words', [({}, '45 near the peak of the rate and 300 at the end'), (dict(at_peak=open_end),
    'at least 60 near the peak of the rate and 300 at the end'), (dict(at_end=nothing), '45 near the peak of the rate'), (dict(at_peak=nothing),
        '300 at the end'),
    (dict(at_peak=nothing, at_end=nothing), None),
    (dict(at_end=NoiseEstimate(inf, (0.,inf), 7), at_peak=NoiseEstimate(0., (0.,0.), 8)), '0 near the peak of the rate')])
def test_what_it_was_on_the_way(kwargs, words):
    "Among the details"
    text = told(cycle(**kwargs), 'detail')
    assert (seen.format(words) in text) if words else 'In the mock training' not in text
    assert 'In the mock training' not in cycle(**kwargs).advice

@pytest.mark.parametrize('kwargs,words', [({}, 'of 100 epochs'), (dict(epochs_now=1), 'of 1 epoch'), (dict(epochs_now=3.66, epochs_given=False),
    'of 3.66 epochs')])
def test_what_training_it_is_of(kwargs, words):
    text = told(cycle(**kwargs), 'why')
    assert text==f"The noise scale is about 100 items (80 to 130) over a one-cycle {words}, and today's 100 lies within that."
    assert present not in cycle(**kwargs).advice

@pytest.mark.parametrize('kwargs', [dict(noise_scale=inf, ci=(0.,inf)), dict(n_windows=9)])
def test_nothing_is_said_of_a_cycle_that_tells_nothing(kwargs): assert 'one-cycle' not in cycle(**kwargs).advice

def test_a_small_set_is_reckoned_with_already():
    "In the number for the whole of a training; not in that of fixed weights"
    assert small_set.format(200, 66.7) in make(n_train=200).advice and 'items alone' not in cycle(n_train=200).advice

# What the step times say, with figures by hand. On the device of `secs`, at a noise scale of 100, (1 + 100/bs)*(0.01 + 0.0001*bs) is
# 0.0625 s at 25 items, 0.045 at 50, 0.04 at 100, 0.045 at 200, 0.0625 at 400

stay = "Stay at {} for 100 epochs ({}): other sizes gain 3% at most on this device."
other = "Use {} (today {}): 100 epochs of {} become {} of {}, in about {} of the time ({} instead of {})."
as_longer = "A larger batch would save steps, but each would take as much longer on this device."
no_time = "A smaller batch would save examples, but hardly any time on this device."
faster = "On this device smaller steps are so much faster that they save time{}."
memory = "Micro-batches of {} items did not fit in memory, {} did."
of_noise = lambda words, noise: words.replace('100 items (80 to 130)', noise)
# An epoch of 25 items a step: 4,000 of 0.0125 s, of 50: 2,000 of 0.015, of 100: 1,000 of 0.02, of 400: 250 of 0.05
to_100 = f"{other.format(100, 25, 25, 160, 100, '64%', '53 min 20 s', '1 h 23 min')} {below.format(25)} {larger}"
from_400 = f"{other.format(100, 400, 400, 40, 100, '64%', '13 min 20 s', '20 min 50 s')} {above.format(400)} {smaller}" # 1.25/2

device = dict(
    leave=(dict(times=five), f"{stay.format(100, '33 min 20 s')} {within.format(100)}"),
    larger=(dict(bs_now=25, times=five), to_100),
    smaller=(dict(bs_now=400, times=five), from_400),
    smaller_and_rising=(dict(bs_now=400, times=five, trend=1), f"{from_400} {rising}"),
    larger_and_rising=(dict(bs_now=25, times=five, trend=1), f"{to_100} {rising}"),
    one_epoch=(dict(bs_now=25, times=five, epochs_now=1),
        "Use 100 (today 25): 1 epoch of 25 becomes 2 of 100, in about 80% of the time (40 s instead of 50 s). "
            f"{below.format(25)} {larger} Rounding tells: the same loss takes 1.6 epochs, in 64% of the time."),
    no_noise=(dict(noise_scale=0., ci=(0.,0.9), bs_now=25, times=five), f"{stay.format(25, '1 h 23 min')} {no_noise}"),
    # 50 items: 3*0.015 s; today's 100 as 4 x 25: 2*(4*0.0115+0.001) = 0.094
    do_not_accumulate=(dict(bs_now=100, micro_now=25, times=secs(25, 50)),
            f"{other.format(50, 100, 100, 75, 50, '48%', '37 min 30 s', '1 h 18 min')} {within.format(100)} {faster.format('')}"),
    # Today's 64 as 4 x 16, 0.043 s, or at once, 0.0164; 128 would take 0.0228 s: 1.56*0.0228 = 0.0356 beside 2.1*0.0164 = 0.0346
    todays_at_once=(dict(noise_scale=70., ci=(60.,75.), bs_now=64, micro_now=16, times=secs(16, 32, 64, 128)), "Stay at 64, but as one micro-batch "
            "(today 4 x 16): 100 epochs in about 38% of the time (42 min 43 s instead of 1 h 53 min). "
            f"{of_noise(within.format(64), '70 items (60 to 75)')}"),
    not_beyond=(dict(bs_now=25, times=secs(25, 50), ci=(95.,105.)), f"{other.format(50, 25, 25, 120, 50, '72%', '1 h', '1 h 23 min')} "
            f"{of_noise(below.format(25), '100 items (95 to 105)')} {larger}"),
    not_beyond_todays=(dict(bs_now=50, times=secs(25, 50), ci=(95.,105.)), f"{stay.format(50, '50 min')} {of_noise(below.format(50), '100 items (95 to 105)')} "
            f"{as_longer}"),
    # With 8 of 10 ms spent once a step: at 1000, 2 x 50 11*0.022 = 0.242 s, 4 x 50 6*0.036 = 0.216, 8 x 50 3.5*0.064 = 0.224; today's 25 41*0.0125
    accumulate=(dict(noise_scale=1000., ci=(990.,1010.), bs_now=25, times=secs(25, 50, opt=0.008)), # 1200/1025, and 117*500*0.036 s
            f"{other.format('200 as 4 x 50', 25, 25, 117, 200, '42%', '35 min 6 s', '1 h 23 min')} "
            f"{of_noise(below.format(25), '1000 items (990 to 1010)')} {larger}"),
    accumulate_as_before=(dict(noise_scale=400., ci=(390.,410.), bs_now=100, micro_now=50, times=secs(25, 50, opt=0.008)),
            f"{stay.format(100, '36 min 40 s')} {of_noise(below.format(100), '400 items (390 to 410)')} {as_longer}"),
    # One large fixed part: more than the noise scale pays; and almost none: less does
    larger_than_the_noise_scale=(dict(bs_now=150, times=secs(75, 150, 300, 600, a=0.1)),
            f"{other.format(300, 150, 150, 160, 300, '90%', '1 h 56 min', '2 h 8 min')} {above.format(150)} "
            f"On this device larger steps take so little longer that they save time all the same."),
    smaller_than_the_noise_scale=(dict(bs_now=60, times=secs(15, 30, 60, a=0.0005, opt=0.0002)),
            f"{other.format(30, 60, 60, 82, 30, '88%', '15 min 57 s', '18 min 3 s')} {below.format(60)} {faster.format(' all the same')}"),
    larger_still=(dict(bs_now=25, times=secs(25, 50, 400, a=0.1)), # Beyond the interval
            f"{other.format(400, 25, 25, 400, 400, '34%', '3 h 53 min', '11 h 23 min')} {below.format(25)} {larger.replace('little ', '')}"),
    above_and_stays=(dict(bs_now=150, times=secs(75, 150)), f"{stay.format(150, '27 min 47 s')} {above.format(150)} {no_time}"),
    out_of_memory=(dict(times=five, too_large=800), f"{stay.format(100, '33 min 20 s')} {within.format(100)} {memory.format(800, 400)}"),
    out_of_memory_and_not_beyond=(dict(bs_now=50, times=secs(25, 50), ci=(95.,105.), too_large=100),
            f"{stay.format(50, '50 min')} {of_noise(below.format(50), '100 items (95 to 105)')} {as_longer} {memory.format(100, 50)}"),
    # At 300: 25 items 13*0.0125 = 0.1625 s, 50 7*0.015 = 0.105, 100 4*0.02 = 0.08, 200 2.5*0.03 = 0.075: 100 are about as fast, and nearer to 25
    no_upper_end=(dict(noise_scale=300., bs_now=25, times=five, ci=(81.,inf)), f"{other.format(100, 25, 25, 123, 100, '49%', '41 min', '1 h 23 min')} "
            f"{open_above.format(81, 25, 'is below it')} {larger} {longer}"),
    # Of 81 items at least: 25 items 4.24*0.0125 = 0.053 s, 50 2.62*0.015 = 0.0393, 100 1.81*0.02 = 0.0362: 50 are about as fast; 131/106, and 124*30 s
    no_estimate=(dict(noise_scale=inf, times=five, ci=(81.,inf)), f"{stay.format(100, '33 min 20 s')} "
            f"{at_least.format('81 items', 100, 'may be above or below it')} {longer}"),
    no_estimate_and_larger=(dict(noise_scale=inf, bs_now=25, times=five, ci=(81.,inf)),
            f"{other.format(50, 25, 25, 124, 50, '74%', '1 h 2 min', '1 h 23 min')} "
            f"{at_least.format('81 items', 25, 'is below it')} {larger} {longer}"),
    few_steps_today=(dict(times=five, n_train=1_000, epochs_now=1), f"{stay.format(100, '0.2 s').replace('100 epochs', '1 epoch')} {within.format(100)}"),
    no_larger_batch_in_an_epoch=(dict(times=five, n_train=200, bs_now=51, micro_now=51),
        f"{not_timed.format(51)} {below.format(51)} {small_set.format(200, 66.7)}"),
    all_at_once=(dict(bs_now=100, micro_now=25, times=secs(25, 50), ci=(20.,500.), too_large=100, n_passes=101., n_train=399, trained=0.1),
            f"{other.format(50, 100, 100, 75, 50, '48%', '9.0 s', '19 s')} {of_noise(within.format(100), '100 items (20 to 500)')} {faster.format('')} "
            f"{small_set.format(399, 80)} {passes.format(101, 399)} {part.format('90%')} {memory.format(100, 50)}"))

@pytest.mark.parametrize('kwargs,words', device.values(), ids=device)
def test_advice_about_this_device(kwargs, words): assert said(make(**kwargs))==words

@pytest.mark.parametrize('kwargs,words', [(dict(times=five), '64 to 128.'), (dict(times=five, ci=(20.,500.)), '32 to 256.'),
    # (low*a/c)**0.5: 45 at 20, 224 at 500
    (dict(times=five, ci=(90.,500.)), '64 to 256.'), (dict(times=five, ci=(20.,110.)), '32 to 128.'), (dict(noise_scale=300., times=five, ci=(81.,inf)),
        '64 or more.'),
    (dict(noise_scale=70., ci=(60.,75.), bs_now=64, micro_now=16, times=secs(16, 32, 64, 128)), '64 to 128.'),
    (dict(noise_scale=400., ci=(390.,410.), bs_now=100, micro_now=50, times=secs(25, 50, opt=0.008)), '64 to 256.'),
    (dict(bs_now=64, ci=(99.,101.), n_train=150, times=secs(32, 64)), 'no other size is about as fast.'), ({}, '')])
def test_how_sure(kwargs, words):
    "The range, which the details explain; nothing where no steps were timed"
    plan = make(**kwargs)
    assert sure(plan)==words and ('are about as fast over' in told(plan, 'detail'))==(words[:1].isdigit())

accumulation = "Accumulation is left out: here it costs more time for the examples than it saves in steps."
beyond = "Batches above 50 would need accumulation, which costs more time here than it saves in steps."

@pytest.mark.parametrize('kwargs,words', [(dict(bs_now=100, micro_now=25, times=secs(25, 50)), accumulation), (dict(bs_now=25, times=secs(25, 50)), beyond),
    (dict(bs_now=50, times=secs(25, 50)), beyond), (dict(times=five), None), (dict(noise_scale=400., ci=(390.,410.), bs_now=25, times=secs(25, 50,
        opt=0.008)), None),
    (dict(bs_now=64, micro_now=16, noise_scale=70., ci=(60.,75.), times=secs(16, 32, 64, 128)), accumulation)])
def test_what_is_said_of_accumulation(kwargs, words):
    "Among the details; never beside a plan that accumulates"
    text = told(make(**kwargs), 'detail')
    assert words in text if words else 'ccumulat' not in text

rates_of = [({},'0.1','0.25','0.171'), (dict(base_lr=1),'1','2.5','1.71'),
    (dict(base_lr=slice(1e-3,1e-2)),'slice(0.001, 0.01)','slice(0.0025, 0.025)','slice(0.00171, 0.0171)'),
    (dict(base_lr=slice(1e-2)),'slice(0.01)','slice(0.025)','slice(0.0171)'),
    (dict(base_lr=[1e-4,1e-3,1e-2]),'[0.0001, 0.001, 0.01]','[0.00025, 0.0025, 0.025]','[0.000171, 0.00171, 0.0171]')]

# (1+100/25)/(1+100/100) = 2.5 times; with Adam, as 1.6 times the examples are needed, 2.5**0.5*(1+0.4/5) = 1.71
@pytest.mark.parametrize('kwargs,base,lr,adam_lr', rates_of)
def test_the_rate_to_go_on_with(kwargs, base, lr, adam_lr):
    "`plan.lr` would be scaled twice"
    sgd,adam = (cycle(bs_now=25, times=five, adam=o, **kwargs) for o in (False,True))
    assert rate(sgd)==f"Keep passing {base} to `fit_one_cycle`: it is scaled to {lr} for you." and told(sgd,
        'run')==f"plan.apply(learn).fit_one_cycle(160, {base})"
    assert rate(adam)==f"Keep passing {base} to `fit_one_cycle`: it is scaled to {adam_lr} for you." and told(adam, 'run')==told(sgd, 'run')
    for plan,grown,rule in ((sgd,lr,'adascale_gain'),(adam,adam_lr,'adam_gain')):
        assert f"The rate that is really used grows to {grown}, by {rule}." in told(plan, 'detail')

def test_the_rate_of_a_scaled_learner():
    "That for 100 items already, which are planned"
    plan = cycle(bs_now=25, base_bs=100, times=five)
    assert rate(plan)=="Keep passing 0.1 to `fit_one_cycle`." and 'really used' not in told(plan, 'detail')

@pytest.mark.parametrize('adam', [False,True])
def test_no_rate_was_given(adam):
    "Then it is for the learner's own, and the line to run asks for the one that is trained with"
    plan = cycle(bs_now=25, times=five, rate_given=False, adam=adam)
    assert rate(plan)==("No rate was given, so this is for the learner's own, 0.1: pass the one that you train with to `fit_one_cycle`, where it is "
                        "scaled for you.")
    assert told(plan, 'run')=='plan.apply(learn).fit_one_cycle(160, lr)'
    still = make(bs_now=25, times=five, rate_given=False, adam=adam) # With `lr=0` there is none to be given
    assert rate(still)==f"Keep passing the rate that you train with to `fit`{'' if adam else ': it is scaled for you'}."
    assert told(still, 'run')=='plan.apply(learn).fit(160, lr)'

@pytest.mark.parametrize('rate_given,line', [(True,'learn.fit_one_cycle(100, 0.1)'), (False,'learn.fit_one_cycle(100, lr)')])
def test_nothing_is_scaled_where_the_batch_stays(rate_given, line):
    plan = cycle(times=five, rate_given=rate_given)
    assert 'Stay at 100 for' in plan.advice and 'plan.apply' not in plan.advice and 'scaled' not in plan.advice and told(plan, 'run')==line

@pytest.mark.parametrize('kwargs,says', [(dict(bs_now=25, rate_held=50),True), (dict(bs_now=25, rate_held=50, rate_given=False),True),
    (dict(bs_now=25, moved=False),True), (dict(bs_now=25),False), (dict(bs_now=25, rate_held=100, rate_low=True),False), (dict(),False),
    (dict(bs_now=400),False), (dict(bs_now=25, rate_held=50, adam=False),False)])
def test_a_rate_that_is_too_low_for_adam(kwargs, says):
    "Said of larger batches whose rate stays as it is, among the details"
    plan = cycle(**{**dict(times=five, adam=True), **kwargs})
    text,which = told(plan, 'detail'),'your rate' if kwargs.get('rate_given') is False else '0.1'
    assert plan.bs==100 and (plan.rule is no_scaling)==(says or plan.bs<plan.bs_now or not plan.adam)
    assert (f"If {which} is well below the best one for 25, raise it first: a larger batch at too low a rate ends worse." in text)==says==('too low' in text)

@pytest.mark.parametrize('kwargs,words,line', [(dict(bs_now=25), "Pass 0.025 to `fit_one_cycle` in place of 0.1", 'fit_one_cycle(160, 0.025)'),
    (dict(bs_now=400), "Pass 0.4 to `fit_one_cycle` in place of 0.1", 'fit_one_cycle(40, 0.4)'),
    (dict(bs_now=25, base_lr=slice(1e-3,1e-2)), "Pass slice(0.00025, 0.0025) to `fit_one_cycle` in place of slice(0.001, 0.01)",
     'fit_one_cycle(160, slice(0.00025, 0.0025))'),
    (dict(bs_now=25, rate_given=False), "Pass 0.25 times your rate to `fit_one_cycle` in place of it", 'fit_one_cycle(160, 0.25*lr)')])
def test_a_loss_that_is_a_sum(kwargs, words, line):
    "With SGD its gradient is the larger, the larger the batch: the rate goes down by that, and is then scaled as any"
    plan = cycle(times=five, sums=True, **kwargs)
    assert rate(plan)==f"{words}, as the loss is a sum over items and grows with the batch." and told(plan, 'run')==f'plan.apply(learn).{line}'
    assert 'Keep passing' not in plan.advice

@pytest.mark.parametrize('n_windows,n_passes,n_enough,line', [(9,1.,None,'num_it=200'), (9,1.,500,'num_it=500'), (30,1.,None,'num_it=200'), (9,11.,None,
    'num_it=200'),
    (30,11.,None,None), (30,10.,None,'num_it=200')])
@pytest.mark.parametrize('kwargs,start', [(dict(cool=NoiseEstimate(90., (72.,117.), 9)), 'learn.bs_find(0.1, n_epoch=100, '), (dict(rate_given=False),
    'learn.bs_find(0, n_epoch=100, '),
    (dict(cool=NoiseEstimate(90., (72.,117.), 9), rate_given=False, epochs_given=False), 'learn.bs_find(')])
def test_how_to_measure_longer(n_windows, n_passes, n_enough, line, kwargs, start):
    "As it was measured; not where more passes through the same items would not help"
    plan = make(inf, (0.,inf), n_windows=n_windows, n_passes=n_passes, n_enough=n_enough, n_train=500, **kwargs)
    assert told(plan, 'run')==(f'plan = {start}{line})' if line else '') and not told(plan, 'how', 'why', 'caution')
    if not line: assert plan.advice=="Stay at 100 until you have more items than these 500: they cannot tell the noise scale."
    if n_windows<10: assert ("Smaller windows, by n_batch, take fewer micro-batches." in told(plan, 'detail'))==(plan.cool is None)
    assert ("More items would tell more than further passes through these." in told(plan, 'detail'))==(n_passes>1.5)

@pytest.mark.parametrize('n_passes,words', [(11.,"only other items would tell more."), (10.,"num_it=200 would tell more.")])
def test_how_to_bound_it(n_passes, words):
    assert f"The noise scale may be larger still: {words}" in told(make(inf, (60.,inf), n_passes=n_passes, n_train=5000), 'caution')

@pytest.mark.parametrize('lr,third', [(0.1,'0.0333'), (slice(1e-3,3e-2),'slice(0.000333, 0.01)'), ([3e-3,3e-2],'[0.001, 0.01]')])
@pytest.mark.parametrize('kwargs', [dict(times=five, bs_now=25), dict(), dict(ci=(0.,inf))])
def test_a_rate_that_is_too_high(lr, third, kwargs):
    "Nothing else is said: whatever was measured means little"
    plan = cycle(loss_rose=True, base_lr=lr, **kwargs)
    assert told(plan, 'do').endswith(f"lower rate: at {rate_text(lr)} the loss rose during the mock training.") and told(plan,
        'do').startswith(f'Stay at {plan.bs_now} until')
    assert told(plan, 'run')==f'plan = learn.bs_find({third}, n_epoch=100)' and not told(plan, 'how', 'why', 'caution')

@pytest.mark.parametrize('why,words', [('loss_rose',"The learning rate may be too high: the loss rose during the mock training."),
    ('pairs',"For pairs nothing can be planned: a batch of another size has another loss.")])
def test_a_choice_of_which_nothing_is_known(why, words):
    "Nothing is known at a rate that is too high or of a loss over pairs; what was chosen stays chosen"
    plan = cycle(times=five, bs_now=25, **{why: True})
    assert math.isnan(plan.noise_known) and (plan.bs,plan.micro_bs,plan.n_epoch)==(25,25,100) and 'not known' in plan.details()
    plan = plan.at(100)
    assert plan.bs==100 and plan.n_epoch==100 and told(plan, 'do')==blind.replace('100', '25').format(100) and words in plan.advice

@pytest.mark.parametrize('valid_time,words', [(0., "No validation is in these times."), (7., "In these times each epoch has a validation, of 7.0 s.")])
def test_validations_are_said(valid_time, words):
    "Among the details, and they are in the times: 8 of 100 items, 5 of 25"
    plan = make(times=secs(25, 100), bs_now=25, epochs_now=5, valid_time=valid_time)
    assert words in told(plan, 'detail') and 'validation is' not in told(make(), 'detail') and 'of training alone' not in plan.details()
    assert plan.duration==pytest.approx((8*(1000*0.02+valid_time),5*(4000*0.0125+valid_time)))

@pytest.mark.parametrize('kwargs,there', [(dict(n_workers=2, n_train=1_999),True), (dict(n_workers=0, n_train=1_999),False), (dict(n_workers=2),False)])
def test_advice_about_workers(kwargs, there):
    "In short epochs"
    words = "Epochs are short: starting the loader's workers may take longer than predicted, so try num_workers=0."
    assert (words in told(make(bs_now=25, times=five, **kwargs), 'caution'))==there

@pytest.mark.parametrize('part,words', [(0.5,'50%'), (0.996,'0.4%'), (0.0949,'90.5%'), (0.004,'99.6%')])
def test_parts_in_percent(part, words): assert f"Of the parameters {words} are frozen" in make(trained=part).advice

@pytest.mark.parametrize('kwargs,there', [({},True), (dict(cool=NoiseEstimate(90., (72.,117.), 30), at_peak=nothing, at_end=nothing),False),
    (dict(trend=1),False),
    (dict(ci=(80.,inf)),True),
    (dict(noise_scale=0.5, ci=(0.,0.9)),False), (dict(n_windows=9),False)])
def test_advice_of_weights_that_did_not_move(kwargs, there): assert (present[1:] in told(make(**kwargs), 'caution'))==there

@pytest.mark.parametrize('kwargs,words', [
    (dict(failed=((200,'ValueError: no'),(400,'KeyError: 3'))),
        "Micro-batches of 200, 400 items failed, so nothing is known of them. The error: ValueError: no"),
    (dict(failed=((200,'ValueError: '+'no '*50),)), "no no ..."),
    (dict(noise_scale=300., ci=(290.,310.), max_bs=150), "Larger micro-batches were not tried, for max_bs=150.")])
def test_advice_about_what_is_special(kwargs, words):
    timed = dict(times=secs(50, 100), micro_now=100)
    assert words in ' '.join(make(**timed, **kwargs).details().split()) and words not in ' '.join(make(**timed).details().split())

@pytest.mark.parametrize('kwargs', [dict(sums=True), dict(max_bs=1000), dict(max_bs=None)])
def test_nothing_special(kwargs):
    "A sum over items is nothing special for Adam, nor where the batch stays"
    assert make(times=secs(50, 100), micro_now=100, **kwargs).details()==make(times=secs(50, 100), micro_now=100).details()
    assert make(bs_now=25, times=five, adam=True, sums=True).details()==make(bs_now=25, times=five, adam=True).details()

@pytest.mark.parametrize('spread,there', [(0.01,False), (0.1,False), (0.11,True), (nan,False)])
def test_a_noisy_clock(spread, there):
    text = told(make(bs_now=25, times=five, spread=spread), 'caution')
    assert ("The clock was noisy: on a quiet machine, gains below 11% could be told." in text)==there==('clock' in text)

# What a plan cannot see

few_steps = "The whole training has only {} steps, where a plan is least sure."

@pytest.mark.parametrize('kwargs,n', [(dict(n_train=10_000, epochs_now=1, bs_now=50, adam=True),None), (dict(n_train=3_900, epochs_now=1),'78'),
    (dict(n_train=4_000, epochs_now=1),None), (dict(n_train=480, epochs_now=10),'77'), (dict(n_train=480, epochs_now=10, bs_now=100),None),
    (dict(n_train=480, epochs_now=10, bs_now=400),None), (dict(n_train=480, epochs_now=10, ci=(0.,inf)),None)])
def test_few_steps(kwargs, n):
    "Said of a larger batch, below 80 in the whole of the training: 2 epochs of 3,900 items are 78 of 100"
    words = told(make(**{**dict(bs_now=25, times=five), **kwargs}), 'caution')
    assert (few_steps.format(n) in words)==('whole training has' in words)==(n is not None)

@pytest.mark.parametrize('epochs_now,bs_now,n_epoch', [(1,25,None), (2,25,4), (100,25,160), (2,50,None), (6,50,None), (7,50,10), (100,50,134), (100,400,None),
    (100,100,None)])
def test_many_passes(epochs_now, bs_now, n_epoch):
    "Half as many again, and three at least, or more than 8: 25 items become 100 in 1.6 times the epochs, 3.2 being 4, and 50 become 100 in 1.33"
    plan = make(bs_now=bs_now, times=five, epochs_now=epochs_now)
    found = re.findall(many, ' '+told(plan, 'caution'))
    assert found==([('100000',str(n_epoch))] if n_epoch else []) and (f"Today they pass {epochs_now} times." in ' '.join(plan.details().split()))==bool(n_epoch)

def test_many_passes_say_what_may_come_of_it():
    words = ' '.join(make(bs_now=25, times=five).details().split())
    assert "The training loss gains by more; plan.at(bs) has the numbers of other sizes." in words

def test_nothing_is_said_of_what_a_plan_leaves_as_it_is():
    "Few steps and many passes are today's training then"
    for kwargs in (dict(times=five), dict(times=five, bs_now=25, ci=(0.,inf)), dict(times=five, bs_now=25, n_windows=9)):
        words = make(n_train=480, epochs_now=10, n_workers=2, **kwargs).details()
        assert not re.findall(many, words) and 'steps are left' not in words and 'num_workers' not in words

# The batch size

@pytest.mark.parametrize('noise_scale,ci,n_windows,known', [(100.,(80.,130.),10,100.), (100.,(80.,130.),9,nan), (100.,(0.,130.),30,100.), (0.,(0.,0.5),30,0.),
    (100.,(80.,inf),30,100.), (inf,(80.,inf),30,80.), (100.,(0.,inf),30,nan), (inf,(0.,inf),30,nan), (100.,(80.,inf),9,nan), (nan,(0.,inf),0,nan)])
def test_the_noise_scale_that_it_reckons_with(noise_scale, ci, n_windows, known):
    assert make(noise_scale, ci, n_windows=n_windows, times=five).noise_known==pytest.approx(known, nan_ok=True)

@pytest.mark.parametrize('noise_scale,ci,bs,bs_range', [(100.,(80.,130.),100,(64,128)), (25.,(6.,99.),50,(16,128)), (400.,(101.,1600.),200,(64,512)),
    (7.,(0.,30.),50,(16,64)), (300.,(80.,inf),200,(64,None)), (inf,(80.,inf),100,(64,None)), (0.,(0.,0.),25,(16,32)), (inf,(0.,inf),100,(64,128)),
    (1e5,(9e4,1.1e5),400,(256,4096))]) # From 400 on an item costs the same: 12.55 s, 12.47, 12.51 and 12.67 up to 3200; 15.03 of 200
def test_fastest_batch_size(noise_scale, ci, bs, bs_range):
    "The root of noise_scale*a/c among those that are there, or one about as fast that is nearer to today's 100; today's where nothing is known"
    plan = make(noise_scale, ci, times=five)
    assert plan.bs==bs and plan.bs_range==bs_range and {*map(type, (plan.bs,*bs_range))} <= {int,type(None)} and type(plan.bs) is int

@pytest.mark.parametrize('bs_range,times,ci', [((64,64),((64,0.02,0.),),(99.,101.)), ((32,64),((32,0.01,0.),(64,0.0161,0.)),(99.,101.)),
    ((16,32),((16,0.001,0.),(24,0.00102,0.)),(9.,11.))])
def test_range_in_powers_of_two(bs_range, times, ci):
    "A power of two is its own, others go outward"
    assert make(sum(ci)/2, ci, bs_now=times[-1][0], n_train=150, times=times).bs_range==bs_range

@pytest.mark.parametrize('bs_now', [50,100])
@pytest.mark.parametrize('spread,gain,leaves', [(nan,1.029,True), (nan,1.031,False), (0.,1.029,True), (0.1,1.099,True), (0.1,1.101,False), (0.01,1.031,False)])
def test_a_gain_within_the_error_of_the_timing_is_none(bs_now, spread, gain, leaves):
    "Or below 3%: half the batch takes 3/2 of the steps, so both would take as long at 3/2 of the step time"
    half = 0.02/1.5*(gain if bs_now==50 else 1/gain)
    plan = make(ci=(99.99,100.01), bs_now=bs_now, spread=spread, n_train=300,
        times=((50,half,0.),(100,0.02,0.)), epochs_now=300) # 400 of 100, 225 of 50
    assert plan.bs==(bs_now if leaves else 150-bs_now) and plan.advice.startswith('Stay at')==leaves
    assert 'plan.apply' not in plan.advice if leaves else True
    assert plan.bs_range==(32,128) if leaves else plan.bs_range==((64,128) if bs_now==50 else (32,64))

def test_nearly_equal_measurements_give_nearly_equal_plans():
    "One of them has no upper end"
    a,b = (make(ns, ci, bs_now=25, times=five) for ns,ci in ((413.,(187.,inf)),(449.,(213.,3430.))))
    assert a.bs==b.bs==200 and a.lr==pytest.approx(b.lr, rel=0.03) and a.n_epoch_exact==pytest.approx(b.n_epoch_exact, rel=0.03)
    assert a.duration==pytest.approx(b.duration, rel=0.03)
    assert 'at least' not in repr(a) and 'about 413 items (187 or more)' in repr(a) and numbers_text(a).startswith('BatchPlan(noise_scale=413 [187, inf], ')

@pytest.mark.parametrize('slower,micro_bs,n_acc', [(1.049,100,1), (1.051,50,2)])
def test_the_largest_micro_batch_within_5_percent(slower, micro_bs, n_acc):
    "100 items in one, or as 2 x 50 where that is clearly faster"
    plan = make(ci=(99.,101.), times=((50,0.11,0.02),(100,slower*0.2,0.02)))
    assert (plan.table.micro_bs.iloc[1],plan.table.n_acc.iloc[1])==(micro_bs,n_acc)

def test_micro_batches_of_the_plan():
    plan = make(1000., (990.,1010.), bs_now=25, times=secs(25, 50, opt=0.008))
    assert (plan.bs,plan.micro_bs,plan.n_acc)==(200,50,4) and type(plan.micro_bs) is type(plan.n_acc) is int

@pytest.mark.parametrize('noise_scale,bs', [(100.,100), (190.,200), (50.,100), (0.,100), (3000.,3200), (1e9,100*2**23)])
def test_without_step_times_the_one_nearest_to_the_noise_scale(noise_scale, bs):
    "On a log scale, reached by accumulation"
    plan = make(noise_scale, (0.9*noise_scale,1.1*noise_scale), n_train=10**11)
    assert plan.bs_range==(2**(bs.bit_length()-1),2**bs.bit_length()) and all(map(math.isnan, plan.duration))
    assert (plan.bs,plan.micro_bs,plan.n_acc)==(bs,100,bs//100) and type(plan.bs) is int and plan.table.step_time.isna().all() and plan.table.time.isna().all()
    assert all(math.isnan(o) for o in plan.step_time) and 'this device' not in plan.advice and 'Step time' not in plan.details()

# The table, against the formulas

def candidates(times, micro_now, bs_now, noise, n_train):
    sizes = {m for m,*_ in times} or {micro_now}
    bs = max(sizes)*2
    while bs<=8*max([bs_now]+[noise]*(noise==noise)):
        sizes.add(bs)
        bs *= 2
    return sorted({o for o in sizes if 2*o<=n_train}|{bs_now})

u = (0.021*0.025*0.02)**(1/3) # Where 200 items cannot be quicker than 100, nor 100 take more than twice as long as 50
uneven = (25,0.02,0.001),(50,0.021,0.015),(100,0.05,0.001),(200,0.04,0.03)
mended = {uneven: ((25,0.02,0.001),(50,u,0.015),(100,2*u,0.001),(200,2*u,0.03))}

def least(plan):
    "Gain: 3%, or by how much the times had to be mended"
    return max(0.03, np.mean([math.log(a/b)**2 for (_,a,_),(_,b,_) in zip(plan.times, mended.get(plan.times, plan.times))] or [0])**0.5)

def way(bs, plan):
    "Seconds, micro-batch, n_acc: with the largest micro-batch that takes no more than 5% above the fastest; today's as today if that gains nothing"
    times = mended.get(plan.times, plan.times)
    ways = [((math.ceil(bs/m)-1)*(t-opt)+t,m,math.ceil(bs/m)) for m,t,opt in times if bs%m==0]
    if (plan.bs_now,plan.micro_now)==(bs,plan.micro_now): # The last micro-batch of today's window may be short, and takes its share of the time
        today = [(bs/m*(t-opt)+opt,m,math.ceil(bs/m)) for m,t,opt in times if m==plan.micro_now]
        if today and (math.isnan(plan.noise_known) or today[0][0]<=(1+least(plan))*max((o for o in ways if o[0]<=1.05*min(ways)[0]), key=lambda o: o[1],
                      default=today[0])[0]): return today[0]
    if not ways: return nan,min(bs, plan.micro_now),math.ceil(bs/plan.micro_now)
    return max((o for o in ways if o[0]<=1.05*min(ways)[0]), key=lambda o: o[1])

def gain(bs, noise, base): return bs/base*(base+noise)/(bs+noise) if noise<inf else bs/base
def for_adam(bs, noise, base):
    "The root; a fifth more where the examples are as many, none from twice as many on, and evenly between"
    examples = (noise+bs)/(noise+base) if noise<inf else 1.
    return min(gain(bs, noise, base)**0.5*(1 if examples>=2 else 1.4-examples/5), gain(bs, noise, base)**(2/3))
def capped(bs, noise, base): return math.sqrt(min(bs, noise)/min(base, noise)) if noise else 1.
def surge(bs, noise, base): return math.sqrt(bs/base)*(base+noise)/(bs+noise)

tables = dict(plain=dict(times=five), accumulated=dict(times=secs(8, 16, 32), bs_now=128, micro_now=32),
    optimizer_part=dict(times=secs(16, 32, 64, opt=0.0095, c=0.00005), bs_now=64), scaled=dict(times=five, base_bs=25, bs_now=100),
    ragged=dict(times=secs(9, 18, 36, 72), bs_now=50, micro_now=18), odd=dict(times=secs(3, 7, 15, 30), bs_now=15),
    adam=dict(times=five, adam=True, base_bs=32, bs_now=100),
    adam_that_moved=dict(times=five, adam=True, base_bs=32, bs_now=100, moved=True), no_times=dict(), no_times_accumulated=dict(bs_now=96, micro_now=32),
    small_set=dict(times=five, n_train=399), smaller_set=dict(times=five, n_train=150), largest_is_half=dict(times=five, n_train=800),
    no_upper_end=dict(times=five, ci=(60.,inf)), unknown=dict(times=five, ci=(0.,inf)), few_windows=dict(times=five, n_windows=9),
    no_noise=dict(times=five, noise_scale=0., ci=(0.,0.5)), much_noise=dict(times=five, noise_scale=1e4, ci=(9e3,1.1e4)),
    slice=dict(times=five, base_lr=slice(1e-3,1e-2), bs_now=200), list=dict(times=five, base_lr=[1e-3,1e-2], bs_now=50),
    uneven=dict(times=uneven))

@pytest.mark.parametrize('kwargs', tables.values(), ids=tables)
def test_table(kwargs):
    plan = make(**kwargs)
    df,noise,now,base,n = plan.table,plan.noise_known,plan.bs_now,plan.base_bs,len(plan.table)
    assert list(df.columns)==['bs','micro_bs','n_acc','lr','steps','examples','step_time','measured','time','linear_scaling','adascale_gain',
        'sqrt_scaling','adam_gain','capped_sqrt_scaling','surge_scaling']
    assert df.bs.tolist()==candidates(plan.times, plan.micro_now, now, noise, plan.n_train) and now in df.bs.values
    ways = [way(bs, plan) for bs in df.bs]
    same = lambda col, v: np.testing.assert_allclose(df[col].astype(float), np.array(v, dtype=float), rtol=1e-12, err_msg=col)
    same('step_time', [o[0] for o in ways])
    same('measured', [next((t for m,t,_ in plan.times if m==bs), nan) for bs in df.bs])
    assert df.micro_bs.tolist()==[o[1] for o in ways] and df.n_acc.tolist()==[o[2] for o in ways]
    lr = plan.base_lr
    lr = lr.stop if isinstance(lr, slice) else lr[-1] if isinstance(lr, list) else lr
    same('linear_scaling', lr*df.bs/base)
    same('sqrt_scaling', lr*(df.bs/base)**0.5)
    if math.isnan(noise):
        assert df[['steps','examples','time','adascale_gain','adam_gain','capped_sqrt_scaling','surge_scaling']].isna().all().all()
        return same('lr', df.linear_scaling) # All of these are for SGD
    same('steps', 1+noise/df.bs)
    same('examples', 1+df.bs/noise if noise else [inf]*n)
    secs_now = (1+noise/now)*way(now, plan)[0]
    same('time', [(1+noise/bs)*o[0]/secs_now for bs,o in zip(df.bs, ways)])
    for nm,f in (('adascale_gain',gain),('adam_gain',for_adam),('capped_sqrt_scaling',capped),('surge_scaling',surge)):
        same(nm, [lr*f(bs, noise, base) for bs in df.bs])
    shown = float(f'{noise:.3g}') # The rule has three digits of the noise scale
    f = for_adam if plan.adam and plan.moved else gain
    same('lr', [lr*(1 if plan.adam and not (plan.moved and bs>=now) else f(bs, shown, base)) for bs in df.bs])
    if plan.times: assert plan.fastest==(now if 1<=(1+least(plan))*df.time.min() else df.bs[df.time.argmin()])

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

def test_a_busy_machine_does_not_decide():
    """Of a device of 8 ms and 0.01 ms per item, at a noise scale of 50: 128 items are the fastest, in 0.84 of the time of 64

    All but 16 and 64 items were read in busy moments, and 128 items so that they seem to take 1.14 of the time.
    """
    sizes,busy = (16,32,64,128,256,512),[1.,1.6,1.,1.14/0.83853,1.5,1.4]
    true = secs(*sizes, a=0.008, c=0.00001)
    read = tuple((m,t*o,once) for (m,t,once),o in zip(true, busy))
    def time(m, times): return (1+50/m)*next(t for o,t,_ in times if o==m)
    def fastest(times): return min(m for m in sizes if time(m, times)<=1.05*min(time(o, times) for o in sizes))
    assert time(128, true)/time(64, true)==pytest.approx(0.8385, abs=1e-4) and time(128, read)/time(64, read)==pytest.approx(1.14, abs=1e-4)
    plan,right = (make(50., (49.,51.), bs_now=64, times=o) for o in (read,true))
    assert (fastest(read),fastest(true))==(64,128) and right.fastest==256 and right.bs==128 # Within 3% of it
    assert plan.timing_error>0.1 and plan.bs==64 and plan.advice.startswith('Stay at 64') # So busy that nothing is known for certain
    assert plan.times==read and plan.table.measured.tolist()==[t for _,t,_ in read] # What was read is kept
    assert right.table.step_time.tolist()==pytest.approx([t for _,t,_ in true])
    mended = plan.table.step_time
    assert (mended.diff()[1:]>=-1e-12).all() and ((mended/plan.table.bs).diff()[1:]<=1e-12).all()
    ratio = plan.table.time[3]
    assert plan.table.time.argmin()>=3 and ratio<0.97 and ratio==pytest.approx((1+50/128)/(1+50/64)*mended[3]/mended[2])

def test_today_is_compared_by_the_same_times():
    "128 items read as quicker than today's 64: all of it is the saving in steps"
    plan = make(ci=(99.,101.), bs_now=64, times=((64,0.02,0.001),(128,0.01,0.001))).at(128)
    assert plan.table.step_time.tolist()[:2]==pytest.approx([0.02*0.5**0.5]*2) and plan.time_ratio==pytest.approx((1+100/128)/(1+100/64))

def test_measured_is_of_a_single_micro_batch():
    "On all ranks; nothing for sizes that are reached by accumulation only"
    plan = make(bs_now=100, micro_now=25, n_ranks=2, times=secs(25, 50))
    assert plan.table.bs.tolist()[:4]==[50,100,200,400] and plan.table.measured.tolist()[:2]==[0.0125,0.015] and plan.table.measured[2:].isna().all()
    assert make().table.measured.isna().all()

@pytest.mark.parametrize('once', [0.001,0.019])
def test_what_is_done_once_is_part_of_the_step(once):
    "Also where the step was mended to less than was read of that part"
    plan = make(bs_now=64, times=((64,0.02,once),(128,0.01,once/2)))
    assert [o for _,_,o in plan.timed]==pytest.approx([min(once, 0.02*0.5**0.5),once/2])
    assert all(n_acc==1 or t>=0.0141 for n_acc,t in zip(plan.table.n_acc, plan.table.step_time))

off = math.log(2)/2 # From either of two readings to their geometric mean
@pytest.mark.parametrize('times,spread,error', [(five,0.,0.), (five,0.03,0.03), (five,nan,nan), ((),nan,nan), (((100,1.,0.),(200,0.5,0.)),nan,off),
    (((100,1.,0.),(200,0.5,0.)),0.1,off), (((100,1.,0.),(200,0.5,0.)),0.5,0.5), (((50,1.,0.),),0.2,0.2)])
def test_timing_error(times, spread, error):
    "By the rounds, or by what had to be mended"
    assert make(times=times, spread=spread).timing_error==pytest.approx(error, nan_ok=True)

# How long to train

@pytest.mark.parametrize('bs_now,epochs_now,exact', [(25,100,160.), (25,5,8.), (25,1,1.6), (25,0.2,0.32), (400,5,2.), (400,0.9,0.36), (100,7,7.),
    (100,2.5,2.5)])
def test_epochs(bs_now, epochs_now, exact):
    "(100+100)/(100+25) = 1.6 times as many, (100+100)/(100+400) = 0.4; whole ones, and one at least"
    plan = make(bs_now=bs_now, times=five, epochs_now=epochs_now)
    assert plan.bs==100 and plan.n_epoch_exact==pytest.approx(exact) and plan.n_epoch==whole_epochs(exact) and type(plan.n_epoch) is int
    assert plan.duration.planned==pytest.approx(plan.n_epoch*1000*0.02) and plan.duration.today==pytest.approx(epochs_now*100_000/bs_now*(0.01+1e-4*bs_now))
    assert type(plan.duration.planned) is type(plan.duration.today) is float

@pytest.mark.parametrize('noise_scale,ci,exact', [(inf,(100.,inf),8.), (100.,(0.,inf),5.), (inf,(0.,inf),5.), (0.,(0.,0.5),5.)])
def test_epochs_by_what_is_known(noise_scale, ci, exact):
    "The lower end where there is no estimate; today's where nothing is known"
    assert make(noise_scale, ci, bs_now=25, times=five, epochs_now=5).n_epoch_exact==pytest.approx(exact)

def test_the_time_is_steps_times_step_time():
    "However it is reckoned: by steps, by examples, or by epochs before they are rounded"
    plan = make(bs_now=25, times=five, epochs_now=5)
    by_steps = steps_needed(100, 100.)*0.02/(steps_needed(25, 100.)*0.0125)
    by_examples = examples_needed(100, 100.)/100*0.02/(examples_needed(25, 100.)/25*0.0125)
    by_epochs = plan.n_epoch_exact*1000*0.02/plan.duration.today
    assert plan.time_ratio==pytest.approx(by_steps)==pytest.approx(by_examples)==pytest.approx(by_epochs)

rounded = r"becomes? (\d+) of \d+, in about (\S+) of the time \((.+?)\)\..*Rounding tells: the same loss takes (\S+) epochs?, in (\S+) of"
@pytest.mark.parametrize('epochs_now,bs_now,says', [(1,25,('2','80%','40 s instead of 50 s','1.6','64%')), (3,25,None), (0.87,25,None), (100,25,None),
    (8,400,None), (1,400,None), (1.2,100,None)])
def test_rounding_is_said_where_it_moves_the_time(epochs_now, bs_now, says):
    "By more than a fifth: 1.6 epochs to 2; not 4.8 to 5, nor where all stays as it is, nor of a part of an epoch"
    words = make(bs_now=bs_now, times=five, epochs_now=epochs_now).advice
    assert re.findall(rounded, words)==([says] if says else []) and ('Rounding' in words)==(says is not None)

for_longer = "For a longer training {} may be faster: ask with its n_epoch."

@pytest.mark.parametrize('noise_scale,bs_now,times,fastest,exact', [
    (200., 50, ((50,0.01,0.),(227,0.0245,0.)), 227, 1.71), # 0.92 of the time for 1.71 epochs, 1.08 for 2
    (100., 400, five, 100, 0.4)])                           # And 1.6 for 1 instead of 0.4
def test_a_gain_that_whole_epochs_take_away_is_none(noise_scale, bs_now, times, fastest, exact):
    "Then it stays, and says what a longer training may gain; a training of many epochs keeps it, as does one of no stated length"
    kwargs = dict(noise_scale=noise_scale, ci=(0.95*noise_scale,1.05*noise_scale), bs_now=bs_now, times=times)
    plan = make(**kwargs, epochs_now=1)
    assert plan.fastest==fastest and plan.bs==plan.bs_now and plan.n_epoch==1 and plan.duration.planned==plan.duration.today
    low,high = plan.bs_range
    assert low<=plan.bs<=high and low<=fastest<=high and f'How sure: {low} to {high}.' in plan.advice and for_longer.format(fastest) in plan.advice
    assert plan.advice.startswith(f"Stay at {bs_now} for 1 epoch (") and f"in whole epochs {fastest} would not be faster." in plan.advice
    assert f'The same loss would take {num(exact)} epochs of {fastest}' in ' '.join(plan.details().split())
    for other in (make(**kwargs, epochs_now=20),make(**kwargs, epochs_now=1, epochs_given=False)):
        assert other.bs==fastest and 'For a longer' not in other.advice and other.time_ratio<0.95
    chosen = plan.at(fastest)
    assert chosen.bs==fastest and "This takes longer than today's training" in chosen.advice

def test_a_part_of_an_epoch():
    "Nor is a training of no stated length one of whole epochs"
    words = make(bs_now=25, times=five, epochs_now=0.5).advice
    assert '0.5 epochs of 25 is worth 0.8 of 100, in about 64% of the time (16 s instead of 25 s).' in words
    assert 'This is for a part of an epoch, and `fit` takes whole ones.' in words
    words = make(bs_now=25, times=five, epochs_now=1, epochs_given=False).advice
    assert '1 epoch of 25 is worth 1.6 of 100, in about 64% of the time (32 s instead of 50 s).' in words and 'part of an epoch' not in words

def test_the_length_is_said():
    "In the headline; and where nobody asked for it, that it is so"
    words = make(bs_now=25, times=five, epochs_now=5).advice
    assert words.startswith("Use 100 (today 25): 5 epochs of 25 become 8 of 100, in about 64% of the time (2 min 40 s instead of 4 min 10 s).")
    assert 'No n_epoch' not in words and 'learn).fit(8, 0.1)' in words
    assert "No n_epoch was given, so epochs and times are for a training of 1 epoch." in make(bs_now=25, times=five, epochs_now=1., epochs_given=False).advice
    left = make(times=five, epochs_given=False).advice # Nothing is to be done, for however many epochs
    assert left.startswith('Stay at 100: other sizes gain') and 'No n_epoch' not in left and 'learn.fit(n_epoch, 0.1)' in left
    for kwargs in (dict(times=five), dict(times=five, bs_now=25)): # The noise scale is that of the length, too
        words = cycle(epochs_given=False, epochs_now=1., **kwargs).advice
        assert "No n_epoch was given: this is for 1 epoch, and a longer training may want a larger batch." in words

@pytest.mark.parametrize('n,said', [(1.5,''), (1.6,"The measurement took 1.6 passes through these 100000 items, so it speaks of them alone.")])
def test_the_measurements_passes_are_said(n, said):
    words = told(cycle(times=five, n_passes=n, epochs_now=1), 'caution')
    assert 'passes' not in told(cycle(times=five, n_passes=n, epochs_now=2), 'caution') # The training goes through them more often
    assert said in words and ('passes' in words)==bool(said)

@pytest.mark.parametrize('took,says', [(21.,True), (19.,False), (9.,False), (nan,False)])
def test_what_it_took_is_said_where_an_epoch_takes_less(took, says):
    "Of 20 s; up to 10 s nobody minds"
    plan = cycle(times=five, took=took)
    assert plan.epoch_time==pytest.approx(20.)
    assert ("Measuring took 21 s, longer than an epoch: num_it= makes it shorter." in plan.advice)==says==('Measuring' in plan.advice)
    if took==9.: assert 'Measuring' not in cycle(times=five, took=took, n_train=10_000).advice

# One number for all of it

powers = [2**i for i in range(40)]

@st.composite
def plans(draw):
    "Of any measurement on any device"
    f = lambda a,b: draw(st.floats(math.log(a), math.log(b)).map(math.exp))
    micro,n_acc,ranks = draw(st.sampled_from([3,8,25,64])),draw(st.sampled_from([1,1,2,5])),draw(st.sampled_from([1,1,2]))
    noise = draw(st.one_of(st.just(0.), st.just(inf), *3*[st.floats(0., 11.).map(math.exp)]))
    low = draw(st.sampled_from([0.,0.3,0.9]))*(noise if noise<inf else f(1, 1e4))
    high = inf if noise==inf else noise*draw(st.sampled_from([1.1,3.]))+1e-3 if draw(st.booleans()) else inf
    a,c,once = f(1e-4, 0.1),f(1e-6, 1e-2),draw(st.sampled_from([0.,0.3,0.9]))
    sizes = [o for o in (micro//4,micro//2,micro,2*micro,4*micro,8*micro)[:draw(st.integers(3,6))] if o]
    busy = draw(st.sampled_from([0.,0.,0.02,0.3]))
    times = tuple((m,(a+c*m)*math.exp(busy*draw(st.floats(-1,1))),once*a) for m in sizes) if draw(st.integers(0,9)) else ()
    now = micro*n_acc*ranks
    return make(noise, (low,high), bs_now=now, micro_now=micro, n_ranks=ranks, n_windows=draw(st.sampled_from([9,10,30])), times=times,
        adam=draw(st.booleans()), spread=draw(st.sampled_from([nan,0.,0.05,0.4])), n_train=draw(st.sampled_from([2*now,1000,10**6])),
        epochs_now=draw(st.sampled_from([0.3,1,2.5,5,40])))

@settings(max_examples=150, deadline=None, derandomize=True)
@given(plans())
def test_all_of_a_plan_follows_from_one_number(plan):
    noise,now,(low,high) = plan.noise_known,plan.bs_now,plan.ci
    known,head,words = not math.isnan(noise),numbers_text(plan),plan.advice
    few = plan.n_windows<10 or low==0 and high==inf
    assert known==(not few) and (few or noise==(low if plan.noise_scale==inf else plan.noise_scale))
    assert ('at least' in head)==('The noise scale is at least' in words)==(known and plan.noise_scale==inf) and ('not known' in head)==few
    # Rule, rate, epochs and times
    by = 1 if plan.adam else plan.bs/now if few else adascale_gain(plan.bs/now, float(f'{noise:.3g}'), now) # The weights did not move
    assert plan.lr==pytest.approx(0.1*by)
    assert f', bs={plan.bs}, micro_bs={plan.micro_bs}, n_acc={plan.n_acc}, lr={rate_text(plan.lr)}, n_epoch={plan.n_epoch}, ' in head
    assert plan.n_epoch_exact==pytest.approx(plan.epochs_now*((noise+plan.bs)/(noise+now) if known else 1))
    assert type(plan.n_epoch) is int and plan.n_epoch==whole_epochs(plan.n_epoch_exact)
    stays,(planned,today) = (plan.bs,plan.micro_bs)==(now,plan.micro_now),plan.duration
    if plan.timed and known: assert planned/plan.n_epoch*plan.n_epoch_exact/today==pytest.approx(plan.time_ratio)
    # The size
    if plan.timed and known:
        def took(bs, secs):
            n = plan.epochs_now*(noise+bs)/(noise+now)
            return (max(n, whole_epochs(n)) if plan.epochs_now>=1 and bs!=now else n)/bs*secs
        took = {bs: took(bs, secs) for bs,secs in zip(plan.table.bs, plan.table.step_time)}
        good = [bs for bs,t in took.items() if t<=1.1*min(took.values()) and t<=took[now]/(1+plan.least_gain)]
        assert plan.bs==(min(good, key=lambda bs: max(bs/now, now/bs)) if good else now)
    first,last = plan.bs_range
    assert first in powers and first<=plan.bs and (last is None or last in powers and last>=plan.bs)
    assert (last is None)==(known and high==inf and bool(plan.timed))
    assert plan.bs%plan.micro_bs==0 and plan.bs==plan.micro_bs*plan.n_acc*plan.n_ranks
    if plan.timed and known:
        says_so = any(o in words for o in (' other sizes gain','in whole epochs','as a whole fit','every other size is slower'))
        assert says_so==stays and (stays or plan.time_ratio*(1+plan.least_gain)<=1+1e-9)
        took = planned if plan.in_whole_epochs else plan.time_ratio*today
        part,off = percent(took/today),1+plan.timing_error
        if off>1.1: part = f'{percent(took/today/off)} to {percent(took/today*off)}'
        whole = f'in about {part} of the time ({Duration(took, today)})'
        if not stays: assert whole in words
        if plan.bs!=now:
            n_epoch = plan.n_epoch if plan.in_whole_epochs else num(plan.n_epoch_exact)
            assert f' {n_epoch} of {plan.bs}, {whole}' in words and words.startswith(f'Use {plan.bs}') and took<today
        if stays: assert plan.time_ratio==approx(1)
    if not known: # As today, and nothing else is said
        assert stays and plan.n_acc*plan.micro_bs*plan.n_ranks==now and plan.lr==0.1 and plan.n_epoch==whole_epochs(plan.epochs_now)
        assert words.startswith(f'Stay at {now} until') and not re.search(r'plan\.|becomes?\b|per item.*;|fastest|Keep|scaled', words)
    json.dumps(plan.to_dict())

# A batch size of one's own choice

def test_at():
    "All that follows goes by it; the measurement and today's training stay"
    plan = make(bs_now=25, times=five, epochs_now=5)
    other = plan.at(400)
    assert plan.chosen is None and plan.bs==100 and type(other) is BatchPlan
    assert (other.bs,other.micro_bs,other.n_acc,other.chosen,other.n_epoch,other.bs_now)==(400,400,1,400,20,25) # 500/125 times 5
    assert other.lr==pytest.approx(0.1*16*125/500) and other.duration.planned==pytest.approx(20*250*0.05) and other.duration.today==plan.duration.today
    assert other.time_ratio==pytest.approx(0.0625/0.0625) and other.bs_range==plan.bs_range and other.noise_known==plan.noise_known
    accum,scaled = other.at(200).cbs
    assert accum.n_acc==1 and scaled.base_bs==25 and other.at(200).bs==200 and other.at(100).bs==plan.bs
    assert other.at(100).to_dict()=={**plan.to_dict(), 'chosen': 100, 'advice': other.at(100).advice, 'too_large': None}

@pytest.mark.parametrize('bs,micro_bs,n_acc', [(300,100,3), (75,25,3), (2000,400,5), (np.int64(50),50,1), (25,25,1)])
def test_at_a_size_that_is_no_candidate(bs, micro_bs, n_acc):
    "By any micro-batch that ran"
    plan = make(bs_now=25, times=five).at(bs)
    assert (plan.bs,plan.micro_bs,plan.n_acc)==(bs,micro_bs,n_acc) and type(plan.bs) is int
    assert plan.table.bs.is_monotonic_increasing and bs in plan.table.bs.values
    assert plan.duration.planned>0 and json.dumps(plan.to_dict())

@pytest.mark.parametrize('bs,exc,words', [(0,ValueError,'`bs` must be at least 1 item, got 0: take a batch size of your own choice'),
    (-1,ValueError,'`bs` must be at least 1 item, got -1'), ('64',TypeError,"`bs` must be a whole number of items, got '64'"),
    (64.,TypeError,'`bs` must be a whole number of items, got 64.0'), (True,TypeError,'got True'), (None,TypeError,'got None'),
    (63,ValueError,'`bs` must be made of whole micro-batches of 25, 50, 100, 200, 400 items, those that ran here, got 63: take 50 or 75, or give the loader '
                   'micro-batches that divide it'),
    (20,ValueError,'got 20: take 25, or'), (990,ValueError,'got 990: take 975 or 1000, or'), (1000,None,''),
    (1001,ValueError,'`bs`=1001 is more than the 1000 items of the training set: take at most those')])
def test_at_refuses(bs, exc, words):
    plan = make(bs_now=25, times=five, n_train=1000)
    if exc is None: assert plan.at(bs).bs==bs
    else:
        with pytest.raises(exc, match=re.escape(words)): plan.at(bs)

def test_at_refuses_what_does_not_divide_over_the_ranks():
    plan = make(bs_now=50, micro_now=25, n_ranks=2, times=secs(25, 50))
    assert (plan.at(150).micro_bs,plan.at(150).n_acc,plan.at(200).micro_bs)==(25,3,
        50) and plan.at(150).advice.startswith('Use 150 as 3 x 25 on each of 2 ranks (today 50), as you chose: ')
    with pytest.raises(ValueError, match='of 25, 50 items on each of 2 ranks, those that ran here, got 75: take 50 or 100, or'): plan.at(75)

def test_at_of_a_small_epoch():
    "Where it holds nothing else that ran, today's is left"
    with pytest.raises(ValueError, match="got 30: take today's, or"): make(bs_now=32, micro_now=32, times=secs(32), n_train=31).at(30)

@pytest.mark.parametrize('kwargs', [dict(bs_now=50, micro_now=18, times=secs(9, 18, 36)), dict(bs_now=50, micro_now=18),
    dict(bs_now=130, times=secs(130), n_train=100), dict(bs_now=50, micro_now=18, ci=(0.,inf), times=secs(9, 18, 36)), dict(bs_now=25, times=five)])
def test_at_todays_size_is_always_possible(kwargs):
    "Ragged windows too, and one that an epoch does not hold whole"
    plan = make(**kwargs)
    same = plan.at(plan.bs_now)
    assert (same.bs,same.micro_bs,same.n_acc)==(plan.bs_now,plan.micro_now,-(-plan.bs_now//plan.micro_now)) and same.n_epoch==100 and same.lr==0.1
    assert f"Stay at {plan.bs_now}, as you chose: nothing changes." in same.advice and 'plan.apply' not in same.advice
    if same.timed: assert same.duration.planned==pytest.approx(same.duration.today)

chose = "Use {} (today {}), as you chose: {} of {} {} of {}, in about {} of the time ({} instead of {}).".format
slower = "This takes longer than today's training"
longer = "{} times as long as the fastest here, {}."
blind = "Use {} (today 100), as you chose; the epochs for it are unknown, as the noise scale is."

@pytest.mark.parametrize('kwargs,bs,do,caution', [
    (dict(bs_now=25), 200, chose(200, 25, '100 epochs', 25, 'become 240', 200, '72%', '1 h', '1 h 23 min'), 'This takes '+longer.format(1.13, '64 to 128')),
    (dict(bs_now=25), 100, chose(100, 25, '100 epochs', 25, 'become 160', 100, '64%', '53 min 20 s', '1 h 23 min'), ''),
    (dict(), 25, chose(25, 100, '100 epochs', 100, 'become 63', 25, '158%', '52 min 30 s', '33 min 20 s'), f"{slower}, and {longer.format(1.56, '64 to 128')}"),
    (dict(ci=(20.,500.)), 200, chose(200, 100, '100 epochs', 100, 'become 150', 200, '113%', '37 min 30 s', '33 min 20 s'),
        f'{slower}, as far as the noise scale is known.'),
    (dict(noise_scale=inf, ci=(81.,inf), adam=True), 50, chose(50, 100, '100 epochs', 100, 'become 73', 50, '110%', '36 min 30 s', '33 min 20 s'),
        f"{slower}, and {longer.format(1.09, '64 or more')}"),
    (dict(bs_now=25, epochs_now=1), 100, chose(100, 25, '1 epoch', 25, 'becomes 2', 100, '80%', '40 s', '50 s'),
        "Rounding tells: the same loss takes 1.6 epochs, in 64% of the time."),
    (dict(bs_now=25), 25, "Stay at 25, as you chose: nothing changes.", 'This takes '+longer.format(1.56, '64 to 128')),
    (dict(bs_now=100, micro_now=25), 200, chose(200, 100, '100 epochs', 100, 'become 150', 200, '48%', '37 min 30 s', '1 h 18 min'),
        'This takes '+longer.format(1.13, '64 to 128')),
    (dict(ci=(0.,inf)), 200, blind.format(200), ''), (dict(n_windows=9), 200, blind.format(200), ''),
    (dict(times=()), 200, "Use 200 as 2 x 100 (today 100), as you chose: 100 epochs of 100 become 150 of 200.", untimed)])
def test_advice_on_a_choice(kwargs, bs, do, caution):
    "What was chosen, what it takes, and in one sentence whether it is slower"
    plan = make(**{**dict(times=five), **kwargs}).at(bs)
    cautions = told(plan, 'caution').replace(present[1:], '')
    assert told(plan, 'do')==do and (cautions.startswith(caution) if caution else not re.search('This is slower|longer than|Rounding', cautions))
    assert cautions.count('the fastest here')+cautions.count('longer than today')<=2 and cautions.count('This ')<=1 and 'How sure' not in plan.advice
    assert not re.search('other sizes gain|ccumulat', plan.advice)
    assert told(plan, 'run').startswith('learn.' if do.startswith('Stay') else 'plan.apply(learn).')

def test_a_chosen_size_is_carried_out():
    "`apply` trains with it; the picture and the table mark it"
    plan = small().at(24)
    learn = plan.apply(net_learner(cbs=Steps(), splitter=halves))
    learn.fit(plan.n_epoch, plan.base_lr)
    assert learn.steps.items==[24]*4*plan.n_epoch and (plan.micro_bs,plan.n_acc)==(8,3)
    assert plan.code.startswith(f'learn.fit_one_cycle({plan.n_epoch}, 0.1, cbs=[GradAccum(3), ScaledLR(8, adascale_gain, noise_scale=64)])')
    assert _line(plan.plot()[1], 'planned').get_label()=='planned, 24'
    ragged = small(bs_now=20, micro_now=8, times=((8,0.01,0.),)).at(20)
    assert ragged.apply(net_learner()).grad_accum.n_acc==3 # 8, 8 and, at the end of an epoch, fewer

# The learning rate

@pytest.mark.parametrize('adam,noise_scale,ci,name,factor', [(False,100.,(80.,130.),'adascale_gain',2.5), (False,100.,(50.,inf),'adascale_gain',2.5),
    (False,inf,(50.,inf),'adascale_gain',4*75/150), (False,100.,(0.,inf),'linear_scaling',4.), (True,100.,(80.,130.),'no_scaling',1.),
    (True,inf,(49.,inf),'no_scaling',1.), (True,100.,(0.,inf),'no_scaling',1.)])
def test_rule(adam, noise_scale, ci, name, factor):
    "By optimizer; without a noise scale the plain one, and then nothing is scaled. From 25 to 100 items"
    plan = make(noise_scale, ci, adam=adam, bs_now=25, times=five)
    assert plan.rule_name==name and plan.rule(4)==approx(factor)
    if math.isfinite(ci[1]): assert plan.bs==100 and plan.lr==approx(0.1*factor)
    if ci==(0.,inf): assert plan.rule is (no_scaling if adam else linear_scaling) and plan.bs==25 and plan.lr==0.1

def test_the_rule_has_three_digits_of_the_noise_scale():
    "As the code shows it: whoever pastes that trains at the same rate"
    assert make(123.456, base_bs=25).rule.keywords==dict(noise_scale=123., base_bs=25)

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
    [(0,'0'),(0.00123,'0.00123'),(0.5,'0.5'),(1,'1'),(3.14159,'3.14'),(9.999,'10'),(99.96,'100'),(10,'10'),(100,'100'),(1234.5,'1230'),(1e6,'1000000')])
def test_numbers_of_three_digits(value, shown): assert f'noise_scale={shown} [0, 2000000]' in make(value, (0.,2e6)).details()

@pytest.mark.parametrize('noise_scale,ci,n_windows,shown', [(500.,(60.,inf),30,'500 [60, inf]'), (inf,(60.,inf),30,'at least 60'),
    (inf,(0.,inf),30,'not known'), (500.,(0.,inf),30,'not known'), (500.,(60.,900.),9,'not known'), (inf,(60.,inf),9,'not known'),
    (nan,(0.,inf),0,'not known')])
def test_what_the_headline_knows(noise_scale, ci, n_windows, shown):
    "'at least' exactly where there is no estimate but a lower end, and nothing where the plan reckons with nothing"
    plan = make(noise_scale, ci, n_windows=n_windows, times=five)
    assert numbers_text(plan).startswith(f'BatchPlan(noise_scale={shown}, balanced_bs={512 if shown[:3]=="500" else None}, bs=')
    assert numbers_text(plan) in ' '.join(plan.details().split())
    assert ('at least' in plan.advice)==(shown=='at least 60') and (math.isnan(plan.noise_known))==(shown=='not known')

def test_repr():
    plan = cycle(noise_scale=512.3, ci=(430.1,640.7), bs_now=64, base_lr=1e-3, times=secs(32, 64, 128, 256, c=1e-5), epochs_now=2)
    assert repr(plan)==("""Use 256 (today 64): 2 epochs of 64 become 3 of 256, in about 44% of the time (15 s instead of 33 s).
Keep passing 0.001 to `fit_one_cycle`: it is scaled to 0.003 for you. How sure: no other size is about as
fast.

    plan.apply(learn).fit_one_cycle(3, 0.001)

Why: The noise scale is about 512 items (430 to 641) over a one-cycle of 2 epochs, and today's 64 is below it.
A larger batch takes fewer steps for little more data.
* The same 100000 items pass 3 times: watch the validation loss, which may be best with a smaller batch.
More in plan.details().""") # 4*576/768, and 768/576
    assert max(map(len, repr(plan).split('\n')))<=110
    assert repr(make(inf, (0.,inf)))==f"{unknown}\n\n    plan = learn.bs_find(0.1, n_epoch=100, num_it=200)\n\nMore in plan.details()."

def test_the_advice_is_the_same_words():
    for plan in (cycle(bs_now=25, times=five), make(inf, (0.,inf)), make(times=five).at(25)):
        words = plan.advice.replace('Run ', '').split()
        assert [o for o in repr(plan).replace('Why: ', '').replace('More in plan.details().',
            '').split() if o!='*']==[o.removesuffix(').')+')' if o.endswith(').') and
                o.removesuffix('.') in repr(plan).split() else o for o in words]

def test_details():
    "All of it, in order; it shows itself as text, and in a notebook with the table"
    plan = cycle(noise_scale=512.3, ci=(430.1,640.7), bs_now=64, base_lr=1e-3, times=secs(32, 64, 128, 256, c=1e-5), epochs_now=2, trained=0.5, n_passes=4.,
        max_bs=256, n_workers=1, n_train=1000)
    text = plan.details()
    assert isinstance(text, str) and repr(text)==text and len([o for o in everything(plan) if o.kind=='caution'])>3
    flat = ' '.join(text.split())
    places = [flat.index(o.text) for o in everything(plan) if o.kind in ('do','run')] + [flat.index(f'* {o.text} {o.reason}'.strip()) for o in everything(plan)
              if o.kind in ('caution','detail')] + [flat.index(numbers_text(plan)), flat.index('Step time here: 10 ms + 0.01 ms per item'),
                  flat.index('256 (planned)')]
    assert places==sorted(places) and flat.count(plan.advice[:50])==1
    assert numbers_text(plan)=='BatchPlan(noise_scale=512 [430, 641], balanced_bs=512, bs=256, micro_bs=256, n_acc=1, lr=0.003, n_epoch=3, base_bs=64)'
    html = text._repr_html_()
    assert html.count('<li>')==sum(o.kind in ('caution',
        'detail') for o in everything(plan))+2 and '<td>256 (planned)</td>' in html and '<pre><code>plan.apply' in html

def test_the_step_time_is_among_the_details():
    "Nothing where two sizes at most ran, as nobody knows how good the fit is"
    for n in (0,1,2): assert 'Step time' not in make(times=secs(25, 50, 100)[:n], bs_now=25).details()
    times = ((25,0.0125,0.),(50,0.015,0.),(100,0.03,0.))
    a,c,error = make(times=times).step_time
    x = np.array([[1/t,m/t] for m,t,_ in times])
    (by_a,by_c),(ss,),*_ = np.linalg.lstsq(x, np.ones(3), rcond=None)
    assert (a,c,error)==(pytest.approx(by_a),pytest.approx(by_c),pytest.approx(ss**0.5))
    text = step_time_text(make(times=times))
    assert text.startswith(f"Step time here: {1e3*a:.3g} ms + {1e3*c:.3g} ms per item, within {100*error:.2g}%; in one micro-batch any size from")
    plan = make(512.3, (430.1,640.7), bs_now=64, times=secs(32, 64, 128, 256, c=1e-5)) # (430.1*0.01/0.00001)**0.5
    assert step_time_text(plan).endswith('; in one micro-batch any size from 656 to 800 items is about as good.')
    assert step_time_text(make(ci=(81.,inf), times=five)).endswith('any size of 90 items or more is about as good.') # (81*0.01/0.0001)**0.5
    unknown = step_time_text(make(ci=(0.,inf), times=five))
    assert 'as good' not in unknown and 'Step time here: 10 ms' in unknown

def _cells(html): return [r.split('<td>')[1].split('</td>')[0] for r in html.split('<tr>') if '<td>' in r]

def test_repr_html():
    html = make(bs_now=25, times=five)._repr_html_()
    assert _cells(html)==['25 (today)','50','100 (planned)','200','400','800'] # A power of two is not among them
    assert _cells(make(150., bs_now=64, times=secs(32, 64, 128, 256, c=0.001))._repr_html_())==['32 (planned)','64 (today)','128 (balanced)','256','512','1024']
    assert _cells(make(times=five)._repr_html_())[2]=='100 (today, planned)' and _cells(make(bs_now=25, times=five).at(150)._repr_html_())[3]=='150 (planned)'
    assert 'step_time (s)' in html and "time (today's = 1)" in html and 'surge_scaling' not in html and 'NaN' not in html
    assert '<th>lr</th>' in html and '<td>0.25</td>' in html

def test_repr_html_is_escaped():
    "What a model said may look like HTML; what is code is marked"
    plan = make(bs_now=25, times=five, failed=((800,'ValueError: <b>5 & `x`'),))
    assert '&lt;b&gt;5 &amp; ' in plan.details()._repr_html_() and '<b>5' not in plan.details()._repr_html_()
    for html in (plan._repr_html_(), plan.details()._repr_html_()): assert '<code>fit</code>' in html and '`fit`' not in html and 'color' not in html

def test_repr_html_without_step_times_and_without_a_noise_scale():
    for plan in (make(), make(inf, (0.,inf)), make(times=five, ci=(0.,inf))):
        html = plan._repr_html_()
        assert 'NaN' not in html and 'None' not in html.split('<table')[1] and html.count('<details>')==1 and plan.advice.split(': ')[0] in html

@pytest.mark.parametrize('kwargs', [dict(times=five, too_large=800), dict(), dict(noise_scale=inf, ci=(0.,inf)), dict(base_lr=slice(1e-3,1e-2)),
    dict(base_lr=np.array([1e-3,1e-2]), bs_now=25, times=five), dict(base_lr=L(1e-3,1e-2)), dict(base_lr=np.float32(0.1)),
    dict(adam=True, times=five), dict(times=five, n_windows=30, cool=NoiseEstimate(90., (72.,inf), 30), at_peak=NoiseEstimate(inf, (1.,inf), 8),
         at_end=NoiseEstimate(nan, (0.,inf), 0), moved=True, mock_epochs=1.5, chosen=200)], ids=lambda o: str(o)[:60])
def test_to_dict(kwargs):
    plan = make(**kwargs)
    d = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    def _known(v): return v if not isinstance(v, float) or math.isfinite(v) else None
    fields = {f.name for f in dataclasses.fields(plan)}-{'df'}
    assert set(d)==fields|{'balanced_bs','bs','bs_range','micro_bs','n_acc','n_epoch','duration','rule_name','lr','wd','step_time',
        'timing_error','advice','code'}
    for nm in ('noise_scale','base_bs','bs_now','micro_now','n_windows','trend','n_train','n_seen','n_passes','moved','loss_rose','level','adam','trained',
               'too_large','balanced_bs','bs','micro_bs','n_acc','n_epoch','epochs_now',
               'epochs_given','mock_epochs','chosen','seed',
               'rule_name','advice',
               'code'): assert d[nm]==_known(getattr(plan, nm))
    assert d['ci']==list(map(_known, plan.ci)) and d['bs_range']==list(plan.bs_range) and d['times']==[list(o) for o in plan.times]
    assert [*d['step_time'],d['timing_error'],d['spread'],d['took']]==list(map(_known, (*plan.step_time,plan.timing_error,plan.spread,plan.took)))
    for nm in ('cool','at_peak','at_end'):
        o = getattr(plan, nm)
        assert repr(d[nm])==repr(o and dict(noise_scale=_known(o.noise_scale), ci=list(map(_known, o.ci)), n_windows=o.n_windows,
                                            tr_sigma=_known(o.tr_sigma), g_sq=_known(o.g_sq)))
    assert repr(d['duration'])==repr(list(map(_known, plan.duration)))
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
    star = _line(ax, 'planned')
    assert star.get_label()==f'planned, {plan.bs}' and np.allclose(star.get_xydata(), [[plan.bs, df.time[df.bs==plan.bs].item()]])
    assert (ax.get_xscale(),ax.get_yscale())==('log','log') and ax.get_xticks().tolist()==df.bs.tolist() and len(ax.get_xticks(minor=True))==0
    assert [o.get_text() for o in ax.get_xticklabels()]==[str(o) for o in df.bs]
    _drawn(axs, tmp_path)

def test_plot_of_what_is_known():
    "No band without an upper end, no times where none ran, no examples without noise"
    lines = lambda plan: [o.split(',')[0] for o in plan.plot()[1].get_legend_handles_labels()[1]]
    assert lines(make(times=five))==["today's",'balanced','time to a given loss','planned','examples']
    unbounded = make(300., (80.,inf), times=five)
    assert lines(make(inf, (80.,inf), times=five))==["today's",'time to a given loss','planned','examples']
    assert lines(unbounded)==["today's",'balanced','time to a given loss','planned','examples'] and not unbounded.plot()[1].collections
    assert lines(make())==["today's",'balanced','examples']
    assert lines(make(0., (0.,0.5), times=five))==["today's",'balanced','time to a given loss','planned']
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

# Along a mock cycle

def windows(n=60, g_sq=0.01, noise=0.):
    "With a noise scale of 3/0.01 = 300 items, or as said; measured nearly without error"
    pct,rng = places(n),np.random.default_rng(0)
    return pd.DataFrame(dict(step=range(n), pct=pct, rate=rate_at(pct), n_items=320, n_elems=640., # 2 elements an item
                             tr_sigma=2*3*(1+noise*rng.normal(size=n)), g_sq=np.broadcast_to(g_sq, n)*(1+noise*rng.normal(size=n))))

def drawn(df=None, noise_scale=400., ci=(350.,460.), **kwargs):
    return cycle(noise_scale=noise_scale, ci=ci, times=five, df=windows() if df is None else df, **kwargs)

def _points(ax): return _line(ax, 'noise scale, a few windows').get_xydata()

def test_plot_without_an_estimate():
    "The lower end as a line, and both ends in words"
    ax,_ = drawn(noise_scale=350., ci=(350.,460.)).plot()
    assert list(_line(ax, 'whole training: 350 to 460 at 95%').get_ydata())==[350,350]

def test_plot_along_a_cycle(tmp_path):
    "Points of 5 or 6 windows that lie together before, on or after the cool stretch; the plan's number over that"
    df = windows(noise=0.1)
    axs = drawn(df).plot()
    ax,_ = axs
    pct = df.pct.to_numpy()
    parts = [np.flatnonzero(o) for o in (pct<cool_stretch[0], (pct>=cool_stretch[0]) & (pct<=cool_stretch[1]), pct>cool_stretch[1])]
    groups = [g for p in parts for g in np.array_split(p, max(1, round(len(p)/5.5)))]
    assert {len(g) for g in groups}<={5,6} and sum(map(len, groups))==60
    by_hand = [(1+g.mean(), df.tr_sigma[g].mean()/df.g_sq[g].mean()/2) for g in groups] # Items, not elements
    assert np.allclose(_points(ax), by_hand)
    x,y = _line(ax, 'whole training: 400 [350, 460] at 95%').get_data()
    assert list(x)==[parts[1][0]+0.5,parts[1][-1]+1.5] and list(y)==[400,400]
    band = next(o for o in ax.collections if len(o.get_facecolor()) and o.get_facecolor()[0][0]==1.).get_paths()[0].vertices # In orange
    assert (band[:,1].min(),band[:,1].max())==(350,460) and (band[:,0].min(),band[:,0].max())==(x[0],x[1])
    assert list(_line(ax, "today's batch size, 100").get_ydata())==[100,100] and ax.get_xlabel()=='part of the mock training that is behind'
    _drawn(axs, tmp_path)

def test_intervals_along_a_cycle():
    "Of each point, by Fieller with successive differences"
    df = windows(noise=0.1)
    ax = drawn(df).plot()[0]
    bars = ax.collections[0].get_segments()
    m = df[:5 if len(_points(ax)) and _points(ax)[0,0]==3 else 6]
    _,low,high = along(m.tr_sigma, m.g_sq, m.n_elems, 0.95)
    assert len(bars)==len(_points(ax)) and bars[0][:,1].tolist()==pytest.approx([low/2,high/2])

def test_the_rate_along_a_cycle():
    "At the foot of the panel, where no point is, on an axis of its own"
    ax = drawn(windows(noise=0.1)).plot()[0]
    right = next(o for o in ax.figure.axes if o is not ax and o.bbox.bounds==ax.bbox.bounds)
    top = right.collections[0].get_paths()[0].vertices
    assert top[:,1].max()==pytest.approx(rate_at(places(60)).max()) and right.get_yscale()=='log'
    height = lambda o,y: o.transAxes.inverted().transform(o.transData.transform((0,y)))[1]
    assert height(right, 1.)==pytest.approx(0.25) and height(ax, 100/2)==pytest.approx(0.25)
    assert min(height(ax, y) for y in _points(ax)[:,1])>0.25 # 100 items, today's, are the least that is drawn
    labels = [o.get_text() for o in ax.get_xticklabels()]
    assert labels[0]=='0%' and labels[-1]=='' and {'89%','97%'} <= {*labels}
    at = ax.get_xticks()[labels.index('89%')]
    assert at==pytest.approx(1+np.flatnonzero(places(60)>=cool_stretch[0])[0])

g_less = np.where(np.arange(60)<30, 0.01, -0.01) # Known, then no gradient to be told from the noise

def test_groups_without_an_interval():
    "Of two windows, which tell none"
    ax = drawn(windows(4, noise=0.1)).plot()[0]
    assert len(_points(ax))==2 and not ax.collections[0].get_segments()

def test_groups_without_an_estimate(tmp_path):
    "An arrow from the lower end, or nothing"
    ax = drawn(windows(g_sq=g_less, noise=0.1)).plot()[0]
    arrows,points = _line(ax, 'at least'),_points(ax)
    assert arrows.get_marker()=='^' and len(arrows.get_xdata())>=3 and arrows.get_xdata().min()>points[:,0].max()-6
    top = ax.get_ylim()[1]
    assert all(o[:,1].max()>=top for o in ax.collections[1].get_segments()) # They leave the picture
    gap,_ = axs = drawn(windows(4, g_sq=[0.01,0.01,-0.01,-0.01]), inf, (0.,inf)).plot()
    _drawn(axs, tmp_path)
    assert len(_points(gap))==1 and not any(o.get_label()=='at least' for o in gap.lines)
    assert not any(o.get_label().startswith('whole training') for o in (*gap.lines,*gap.collections))

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('kwargs', [{}, dict(noise_scale=inf, ci=(60.,inf)), dict(noise_scale=inf, ci=(0.,inf)), dict(ci=(60.,inf)), dict(n_windows=9),
    dict(noise_scale=0., ci=(0.,0.1)), dict(df=windows(4)), dict(df=windows(1)), dict(df=windows(8), n_windows=4),
    dict(df=windows(g_sq=g_less)), dict(df=windows(g_sq=-1.)), dict(df=windows(noise=3.)), dict(noise_scale=inf, ci=(60.,inf), df=windows(2)[:1])],
    ids=lambda o: str({k: v for k,v in o.items() if k!='df'}))
def test_plots_of_cycles(kwargs, tmp_path):
    "Drawn without a warning, whatever is known; the plan's number only where it has one"
    plan = drawn(**kwargs)
    axs = plan.plot()
    _drawn(axs, tmp_path)
    names = [o.get_label() for o in (*axs[0].lines,*axs[0].collections) if o.get_label().startswith('whole training')]
    shown = [] if math.isnan(plan.noise_known) or plan.noise_scale==0 else ['whole training: at least 60 at 95%'] if plan.noise_scale==inf else [
        f'whole training: {with_interval(plan.noise_scale, plan.ci)} at 95%']
    cool = plan.df.pct.between(*cool_stretch).any()
    assert names==(shown if cool else []) and plan.noise_known!=0 or not names

def test_plot_of_a_cycle_on_given_axes():
    "Two for both panels, one for the first alone, with the rate in it"
    _,axs = plt.subplots(1,3)
    plan = drawn()
    assert plan.plot(axs[1]) is axs[1] and axs[1].get_xlabel()=='part of the mock training that is behind' and not axs[0].lines
    both = plan.plot(ax=axs[[0,2]])
    assert both[0] is axs[0] and both[1] is axs[2] and axs[2].get_xlabel()=='batch size (items)' and len(plt.get_fignums())==1

def test_fixed_weights_are_drawn_as_they_were_measured(): assert make(times=five).plot()[0].get_xlabel()=='items measured'

@pytest.mark.parametrize('kwargs,words', [(dict(bs_now=25, times=five), ': use 100 (today 25)'), (dict(times=five), ': stay at 100'), (dict(), ''),
    (dict(times=five, ci=(0.,inf)), ''), (dict(times=five, chosen=200), ': use 200 (today 100)')])
def test_the_picture_says_what_to_do(kwargs, words):
    "In the words of the headline, where times are known"
    assert make(**kwargs).plot()[1].get_title()==f'Predicted here{words}'

# Carrying it out

def net_learner(dls=None, n=96, bs=8, cbs=None, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4,2))
    return quiet_learner(dls or loaders(regression(n, dtype=torch.float32), bs, shuffle=True), model, cbs=cbs, **kwargs)

def small(noise_scale=64., micro_now=8, times=((4,0.01,0.),(8,0.01,0.),(16,0.01,0.),(32,0.011,0.)), **kwargs):
    "Of 8 items a step; 32 are the fastest, in one micro-batch"
    return make(noise_scale, micro_now=micro_now, times=times, n_train=96, **{**dict(ci=(60.,70.), bs_now=8, epochs_now=3), **kwargs})

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
    learn = plan.apply(net_learner(cbs=Steps(), splitter=halves))
    learn.fit(10, plan.base_lr)
    assert learn.steps.items==[32]*30 and plan.bs==32
    lr = plan.lr
    lr = [lr.start,lr.stop] if isinstance(lr, slice) else lr if isinstance(lr, list) else [lr]*2
    assert learn.steps.lrs[-1]==pytest.approx(lr) and learn.steps.lrs[3]==pytest.approx(lr)
    assert learn.steps.lrs[0]==pytest.approx([o/plan.rule(4) for o in lr]) # At the start of the warmup, the rate of 8 items
    assert learn.recorder.lrs[-1]==pytest.approx(lr[-1])

@pytest.mark.parametrize('plan', [small(base_lr=0.02), accumulated(base_lr=0.02), small(base_lr=slice(1e-3,1e-2)), accumulated(base_lr=[1e-3,1e-2]),
    small(ci=(0.,inf)), small(adam=True), small(noise_scale=123.456), small(base_bs=4),
    accumulated(adam=True, ci=(0.,inf), bs_now=24)], ids=lambda p: p.code[25:100])
def test_the_code_does_what_apply_does(plan):
    "Pasted where everything is imported, on a learner with loaders of `micro_bs`: the same rates and items a step"
    def pasted(learn):
        scope = dict(learn=learn)
        exec('from fastai_bs.all import *', scope)
        exec(plan.code, scope)
    assert plan.code.endswith(f'# with dls of bs={plan.micro_bs}') and '\n' not in plan.code
    learn = lambda bs: net_learner(bs=bs, cbs=Steps(), splitter=halves, opt_func=Adam if plan.adam else momentum_sgd)
    here,there = learn(plan.micro_bs),plan.apply(learn(8))
    pasted(here)
    there.fit_one_cycle(plan.n_epoch, plan.base_lr)
    assert here.steps.lrs==there.steps.lrs and here.steps.items==there.steps.items==[plan.bs]*len(here.steps.items)
    assert len(here.steps.items)==plan.n_epoch*96//plan.bs

def test_code():
    assert accumulated(base_lr=slice(1e-3,1e-2)).code==("learn.fit_one_cycle(3, slice(0.001, 0.01), cbs=[GradAccum(4), "
        "ScaledLR(8, adascale_gain, noise_scale=1000)]) # with dls of bs=8")
    assert small(ci=(0.,inf), base_lr=[0.1,0.2]).code==(
        "learn.fit_one_cycle(3, [0.1, 0.2], cbs=[GradAccum(1), ScaledLR(8, linear_scaling)]) # with dls of bs=8")
    assert small(epochs_now=6).code.startswith("learn.fit_one_cycle(8, 0.1, cbs=") # 6*(64+32)/(64+8)
    assert small(noise_scale=1234567., ci=(1.,inf), times=()).code.endswith("ScaledLR(8, adascale_gain, noise_scale=1.23e+06)]) # with dls of bs=8")
    assert small(adam=True).code.endswith("ScaledLR(8, no_scaling)]) # with dls of bs=32")

# Rates that were tried, whole epochs, weight decay

def test_the_size_is_chosen_by_whole_epochs():
    "What 1.3 epochs would save of 1 is lost where there must be 2: (450+300)/(450+150) = 1.25 of 300 items"
    plan = make(450., (440.,460.), bs_now=150, epochs_now=1, times=((150,0.02,0.),(300,0.024,0.)), n_train=600)
    assert plan.fastest==300 and plan.n_epoch_exact==1 and plan.epochs_at(300)==1.25 and plan.bs==150
    assert 'in whole epochs 300 would not be faster' in plan.advice and dataclasses.replace(plan, epochs_now=4).bs==300 # 5 epochs

def test_todays_training_is_not_rounded_in_the_choice():
    "2.5 epochs stay 2.5; with 50 items 3 take more"
    plan = make(2000., (1900.,2100.), bs_now=25, epochs_now=2.5, times=((25,0.0125,0.),(50,0.022,0.)), n_train=100)
    assert plan.fastest==50 and plan.bs==25

@pytest.mark.parametrize('epochs_given', [True,False])
@pytest.mark.parametrize('valid_time,epoch_start,bs', [(0.,0.,100), (10.,0.,100), (30.,0.,25), (0.,10.,100), (0.,30.,25), (12.,13.,100), (14.,16.,25)])
def test_validations_count_in_the_choice(valid_time, epoch_start, bs, epochs_given):
    "8 epochs of 20 s with 100 items, 5 of 50 s with 25: three validations and starts more cost up to 90 s"
    plan = make(bs_now=25, times=((25,0.0125,0.001),(100,0.02,0.001)), epochs_now=5, epochs_given=epochs_given, valid_time=valid_time, epoch_start=epoch_start)
    assert plan.bs==bs and plan.fastest==100
    beside = valid_time+epoch_start
    planned,today = 8*(20+beside),5*(50+beside)
    assert plan.at(100).time_ratio==pytest.approx(planned/today) and plan.at(100).duration==pytest.approx((planned,today))
    within = 'in whole epochs' if epochs_given else 'as a whole fit'
    if bs==25: assert plan.advice.startswith('Stay at 25') and f': {within} 100 would not be faster.' in plan.advice

# At a noise scale of 100 a batch of 100 items needs 2 steps where 200 need 1.5 and 400 1.25
def relative(*ratios): return tuple((bs,0.04*ratio/steps,0.) for bs,ratio,steps in zip((100,200,400), ratios, (2,1.5,1.25)))

@pytest.mark.parametrize('kwargs,fastest,bs', [
    (dict(bs_now=25, times=five),100,100), # 50 take 0.045/0.04 as long
    (dict(bs_now=400, times=five),100,100), # And so do 200
    (dict(bs_now=25, times=five, noise_scale=300.),200,100), # 0.08/0.075, and 0.105/0.075 with 50
    (dict(bs_now=400, times=five, noise_scale=30.),50,100), # 0.026/0.024, and 0.0345/0.024 with 200
    (dict(bs_now=100, times=five),100,100), # Nothing is faster
    (dict(bs_now=100, times=five, noise_scale=300.),200,200), # Of 0.08/0.075 a gain is left
    (dict(bs_now=100, times=five, noise_scale=300., spread=0.07),100,100), # Not of a clock that errs as much
    (dict(bs_now=100, times=relative(1, 0.96, 0.9)),400,200), # A tenth more at most, and less than today's
    (dict(bs_now=100, times=relative(1, 0.98, 0.9)),400,400), # Here 200 gain nothing
    (dict(bs_now=100, times=relative(1, 0.96, 0.87)),400,400), # And here more than a tenth of the time is lost
    (dict(bs_now=100, times=relative(1, 0.98, 0.98)),100,100)])
@pytest.mark.parametrize('epochs_given', [True,False])
def test_of_sizes_about_as_fast_the_one_nearest_to_todays(kwargs, fastest, bs, epochs_given):
    "On either side; today's where nothing gains as much as the timing errs"
    noise = kwargs.get('noise_scale', 100.)
    plan = make(ci=(0.99*noise,1.01*noise), epochs_given=epochs_given, epochs_now=1000, **kwargs)
    assert (plan.fastest,plan.fastest_fit,plan.bs)==(fastest,bs,bs) and type(plan.fastest_fit) is int
    low,high = plan.bs_range
    assert low<=bs<=high and low<=fastest<=high

def test_a_rate_that_is_low_grows_as_for_sgd():
    "With Adam, and where it held; then that is said first of all"
    plan = cycle(bs_now=25, times=five, adam=True, rate_held=100, rate_low=True, epochs_given=False, n_passes=4.)
    assert (plan.bs,plan.rule_name)==(100,'adascale_gain') and plan.rule_at(50)(2)==approx(gain(50, 100., 25)) and plan.lr==approx(0.1*gain(100, 100., 25))
    words = told(plan, 'caution')
    assert words.startswith("Your rate looks low, so find it again: in a short training the loss fell faster at 2.5 times it.")
    assert "ended better at the higher rate than at today's" in told(plan, 'detail') and 'rate looks low' not in told(plan.at(50), 'caution')
    as_ever = dataclasses.replace(plan, rate_low=False)
    assert as_ever.rule_name=='adam_gain' and as_ever.lr==approx(0.1*for_adam(100, 100., 25))
    assert 'rate looks low' not in told(as_ever, 'caution') and "ended no worse at the higher rate than at today's" in told(as_ever, 'detail')
    assert plan.at(200).rule is no_scaling and plan.at(25).rule(1)==1 # Nor where it was not tried

@pytest.mark.parametrize('adam', [False,True])
def test_a_higher_rate_is_advised_where_it_was_tried(adam):
    "Up to the size at which it held, and below the one at which it failed; the other way it needs no trial"
    plan = cycle(bs_now=50, times=five, adam=adam, rate_held=100, rate_failed=400)
    for bs in (50,100): assert plan.rule_at(bs)(bs/50)==approx((for_adam if adam else gain)(bs, 100., 50))
    for bs in (101,200,399,400,800): assert plan.rule_at(bs) is no_scaling
    assert (plan.rule_at(25) is no_scaling) if adam else plan.rule_at(25)(0.5)==approx(gain(25, 100., 50))
    assert plan.table.bs.tolist()==[25,50,100,200] and plan.at(400).table.bs.tolist()==[25,50,100,200,400] and plan.at(400).rule is no_scaling
    failed = dataclasses.replace(plan, rate_held=None, rate_failed=100)
    assert failed.rule_at(99) is not no_scaling and failed.rule_at(100) is no_scaling and failed.table.bs.tolist()==[25,50] and failed.bs==50
    assert 'at the rate that goes with 100, a short training ended worse' in failed.advice

@pytest.mark.parametrize('wd', [0.01,[0.01,0.1]])
@pytest.mark.parametrize('adam,epochs_given', [(False,True), (True,True), (True,False)])
def test_weight_decay(wd, adam, epochs_given):
    "Batch, rate and epochs: 4 times, 2.5 times or what Adam makes of it, and 8 of 5 epochs; not where nothing changes, nor where none is known"
    plan = cycle(bs_now=25, base_bs=50, times=five, adam=adam, epochs_now=5, epochs_given=epochs_given, wd_now=wd)
    assert plan.bs==100 and plan.n_epoch==8
    by = for_adam(100, 100., 50)/for_adam(25, 100., 50) if adam else 2.5
    factor = 4/(by*8/5)
    assert plan.wd_factor==approx(factor) and L(plan.wd)==L([approx(factor*o) for o in L(wd)])
    assert plan.at(25).wd_factor==1 and plan.at(25).wd==wd
    none = dataclasses.replace(plan, wd_now=None)
    assert none.wd_factor==1 and none.wd is None and 'decay' not in none.details()
    whole = dataclasses.replace(plan, epochs_now=3) # 4.8 are 5, where they are to be whole
    assert whole.wd_factor==approx(4/(by*(5 if epochs_given else 4.8)/3))
    words = f"Weight decay becomes {rate_text(whole.wd)} in place of {rate_text(wd)}: it is set for you, unless you pass wd= to the fit."
    assert (words in told(whole, 'how'))==(adam or epochs_given) # For SGD the gain is what the epochs leave of the batch, before they are rounded
