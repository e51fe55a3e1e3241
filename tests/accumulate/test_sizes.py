"How large a window is: micro-batches by epoch, `GradAccum(bs=...)` by items, and `learn.batch_size`"
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from fastai.callback.core import Callback, CancelFitException
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai_bs.accumulate.grad_accum import quiet_accum
from fastai_bs.accumulate.sizes import accumulation
from fastai_bs.all import batch_size, GradAccum
from helpers import changes, flat, Float32Loss, loaders, mlp, picture, quiet_learner, RaiseAt, regression, set_seed
from test_grad_accum import assert_clean, assert_windows, bn_learner, Counts, idxs, items15, spied

def bn_model(): return nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Linear(4,2)).double()

def learner(*cbs, bs=4, n=50, model=mlp, **kwargs):
    set_seed(3)
    return quiet_learner(loaders(regression(n), bs, shuffle=True), model(), cbs=cbs, **kwargs)

def test_n_acc_goes_along_with_the_loader():
    "From fit to fit, and from epoch to epoch"
    class Grows(Callback):
        def before_epoch(self):
            if self.epoch==1: self.learn.dls = loaders(regression(48), 8)
    learn,seen = learner(GradAccum(bs=24), Grows()),[]
    learn.add_cb(type('Look', (Callback,), dict(after_batch=lambda self: seen.append((self.epoch,self.learn.grad_accum.n_acc)) if self.training else None))())
    learn.fit(2, 0.05)
    assert dict(seen)=={0: 6, 1: 3}
    assert learn.batch_size==24
    learn.dls = loaders(regression(48), 12)
    learn.fit(1, 0.05)
    assert learn.grad_accum.n_acc==2
    assert learn.batch_size==24

# By epoch

@pytest.mark.parametrize('n_acc', [{1:3, 2:1}, lambda epoch: {0:1,1:3,2:1}[epoch]])
def test_n_acc_goes_by_the_epoch(n_acc):
    c = Counts()
    learn = spied(items15, 2, cbs=[GradAccum(n_acc), c], n_epoch=3)
    each = idxs(*((i,) for i in range(8)))
    assert_windows(learn, items15, each+idxs((0,1,2),(3,4,5),(6,7))+each)
    assert c.n_accs==[1]*8+[3]*8+[1]*8
    assert [accumulation(learn, e) for e in range(3)]==[1,3,1]

# What is warned about

@pytest.mark.parametrize('n_acc,bs,n,warns', [({1: 32},2,200,True), (32,2,608,False), (31,2,248,True), (31,2,250,False), (64,4,300,True), (8,16,448,True),
    (7,2,24,False), (256,1,20,True)])
def test_items_taken_for_micro_batches_are_warned_about(n_acc, bs, n, warns):
    "Fewer than 5 steps in an epoch, or fewer than 10 where 32 or more are more than a micro-batch has items: said before the first batch"
    def _said(accum):
        learn = quiet_learner(loaders(regression(n), bs), mlp(), cbs=[accum, RaiseAt('before_batch', CancelFitException)])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            learn.fit(2, 0.)
        return [str(o.message) for o in said if ' micro-batches' in str(o.message)]
    said = _said(GradAccum(n_acc))
    assert len(said)==warns
    assert all('counts micro-batches, not items' in o for o in said)
    assert _said(quiet_accum(n_acc))==[]

# Refused

class Unsized:
    "Yields batches, and does not say of how many items"
    def __init__(self, dl): self.dl,self.dataset = dl,dl.dataset
    def __iter__(self): return iter(self.dl)
    def __len__(self): return len(self.dl)

@pytest.mark.parametrize('bs,says', [(10,'take bs=8 or bs=12,'), (3,'take bs=4 or bs=8,')])
def test_items_that_micro_batches_do_not_divide_are_refused(bs, says):
    "With the two nearest that do, before anything has changed"
    learn = learner()
    learn.fit(1, 0.05)
    learn.add_cb(GradAccum(bs=bs))
    was = picture(learn, only=('model','opt','dls'))
    with pytest.raises(ValueError, match=f'`bs`={bs} is no whole number of micro-batches of 4 items: {says}'): learn.fit(1, 0.05)
    assert changes(was, picture(learn, only=('model','opt','dls')))==[]
    assert learn.batch_size is None
    with pytest.raises(ValueError, match='no whole number'): batch_size(learn)

@pytest.mark.parametrize('accum', [GradAccum(bs=57),GradAccum(bs=1000),GradAccum({0: 1, 1: 14})], ids=repr)
def test_a_window_holds_no_more_than_an_epoch(accum):
    "50 items in 13 micro-batches: a step in each epoch, of all there is, and a warning once a fit, whole micro-batches or not"
    learn,whole = learner(accum, model=bn_model),learner(GradAccum({0: 1, 1: 13} if accum.sizes.varies else 13), model=bn_model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn.fit(3, 0.05)
    words = f"of {accum.sizes.n_acc(learn, 0)} micro-batches is more than an epoch holds, which is 13"
    if accum.sizes.varies: words = 'GradAccum(14) counts micro-batches'
    assert [words in str(o.message) for o in said]==[True]
    whole.fit(3, 0.05)
    assert torch.allclose(flat(learn), flat(whole), rtol=1e-12)
    for o in (learn,whole): assert o.grad_accum.columns().get('batch_size', o.batch_size)==50

def test_a_loader_that_does_not_say_its_batch_size_is_refused():
    dl = Unsized(TorchDataLoader(regression(50), 4))
    learn = quiet_learner(DataLoaders(dl, dl, device='cpu'), mlp(), cbs=[GradAccum(bs=12)])
    with pytest.raises(ValueError, match='does not say how many items it puts in a batch: set `learn.dls.train.bs`'): learn.fit(1, 0.05)
    assert learn.batch_size is None
    dl.bs = 4
    learn.fit(1, 0.05)
    assert learn.batch_size==12

@pytest.mark.parametrize('kwargs,exc,match', [(dict(n_acc=3, bs=12),ValueError,'one of them follows from the other, got 3 and 12: leave one out'),
    (dict(bs=0),ValueError,'`bs` must be at least 1 item, got 0'), (dict(bs=12.),TypeError,'`bs` must be a whole number of items'),
    (dict(n_acc=0),ValueError,'at least 1.*got 0'), (dict(n_acc=4.),TypeError,'whole number.*got 4.0'),
    (dict(n_acc={}),ValueError,r'as in \{0: 8, 3: 32\}; got \{\}'),
    (dict(n_acc={0: 1, 3: 2.5}),TypeError,'got 2.5.*from epoch 3'), (dict(n_acc={-1: 2}),ValueError,'epochs.*got -1')], ids=str)
def test_bad_sizes_are_refused(kwargs, exc, match):
    with pytest.raises(exc, match=match): GradAccum(**kwargs)

@pytest.mark.parametrize('n_acc,exc,match', [(lambda epoch: 2*(epoch==0), ValueError, '`n_acc` must be at least 1.*for epoch 1'),
    ([2,3].__getitem__, IndexError, 'list index out of range')])
def test_bad_n_acc_function_is_refused_before_anything_changed(n_acc, exc, match):
    learn = bn_learner()
    learn.fit(1, 0.1)
    learn.add_cb(GradAccum(n_acc))
    before = picture(learn, only=('model','opt'))
    with pytest.raises(exc, match=match): learn.fit(3, 0.1)
    assert changes(before, picture(learn, only=('model','opt')))==[]
    assert_clean(learn, [0.3])

# `learn.batch_size`

def test_batch_size_of_a_learner_is_what_the_function_says():
    "Before, in and after a fit what `batch_size` says"
    learn,seen = learner(GradAccum({0: 1, 1: 3})),[]
    learn.add_cb(type('Look', (Callback,), dict(after_batch=lambda self: seen.append((self.epoch,self.batch_size)) if self.training else None))())
    assert learn.batch_size==batch_size(learn)==4
    learn.fit(2, 0.05)
    assert dict(seen)=={0: 4, 1: 12}
    assert learn.batch_size==batch_size(learn)==4
    assert 'None' in Learner.batch_size.__doc__

class OwnAttribute(Learner):
    def __init__(self, *args, **kwargs):
        self.batch_size = 'mine'
        super().__init__(*args, **kwargs)

@pytest.mark.parametrize('cls', [OwnAttribute,Learner])
def test_batch_size_of_a_learner_gives_way_to_one_of_the_users(cls):
    "A learner that has such an attribute of its own keeps it, and what needs the number does not ask it"
    learn = cls(loaders(regression(24), 4), mlp(), loss_func=nn.MSELoss(), cbs=[Float32Loss(),GradAccum(3)])
    if cls is Learner: learn.batch_size = 'mine'
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.05)
    assert (learn.batch_size,batch_size(learn),learn.memory_report().bs)==('mine',12,4)
