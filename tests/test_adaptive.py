"AdaptiveAccum: it follows a noise scale that is known, is GradAccum where it cannot move, and leaves nothing behind"
import math
import warnings
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import fastai.distributed # noqa: F401, it adds distrib_ctx
from torch import nn
from fastai.callback.core import CancelFitException, CancelTrainException
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import LRFinder, fit_one_cycle # noqa: F401, it adds the method
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.learner import load_learner
from fastai.optimizer import Adam, SGD
from fastai_bs.accumulate import GradAccum
from fastai_bs.adaptive import AdaptiveAccum, Change, followed, is_constant
from fastai_bs.batch_size import batch_size
from fastai_bs.lr import ScaledLR
from fastai_bs.noise import NoiseScale
from fastai_bs.scaling import adam_scaling, adascale_gain, capped_sqrt_scaling, linear_scaling, no_scaling, sqrt_scaling
from helpers import changes, distance, left_behind, loaders, mlp, needs_export, pairwise, quiet_learner, RaiseAt, regression, set_seed
from ranks import on_ranks
from test_noise import Losses, n_hooks, with_batchnorm

# A noise scale that is known

class Drift(nn.Module):
    "Its gradient is the mean of its inputs, whatever its weights"
    def __init__(self, n=50): super().__init__(); self.w = nn.Parameter(torch.zeros(n))
    def forward(self, x): return x@self.w

class MeanLoss(nn.Module):
    reduction = 'mean'
    def forward(self, p, y): return (p-y).mean()

def inputs(noise_scale, n, n_in=50, seed=0):
    "Items whose gradients have that noise scale, in the model `Drift`"
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, n_in, generator=g)*(noise_scale/n_in)**0.5
    x[:,0] += 1
    return x

class InOrder(DataLoader):
    "Batches as they come, without the time that it takes to put them together"
    def __init__(self, x, bs):
        super().__init__(list(x), bs=bs, num_workers=0)
        self.x = x
    def __iter__(self):
        for o in self.x.split(self.bs): yield o,torch.zeros(len(o))

def drift_learner(x, bs=8, opt_func=SGD, cbs=None, **kwargs):
    return quiet_learner(DataLoaders(InOrder(x, bs), InOrder(x[:bs], bs), device='cpu'), Drift(x.shape[1]), MeanLoss(), opt_func,
                         cbs=cbs or AdaptiveAccum(**kwargs))

def grows(n=1500, bs=4, n_epoch=1, noise_scale=128, opt_func=SGD, cbs=(), lr=1e-3, **kwargs):
    "A fit in which the batch grows within the first epoch"
    learn = drift_learner(inputs(noise_scale, n), bs, opt_func, [AdaptiveAccum(**{**dict(start=2, max_acc=16, beta=0.9), **kwargs}), *cbs])
    learn.fit(n_epoch, lr)
    return learn

# What it decides, as often as it takes to tell chance from rule

def standing(**kwargs):
    "One that is asked for its windows outside of a fit, with micro-batches of 8 items"
    a = AdaptiveAccum(**kwargs)
    a.learn,a.follows,a.micro_bs,a.most,a.per_epoch = SimpleNamespace(epoch=0, iter=0, n_iter=1),True,8,a.max_acc,10**9
    a.rows = [Change(0, 0, 0, a.start, 8*a.start, math.nan, 0., math.inf)]
    return a

def measured(a, noise_scale, n, rng, n_in=50):
    "`n` windows with the moments of exact gradients"
    for _ in range(n):
        K = a.n_acc_now()
        g = rng.normal(size=(K,n_in))*(noise_scale/n_in/8)**0.5
        g[:,0] += 1
        mean = g.mean(0)
        tr_sigma = 8*((g**2).sum()-K*mean@mean)/(K-1)
        a.own.pool.add(tr_sigma, mean@mean-tr_sigma/(8*K), 8*K)
        a.own.n_items += 8*K
        a._count()
    return a

@pytest.mark.slow
@pytest.mark.parametrize('beta', [0.95, 0.98, 0.99])
def test_a_step_by_8_is_followed(beta):
    "Half of the new noise scale is reached within 3/(1-beta) windows, 20 seeds of 20; a quarter within 2/(1-beta)"
    D = round(1/(1-beta))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a = measured(standing(start=2, max_acc=512, beta=beta), 100, 5*D, rng)
        assert a.df.bs.iloc[-1]==64, seed
        measured(a, 800, 3*D, rng)
        df = a.df[a.df.step>=5*D]
        assert df.bs.iloc[-1]==512 and df.step[df.bs>=200].min()<=7*D, seed

@pytest.mark.slow
@pytest.mark.parametrize('start,n_acc', [(2,[8,16]), (8,[8,16]), (16,[16]), (64,[64])], ids=['below','half','at','above'])
@pytest.mark.parametrize('beta', [0.9, 0.98])
def test_a_constant_noise_scale_is_left_at_peace(beta, start, n_acc):
    "Of 128 items, where 16 micro-batches are at the limit: after 3/(1-beta) windows at most one change, in 20 seeds of 20, and no size beyond it"
    for seed in range(20):
        D = round(1/(1-beta))
        a = measured(standing(start=start, max_acc=256, beta=beta), 128, 10*D, np.random.default_rng(seed))
        assert (a.df.step>3*D).sum()<=1, seed
        assert a.n_acc_at in n_acc, seed
        assert (a.df.step.diff().dropna()>=D).all(), seed

def test_it_shrinks_only_if_asked_to():
    for shrinks,least in ((True,4),(False,32)):
        rng = np.random.default_rng(0)
        a = measured(standing(start=4, max_acc=64, beta=0.9, shrinks=shrinks), 512, 60, rng)
        assert a.n_acc_at>=32
        measured(a, 16, 100, rng)
        assert a.n_acc_at==least or not shrinks and a.n_acc_at>=least

def test_target():
    "The batch size that is aimed at, in noise scales"
    sizes = [measured(standing(start=2, max_acc=512, beta=0.95, target=o), 100, 100, np.random.default_rng(0)).df.bs.iloc[-1] for o in (0.5,1,4)]
    assert sizes==[32,64,256]

@pytest.mark.parametrize('n_acc,low,high,kwargs,expected', [
    (2,31.9,math.inf,{},2), (2,32,math.inf,{},4), (1,64,math.inf,{},8), (1,math.inf,math.inf,{},64), (3,math.inf,math.inf,{},48),
    (2,0,0,{},2), (8,0,16,dict(least=1),2), (8,0,17,dict(least=1),4), (8,0,0,dict(least=2),2), (1,64,64,dict(target=0.5),4),
    (4,math.nan,math.nan,dict(least=1),4)])
def test_followed(n_acc, low, high, kwargs, expected): assert followed(n_acc, 8, low, high, 64, **kwargs)==expected

# In a fit

@pytest.mark.parametrize('k', [1, 3])
@pytest.mark.parametrize('opt_func', [partial(SGD, mom=0.9), Adam], ids=['sgd','adam'])
def test_where_it_cannot_move_it_is_grad_accum(k, opt_func):
    "Bit for bit: weights, buffers, optimizer state, losses, random numbers"
    def _trained(accum):
        set_seed(0)
        learn = quiet_learner(loaders(regression(91, dtype=torch.float32), 8, shuffle=True), with_batchnorm(), nn.MSELoss(), opt_func, wd=0.1,
                              cbs=[accum, Losses()])
        set_seed(2)
        learn.fit_one_cycle(2, 0.02)
        return learn, {**left_behind(learn), 'losses': (learn.losses.seen, [float(o) for o in learn.recorder.losses])}
    (_,plain),(learn,adaptive) = _trained(GradAccum(k)),_trained(AdaptiveAccum(start=k, max_acc=k, beta=0.5))
    assert changes(plain, adaptive)==[]
    assert len(learn.grad_accum.df)==1 and len(learn.grad_accum.noise.df)>=(8 if k>1 else 1)

class Used(RaiseAt):
    "Windows and rates that were used; raises nothing"
    order = ScaledLR.order+1
    def __init__(self): self.seen = []
    def before_step(self):
        accum = self.learn.grad_accum
        self.seen.append((accum.n_acc, batch_size(self.learn), accum.window.n_micro, self.opt.hypers[-1]['lr']))

def test_windows_and_rates_are_as_told():
    "A window is one size throughout, the rate goes with its root, and `df` says when"
    used = Used()
    learn = grows(cbs=[used], lr=0.01)
    accum,df = learn.grad_accum,learn.grad_accum.df
    assert len(df)>=3 and df.n_acc.iloc[-1]==16 and df.step.iloc[0]==df.n_items.iloc[0]==0
    assert len(used.seen)==accum.n_steps
    for i,(n_acc,bs,n_micro,lr) in enumerate(used.seen):
        row = df[df.step<=i].iloc[-1]
        assert (n_acc,bs)==(row.n_acc,row.bs) and (n_micro==n_acc or i==len(used.seen)-1)
        assert lr==pytest.approx(0.01*(n_acc/2)**0.5, rel=1e-12)
    assert (df.bs==4*df.n_acc).all()
    assert df.n_items.tolist()==[sum(4*o[2] for o in used.seen[:s]) for s in df.step]
    assert df.low[1:].ge(df.bs[1:]).all()
    assert learn.opt.hypers[-1]['lr']==0.01

@pytest.mark.parametrize('rule,factor', [(linear_scaling,8), (lambda k: k**0.25,8**0.25), (lambda k: dict(lr=k**0.5, eps=k**-0.5),8**0.5)],
                         ids=['linear','own','dict'])
def test_a_rule_of_ones_own(rule, factor):
    used = Used()
    grows(cbs=[used], rule=rule, opt_func=SGD if rule is linear_scaling else Adam)
    assert used.seen[-1][0]==16 and used.seen[-1][-1]==pytest.approx(1e-3*factor, rel=1e-12)

@pytest.mark.parametrize('rule', [capped_sqrt_scaling, adascale_gain])
def test_a_rule_that_goes_by_the_noise_scale(rule):
    used = Used()
    learn = grows(cbs=[used], rule=rule)
    f = rule(8, noise_scale=learn.grad_accum.noise.noise_scale, base_bs=8)
    assert used.seen[-1][-1]==pytest.approx(1e-3*f, rel=0.05) and used.seen[0][-1]==1e-3

def test_the_learners_scaled_lr_is_enough():
    "It goes by the real batch size, and nothing is added"
    used = Used()
    learn = grows(cbs=[ScaledLR(4, sqrt_scaling, warmup_epochs=0), used])
    assert used.seen[-1][0]==16 and used.seen[0][-1]==pytest.approx(1e-3*2**0.5) and used.seen[-1][-1]==pytest.approx(1e-3*4)
    assert sum(isinstance(o, ScaledLR) for o in learn.cbs)==1

def test_the_learners_noise_scale_is_followed():
    noise = NoiseScale(0.9, every=2)
    learn = grows(cbs=[noise])
    assert learn.grad_accum.noise is noise and noise.n_steps==learn.grad_accum.n_steps and learn.grad_accum.df.n_acc.iloc[-1]==16
    assert not learn.grad_accum.own.rows
    names = list(learn.recorder.metric_names)
    assert names.count('noise_scale')==1 and len(learn.recorder.values[-1])==len(names)-2

def test_from_parts_of_a_batch_to_windows():
    learn = grows(n=2500, start=1, bs=8)
    df,noise = learn.grad_accum.df,learn.grad_accum.noise.df
    first = df.step[1]
    assert first>200 and df.n_acc.iloc[-1]==8
    assert noise.step[noise.step<=first].tolist()==list(range(1, first+1, 40)) and (noise.step[noise.step>first].diff().dropna()==1).all()

def test_columns():
    learn = grows(n_epoch=2)
    accum,rec = learn.grad_accum,learn.recorder
    names = ['noise_scale','noise_low','noise_high','batch_size']
    assert list(rec.metric_names)[-5:]==[*names,'time']
    assert list(rec.values[-1])[-4:]==[accum.noise.noise_scale,*accum.noise.ci,64]
    assert len(rec.values)==2 and rec.noise.df.equals(accum.noise.df)

def test_no_more_than_an_epoch():
    learn = grows(n=120, n_epoch=8, max_acc=256, noise_scale=10_000)
    assert learn.grad_accum.rows[-1].n_acc==16 and batch_size(learn)==8 # Twice that would be more than the epoch's 30 micro-batches

def test_memory_does_not_grow_but_by_changes():
    learn = grows(n_epoch=6)
    assert len(learn.grad_accum.rows)<=4

# Fits one after the other

def test_a_new_fit_starts_anew():
    learn = grows()
    first = learn.grad_accum.df
    learn.model.w.data.zero_()
    learn.fit(1, 1e-3)
    pd.testing.assert_frame_equal(first, learn.grad_accum.df)

def ones(i): return torch.ones(50)
def zero(i): return 0.

@pytest.mark.parametrize('via', [None, 'export'])
def test_a_start_epoch_goes_on(via, tmp_path, monkeypatch):
    "Windows, moving means and history, also of a learner that was exported and loaded"
    monkeypatch.chdir(tmp_path)
    x = inputs(128, 200)
    def _learner(): return drift_learner(x, 4, start=2, max_acc=64, beta=0.95)
    whole,learn = _learner(),_learner()
    whole.fit(4, 1e-3)
    learn.fit(2, 1e-3)
    n,df = learn.grad_accum.n_steps,learn.grad_accum.df
    if via:
        needs_export()
        learn.path,learn.logger,dls = tmp_path,print,learn.dls
        learn.dls = DataLoaders.from_dsets(*2*[Datasets(list(range(8)), [[ones],[zero]])], bs=4, num_workers=0, device='cpu') # As any that can be exported
        learn.export('it.pkl')
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            learn = load_learner(tmp_path/'it.pkl')
        learn.dls,learn.logger = dls,lambda *args: None
        assert learn.grad_accum.df.equals(df)
    learn.fit(4, 1e-3, start_epoch=2)
    a,b = whole.grad_accum,learn.grad_accum
    pd.testing.assert_frame_equal(a.df, b.df, rtol=1e-9)
    assert len(b.df)>len(df)>1 and b.n_steps==a.n_steps>n and b.rows[-1].n_acc==a.rows[-1].n_acc>2
    np.testing.assert_allclose(b.noise.df.noise_scale, a.noise.df.noise_scale, rtol=1e-9)
    assert distance(learn, whole)<1e-6

def test_lr_find_is_at_the_start():
    "Nothing is measured or scaled, and the history stays"
    learn = grows()
    df = learn.grad_accum.df
    used = Used()
    learn.add_cb(used)
    learn.fit(1, cbs=LRFinder(num_it=120))
    assert {o[0] for o in used.seen}=={2} and learn.grad_accum.df.equals(df)
    assert not [o for o in learn.cbs if isinstance(o, (NoiseScale,ScaledLR))]

@cache
def one_that_ended(n_dim, n):
    learn = drift_learner(inputs(n_dim, n), 4, partial(SGD, mom=0.9), start=2, max_acc=16, beta=0.8)
    learn.fit_one_cycle(2, 1e-3)
    return learn

@pytest.mark.parametrize('event,exc,epoch', pairwise(['before_batch','after_pred','after_backward','before_step','after_step','after_train','before_validate'],
    [ValueError,KeyboardInterrupt,CancelFitException,CancelTrainException], [0,1], where=lambda e,x,_: not (x is CancelTrainException and 'a' in e and
    e in ('after_train','before_validate'))))
def test_nothing_is_left_behind(event, exc, epoch):
    "However a fit ends, in any epoch; the next one is as if there had been none"
    x = inputs(128, 400)
    stop = RaiseAt(event, exc, 40 if 'step' not in event and event not in ('after_train','before_validate') else None, epoch, order=100, times=1)
    if event in ('after_train','before_validate'): stop.due = lambda: stop.learn.epoch==epoch
    learn = drift_learner(x, 4, partial(SGD, mom=0.9), [AdaptiveAccum(start=2, max_acc=16, beta=0.8), stop])
    cbs = [type(o) for o in learn.cbs]
    try: learn.fit_one_cycle(2, 1e-3)
    except BaseException as e: assert exc in (type(e),type(e.__cause__),type(e.__context__)) or isinstance(e, exc)
    assert stop.raised==1
    assert [type(o) for o in learn.cbs if type(o).__name__!='ParamScheduler']==cbs
    assert not hasattr(learn, 'scaled_lr') and not hasattr(learn, 'noise_scale')
    assert n_hooks(learn.model)==0 and learn.grad_accum.on_window==[] and not any(p.grad.any() for p in learn.model.parameters() if p.grad is not None)
    assert '_do_epoch_train' not in vars(learn) and 'one_batch' not in vars(learn)
    learn.remove_cbs([stop, *(o for o in learn.cbs if type(o).__name__=='ParamScheduler')])
    learn.model.w.data.zero_()
    learn.create_opt()
    learn.fit_one_cycle(2, 1e-3)
    other = one_that_ended(128, 400)
    assert torch.equal(learn.model.w, other.model.w) and learn.grad_accum.df.equals(other.grad_accum.df) and len(other.grad_accum.df)>1

def test_momenta_and_rates_are_those_of_the_schedule():
    "After a fit with a rule that moves them"
    learn = grows(rule=lambda k: dict(lr=k**0.5, mom=k**0.5), opt_func=Adam)
    assert learn.opt.hypers[-1]['lr']==1e-3 and learn.opt.hypers[-1]['mom']==0.9

def test_repr():
    assert repr(AdaptiveAccum(2, 16))=='AdaptiveAccum(2 to 16)'
    assert repr(grows().grad_accum).startswith('AdaptiveAccum(2 to 16: 16, 64 items, at a noise scale of ')

# What is refused

@pytest.mark.parametrize('kwargs,exc,match', [
    (dict(start=0),ValueError,'`start` must be at least 1'), (dict(start=1.5),TypeError,'`start` must be a whole'), (dict(start=True),TypeError,'`start`'),
    (dict(start=4, max_acc=2),ValueError,'`max_acc` must be at least 4 .*not be below `start`'), (dict(max_acc='8'),TypeError,'`max_acc`'),
    (dict(target=0),ValueError,'`target`'), (dict(target=-1),ValueError,'`target`'), (dict(target='1'),TypeError,'`target`'),
    (dict(target=math.inf),ValueError,'`target`'),
    (dict(beta=0),ValueError,'`beta`'), (dict(beta=1),ValueError,'`beta`'), (dict(beta=None),TypeError,'`beta`'),
    (dict(rule='sqrt'),TypeError,'`rule` must be a function'), (dict(rule=no_scaling),ValueError,'no_scaling.*leaves it as it is'),
    (dict(rule=lambda k: 1),ValueError,'never end'), (dict(rule=lambda k: {'lr': 1., 'mom': k}),ValueError,'never end')], ids=range(16))
def test_arguments_that_are_refused(kwargs, exc, match):
    with pytest.raises(exc, match=match): AdaptiveAccum(**kwargs)

@pytest.mark.parametrize('rule', [None, sqrt_scaling, linear_scaling, capped_sqrt_scaling, adascale_gain,
    partial(capped_sqrt_scaling, noise_scale=64)], ids=range(6))
def test_rules_that_move(rule): assert rule is None or not is_constant(rule)

@pytest.mark.parametrize('cbs,match', [
    (lambda: [GradAccum(2)],'Only one callback can decide when to step'), (lambda: [GradientAccumulation(8)],'Only one callback can decide when to step'),
    (lambda: [ScaledLR(4, no_scaling)],'Beside AdaptiveAccum the rule of ScaledLR must move'), (lambda: [NoiseScale(), NoiseScale()],'2 NoiseScale'),
    (lambda: [MixUp()],'MixUp binds')], ids=['accum','fastai','constant','noise','mixup'])
def test_company_that_is_refused(cbs, match):
    learn = quiet_learner(loaders(regression(64, dtype=torch.float32), 8), mlp(dtype=torch.float32), cbs=[AdaptiveAccum(), *cbs()])
    before = [p.clone() for p in learn.model.parameters()]
    with pytest.raises(ValueError, match=match): learn.fit(1, 0.1)
    assert all(torch.equal(a,b) for a,b in zip(before, learn.model.parameters()))

def test_a_rule_beside_a_scaled_lr_is_refused():
    with pytest.raises(ValueError, match='give AdaptiveAccum no `rule`'): grows(rule=sqrt_scaling, cbs=[ScaledLR(4, sqrt_scaling)])

def test_a_rule_without_a_value_at_the_largest_size_is_refused_at_once():
    "Adam's momentum of 0.9 looks back on 10 batches: there is none for 16 times the size"
    learn = drift_learner(inputs(128, 64), 4, Adam, start=1, max_acc=16, rule=adam_scaling)
    with pytest.raises(ValueError, match='no momentum looks back over that few items'): learn.fit(1, 1e-3)
    assert not learn.model.w.any() and learn.grad_accum.n_acc_at==1
    drift_learner(inputs(128, 64), 4, Adam, start=1, max_acc=8, rule=adam_scaling).fit(1, 1e-3)

# On ranks

class OnDoubles(Drift):
    def __init__(self): super().__init__(); self.double()

def on_rank(rank, start, order=None):
    "A fit over the items in `order`, on this rank or in one process"
    items = [(o,torch.zeros((), dtype=torch.float64)) for o in inputs(128, 1536).double()]
    if order: items = [items[i] for i in order]
    set_seed(0)
    learn = quiet_learner(loaders(items, 4), OnDoubles(), MeanLoss(), partial(SGD, mom=0.9), cbs=AdaptiveAccum(start=start, max_acc=8*start, beta=0.9))
    with nullcontext() if rank is None else learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(2, 0.01)
    accum = learn.grad_accum
    return learn.model.w.detach().numpy(),accum.df,accum.noise.df,[list(o)[-4:] for o in learn.recorder.values]

@pytest.mark.slow
@pytest.mark.xdist_group('ranks')
def test_two_ranks_are_as_one_process():
    "That has the micro-batches of both by turns; the ranks agree to the last bit"
    a,b = on_ranks(on_rank, 2, 1)
    order = [768*r+4*i+j for i in range(192) for r in range(2) for j in range(4)]
    w,df,noise,values = on_rank(None, 2, order)
    assert np.array_equal(a[0], b[0]) and a[1].equals(b[1]) and a[2].equals(b[2]) and a[3]==b[3]
    assert df.n_acc.iloc[-1]==16 and len(df)>=3
    pd.testing.assert_frame_equal(a[1].assign(n_acc=2*a[1].n_acc), df, rtol=1e-9)
    np.testing.assert_allclose(a[2][noise.columns], noise, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(a[3], values, rtol=1e-9)
    np.testing.assert_allclose(a[0], w, rtol=1e-9)
