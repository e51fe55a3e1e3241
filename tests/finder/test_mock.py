"The windows of the mock training: they leave no trace in it, are measured as by hand, and grow with the noise scale; and what a micro-batch reaches"
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler, SchedCos
from fastai.data.core import DataLoaders
from fastai.optimizer import OptimWrapper

from fastai_bs.all import GradAccum
from fastai_bs.finder.cycle import cool_stretch
from fastai_bs.finder.mock import MockSizes
from helpers import flat, halves, loaders, mlp, momentum_sgd, noted, Overflowing, pairwise, peak_lr, quiet_learner, regression, token_model, tokens
from oracle import moments_of_micros

inf = math.inf

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
            return accum if accum and isinstance(accum.sizes, MockSizes) and self.training else None
        def before_batch(self):
            accum = self.accum()
            if not accum: return
            if accum.starts_window: tape.windows.append(SimpleNamespace(measured=accum.sizes.measures, micros=[], weights=[], opts=[]))
            window = tape.windows[-1]
            window.micros.append((self.xb,self.yb))
            window.weights.append(flat(self.learn).clone())
            window.opts.append(opt_state(self.learn) if hasattr(self.opt, 'state') else [])
        def before_step(self):
            if self.accum(): tape.hypers.append([(h['lr'],h.get('mom')) for h in self.opt.hypers])
        def after_cancel_fit(self):
            accum = self.accum()
            if not accum: return
            tape.cycle,tape.weights = self.learn.mock_windows.cycle,flat(self.learn).clone()
            tape.opt = opt_state(self.learn) if hasattr(self.opt, 'state') else None
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

def accum3(): return [GradAccum(3)]
def scheduled(): return [ParamScheduler({'lr': SchedCos(3.,2.), 'mom': SchedCos(0.1,0.2)})]
cases = pairwise([list,accum3,scheduled], [momentum_sgd,partial(OptimWrapper, opt=torch.optim.AdamW)],
                 [0.02,slice(0.005,0.02)], [0,5.], [False,True])

@pytest.mark.parametrize('cbs,opt_func,lr,tol,freezes', cases)
def test_the_mock_training_is_fit_one_cycle_bit_for_bit(cbs, opt_func, lr, tol, freezes):
    "Weights, state of the optimizer, rates and momenta are those of `fit_one_cycle` with the same batches at the same steps, in ragged epochs too"
    learn = learner(opt_func=opt_func, splitter=halves, cbs=cbs())
    if freezes: learn.freeze()
    start = flat(learn).clone()
    tape = taped(learn, lr=lr, tol=tol)
    steps = [o.micros for o in tape.trained]
    assert len(steps)==tape.cycle.n_steps
    assert torch.equal(flat(learn), start)

    plain = learner(opt_func=opt_func, splitter=halves)
    plain.dls = DataLoaders(Played(steps), learn.dls.valid, device='cpu')
    if freezes: plain.freeze()
    look,seen = noted('before_step', lambda learn: [(h['lr'],h.get('mom')) for h in learn.opt.hypers])
    plain.fit_one_cycle(len(steps), lr, cbs=[look, *(o for o in cbs() if isinstance(o, GradAccum))])
    assert seen==tape.hypers
    assert torch.equal(flat(plain), tape.weights)
    assert not torch.equal(flat(plain), start)
    if tape.opt is not None: assert all(torch.equal(a, b) for a,b in zip(opt_state(plain), tape.opt, strict=True))
    if cbs is list: assert plain.recorder.hps['lr']==[o[-1][0] for o in tape.hypers]

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
    return *moments_of_micros(gs, ns),sum(ns),sum(len(yb[0]) for _,yb in window.micros)

def _kept(i): return 0 if i%24<9 else 1+i%4

counts = {'mean': (lambda: learner(90), lambda y: y.numel()),
    'tokens': (lambda: quiet_learner(loaders(tokens(90, ignored=0.4), 4, shuffle=True), token_model(tied=False), nn.CrossEntropyLoss()),
               lambda y: (y!=-100).sum().item()),
    'nothing counts': (lambda: quiet_learner(loaders(tokens(90, kept=_kept), 3), token_model(tied=False), nn.CrossEntropyLoss()),
               lambda y: (y!=-100).sum().item())}

@pytest.mark.parametrize('nm', counts)
def test_measured_windows_are_those_by_hand(nm):
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
    assert tape.plan.facts.measured.cool.noise_scale==pytest.approx((cool.tr_sigma@w)/(cool.g_sq@w)*cool.n_items.sum()/w.sum()) or (cool.g_sq@w)<=0
    if nm=='nothing counts': assert any(count(*yb)==0 for o in tape.measured for _,yb in o.micros)

@pytest.mark.parametrize('lr', [0,1e-5])
def test_windows_that_overflow_are_left_out(lr, n_dropped=4):
    "A scale that is too large is found by trying: by the steps between the windows, and where there are none by the windows themselves"
    (look,steps),(at_end,seen) = noted('before_step', peak_lr),noted('after_fit', lambda learn: getattr(learn, 'noise_scale', None))
    learn = learner(cbs=[Overflowing(init_scale=2.**13, growth_interval=1000),look,at_end], shuffle=False)
    start = flat(learn).clone()
    plan = find(learn, lr, num_it=120, n_batch=2)
    noise = seen[0]
    assert noise.n_dropped==n_dropped if lr==0 else noise.n_dropped>0
    assert len(noise.rows)==len(plan.df)>=20
    assert any(steps)==(lr>0)
    assert torch.equal(flat(learn), start)
    if lr==0:
        exact = find(learner(shuffle=False), 0, num_it=120, n_batch=2).df.iloc[n_dropped:]
        for k in ('tr_sigma','g_sq','n_elems'): assert plan.df[k].tolist()==pytest.approx(exact[k].tolist())

# How long a window is

def test_windows_grow_and_shrink_with_the_noise_scale():
    "Items that are nearly alike, and items in which there is nothing to learn"
    (x0,y0),*_ = items = regression(2000)
    alike = [(x0+0.01*x,y0+1) for x,_ in items]
    noise = [(x,torch.randn(2, dtype=torch.float64)) for x,_ in items]
    few,many = (find(quiet_learner(loaders(o, 4), mlp(), cbs=[GradAccum(16)]), 1e-2, num_it=1000, n_batch=20).df.n_items.to_numpy() for o in (alike,noise))
    assert few[0]==many[0]==16
    assert (few[3:]==8).all()
    assert many.max()>16
    assert many.mean()>20
    for n in (few,many): assert (n[1:]<=2*n[:-1]).all()
