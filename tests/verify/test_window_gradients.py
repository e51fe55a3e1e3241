"Gradients of a window: of its micro-batches, and of the same items as one large batch"
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from fastai_bs.all import GradAccum
from fastai_bs.verify.check_accum import errors_of
from fastai_bs.verify.window_gradients import FixedDraws, run
from helpers import quiet_learner
from verify.test_check_accum import conv, dense, images, learner

# The gradient

def test_the_gradient_of_a_window_is_that_by_hand():
    "Against a large batch by hand, and against itself with an error that is put in"
    learn = learner(dense())
    batches = [b for b,_ in zip(learn.dls.train, range(4))]
    x,y = map(torch.cat, zip(*batches))
    model = copy.deepcopy(learn.model).double()
    F.cross_entropy(model(x.double()), y).backward()
    whole,*_ = run(learn, batches)
    for nm,p in model.named_parameters(): torch.testing.assert_close(whole[nm], p.grad, rtol=1e-12, atol=1e-15)
    parts,*_ = run(learn, batches, GradAccum(4))
    parts['1.bias'] += 0.5*whole['1.bias'].norm()/8**0.5
    error,df = errors_of(parts, whole, learn.model)
    total = sum(o.square().sum() for o in whole.values())**0.5
    assert df.index[0]=='1.bias'
    assert df.layer.iloc[0]=='Linear'
    assert df.own.iloc[0]==pytest.approx(0.5)
    assert error==pytest.approx((0.5*whole['1.bias'].norm()/total).item())

# Random numbers

def test_no_random_number_tells_an_item_from_another():
    "Neither of dropout, as CPUs and GPUs have it and within attention, nor of others; an order is that of the items"
    t = torch.rand(6,4, requires_grad=True)
    with FixedDraws() as draws:
        assert t.bernoulli().unique().numel()==2 # It lets be what is drawn outside of a batch
        draws.on = True
        native,_ = torch.native_dropout(t, 0.5, True)
        native.sum().backward()
        for o in (native,F.dropout(t, 0.5)): assert torch.equal(o, 2*t)
        for o in (torch.randn(5),torch.rand_like(t),t.detach().clone().normal_(),torch.randint(9, (5,))): assert o.unique().numel()==1
        assert torch.randperm(5).tolist()==[0,1,2,3,4]
        q = torch.rand(1,1,3,4)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), 2*F.scaled_dot_product_attention(q, q, q))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu # Knows no dropout, so it fails where it is asked for any
        torch.testing.assert_close(kernel(q, q, q, 0.5)[0], F.scaled_dot_product_attention(q, q, q))
    assert torch.equal(t.grad, torch.full_like(t, 2))
    assert draws.drew

# Windows

def test_a_short_loader_has_smaller_windows():
    res = learner(conv(), images[:20]).check_accum(4)
    assert list(res.errors)==['a window of 2 x 8 + 4 items']
    assert 'a window has 3, and not 4' in res.notes[0]
    assert res.error<1e-13

def ragged_tokens():
    items = [(torch.randint(1, 12, (int(n),)),i%3) for i,n in enumerate(np.random.default_rng(0).integers(5, 12, 70))]
    def create_batch(b):
        m = max(len(x) for x,_ in b)
        return torch.stack([F.pad(x, (0,m-len(x))) for x,_ in b]),torch.tensor([y for _,y in b])
    dls = DataLoaders(DataLoader(items, bs=8, create_batch=create_batch), DataLoader(items[:4], bs=2, create_batch=create_batch))
    return quiet_learner(dls, nn.Sequential(nn.EmbeddingBag(12,4,sparse=True), nn.Linear(4,3)), CrossEntropyLossFlat(), opt_func=SGD)

def test_batches_that_do_not_go_together_are_cut():
    "One of them in parts"
    res = ragged_tokens().check_accum(GradientAccumulation(30))
    assert "one batch, as the loader's cannot be joined (how each is padded is not compared), in parts of 4 x 2 items" in list(res.errors)[0]
    assert 'cannot be joined' in res.notes[0]
    assert res.error==pytest.approx(32/30-1, abs=1e-13)
