"Several processes that train together over gloo: the large batch's gradient, one noise scale and one plan, and learners that are put back where a fit fails"
import math
import pickle
import random
from contextlib import nullcontext
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest
import torch
import fastai.distributed # noqa: F401, it adds distrib_ctx
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.schedule import fit_one_cycle # noqa: F401, it adds the method
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.distributed import DistributedTrainer
from fastai.optimizer import Adam, SGD
from fastai.torch_core import rank_distrib
from fastai_bs.all import BatchSchedule, GradAccum, linear_scaling, NoiseScale, ScaledLR, sqrt_scaling
from fastai_bs.learner.ranks import ddp_model, trains_together
from fastai_bs.learner.loop import ScopedCallback
from fastai_bs.finder.timing import StepTimer, StepTimes
from helpers import changes, flat, loaders, mlp, n_kept, picture, quiet_learner, RaiseAt, regression, ScaledLoss, set_seed, SkipSteps, token_task
from test_oom import Strike, places
from oracle import item_grads, moments, window_rows
from gloo_ranks import fastai_on_cpu_ranks, on_ranks, results, start

pytestmark = [pytest.mark.xdist_group('ranks'), pytest.mark.first, pytest.mark.slow] # They wait for each other, while other tests have a core to themselves

# Tasks

def masked_mse(pred, targ):
    "A loss of one's own, over the elements that are not NaN"
    keep = ~targ.isnan()
    return ((pred-targ.nan_to_num())**2*keep).sum()/keep.sum()

def count_kept(learn): return (~learn.y.isnan()).sum()

def bn_model(): return nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4,2)).double()

def task(kind, n):
    "Items, model and loss; where elements can be left out, ranks have micro-batches without any"
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    gone = [i for i in range(n) if n//2<=i<n//2+4 or i%5==1 and i<n//3] # Rank 1 of 2 begins without
    if kind=='mlp': return regression(n), mlp(), nn.MSELoss()
    if kind=='sum': return regression(n), mlp(), nn.MSELoss(reduction='sum')
    if kind=='bn': return regression(n), bn_model(), nn.MSELoss()
    if kind=='own':
        items = [(x, torch.full_like(y, math.nan) if i in gone else torch.where(torch.arange(2)<1+i%2, y, math.nan)) for i,(x,y) in enumerate(regression(n))]
        return items, mlp(), masked_mse
    y = torch.randint(3, (n,), generator=g)
    items = list(zip(torch.randn(n, 5, generator=g, dtype=torch.float64)+0.3*y[:,None], y))
    if kind=='classes': return items, mlp(n_out=3), nn.CrossEntropyLoss()
    if kind=='tokens': return token_task(n, 0.4, tied=False, kept=lambda i: 0 if i in gone else 4)
    ignored = {'ignored': lambda i: i in gone, 'thirds': lambda i: i%3==0, 'none': lambda i: True}[kind]
    return [(x, torch.tensor(-100) if ignored(i) else o) for i,(x,o) in enumerate(items)], mlp(n_out=3), nn.CrossEntropyLoss()

# What each rank gets

def shares(n, world, bs, drop_last=False):
    "The micro-batches of each rank, as indices: fastai gives each a contiguous share of the epoch's order, and fills the last one up from the start"
    size = math.ceil(n/world)
    padded = (list(range(n))*world)[:size*world]
    micro = [[padded[r*size:(r+1)*size][i:i+bs] for i in range(0, size, bs)] for r in range(world)]
    return [[b for b in m if len(b)==bs or not drop_last] for m in micro]

def windows(micro, k):
    "Of `k` micro-batches on each rank: a list of micro-batches for each"
    return [[b for m in micro for b in m[i:i+k]] for i in range(0, len(micro[0]), k)]

def n_whole(n, world, size):
    "Windows of `size` items on each rank before the first in which an item is for the second time"
    return math.ceil(n/world) if n%world==0 else (math.ceil(n/world)-(-n%world))//size

def n_acc_in(k, epoch): return k[max(e for e in k if e<=epoch)] if isinstance(k, dict) else k

def collate(items, idxs): return tuple(torch.stack(o) for o in zip(*(items[i] for i in idxs)))

class Given(DataLoader):
    "Ready-made batches, a list of them for each epoch"
    def __init__(self, epochs):
        super().__init__(epochs[0], bs=None, num_workers=0)
        self.epochs,self.at = epochs,0
    def __len__(self): return len(self.epochs[self.at])
    def __iter__(self):
        yield from self.epochs[self.at]
        self.at = min(self.at+1, len(self.epochs)-1)

# A fit, on ranks and in one process

class Watch(Callback):
    "Notes what GradAccum says after each micro-batch, and in which DDP reduces its one bucket"
    order = DistributedTrainer.order+1
    def __init__(self): self.said,self.reduced,self.clean = [],[],[]
    def before_fit(self): ddp_model(self.learn).register_comm_hook(None, self.count)
    def count(self, state, bucket):
        self.reduced.append((self.epoch,self.iter))
        return allreduce_hook(None, bucket)
    def after_batch(self):
        accum = getattr(self.learn, 'grad_accum', None)
        if self.training and accum is not None: self.said.append((accum.stepped, None if accum.window_loss is None else float(accum.window_loss)))
    def after_epoch(self):
        self.clean.append(all(p.grad is None or not p.grad.any() for p in self.learn.model.parameters()))
        self.clean.append(getattr(self.learn.model, 'require_backward_grad_sync', True))

opts = {'mom': partial(SGD, mom=0.9), 'sgd': partial(SGD, mom=0.9, wd=0.1), 'plain': SGD, 'adam': partial(Adam, eps=1e-3, wd=0.05)}

def on_cpu(learn):
    "A fit of `learn` works on CPU ranks in this block: with our callbacks by itself"
    return nullcontext() if any(isinstance(cb, ScopedCallback) for cb in learn.cbs) else fastai_on_cpu_ranks()

def fit(learn, epochs=2, lr=0.05, cycle=False, **kwargs):
    with on_cpu(learn):
        if cycle: learn.fit_one_cycle(epochs, lr)
        else: learn.fit(epochs, lr)

def facts(learn, watch=None):
    "What can be sent between processes"
    res = {} if watch is None else dict(said=watch.said, reduced=watch.reduced, clean=watch.clean)
    return dict(res, flat=flat(learn).numpy(), losses=[float(o) for o in learn.recorder.losses], model=type(learn.model).__name__,
               own=sorted(vars(learn)), lrs=list(learn.recorder.lrs), values=[list(o) for o in learn.recorder.values],
               grads=[p.grad is None or not p.grad.any().item() for p in learn.model.parameters()],
               buffers=[b.double().numpy() for b in learn.model.buffers()],
               state=[t.double().numpy() for s in learn.opt.state.values() for t in s.values() if isinstance(t, torch.Tensor)])

def cbs_of(k=None, clip=None, count=None, sizes=None, most=None, **kwargs):
    if sizes: return [BatchSchedule(sizes, sqrt_scaling, most)]
    return ([] if k is None else [GradAccum(k, count=count)]) + ([] if clip is None else [GradientClip(clip)])

def train(rank, kind='mlp', n=96, bs=4, drop_last=False, opt='sgd', **case):
    "A fit on this rank"
    items,model,loss_func = task(kind, n)
    watch = Watch()
    set_seed(rank)
    learn = quiet_learner(loaders(items, bs, drop_last=drop_last), model, loss_func, opts[opt], cbs=[watch, *cbs_of(**case)])
    with learn.distrib_ctx(cpu=True, sync_bn=False): fit(learn, **case)
    res = facts(learn, watch)
    learn.remove_cb(watch)
    learn.logger = print # Not that of `quiet_learner`
    res['pickled'] = torch.equal(flat(pickle.loads(pickle.dumps(learn))), flat(learn))
    return res

def in_one(kind='mlp', n=96, bs=4, world=2, k=1, drop_last=False, opt='sgd', epochs=2, clip=None, **case):
    "One process with fastai alone, each window a batch"
    items,model,loss_func = task(kind, n)
    micro = shares(n, world, bs, drop_last)
    epochs_of = [[collate(items, sum(w, [])) for w in windows(micro, n_acc_in(k or 1, e))] for e in range(epochs)]
    dls = DataLoaders(Given(epochs_of), loaders(items, 2).valid, device='cpu')
    learn = quiet_learner(dls, model, loss_func, opts[opt], cbs=cbs_of(clip=clip))
    losses = []
    class Losses(Callback):
        def after_loss(self):
            if self.training: losses.append(self.learn.loss.item())
    fit(learn.add_cb(Losses()), epochs, **case)
    return learn,losses

def each(rank, f, cases): return [f(rank, **case) for case in cases]

def all_at_once(f, cases, on_three=()):
    "A function of the number of ranks: by name what `f(rank, **case)` returned on each of them, for `cases`, or those `on_three`, in one launch"
    def _run(world):
        names = [nm for nm in cases if world==2 or nm in on_three]
        return dict(zip(names, zip(*on_ranks(each, world, f, [cases[nm] for nm in names]))))
    return cache(_run)

def assert_close(a, b, tol=1e-9): np.testing.assert_allclose(a, b, rtol=0, atol=tol*np.abs(b).max())

stand_ins = {'one_batch','_do_epoch_train','_with_events'} # Of the learner's methods, for a while

def assert_sound(ranks):
    "What holds after any fit: no rank differs, and nothing is left behind"
    for o in ranks:
        assert np.array_equal(o['flat'], ranks[0]['flat'])
        assert np.isfinite(o['flat']).all()
        assert np.isfinite(o['losses']).all()
        assert o['model']!='DistributedDataParallel'
        assert all(o['grads'])
        assert all(o['clean'])
        assert o['pickled']
        assert not stand_ins & set(o['own'])
        assert o['losses']==ranks[0]['losses']
        assert repr(o['said'])==repr(ranks[0]['said'])
        assert o['reduced']==ranks[0]['reduced']

large = {
    'dict back': dict(n=50, bs=4, k={0: 2, 1: 1, 2: 3}, epochs=3), 'fewer items than ranks': dict(n=1, bs=4, k=3),
    'one cycle, adam': dict(n=91, bs=4, k=5, cycle=True, opt='adam', lr=0.01), 'drop_last, clip': dict(n=90, bs=16, k=3, drop_last=True, clip=0.1),
    'tokens, clip': dict(kind='tokens', n=51, bs=4, k=3, clip=0.05), 'ignored, single': dict(kind='ignored', n=50, bs=1, k=2),
    'own': dict(kind='own', n=50, bs=3, k=3, count=count_kept), 'sum, drop_last': dict(kind='sum', n=90, bs=16, k=3, lr=0.002, drop_last=True),
    'nothing counts': dict(kind='none', n=30, bs=4, k=2)}
scheduled = dict(n=90, sizes={0: 8, 1: 24})
one = {kind: dict(kind=kind, n=52, bs=4, clip=0.3) for kind in ('classes','bn')}
watched = [dict(n=91, bs=4, clip=0.3, opt='sgd'),dict(kind='tokens', n=60, bs=2, k=2, opt='sgd')]
trainings = {**large, **dict(enumerate(watched)), 'schedule': scheduled, 'schedule in parts': dict(scheduled, most=4),
    **{f'{kind}, bare': o for kind,o in one.items()}, **{f'{kind}, one': dict(o, k=1) for kind,o in one.items()}}
large_on_three = ['tokens, clip','fewer items than ranks']

def on_two_and_three(cases, on_three): return [(2,nm) for nm in cases]+[(3,nm) for nm in cases if nm in on_three]

trained = all_at_once(train, trainings, [*large_on_three,'classes, bare','classes, one'])

@pytest.mark.parametrize('world,name', on_two_and_three(large, large_on_three))
def test_follows_the_large_batch(world, name):
    "Parameters, optimizer state, losses and steps of one process that is given each window as a batch; one reduction a window, in short last ones too"
    case = large[name]
    ranks = trained(world)[name]
    assert_sound(ranks)
    learn,losses = in_one(world=world, **case)
    one = facts(learn)
    assert_close(ranks[0]['flat'], one['flat'])
    assert len(ranks[0]['state'])==len(one['state'])
    for a,b in zip(ranks[0]['state'], one['state']): assert_close(a, b)
    said = ranks[0]['said']
    epochs = case.get('epochs', 2)
    micro = shares(case['n'], world, case['bs'], case.get('drop_last', False))
    closed = [l for stepped,l in said if stepped]
    if not case.get('drop_last'):
        micro_batches = [(e,i) for e in range(epochs) for i in range(len(micro[0]))]
        closing = [(e,i) for e,i in micro_batches if (i+1)%n_acc_in(case['k'], e)==0 or i+1==len(micro[0])]
        assert [o for o,(stepped,_) in zip(micro_batches, said, strict=True) if stepped]==closing==ranks[0]['reduced']
        if case.get('kind')!='none': np.testing.assert_allclose(closed, losses, rtol=1e-9)
    if case.get('kind')!='none':
        assert one['lrs']==ranks[0]['lrs']
        np.testing.assert_allclose(ranks[0]['losses'], one['losses'], rtol=1e-6)

def test_a_schedule_follows_the_large_batch():
    "Items of all ranks: in one micro-batch of each rank, or in several; the rate goes along"
    n,sizes = scheduled['n'],scheduled['sizes']
    items,model,loss_func = task('mlp', n)
    epochs_of = [[collate(items, sum(w, [])) for w in windows(shares(n, 2, size//2), 1)] for size in sizes.values()]
    class Rate(Callback):
        order = 1000
        def before_batch(self):
            if self.training: self.opt.set_hyper('lr', 0.05*(sizes[self.epoch]/sizes[0])**0.5)
    one = quiet_learner(DataLoaders(Given(epochs_of), loaders(items, 2).valid, device='cpu'), model, loss_func, opts['sgd'], cbs=Rate())
    fit(one)
    for ranks in (trained(2)[nm] for nm in ('schedule','schedule in parts')):
        assert_sound(ranks)
        assert_close(ranks[0]['flat'], flat(one).numpy())
        assert [o[-1] for o in ranks[0]['values']]==list(sizes.values())

@pytest.mark.parametrize('kind,world', [('classes',3), ('bn',2)])
def test_one_changes_no_bit(kind, world):
    "Where all ranks' counts are equal, ragged last batches too"
    for x,y in zip(trained(world)[f'{kind}, one'], trained(world)[f'{kind}, bare']):
        assert np.array_equal(x['flat'], y['flat'])
        assert x['losses']==y['losses']
        assert x['values']==y['values']
        for s,t in zip(x['buffers']+x['state'], y['buffers']+y['state']): assert np.array_equal(s, t)

# Noise scale

def noise_learner(items, model, loss_func, dls, k=None, opt='plain', every=None, scaled=False, count=None, clip=None):
    noise = NoiseScale(every=every)
    cbs = [noise, *cbs_of(k, clip, count)] + ([ScaledLoss(init_scale=2.**10, growth_interval=3)] if scaled else [])
    return quiet_learner(dls, model, loss_func, opts[opt], cbs=cbs),noise

def hooks(learn): return sum(len(p._backward_hooks or {}) for p in learn.model.parameters())

def measure(rank, kind='mlp', n=96, bs=4, drop_last=False, shuffle=False, epochs=2, lr=0.05, **case):
    "On this rank"
    items,model,loss_func = task(kind, n)
    set_seed(0)
    learn,noise = noise_learner(items, model, loss_func, loaders(items, bs, drop_last=drop_last, shuffle=shuffle), **case)
    with learn.distrib_ctx(cpu=True, sync_bn=False): fit(learn, epochs, lr)
    return dict(df=noise.df, flat=flat(learn).numpy(), bs=noise.bs, ci=noise.ci, steps=noise.n_steps, names=list(learn.recorder.metric_names),
                losses=[float(o) for o in learn.recorder.losses], hooks=hooks(learn))

def measure_in_one(kind='mlp', n=96, bs=4, world=2, k=1, drop_last=False, epochs=2, lr=0.05, **case):
    "One process with `GradAccum` over the micro-batches of all ranks"
    items,model,loss_func = task(kind, n)
    micros = [collate(items, b) for w in windows(shares(n, world, bs, drop_last), k) for b in w]
    learn,noise = noise_learner(items, model, loss_func, DataLoaders(Given([micros]), loaders(items, 2).valid, device='cpu'), k*world, **case)
    fit(learn, epochs, lr)
    return noise

def assert_rows(df, expected, cols=('n_items','n_elems','tr_sigma','g_sq')):
    assert len(df)==len(expected)>0
    for c in cols: np.testing.assert_allclose(df[c], expected[c], rtol=1e-6, atol=1e-6*np.abs(expected[c]).max(), err_msg=c)

def assert_same_noise(ranks):
    for o in ranks[1:]:
        pd.testing.assert_frame_equal(o['df'], ranks[0]['df'], check_exact=True)
        for nm in ('bs','ci','steps','names'): assert o[nm]==ranks[0][nm]
        assert np.array_equal(o['flat'], ranks[0]['flat'])
    assert not any(o['hooks'] for o in ranks)

measured_on_ranks = { # Without a `k` there is no GradAccum, and every step has one gradient of each rank
    'padded, single items': dict(n=49, bs=1, k=5), 'tokens': dict(kind='tokens', n=60, bs=2, k=3),
    'own': dict(kind='own', n=60, bs=3, k=2, count=count_kept), 'sum': dict(kind='sum', n=60, bs=4, k=2, lr=0.002),
    'no accum, padded': dict(n=91, bs=4), 'no accum, scaled, clip': dict(n=90, bs=4, scaled=True, clip=0.1),
    'no accum, sum': dict(kind='sum', n=60, bs=4, lr=0.002), 'no accum, every, drop_last': dict(n=90, bs=16, every=3, drop_last=True)}
at_fixed_weights = { # In single items, without `GradAccum`, DDP divides by all ranks, also by those in which nothing counts and that have no gradient
    'items': dict(kind='tokens', n=90, bs=2, k=3), 'nothing counts': dict(kind='ignored', n=60, bs=1)}
of_three = {nm: dict(o, lr=0., epochs=1) for nm,o in at_fixed_weights.items()}
of_three['unequal'] = dict(kind='thirds', n=120, bs=3, shuffle=True, lr=0., epochs=5)
noise_on_ranks = all_at_once(measure, {**measured_on_ranks, **dict(enumerate(watched)), **of_three}, ['tokens','no accum, padded',*of_three])

@pytest.mark.parametrize('world,name', on_two_and_three(measured_on_ranks, ['tokens','no accum, padded']))
def test_rows_are_those_of_one_process(world, name):
    """And without those of an epoch's last window where items are in it twice, and only there

    Without `GradAccum` a sum's gradient is divided by the ranks in DDP, as by a smaller rate.
    """
    case,ranks = measured_on_ranks[name],noise_on_ranks(world)[name]
    assert_same_noise(ranks)
    k,n,bs = case.get('k', 1),case['n'],case['bs']
    noise = measure_in_one(world=world, **{**case, 'k': k, **(dict(lr=case['lr']/world) if name=='no accum, sum' else {})})
    n_micro = len(shares(n, world, bs, case.get('drop_last', False))[0])
    n_windows = math.ceil(n_micro/k)
    padded = max(0, n_windows-n_whole(n, world, bs*k))
    expected = noise.df[(noise.df.step-1)%n_windows<n_windows-padded]
    assert_rows(ranks[0]['df'], expected)
    assert list(ranks[0]['df'].step)==list(expected.step)
    assert ranks[0]['steps']==noise.n_steps
    assert ranks[0]['bs']==min(bs*min(k, math.ceil(n/world/bs))*world, n) # As fastai's loader says, with `drop_last` too
    if not padded: np.testing.assert_allclose(ranks[0]['ci'], noise.ci, rtol=1e-6)
    assert np.isfinite(ranks[0]['losses']).all()

@pytest.mark.parametrize('name', at_fixed_weights)
def test_rows_are_those_of_the_items(name):
    "Slow and obvious: the gradient of every item"
    case,ranks = at_fixed_weights[name],noise_on_ranks(3)[name]
    n,bs,k = case['n'],case['bs'],case.get('k', 1)
    items,model,loss_func = task(case['kind'], n)
    wins = windows(shares(n, 3, bs), k)[:n_whole(n, 3, bs*k)]
    assert_same_noise(ranks)
    expected = window_rows(item_grads(model, loss_func, items), wins, n_kept(items))
    assert_rows(ranks[0]['df'], expected, cols=('n_elems','tr_sigma','g_sq'))

def test_measuring_changes_no_bit():
    for i in range(len(watched)):
        a,b = noise_on_ranks(2)[i][0],trained(2)[i][0]
        assert np.array_equal(a['flat'], b['flat'])
        assert np.array_equal(a['losses'], b['losses'], equal_nan=True)
        assert len(a['df'])

def test_unequal_counts_are_no_bias():
    "Drawn anew each epoch; without `GradAccum`, where DDP's mean is not that of the elements"
    items,model,loss_func = task('thirds', 120)
    want = moments(item_grads(model, loss_func, [o for o in items if o[1]>=0]))
    ranks = noise_on_ranks(3)['unequal']
    assert_same_noise(ranks)
    df = ranks[0]['df'][['tr_sigma','g_sq']]
    assert len(df)>60
    assert ((df.mean()-want)/df.sem()).abs().max()<3.5

# bs_find

def everything(learn):
    "What a mock training may change"
    return dict(picture(learn, only=('model','opt')), rngs=[dl.rng.getstate() for dl in learn.dls.loaders], names=sorted(set(vars(learn))-{'progress'}),
                loaders=[id(o) for o in learn.dls.loaders], cbs=[id(o) for o in learn.cbs], bs=[dl.bs for dl in learn.dls.loaders],
                grads=[p.grad is None or not p.grad.any().item() for p in learn.model.parameters()], hooks=hooks(learn))

real,n_rounds = (StepTimes.budget,StepTimes.slack,StepTimes.part),StepTimes.n_rounds

def find(rank, kind='mlp', n=96, lr=0.05, kw=None, cbs=(), first=0, plain=False, thrifty=False):
    "`bs_find` and a fit after it"
    import matplotlib.pyplot as plt
    StepTimer.patience,StepTimer.most = 1.,2 # In this process; what steps take does not matter
    plt.close('all') # Of the case before
    StepTimes.budget,StepTimes.slack,StepTimes.part = real if thrifty else (math.inf,)*3
    StepTimes.n_rounds = n_rounds if thrifty else 1
    set_seed(0)
    items,model,loss_func = task(kind, n)
    learn,plan = quiet_learner(loaders(items, 4, shuffle=True), model, loss_func, opts['sgd'], cbs=[f() for f in cbs]),None
    with learn.distrib_ctx(cpu=True, sync_bn=False):
        if first: fit(learn, first, 0.02)
        before,n_models = everything(learn),known_models(learn)
        if not plain: plan = learn.bs_find(lr, **dict(dict(num_it=140, max_bs=16), **(kw or {}))) # No more than 30 windows take
        changed = changes(before, everything(learn)) + ([] if known_models(learn)==n_models else ['what accelerate knows'])
        fit(learn, 1, 0.05)
    return dict(facts=plan and plan.facts, df=plan and plan.df, text=repr(plan), changed=changed, figures=len(plt.get_fignums()),
                after=flat(learn).numpy(), model=type(learn.model).__name__)

def known_models(learn): return [len(cb.accelerator._models) for cb in learn.cbs if hasattr(cb, 'accelerator')]

class NoEights(Callback):
    "Rank 1 cannot train on 8 items at a time"
    def before_batch(self):
        if rank_distrib()==1 and len(self.x)==8: raise ValueError('no eights')

def accum3(): return GradAccum(3)
def accum1(): return GradAccum(1)
def scaled(): return ScaledLR(8, linear_scaling)

finds = {'plain': dict(), 'accum': dict(cbs=(accum3,), first=1), 'scaled': dict(cbs=(accum1,scaled), n=90),
         'still': dict(kind='tokens', lr=0., n=91, kw=dict(max_bs=4, show_plot=False)),
         'no eights': dict(cbs=(NoEights,), n=90),
         'thrifty': dict(thrifty=True, n=200, kw=dict(show_plot=False, n_batch=4)), 'accum, none': dict(cbs=(accum3,), first=1, plain=True),
         'tried': dict(kw=dict(num_it=None, n_epoch=100, step_times={4: 0.01, 8: 0.01, 16: 0.01}, show_plot=False))}

found = all_at_once(find, finds, ['plain'])

@pytest.mark.parametrize('name,world', [('plain',3), *((nm,2) for nm in ('accum','scaled','still','thrifty','no eights','tried'))])
def test_one_plan(name, world):
    "The same to the bit on every rank, with a picture on rank 0 alone, and the learner as it was"
    ranks,case = found(world)[name],finds[name]
    for i,o in enumerate(ranks):
        for nm in ('facts','text'): assert repr(o[nm])==repr(ranks[0][nm])
        if name!='tried': pd.testing.assert_frame_equal(o['df'], ranks[0]['df'], check_exact=True) # By short trainings there is none
        assert o['changed']==[]
        assert o['model']!='DistributedDataParallel'
        assert np.array_equal(o['after'], ranks[0]['after'])
        assert o['figures']==(i==0 and 'show_plot' not in case.get('kw', {}))
    facts,df = ranks[0]['facts'],ranks[0]['df']
    times,failed = facts.device.times,facts.device.failed
    assert all(t>0 for o in times for t in o) or name=='tried'
    assert (facts.today.micro_bs,facts.today.bs,facts.today.n_train)==(4,4*(3 if name=='accum' else 1)*world,case.get('n', 96))
    if name=='accum': assert np.array_equal(ranks[0]['after'], found(2)['accum, none'][0]['after']) # The training without `bs_find`
    if name=='no eights':
        assert failed[0][0]==8
        assert 'no eights' in failed[0][1]
        assert 8 not in [o for o,*_ in times]
    if name=='tried': assert df is None and (facts.trial.is_known or facts.trial.got_nowhere) # By short trainings, which all ranks train together
    elif name=='still': assert df.step.eq(0).all()
    else: assert df.pct.is_monotonic_increasing and df.pct.iloc[-1]>0.98 and facts.measured.n_windows>=(30 if name!='thrifty' else 20)

# Failures

def failing(rank, event, at=None, finder=False, on=(1,)):
    "The error of a fit or of `bs_find` that fails at the first `event`, or in micro-batch `at`, on the ranks `on`, and what it leaves behind"
    fail = [RaiseAt(event, KeyError, at, order=70)] if rank in on else []
    learn = quiet_learner(loaders(regression(96), 8, valid=regression(4)), mlp(), cbs=[*fail, accum3()])
    model,before,text = learn.model,everything(learn),'no error'
    try:
        with learn.distrib_ctx(cpu=True, sync_bn=False): learn.bs_find(0.05, show_plot=False, max_bs=8) if finder else learn.fit(2, 0.05)
    except BaseException as e: text = f'{type(e).__name__}: {e}'
    now = everything(learn)
    left = [nm for nm in ('loaders','bs','hooks') if now[nm]!=before[nm]] + sorted(stand_ins & set(vars(learn)))
    if learn.model is not model: left.append('model')
    if not all(now['grads']): left.append('gradients')
    if finder: left += [o for o in changes(before, now) if o!='cbs'] # A fit has moved the weights
    return text,left

@pytest.mark.parametrize('event,at,finder', [('after_backward',1,False), ('after_pred',1,True)])
def test_one_fails(event, at, finder):
    "It ends with its own error and its learner as it was; the others end when its process does, as they wait for it"
    other,(text,left) = results(start(failing, 2, event, at, finder, linger=False), errors=True)
    assert 'the one' in text
    assert left==[]
    assert isinstance(other, str) or other[0]!='no error'

def test_the_same_error_on_all():
    "Each raises its own, and the group can be used again"
    ranks = on_ranks(again, 3)
    for *failures,then in ranks:
        for text,left in failures:
            assert 'the one' in text
            assert left==[]
        assert np.array_equal(then, ranks[0][-1])

def again(rank):
    failures = [failing(rank, event, at, finder, on=(0,1,2)) for event,at,finder in (('before_step',None,True),('after_batch',1,False))]
    learn = quiet_learner(loaders(regression(48), 4), mlp(), cbs=GradAccum(2))
    with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(1, 0.05)
    return *failures,flat(learn).numpy()

# Memory runs out on one rank

splits = { # Where it does on rank 1, of 7 micro-batches of up to 4 items in each of two epochs, and the windows that are lost
    'backward, closing': (dict(clip=0.1), ('backward',[2,5],1,2), [0,1]), 'alone': (dict(k=1), ('forward',[0,6],2,2), [0]),
    'always': (dict(opt='mom', cycle=True), ('before_batch',range(100),1,100), [0,1]),
    'ignored': (dict(kind='ignored'), ('after_loss',[1,7],2,2), [0]), 'after_train': (dict(cancel=6, k=4), ('backward',[5],0), [1])}

def random_split(seed):
    draw = random.Random(seed)
    k,at = draw.choice([1,2,3,7]),sorted(draw.sample([i for i in range(14) if i%7<6], draw.choice([1,2])))
    lost = sorted({i//7*math.ceil(7/k) + i%7//k for i in at})
    return dict(k=k, clip=draw.choice([None,0.1]), opt=draw.choice(['sgd','mom'])),(draw.choice(places),at,0,2,draw.choice([-3,20])),lost

splits.update({f'at random, {seed}': random_split(seed) for seed in range(25)})

def split_fit(rank, on_oom, strike, lost, kind='mlp', n=51, k=3, opt='sgd', clip=None, cancel=None, **case):
    items,model,loss_func = task(kind, n)
    learn = quiet_learner(loaders(items, 4), model, loss_func, opts[opt], cbs=[watch := Watch(), *cbs_of(clip=clip)])
    learn.add_cbs([GradAccum(k, on_oom=on_oom), NoiseScale()])
    if cancel: learn.add_cb(RaiseAt('before_batch', CancelBatchException, cancel))
    s = Strike(*strike)
    if on_oom=='raise': learn.add_cb(SkipSteps(*lost))
    elif rank: learn.add_cb(s)
    with learn.distrib_ctx(cpu=True, sync_bn=False): fit(learn, **case)
    accum = learn.grad_accum
    return dict(facts(learn, watch), struck=s.struck, n_parts=accum.n_parts, n_lost=accum.n_lost, noise=learn.noise_scale.noise_scale, pickled=True)

def split_both(rank, case, strike, lost): return [split_fit(rank, on_oom, strike, lost, **case) for on_oom in ('raise','split')]
ran = all_at_once(split_both, {nm: dict(zip(('case','strike','lost'), o)) for nm,o in splits.items()})

@pytest.mark.parametrize('name', splits)
def test_all_ranks_lose_the_same_window(name):
    "Where memory runs out on one rank, none hangs, and weights and rates are those of a fit in which the steps of these windows were cancelled"
    plain,split = zip(*ran(2)[name])
    lost = splits[name][-1]
    assert_sound(split)
    assert split[1]['struck']
    assert not split[0]['reduced']
    assert split[0]['n_parts']==split[1]['n_parts']==2**len(lost)
    assert split[0]['n_lost']==split[1]['n_lost']==len(lost)
    assert_close(split[0]['flat'], plain[0]['flat'])
    assert split[0]['lrs']==[o for i,o in enumerate(plain[0]['lrs']) if i not in lost]
    np.testing.assert_equal(split[0]['noise'], split[1]['noise'])

def split_bn(rank):
    learn = quiet_learner(loaders(regression(48), 4), bn_model(), cbs=GradAccum(2, on_oom='split'))
    with learn.distrib_ctx(cpu=True, sync_bn=True):
        with pytest.raises(ValueError, match='sync_bn=False'): learn.fit(1)
    if rank: learn.add_cb(Strike('backward', [1]))
    stats = []
    class Look(Callback):
        def after_pred(self):
            if not self.training: stats.append(self.learn.model.module[1].running_mean.tolist())
    learn.add_cb(Look())
    with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(1, 0.05)
    return stats[0],learn.grad_accum.n_parts

def test_batch_norm_in_parts():
    "Not of SyncBatchNorm, whose ranks wait for each other; statistics in validation are those of rank 0, as DDP has it"
    a,b = on_ranks(split_bn, 2)
    assert a==b
    assert a[1]==2

def test_no_part_left_on_one_rank():
    "That rank raises, and the launcher ends the others"
    (other,_),one = start(no_part, 2)
    try: assert results([one], errors=True)[0].startswith('OutOfMemoryError: Memory runs out with a single item')
    finally: other.kill()

def no_part(rank):
    learn = quiet_learner(loaders(regression(48), 4), mlp(), cbs=GradAccum(2, on_oom='split'))
    if rank: learn.add_cb(Strike('forward', range(100), times=100))
    with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(1, 0.05)

# Bad input

bad = { # Items, size of a micro-batch and callbacks by rank, and what the error says
    'n_acc': (lambda rank: (96,4,GradAccum(2+rank)), '`n_acc` must be the same on all ranks','2 on rank 0, 3 on rank 1'),
    'n_acc, dict': (lambda rank: (96,4,GradAccum({0: 2, 1: 2+rank})), '`n_acc` must be the same on all ranks','2 on rank 0, [2, 3] on rank 1'),
    'length': (lambda rank: (96-48*rank,4,GradAccum(2)), "loader's length must be the same on all ranks",'24 on rank 0, 12 on rank 1'),
    'length, find': (lambda rank: (96-48*rank,4,None), "length must be the same on all ranks",'24 on rank 0, 12 on rank 1'),
    'bs': (lambda rank: (96,4+4*rank,ScaledLR(8, linear_scaling)), 'batch size must be the same on all ranks','8 on rank 0, 16 on rank 1'),
    'accumulation of fastai': (lambda rank: (96,4,[NoiseScale(),GradientAccumulation(8)]), 'On several ranks NoiseScale compares')}

def refused_all(rank):
    "By name, the text of the error, and whether the learner is as it was"
    res = {}
    for nm,(make,*_) in bad.items():
        n,bs,cb = make(rank)
        learn = quiet_learner(loaders(regression(n), bs), mlp(), cbs=cb)
        before = flat(learn)
        with learn.distrib_ctx(cpu=True, sync_bn=False), pytest.raises(ValueError) as e:
            learn.fit(2, 0.05) if cb else learn.bs_find(0.05, show_plot=False)
        res[nm] = str(e.value),torch.equal(before, flat(learn)) and not (hasattr(learn, 'grad_accum') and learn.grad_accum.window.n_micro)
    return res

def test_different_ranks_are_refused():
    for res in on_ranks(refused_all, 2):
        for nm,(text,kept) in res.items(): assert all(o in text for o in bad[nm][1:]) and kept, (nm, text)

# ScaledLR

def scaled_fit(rank):
    learn = quiet_learner(loaders(regression(96), 4), mlp(), cbs=[GradAccum(bs=24), ScaledLR(8, linear_scaling, warmup_epochs=0)])
    with learn.distrib_ctx(cpu=True, sync_bn=False):
        with learn.removed_cbs(learn.grad_accum), learn.added_cbs(GradAccum(bs=23)):
            with pytest.raises(ValueError, match='4 items on each of 2 ranks: take bs=16 or bs=24,'): learn.fit(1, 0.01)
        bs = learn.batch_size
        learn.fit(1, 0.01)
    return bs,learn.scaled_lr.bs,learn.scaled_lr.factor,flat(learn).numpy()

def test_scaled_lr_reads_the_world():
    "And so does `GradAccum(bs=...)`"
    one,_ = in_one(n=96, bs=4, k=3, epochs=1, lr=0.01*3, opt='mom')
    for *sizes,factor,params in on_ranks(scaled_fit, 2):
        assert sizes==[24,24]
        assert factor==3
        assert_close(params, flat(one).numpy())

# One shuffle per epoch

class Logged(list):
    "Keeps the order in which its items are taken"
    seen = ()
    def __getitem__(self, i):
        self.seen = (*self.seen,i)
        return super().__getitem__(i)

def taken(rank):
    items = Logged(regression(41))
    set_seed(rank) # fastai takes the order of rank 0
    learn = quiet_learner(loaders(items, 4, valid=regression(2), shuffle=True), mlp(), cbs=[GradAccum(2)])
    with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(2, 0.05)
    return [items.seen[:21],items.seen[21:]]

def test_one_shuffle_per_epoch():
    "Of 41 items rank 1 has the last 20, and the first one to fill it up"
    first,second = (a+b for a,b in zip(*on_ranks(taken, 2)))
    for order in (first,second):
        assert sorted(order[:-1])==list(range(41))
        assert order[-1]==order[0]
    assert first!=second

# Processes without a common training

def apart(rank):
    own = fastai.torch_core.maybe_gather
    learn = quiet_learner(loaders(regression(40+20*rank), 4), mlp(), cbs=[GradAccum(2+rank), NoiseScale(), ScaledLR(4, warmup_epochs=0)])
    learn.fit(2, 0.05)
    assert '_with_events' not in vars(learn)
    assert fastai.torch_core.maybe_gather is own
    if rank: quiet_learner(loaders(regression(96), 4), mlp()).bs_find(0.05, show_plot=False)
    return flat(learn).numpy(),trains_together(learn),len(learn.noise_scale.df),learn.scaled_lr.bs,list(learn.recorder.values[-1])

def test_processes_apart():
    "Each trains as if alone, with another number of batches and of micro-batches; its losses are its own"
    for r,(params,said,n,bs,row) in enumerate(results(start(apart, 2, linger=False))):
        learn = quiet_learner(loaders(regression(40+20*r), 4), mlp(), cbs=[GradAccum(2+r), NoiseScale(), ScaledLR(4, warmup_epochs=0)])
        learn.fit(2, 0.05)
        assert np.array_equal(params, flat(learn).numpy())
        assert not said
        assert n==len(learn.noise_scale.df)
        assert bs==4*(2+r)
        assert row==list(learn.recorder.values[-1])
