"What a plan follows from: each value knows what concerns itself"
import math

import pytest
from fastai_bs.finder.facts import Device, Trial, step_of, unfrozen_lr
from fastai_bs.finder.formulas import epoch_of
from plans import facts_of, secs

inf,nan = math.inf,math.nan
def approx(v): return pytest.approx(v, rel=1e-12, abs=0, nan_ok=True)

def facts(noise_scale=100., ci=(80.,130.), **kwargs): return facts_of(noise_scale=noise_scale, ci=ci, **kwargs)

# The noise scale

@pytest.mark.parametrize('kwargs,known,reason', [
    (dict(), 100., ''),
    (dict(noise_scale=inf, ci=(60.,inf)), 60., ''), # The lower end, where there is no estimate
    (dict(noise_scale=300., ci=(0.,inf)), nan, 'unknown'),
    (dict(noise_scale=inf, ci=(0.,inf)), nan, 'unknown'),
    (dict(noise_scale=0., ci=(0.,0.5)), 0., ''),
    (dict(n_windows=10), 100., ''),
    (dict(n_windows=9, loss_rose=True), nan, 'short'),
    (dict(loss_rose=True, learned=False), nan, 'too_high'),
    (dict(learned=False, ci=(0.,inf)), nan, 'not_learned'),
    (dict(n_train=5000, n_epoch=1, n_windows=9), nan, 'few_steps'), # 79 steps
    (dict(n_train=2560, n_epoch=2), 100., ''),
    (dict(n_train=5000, n_epoch=1, has_n_epoch=False), 100., ''),
    (dict(pairs=True, n_train=1000, n_epoch=1), nan, 'pairs')])
def test_the_noise_scale_is_known_unless_something_speaks_against_it(kwargs, known, reason):
    f = facts(**kwargs)
    assert f.no_plan_for==reason
    assert f.noise==approx(known)
    assert f.can_plan==(reason=='')

@pytest.mark.parametrize('trial,noise', [(Trial(256, 300., 3910),300.), (Trial(256, 300., 3910/16),600.), (Trial(64),512.), (Trial(failed=128),512.)])
def test_a_plan_goes_by_what_was_tried(trial, noise):
    "Grown as the fourth root of the steps, 5 epochs of 782; else by what was measured"
    f = facts_of(trial=trial)
    assert f.noise==approx(noise)
    assert f.measured_noise==512
    assert math.isnan(facts_of(trial=trial, pairs=True).noise)

@pytest.mark.parametrize('kwargs,hoped,assumed', [(dict(noise_scale=nan, n_windows=None),300.,300.), (dict(),nan,512.),
    (dict(noise_scale=nan, pairs=True),nan,nan)])
def test_what_is_hoped_of_a_size_that_was_skipped(kwargs, hoped, assumed):
    "Unless a noise scale is known, or nothing can be planned"
    f = facts_of(trial=Trial(64, skipped=256, hoped_noise=300.), **kwargs)
    assert (f.hoped_noise,f.assumed_noise)==(approx(hoped),approx(assumed))

# Today

def test_today_counts_what_its_loader_gives():
    t = facts(bs=128, n_ranks=2, micro_bs=16, n_train=1000, drops_last=True, n_epoch=3).today
    assert t.n_acc==4
    assert t.epoch==epoch_of(1000, 16, 4, 2, drops_last=True)
    assert t.steps==3*t.epoch.steps

def test_fine_tune_trains_at_other_rates_than_it_takes():
    assert facts(lr=0.02, freeze_epochs=1).today.trained_lr==unfrozen_lr(0.02)==slice(0.0001, 0.01)
    assert facts(lr=0.02).today.trained_lr==0.02

# The device

@pytest.mark.parametrize('spread,times,error', [(nan,secs(16),nan), (0.02,secs(16, 32),0.02), (nan,((16,0.02,0.),(32,0.01,0.)),math.log(2)/2),
                                                (0.5,((16,0.02,0.),(32,0.01,0.)),0.5)])
def test_the_error_of_step_times_is_that_of_the_rounds_or_what_cannot_be(spread, times, error):
    device = Device(times, spread=spread)
    assert device.timing_error==pytest.approx(error, nan_ok=True)
    assert device.least_gain==pytest.approx(max(0.03, error) if error==error else 0.03)

def test_parts_of_a_step():
    assert Device().part_of_step(0.1, 64)==0
    device = Device(secs(16, 64, a=0.01, c=0.0005))
    assert device.part_of_step(0.021, 64)==approx(0.5)
    assert device.part_of_step(0.021, 32)==0
    assert step_of(device.times, 16)==approx(0.018)

# The trial of larger sizes

@pytest.mark.parametrize('trial,leaves', [(Trial(), (64,128,256)), (Trial(128, 90., 9), (64,128)), (Trial(failed=128), (64,)), (Trial(64), (64,128,256)),
    (Trial(64, failed=256), (64,)), (Trial(128, 90., 9, 256), (64,128)), (Trial(256, 90., 9, 256), (64,128))])
def test_what_a_trial_leaves(trial, leaves):
    assert [bs for bs in (64,128,256) if trial.permits_size(bs)]==list(leaves)
    assert trial.is_known==(not math.isnan(trial.noise))
    assert trial.got_nowhere==(trial.failed<inf and (math.isnan(trial.noise) or trial.failed==trial.largest))
