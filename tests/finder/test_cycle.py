"The mock cycle: it trains as `fit_one_cycle` does, measures without a trace in it, and keeps to its micro-batches; and what is read of it"
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler, SchedCos, combined_cos
from fastai.data.core import DataLoaders
from fastai.optimizer import Adam, OptimWrapper

from fastai_bs.finder import mock_cycle as cycle
from fastai_bs.finder import bs_find as finder
from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.finder.mock_cycle import (MockAccum, MockCycle, cool_rates, cool_stretch, cooled_to, cycle_of, for_training, places, rate_at, readings,
                             window_len)
from fastai_bs.noise.estimator import NoiseEstimate, along, window_moments
from fastai_bs.finder.bs_find import BSFinder
from fastai_bs.noise.noise_scale import Moments, NoiseScale
from helpers import flat, loaders, mlp, momentum_sgd, pairwise, quiet_learner, regression, ScaledLoss, set_seed, token_model, tokens

inf,nan = math.inf,math.nan

pytestmark = pytest.mark.usefixtures('short')

def learner(n=90, bs=4, opt_func=momentum_sgd, shuffle=True, dtype=torch.float64, loss_func=None, cbs=None, **kwargs):
    return quiet_learner(loaders(regression(n, dtype=dtype), bs, shuffle=shuffle), mlp(dtype=dtype), loss_func, opt_func, cbs=cbs, **kwargs)

def find(learn, lr=0.05, **kwargs): return learn.bs_find(lr, **{**dict(num_it=60, n_batch=6, tol=0, max_bs=1000, show_plot=False), **kwargs})

def opt_state(learn): return [v.clone() for p in learn.model.parameters() for v in learn.opt.state[p].values() if torch.is_tensor(v)]

def taped(learn, **kwargs):
    "The plan, each window of the mock training, each step's hyper-parameters, and what was there at the end"
    tape = SimpleNamespace(windows=[], hypers=[])
    class Tape(Callback):
        order = 200
        def accum(self):
            accum = getattr(self.learn, 'grad_accum', None)
            return accum if isinstance(accum, MockAccum) and self.training else None
        def before_batch(self):
            accum = self.accum()
            if not accum: return
            if accum.starts_window: tape.windows.append(SimpleNamespace(measured=accum.measures, micros=[], weights=[], opts=[]))
            window = tape.windows[-1]
            window.micros.append((self.xb,self.yb))
            window.weights.append(flat(self.learn).clone())
            window.opts.append(opt_state(self.learn) if hasattr(self.opt, 'state') else [])
        def before_step(self):
            if self.accum(): tape.hypers.append([(h['lr'],h.get('mom')) for h in self.opt.hypers])
        def after_cancel_fit(self):
            accum = self.accum()
            if accum: tape.accum,tape.weights,tape.opt = accum,flat(self.learn).clone(),opt_state(self.learn) if hasattr(self.opt, 'state') else None
    tape.plan = find(learn.add_cb(Tape()), **kwargs)
    tape.trained,tape.measured = ([o for o in tape.windows if o.measured==m] for m in (False,True))
    return tape

# It trains as `fit_one_cycle` does

class Played:
    "A loader with the micro-batches of one step in each epoch"
    def __init__(self, steps): self.steps,self.n = steps,0
    def __len__(self): return len(self.steps[min(self.n, len(self.steps)-1)])
    def __iter__(self):
        for xb,yb in self.steps[self.n]: yield (*xb,*yb)
        self.n += 1

def halves(model): return [list(model[:2].parameters()),list(model[2:].parameters())]

def accum2(): return [GradAccum(2)]
def accum3(): return [GradAccum(3)]
def scheduled(): return [ParamScheduler({'lr': SchedCos(3.,2.), 'mom': SchedCos(0.1,0.2)})]
def frozen(learn):
    learn.freeze()
    return learn

cases = pairwise([list,accum2,accum3,scheduled], [momentum_sgd,Adam,partial(OptimWrapper, opt=torch.optim.AdamW)],
                 [0.02,slice(0.005,0.02),[0.01,0.03]], [0,5.], [False,True])

@pytest.mark.parametrize('cbs,opt_func,lr,tol,freezes', cases)
def test_bit_for_bit(cbs, opt_func, lr, tol, freezes):
    "Weights, state of the optimizer, rates and momenta are those of `fit_one_cycle` with the same batches at the same steps, in ragged epochs too"
    learn = learner(opt_func=opt_func, splitter=halves, cbs=cbs())
    if freezes: learn.freeze()
    start = flat(learn).clone()
    tape = taped(learn, lr=lr, tol=tol)
    steps = [o.micros for o in tape.trained]
    assert len(steps)==tape.accum.cycle.n_steps and torch.equal(flat(learn), start)

    plain = learner(opt_func=opt_func, splitter=halves)
    plain.dls = DataLoaders(Played(steps), learn.dls.valid, device='cpu')
    if freezes: plain.freeze()
    seen = []
    class Look(Callback):
        order = 200
        def before_step(self): seen.append([(h['lr'],h.get('mom')) for h in self.opt.hypers])
    plain.fit_one_cycle(len(steps), lr, cbs=[Look(), *(o for o in cbs() if isinstance(o, GradAccum))])
    assert seen==tape.hypers and torch.equal(flat(plain), tape.weights) and not torch.equal(flat(plain), start)
    if tape.opt is not None: assert all(torch.equal(a, b) for a,b in zip(opt_state(plain), tape.opt, strict=True))
    if cbs is list: assert plain.recorder.hps['lr']==[o[-1][0] for o in tape.hypers]

def test_a_window_that_is_measured_is_not_noticed():
    "No step, no weight, no state of the optimizer; all its micro-batches are at the same weights"
    tape = taped(learner(opt_func=Adam), num_it=120)
    assert len(tape.measured)>=len(tape.plan.df)>20 and len(tape.trained)==60
    for a,b in zip(tape.windows, tape.windows[1:]+[None]):
        assert all(torch.equal(o, a.weights[0]) for o in a.weights)
        if b is None or not b.opts[0]: continue
        same = torch.equal(a.weights[0], b.weights[0]), all(torch.equal(x, y) for x,y in zip(a.opts[0], b.opts[0], strict=True)) if a.opts[0] else False
        assert same==((True,True) if a.measured else (False,False)) or not a.opts[0]

@pytest.mark.parametrize('today', [1,3])
def test_it_says_where_each_window_was(today):
    tape = taped(learner(cbs=[GradAccum(today)]), num_it=200)
    df,at = tape.plan.df,[]
    for o in tape.windows:
        if not o.measured: at.append([])
        elif len(o.micros)>1: at.append(None)
    steps,n = [],0
    for o in at:
        if o is None: steps.append(n)
        else: n += 1
    assert df.step.tolist()==steps and df.rate.tolist()==rate_at(df.pct).tolist()
    n_steps = tape.accum.cycle.n_steps
    assert (df.pct>=df.step/n_steps).all() and (df.pct<(df.step+1)/n_steps).all() and df.pct.tolist()==places(len(df)).tolist()
    cool = df[(df.pct>=cool_stretch[0]) & (df.pct<cool_stretch[1])]
    assert len(cool)==tape.plan.measured.n_windows==tape.plan.measured.cool.n_windows==len(df)//2

# Each window by hand

def moments_by_hand(window, model, loss_func, count):
    torch.nn.utils.vector_to_parameters(window.weights[0], model.parameters())
    gs,ns = [],[]
    for xb,yb in window.micros:
        n = count(*yb)
        if not n: continue
        grads = torch.autograd.grad(loss_func(model(*xb), *yb), list(model.parameters()))
        gs.append(torch.cat([g.flatten() for g in grads])); ns.append(float(n))
    if len(gs)<2: return None
    mean = sum(n*g for n,g in zip(ns, gs))/sum(ns)
    return *window_moments(ns, [g.square().sum().item() for g in gs], mean.square().sum().item()),sum(len(yb[0]) for _,yb in window.micros)

def _kept(i): return 0 if i%24<9 else 1+i%4

counts = {'mean': (lambda: learner(90), lambda y: y.numel()),
    'tokens': (lambda: quiet_learner(loaders(tokens(90, ignored=0.4), 4, shuffle=True), token_model(tied=False), nn.CrossEntropyLoss()),
               lambda y: (y!=-100).sum().item()),
    'nothing counts': (lambda: quiet_learner(loaders(tokens(90, kept=_kept), 3), token_model(tied=False), nn.CrossEntropyLoss()),
               lambda y: (y!=-100).sum().item())}

@pytest.mark.parametrize('nm', counts)
def test_windows_by_hand(nm):
    "At the weights they were measured at; with micro-batches in which nothing counts, and whose loss is NaN"
    make,count = counts[nm]
    learn = make()
    tape = taped(learn, num_it=100, n_batch=4)
    res = [moments_by_hand(o, make().model, learn.loss_func, count) for o in tape.measured]
    res = np.array([o for o in res if o])
    df = tape.plan.df
    for k,col in zip(('tr_sigma','g_sq','n_elems','n_items'), res.T): assert df[k].tolist()==pytest.approx(col.tolist(), rel=1e-9)
    cool = df[(df.pct>=cool_stretch[0]) & (df.pct<cool_stretch[1])]
    w = cool.n_elems
    assert tape.plan.measured.cool.noise_scale==pytest.approx((cool.tr_sigma@w)/(cool.g_sq@w)*cool.n_items.sum()/w.sum()) or (cool.g_sq@w)<=0
    if nm=='nothing counts': assert len(tape.measured)>len(df)>5 and any(count(*yb)==0 for o in tape.measured for _,yb in o.micros)

def test_a_loss_that_sums():
    "At weights that do not move the noise scale is that of the mean"
    plans = []
    for o in ('mean','sum'):
        set_seed(0)
        plans.append(find(learner(loss_func=nn.MSELoss(reduction=o)), 1e-30, num_it=100))
    cools = [plan.measured.cool for plan in plans]
    assert cools[0].noise_scale==pytest.approx(cools[1].noise_scale) and cools[0].ci==pytest.approx(cools[1].ci)

class Overflowing(ScaledLoss):
    "As float16 would above 512"
    def before_backward(self):
        super().before_backward()
        if self.learn.scaler.get_scale()>512: self.learn.loss_grad = self.loss_grad*inf

@pytest.mark.parametrize('init_scale,n_dropped', [(256.,0),(2.**13,4)])
@pytest.mark.parametrize('lr', [0,1e-5])
def test_windows_that_overflow_are_left_out(lr, init_scale, n_dropped):
    "A scale that is too large is found by trying: by the steps between the windows, and where there are none by the windows themselves"
    seen,steps = [],[]
    class Look(Callback):
        order = 200
        def before_step(self): steps.append(self.opt.hypers[0]['lr'])
        def after_fit(self):
            noise = getattr(self.learn, 'noise_scale', None)
            if noise: seen.append((noise.n_dropped,len(noise.rows)))
    learn = learner(cbs=[Overflowing(init_scale=init_scale, growth_interval=1000),Look()], shuffle=False)
    start = flat(learn).clone()
    plan = find(learn, lr, num_it=120, n_batch=2)
    assert (seen[0][0]==n_dropped if lr==0 or not n_dropped else seen[0][0]>0) and seen[0][1]==len(plan.df)>=20
    assert any(steps)==(lr>0) and torch.equal(flat(learn), start)
    if lr==0:
        exact = find(learner(shuffle=False), 0, num_it=120, n_batch=2).df.iloc[n_dropped:]
        for k in ('tr_sigma','g_sq','n_elems'): assert plan.df[k].tolist()==pytest.approx(exact[k].tolist())

# Places and lengths

def test_the_rate_is_fastais():
    "At its ends and its peak exactly"
    pct = np.linspace(0, 1, 1001)
    fastais = combined_cos(0.25, 1/25, 1., 1/1e5)
    assert rate_at(pct).tolist()==pytest.approx([fastais(float(o)) for o in pct], rel=1e-4) # fastai's positions are in single precision
    assert (rate_at(0),rate_at(0.25),rate_at(1))==(1/25,1,pytest.approx(1e-5))
    for rate in (0.9,0.1,*cool_rates,1e-4): assert rate_at(cooled_to(rate))==pytest.approx(rate) and cooled_to(rate)>0.25

@pytest.mark.parametrize('n', [2,3,5,8,9,16,17,60,101])
def test_places(n):
    "Ascending from the beginning on, half of them on the cool stretch, an eighth after it"
    at,(begin,end) = places(n),cool_stretch
    assert len(at)==n and (np.diff(at)>0).all() and at[0]==0 and at[-1]<1
    assert ((at>=begin) & (at<end)).sum()==n//2 and (at>=end).sum()==n//8

def _rows(tr_sigma, g_sq, n=256.): return [Moments(1, n, n, tr_sigma, g_sq)]

@pytest.mark.parametrize('rows,last,res', [([],0,4), (_rows(256,1),4,4), (_rows(10,1),4,2), (_rows(10,1),16,8), (_rows(10_000,1),4,8), (_rows(10_000,1),16,20),
    (_rows(1,-1),4,8), (_rows(1,0),4,8), (_rows(-5,1),8,4), (_rows(10_000,1)+_rows(256,1)*6,4,4), (_rows(0,1)*5+_rows(256*12,6.),4,4)])
def test_window_len(rows, last, res):
    "Of micro-batches of 64 elements: the noise scale of the last six windows, at most twice and at least half of the last one; 2 to 20"
    assert window_len(rows, 64., last, 2, 20)==res

def test_windows_grow_and_shrink_with_the_noise_scale():
    "Items that are nearly alike, and items in which there is nothing to learn"
    (x0,y0),*_ = items = regression(2000)
    alike = [(x0+0.01*x,y0+1) for x,_ in items]
    noise = [(x,torch.randn(2, dtype=torch.float64)) for x,_ in items]
    few,many = (find(quiet_learner(loaders(o, 4), mlp()), 1e-2, num_it=800, n_epoch=0.05, n_batch=20).df.n_items.to_numpy() for o in (alike,noise))
    assert few[0]==many[0]==16 and (few[3:]==8).all() and many.max()>16 and many.mean()>20
    for n in (few,many): assert (n[1:]<=2*n[:-1]).all()

# Within its micro-batches

def mock(n_iter, cycle, tol=0.25, lr=0.05, cls=MockAccum):
    "A mock training without the rest of `bs_find`"
    learn = learner(3*n_iter-1, 3)
    accum = cls(NoiseScale(), min(20, max(2, n_iter//8)), cycle, tol=tol)
    finder,steps = BSFinder(accum, cycle.num_it, tol),[]
    class Look(Callback):
        order = 200
        def before_step(self): steps.append(self.opt.hypers[0]['lr'])
    learn.fit(math.ceil(cycle.num_it/n_iter), lr, cbs=[accum, finder.noise, finder, cycle, Look()])
    return SimpleNamespace(finder=finder, accum=accum, cycle=cycle, rows=accum.noise.rows, steps=steps)

@pytest.mark.parametrize('n_iter,today,which', pairwise([2,3,4,7,40], [1,2,3,5], range(4)))
def test_the_cycle_ends_within_num_it(n_iter, today, which):
    "In epochs shorter than the cycle, in which a window may be cut short and a left-over micro-batch may tell nothing"
    num_it = (2*max(today,4), 4*today+9, 61, 100)[which]
    o = mock(n_iter, cycle_of(num_it, today, inf))
    assert o.cycle.is_over and o.finder.n_seen==o.cycle.n_seen+1<=num_it and len(o.steps)==o.cycle.n_steps+o.cycle.n_more
    assert len(o.rows)==len(o.accum.path) and len(o.rows)>=(1 if num_it<60 else 10) and o.cycle.n_more<=o.cycle.most_more<=len(places(60))//2
    assert o.cycle.n_measured<=len(o.cycle.places)

@pytest.mark.parametrize('num_it,today,n_training,n_steps,n_windows', [(None,1,inf,300,60), (None,8,inf,300,60), (None,1,50,50,60), (None,2,0.3,1,60),
    (None,1,299.5,300,60), (100,1,inf,50,25), (100,1,10,10,45), (100,5,inf,10,25), (1000,1,inf,500,60), (8,1,inf,4,2), (10**6,1,10**9,500_000,60)])
def test_how_long_the_cycle_is(num_it, today, n_training, n_steps, n_windows):
    "Half of `num_it` to train with, no more than the training that is planned; 300 steps where nobody says otherwise"
    c = cycle_of(num_it, today, n_training)
    assert (c.n_steps,len(c.places))==(n_steps,n_windows) and c.num_it==(num_it or n_steps*today+360)
    assert n_steps*today+2*n_windows+c.kept_for_each*c.most_more<=c.num_it and (not c.most_more or c.kept_for_each>=today+2) and 0<=c.most_more<=n_windows//2

@pytest.mark.parametrize('num_it,today,least,enough', [(6,1,2,8), (1,1,2,8), (8,5,2,9), (2,1,1,4), (4,3,1,5)])
def test_too_few_for_two_windows_and_a_step(num_it, today, least, enough):
    with pytest.raises(ValueError, match=f'`num_it`={num_it} micro-batches are not enough for two windows of {least} and a step of {today}: take {enough} or'):
        cycle_of(num_it, today, inf, least)
    assert len(cycle_of(enough, today, inf, least).places)>=2

# More windows where they are needed

@pytest.mark.parametrize('tol,today', [(1e-9,1), (1e-9,4), (0,1), (10,1)])
def test_more_windows_where_the_interval_is_wide(tol, today):
    "In the middle of the cool stretch, as many as were kept for at most; the cycle waits there for a step each. None with tol=0"
    o = mock(400, MockCycle(60, 20, today, 60*today+20*6+10*(6+today)), tol, lr=0.001)
    c = o.cycle
    assert c.most_more>=8 and c.n_more==(0 if tol in (0,10) else c.most_more)
    pct = [at for _,at,_ in o.accum.path]
    assert len(o.steps)==60+c.n_more and len(pct)==len(o.rows)==20+c.n_more and pct==sorted(pct)
    rates = [0.001*rate_at(i/60) for i in range(60)]
    middle = math.ceil(sum(cool_stretch)/2*60)
    assert o.steps==pytest.approx(rates[:middle]+[rates[middle]]*c.n_more+rates[middle:], rel=1e-4)
    assert readings(o.accum.placed(o.accum.noise.moments))[1].n_windows==10+c.n_more

def test_it_looks_after_every_5_windows_only(monkeypatch):
    "And stops as soon as the interval is narrow"
    looks,highs = [],iter([10.,10.,1.4,10.])
    def _readings(df, level):
        looks.append(len(df))
        return None,NoiseEstimate(1., (1.,next(highs)), 10),None
    monkeypatch.setattr(cycle, 'readings', _readings)
    o = mock(400, MockCycle(60, 40, 1, 600))
    assert len(looks)==3 and looks[2]-looks[1]==5 and o.cycle.n_more==10 and o.cycle.is_over

# What is read of it

def frame(n=24, items=1, seed=0):
    rng = np.random.default_rng(seed)
    pct = places(n)
    return pd.DataFrame(dict(pct=pct, n_items=40., n_elems=40.*items, tr_sigma=rng.uniform(90,110,n), g_sq=rng.uniform(0.5,1,n)))

def test_readings():
    "Along the windows near the peak of the rate, on the cool stretch, and after it"
    df = frame(items=7)
    begin,end = cool_stretch
    parts = [df[rate_at(df.pct)>0.9], df[(df.pct>=begin) & (df.pct<end)], df[df.pct>=end]]
    assert [len(o) for o in parts]==[3,12,3]
    assert readings(df, 0.9)==tuple(along(o, 0.9) for o in parts)

# For the whole of a training

def test_for_training_by_hand():
    "With the training set and 80 steps of its examples"
    assert for_training(500, 60_000, 1)==pytest.approx(1/(1/500+1/60_000+80/60_000))
    assert for_training(500, 60_000, 3)==pytest.approx(1/(1/500+1/60_000+80/180_000))
    assert for_training(500, 10**9, 10**6)==pytest.approx(500, rel=1e-5)

def test_limits_of_for_training():
    ns = [0,1e-300,1e-3,1,10,1e3,1e6,1e300,inf]
    for n_train,n_epoch in ((50,0.01),(1000,1),(10**6,1),(1000,10**6),(1,0.5)):
        res = [for_training(o, n_train, n_epoch) for o in ns]
        assert res[0]==0 and (np.diff(res)>=0).all() and all(0<=o<n_train for o in res)
        assert res[-1]==pytest.approx(1/(1/n_train+80/n_train/n_epoch)) and res[-1]<=n_epoch*n_train/80
    assert all(np.diff([for_training(500, 10**5, o) for o in (0.1,1,9)])>0) and math.isnan(for_training(nan, 1000, 1))

@pytest.mark.parametrize('ci', [(0.,inf),(20.,inf),(0.,80.),(20.,80.)])
@pytest.mark.parametrize('noise_scale', [50.,inf,nan])
def test_what_is_not_known_stays_so(ci, noise_scale, monkeypatch):
    "The training bounds an interval from above that the measurement leaves open, unless nothing is known at all; without an estimate, by its lower end"
    monkeypatch.setattr(finder, 'readings', lambda *args: [NoiseEstimate(noise_scale, ci, 30)]*3)
    plan = find(learner(), n_epoch=2)
    def whole(o): return for_training(o, 90, 2)
    assert plan.ci==(ci if ci==(0,inf) else tuple(map(whole, ci)))
    assert plan.noise_scale==(whole(50.) if noise_scale==50 else plan.ci[0] or inf) and plan.measured.cool.ci==ci
    assert plan.is_bound==(noise_scale!=50)

# How long the training is to be

@pytest.mark.parametrize('n_epoch', [0.25,1,1.5,np.float32(2),np.int64(3),40,10**6])
def test_the_training_that_is_planned(n_epoch):
    "A mock cycle no longer than it, with today's batch size"
    plan = find(learner(cbs=accum2()), n_epoch=n_epoch, num_it=300)
    n_steps = min(75, math.ceil(n_epoch*23/2))
    assert plan.today.n_epoch==n_epoch and plan.today.has_n_epoch
    assert plan.df.step.max()==n_steps-1 and plan.measured.n_windows==30 and 0<=plan.noise_scale<90 or math.isinf(plan.noise_scale)

