"Moments of a window, pooled ratio, Fieller interval and drift: closed forms, a two-pass version, simulations"
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from fastai_bs.noise.estimator import along, drift_t, fieller, moments_of_sums, pooled, ratio, settled

def moments_of(g, n):
    "Of micro-batches with mean gradients `g` of shape `(K, d)` over `n` elements"
    g,n = np.array(g),np.array(n)
    mean = n@g/n.sum()
    return moments_of_sums(len(n), n.sum(), n@(g**2).sum(-1), mean@mean)

def frame(tr_sigma, g_sq, n, n_items=None):
    "Windows as `NoiseScale.moments` has them"
    return pd.DataFrame(dict(tr_sigma=tr_sigma, g_sq=g_sq, n_elems=n, n_items=n if n_items is None else n_items), dtype=float)

eigs = 1/np.arange(1, 101) # Of the covariance of an item's gradient

def simulate(rng, rel, K=20, n=64):
    """`tr_sigma`, `g_sq` and elements of windows of `K` micro-batches of `n` Gaussian items, one for each of `rel`, noise scale over window.
    Of the `K` gradients only two sums count: about their mean, chi-squared with `K-1` degrees of freedom in each direction, and of the mean itself"""
    rel,N = np.asarray(rel, dtype=float),K*n
    G = np.sqrt(eigs.sum()/(rel*N)/len(eigs))[...,None]
    mean = ((G + rng.standard_normal((*rel.shape,len(eigs)))*np.sqrt(eigs/N))**2).sum(-1)
    about = rng.chisquare(K-1, (*rel.shape,len(eigs)))@eigs/n
    return *moments_of_sums(K, N, N*(about/K + mean), mean),np.full(rel.shape, N)

# Moments of a window

@pytest.mark.parametrize('g,n,tr_sigma,g_sq', [
    ([[3,4]]*3,           [2,5,1], 0,    25),     # Identical: no noise
    ([[3,4],[-3,-4]],     [1,1],   50,   -25),    # Opposite: no gradient, and less than that
    ([[1,0],[0,1]],       [5,5],   5,    0),      # Orthogonal means of 5 items: one item is 5 times as noisy
    ([[3,0],[0,0],[0,0]], [1,1,4], 3.75, -0.375)]) # Ragged: (9 - 6*0.5²)/2, 0.5² - 3.75/6
def test_moments_of_windows_by_hand(g, n, tr_sigma, g_sq): assert_allclose(moments_of(g, n), [tr_sigma,g_sq], atol=1e-12)

@pytest.mark.parametrize('tr_sigma,g_sq,res', [(6,2,3), (0,2,0), (-1,2,0), (1,0,np.inf), (1,-1,np.inf), (-1,-1,np.inf)])
def test_a_ratio_is_never_negative(tr_sigma, g_sq, res): assert_array_equal(ratio([tr_sigma]*2, [g_sq]*2), [res]*2)

# Weighted means and their interval

def two_pass(T, g, n, beta):
    "Means and (co)variances as they are written down, of the mean of all in one go"
    w = n*beta**np.arange(len(n)-1, -1, -1.)
    w = w/w.sum()
    s,x = (w**2).sum(),np.stack([T,g])
    mean = (x*w).sum(1)
    dev = x-mean[:,None]
    return mean, (w**2*dev)@dev.T/(1-s), 1/s

@given(st.integers(3,40), st.floats(0.5,1), st.integers(-30,30), st.integers(-30,30), st.integers(0,10**6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_pool_is_the_two_pass_version(n_windows, beta, exp_tr, exp_g, seed):
    rng,rtol = np.random.default_rng(seed),1e-9
    T,g,n = rng.normal(2,1,n_windows)*10.**exp_tr,rng.normal(1,2,n_windows)*10.**exp_g,rng.integers(1,300,n_windows).astype(float)
    p,(mean,cov,w_eff) = pooled(frame(T, g, n), beta),two_pass(T, g, n, beta)
    assert_allclose([p.tr_sigma,p.g_sq,p.w_eff,p.n_elems,p.n_windows], [*mean,w_eff,n.sum(),len(n)], rtol=rtol)
    v_tr,v_g,c = p.variances # Through `interval`, a tiny variance would drown in rounding
    assert_allclose([v_tr,v_g], cov.diagonal(), rtol=rtol)
    assert_allclose(c, cov[0,1], rtol=0, atol=rtol*np.sqrt(v_tr*v_g))

def test_interval_is_fieller_of_the_two_pass_moments():
    rng = np.random.default_rng(0)
    T,g,n = rng.normal(8,2,40),rng.normal(1,0.4,40),rng.integers(200,1300,40).astype(float)
    (mt,mg),cov,w_eff = two_pass(T, g, n, 0.95)
    q = stats.t.ppf(0.95, w_eff-1)**2 # 90% in the middle
    roots = np.roots([mg**2-q*cov[1,1], -2*(mt*mg-q*cov[0,1]), mt**2-q*cov[0,0]])
    p = pooled(frame(T, g, n), 0.95)
    assert_allclose(p.interval(0.9), sorted(roots))
    assert p.interval(0.99)[0]<p.interval(0.9)[0]<p.noise_scale<p.interval(0.9)[1]<p.interval(0.99)[1]

# Fieller's branches, each against the inequality that defines the interval

grid = np.concatenate([[0], np.geomspace(1e-4, 1e6, 200001)])

def accepted(T, g, v_tr, v_g, cov, dof, ci=0.95):
    "Which noise scales of the grid lie within t standard errors: (T - r*g)² <= q*Var(T - r*g)"
    q = stats.t.ppf((1+ci)/2, dof)**2
    return grid[(T - grid*g)**2 <= q*(v_tr - 2*grid*cov + grid**2*v_g)]

@pytest.mark.parametrize('branch,T,g', [('bounded',8,2), ('bounded from 0',-.5,2), ('no upper end',8,0.3), ('no upper end',8,-0.3), # Whatever the sign of g
    ('nothing known',1,0.3)])
def test_fieller_is_the_set_of_what_the_data_accept(branch, T, g):
    args = T, g, 0.5, 0.05, -0.05, 30
    (low,high),ok = fieller(*args),accepted(*args)
    assert_allclose(low, ok[0], rtol=1e-3)
    if branch.startswith('bounded'): assert_allclose(high, ok[-1], rtol=1e-3)
    else: assert high==np.inf and ok[-1]==grid[-1]
    assert (low==0)==(branch in ('bounded from 0','nothing known'))

def test_a_gradient_measured_negative_beyond_doubt():
    "At least the items measured"
    rng = np.random.default_rng(0)
    p = pooled(frame(rng.normal(8,0.1,20), rng.normal(-2,0.1,20), 32.))
    assert p.noise_scale==np.inf
    assert p.interval()==(640,np.inf)

# A moving target

def drifts(rel, n_runs): return np.array([drift_t(frame(*o)) for o in zip(*simulate(np.random.default_rng(0), np.broadcast_to(rel, (n_runs,len(rel)))))])

def test_drift_is_seen_and_rarely_where_nothing_moves():
    "Zero on average and rarely above 3 where nothing moves; a doubling is seen, with its sign"
    t,doubles = drifts(np.ones(50), 1000),np.repeat([0.3,0.6], 25)
    assert abs(t.mean()) < 4*stats.sem(t)
    assert_allclose(t.std(), 1, atol=0.1)
    assert 0 < (abs(t)>3).mean() <= 0.01 # 0.005, and what 1,000 draws of it may show
    for sign in (1,-1): assert (sign*drifts(doubles[::sign], 200)>3).mean() > 0.99

def test_the_present_value_is_read():
    "Where the noise scale rises from 33 items to 1000"
    r = np.geomspace(33, 1000, 47)
    runs = [frame(*o) for o in zip(*simulate(np.random.default_rng(0), np.broadcast_to(r/1280, (100,len(r)))))]
    read,end = [settled(o, beta=0.99) for o in runs],r[-5:].mean()
    off = np.array([e.noise_scale for e in read])/end
    assert ((1/1.6<off) & (off<1.6)).mean() >= 0.97
    assert all(e.n_windows<47 for e in read)
    assert end/np.median([pooled(o, 0.99).noise_scale for o in runs]) > 2.5 # Of the whole run: nobody's noise scale

# Along a path

def windows_of(K, noise_scale, n_trials, p, b=8, seed=0):
    "Moments of windows of `K[i]` micro-batches of `b` items each, `p` independent components, and a gradient of length 1; shape `(n_trials, windows)`"
    rng = np.random.default_rng(seed)
    K = np.asarray(K)
    n,each = K*b,noise_scale/p # Variance of a component of an item's gradient
    shape = n_trials,len(K)
    sq_mean = (1+rng.normal(size=shape)*np.sqrt(each/n))**2 + rng.chisquare(p-1, shape)*each/n
    tr_sigma = rng.chisquare(p*(K-1), shape)*each/(K-1)
    return tr_sigma,sq_mean-tr_sigma/n,n

@pytest.mark.parametrize('K,noise_scale', [([2]*6+[4]*8+[8]*16,32), ([2,16]*15,32)], ids=['growing','tenfold'])
def test_the_interval_along_a_path_covers_the_truth_as_often_as_it_says(K, noise_scale):
    "Of a noise scale that does not change"
    tr_sigma,g_sq,n = windows_of(K, noise_scale, 1000, 200)
    ends = np.array([along(frame(t, g, n)).ci for t,g in zip(tr_sigma, g_sq)])
    assert 0.93<((ends[:,0]<=noise_scale) & (noise_scale<=ends[:,1])).mean()<=(1 if max(K)==16 else 0.975) # Never less than it says

def test_along_does_not_take_the_path_for_an_error():
    "A noise scale that rises tenfold: the interval is as narrow as that of one which stands still, and that of `Pool` is not"
    rises = frame(np.geomspace(50, 500, 40), 1+0.02*np.random.default_rng(0).normal(size=40), 500.)
    path,pool = along(rises),pooled(rises).estimate()
    (low,high),(pool_low,pool_high) = path.ci,pool.ci
    assert high-low<0.15*(pool_high-pool_low)
    assert low<path.noise_scale<high
    assert (path.noise_scale,path.tr_sigma,path.g_sq)==pytest.approx((pool.noise_scale,pool.tr_sigma,pool.g_sq))

# One result, however windows are put together

ways = {'moving': lambda windows: pooled(windows).estimate(), 'settled': settled, 'along': along}

@pytest.mark.parametrize('way', ways)
def test_an_estimate_is_in_items(way):
    "With 7 elements to an item; nothing is known without windows, and nothing bounds it below 3"
    rng = np.random.default_rng(0)
    T,g,n = rng.normal(8,2,40),rng.normal(1,0.4,40),rng.integers(2,13,40)*7.
    f = ways[way]
    e,in_elems = f(frame(T, g, n, n/7)),f(frame(T, g, n))
    assert (e.noise_scale,*e.ci)==pytest.approx([o/7 for o in (in_elems.noise_scale,*in_elems.ci)])
    assert e.n_windows==40
    assert (e.tr_sigma,e.g_sq)==pytest.approx((n@T/n.sum(),n@g/n.sum()))
    assert e.ci[0]<e.noise_scale<e.ci[1]
    few,none = f(frame(T, g, n)[:2]),f(frame(T, g, n)[:0])
    assert few.ci==none.ci==(0,np.inf)
    assert few.noise_scale==pytest.approx((n[:2]@T[:2])/(n[:2]@g[:2]))
    assert np.isnan(none.noise_scale)
    assert none.n_windows==0
