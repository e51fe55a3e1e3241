"A loss over pairs within the batch, or a wrong `count`: told from others, and named by a plan"
import random
import warnings

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
from fastai_bs.finder.alarms import looks_at_pairs
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
class Norm(nn.Module):
    "A running mean in a buffer that has no part in the loss"
    def __init__(self):
        super().__init__()
        self.register_buffer('n', torch.zeros(()))
        self.log = []
    def forward(self, pred, targ):
        self.n += 1
        self.log.append(float(self.n))
        return per_item(pred, targ)

good = dict(per_item=(per_item,reals,None), items_of_a_callback=(Views(per_item).lf,reals,None), module=(Norm(),reals,None),
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

@pytest.mark.filterwarnings('ignore:GradAccum cannot tell')
@pytest.mark.parametrize('nm', [*bad,*good,*mute])
def test_losses_that_look_at_pairs_are_told_from_others(nm): assert first_batch(*{**bad,**good,**mute}[nm])==(nm in bad)

# In a plan

def plan(loss_func, items, count=None, lr=0.01):
    learn = quiet_learner(loaders(items, 4), mlp(dtype=f32), loss_func, cbs=[GradAccum(1, count=count)] if count else None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        was = picture(learn)
        res = learn.bs_find(lr, num_it=80, n_batch=4, tol=0, show_plot=False)
        assert changes(was, picture(learn))==[]
    return res

@pytest.mark.parametrize('nm,lr', [('info_nce',0.), ('wrong_count',0.01)])
def test_a_plan_names_a_loss_over_pairs(nm, lr, short):
    res = plan(*bad[nm], lr=lr)
    assert res.verdict=='pairs'
    assert res.to_dict()['measured']['pairs']
    assert 'needs another `count=` or `reduction`, or it compares the items of a batch' in res.advice

def test_a_plan_names_no_mean_over_items(short):
    res = plan(*good['per_item'])
    assert not res.measured.pairs
    assert 'pairs' not in res.advice
