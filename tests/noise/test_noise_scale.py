"NoiseScale beside GradAccum: exact against per-item gradients, and not a bit of the training changed"
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelFitException,
                                  CancelTrainException)
from fastai.callback.schedule import fit_one_cycle # noqa: F401, it adds the method
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import Adam, SGD
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from fastai_bs.accumulate.losses import ElementCounter
from fastai_bs.all import GradAccum, NoiseScale
from fastai_bs.noise.estimator import pooled
from fastai_bs.noise.noise_scale import Moments
from fastai_bs.noise.sources import FromSteps
from helpers import (Overflowing, RaiseAt, changes, exported, left_behind, listed, loaders, mlp, n_kept, quiet_learner, regression, set_seed,
    token_task)
from oracle import item_grads, noise_scale, window_rows, windows_in_order, z_score

class Embeddings(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.embs,self.out = nn.ModuleList([nn.Embedding(9,3,sparse=sparse),nn.Embedding(5,3,sparse=sparse)]),nn.Linear(6,1)
    def forward(self, x): return self.out(torch.cat([e(x[:,i]) for i,e in enumerate(self.embs)], 1))

def classes(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return list(zip(torch.randn(n, 5, generator=g, dtype=torch.float64) + 0.3*y[:,None], y))

elems_of = {'mlp': 2, 'convnet': 1, 'embeddings': 1, 'tokens': 4} # Elements of the loss in an item

def task(kind, n=203):
    "Items, a model in float64 and its loss"
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    if kind=='mlp': return regression(n), mlp(), nn.MSELoss()
    if kind=='tokens': return token_task(n)
    y = torch.randint(3, (n,), generator=g)
    if kind=='convnet':
        x = torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64) + 0.6*y[:,None,None,None]
        model = nn.Sequential(nn.Conv2d(1,4,3), nn.GroupNorm(2,4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16,3))
        return list(zip(x,y)), model.double(), nn.CrossEntropyLoss()
    if kind=='embeddings':
        x = torch.stack([torch.randint(k, (n,), generator=g) for k in (9,5)], 1)
        return list(zip(x, 0.2*x[:,:1] + torch.randn(n, 1, generator=g, dtype=torch.float64))), Embeddings().double(), nn.MSELoss()

@cache
def task_grads(kind, n=203): return item_grads(*(task(kind, n)[i] for i in (1,2,0)))

def measure(items, model, loss_func, bs=2, n_acc=5, n_epoch=1, lr=0., shuffle=False, cbs=(), noise=None, opt_func=SGD, **kwargs):
    "The `NoiseScale` of a fit in windows of `n_acc`, or as `GradAccum` is among `cbs`; with 0 without windows. At the present weights unless `lr`"
    set_seed(0)
    noise = noise or NoiseScale()
    accum = [GradAccum(n_acc)] if n_acc and not any(isinstance(cb, GradAccum) for cb in cbs) else []
    quiet_learner(loaders(items, bs, shuffle=shuffle), model, loss_func, opt_func, cbs=[*accum, noise, *cbs], **kwargs).fit(n_epoch, lr)
    return noise

def expected(items, model, loss_func, windows, elems=2):
    "The rows that the gradients of single `items` make, of `elems` elements each or one number of them for each"
    return window_rows(item_grads(model, loss_func, items), windows, torch.full((len(items),), elems) if isinstance(elems, int) else elems)

def assert_rows(df, expected, rtol=1e-8):
    assert len(df)==len(expected)>0
    np.testing.assert_allclose(df[expected.columns], expected, rtol=rtol, atol=rtol*abs(expected.g_sq).max())

# Against per-item gradients

@pytest.mark.parametrize('kind,bs,n_acc', [('convnet',3,4), ('embeddings',2,5), ('tokens',2,5)])
def test_rows_are_those_of_the_items(kind, bs, n_acc):
    "Ragged micro-batches and windows too: 203 items"
    rows = window_rows(task_grads(kind), windows_in_order(203, bs, n_acc), torch.full((203,), elems_of[kind]))
    assert_rows(measure(*task(kind), bs, n_acc).df, rows)

@pytest.mark.parametrize('own', [False,True])
def test_rows_are_those_of_the_tokens_that_count(own):
    "There are micro-batches in which nothing counts, and some windows with one in which something does; also by a `count` for a loss of one's own"
    items,model,loss_func = token_task(150, 0.8)
    accum = GradAccum(3, count=(lambda learn: (learn.yb[0]!=-100).sum()) if own else None)
    if own: loss_func = partial(F.cross_entropy, ignore_index=-100)
    rows = expected(items, model, loss_func, windows_in_order(150, 1, 3), n_kept(items))
    assert len(rows)<50
    assert_rows(measure(items, model, loss_func, 1, cbs=[accum]).df, rows)

def test_with_class_weights_an_element_is_a_unit_of_weight():
    items,model,loss_func = classes(203),mlp(n_out=3),nn.CrossEntropyLoss(weight=torch.tensor([1,2,0.5], dtype=torch.float64))
    weights = loss_func.weight[torch.stack([y for _,y in items])]
    assert_rows(measure(items, model, loss_func, 8, 4).df, expected(items, model, loss_func, windows_in_order(203, 8, 4), weights))

def test_steps_that_are_measured():
    "The first 100 of a fit, over its epochs, and then every 4th; or every so many from the first one on"
    items = regression(76)
    for every,steps in ((None,[*range(1, 101),101,105,109,113]), (1,range(1, 115)), (25,[1,26,51,76,101])):
        noise = measure(items, mlp(), nn.MSELoss(), 1, 2, n_epoch=3, noise=NoiseScale(every=every))
        assert noise.df.step.tolist()==[*steps]
        assert noise.n_steps==114
        windows = 3*windows_in_order(76, 1, 2)
        assert_rows(noise.df, expected(items, mlp(), nn.MSELoss(), [windows[i-1] for i in steps]))

# What other callbacks do

def test_overflows_of_a_scaled_loss_are_dropped():
    "At 4096, 2048 and 1024, which the optimizer does not see either; the other rows are those of the loss as it is"
    items = regression(100)
    noise = measure(items, mlp(), nn.MSELoss(), cbs=[Overflowing(init_scale=4096.)], n_epoch=2)
    assert noise.n_dropped==3
    assert noise.df.step.tolist()==list(range(4,21))
    assert_rows(noise.df, expected(items, mlp(), nn.MSELoss(), (2*windows_in_order(100, 2, 5))[3:]))

def cancelled(event, exc, at, order, n, first, bs=2, k=3):
    "Rows of a fit in which a micro-batch is cancelled, and those of windows of the micro-batches from `first` on, without it"
    items,model = regression(n),mlp()
    micro = [[bs*i,bs*i+1] for i in range(first, n//bs) if i!=at]
    df = measure(items, model, nn.MSELoss(), bs, k, cbs=[RaiseAt(event, exc, at, order=order)]).df
    return df,expected(items, model, nn.MSELoss(), [micro[i:i+k] for i in range(0, len(micro), k)])

@pytest.mark.parametrize('event,exc,order,at', [('after_pred',CancelBatchException,6.5,0), ('before_backward',CancelBackwardException,100,2)])
def test_a_micro_batch_cancelled_before_its_backward_is_not_measured(event, exc, order, at):
    "The window goes on without it: with 8 micro-batches in windows of 3, cancelling one leaves two windows of 3 and a last one of 1"
    assert_rows(*cancelled(event, exc, at, order, 16, 0))

@pytest.mark.parametrize('event,at,order', [('after_backward',1,0), ('before_step',2,20)])
def test_a_window_cancelled_after_a_backward_leaves_no_row(event, at, order):
    "A new one starts with the next micro-batch"
    df,rows = cancelled(event, CancelBatchException, at, order, 18, at+1)
    measured = event=='before_step' and order>=6 # By then it is no longer a matter of the gradient
    assert_rows(df[1:] if measured else df, rows)

@pytest.mark.parametrize('exc', [CancelTrainException, CancelFitException])
def test_a_cancelled_epoch_leaves_nothing_behind(exc):
    "Cancelled after 7 of 10 micro-batches: an open window of one closes where training goes on to its end, and has no row"
    items,model = regression(20),mlp()
    one = expected(items, model, nn.MSELoss(), windows_in_order(12, 2, 3))
    noise = measure(items, model, nn.MSELoss(), 2, 3, n_epoch=2, cbs=[RaiseAt('before_batch', exc, 7)])
    assert_rows(noise.df, one if exc is CancelFitException else pd.concat([one,one]))

# It changes nothing

class Losses(Callback):
    order = 100
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(self.loss.item())

def all_left(learn):
    "Weights, buffers, optimizer state, losses, hidden state, all random numbers; gradients are the same objects, zero or `None`"
    return {**left_behind(learn), 'losses': (learn.losses.seen, [float(o) for o in learn.recorder.losses])}

def with_batchnorm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8,2))

def awd_lstm():
    torch.manual_seed(0)
    return get_language_model(AWD_LSTM, 13, {**awd_lstm_lm_config, 'emb_sz': 6, 'n_hid': 7, 'n_layers': 2, 'tie_weights': True})

def trained(observed):
    set_seed(2)
    learn = quiet_learner(loaders(regression(203, dtype=torch.float32), 4, shuffle=True), with_batchnorm(), nn.MSELoss(), Adam, wd=0.1,
                          cbs=[GradAccum(3), GradientClip(0.1), Losses(), *([NoiseScale()] if observed else [])])
    learn.fit_one_cycle(2, 0.03)
    assert not observed or len(learn.noise_scale.rows)>10
    return all_left(learn)

def test_training_is_bit_identical(): assert changes(trained(False), trained(True))==[]

def n_hooks(model): return sum(len(p._backward_hooks or ()) for p in model.parameters())

@pytest.mark.parametrize('event,exc,there', [('after_backward',KeyboardInterrupt,4), ('before_validate',ValueError,0)])
def test_no_hook_stays(event, exc, there):
    "However a fit ends, here in its second window; and the next one measures as if there had been none"
    items,model,noise,seen = regression(30),mlp(),NoiseScale(),[]
    stop = RaiseAt(event, exc, [4,5], order=100)
    look = Callback(**{event: lambda self: seen.append(n_hooks(self.model))})
    learn = quiet_learner(loaders(items, 2), model, nn.MSELoss(), cbs=[GradAccum(3), noise, look, stop])
    with suppress(ValueError, KeyboardInterrupt): learn.fit(1, 0.)
    assert stop.raised
    assert seen[-1]==there
    assert n_hooks(model)==0
    learn.remove_cb(stop)
    learn.fit(1, 0.)
    assert n_hooks(model)==0
    assert_rows(noise.df, expected(items, model, nn.MSELoss(), windows_in_order(30, 2, 3)))

# What is refused, and what is said

def test_two_noise_scales_are_refused():
    learn = quiet_learner(loaders(regression(30), 2), mlp(), cbs=[GradAccum(2), NoiseScale(), NoiseScale(0.9)])
    with pytest.raises(ValueError, match='learner has 2 NoiseScale: remove'): learn.fit(1, 0.1)

bad = dict(beta=(0,1,float('nan')), ci=(0,'0.9'), every=(0,1.5,True), n_micro=(1,None))

@pytest.mark.parametrize('kwargs', [{nm: v} for nm,values in bad.items() for v in values], ids=str)
def test_arguments_out_of_range_are_refused(kwargs):
    with pytest.raises((ValueError,TypeError), match=f'`{[*kwargs][0]}`'): NoiseScale(**kwargs)

def test_properties_are_those_of_the_last_row():
    noise,other = (measure(regression(203), mlp(), nn.MSELoss(), noise=NoiseScale(**o)) for o in ({},dict(ci=0.8)))
    df = noise.df
    numbers = 'n_elems','tr_sigma','g_sq','noise_scale','low','high','mean_tr_sigma','mean_g_sq'
    assert df.dtypes.to_dict()=={'step': int, 'n_items': int, **dict.fromkeys(numbers, float)}
    assert all(type(o) is float for o in (noise.noise_scale,noise.g_sq,noise.tr_sigma,*noise.ci))
    assert noise.ci==tuple(df.iloc[-1][['low','high']])
    assert noise.noise_scale==df.noise_scale.iloc[-1]
    assert noise.ci[0]<other.ci[0]<noise.noise_scale==other.noise_scale<other.ci[1]<noise.ci[1]
    assert (df.low[:2]==0).all()
    assert np.isinf(df.high[:2]).all()
    for i in (0,7,20): # As known by then
        p = pooled(df[:i+1], 0.99)
        assert [2*o for o in df.loc[i,['noise_scale','low','high']]]==pytest.approx([p.noise_scale,*p.interval()])

def test_a_learner_with_it_is_exported_and_loaded(tmp_path):
    learn = quiet_learner(listed(), nn.Linear(2,1), nn.MSELoss(), SGD, cbs=[GradAccum(2), NoiseScale(0.9)], path=tmp_path)
    learn.fit(1, 0.1)
    other = exported(learn, tmp_path)
    assert other.noise_scale.beta==0.9
    assert len(other.noise_scale.df)==6
    pd.testing.assert_frame_equal(other.noise_scale.df, learn.noise_scale.df)

def test_drift_is_of_what_the_means_look_back_on():
    "With `beta` of 0.95 of 20 measurements: not of fewer, nor of a fall before them"
    noise = NoiseScale(0.95)
    noise.rows = [Moments(i+1, 8, 8., t, 1.) for i,t in enumerate([100.]*40 + [1.]*10 + [2.]*10)]
    assert noise.drift==1

# The cool stretch

def test_at_rest_consecutive_steps_are_windows():
    "Of eight batches each, exact against the gradients of the items; a batch of another size is left out"
    items,model,loss_func = task('mlp')
    noise = measure(items, model, loss_func, bs=8, n_acc=0, n_epoch=2)
    windows = [list(range(64*i, 64*(i+1))) for i in range(3)]
    rows = window_rows(task_grads('mlp'), [[w[8*i:8*(i+1)] for i in range(8)] for w in windows], torch.full((203,), 2))
    df = pd.DataFrame(noise.cool_rows)
    assert len(df)==2*3 # An epoch has 25 whole batches, and windows end with it
    for nm in ('n_elems','tr_sigma','g_sq'): assert df[nm][:3].tolist()==pytest.approx(rows[nm].tolist(), rel=1e-8)
    assert df.n_items.tolist()==[64]*6

def test_windows_of_the_cool_stretch_come_last_in_a_cycle():
    "Where the rate is below a twentieth of its peak; in windows of several micro-batches their own measurements count"
    items,model,loss_func = task('mlp')
    def _fit(cbs, bs, every=None):
        noise,rates = NoiseScale(every=every),[]
        class Look(Callback):
            def after_step(self): rates.append(self.opt.hypers[-1]['lr'])
        set_seed(0)
        quiet_learner(loaders(items, bs), task('mlp')[1], loss_func, SGD, cbs=[*cbs,noise,Look()]).fit_one_cycle(6, 0.01)
        return noise,np.array(rates)
    whole,rates = _fit([], 8)
    is_cool = (rates<=0.05*max(rates)) & (np.arange(len(rates))>20)
    assert whole.peak==max(rates)
    assert 0<len(whole.cool_rows)<=is_cool.sum()//8
    assert all(is_cool[r.step-8:r.step].all() for r in whole.cool_rows)
    for every in (1,None): # Each window; and after the first 100 steps every 4th
        windows,rates = _fit([GradAccum(4)], 2, every)
        is_cool = (rates<=0.05*max(rates)) & (np.arange(len(rates))>20)
        assert is_cool.sum()>10
        assert len(windows.cool_rows)==is_cool[::every or 4].sum()
        assert [r.step for r in windows.cool_rows]==[r.step for r in windows.rows if is_cool[r.step-1]]
        assert windows.cool.n_windows==len(windows.cool_rows)
        assert 'where the rate was lowest' in repr(windows)

def test_a_watched_cycle_is_the_same_to_the_last_bit():
    items,_,loss_func = task('convnet')
    models = []
    for cbs in ([],[NoiseScale()]):
        set_seed(0)
        learn = quiet_learner(loaders(items, 4, shuffle=True), task('convnet')[1], loss_func, Adam, cbs=cbs)
        learn.fit_one_cycle(3, 0.01)
        models.append([p.detach().clone() for p in learn.model.parameters()])
    assert cbs[0].cool_rows
    assert all(torch.equal(a, b) for a,b in zip(*models))

def cool_window(batches, grads, loss_func=None):
    "What eight steps with these targets and gradients of two parameters, or `None`, make a window of"
    params = [nn.Parameter(torch.zeros(2)),nn.Parameter(torch.zeros(2))]
    learn = SimpleNamespace(loss_func=loss_func or nn.MSELoss(), pred=None, yb=None)
    steps,res = FromSteps(learn, ElementCounter()),None
    for y,gs in zip(batches, grads, strict=True):
        learn.yb = (y,)
        for p,g in zip(params, gs): p.grad = None if g is None else torch.tensor(g)
        res = res or steps.after_backward(params)
    return res

def test_a_layer_that_is_left_out_has_a_gradient_of_0():
    "As with LayerDrop: the sums are those of each parameter"
    a,b = [1.,1.],[2.,0.]
    res = cool_window([torch.zeros(4)]*8, [(a,None),(None,b)]*4)
    assert res.sq_mean==pytest.approx(0.5**2*2 + 1**2)
    assert res.total/res.n_elems==pytest.approx((2+4)/2)
    assert (res.n_micro,res.n_items)==(8,32)

def test_batches_of_a_window_may_count_differently():
    "The mean of their gradients has the noise of the harmonic mean; a batch in which nothing counts ends the window without a measurement"
    labels = [torch.tensor([1,1,-100,-100])]*4+[torch.tensor([1,1,1,1])]*4
    res = cool_window(labels, [([1.,1.],[0.,0.])]*8, nn.CrossEntropyLoss())
    assert res.n_elems==pytest.approx(8*8/(4/2+4/4))
    assert cool_window([*labels[:7],torch.full((4,), -100)], [([1.,1.],[0.,0.])]*8, nn.CrossEntropyLoss()) is None

def test_no_sparse_gradient_is_added_up():
    items,_,loss_func = task('embeddings')
    x = [(a,b.float()) for a,b in items]
    noise = NoiseScale()
    quiet_learner(loaders(x, 8), Embeddings(sparse=True), loss_func, SGD, cbs=noise).fit(1, 0.)
    assert noise.cool_rows==[]
    assert len(noise.rows)>0

def test_a_batch_of_another_size_is_no_part_of_a_window():
    "Seven batches of 27 items, and one of 14"
    assert measure(*task('mlp'), bs=27, n_acc=0, n_epoch=2).cool_rows==[]

def test_no_gradient_that_somebody_else_adds_up_is_a_step_s():
    items,_,loss_func = task('mlp')
    noise = NoiseScale()
    quiet_learner(loaders(items, 8), task('mlp')[1], loss_func, SGD, cbs=[noise,GradientAccumulation(16)]).fit(1, 0.)
    assert noise.steps is None
    assert {o.n_items for o in noise.cool_rows}=={8} # Measured in parts

def test_rows_of_the_cool_stretch_are_bounded():
    "At rest every window belongs to it"
    noise = NoiseScale()
    noise.most_cool = 5
    measure(*task('mlp'), bs=2, n_acc=5, noise=noise)
    assert len(noise.rows)>15
    assert 2<len(noise.cool_rows)<=6
    assert noise.cool_rows[-1]==noise.rows[-1]

def test_the_exact_noise_scale_is_found(kind='tokens'):
    exact = noise_scale(task_grads(kind, 200))
    noise = measure(*task(kind, 200), n_epoch=3, shuffle=True)
    assert len(noise.df)>=50  # The window holds 10 items
    assert 0.1 < exact/10 < 5
    assert noise.ci[0] <= exact <= noise.ci[1]
    assert abs(z_score(noise.df, elems_of[kind]*exact)) <= 3 < abs(z_score(noise.df, exact)) # In elements, not in items
