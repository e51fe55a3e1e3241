"Short trainings with a larger batch: they leave no trace, tell how far it gets and at which rate, and have their say in the plan"
import math
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.optimizer import Adam

from fastai_bs.schedule.scaled_lr import rates
from fastai_bs.finder import bs_find as finder # noqa: F401 (patches `bs_find` into `Learner`)
from fastai_bs.finder import trial as trials
from fastai_bs.all import GhostBatchNorm, GradAccum, linear_scaling, ScaledLR
from fastai_bs.finder.facts import Trial, unfrozen_lr
from fastai_bs.finder.choice import decide
from fastai_bs.finder.options import option_of, options_of, today_as_is
from fastai_bs.finder.formulas import epochs_needed, noise_of, whole_epochs
from fastai_bs.finder.trial import (FirstLook, items_to_compare, loss_after, MeanLoss, most_part, most_part_of_less, short_steps, is_steep,
    part_reached, parts_tried,
    try_larger, try_sizes)
from helpers import changes, loaders, mlp, picture, quiet_learner, regression
from plans import facts_of, secs
from test_bs_find import convnet_learner

pytestmark = pytest.mark.usefixtures('short')

def learner(cbs=None): return quiet_learner(loaders(regression(400), 4, shuffle=True), mlp(), opt_func=Adam, cbs=cbs)
own = {'nothing': lambda: [], 'its own': lambda: [GradAccum(2),ScaledLR(4, linear_scaling)]}

class Count(Callback):
    "Micro-batches, optimizer steps, and micro-batches of validations"
    order = 90
    def __init__(self): self.seen = dict(micro=0, steps=0, valid=0)
    def before_batch(self): self.seen['micro' if self.training else 'valid'] += 1
    def after_step(self): self.seen['steps'] += 1

# One short training

@pytest.mark.parametrize('cbs,n_steps', [(own['nothing'],1),(own['its own'],7)])
def test_a_short_training_leaves_the_learner_as_it_was(cbs, n_steps):
    "After so many steps of `n_acc` micro-batches, and a validation on the items alone"
    learn = learner([*cbs(),Count()])
    learn.fit(1, 1e-3)
    items = items_to_compare(learn, 8, 3)
    learn.count.seen = dict(micro=0, steps=0, valid=0)
    seen,was = learn.count.seen,picture(learn)
    assert math.isfinite(loss_after(learn, 8, 3, 1e-3, n_steps, items))
    n = dict(seen)
    seen.update(micro=0, steps=0, valid=0)
    assert n in ({'micro': 3*n_steps, 'steps': n_steps, 'valid': 3}, seen)
    assert changes(was, picture(learn))==[]

@pytest.mark.parametrize('micro_bs,n,sizes', [(None,3,[4,4,4]), (8,2,[8,8]), (100,9,[100]*4)])
def test_items_are_the_first_of_the_training_loader(micro_bs, n, sizes):
    "In the same order each time, with another seed in another; no more than there are"
    learn = learner()
    was = picture(learn)
    items = items_to_compare(learn, micro_bs, n)
    assert [len(x) for x,_ in items]==sizes
    assert all(torch.equal(a, b) for o,p in zip(items, items_to_compare(learn, micro_bs, n)) for a,b in zip(o, p))
    assert not torch.equal(items[0][0], items_to_compare(learn, micro_bs, n, seed=3)[0][0])
    assert changes(was, picture(learn))==[]

def test_the_loss_is_that_of_the_items_without_dropout():
    model = nn.Sequential(nn.Dropout(0.5), mlp())
    learn = quiet_learner(loaders(regression(80), 4), model)
    items = items_to_compare(learn, None, 5)
    with torch.no_grad(): losses = [nn.functional.mse_loss(model[1](x), y).item() for x,y in items]
    assert loss_after(learn, None, 1, 0., 3, items)==pytest.approx(np.mean(losses))

@pytest.mark.parametrize('losses,mean', [([1.,math.nan,3.],2.), ([math.nan],math.inf), ([1.,math.inf],math.inf), ([1.,-math.inf],math.inf), ([-1.],-1.)])
def test_mean_loss(losses, mean):
    "Of those that have a number; a loss of inf is no loss to compare"
    cb = MeanLoss()
    cb.losses = list(map(torch.tensor, losses))
    assert cb.mean(False)==mean

def test_a_loss_of_one_dimension():
    def _loss(pred, y): return nn.functional.mse_loss(pred, y).reshape(1)
    learn = quiet_learner(loaders(regression(80), 4), mlp(), _loss)
    assert math.isfinite(loss_after(learn, None, 1, 1e-3, 3, items_to_compare(learn, None, 2)))

def test_another_seed_trains_on_other_items():
    learn = learner()
    items = items_to_compare(learn, None, 5)
    first,again,other = (loss_after(learn, None, 1, 1e-2, 20, items, seed) for seed in (1,1,2))
    assert first==again!=other

def test_a_metric_is_left_out():
    "It may need all of the validation set"
    def _fails(*args): raise ZeroDivisionError
    learn = learner()
    learn.metrics = [_fails]
    assert math.isfinite(loss_after(learn, None, 1, 1e-3, 3, items_to_compare(learn, None, 2)))

# How far

def on_a_line(part): return 10-4*math.log2(part)

@pytest.mark.parametrize('k', [2,3,4,16])
@pytest.mark.parametrize('part', [1.,0.9,0.6,0.3,0.1])
def test_part_reached(k, part):
    "Exactly where losses fall evenly with the logarithm, above the upper part and below the lower one too, up to the most that is claimed"
    low,high = parts_tried(k)
    assert part_reached(on_a_line(part), on_a_line(low), on_a_line(high), k)==pytest.approx(min(part, k**-0.125))

low,high = parts_tried(4)

@pytest.mark.parametrize('loss,at_low,at_high,part', [(2.,3.,2.,high), (5.,4.,3.,low*low/high), (4.,4.,3.,low), (1.,4.,3.,high**0.5),
    (-2.,-1.,-3.,(low*high)**0.5),
    (inf,inf,inf,0), (inf,nan,3.,0), (nan,nan,3.,0), (1e9,4.,3.,0),       # The larger batch broke down
    (2.,inf,3.,high), (2.,inf,1.,0), (2.,nan,3.,high), (2.,nan,1.,0),      # Today's did on fewer items
    (2.,3.,3.,high), (4.,3.,3.,0), (2.,2.5,3.,high)])                      # More items are of no use to it
def test_part_reached_at_its_ends(loss, at_low, at_high, part):
    "Losses may be negative, or tell nothing"
    assert part_reached(loss, at_low, at_high, 4)==pytest.approx(part)

@pytest.mark.parametrize('k', [2,4,16])
@pytest.mark.parametrize('power,steep', [(1.1,True), (0.9,False), (-1.,False)])
def test_a_loss_that_falls_faster_than_in_proportion_is_steep(k, power, steep):
    at_low,at_high = (o**-power for o in parts_tried(k))
    assert is_steep(at_low, at_high, k)==steep

@pytest.mark.parametrize('at_low,at_high', [(inf,1.), (nan,1.), (-1.,-3.), (1.,-1.)])
def test_what_tells_no_slope_is_not_steep(at_low, at_high):
    "A loss below 0 has no proportion"
    assert not is_steep(at_low, at_high, 4)

decays = [] # Weight decay of each short training

@pytest.fixture
def scripted(monkeypatch):
    "Loss after a short training with so many items in a batch, at a rate and after so many steps; what was asked for"
    def _scripted(loss):
        asked = []
        def _loss_after(learn, micro_bs, n_acc, lr, n_steps, items, seed, wd, watch):
            asked.append((micro_bs,n_acc,lr,n_steps,seed))
            decays.append(wd)
            return loss((micro_bs or 4)*n_acc, np.ravel(rates(lr))[-1], n_steps)
        monkeypatch.setattr(trials, 'loss_after', _loss_after)
        decays.clear()
        monkeypatch.setattr(trials, 'items_to_compare', lambda *args: [])
        return asked
    return _scripted

def small_facts(**kwargs):
    "Facts of a training of 1,000 steps of 4 items"
    return facts_of(4, **{**dict(noise_scale=60., ci=(50.,70.), times=secs(4, 8, 16, 32, 64, 128), n_epoch=5, n_train=800, lr=1e-3), **kwargs})

def tried(facts, bs, n_steps=240):
    return try_larger(None, facts, today_as_is(facts), option_of(facts, facts.noise, bs), n_steps)

def test_a_larger_batch_is_tried_at_the_root_of_the_ratio(scripted):
    "On the same items as today's, which gets 71% and 40% of them"
    asked = scripted(lambda bs, lr, n_steps: 1.4 if bs==16 else 2.-n_steps/240)
    at_low,at_high = 95/240,170/240
    part,steep = tried(small_facts(seed=7), 16)
    assert part==pytest.approx(low*4**((2/3-1/4)*(0.6-at_low)/(at_high-at_low)))
    assert not steep
    assert asked==[(None,1,1e-3,170,7),(16,1,pytest.approx(2e-3),60,7),(None,1,1e-3,95,7)]

@pytest.mark.parametrize('own,micro_bs,groups', [(None,None,{None}), (None,4,{None}), (None,16,{8}), (4,None,{4}), (4,16,{4})])
def test_a_short_training_has_batchnorm_see_as_few_items(own, micro_bs, groups):
    "Of a larger micro-batch of pictures, as many as of today's 8; where the learner has groups of its own, of every one"
    class Look(Callback):
        def before_batch(self):
            if self.training: found.add(getattr(vars(self.learn.model[1]).get('forward'), 'args', (None,None))[1])
    learn,found = convnet_learner(cbs=own and GhostBatchNorm(own)),set()
    was = picture(learn)
    loss_after(learn, micro_bs, 1, 1e-3, 2, items_to_compare(learn, micro_bs, 1), watch=Look())
    assert found==groups
    assert changes(was, picture(learn))==[]

@pytest.mark.parametrize('loss', [inf,nan])
def test_the_third_training_is_left_out_where_the_larger_batch_broke_down(loss, scripted):
    asked = scripted(lambda bs, lr, n_steps: loss if bs==16 else 2.-n_steps/240)
    assert tried(small_facts(), 16)==(0,False)
    assert len(asked)==2

def test_a_steep_loss_is_told(scripted):
    scripted(lambda bs, lr, n_steps: 300/n_steps**1.2)
    assert tried(small_facts(), 16)[1]

@pytest.mark.parametrize('n_train,n_epoch,drops_last,steps', [(800,1,False,(141,50,79)), (90,10,False,(163,60,91)), (90,10,True,(156,50,87))])
def test_both_batches_see_as_many_items(n_train, n_epoch, drops_last, steps, scripted):
    "Also where epochs have a last batch that is small, or drop it; no longer than the training"
    asked = scripted(lambda bs, lr, n_steps: 3. if bs==16 else 2.)
    facts = small_facts(n_train=n_train, n_epoch=n_epoch, drops_last=drops_last)
    tried(facts, 16, round(facts.today.steps))
    assert tuple(n_steps for *_,n_steps,_ in asked)==steps

@pytest.mark.parametrize('kwargs,lr', [(dict(lr=0.01, lr_factor=3.),0.03), (dict(lr=0.01, freeze_epochs=1, frozen=0.005),unfrozen_lr(0.01)),
                                       (dict(lr=0.01, adam=False, sums=True),0.01/4)])
def test_rates_begin_with_that_which_trains_today(kwargs, lr, scripted):
    "Also where a ScaledLR scales it, `fine_tune` takes another, or the loss is a sum"
    asked = scripted(lambda bs, lr, n_steps: 1. if bs==16 else 2.)
    tried(small_facts(**kwargs), 16)
    assert rates(asked[1][2])==pytest.approx(np.multiply(rates(lr), 2))
    today = rates(asked[0][2])
    assert today==pytest.approx(rates(lr) if 'sums' not in kwargs else [0.01])

@pytest.mark.parametrize('kwargs,factor', [(dict(), 4/2), (dict(adam=False, sums=True), 4/(2/4)), (dict(wd_factor=0.5), 1.), (dict(wd=None), None),
                                           (dict(n_train=90, n_epoch=10), 23/6/2)])
def test_the_weights_decay_as_much(kwargs, factor, scripted):
    "A quarter of the steps, at the rate that goes with the size; today's training has its own decay"
    scripted(lambda bs, lr, n_steps: 3. if bs==16 else 2.)
    tried(small_facts(**{**dict(wd=0.1), **kwargs}), 16)
    assert decays==[None,factor and pytest.approx(0.1*factor),None]

def test_the_decay_is_what_the_optimizer_sees():
    "Without one no weight shrinks"
    seen = []
    class Look(Callback):
        def before_step(self): seen.append(self.opt.hypers[0]['wd'])
    learn = learner([Look()])
    loss_after(learn, None, 1, 1e-3, 3, items_to_compare(learn, None, 2), wd=0.3)
    assert seen==[0.3]*3

def as_long(*sizes): return tuple((o,0.01,0.) for o in sizes)
flat = as_long(4, 8, 16, 32, 64, 128)

def unmeasured(**kwargs):
    "As facts are where no noise scale was asked for; a step takes 10 ms, whatever the size"
    return small_facts(**{**dict(noise_scale=nan, ci=(nan,nan), n_windows=None, times=flat), **kwargs})

# For a choice

lengths = [] # Steps of each trial

@pytest.fixture
def told(monkeypatch):
    "What is told of each size that is tried; those sizes"
    def _told(parts):
        sizes = []
        lengths.clear()
        def _try_larger(learn, facts, base, larger, n_steps, watch):
            sizes.append((base.bs,larger.bs))
            lengths.append(n_steps)
            part = parts[larger.bs]
            return part if isinstance(part, tuple) else (part,False)
        monkeypatch.setattr(trials, 'try_larger', _try_larger)
        return sizes
    return _told

low4 = low # Of no use

def of_both(first, second):
    "The part of 64 items by two trials, 16 from 4 and 64 from 16: what 16 reached in 240 steps of 4 is more in 960"
    noise = noise_of(first, 16, 4)*4**0.25
    return second*(1+4/noise)/(1+16/noise)

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('facts,parts,tried_sizes,bs,part,failed', [
    (small_facts(times=flat), {16: 0.8, 64: 0.5}, [(4,16),(16,64)], 64, of_both(0.8, 0.5), inf), # The noise scale is that of both trials
    (small_facts(times=flat[:3]), {16: 0.44}, [(4,16)], 16, 0.44, inf),            # Where still larger batches would not pay no more is tried
    (small_facts(times=flat), {16: 0.43}, [(4,16)], 16, 0.43, 16),                 # Too little for a plan, though as far as the lower part
    (small_facts(times=flat), {16: 0.3}, [(4,16)], 16, 0.3, 16),                   # A size that is of no use tells of smaller ones
    (small_facts(times=flat), {16: 0.25}, [(4,16)], 4, None, 16),                  # Not where it got no further in as many steps
    (small_facts(times=flat), {16: 0.8, 64: low4}, [(4,16),(16,64)], 16, 0.8, 64), # What was found stays
    (unmeasured(n_epoch=40), {16: low4}, [(4,16)], 16, low4, 16),
    (unmeasured(n_epoch=8), {16: 0.6}, [(4,16)], 16, 0.6, inf),                    # The next size has to pay for itself
    (unmeasured(n_epoch=400), {16: 0.6, 64: 0.6}, [(4,16),(16,64)], 64, of_both(0.6, 0.6), inf)])
def test_sizes_are_tried_each_from_the_one_before(facts, parts, tried_sizes, bs, part, failed, told):
    sizes = told(parts)
    trial = try_sizes(None, facts).trial
    assert sizes==tried_sizes
    assert (trial.largest,trial.failed,trial.is_known)==(bs,failed,part is not None)
    if part: assert (trial.noise+bs)/(trial.noise+4)==pytest.approx(1/part)

@pytest.mark.parametrize('n_epoch,times,tried_sizes,planned', [
    (5,None,[(4,16),(16,64)],64), (6,None,[(4,16)],8), # Four times as many items are tried where twice as many may be planned, once
    (6,(4,8),[(4,8)],8),                               # They do not run here
    (6,'no gain',[],4),                                # Twice as many could save too little, though four times as many would save enough
    (5,'no gain',[(4,16),(16,64)],64)])
def test_with_many_passes_one_larger_size_is_tried_if_twice_the_batch_may_pay(n_epoch, times, tried_sizes, planned, told):
    times = {None: flat, 'no gain': ((4,0.01,0.),(8,0.0195,0.),(16,0.02,0.),(32,0.025,0.),(64,0.03,0.))}.get(times) or as_long(*times)
    sizes = told({8: 0.9, 16: 0.8, 64: 0.8})
    facts = try_sizes(None, small_facts(n_train=8000, n_epoch=n_epoch, times=times, noise_scale=1e5, ci=(9e4,1.1e5)))
    assert sizes==tried_sizes
    assert decide(facts, options_of(facts, facts.noise)).option.bs==planned

@pytest.mark.parametrize('n_epoch,n_steps,pays', [(5,1425,True),(6,1425,False),(6,1600,True)])
def test_a_trial_must_pay_for_what_would_be_planned(n_epoch, n_steps, pays, told):
    "Of 240 steps, and of the items three times: in 1,425 steps four times the batch would save twice as much, twice the batch 4/3 as much in 1,600 steps only"
    told({16: 0.8, 64: 0.8})
    facts = unmeasured(n_epoch=n_epoch, n_train=4*n_steps//n_epoch, times=flat)
    trial = try_sizes(None, facts).trial
    assert trial.is_known==pays
    if pays: return
    assert (trial.skipped,trial.largest)==(16,4)
    hoped = [option_of(replace(facts, trial=trial), trial.hoped_noise, bs).fit_time for bs in (4,8,16)]
    assert trial.saving==pytest.approx(hoped[0]-hoped[1])
    assert most_part_of_less*(hoped[0]-hoped[1])<trial.cost

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('steeps', [(False,False),(True,False),(False,True),(True,True)])
def test_a_noise_scale_does_not_grow_where_the_loss_falls_steeply(steeps, told):
    "The last trial tells; a first one that was steep has no more to grow"
    facts = unmeasured(n_epoch=400)
    told({16: (0.6,steeps[0]), 64: (0.5,steeps[1])})
    found = try_sizes(None, facts)
    noise = noise_of(0.6, 16, 4)*(1 if steeps[0] else 4**0.25)
    assert found.trial.n_short==(facts.today.steps if steeps[1] else 960)
    assert (found.trial.noise+64)/(found.trial.noise+4)==pytest.approx((1+16/noise)/(1+4/noise)/0.5)
    assert (found.noise==found.trial.noise)==steeps[1]

@pytest.mark.parametrize('times,sizes', [((4,12,48),[(4,12),(12,48)]), ((4,64),[(4,64)])])
def test_the_largest_within_four_times_is_tried(times, sizes, told):
    "Or the next one where that is further"
    tried_sizes = told({12: 0.9, 48: 0.9, 64: 0.9})
    try_sizes(None, small_facts(times=as_long(*times)))
    assert tried_sizes[:len(sizes)]==sizes

@pytest.mark.parametrize('n_train,n_steps', [(1600,240), (800,200)])
def test_what_was_measured_is_tried_whatever_it_costs(n_train, n_steps, told):
    "No longer than the training itself"
    told({16: 0.6, 64: 0.6})
    trial = try_sizes(None, small_facts(n_epoch=1, n_train=n_train, times=flat)).trial
    assert trial.is_known
    assert (lengths[0],trial.n_short)==(n_steps,n_train//4)

def test_what_was_found_stays_where_a_larger_one_is_of_no_use(told):
    "The choice must save more than a tenth"
    told({16: 0.8, 64: low4})
    trial = try_sizes(None, small_facts(times=flat)).trial
    device = small_facts(times=(*flat[:3],(32,0.013,0.),(64,0.016,0.)))
    for part,bs in ((0.44,16),(0.5,64)):
        told({16: 0.8, 64: part})
        again = try_sizes(None, device).trial
        assert (again.largest,again.failed)==(bs,math.inf)
        assert (again.noise==trial.noise)==(bs==16)

no_gain = tuple((o,0.01*o,0.) for o in (4,8,16))

@pytest.mark.parametrize('facts,trial', [(small_facts(moved=False),Trial()), (small_facts(times=()),Trial()), (small_facts(n_windows=4),Trial()),
    (small_facts(loss_rose=True),Trial()), (small_facts(times=no_gain),Trial(4)), (unmeasured(times=no_gain, n_epoch=100),Trial(4))])
def test_where_nothing_can_be_planned_or_won_nothing_is_tried(facts, trial, told):
    sizes = told({})
    assert vars(try_sizes(None, facts).trial)==vars(trial) # As dicts, where a NaN equals itself
    assert sizes==[]

# What it may cost

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('n_epoch', [1,5,9,40])
def test_a_trial_costs_no_more_than_a_part_of_what_it_can_win(n_epoch, told):
    "From 200 steps of today's training to 8,000, of 10 ms each; where that is too little, it says of which size and what it would cost"
    sizes = told({16: 0.6})
    facts = unmeasured(n_epoch=n_epoch, times=flat[:3])
    n_steps = min(short_steps, 200*n_epoch)
    def _seconds(n): return 0.01*(n/4+n*(low+high)+512/4) # As many items for the larger batch, both parts of them for today's, and the items three times
    noise = noise_of(high, 16, 4)*(200*n_epoch/n_steps)**0.25 # At best all of the upper part is reached
    epochs = n_epoch*epochs_needed(16, 4, noise)
    saving = 2*n_epoch-0.5*max(epochs, whole_epochs(epochs))
    trial,cost = try_sizes(None, facts).trial,_seconds(n_steps)
    if n_epoch<9:
        assert cost>most_part*saving
        skipped = dict(skipped=16, hoped_noise=pytest.approx(noise), saving=pytest.approx(saving), cost=pytest.approx(cost))
        assert (sizes,vars(trial))==([],vars(Trial(4, **skipped)))
    else:
        assert cost<=most_part*saving
        assert (sizes,lengths)==([(4,16)],[short_steps])
        assert trial.is_known and trial.skipped is None

on_this = "Trying batches of 16 items in short trainings on this device; how long that takes here is not known."

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('a,said,given', [(0.01,["Trying batches of 16 items in short trainings: about 4.5 s, 23% of this training."],False), (0.001,[],False),
    (0.001,[on_this],True)])
def test_what_takes_long_is_said_before(a, said, given, told, capsys):
    told({16: 0.6, 64: 0.6})
    learn = learner()
    facts = unmeasured(n_epoch=10, times=tuple((o,a,0.) for o in (4,8,16)), given=given)
    for progress in (False,True):
        if progress: learn.progress = None # As with a progress bar
        try_sizes(learn, facts)
        assert capsys.readouterr().out.splitlines()==(said if progress else [])

# A first look

def looked(lr=1e-2, learn=None, n_steps=60, n_acc=1):
    learn,look = learn or learner(),FirstLook()
    items = items_to_compare(learn, None, 40)
    loss = loss_after(learn, None, n_acc, lr, n_steps, items, watch=look)
    return look,loss

def test_losses_along_the_training_and_of_the_items_after_it():
    "Windows of four micro-batches, the last of which may be too short"
    look,_ = looked(n_steps=61, n_acc=2)
    assert [len(o) for o in look.along.windows]==[4]*30
    assert look.along.at[0]==0
    assert look.along.at==sorted(look.along.at)
    assert [len(o) for o in look.after.windows]==[1]*40
    assert look.alarms(False)==dict(loss_rose=False, learned=True)

@pytest.mark.parametrize('lr,loss_rose,learned', [(1e-2,False,True), (30.,True,False), (0.,False,None)])
def test_alarms_of_a_short_training(lr, loss_rose, learned):
    "A rate too high, in the shortest training that there is; and one of 0"
    look,_ = looked(lr, n_steps=113)
    alarms = look.alarms(False)
    assert alarms['loss_rose']==loss_rose
    if learned is not None: assert alarms['learned']==learned

def test_an_alarm_ends_the_trials(told):
    told({16: 0.6})
    class Rose(FirstLook):
        def alarms(self, on_ranks): return dict(loss_rose=True, learned=True)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(trials, 'FirstLook', Rose)
        facts = try_sizes(learner(), unmeasured(n_epoch=40))
    assert facts.no_plan_for=='too_high'
    assert vars(facts.trial)==vars(Trial(4))

class Breaks(Callback):
    "The loss is no number from the micro-batch `at` on, in training"
    order = -1
    def __init__(self, at): self.at,self.n = at,0
    def after_loss(self):
        if not self.training: return
        self.n += 1
        if self.n>=self.at: self.learn.loss_grad *= nan
        self.learn.loss = self.learn.loss_grad.clone()

def test_a_loss_that_is_not_finite_is_named():
    look,loss = looked(learn=learner([Breaks(7)]))
    assert loss==inf
    with pytest.raises(ValueError, match=r"The loss is nan at micro-batch 7 of a short training with today's batch \(lr=0.1\)"): look.check(loss, 0.1)
    look.check(1., 0.1)

@pytest.mark.usefixtures('any_growth')
def test_a_loss_that_is_not_finite_ends_the_call():
    "And the learner is as it was"
    learn = learner([Breaks(50)])
    was = picture(learn)
    with pytest.raises(ValueError, match="of a short training with today's batch"):
        learn.bs_find(1e-2, n_epoch=20, step_times={4: 0.01, 8: 0.01, 16: 0.01}, show_plot=False)
    assert [o for o in changes(was, picture(learn)) if 'breaks' not in o]==[]

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('cbs', own.values(), ids=own)
def test_a_size_is_tried_in_a_plan_that_measures_nothing(cbs):
    "With step times that make it worth it; the learner is as it was"
    learn = learner(cbs())
    was = picture(learn)
    plan = learn.bs_find(1e-2, n_epoch=20, step_times={4: 0.01, 8: 0.01, 16: 0.01, 32: 0.01}, show_plot=False)
    assert changes(was, picture(learn))==[]
    assert plan.df is None
    assert math.isnan(plan.noise_scale)
    trial = plan.facts.trial
    assert trial.is_known or trial.got_nowhere
    assert plan.facts.measured.n_seen==2

def test_a_trial_that_is_cut_off_leaves_no_trace(monkeypatch):
    "At the fifth batch of items that are compared"
    was_after_loss,n = MeanLoss.after_loss,[]
    def _after_loss(self):
        n.append(1)
        if len(n)==5: raise KeyboardInterrupt
        was_after_loss(self)
    monkeypatch.setattr(MeanLoss, 'after_loss', _after_loss)
    learn = learner(own['its own']())
    was = picture(learn)
    with pytest.raises(KeyboardInterrupt): learn.bs_find(1e-2, n_epoch=40, step_times={4: 0.01, 8: 0.01, 16: 0.01}, show_plot=False)
    assert changes(was, picture(learn))==[]
    assert len(n)==5
