"Factors on the learning rate, each against its formula written another way"
import doctest, math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from fastai_bs.schedule import rules as scaling
from fastai_bs.all import adam_gain, adascale_gain, linear_scaling, no_scaling, sqrt_scaling
from fastai_bs.schedule.rules import warmup_factor
from fastai_bs.finder.formulas import examples_needed, fit_step_time, steps_needed

inf,nan = math.inf,math.nan
approx = lambda v, rel=1e-12: pytest.approx(v, rel=rel, abs=0)
ks,noises,sizes = st.floats(1e-3,1e4),st.floats(1e-6,1e9),st.floats(0.5,1e5)
many = settings(max_examples=200, deadline=None, derandomize=True)

# The formulas as the papers have them

def gain(k, n, b): return (1+n/b)/(1+n/(k*b))

@pytest.mark.parametrize('k,noise,base,g', [ # By hand; without noise nothing is gained, in noise only it is the linear rule
    (4,256,64,2.5), (2,64,64,4/3), (0.25,256,256,0.4), (9,0,7,1), (0.3,5e-324,7,1), (9,inf,7,9), (9,1e300,7,9)])
def test_gain_by_hand(k, noise, base, g): assert adascale_gain(k, noise_scale=noise, base_bs=base)==approx(g)

@many
@given(ks, ks, noises, sizes)
def test_two_changes_in_a_row_are_one(k1, k2, n, b):
    assert adascale_gain(k1, n, b)==approx(gain(k1, n, b))
    assert adascale_gain(k1, n, b)*adascale_gain(k2, n, k1*b)==approx(adascale_gain(k1*k2, n, b))
    for rule in (linear_scaling,sqrt_scaling): assert rule(k1)*rule(k2)==approx(rule(k1*k2))

@many
@given(st.floats(0,1e300) | st.just(inf), sizes)
def test_same_batch_same_rate(n, b):
    "To the last bit"
    assert adascale_gain(1, n, b)==adam_gain(1, n, b)==linear_scaling(1)==sqrt_scaling(1)==1

# For Adam the root of the gain, and up to a fifth more

@pytest.mark.parametrize('k,noise,base,gain,more', [ # Examples are k over the gain
    (16,inf,7,16,1.2), (0.25,inf,7,0.25,0.25**(1/6)), # As many
    (4.5,384,64,3,1.1), # 1.5 times
    (8,384,64,4,1), # Twice
    (16,0,64,1,1)]) # Without noise as many times as the batch
def test_adam_gain_by_hand(k, noise, base, gain, more):
    "A fifth more where the examples stay as many, none where twice as many are needed or more, evenly between, and never more than the gain to the power 2/3"
    assert adascale_gain(k, noise, base)==approx(gain)
    assert adam_gain(k, noise_scale=noise, base_bs=base)==approx(gain**0.5*more)

# Steps, examples and seconds

@pytest.mark.parametrize('bs,noise,steps,examples', [(64,256,5,1.25), (1,0,1,inf), (7,inf,inf,1)])
def test_steps_and_examples_by_hand(bs, noise, steps, examples):
    assert (steps_needed(bs, noise),examples_needed(bs, noise_scale=noise))==(steps,examples)

@many
@given(st.lists(st.tuples(st.integers(1,1000),st.floats(1e-3,1.)), min_size=3, max_size=8, unique_by=lambda o: o[0]))
def test_fit_of_step_times_is_of_least_squares(times):
    "The least squares of relative errors, as NumPy finds them"
    bs,secs = zip(*times)
    x = np.array([[1/t,b/t] for b,t in times])
    if np.linalg.cond(x)>=1e4: return
    u = np.linalg.solve(x.T@x, x.sum(0))
    assert fit_step_time(bs, secs)==pytest.approx(tuple(u), rel=1e-5, abs=1e-9)

# Warmup

@many
@given(st.floats(1e-3,1e4), st.floats(0,3))
def test_warmup_is_linear(factor, pct):
    "Linear, and exact at both ends"
    assert warmup_factor(factor, pct)==approx((1-min(1,pct)) + min(1,pct)*factor, 1e-9)
    assert warmup_factor(factor, 0)==1
    assert all(warmup_factor(factor, o)==factor for o in (1,1+1e-15,inf))

# Bad input

with_noise = [adascale_gain,adam_gain]

@pytest.mark.parametrize('rule', [linear_scaling, no_scaling, sqrt_scaling, *with_noise])
@pytest.mark.parametrize('v,exc', [(-1,ValueError), (nan,ValueError), ('4',TypeError)])
def test_bad_input_of_a_rule_is_refused(rule, v, exc):
    kwargs = dict(k=4, noise_scale=64, base_bs=64) if rule in with_noise else dict(k=4)
    for nm in kwargs:
        with pytest.raises(exc, match=f'{nm}`'): rule(**{**kwargs, nm: v})

# Examples

def test_examples_of_the_docs_run(): assert doctest.testmod(scaling).failed==0
