"BatchNorm in windows: its running statistics keep their pace, and its own momentum comes back"
from functools import partial

import pytest
import torch
from torch import nn
from fastai_bs.all import GradAccum
from helpers import loaders, quiet_learner, regression
from test_grad_accum import f64, items15

@pytest.mark.parametrize('norm,shape,momentum,fix_bn,n_updates', [(nn.BatchNorm1d,(5,),0.1,True,6), (nn.BatchNorm1d,(5,),0.7,False,16),
    (partial(nn.InstanceNorm1d, track_running_stats=True),(5,3),0.7,True,6)])
def test_running_statistics_keep_their_time_constant(norm, shape, momentum, fix_bn, n_updates):
    "Inputs of zero: of the first mean and variance, 1 and 1, only (1-momentum)**updates is left"
    bn = norm(5, momentum=momentum).to(f64)
    bn.running_mean.fill_(1.)
    model = nn.Sequential(bn, nn.Flatten(), nn.LazyLinear(2).to(f64))
    x = torch.zeros(shape, dtype=f64)
    model.eval()(x[None])
    learn = quiet_learner(loaders([(x,y) for _,y in items15+regression(1)], 2), model, cbs=GradAccum(3, fix_bn=fix_bn)) # Windows of 3, 3 and 2
    learn.fit(2, 0.01)
    left = torch.full((5,), (1-momentum)**n_updates, dtype=f64)
    torch.testing.assert_close(bn.running_mean, left, rtol=1e-12, atol=0.)
    torch.testing.assert_close(bn.running_var, left, rtol=1e-12, atol=0.)
    assert bn.momentum==momentum
