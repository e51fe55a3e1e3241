"What says that a plan would mean nothing: a loss over pairs or a wrong `count`, a rate too high, and a model that has learned nothing"
import math
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler # noqa: F401 (patches `fit_one_cycle` into `Learner`)
from fastai.losses import CrossEntropyLossFlat, MSELossFlat
from fastai_bs.finder import bs_find as finder # noqa: F401 (patches `bs_find` into `Learner`)
from fastai_bs.all import GradAccum
from fastai_bs.accumulate.losses import ElementCounter
from fastai_bs.finder.loss_checks import guess_loss, is_too_high, looks_at_pairs, LossPath
from helpers import changes, loaders, mlp, picture, quiet_learner, regression

f32 = torch.float32
reals = regression(64, dtype=f32)
kinds = [(x,(y[0]>0).long()) for x,y in reals]
kept = [(x,y.masked_fill(y<0.5*(i%3-1), 0)) for i,(x,y) in enumerate(reals)] # A 0 does not count; items differ in how many do

# Losses that look at pairs, or that are no mean over items

def info_nce(pred, targ): return F.cross_entropy(pred@targ.T, torch.arange(len(pred)))

def over_kept(pred, targ): return (F.mse_loss(pred, targ, reduction='none')*(targ!=0)).sum()/(targ!=0).sum()
def not_a_sum(pred, targ): return F.mse_loss(pred, targ)
not_a_sum.reduction = 'sum'

class Views(Callback):
    "Brings a loss"
    def __init__(self, f): self.f = f
    def lf(self, pred, targ): return self.f(pred, targ)

bad = dict(info_nce=(info_nce,reals,None), of_a_callback=(Views(info_nce).lf,reals,None), tokens=(over_kept,kept,None),
    wrong_count=(over_kept,kept,lambda learn: learn.y.numel()),
    wrong_count_of_a_known_loss=(nn.MSELoss(),kept,lambda learn: (learn.y!=0).sum()), not_a_sum=(not_a_sum,reals,None))

# Losses that are what is taken from them

def per_item(pred, targ): return ((pred-targ)**2).sum(-1).mean()
good = dict(per_item=(per_item,reals,None), items_of_a_callback=(Views(per_item).lf,reals,None),
    counted=(over_kept,kept,lambda learn: (learn.y!=0).sum()), flat=(MSELossFlat(),reals,None),
    weighted=(CrossEntropyLossFlat(weight=torch.tensor([1.,9.])),kinds,None),
    summed=(nn.MSELoss(reduction='sum'),reals,lambda learn: len(learn.x)))

# Those that cannot be asked

def drawn(pred, targ): return (per_item(pred, targ)*(1+torch.rand(()))) if random.random()<2 and np.random.rand()<2 else None
def whole_only(pred, targ):
    if len(pred)==4: raise ValueError
    return info_nce(pred, targ)
elsewhere = {'n': 8.}

mute = dict(drawn=(drawn,reals,None), whole_only=(whole_only,reals,None),
    count_from_elsewhere=(info_nce,reals,lambda learn: elsewhere['n']))

def first_batch(loss_func, items, count=None):
    learn = quiet_learner(loaders(items, 8), mlp(dtype=f32), loss_func)
    learn.create_opt()
    x,y = (torch.stack([torch.as_tensor(o) for o in os]) for os in zip(*items[:8]))
    learn.xb,learn.yb,learn.pred,learn.loss_grad = (x,),(y,),learn.model(x).detach(),torch.zeros(())
    counter = ElementCounter(count)
    counter(learn)
    return looks_at_pairs(learn, counter)

@pytest.mark.filterwarnings('ignore:Nothing tells')
@pytest.mark.parametrize('nm', [*bad,*good,*mute])
def test_losses_that_look_at_pairs_are_told_from_others(nm): assert first_batch(*{**bad,**good,**mute}[nm])==(nm in bad)

# In a plan

def planned(loss_func, items, count=None, lr=0.01):
    learn = quiet_learner(loaders(items, 4), mlp(dtype=f32), loss_func, cbs=[GradAccum(1, count=count)] if count else None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        was = picture(learn)
        res = learn.bs_find(lr, num_it=80, n_batch=4, tol=0, show_plot=False)
        assert changes(was, picture(learn))==[]
    return res

@pytest.mark.parametrize('nm,lr', [('info_nce',0.), ('wrong_count',0.01)])
def test_a_plan_names_a_loss_over_pairs(nm, lr, short):
    res = planned(*bad[nm], lr=lr)
    assert res.verdict=='pairs'
    assert res.to_dict()['measured']['pairs']
    assert 'needs another `count=` or `reduction`, or it compares the items of a batch' in ' '.join(repr(res).split())

# A rate too high

nan = math.nan
pred,targ = torch.tensor([[1.],[2.],[3.],[4.],[5.]]),torch.tensor([[1.],[2.],[3.],[5.],[8.]])

def case(yb=(targ,), loss_func=None, pred=pred):
    return SimpleNamespace(pred=pred, yb=yb, loss_func=loss_func or nn.MSELoss(), loss=torch.tensor(2.))

# The loss of a guess

def test_the_loss_of_a_guess_by_hand():
    "Each item has the target of the one two before it, half a batch of five"
    assert guess_loss(case())==((1-5)**2+(2-8)**2+(3-1)**2+(4-2)**2+(5-3)**2)/5

def by_name(pred, targ): return nn.functional.mse_loss(pred, targ['y'])+0*targ['more'][0].sum()
def two(pred, a, b): return nn.functional.mse_loss(pred, a)+nn.functional.l1_loss(pred, b)

@pytest.mark.parametrize('yb,loss_func', [(({'y': targ, 'more': [targ]},),by_name), ((targ,targ),two)], ids=['nested','two'])
def test_a_guess_keeps_the_targets_of_an_item_together(yb, loss_func):
    rolled = targ.roll(2, 0)
    there = loss_func(pred, *(rolled,rolled) if len(yb)==2 else ({'y': rolled, 'more': [rolled]},))
    assert guess_loss(case(yb, loss_func))==there

# The answer

def rows(losses, guesses, n=8, sd=0.05, seed=0):
    rng,res = np.random.default_rng(seed),[]
    for loss,guess in zip(losses, guesses):
        loss,guess = (o+sd*rng.standard_normal(n) for o in (loss,guess))
        res.append([n, loss.sum(), (loss**2).sum(), guess.sum(), ((guess-loss)**2).sum()])
    return np.array(res)

at = np.linspace(0, 1, 21)
def along(start, way, end): return np.where(at==0, start, np.where(at>=0.9, end, way))
def answer(losses, guesses=(2.3,2.3), **kwargs): return is_too_high(at, rows(along(*losses), along(guesses[0], nan, guesses[1]), **kwargs), 0.9)

@pytest.mark.parametrize('losses,guesses,res', [((2.3,4,2.3),(2.3,2.3),True), ((2.3,2.6,2.32),(2.3,2.32),True), ((8.6,1e4,8.1),(8.6,8.1),True),
    ((0.7,1e4,37),(0.75,80),True), ((0.3,0.6,0.6),(1.2,0.6),True), # Flung away, from new weights and from others
    ((0.3,0.4,0.33),(1.2,1.1),False), ((0.05,0.6,0.2),(10,12),False), # Begun anew
    ((2.3,2.3,2.3),(2.3,2.3),False), ((2.3,2.4,2.29),(2.3,2.29),False), # It hardly moves
    ((2.3,1,0.5),(2.3,8),False), ((100,20,8),(100,8),False), # It falls
    ((0.69,1.5,0.5),(0.69,0.75),False), ((0.3,0.6,0.6),(nan,nan),False)])
def test_when_a_rate_is_too_high(losses, guesses, res):
    for seed in range(5): assert answer(losses, guesses, seed=seed)==res
    assert answer([2*o+100 for o in losses], [2*o+100 for o in guesses], sd=0.1)==res # Whatever the loss counts in and from

@pytest.mark.parametrize('seed', range(5))
def test_guesses_that_scatter_are_no_alarm(seed):
    "A regression learned by heart, whose guesses are far off and differ much: by how much says nothing of how well the start was guessed"
    rng = np.random.default_rng(seed)
    sums = rows(along(2.8, 9.5, 0.33), along(2.7, nan, 23), n=8, sd=0.1, seed=seed)
    off = 8*rng.standard_normal((len(at),8))*(at>=0.9)[:,None]
    sums[:,3] += off.sum(1)
    sums[:,4] = ((sums[:,3:4]/8-sums[:,1:2]/8+off-off.mean(1, keepdims=True))**2).sum(1)
    assert not is_too_high(at, sums, 0.9)

# Has it learned anything?

@pytest.mark.parametrize('loss,guess,n,res', [(2.3,2.3,8,False), (2.2,2.3,8,True), (2.3,2.2,8,False), (2.3,nan,8,True), (2.3,2.3,2,True)])
def test_a_model_has_learned_if_it_ends_below_a_guess(loss, guess, n, res):
    "With a hundred micro-batches at the end or more, whatever the loss counts from"
    for start in (0,100):
        path,sums = LossPath(0.5),rows([start+loss]*41, [start+guess]*41, n=n, seed=3)
        path.at,path.sums = np.linspace(0, 1, 41).tolist(),lambda on_ranks: sums.copy() # noqa: B023
        assert path.learned()==res
