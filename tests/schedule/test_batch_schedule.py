"BatchSchedule: sizes that change, exactly the large batch's steps, and nothing left behind"
import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, Dataset, SequentialSampler
from fastai.callback import schedule # noqa: F401 (patches `fit_one_cycle` into `Learner`)
from fastai.callback.core import Callback
from fastai.callback.schedule import SchedCos, SchedExp, SchedLin, combine_scheds
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Recorder
from fastai.optimizer import Adam
from fastai_bs.all import adascale_gain, batch_size, BatchSchedule, linear_scaling, ScaledLR, sqrt_scaling
from fastai_bs.learner.loaders import micro_batch_size
from fastai_bs.schedule.batch_schedule import way_to
from helpers import changes, distance, loaders, mlp, momentum_sgd, pairwise, picture, quiet_learner, regression, set_seed, SkipSteps
from pictures import misplaced, narrow, tick_texts

class Seen(Callback):
    "Items of each micro-batch, size of the loader and rate at each step, and how far the fit is"
    order,run_valid = 1000,False
    def __init__(self): self.items,self.steps,self.pcts,self.micros,self.begins = [],[],[],[],[]
    def before_batch(self):
        self.items.append(self.x[:,0].tolist())
        self.micros.append(len(self.x))
        self.pcts.append(self.learn.pct_train)
        accum = getattr(self.learn, 'grad_accum', None)
        if accum and accum.starts_window: self.begins.append((self.learn.pct_train,micro_batch_size(self.learn.dls.train)))
    def after_step(self): self.steps.append((self.learn.epoch,batch_size(self.learn),self.learn.opt.hypers[-1]['lr']))

def learner(bs=4, n=50, cbs=None, opt_func=momentum_sgd, model=None, dls=None, **kwargs):
    set_seed(3)
    dls = dls or loaders(regression(n), bs, **{'shuffle': True, **kwargs})
    return quiet_learner(dls, model or mlp(), opt_func=opt_func, cbs=[Seen(), *(cbs or [])])

def fit(learn, kind='one_cycle', n_epoch=3, **kwargs):
    if kind=='one_cycle': learn.fit_one_cycle(n_epoch, 0.05, **kwargs)
    else: learn.fit(n_epoch, 0.05, **kwargs)
    return learn

def items(learn): return np.concatenate(learn.seen.items)

# A size in micro-batches

@pytest.mark.parametrize('args,way', [((512,),(512,1)), ((512,128),(128,4)), ((96,64),(48,2)), ((17,8),(6,3)), ((64,20),(16,4)),
    ((96,64,3),(32,1)), ((2,None,3),(1,1))])
def test_ways_are_as_few_and_exact_as_can_be(args, way): assert way_to(*args)==way

# What it is the same as

class Rows(Dataset):
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]

def torch_dls(bs, n=50):
    g = torch.Generator().manual_seed(5)
    return DataLoaders(TorchDataLoader(Rows(regression(n)), bs, shuffle=True, generator=g), TorchDataLoader(Rows(regression(4)), 2), device='cpu')

@pytest.mark.parametrize('kind,how,opt_func', pairwise(['one_cycle','fit'], ['fastai','drop_last','torch'], [momentum_sgd,Adam]))
def test_a_grown_micro_batch_follows_a_loader_of_that_size(kind, how, opt_func):
    def _learner(bs, **kwargs):
        return learner(bs, opt_func=opt_func, **(dict(dls=torch_dls(bs)) if how=='torch' else dict(drop_last=how=='drop_last')), **kwargs)
    a,b = fit(_learner(16), kind),fit(_learner(4, cbs=[BatchSchedule({0: 16})]), kind)
    assert a.seen.micros==b.seen.micros
    assert max(b.seen.micros)==16
    assert np.array_equal(items(a), items(b))
    assert distance(a, b)<1e-12
    assert a.recorder.lrs==b.recorder.lrs
    assert len(a.recorder.losses)==len(b.recorder.losses)

# How large a batch is

def sizes_of(learn): return [o[1] for o in learn.seen.steps]

def test_sizes_go_by_the_epoch():
    learn = fit(learner(n=48, cbs=[BatchSchedule({1: 8, 3: 24})]), n_epoch=5)
    assert {e: {bs for i,bs,_ in learn.seen.steps if i==e} for e in range(5)}=={0: {4}, 1: {8}, 2: {8}, 3: {24}, 4: {24}}
    assert [o[-1] for o in learn.recorder.values]==[4,8,8,24,24]
    assert learn.grad_accum.df[['epoch','step','micro_bs','n_acc','bs']].values.tolist()==[[0,0,4,1,4], [1,12,8,1,8], [3,24,24,1,24]]
    assert learn.grad_accum.progress.n_steps==len(learn.seen.steps)==12+6+6+2+2

@pytest.mark.parametrize('f,most', [(SchedExp(4,32),None), (combine_scheds([0.5,0.5], [SchedLin(4,4),SchedCos(4,24)]),8), (lambda pct: 40-36*pct,8)],
    ids=['exp','combined','falls'])
def test_sizes_go_by_the_progress(f, most):
    learn = fit(learner(n=240, cbs=[accum := BatchSchedule(f, max_micro_bs=most)]), n_epoch=4)
    assert learn.seen.pcts[0]==0
    assert max(learn.seen.pcts)<1
    assert (np.diff(learn.seen.pcts)>=-1e-12).all()
    assert 0.98<learn.pct_train<1+1e-9
    assert len(learn.seen.begins)==len(learn.seen.steps)==accum.progress.n_steps
    for (pct,micro),(_,bs,_) in zip(learn.seen.begins, learn.seen.steps):
        assert bs==micro*max(1, int(f(pct)/micro+1e-6))  # As many whole micro-batches as there is room for
        assert micro<=(most or 1000)
    assert max(sizes_of(learn))>=3*min(sizes_of(learn))

def test_a_rule_beside_a_scaled_lr_is_warned_of():
    "The learner's own scales the rate"
    learn = learner(n=48, cbs=[BatchSchedule({0: 4, 1: 16}, rule=sqrt_scaling), ScaledLR(4, linear_scaling, warmup_epochs=0)])
    with pytest.warns(UserWarning, match="so the rule sqrt_scaling of BatchSchedule has no effect"): fit(learn, "fit", n_epoch=2)
    assert [round(lr/0.05, 6) for _,bs,lr in learn.seen.steps]==[bs/4 for _,bs,_ in learn.seen.steps]

@pytest.mark.parametrize('base_bs', [None,8])
def test_the_rate_goes_with_the_size(base_bs):
    learn = fit(learner(n=48, cbs=[BatchSchedule({0: 4, 1: 16}, rule=sqrt_scaling, base_bs=base_bs)]), 'fit', n_epoch=2)
    for _,bs,lr in learn.seen.steps: assert math.isclose(lr, 0.05*(bs/(base_bs or 4))**0.5)
    assert learn.opt.hypers[-1]['lr']==0.05
    assert not any(isinstance(cb, ScaledLR) for cb in learn.cbs)

# Memory

class Hungry(nn.Module):
    "No more than `most` items at a time"
    def __init__(self, most):
        super().__init__()
        self.model,self.most,self.seen = mlp(),most,[]
    def forward(self, x):
        if self.training: self.seen.append(len(x))
        if len(x)>self.most: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.model(x)

def test_where_memory_runs_out_it_goes_on_by_accumulation():
    sizes = {0: 4, 1: 16, 2: 48}
    a = learner(n=96, model=Hungry(10), cbs=[BatchSchedule(sizes)])
    with pytest.warns(UserWarning, match='Out of memory with 16 items') as said: fit(a, n_epoch=4)
    assert any('from the start, take micro-batches of 8 items' in str(o.message) for o in said)
    assert len([o for o in said if 'Out of memory' in str(o.message)])==1 # From the next epoch on the micro-batch is one that fits
    assert sizes_of(a)==[4]*24+[16]*5+[48]*4
    assert max(o for o in a.model.seen if o!=16)<=8
    b = fit(learner(n=96, model=Hungry(100), cbs=[BatchSchedule(sizes), SkipSteps(24)]), n_epoch=4) # The first of the grown batches takes no step
    assert distance(a, b)<1e-12

def test_no_more_than_asked_is_ones_own_affair():
    with pytest.raises(torch.OutOfMemoryError): fit(learner(n=48, model=Hungry(2), cbs=[BatchSchedule({0: 4})]))
    with pytest.raises(torch.OutOfMemoryError): fit(learner(n=48, model=Hungry(8), cbs=[BatchSchedule({0: 4, 1: 32}, max_micro_bs=16)]))

# What is refused

@pytest.mark.parametrize('kwargs,error,says', [
    (dict(bs={}), ValueError, r"in \{0: 8, 3: 32\}; got \{\}"), (dict(bs={0: 0}), ValueError, 'got 0'), (dict(bs={-1: 4}), ValueError, 'got -1'),
    (dict(bs={0: 4.5}), TypeError, '4.5'), (dict(bs=[4,8]), TypeError, 'SchedExp'), (dict(bs=64), TypeError, r'BatchSchedule\(\{0: 64\}\)'),
    (dict(bs=lambda: 64), TypeError, 'positional argument'), (dict(bs=lambda pct: 'a'), TypeError, "number of items"),
    (dict(bs=lambda pct: math.nan), ValueError, "finite"),
    (dict(bs={0: 4}, base_bs=8), ValueError, 'needs a `rule`'),
    (dict(bs={0: 4}, max_micro_bs=0), ValueError, 'max_micro_bs'), (dict(bs={0: 4}, base_bs=1.5), TypeError, 'base_bs'),
    (dict(bs={0: 4}, rule=128), TypeError, '`rule` must be a function')])
def test_bad_arguments_are_refused_at_once(kwargs, error, says):
    with pytest.raises(error, match=says): BatchSchedule(**kwargs)

@pytest.mark.parametrize('accum,more,says', [
    (lambda: BatchSchedule({0: 4, 1: 64}), [], 'more than the 48 of the training set'),
    (lambda: BatchSchedule(SchedExp(4, 64)), [], 'more than the 48'),
    (lambda: BatchSchedule(lambda pct: 4 if pct<0.5 else 0), [], 'at least one item'),
    (lambda: BatchSchedule({0: 8}), [lambda: GradientAccumulation(8)], 'Only one callback can decide'),
    (lambda: BatchSchedule({0: 8}, rule=adascale_gain), [], 'noise scale'),
    (lambda: BatchSchedule(SchedLin(4, 16), rule=lambda k: 3.-k), [], 'above 0'),
], ids=['more than there is','more at the end','nothing at the end','GradientAccumulation','rule','rule that fails at some size'])
def test_what_cannot_be_scheduled_is_refused_before_anything_changes(accum, more, says):
    learn = learner(n=48)
    learn.create_opt()
    learn.add_cbs([accum(), *(o() for o in more)])
    before = picture(learn, only=('model','opt','dls'))
    with pytest.raises(ValueError, match=says): fit(learn)
    assert changes(before, picture(learn, only=('model','opt','dls')))==[]

def test_a_loader_that_cannot_be_given_another_size():
    class Own(BatchSampler): pass
    items = Rows(regression(48))
    dls = DataLoaders(TorchDataLoader(items, batch_sampler=Own(SequentialSampler(items), 4, False)), TorchDataLoader(items, 4), device='cpu')
    with pytest.raises(ValueError, match='max_micro_bs=4'): fit(learner(dls=dls, cbs=[BatchSchedule({0: 4, 1: 8})]))
    learn = fit(learner(dls=dls, cbs=[BatchSchedule({0: 4, 1: 8}, max_micro_bs=4)]), n_epoch=2)
    assert sizes_of(learn)==[4]*12+[8]*6

def test_what_cannot_be_met_is_rounded_and_said():
    with pytest.warns(UserWarning, match='17 items is not made of whole micro-batches here: from epoch 1 on it is 18 items, in micro-batches of 6') as said:
        learn = fit(learner(n=48, cbs=[BatchSchedule({0: 4, 1: 17}, max_micro_bs=8)]), n_epoch=4)
    assert len(said)==1
    assert set(sizes_of(learn))=={4,18}

@pytest.mark.parametrize('sizes', [[64],[64,128,512],[90,100,120],[64*round(1.08**i) for i in range(60)]], ids=len)
def test_the_batch_size_is_drawn_over_the_epochs(sizes):
    "Doublings are as high as each other, and the ticks are at its sizes"
    rec = Recorder()
    rec.schedule = SimpleNamespace(df=pd.DataFrame(dict(epoch=np.arange(len(sizes)), bs=sizes)), n_trained=len(sizes))
    for mine in (None,narrow()):
        ax = rec.plot_batch_size(mine)
        assert ax.lines[0].get_xydata().tolist()==[[i,bs] for i,bs in enumerate([*sizes,sizes[-1]])]
        assert misplaced(ax.figure)==[]
        assert {*tick_texts(ax.yaxis).values()}<={*sizes}
        assert ax.yaxis.get_transform().base==2
    plt.close('all')
