"On a second device: all that runs on the CPU runs there too, comes to the same numbers, waits for it no more than it must and puts it back as it was"
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import SchedExp
from fastai.optimizer import Adam
from fastai_bs.all import BatchSchedule, bn_to_gn, GradAccum, NoiseScale, ScaledLR, sqrt_scaling, unchanged
from fastai_bs.memory import max_bs
from fastcore.foundation import L
from fastai_bs.accumulate.gradients import no_autocast
from fastai_bs.learner.ranks import n_processes, over_ranks
from fastai_bs.finder.timing import StepTimer, StepTimes
from helpers import RaiseAt, changes, flat, left_behind, loaders, mlp, momentum_sgd, picture, quiet_learner, regression, set_seed, token_model, tokens
import acc_device
from acc_device import AccTensor, on_acc, waits

pytestmark = pytest.mark.xdist_group('ranks') # They share a process that has all imports
if hasattr(torch, 'acc'): StepTimer.most,StepTimes.n_rounds = 2,1 # In that other process: it does not matter what steps take

# The device itself

@on_acc
def test_devices_are_not_mixed():
    there,here = torch.ones(3, device='acc'),torch.ones(3)
    for f in (lambda: there+here, lambda: here.add_(there), lambda: torch.stack([there.sum(),here.sum()]), lambda: nn.Linear(3,2)(there),
              lambda: torch.cat([there,here]), lambda: torch._foreach_div([there], here.sum())):
        with pytest.raises(RuntimeError, match='same device'): f()
    assert (there+torch.tensor(2.)).tolist()==[3.]*3  # Numbers go with it, as on a GPU
    assert torch.where(there>0, there, 0.).device.type=='acc'

@on_acc
def test_waits_are_counted():
    x = torch.ones(3, device='acc')
    for n,f in [(0, lambda: x.sum()*2), (0, lambda: x.to('acc')), (0, lambda: x.double()), (0, lambda: x[:2]), (1, lambda: x.sum().item()),
                (1, lambda: bool(x.any())), (1, x.tolist), (1, x.cpu), (1, lambda: x[x>0]), (1, lambda: torch.tensor(3., device='acc')),
                (1, lambda: torch.ones(2).to('acc')), (1, lambda: torch.zeros(3).copy_(x))]:
        waits.clear()
        f()
        assert waits.total()==n, (n, waits)

def test_other_tests_do_not_see_it():
    assert not hasattr(torch, 'acc')
    assert torch._C._get_privateuse1_backend_name()!='acc'

# Tasks

class Dropped(nn.Sequential):
    "Draws random numbers on its device, and has buffers there"
    def __init__(self, p=0.3, n_out=2): super().__init__(nn.Linear(5,8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(p), nn.Linear(8,n_out))

def correlation(pred, targ): return -(pred*targ).mean() # A loss of which nothing is known

none_counts = lambda i: 0 if i%12<4 else 4 # noqa: E731 In one micro-batch of three

def task(kind, n):
    if kind=='tokens': return tokens(n, 0.3, kept=none_counts),token_model(),nn.CrossEntropyLoss()
    if kind=='weights': return tokens(n, 0.3, kept=none_counts),token_model(),nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 7).double())
    if kind=='sum': return tokens(n, 0.3, kept=none_counts),token_model(),nn.CrossEntropyLoss(reduction='sum')
    if kind=='unknown': return regression(n),mlp(),correlation
    if kind=='single': return regression(n, dtype=torch.float32),mlp(dtype=torch.float32),nn.MSELoss()
    if kind in ('dropout','bn'): return regression(n, dtype=torch.float32),Dropped(0.3 if kind=='dropout' else 0.),nn.MSELoss()
    return regression(n),mlp(),nn.MSELoss()

def learner(cbs=(), kind='tokens', there=True, n=28, bs=4, opt_func=momentum_sgd, **kwargs):
    set_seed(0)
    items,model,loss_func = task(kind, n)
    dls = loaders(items, bs, shuffle=True, drop_last=True)
    dls.device = acc_device.device if there else torch.device('cpu')
    learn = quiet_learner(dls, model.to(dls.device), loss_func, opt_func, **kwargs)
    learn.dls.train.rng.seed(1)
    for dl in dls.loaders: dl.n_inp = 1
    return learn.add_cbs(cbs)

def numbers(learn):
    "What a training comes to"
    rec = learn.recorder
    return [flat(learn).cpu().numpy(), *(b.cpu().numpy() for b in learn.model.buffers()), np.array([float(o) for o in rec.losses]), np.array(rec.lrs),
            np.array([o for row in rec.values for o in row], dtype=float)]

# It comes to the same numbers

kept = lambda learn: (learn.y!=-100).sum() # noqa: E731
ways = {'GradAccum': lambda: GradAccum(3), 'a count or a number': lambda: GradAccum(3, count=lambda o: int(kept(o)) if o.iter%2 else kept(o)),
        'split': lambda: GradAccum(3, on_oom='split'), 'NoiseScale': lambda: NoiseScale(every=2, n_micro=2),
        'of windows': lambda: [GradAccum(3), NoiseScale()],
        'of progress': lambda: BatchSchedule(SchedExp(4, 24), max_micro_bs=8)}
fits = [*((nm,'tokens') for nm in ways), ('split','bn'), ('NoiseScale','bn'), ('of windows','weights'), ('GradAccum','unknown')]

class Where(Callback):
    "After Recorder has seen the loss, it is still where it was"
    order = 60
    def after_batch(self): assert self.loss.device==self.dls.device

def trained(nm, kind, there):
    learn = learner([*L(ways[nm]()), Where()], kind, there)
    learn.fit_one_cycle(2, 0.05)
    return learn

@pytest.mark.parametrize('nm,kind', fits)
@pytest.mark.filterwarnings('ignore:Nothing tells', 'ignore:The loss correlation')
@on_acc
def test_a_training_comes_to_the_same(nm, kind):
    here,there = (trained(nm, kind, o) for o in (False,True))
    assert all(isinstance(p, AccTensor) for p in there.model.parameters())
    for a,b in zip(numbers(here), numbers(there)): np.testing.assert_allclose(a, b, rtol=1e-6)
    if hasattr(there, 'noise_scale'): np.testing.assert_allclose(here.noise_scale.moments, there.noise_scale.moments, rtol=1e-4 if kind=='bn' else 1e-9)

def plan_of(learn): return learn.bs_find(0.01, num_it=60, n_batch=3, show_plot=False)

def found(learn):
    plan = plan_of(learn)
    return plan.noise_scale,*plan.ci,plan.micro_bs>0,len(plan.df),plan.df.g_sq.sum()

def oom_beyond(most, learn):
    "The model runs out of memory with more than `most` items"
    def _strike(m, x):
        if len(x[0])>most: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')
    learn.model[1].register_forward_pre_hook(_strike)

def in_pieces(learn):
    oom_beyond(2, learn)
    learn.add_cb(GradAccum(3, on_oom='split'))
    with pytest.warns(UserWarning, match='Out of memory with 4 items'): learn.fit(2, 0.05)
    return learn.grad_accum.n_parts,*numbers(learn)

def largest(learn):
    oom_beyond(11, learn)
    return [learn.max_bs_find(max_bs=24)]

def reported(learn):
    rows = learn.memory_report()
    return [*rows.bytes[['parameters','gradients','optimizer state','buffers']],rows.bytes['activations']>0]

def planned_for(learn): return learn.bs_find(0.05, n_epoch=6, noise_scale=100, step_times={4: 0.1, 8: 0.2}, show_plot=False).at(8)

def verified(learn):
    return learn.bs_verify(planned_for(learn), n_runs=1).table.valid_loss

def without_batchnorm(learn):
    bn_to_gn(learn.model)
    learn.create_opt()
    learn.fit(1, 0.05, cbs=GradAccum(3))
    return numbers(learn)

entries = {'bs_find': found, 'check_accum': lambda learn: [learn.check_accum().error<1e-9],
           'max_bs_find': largest, 'on_oom=split': in_pieces,
           'memory_report': reported, 'bs_verify': verified, 'bn_to_gn': without_batchnorm}

@pytest.mark.parametrize('nm', entries)
@on_acc
def test_an_entry_comes_to_the_same(nm):
    here,there = (entries[nm](learner(kind='bn' if nm in ('bn_to_gn','memory_report') else 'tokens', there=o)) for o in (False,True))
    for a,b in zip(here, there): np.testing.assert_allclose(a, b, rtol=1e-6)

@on_acc
def test_memory_of_the_machine_is_no_limit_of_the_device():
    with pytest.MonkeyPatch.context() as m:
        m.setattr(max_bs, '_memory_of_machine', lambda: 1)
        assert learner(kind='mse').max_bs_find(max_bs=6)==6

# It waits for the device no more than it must

def n_waits(cbs, kind, n=48, bs=2, n_epoch=1, **kwargs):
    "Of a training, by operation and line"
    learn = learner(cbs, kind, n=n, bs=bs, **kwargs)
    waits.clear()
    learn.fit(n_epoch, 0.01)
    return Counter(waits)

def assert_adds(most, cbs, kind, **kwargs):
    "A training waits at most so many times more than without `cbs`; else the lines that do are in the error"
    bare,now = n_waits((), kind, **kwargs),n_waits(cbs, kind, **kwargs)
    assert now.total()-bare.total()<=most, f"{now.total()-bare.total()} waits more, {most} allowed: {(now-bare).most_common()}"

@pytest.mark.parametrize('kind', ['tokens','weights','sum'])
@on_acc
def test_none_per_micro_batch_and_one_per_window(kind):
    "Three windows of eight micro-batches; `GradAccum` alone waits for none of them"
    assert_adds(0, GradAccum(8), kind)
    assert_adds(3, [GradAccum(8), NoiseScale(), ScaledLR(4, sqrt_scaling)], kind)

counts = {'none': None, 'there': kept, 'here': lambda learn: torch.tensor(8.)}

@pytest.mark.parametrize('nm,kind', zip(counts, ('unknown','tokens','mse')))
@pytest.mark.filterwarnings('ignore:Nothing tells', 'ignore:The loss')
@on_acc
def test_a_loss_of_which_nothing_is_known_is_asked_now_and_then(nm, kind):
    "In the first window and the second"
    assert_adds(2, GradAccum(8, count=counts[nm]), kind)

@on_acc
def test_three_per_measurement_of_parts(kind='tokens'):
    cb = NoiseScale(every=2, n_micro=2)
    assert_adds(3*6, cb, kind, bs=4)
    assert len(cb.df)>=4

@on_acc
def test_step_times_are_those_of_the_device():
    learn = learner(kind='mse')
    waits.clear()
    learn.fit(10_000, 0., cbs=StepTimer(4, 2))
    assert sum(n for (what,_),n in waits.items() if what=='synchronize')>=2

# It is left as it was

def all_of(learn): return {**picture(learn), 'device': torch.acc.get_rng_state().tolist()}
def assert_unchanged(learn, before): assert not changes(before, all_of(learn)), changes(before, all_of(learn))

interrupted = {'bs_find': plan_of, 'max_bs_find': lambda learn: learn.max_bs_find(max_bs=8), 'check_accum': lambda learn: learn.check_accum(),
          'bs_verify': lambda learn: learn.bs_verify(planned_for(learn), n_runs=1)}

@pytest.mark.parametrize('nm,event', zip(interrupted, ('before_backward','after_pred','after_backward','after_step')))
@on_acc
def test_a_trial_leaves_it_as_it_was(nm, event):
    "Interrupted, and at its end"
    learn = learner(RaiseAt(event, KeyboardInterrupt, times=1, order=60), kind='dropout', opt_func=Adam)
    learn.fit(0)
    before = all_of(learn)
    with pytest.raises(KeyboardInterrupt): interrupted[nm](learn)
    learn.cbs[-1].raised = 0
    assert_unchanged(learn, before)
    learn.remove_cb(learn.cbs[-1])
    before = all_of(learn)
    if nm!='bs_verify': interrupted[nm](learn) # It takes the longest
    assert_unchanged(learn, before)

observers = {'NoiseScale of parts': (lambda: NoiseScale(every=2, n_micro=2),lambda: []), 'of windows': (lambda: [GradAccum(3), NoiseScale()],
    lambda: GradAccum(3)), 'at 1': (lambda: [GradAccum(1), ScaledLR(4), NoiseScale(every=2, n_micro=2)],lambda: [])}

@pytest.mark.parametrize('nm,precision', [*((nm,'single') for nm in observers), ('NoiseScale of parts','bf16')])
@on_acc
def test_an_observer_changes_no_bit(nm, precision):
    res = []
    for make in observers[nm]:
        learn = learner(make(), kind='dropout', opt_func=Adam)
        if precision=='bf16': learn.add_cb(Mixed('bf16'))
        learn.fit(2, 0.01)
        res.append({**left_behind(learn), 'device': torch.acc.get_rng_state().tolist()})
    assert not changes(*res), changes(*res)

# Half precision

class Mixed(MixedPrecision):
    "Of this device"
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast('acc', dtype=self.autocast.fast_dtype)
        self.learn.scaler = GradScaler('acc', **self.kwargs)

@on_acc
def test_autocast_is_left_and_put_back():
    learn = learner(kind='single')
    with unchanged(learn): torch.set_autocast_enabled('acc', True) # As a forward pass that failed leaves it
    assert not torch.is_autocast_enabled('acc')
    with torch.autocast('acc', dtype=torch.bfloat16):
        with no_autocast(): assert not torch.is_autocast_enabled('acc')
        assert torch.is_autocast_enabled('acc')

def half(precision, kwargs, cbs, bs):
    learn = learner([*cbs, Mixed(precision, **kwargs)], kind='single', n=36, bs=bs)
    seen,scales = set(),[]
    learn.model[0].register_forward_hook(lambda m,x,out: seen.add(out.dtype))
    learn.add_cb(Callback(after_step=lambda cb: scales.append(learn.scaler.get_scale())))
    learn.fit(2, 0.05)
    return learn,seen,scales

@pytest.mark.parametrize('precision,kwargs', [('bf16',{}),('fp16',dict(init_scale=2.**18))], ids=['bf16','fp16 overflows'])
@on_acc
def test_half_precision_follows_the_large_batch(precision, kwargs):
    (small,seen,scales),(large,*same) = half(precision, kwargs, [GradAccum(3), NoiseScale()], 4),half(precision, kwargs, [], 12)
    assert seen=={torch.bfloat16 if precision=='bf16' else torch.float16}
    if kwargs.get('init_scale')==2.**18: # It is skipped until the scale is small enough; smaller micro-batches have larger gradients
        assert scales[-1]<scales[0]
        assert torch.isfinite(flat(small)).all()
        assert small.noise_scale.n_dropped>0
        return
    assert [seen,scales]==same
    np.testing.assert_allclose(flat(small).cpu(), flat(large).cpu(), rtol=0.02, atol=0.002)
    full = learner([GradAccum(3), NoiseScale()], kind='single', n=36)
    full.fit(2, 0.05)
    np.testing.assert_allclose(small.noise_scale.moments, full.noise_scale.moments, rtol=0.1)

# Several ranks

class AsDDP(DistributedDataParallel):
    "Without a reducer, which is for devices with a memory of their own"
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module,self.require_backward_grad_sync = module,True
    def forward(self, *args): return self.module(*args)

class Reduce(Callback):
    "What its reducer does after a backward pass that synchronises"
    order = -100
    def after_backward(self):
        if not self.learn.model.require_backward_grad_sync: return
        for p in self.learn.model.parameters(): p.grad.copy_(over_ranks(p.grad)/n_processes())

def rank_learner(kind, rank, world, cbs):
    "With this rank's share of the items"
    items,model,loss_func = task(kind, 48)
    dls = loaders(items[rank*48//world:(rank+1)*48//world], 4, drop_last=True)
    dls.device = acc_device.device
    learn = quiet_learner(dls, model.to(dls.device), loss_func)
    for dl in dls.loaders: dl.n_inp = 1
    if world>1:
        learn.model = AsDDP(learn.model)
        learn.add_cb(Reduce())
    return learn.add_cbs(cbs)

@pytest.mark.parametrize('kind', ['tokens','mse'])
@partial(on_acc, world=2)
def test_two_ranks_follow_the_large_batch(kind):
    "A window is two micro-batches on each of them"
    import fastai_bs.learner.loop as loop
    rank = torch.distributed.get_rank()
    loop._gather = lambda x, axis=0: over_ranks(x)/n_processes() # gloo knows tensors of the CPU only
    learn = rank_learner(kind, rank, 2, [GradAccum(2), NoiseScale()])
    learn.fit(2, 0.05)

    items,model,loss_func = task(kind, 48)
    order = [i for w in range(3) for r in range(2) for i in range(24*r+8*w, 24*r+8*w+8)]
    one = quiet_learner(loaders([items[i] for i in order], 4), model, loss_func, cbs=[GradAccum(4), NoiseScale()])
    one.fit(2, 0.05)
    np.testing.assert_allclose(flat(learn).cpu(), flat(one), rtol=1e-9)
    np.testing.assert_allclose(learn.noise_scale.moments, one.noise_scale.moments, rtol=1e-9)
    assert np.isfinite(torch.stack(learn.recorder.losses)).all()
