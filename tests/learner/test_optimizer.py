"What an optimizer does with its hyper-parameters: whether its velocity holds the rate, and by how much a step decays"
from functools import partial

import pytest
import torch
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastai_bs.learner.optimizer import decay_of
from helpers import loaders, mlp, quiet_learner, regression

def torchs(nm, **kwargs): return partial(OptimWrapper, opt=getattr(torch.optim, nm), **kwargs)

@pytest.mark.parametrize('opt_func,wd', [(partial(SGD, wd=0.1),0.1), (partial(SGD, wd=0.1, decouple_wd=False),0.1), (partial(Adam, wd=0.1),0.1),
    (partial(Adam, wd=0.1, decouple_wd=False),None), (torchs('AdamW', weight_decay=0.1),0.1), (torchs('Adam', weight_decay=0.1),None),
    (partial(Adam, wd=0.),None)], ids=['SGD','SGD l2','Adam','Adam l2','torch AdamW','torch Adam','none'])
def test_weight_decay_is_known_where_a_step_decays_by_rate_times_wd(opt_func, wd):
    "Decay that is added to the gradient is one for SGD, and is divided by the gradient's size for Adam"
    learn = quiet_learner(loaders(regression(8), 4), mlp(), opt_func=opt_func)
    learn.create_opt()
    assert decay_of(learn)==wd

@pytest.mark.parametrize('decays,wd', [([0.1,0.2],[0.1,0.2]), ([0.1,0.],[0.1,0.]), ([0.1,0.1],0.1), ([0.,0.],None)])
def test_weight_decay_of_groups_is_a_list_where_they_differ(decays, wd):
    "Often biases have none"
    learn = quiet_learner(loaders(regression(8), 4), mlp(), opt_func=SGD, splitter=lambda m: [[*m[0].parameters()],[*m[2].parameters()]])
    learn.create_opt()
    learn.opt.set_hyper('wd', decays)
    assert decay_of(learn)==wd
