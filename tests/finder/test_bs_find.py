"`learn.bs_find`: what it says, that nobody can tell it was called, and what it refuses"
import math
import sys
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader as TorchDataLoader, Dataset, IterableDataset, RandomSampler
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.callback.rnn import ModelResetter, rnn_cbs
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback, TerminateOnNaNCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.layers import Flatten
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper
from fastai.text.data import LMDataLoader
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from fastai.torch_core import params

from fastai_bs.finder import bs_find as finder
from fastai_bs.all import adascale_gain, GhostBatchNorm, GradAccum, NoiseScale, ScaledLR, sqrt_scaling
from fastai_bs.finder.cycle import rate_at
from fastai_bs.finder.formulas import for_training
from fastai_bs.finder.mock import EndOfMock
from fastai_bs.finder.timing import StepTimes
from fastai_bs.noise.estimator import NoiseEstimate
from fastai_bs.schedule.scaled_lr import rates as all_rates
from helpers import (changes, halves, hypers, loaders, mlp, noted, peak_lr, picture, quiet_learner, RaiseAt, regression, ScaledLoss, set_seed, token_model,
                     tokens)
from test_snapshot import Net

nan,inf = float('nan'),float('inf')
pytestmark = pytest.mark.usefixtures('short')

# Nobody can tell it was called

def images(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(1,6,6, generator=g), int(torch.randint(0,3,(1,), generator=g))) for _ in range(n)]

def convnet():
    return nn.Sequential(nn.Conv2d(1,4,3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), Flatten(), nn.Linear(64,3))

def convnet_learner(dls=None, n=64, opt_func=Adam, **kwargs):
    dls = dls or loaders(images(n), 8, valid=images(8,1), shuffle=True)
    return quiet_learner(dls, convnet(), loss_func=CrossEntropyLossFlat(), opt_func=opt_func, splitter=halves, **kwargs)

@pytest.mark.parametrize('own', [None,4])
def test_a_plan_for_pictures_keeps_what_batchnorm_sees(own):
    "It adds what has BatchNorm go on to see today's 8 items, or as many as the learner's own callback says, and takes it back"
    learn = convnet_learner(cbs=own and GhostBatchNorm(own))
    was = list(learn.cbs)
    plan = learn.bs_find(1e-3, n_epoch=20, step_times={8: 0.01, 16: 0.01, 32: 0.01}, show_plot=False).at(32)
    kept, = [cb for cb in plan.cbs if isinstance(cb, GhostBatchNorm)]
    assert kept.bs==plan.facts.today.norm_bs==(own or 8)
    assert f'GhostBatchNorm({kept.bs})]' in plan.code
    assert f"BatchNorm goes on to see {kept.bs} items at a time: GhostBatchNorm({kept.bs}) is added for you." in plan.details().replace('\n', ' ')
    plan.apply(learn)
    assert [cb.bs for cb in learn.cbs if isinstance(cb, GhostBatchNorm)]==[kept.bs]
    plan.undo(learn)
    assert all(a is b for a,b in zip(learn.cbs, was, strict=True))

def test_steps_are_timed_as_batchnorm_will_see_them():
    "In groups where a micro-batch is larger than today's"
    class Look(Callback):
        def before_batch(self):
            if self.training and hasattr(self.learn, 'step_timer'): seen.add((len(self.x),hasattr(self.learn, 'ghost_batch_norm')))
    seen = set()
    convnet_learner(cbs=Look()).bs_find(1e-3, n_epoch=200, show_plot=False)
    assert {(8,False),(16,True)}<=seen
    assert all(grouped==(n>8) for n,grouped in seen)

def language_learner():
    toks = [torch.randint(0,12,(n,)) for n in (40,61,33,50,70)]
    dls = DataLoaders(LMDataLoader(toks, bs=2, seq_len=7, shuffle=True, num_workers=0), LMDataLoader(toks[:1], bs=2, seq_len=7, num_workers=0), device='cpu')
    model = get_language_model(AWD_LSTM, 12, config={**awd_lstm_lm_config, 'emb_sz': 6, 'n_hid': 8, 'n_layers': 2})
    return quiet_learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=Adam, cbs=rnn_cbs(alpha=2., beta=1.))

def torch_loaders(**kwargs):
    items = images(64)
    gen = lambda i: torch.Generator().manual_seed(i)
    train = TorchDataLoader(items, batch_size=8, sampler=RandomSampler(items, generator=gen(1)), generator=gen(2), **kwargs)
    return DataLoaders(train, TorchDataLoader(items[:8], batch_size=8))

class StateNet(Net):
    "`Net` with its buffers and attributes, for images"
    def forward(self, x): return super().forward(x.flatten(1)[:,:5])

class StateLoss:
    "A loss of no class that anybody knows, with a state of its own"
    reduction = 'mean'
    def __init__(self): self.n,self.decay = 0,torch.ones(())
    def __call__(self, pred, targ):
        self.n += 1
        self.decay.mul_(0.99)
        return nn.functional.cross_entropy(pred, targ)*self.decay

def state_learner(): return quiet_learner(loaders(images(64), 8, shuffle=True), StateNet(n_out=3), loss_func=StateLoss(), opt_func=Adam)

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

learners = dict(
    convnet=convnet_learner, awd_lstm=language_learner, state_of_its_own=state_learner, torch_loaders=lambda: convnet_learner(torch_loaders()),
    persistent_workers=lambda: convnet_learner(torch_loaders(num_workers=2, persistent_workers=True)),
    scaled_lr=lambda: convnet_learner(cbs=[GradAccum(2), NoiseScale(), ScaledLR(4, sqrt_scaling)]),
    loss_scaler=lambda: convnet_learner(cbs=ScaledLoss(init_scale=2.**10, growth_interval=4)),
    adamw=lambda: convnet_learner(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)))

def failing_find(learn, event, error, order=99, **kwargs):
    "From the fourth micro-batch on where the event is one of a batch, else at once"
    with pytest.raises(error, match='the one'), learn.added_cbs(RaiseAt(event, error, range(3, 99), order=order)): find(learn, **kwargs)

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
    assert torch.stack(learn.recorder.losses).isfinite().all()
    assert learn.opt.state_dict()['state']
    return picture(learn, ids=False)

@lru_cache(maxsize=None)
def plain_training(nm, first): return training(learners[nm], first)

interrupted = partial(failing_find, event='after_backward', error=KeyboardInterrupt)
cases = [('convnet',_open_gradients,find),('convnet',_after_freezing,partial(find, how='fine_tune')),
         ('scaled_lr',_after_freezing,partial(interrupted, how='fine_tune'))] # And each learner: new, and trained
cases += [(nm,*o) for nm in learners for o in ((_nothing,find),(_after_training,interrupted))
          if nm!='persistent_workers' or o[0] is _nothing] # To start workers takes long

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('nm,first,mock', cases, ids=[f'{nm}{first.__name__}' for nm,first,_ in cases])
def test_bs_find_cannot_be_noticed(nm, first, mock):
    assert changes(plain_training(nm, first), training(learners[nm], first, partial(mock, max_bs=8)))==[]

@pytest.mark.parametrize('kwargs', [dict(num_it=200, n_batch=20, tol=1e-9, n_epoch=5), dict(lr=0, seed=3)], ids=['longer','still'])
def test_whatever_is_asked_for_cannot_be_noticed(kwargs):
    "A cycle that is held for more windows; fixed weights and other random numbers"
    assert changes(plain_training('scaled_lr', _nothing), training(learners['scaled_lr'], mock=partial(find, **kwargs)))==[]

# Every event

class Spy(Callback):
    "Notes the events of a mock training"
    fired = []
    def __call__(self, event_name): self.fired.append(event_name)

events = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step',
          'after_cancel_batch','after_batch','after_train','before_validate','after_cancel_validate','after_validate','after_epoch','after_cancel_fit','after_fit']

def test_the_events_that_are_tried_are_all_events():
    Spy.fired = []
    find(convnet_learner(cbs=Spy()))
    assert set(Spy.fired)-{'after_create'}==set(events)

@pytest.mark.parametrize('event,order,error', [(e,99 if i%2 and e!='before_validate' else -99,(ValueError,KeyboardInterrupt)[i//2%2])
    for i,e in enumerate(events)]) # `bs_find` ends the validation before 99
def test_an_exception_in_any_event_leaves_no_trace(event, order, error):
    mock = partial(failing_find, event=event, error=error, order=order)
    assert changes(plain_training('convnet', _nothing), training(convnet_learner, mock=mock))==[]

# Files

class Progress(Callback):
    "Stands in for the progress bar that ShowGraphCallback draws on"
    mbar = SimpleNamespace(update_graph=lambda *a: None, write=lambda *a: None)

def watched_learner(path):
    learn = convnet_learner(path=path)
    learn.recorder.add_time = False
    return learn.add_cbs([Progress(), ShowGraphCallback(), SaveModelCallback(), EarlyStoppingCallback(patience=2), ReduceLROnPlateau(patience=1), CSVLogger(),
                          TerminateOnNaNCallback()])

def _files(folder): return {p.relative_to(folder): p.read_text() if p.suffix=='.csv' else p.stat().st_size for p in Path(folder).rglob('*') if p.is_file()}

@pytest.mark.parametrize('mock', [find, partial(failing_find, event='after_epoch', error=ValueError)], ids=['ends','fails'])
def test_bs_find_writes_no_file(mock, tmp_path):
    "With callbacks that write; and they do their work in the training that follows"
    def _mock(learn):
        mock(learn)
        assert list(tmp_path.rglob('*'))==[]
        assert list(Path.cwd().rglob('*'))==[]
    def fit(learn):
        learn.path.mkdir()
        learn.fit(4, 0.05)
    alone,after = (training(partial(watched_learner, tmp_path/nm), mock=m, fit=fit) for nm,m in (('after',_mock),('alone',None)))
    assert [k for k in changes(alone, after) if not k.endswith(("['path']","['file']"))]==[]
    assert set(map(str, _files(tmp_path/'after')))=={'history.csv','models/model.pth'}
    assert _files(tmp_path/'after')==_files(tmp_path/'alone')

# What it says

@pytest.mark.parametrize('n,bs,n_batch', [(158,4,4),(157,5,2),(64,1,8)], ids=['last_batch_short','last_window_short','single_items'])
def test_the_noise_scale_at_fixed_weights_is_that_by_hand(n, bs, n_batch):
    "All of the windows, each as by hand: `test_mock.py`; a last one of a single micro-batch tells nothing. Later ones weigh more"
    plan = quiet_learner(loaders(regression(n), bs), mlp()).bs_find(0, n_batch=n_batch, num_it=-(-n//bs), tol=0, show_plot=False)
    df = plan.df
    items = [min(bs*n_batch, n-i) for i in range(0, n, bs*n_batch)]
    assert df.n_items.tolist()==[o for o in items if o>bs]
    assert plan.facts.measured.n_windows==len(df)
    w = df.n_items*0.99**np.arange(len(df))[::-1]
    assert plan.noise_scale==pytest.approx(w@df.tr_sigma/(w@df.g_sq)/2, rel=1e-9) # The loss averages over the 2 outputs of an item as well
    assert plan.ci==pytest.approx(tuple(df[['low','high']].iloc[-1]), rel=1e-9)
    assert plan.ci[0]<plan.noise_scale<plan.ci[1]

def reg_learner(n=200, bs=4, dtype=torch.float32, seed=0, **kwargs):
    return quiet_learner(loaders(regression(n, dtype=dtype), bs, shuffle=True), mlp(dtype=dtype, seed=seed), **kwargs)

@pytest.mark.parametrize('kwargs,measures', [(dict(), True), (dict(n_epoch=9), False), (dict(n_epoch=9, num_it=60), True), (dict(n_epoch=9, lr=0), True),
    (dict(n_epoch=9, how='fine_tune'), False), (dict(how='fine_tune'), True), (dict(noise_scale=50.), False)])
def test_a_noise_scale_is_measured_where_it_is_asked_for(kwargs, measures):
    "Not for a number of epochs alone, nor where it is given"
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).double()
    learn = quiet_learner(loaders(regression(96), 4), model, splitter=lambda m: [params(m[0]),params(m[1])])
    plan = learn.bs_find(**{**dict(lr=0.01, tol=0, max_bs=4, show_plot=False), **kwargs})
    m = plan.facts.measured
    assert m.has_mock==(plan.df is not None)==measures
    assert (m.n_seen>2)==measures
    assert math.isnan(plan.noise_scale)==(not measures and 'noise_scale' not in kwargs)
    assert m.moved==(kwargs.get('lr')!=0)

def test_fixed_weights_end_early_at_a_narrow_interval(tol=0.5):
    "At the first look, one every 5 windows from the 20th on, at which the interval is narrow enough"
    set_seed(1)
    plan = reg_learner(2400, 4).bs_find(0, n_batch=4, num_it=3000, tol=tol, show_plot=False)
    df = plan.df
    assert plan.facts.measured.n_windows==len(df)>=20
    narrow = [(i+1)%5==0 and i>=19 and (df.high[i]-df.low[i])/2<tol*df.noise_scale[i] for i in range(len(df))]
    assert narrow[-1]
    assert sum(narrow)==1

@pytest.mark.parametrize('noise_scale,ci', [(50.,(0.,inf)),(inf,(20.,inf)),(nan,(20.,80.))])
def test_a_noise_scale_that_is_not_known_stays_so(ci, noise_scale, monkeypatch):
    "The training bounds an interval from above that the measurement leaves open, unless nothing is known at all; without an estimate, by its lower end"
    monkeypatch.setattr(finder, 'cool_reading', lambda *args: NoiseEstimate(noise_scale, ci, 30))
    plan = find(reg_learner(90), n_epoch=2)
    def whole(o): return for_training(o, 90, 2)
    assert plan.ci==(ci if ci==(0,inf) else tuple(map(whole, ci)))
    assert plan.noise_scale==(whole(50.) if noise_scale==50 else plan.ci[0] or inf)
    assert plan.facts.measured.cool.ci==ci

@pytest.mark.parametrize('n_iter,lr', [(17,0),(2,0.01)])
def test_short_loaders_give_20_windows(n_iter, lr):
    "Whatever is left over at the end of each epoch"
    plan = reg_learner(4*n_iter-1, 4).bs_find(lr, tol=0, show_plot=False)
    assert len(plan.df)>=20  # The last micro-batch of an epoch has 3 items
    assert plan.df.n_items.max()==(7 if n_iter==2 else 8)

@pytest.mark.parametrize('lr,peak,has_lr', [(slice(1e-4,1e-3),1e-3,True), ([0.01,0.02],0.02,True), (None,0.005,False), ([0.,0.],0.,False)])
def test_which_rate_a_plan_is_for(lr, peak, has_lr):
    "The plan names the rate that goes with today's batch size, and says whether the weights moved; the mock training goes up to it, as `fit_one_cycle`"
    look,seen = noted('after_step', peak_lr)
    plan = find(convnet_learner(cbs=look, lr=0.005), lr=lr)
    assert (plan.lr,plan.facts.today.has_lr,plan.facts.measured.moved)==(lr if has_lr else 0.005,has_lr,peak>0)
    assert [o for o in seen if o]==pytest.approx([peak*rate_at(i/5) for i in range(5)] if peak else [])
    assert seen[-1]==0 # The steps that are timed move nothing

@pytest.mark.parametrize('lr', [0.02,None])
def test_fine_tune_is_measured_unfrozen(lr):
    "At the peak of its second part, half the rate and a two-hundredth of it; the plan's rate is what `fine_tune` takes"
    def _state(learn): return [h['lr'] for h in learn.opt.hypers],all(p.requires_grad for p in learn.model.parameters()),hasattr(learn, 'step_timer')
    look,seen = noted('after_step', _state)
    learn = convnet_learner(cbs=look, lr=0.005)
    learn.freeze()
    plan = find(learn, lr=lr, how='fine_tune')
    base = 0.002 if lr is None else lr
    peak = base/2*max(rate_at(i/5) for i in range(5))
    trained = [(lrs,is_whole) for lrs,is_whole,is_timed in seen if not is_timed]
    assert max(trained)==([pytest.approx(peak/100),pytest.approx(peak)],True)
    assert all(is_whole for _,is_whole in trained)
    assert plan.lr==base
    assert plan.facts.today.has_lr
    assert plan.facts.today.freeze_epochs==1
    assert plan.facts.today.trained==1

@pytest.mark.parametrize('lr,scaled,rates', [(0.01,ScaledLR(2, sqrt_scaling, warmup_epochs=3),{round(0.01*2**.5, 12)}),
    (slice(0.01,0.02),ScaledLR(8, scale_wd=False),{0.005,0.01}), (0.01,ScaledLR(2, adascale_gain, noise_scale=NoiseScale()),{0.01})])
def test_the_rate_that_this_batch_is_trained_with(lr, scaled, rates):
    "A ScaledLR that the learner has is set aside, but its factor is not: the training goes on at the scaled rate"
    look,seen = noted('before_step', hypers)
    learn = reg_learner(cbs=[scaled,look], lr=0.003, splitter=halves)
    plan = find(learn, lr=lr)
    assert sorted({h['lr'] for hs in seen for h in hs}-{0.})==pytest.approx(sorted(o*rate_at(i/5) for o in rates for i in range(5)))
    assert plan.base_bs==scaled.base_bs
    assert plan.facts.today.bs==4
    assert plan.lr==(lr if lr else 0.003)
    assert learn.scaled_lr is scaled
    assert plan.facts.today.lr_factor==pytest.approx(scaled.factor_at(4))
    assert (plan.facts.today.own_cbs,plan.facts.today.own_accum)==(('ScaledLR',),())
    assert plan.facts.today.wd_factor==(1 if scaled.scale_wd else 1/plan.facts.today.lr_factor)
    assert sorted(rates)==pytest.approx(all_rates(plan.scaled_lr))

def test_what_the_learner_s_own_accumulation_knows_is_noted():
    plan = find(reg_learner(cbs=GradAccum(2, fix_bn=False)))
    assert (plan.facts.today.own_cbs,plan.facts.today.own_accum)==(('GradAccum',),('fix_bn=False',))

class Hidden(nn.Module):
    "A language model that goes on with the state of the batch before, as in chapter 12 of the fastai book"
    def __init__(self, bs=4):
        super().__init__()
        self.emb,self.rnn,self.out,self.h = nn.Embedding(12, 8),nn.RNN(8, 8, batch_first=True),nn.Linear(8, 12),torch.zeros(1, bs, 8)
    def reset(self): self.h.zero_()
    def forward(self, x):
        y,h = self.rnn(self.emb(x), self.h)
        self.h = h.detach()
        return self.out(y)

@pytest.mark.parametrize('shuffle', [False,True])
def test_a_state_goes_on_from_batch_to_batch(shuffle):
    "The loader's order is made for its batch size, which stays: larger batches are accumulated"
    toks = torch.randint(0, 12, (200,6), generator=torch.Generator().manual_seed(0))
    dl = DataLoader([(t[:5],t[1:]) for t in toks], bs=4, shuffle=shuffle, drop_last=True, num_workers=0)
    learn = quiet_learner(DataLoaders(dl, dl), Hidden(), loss_func=CrossEntropyLossFlat(), opt_func=Adam, cbs=ModelResetter())
    plan = find(learn, n_epoch=2)
    assert [m for m,*_ in plan.facts.device.times]==[4] # Others do not run with this state either
    assert bool(plan.facts.device.failed)==shuffle # But they are not even tried where the order is fixed
    chosen = plan.at(8)
    assert (chosen.micro_bs,chosen.n_acc)==(4,2)
    assert chosen.apply(learn).dls.train.bs==4
    with pytest.raises(ValueError, match=r'must be a multiple of a micro-batch that ran here \(4 items\)'): plan.at(2)

def test_a_training_that_cannot_learn():
    "Pictures of noise with any label: 240 steps"
    plan = convnet_learner(n=240, opt_func=Adam).bs_find(1e-6, n_epoch=8, num_it=960, show_plot=False)
    assert plan.verdict=='not_learned'

@pytest.mark.parametrize('kwargs,verdict', [(dict(n_epoch=3),'few_steps'), (dict(n_epoch=9, loss_func=lambda pred, y: (pred@y.T).logsumexp(1).mean()),'pairs')])
def test_where_nothing_can_be_planned_nothing_is_timed(kwargs, verdict, monkeypatch):
    def _time_steps(*args): raise AssertionError("Steps were timed")
    monkeypatch.setattr(finder, 'time_steps', _time_steps)
    loss_func = kwargs.pop('loss_func', nn.MSELoss())
    plan = quiet_learner(loaders(regression(96), 4), mlp(), loss_func).bs_find(0.01, show_plot=False, **kwargs)
    assert plan.verdict==verdict
    assert plan.facts.device.times==()
    assert math.isnan(plan.facts.noise)

class Overflows(Callback):
    "The gradients of the first micro-batches are not finite, as while mixed precision looks for a loss scale"
    def before_fit(self): self.n = 0
    def after_backward(self):
        self.n += 1
        if self.n<=2:
            for p in self.model.parameters(): p.grad.fill_(math.inf)

def test_a_first_look_needs_no_finite_gradient():
    plan = quiet_learner(loaders(regression(400), 4), mlp(), cbs=Overflows()).bs_find(0.01, n_epoch=9, show_plot=False, step_times={4: 0.01})
    assert plan.choice.reason=='single'

class Stream(IterableDataset):
    "Gives `n` items, and declares no length"
    def __init__(self, n): self.items = regression(n, dtype=torch.float32)
    def __iter__(self): return iter(self.items)

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

def _refused(learn, error, match, **kwargs):
    "In words, before anything has changed"
    spy = Spy()
    learn.add_cb(spy)
    was,spy.fired[:] = picture(learn),[]
    with pytest.raises(error, match=match): learn.bs_find(**{**dict(lr=0.01, show_plot=False), **kwargs})
    assert changes(was, picture(learn))==[]
    return spy.fired

def sized(items, cls=DataLoader, **kwargs):
    kwargs['bs' if cls is DataLoader else 'batch_size'] = 4
    return lambda: quiet_learner(DataLoaders(*(cls(items, **kwargs) for _ in range(2)), device='cpu'), mlp(dtype=torch.float32))

def _all_frozen():
    learn = reg_learner()
    for p in learn.model.parameters(): p.requires_grad_(False)
    return learn

@pytest.mark.parametrize('make,kwargs,match', [
    (sized(regression(4)), {}, 'yields 1 micro-batch in an epoch of 4 items with bs=4, and at least 2 are needed'),
    (sized([], TorchDataLoader), {}, 'yields 0 micro-batches'),
    (sized(regression(3), drop_last=True), {}, 'yields 0 micro-batches'),
    (sized(Stream(60), TorchDataLoader), {}, 'does not declare a length'),
    (_all_frozen, {}, 'no trainable parameters'), (partial(reg_learner, lr=-0.1), dict(lr=None), '`lr` must be the rate you train with.* at least 0, got -0.1'),
    (reg_learner, dict(lr=0, n_batch=2, num_it=3), '`num_it`=3 micro-batches do not make two windows of 2'),
    (reg_learner, dict(how='fine_tune'), 'this learner has a single one: give it a `splitter`'),
    (convnet_learner, dict(lr=0, how='fine_tune'), '`lr` must be the `base_lr` of `fine_tune`.* above 0, got 0')],
    ids=['one','none of torch','dropped','endless of torch','frozen','rate','few','group','still'])
def test_bs_find_refuses_bad_learners(make, kwargs, match): assert _refused(make(), ValueError, match, **kwargs)==[]

class Views(Callback):
    "Another number of items in each batch, as with two views of each"
    def __init__(self, f): self.f = f
    def before_batch(self): self.learn.xb,self.learn.yb = ([self.f(o) for o in b] for b in (self.xb,self.yb))

def _more(): return reg_learner(64, 4, cbs=Views(lambda o: torch.cat([o,o])))
def _fewer(): return reg_learner(64, 4, cbs=Views(lambda o: o[1:]))

@pytest.mark.parametrize('make,n', [(_more,8),(_fewer,3)])
def test_a_batch_of_other_items_than_the_loaders_is_refused(make, n):
    "At once, where there are more"
    fired = _refused(make(), ValueError, f'makes batches of 4 items, and the loss gets {n}: ', num_it=40)
    assert fired.count('after_backward')==1 or n==3

@pytest.mark.parametrize('first,what,cb', [(1,nan,None),(7,inf,None),(7,nan,TerminateOnNaNCallback)])
def test_a_loss_that_is_not_finite_ends_the_mock_training(first, what, cb):
    "It says at which micro-batch, and runs no further"
    items = [(x, y if i<4*(first-1) else y*what) for i,(x,y) in enumerate(regression(80, dtype=torch.float32))]
    learn = quiet_learner(loaders(items, 4), mlp(dtype=torch.float32), cbs=cb)
    fired = _refused(learn, ValueError, rf'The loss is {what} at micro-batch {first} of the mock training \(lr=0.01\)', n_batch=2)
    assert fired.count('before_batch')==first

@pytest.mark.parametrize('num_it,n_epoch', [(400,200/50), (60,1)])
def test_without_epochs_a_plan_is_for_those_of_the_mock_training(num_it, n_epoch):
    "Half of its micro-batches are for steps; for one at least"
    plan = find(reg_learner(), num_it=num_it, max_bs=4)
    assert plan.facts.today.n_epoch==n_epoch
    assert not plan.facts.today.has_n_epoch
    assert 0<plan.took<60

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
    with pytest.warns(UserWarning, match='Nothing tells what the loss'): means = plan(my_token_loss)
    assert means.noise_scale!=pytest.approx(torchs.noise_scale, rel=1e-2)

def test_a_loss_that_sums_is_told():
    for reduction,there in (('sum',True),('mean',False)):
        learn = quiet_learner(loaders(regression(200, dtype=torch.float32), 4), mlp(dtype=torch.float32), nn.MSELoss(reduction=reduction))
        assert find(learn, lr=1e-5).facts.today.sums==there

@pytest.mark.parametrize('lr', [0,0.01])
def test_num_it_that_is_enough(lr):
    "What the advice asks for makes 20 windows at fixed weights, or on the cool stretch"
    learn = reg_learner(400)
    plan = find(learn, lr=lr, num_it=11)
    assert plan.facts.measured.n_windows<10
    assert 'num_it=660)' in repr(plan)
    assert find(learn, lr=lr, num_it=660, tol=0).facts.measured.n_windows>=20

# Is the rate too high?

@pytest.mark.parametrize('lr,res', [(0.1,False),(3.,True)])
def test_a_plan_says_whether_the_rate_is_too_high(lr, res):
    "Not where trained weights go on at their rate, though the loss rises at first"
    learn = reg_learner(400, 8, opt_func=Adam)
    learn.fit_one_cycle(4, 0.02)
    assert find(learn, lr=lr, num_it=200, max_bs=8).facts.measured.loss_rose==res

# Other random numbers

def test_a_seed_gives_its_own_noise_scale():
    "The same number to the digit for the same seed, another one for another"
    learn = convnet_learner()
    first,again,other,none = (find(learn, seed=o, num_it=40) for o in (3,np.int64(3),4,None))
    pd.testing.assert_frame_equal(first.df, again.df, check_exact=True)
    assert len({o.df.tr_sigma.sum() for o in (first,other,none)})==3
    assert [o.facts.measured.seed for o in (first,other,none)]==[3,4,None]

# What it takes

def test_what_bs_find_takes_is_said_before(monkeypatch):
    "Once, where it is long and there is a bar"
    monkeypatch.setattr(EndOfMock, 'worth_saying', 0)
    monkeypatch.setattr(StepTimes, 'budget', 180)
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    said = []
    monkeypatch.setattr(Progress, 'mbar', SimpleNamespace(write=said.append))
    plan = reg_learner(cbs=Progress()).bs_find(0.01, num_it=40, max_bs=4, show_plot=False)
    assert len(said)==1
    assert 'bs_find takes about' in said[0]
    assert 0<plan.took<60

def test_where_nothing_was_timed_or_measured_nothing_is_drawn():
    plt.close('all')
    plan = reg_learner(20, 4).bs_find(0.01, n_epoch=1)
    assert plan.verdict=='few_steps'
    assert plt.get_fignums()==[]
