"`learn.bs_find`: what it says, that nobody can tell it was called, and what it refuses"
import builtins
import re
import sys
import time
import warnings
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader as TorchDataLoader, Dataset, IterableDataset, RandomSampler
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.callback.rnn import rnn_cbs
from fastai.callback.schedule import ParamScheduler, SchedCos
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, TfmdDL
from fastai.data.load import DataLoader
from fastai.layers import Flatten
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import F1Score, accuracy
from fastai.optimizer import Adam, OptimWrapper, SGD, ranger
from fastai.text.data import LMDataLoader
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model

from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.finder.mock_cycle import MockAccum, rate_at
from fastai_bs.noise.estimator import last_stretch
from fastai_bs.finder.bs_find import BSFinder, window_size
from fastai_bs.schedule.scaled_lr import ScaledLR
from fastai_bs.noise.noise_scale import NoiseScale
from fastai_bs.schedule.rules import adascale_gain, sqrt_scaling
from fastai_bs.finder.timing import StepTimes
from helpers import (autocast_state, changes, loaders, mlp, pairwise, picture, quiet_learner, RaiseAt, regression, ScaledLoss, set_seed, Swap, token_model,
                     tokens)
from test_snapshot import Net

pytestmark = pytest.mark.usefixtures('short')

# Nobody can tell it was called

def images(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(1,6,6, generator=g), int(torch.randint(0,3,(1,), generator=g))) for _ in range(n)]

def convnet():
    return nn.Sequential(nn.Conv2d(1,4,3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), Flatten(), nn.Linear(64,3))

def halves(model): return [list(model[:2].parameters()), list(model[2:].parameters())]

def convnet_learner(dls=None, n=64, opt_func=Adam, **kwargs):
    dls = dls or loaders(images(n), 8, valid=images(8,1), shuffle=True)
    return quiet_learner(dls, convnet(), loss_func=CrossEntropyLossFlat(), opt_func=opt_func, splitter=halves, **kwargs)

def language_learner():
    toks = [torch.randint(0,12,(n,)) for n in (40,61,33,50,70)]
    dls = DataLoaders(LMDataLoader(toks, bs=2, seq_len=7, shuffle=True, num_workers=0), LMDataLoader(toks[:1], bs=2, seq_len=7, num_workers=0), device='cpu')
    model = get_language_model(AWD_LSTM, 12, config={**awd_lstm_lm_config, 'emb_sz': 6, 'n_hid': 8, 'n_layers': 2})
    return quiet_learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=Adam, cbs=rnn_cbs(alpha=2., beta=1.))

def _jitter(x:torch.Tensor): return x+0.1*torch.randn_like(x)

def fresh_tfmd_learner():
    train,valid = (TfmdDL(images(64), bs=8, shuffle=s, num_workers=0, after_item=_jitter) for s in (True,False))
    learn = convnet_learner(DataLoaders(train, valid, device='cpu'))
    assert not hasattr(train, '_types')
    return learn

def torch_loaders(**kwargs):
    items = images(64)
    gen = lambda i: torch.Generator().manual_seed(i)
    train = TorchDataLoader(items, batch_size=8, sampler=RandomSampler(items, generator=gen(1)), generator=gen(2), **kwargs)
    return DataLoaders(train, TorchDataLoader(items[:8], batch_size=8))

class StateNet(Net):
    "`Net` with its buffers and attributes, for images"
    def forward(self, x): return super().forward(x.flatten(1)[:,:5])

def state_learner(): return quiet_learner(loaders(images(64), 8, shuffle=True), StateNet(n_out=3), loss_func=CrossEntropyLossFlat(), opt_func=Adam)

def _metrics():
    learn = convnet_learner(metrics=[accuracy, F1Score(average='macro')])
    learn.recorder.train_metrics = True
    return learn

def _frozen():
    learn = convnet_learner()
    for p in learn.model[0].parameters(): p.requires_grad_(False)
    return learn

def _after_training(learn): learn.fit(1, 0.01)

def _open_gradients(learn):
    "None, zero and not zero: those enter the first step that follows"
    learn.fit(1, 0.01)
    learn.model[0].weight.grad.fill_(0.5)
    learn.model[1].weight.grad = None

def _after_freezing(learn):
    learn.fit(1, 0.01)
    learn.freeze()
    learn.fit(1, 0.01)

def _nothing(learn): pass

def scheduler(): return ParamScheduler({'lr': SchedCos(0.01,0.001), 'mom': SchedCos(0.9,0.8)})

learners = dict(convnet=convnet_learner, awd_lstm=language_learner, fresh_tfmd_dl=fresh_tfmd_learner, state_in_modules=state_learner, metrics=_metrics,
    frozen=_frozen,
    workers=lambda: convnet_learner(DataLoaders(*(DataLoader(images(64), bs=8, shuffle=True, num_workers=2) for _ in range(2)), device='cpu')),
    torch_loaders=lambda: convnet_learner(torch_loaders()),
    persistent_workers=lambda: convnet_learner(torch_loaders(num_workers=2, persistent_workers=True)),
    scheduler=lambda: convnet_learner(cbs=scheduler()),
    grad_accum=lambda: convnet_learner(cbs=GradAccum(3)),
    noise_scale=lambda: convnet_learner(cbs=[GradAccum(2), NoiseScale()]),
    fastai_accumulation=lambda: convnet_learner(cbs=GradientAccumulation(16)),
    mixup=lambda: convnet_learner(cbs=MixUp(0.4)),
    scaled_lr=lambda: convnet_learner(cbs=[GradAccum(2), NoiseScale(), ScaledLR(4, sqrt_scaling)]),
    loss_scaler=lambda: convnet_learner(cbs=ScaledLoss(init_scale=2.**10, growth_interval=4)))

opts = dict(adam=Adam, sgd=partial(SGD, mom=0.9), ranger=ranger, adamw=partial(OptimWrapper, opt=torch.optim.AdamW))

def _opt_learner(nm): return convnet_learner(opt_func=opts[nm])

def _built_opt_learner():
    model = convnet()
    opt = OptimWrapper(opt=torch.optim.AdamW([{'params': o} for o in halves(model)], lr=0.01))
    return quiet_learner(loaders(images(64), 8, shuffle=True), model, loss_func=CrossEntropyLossFlat(), opt_func=opt)

make = {**learners, **{nm: partial(_opt_learner, nm) for nm in opts}, 'built_adamw': _built_opt_learner}

cases = [(nm,_nothing) for nm in learners] + [(nm,_after_training) for nm in list(learners)[::2]]
cases += [(nm,first) for nm in (*opts,'built_adamw') for first in (_nothing,_after_freezing)
    if (nm,first)!=('adam',_nothing)] + [('convnet',_open_gradients),('sgd',_open_gradients)]
case_ids = [f"{nm}{first.__name__.replace('_nothing','')}" for nm,first in cases]

def failing_find(learn, event, error, order=99):
    "From the fourth micro-batch on where the event is one of a batch, else at once"
    with pytest.raises(error, match='the one'), learn.added_cbs(RaiseAt(event, error, range(3, 99), order=order)): find(learn)

def find(learn, **kwargs): return learn.bs_find(**{**dict(lr=0.01, num_it=11, n_batch=2, show_plot=False), **kwargs})

def training(make, first=_nothing, mock=None, fit=lambda learn: learn.fit(2, 0.01)):
    "Everything that a learner holds after a training, bit for bit; with a `mock` training before it, which must leave no trace by itself either"
    set_seed(0)
    learn = make()
    first(learn)
    if mock is not None:
        was = picture(learn)
        mock(learn)
        assert changes(was, picture(learn))==[]
    fit(learn)
    for dl in learn.dls.loaders:
        if getattr(dl, '_iterator', None) is not None: dl._iterator._shutdown_workers()
    assert torch.stack(learn.recorder.losses).isfinite().all() and learn.opt.state_dict()['state']
    return picture(learn, ids=False)

@lru_cache(maxsize=None)
def plain_training(nm, first): return training(make[nm], first)

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('nm,first', cases, ids=case_ids)
def test_cannot_be_noticed(nm, first):
    mock = partial(find, max_bs=8) if 'workers' in nm and (nm,first)!=('workers',_nothing) else find # To start workers for each size takes long: once will do
    assert changes(plain_training(nm, first), training(make[nm], first, mock))==[]

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('nm,first', [o for o in cases if o[1] is _nothing], ids=[i for i,o in zip(case_ids, cases) if o[1] is _nothing])
def test_an_interrupt_cannot_be_noticed(nm, first):
    mock = partial(failing_find, event='after_backward', error=KeyboardInterrupt)
    assert changes(plain_training(nm, first), training(make[nm], first, mock))==[]

@pytest.mark.parametrize('fit', ['fit_one_cycle','fit_flat_cos'])
def test_scheduled_trainings_after_it(fit):
    go = lambda learn: getattr(learn, fit)(2, 0.01)
    assert changes(training(convnet_learner, fit=go), training(convnet_learner, mock=find, fit=go))==[]

@pytest.mark.parametrize('kwargs', [dict(num_it=200, n_batch=20, tol=1e-9, n_epoch=5), dict(lr=slice(1e-3,1e-2)), dict(lr=[1e-3,1e-2], n_epoch=0.5),
    dict(lr=0)], ids=['longer','slice','list','still'])
def test_whatever_is_asked_for_cannot_be_noticed(kwargs):
    "A cycle that is held for more windows, rates of its own for each group, a part of an epoch, fixed weights"
    make = learners['scaled_lr']
    assert changes(plain_training('scaled_lr', _nothing), training(make, mock=partial(find, **kwargs)))==[]

# Every event

class Spy(Callback):
    "Notes the events of a mock training"
    fired = []
    def __call__(self, event_name): self.fired.append(event_name)

events = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step',
          'after_cancel_batch','after_batch','after_train','before_validate','after_cancel_validate','after_validate','after_epoch','after_cancel_fit','after_fit']

def test_these_are_all_events():
    Spy.fired = []
    find(convnet_learner(cbs=Spy()))
    assert set(Spy.fired)-{'after_create'}==set(events)

@pytest.mark.parametrize('event,order,error', pairwise(events, [-99,99], [ValueError,KeyboardInterrupt], where=lambda e,o,_: (e,o)!=('before_validate',99)))
def test_an_exception_in_any_event(event, order, error):
    "`bs_find` ends the validation before 99"
    mock = partial(failing_find, event=event, error=error, order=order)
    assert changes(plain_training('convnet', _nothing), training(convnet_learner, mock=mock))==[]

@pytest.mark.parametrize('outer', [False,True], ids=['closed','inside_another'])
def test_an_autocast_context_left_open(outer):
    "By an exception in forward, between the callback's entry and its exit"
    class Autocast(Callback):
        def before_batch(self):
            self.context = torch.autocast('cpu', dtype=torch.float16)
            self.context.__enter__()
        def after_pred(self): self.context.__exit__(None, None, None)
    class Fragile(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled() and x.mean()>0.3: raise ValueError('the one')
            return super().forward(x).float()
    torch.manual_seed(0)
    learn = quiet_learner(loaders(regression(200, dtype=torch.float32), 4), Fragile(5,2), cbs=Autocast())
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=outer):
        depth,was = autocast_state(),picture(learn)
        with pytest.raises(ValueError, match='the one'): learn.fit(1)
        assert autocast_state()!=depth # So fastai leaves it
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled('cpu', outer); torch.set_autocast_dtype('cpu', torch.bfloat16)
        learn = quiet_learner(loaders(regression(200, dtype=torch.float32), 4), Fragile(5,2), cbs=Autocast())
        was = picture(learn)
        with pytest.raises(ValueError, match='the one'): learn.bs_find(0.01, show_plot=False)
        assert autocast_state()==depth and changes(was, picture(learn))==[]

# Files

class Progress(Callback):
    "Stands in for the progress bar that ShowGraphCallback draws on"
    mbar = SimpleNamespace(update_graph=lambda *a: None, write=lambda *a: None)

def watched_learner(path, graph=True):
    learn = convnet_learner(path=path)
    learn.recorder.add_time = False
    return learn.add_cbs([Progress()]*graph + [ShowGraphCallback()]*graph +
        [SaveModelCallback(), EarlyStoppingCallback(patience=2), ReduceLROnPlateau(patience=1), CSVLogger(), TerminateOnNaNCallback()])

def _files(folder): return {p.relative_to(folder): p.read_text() if p.suffix=='.csv' else p.stat().st_size for p in Path(folder).rglob('*') if p.is_file()}

def _no_writing(monkeypatch):
    "As on a file system that is read-only"
    def _refuse(*args, **kwargs): raise PermissionError('read-only')
    def _only_reading(file, mode='r', *args, _open=builtins.open, **kwargs):
        return _refuse() if set(mode)&set('wax+') else _open(file, mode, *args, **kwargs)
    for o,nm in ((Path,'mkdir'),(Path,'open'),(Path,'touch'),(Path,'write_text'),(torch,'save')): monkeypatch.setattr(o, nm, _refuse)
    monkeypatch.setattr(builtins, 'open', _only_reading)
    for nm in ('mkdir','makedirs','replace','rename'): monkeypatch.setattr(f'os.{nm}', _refuse)

@pytest.mark.parametrize('mock', [find, partial(find, num_it=40, lr=0), partial(failing_find, event='after_epoch', error=ValueError)],
    ids=['ends','many_epochs','fails'])
def test_no_file_appears(mock, tmp_path, monkeypatch):
    "With callbacks that write, on a file system where nobody can; and they do their work in the training that follows"
    def _mock(learn):
        with monkeypatch.context() as m:
            _no_writing(m)
            mock(learn)
        assert list(tmp_path.rglob('*'))==[] and list(Path.cwd().rglob('*'))==[]
    def fit(learn):
        learn.path.mkdir()
        learn.fit(4, 0.05)
    alone,after = (training(partial(watched_learner, tmp_path/nm), mock=m, fit=fit) for nm,m in (('after',_mock),('alone',None)))
    assert [k for k in changes(alone, after) if not k.endswith(("['path']","['file']"))]==[]
    assert set(map(str, _files(tmp_path/'after')))=={'history.csv','models/model.pth'} and _files(tmp_path/'after')==_files(tmp_path/'alone')

# What it says

def by_hand(items, bs, n_acc, loss_func, model, beta=0.99):
    "Noise scale in items at fixed weights, from one backward pass per micro-batch and per window: |G_n|² = |G|² + tr(Σ)/n for both sizes, solved"
    def _sq(o):
        xb,yb = (torch.stack(list(t)) for t in zip(*o))
        g = torch.autograd.grad(loss_func(model(xb), yb), list(model.parameters()))
        return sum(t.double().square().sum().item() for t in g)
    rows = []
    for i in range(0, len(items), bs*n_acc):
        window = items[i:i+bs*n_acc]
        micros = [window[j:j+bs] for j in range(0, len(window), bs)]
        if len(micros)<2: continue
        N,K,sq_mean = len(window),len(micros),_sq(window)
        tr_sigma = sum(len(m)*(_sq(m)-sq_mean) for m in micros)/(K-1)
        rows.append((N, tr_sigma, sq_mean-tr_sigma/N))
    w = np.array([r[0]*beta**(len(rows)-i) for i,r in enumerate(rows)])
    return w@[r[1] for r in rows]/(w@[r[2] for r in rows]), rows

@pytest.mark.parametrize('n,bs,n_batch', [(160,4,4),(158,4,4),(157,5,2),(64,1,8)], ids=['even','last_batch_short','last_window_short','single_items'])
def test_value_at_fixed_weights(n, bs, n_batch):
    items = regression(n)
    learn = quiet_learner(loaders(items, bs), mlp())
    plan = learn.bs_find(0, n_batch=n_batch, num_it=-(-n//bs), tol=0, show_plot=False)
    value,rows = by_hand(items, bs, n_batch, nn.functional.mse_loss, learn.model)
    assert last_stretch(pd.DataFrame(rows, columns=['n_elems','tr_sigma','g_sq']).assign(n_items=1))==0
    # The loss averages over the 2 outputs of an item as well: that is one element each, and the noise scale is in items
    assert plan.noise_scale==pytest.approx(value, rel=1e-9)
    assert plan.measured.n_windows==len(rows)==len(plan.df) and plan.df.n_items.tolist()==[r[0] for r in rows]
    assert plan.ci==pytest.approx(tuple(plan.df[['low','high']].iloc[-1]), rel=1e-9) and plan.ci[0]<plan.noise_scale<plan.ci[1]

def token_features(n, n_tokens=7, vocab=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, n_tokens, 4, generator=g, dtype=torch.float64)
    return list(zip(x, (x[...,:vocab-1].argmax(-1)+torch.randint(0,2,(n,n_tokens), generator=g))))

class TokenLoss(nn.CrossEntropyLoss):
    def forward(self, pred, targ): return super().forward(pred.flatten(0,1), targ.flatten())

def test_token_losses_are_told_in_items():
    "An item of 7 tokens: the noise scale is a seventh of the one in tokens"
    items,model = token_features(96),mlp(4, 5)
    learn = quiet_learner(loaders(items, 4), model, loss_func=CrossEntropyLossFlat().func.__class__())
    learn.model = nn.Sequential(model, Swap())
    plan = learn.bs_find(0, n_batch=3, num_it=24, tol=0, show_plot=False)
    value,_ = by_hand(items, 4, 3, TokenLoss(), model)
    assert plan.noise_scale==pytest.approx(value, rel=1e-9)
    assert plan.df.n_elems.eq(7*plan.df.n_items).all() and plan.base_bs==4

@pytest.mark.parametrize('lr', [0,0.01])
def test_one_sample_copied_has_no_noise(lr):
    items = regression(1, dtype=torch.float32)*10_000
    plan = quiet_learner(loaders(items, 50), mlp(dtype=torch.float32)).bs_find(lr, show_plot=False)
    assert plan.noise_scale==pytest.approx(0, abs=1e-3) and plan.ci[1]<0.01 and plan.balanced_bs==1

def reg_learner(n=200, bs=4, dtype=torch.float32, seed=0, **kwargs):
    return quiet_learner(loaders(regression(n, dtype=dtype), bs, shuffle=True), mlp(dtype=dtype, seed=seed), **kwargs)

@pytest.mark.parametrize('tol', [0.25, 0.5, 1.])
def test_early_stop(tol):
    "At the first look, one every 5 windows from the 20th on, at which the interval is narrow enough"
    set_seed(1)
    plan = reg_learner(2400, 4).bs_find(0, n_batch=4, num_it=3000, tol=tol, show_plot=False)
    df = plan.df
    assert plan.measured.trend==0 and plan.measured.n_windows==len(df)>=20
    narrow = [(i+1)%5==0 and i>=19 and (df.high[i]-df.low[i])/2<tol*df.noise_scale[i] for i in range(len(df))]
    assert narrow[-1] and sum(narrow)==1

def test_early_stop_waits_for_20_windows_after_a_drift():
    "A stretch has to be long enough by itself"
    noise = NoiseScale()
    noise.rows = [(i+1, 40, 40., 100.+i%2, 10.) for i in range(15)] + [(i+16, 40, 40., 1000.+i%2, 10.) for i in range(15)]
    finder = BSFinder(MockAccum(noise, 10), 1000, tol=0.5)
    assert not finder.narrow_enough()
    noise.rows += [(i+31, 40, 40., 1000.+i%2, 10.) for i in range(30)]
    assert finder.narrow_enough()

@pytest.mark.parametrize('num_it', [None,60,171])
def test_tol_0_never_stops_early(num_it):
    "An epoch of 50 holds 25 windows: without `num_it` that is enough"
    plan = reg_learner().bs_find(0, n_batch=2, num_it=num_it, tol=0, show_plot=False)
    assert plan.measured.n_passes==pytest.approx((num_it or 50)/50)

@pytest.mark.parametrize('n_iter,n_acc', [(2,2),(3,2),(15,2),(16,2),(24,3),(159,19),(160,20),(1000,20)])
def test_window_size(n_iter, n_acc): assert window_size(20, n_iter)==n_acc

@pytest.mark.parametrize('n_ranks,n_acc', [(2,10),(3,7),(20,1),(30,1)])
def test_window_size_on_ranks(n_ranks, n_acc): assert window_size(20, 1000, n_ranks)==n_acc # Together at least as many as asked for

@pytest.mark.parametrize('n_iter,lr', [*((n,0) for n in (2,3,4,5,15,17,40)), *((n,0.01) for n in (2,5,40))])
def test_short_loaders_give_20_windows(n_iter, lr):
    "Whatever is left over at the end of each epoch"
    plan = reg_learner(4*n_iter-1, 4).bs_find(lr, tol=0, show_plot=False)
    assert len(plan.df)>=20 and plan.df.n_items.max()=={2: 7, 40: 20}.get(n_iter, 8) # The last micro-batch of an epoch has 3 items

@pytest.mark.parametrize('lr,base_lr,moved', [(0.02,0.02,True), (0,0.005,False), (None,0.005,True), (slice(1e-4,1e-3),slice(1e-4,1e-3),True),
    ([0.01,0.02],[0.01,0.02],True)])
def test_learning_rate(lr, base_lr, moved):
    "The plan names the rate that goes with today's batch size, and says whether the weights moved; the mock training goes up to it, as `fit_one_cycle`"
    seen = []
    class Look(Callback):
        order = 98
        def after_step(self): seen.append(self.opt.hypers[-1]['lr'])
    learn = convnet_learner(cbs=Look(), lr=0.005)
    plan = find(learn, lr=lr)
    assert (plan.lr,plan.measured.moved)==(base_lr,moved)
    last = lr.stop if isinstance(lr, slice) else lr[-1] if isinstance(lr, list) else 0.005 if lr is None else lr
    assert [o for o in seen if o]==pytest.approx([last*rate_at(i/5) for i in range(5)] if moved else [])
    assert seen[-1]==0 # The steps that are timed move nothing

@pytest.mark.parametrize('accum', [[], [GradAccum(2)]])
def test_losses_are_those_of_the_windows(accum):
    "Whether the rate is too high is not asked of a micro-batch of the training between them"
    seen,paths = [],[]
    class Look(Callback):
        order = BSFinder.order+1
        def after_backward(self):
            accum = getattr(self.learn, 'grad_accum', None)
            if isinstance(accum, MockAccum) and accum.measures:
                seen.append((accum.cycle.pct,self.learn.loss.item()))
                paths[:] = [accum.losses]
    plan = find(reg_learner(cbs=[Look(), *accum]), num_it=40, n_batch=5)
    path, = paths
    assert [o for w in path.windows for o in w[:,0].tolist()]==[o for _,o in seen] and len(seen)<plan.measured.n_seen
    assert path.at==plan.df.pct.tolist() and path.sums()[:,0].tolist()==(plan.df.n_items/4).tolist()

def rates_of(learn, **kwargs):
    "What it steps with, and the plan"
    rates = set()
    class Look(Callback):
        order = 200
        def before_step(self): rates.update(h['lr'] for h in self.opt.hypers)
    learn.add_cb(Look())
    plan = find(learn, **kwargs)
    return sorted(rates-{0.}),plan

@pytest.mark.parametrize('lr,scaled,rates', [(0.01,ScaledLR(2),{0.02}), (0.01,ScaledLR(2, sqrt_scaling, warmup_epochs=3),{round(0.01*2**.5, 12)}),
    (slice(0.01,0.02),ScaledLR(8),{0.005,0.01}), (None,ScaledLR(2),{0.006}), (0,ScaledLR(2),set()),
    (0.01,ScaledLR(2, adascale_gain, noise_scale=NoiseScale()),{0.01})])
def test_the_rate_that_this_batch_is_trained_with(lr, scaled, rates):
    "A ScaledLR that the learner has is set aside, but its factor is not: the training goes on at the scaled rate"
    learn = reg_learner(cbs=scaled, lr=0.003, splitter=lambda m: [list(m[:2].parameters()),list(m[2:].parameters())])
    used,plan = rates_of(learn, lr=lr)
    assert used==pytest.approx(sorted(o*rate_at(i/5) for o in rates for i in range(5))) and plan.base_bs==scaled.base_bs and plan.bs_now==4
    assert plan.lr==(lr if lr else 0.003) and learn.cbs[-2] is scaled

def test_learning_rate_of_the_optimizer_function():
    "fastai takes that one where there is no other"
    learn = reg_learner(opt_func=partial(SGD, lr=0.3))
    assert find(learn, lr=None).lr==0.3

@pytest.mark.parametrize('lr', [0, slice(0), [0.,0.]])
def test_weights_that_do_not_move(lr): assert not find(convnet_learner(), lr=lr).measured.moved

@pytest.mark.parametrize('cbs,base_bs', [([],4), ([GradAccum(4)],16), ([GradAccum({0: 2, 1: 8})],8), ([GradAccum(3),NoiseScale()],12),
    ([GradientAccumulation(10)],12)])
def test_todays_batch_size(cbs, base_bs):
    plan = find(reg_learner(cbs=cbs))
    assert (plan.base_bs,plan.today.micro_bs,plan.today.n_train)==(base_bs,4,200)

class Stream(IterableDataset):
    "Gives `n` items, and declares no length"
    def __init__(self, n): self.items = regression(n, dtype=torch.float32)
    def __iter__(self): return iter(self.items)

def test_plot_is_drawn_only_if_asked_for():
    import matplotlib.pyplot as plt
    find(reg_learner())
    assert not plt.get_fignums()
    find(reg_learner(), show_plot=True)
    assert len(plt.get_fignums())==1

# Memory

def _peak(n_batch):
    "The most bytes that the tensors of a mock training hold at a time"
    class Wide(Dataset):
        def __len__(self): return 800
        def __getitem__(self, i): return torch.full((200,), i/800), torch.tensor([1.])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200,400), nn.Tanh(), nn.Linear(400,400), nn.Tanh(), nn.Linear(400,1))
    learn = quiet_learner(DataLoaders(*(DataLoader(Wide(), bs=2, num_workers=0) for _ in range(2)), device='cpu'), model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        plan = learn.bs_find(0, n_batch=n_batch, num_it=120, tol=0, max_bs=2, show_plot=False) # Along a cycle the noise says how long windows are
    assert plan.df.n_items.eq(2*n_batch).all()
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name()=='[memory]')
    return max(np.cumsum([b for _,b in events])), sum(p.numel()*4 for p in model.parameters())

@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_window():
    (few,n_bytes),(many,_) = _peak(4),_peak(40)
    assert few>2*n_bytes # Snapshot and gradients, so the count sees them
    assert abs(many-few)<0.05*n_bytes

# What it refuses

nan,inf = float('nan'),float('inf')

bad = [(dict(max_bs='yes'), TypeError, "`max_bs` must be a whole number of items, 'auto' or None, got 'yes'"),
    (dict(num_it=0), ValueError, '`num_it` must be at least 1 micro-batch, got 0'), (dict(num_it=1.5), TypeError,
    '`num_it` must be a whole number of micro-batches, got 1.5'),
    (dict(num_it=True), TypeError, '`num_it` must be a whole number'), (dict(num_it='9'), TypeError,
    "`num_it` must be a whole number of micro-batches, got '9'"),
    (dict(lr=0, num_it=3, n_batch=2), ValueError, '`num_it`=3 micro-batches do not make two windows of 2: raise it, or make n_batch smaller'),
    (dict(num_it=6), ValueError, '`num_it`=6 micro-batches are not enough for two windows of 2 and a step of 1: take 8 or more, or leave it out'),
    *[(dict(n_epoch=v), ValueError, f'`n_epoch` must be above 0 and finite, the epochs you are going to train for with today.s batch size, got {v}')
      for v in (0,-1,-0.5,nan,inf)],
    *[(dict(n_epoch=v), TypeError, f'`n_epoch` must be a number, the epochs you are going to train for with today.s batch size, got {v!r}')
      for v in ('5',True,False)], (dict(n_epoch=[1]), TypeError, '`n_epoch` must be a number'),
    (dict(lr=0, n_epoch=0), ValueError, '`n_epoch` must be above 0'),
    (dict(n_batch=1), ValueError, '`n_batch` must be at least 2 micro-batches, got 1'), (dict(n_batch=2.5), TypeError,
    '`n_batch` must be a whole number of micro-batches, got 2.5'),
    (dict(n_batch=None), TypeError, '`n_batch` must be a whole number'),
    *[(dict(beta=v), ValueError, f'`beta` must be between 0 and 1, both excluded, got {v}') for v in (0,1,-1,2,nan)], (dict(beta='x'), (TypeError,ValueError),
    '`beta` must be'),
    *[(dict(ci=v), ValueError, f'`ci` must be between 0 and 1, both excluded, got {v}') for v in (0,1,95)], (dict(ci=None), (TypeError,ValueError),
    '`ci` must be'),
    *[(dict(lr=v), ValueError, f'`lr` must be 0 or more and finite, got {v}') for v in (-1,nan,inf)], (dict(lr='x'), TypeError,
    "`lr` must be a number, a slice or one number per parameter group, got 'x'"),
    (dict(lr=True), TypeError, '`lr` must be a number'), (dict(lr=slice(-1e-3,1e-2)), ValueError, '`lr` must be 0 or more'), (dict(lr=[0.1,nan]), ValueError,
    '`lr` must be 0 or more'),
    (dict(lr=slice(None)), (TypeError,ValueError), '`lr` must'), (dict(lr=[]), (TypeError,ValueError), '`lr` must'), (dict(lr=[0.1]*3),
    (TypeError,ValueError), '`lr` must.*parameter group'),
    (dict(lr=[None]), (TypeError,ValueError), '`lr` must'),
    *[(dict(seed=v), TypeError, f'`seed` must be a whole number, 0 or more, got {v!r}') for v in (1.5,'3',True)],
    (dict(seed=-1), ValueError, '`seed` must be a whole number, 0 or more, got -1'),
    *[(dict(tol=v), ValueError, f'`tol` must be 0 or more, the interval\'s half-width as a fraction of the estimate, got {v}') for v in (-1,nan)],
    (dict(tol='x'), (TypeError,ValueError), '`tol` must be')]

def _refused(learn, error, match, **kwargs):
    "In words, before anything has changed"
    spy = Spy()
    learn.add_cb(spy)
    was,spy.fired[:] = picture(learn),[]
    with pytest.raises(error, match=match): learn.bs_find(**{**dict(lr=0.01, show_plot=False), **kwargs})
    assert changes(was, picture(learn))==[]
    return spy.fired

@pytest.mark.parametrize('kwargs,error,match', bad, ids=[str(o[0]) for o in bad])
def test_bad_arguments(kwargs, error, match): assert _refused(reg_learner(), error, match, **kwargs)==[]

@pytest.mark.parametrize('lr,given', [(0.01,True), ([0.01],True), (None,False), (0,False)])
def test_the_plan_knows_where_its_rate_is_from(lr, given):
    "`bs_find()` and `bs_find(0)` know of the learner's own only"
    plan = find(reg_learner(lr=0.3), lr=lr)
    assert plan.today.has_lr==given and plan.lr==(lr if given else 0.3)

@pytest.mark.parametrize('lr,most', [(0,80), (0.01,None)])
def test_large_windows_of_the_measurement_are_no_accumulation_to_warn_of(lr, most):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        plan = quiet_learner(loaders(regression(700), 2), mlp()).bs_find(lr, n_batch=40, num_it=160, max_bs=2, show_plot=False)
    assert most is None or plan.df.n_items.max()==most

def test_bad_learning_rate_of_the_learner():
    assert _refused(reg_learner(lr=-0.1), ValueError, '`lr` must be 0 or more and finite, got -0.1', lr=None)==[]

def _one_batch(): return reg_learner(4, 4)
def _empty(): return quiet_learner(DataLoaders(*(DataLoader([], bs=4) for _ in range(2)), device='cpu'), mlp())
def _empty_torch(): return quiet_learner(DataLoaders(*(TorchDataLoader([], batch_size=4) for _ in range(2))), mlp())
def _dropped(): return quiet_learner(loaders(regression(3), 4, drop_last=True), mlp())
def _endless(): return quiet_learner(DataLoaders(*(DataLoader(Stream(60), bs=4) for _ in range(2)), device='cpu'), mlp(dtype=torch.float32))
def _endless_torch(): return quiet_learner(DataLoaders(*(TorchDataLoader(Stream(60), batch_size=4) for _ in range(2))), mlp(dtype=torch.float32))
def _all_frozen():
    learn = reg_learner()
    for p in learn.model.parameters(): p.requires_grad_(False)
    return learn
def _no_parameters(): return quiet_learner(loaders(regression(20), 4), nn.Sequential(nn.Flatten(), nn.Tanh()))

@pytest.mark.parametrize('make,match', [
    (_one_batch, 'yields 1 micro-batch in an epoch of 4 items with bs=4, and at least 2 are needed'), (_empty, 'yields 0 micro-batches in an epoch of 0 items'),
    (_empty_torch, 'yields 0 micro-batches in an epoch'), (_dropped, 'yields 0 micro-batches in an epoch of 3 items with bs=4'),
    (_endless, 'does not declare a length.*give its data set a `__len__`, or the loader `n=`'), (_endless_torch, 'does not declare a length'),
    (_all_frozen, 'no trainable parameters.*unfreeze'), (_no_parameters, 'no trainable parameters')], ids=lambda o: getattr(o, '__name__', ''))
def test_bad_learners(make, match): assert _refused(make(), ValueError, match)==[]

class Views(Callback):
    "Another number of items in each batch, as with two views of each"
    def __init__(self, f): self.f = f
    def before_batch(self): self.learn.xb,self.learn.yb = ([self.f(o) for o in b] for b in (self.xb,self.yb))

def _twice(o): return torch.cat([o,o])
def _two_views(): return reg_learner(64, 4, cbs=Views(_twice))
def _some_left_out(): return reg_learner(64, 4, cbs=Views(lambda o: o[1:]))
def _repeated_by_the_loader():
    return quiet_learner(loaders(regression(64, dtype=torch.float32), 4, before_batch=lambda items: [*items,*items]), mlp(dtype=torch.float32))

@pytest.mark.parametrize('make,n', [(_two_views,8), (_some_left_out,3), (_repeated_by_the_loader,8)])
def test_a_batch_of_other_items_than_the_loaders_is_refused(make, n):
    "At once, where there are more"
    fired = _refused(make(), ValueError, f'makes batches of 4 items, and the loss gets {n}: .* Measure without it, by `with learn.removed_cbs', num_it=40)
    assert fired.count('after_backward')==1 or n==3

@pytest.mark.parametrize('cb', [None, TerminateOnNaNCallback], ids=['alone','with_terminate_on_nan'])
@pytest.mark.parametrize('what', [nan,inf])
@pytest.mark.parametrize('first', [1,7])
def test_a_loss_that_is_not_finite(first, what, cb):
    "It says at which micro-batch, and runs no further"
    items = [(x, y if i<4*(first-1) else y*what) for i,(x,y) in enumerate(regression(80, dtype=torch.float32))]
    learn = quiet_learner(loaders(items, 4), mlp(dtype=torch.float32), cbs=cb)
    fired = _refused(learn, ValueError, rf'The loss is {what} at micro-batch {first} of the mock training \(lr=0.01\)', n_batch=2)
    assert fired.count('before_batch')==first

def test_a_loss_that_diverges():
    learn = reg_learner()
    _refused(learn, ValueError, r'The loss is (nan|inf) at micro-batch \d+ of the mock training \(lr=1e\+20\).*lower `lr`', lr=1e20)
    learn.fit(1, 0.01)
    assert learn.recorder.losses[-1].isfinite()

# What the learner brings along

def my_token_loss(pred, targ):
    loss = nn.functional.cross_entropy(pred.flatten(0,1), targ.flatten(), reduction='none')
    keep = targ.flatten()!=0
    return (loss*keep).sum()/keep.sum()

def test_the_count_of_the_learners_own_accumulation_is_kept():
    "A loss of one's own over tokens reads as torch's does with `ignore_index`"
    items = tokens(96, n_tok=9, length=6, kept=lambda i: 1+i*i%7%6, pad=0)
    def plan(loss_func, cbs=None):
        return quiet_learner(loaders(items, 4), token_model(9, last=True), loss_func, cbs=cbs).bs_find(0, n_batch=3, num_it=24, tol=0, show_plot=False)
    torchs = plan(CrossEntropyLossFlat(ignore_index=0))
    mine = plan(my_token_loss, GradAccum(1, count=lambda learn: (learn.y!=0).sum()))
    assert mine.noise_scale==pytest.approx(torchs.noise_scale, rel=1e-4) # fastai's flat losses compute in single precision
    with pytest.warns(UserWarning, match='cannot tell what the loss'): means = plan(my_token_loss)
    assert means.noise_scale!=pytest.approx(torchs.noise_scale, rel=1e-2)

class PlainLoader:
    "No data set, no batch size, only batches"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        for _ in range(self.n):
            x = torch.randn(4, 5, generator=g)
            yield x, x[:,:2]+torch.randn(4, 2, generator=g)

def test_a_loader_without_a_data_set():
    plan = quiet_learner(DataLoaders(PlainLoader(60), PlainLoader(3), device='cpu'), mlp(dtype=torch.float32)).bs_find(0, show_plot=False)
    assert plan.today.n_train==240 and plan.base_bs==4

class CountingLoss:
    "Of no class that anybody knows, with a state of its own"
    reduction = 'mean'
    def __init__(self): self.n,self.decay = 0,torch.ones(())
    def __call__(self, pred, targ):
        self.n += 1
        self.decay.mul_(0.99)
        return nn.functional.mse_loss(pred, targ)*self.decay

@pytest.mark.filterwarnings('ignore:GradAccum cannot tell')
def test_a_loss_of_any_class_is_put_back():
    learn = quiet_learner(loaders(regression(80), 4), mlp(), CountingLoss())
    first,second = (learn.bs_find(0.01, num_it=40, show_plot=False) for _ in range(2))
    assert learn.loss_func.n==0 and learn.loss_func.decay==1 and first.noise_scale==second.noise_scale

def test_a_loss_that_sums_is_told():
    for reduction,there in (('sum',True),('mean',False)):
        learn = quiet_learner(loaders(regression(200, dtype=torch.float32), 4), mlp(dtype=torch.float32), nn.MSELoss(reduction=reduction))
        assert find(learn, lr=1e-5).today.sums==there

@pytest.mark.parametrize('lr', [0,0.01])
def test_num_it_that_is_enough(lr):
    "What the advice asks for makes 20 windows at fixed weights, or on the cool stretch"
    learn = reg_learner(400)
    plan = find(learn, lr=lr, num_it=11)
    assert plan.measured.n_windows<10 and f'num_it={plan.measured.n_enough})' in plan.advice
    assert find(learn, lr=lr, num_it=plan.measured.n_enough, tol=0).measured.n_windows==20

# Is the rate too high?

def test_a_rate_that_is_too_high_is_told():
    plan = reg_learner(lr=3.).bs_find(0.4, n_batch=2, tol=0, show_plot=False)
    assert plan.measured.loss_rose
    plan = reg_learner().bs_find(0.01, tol=0, show_plot=False)
    assert not plan.measured.loss_rose

def digits(opt_func=Adam):
    data = load_digits()
    items = list(zip(torch.tensor(data.data/16, dtype=torch.float32), torch.tensor(data.target)))
    torch.manual_seed(0)
    return quiet_learner(loaders(items, 64, shuffle=True), nn.Sequential(nn.Linear(64,100), nn.ReLU(), nn.Linear(100,10)), CrossEntropyLossFlat(), opt_func)

def too_high(learn, lr, **kwargs):
    "A loss that is no number any more says so too"
    try: return learn.bs_find(lr, max_bs=64, show_plot=False, num_it=200, **kwargs).measured.loss_rose
    except ValueError as e:
        assert 'of the mock training' in str(e)
        return True

@pytest.mark.parametrize('opt_func,lr', [(Adam,0.01), (partial(SGD, mom=0.9),0.1)], ids=['adam','sgd'])
@pytest.mark.parametrize('epochs', [8])
def test_going_on_from_weights_at_rest_is_no_alarm(opt_func, lr, epochs):
    "At the rate they were trained with the loss rises, and does not come down all the way"
    learn = digits(opt_func)
    learn.fit_one_cycle(epochs, lr)
    assert not too_high(learn, lr)

@pytest.mark.parametrize('lr', [1e-6,1e-2])
def test_a_rate_that_does_nothing_is_no_alarm(lr): assert not too_high(digits(), lr)

@pytest.mark.parametrize('opt_func,lr', [(Adam,3.), (partial(SGD, mom=0.9),9.)], ids=['adam','sgd'])
def test_new_weights_flung_away(opt_func, lr): assert too_high(digits(opt_func), lr)

def test_weights_at_rest_flung_away():
    "What is lost counts, and not what new weights would have had"
    learn = digits()
    learn.fit_one_cycle(4, 0.01)
    assert too_high(learn, 3.)

# Other random numbers

def test_seeds():
    "The same number to the digit for the same seed, another one for another"
    learn = convnet_learner()
    first,again,other,none = (find(learn, seed=o, num_it=40) for o in (3,np.int64(3),4,None))
    pd.testing.assert_frame_equal(first.df, again.df, check_exact=True)
    assert len({o.df.tr_sigma.sum() for o in (first,other,none)})==3
    assert [o.measured.seed for o in (first,other,none)]==[3,4,None]

@pytest.mark.parametrize('nm', ['convnet','torch_loaders','awd_lstm','workers'])
def test_another_order_of_the_items(nm):
    "In loaders of fastai and torch, with generators of their own"
    seen = {}
    class Look(Callback):
        def before_batch(self):
            if isinstance(getattr(self.learn, 'grad_accum', None), MockAccum): seen[seed].append(self.x.flatten()[:4].tolist())
    learn = learners[nm]()
    learn.add_cb(Look())
    for seed in (None,3,4): # Of five texts some seeds begin with the same ones
        seen[seed] = []
        find(learn, seed=seed, max_bs=8)
    assert seen[None]!=seen[3]!=seen[4]!=seen[None] and all(len(o)>8 for o in seen.values())

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('nm', ['convnet','awd_lstm','torch_loaders','loss_scaler'])
def test_a_seed_cannot_be_noticed(nm):
    assert changes(plain_training(nm, _nothing), training(learners[nm], mock=partial(find, seed=3)))==[]

# What it takes

@pytest.mark.parametrize('bar', [False,True])
@pytest.mark.parametrize('worth,n', [(0,1), (1e6,0)])
def test_what_it_takes_is_said_before(bar, worth, n, monkeypatch, capsys):
    "Once, where it is long and there is a bar"
    monkeypatch.setattr(BSFinder, 'worth_saying', worth)
    monkeypatch.setattr(StepTimes, 'budget', 180)
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    said = []
    monkeypatch.setattr(Progress, 'mbar', SimpleNamespace(write=said.append))
    plan = reg_learner(cbs=Progress() if bar else None).bs_find(0.01, num_it=40, max_bs=4, show_plot=False)
    assert len(said)==(n if bar else 0) and (bar or capsys.readouterr().out=='') and 0<plan.took<60 and plan.epoch_time>0
    for o in said: assert re.fullmatch(r'bs_find takes about \S+ s: up to 40 micro-batches to measure, then timing\. num_it= makes it shorter\.', o)

def test_what_it_takes_is_reckoned_from_micro_batches_that_have_warmed_up(monkeypatch):
    "All micro-batches there may be, and those of the timing"
    secs = []
    monkeypatch.setattr(BSFinder, 'say_cost', lambda self, o: secs.append(o))
    class Slow(Callback):
        def before_batch(self):
            if isinstance(getattr(self.learn, 'grad_accum', None), MockAccum): time.sleep(0.3 if self.learn.bs_finder.n_seen<2 else 0.02)
    find(reg_learner(cbs=Slow()), num_it=20)
    assert len(secs)==1 and 0.02<=secs[0]<0.1
