"`bn_to_gn`, a norm that a micro-batch has as the large batch has it; `GhostBatchNorm`, one that the large batch has as a micro-batch"
import pytest
import torch
from torch import nn
from fastai.tabular.model import TabularModel

from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.memory.group_norm import GhostBatchNorm, bn_to_gn, kept_norm, norm_batch
from helpers import distance, loaders, quiet_learner, regression

@pytest.mark.parametrize('bn,shape,n,groups', [(nn.BatchNorm2d,(3,3),2,1), (nn.BatchNorm2d,(3,3),9,3), (nn.BatchNorm3d,(2,2,2),100,25),
    (nn.SyncBatchNorm,(3,3),128,32), (nn.BatchNorm1d,(),4,1), (nn.BatchNorm1d,(3,),100,5), (nn.BatchNorm1d,(),1024,32)])
def test_groups_divide_the_channels(bn, shape, n, groups):
    """As many as divide the channels, 32 at most, and two channels in each; 16 of features, as there may be no positions to normalise over: of two values
    nothing would be left but their order"""
    gn = bn_to_gn(nn.Sequential(bn(n)))[0]
    assert type(gn) is nn.GroupNorm
    assert gn.num_groups==groups
    assert gn.num_channels==n
    assert gn(torch.randn(3, n, *shape)).isfinite().all()

@pytest.mark.parametrize('dtype,training', [(torch.float64,False), (torch.float16,True)])
def test_weights_and_mode_of_a_norm_stay(dtype, training):
    "The same parameter objects, frozen or not"
    bn = nn.BatchNorm2d(8, eps=1e-3).to(dtype).train(training)
    bn.weight.requires_grad_(False)
    model = nn.Sequential(nn.Identity(), bn).train(training)
    assert bn_to_gn(model) is model
    gn = model[1]
    assert gn.weight is bn.weight
    assert gn.bias is bn.bias
    assert gn.weight.dtype==dtype
    assert gn.eps==1e-3
    assert gn.affine
    assert gn.training is training
    assert not gn.weight.requires_grad
    assert gn.bias.requires_grad
    assert set(model.state_dict())=={'1.weight','1.bias'}

def test_a_norm_without_weights_stays_without():
    gn = bn_to_gn(nn.Sequential(nn.BatchNorm1d(8, affine=False, track_running_stats=False)))[0]
    assert gn.weight is None
    assert gn.bias is None
    assert not gn.affine
    assert gn(torch.randn(2,8)).shape==(2,8)
    assert repr(gn)

def test_norms_are_replaced_where_they_are():
    "One in several places stays one; a model that is one is replaced in what is returned; others stay"
    bn,norm = nn.BatchNorm1d(8),nn.LayerNorm(4)
    model = nn.ModuleDict(dict(a=bn, b=nn.ModuleList([norm,bn]), d=nn.Sequential(nn.Sequential(bn))))
    bn_to_gn(model)
    assert isinstance(model['a'], nn.GroupNorm)
    assert model['a'] is model['b'][1] is model['d'][0][0]
    assert model['b'][0] is norm
    gn = bn_to_gn(bn)
    assert isinstance(gn, nn.GroupNorm)
    assert gn.weight is bn.weight
    assert isinstance(bn, nn.BatchNorm1d)

def after_bn(layer): return nn.Sequential(nn.BatchNorm1d(16), nn.Sequential(layer))

class BatchNormAct(nn.BatchNorm2d):
    "With an activation, as timm has it"
    def forward(self, x): return super().forward(x).relu()

@pytest.mark.parametrize('model,groups,error,says', [
    (after_bn(BatchNormAct(8)),32,ValueError,"1.0 is a BatchNormAct with a `forward` of its own"),
    (after_bn(nn.LazyBatchNorm1d()),32,ValueError,"1.0 is lazy and has no channels yet: pass one batch through the model first"),
    (after_bn(nn.BatchNorm1d(1)),32,ValueError,"1.0 normalises 1 feature, of which GroupNorm would leave little or nothing: leave it out of the model"),
    (nn.BatchNorm1d(3),32,ValueError,"The layer normalises 3 features"),
    (TabularModel([(3,2)], 3, 1, [8]),32,ValueError,"`bn_cont` of a TabularModel normalises the columns"),
    (after_bn(nn.Tanh()),0,ValueError,"`groups` must be at least 1 group, got 0: 1 normalises over all channels"),
    (after_bn(nn.Tanh()),4.,TypeError,"`groups` must be a whole number of groups, got 4.0")])
def test_what_has_no_group_norm_is_refused(model, groups, error, says):
    "And the model is what it was"
    was = list(model.modules())
    with pytest.raises(error) as e: bn_to_gn(model, groups)
    assert says in str(e.value)
    assert all(a is b for a,b in zip(was, model.modules(), strict=True))

@pytest.mark.parametrize('embs,n_cont,kwargs', [(1,3,dict(bn_cont=False)), (4,0,{})])
def test_the_other_norms_of_a_tabular_model_are_replaced(embs, n_cont, kwargs):
    model = bn_to_gn(TabularModel([(3,2)]*embs, n_cont, 1, [8], **kwargs))
    assert any(isinstance(m, nn.GroupNorm) for m in model.modules())

def learner(bs, cbs=None, norm=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5,8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8,2)).double()
    return quiet_learner(loaders(regression(32), bs), bn_to_gn(model) if norm else model, cbs=cbs)

@pytest.mark.parametrize('norm', [True,False], ids=['GroupNorm','BatchNorm'])
def test_a_model_with_group_norms_accumulates_exactly(norm):
    "Four micro-batches are the large batch; with BatchNorm they are not"
    large,accumulated = learner(16, norm=norm),learner(4, GradAccum(4), norm=norm)
    for learn in (large,accumulated): learn.fit(3, 0.1)
    assert (distance(accumulated, large)<1e-9)==norm

# GhostBatchNorm

class WithNorm(nn.Module):
    "One norm, and what it was given and returned last, in training or not"
    def __init__(self, bn, shape):
        super().__init__()
        self.bn,self.lin,self.shape,self.last = bn.double(),nn.Linear(5, 3).double(),shape,{}
    def forward(self, x):
        given = self.lin(x).reshape(-1, 3, *(1 for _ in self.shape)).expand(-1, 3, *self.shape)
        returned = self.bn(given)
        self.last[self.training] = given.detach(),returned.detach()
        return returned.flatten(2).mean(2)[:,:2] if self.shape else returned[:,:2]

@pytest.mark.parametrize('bn,shape', [(nn.BatchNorm1d(3),()), (nn.BatchNorm1d(3),(4,)), (nn.BatchNorm2d(3),(2,3)), (nn.BatchNorm3d(3),(2,1,2))])
def test_each_group_is_normalised_by_itself(bn, shape):
    "Every fourth item of 16 together, as a batch of 4; running statistics are the mean of the groups'"
    model = WithNorm(bn, shape)
    learn = quiet_learner(loaders(regression(16), 16), model, cbs=GhostBatchNorm(4))
    learn.fit(1, 0.1)
    apart = [type(bn)(3).double() for _ in range(4)]
    given,returned = model.last[True]
    for i,o in enumerate(apart): torch.testing.assert_close(returned[i::4], o(given[i::4]).detach())
    for nm in ('running_mean','running_var'): torch.testing.assert_close(getattr(bn, nm), torch.stack([getattr(o, nm) for o in apart]).mean(0))
    assert bn.num_batches_tracked==1

def test_groups_train_as_accumulated_micro_batches():
    "The weights after steps of 16 items in groups of 4 are those of four micro-batches with the same items; without groups they are not"
    items = regression(32)
    by_group = [items[16*step+4*j+i] for step in range(2) for i in range(4) for j in range(4)]
    def _trained(items, bs, cbs):
        torch.manual_seed(0)
        learn = quiet_learner(loaders(items, bs), nn.Sequential(nn.Linear(5,8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8,2)).double(), cbs=cbs)
        learn.fit(3, 0.1)
        return learn
    accumulated = _trained(by_group, 4, GradAccum(4))
    assert distance(_trained(items, 16, GhostBatchNorm(4)), accumulated)<1e-9
    assert distance(_trained(items, 16, None), accumulated)>1e-3

@pytest.mark.parametrize('bn', [nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3, momentum=None),
    nn.SyncBatchNorm(3), BatchNormAct(3)])
def test_norms_of_other_kinds_stay_as_they_are(bn):
    "No group of theirs would have the same meaning, so a plan has none"
    learn = quiet_learner(loaders(regression(16), 16), nn.Sequential(bn))
    assert norm_batch(learn, 16) is None
    learn.add_cb(GhostBatchNorm(4))
    with learn.ghost_batch_norm.scope(): assert 'forward' not in vars(bn)

def test_a_norm_of_no_columns_stays():
    "As fastai makes for a table without continuous columns"
    model = TabularModel([(3,2)]*2, 0, 1, [8])
    learn = quiet_learner(loaders(regression(16), 16), model, cbs=GhostBatchNorm(4))
    with learn.ghost_batch_norm.scope(): assert [m.num_features for m in model.modules() if 'forward' in vars(m)]==[8]

def test_a_forward_of_somebody_else_stays():
    bn = nn.BatchNorm2d(3)
    bn.forward = own = lambda x: x
    learn = quiet_learner(loaders(regression(16), 16), nn.Sequential(bn), cbs=GhostBatchNorm(4))
    with learn.ghost_batch_norm.scope(): assert bn.forward is own
    assert bn.forward is own
    assert norm_batch(quiet_learner(loaders(regression(16), 16), nn.DataParallel(nn.Sequential(nn.BatchNorm2d(3)))), 16) is None

@pytest.mark.parametrize('n,bs', [(18,4), (4,4), (3,4), (6,4)])
def test_what_does_not_divide_is_normalised_whole(n, bs):
    model,plain = WithNorm(nn.BatchNorm1d(3), ()),WithNorm(nn.BatchNorm1d(3), ())
    plain.load_state_dict(model.state_dict())
    for o,cbs in ((model,GhostBatchNorm(bs)),(plain,None)): quiet_learner(loaders(regression(n), n), o, cbs=cbs).fit(1, 0.1)
    torch.testing.assert_close(model.last[True][1], plain.last[True][1])

@pytest.mark.parametrize('error', [KeyboardInterrupt,ValueError])
def test_an_interrupt_leaves_no_groups_behind(error):
    class Stops(nn.Module):
        def forward(self, x): raise error
    model = nn.Sequential(nn.Linear(5,8), nn.BatchNorm1d(8), Stops()).double()
    with pytest.raises(error): quiet_learner(loaders(regression(16), 16), model, cbs=GhostBatchNorm(4)).fit(1, 0.1)
    assert 'forward' not in vars(model[1])

def test_a_frozen_norm_uses_its_running_statistics():
    bn,x = nn.BatchNorm1d(5).double().eval(),torch.randn(16, 5).double()
    learn = quiet_learner(loaders(regression(16), 16), bn, cbs=GhostBatchNorm(4))
    wanted = bn(x)
    with learn.ghost_batch_norm.scope(): torch.testing.assert_close(bn(x), wanted)

@pytest.mark.parametrize('bs,error,says', [(1,ValueError,"`bs` must be at least 2 items, got 1: BatchNorm needs two items"), (4.,TypeError,"whole number")])
def test_a_group_has_items(bs, error, says):
    with pytest.raises(error, match=says): GhostBatchNorm(bs)

@pytest.mark.parametrize('bn,micro_bs,own,keeps', [(nn.BatchNorm2d(3),16,None,16), (nn.BatchNorm3d(3),31,None,31), (nn.BatchNorm2d(3),32,None,None),
    (nn.BatchNorm2d(3),1,None,None), (nn.BatchNorm1d(3),16,None,None), (nn.GroupNorm(1, 3),16,None,None), (nn.BatchNorm2d(3),64,8,8)])
def test_pictures_in_small_batches_keep_their_norm(bn, micro_bs, own, keeps):
    "Of fewer than 32 items, and no tables; or as the learner's own callback has it"
    learn = quiet_learner(loaders(regression(16), 16), nn.Sequential(bn), cbs=own and GhostBatchNorm(own))
    assert norm_batch(learn, micro_bs)==keeps

@pytest.mark.parametrize('norm_bs,micro_bs,is_kept', [(16,64,True), (16,16,False), (16,8,False), (16,40,False), (None,64,False)])
def test_groups_are_made_of_larger_micro_batches(norm_bs, micro_bs, is_kept):
    assert [o.bs for o in kept_norm(norm_bs, micro_bs)]==([norm_bs] if is_kept else [])
