"NoiseScale without GradAccum: exact against per-item gradients, and not a bit of the training changed"
import random
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from fastai.callback.core import (Callback, CancelBatchException, CancelFitException, CancelStepException)
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import MixUp
from fastai.callback.rnn import RNNCallback, rnn_cbs
from fastai.callback.schedule import fit_one_cycle, lr_find # noqa: F401, they add the methods
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from fastai_bs.all import GradAccum, NoiseScale
from helpers import (changes, left_behind, loaders, mlp, noted, picture, quiet_learner, RaiseAt, regression, ScaledLoss, set_seed)
from oracle import window_rows
from noise.test_noise_scale import Losses, Overflowing, all_left, assert_rows, awd_lstm, elems_of, expected, n_hooks, task, task_grads, with_batchnorm
from noise.test_noise_scale import measure as measure_windows

def parts(n, bs, n_micro=4, every=1, n_epoch=1):
    "Items of each part of each batch that is measured, in order, and the steps of these batches"
    windows,steps,step,due = [],[],0,1
    for _ in range(n_epoch):
        for i in range(0, n, bs):
            batch,step = list(range(i, min(i+bs,n))),step+1
            if step<due or len(batch)<n_micro: continue
            at = [len(batch)*j//n_micro for j in range(n_micro+1)]
            windows.append([batch[a:b] for a,b in zip(at, at[1:])])
            steps.append(step)
            due = step+every
    return windows,steps

def measure(items, model, loss_func, bs=12, n_micro=4, every=1, noise=None, **kwargs):
    return measure_windows(items, model, loss_func, bs, 0, noise=noise or NoiseScale(every=every, n_micro=n_micro), **kwargs)

def small(n=64, bs=8, cbs=None, model=None, items=None, **kwargs):
    "A learner that could be measured"
    set_seed(0)
    return quiet_learner(loaders(items or regression(n), bs, shuffle=True), model or mlp(), cbs=cbs, **kwargs)

def floats(n, **kwargs): return regression(n, dtype=torch.float32, **kwargs)

# It changes nothing

class Keeps(nn.Module):
    "Counts its calls and remembers the last output in plain attributes, and both show in the next output; draws from all generators; changes its input"
    def __init__(self):
        super().__init__()
        self.m,self.n,self.last,self.gen = mlp(dtype=torch.float32),0,torch.zeros(2),torch.Generator().manual_seed(3)
    def forward(self, x):
        self.n += 1
        res = self.m(x.mul_(0.5))*(1+0.01*self.n) + 0.1*self.last + 0.1*random.random() + 0.1*np.random.rand() + 0.1*torch.rand(1, generator=self.gen)
        self.last = res.detach().mean(0)
        self.m[1].told = [self.last, {'n': self.n}]
        return res

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

class MixedOnCPU(MixedPrecision):
    "Mixed precision that a CPU has, and a scale that moves"
    def before_fit(self):
        self.autocast,self.scales = torch.autocast('cpu', dtype=torch.bfloat16),[]
        self.learn.scaler = GradScaler('cpu', growth_interval=3, **self.kwargs)

kinds = {
    'keeps': dict(model=Keeps),
    'awd_lstm': dict(items=[(o[:-1],o[1:]) for o in torch.randint(13, (86,7), generator=torch.Generator().manual_seed(1))], model=awd_lstm, opt_func=Adam,
                     loss_func=CrossEntropyLossFlat, cbs=lambda: rnn_cbs(alpha=2., beta=1.)), # 6 in the last batch
    'callback': dict(cbs=lambda: [Stateful()]), 'bf16': dict(cbs=lambda: [MixedOnCPU()]), 'overflows': dict(cbs=lambda: [Overflowing(init_scale=4096.)]),
}

def trained(observed, items=None, model=with_batchnorm, loss_func=nn.MSELoss, cbs=list, **kwargs):
    set_seed(0) # A loader draws its own seed
    learn = quiet_learner(loaders(items or floats(91), 16, shuffle=True), model(), loss_func(), wd=0.1,
                          cbs=[Losses(), *cbs(), *([NoiseScale(every=2)] if observed else [])], **kwargs)
    set_seed(2)
    learn.fit_one_cycle(2, 0.02)
    return learn

@pytest.mark.filterwarnings('ignore:Nothing tells', 'ignore:You are shadowing')
@pytest.mark.parametrize('kind', kinds)
def test_training_is_bit_identical(kind):
    plain,observed = (trained(o, **kinds[kind]) for o in (False,True))
    assert len(observed.noise_scale.df)+observed.noise_scale.n_dropped >= 3
    assert changes(all_left(plain), all_left(observed))==[]

# Windows of one batch, and of several

@pytest.mark.parametrize('n_acc,every', [({0: 3, 1: 1},None), ({0: 1, 1: 4, 2: 1},3)], ids=str)
def test_rows_where_n_acc_moves(n_acc, every):
    "Parts of a batch where it is a window of its own, windows where they have several; steps are those of the optimizer"
    items,model = regression(43),mlp()
    accum = GradAccum(n_acc)
    noise = measure(items, model, nn.MSELoss(), 4, noise=NoiseScale(every=every), cbs=[accum], n_epoch=3)
    windows,steps,step,due,k = [],[],0,0,1
    for epoch in range(3):
        k = n_acc.get(epoch, k if epoch else 1)
        for i in range(0, 43, 4*k):
            step,at = step+1,list(range(i, min(i+4*k,43)))
            if k==1 and step>due and len(at)==4: window,due = [[o] for o in at],step-1+(every or 60)
            elif k>1 and (step-1)%(every or 1)==0 and len(at)>4: window = [at[j:j+4] for j in range(0, len(at), 4)]
            else: continue
            windows.append(window)
            steps.append(step)
    assert noise.df.step.tolist()==steps
    assert noise.n_steps==step
    assert noise.n_items==sum(map(len, sum(windows, [])))
    assert_rows(noise.df, expected(items, model, nn.MSELoss(), windows))

def test_a_fit_with_a_start_epoch_goes_on(n_acc=1, every=5):
    "From where the one before has ended, with parts of its first batch; any other fit starts anew"
    items,noise = regression(42),NoiseScale(every=every)
    whole,learn = (quiet_learner(loaders(items, 6), mlp(), cbs=[GradAccum(n_acc), o]) for o in (NoiseScale(every=every),noise))
    whole.fit(2, 0.1)
    learn.fit(1, 0.1)
    n_first = len(noise.df)
    learn.fit(2, 0.1, start_epoch=1)
    pd.testing.assert_frame_equal(noise.df, whole.noise_scale.df, rtol=1e-12)
    assert len(noise.df)>n_first
    assert noise.n_steps==whole.noise_scale.n_steps
    assert noise.n_items==noise.df.n_items.sum()
    learn.fit(1, 0.1)
    assert noise.df.step.max()<=len(items)//6
    assert noise.n_items==noise.df.n_items.sum()

# Passes that fail, and batches that others cancel

@pytest.mark.parametrize('event,exc,order,n_rows', [('after_pred',CancelBatchException,0,6),
    ('after_pred',CancelFitException,60,1), ('before_step',CancelStepException,0,8)])
def test_what_others_cancel_goes_as_without(event, exc, order, n_rows):
    "As without NoiseScale; a batch that is cancelled before its backward pass has no row"
    res = []
    for cbs in ([],[NoiseScale(every=1)]):
        learn = small(48, 12, [Losses(), RaiseAt(event, exc, 1, order=order), *cbs], opt_func=Adam)
        learn.fit(2, 0.01)
        res.append(all_left(learn))
    assert changes(*res)==[]
    assert n_hooks(learn.model)==0
    assert len(learn.noise_scale.df)==n_rows

class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f): ctx.f = f; return x.view_as(x)
    @staticmethod
    def backward(ctx, grad): ctx.f(); return grad,None

def failing(where, exc, nth):
    "A model that raises the `nth` time that somebody passes `where`"
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
    return Model()

@pytest.mark.parametrize('where,nth_at,exc', [('forward',(1,0),KeyboardInterrupt), ('backward',(5+5+4,2),ValueError)])
def test_nothing_is_left_of_a_pass_that_failed(where, nth_at, exc):
    "And the next fit is that of a twin which failed just before that batch"
    (nth,at),res = nth_at,[]
    for observed in (False,True):
        model = failing(where, exc, nth if observed else -1)
        stop = NoiseScale(every=1) if observed else RaiseAt('before_batch', exc, at, order=NoiseScale.order) # In the place of an extra pass that fails
        set_seed(0)
        learn = quiet_learner(loaders(floats(80), 16), model, nn.MSELoss(), Adam, cbs=[GradAccum(1), stop])
        with pytest.raises(exc, match='broken|the one'): learn.fit(1, 0.1)
        assert n_hooks(model)==0
        one = {**left_behind(learn), **picture(learn, ids=False, only=['pred']), 'names': sorted(set(vars(learn))-{'noise_scale','raise_at'})}
        if not observed: learn.remove_cb(RaiseAt)
        learn.fit(1, 0.1)
        res.append((one,left_behind(learn)))
    for a,b in zip(*res): assert changes(a, b)==[]
    assert learn.noise_scale.df.step.tolist()==[1,2,3,4,5]

class OwnMixer(Callback):
    "Mixes the targets in the loss, which is a method"
    def before_fit(self): self.old,self.learn.loss_func = self.learn.loss_func,self.mixed
    def before_batch(self): self.y1 = self.y.flip(0)
    def mixed(self, pred, y): return 0.7*self.old(pred, y) + (0.3*self.old(pred, self.y1) if self.training else 0.)

class WeighedItems:
    w = None
    def __call__(self, pred, y): return ((pred-y).square().mean(1)*self.w).mean()
class SetsWeights(Callback):
    "For the batch, after NoiseScale has run it in parts"
    order = NoiseScale.order+8
    def before_batch(self): self.learn.loss_func.w = torch.linspace(1, 2, len(self.y))

class Hidden(nn.Module):
    "Goes on from the batch before, item by item; the first one has none before it"
    def __init__(self): super().__init__(); self.i,self.h_h,self.o,self.h = nn.Linear(5,4),nn.Linear(4,4),nn.Linear(4,2),0.
    def forward(self, x):
        if not self.training: return self.o(self.i(x))
        h = torch.tanh(self.i(x)+self.h_h(self.h) if torch.is_tensor(self.h) else self.i(x))
        self.h = h.detach()
        return self.o(h)

class Odd(Exception): "Of nobody's making"

def whole(**kwargs): return small(items=floats(48), **{'bs': 12, 'model': mlp(dtype=torch.float32), **kwargs})
needs_whole = {'mixer': (RuntimeError,lambda cbs: whole(cbs=[OwnMixer(), *cbs])),
    'weights_late': (TypeError,lambda cbs: whole(loss_func=WeighedItems(), cbs=[SetsWeights(), *cbs])),
    'hidden': (RuntimeError,lambda cbs: whole(model=Hidden(), cbs=cbs)),
    'hidden_over_one_item': (RuntimeError,lambda cbs: whole(model=Hidden(), bs=4, cbs=cbs)),
    'odd': (Odd,lambda cbs: whole(cbs=[RaiseAt('after_pred', Odd, 0), *cbs]))}

@pytest.mark.filterwarnings('ignore:Nothing tells', 'ignore:You are shadowing', 'ignore:Using a target size')
@pytest.mark.parametrize('nm', needs_whole)
def test_what_fails_in_parts_is_refused_before_anything_has_changed(nm):
    "With its cause, beside GradAccum(1) too; where there are windows of several batches, those are measured"
    cause,make = needs_whole[nm]
    def _left(learn): return picture(learn, only=('model','opt','loss_func','xb','yb'))
    for accum in ([],[GradAccum(1)]):
        learn = make([NoiseScale(every=1), *accum])
        before,seen = noted('before_batch', _left)
        before.order = NoiseScale.order-1
        learn.add_cb(before)
        with pytest.raises(ValueError, match=r'use GradAccum\(2\) with micro-batches of half') as e: learn.fit(1, 0.1)
        assert isinstance(e.value.__cause__, cause)
        assert len(seen)==1
        assert n_hooks(learn.model)==0
        assert changes(seen[0], _left(learn))==[]
    if nm in ('hidden','hidden_over_one_item','odd'): return
    learn = make([NoiseScale(every=1), GradAccum({0: 1, 1: 2})])
    learn.fit(2, 0.1)
    assert learn.noise_scale.df.step.tolist()==[5,6]

class PullsOnWeights(nn.MSELoss):
    "Takes a gradient of its own, as GradNorm does"
    def __init__(self, model): super().__init__(); self.p = [next(model.parameters())] # In a list: no parameter of the loss
    def forward(self, pred, y):
        loss = super().forward(pred, y)
        return loss+0.1*torch.autograd.grad(loss, self.p, create_graph=True)[0].square().sum() if loss.requires_grad else loss

class Spectral(nn.Module):
    "With complex weights"
    def __init__(self): super().__init__(); self.i,self.w,self.o = nn.Linear(5,8),nn.Parameter(torch.randn(5, dtype=torch.cfloat)),nn.Linear(8,2)
    def forward(self, x): return self.o(torch.fft.irfft(torch.fft.rfft(self.i(x))*self.w, n=8))

@pytest.mark.filterwarnings('ignore:Nothing tells')
@pytest.mark.parametrize('accum', [[],[GradAccum(2)]], ids=['parts','windows'])
@pytest.mark.parametrize('make', [lambda: (mlp(dtype=torch.float32),PullsOnWeights), lambda: (Spectral(),lambda model: nn.MSELoss())], ids=['pulls','spectral'])
def test_gradients_of_other_kinds_are_measured(make, accum):
    "Those that a loss takes by itself are no parts of the gradient; of complex ones real and imaginary parts count"
    model,loss = make()
    noise = NoiseScale(every=1)
    whole(model=model, loss_func=loss(model), cbs=[noise,*accum], opt_func=partial(OptimWrapper, opt=torch.optim.SGD)).fit(1, 0.01)
    assert len(noise.rows)==(2 if accum else 4)
    assert all(r.g_sq+r.tr_sigma>0 for r in noise.rows)

@pytest.mark.parametrize('exc', [torch.OutOfMemoryError,KeyboardInterrupt])
def test_memory_and_interrupts_are_no_refusal(exc):
    "Memory that runs out has its own cure"
    with pytest.raises(exc, match='the one'): whole(cbs=[RaiseAt('after_loss', exc, 0), NoiseScale(every=1)]).fit(1, 0.1)

# Rows against per-item gradients

@pytest.mark.parametrize('kind,bs,n_micro,every', [('convnet',7,2,2), ('tokens',31,3,1)])
def test_rows_are_those_of_the_items(kind, bs, n_micro, every):
    "Parts of unequal sizes and ragged last batches too: 203 items"
    windows,steps = parts(203, bs, n_micro, every, n_epoch=2)
    df = measure(*task(kind), bs, n_micro, every, n_epoch=2).df
    assert_rows(df, window_rows(task_grads(kind), windows, torch.full((203,), elems_of[kind])))
    assert df.step.tolist()==steps

def test_parts_of_batchnorm_have_two_items(n=46):
    "A last batch of less than 8 items is left out"
    assert measure(floats(n), with_batchnorm(), nn.MSELoss(), 10).df.step.tolist()==[1,2,3,4]

def test_the_scale_of_the_loss_does_not_show():
    "Also where it moves"
    plain = measure(*task('mlp'))
    scaled = ScaledLoss(init_scale=1024., growth_interval=3)
    assert_rows(measure(*task('mlp'), cbs=[scaled]).df, plain.df)
    assert max(scaled.scales)>=4*min(scaled.scales)

class ClassesSecond(Callback):
    "As the loss of torch wants them"
    order = RNNCallback.order+5
    def after_pred(self): self.learn.pred = self.pred.transpose(1,2)

def test_parts_go_on_from_the_hidden_state_of_their_items():
    "Item by item from the hidden state that the batch before has left; the last batch is smaller"
    torch.manual_seed(0)
    config = {**awd_lstm_lm_config, 'emb_sz': 6, 'n_hid': 7, 'n_layers': 2, 'tie_weights': True, **{k: 0. for k in awd_lstm_lm_config if k.endswith('_p')},
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
    one = window_rows(torch.stack(rows), windows, elems)
    assert_rows(df, pd.concat([one,one])) # The model is reset for each epoch
    with pytest.raises(AssertionError): assert_rows(df[:len(windows)], window_rows(torch.stack(fresh), windows, elems))

# What is refused

def unchanged_by(learn, match):
    "The fit raises, and has changed nothing"
    before = [p.detach().clone() for p in learn.model.parameters()]
    with pytest.raises(ValueError, match=match): learn.fit(1, 0.1)
    assert all(torch.equal(a,b) and b.grad is None for a,b in zip(before, learn.model.parameters()))
    assert n_hooks(learn.model)==0

def test_mixed_items_are_refused():
    "They are bound together, but micro-batches are not"
    items = [(torch.randn(3,6,6),torch.randint(3,())) for _ in range(32)]
    def _learn(*cbs): return small(items=items, model=nn.Sequential(nn.Flatten(), nn.Linear(108,3)), loss_func=CrossEntropyLossFlat(), cbs=[MixUp(), *cbs])
    unchanged_by(_learn(NoiseScale()), r'MixUp binds the items of a batch together.*use GradAccum\(2\)')
    unchanged_by(_learn(NoiseScale(), GradAccum(1)), 'MixUp binds')
    learn = _learn(NoiseScale(), GradAccum(2))
    learn.fit(1, 0.01)
    assert len(learn.noise_scale.df)==2

@pytest.mark.parametrize('bn,bs,n_micro,needed', [(False,1,2,2), (True,7,4,8)])
def test_a_batch_smaller_than_its_parts_is_refused(bn, bs, n_micro, needed):
    "With BatchNorm a part needs two items"
    learn = small(64, bs, NoiseScale(n_micro=n_micro), with_batchnorm() if bn else None, floats(64) if bn else None)
    unchanged_by(learn, f'at least {needed} are needed.*take a larger batch, or GradAccum\\(2\\)')

class Feeds(Callback):
    "Has the model see something that is not of the items"
    order = 20
    def before_batch(self): self.learn.xb = (*self.xb, self.x.T)

class Second(nn.Module):
    "Ignores whatever else it is fed"
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x, other=None): return self.m(x)

def test_a_batch_that_cannot_be_cut_is_refused():
    "It is seen at the first batch"
    unchanged_by(small(model=Second(), cbs=[NoiseScale(), Feeds()]), r'this one of 8 items holds a tensor of shape \(5, 8\): use GradAccum\(2\)')
    learn = small(bs=4, model=Second(), cbs=[NoiseScale(), GradAccum(2), Feeds()])
    learn.fit(1, 0.01)
    assert len(learn.noise_scale.df)==8
