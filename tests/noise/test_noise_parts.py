"NoiseScale without GradAccum: exact against per-item gradients, and not a bit of the training changed"
import copy, random
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
                                  CancelTrainException)
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.rnn import RNNCallback, rnn_cbs
from fastai.callback.schedule import fit_one_cycle, lr_find # noqa: F401, they add the methods
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Recorder
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, LabelSmoothingCrossEntropy, MSELossFlat
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastai.text.data import LMDataLoader
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.noise.noise_scale import NoiseScale
from helpers import (changes, left_behind, loaders, mlp, momentum_sgd, n_kept, no_bf16_lstm, pairwise, picture, quiet_learner, RaiseAt, regression,
                     ScaledLoss, set_seed, token_task)
from oracle import item_grads, noise_scale, window_rows, z_score
from test_noise import (Losses, Overflowing, assert_rows, awd_lstm, classes, n_hooks, task, task_grads, with_batchnorm)

def parts(n, bs, n_micro=4, every=1, least=None, n_epoch=1):
    "Items of each part of each batch that is measured, in order, and the steps of these batches"
    windows,steps,step,due = [],[],0,1
    for _ in range(n_epoch):
        for i in range(0, n, bs):
            batch,step = list(range(i, min(i+bs,n))),step+1
            if step<due or len(batch)<(least or n_micro): continue
            at = [len(batch)*j//n_micro for j in range(n_micro+1)]
            windows.append([batch[a:b] for a,b in zip(at, at[1:])])
            steps.append(step)
            due = step+every
    return windows,steps

def measure(items, model, loss_func, bs=12, n_micro=4, every=1, n_epoch=1, lr=0., shuffle=False, cbs=(), opt_func=SGD, seed=0, noise=None, **kwargs):
    "The `NoiseScale` of a fit without windows, at the present weights unless `lr`"
    set_seed(seed)
    noise = noise or NoiseScale(every=every, n_micro=n_micro)
    learn = quiet_learner(loaders(items, bs, shuffle=shuffle), model, loss_func, opt_func, cbs=[noise, *cbs], **kwargs)
    learn.fit(n_epoch, lr)
    return noise

def small(n=64, bs=8, cbs=None, model=None, items=None, **kwargs):
    "A learner that could be measured"
    set_seed(0)
    return quiet_learner(loaders(items or regression(n), bs, shuffle=True), model or mlp(), cbs=cbs, **kwargs)

# It changes nothing

class Around(Callback):
    "What is there before NoiseScale has a look at a batch, and is the same afterwards"
    order,run_valid = Recorder.order,False
    def before_batch(self): self.seen = around(self.learn)

class Afterwards(Callback):
    order,run_valid = NoiseScale.order+1,False
    def before_batch(self):
        assert changes(self.around.seen, around(self.learn))==[]
        assert n_hooks(self.model)==0

def around(learn):
    "What `learn` is trained with, all of it, and which objects else it has"
    own,res = dict(vars(learn)),picture(learn, only=('model','opt','loss_func','xb','yb'))
    return {**res, **{f'.{k}': id(v) for k,v in own.items()}, None: (own,res[None])} # Kept alive, as `picture` does

class Keeps(nn.Module):
    "Counts its calls and remembers the last output in plain attributes, and both show in the next output; draws from all generators"
    def __init__(self):
        super().__init__()
        self.m,self.n,self.last,self.gen = mlp(dtype=torch.float32),0,torch.zeros(2),torch.Generator().manual_seed(3)
    def forward(self, x):
        self.n += 1
        res = self.m(x)*(1+0.01*self.n) + 0.1*self.last + 0.1*random.random() + 0.1*np.random.rand() + 0.1*torch.rand(1, generator=self.gen)
        self.last = res.detach().mean(0)
        self.m[1].told = [self.last, {'n': self.n}]
        return res

class InPlace(nn.Module):
    "Changes its input"
    def __init__(self): super().__init__(); self.m = mlp(dtype=torch.float32)
    def forward(self, x): return self.m(x.mul_(0.5))

class Stateful(Callback):
    "The more often it was asked, the more it changes"
    def before_fit(self): self.n,self.preds,self.mean = 0,[],{'pred': torch.zeros(2)}
    def after_pred(self):
        self.n += 1
        self.preds.append(self.pred.detach().mean())
        self.mean['pred'].lerp_(self.pred.detach().mean(0), 0.1)
        self.learn.pred = self.pred + 0.01*self.mean['pred']
    def after_loss(self): self.learn.loss_grad *= 1+0.01*len(self.preds)
    def before_backward(self): self.learn.loss_grad = self.loss_grad*(1+0.01*self.n)

class KeepsLoss(nn.Module):
    "A loss with a state"
    reduction = 'mean'
    def __init__(self): super().__init__(); self.register_buffer('n', torch.zeros(())); self.calls = 0
    def forward(self, p, y):
        self.n += 1
        self.calls += 1
        return F.mse_loss(p, y)*(1+0.01*self.n+0.01*self.calls)

class TwoInputs(nn.Module):
    def __init__(self): super().__init__(); self.m = mlp(10, dtype=torch.float32)
    def forward(self, a, b): return self.m(torch.cat([a,b], 1))

class Nested(nn.Module):
    "Its input is a tuple with a dict"
    def __init__(self): super().__init__(); self.m = TwoInputs()
    def forward(self, x): return self.m(x[0], x[1]['b'])

class MixedOnCPU(MixedPrecision):
    "Mixed precision that a CPU has, and a scale that moves"
    def before_fit(self):
        self.autocast,self.scales = torch.autocast('cpu', dtype=torch.bfloat16),[]
        self.learn.scaler = GradScaler('cpu', growth_interval=3, **self.kwargs)

def floats(n, **kwargs): return regression(n, dtype=torch.float32, **kwargs)

def lm_loaders():
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(13, (40+i,), generator=g) for i in range(12)]
    return DataLoaders(LMDataLoader(texts, bs=6, seq_len=9, num_workers=0), LMDataLoader(texts[:6], bs=6, seq_len=9, num_workers=0), device='cpu')

kinds = {
    'sgd': dict(), 'adam': dict(opt_func=Adam), 'adamw': dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)),
    'awd_lstm': dict(items=[(o[:-1],o[1:]) for o in torch.randint(13, (86,7), generator=torch.Generator().manual_seed(1))], model=awd_lstm, opt_func=Adam,
                     loss_func=CrossEntropyLossFlat, cbs=lambda: rnn_cbs(alpha=2., beta=1.)), # 6 in the last batch
    'lm': dict(items=lm_loaders, model=awd_lstm, loss_func=CrossEntropyLossFlat, cbs=lambda: rnn_cbs(alpha=2., beta=1.)),
    'keeps': dict(model=Keeps), 'loss': dict(loss_func=KeepsLoss), 'callback': dict(cbs=lambda: [Stateful()]),
    'accum 1': dict(cbs=lambda: [GradAccum(1)]), 'accum of fastai': dict(cbs=lambda: [GradientAccumulation(32)]),
    'two inputs': dict(items=[(a,b,y) for (a,y),(b,_) in zip(floats(91), floats(91, seed=1))], model=TwoInputs),
    'nested': dict(items=[((a,{'b': b}),y) for (a,y),(b,_) in zip(floats(91), floats(91, seed=1))], model=Nested),
    'bf16': dict(cbs=lambda: [MixedOnCPU()]),
    'bf16 lstm': dict(items=lm_loaders, model=awd_lstm, loss_func=CrossEntropyLossFlat, cbs=lambda: [MixedOnCPU(), *rnn_cbs()]), # Not on each CPU
    'scaled': dict(cbs=lambda: [ScaledLoss(init_scale=64., growth_interval=3)]), 'overflows': dict(cbs=lambda: [Overflowing(init_scale=4096.)]),
}

def trained(observed, items=None, model=with_batchnorm, loss_func=nn.MSELoss, opt_func=momentum_sgd, cbs=list, every=2, **noise):
    set_seed(0) # A loader draws its own seed
    dls = items() if callable(items) else loaders(items or floats(91), 16, shuffle=True)
    learn = quiet_learner(dls, model(), loss_func(), opt_func, wd=0.1,
                          cbs=[Losses(), *cbs(), Around(), Afterwards(), *([NoiseScale(every=every, **noise)] if observed else [])])
    set_seed(2)
    learn.fit_one_cycle(2, 0.02)
    return learn, {**left_behind(learn), 'losses': (learn.losses.seen, [float(o) for o in learn.recorder.losses])}

@pytest.mark.filterwarnings('ignore:GradAccum cannot tell', 'ignore:You are shadowing')
@pytest.mark.parametrize('kind', kinds)
def test_training_is_bit_identical(kind):
    "Weights, buffers, optimizer state, losses, hidden state, all random numbers; gradients are the same objects, zero or `None`"
    if kind=='bf16 lstm' and no_bf16_lstm(): pytest.skip(no_bf16_lstm())
    (_,plain),(learn,observed) = (trained(o, **kinds[kind]) for o in (False,True))
    assert len(learn.noise_scale.df)+learn.noise_scale.n_dropped >= 3
    assert changes(plain, observed)==[]

def test_the_batch_is_trained_on_as_it_came():
    "The parts must be no views of a batch that the model changes"
    (_,plain),(_,observed) = (trained(o, model=InPlace) for o in (False,True))
    assert changes(plain, observed)==[]

# Windows of one batch, and of several

moving = {'up': {0: 1, 1: 3}, 'down': {0: 3, 1: 1}, 'and back': {0: 1, 1: 4, 2: 1}, 'never': {0: 1, 3: 4}}

def moved(n_acc, observed, cbs=(), n_epoch=3, **noise):
    set_seed(0)
    learn = quiet_learner(loaders(floats(91), 8, shuffle=True), with_batchnorm(), wd=0.1,
                          cbs=[Losses(), GradAccum(n_acc), *cbs, *([NoiseScale(**noise)] if observed else [])])
    set_seed(2)
    learn.fit_one_cycle(n_epoch, 0.02)
    return learn, {**left_behind(learn), 'losses': (learn.losses.seen, [float(o) for o in learn.recorder.losses])}

@pytest.mark.parametrize('n_acc', moving.values(), ids=moving)
def test_training_is_bit_identical_where_n_acc_moves(n_acc):
    (_,plain),(learn,observed) = (moved(n_acc, o, every=1) for o in (False,True))
    assert len(learn.noise_scale.df)>=14
    assert changes(plain, observed)==[]

@pytest.mark.parametrize('every', [None, 1, 3])
@pytest.mark.parametrize('n_acc', moving.values(), ids=list(moving))
def test_rows_where_n_acc_moves(n_acc, every):
    "Parts of a batch where it is a window of its own, windows where they have several; steps are those of the optimizer"
    items,model = regression(43),mlp()
    set_seed(0)
    learn = quiet_learner(loaders(items, 4), model, nn.MSELoss(), SGD, cbs=[GradAccum(n_acc), NoiseScale(every=every)])
    learn.fit(3, 0.)
    windows,steps,step,due = [],[],0,0
    for epoch in range(3):
        k = learn.grad_accum.n_acc_in(epoch)
        for i in range(0, 43, 4*k):
            step,at = step+1,list(range(i, min(i+4*k,43)))
            if k==1 and step>due and len(at)==4: window,due = [[o] for o in at],step-1+(every or 40)
            elif k>1 and (step-1)%(every or 1)==0 and len(at)>4: window = [at[j:j+4] for j in range(0, len(at), 4)]
            else: continue
            windows.append(window)
            steps.append(step)
    noise = learn.noise_scale
    assert noise.df.step.tolist()==steps and noise.n_steps==step and noise.n_items==sum(map(len, sum(windows, [])))
    assert_rows(noise.df, window_rows(item_grads(model, nn.MSELoss(), items), windows, torch.full((43,), 2)))
    assert n_hooks(model)==0

def test_windows_alone_are_measured_where_a_batch_cannot_be_cut():
    learn,_ = moved({0: 1, 1: 3}, True, cbs=[MixUp()])
    assert learn.noise_scale.df.step.min()==13 and learn.noise_scale.n_steps==12+2*4
    with pytest.raises(ValueError, match='MixUp binds the items'): moved({0: 1, 3: 2}, True, cbs=[MixUp()])

def test_hooks_are_there_for_windows_of_several_only():
    seen = []
    class Look(Callback):
        order = NoiseScale.order+1
        def before_batch(self):
            if self.training: seen.append((self.epoch,n_hooks(self.model)>0))
    moved({0: 1, 1: 4, 2: 1}, True, cbs=[Look()])
    assert set(seen)=={(0,False),(1,True),(2,False)}

@pytest.mark.parametrize('n_acc,every', [(1,5), (3,2), ({0: 3, 1: 1},2)], ids=str)
def test_a_fit_with_a_start_epoch_goes_on(n_acc, every):
    "From where the one before has ended, with parts of its first batch; any other fit starts anew"
    items,noise = regression(42),NoiseScale(every=every)
    whole,learn = (quiet_learner(loaders(items, 6), mlp(), nn.MSELoss(), SGD, cbs=[GradAccum(n_acc), o]) for o in (NoiseScale(every=every),noise))
    whole.fit(2, 0.1)
    learn.fit(1, 0.1)
    first = noise.df
    learn.fit(2, 0.1, start_epoch=1)
    pd.testing.assert_frame_equal(noise.df, whole.noise_scale.df, rtol=1e-12)
    assert len(noise.df)>len(first) and noise.n_steps==whole.noise_scale.n_steps and noise.n_items==noise.df.n_items.sum()
    learn.fit(1, 0.1)
    assert noise.df.step.max()<=len(items)//6 and noise.n_items==noise.df.n_items.sum()

def stop(exc, at):
    "In the place of an extra pass that fails"
    return RaiseAt('before_batch', exc, at, order=NoiseScale.order)

class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f): ctx.f = f; return x.view_as(x)
    @staticmethod
    def backward(ctx, grad): ctx.f(); return grad,None

def failing(where, exc, nth):
    "A model and a loss that raise the `nth` time that somebody passes `where`"
    n = [0]
    def _check(at):
        n[0] += at==where
        if at==where and n[0]==nth: raise exc('broken')
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.m,self.out = with_batchnorm(),nn.Linear(2,2)
        def forward(self, x):
            h = self.m(x)
            if self.training: _check('forward'); h = FailsBackward.apply(h, partial(_check, 'backward'))
            return self.out(h)
    def _loss(p, y):
        if p.requires_grad: _check('loss')
        return F.mse_loss(p, y)
    torch.manual_seed(0)
    return Model(),_loss

@pytest.mark.parametrize('where,nth_at,exc', pairwise(['forward','loss','backward'], [(1,0),(3,0),(5+5+2,2),(5+5+4,2)], [ValueError,KeyboardInterrupt]))
def test_nothing_is_left_of_a_pass_that_failed(where, nth_at, exc):
    "And the next fit is that of a twin which failed just before that batch"
    (nth,at),res = nth_at,[]
    for observed in (False,True):
        model,loss_func = failing(where, exc, nth if observed else -1)
        learn = quiet_learner(loaders(floats(80), 16), model, loss_func, Adam,
                              cbs=[NoiseScale(every=1) if observed else stop(exc, at)])
        set_seed(0)
        for cb in learn.cbs:
            if isinstance(cb, NoiseScale): cb.learn.add_cb(GradAccum(1, count=lambda learn: len(learn.yb[0]))) # No warning of a loss of one's own
        with pytest.raises(exc, match='broken|the one'): learn.fit(1, 0.1)
        assert n_hooks(model)==0 and 'pred' not in vars(learn) or at>0
        one = {**left_behind(learn), **picture(learn, ids=False, only=['pred']), 'names': sorted(set(vars(learn))-{'noise_scale','raise_at','grad_accum'})}
        if not observed: learn.remove_cb(RaiseAt)
        learn.fit(1, 0.1)
        res.append((one,left_behind(learn)))
    for a,b in zip(*res): assert changes(a, b)==[]
    assert learn.noise_scale.df.step.tolist()==[1,2,3,4,5]

@pytest.mark.parametrize('event,exc,order', [*pairwise(['after_pred','after_loss','before_backward'],
    [CancelBatchException,CancelTrainException,CancelEpochException,CancelFitException], [0,20,60]),
    *((*o,n) for o in (('before_backward',CancelBackwardException),('before_step',CancelStepException)) for n in (0,20,60))])
def test_what_others_cancel(event, exc, order):
    "As without NoiseScale; a batch that is cancelled before its backward pass has no row"
    items,res = regression(48),[]
    for observed in (False,True):
        set_seed(0)
        cbs = [RaiseAt(event, exc, 1, order=order), *([NoiseScale(every=1)] if observed else [])]
        learn = quiet_learner(loaders(items, 12), mlp(), opt_func=Adam, cbs=cbs)
        learn.fit(2, 0.01)
        assert n_hooks(learn.model)==0
        res.append({**left_behind(learn), 'losses': [float(o) for o in learn.recorder.losses]})
    assert changes(*res)==[]
    n_rows = {CancelBatchException: 6, CancelTrainException: 2, CancelEpochException: 2, CancelFitException: 1, CancelBackwardException: 6}
    assert len(learn.noise_scale.df)==n_rows.get(exc, 8)

@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
@pytest.mark.parametrize('nth', [0, 2])
def test_a_pass_alone_is_cancelled(event, nth):
    "Its batch is trained on all the same, and the next one is measured"
    calls,res = [],[]
    class Once(Callback):
        "Cancels the `nth` call of all"
        def _once(self):
            calls.append(1)
            if len(calls)==nth+1 and self.observed: raise CancelBatchException
    setattr(Once, event, Once._once)
    for observed in (False,True):
        calls.clear()
        cb = Once()
        cb.observed = observed
        noise = NoiseScale(every=3)
        learn = small(cbs=[cb, *([noise] if observed else [])], opt_func=Adam)
        learn.fit(1, 0.01)
        res.append(left_behind(learn))
    assert changes(*res)==[]
    assert noise.df.step.tolist()==[2,5,8]

def test_gradients_that_wait_are_left_alone():
    "A measurement that falls due in the midst of a step waits for the next one"
    res = []
    for observed in (False,True):
        noise = NoiseScale(every=1)
        learn = small(items=regression(93), bs=12, cbs=[GradientAccumulation(24), Around(), Afterwards(), *([noise] if observed else [])])
        learn.dls.train.shuffle = False
        class Due(Callback):
            "In every micro-batch"
            order = 40
            def before_batch(self):
                if noise.source: noise.source.next = 0 # noqa: B023
        learn.add_cb(Due())
        learn.fit(1, 0.)
        res.append(left_behind(learn))
    assert changes(*res)==[]
    assert_rows(noise.df, window_rows(item_grads(mlp(), nn.MSELoss(), regression(93)), parts(93, 12)[0][::2], torch.full((93,), 2)))

# Rows against per-item gradients

@pytest.mark.parametrize('kind,elems', [('mlp',2), ('convnet',1), ('embeddings',1), ('lstm',1), ('tokens',4)])
@pytest.mark.parametrize('bs,n_micro,every', [(12,4,1), (7,2,2), (31,3,1)])
def test_rows_are_those_of_the_items(kind, elems, bs, n_micro, every):
    "Parts of unequal sizes and ragged last batches too: 203 items"
    items,model,loss_func = task(kind)
    windows,steps = parts(203, bs, n_micro, every, n_epoch=2)
    df = measure(items, model, loss_func, bs, n_micro, every, n_epoch=2).df
    assert_rows(df, window_rows(task_grads(kind), windows, torch.full((203,), elems)))
    assert df.step.tolist()==steps

@pytest.mark.parametrize('every', [1, 2, 3])
def test_every_step_of_gradaccum(every):
    "`every` counts optimizer steps there too"
    windows,steps = parts(58, 8, 4, every, n_epoch=2)
    noise = NoiseScale(every=every)
    measure(regression(58), mlp(), nn.MSELoss(), 2, noise=noise, cbs=[GradAccum(4)], n_epoch=2)
    expected = [s for s in range(1, 17, every) if s not in (8,16)] # The last window has one micro-batch
    assert noise.df.step.tolist()==expected and noise.n_steps==16
    rows = item_grads(mlp(), nn.MSELoss(), regression(58))
    windows = [[[8*((s-1)%8)+2*j, 8*((s-1)%8)+2*j+1] for j in range(4)] for s in expected]
    assert_rows(noise.df, window_rows(rows, windows, torch.full((58,), 2)))

def by_hand(model, loss_func, items, windows):
    "Moments of `windows` from the gradient of each part, in training mode"
    res = []
    for window in windows:
        gs = []
        for part in window:
            m = copy.deepcopy(model).train()
            x,y = (torch.stack([items[i][k] for i in part]) for k in (0,1))
            gs.append((torch.cat([g.flatten() for g in torch.autograd.grad(loss_func(m(x), y), list(m.parameters()))]), y.numel()))
        N,K = sum(n for _,n in gs),len(gs)
        g = sum(n*g for g,n in gs)/N
        tr_sigma = (sum(n*(g@g) for g,n in gs) - N*(g@g))/(K-1)
        res.append((sum(map(len, window)), float(N), tr_sigma.item(), (g@g-tr_sigma/N).item()))
    return pd.DataFrame(res, columns=['n_items','n_elems','tr_sigma','g_sq'])

@pytest.mark.parametrize('n', [48, 46, 42])
def test_parts_of_batchnorm_have_two_items(n):
    "Each part is normalised by itself; a last batch of less than 8 items is left out"
    torch.manual_seed(0)
    items,model = regression(n),nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Linear(4,2)).double()
    windows,steps = parts(n, 10, 4, least=8)
    noise = measure(items, model, nn.MSELoss(), 10)
    assert noise.df.step.tolist()==steps==[1,2,3,4]+([5] if n==48 else [])
    assert_rows(noise.df, by_hand(model, nn.MSELoss(), items, windows))

@pytest.mark.parametrize('training', [False, True])
def test_batchnorm_in_a_later_fit(training):
    "A model that validation left in evaluation mode has BatchNorm all the same"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Linear(4,2)).double().train(training)
    learn = small(46, 10, NoiseScale(every=1), model)
    for _ in range(2):
        learn.fit(1, 0.)
        assert len(learn.noise_scale.df)==4 # Not of 6 items
    learn.dls = loaders(regression(30), 6)
    with pytest.raises(ValueError, match='BatchNorm.*n_micro=3'): learn.fit(1, 0.)

@pytest.mark.parametrize('ignored', [0.3, 0.8])
def test_rows_of_tokens_that_count(ignored):
    "0.8 leaves parts in which nothing counts, and some batches with but one in which something does"
    items,model,loss_func = token_task(152, ignored)
    elems = n_kept(items)
    expected = window_rows(item_grads(model, loss_func, items), parts(152, 4, 4)[0], elems)
    assert_rows(measure(items, model, loss_func, 4).df, expected)
    assert expected.n_elems.nunique()>3 and (sum(elems==0)>20)==(ignored==0.8)

def test_a_batch_in_which_nothing_counts():
    "Has no row, and what it does to the weights is none of ours"
    items,model,loss_func = token_task(32, kept=lambda i: 0 if i<8 else 4)
    df = measure(items, model, loss_func, 8, cbs=[RaiseAt('before_step', CancelStepException, 0, order=60)]).df
    assert_rows(df, window_rows(item_grads(model, loss_func, items), parts(32, 8, 4)[0], n_kept(items)))
    assert df.step.tolist()==[2,3,4]

@pytest.mark.parametrize('loss_func', [nn.MSELoss, nn.CrossEntropyLoss])
def test_sums_give_the_rows_of_means(loss_func):
    items = regression(53) if loss_func is nn.MSELoss else classes(53)
    model = mlp(n_out=2 if loss_func is nn.MSELoss else 3)
    mean,total = (measure(items, model, loss_func(reduction=o), 9).df for o in ('mean','sum'))
    assert_rows(total, mean)
    assert_rows(mean, window_rows(item_grads(model, loss_func(), items), parts(53, 9)[0], torch.full((53,), 2 if loss_func is nn.MSELoss else 1)))

@pytest.mark.parametrize('flat,plain,kind', [(MSELossFlat,nn.MSELoss,'mlp'), (CrossEntropyLossFlat,nn.CrossEntropyLoss,'classes'),
                                             (BCEWithLogitsLossFlat,nn.BCEWithLogitsLoss,'labels'), (LabelSmoothingCrossEntropy,None,'classes')])
def test_rows_of_fastai_losses(flat, plain, kind):
    "They compute in float32"
    items = classes(90) if kind=='classes' else regression(90) if kind=='mlp' else [(x,(y>0).double()) for x,y in regression(90)]
    model = mlp(n_out=3 if kind=='classes' else 2)
    rows = item_grads(model, plain() if plain else nn.CrossEntropyLoss(label_smoothing=0.1), items)
    df = measure(items, model, flat(), 13).df
    assert_rows(df, window_rows(rows, parts(90, 13)[0], torch.full((90,), 1 if kind=='classes' else 2)), 1e-4)

def test_what_does_not_show():
    "Clipping and scaled losses, with overflows"
    items,model,loss_func = task('mlp')
    plain = measure(items, model, loss_func)
    scaled = ScaledLoss(init_scale=1024., growth_interval=3)
    assert_rows(measure(items, model, loss_func, cbs=[scaled]).df, plain.df)
    assert max(scaled.scales)>=4*min(scaled.scales)
    over = measure(items, model, loss_func, cbs=[Overflowing(init_scale=4096.)])
    assert over.n_dropped==3 and over.df.step.tolist()==list(range(4,18))
    assert_rows(over.df[['n_items','n_elems','tr_sigma','g_sq']], plain.df[3:][['n_items','n_elems','tr_sigma','g_sq']])

def test_rows_of_bf16():
    "Near those of float32, though no part reuses the weights that another one has cast"
    items,model = floats(96),mlp(n_hid=16, dtype=torch.float32)
    plain,mixed = (measure(items, model, nn.MSELoss(), cbs=o).df for o in ([], [MixedOnCPU()]))
    assert len(mixed)==len(plain)==8
    np.testing.assert_allclose(mixed.tr_sigma, plain.tr_sigma, rtol=0.1)
    assert not mixed.equals(plain)

def test_the_backward_pass_runs_outside_of_autocast():
    "As that of the batch does"
    seen = []
    class Sees(nn.Module):
        def __init__(self): super().__init__(); self.m = mlp(dtype=torch.float32)
        def forward(self, x):
            assert torch.is_autocast_enabled('cpu')
            return FailsBackward.apply(self.m(x), lambda: seen.append(torch.is_autocast_enabled('cpu')))
    measure(floats(36), Sees(), nn.MSELoss(), cbs=[MixedOnCPU()])
    assert seen==[False]*15 and not torch.is_autocast_enabled('cpu')

@pytest.mark.parametrize('n_acc', [24, 36])
def test_beside_accumulation_of_fastai(n_acc):
    "The first micro-batch of each of its steps, for the others find gradients that wait"
    items,k = regression(96),n_acc//12
    df = measure(items, mlp(), nn.MSELoss(), cbs=[GradientAccumulation(n_acc)]).df
    windows = parts(96, 12)[0]
    assert_rows(df, window_rows(item_grads(mlp(), nn.MSELoss(), items), windows[::k], torch.full((96,), 2)))
    assert df.step.tolist()==list(range(1, len(windows[::k])+1))

class MixedDtypes(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5,4),nn.Linear(4,2).double()
    def forward(self, x): return self.b(self.a(x.float()).double())

@pytest.mark.parametrize('accum', [False, True])
def test_parameters_of_several_dtypes(accum):
    torch.manual_seed(0)
    items,model = regression(64),MixedDtypes()
    noise = measure(items, model, nn.MSELoss(), 2 if accum else 8, noise=NoiseScale(every=1), cbs=[GradAccum(4)] if accum else [])
    assert_rows(noise.df, window_rows(item_grads(model, nn.MSELoss(), items).double(), parts(64, 8)[0], torch.full((64,), 2)), 1e-4)

class ClassesSecond(Callback):
    "As the loss of torch wants them"
    order = RNNCallback.order+5
    def after_pred(self): self.learn.pred = self.pred.transpose(1,2)

@pytest.mark.parametrize('tied', [False, True])
def test_parts_go_on_from_the_hidden_state_of_their_items(tied):
    "Item by item from the hidden state that the batch before has left; the last batch is smaller"
    torch.manual_seed(0)
    config = {**awd_lstm_lm_config, 'emb_sz': 6, 'n_hid': 7, 'n_layers': 2, 'tie_weights': tied, **{k: 0. for k in awd_lstm_lm_config if k.endswith('_p')},
              'weight_p': 1e-12} # fastai cannot reset one with 0
    model,hand = (get_language_model(AWD_LSTM, 13, config).double() for _ in range(2))
    loss_func = nn.CrossEntropyLoss()
    for p in model.parameters(): nn.init.normal_(p, std=0.7) # Let the hidden state matter
    items = [(o[:-1],o[1:]) for o in torch.randint(13, (43,6))]
    df = measure(items, model, loss_func, 9, cbs=[*rnn_cbs(), ClassesSecond()], n_epoch=2).df
    rows,fresh = [],[]
    hand.load_state_dict(model.state_dict())
    hand.reset()
    params = list(dict.fromkeys(hand.parameters()))
    def _grad(x, y, hidden):
        hand[0].bs,hand[0].hidden = 1,hidden
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss_func(hand(x[None])[0].transpose(1,2), y[None]), params)])
    for i in range(0, 43, 9):
        batch = items[i:i+9]
        if hand[0].bs!=len(batch): hand[0]._change_hidden(len(batch))
        bs,hidden = len(batch),hand[0].hidden
        for j,(x,y) in enumerate(batch):
            rows.append(_grad(x, y, [tuple(h[:,j:j+1].contiguous() for h in layer) for layer in hidden]))
            fresh.append(_grad(x, y, [tuple(torch.zeros_like(h[:,:1]) for h in layer) for layer in hidden]))
        hand[0].bs,hand[0].hidden = bs,hidden
        hand(torch.stack([x for x,_ in batch]))
    windows,elems = parts(43, 9)[0],torch.full((43,), 5)
    expected = window_rows(torch.stack(rows), windows, elems)
    assert_rows(df, pd.concat([expected,expected])) # The model is reset for each epoch
    with pytest.raises(AssertionError): assert_rows(df[:len(windows)], window_rows(torch.stack(fresh), windows, elems))

# The noise scale itself

@pytest.mark.slow
@pytest.mark.parametrize('kind,elems', [('mlp',2), ('convnet',1), ('embeddings',1), ('lstm',1), ('tokens',4)])
def test_exact_noise_scale(kind, elems):
    items,model,loss_func = task(kind, 200)
    exact,noise = noise_scale(task_grads(kind, 200)),NoiseScale(0.999, every=1)
    measure(items, model, loss_func, 40, noise=noise, n_epoch=16, shuffle=True)
    low,high = noise.ci
    assert low <= exact <= high and (high-low)/2 <= 0.25*noise.noise_scale
    assert abs(z_score(noise.df, elems*exact)) <= 3

modes = pytest.mark.parametrize('accum', [False, True])

def test_lr_find_beside_it():
    learn = small(320, cbs=[NoiseScale(every=5)])
    learn.lr_find(num_it=30, show_plot=False, suggest_funcs=())
    learn.fit(1, 0.01)
    assert learn.noise_scale.df.step.tolist()==list(range(1,41,5))

# What Recorder draws

def test_plot_of_recorder():
    learn = small()
    with pytest.raises(ValueError, match=r'add NoiseScale\(\) to its callbacks'): learn.recorder.plot_noise_scale()
    learn.fit(1, 0.01)
    with pytest.raises(ValueError, match=r'add NoiseScale\(\) to its callbacks'): learn.recorder.plot_noise_scale()
    noise = NoiseScale(every=1)
    learn.fit(2, 0.01, cbs=noise)
    assert noise not in learn.cbs
    ax = learn.recorder.plot_noise_scale()
    np.testing.assert_allclose(ax.lines[0].get_ydata(), noise.df.noise_scale[np.isfinite(noise.df.noise_scale) & (noise.df.noise_scale>0)])
    assert [8,8] in [list(l.get_ydata()) for l in ax.lines] # Today's batch size
    _,mine = plt.subplots()
    assert learn.recorder.plot_noise_scale(mine) is mine and learn.recorder.plot_noise_scale(ax=mine) is mine
    learn.fit(1, 0.01) # Its own columns are gone, the plot of the last measured fit is not
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','time'] and len(learn.recorder.plot_noise_scale().lines[0].get_ydata())>0

def test_batch_size_of_the_plot():
    for cbs,bs,items in (([],8,8), ([GradAccum(4)],2,8), ([GradAccum({0: 1})],8,8), ([GradientAccumulation(24)],8,24)):
        learn = small(bs=bs, cbs=[NoiseScale(), *cbs])
        learn.fit(1, 0.01)
        assert f"today's batch size, {items}" in [l.get_label() for l in learn.recorder.plot_noise_scale().lines]

# What is refused

@pytest.mark.parametrize('v,exc', [(0,ValueError), (-1,ValueError), (1.5,TypeError), (True,TypeError), ('4',TypeError), (float('nan'),TypeError)])
def test_every_out_of_range(v, exc):
    with pytest.raises(exc, match='`every` must be .*optimizer steps, got'): NoiseScale(every=v)

@pytest.mark.parametrize('v,exc', [(1,ValueError), (0,ValueError), (-4,ValueError), (4.,TypeError), (True,TypeError), ('4',TypeError), (None,TypeError)])
def test_n_micro_out_of_range(v, exc):
    with pytest.raises(exc, match='`n_micro` must be .*to tell signal from noise, got'): NoiseScale(n_micro=v)

def unchanged_by(learn, match, exc=ValueError):
    "The fit raises, and has changed nothing"
    before = [p.detach().clone() for p in learn.model.parameters()]
    with pytest.raises(exc, match=match): learn.fit(1, 0.1)
    assert all(torch.equal(a,b) for a,b in zip(before, learn.model.parameters())) and all(p.grad is None for p in learn.model.parameters())
    assert n_hooks(learn.model)==0

class OtherMixUp(Callback):
    "As of a library whose mixers are none of fastai's: the loss is a method of the callback while it trains, or the targets are mixed too"
    run_valid = False
    def __init__(self, blends=False): self.blends,self.distrib = blends,torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4))
    def before_train(self): self.old,self.learn.loss_func = self.learn.loss_func,nn.CrossEntropyLoss() if self.blends else self.lf
    def after_train(self): self.learn.loss_func = self.old
    def before_batch(self):
        self.lam,order = self.distrib.sample((len(self.x),)),torch.randperm(len(self.x))
        self.learn.xb,self.other = (torch.lerp(self.x[order], self.x, self.lam[:,None,None,None]),),self.y[order]
        if self.blends: self.learn.yb = (torch.lerp(*(F.one_hot(o, 3).float() for o in (self.other,self.y)), self.lam[:,None]),)
    def lf(self, pred, y): return torch.lerp(*(F.cross_entropy(pred, o, reduction='none') for o in (self.other,y)), self.lam).mean()

class Blends(OtherMixUp):
    def __init__(self): super().__init__(True)

@pytest.mark.parametrize('mix', [MixUp, CutMix, OtherMixUp, Blends])
@pytest.mark.filterwarnings('ignore:GradAccum cannot tell what the loss')
def test_mixed_items(mix):
    "Are bound together, but micro-batches are not"
    g = torch.Generator().manual_seed(0)
    items = [(torch.randn(3,6,6,generator=g),torch.randint(3,(),generator=g)) for _ in range(32)]
    def _learn(bs, *cbs):
        torch.manual_seed(0)
        return quiet_learner(loaders(items, bs, shuffle=True), nn.Sequential(nn.Flatten(), nn.Linear(108,3)), CrossEntropyLossFlat(), cbs=[mix(), *cbs])
    unchanged_by(_learn(8, NoiseScale()), f'{mix.__name__} binds the items of a batch together.*use GradAccum\\(2\\)')
    unchanged_by(_learn(8, NoiseScale(), GradAccum(1)), f'{mix.__name__} binds')
    learn = _learn(8, NoiseScale(), GradAccum(2))
    learn.fit(1, 0.01)
    assert len(learn.noise_scale.df)==2

@pytest.mark.parametrize('bn,n,bs,n_micro,fewer', [(False,64,3,4,3), (False,64,1,2,None), (True,64,7,4,3), (True,64,3,2,None), (False,3,64,4,3)])
def test_a_batch_smaller_than_its_parts(bn, n, bs, n_micro, fewer):
    "With BatchNorm a part needs two items; the batch is no larger than the data set"
    model = with_batchnorm() if bn else None
    hint = 'take a larger batch, ' + (f'n_micro={fewer}, or' if fewer else 'or')
    unchanged_by(small(n, bs, NoiseScale(n_micro=n_micro), model, floats(n) if bn else None), hint)

class Feeds(Callback):
    "Has the model see `o` of a batch"
    order = 20
    def __init__(self, f, yb=None): self.f,self.yb_f = f,yb
    def before_batch(self):
        self.learn.xb = (*self.xb, self.f(self.xb[0]))
        if self.yb_f: self.learn.yb = self.yb_f(self.yb[0])

class Second(nn.Module):
    "Ignores whatever else it is fed"
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x, other=None): return self.m(x)

@pytest.mark.parametrize('f,what', [(lambda x: x[:3], r'a tensor of shape \(3, 5\)'), (lambda x: torch.tensor(3.), r'a tensor of shape \(\)'),
                                    (lambda x: (x, x.T), r'a tensor of shape \(5, 8\)'), (lambda x: [torch.cat([x,x])], r'a tensor of shape \(16, 5\)'),
                                    (lambda x: {'a': [x, None]}, 'NoneType'), (lambda x: 'text', 'str'), (lambda x: np.zeros(8), 'ndarray')])
def test_a_batch_that_cannot_be_cut(f, what):
    "Is seen at the first batch"
    unchanged_by(small(model=Second(), cbs=[NoiseScale(), Feeds(f)]), f'this one of 8 items holds {what}: use GradAccum\\(2\\)')
    learn = small(bs=4, model=Second(), cbs=[NoiseScale(), GradAccum(2), Feeds(f)])
    learn.fit(1, 0.01)
    assert len(learn.noise_scale.df)==8

class NoTargets(Callback):
    "One batch without targets, which fastai does not train on"
    order = 20
    def before_batch(self):
        if self.training and self.iter==1: self.learn.yb = ()

def test_a_batch_without_targets():
    res = []
    for cbs in ([], [NoiseScale(every=1)]):
        learn = small(cbs=[NoTargets(), *cbs])
        learn.fit(1, 0.01)
        res.append(left_behind(learn))
    assert changes(*res)==[]
    assert learn.noise_scale.df.step.tolist()==[1,2,3,4,5,6,7]

class Freezes(Callback):
    "In mid-epoch"
    order = 20
    def before_batch(self): self.model[0].requires_grad_(self.iter<3)

@modes
def test_parameters_that_are_frozen_on_the_way(accum):
    learn = small(bs=2 if accum else 8, cbs=[NoiseScale(every=1), Freezes(), *([GradAccum(4)] if accum else [])])
    learn.fit(1, 0.01)
    assert len(learn.noise_scale.df)==8 and n_hooks(learn.model)==0

