"Which batch size is taken, and for which reason"
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from fastai_bs.finder.choice import choose, decide
from fastai_bs.finder.facts import Trial
from fastai_bs.finder.options import at_todays_size, option_of, options_of
from plans import facts_of, plans, secs

inf,nan = math.inf,math.nan
five = secs(25, 50, 100, 200, 400) # With them 100 items are the fastest at a noise scale of 100: (100*0.01/0.0001)**0.5

def fixed(noise_scale=100., bs=100, **kwargs):
    "For SGD at the present weights"
    return facts_of(bs, **{**dict(noise_scale=noise_scale, ci=(0.99*noise_scale,1.01*noise_scale), lr=0.1, adam=False, n_train=100_000, n_epoch=1000,
                                  moved=False, cool=None, times=five, spread=0.), **kwargs})

def decided(facts, chosen=None): return decide(facts, options_of(facts, facts.noise, [chosen] if chosen else []), chosen)
def chosen_at(facts, noise):
    options = options_of(facts, noise)
    return choose(options, at_todays_size(facts, options), facts.device.least_gain)
def sizes(options): return [o.bs for o in options]

# By time

# At a noise scale of 100 a batch of 100 items needs 2 steps where 200 need 1.5 and 400 1.25
def relative(*ratios): return tuple((bs,0.04*ratio/steps,0.) for bs,ratio,steps in zip((100,200,400), ratios, (2,1.5,1.25)))

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('kwargs,bs,reason', [
    (dict(bs=25), 100, 'faster'), # 50 take 0.045/0.04 as long
    (dict(bs=400), 100, 'faster'), # And so do 200
    (dict(bs=25, noise_scale=300.), 100, 'faster'), # 0.08/0.075 of the time with 200, and 0.105/0.075 with 50
    (dict(bs=128, times=secs(32, 64, 128, 256)), 128, 'slower'),
    (dict(bs=100), 100, 'slower'),
    (dict(bs=100, noise_scale=300.), 100, 'little'), # A gain of 0.08/0.075, and twice the batch is to save a tenth
    (dict(bs=100, times=relative(1, 0.87, 0.8)), 200, 'faster'), # A tenth more at most, and less than today's
    (dict(bs=100, times=relative(1, 0.87, 0.8), spread=0.2), 400, 'faster'), # 200 gain less than the clock errs
    (dict(bs=100, times=relative(1, 0.87, 0.8), spread=0.3), 100, 'little'), # And 400 too
    (dict(bs=100, times=relative(1, 0.98, 0.8)), 400, 'faster'), # Here 200 gain nothing
    (dict(bs=100, times=relative(1, 0.98, 0.84)), 100, 'little'), # Four times the batch is to take 1/1.21
    (dict(bs=100, times=relative(1, 0.98, 0.98)), 100, 'little'),
    (dict(bs=100, times=relative(1)), 100, 'single'),
    (dict(bs=50, trial=Trial(50, failed=100)), 50, 'nowhere'),
    (dict(bs=50, trial=Trial(100, 200., 99, failed=200)), 100, 'faster')])
def test_of_sizes_about_as_fast_the_one_nearest_to_todays(kwargs, bs, reason):
    facts = fixed(**kwargs)
    choice = decided(facts)
    assert (choice.option.bs,choice.reason)==(bs,reason)
    assert choice.verdict==('use' if reason=='faster' else 'stay')

def test_the_size_is_chosen_by_whole_epochs():
    "What 1.3 epochs would save of 1 is lost where there must be 2: (450+300)/(450+150) = 1.25 of 300 items each"
    facts = fixed(450., bs=150, n_epoch=1, times=((150,0.02,0.),(300,0.024,0.)), n_train=12_000)
    choice = decided(facts)
    assert (choice.option.bs,choice.reason)==(150,'slower')
    for change in (dict(n_epoch=4), dict(has_n_epoch=False)): # 5 epochs; no epochs were asked for
        assert decided(replace(facts, today=replace(facts.today, **change))).option.bs==300

@pytest.mark.parametrize('valid_time,epoch_start,bs,has_n_epoch', [(30.,0.,25,True),(0.,30.,25,False),(6.,6.,100,True),(6.,7.,25,False)])
def test_validations_count_in_the_choice(valid_time, epoch_start, bs, has_n_epoch):
    "8 epochs of 20 s with 100 items, 5 of 50 s with 25: three validations and starts more cost up to 90 s, and four times the batch is to take 1/1.21"
    times = (25,0.0125,0.001),(100,0.02,0.001)
    choice = decided(fixed(bs=25, times=times, n_epoch=5, has_n_epoch=has_n_epoch, valid_time=valid_time, epoch_start=epoch_start))
    assert choice.option.bs==bs

@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans())
def test_no_option_that_may_be_taken_is_nearer_to_today_s(plan):
    facts = plan.facts
    if not (facts.device.timed and facts.can_plan): return
    noise = facts.noise
    options = [option_of(facts, noise, o.bs) for o in plan.options]
    now, = [o for o in options if o.bs==facts.today.bs]
    choice = choose(options, now, facts.device.least_gain)
    least = 1+facts.device.least_gain
    def _far(o): return max(o.bs/now.bs, now.bs/o.bs)
    def _saves(o): return now.fit_time/o.fit_time>=max(least, _far(o)**math.log2(1.1))
    shortest = min(o.fit_time for o in options)
    good = [o for o in options if o.fit_time<=1.1*shortest and _saves(o)]
    assert sizes(choice.as_fast)==[o.bs for o in options if o.fit_time<=1.1*shortest]
    if good:
        assert choice.verdict=='use'
        assert choice.option in good
        assert _far(choice.option)==min(map(_far, good))
    else:
        assert choice.option is now
        assert choice.verdict==('split' if now.micro_bs!=facts.today.micro_bs else 'stay')

# All that can decide

@pytest.mark.parametrize('kwargs,reason', [
    (dict(n_windows=9),'short'), (dict(pairs=True),'pairs'), (dict(loss_rose=True),'too_high'), (dict(ci=(0.,inf)),'unknown'),
    (dict(n_train=500, n_epoch=1),'few_steps'), (dict(learned=False),'not_learned')])
@pytest.mark.parametrize('times', [five,()])
def test_nothing_changes_where_the_noise_scale_is_not_known(kwargs, reason, times):
    choice = decided(fixed(bs=100, micro_bs=25, times=times, **kwargs))
    assert choice.verdict==choice.reason==reason
    assert (choice.option.bs,choice.option.micro_bs,choice.option.n_acc)==(100,25,4)
    assert not choice.option.changes
    assert choice.as_fast==()

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('noise,bs,verdict', [(120.,100,'stay'),(450.,400,'use'),(0.,100,'stay')])
def test_without_times_the_size_nearest_to_the_noise_scale(noise, bs, verdict):
    choice = decided(fixed(noise, times=()))
    assert (choice.option.bs,choice.verdict,choice.reason)==(bs,verdict,'untimed')

@pytest.mark.parametrize('kwargs,chosen,verdict', [(dict(bs=25),300,'use'), (dict(bs=25),25,'stay'), (dict(bs=25, n_windows=9),300,'use'),
    (dict(bs=25, times=()),100,'use'), (dict(bs=128, micro_bs=32, times=secs(32, 64, 128)),128,'split')])
def test_a_size_of_one_s_own_choice_is_taken(kwargs, chosen, verdict):
    facts = fixed(**kwargs)
    choice = decided(facts, chosen)
    assert (choice.option.bs,choice.verdict,choice.reason)==(chosen,verdict,'chosen')

# Without a noise scale

def unmeasured(**kwargs): return facts_of(**{**dict(noise_scale=math.nan, ci=(math.nan,math.nan), n_windows=None, cool=None), **kwargs})

@pytest.mark.parametrize('facts,verdict,reason', [
    (lambda: unmeasured(), 'stay', 'never'), (lambda: unmeasured(times=secs(64)), 'stay', 'single'), (lambda: unmeasured(times=()), 'stay', 'untimed'),
    (lambda: unmeasured(micro_bs=16, times=()), 'stay', 'untimed'),
    (lambda: unmeasured(trial=Trial(64, skipped=256, saving=9., cost=3.)), 'stay', 'costly'),
    (lambda: unmeasured(trial=Trial(64, skipped=256, saving=-1., cost=3.)), 'stay', 'useless'),
    (lambda: unmeasured(trial=Trial(64, failed=256)), 'stay', 'nowhere'),
    (lambda: unmeasured(trial=Trial(64, failed=256, skipped=128, cost=3.)), 'stay', 'nowhere'),
    (lambda: unmeasured(trial=Trial(256, 8., 4690, failed=256)), 'stay', 'nowhere'),
    (lambda: unmeasured(noise_scale=512., trial=Trial(64, skipped=256, saving=9., cost=3.)), 'stay', 'costly'),
    (lambda: unmeasured(micro_bs=16, times=secs(16, 32, 64)), 'split', 'faster')])
def test_what_was_not_tried_is_not_planned(facts, verdict, reason):
    "But for today's batch in larger micro-batches, which is the same training"
    facts = facts()
    choice = decide(facts, options_of(facts, facts.assumed_noise))
    assert (choice.verdict,choice.reason)==(verdict,reason)
    assert choice.option.bs==64
    assert choice.option.changes==(verdict=='split')

# With many passes

@pytest.mark.parametrize('n_epoch,bs', [(5,256),(5.9,256),(6,128),(40,128)])
@pytest.mark.parametrize('trial', [None,Trial(256, 2000., 240)])
def test_with_many_passes_at_most_twice_today_s_batch_is_planned(n_epoch, bs, trial):
    facts = facts_of(noise_scale=2000., ci=(1900.,2100.), n_epoch=n_epoch, times=tuple((o,0.02,0.) for o in (64,128,256)), trial=trial)
    assert decided(facts).option.bs==bs
    assert decided(facts, 256).option.bs==256 # One's own choice
    assert 256 in sizes(options_of(facts, facts.noise)) # It is compared
    untimed = replace(facts, device=replace(facts.device, times=()))
    assert (decided(untimed).option.bs<=128)==(n_epoch>=6)

def test_with_many_passes_smaller_sizes_are_planned_too():
    facts = facts_of(noise_scale=5., ci=(4.,6.), n_epoch=40, times=secs(16, 32, 64, 128))
    assert decided(facts).option.bs<64

def test_why_a_size_that_may_not_be_planned_does_not_save():
    "What is said is of sizes that may be planned: here twice the batch saves too little, and four times as much would save enough"
    facts = facts_of(noise_scale=math.inf, ci=(5000.,math.inf), n_epoch=6, times=((64,0.02,0.),(128,0.037,0.),(256,0.05,0.)), spread=0.)
    choice = decided(facts)
    assert (choice.option.bs,choice.reason)==(64,'little')
    assert [o.bs for o in choice.as_fast]==[64,128]
