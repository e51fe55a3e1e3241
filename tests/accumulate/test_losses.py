"What a loss averages over: known, said by `count`, or asked for, so that the gradient is the large batch's"
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader as TorchDataLoader
from fastai.data.core import DataLoaders
from fastai.optimizer import SGD
from fastai.losses import BaseLoss, CrossEntropyLossFlat, DiceLoss, LabelSmoothingCrossEntropyFlat
from fastai.callback.core import Callback
from fastai_bs.accumulate.losses import count_items, items_of, loss_elements
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale
from helpers import flat, loaders, mlp, quiet_learner, regression
from loss_cases import classes, exact, padded, reals, seqs, token, weight
from test_grad_accum import assert_clean, assert_windows, bn_learner, inf, spied
from test_sizes import bn_model, learner

# What a loss averages over

@pytest.fixture
def flat_in_double(monkeypatch):
    "fastai's flat losses cast to `TensorBase`, which turns float64 into float32: not so in these tests"
    monkeypatch.setattr(BaseLoss, '_contiguous', lambda self, x: x.transpose(self.axis,-1).contiguous() if isinstance(x, torch.Tensor) else x)

@pytest.mark.parametrize('case', [*exact])
def test_gradient_is_the_large_batchs(case, flat_in_double):
    loss,items,model = exact[case]
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='Nothing tells')
        learn = spied(items, 2, model(), loss, GradAccum(3))
    assert_windows(learn, items, [range(6), range(6,12), range(12,13)])
    assert not any(torch.as_tensor(o).isnan() for o in learn.recorder.losses)
    learn = quiet_learner(learn.dls, model(), loss, cbs=GradAccum(3)) # And training goes well with it
    learn.fit(2, 0.01)
    assert flat(learn).isfinite().all()
    assert not any(torch.as_tensor(o).isnan() for o in learn.recorder.losses)

# Losses of one's own, and a `count` for them

def my_loss(pred, targ): return F.mse_loss(pred, targ)

class MyFlat(CrossEntropyLossFlat):
    "A mean over items of a sum over tokens: no longer what `CrossEntropyLossFlat` averages over"
    def __call__(self, inp, targ): return F.cross_entropy(inp.flatten(0,1), targ.flatten(), reduction='sum')/len(targ)

@pytest.mark.parametrize('loss,items,model',
    [(my_loss,reals,mlp), token(DiceLoss(reduction='mean'), seqs, False), token(MyFlat(), padded())])
def test_unknown_loss_is_warned_about_once_a_fit(loss, items, model):
    "And taken for a mean over items"
    learn = quiet_learner(loaders(items, 2), model(), loss, cbs=GradAccum(3))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter('always')
            learn.fit(1, 0.01)
        ours = [str(w.message) for w in ws if 'Nothing tells what the loss' in str(w.message)]
        assert len(ours)==1
        assert "count='items'" in ours[0]
    assert_windows(spied(items, 2, model(), loss, GradAccum(3)), items, [range(6), range(6,12), range(12,13)], tol=1e-6)

def spread(pred, y): return (pred-y).square().mean(1).mean()

@pytest.mark.parametrize('make', [lambda count: GradAccum(3, count=count), lambda count: BatchSchedule({0: 4, 1: 12}, count=count)], ids=['accum','schedule'])
def test_a_mean_over_items_is_said_in_a_word(make):
    "50 items in batches of 4, the last of 2: to the bit as with a function, and without a warning, beside NoiseScale too"
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        a,b = (learner(make(o), NoiseScale(n_micro=2), model=bn_model, loss_func=spread) for o in ('items',lambda learn: len(learn.y)))
        for o in (a,b): o.fit(2, 0.05)
    assert torch.equal(flat(a), flat(b))
    assert a.recorder.values==b.recorder.values

class Reweighs(Callback):
    "Other class weights from the second epoch on, as where rare classes are learned late"
    def before_epoch(self): self.learn.loss_func.weight = None if self.epoch==0 else torch.tensor([1.,20.,5.,2.], dtype=torch.float64)

def test_class_weights_may_change_in_a_fit():
    a,b = (quiet_learner(loaders(classes, bs), mlp(5, 4), torch.nn.CrossEntropyLoss(), cbs=[Reweighs(),*cbs]) for bs,cbs in ((2,[GradAccum(3)]),(6,[])))
    for o in (a,b): o.fit(3, 0.05)
    torch.testing.assert_close(flat(a), flat(b), rtol=1e-12, atol=1e-14)

@pytest.mark.parametrize('dtype', [torch.uint8,torch.int32,torch.int64])
def test_no_byte_is_ignored(dtype):
    "Class 156 is -100 as a byte"
    targ = torch.tensor([156,3,156,7], dtype=dtype)
    count,_ = loss_elements(torch.nn.CrossEntropyLoss())
    assert count(torch.zeros(4, 200), targ)==4

@pytest.mark.parametrize('yb,n', [((torch.zeros(3),),3), (([torch.zeros(7,4),torch.zeros(2,4),torch.zeros(1,4)],),3),
    (([dict(boxes=torch.zeros(7,4), label=torch.zeros(1)),dict(boxes=torch.zeros(2,4), label=torch.zeros(1))],),2),
    (([torch.zeros(5,4),torch.zeros(5)],),5), (((torch.zeros(5,4),torch.zeros(5)),torch.zeros(5)),5)])
def test_items_of_a_batch(yb, n):
    "Where each has targets of its own, as boxes, too; several targets of a batch are no items"
    assert count_items(None, *yb)==n

@pytest.mark.parametrize('xb,yb,n', [(torch.zeros(4,3,8,8),[torch.zeros(2,4)]*4,4), ([torch.zeros(3,8,8)]*4,[torch.zeros(2,4)]*4,4),
    (torch.zeros(4,3,8,8),[torch.zeros(n,4) for n in (1,2,3,4)],4), ((torch.zeros(5,3),torch.zeros(5,2)),(torch.zeros(5),torch.zeros(5,4)),5),
    (torch.zeros(5,3),(torch.zeros(5),torch.zeros(5,4)),5), (torch.zeros(2,3),[torch.zeros(2,4),torch.zeros(2)],2)])
def test_items_are_those_of_the_inputs_where_each_has_targets_of_its_own(xb, yb, n):
    "Also where all have as many boxes; several targets of a batch have as many rows as it has items"
    assert items_of(SimpleNamespace(xb=(xb,), yb=(yb,)))==n

class Boxes(torch.nn.Module):
    def __init__(self): super().__init__(); self.l = mlp(5, 4, dtype=torch.float32)
    def forward(self, x, *_): return self.l(x)

def test_a_detector_accumulates_exactly():
    "In each window a micro-batch has two boxes in each picture, and the other one differing numbers"
    items = [(x,torch.full((2 if i%8<4 else 1+i%3,4), float(i))) for i,(x,_) in enumerate(regression(16, dtype=torch.float32))]
    def loss(pred, targ): return torch.stack([(p-t).square().mean() for p,t in zip(pred, targ)]).mean()
    def _collate(b): return torch.stack([x for x,_ in b]),[t for _,t in b]
    def _fit(bs, *cbs):
        dl = TorchDataLoader(items, batch_size=bs, collate_fn=_collate)
        learn = quiet_learner(DataLoaders(dl, dl), Boxes(), loss, opt_func=SGD, cbs=cbs)
        learn.fit(2, 1e-3)
        return flat(learn)
    torch.testing.assert_close(_fit(4, GradAccum(2, count='items')), _fit(8), rtol=1e-4, atol=1e-6)

# What is refused

def test_label_smoothing_with_weight_is_refused():
    learn = quiet_learner(loaders(classes, 2), mlp(5,4), LabelSmoothingCrossEntropyFlat(weight=weight.float()), cbs=GradAccum(3))
    with pytest.raises(ValueError, match='LabelSmoothingCrossEntropy with `weight`.*nn.CrossEntropyLoss'): learn.fit(1)
    learn.remove_cb(GradAccum)
    learn.fit(0, cbs=GradAccum(1)) # It accumulates nothing

@pytest.mark.parametrize('count', ['item','',3,['items']], ids=str)
def test_bad_count_is_refused(count):
    for cls in (GradAccum,partial(BatchSchedule, {0: 12})):
        with pytest.raises(TypeError, match="`count` must be a function.*, or 'items' for"): cls(count=count)

@pytest.mark.parametrize('n,exc,match',
    [('3',TypeError,"number or a tensor.*got '3'"), (-1,ValueError,'0 or more, got -1'), (torch.ones(2),TypeError,'of one element'),
    (float('nan'),ValueError,'got nan'), (inf,ValueError,'got inf')])
def test_bad_number_from_count_is_refused(n, exc, match):
    learn = bn_learner(GradAccum(3, count=lambda learn: n))
    before = flat(learn).clone()
    with pytest.raises(exc, match=match): learn.fit(1, 0.1)
    assert torch.equal(before, flat(learn))
    assert_clean(learn, [0.3])
