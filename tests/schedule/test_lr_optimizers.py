"ScaledLR and the optimizer: what a rule promises of SGD, and velocities that hold the rate"
import math
from functools import cache, partial

import pytest
import torch
from torch import nn
from fastai.callback import schedule # noqa: F401 (patches `fit_one_cycle` and its kin into `Learner`)
from fastai.callback.core import Callback
from fastai.optimizer import Adam, OptimWrapper, Optimizer, RMSProp, SGD, ranger, weight_decay
from fastai_bs.all import adascale_gain, GradAccum, ScaledLR
from fastai_bs.schedule.scaled_lr import velocity_names
from helpers import flat, hypers, loaders, noted, pairwise, quiet_learner, regression

f64 = torch.float64

def rand(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)
def count_items(learn): return len(learn.x)

# SGD: k small steps and one large one

class Linear(nn.Module):
    "Linear in its weights, so that no step changes a gradient"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Parameter(rand(5, seed=1)),nn.Parameter(rand(5, seed=2))
    def forward(self, z): return (z@self.a + z.square()@self.b)[:,None]

def linear_learner(zs, bs, cbs=(), opt_func=SGD, groups=False):
    splitter = (lambda m: [[m.a],[m.b]]) if groups else (lambda m: [list(m.parameters())])
    return quiet_learner(loaders([(z,z[:1]) for z in zs], bs), Linear(), lambda pred,targ: pred.mean(), opt_func, cbs=cbs, splitter=splitter)

@pytest.mark.parametrize('k,by,groups', pairwise([2,32], ['loader','GradAccum','both'], [False,True]))
def test_k_small_steps_are_one_large_one(k, by, groups):
    zs,lr = rand(128, 5, seed=3),slice(0.01,0.1) if groups else 0.1
    n_acc = dict(loader=1, GradAccum=k, both=2)[by]
    cbs = [ScaledLR(2, warmup_epochs=0), GradAccum(n_acc, count=count_items)]
    small,large = linear_learner(zs, 2, groups=groups),linear_learner(zs, 2*k//n_acc, cbs, groups=groups)
    for learn in (small,large): learn.fit(2, lr)
    assert len(large.recorder.lrs)==2*64//k
    assert len(small.recorder.lrs)==128
    assert (flat(small)-flat(large)).abs().max() <= 1e-13
    for p,seed,g,rate in ((large.model.a,1,zs,0.01 if groups else 0.1),(large.model.b,2,zs**2,0.1)): # Mean gradient times the sum of the rates
        assert (p.detach()-rand(5, seed=seed)+128*rate*g.mean(0)).abs().max() <= 1e-12

@pytest.mark.parametrize('by,warmup,scale_wd,decouple_wd', pairwise(['loader','GradAccum'], [0,1.5], [True,False], [True,False]))
def test_weight_decay_against_the_closed_form(by, warmup, scale_wd, decouple_wd):
    "w <- (1-d)w - k lr g per step, where d is k lr wd, or lr wd with `scale_wd=False`"
    k,lr,wd,z = 8,0.05,0.3,rand(5, seed=3)
    n_acc,(look,seen) = k if by=='GradAccum' else 1,noted('before_step', hypers)
    cbs = [ScaledLR(2, warmup_epochs=warmup, scale_wd=scale_wd), GradAccum(n_acc, count=count_items), look]
    learn = linear_learner([z]*64, 2*k//n_acc, cbs, partial(SGD, decouple_wd=decouple_wd))
    learn.fit(3, lr, wd=wd)
    fs = [1+(k-1)*min(1,i/4/warmup) if warmup else k for i in range(12)] # 4 steps to the epoch
    ds = [(f if scale_wd else 1)*lr*wd for f in fs]
    for p,w,g in ((learn.model.a,rand(5, seed=1),z),(learn.model.b,rand(5, seed=2),z**2)):
        want = w*math.prod(1-d for d in ds) - sum(f*lr*math.prod(1-d for d in ds[i+1:])*g for i,f in enumerate(fs))
        assert (p.detach()-want).abs().max() <= 1e-12
    assert [h['wd']*h['lr'] for h, in seen]==pytest.approx(ds, rel=1e-12)
    assert learn.opt.hypers[0]['wd']==wd
    assert learn.opt.hypers[0]['lr']==lr

# Velocities that hold the rate

def velocity(p, lr, mom, vel=None, **kwargs):
    "fastai: v = mom*v + lr*g"
    return dict(vel=(torch.zeros_like(p) if vel is None else vel).mul_(mom).add_(p.grad.data, alpha=lr))
velocity.defaults = dict(mom=0.9)

def velocity_step(p, vel, **kwargs): p.data.sub_(vel)

def Folded(params, lr, **kwargs): return Optimizer(params, [weight_decay, velocity, velocity_step], lr=lr, **kwargs)

class TorchFolded(torch.optim.Optimizer):
    "The same for torch; with an attribute of its own, which torch's optimizers do not take along when they are copied"
    def __init__(self, params, lr, momentum=0.9, weight_decay=0.):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.nm = 'buf'
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']:
                if p.grad is None: continue
                v = self.state[p].setdefault(self.nm, torch.zeros_like(p))
                v.mul_(g['momentum']).add_(p.grad + g['weight_decay']*p, alpha=g['lr'])
                p.sub_(v)

pairs = { # The optimizer, and its reference that keeps the rate out
    'fastai': (Folded, partial(SGD, mom=0.9)),
    'torch': (partial(OptimWrapper, opt=TorchFolded), partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9))}

class Branches(nn.Module):
    "Its first branch is used at each forward pass, the second one in two of five"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one,self.two,self.head,self.n = nn.Linear(5,4).to(f64),nn.Linear(5,4).to(f64),nn.Linear(4,2).to(f64),0
    def forward(self, x):
        self.n += self.training
        return self.head(torch.tanh(self.one(x) + (self.two(x) if self.n%5 in (3,4) else 0)))

class NoGrads(Callback):
    "Leaves no gradient after a step, as torch's `zero_grad` does and fastai's does not; notes where parameters had none"
    order = 99
    def __init__(self): self.none = []
    def before_step(self): self.none.append(any(p.grad is None for p in self.learn.model.two.parameters()))
    def after_step(self):
        for p in self.learn.model.parameters(): p.grad = None
        self.opt.zero_grad()
    def before_epoch(self):
        for p in self.learn.model.parameters(): p.grad = None

def branch_groups(m): return [list(m.one.parameters()),[*m.two.parameters(),*m.head.parameters()]]

def train(opt_func, how, correction=False, n_acc=1, cbs=()):
    "`how(learn)` fits; with k=8, or n_acc of it by GradAccum"
    learn = quiet_learner(loaders(regression(64), 16//n_acc), Branches(), opt_func=opt_func, splitter=branch_groups,
        cbs=[ScaledLR(2, warmup_epochs=1.5, momentum_correction=correction), *([GradAccum(n_acc)] if n_acc>1 else []), *cbs])
    how(learn)
    return learn

def off(a, b): return (flat(a)-flat(b)).abs().max().item()

def assert_restores(opt, how, n_acc=1, cbs=lambda: []):
    "With the correction it is the training of the reference, without it another one"
    want = train(pairs[opt][1], how, n_acc=n_acc, cbs=cbs())
    assert off(train(pairs[opt][0], how, True, n_acc, cbs()), want) <= 1e-10
    assert off(train(pairs[opt][0], how, False, n_acc, cbs()), want) > 1e-5
    return want

def frozen(learn):
    for is_frozen,n_epoch in ((True,2),(False,2),(True,1),(False,1)):
        learn.freeze() if is_frozen else learn.unfreeze()
        learn.fit(n_epoch, slice(0.002,0.02))

hows = dict(
    groups=lambda learn: learn.fit_one_cycle(4, slice(0.004,0.03)),
    wd=lambda learn: learn.fit_flat_cos(4, slice(0.004,0.02), pct_start=0.3, wd=0.1),
    frozen=frozen)

@pytest.mark.parametrize('how,opt,n_acc', pairwise([*hows], [*pairs], [1,4]))
def test_correction_restores_the_reference(how, opt, n_acc): assert_restores(opt, hows[how], n_acc)

@pytest.mark.parametrize('opt,n_acc', [('fastai',2), ('torch',1)])
def test_correction_where_parameters_have_no_gradient_for_some_windows(opt, n_acc):
    "Their velocity stands still while the rate moves on"
    none = assert_restores(opt, hows['groups'], n_acc, lambda: [NoGrads()]).no_grads.none
    assert 2<sum(none)<len(none)  # There, gone and there again
    assert any(b and not a for a,b in zip(none, none[1:]))

# Where it is found

t_opt = lambda nm, **kwargs: partial(OptimWrapper, opt=getattr(torch.optim, nm), **kwargs)
without = [partial(SGD, mom=0.9, wd=0.1, decouple_wd=False), Adam, partial(RMSProp, mom=0.9), ranger,
    t_opt('SGD', momentum=0.9, nesterov=True, weight_decay=0.1), t_opt('Adam', amsgrad=True)]

@pytest.mark.parametrize('opt_func', without)
def test_correction_is_refused_where_there_is_nothing_to_correct(opt_func):
    learn = quiet_learner(loaders(regression(32), 4), Branches(), opt_func=opt_func, cbs=ScaledLR(2, momentum_correction=True))
    before = flat(learn).clone()
    with pytest.raises(ValueError, match="`momentum_correction` is for optimizers that keep the learning rate in their velocity"): learn.fit(1, 1e-3)
    assert torch.equal(flat(learn), before)

def test_velocity_of_an_optimizer_that_cannot_be_tried():
    "It needs a closure"
    with pytest.raises(ValueError, match='the trial failed: .*Leave out `momentum_correction`'):
        velocity_names(OptimWrapper(opt=torch.optim.LBFGS([nn.Parameter(torch.ones(2,2))], lr=0.1)))

# The gain

@cache
def best_rate(bs, noise=2., n=200_000):
    "Of one step of SGD on |w|^2/2 whose items have the gradient w + noise*N(0,1): E[w G]/E[G G], from samples"
    w = torch.tensor([1.,0.5,0,0,0], dtype=f64)
    g = w + noise*rand(n, len(w), seed=bs)/bs**0.5
    return ((g@w).mean()/(g*g).sum(1).mean()).item()

@pytest.mark.parametrize('k,base', [(0.5,16), (4,2), (16,2)])
def test_gain_is_the_ratio_of_the_best_rates(k, base):
    "eps_max/(1+Bn/B), with Bn = tr(S)/|G|^2 = 5*4/1.25"
    bn = 5*2.**2/1.25
    assert best_rate(base)==pytest.approx(1/(1+bn/base), rel=0.01)
    assert adascale_gain(k, bn, base)==pytest.approx(best_rate(int(k*base))/best_rate(base), rel=0.02)
