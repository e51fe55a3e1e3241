"Squared norms of the gradients of micro-batches: a measurement of a window, and parameters of all kinds"
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from fastai.optimizer import OptimWrapper
from fastai_bs.accumulate.window import MicroBatch
from fastai_bs.all import GradAccum, NoiseScale
from fastai_bs.noise.norms import MicroNorms, RankWindow, unweighed_window, weighed_window, without_scales
from helpers import loaders, mlp, quiet_learner, regression
from noise.test_noise_scale import assert_rows, Embeddings, expected, measure, n_hooks, task
from oracle import windows_in_order
from test_weights import double

# A measurement

def micro_norms(n, w, scale): return MicroNorms(MicroBatch(n, w, scale), None, 2)

@pytest.mark.parametrize('is_sum', [False, True])
@pytest.mark.parametrize('as_scale', [float, torch.tensor])
def test_all_scales_are_divided_out(is_sum, as_scale):
    "What `.grad` and the hooks see is multiplied by weights, elements of a summed loss, and the scale of mixed precision; a micro-batch of nothing is left out"
    ns,ws,scale = [3.,0.,5.],[1.,0.,5/3],256.
    true,mean = np.array([2.,9.,4.]),7.
    seen = [t*((n if is_sum else w)*scale)**2 for t,n,w in zip(true, ns, ws)] + [mean*((8. if is_sum else 1.)*scale)**2]
    micros = [micro_norms(n, 1. if is_sum else w, as_scale(scale)) for n,w in zip(ns, ws)]
    w = without_scales(micros, double(seen), is_sum, 8. if is_sum else 1.)
    assert (w.n,w.n_items)==([3.,5.],6)
    assert w.sq==pytest.approx([2.,4.])
    assert w.sq_mean==pytest.approx(7.)
    m = weighed_window(w)
    assert (m.n_micro,m.n_elems,m.n_items)==(2,8.,6)
    assert m.total==pytest.approx(3*2.+5*4.)
    assert m.moments==pytest.approx((26-8*7, 7-(26-8*7)/8))

@pytest.mark.parametrize('ns', [[4.,4.,4.], [1.,2.,6.]], ids=str)
def test_a_mean_of_means_is_as_noisy_as_it_is(ns, monkeypatch):
    "Ranks of `n` elements each, in expectation: what they know gives back what they were made of"
    monkeypatch.setattr('fastai_bs.noise.norms.over_ranks', lambda t: t) # This process holds what all of them would
    n,K,g_sq,tr_sigma = np.array(ns),len(ns),2.,3.
    mean = g_sq + tr_sigma*(1/n).sum()/K**2
    assert unweighed_window(RankWindow(ns, (g_sq+tr_sigma/n).tolist(), K*mean, 6), K, False).moments==pytest.approx((tr_sigma,g_sq))

# Parameters of all kinds

def test_a_frozen_group_is_left_out():
    items,model,loss_func,noise = regression(60),mlp(),nn.MSELoss(),NoiseScale()
    learn = quiet_learner(loaders(items, 3), model, loss_func, cbs=[GradAccum(4), noise], splitter=lambda m: [[*m[0].parameters()],[*m[2].parameters()]])
    for frozen in (True,False):
        (learn.freeze if frozen else learn.unfreeze)()
        learn.fit(1, 0.)
        assert_rows(noise.df, expected(items, model, loss_func, windows_in_order(60, 3, 4)))

class Extra(nn.Module):
    "A layer that forward does not use, and one that it uses for some micro-batches only"
    def __init__(self):
        super().__init__()
        self.main,self.unused,self.rare = mlp(),nn.Linear(5,5).double(),nn.Linear(5,2).double()
    def forward(self, x): return self.main(x) + (self.rare(x) if x[0,0]>0 else 0)

def test_parameters_without_a_gradient_are_left_out():
    items,model = [(x.abs() if i>=30 else -x.abs(), y) for i,(x,y) in enumerate(regression(60))],Extra()
    assert_rows(measure(items, model, nn.MSELoss(), 3, 2).df, expected(items, model, nn.MSELoss(), windows_in_order(60, 3, 2)))
    assert model.unused.weight.grad is None

def test_sparse_gradients_have_the_rows_of_dense_ones():
    "The rows of dense ones"
    items,dense,loss_func = task('embeddings', 60)
    sparse = Embeddings(sparse=True).double()
    sparse.load_state_dict(dense.state_dict())
    a,b = (measure(items, m, loss_func, 3, 4, lr=0.1, opt_func=partial(OptimWrapper, opt=torch.optim.SGD)).df for m in (dense,sparse))
    assert_rows(b, a)

class Checkpointed(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.a,self.b,self.kwargs = mlp(5,5),mlp(5,2),kwargs
        self.b[0].weight = self.a[0].weight # Used in two segments
    def forward(self, x):
        if not self.kwargs: return self.b(self.a(x))
        x = x.clone().requires_grad_()
        return checkpoint(self.b, checkpoint(self.a, x, **self.kwargs), **self.kwargs)

def test_checkpointing_changes_no_row():
    "The rows are those without; the reentrant kind brings gradients in parts and is refused"
    plain,checked = (measure(regression(60), Checkpointed(**o), nn.MSELoss(), 3, 4).df for o in ({}, {'use_reentrant': False}))
    assert_rows(checked, plain)
    model = Checkpointed(use_reentrant=True)
    with pytest.raises(RuntimeError, match='use_reentrant=False'): measure(regression(60), model, nn.MSELoss(), 3, 4)
    assert n_hooks(model)==0
