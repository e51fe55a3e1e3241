"Factors on the learning rate, each against its formula written another way"
import doctest, math, sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from fastai_bs.schedule import rules as scaling
from fastai_bs.schedule.rules import adam_gain, adascale_gain, linear_scaling, no_scaling, sqrt_scaling, warmup_factor
from fastai_bs.finder.steps import examples_needed, fastest_bs, fit_step_time, steps_needed

inf,nan = math.inf,math.nan
approx = lambda v, rel=1e-12: pytest.approx(v, rel=rel, abs=0)
ks,noises,sizes = st.floats(1e-3,1e4),st.floats(1e-6,1e9),st.floats(0.5,1e5)
many = settings(max_examples=300, deadline=None, derandomize=True)

# The formulas as the papers have them

def gain(k, n, b): return (1+n/b)/(1+n/(k*b))
@pytest.mark.parametrize('rule,k,factor', [(linear_scaling,1,1), (linear_scaling,32,32), (linear_scaling,0.25,0.25),
                                           (sqrt_scaling,1,1), (sqrt_scaling,16,4), (sqrt_scaling,0.25,0.5)])
def test_factor(rule, k, factor): assert rule(k)==factor

@pytest.mark.parametrize('k', [1e-3,1,4,1000.])
def test_no_scaling(k):
    "A float, as the other factors"
    assert no_scaling(k)==1 and type(no_scaling(k)) is float

@pytest.mark.parametrize('k,noise,base,g,s', [ # By hand
    (4,256,64, 2.5,1.25), (2,64,64, 4/3,2**0.5*2/3), (16,16,1, 8.5,2.125), (4,1,1, 1.6,0.8), (0.25,256,256, 0.4,0.8), (9,0,7, 1,1/3), (9,inf,7, 9,3)])
def test_gain_by_hand(k, noise, base, g, s):
    assert adascale_gain(k, noise, base)==approx(g)

@many
@given(ks, noises, sizes)
def test_formulas_written_another_way(k, n, b):
    assert adascale_gain(k, n, b)==approx(gain(k, n, b))
    assert linear_scaling(k)==k and sqrt_scaling(k)==approx(math.exp(math.log(k)/2))
    assert adascale_gain(k, noise_scale=n, base_bs=b)==adascale_gain(k, n, b)

@many
@given(ks, ks, noises, sizes)
def test_two_changes_in_a_row_are_one(k1, k2, n, b):
    for rule in (adascale_gain,): assert rule(k1, n, b)*rule(k2, n, k1*b)==approx(rule(k1*k2, n, b))
    for rule in (linear_scaling,sqrt_scaling): assert rule(k1)*rule(k2)==approx(rule(k1*k2))
    for rule in (adascale_gain,): assert rule(k1, n, b)*rule(1/k1, n, k1*b)==approx(1) # There and back

@many
@given(ks, noises, noises, sizes)
def test_gain_lies_between_1_and_k(k, n, more, b):
    g = adascale_gain(k, n, b)
    assert min(1,k)*(1-1e-15) <= g <= max(1,k)*(1+1e-15)
    assert abs(math.log(adascale_gain(k, n+more, b))) >= abs(math.log(g))-1e-12 # The more noise, the closer to k

@many
@given(st.floats(0,1e300) | st.just(inf), sizes)
def test_same_batch_same_rate(n, b):
    "To the last bit"
    assert adascale_gain(1, n, b)==linear_scaling(1)==sqrt_scaling(1)==1

@pytest.mark.parametrize('k', [0.01,0.5,3,1000])
@pytest.mark.parametrize('noise,part', [(0,0), (0.,0), (5e-324,0), (1e-300,0), (1e300,1), (sys.float_info.max,1), (inf,1)])
def test_limits(k, noise, part):
    "Without noise nothing is gained; in noise only it is the linear and the square root rule"
    assert adascale_gain(k, noise, 64)==approx(k if part else 1)

def test_limits_exactly():
    for k in (0.3,1,7,32.5):
        assert adascale_gain(k, 0, 64)==1
        assert adascale_gain(k, inf, 64)==linear_scaling(k)

# For Adam the root of the gain, and up to a fifth more

@pytest.mark.parametrize('k,noise,base,gain,more', [ # Examples are k over the gain
    (1,256,64, 1,1), (16,inf,7, 16,1.2), (2,inf,7, 2,2**(1/6)), (0.25,inf,7, 0.25,0.25**(1/6)), # As many
    (4.5,384,64, 3,1.1), # 1.5 times
    (8,384,64, 4,1), # Twice
    (32,64*28/3,64, 8,1), # 4 times
    (16,0,64, 1,1)]) # Without noise as many times as the batch
def test_adam_gain_by_hand(k, noise, base, gain, more):
    "A fifth more where the examples stay as many, none where twice as many are needed or more, evenly between, and never more than the gain to the power 2/3"
    assert adascale_gain(k, noise, base)==approx(gain) and adam_gain(k, noise_scale=noise, base_bs=base)==approx(gain**0.5*more)

@pytest.mark.parametrize('x', [0.1,1,10,100,1e4,1e6])
def test_adam_gain_hardly_falls(x):
    "Less than 3% below what a smaller batch has, and where there is much noise never"
    fs = [adam_gain(2**(i/8), x, 1) for i in range(300)]
    assert all(f>=(0.97 if x<10 else 1-1e-12)*max(fs[:i+1]) for i,f in enumerate(fs))

@many
@given(ks, noises, sizes)
def test_adam_gain(k, n, b):
    examples = (n+k*b)/(n+b)
    f,root = adam_gain(k, n, b),math.sqrt(gain(k, n, b))
    more = 1 if examples>=2 else 1.4-examples/5
    assert f==approx(min(root*more, root**(4/3)), 1e-9)
    if k>=1: assert 1-1e-12 <= f <= 1.2*k**0.5*(1+1e-12)
    assert adam_gain(1, n, b)==1

# The square root rule as far as it is derived

# Steps, examples and seconds

@pytest.mark.parametrize('bs,noise,steps,examples', [(64,256,5,1.25), (256,64,1.25,5), (100,100,2,2), (1,0,1,inf), (64,0.,1,inf), (7,inf,inf,1), (0.5,1,3,1.5)])
def test_steps_and_examples_by_hand(bs, noise, steps, examples):
    assert (steps_needed(bs, noise),examples_needed(bs, noise_scale=noise))==(steps,examples)

@many
@given(sizes, noises)
def test_steps_and_examples(bs, n):
    s,e = steps_needed(bs, n),examples_needed(bs, n)
    assert s>=1 and e>=1 and s==approx(examples_needed(n, bs)) # What the one is to the batch size, the other is to the noise scale
    assert s*bs==approx(e*n, 1e-9) # Examples are steps times batch size, and the fewest of them are noise scale times the fewest steps
    if 1e-3<bs/n<1e3: assert (s-1)*(e-1)==approx(1, 1e-9)

@pytest.mark.parametrize('a,c', [(0.002,6.25e-5), (0.,1e-3), (1e-4,0.), (0.5,1e-9), (1e-6,1e-2)])
@pytest.mark.parametrize('bs', [[16,64], [16,64,256], [1,2,4,8,16], [100,25,50]])
def test_fit_of_exact_step_times(a, c, bs):
    got_a,got_c,error = fit_step_time(bs, [a+c*b for b in bs])
    t = a+c*max(bs)
    assert got_a==pytest.approx(a, abs=1e-9*t) and got_c*max(bs)==pytest.approx(c*max(bs), abs=1e-9*t)
    assert error==pytest.approx(0, abs=1e-7) if len(bs)>2 else math.isnan(error)

@many
@given(st.lists(st.tuples(st.integers(1,1000),st.floats(1e-3,1.)), min_size=3, max_size=8, unique_by=lambda o: o[0]))
def test_fit_of_step_times(times):
    "The least squares of relative errors, as NumPy finds them; and their root mean square over n-2"
    bs,secs = zip(*times)
    x = np.array([[1/t,b/t] for b,t in times])
    u = np.linalg.solve(x.T@x, x.sum(0)) if np.linalg.cond(x)<1e4 else None
    if u is None: return
    a,c,error = fit_step_time(iter(bs), iter(secs))
    assert (a,c)==pytest.approx(tuple(u), rel=1e-5, abs=1e-9) and error==pytest.approx((((x@u-1)**2).sum()/(len(bs)-2))**0.5, rel=1e-4, abs=1e-9)
    assert fit_step_time(bs, [10*t for t in secs])==pytest.approx((10*a,10*c,error), rel=1e-6, abs=1e-9)
    assert fit_step_time(bs[::-1], secs[::-1])==pytest.approx((a,c,error), rel=1e-6, abs=1e-9)

def test_the_fit_weighs_relative_errors():
    "A tenth too much on a small step counts as much as a tenth on a large one: neither bends the line away from the middle"
    bs = [1,10,100,1000]
    low,high = (fit_step_time(bs, [(0.001+0.001*b)*(1.1 if i==j else 1) for i,b in enumerate(bs)]) for j in (0,3))
    assert low[0]>0.0011 and low[1]==pytest.approx(0.001, rel=0.05) and high[0]<0.001 and high[1]==pytest.approx(0.00105, rel=0.03)

@pytest.mark.parametrize('n', [0,1])
def test_too_few_step_times(n): assert all(math.isnan(o) for o in fit_step_time([64]*n, [0.1]*n))

@pytest.mark.parametrize('noise,a,c,bs', [(400,0.001,0.00001,200), (100,0.01,0.0001,100), (0,0.01,0.0001,0), (100,0,0.1,0), (inf,0.01,0.0001,inf),
    (100,0.01,0,nan), (100,0.01,-1e-9,nan), (100,-1e-9,0.01,nan), (100,-0.1,-0.1,nan), (100,nan,nan,nan)])
def test_fastest_by_hand(noise, a, c, bs): assert fastest_bs(noise, a, c)==pytest.approx(bs, nan_ok=True)

@many
@given(noises, st.floats(1e-6,1.), st.floats(1e-9,1e-2), st.floats(0.01,100.))
def test_nothing_is_faster(n, a, c, off):
    time = lambda bs: steps_needed(bs, n)*(a+c*bs)
    best = fastest_bs(n, a, c)
    assert time(best)<=time(best*off)*(1+1e-12) and time(best)==approx((math.sqrt(a)+math.sqrt(n*c))**2, 1e-9)

# Warmup

@many
@given(st.floats(1e-3,1e4), st.floats(0,3))
def test_warmup(factor, pct):
    f = warmup_factor(factor, pct)
    assert min(1,factor)*(1-1e-15) <= f <= max(1,factor)*(1+1e-15)
    assert f==approx((1-min(1,pct)) + min(1,pct)*factor, 1e-9)
    assert warmup_factor(factor, 0)==1

@pytest.mark.parametrize('factor', [0.1,1/3,1,2.7,8,32,1e9,0.1+0.2])
def test_warmup_ends_exactly_at_the_factor(factor):
    for pct in (1,1.,1+1e-15,2,100,inf): assert warmup_factor(factor, pct)==factor
    fs = [warmup_factor(factor, i/8) for i in range(9)]
    for a,b in zip(fs, fs[1:]): assert b-a==approx((factor-1)/8, 1e-9)

@pytest.mark.parametrize('pct', [-1e-9,-1,-inf,nan])
def test_warmup_refuses(pct):
    with pytest.raises(ValueError, match=f"`pct` must be .* got {pct}"): warmup_factor(8, pct)

# Momentum, and what goes with it

# Bad input

with_noise = [adascale_gain,adam_gain]
rules = [linear_scaling, no_scaling, sqrt_scaling, *with_noise]

@pytest.mark.parametrize('rule', rules)
@pytest.mark.parametrize('k,exc', [(0,ValueError), (0.,ValueError), (-4,ValueError), (nan,ValueError), ('4',TypeError), (None,TypeError), (True,TypeError),
                                   ([4],TypeError), (4j,TypeError)])
def test_a_ratio_is_positive(rule, k, exc):
    with pytest.raises(exc, match='`k`'): rule(k, **(dict(noise_scale=1, base_bs=1) if rule in with_noise else {}))

@pytest.mark.parametrize('rule', with_noise)
@pytest.mark.parametrize('nm,v,exc', [('noise_scale',-1e-9,ValueError), ('noise_scale',-inf,ValueError), ('noise_scale',nan,ValueError),
    ('noise_scale','64',TypeError), ('noise_scale',None,TypeError), ('noise_scale',True,TypeError), ('base_bs',0,ValueError), ('base_bs',-64,ValueError),
    ('base_bs',nan,ValueError), ('base_bs','64',TypeError), ('base_bs',None,TypeError), ('base_bs',False,TypeError)])
def test_noise_scale_and_base_are_checked(rule, nm, v, exc):
    with pytest.raises(exc, match=f'`{nm}`'): rule(4, **{**dict(noise_scale=64, base_bs=64), nm: v})


# Examples

def test_examples_of_the_docs_run():
    assert doctest.testmod(scaling).failed==0

@pytest.mark.parametrize('nm', scaling.__all__)
def test_each_function_has_an_example_and_a_source(nm):
    f = getattr(scaling, nm)
    examples = [e for t in doctest.DocTestFinder(recurse=False).find(f, nm, globs={}) for e in t.examples]
    assert any(f'{nm}(' in e.source for e in examples) and examples[-1].want
    if nm=='rule_meant': return # No formula
    assert ('benchmarks/' if nm=='no_scaling' else 'arXiv') in f.__doc__ and f.__doc__.lstrip().startswith(('`','From','Square root rule'))
