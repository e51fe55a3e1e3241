"Models in half precision: the gradient of a window is what its items' is in float64, but for a rounding"
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.optimizer import SGD
from fastai_bs.all import GradAccum, NoiseScale
from helpers import loaders, mlp, quiet_learner, regression
from gloo_ranks import on_ranks
from test_grad_accum import CancelLast, Spy
from test_oom import Strike

halves = {torch.bfloat16: 0.004, torch.float16: 0.0006} # The bound on the relative error. Sums in half precision: 0.018 and 0.0025 with 256 micro-batches

def items_of(n, dtype): return [(x.to(dtype),y.to(dtype)) for x,y in regression(n)]

def net(dtype): return mlp(n_hid=16).to(dtype)

def learner(dtype, n=512, bs=2, n_acc=256, cbs=(), **kwargs):
    return quiet_learner(loaders(items_of(n, dtype), bs), net(dtype), opt_func=Spy, cbs=[GradAccum(n_acc, **kwargs), *cbs])

def oracle(model, items):
    "The gradient of `items` in float64"
    model = deepcopy(model).double()
    model.zero_grad()
    x,y = (torch.stack(o).double() for o in zip(*items))
    nn.MSELoss()(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

def off(learn, items=None):
    "The relative error of the first step"
    want = oracle(learn.model, items or list(learn.dls.train.dataset))
    return ((learn.opt.grads[0].double()-want).norm()/want.norm()).item()

@pytest.mark.parametrize('dtype', halves, ids=str)
def test_the_windows_gradient(dtype):
    learn = learner(dtype)
    learn.fit(1, 0.1)
    assert len(learn.opt.grads)==1
    assert off(learn)<halves[dtype]

def test_small_gradients_in_float16():
    "Divided by 256 first they would have few bits left"
    learn = learner(torch.float16)
    learn.loss_func = lambda pred,targ: nn.functional.mse_loss(pred, targ)/1000
    learn.grad_accum.count = lambda learn: learn.y.numel()
    learn.fit(1, 0.1)
    learn.opt.grads[0] *= 1000
    assert off(learn)<5*halves[torch.float16]

def test_a_sparse_gradient():
    "Stays sparse, and is used as it came"
    model = nn.Sequential(nn.Embedding(7, 2, sparse=True)).bfloat16()
    items = [(torch.tensor(i%7),y.bfloat16()) for i,(_,y) in enumerate(regression(64))]
    seen = []
    class Look(Callback):
        order = 20
        def before_step(self): seen.append(model[0].weight.grad.clone())
    learn = quiet_learner(loaders(items, 2), model, opt_func=SGD, cbs=[GradAccum(32), Look()])
    learn.fit(1, 0.)
    x,y = (torch.stack(o) for o in zip(*items))
    whole = nn.Embedding(7, 2).double()
    whole.weight.data = model[0].weight.data.double()
    nn.MSELoss()(whole(x), y.double()).backward()
    assert len(seen)==1
    assert seen[0].is_sparse
    assert (seen[0].to_dense().double()-whole.weight.grad).norm()<0.02*whole.weight.grad.norm()

# Whatever becomes of the window

@pytest.mark.parametrize('cb,n_acc,on_oom,first,last', [
    (CancelLast('before_batch', 0),64,'raise',0,126), # Closed after the last micro-batch
    (Strike('forward', [10]),32,'split',64,128)], ids=['after_train','split'])
def test_whatever_becomes_of_the_window(cb, n_acc, on_oom, first, last):
    learn = learner(torch.bfloat16, 128, n_acc=n_acc, cbs=[cb], on_oom=on_oom)
    learn.dls.train.n_inp = learn.dls.valid.n_inp = 1
    learn.fit(1, 0.1)
    assert off(learn, items_of(128, torch.bfloat16)[first:last])<halves[torch.bfloat16]

@cache
def measured(dtype):
    learn = learner(dtype, n=256, bs=8, n_acc=4, cbs=[NoiseScale()])
    learn.fit(1, 0.)
    return learn.noise_scale.df

@pytest.mark.parametrize('dtype', halves, ids=str)
def test_what_noise_scale_measures_beside_it(dtype):
    df,want = measured(dtype),measured(torch.float64)
    assert list(df.n_items)==list(want.n_items)
    for nm in ('tr_sigma','g_sq'): np.testing.assert_allclose(df[nm], want[nm], rtol=0.03, atol=0.03*want[nm].abs().mean())

# On two ranks

def train_rank(rank):
    torch.set_num_threads(1)
    items = items_of(256, torch.bfloat16)
    learn = quiet_learner(loaders(items, 1), net(torch.bfloat16), opt_func=Spy, cbs=[GradAccum(128)])
    with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(1, 0.1)
    return [o.double().numpy() for o in learn.opt.grads]

@pytest.mark.xdist_group('ranks')
def test_on_ranks():
    "What is exchanged is in the parameters' precision, a sum of 128 micro-batches that is rounded once before, and the last one"
    one,two = on_ranks(train_rank, 2)
    want = oracle(net(torch.bfloat16), items_of(256, torch.bfloat16)).numpy()
    assert len(one)==1
    assert np.array_equal(one[0], two[0])
    assert np.linalg.norm(one[0]-want)<0.005*np.linalg.norm(want)
