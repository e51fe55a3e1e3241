"`max_bs_find`: the largest micro-batch that trains, wherever memory runs out"
import gc
import math
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastcore.basics import noop
import fastai.distributed # noqa: F401, it adds `distrib_ctx`
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset, SubsetRandomSampler
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.data import PartialDL
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import Adam
from fastai.text.data import LMDataLoader, SortedDL
from fastai.torch_core import find_bs

from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.finder import bs_find as finder # noqa: F401 (it patches `bs_find` into `Learner`)
from fastai_bs.memory import max_bs, report
from fastai_bs.memory.max_bs import largest
from fastai_bs.memory.cards import card_of, margin_text
from fastai_bs.memory.report import MemoryReport
from fastai_bs.memory.trace import TracedStep, training_device
from fastai_bs.noise.noise_scale import NoiseScale
from fastai_bs.schedule.scaled_lr import ScaledLR
from helpers import changes, mlp, picture, quiet_learner, RaiseAt, regression
from gloo_ranks import on_ranks
from test_report import Fixed

inf,f32 = math.inf,torch.float32

# The search by itself

def searched(fits_up_to, start, most):
    "What is found, and what was tried"
    tried = []
    return largest(lambda n: tried.append(n) or n<=fits_up_to, start, most),tried

@given(st.integers(0, 10**7), st.integers(1, 10**7), st.integers(1, 10**7))
@settings(max_examples=200, deadline=None)
def test_the_largest_size_that_fits_is_found(fits_up_to, start, most):
    "By few sizes, none of them twice"
    res,tried = searched(fits_up_to, start, most)
    assert res==min(fits_up_to, most)
    assert res==0 or res in tried
    assert len(set(tried))==len(tried)<=2*math.log2(most+1)+1
    assert all(1<=n<=most for n in tried)

@pytest.mark.parametrize('args,tried', [((100,32,1000),[32,64,128,96,112,104,100,102,101]), ((99,4,9),[4,8,9]),
    ((0,8,9),[8,4,2,1]), ((50,64,50),[50])])
def test_sizes_are_doubled_then_halved_between(args, tried): assert searched(*args)[1]==tried

# The search on a learner

def oom(): return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

class Limit(Callback):
    "Memory for `most` items, in one part of the step; from the fit's step `since` on. What it saw is kept elsewhere: a search would undo it"
    order = 20
    def __init__(self, most, where='forward', since=0, error=oom):
        seen = [] # (items, in training?, weak reference to the prediction)
        self.most,self.where,self.since,self.error = most,where,since,error
        self.note,self.seen = seen.append,lambda: seen
    def before_fit(self):
        self.n = 0
        if self.where=='optimizer': self.opt.cbs.append(lambda p, **kwargs: self.check('optimizer'))
    def check(self, where):
        if where==self.where and self.n>=self.since and find_bs(self.learn.xb)>self.most: raise self.error()
    def after_pred(self):
        self.note((len(self.x),self.training,weakref.ref(self.pred)))
        if not self.training: return self.check('validation')
        self.check('forward')
        self.pred.register_hook(lambda g: self.check('backward'))
    def before_step(self): self.check('step')
    def after_step(self): self.n += 1

def tried(learn):
    "Sizes in training, in their order"
    sizes = [n for n,training,_ in learn.limit.seen() if training]
    return [n for before,n in zip([None,*sizes], sizes) if n!=before]

def seen(learn): return [o[:2] for o in learn.limit.seen()]

places = ['forward','backward','step','optimizer','validation']

def pair(cls=DataLoader, n=50, bs=4, valid_bs=None, **kwargs):
    "Training and validation loader of the same items"
    items,size = regression(n, dtype=f32),'bs' if cls is DataLoader else 'batch_size'
    return DataLoaders(*(cls(items, shuffle=o is None, num_workers=0, **{size: o or bs}, **kwargs) for o in (None,valid_bs or bs)), device='cpu')

def limited(most, where='forward', since=0, error=oom, model=None, opt_func=Adam, dls=None, cbs=None, **kwargs):
    learn = quiet_learner(dls or pair(**kwargs), model or mlp(dtype=f32), opt_func=opt_func, cbs=cbs)
    return learn.add_cb(Limit(most, where, since, error))

def unmoved(f, learn):
    "What `f(learn)` returns, or the exception that it raised; the learner is as it was"
    was = picture(learn)
    try: return f(learn)
    except BaseException as e: return e
    finally: assert changes(was, picture(learn))==[]

def search(learn, limit=inf, **kwargs): return unmoved(lambda o: o.max_bs_find(limit=limit, **kwargs), learn)

@pytest.mark.parametrize('where,since,limit', [*((o,0,inf) for o in places), ('optimizer',1,inf), ('validation',3,inf),
    ('forward',0,'1MB'), ('step',1,None)])
def test_memory_may_run_out_anywhere_in_a_step(where, since, limit):
    "From the first step on, or from the second, when the optimizer's state is there: 13 items fit, and nothing has happened to the learner"
    learn = limited(13, where, since)
    assert search(learn, limit)==13
    assert (13,False) in seen(learn)
    if limit==inf: assert tried(learn)==[4,8,16,12,14,13]
    else: assert [o for o in tried(learn) if o>4]==[50,25,12,18,15,13,14] # Without the report's, which bounds nothing here, but says where to begin

@pytest.mark.parametrize('where,most,limit,sizes', [('forward',5,inf,[16,8,4,6,5]), ('optimizer',1,inf,[16,8,4,2,1]), ('validation',15,inf,[16,8,12,14,15]),
    ('forward',5,'1MB',[16,50,25,12,6,3,4,5])])
def test_memory_may_run_out_at_the_first_trial(where, most, limit, sizes):
    "Today's batch does not fit: smaller ones are tried"
    learn = limited(most, where, bs=16)
    assert search(learn, limit)==most
    assert tried(learn)==sizes

@pytest.mark.parametrize('error', [oom,lambda: RuntimeError('CUBLAS_STATUS_ALLOC_FAILED')], ids=['surely','perhaps'])
def test_no_size_that_fits_is_an_error(error):
    "An error with what the device said, which may have had another cause"
    learn = limited(0, bs=16, error=error)
    res = search(learn)
    assert isinstance(res, RuntimeError)
    assert tried(learn)==[16,8,4,2,1]
    assert 'Not even a micro-batch of one item' in str(res)
    assert str(error()) in str(res)
    assert type(res.__cause__) is type(error())

@pytest.mark.parametrize('where', ['backward','validation'])
def test_another_error_is_no_limit(where):
    "It says itself, with the first size and with a smaller one, after memory has run out"
    error = search(limited(3, where, error=lambda: KeyError('mine')), None)
    assert isinstance(error, ValueError)
    assert "Micro-batches of 4 items cannot be trained on, and memory is not the reason (KeyError: " in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.__traceback__ is None
    errors = [KeyError('mine'),oom()]
    error = search(limited(0, where, error=errors.pop))
    assert "Micro-batches of 4 items do not fit in memory, and those of 2 cannot be trained on (KeyError: " in str(error)

class InGroups(nn.Module):
    "Takes multiples of 16 items only while it trains"
    def __init__(self): super().__init__(); self.l = mlp(dtype=f32)
    def forward(self, x): return self.l(x.view(-1, 16, 5).flatten(0, 1) if self.training else x)

def test_a_model_that_takes_some_sizes_only():
    "The one that has run first counts, though none below the largest did"
    learn = quiet_learner(pair(n=200, bs=16), InGroups())
    with pytest.warns(UserWarning, match='16 items are the largest micro-batch that ran, and memory is not the reason'): assert search(learn, None)==16

def test_batch_norm_does_not_hide_that_memory_ran_out():
    "Two items do not fit, and one is too few for it"
    error = search(limited(1, model=nn.Sequential(nn.BatchNorm1d(5), mlp(dtype=f32))))
    assert "Micro-batches of 2 items do not fit in memory, and those of 1 cannot be trained on (ValueError: Expected more than 1" in str(error)
    assert 'bn_to_gn' in str(error)

of_a_kernel = "CUDA error: invalid configuration argument" # pytorch/pytorch#142228

@pytest.mark.parametrize('limit', [inf,None])
def test_a_kernels_limit(limit):
    "Ends the search with what ran, without a margin for memory, and says why"
    with pytest.warns(UserWarning, match='40 items are the largest micro-batch that ran, and memory is not the reason: larger ones end with Runtime') as w:
        assert search(limited(40, bs=8, error=lambda: RuntimeError(of_a_kernel)), limit)==40
    assert len(w)==1
    assert of_a_kernel in str(w[0].message)
    assert w[0].filename==__file__

@pytest.mark.parametrize('where,error,most', [('backward',oom,0), ('validation',lambda: KeyError('mine'),3)], ids=['nothing','other'])
def test_no_tensor_is_pinned(where, error, most):
    "Not by the learner, nor by an error that is still held"
    learn = limited(most, where, error=error)
    held = search(learn)
    assert isinstance(held, Exception)
    gc.collect()
    assert learn.limit.seen()
    assert all(ref() is None for *_,ref in learn.limit.seen())

def test_a_trial_that_failed_is_gone_before_the_next():
    "Its tensors would be in the way: they are let go even where they lie in a cycle"
    alive = []
    class Cycle(Callback):
        order = 19
        def after_pred(self):
            alive.append(sum(ref() is not None and n>13 for n,_,ref in self.learn.limit.seen()))
            ring = [self.pred]
            ring.append(ring)
    learn = limited(13, cbs=Cycle())
    gc.disable()
    try: assert learn.max_bs_find(limit=inf)==13
    finally: gc.enable()
    big = [i for i,(n,*_) in enumerate(learn.limit.seen()) if n>13]
    assert len(big)==2
    assert alive[big[0]+1]==0
    assert alive[-1]==0

@pytest.mark.parametrize('kwargs,res,sizes', [({},50,[4,8,16,32,50]), (dict(start=1),50,[1,2,4,8,16,32,50]), (dict(max_bs=20),20,[4,8,16,20]),
    (dict(max_bs=3),3,[3]), (dict(start=np.int64(5),max_bs=np.int64(9)),9,[5,9]), (dict(max_bs=1000),50,[4,8,16,32,50]),
    (dict(limit='1GB',max_bs=20),20,[4,20]), (dict(limit='1GB',start=8),50,[8,16,32,50])])
def test_sizes_go_from_start_to_max_bs(kwargs, res, sizes):
    learn = limited(1000)
    assert search(learn, **kwargs)==res
    assert type(res) is int
    assert tried(learn)==sizes # Today's size comes first, where a report has the next one

@pytest.mark.parametrize('n,bs', [(4,4), (30,8)])
def test_the_limit_holds_as_many_items_as_the_report_says(n, bs):
    "By the report: so many items, and not one more"
    learn = limited(1000, bs=bs)
    report = learn.memory_report()
    held = sum(report.step(n).values())
    limit,less = f'{held}B',f'{held-1}B'
    learn.limit.seen().clear()
    assert learn.max_bs_find(limit=limit, margin=0)==n
    assert max(tried(learn))==max(n, bs)
    assert learn.max_bs_find(limit=less, margin=0)==n-1
    assert learn.max_bs_find(limit=limit, margin=0, max_bs=n-1)==n-1

def test_limit_of_a_cpu(monkeypatch):
    "Half of the machine's memory where nothing else is said, if the system says how much that is"
    assert 2**28<max_bs._memory_of_machine()<2**50
    learn = limited(1000)
    report = learn.memory_report()
    monkeypatch.setattr(max_bs, '_memory_of_machine', lambda: 2*sum(report.step(13).values()))
    assert learn.max_bs_find(margin=0)==13
    assert learn.max_bs_find(limit=inf)==50
    assert learn.max_bs_find(limit='1GB')==50
    monkeypatch.setattr(max_bs, '_memory_of_machine', lambda: inf)
    assert limited(13).max_bs_find()==13

def test_limit_of_mps(monkeypatch):
    "What Metal recommends, by a trace, as its allocator goes on into swap"
    learn = limited(1000)
    held = sum(learn.memory_report().step(13).values())
    for o in (max_bs,report): monkeypatch.setattr(o, 'training_device', lambda learn: torch.device('mps'))
    monkeypatch.setattr(report, 'process_bytes', lambda: 10**9) # Nothing of the device's
    monkeypatch.setattr(torch.mps, 'recommended_max_memory', lambda: held)
    assert search(learn, None, margin=0)==13
    assert search(learn)==50

def test_what_the_process_holds(monkeypatch, capsys):
    "Is taken off, without what the training counts itself, and said; a card has a memory of its own"
    learn = limited(1000, bs=8, cbs=ProgressCallback())
    held = sum(learn.memory_report().step(13).values())
    own = sum(p.nbytes for p in learn.model.parameters())
    monkeypatch.setattr(report, 'process_bytes', lambda: 10**9+own)
    assert search(learn, f'{10**9+held}B', margin=0)==13
    assert "This process holds 1 GB beside the model (Python, torch, data), so" in capsys.readouterr().out
    monkeypatch.setattr(max_bs, '_memory_of_machine', lambda: 2*(10**9+held))
    assert search(learn, None, margin=0)==13
    assert 'This process holds 1 GB already, beside the model' in str(search(learn, '900MB'))
    monkeypatch.setattr(report, 'process_bytes', lambda: 10**12)
    assert search(learn, 'T4')==50

# `fine_tune`

class Layers(nn.Module):
    "A body with a LayerNorm, and a head; without its body's gradients a frozen one keeps fewer activations"
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5,40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40,40), nn.Tanh(), nn.Linear(40,40), nn.Tanh())
        self.head = nn.Linear(40,2)
    def forward(self, x): return self.head(self.body(x))

def frozen(most=1000, **kwargs):
    dls = pair(n=200, bs=8)
    learn = quiet_learner(dls, Layers(), opt_func=Adam, splitter=lambda m: [list(m.body.parameters()),list(m.head.parameters())], **kwargs)
    learn.add_cb(Limit(most))
    learn.freeze()
    return learn

def test_what_fine_tune_needs(capsys):
    "Is what the unfrozen learner needs, for the report, the search and the setup; it stays frozen, and without `how` that is said"
    free = frozen()
    free.unfreeze()
    whole,limit = free.memory_report(),'150KB'
    n = whole.max_bs(limit)
    capsys.readouterr()
    learn = frozen(cbs=ProgressCallback())
    report = unmoved(lambda o: o.memory_report(how='fine_tune'), learn)
    assert report.bytes.tolist()==whole.bytes.tolist()
    assert report.max_bs(limit)==n<n*1.3<learn.memory_report().max_bs(limit)
    out = capsys.readouterr().out
    assert out.count("Counted with its body frozen, as the learner is. ")==out.count("with how='fine_tune' it is counted unfrozen")==1
    assert 'with a frozen body' in repr(learn.memory_report())
    assert 'frozen' not in repr(report)
    assert search(learn, limit, how='fine_tune')==n<search(learn, limit)
    assert 'frozen' in capsys.readouterr().out
    setup = learn.accum_to(120, limit=limit, how='fine_tune')
    assert setup.micro_bs==max(o for o in range(1, n+1) if 120%o==0)
    assert not learn.model.body[0].weight.requires_grad
    assert learn.opt.frozen_idx==1
    assert unmoved(lambda o: o.accum_to(120, limit='600B', how='fine_tune'), learn).__class__ is ValueError # Takes nothing back that was not set

@pytest.mark.parametrize('f', [lambda o, **k: o.max_bs_find(**k), lambda o, **k: o.memory_report(**k), lambda o, **k: o.accum_to(8, **k),
    lambda o, **k: o.bs_find(**k)])
def test_how_is_refused(f):
    "In one way by all; and `fine_tune` of a single group of parameters"
    says = "`how` must be 'fit_one_cycle' or 'fine_tune', got 'fit': take the method that you train with"
    assert says in str(unmoved(lambda o: f(o, how='fit'), limited(13)))
    assert 'this learner has a single one: give it a `splitter`' in str(unmoved(lambda o: f(o, how='fine_tune'), limited(13)))

# More in a batch than the loader's items

class Twice(Callback):
    "Joins the batch with itself"
    run_valid = False
    def before_batch(self): self.learn.xb,self.learn.yb = ((torch.cat([o,o]),) for o in (self.x,self.y))

def doubled(b):
    xs,ys = map(torch.stack, zip(*b))
    return torch.cat([xs,xs]),torch.cat([ys,ys])

@pytest.mark.parametrize('kind', ['callback','collate'])
def test_batches_that_grow(kind):
    "Are as large as they are, in the trace and in the search, which is about the loader's items; what an epoch leaves over is none"
    if kind=='callback': learn = limited(26, cbs=Twice())
    else: learn = limited(26, dls=DataLoaders(*(TorchDataLoader(regression(50, dtype=f32), 4, collate_fn=doubled) for _ in range(2)), device='cpu'))
    for n in (4,7): assert unmoved(lambda o: sum(o.memory_report(n).step(n).values()), learn)==sum(limited(1).memory_report().step(2*n).values()) # noqa: B023
    assert search(learn)==13
    assert all(n%2==0 for n,training in seen(learn) if training)
    assert (26,True) in seen(learn)
    assert report._measured_report(learn, 7).bytes['activations']>1.9*report._measured_report(limited(50), 7).bytes['activations']

def test_a_margin_is_left_where_memory_is_the_bound():
    "Where memory is the bound, and not where the set or the user is; what is returned has run"
    learn = limited(40)
    assert search(learn)==38
    assert 38 in tried(learn)
    assert search(limited(40), margin=0)==search(limited(40), max_bs=40)==40
    assert search(limited(1000))==50

def test_a_validation_batch_is_searched_without_a_training_step():
    "No training step is run; by a limit as traced, a tenth of the memory of a training holds no gradient"
    learn = limited(13, 'validation')
    assert search(learn, for_='valid')==13
    assert not [o for o in seen(learn) if o[1]]
    assert search(limited(7, 'validation', valid_bs=10), for_='valid')==7 # Its own size is no bound
    learn = limited(1000, bs=8)
    step = TracedStep(learn, ds_idx=1)
    assert step.valid(30)<sum(step(30).values())
    assert search(learn, limit=f'{step.valid(30)}B', margin=0, for_='valid')==30
    res = search(learn, limit='100B', for_='valid')
    assert isinstance(res, ValueError)
    assert "`limit` leaves 100 B, and less `margin`=0.05 that does not hold a validation batch of one item" in str(res)
    assert isinstance(search(learn, for_='test'), ValueError)
    for valid in ([DataLoader([], bs=4)],[]):
        learn.dls.loaders[1:] = valid
        assert "for_='valid' needs a validation set" in str(search(learn, for_='valid'))

def test_a_card_is_a_limit_by_its_name(capsys):
    "By the report alone, as this device is another; and where there are no more items than fit, that is said"
    learn = limited(13, cbs=ProgressCallback())
    assert learn.max_bs_find(limit='t4')==50 # No more than 13 train here, and none is tried
    card,all_ = capsys.readouterr().out.splitlines()
    assert card==f"{card_of('T4')}. {margin_text(card_of('T4').usable, 0.05)}"
    assert all_=="max_bs_find: all 50 items of the set fit in one batch, so this is no limit of memory"

@pytest.mark.parametrize('n_steps,n,kwargs,n_train', [(7,8,{},7), (3,11,{},3),
    (2,8,dict(cbs=RaiseAt('before_step', CancelStepException, order=20, times=4)),6)], ids=['seven','left over','skipped'])
def test_a_trial_takes_as_many_steps_as_asked(n_steps, n, kwargs, n_train):
    "Then a batch of the validation set; neither steps that are skipped count, nor what an epoch leaves over"
    learn = limited(1000, n=n, bs=8, **kwargs)
    assert search(learn, n_steps=n_steps, max_bs=8)==8
    assert seen(learn)==[(8,True)]*n_train+[(8,False)]

def test_too_few_steps_are_no_trial():
    learn = limited(1000, n=200, bs=1, cbs=RaiseAt('before_step', CancelStepException, [i for i in range(200) if i!=40], order=20))
    assert 'In 60 micro-batches no 3 optimizer steps were taken with 1 item: see that' in str(search(learn, max_bs=1))

@pytest.mark.parametrize('train,n,n_valid', [(lambda o: TorchDataLoader(o, 4, sampler=SubsetRandomSampler(range(10))),10,8),
    (lambda o: PartialDL(o, partial_n=30, bs=8, num_workers=0),30,8), (lambda o: DataLoader(o, bs=64),40,0), (lambda o: DataLoader(o[:6], bs=4),6,None)],
    ids=['sampler','part','more','few'])
def test_all_of_a_set_is_the_most_that_is_tried(train, n, n_valid):
    "What its loader draws from is the most that is tried; a validation set may be empty, or not there"
    items = regression(40, dtype=f32)
    dls = DataLoaders(train(items), *([] if n_valid is None else [DataLoader(items[:n_valid], bs=4)]), device='cpu')
    assert limited(1000, dls=dls).max_bs_find(limit=inf)==n

def test_a_learner_that_does_not_validate():
    "Ends its trials, too"
    learn = limited(1000)
    learn._do_epoch_validate = noop
    assert learn.max_bs_find(limit=inf)==50

def test_the_validation_loader():
    "Goes along where it has the same size, and keeps one of its own, which smaller training batches would not help"
    learn = limited(1000)
    learn.max_bs_find(limit=inf)
    assert [n for n,training in seen(learn) if not training]==[4,8,16,32,50]
    learn = limited(1000, valid_bs=10)
    assert learn.max_bs_find(limit=inf)==50
    assert {n for n,training in seen(learn) if not training}=={10}
    with pytest.raises(ValueError, match="Training steps with micro-batches of 4 items fit in memory, but the validation loader's batches do not"):
        limited(9, 'validation', valid_bs=10).max_bs_find(limit=inf)

def test_callbacks_keep_still(tmp_path, capsys):
    "Nothing is logged, and each micro-batch is a step"
    cbs = [GradAccum(4, on_oom='split'), NoiseScale(), ScaledLR(2), CSVLogger(), SaveModelCallback(monitor='train_loss'),
           EarlyStoppingCallback(monitor='train_loss'), GradientClip(0.1)]
    learn,plain,lines = limited(13, cbs=cbs),limited(13),[]
    learn.logger = lines.append
    assert search(learn)==13
    assert list(tmp_path.iterdir())==lines==[]
    assert capsys.readouterr().out==''
    plain.max_bs_find(limit=inf)
    assert seen(learn)==seen(plain)

def test_what_is_shown(capsys, monkeypatch):
    "By the bar that the learner has, to who can see it move; what takes long is said before; without a bar all is quiet"
    limited(13).max_bs_find()
    limited(13, cbs=ProgressCallback()).max_bs_find()
    assert capsys.readouterr().out==''
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    monkeypatch.setattr(max_bs, 'worth_saying', 0)
    limited(13, cbs=ProgressCallback()).max_bs_find()
    out = capsys.readouterr().out
    assert 'by the memory report at least 50 items fit' in out # All that there are
    assert 'a trial with 50 items takes at most about ' in out
    assert 'tracing a step of' in out
    assert 'trying micro-batches of 14 items, about ' in out

def test_an_interrupt_says_what_is_known(capsys):
    "It goes on, and what is known by then is said"
    learn = limited(13, error=KeyboardInterrupt, cbs=ProgressCallback())
    assert isinstance(search(learn), KeyboardInterrupt)
    assert '8 items fit. start=8 goes on from there' in capsys.readouterr().out

# A GPU, by its functions alone

class Allocator(Callback):
    "As of a card of 1,000 bytes with 800 for this process, of which an item takes 20; what torch asks of it"
    def __init__(self, monkeypatch, fraction=1., held=100):
        fractions = [fraction]
        self.fractions = lambda: fractions # As they were set; a search would undo what it saw here
        asked = dict(get_device_properties=SimpleNamespace(total_memory=1000), mem_get_info=(700,1000), memory_reserved=100, max_memory_allocated=80,
                     max_memory_reserved=held, reset_peak_memory_stats=None)
        for nm,v in asked.items(): monkeypatch.setattr(torch.cuda, nm, lambda gpu, v=v: v)
        monkeypatch.setattr(torch.cuda, 'get_per_process_memory_fraction', lambda gpu: fractions[-1], raising=False)
        monkeypatch.setattr(torch.cuda, 'set_per_process_memory_fraction', lambda v, gpu: fractions.append(v))
        monkeypatch.setattr(max_bs, 'training_device', lambda learn: torch.device('cuda', 0))
        monkeypatch.setattr(max_bs, 'free_memory', lambda: None) # It takes long
    def after_pred(self):
        if 20*len(self.x)>1000*self.fractions()[-1]+1e-6: raise oom()

def on_gpu(monkeypatch, cbs=(), **kwargs):
    learn = quiet_learner(pair(), mlp(dtype=f32), opt_func=Adam, cbs=cbs)
    return learn.add_cb(Allocator(monkeypatch, **kwargs))

@pytest.mark.parametrize('kwargs,res', [({},38), (dict(margin=0),40), (dict(limit='500B',margin=0.1),22),
    (dict(limit='T4'),38), (dict(limit=inf),38), (dict(for_='valid',limit='500B'),23), (dict(limit='10B'),None)])
def test_the_allocator_is_bounded(kwargs, res, monkeypatch):
    "By the limit, or what is free, less the margin, in place of reckoning; and it is as it was afterwards"
    learn = on_gpu(monkeypatch)
    monkeypatch.setattr(max_bs, 'report_of', None)
    found = search(learn, **{'limit': None, **kwargs})
    assert found==res if res else isinstance(found, RuntimeError)
    assert len(learn.allocator.fractions())==3
    assert learn.allocator.fractions()[-1]==1

def test_a_model_is_measured_where_it_will_train(monkeypatch):
    "The model is not on its device yet, but what trains there is measured there, and main memory bounds nothing"
    learn = limited(1000)
    learn.dls.device = torch.device('meta')
    assert training_device(learn).type=='meta'
    assert next(learn.model.parameters()).device.type=='cpu'
    assert max_bs._limit_of(learn, None, 0.05)==inf
    monkeypatch.setattr(report, '_traced_report', None)
    monkeypatch.setattr(report, '_measured_report', lambda *args: MemoryReport())
    assert learn.memory_report().untraced==''

@pytest.mark.parametrize('error', [KeyError,KeyboardInterrupt])
def test_the_bound_ends_with_the_search(error, monkeypatch):
    "What the user had set bounds the search too, and is put back; an older torch cannot be asked for it"
    learn = on_gpu(monkeypatch, fraction=0.2)
    assert learn.max_bs_find()==9
    learn.add_cb(RaiseAt('after_pred', error))
    assert isinstance(search(learn), (ValueError,KeyboardInterrupt))
    assert learn.allocator.fractions()[-1]==0.2
    learn.remove_cb(RaiseAt)
    monkeypatch.delattr(torch.cuda, 'get_per_process_memory_fraction')
    assert learn.max_bs_find()==38
    assert learn.allocator.fractions()[-1]==1

@pytest.mark.parametrize('held,says', [(100,'20% of what PyTorch holds lies in pieces'), (85,'')])
def test_what_lies_in_pieces_is_said(held, says, monkeypatch, capsys):
    on_gpu(monkeypatch, held=held, cbs=ProgressCallback()).max_bs_find()
    out = capsys.readouterr().out
    assert bool(out)==bool(says)
    assert says in out

# Items of different sizes

class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.out = nn.Embedding(20,8),nn.Linear(8,2)
    def forward(self, x): return self.out(self.emb(x).tanh().mean(1))

lens = [1+i%5 for i in range(40)]
lens[17],lens[33] = 30,20

def texts(lens=lens): return [(torch.full((n,), 1+n%19),torch.tensor(i%2)) for i,n in enumerate(lens)]
def collate(b): return pad_sequence([torch.as_tensor(x) for x,_ in b], batch_first=True),torch.tensor([int(y) for _,y in b])
def pad(b): return list(zip(pad_sequence([x for x,_ in b], batch_first=True),[y for _,y in b]))

def text_loader(kind, shuffle=True, items=None):
    items = items or texts()
    if kind=='torch': return TorchDataLoader(items, 4, shuffle=shuffle, collate_fn=collate)
    return SortedDL(items, bs=4, shuffle=shuffle, before_batch=pad, num_workers=0, sort_func=lambda o: len(o[0]))

class Lengths(Callback):
    "Notes (items, length, in training?), and has memory for so many tokens"
    def __init__(self, tokens=inf):
        seen = []
        self.tokens,self.note,self.seen = tokens,seen.append,lambda: seen
    def after_pred(self):
        self.note((*self.x.shape,self.training))
        if self.x.numel()>self.tokens: raise oom()

def text_learner(train, valid, tokens=inf):
    return quiet_learner(DataLoaders(train, valid, device='cpu'), Texts(), nn.CrossEntropyLoss(), cbs=Lengths(tokens))

@pytest.mark.parametrize('kind', ['torch','sorted'])
def test_the_largest_items_are_tried(kind):
    "In the first batch of each trial, in training and in validation"
    learn = text_learner(text_loader(kind), text_loader(kind, False), 30*11)
    assert search(learn)==11
    order = max_bs.by_size(learn.dls.train)
    assert order[:2]==[17,33]
    assert sorted(order)==list(range(40))
    assert all(lens[a]>=lens[b] for a,b in zip(order, order[1:]))
    seen = learn.lengths.seen()
    firsts = [b for a,b in zip([(None,None,False),*seen], seen) if b[0]!=a[0] or b[2]!=a[2]]
    assert all(n==30 for _,n,_ in firsts)
    assert {o for o,_,training in firsts if training}=={4,8,16,12,10,11}
    assert (11,30,False) in seen

class Stream(IterableDataset):
    def __init__(self, items): self.items = items
    def __iter__(self): return iter(self.items)

def test_items_that_are_alike_or_cannot_be_told():
    "Are drawn as the loader does"
    for dl in (text_loader('torch', items=texts([3]*40)), TorchDataLoader(Stream(texts()), 4), DataLoader(Stream(texts()), bs=4),
               LMDataLoader([(torch.arange(100),)], bs=4, seq_len=8, num_workers=0)): assert max_bs.by_size(dl) is None
    arrays = [(x.numpy(),int(y)) for x,y in texts()]
    assert max_bs.by_size(text_loader('torch', items=arrays)) is not None
    state = torch.get_rng_state()
    class Random(list):
        def __getitem__(self, i): return torch.rand(3+i%2)
    assert len(max_bs.by_size(TorchDataLoader(Random(range(9)), 4)))==9
    assert torch.equal(torch.get_rng_state(), state)

# Bad input

@pytest.mark.parametrize('kwargs,error,says', [
    (dict(start=0),ValueError,"`start` must be at least 1 item, got 0: leave it out for the usual"),
    (dict(max_bs=8.),TypeError,"`max_bs` must be a whole number of items, got 8.0"),
    (dict(n_steps=1),ValueError,"`n_steps` must be at least 2 steps, got 1: the optimizer's state is there from the second on"),
    (dict(start=9,max_bs=8),ValueError,"`start`=9 items are more than `max_bs`=8: begin with at most those"),
    (dict(start=51),ValueError,"`start`=51 items are more than the 50 of the set: begin with at most those"),
    (dict(limit=0),ValueError,"must be above 0 bytes and finite, got 0"),
    (dict(limit='595B'),ValueError,"`limit` leaves 595 B, and less `margin`=0.05 that does not hold a micro-batch of one item, which takes ")])
def test_bad_arguments_of_a_search_are_refused(kwargs, error, says):
    "And nothing has changed"
    learn = limited(13)
    res = search(learn, **kwargs)
    assert isinstance(res, error)
    assert says in str(res)
    if 'limit' not in kwargs: assert seen(learn)==[] # Before anything is trained on

def test_no_more_items_are_traced_than_may_be_asked_for(monkeypatch):
    "A loss that goes through the items one by one would take for ever with millions"
    seen = []
    own = TracedStep.__call__
    def _traced(self, bs, *args):
        seen.append(bs)
        return own(self, bs, *args)
    monkeypatch.setattr(TracedStep, '__call__', _traced)
    assert quiet_learner(pair(n=96), mlp(dtype=f32)).max_bs_find(max_bs=8, limit='8GB')==8
    assert max(seen)==8
    seen.clear()
    assert quiet_learner(pair(n=96), mlp(dtype=f32)).max_bs_find()==96
    assert max(seen)==96

def test_a_loader_that_cannot_change_its_batches():
    error = search(limited(1000, dls=DataLoaders(Fixed(), Fixed())))
    assert isinstance(error, ValueError)
    assert 'A training loader of type Fixed cannot be given batches of' in str(error)

def test_a_set_of_unknown_length():
    "Needs a `max_bs`"
    class Long(DataLoader):
        def __len__(self): return 5
    items = regression(40, dtype=f32)
    learn = limited(13, dls=DataLoaders(Long(Stream(items), bs=4, num_workers=0), DataLoader(items, bs=4, num_workers=0), device='cpu'))
    with pytest.raises(ValueError, match="The set does not say how many items it has, so the search has no end: set `max_bs`"):
        learn.max_bs_find(limit=inf)
    assert learn.max_bs_find(limit=inf, max_bs=20)==13

# Several processes

def _worker(rank):
    "What two processes find; each holds nothing, as the fixture for one process has it"
    report.process_bytes = lambda: 0
    dls = [text_loader('torch', False, items=texts([5*(rank+1)]*40)) for _ in range(2)]
    res = {}
    for nm,learn,limit in (('memory',limited(5 if rank else 1000),inf), ('margin',limited(40 if rank else 1000),inf),
            ('kernel',limited(20 if rank else 1000, error=lambda: RuntimeError(of_a_kernel)),inf),
            ('other',limited(3 if rank else 1000, error=lambda: KeyError('mine')),inf), ('every',limited(0 if rank else 1000),inf),
            ('validation',limited(1000 if rank else 7, 'validation'),inf), ('limit',text_learner(*dls),'15KB')):
        try: res[nm] = learn.max_bs_find(limit=limit)
        except Exception as e: res[nm] = str(e)
    learn = limited(9 if rank else 1000, n=48)
    with learn.distrib_ctx(cpu=True, sync_bn=False), learn.accum_to(32, limit=inf) as setup:
        learn.fit(1, 0.01)
        res['setup'] = repr(setup),[p.tolist() for p in learn.model.parameters()]
    return {**res, 'after': learn.dls.train.bs}

@pytest.mark.slow
@pytest.mark.xdist_group('ranks')
def test_processes_agree():
    a,b = on_ranks(_worker, 2, timeout=8)
    assert a['limit']==b['limit']<40
    assert a['memory']==b['memory']==5
    assert a['validation']==b['validation']==7
    assert a['margin']==b['margin']==38
    assert a['kernel']==b['kernel']==20
    assert all('Micro-batches of 4 items cannot be trained on, and memory is not the reason (KeyError' in o['other'] for o in (a,b))
    assert all('Not even a micro-batch of one item' in o['every'] for o in (a,b))
    assert a['setup']==b['setup']
    assert a['setup'][0]=='Batches of 32 items, in 2 micro-batches of 8'
    assert a['after']==b['after']==4

# `bs_find(max_bs='auto')`

@pytest.mark.parametrize('most,where,res', [(9,'optimizer',(8,16,9)), (1000,'forward',(16,None,16))])
def test_bs_find_times_no_size_that_does_not_fit(most, where, res, short):
    "What does not fit is not timed"
    plan = unmoved(lambda o: o.bs_find(lr=0.01, num_it=24, n_batch=2, show_plot=False, max_bs='auto'), limited(most, where, n=200))
    device = plan.facts.device
    assert (max(m for m,*_ in device.times),device.too_large,device.max_bs)==res

@pytest.mark.parametrize('device', ['cuda',torch.device('cuda'),torch.device('cuda', 1)])
def test_a_gpu_without_an_index_is_the_current_one(device, monkeypatch):
    "`DataLoaders(..., device='cuda')`: what is asked of its allocator takes no other"
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 3)
    learn = limited(1000)
    learn.dls.device = device
    assert training_device(learn)==torch.device('cuda', 1 if device==torch.device('cuda', 1) else 3)
