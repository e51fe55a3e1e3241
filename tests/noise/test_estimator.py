"Moments of a window, pooled ratio, Fieller interval and drift: closed forms, a two-pass version, simulations"
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from fastai_bs.noise import estimator
from fastai_bs.noise.estimator import (Pool, along, drift_t, estimates, fieller, last_stretch, pooled, ratio, settled,
                                 window_moments)
from helpers import pairwise

def moments_of(g, n):
    "`window_moments` of micro-batches with mean gradients `g` of shape `(..., K, d)` over `n` elements"
    g,n = np.asarray(g, dtype=float),np.asarray(n, dtype=float)
    mean = (n[...,None]*g).sum(-2)/n.sum(-1)[...,None]
    return window_moments(n, (g**2).sum(-1), (mean**2).sum(-1))

eigs = 1/np.arange(1, 101) # Of the covariance of an item's gradient

def simulate(rng, rel, K=20, n=64):
    """`tr_sigma`, `g_sq` and elements of windows of `K` micro-batches of `n` Gaussian items, one for each of `rel`, noise scale over window.
    Of the `K` gradients only two sums count: about their mean, chi-squared with `K-1` degrees of freedom in each direction, and of the mean itself"""
    rel,N = np.asarray(rel, dtype=float),K*n
    G = np.sqrt(eigs.sum()/(rel*N)/len(eigs))[...,None]
    mean = ((G + rng.standard_normal((*rel.shape,len(eigs)))*np.sqrt(eigs/N))**2).sum(-1)
    about = rng.chisquare(K-1, (*rel.shape,len(eigs)))@eigs/n
    sq = np.broadcast_to((about/K + mean)[...,None], (*rel.shape,K))
    return window_moments(np.full((*rel.shape,K), n), sq, mean)

# Moments of a window

@pytest.mark.parametrize('g,n,tr_sigma,g_sq', [
    ([[3,4]]*3,           [2,5,1], 0,    25),     # Identical: no noise
    ([[3,4],[-3,-4]],     [1,1],   50,   -25),    # Opposite: no gradient, and less than that
    ([[1,0],[0,1]],       [1,1],   1,    0),      # Orthogonal
    ([[1,0],[0,1]],       [5,5],   5,    0),      # Means of 5 items: one item is 5 times as noisy
    ([[3,0],[0,0],[0,0]], [1,1,4], 3.75, -0.375)]) # Ragged: (9 - 6*0.5²)/2, 0.5² - 3.75/6
def test_golden_windows(g, n, tr_sigma, g_sq): assert_allclose(moments_of(g, n), [tr_sigma,g_sq,sum(n)], atol=1e-12)

def test_equal_micro_batches_agree_with_two_batch_sizes():
    "McCandlish et al. 2018, appendix A.1, with b and B = K*b"
    g = np.random.default_rng(0).normal(0.3, 1, (5,7))
    b,B,small,big = 4,20,(g**2).sum(1).mean(),(g.mean(0)**2).sum()
    assert_allclose(moments_of(g, [b]*5)[:2], [(small-big)/(1/b-1/B), (B*big-b*small)/(B-b)])

@given(st.floats(-15,15), st.integers(0,10**6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_scale_of_the_loss_and_order_of_micro_batches_do_not_count(exponent, seed):
    rng,c = np.random.default_rng(seed),10**exponent
    K,W = rng.integers(2, 7),rng.integers(3, 9)
    n,g = rng.integers(1, 20, (W,K)).astype(float),rng.normal(0.5, 1, (W,K,3))
    def _known(g, n):
        p = pooled(*moments_of(g, n), 0.9)
        return [p.noise_scale, *p.interval()]
    assert_allclose(_known(c*g, n), _known(g, n), rtol=1e-7)
    shuffled = rng.permutation(K)
    assert_allclose(moments_of(g[:,shuffled], n[:,shuffled]), moments_of(g, n), rtol=1e-9, atol=1e-9)

@pytest.mark.parametrize('f', [lambda: window_moments([3], [1], 1.), lambda: window_moments([3,0], [1,1], 1.), lambda: window_moments([3,np.nan], [1,1], 1.),
    lambda: Pool(0), lambda: Pool(1.1), lambda: pooled([8.,9.,7.], [2.,2.1,1.9], [5.]*3).interval(95), lambda: drift_t([1,2,3], [1,1,1], [1,1,1])])
def test_what_is_refused(f):
    "Windows of one micro-batch or of nothing, `beta` and the coverage out of range, a drift of three windows"
    with pytest.raises(ValueError): f()

@pytest.mark.parametrize('tr_sigma,g_sq,res', [(6,2,3), (0,2,0), (-1,2,0), (1,0,np.inf), (1,-1,np.inf), (-1,-1,np.inf)])
def test_ratio(tr_sigma, g_sq, res):
    assert ratio(tr_sigma, g_sq)==res
    assert_array_equal(ratio([tr_sigma]*2, [g_sq]*2), [res]*2)

# Weighted means and their interval

def two_pass(T, g, n, beta):
    "Means and (co)variances as they are written down, of the mean of all in one go"
    w = n*beta**np.arange(len(n)-1, -1, -1.)
    w = w/w.sum()
    s,x = (w**2).sum(),np.stack([T,g])
    mean = (x*w).sum(1)
    dev = x-mean[:,None]
    return mean, (w**2*dev)@dev.T/(1-s), 1/s

def assert_as_two_pass(T, g, n, beta, rtol=1e-9):
    p,(mean,cov,w_eff) = pooled(T, g, n, beta),two_pass(T, g, n, beta)
    assert_allclose([p.tr_sigma,p.g_sq,p.w_eff,p.n_elems,p.n_windows], [*mean,w_eff,n.sum(),len(n)], rtol=rtol)
    v_tr,v_g,c = p.variances # Through `interval`, a tiny variance would drown in rounding
    assert_allclose([v_tr,v_g], cov.diagonal(), rtol=rtol)
    assert_allclose(c, cov[0,1], rtol=0, atol=rtol*np.sqrt(v_tr*v_g))

@given(st.integers(3,40), st.floats(0.5,1), st.integers(-30,30), st.integers(-30,30), st.integers(0,10**6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_pool_is_the_two_pass_version(n_windows, beta, exp_tr, exp_g, seed):
    rng = np.random.default_rng(seed)
    assert_as_two_pass(rng.normal(2,1,n_windows)*10.**exp_tr, rng.normal(1,2,n_windows)*10.**exp_g, rng.integers(1,300,n_windows).astype(float), beta)

@pytest.mark.parametrize('beta', [1, 0.99])
@pytest.mark.parametrize('wobble,rtol', [(1e-6,1e-8), (1e-9,1e-5)])
def test_pool_loses_no_digits_on_nearly_constant_data(wobble, rtol, beta):
    "Sums of squares would: 1e-9 squared is below the rounding of 1"
    rng = np.random.default_rng(0)
    x = 1 + wobble*rng.standard_normal((2,500))
    assert_as_two_pass(*x, rng.integers(1,64,500).astype(float), beta, rtol)

def test_interval_is_fieller_of_the_two_pass_moments():
    rng = np.random.default_rng(0)
    T,g,n = rng.normal(8,2,40),rng.normal(1,0.4,40),rng.integers(200,1300,40).astype(float)
    (mt,mg),cov,w_eff = two_pass(T, g, n, 0.95)
    q = stats.t.ppf(0.95, w_eff-1)**2 # 90% in the middle
    roots = np.roots([mg**2-q*cov[1,1], -2*(mt*mg-q*cov[0,1]), mt**2-q*cov[0,0]])
    p = pooled(T, g, n, 0.95)
    assert_allclose(p.interval(0.9), sorted(roots))
    assert roots.min()<p.noise_scale<roots.max()
    assert p.interval(0.99)[0]<p.interval(0.9)[0] and p.interval(0.9)[1]<p.interval(0.99)[1]

def test_many_experiments_at_once():
    rng = np.random.default_rng(0)
    T,g,n = rng.normal(8,2,(30,5)),rng.normal(0.3,1,(30,5)),rng.integers(10,99,30)
    p = pooled(T, g, n, 0.97)
    for i in range(5):
        one = pooled(T[:,i], g[:,i], n, 0.97)
        assert_allclose([one.tr_sigma,one.g_sq,one.noise_scale,*one.interval()], [o[i] for o in (p.tr_sigma,p.g_sq,p.noise_scale,*p.interval())])

def test_effective_windows():
    "49 at 50 windows and 92 at 100, at most 199"
    w_eff = lambda k: pooled([1.]*k, [1.]*k, [7.]*k, 0.99).w_eff
    assert_allclose([w_eff(k) for k in (50,100,5000)], [49,92,199], atol=1)
    assert pooled([1.]*8, [1.]*8, [7.]*8).w_eff==pytest.approx(8)

@pytest.mark.parametrize('k', range(3))
def test_fewer_than_3_windows_bound_nothing(k):
    assert pooled([8.]*k, [2.]*k, [5.]*k).interval()==(0,np.inf)

@pytest.mark.parametrize('tr_sigma,g_sq,res', [(8.,2.,4.), (0.,2.,0.), (1e-12,3.,1e-12/3)])
@pytest.mark.parametrize('beta', [1, 0.99])
def test_windows_that_are_all_alike(tr_sigma, g_sq, res, beta):
    p = pooled([tr_sigma]*30, [g_sq]*30, [64.]*30, beta)
    assert_allclose([p.noise_scale,*p.interval()], res, rtol=1e-6, atol=1e-15)

# Fieller's branches, each against the inequality that defines the interval

grid = np.concatenate([[0], np.geomspace(1e-4, 1e6, 200001)])

def accepted(T, g, v_tr, v_g, cov, dof, ci=0.95):
    "Which noise scales of the grid lie within t standard errors: (T - r*g)² <= q*Var(T - r*g)"
    q = stats.t.ppf((1+ci)/2, dof)**2
    return grid[(T - grid*g)**2 <= q*(v_tr - 2*grid*cov + grid**2*v_g)]

@pytest.mark.parametrize('branch,T,g,v_tr,v_g,cov', [
    ('bounded',         8,  2,    0.5, 0.05,  -0.05),
    ('bounded',         8,  2,    0.5, 0.05,  0.1),
    ('bounded from 0',  1,  2,    0.5, 0.05,  -0.05),
    ('bounded from 0',  -.5,2,    0.5, 0.05,  -0.05),
    ('no upper end',    8,  0.3,  0.5, 0.05,  -0.05),
    ('no upper end',    8,  0,    0.5, 0.05,  -0.05),
    ('no upper end',    8,  -0.3, 0.5, 0.05,  -0.05), # Whatever the sign of g
    ('no upper end',    8,  -0.3, 0.5, 0.05,  0.1),
    ('nothing known',   1,  0.3,  0.5, 0.05,  -0.05),
    ('nothing known',   1,  -0.3, 0.5, 0.05,  -0.05),
    ('nothing known',   -1, 0.2,  0.5, 0.05,  0.)])
def test_fieller_is_the_set_of_what_the_data_accept(branch, T, g, v_tr, v_g, cov):
    low,high = fieller(T, g, v_tr, v_g, cov, dof=30)
    ok = accepted(T, g, v_tr, v_g, cov, dof=30)
    assert_allclose(low, ok[0], rtol=1e-3)
    if branch.startswith('bounded'): assert_allclose(high, ok[-1], rtol=1e-3)
    else: assert high==np.inf and ok[-1]==grid[-1]
    assert (low==0)==(branch in ('bounded from 0','nothing known'))

@given(st.floats(-3,10), st.floats(-2,3), st.floats(0.01,2), st.floats(0.01,1), st.floats(-0.99,0.99), st.integers(2,200))
@settings(max_examples=300, deadline=None)
def test_fieller_holds_all_that_the_data_accept(T, g, sd_tr, sd_g, corr, dof):
    args = T, g, sd_tr**2, sd_g**2, corr*sd_tr*sd_g, dof
    low,high = fieller(*args)
    assert 0<=low<=high
    ok = accepted(*args)
    A = g**2 - stats.t.ppf(0.975, dof)**2*sd_g**2
    if A>0 and g<0: assert (low,high)==(0,np.inf) # Never a negative interval
    elif len(ok):
        assert low<=ok[0]*(1+1e-6)+1e-9 and high>=ok[-1]*(1-1e-6)-1e-9
        if 0<low<1e5: assert ok[0]<=low*1.001+2e-4

def test_a_gradient_measured_negative_beyond_doubt():
    "At least the items measured"
    assert fieller(8., -2., 0.5, 0.05, 0., 30, at_least=640.)==(640,np.inf)
    rng = np.random.default_rng(0)
    p = pooled(rng.normal(8,0.1,20), rng.normal(-2,0.1,20), [32.]*20)
    assert p.noise_scale==np.inf and p.interval()==(640,np.inf)

@pytest.mark.parametrize('eps', [1e-3, 1e-6, 1e-9, 1e-12, 1e-14])
def test_continuous_where_the_upper_end_goes_to_infinity(eps):
    "A passes through 0 as the variance of g_sq grows"
    T,v_tr,cov,dof = 8.,0.5,-0.05,30
    v_g = 1/stats.t.ppf(0.975, dof)**2
    limit = fieller(T, 1., v_tr, v_g*(1+1e-15), cov, dof)[0]
    below,above = (fieller(T, 1., v_tr, v_g*(1+o), cov, dof) for o in (-eps,eps))
    assert_allclose([below[0],above[0]], limit, rtol=max(2*eps, 1e-12))
    assert below[1]>1/eps and above[1]==np.inf

# Coverage

@pytest.mark.parametrize('rel,n_windows,beta', [(0.05,30,1), (1,30,1), (10,100,1), (1,50,0.99)])
def test_coverage_of_the_interval(rel, n_windows, beta):
    rng,n_experiments = np.random.default_rng(0),4000
    p = Pool(beta)
    for _ in range(n_windows):
        T,g,N = simulate(rng, np.full(n_experiments, rel))
        p.add(T, g, N[0])
    truth,(low,high) = rel*N[0],p.interval()
    assert (low>=0).all() and (low<=high).all()
    assert 0.92 <= ((low<=truth) & (truth<=high)).mean() <= 0.98
    assert np.isinf(high).mean() <= (0 if rel<=1 else 0.3)
    assert (low>truth).mean() <= 0.05

# A moving target

@pytest.mark.parametrize('sign', [1, -1])
def test_drift_has_the_sign_of_the_change(sign):
    rng = np.random.default_rng(0)
    rel = np.full((200,40), 1.)
    rel[:,20:] = 2.
    T,g,n = simulate(rng, rel[:,::sign])
    assert (sign*np.array([drift_t(*o) for o in zip(T,g,n)]) > 0).mean() > 0.95

def test_drift_without_drift():
    "Zero on average, and rarely above 3"
    T,g,n = simulate(np.random.default_rng(0), np.full((4000,50), 1.))
    t = np.array([drift_t(*o) for o in zip(T,g,n)])
    assert abs(t.mean()) < 4*stats.sem(t)
    assert_allclose(t.std(), 1, atol=0.1)
    assert 0 < (abs(t)>3).mean() <= 0.007 # 0.005, and what 4,000 draws of it may show

@pytest.mark.parametrize('rel', [0.05, 0.3])
def test_drift_sees_a_doubling(rel):
    doubling = np.repeat([rel,2*rel], 25)
    t = [drift_t(*o) for o in zip(*simulate(np.random.default_rng(0), np.broadcast_to(doubling, (200,50))))]
    assert (np.array(t)>3).mean() > 0.99

def test_drift_of_nothing():
    x = np.ones(8)
    assert drift_t(3*x, 2*x, x)==0
    assert drift_t([1,1,1,1,2,2,2,2], x, x)==np.inf # No noise: any difference is beyond doubt
    assert drift_t([2,2,2,2,1,1,1,1], x, x)==-np.inf

def test_drift_where_the_mean_gradient_is_measured_negative():
    "The sign is that of `tr_sigma - r*g_sq`, though the mean of `g_sq` is below 0"
    T,g,n = np.array([1.,1.2,0.9,3.,3.2,2.9]),np.array([-1.,-0.8,-1.2,-1.,-1.1,-0.9]),np.ones(6)
    assert drift_t(T, g, n)>0>drift_t(T[::-1], g[::-1], n)

def readings(r, n_seeds=200):
    "Runs in which the noise scale follows `r`, in items: what the plan reads, what the whole run pooled reads, and windows of the last stretch"
    res = []
    for T,g,n in zip(*simulate(np.random.default_rng(0), np.broadcast_to(r/1280, (n_seeds,len(r))))):
        e = settled(T, g, n, beta=0.99)
        res.append((e.noise_scale, pooled(T, g, n, 0.99).noise_scale, e.n_windows))
    return np.array(res).T

@pytest.mark.parametrize('r', [np.geomspace(33,1000,47), np.geomspace(1000,33,47), np.full(47,200.)], ids=['rises','falls','stays'])
def test_the_plan_reads_the_present_value(r):
    plan,pooled,n_windows = readings(r)
    off = plan/r[-5:].mean() # From the last tenth
    assert ((1/1.6<off) & (off<1.6)).mean() >= 0.97
    if r[0]==r[-1]: assert (n_windows==47).mean()>0.97
    else:
        assert (n_windows<47).all()
        assert abs(np.log(np.median(pooled/r[-5:].mean()))) > np.log(2.5) # Of the whole run: nobody's noise scale

@pytest.mark.parametrize('k', [0, 3, 19])
def test_a_short_run_is_not_tested_for_drift(k):
    assert last_stretch(np.arange(k)+1., np.ones(k), np.ones(k))==0

def test_last_stretch_keeps_halving():
    "Three levels: the oldest half goes, then the older half of what is left"
    rng = np.random.default_rng(0)
    T = np.repeat([1.,10.,100.], [40,20,20]) + rng.normal(0,0.1,80)
    assert last_stretch(T, np.ones(80), np.ones(80))==60
    assert last_stretch(T, np.ones(80), np.ones(80), t_max=np.inf)==0
    assert last_stretch(T, np.ones(80), np.ones(80), min_windows=50)==40

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

sizes_of_windows = {'10': [4]*10, '30': [4]*30, '45': [4]*45, 'growing': [2]*6+[4]*8+[8]*16, 'cut at the end of epochs': ([8]*7+[3])*4,
                    'tenfold': [2,16]*15}

@pytest.mark.parametrize('nm,noise_scale', pairwise(list(sizes_of_windows), [8,32,100]))
def test_coverage_along(nm, noise_scale):
    "Of a noise scale that does not change; a quarter of a window, a window, and three times as much"
    tr_sigma,g_sq,n = windows_of(sizes_of_windows[nm], noise_scale, 2000, 200)
    ends = np.array([along(t, g, n).ci for t,g in zip(tr_sigma, g_sq)])
    assert 0.93<((ends[:,0]<=noise_scale) & (noise_scale<=ends[:,1])).mean()<=(1 if nm=='tenfold' else 0.975) # Never less than it says

@pytest.mark.parametrize('n', [[40.]*30, np.linspace(10, 80, 30), [10.,90.]*15])
def test_variances_along_are_unbiased(n, monkeypatch):
    "Those that reach `fieller`, where a window's errors have a variance of one over its elements; and the covariance"
    n,rng,seen = np.asarray(n, dtype=float),np.random.default_rng(0),[]
    monkeypatch.setattr(estimator, 'fieller', lambda *args, **kwargs: (seen.append(args), (0.,1.))[1])
    trials = 4000
    e = rng.normal(size=(2,trials,len(n)))/np.sqrt(n)
    t,g = 100+e[0]*3,1+0.5*e[0]+e[1]
    for a,b in zip(t, g): along(a, b, n)
    mean_tr,mean_g,v_tr,v_g,cov,dof,_ = zip(*seen)
    w = n/n.sum()
    assert_allclose(mean_tr, t@w); assert_allclose(mean_g, g@w); assert_allclose(dof, 2/3*(1/(w@w)-1))
    for est,exact in ((v_tr,9),(v_g,1.25),(cov,1.5)): assert np.mean(est)==pytest.approx(exact/n.sum(), rel=0.03)

def test_along_does_not_take_the_path_for_an_error():
    "A noise scale that rises tenfold: the interval is as narrow as that of one which stands still, and that of `Pool` is not"
    n,g = np.full(40, 500.),1+0.02*np.random.default_rng(0).normal(size=40)
    rises = np.geomspace(50, 500, 40)
    path,pool = along(rises, g, n),pooled(rises, g, n).estimate()
    (low,high),(pool_low,pool_high) = path.ci,pool.ci
    assert high-low<0.15*(pool_high-pool_low) and low<path.noise_scale<high
    assert (path.noise_scale,path.tr_sigma,path.g_sq)==pytest.approx((pool.noise_scale,pool.tr_sigma,pool.g_sq))

# One result, however windows are put together

ways = {'moving': lambda T, g, n, items: pooled(T, g, n, 1., items).estimate(), 'settled': settled, 'along': along}

@pytest.mark.parametrize('way', ways)
def test_an_estimate_is_in_items(way):
    "With 7 elements to an item; nothing is known without windows, and nothing bounds it below 3"
    rng = np.random.default_rng(0)
    T,g,n = rng.normal(8,2,40),rng.normal(1,0.4,40),rng.integers(2,13,40)*7.
    f = ways[way]
    e,in_elems = f(T, g, n, n/7),f(T, g, n, None)
    assert (e.noise_scale,*e.ci)==pytest.approx([o/7 for o in (in_elems.noise_scale,*in_elems.ci)]) and e.n_windows==40
    assert (e.tr_sigma,e.g_sq)==pytest.approx((n@T/n.sum(),n@g/n.sum())) and e.ci[0]<e.noise_scale<e.ci[1]
    few = f(T[:2], g[:2], n[:2], None)
    assert few.ci==(0,np.inf) and few.noise_scale==pytest.approx((n[:2]@T[:2])/(n[:2]@g[:2]))
    none = f([], [], [], None)
    assert np.isnan(none.noise_scale) and none.ci==(0,np.inf) and none.n_windows==0

@pytest.mark.parametrize('way', ['settled','along'])
def test_items_that_are_all_alike(way):
    "All windows count, however the gradient changes, and the largest ratio is the upper end"
    g = np.geomspace(1, 100, 40)
    e = ways[way](1e-6*(-1)**np.arange(40), g, np.full(40, 40.), np.full(40, 8.))
    assert e.n_windows==40 and e.ci==(0,pytest.approx(1e-6/g[0]/5)) and 0<=e.noise_scale<1e-6

def test_estimates_are_those_of_each_pool():
    rng = np.random.default_rng(0)
    T,g,n = rng.normal(8,2,9),rng.normal(1,1,9),rng.integers(10,99,9)*3.
    df = estimates([pooled(T[:k], g[:k], n[:k], 0.9, n[:k]/3) for k in range(1, 10)], 0.8)
    for k,o in zip(range(1, 10), df.itertuples()):
        e = pooled(T[:k], g[:k], n[:k], 0.9, n[:k]/3).estimate(0.8)
        assert (o.noise_scale,o.low,o.high,o.mean_tr_sigma,o.mean_g_sq)==(e.noise_scale,*e.ci,e.tr_sigma,e.g_sq)
    assert len(estimates([]))==0

