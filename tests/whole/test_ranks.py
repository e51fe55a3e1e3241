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
from torch.nn.modules.batchnorm import _BatchNorm
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.schedule import fit_one_cycle # noqa: F401, it adds the method
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.distributed import DistributedDL, DistributedTrainer
from fastai.optimizer import Adam, SGD
from fastai.torch_core import rank_distrib
from fastai_bs.all import BatchSchedule, GradAccum, linear_scaling, NoiseScale, ScaledLR, sqrt_scaling
from fastai_bs.learner.ranks import ddp_model, n_processes, over_ranks, trains_together
from fastai_bs.learner.loop import ScopedCallback
from fastai_bs.finder.timing import StepTimer, StepTimes
from helpers import changes, flat, loaders, mlp, picture, quiet_learner, RaiseAt, regression, ScaledLoss, set_seed, SkipSteps, token_task
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

def task(kind, n):
    "Items, model and loss; where elements can be left out, ranks have micro-batches without any"
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    gone = [i for i in range(n) if n//2<=i<n//2+4 or i%5==1 and i<n//3] # Rank 1 of 2 begins without
    if kind=='mlp': return regression(n), mlp(), nn.MSELoss()
    if kind=='sum': return regression(n), mlp(), nn.MSELoss(reduction='sum')
    if kind=='bn': return regression(n), nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4,2)).double(), nn.MSELoss()
    if kind=='own':
        items = [(x, torch.full_like(y, math.nan) if i in gone else torch.where(torch.arange(2)<1+i%2, y, math.nan)) for i,(x,y) in enumerate(regression(n))]
        return items, mlp(), masked_mse
    y = torch.randint(3, (n,), generator=g)
    items = list(zip(torch.randn(n, 5, generator=g, dtype=torch.float64)+0.3*y[:,None], y))
    if kind=='classes': return items, mlp(n_out=3), nn.CrossEntropyLoss()
    if kind=='ignored': return [(x, torch.tensor(-100) if i in gone else o) for i,(x,o) in enumerate(items)], mlp(n_out=3), nn.CrossEntropyLoss()
    if kind=='thirds': return [(x, torch.tensor(-100) if i%3==0 else o) for i,(x,o) in enumerate(items)], mlp(n_out=3), nn.CrossEntropyLoss()
    if kind=='none': return [(x, torch.tensor(-100)) for x,_ in items], mlp(n_out=3), nn.CrossEntropyLoss()
    if kind=='tokens': return token_task(n, 0.4, tied=False, kept=lambda i: 0 if i in gone else 4)
    raise KeyError(kind)

def elements(items, kind):
    "Of the loss in each item"
    return torch.stack([(y!=-100).sum() if kind in ('ignored','thirds','tokens') else torch.tensor(y.numel()) for _,y in items])

# What each rank gets

def shares(n, world, bs, drop_last=False, order=None):
    "The micro-batches of each rank, as indices: fastai gives each a contiguous share of the epoch's order, and fills the last one up from the start"
    order,size = list(range(n) if order is None else order),math.ceil(n/world)
    padded = (order*world)[:size*world]
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
    "Notes what GradAccum says after each micro-batch, and counts reductions where `hook`"
    order = DistributedTrainer.order+1
    def __init__(self, hook=False): self.hook,self.said,self.reduced,self.syncs,self.clean,self.norms = hook,[],[],[],[],[]
    def before_fit(self):
        ddp = ddp_model(self.learn)
        if self.hook and ddp is not None: ddp.register_comm_hook(None, self.count)
    def count(self, state, bucket):
        self.reduced.append((self.epoch,self.iter))
        return allreduce_hook(None, bucket)
    def before_backward(self):
        if not self.training: return
        self.norms.append([m.momentum for m in self.learn.model.modules() if isinstance(m, _BatchNorm)])
        self.syncs.append(getattr(self.learn.model, 'require_backward_grad_sync', None))
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
    res = dict(flat=flat(learn).numpy(), losses=[float(o) for o in learn.recorder.losses], model=type(learn.model).__name__,
               own=sorted(vars(learn)), lrs=list(learn.recorder.lrs), values=[list(o) for o in learn.recorder.values],
               grads=[p.grad is None or not p.grad.any().item() for p in learn.model.parameters()],
               buffers=[b.double().numpy() for b in learn.model.buffers()],
               momenta=[m.momentum for m in learn.model.modules() if isinstance(m, _BatchNorm)],
               state=[t.double().numpy() for s in learn.opt.state.values() for t in s.values() if isinstance(t, torch.Tensor)])
    if watch is not None: res.update(said=watch.said, reduced=watch.reduced, syncs=watch.syncs, clean=watch.clean, norms=watch.norms)
    return res

def cbs_of(k=None, clip=None, count=None, fix_bn=True, sizes=None, most=None, **kwargs):
    if sizes: return [BatchSchedule(sizes, sqrt_scaling, most)]
    return ([] if k is None else [GradAccum(k, count=count, fix_bn=fix_bn)]) + ([] if clip is None else [GradientClip(clip)])

def train(rank, kind='mlp', n=96, bs=4, drop_last=False, opt='sgd', hook=False, fastai_acc=None, plain=False, shuffle=False, bucket=None, **case):
    "A fit on this rank"
    items,model,loss_func = task(kind, n)
    watch = Watch(hook)
    set_seed(rank)
    learn = quiet_learner(loaders(items, bs, drop_last=drop_last, shuffle=shuffle), model, loss_func, opts[opt], cbs=[watch, *cbs_of(**case)])
    if fastai_acc: learn.add_cb(GradientAccumulation(fastai_acc))
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

def train_all(rank, cases): return [train(rank, **case) for case in cases]
def run_all(world, *cases):
    "A list for each of `cases`, of what `train` returned on each of `world` ranks; one launch saves time"
    return list(zip(*on_ranks(train_all, world, cases)))

def assert_close(a, b, tol=1e-9): np.testing.assert_allclose(a, b, rtol=0, atol=tol*np.abs(b).max())

def assert_sound(ranks, learner_too=True):
    "What holds after any fit: no rank differs, and nothing is left behind"
    for o in ranks:
        assert np.array_equal(o['flat'], ranks[0]['flat'])
        assert np.isfinite(o['flat']).all()
        assert np.isfinite(o['losses']).all()
        assert o['model']!='DistributedDataParallel'
        assert all(o['grads'])
        assert all(o['clean'])
        assert o['pickled']
        assert not {'one_batch','_do_epoch_train','_with_events'} & set(o['own'])
        assert o['losses']==ranks[0]['losses']
        assert repr(o['said'])==repr(ranks[0]['said'])
        assert o['syncs']==ranks[0]['syncs']

large = {
    'dict back': dict(n=50, bs=4, k={0: 2, 1: 1, 2: 3}, epochs=3), 'fewer items than ranks': dict(n=1, bs=4, k=3),
    'one cycle, adam': dict(n=91, bs=4, k=5, cycle=True, opt='adam', lr=0.01), 'drop_last, clip': dict(n=90, bs=16, k=3, drop_last=True, clip=0.1),
    'tokens, clip': dict(kind='tokens', n=51, bs=4, k=3, clip=0.05), 'ignored, single': dict(kind='ignored', n=50, bs=1, k=2),
    'own': dict(kind='own', n=50, bs=3, k=3, count=count_kept), 'sum, drop_last': dict(kind='sum', n=90, bs=16, k=3, lr=0.002, drop_last=True),
    'nothing counts': dict(kind='none', n=30, bs=4, k=2)}
scheduled,hooked,bn = dict(n=90, sizes={0: 8, 1: 24}),dict(n=91, bs=4, hook=True),dict(kind='bn', n=52, bs=4)
one = {kind: dict(kind=kind, n=52, bs=4, clip=0.3) for kind in ('classes','bn')}
watched = [dict(n=91, bs=4, clip=0.3, opt='sgd'),dict(kind='tokens', n=60, bs=2, k=2, opt='sgd')]
trainings = {**large, **dict(enumerate(watched)), 'schedule': scheduled, 'schedule in parts': dict(scheduled, most=4),
    'bn, 1': dict(bn, k=1), 'bn, 3': dict(bn, k=3),
    'bn as it is': dict(bn, k=3, fix_bn=False), 'reduced, 3': dict(hooked, k=3), "reduced, fastai's": dict(hooked, fastai_acc=12),
    'reduced, 1': dict(hooked, k=1), 'unwatched': dict(hooked, k=3, hook=False),
    **{f'{kind}, bare': o for kind,o in one.items()}, **{f'{kind}, one': dict(o, k=1) for kind,o in one.items()}}
large_on_three = ['tokens, clip','fewer items than ranks']

def on_two_and_three(cases, on_three): return [(2,nm) for nm in cases]+[(3,nm) for nm in cases if nm in on_three]

def all_at_once(f, cases, on_three):
    "A function of the number of ranks: what `f` has for each of `cases`, or of those `on_three`, by name; one launch"
    def _run(world):
        names = [nm for nm in cases if world==2 or nm in on_three]
        return dict(zip(names, f(world, *(cases[nm] for nm in names))))
    return cache(_run)

trained = all_at_once(run_all, trainings, [*large_on_three,'classes, bare','classes, one'])

@pytest.mark.parametrize('world,name', on_two_and_three(large, large_on_three))
def test_follows_the_large_batch(world, name):
    "Parameters, optimizer state, losses and steps of one process that is given each window as a batch"
    case = large[name]
    ranks = trained(world)[name]
    assert_sound(ranks)
    one,losses = in_one(world=world, **case)
    one = facts(one)
    assert_close(ranks[0]['flat'], one['flat'])
    assert len(ranks[0]['state'])==len(one['state'])
    for a,b in zip(ranks[0]['state'], one['state']): assert_close(a, b)
    said = ranks[0]['said']
    epochs = case.get('epochs', 2)
    micro = shares(case['n'], world, case['bs'], case.get('drop_last', False))
    closed = [l for stepped,l in said if stepped]
    if not case.get('drop_last'):
        steps = [bool((i+1)%n_acc_in(case['k'], e)==0 or i+1==len(micro[0])) for e in range(epochs) for i in range(len(micro[0]))]
        assert [o for o,_ in said]==steps==ranks[0]['syncs']
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

def test_bn_is_that_of_each_rank():
    "Running statistics are those of rank 0, and their momentum what it was; a window's is that of one update"
    *fixed,ranks = (trained(2)[nm] for nm in ('bn, 1','bn, 3','bn as it is'))
    assert_sound(ranks)
    assert np.ravel(ranks[0]['norms']).tolist()==[0.1]*14
    for k,ranks in zip((1,3), fixed):
        assert_sound(ranks)
        for o in ranks:
            assert o['momenta']==[0.1]
            n_micro = [min(k, 7-i//k*k) for _ in range(2) for i in range(7)]
            np.testing.assert_allclose(np.ravel(o['norms']), [1-0.9**(1/m) for m in n_micro], rtol=1e-12)

# Reductions

def epochs_reduced(ranks): return [list(map(tuple, o['reduced'])) for o in ranks]

def test_one_reduction_per_window():
    "And bucket, also in a short last window; fastai's own has one per micro-batch"
    n_iter = math.ceil(math.ceil(91/2)/4)
    closing = [i for i in range(n_iter) if (i+1)%3==0 or i==n_iter-1]
    three,fastais,one,without = (trained(2)[nm] for nm in ('reduced, 3',"reduced, fastai's",'reduced, 1','unwatched'))
    for o in epochs_reduced(three): assert o==[(e,i) for e in range(2) for i in closing]
    for o in epochs_reduced(fastais)+epochs_reduced(one): assert o==[(e,i) for e in range(2) for i in range(n_iter)]
    assert np.array_equal(three[0]['flat'], without[0]['flat']) # Counting changes nothing

# GradAccum(1)

@pytest.mark.parametrize('kind,world', [('classes',3), ('bn',2)])
def test_one_changes_no_bit(kind, world):
    "Where all ranks' counts are equal, ragged last batches too"
    for x,y in zip(trained(world)[f'{kind}, one'], trained(world)[f'{kind}, bare']):
        assert np.array_equal(x['flat'], y['flat'])
        assert x['losses']==y['losses']
        assert x['values']==y['values']
        for s,t in zip(x['buffers']+x['state'], y['buffers']+y['state']): assert np.array_equal(s, t)

# Noise scale

def noise_learner(items, model, loss_func, dls, k=None, opt='plain', every=None, scaled=False, count=None, clip=None,
    **case):
    noise = NoiseScale(every=every)
    cbs = [noise, *cbs_of(k, clip, count)] + ([ScaledLoss(init_scale=2.**10, growth_interval=3)] if scaled else [])
    return quiet_learner(dls, model, loss_func, opts[opt], cbs=cbs),noise

def measured(noise, learn):
    return dict(df=noise.df, flat=flat(learn).numpy(), bs=noise.bs, ci=noise.ci, steps=noise.n_steps, names=list(learn.recorder.metric_names),
                losses=[float(o) for o in learn.recorder.losses], hooks=sum(len(p._backward_hooks or {}) for p in learn.model.parameters()))

def measure(rank, kind='mlp', n=96, bs=4, drop_last=False, shuffle=False, epochs=2, lr=0.05, cycle=False, **case):
    "On this rank"
    items,model,loss_func = task(kind, n)
    set_seed(0)
    learn,noise = noise_learner(items, model, loss_func, loaders(items, bs, drop_last=drop_last, shuffle=shuffle), **case)
    with learn.distrib_ctx(cpu=True, sync_bn=False): fit(learn, epochs, lr, cycle)
    return measured(noise, learn)
def measure_all(rank, cases): return [measure(rank, **case) for case in cases]
def noises(world, *cases): return list(zip(*on_ranks(measure_all, world, cases)))

def measure_in_one(kind='mlp', n=96, bs=4, world=2, k=1, drop_last=False, epochs=2, lr=0.05, cycle=False, **case):
    "One process with `GradAccum` over the micro-batches of all ranks"
    items,model,loss_func = task(kind, n)
    each = [collate(items, b) for w in windows(shares(n, world, bs, drop_last), k) for b in w]
    learn,noise = noise_learner(items, model, loss_func, DataLoaders(Given([each]), loaders(items, 2).valid, device='cpu'), k*world, **case)
    fit(learn, epochs, lr, cycle)
    return noise

def assert_rows(df, expected, rtol=1e-6, cols=('n_items','n_elems','tr_sigma','g_sq')):
    assert len(df)==len(expected)>0
    for c in cols: np.testing.assert_allclose(df[c], expected[c], rtol=rtol, atol=rtol*np.abs(expected[c]).max(), err_msg=c)

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
of_items = {k: dict(kind='tokens', n=90, bs=2, k=k, lr=0., epochs=1) for k in (1,3)}
measurements = {**measured_on_ranks, **dict(enumerate(watched)), **{f'items, {k}': o for k,o in of_items.items()},
    'nothing counts': dict(kind='ignored', n=60, bs=1, lr=0., epochs=1)}
unequal = [dict(kind='thirds', n=120, bs=3, k=k, shuffle=True, lr=0., epochs=e) for k,e in ((None,5),(2,9))]
measurements.update({f'unequal, {i}': o for i,o in enumerate(unequal)})
noise_on_ranks = all_at_once(noises, measurements, ['tokens','no accum, padded','items, 1','items, 3','nothing counts','unequal, 0','unequal, 1'])

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

def test_rows_are_those_of_the_items():
    "Slow and obvious: the gradient of every item"
    items,model,loss_func = task('tokens', 90)
    rows,elems = item_grads(model, loss_func, items),elements(items, 'tokens')
    for k in of_items:
        wins = windows(shares(90, 3, 2), k)[:n_whole(90, 3, 2*k)]
        assert_rows(noise_on_ranks(3)[f'items, {k}'][0]['df'], window_rows(rows, wins, elems))

def test_measuring_changes_no_bit():
    for i in range(len(watched)):
        a,b = noise_on_ranks(2)[i][0],trained(2)[i][0]
        assert np.array_equal(a['flat'], b['flat'])
        assert np.array_equal(a['losses'], b['losses'], equal_nan=True)
        assert len(a['df'])

def test_unequal_counts_are_no_bias():
    "Drawn anew each epoch; with `GradAccum` and without"
    items,model,loss_func = task('thirds', 120)
    T,G = moments(item_grads(model, loss_func, [o for o in items if o[1]>=0]))
    for i,case in enumerate(unequal):
        ranks = noise_on_ranks(3)[f'unequal, {i}']
        assert_same_noise(ranks)
        df = ranks[0]['df']
        assert len(df)>60
        for nm,true in (('tr_sigma',T),('g_sq',G)): assert abs((df[nm].mean()-true)/df[nm].sem())<3.5, (case, nm, df[nm].mean(), true, df[nm].sem())

def test_a_rank_in_which_nothing_counts():
    "Without `GradAccum` DDP divides by all ranks, those without a gradient too"
    items,model,loss_func = task('ignored', 60)
    rows,elems = item_grads(model, loss_func, items),elements(items, 'ignored')
    ranks = noise_on_ranks(3)['nothing counts']
    assert_same_noise(ranks)
    assert_rows(ranks[0]['df'], window_rows(rows, windows(shares(60, 3, 1), 1), elems), cols=('n_elems','tr_sigma','g_sq')) # Single elements: weights are equal

# bs_find

def find_learner(n=96, bs=4, kind='mlp', cbs=(), opt='sgd', **kwargs):
    items,model,loss_func = task(kind, n)
    return quiet_learner(loaders(items, bs, shuffle=True), model, loss_func, opts[opt], cbs=cbs, **kwargs)

def everything(learn):
    "What a mock training may change"
    return dict(picture(learn, only=('model','opt')), rngs=[dl.rng.getstate() for dl in learn.dls.loaders], names=sorted(set(vars(learn))-{'progress'}),
                loaders=[id(o) for o in learn.dls.loaders], cbs=[id(o) for o in learn.cbs], bs=[dl.bs for dl in learn.dls.loaders],
                grads=[p.grad is None or not p.grad.any().item() for p in learn.model.parameters()],
                hooks=[len(p._backward_hooks or {}) for p in learn.model.parameters()])

real = StepTimes.budget,StepTimes.slack,StepTimes.part

def find(rank, lr=0.05, kw=None, cbs=(), first=0, after=1, plain=False, rng=0, thrifty=False, **case):
    "`bs_find` and a fit after it"
    import matplotlib.pyplot as plt
    StepTimer.patience,StepTimer.most = 1.,2 # In this process; what steps take does not matter
    StepTimes.budget,StepTimes.slack,StepTimes.part = real if thrifty else (math.inf,)*3
    set_seed(rng)
    learn = find_learner(cbs=[f() for f in cbs], **case)
    res = {}
    with learn.distrib_ctx(cpu=True, sync_bn=False):
        if first: fit(learn, first, 0.02)
        n_kept = [len(cb.accelerator._models) for cb in learn.cbs if hasattr(cb, 'accelerator')]
        before = everything(learn)
        if not plain:
            plan = learn.bs_find(lr, **dict(dict(num_it=140), **(kw or {}))) # No more than 30 windows take
            t,m,d = plan.facts.today,plan.facts.measured,plan.facts.device
            res = dict(noise_scale=plan.noise_scale, ci=plan.ci, times=d.times, bs=plan.bs, repr=repr(plan), df=plan.df, n_windows=m.n_windows, bs_now=t.bs,
                       micro_now=t.micro_bs, n_train=t.n_train, n_passes=m.n_passes, n_seen=m.n_seen, max_bs=d.max_bs, base_lr=plan.lr,
                       loss_rose=m.loss_rose, valid_time=d.valid_time, trial=plan.facts.trial, epoch_start=d.epoch_start,
                       failed=d.failed)
        changed = changes(before, everything(learn))
        kept = [len(cb.accelerator._models) for cb in learn.cbs if hasattr(cb, 'accelerator')]
        if after: fit(learn, after, 0.05)
    return res,dict(changed=changed, kept=kept==n_kept, figures=len(plt.get_fignums()), after=flat(learn).numpy(), model=type(learn.model).__name__)

class NoEights(Callback):
    "Rank 1 cannot train on 8 items at a time"
    def before_batch(self):
        if rank_distrib()==1 and len(self.x)==8: raise ValueError('no eights')

def accum3(): return GradAccum(3)
def accum1(): return GradAccum(1)
def scaled(): return ScaledLR(8, linear_scaling)

def find_all(rank, cases): return [find(rank, **case) for case in cases]

finds = {'plain': dict(), 'accum': dict(cbs=(accum3,), first=1), 'scaled': dict(cbs=(accum1,scaled), n=90),
         'still': dict(kind='tokens', lr=0., n=91, kw=dict(max_bs=4, show_plot=False)),
         'no eights': dict(cbs=(NoEights,), n=90),
         'thrifty': dict(thrifty=True, n=200, kw=dict(show_plot=False, n_batch=4)), 'accum, none': dict(cbs=(accum3,), first=1, plain=True),
         'tried': dict(kw=dict(num_it=None, n_epoch=100, step_times={4: 0.01, 8: 0.01, 16: 0.01}, show_plot=False))}

@cache
def all_found(world):
    names = [nm for nm in finds if (nm=='plain')==(world==3)]
    return dict(zip(names, zip(*on_ranks(find_all, world, [finds[nm] for nm in names]))))

@pytest.mark.parametrize('name,world', [('plain',3), *((nm,2) for nm in ('accum','scaled','still','thrifty','no eights'))])
def test_one_plan(name, world):
    "The same to the bit on every rank, and the learner as it was"
    ranks,case = all_found(world)[name],finds[name]
    for plan,left in ranks:
        for k,v in plan.items():
            if k=='df': pd.testing.assert_frame_equal(v, ranks[0][0]['df'], check_exact=True)
            else: assert repr(v)==repr(ranks[0][0][k])
        assert left['changed']==[]
        assert left['kept']
        assert left['model']!='DistributedDataParallel'
        assert np.array_equal(left['after'], ranks[0][1]['after'])
    plan = ranks[0][0]
    assert len(plan['times'])>=1
    assert all(t>0 for o in plan['times'] for t in o)
    assert len(plan['df'])>=1
    k,micro = 3 if name=='accum' else 1,min(case.get('bs', 4), math.ceil(case.get('n', 96)/world))
    assert plan['micro_now']==micro
    assert plan['bs_now']==min(micro*k*world, case.get('n', 96))
    assert plan['n_train']==case.get('n', 96)
    if name=='accum': assert plan['base_lr']==0.05
    if name=='no eights':
        assert plan['failed'][0][0]==8
        assert 'no eights' in plan['failed'][0][1]
        assert 8 not in [o for o,*_ in plan['times']]
    df = plan['df']
    if name=='still': assert df.step.eq(0).all()
    else: assert df.pct.is_monotonic_increasing and df.pct.iloc[-1]>0.98 and plan['n_windows']>=(30 if name!='thrifty' else 20)

def test_one_plan_by_short_trainings():
    "Which all ranks train together; nobody can tell afterwards"
    ranks = all_found(2)['tried']
    for plan,left in ranks:
        assert repr(plan)==repr(ranks[0][0])
        assert left['changed']==[]
        assert left['kept']
        assert np.array_equal(left['after'], ranks[0][1]['after'])
    plan = ranks[0][0]
    assert plan['df'] is None
    assert plan['bs_now']==8
    assert not plan['loss_rose']
    assert plan['trial'].is_known or plan['trial'].got_nowhere

def test_figure_on_rank_0_only():
    (_,first),(_,second) = all_found(2)['accum']
    assert first['figures']
    assert not second['figures']

def test_training_after_it_is_that_without_it():
    assert np.array_equal(all_found(2)['accum, none'][0][1]['after'], all_found(2)['accum'][0][1]['after'])

# Failures

def failing(rank, event, at=None, finder=False, on=(1,)):
    "What is left of a fit or of `bs_find` that fails at the first `event`, or in micro-batch `at`, on the ranks `on`"
    fail = [RaiseAt(event, KeyError, at, order=70)] if rank in on else []
    learn = quiet_learner(loaders(regression(96), 8, valid=regression(4)), mlp(), cbs=[*fail, accum3()])
    model,dls,text = learn.model,list(learn.dls.loaders),'no error'
    before = everything(learn)
    try:
        with learn.distrib_ctx(cpu=True, sync_bn=False): learn.bs_find(0.05, show_plot=False, max_bs=8) if finder else learn.fit(2, 0.05)
    except BaseException as e: text = f'{type(e).__name__}: {e}'
    now = everything(learn)
    return dict(text=text, model=learn.model is model, dls=all(a is b for a,b in zip(learn.dls.loaders, dls)), grads=all(now['grads']), hooks=now['hooks'],
                own=[k for k in vars(learn) if k in ('one_batch','_do_epoch_train','_with_events')], changed=[o for o in changes(before, now) if o!='cbs'])

@pytest.mark.parametrize('event,at,finder', [('after_backward',1,False), ('after_pred',1,True)])
def test_one_fails(event, at, finder):
    "It ends with its own error and its learner as it was; the others end when its process does, as they wait for it"
    other,failed = results(start(failing, 2, event, at, finder, linger=False), errors=True)
    assert 'the one' in failed['text']
    assert failed['model']
    assert failed['dls']
    assert failed['own']==[]
    assert failed['grads']
    assert not any(failed['hooks'])
    if finder: assert failed['changed']==[]
    assert isinstance(other, str) or other['text']!='no error'

def test_the_same_error_on_all():
    "Each raises its own, and the group can be used again"
    ranks = results(start(again, 3), errors=True)
    for o in ranks:
        assert 'the one' in o['text']
        assert o['model']
        assert o['dls']
        assert o['own']==[]
        assert o['grads']
        assert np.array_equal(o['then'], ranks[0]['then'])
        assert o['summed']==3
        assert 'the one' in o['twice']

def again(rank):
    res = failing(rank, 'before_step', None, True, (0,1,2))
    res['twice'] = failing(rank, 'after_batch', 1, False, (0,1,2))['text']
    learn = quiet_learner(loaders(regression(48), 4), mlp(), cbs=GradAccum(2))
    with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(1, 0.05)
    return dict(res, then=flat(learn).numpy(), summed=over_ranks(torch.tensor(1.)).item())

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
    return dict(facts(learn, watch), struck=s.struck, n_parts=accum.n_parts, n_lost=accum.n_lost, noise=learn.noise_scale.noise_scale, pickled=True,
                syncs=any(watch.syncs))

def split_all(rank): return [(split_fit(rank, 'raise', s, lost, **case),split_fit(rank, 'split', s, lost, **case)) for case,s,lost in splits.values()]
@cache
def run_splits(): return dict(zip(splits, zip(*on_ranks(split_all, 2))))

@pytest.mark.parametrize('name', splits)
def test_all_ranks_lose_the_same_window(name):
    "Where memory runs out on one rank, none hangs, and weights and rates are those of a fit in which the steps of these windows were cancelled"
    plain,split = zip(*run_splits()[name])
    lost = splits[name][-1]
    assert_sound(split)
    assert split[1]['struck']
    assert not split[0]['syncs']
    assert split[0]['n_parts']==split[1]['n_parts']==2**len(lost)
    assert split[0]['n_lost']==split[1]['n_lost']==len(lost)
    assert_close(split[0]['flat'], plain[0]['flat'])
    assert split[0]['lrs']==[o for i,o in enumerate(plain[0]['lrs']) if i not in lost]
    np.testing.assert_equal(split[0]['noise'], split[1]['noise'])

def split_bn(rank):
    learn = quiet_learner(loaders(regression(48), 4), task('bn', 1)[1], cbs=GradAccum(2, on_oom='split'))
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
    world = n_processes()
    learn = quiet_learner(loaders(regression(96), 4), mlp(), cbs=[GradAccum(bs=4*3*world), ScaledLR(8, linear_scaling, warmup_epochs=0)])
    with learn.distrib_ctx(cpu=True, sync_bn=False):
        with learn.removed_cbs(learn.grad_accum), learn.added_cbs(GradAccum(bs=4*3*world-1)):
            with pytest.raises(ValueError, match=f'4 items on each of {world} ranks: take bs={4*2*world} or bs={4*3*world},'): learn.fit(1, 0.01)
        bs = learn.batch_size
        learn.fit(1, 0.01)
    return bs,learn.scaled_lr.factor,learn.scaled_lr.bs,flat(learn).numpy()

def test_scaled_lr_reads_the_world(world=2):
    "And so does `GradAccum(bs=...)`"
    for bs,factor,own,params in on_ranks(scaled_fit, world):
        assert bs==own==4*3*world
        assert factor==4*3*world/8
        one,_ = in_one(n=96, bs=4, world=world, k=3, epochs=1, lr=0.01*factor, opt='mom')
        assert_close(params, flat(one).numpy())

# One shuffle per epoch

class Logged:
    "Keeps the order in which its items are taken"
    def __init__(self, n): self.items,self.seen = regression(n),[]
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        self.seen.append(i)
        return self.items[i]

def taken(rank, n, seed):
    items = Logged(n)
    set_seed(seed+rank) # fastai takes the order of rank 0
    learn = quiet_learner(loaders(items, 4, valid=regression(2), shuffle=True), mlp(), cbs=[GradAccum(2)])
    with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(3, 0.05)
    return np.array(items.seen).reshape(3, -1).tolist()

def taken_thrice(rank, n): return [taken(rank, n, seed) for seed in (0,0,1)]

def test_one_shuffle_per_epoch(n=41):
    ranks,again,other = map(list, zip(*on_ranks(taken_thrice, 2, n)))
    assert ranks==again
    assert ranks!=other
    orders = [sum((o[e] for o in ranks), []) for e in range(3)]
    for o in orders:
        assert sorted(o[:n])==list(range(n))
        assert o[n:]==o[:len(o)-n] # The padding
    assert orders[0]!=orders[1]!=orders[2]!=orders[0]

# Processes without a common training

def apart(rank):
    own = fastai.torch_core.maybe_gather
    learn = quiet_learner(loaders(regression(40+20*rank), 4), mlp(), cbs=[GradAccum(2+rank), NoiseScale(), ScaledLR(4, warmup_epochs=0)])
    learn.fit(2, 0.05)
    assert '_with_events' not in vars(learn)
    assert fastai.torch_core.maybe_gather is own
    plan = quiet_learner(loaders(regression(96), 4), mlp()).bs_find(0.05, show_plot=False) if rank else None
    return flat(learn).numpy(),trains_together(learn),len(learn.noise_scale.df),plan is not None,learn.scaled_lr.bs,list(learn.recorder.values[-1])

def test_processes_apart():
    "Each trains as if alone, with another number of batches and of micro-batches; its losses are its own"
    for r,(params,said,n,_,bs,row) in enumerate(results(start(apart, 2, linger=False))):
        learn = quiet_learner(loaders(regression(40+20*r), 4), mlp(), cbs=[GradAccum(2+r), NoiseScale(), ScaledLR(4, warmup_epochs=0)])
        learn.fit(2, 0.05)
        assert np.array_equal(params, flat(learn).numpy())
        assert not said
        assert n==len(learn.noise_scale.df)
        assert bs==4*(2+r)
        assert row==list(learn.recorder.values[-1])

def own_again(_):
    "What is fastai's own before a fit with our callback, in it, after it, and in a fit without"
    import fastai.torch_core
    def now(): return fastai.torch_core.maybe_gather,DistributedDL._broadcast
    own,seen = now(),[]
    class Look(Callback):
        def after_batch(self): seen.append([a is b for a,b in zip(now(), own)])
    learn,texts = quiet_learner(loaders(regression(16), 4), mlp(), cbs=Look()),[]
    for cbs in (GradAccum(2),[GradAccum(2),RaiseAt('after_batch', KeyError, 1, order=70)],()):
        try:
            with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(1, 0.05, cbs=cbs)
        except Exception as e: texts.append(str(e))
        assert now()==own
    return seen,texts

def test_a_fit_without_our_callbacks_is_fastais_own():
    "On CPU ranks with its own error"
    for seen,(mine,fastais) in on_ranks(own_again, 2):
        assert seen
        assert not any(a or b for a,b in seen)
        assert 'the one' in mine
        assert 'NVIDIA' in fastais
