"ScaledLR: the rate of every optimizer step over every schedule, what a rule promises of an optimizer, and that nothing else is touched"
import math, warnings
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastai.callback import schedule # noqa: F401 (patches `fit_one_cycle` and its kin into `Learner`)
from fastai.callback.core import Callback, CancelBatchException, CancelStepException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import Adam, Optimizer, OptimWrapper, ranger, SGD, weight_decay
from fastai_bs.all import adam_gain, adascale_gain, BatchSchedule, GradAccum, linear_scaling, NoiseScale, ScaledLR, sqrt_scaling
from fastai_bs.finder.formulas import steps_anyway
from helpers import changes, flat, halves, hypers, loaders, mlp, momentum_sgd, pairwise, picture, quiet_learner, RaiseAt, regression

# Measures

def of(nm, seen): return np.array([[h[nm] for h in hs] for hs in seen])
def close(a, b): np.testing.assert_allclose(np.array(a, float), np.array(b, float), rtol=1e-12, atol=0)

def watched(opt_func):
    "`opt_func`, with the hyper-parameters of all groups at each step noted in the optimizer's `seen`"
    def _create(params, **kwargs):
        opt = opt_func(params, **kwargs)
        step,opt.seen = opt.step,[]
        def _step(closure=None):
            opt.seen.append([dict(h) for h in opt.hypers])
            step()
        opt.step = _step
        return opt
    return _create

def caught(f):
    "What `f` returns, and what it warns of"
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        return f(),[str(o.message) for o in w]

class Note(Callback):
    "What `f` says of the learner at `event`, after all other callbacks"
    order,run_valid = 1000,False
    def __init__(self, event, f=hypers):
        self.seen = []
        setattr(self, event, lambda: self.seen.append(f(self.learn)))

class Do(Callback):
    "`f` of the learner at `event` of the training batches for which `when` holds"
    run_valid = False
    def __init__(self, event, f, when=lambda learn: True, order=0):
        self.order = order
        setattr(self, event, lambda: f(self.learn) if when(self.learn) else None)

def set_lr(lr): return lambda learn: learn.opt.set_hyper('lr', lr)

def thirds(model):
    p = list(model.parameters())
    return [p[:2], p[2:3], p[3:]]

lrs = slice(1e-3,1e-1)
fits = dict(fit=lambda learn,lr=lrs,**kw: learn.fit(3, lr, **kw), one_cycle=lambda learn,lr=lrs,**kw: learn.fit_one_cycle(3, lr, **kw),
            sgdr=lambda learn,lr=lrs,**kw: learn.fit_sgdr(2, 1, lr, **kw))

items = lru_cache(None)(regression)
adamw = partial(OptimWrapper, opt=torch.optim.AdamW)

def learner(n=24, bs=4, cbs=(), opt_func=momentum_sgd, dls=None, **kwargs):
    return quiet_learner(dls or loaders(items(n), bs), mlp(), opt_func=watched(opt_func), splitter=thirds, cbs=list(cbs), **kwargs)

def ran(fit='fit', **kwargs):
    learn = learner(**kwargs)
    fits[fit](learn)
    return learn

@lru_cache(None)
def scheduled(fit, n, bs, opt_func=momentum_sgd):
    "What fastai alone sets at each micro-batch of each epoch"
    note = Note('before_batch')
    ran(fit, n=n, bs=bs, cbs=[note], opt_func=opt_func)
    n_iter = math.ceil(n/bs)
    return [note.seen[e*n_iter:(e+1)*n_iter] for e in range(3)]

def ramp(full, t, warmup): return full if warmup==0 else 1 + (full-1)*min(1, t/warmup)

# The rate of every step

# Items, items in a micro-batch, callbacks, batch size of each epoch
ways = dict(ragged=(22, 4, lambda: [], [4]*3), accum_1=(22, 4, lambda: [GradAccum(1)], [4]*3), ragged_both=(25, 2, lambda: [GradAccum(4)], [8]*3),
    growing=(28, 2, lambda: [GradAccum({0:1,2:4})], [2,2,8]), fastai_accum=(30, 2, lambda: [GradientAccumulation(7)], [8]*3))

@pytest.mark.parametrize('fit,way,warmup', pairwise([*fits], [*ways], [None,1.7]))
def test_rate_of_every_step_is_the_schedules_times_the_factor(fit, way, warmup):
    "f x s, per group, in the optimizer and as recorded; before and after, the schedule's own. A window is where the large batch would be"
    n,bs,cbs,sizes = ways[way]
    after,at_end = Note('after_batch'),Note('after_epoch')
    learn = ran(fit, n=n, bs=bs, cbs=[*cbs(), ScaledLR(2, warmup_epochs=warmup), after, at_end])
    ks = [1 if way=='fastai_accum' else size//bs for size in sizes] # Micro-batches in a batch of that loop
    s,n_iter,w = [scheduled(fit, n, k*bs)[e] for e,k in enumerate(ks)],math.ceil(n/bs),0.3 if warmup is None else warmup
    each = [[[h['lr']*ramp(sizes[e]/2, e+i/len(s[e]), w) for h in hs] for i,hs in enumerate(s[e])] for e in range(3)]
    want,mom = np.concatenate(each),of('mom', sum(s, []))
    if way=='fastai_accum': want,mom = want[3::4],mom[3::4] # Its step has what is set at its last micro-batch
    close(of('lr', learn.opt.seen), want)
    assert len({*np.ravel(want)})>=3
    assert (of('mom', learn.opt.seen)==mom).all()
    now = of('lr', [s[e][i//k] for e,k in enumerate(ks) for i in range(n_iter)])
    close(of('lr', after.seen), now)
    assert (of('lr', at_end.seen)==now[n_iter-1::n_iter]).all() # An epoch leaves the values of its last window
    if way=='fastai_accum': return
    close(learn.recorder.lrs, np.concatenate(each)[:,-1]) # Of the last group, at each step
    if fit!='fit': close(learn.recorder.hps['lr'], [each[e][i//k][-1] for e,k in enumerate(ks) for i in range(n_iter)]) # And at each micro-batch

@pytest.mark.parametrize('n_epoch,warmup', [(1,0.1),(20,2),(60,5)])
def test_default_warmup_is_a_tenth_of_the_fit(n_epoch, warmup):
    "A tenth of the fit, 5 epochs at most"
    learn = learner(n=4, bs=2, cbs=[ScaledLR(1)])
    learn.fit(n_epoch, 0.01)
    close(of('lr', learn.opt.seen)[:,0], [0.01*ramp(2, e+i/2, warmup) for e in range(n_epoch) for i in range(2)])

def gain(k, B, b): return (1+B/b)/(1+B/(k*b))
def root_of_noise(k, noise_scale=9, base_bs=None): return k**0.5*noise_scale*base_bs

rules = dict(gain_inf=(adascale_gain, math.inf, lambda k,b: k), plan=(adascale_gain, SimpleNamespace(noise_scale=30.), lambda k,b: gain(k, 30, b)),
    default_given=(root_of_noise, 5, lambda k,b: k**0.5*5*b),
    partial=(partial(adascale_gain, noise_scale=40), None, lambda k,b: gain(k, 40, b)))

@pytest.mark.parametrize('rule', rules)
def test_a_rule_is_handed_what_it_names(rule):
    "Growing and shrinking batches; what a rule names is handed to it"
    (f,noise,full),s = rules[rule],scheduled('one_cycle', 24, 4)
    for base_bs in (np.int64(2),16,2.5):
        learn = ran('one_cycle', cbs=[ScaledLR(base_bs, f, warmup_epochs=1, noise_scale=noise)])
        close(of('lr', learn.opt.seen), [[h['lr']*ramp(full(4/base_bs, base_bs), e+i/6, 1) for h in s[e][i]] for e in range(3) for i in range(6)])

def test_warmup_restarts_in_the_second_fit_of_fine_tune():
    def _run(*cbs):
        learn,s = learner(cbs=cbs),Note('before_batch')
        learn.fine_tune(4, 1e-2, freeze_epochs=2, cbs=s)
        return learn,s.seen
    (learn,_),(_,s) = _run(ScaledLR(1), GradAccum(2)),_run()
    at = [(e,i,n/10) for n in (2,4) for e in range(n) for i in range(0, 6, 2)]
    close(of('lr', learn.opt.seen), [[h['lr']*ramp(8, e+i/6, warmup) for h in hs] for (e,i,warmup),hs in zip(at, s[::2])])

@pytest.mark.parametrize('fit', ['fit','one_cycle'])
def test_start_epoch_goes_on_as_the_uninterrupted_fit(fit):
    whole,rest = (learner(cbs=[GradAccum({0:1,2:4}), ScaledLR(2, warmup_epochs=2.5)]) for _ in range(2))
    fits[fit](whole)
    fits[fit](rest, start_epoch=1)
    n = len(rest.opt.seen)
    assert 0<n<len(whole.opt.seen)
    close(of('lr', rest.opt.seen), of('lr', whole.opt.seen)[-n:])

# Bit-identical at the base batch size

@pytest.mark.parametrize('fit,n_acc,scale_wd,how', pairwise(['fit','one_cycle'], [None,4], [True,False],
    [(momentum_sgd,adascale_gain,50), (adamw,sqrt_scaling,None)]))
def test_bit_identical_at_the_base_batch_size(fit, n_acc, scale_wd, how):
    opt_func,rule,noise = how
    def _run(*cbs):
        note = Note('after_batch')
        learn = learner(n=9, bs=2, cbs=[*([GradAccum(n_acc)] if n_acc else []), note, *cbs], opt_func=opt_func, wd=0.1)
        fits[fit](learn)
        return learn,note.seen
    (a,seen_a),(b,seen_b) = _run(ScaledLR(2*(n_acc or 1), rule, noise_scale=noise, scale_wd=scale_wd)),_run()
    rec = lambda learn: (learn.opt.seen, learn.recorder.lrs, getattr(learn.recorder, 'hps', None), learn.recorder.losses, learn.recorder.values, hypers(learn))
    assert torch.equal(flat(a), flat(b))
    assert repr(rec(a))==repr(rec(b))
    assert repr(seen_a)==repr(seen_b)
    assert a.scaled_lr.factor==1
    assert len(a.opt.seen)==(6 if n_acc==4 else 15)

# Put back

class Overflows(Callback):
    "A scale on the CPU that is too large for the first steps"
    order = MixedPrecision.order+1
    def before_fit(self): self.learn.scaler = torch.amp.GradScaler('cpu', init_scale=2.**127)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('cb,n_acc,n_steps', [*((lambda exc=exc,order=order: [RaiseAt('before_step', exc, 5, order=order)],n_acc,range(5, 6))
        for exc,order,n_acc in pairwise([CancelStepException,CancelBatchException], [0,100], [1,3])),
    (lambda: [RaiseAt('before_batch', CancelBatchException, 17, order=-100)],3,[6]), (lambda: [MixedPrecision(),Overflows()],1,range(1, 6))])
def test_the_rate_is_given_back_where_there_is_no_step(cb, n_acc, n_steps):
    "Cancelled before and after it is scaled, with a window that the epoch leaves open, and by mixed precision; it is recorded as it was used"
    after = Note('after_batch')
    learn = learner(n=12*n_acc, bs=2, cbs=[*cb(), GradAccum(n_acc), ScaledLR(2*n_acc, lambda k: 3, warmup_epochs=0), after])
    learn.fit(1, 1.)
    assert len(learn.opt.seen) in n_steps
    assert [{*np.ravel(o)} for o in (of('lr', after.seen),of('lr', learn.opt.seen),learn.recorder.lrs)]==[{1.},{3.},{3.}]
    assert len(learn.recorder.lrs)>=5

@pytest.mark.parametrize('order,n_acc', [(0,3), (60.5,1)])
def test_a_rate_changed_in_before_batch_is_scaled_once(order, n_acc):
    "Each change is scaled once; within a window of GradAccum it comes into force with the next"
    halve = Do('before_batch', lambda learn: learn.opt.set_hyper('lr', 0.1/2**((learn.train_iter+1)//2)), lambda learn: learn.iter%2==1, order)
    learn = learner(n=24, bs=2, cbs=[halve, GradAccum(n_acc), ScaledLR(1, warmup_epochs=1)])
    learn.fit(2, 0.1)
    at = [(e,i) for e in range(2) for i in range(0, 12, n_acc)]
    close(of('lr', learn.opt.seen)[:,0], [0.1/2**(6*e+(i+1)//2)*ramp(2*n_acc, e+i/12, 1) for e,i in at])
    close(learn.opt.hypers[0]['lr'], 0.1/2**12)

@pytest.mark.parametrize('event,order,steps,left', [('after_loss',0,[6,18,18,18],3), ('before_step',100,[6,3,18,18],3), ('after_step',0,[6,6,18,18],3),
    ('after_batch',0,[6,6,18,18],3), ('after_batch',100,[6,6,18,18],3)])
def test_a_rate_changed_within_a_batch_stays(event, order, steps, left):
    "It is the schedule's own for each step that `ScaledLR` has not begun"
    learn = learner(n=24, bs=2, cbs=[Do(event, set_lr(0.03), lambda learn: learn.iter==5, order), GradAccum(3), ScaledLR(1, warmup_epochs=0)])
    _,words = caught(lambda: learn.fit(1, 0.01))
    close(of('lr', learn.opt.seen)[:,0], np.array(steps)/100)
    close(learn.opt.hypers[0]['lr'], left/100)
    assert sum('has set `lr`' in o for o in words)==((event,order) not in (('after_loss',0),('after_batch',100)))

class StepsDown(Callback):
    "Steps a scheduler of torch that multiplies the present rate"
    run_valid = False
    def __init__(self, event, order):
        self.order = order
        setattr(self, event, lambda: self.sched.step())
    def before_fit(self): self.sched = torch.optim.lr_scheduler.StepLR(self.opt.opt, 1, 0.5)

@pytest.mark.parametrize('event,order,grows', [('after_step',0,True), ('after_batch',ScaledLR.order+1,False)])
def test_a_scheduler_that_multiplies_the_rate(event, order, grows):
    "A scaled rate would be scaled again: that is warned of once, and the order that is advised is right"
    learn = learner(n=24, bs=4, cbs=[StepsDown(event, order), ScaledLR(2, warmup_epochs=0)], opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    _,words = caught(lambda: learn.fit(1, 0.01))
    assert sum('StepLR' in o and f'above {ScaledLR.order}' in o for o in words)==grows
    if not grows: close(learn.recorder.lrs, 0.02/2**np.arange(6))

def test_an_optimizer_without_weight_decay():
    "Its decay cannot be kept the same"
    learn = learner(cbs=[ScaledLR(2, scale_wd=False, warmup_epochs=0)], opt_func=partial(OptimWrapper, opt=torch.optim.Rprop))
    learn.fit(1, 0.01)
    close(learn.recorder.lrs, [0.02]*6)

# Mock trainings

def test_scaled_lr_keeps_still_under_lr_find(tmp_path):
    "The rates and weights of the learner without, and each time it says so; then it works"
    def _run(*cbs):
        learn = learner(n=24, bs=2, cbs=[GradAccum(2), *cbs], path=tmp_path)
        found,words = zip(*(caught(lambda: learn.lr_find(num_it=40, show_plot=False)) for _ in range(2)))
        said = [sum("today's batch of 4 items" in o and 'learn.remove_cb(ScaledLR)' in o for o in w) for w in words]
        assert said==([1,1] if cbs else [0,0])
        return learn,found,list(learn.recorder.lrs)
    (a,found_a,lrs_a),(b,found_b,lrs_b) = _run(ScaledLR(1)),_run()
    assert found_a==found_b
    assert lrs_a==lrs_b
    assert a.opt.seen==b.opt.seen
    assert len(lrs_a)>20
    assert torch.equal(flat(a), flat(b))
    a.opt.seen.clear()
    a.fit(1, 0.01)
    close(of('lr', a.opt.seen)[:,0], [0.01*ramp(4, i/12, 0.1) for i in range(0, 12, 2)])

# The noise scale

def test_a_noise_scale_that_runs_along_sets_the_factor():
    "No factor until its first window is measured, then that of its present value, at each window; so in the next fit too"
    noise = NoiseScale()
    note = Note('before_batch', lambda learn: noise.noise_scale)
    learn = learner(n=32, bs=2, cbs=[GradAccum(4), noise, note, ScaledLR(2, adascale_gain, noise_scale=noise, warmup_epochs=1.5)])
    for _ in range(2):
        learn.fit(3, 0.01)
        values = note.seen[::4]
        assert math.isnan(values[0])
        assert all(o>0 for o in values[1:])
        assert len({*values[1:]})==11
        f = [1] + [ramp(gain(4, o, 2) if o<math.inf else 4, i/4, 1.5) for i,o in enumerate(values) if i]
        close(of('lr', learn.opt.seen), np.outer(f, [0.01]*3))
        assert max(f)>1.01
        note.seen.clear()
        learn.opt.seen.clear()

def test_the_default_rule_for_adam_is_warned_about(opt_func=Adam):
    "Only where it scales. A plan takes AdaScale's gain for Adam too, where the rate is low"
    learn = learner(opt_func=opt_func, cbs=[ScaledLR(1, linear_scaling)])
    with pytest.warns(UserWarning, match='is a rule for SGD, and this optimizer divides by the size of the gradient.*rule=sqrt_scaling'): learn.fit(1, 0.01)
    others = (opt_func,ScaledLR(4, linear_scaling)),(opt_func,ScaledLR(1, adam_gain, noise_scale=64)),(momentum_sgd,ScaledLR(1, linear_scaling))
    for o in (learner(opt_func=f, cbs=[cb]) for f,cb in others): assert not [w for w in caught(lambda: o.fit(1, 0.01))[1] if 'rule' in w] # noqa: B023

def test_a_rule_and_a_noise_scale_belong_together():
    for rule in (adascale_gain, lambda k,noise_scale: k):
        with pytest.raises(ValueError, match='needs the noise scale, so `noise_scale` must be given'): ScaledLR(2, rule)
    for rule in (sqrt_scaling, np.sqrt):
        with pytest.warns(UserWarning, match='takes no noise scale, so the one given has no effect') as w: ScaledLR(2, rule, noise_scale=30)
        assert len(w)==1
        assert w[0].filename==__file__

# Weight decay

@pytest.mark.parametrize('fit,opt_func,n_acc', [('fit',partial(SGD, decouple_wd=False),1), ('one_cycle',adamw,3)])
def test_scale_wd_is_whether_the_decay_of_a_step_goes_with_the_rate(fit, opt_func, n_acc):
    "False: lr*wd of each group at each step is that without ScaledLR; True: wd is left alone. Afterwards it is put back"
    def _run(*cbs):
        learn,after = learner(n=24, bs=4, cbs=[GradAccum(n_acc), *cbs], opt_func=opt_func),Note('after_batch')
        learn.create_opt()
        fits[fit](learn, cbs=after, wd=[0.1,0.,0.02])
        assert (of('wd', after.seen)==[[0.1,0.,0.02]]*18).all()
        assert (of('wd', [hypers(learn)])==[[0.1,0.,0.02]]).all()
        return of('lr', learn.opt.seen),of('wd', learn.opt.seen),learn
    (lr,wd,_),(lr_same,wd_same,_),(lr0,wd0,_) = _run(ScaledLR(1, scale_wd=False, warmup_epochs=1)),_run(ScaledLR(1, warmup_epochs=1)),_run()
    close(lr*wd, lr0*wd0)
    close(lr, lr_same)
    assert (wd_same==wd0).all()
    assert (wd[6//n_acc:,0]<0.1/3.9).all()
    assert lr[-1,0]/lr0[-1,0]==pytest.approx(4*n_acc, rel=1e-12)

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

def train(opt_func, how, correction=False, n_acc=1):
    "`how(learn)` fits; with k=8, or n_acc of it by GradAccum"
    learn = quiet_learner(loaders(regression(64), 16//n_acc), mlp(), opt_func=opt_func, splitter=halves,
        cbs=[ScaledLR(2, warmup_epochs=1.5, momentum_correction=correction), *([GradAccum(n_acc)] if n_acc>1 else [])])
    how(learn)
    return learn

def off(a, b): return (flat(a)-flat(b)).abs().max().item()

def between(learn):
    "Fits without `ScaledLR` before and after, and `lr_find`"
    scaled = learn.scaled_lr
    scaled.warmup_epochs = 0
    def _plain():
        with learn.removed_cbs(scaled): learn.fit(1, 0.005)
    _plain()
    learn.fit(1, 0.005)
    with TemporaryDirectory() as folder:
        learn.path = Path(folder)
        learn.lr_find(stop_div=False, show_plot=False)
    learn.fit(1, 0.005)
    _plain()

hows = dict(between=between,
    groups=lambda learn: learn.fit_one_cycle(4, slice(0.004,0.03)),
    wd=lambda learn: learn.fit_flat_cos(4, slice(0.004,0.02), pct_start=0.3, wd=0.1))

@pytest.mark.parametrize('how,opt,n_acc', pairwise([*hows], [*pairs], [1,4]))
def test_correction_restores_the_reference(how, opt, n_acc):
    "Without the correction it is another training"
    (folded,reference),how = pairs[opt],hows[how]
    want = train(reference, how, n_acc=n_acc)
    assert off(train(folded, how, True, n_acc), want) <= 1e-10
    assert off(train(folded, how, False, n_acc), want) > 1e-5

# Where there is none

t_opt = lambda nm, **kwargs: partial(OptimWrapper, opt=getattr(torch.optim, nm), **kwargs)
without = [partial(SGD, mom=0.9, wd=0.1, decouple_wd=False), Adam, ranger, t_opt('SGD', momentum=0.9, nesterov=True, weight_decay=0.1)]

@pytest.mark.parametrize('opt_func', without)
def test_correction_is_refused_where_there_is_nothing_to_correct(opt_func):
    learn = quiet_learner(loaders(regression(32), 4), mlp(), opt_func=opt_func, cbs=ScaledLR(2, momentum_correction=True))
    before = flat(learn).clone()
    with pytest.raises(ValueError, match="`momentum_correction` is for optimizers that keep the learning rate in their velocity"): learn.fit(1, 1e-3)
    assert torch.equal(flat(learn), before)

# Bad input

@pytest.mark.parametrize('kwargs,exc', [(dict(base_bs=0), ValueError), (dict(base_bs=math.inf), ValueError), (dict(base_bs=True), TypeError),
    (dict(base_bs='64'), TypeError), (dict(base_bs=0.1), ValueError), (dict(rule=2), TypeError),
    (dict(warmup_epochs=-1), ValueError), (dict(warmup_epochs='5'), TypeError),
    (dict(noise_scale='7'), TypeError), (dict(noise_scale=SimpleNamespace(noise_scale='7')), TypeError), (dict(noise_scale=math.nan), ValueError)], ids=str)
def test_bad_arguments_are_refused(kwargs, exc):
    with pytest.raises(exc, match=f'`{[*kwargs][0]}` must '): ScaledLR(**{'base_bs': 8, 'rule': adascale_gain, **kwargs})

@pytest.mark.parametrize('cbs,exc,match', [*(([ScaledLR(2, lambda k,res=res: res)], exc, match) for res,exc,match in [
        (math.nan, ValueError, 'above 0 and finite, got nan at k=2'), (-1., ValueError, 'got -1.0'), (torch.tensor(2.), TypeError, r'got tensor\(2.\)')]),
    ([ScaledLR(2), ScaledLR(4)], ValueError, 'learner has 2 ScaledLR: remove the others'),
    ([ScaledLR(2, lambda k: k if k<3 else math.nan), GradAccum({1:2})], ValueError, 'got nan'), # Right for the small batches of the first epoch
    ([ScaledLR(2, adascale_gain, noise_scale=NoiseScale())], ValueError, 'not known.*never will be.*add it to them, or give a number')])
def test_what_cannot_be_scaled_is_refused_before_anything_has_changed(cbs, exc, match):
    "Nor anything drawn; without the callback the learner then fits as ever, and with it validates as ever"
    learn,twin = (learner(opt_func=momentum_sgd) for _ in range(2))
    with learn.added_cbs(cbs): assert learn.validate()==twin.validate()
    for l in (learn,twin): l.fit(1, 0.01)
    before = picture(learn, only=('model','opt'))
    with pytest.raises(exc, match=match): learn.fit(2, 0.01, cbs=cbs)
    assert changes(before, picture(learn, only=('model','opt')))==[]
    assert not learn.lock.locked()
    for l in (learn,twin): l.fit(2, 0.01)
    assert torch.equal(flat(learn), flat(twin))

def few(f): return [o[o.index('only'):o.index('.')] for o in caught(f)[1] if 'a training needs about 80' in o]

@pytest.mark.parametrize('cbs,n_epoch,says', [([ScaledLR(2)],9,'only 54 optimizer steps, at 2 times the rate'), ([ScaledLR(2)],14,None),
    ([ScaledLR(1),GradAccum(2)],20,'only 60 optimizer steps, at 8 times the rate'), ([ScaledLR(4),GradAccum({0:1,2:4})],4,None), ([ScaledLR(3)],9,None),
    ([GradAccum({0:2,3:4}),ScaledLR(2)],4,'only 11 optimizer steps, at 4 times the rate'), ([BatchSchedule({0:4,2:8}, linear_scaling)],4,None)], ids=str)
def test_few_steps_for_a_rate_are_warned_about(cbs, n_epoch, says):
    "Fewer than any batch size needs, all of them at twice the rate or more: said once in a fit"
    assert few(lambda: learner(cbs=cbs).fit(n_epoch, 1e-4))==([says] if says else [])

def test_few_steps_are_of_what_is_trained():
    "From `start_epoch` on, and not where a rate or a plan is looked for; as many as plans reckon with, a floor above"
    learn = learner(cbs=[ScaledLR(2)])
    assert few(lambda: learn.fit(14, 1e-4, start_epoch=9))==['only 30 optimizer steps, at 2 times the rate']
    assert few(lambda: learn.fine_tune(9, 1e-4))==['only 54 optimizer steps, at 2 times the rate'] # Not of its frozen epoch
    for f in (learn.lr_find,partial(learn.bs_find, 0.01, num_it=24)): assert few(lambda: f(show_plot=False))==[] # noqa: B023
    assert ScaledLR.steps_anyway==steps_anyway

def test_a_warmup_that_is_longer_than_the_fit_is_warned_about():
    learn = learner(cbs=[ScaledLR(1, warmup_epochs=5)])
    with pytest.warns(UserWarning, match='is longer than the fit: the warmup lasts 2 epochs, .*gets no more than 40% of the way from 1'): learn.fit(2, 0.01)
    close(of('lr', learn.opt.seen)[-1,0], 0.01*(1+3*(2-1/6)/5))

def test_the_rate_is_given_back_where_the_step_fails():
    def _fail(learn):
        def _step(): raise ZeroDivisionError
        learn.opt.step = _step
    learn = learner(cbs=[Do('before_step', _fail, lambda learn: learn.train_iter==2), ScaledLR(2, lambda k: 3, warmup_epochs=0)])
    with pytest.raises(ZeroDivisionError): fits['one_cycle'](learn)
    own = of('lr', sum(scheduled('one_cycle', 24, 4), []))
    close(of('lr', learn.opt.seen), 3*own[:2])
    close(of('lr', [hypers(learn)]), own[[2]])
