"ScaledLR and the optimizer: what a rule promises of Adam and SGD, and velocities that hold the rate"
import math
from functools import cache, partial

import pytest
import torch
from torch import nn
from fastai.callback import schedule # noqa: F401 (patches `fit_one_cycle` and its kin into `Learner`)
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.schedule import ParamScheduler
from fastai.optimizer import Adam, Lamb, Larc, Lookahead, OptimWrapper, Optimizer, QHAdam, RAdam, RMSProp, SGD, average_grad, ranger, weight_decay
from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.schedule.scaled_lr import ScaledLR, velocity_names
from fastai_bs.schedule.rules import adascale_gain, linear_scaling
from helpers import changes, flat, loaders, mlp, pairwise, picture, quiet_learner, RaiseAt, regression

f64 = torch.float64

def rand(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)

class Seen(Callback):
    "The hyper-parameters that each optimizer step was taken with, of each group"
    order = 100
    def __init__(self): self.hypers,self.started = [],False
    def before_train(self): self.started = True
    def before_step(self):
        if getattr(self.learn, 'grad_accum', None) is None or self.grad_accum.stepped: self.hypers.append([dict(h) for h in self.opt.hypers])

class Noisy(nn.Module):
    "Its output, summed over elements, has the gradient x + z for each item z"
    def __init__(self, n):
        super().__init__()
        self.x = nn.Parameter(torch.ones(n, dtype=f64))
    def forward(self, z): return self.x**2/2 + self.x*z

def item_mean(pred, targ): return pred.sum(1).mean()
count_items = lambda learn: len(learn.x)

def noisy_learner(zs, bs, opt_func, *cbs): return quiet_learner(loaders([(z,z[:1]) for z in zs], bs), Noisy(zs.shape[1]), item_mean, opt_func, cbs=cbs)

def hand_adam(zs, k, lr, mom, sqr_mom, eps):
    "Adam as Kingma and Ba have it, with the mean gradient of k items at a time"
    x,m,v = torch.ones(zs.shape[1], dtype=f64),0.,0.
    for t,z in enumerate(zs.split(k), 1):
        g = x + z.mean(0)
        m,v = mom*m + (1-mom)*g, sqr_mom*v + (1-sqr_mom)*g*g
        x = x - lr*(m/(1-mom**t))/((v/(1-sqr_mom**t))**0.5 + eps)
    return x

# Where a momentum has no value for the new batch size

def adam_learner(bs=2, n=32, opt_func=Adam, cbs=(), **kwargs):
    return quiet_learner(loaders(regression(n), bs), mlp(), opt_func=opt_func, cbs=[*cbs, Seen()], **kwargs)

def assert_refused(learn, match, fit='fit', *args, **kwargs):
    "Before anything has changed: neither parameters, nor gradients, nor state, nor hyper-parameters but those that the fit itself sets"
    own = lambda: [{nm: v for nm,v in h.items() if nm not in ('lr','wd')} for h in learn.opt.hypers]
    learn.create_opt()
    before,hypers = flat(learn).clone(),own()
    with pytest.raises(ValueError, match=match): getattr(learn, fit)(*args, **kwargs)
    assert torch.equal(flat(learn), before) and all(p.grad is None for p in learn.model.parameters())
    assert not any(set(st)-{'do_wd'} for st in vars(learn.opt).get('opt', learn.opt).state.values()) and own()==hypers
    assert not learn.seen.started and '_do_epoch_train' not in vars(learn) and not learn.lock.locked()

# SGD: k small steps and one large one

class Linear(nn.Module):
    "Linear in its weights, so that no step changes a gradient"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Parameter(rand(5, seed=1)),nn.Parameter(rand(5, seed=2))
    def forward(self, z): return (z@self.a + z.square()@self.b)[:,None]

def linear_learner(items, bs, cbs=(), opt_func=SGD, groups=False, **kwargs):
    splitter = (lambda m: [[m.a],[m.b]]) if groups else (lambda m: [list(m.parameters())])
    return quiet_learner(loaders(items, bs), Linear(), lambda pred,targ: pred.mean(), opt_func, cbs=cbs, splitter=splitter, **kwargs)

def linear_items(n): return [(z,z[:1]) for z in rand(n, 5, seed=3)]

@pytest.mark.parametrize('k,by,groups', pairwise([2,8,32], ['loader','GradAccum','both'], [False,True]))
def test_k_small_steps_are_one_large_one(k, by, groups):
    items,lr = linear_items(128),slice(0.01,0.1) if groups else 0.1
    n_acc = dict(loader=1, GradAccum=k, both=2)[by]
    small,large = linear_learner(items, 2, groups=groups),linear_learner(items, 2*k//n_acc, [ScaledLR(2, warmup_epochs=0), Seen(),
        *([GradAccum(n_acc, count=count_items)] if n_acc>1 else [])], groups=groups)
    for learn in (small,large): learn.fit(2, lr)
    assert len(large.seen.hypers)==2*64//k and len(small.recorder.lrs)==128
    assert (flat(small)-flat(large)).abs().max() <= 1e-13 < 0.01 < (flat(small)-flat(linear_learner(items, 2))).abs().max()
    z = torch.stack([x for x,_ in items]) # And where that is: mean gradient times the sum of the rates
    for p,g,rate in ((large.model.a,z,0.01 if groups else 0.1),(large.model.b,z**2,0.1)):
        assert (p.detach()-rand(5, seed=1 if p is large.model.a else 2)+128*rate*g.mean(0)).abs().max() <= 1e-12

@pytest.mark.parametrize('by,warmup,scale_wd,decouple_wd', pairwise(['loader','GradAccum'], [0,1.5], [True,False], [True,False]))
def test_weight_decay_against_the_closed_form(by, warmup, scale_wd, decouple_wd):
    "w <- (1-d)w - k lr g per step, where d is k lr wd, or lr wd with `scale_wd=False`"
    k,lr,wd,z = 8,0.05,0.3,rand(5, seed=3)
    acc = by=='GradAccum'
    learn = linear_learner([(z,z[:1])]*64, 2 if acc else 2*k, [ScaledLR(2, warmup_epochs=warmup, scale_wd=scale_wd), Seen(),
        *([GradAccum(k, count=count_items)] if acc else [])], partial(SGD, decouple_wd=decouple_wd))
    learn.fit(3, lr, wd=wd)
    n = 12 # Steps, 4 to the epoch
    fs = [1+(k-1)*min(1,i/4/warmup) if warmup else k for i in range(n)]
    for p,w,g in ((learn.model.a,rand(5, seed=1),z),(learn.model.b,rand(5, seed=2),z**2)):
        ds = [(f if scale_wd else 1)*lr*wd for f in fs]
        want = w*math.prod(1-d for d in ds) - sum(f*lr*math.prod(1-d for d in ds[i+1:])*g for i,f in enumerate(fs))
        if not warmup: # A geometric series
            a = 1-ds[0]
            assert torch.allclose(want, w*a**n - k*lr*g*(1-a**n)/(1-a), rtol=1e-12)
        assert (p.detach()-want).abs().max() <= 1e-12
    assert [h['wd']*h['lr'] for h, in learn.seen.hypers]==pytest.approx([(f if scale_wd else 1)*lr*wd for f in fs], rel=1e-12)
    assert learn.opt.hypers[0]['wd']==wd and learn.opt.hypers[0]['lr']==lr

def test_weight_decay_per_group():
    learn = linear_learner(linear_items(64), 16, [ScaledLR(2, warmup_epochs=0, scale_wd=False), Seen()], groups=True)
    learn.create_opt()
    learn.opt.set_hyper('wd', [0.1,0.4])
    learn.fit(1, slice(0.01,0.1))
    assert [[h['wd'] for h in hs] for hs in learn.seen.hypers]==[[0.1/8,0.4/8]]*4 and [h['wd'] for h in learn.opt.hypers]==[0.1,0.4]

# Velocities that hold the rate

def folded(nm):
    "fastai: v = mom*v + lr*g under the name `nm`"
    def _velocity(p, lr, mom, **kwargs):
        v = kwargs.get(nm)
        return {nm: (torch.zeros_like(p) if v is None else v).mul_(mom).add_(p.grad.data, alpha=lr)}
    _velocity.defaults = dict(mom=0.9)
    def _step(p, **kwargs): p.data.sub_(kwargs[nm])
    return [weight_decay, _velocity, _step]

def Folded(params, lr, nm='vel', **kwargs): return Optimizer(params, folded(nm), lr=lr, **kwargs)

class TorchFolded(torch.optim.Optimizer):
    "The same for torch"
    def __init__(self, params, lr, momentum=0.9, weight_decay=0., nm='buf'):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, nm=nm))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']:
                if p.grad is None: continue
                v = self.state[p].setdefault(g['nm'], torch.zeros_like(p))
                v.mul_(g['momentum']).add_(p.grad + g['weight_decay']*p, alpha=g['lr'])
                p.sub_(v)

pairs = { # The optimizer, its reference that keeps the rate out, and the names of their states
    'fastai': (Folded, partial(SGD, mom=0.9), 'vel', 'grad_avg'),
    'torch': (partial(OptimWrapper, opt=TorchFolded), partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9), 'buf', 'momentum_buffer'),
    'lookahead': (lambda params, lr: Lookahead(Folded(params, lr), k=3), lambda params, lr: Lookahead(SGD(params, lr, mom=0.9), k=3), 'vel', 'grad_avg')}

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
    "Leaves no gradient after a step, as torch's `zero_grad` does and fastai's does not"
    order = 100
    def after_step(self):
        for p in self.learn.model.parameters(): p.grad = None
        self.opt.zero_grad()
    def before_epoch(self):
        for p in self.learn.model.parameters(): p.grad = None

def branch_groups(m): return [list(m.one.parameters()),[*m.two.parameters(),*m.head.parameters()]]

def train(opt_func, how, correction=False, n_acc=1, warmup=1.5, n=64, cbs=(), no_grads=False, model=None):
    "`how(learn)` fits; with k=8, or n_acc of it by GradAccum"
    scaled = ScaledLR(2, warmup_epochs=warmup, momentum_correction=correction)
    learn = quiet_learner(loaders(regression(n), 16//n_acc), model or Branches(), opt_func=opt_func, splitter=branch_groups,
        cbs=[scaled, *([GradAccum(n_acc)] if n_acc>1 else []), *([NoGrads()] if no_grads else []), *cbs])
    learn.scaled = scaled
    how(learn)
    return learn

def off(a, b): return (flat(a)-flat(b)).abs().max().item()

hows = dict(
    fit=lambda learn: learn.fit(4, 0.02), # Warmup alone changes the rate
    one_cycle=lambda learn: learn.fit_one_cycle(4, 0.03, moms=(0.9,0.9,0.9)),
    moms=lambda learn: learn.fit_one_cycle(4, 0.03),
    flat_cos=lambda learn: learn.fit_flat_cos(4, 0.02, pct_start=0.3),
    sgdr=lambda learn: learn.fit_sgdr(2, 1, 0.02),
    groups=lambda learn: learn.fit_one_cycle(4, slice(0.004,0.03)),
    unlike=lambda learn: learn.fit(4, cbs=ParamScheduler({'lr': lambda pct: [0.01+0.02*pct,0.03-0.02*pct]})), # One group up, the other down
    wd=lambda learn: learn.fit_flat_cos(4, slice(0.004,0.02), pct_start=0.3, wd=0.1))

@cache
def referred(how, opt, n_acc): return train(pairs[opt][1], hows[how], n_acc=n_acc)

@pytest.mark.parametrize('how,opt,n_acc', pairwise([*hows], [*pairs], [1,2,4]))
def test_correction_restores_the_reference(how, opt, n_acc):
    assert off(train(pairs[opt][0], hows[how], True, n_acc), referred(how, opt, n_acc)) <= 1e-10

@pytest.mark.parametrize('how', hows)
def test_without_correction_it_is_another_training(how):
    "The test above would see it"
    assert off(train(pairs['fastai'][0], hows[how], False, 2), referred(how, 'fastai', 2)) > 1e-4

@pytest.mark.parametrize('n,n_acc', [(58,4), (58,1), (7,4)])
@pytest.mark.parametrize('opt', pairs)
def test_correction_with_ragged_windows(opt, n, n_acc):
    how = lambda learn: learn.fit_flat_cos(5, slice(0.004,0.02), pct_start=0.1)
    want = train(pairs[opt][1], how, n_acc=n_acc, n=n)
    assert off(train(pairs[opt][0], how, True, n_acc, n=n), want) <= 1e-10
    assert off(train(pairs[opt][0], how, False, n_acc, n=n), want) > 1e-5

@pytest.mark.parametrize('n_acc', [1,2])
@pytest.mark.parametrize('opt', ['fastai','torch'])
def test_correction_where_parameters_have_no_gradient_for_some_windows(opt, n_acc):
    "Their velocity stands still while the rate moves on"
    none = []
    class Missing(Callback):
        order = 99
        def before_step(self): none.append(any(p.grad is None for p in self.learn.model.two.parameters()))
    how = lambda learn: learn.fit_one_cycle(4, slice(0.004,0.03))
    want = train(pairs[opt][1], how, n_acc=n_acc, no_grads=True, cbs=[Missing()])
    assert 2<sum(none)<len(none) and any(b and not a for a,b in zip(none, none[1:])) # There, gone and there again
    assert off(train(pairs[opt][0], how, True, n_acc, no_grads=True), want) <= 1e-10
    assert off(train(pairs[opt][0], how, False, n_acc, no_grads=True), want) > 1e-4

@pytest.mark.parametrize('opt', pairs)
def test_correction_with_frozen_groups(opt):
    def how(learn):
        learn.freeze(); learn.fit(2, slice(0.02)); learn.unfreeze(); learn.fit(2, slice(0.002,0.02)); learn.freeze(); learn.fit(1, slice(0.002,0.02))
        learn.unfreeze(); learn.fit(1, slice(0.002,0.02))
    want = train(pairs[opt][1], how, warmup=1)
    assert off(train(pairs[opt][0], how, True, warmup=1), want) <= 1e-10
    assert off(train(pairs[opt][0], how, False, warmup=1), want) > 1e-4

@pytest.mark.parametrize('exc,event,order,n_acc', pairwise([CancelFitException,KeyboardInterrupt],
    ['before_batch','after_pred','before_step','after_batch'], [0,200], [1,4]))
def test_correction_over_a_fit_that_was_cut_short(exc, event, order, n_acc):
    "At a constant rate: the velocity waits at the schedule's own rate"
    def how(learn):
        try: learn.fit(3, slice(0.004,0.02))
        except KeyboardInterrupt: pass
        assert learn.raise_at.raised
        learn.fit(2, slice(0.004,0.02))
    cb = lambda: [RaiseAt(event, exc, 3, 1, order, 1)]
    assert off(train(pairs['fastai'][0], how, True, n_acc, cbs=cb()), train(pairs['fastai'][1], how, n_acc=n_acc, cbs=cb())) <= 1e-10

@pytest.mark.parametrize('second', ['fit','fit_one_cycle','fit_flat_cos'])
@pytest.mark.parametrize('opt', ['fastai','torch'])
def test_correction_from_one_fit_to_the_next_at_another_rate(opt, second):
    "The velocity is that of the rate that the first fit ended with, whatever `learn.lr` is"
    def how(learn):
        learn.fit(2, 0.02)
        getattr(learn, second)(2, 0.005)
    want = train(pairs[opt][1], how)
    assert off(train(pairs[opt][0], how, True), want) <= 1e-10

@pytest.mark.parametrize('opt', pairs)
def test_correction_through_a_rate_of_0(opt):
    "Which leaves nothing of the velocity: what comes after it starts from none"
    rates = lambda first: ParamScheduler({'lr': lambda pct: first if pct<0.25 else 0. if pct<0.5 else 0.02})
    fit = lambda first: train(pairs[opt][0], lambda learn: learn.fit(4, cbs=rates(first)), True, warmup=0)
    learn = fit(0.)
    assert flat(learn).isfinite().all() and 0.01 < off(learn, fit(0.01)) < 100 and off(learn, train(pairs[opt][0], lambda learn: None)) > 0.01

class Velocities(Callback):
    "After each epoch: the rates of the groups, and the state `nm` of each parameter"
    order = 100
    def __init__(self, nm): self.nm,self.seen = nm,[]
    def look(self):
        opt = vars(self.learn.opt).get('opt', self.learn.opt)
        self.seen.append([(h['lr'],opt.state[p][self.nm].clone()) for pg,h in zip(self.learn.opt.param_lists, self.learn.opt.hypers)
                          for p in pg if self.nm in opt.state[p]])
    def after_train(self): self.look()
    def before_validate(self): self.look()
    def after_epoch(self): self.look()
    def after_fit(self): self.look()

@pytest.mark.parametrize('opt,n_acc,how', pairwise([*pairs], [1,2,4], ['fit','groups','flat_cos']))
def test_between_epochs_the_velocity_is_of_the_own_rate(opt, how, n_acc):
    "lr*u, u the velocity of the reference and lr what the optimizer shows; in `after_train` too where nothing is scaled any more"
    ours,reference,v,u = pairs[opt]
    want,got = Velocities(u),Velocities(v)
    train(reference, hows[how], n_acc=n_acc, cbs=[want])
    learn = train(ours, hows[how], True, n_acc, cbs=[got])
    for spy in (want,got): spy.look() # After the fit
    assert len(got.seen)==len(want.seen)==14
    for i,(a,b) in enumerate(zip(got.seen, want.seen)):
        assert len(a)==len(b)==6
        for (lr,vel),(lr_ref,vel_ref) in zip(a, b):
            assert lr==lr_ref
            if i%3 or i>11: assert (vel-lr*vel_ref).abs().max() <= 1e-12*max(1, vel_ref.abs().max()) and vel.any()
    assert learn.scaled.factor==8

@pytest.mark.parametrize('nm', ['vel','v','momentum_buffer','grad_avg','exp_avg','step'])
def test_velocity_is_found_by_what_it_does(nm):
    p = nn.Parameter(rand(3))
    assert velocity_names(Folded([p], 0.1, nm=nm))==[nm]
    assert velocity_names(OptimWrapper([p], opt=partial(TorchFolded, nm=nm), lr=0.1))==[nm]
    assert velocity_names(Lookahead(Folded([p], 0.1, nm=nm)))==[nm]

def both_states(p, lr, mom, vel=None, slow=None, **kwargs):
    new = lambda v: torch.zeros_like(p) if v is None else v
    return dict(vel=new(vel).mul_(mom).add_(p.grad, alpha=lr), slow=new(slow).mul_(0.99).add_(p.grad, alpha=lr), rate=lr, one=torch.tensor(lr),
                ahead=p.data + lr*p.grad, empty=torch.zeros_like(p))

def test_only_those_states_that_hold_the_rate():
    opt = Optimizer([nn.Parameter(rand(3))], [average_grad, both_states], lr=0.1)
    assert sorted(velocity_names(opt))==['slow','vel']

class Extra(TorchFolded):
    "With an attribute of its own, which torch's optimizers do not take along when they are copied"
    def __init__(self, params, lr, **kwargs):
        super().__init__(params, lr, **kwargs)
        self.sign = 1.
    def step(self, closure=None):
        assert self.sign==1.
        return super().step(closure)

def test_velocity_of_an_optimizer_with_attributes_of_its_own():
    assert velocity_names(OptimWrapper([nn.Parameter(rand(3))], opt=Extra, lr=0.1))==['buf']

t_opt = lambda nm, **kwargs: partial(OptimWrapper, opt=getattr(torch.optim, nm), **kwargs)
without = dict(sgd=SGD, sgd_mom=partial(SGD, mom=0.9), sgd_l2=partial(SGD, mom=0.9, wd=0.1, decouple_wd=False), adam=Adam, rmsprop=RMSProp,
    rmsprop_mom=partial(RMSProp, mom=0.9), radam=RAdam, qhadam=QHAdam, larc=Larc, lars=partial(Larc, clip=False), larc_nomom=partial(Larc, mom=0.), lamb=Lamb,
    ranger=ranger, lookahead=lambda params, lr: Lookahead(SGD(params, lr, mom=0.9)), t_sgd=t_opt('SGD'), t_mom=t_opt('SGD', momentum=0.9),
    t_nesterov=t_opt('SGD', momentum=0.9, nesterov=True, weight_decay=0.1), t_adam=t_opt('Adam'), t_amsgrad=t_opt('Adam', amsgrad=True), t_adamw=t_opt('AdamW'),
    t_rmsprop=t_opt('RMSprop', momentum=0.9), t_nadam=t_opt('NAdam'), t_adagrad=t_opt('Adagrad'))
# An older torch fills Adagrad's state as it is made, so that it cannot be tried: such are refused in words
if torch.optim.Adagrad([nn.Parameter(torch.ones(2))]).state: del without['t_adagrad']

def stepped_opt(opt_func, n=2, dtype=f64):
    "An optimizer of two groups with some steps behind, and gradients left in `.grad`"
    ps = [nn.Parameter(rand(3, 2, seed=i).to(dtype)) for i in range(4)]
    opt = opt_func([ps[:2],ps[2:]], lr=0.1)
    opt.set_hyper('lr', [0.01,0.1])
    for i in range(n+1):
        for j,p in enumerate(ps): p.grad = rand(3, 2, seed=10*i+j).to(dtype)
        if i<n: opt.step()
    return opt

@pytest.mark.parametrize('n', [0,2])
@pytest.mark.parametrize('nm', without)
def test_no_velocity_in_these_and_untouched(nm, n):
    opt = stepped_opt(without[nm], n)
    before = picture(opt)
    assert velocity_names(opt)==[]
    assert changes(before, picture(opt))==[]

@pytest.mark.parametrize('nm,n,dtype', pairwise([*pairs], [0,2], [torch.float32,f64,torch.bfloat16,torch.float16]))
def test_velocity_in_these_and_untouched(nm, n, dtype):
    opt = stepped_opt(pairs[nm][0], n, dtype)
    before = picture(opt)
    assert velocity_names(opt)==[pairs[nm][2]]
    assert changes(before, picture(opt))==[]

@pytest.mark.parametrize('nm', without)
def test_correction_is_refused_where_there_is_nothing_to_correct(nm):
    learn = adam_learner(4, 32, without[nm], [ScaledLR(2, momentum_correction=True)])
    with pytest.raises(ValueError, match="`momentum_correction` is for optimizers that keep the learning rate in their velocity"): learn.fit(1, 1e-3)
    assert not learn.seen.started and torch.equal(flat(learn), torch.cat([p.detach().flatten() for p in mlp().parameters()]))

# The gain

def best_rate(w, bs, noise, n=200_000):
    "Of one step of SGD on |w|^2/2 whose items have the gradient w + noise*N(0,1): E[w G]/E[G G], from samples"
    g = w + noise*rand(n, len(w), seed=bs)/bs**0.5
    return ((g@w).mean()/(g*g).sum(1).mean()).item()

@pytest.mark.parametrize('base', [2,16])
@pytest.mark.parametrize('k', [0.5,4,16])
def test_gain_is_the_ratio_of_the_best_rates(k, base):
    "eps_max/(1+Bn/B), with Bn = tr(S)/|G|^2 = 5*4/1.25"
    w = torch.tensor([1.,0.5,0,0,0], dtype=f64)
    bn = 5*2.**2/1.25
    one,other = best_rate(w, base, 2.),best_rate(w, int(k*base), 2.)
    assert one==pytest.approx(1/(1+bn/base), rel=0.01)
    assert adascale_gain(k, bn, base)==pytest.approx(other/one, rel=0.02)

@pytest.mark.parametrize('by', ['loader','GradAccum'])
def test_gain_trains_where_the_linear_rule_diverges(by):
    "At a rate of 0.3 and k=16, 4.8 is beyond the 2 that x^2/2 bears; at a noise scale of twice the base batch the gain stays below 3"
    zs = 0.1*rand(512, 8)
    def _norm(*cbs):
        accum = [GradAccum(16, count=count_items)] if by=='GradAccum' else []
        learn = noisy_learner(zs, 4 if accum else 64, SGD, *cbs, *accum)
        learn.fit(2, 0.3)
        return flat(learn).abs().max().item()
    gain = 16*(4+8)/(64+8)
    x = torch.ones(8, dtype=f64)
    for z in torch.cat([zs,zs]).split(64): x = x - 0.3*gain*(x+z.mean(0))
    assert 0<x.abs().max().item()==pytest.approx(_norm(ScaledLR(4, adascale_gain, 0, noise_scale=8)), rel=1e-9) and x.abs().max()<0.1
    assert _norm(ScaledLR(4, linear_scaling, 0)) > 1e6 # 3.8**16

@pytest.mark.parametrize('name', ['Muon','LBFGS']) # The one needs matrices, the other a closure
def test_velocity_of_an_optimizer_that_cannot_be_tried(name):
    if not (opt_func := getattr(torch.optim, name, None)): pytest.skip(f'this torch has no {name}')
    with pytest.raises(ValueError, match='it cannot be tried: .*Leave out `momentum_correction`'):
        velocity_names(OptimWrapper(opt=opt_func([nn.Parameter(torch.ones(2,2))], lr=0.1)))

def test_velocity_with_an_empty_first_group(): assert velocity_names(Folded([[], [nn.Parameter(torch.ones(2))]], lr=0.1))==['vel']
