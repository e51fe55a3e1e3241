"`learn.check_accum`: is accumulating the same as the large batch? Exact where it is, named where not, and nothing left behind"
import itertools
import math
import os
import random
import re
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset
import fastai.callback.fp16 # noqa: F401 (patches `to_fp16` into `Learner`)
import fastai.distributed # noqa: F401 (patches `distrib_ctx` into `Learner`)
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.mixup import MixUp
from fastai.callback.progress import ProgressCallback
from fastai.callback.rnn import rnn_cbs
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import BnFreeze, GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat, DiceLoss, FocalLossFlat, LabelSmoothingCrossEntropyFlat
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from fastai_bs.all import BatchSchedule, bn_to_gn, GradAccum, NoiseScale, ScaledLR
from helpers import RaiseAt, changes, loaders, mlp, picture, quiet_learner, regression, token_model, tokens

f32 = torch.float32
g = torch.Generator().manual_seed(0)
images = [(torch.rand(3,6,6, generator=g),i%3) for i in range(70)] # With 8 in a micro-batch the ninth has 6
reals = regression(70, dtype=f32)
kept = [(x,y.masked_fill(y<0.5*(i%3-1), 0)) for i,(x,y) in enumerate(reals)] # A 0 does not count; items differ in how many do
ids = [(torch.randint(0, 12, (6,), generator=g),torch.randint(0, 12, (6,), generator=g)) for _ in range(70)]

def learner(model, items=images, loss_func=None, bs=8, n_inp=None, **kwargs):
    dls = loaders(items, bs)
    if n_inp: dls.train.n_inp = n_inp
    return quiet_learner(dls, model, loss_func or CrossEntropyLossFlat(), **kwargs)

def seeded(f):
    "Weights that are the same each time"
    def _f(*args, **kwargs):
        torch.manual_seed(0)
        return f(*args, **kwargs)
    return _f

@seeded
def conv(norm=lambda c: nn.GroupNorm(2, c), p=0.): return nn.Sequential(nn.Conv2d(3,4,3), norm(4), nn.ReLU(), nn.Dropout(p), nn.Flatten(), nn.Linear(64,3))
@seeded
def dense(*more): return nn.Sequential(nn.Flatten(), nn.Linear(108,8), *more, nn.Linear(8,3))
@seeded
def lm():
    cfg = {**awd_lstm_lm_config, 'emb_sz': 4, 'n_hid': 5, 'n_layers': 2}
    return get_language_model(AWD_LSTM, 12, config=cfg, drop_mult=1.)

# Where it is the same

class Chance(nn.Module):
    "All kinds of random numbers: Python's, NumPy's, one for each item, and dropout in a part that is computed twice"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Linear(108,8),nn.Linear(8,8),nn.Linear(8,3)
    def forward(self, x):
        x = self.a(x.flatten(1))
        if random.random()<0.5: x = x+self.b(x)
        if np.random.rand()<0.5: x = x.tanh()
        x = x*(torch.rand(len(x),1)<0.7)
        return self.c(x + checkpoint(lambda x: F.dropout(self.b(x), 0.3), x, use_reentrant=False))

class WeightedLoss(nn.Module):
    "With parameters of its own, trained with the model's"
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(3))
    def forward(self, pred, targ): return F.cross_entropy(pred*self.w, targ)

def with_loss_params():
    loss = WeightedLoss()
    return learner(dense(), loss_func=loss, splitter=lambda m: [list(m.parameters()),list(loss.parameters())])

def own_counts(learn): return (learn.y!=0).sum()

def over_kept(pred, targ): return (F.mse_loss(pred, targ, reduction='none')*(targ!=0)).sum()/(targ!=0).sum()

class_weights = torch.tensor([1.,5.,2.])

def frozen_bn(c): return nn.BatchNorm2d(c).requires_grad_(False)

same = dict(bn_in_eval=lambda: learner(conv(frozen_bn), cbs=BnFreeze()), awd_lstm=lambda: learner(lm(), ids, cbs=rnn_cbs(2.,1.)),
    chance=lambda: learner(Chance()), mixup=lambda: learner(conv(), cbs=MixUp()),
    half=lambda: learner(dense().bfloat16(), [(x.bfloat16(),y) for x,y in images], nn.CrossEntropyLoss()),
    double=lambda: learner(token_model(), tokens(70, 0.3), nn.CrossEntropyLoss()), loss_params=with_loss_params,
    counted=lambda: learner(mlp(dtype=f32), kept, over_kept, cbs=GradAccum(2, count=own_counts)),
    callbacks=lambda: learner(conv(), cbs=[GradientClip(0.01),NoiseScale(),ScaledLR(8),GradAccum(8),SaveModelCallback()]),
    scripted=lambda: learner(torch.jit.script(dense(nn.Dropout(0.3)))))

@pytest.mark.parametrize('nm', same)
def test_accumulating_is_the_same_as_the_large_batch(nm):
    "To the last digits of double precision, in a whole window and in the ragged one; the learner and its folder are as they were"
    learn = same[nm]()
    was = picture(learn)
    res = learn.check_accum(4)
    assert changes(was, picture(learn))==[]
    assert os.listdir()==[]
    assert res.error<1e-13
    assert res.same
    assert res.verdict=='same'
    assert res.reasons==[]
    assert res.precision=='double'
    assert 'The same' in repr(res)
    assert 'The same' in res._repr_html_()
    if nm=='double': assert math.isnan(res.rounding)
    else: assert 0<res.rounding<(0.05 if nm=='half' else 1e-5)

# Where it is not

def info_nce(pred, targ): return F.cross_entropy(pred@targ.T, torch.arange(len(pred)))
def unsaid_sum(pred, targ): return F.mse_loss(pred, targ, reduction='sum')

class Centred(nn.Module):
    def forward(self, x): return x-x.mean(0)

other = dict(bn_and_dropout=(lambda: learner(conv(nn.BatchNorm2d, 0.4)), ['batchnorm']),
    bn_and_count=(lambda: learner(nn.Sequential(nn.Linear(5,6), nn.BatchNorm1d(6), nn.Linear(6,2)), kept, over_kept), ['batchnorm','loss']),
    in_a_kernel=(lambda: learner(dense(nn.RReLU(0.1,0.9))), ['layer']),
    own_layer=(lambda: learner(dense(Centred())), ['layer']),
    info_nce=(lambda: learner(mlp(dtype=f32), reals, info_nce), ['loss']),
    label_smoothing=(lambda: learner(conv(), loss_func=LabelSmoothingCrossEntropyFlat(weight=class_weights)), ['loss']))

def keys(res): return [o.key for o in res.reasons]

@pytest.mark.parametrize('nm', other)
def test_each_reason_why_it_is_not_the_same_is_named(nm):
    "Each reason is named, and no other; the learner is as it was"
    make,expected = other[nm]
    learn = make()
    was = picture(learn)
    res = learn.check_accum(4)
    assert changes(was, picture(learn))==[]
    assert res.error>1e-4
    assert not res.same
    assert res.verdict=='different'
    assert keys(res)==expected
    assert math.isnan(res.rounding)
    assert all(str(o)[:30] in res._repr_html_() for o in res.reasons)

def test_batchnorm_alone_is_told_from_the_rest():
    learn = learner(conv(nn.BatchNorm2d))
    reason, = learn.check_accum().reasons
    assert reason.data['rest']<1e-13<1e-3<reason.data['error']
    learn.model = bn_to_gn(learn.model, groups=2)
    assert learn.check_accum().error<1e-13

# What kind of loss it is

two_labels = [(x,torch.tensor(i%3 if i%2 else -100),torch.tensor(i%2 if i%3==0 else -100)) for i,(x,_) in enumerate(reals)] # Of a half, of a third
areas = [(torch.rand(3,4,4, generator=g),torch.randint(0, 3, (4,4), generator=g)) for _ in range(40)]
hits = [(x,(y>0).float()*(i//8%4>0)) for i,(x,y) in enumerate(reals)] # None in the first micro-batch of a window

class TwoHeads(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5,3),nn.Linear(5,2)
    def forward(self, x): return self.a(x),self.b(x)

def ce(*args, **kwargs): return F.cross_entropy(*args, **kwargs)
def two_means(p, a, b): return ce(p[0], a)+ce(p[1], b)
def two_over_items(p, a, b): return (ce(p[0], a, reduction='sum')+ce(p[1], b, reduction='sum'))/len(a)
def three_means(p, y): return F.mse_loss(p, y)+over_kept(p.tanh(), y)+(p.relu()*(y>0)).sum()/(y>0).sum()
def sum_and_mean(p, y): return F.mse_loss(p, y, reduction='sum')+0.1*p.abs().mean()
def over_hits(p, y): return F.binary_cross_entropy_with_logits(p, y, reduction='sum')/y.sum()
def over_hits_or_one(p, y): return F.binary_cross_entropy_with_logits(p, y, reduction='sum')/y.sum().clamp(min=1)
def hardest(p, y):
    d,alike = torch.cdist(p, p),(y[:,None,0]>0)==(y[:,0]>0)
    return F.relu((d*alike).amax(1)-(d+100*alike).amin(1)+1).mean()
def noisy(p, y): return over_kept(p+torch.randn(len(p),1), y)

class FocalAndDice:
    "As in fastai's course on segmentation"
    def __init__(self, reduction): self.focal,self.dice = FocalLossFlat(axis=1),DiceLoss(reduction=reduction)
    def __call__(self, p, y): return self.focal(p, y)+self.dice(p, y)
def dice_of_batch(p, y): return 1-2*(p.softmax(1)[:,1]*(y==1)).sum()/(p.softmax(1)[:,1]+(y==1)).sum()

def task(loss_func, items=reals, model=None, cbs=None, bs=8): return learner(model() if model else mlp(dtype=f32), items, loss_func, bs, 1, cbs=cbs)
def labels(loss_func): return task(loss_func, two_labels, TwoHeads)
def image(loss_func): return task(loss_func, areas, lambda: nn.Conv2d(3,3,3,padding=1))

class AddsMean(Callback):
    "Over the positive targets"
    def after_loss(self): self.learn.loss_grad = self.loss_grad+(self.pred*(self.y>0)).sum()/(self.y>0).sum()

class Weighs(Callback):
    def before_batch(self): self.learn.loss_func.w = self.x.abs().sum(1)
class Weighed:
    "Takes no part of a batch, as its weights are set for the whole"
    def __call__(self, p, y): return ((p-y).square().mean(1)*self.w).sum()/self.w.sum()

def with_penalty():
    "On the parameters, which is counted once for each micro-batch where it is added to a sum"
    model = mlp(dtype=f32)
    def loss(p, y): return F.mse_loss(p, y, reduction='sum')+sum(o.square().sum() for o in model.parameters())
    loss.reduction = 'sum'
    return task(loss, model=lambda: model)

kinds = dict(mean=lambda: task(over_kept, kept), positives=lambda: task(over_hits, [(x,(y>0).float()) for x,y in reals]),
    sum=lambda: task(unsaid_sum), fixed_divisor=lambda: task(lambda p,y: unsaid_sum(p, y)/64),
    divisor=lambda: task(over_hits_or_one, hits),
    parts=lambda: labels(two_means), parts_three=lambda: task(three_means, kept),
    parts_ratio=lambda: image(dice_of_batch), beside=lambda: image(FocalAndDice('sum')), beside_penalty=lambda: task(sum_and_mean),
    pairs=lambda: task(info_nce), pairs_few=lambda: task(info_nce, bs=2), pairs_hardest=lambda: task(hardest),
    counted=lambda: task(nn.MSELoss(), cbs=AddsMean()), counted_sum=with_penalty, unknown=lambda: task(info_nce, reals[:4], bs=1),
    unknown_uncut=lambda: task(Weighed(), cbs=Weighs()), mean_noise=lambda: task(noisy, kept))
kind_of = dict(positives='mean', fixed_divisor='sum')
says = dict(mean=r'not over what is counted.*count=lambda', sum=r"learn.loss_func.reduction = 'sum'", divisor=r'max\(1, positives\)',
    beside='the same `reduction`', parts='average over different numbers, so no single `count=` is exact: give each the same divisor',
    pairs='compares the items', counted='`after_loss`', unknown="If it is a mean.*If it is a sum.*different numbers.*compares the items")

@pytest.mark.parametrize('nm', kinds)
def test_the_kind_of_loss_is_named(nm):
    "With what to do; the learner is as it was"
    kind,learn = kind_of.get(nm, nm.split('_')[0]),kinds[nm]()
    was = picture(learn)
    res = learn.check_accum(4)
    assert changes(was, picture(learn))==[]
    assert res.verdict=='different'
    assert [(o.key,o.data.get('kind')) for o in res.reasons]==[('loss',kind)]
    assert re.search(says[kind], str(res.reasons[0]))

def said_sum(p, y): return unsaid_sum(p, y)
said_sum.reduction = 'sum'

cured = dict(positives=lambda: (task(over_hits, [(x,(y>0).float()) for x,y in reals]),lambda learn: learn.y.sum()), sum=lambda: (task(said_sum),None),
    parts=lambda: (labels(two_over_items),'items'), beside=lambda: (image(FocalAndDice('mean')),'items'))

@pytest.mark.parametrize('nm', cured)
def test_what_it_says_makes_it_exact(nm):
    learn,count = cured[nm]()
    res = learn.check_accum(GradAccum(4, count=count))
    assert res.verdict=='same'
    assert res.error<1e-13

# What accumulates

def test_fastais_callback_divides_a_ragged_window_by_too_little():
    "Nine micro-batches of 8 and one of 6: the window with the ragged one has 38 items, and is divided by 32"
    res = learner(conv()).check_accum(GradientAccumulation(32))
    whole,end = res.errors.values()
    assert whole<1e-13
    assert end==pytest.approx(38/32-1)
    assert res.error==end
    reason, = res.reasons
    assert reason.key=='divides'
    assert reason.data['items']==38
    assert 'GradAccum(4)' in str(reason)

@pytest.mark.parametrize('loss_func,items,expected', [(over_kept,kept,['divides','loss']),
    (info_nce,reals[:64],['loss']), (nn.MSELoss(reduction='sum'),reals,['divides'])], ids=range(3))
def test_what_another_callback_divides_by_is_told_from_what_the_loss_does(loss_func, items, expected):
    assert keys(learner(mlp(dtype=f32), items, loss_func).check_accum(GradientAccumulation(32)))==expected

def test_both_windows_are_named_with_their_sizes():
    "Of fastai's callback, the last one goes on into the next epoch"
    learn = learner(dense())
    first,errors,*_ = learn.check_accum(4).lines()
    assert first=='The same, to rounding: GradAccum(4) against one batch of the same items, in double precision.'
    assert re.fullmatch(r"Relative error of the gradient: \S+ in a window of 4 x 8 items, \S+ in the epoch's last window of 6 items\.", errors)
    _,errors,*_ = learn.check_accum(GradientAccumulation(32)).lines()
    assert errors.endswith(", 0.188 in the epoch's last window, filled up from the next epoch, of 6 + 4 x 8 items.")
    _,errors,*_ = learn.check_accum(GradientAccumulation(70)).lines()
    assert re.fullmatch(r'Relative error of the gradient: \S+ in a window of 8 x 8 \+ 6 items\.', errors)

own_accums = dict(nothing=(None,'GradAccum(4)',4,None), by_items=(lambda: GradAccum(bs=16),'GradAccum(bs=16)',2,None), fastais=(
    lambda: GradientAccumulation(24),'GradientAccumulation(24)',3,None), counted=(lambda: GradAccum(3, count=own_counts),'GradAccum(3, count=...)',3,None),
    by_epoch=(lambda: GradAccum({0: 1, 2: 5}),'GradAccum(5)',5,r'own GradAccum\({0: 1, 2: 5}\) changes from epoch to epoch: windows of 5 micro-batches'),
    one=(lambda: GradAccum(bs=8, count=own_counts),'GradAccum(4, count=...)',4,r'own GradAccum\(bs=8, count=own_counts\) does not accumulate at first, so 4'),
    scheduled=(lambda: BatchSchedule({0: 8, 1: 32}),'GradAccum(4)',4,'own BatchSchedule has micro-batches of its own sizes, so 4'))

@pytest.mark.parametrize('nm', own_accums)
def test_without_an_argument_the_learners_own_is_checked(nm):
    "A number or a callback that is given comes first"
    own,how,n,says = own_accums[nm]
    learn = learner(mlp(dtype=f32), reals, nn.MSELoss(), cbs=own and own())
    was = picture(learn)
    res = learn.check_accum()
    assert changes(was, picture(learn))==[]
    assert res.how==how
    assert [*res.errors][0]==f'a window of {n} x 8 items'
    assert bool(re.search(says or 'own Grad|own Batch', ' '.join(res.notes)))==bool(says)
    assert re.fullmatch(r'GradAccum\(2(, count=...)?\)', learn.check_accum(2).how)
    assert learn.check_accum(GradAccum(bs=32)).how=='GradAccum(bs=32)'

def test_each_window_has_a_reason_of_its_own():
    "BatchNorm in the whole window, the divisor in the last one too; clipping would hide that"
    res = learner(conv(nn.BatchNorm2d), cbs=GradientClip(1e-4)).check_accum(GradientAccumulation(32))
    assert sorted(keys(res))==['batchnorm','divides']

# Precision

def failing(model, when, error):
    "`model`, which raises `error` where `when(x)`"
    def _check(m, x):
        if when(x[0]): raise error
    model.register_forward_pre_hook(_check)
    return model

def single_only(*more): # The error may be of memory, too
    return failing(dense(*more), lambda x: x.dtype!=f32, RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED'))

def test_a_model_without_double_precision_is_checked_in_its_own():
    "In its own, said with the rounding that it has"
    learn = learner(single_only())
    was = picture(learn)
    res = learn.check_accum(4)
    assert changes(was, picture(learn))==[]
    assert res.precision=='single'
    assert res.same
    assert 0<res.error==res.rounding<1e-6
    assert keys(res)==['precision']
    assert res.notes==[]
    assert keys(learner(single_only(), loss_func=lambda pred,y: F.cross_entropy(pred, y, reduction='sum')).check_accum())==['loss','precision']

# Memory

def small(most): return failing(dense(), lambda x: len(x)>most, torch.OutOfMemoryError('out of memory'))

@pytest.mark.parametrize('most,how,items', [(9,4,'4 x 2'),(16,GradientAccumulation(30),'4 x 4')], ids=range(2))
def test_parts_are_checked_where_memory_is_short(most, how, items):
    learn = learner(small(most), images[:64])
    was = picture(learn)
    res = learn.check_accum(how)
    assert changes(was, picture(learn))==[]
    assert list(res.errors)[0].endswith(f'{items} items')
    assert res.error==pytest.approx(32/30-1 if getattr(how, 'n_acc', 0)==30 else 0, abs=1e-13)
    assert any(o.startswith('Memory was short') for o in res.notes)

@pytest.mark.parametrize('exc,times,event', [(ValueError,1000,'before_batch'), (KeyboardInterrupt,1,'before_step')])
def test_an_exception_in_any_event_leaves_nothing_behind(exc, times, event):
    "It passes on, and the learner and its folder are as they were"
    learn = learner(conv(nn.BatchNorm2d, 0.3), cbs=RaiseAt(event, exc, times=times))
    was = picture(learn)
    with pytest.raises(exc): learn.check_accum(4)
    assert not [o for o in changes(was, picture(learn)) if "['raised']" not in o]
    assert os.listdir()==[]

# Bad input

def no_parameter():
    learn = learner(dense())
    for p in learn.model.parameters(): p.requires_grad_(False)
    return learn

x,y = torch.randn(50,5, generator=g),torch.randint(0, 3, (50,), generator=g)

class Endless(IterableDataset):
    def __iter__(self): return iter(zip(x, y))

def of(train): return DataLoaders(train, DataLoader(images, bs=4))

bad = {'n_acc: one': (lambda: learner(dense()), 1, ValueError, 'at least 2 micro-batches, got 1: a single micro-batch'),
    'n_acc: part': (lambda: learner(dense()), 2.5, TypeError, "a whole number of micro-batches, or what accumulates them.* got 2.5"),
    'n_acc: another callback': (lambda: learner(dense()), MixUp(), TypeError, 'got MixUp'),
    'GradAccum(1)': (lambda: learner(dense()), GradAccum(1), ValueError, 'at least 2'),
    'GradientAccumulation(0)': (lambda: learner(dense()), GradientAccumulation(0), ValueError, 'at least 1 item'),
    'GradientAccumulation(1000)': (lambda: learner(dense()), GradientAccumulation(1000), ValueError, r'counts items, and an epoch has 70.*\(8000\)'),
    'no parameter': (no_parameter, 4, ValueError, r'no parameter that is trained.*unfreeze'),
    'no length': (lambda: quiet_learner(of(DataLoader(Endless(), bs=4)), nn.Linear(5,3), nn.CrossEntropyLoss()), 4, ValueError,
        'does not declare a length'),
    'NaN': (lambda: learner(dense(), loss_func=lambda p,y: F.cross_entropy(p*math.nan, y)), 4, ValueError, 'is not finite'),
    'cancels': (lambda: learner(dense(), cbs=Cancels()), 4, ValueError, 'came to no optimizer step')}

class Halves(nn.Module):
    "With complex weights, of whose gradient one half is 0"
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(5, 2, dtype=torch.cfloat))
    def forward(self, x): return x@self.w.imag

class Clips(Callback):
    run_valid = False
    def __init__(self, order): self.order = order
    def before_step(self): nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)

def test_complex_weights_are_compared():
    "Real and imaginary parts, in double precision"
    learn = quiet_learner(loaders(reals, 4), Halves(), nn.MSELoss())
    res = learn.check_accum(3)
    assert (res.verdict,res.precision,res.trains_in)==('same','double','single')
    learn.loss_func = unsaid_sum
    assert learn.check_accum(3).reasons[0].data['kind']=='sum'

def test_batches_that_are_mappings():
    "Of any class, as those of tokenizers: fastai makes a dict of them"
    class ByName(nn.Module):
        def __init__(self): super().__init__(); self.l = mlp(dtype=f32)
        def forward(self, b): return self.l(b['x'])
    def _collate(items):
        x,y = (torch.stack(o) for o in zip(*items))
        return UserDict(x=x),y
    dls = DataLoaders(*(TorchDataLoader(reals, batch_size=4, collate_fn=_collate) for _ in range(2)))
    assert quiet_learner(dls, ByName(), nn.MSELoss()).check_accum(3).verdict=='same'

def test_a_callback_that_changes_each_part_of_the_sum_is_named():
    "With the order that makes it exact: `_Take` sees what comes before it"
    res = task(nn.MSELoss(), cbs=Clips(0)).check_accum(4)
    assert res.verdict=='different'
    assert re.search(r'`before_step`.*`order = 20`', ' '.join(str(res).split()))
    assert task(nn.MSELoss(), cbs=Clips(20)).check_accum(4).verdict=='same'

class Cancels(Callback):
    def before_batch(self): raise CancelBatchException

@pytest.mark.parametrize('nm', bad)
def test_bad_input_is_refused(nm):
    "Refused in words, and the learner is as it was"
    make,n_acc,error,match = bad[nm]
    learn = make()
    was = picture(learn)
    with pytest.raises(error, match=match): learn.check_accum(n_acc)
    assert changes(was, picture(learn))==[]

def test_what_takes_long_is_said_once(monkeypatch, capsys):
    "After two of six runs: both windows twice in double precision, one as it is trained; without a bar all is quiet"
    learn,now = learner(conv()),itertools.count(0, 3)
    monkeypatch.setattr('fastai_bs.verify.check_accum.time.perf_counter', lambda: next(now))
    assert learn.check_accum(4).same
    assert not capsys.readouterr().out
    learn.add_cb(ProgressCallback())
    assert learn.check_accum(4).same
    assert capsys.readouterr().out=="check_accum takes about 12 s more, and longer to find a reason; smaller batches or a smaller `n_acc` take less\n"
    monkeypatch.setattr('fastai_bs.verify.check_accum.worth_saying', 12)
    assert learn.check_accum(4).same
    assert not capsys.readouterr().out

# On several ranks

@pytest.mark.slow
@pytest.mark.xdist_group('ranks')
def test_all_ranks_have_the_answer_of_the_worst():
    "The same answer on all: that of the worst"
    from gloo_ranks import on_ranks
    a,b = on_ranks(_on_rank, 2)
    assert a==b
    assert a[0]>1e-3
    assert a[1]==['batchnorm']

def _on_rank(rank):
    learn = learner(conv(nn.BatchNorm2d))
    with torch.no_grad(): learn.model[0].weight.add_(rank) # Each has its own error
    with learn.distrib_ctx(in_notebook=False): res = learn.check_accum(4)
    return res.error,keys(res),list(res.table.index)
