"`learn.bs_find`: what a step costs on this device, where memory ends, and that timing leaves no trace either"
import gc
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, Dataset
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import Adam, SGD
from fastai.torch_core import params

from fastai_bs.finder import bs_find as finder
from fastai_bs.finder import timing
from fastai_bs.finder.advice import cautions
from fastai_bs.all import GradAccum, NoiseScale, ScaledLR, sqrt_scaling
from fastai_bs.finder.options import today_as_is
from fastai_bs.finder.timing import StepTimer, StepTimes, micro_batch_sizes, time_steps
from fastai_bs.learner.mock import mock_training
from helpers import changes, loaders, mlp, pairwise, picture, quiet_learner, regression

inf,nan = math.inf,math.nan

pytestmark = pytest.mark.usefixtures('short')

@pytest.fixture(autouse=True)
def rounds(short, monkeypatch): monkeypatch.setattr(StepTimes, 'n_rounds', 3) # As ever: here they matter

class Clock:
    "Stands in for `time.perf_counter`: time passes only where it is told to"
    def __init__(self): self.now = 100.
    def __call__(self): return self.now
    def spend(self, seconds): self.now += seconds

@pytest.fixture
def clock(monkeypatch):
    c = Clock()
    monkeypatch.setattr(timing.time, 'perf_counter', c)
    for nm,v in (('patience',2.),('most',20)): monkeypatch.setattr(StepTimer, nm, v)
    return c

class Slow(nn.Module):
    "A forward pass takes `a + c*bs` seconds, in training"
    def __init__(self, clock, a=0., c=0.001):
        super().__init__()
        self.lin,self.clock,self.a,self.c = nn.Linear(5,2),[clock],a,c
    def forward(self, x):
        if torch.is_grad_enabled(): self.clock[0].spend(self.a+self.c*len(x))
        return self.lin(x)

def slow_learner(clock, n=200, bs=4, opt_func=SGD, dls=None, cbs=None, a=0., c=0.001):
    torch.manual_seed(0)
    return quiet_learner(dls or loaders(regression(n, dtype=torch.float32), bs), Slow(clock, a, c), opt_func=opt_func, cbs=cbs)

def learner(n=200, bs=4, model=None, dls=None, **kwargs):
    return quiet_learner(dls or loaders(regression(n, dtype=torch.float32), bs, shuffle=True), model or mlp(dtype=torch.float32), **kwargs)

def find(learn, **kwargs): return learn.bs_find(**{**dict(lr=0.01, num_it=24, n_batch=2, show_plot=False), **kwargs})

def sizes(plan): return [m for m,*_ in plan.facts.device.times]

# Which sizes

@pytest.mark.parametrize('micro_bs,noise_scale,most,res', [
    (64,256.,inf,[16,32,64,128,256,512,1024]), (64,nan,inf,[16,32,64,128,256]), (64,0.,inf,[2,4,8,16,32,64,128,256]),
    (64,512.,inf,[16,32,64,128,256,512,1024,2048]), (64,256.,300,[16,32,64,128,256]), (64,256.,10,[16,32,64]), (1,1000.,10,[1,2,4,8]), (3,nan,inf,[3,6,12]),
    (100,40.,inf,[3,6,12,25,50,100,200,400]), (7,nan,27,[3,7,14]), (16,64.,inf,[4,8,16,32,64,128,256]), (16,63.,inf,[4,8,16,32,64,128])])
def test_micro_batch_sizes(micro_bs, noise_scale, most, res): assert micro_batch_sizes(micro_bs, noise_scale, most)==res

def test_two_batches_of_each_size_that_is_timed_fit_in_an_epoch(): assert sizes(find(learner(64, 16), max_bs=10_000))[-1]==32

def test_a_step_that_takes_longer_than_patience_is_not_tried(clock):
    "As far as one can tell from the largest size that ran"
    learn = slow_learner(clock, n=2000, bs=100, c=0.003)
    with mock_training(learn): times = time_steps(learn, [100,200,400,800], 100, 10_000.) # 0.3, 0.6, 1.2 and 2.4 seconds
    assert [m for m,*_ in times.fastest()]==[100,200,400]
    assert times.too_large is None
    assert 100 in sizes(find(slow_learner(clock, n=600, bs=100, c=0.03))) # Today's is timed however long it takes

# The timer

def near(step, once=0.):
    "Seconds of a step, and of them those that are spent once per step"
    return pytest.approx(step),pytest.approx(once, abs=1e-12)

def timed(learn, bs, n_epoch=10_000, cbs=(), n_steps=5):
    timer = StepTimer(bs, n_steps)
    learn.fit(n_epoch, 0., cbs=[timer,*cbs])
    return timer

@pytest.mark.parametrize('n_steps', [1,12])
def test_a_step_is_timed_from_end_to_end(clock, n_steps):
    "As many as asked for; the first is where the second begins"
    timer = timed(slow_learner(clock, a=0.01, c=0.005), 4, n_steps=n_steps)
    assert timer.n_seen==n_steps+1
    assert timer.times==[near(0.03)]*n_steps
    assert timer.median==near(0.03)

class Spend(Callback):
    "Takes its time in one event, in micro-batches of the training alone"
    def __init__(self, clock, event, seconds, order=50):
        super().__init__(**{event: self._spend})
        self.clock,self.seconds,self.order = [clock],seconds,order
    def _spend(self, *args): self.clock[0].spend(self.seconds)

@pytest.mark.parametrize('event,order,opt', [
    ('before_batch',-50,0), ('before_step',-50,1), ('after_step',50,1), ('after_batch',-50,0)])
def test_the_time_that_callbacks_take_counts(clock, event, order, opt):
    "That of the events around the step as the optimizer's part"
    assert timed(slow_learner(clock, cbs=Spend(clock, event, 0.007, order)), 4).median==near(0.011, 0.007*opt)

class SlowItems(Dataset):
    def __init__(self, clock, items): self.clock,self.items = clock,items
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        self.clock.spend(0.003)
        return self.items[i]

@pytest.mark.parametrize('cls,kw', [(DataLoader,'bs'), (TorchDataLoader,'batch_size')])
def test_the_time_that_the_loader_takes_counts(clock, cls, kw):
    dl = cls(SlowItems(clock, regression(80, dtype=torch.float32)), **{kw: 4}, num_workers=0)
    timer = timed(slow_learner(clock, dls=DataLoaders(dl, dl)), 4)
    assert timer.median==near(0.016)
    assert timer.waits==pytest.approx([0.012]*5)

# What the plan holds of it

def test_what_the_loader_takes_is_said_first(clock):
    "12 of 16 ms with today's size, whatever other sizes take of it"
    dl = DataLoader(SlowItems(clock, regression(200, dtype=torch.float32)), bs=4, num_workers=0)
    plan = find(slow_learner(clock, dls=DataLoaders(dl, dl)), n_epoch=5, num_it=200)
    assert plan.facts.device.loading==pytest.approx(0.012)
    assert next(cautions(plan))=="The loader takes 75% of a step: a faster one saves time at any batch size (for files, more num_workers)."

class InFours:
    "Four workers make a batch each in 80 ms; there are `n` batches, and maybe more are declared"
    num_workers = 4
    def __init__(self, clock, n, declared): self.clock,self.n,self.declared = clock,n,declared
    def __len__(self): return self.declared
    def __iter__(self):
        for i in range(self.n):
            if i%4==0: self.clock.spend(0.08)
            yield i

@pytest.mark.parametrize('n,declared,secs', [(100,100,0.02), (6,6,0.02), (4,4,0.), (0,100,0.), (12,100,0.)])
def test_loader_time_by_workers(clock, n, declared, secs): assert timing.loader_time(InFours(clock, n, declared))==pytest.approx(secs)

@pytest.mark.parametrize('limit,now,part', [(0.02,0.02,0.8), (0.001,0.004,0.)])
def test_no_step_is_shorter_than_its_items_take_the_workers(clock, monkeypatch, limit, now, part):
    monkeypatch.setattr(finder, 'loader_time', lambda dl: limit)
    plan = find(slow_learner(clock), n_epoch=5)
    device = plan.facts.device
    assert today_as_is(plan.facts).step_time==pytest.approx(now)
    assert device.part_of_step(device.loading, 4)==pytest.approx(part)
    assert {o.bs: o.step_time for o in plan.options}[8]==pytest.approx(2*now)

class Frozen(Slow):
    "A step of the head alone takes a fifth of the time"
    def __init__(self, clock):
        super().__init__(clock, a=0.02, c=0.)
        self.head = nn.Linear(2, 2)
    def forward(self, x):
        res = self.head(super().forward(x))
        if not self.lin.weight.requires_grad: self.clock[0].spend(-0.016)
        return res

@pytest.mark.parametrize('limit,secs', [(0.,0.004),(0.006,0.006)])
def test_a_frozen_step_is_timed(clock, monkeypatch, limit, secs):
    "None is shorter than its items take the workers"
    monkeypatch.setattr(finder, 'loader_time', lambda dl: limit)
    learn = quiet_learner(loaders(regression(200, dtype=torch.float32), 4), Frozen(clock), splitter=lambda m: [params(m.lin),params(m.head)])
    plan = find(learn, n_epoch=4, how='fine_tune')
    assert plan.facts.device.frozen==pytest.approx(secs)
    assert plan.duration.today==pytest.approx((4+secs/0.02)*50*0.02)

@pytest.mark.parametrize('a,c', [(0.02,0.001), (0.0001,0.002)])
def test_step_times_of_a_device(clock, a, c):
    "A step of `a + c*bs` seconds, of which the optimizer takes 10 ms"
    plan = find(slow_learner(clock, a=a, c=c, cbs=Spend(clock, 'before_step', 0.01)), max_bs=32)
    assert {2,4,8,16}<=set(sizes(plan))
    for m,t,opt in plan.facts.device.times: assert (t,opt)==(pytest.approx(a+c*m+0.01),pytest.approx(0.01))

def test_the_fastest_round_of_a_size_counts(clock, monkeypatch):
    "A size that something else slowed down twice is not slow; the spread is how far the second fastest round is from the fastest, the median of the sizes"
    assert find(slow_learner(clock), max_bs=16).facts.device.spread==pytest.approx(0, abs=1e-9)
    learn,fit,seen = slow_learner(clock),finder.Learner.fit,[]
    def slow_twice(self, *args, **kwargs):
        seen.append(self.dls.train.bs)
        self.model.a = 0.008 if seen.count(seen[-1]) in (1,3) and seen[-1]>4 else 0. # Of 8 items twice the time, of 16 half as much more
        return fit(self, *args, **kwargs)
    monkeypatch.setattr(finder.Learner, 'fit', slow_twice)
    plan = find(learn, max_bs=16)
    assert plan.facts.device.times==tuple((bs,*near(0.001*bs)) for bs in (2,4,8,16))
    assert plan.facts.device.spread==pytest.approx(math.log(1.5)/2)
    assert plan.facts.device.timing_error==plan.facts.device.spread

# What timing may cost

class Tensors:
    "Batches of tensors, at once"
    def __init__(self, bs, n=40_000): self.bs,self.n,self.dataset = bs,n,range(n)
    def __len__(self): return -(-self.n//self.bs)
    def new(self, bs): return Tensors(bs, self.n)
    def __iter__(self):
        for i in range(0, self.n, self.bs): yield torch.zeros(min(self.bs, self.n-i), 5),torch.zeros(min(self.bs, self.n-i), 2)

real = dict(budget=StepTimes.budget, part=StepTimes.part, slack=StepTimes.slack) # `short` does without

@pytest.fixture
def thrifty(clock, monkeypatch):
    "As it is for those who use it; with patience for whatever a model takes"
    for nm,v in real.items(): monkeypatch.setattr(StepTimes, nm, v)
    monkeypatch.setattr(StepTimer, 'patience', 1e9)
    return clock

def visits(clock, micro_bs, noise_scale, a, c, busy=lambda seen: 1.):
    "Times steps that take `a + c*bs` seconds, in fits that take `busy` times as long: what is known, `(size, micro-batches)` of each fit, and seconds in all"
    dl,seen = Tensors(micro_bs),[]
    learn = slow_learner(clock, dls=DataLoaders(dl, dl), a=a, c=c)
    class Count(Callback):
        def before_fit(self):
            seen.append([self.dls.train.bs, 0])
            f = busy([m for m,_ in seen])
            self.learn.model.a,self.learn.model.c = f*a,f*c
        def before_batch(self): seen[-1][1] += 1
    learn.add_cb(Count())
    begin = clock.now
    with mock_training(learn): times = time_steps(learn, micro_batch_sizes(micro_bs, noise_scale, 20_000), micro_bs, noise_scale)
    return times,seen,clock.now-begin

devices = [(0.,0.001), (0.01,0.001), (0.1,0.001), (1.,0.)]

@pytest.mark.parametrize('micro_bs,noise_scale,device', pairwise([8,64], [0.,50.,5000.,nan], devices))
def test_timing_keeps_to_its_budget(thrifty, micro_bs, noise_scale, device):
    "Steps of a few hundred micro-batches at most, whatever the noise scale and the device"
    a,c = device
    times,seen,seconds = visits(thrifty, micro_bs, noise_scale, a, c)
    assert seconds<=190*(a+c*micro_bs) # 180, and a few for the second size, of which one cannot know beforehand
    for m,t,_ in times.fastest():
        assert t==pytest.approx(a+c*m)
        assert len(times.rounds[m])==3
    assert all(n>=2 for _,n in seen)
    assert len(seen)==3*len(times.rounds)
    if math.isnan(noise_scale): return
    def _best(sizes): return min((1+noise_scale/o)*(a+c*o) for o in sizes)
    assert _best(times.rounds)<=1.05*_best(micro_batch_sizes(micro_bs, noise_scale, 20_000)) # No size was left out that would be clearly faster

def test_a_size_that_failed_is_not_tried_again(thrifty):
    "Nor does it keep larger ones from being tried"
    dl = Tensors(8)
    learn = slow_learner(thrifty, dls=DataLoaders(dl, dl), a=0.1)
    tried = []
    class Fails(Callback):
        def before_batch(self):
            if len(self.x)!=16: return
            tried.append(1)
            raise ValueError('no')
    learn.add_cb(Fails())
    with mock_training(learn): times = time_steps(learn, [4,8,16,32,64], 8, 100.)
    assert tried==[1]
    assert {8,32,64}<=set(times.rounds)
    assert list(times.errors)==[16]
    assert times.too_large is None

# Memory

class Greedy(nn.Module):
    "Has no memory for batches above `most` items, in one part of the step"
    error = torch.OutOfMemoryError
    def __init__(self, most, where):
        super().__init__()
        self.lin,self.bn,self.most,self.where,self.seen = nn.Linear(5,2),nn.BatchNorm1d(5),most,where,[]
    def check(self, n, where):
        if n>self.most and where==self.where: raise self.error('CUDA out of memory. Tried to allocate 2.00 GiB')
    def forward(self, x):
        self.seen.append(len(x))
        self.check(len(x), 'forward')
        res = self.lin(self.bn(x))
        if torch.is_grad_enabled() and res.requires_grad: res.register_hook(lambda g: self.check(len(g), 'backward'))
        return res

def greedy_learner(where, most=15, **kwargs):
    torch.manual_seed(0)
    model = Greedy(most, where)
    return learner(model=model, opt_func=Adam, cbs=Callback(), **kwargs)

def unseen(was, now): return [k for k in changes(was, now) if 'seen' not in k]

@pytest.mark.parametrize('where,trained', [('forward',False),('backward',True)])
def test_a_size_that_does_not_fit_is_not_timed(where, trained):
    "The plan says where; nothing larger is tried, the sizes that fit are timed, and the learner is what it was"
    learn = greedy_learner(where)
    if trained: learn.fit(1, 0.01)
    was = picture(learn)
    learn.model.seen.clear()
    plan = find(learn)
    assert unseen(was, picture(learn))==[]
    assert plan.facts.device.too_large==16
    assert sizes(plan)[-1]==8
    assert 4 in sizes(plan)
    assert max(learn.model.seen, default=0)<=16

def test_an_interrupt_at_another_size_is_raised():
    learn = greedy_learner('backward')
    learn.model.error = KeyboardInterrupt
    was = picture(learn)
    with pytest.raises(KeyboardInterrupt): find(learn)
    assert unseen(was, picture(learn))==[]

class Leaky(Greedy):
    "Has no memory left after some batches"
    def check(self, n, where): super().check(len(self.seen), where)

@pytest.mark.parametrize('most', [3,25])
def test_todays_size_that_does_not_fit_is_an_error(most):
    "In the mock training of 24 micro-batches, or in the timing: nobody could train so, and it is raised"
    learn = greedy_learner('forward', most)
    learn.model.__class__ = Leaky
    was = picture(learn)
    with pytest.raises(torch.OutOfMemoryError): find(learn)
    assert unseen(was, picture(learn))==[]

def test_what_a_step_out_of_memory_held_is_let_go():
    gc.collect() # What other tests have left
    plan = find(greedy_learner('backward', most=26, dls=loaders(regression(208, dtype=torch.float32), 13)), max_bs=52)
    assert plan.facts.device.too_large==52
    assert sizes(plan)[-1]==26
    assert not [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.shape[:1]==(52,)]

# Loaders

def batch_sampler(): return TorchDataLoader(regression(240, dtype=torch.float32), batch_sampler=[list(range(i,i+4)) for i in range(0, 240, 4)])

@pytest.mark.parametrize('dl', [batch_sampler(), list(batch_sampler())], ids=['batch_sampler','no_data_set'])
def test_a_loader_that_cannot_change_is_timed_at_its_size(dl):
    "Today's size only; the plan says why"
    plan = find(learner(dls=DataLoaders(dl, dl)), num_it=160)
    assert sizes(plan)==[4]
    assert plan.facts.device.too_large is None
    assert plan.facts.today.n_train==240
    assert plan.choice.reason in ('single','little')
    assert 'cannot be given batches of' in plan.facts.device.failed[0][1]

# Learners

@pytest.mark.parametrize('cbs,bs_now,base_bs', [([GradAccum({0: 2, 1: 8})],8,8), ([GradAccum(2),ScaledLR(32, sqrt_scaling),NoiseScale()],8,32),
    ([GradientAccumulation(12)],12,12)], ids=str)
def test_callbacks_about_batches_are_set_aside_while_steps_are_timed(cbs, bs_now, base_bs):
    "Micro-batches are timed one to a step, each with what the training as planned sets its rate by, and today's batch is reckoned from them"
    class Look(Callback):
        order = 98
        def before_fit(self): fits.append(([cb.name for cb in self.learn.cbs],[],[]))
        def before_batch(self):
            if self.training: fits[-1][1].append(len(self.x))
        def after_step(self): fits[-1][2].append(len(self.x))
    fits = []
    learn = learner(cbs=[*cbs,Look()])
    was = picture(learn)
    plan = find(learn)
    assert changes(was, picture(learn))==[]
    assert (plan.facts.today.bs,plan.base_bs)==(bs_now,base_bs)
    timed = [fit for fit in fits if 'step_timer' in fit[0]]
    assert len(timed)>=2
    for names,batches,steps in timed:
        assert not {'grad_accum','noise_scale','gradient_accumulation'}&set(names)
        assert batches==steps
        assert batches[0] in sizes(plan)
        assert 'one_cycle' in names
        assert names.count('scaled_lr')==(batches[0]!=4)

# Given

flat = {4: 0.02, 8: 0.02, 16: 0.02, 32: 0.03}

def no_clock(*args): raise AssertionError("Something was timed")

@pytest.mark.parametrize('kwargs,taken,frozen', [({},(4,8,16,32),0.), (dict(max_bs=8),(4,8),0.), (dict(how='fine_tune'),(4,8,16,32),0.)])
def test_step_times_that_are_given_are_taken_in_place_of_the_clock(kwargs, taken, frozen, monkeypatch):
    "Loading, validation and frozen steps count as 0; the learner stays as it was"
    for nm in ('time_steps','valid_time','loader_time'): monkeypatch.setattr(finder, nm, no_clock)
    learn = quiet_learner(loaders(regression(400, dtype=torch.float32), 4), nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)),
                          splitter=lambda m: [params(m[0]),params(m[1])])
    was = picture(learn)
    plan = find(learn, n_epoch=4, step_times=flat, **{'max_bs': None, **kwargs})
    device,t = plan.facts.device,plan.facts.today
    assert changes(was, picture(learn))==[]
    assert device.times==tuple((bs,flat[bs],0.) for bs in taken)
    assert device.given
    assert device.frozen==frozen
    assert (device.valid_time,device.epoch_start,device.loading,device.spread)==(0,0,0,0)
    assert plan.duration.today==pytest.approx(t.n_epoch*100*0.02)
# A part of the training

@pytest.mark.parametrize('n_training,budget,n_rounds', [(inf,180,3), (3600,180,3), (1300,65,3), (1000,50,2), (500,25,1), (100,14,1), (1,14,1)])
def test_timing_takes_a_twentieth_of_the_training(n_training, budget, n_rounds, monkeypatch):
    "At least a round of today's size, and of twice and four times as many items; at most three rounds"
    for nm,v in real.items(): monkeypatch.setattr(StepTimes, nm, v)
    monkeypatch.setattr(StepTimes, 'n_rounds', 3)
    times = StepTimes(quiet_learner(loaders(regression(40), 4), mlp()), [4,8,16], 4, nan, n_training)
    assert (times.budget,times.n_rounds)==(pytest.approx(budget),n_rounds)

@pytest.mark.parametrize('seconds', [(1.,1.2),(1.,2.),(1.,3.2)])
def test_without_a_noise_scale_a_size_can_win_by_the_time_of_an_item(seconds, monkeypatch):
    "Which never rises with the size, as far as step times are mended"
    monkeypatch.setattr(StepTimes, 'slack', 1.2)
    times = StepTimes(quiet_learner(loaders(regression(40), 4), mlp()), [4,8,16], 4, inf)
    times.rounds = {bs: [(s,0.)] for bs,s in zip((4,8), seconds)}
    assert times.can_win(16)

@pytest.mark.parametrize('kwargs,sizes,n_training', [(dict(n_epoch=3), [4,8,16,32,64], 300), (dict(n_epoch=3, noise_scale=60.), [2,4,8,16,32], 300),
    (dict(n_epoch=3, max_bs=8), [4,8], 300), (dict(num_it=24, n_batch=2), None, inf), (dict(n_epoch=3, num_it=24, n_batch=2), None, 300)])
def test_which_sizes_are_timed(kwargs, sizes, n_training, monkeypatch):
    "Without a noise scale from today's up to what two trials of four times the batch may come to; smaller ones where a noise scale is known"
    asked = []
    def _time_steps(learn, sizes, micro_bs, noise_scale, n_training):
        asked.append((sizes,n_training))
        return real_time_steps(learn, sizes[:1], micro_bs, noise_scale, n_training)
    real_time_steps = finder.time_steps
    monkeypatch.setattr(finder, 'time_steps', _time_steps)
    quiet_learner(loaders(regression(400, dtype=torch.float32), 4), mlp(dtype=torch.float32)).bs_find(0.01, show_plot=False, **kwargs)
    (found,n), = asked
    assert n==n_training
    if sizes: assert found==sizes
