"What holds for whatever is measured, cut, counted or planned: exact where chance could only be sampled, against the definition where there is one"
import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, islice, permutations
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import SGD
from fastai_bs.accumulate import losses
from fastai_bs.all import GradAccum, NoiseScale
from fastai_bs.finder.facts import Trial
from fastai_bs.schedule.scaled_lr import rates
from helpers import mlp, quiet_learner, regression
from plans import plans, replanned
from oracle import item_grads, moments

f64,inf,nan = torch.float64,math.inf,math.nan
sizes_of_micros = st.lists(st.integers(1, 4), min_size=2, max_size=6)
seeds = st.integers(0, 2**16)
def examples(n): return settings(max_examples=n, deadline=None, derandomize=True)

class Cut(DataLoader):
    "Batches of these `sizes`, in order"
    def __init__(self, items, sizes):
        super().__init__(items, bs=max(sizes), num_workers=0)
        self.sizes = sizes
    def chunkify(self, b): return ([*islice(b, n)] for n in self.sizes)
    def __len__(self): return len(self.sizes)

def learner(items, sizes, loss_func=None, cbs=(), opt_func=SGD, **kwargs):
    "That goes through `items` in micro-batches of `sizes`"
    return quiet_learner(DataLoaders(Cut(items, sizes), DataLoader(items[:2], bs=2, num_workers=0), device='cpu'), mlp(n_hid=3), loss_func, opt_func,
                         cbs=cbs, **kwargs)

def measured(items, sizes, n_acc, loss_func=None, count=None, **kwargs):
    "By a `NoiseScale`, at fixed weights; with `n_acc` 1 in parts of each batch"
    noise = NoiseScale(every=1, n_micro=kwargs.pop('n_micro', 2))
    learner(items, sizes, loss_func, [GradAccum(n_acc, count), noise], **kwargs).fit(1, 0.)
    return noise

def batches(items, sizes):
    "Items of each batch"
    return [items[i-n:i] for i,n in zip(accumulate(sizes), sizes)]

# The noise scale

class Mean:
    "`times` the mean squared error"
    def __init__(self, times): self.times = times
    def __call__(self, pred, y): return self.times*F.mse_loss(pred, y)

@examples(20)
@given(st.lists(sizes_of_micros, min_size=1, max_size=3), st.floats(-30, 30), st.sampled_from([-1,1]), seeds)
def test_scale_of_the_loss_and_order_within_a_window_do_not_count(windows, exponent, sign, seed):
    "At fixed weights: the noise scale and its interval, and but for the square of the scale the moments"
    n_acc,c = max(map(len, windows)),sign*10**exponent
    sizes = sum((w + [1]*(n_acc-len(w)) for w in windows), []) # Only the epoch's last may be short
    order = np.random.default_rng(seed).permutation
    at = [i for first in range(0, len(sizes), n_acc) for i in first+order(n_acc)]
    items,count = regression(sum(sizes), seed=seed),lambda learn: learn.y.numel()
    micros = batches(items, sizes)
    one = measured(items, sizes, n_acc, Mean(1.), count)
    other = measured([o for i in at for o in micros[i]], [sizes[i] for i in at], n_acc, Mean(c), count)
    assert len(one.df)==len(windows)
    a,b = (o.df[['tr_sigma','g_sq']].to_numpy() for o in (one,other))
    np.testing.assert_allclose(b/c**2, a, rtol=1e-9, atol=1e-11*np.abs(a).max())
    a,b = (o.df[['noise_scale','low','high']].to_numpy() for o in (one,other))
    np.testing.assert_allclose(b, a, rtol=1e-6)

@examples(10)
@given(st.sampled_from([[1,1],[2,1],[1,3],[2,2],[1,1,2],[2,1,1],[1,1,1,1],None]), seeds)
def test_a_training_measures_without_bias(n, seed):
    "All 24 orders of four items, a window or a batch of each: `GradAccum`'s micro-batches of `n` items, or two parts of the batch"
    items = regression(4, seed=seed)
    orders = [[items[i] for i in o][:sum(n or [4])] for o in permutations(range(4))]
    noise = measured(sum(orders, []), (n or [4])*24, len(n) if n else 1)
    want = moments(item_grads(noise.learn.model, nn.MSELoss(), items), torch.full((4,), 2)) # Elements of an item
    assert len(noise.df)==24
    np.testing.assert_allclose([noise.df.tr_sigma.mean(),noise.df.g_sq.mean()], want, rtol=1e-8, atol=1e-10)

# Accumulation

class Spy(Callback):
    "The gradient and the loss of each window"
    order = GradAccum.order+1
    def __init__(self): self.grads,self.losses = [],[]
    def before_step(self):
        self.grads.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
        self.losses.append(self.learn.grad_accum.window_loss.item())

kinds = dict(int=lambda n: n, tensor=torch.tensor, of_one=lambda n: torch.tensor([float(n)]))

@examples(40)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0,0,1,2,3,7,40,1000])), min_size=1, max_size=9), st.integers(1, 5), st.sampled_from([*kinds]),
       st.sampled_from([F.mse_loss, F.l1_loss, F.huber_loss, Mean(1e3)]), st.booleans(), seeds)
def test_any_count_is_what_it_weighs_by(micros, n_acc, kind, loss, elsewhere, seed):
    "The gradient is sum(count*gradient)/sum(count), and the loss sum(count*loss)/sum(count): whatever is counted, nothing too, in each micro-batch"
    sizes,counts = zip(*micros)
    items,spy = regression(sum(sizes), seed=seed),Spy()
    if n_acc==1: counts = [max(1, n) for n in counts] # Alone in its window, it is its own mean, whatever it counts
    def loss_func(pred, y): return loss(pred, y)
    learn = learner(items, sizes, loss_func, [GradAccum(n_acc, lambda learn: kinds[kind](counts[learn.iter])), spy])
    model,parts = mlp(n_hid=3),batches(items, sizes)
    with patch.object(losses, 'at_hand', lambda n: losses.precise(torch.as_tensor(n))) if elsewhere else nullcontext(): # As on another device: no number
        learn.fit(1, 0.)
    def _one(part):
        x,y = (torch.stack(o) for o in zip(*part))
        value = loss(model(x), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, model.parameters())]),value.item()
    windows = [range(i, min(i+n_acc, len(sizes))) for i in range(0, len(sizes), n_acc)]
    assert len(spy.grads)==len(windows)
    for got,window_loss,w in zip(spy.grads, spy.losses, windows):
        total = sum(counts[i] for i in w)
        each = [(counts[i]/total,*_one(parts[i])) for i in w if counts[i]]
        want = sum((n*g for n,g,_ in each), torch.zeros_like(got))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12*max([1., *(g.abs().max().item() for _,g,_ in each)]))
        if total: assert window_loss==pytest.approx(sum(n*value for n,_,value in each), rel=1e-10)

# The plan

@examples(120)
@given(plans(), st.sampled_from([0.25,1,1,6]))
def test_the_table_of_a_plan_follows_from_its_formulas(plan, factor):
    "Each column from the others, the noise scale and what was timed"
    plan = replanned(plan, today=replace(plan.facts.today, lr_factor=factor))
    df,now,t = plan.table,plan.facts.today.bs,plan.facts.today
    noise = plan.facts.noise if plan.bs>=now else plan.facts.measured_noise
    lr = rates(t.lr)[-1]*factor*(now/df.bs if t.sums and not t.adam else 1) # As the optimizer sees it today; a loss that sums has a gradient that grows
    def same(nm, v): np.testing.assert_allclose(df[nm].to_numpy(float), np.broadcast_to(np.array(v, dtype=float), len(df)), rtol=1e-9, err_msg=nm)
    # How it is reached, and how long a step takes
    assert df.bs.is_unique
    assert df.bs.is_monotonic_increasing
    assert (df.bs==now).sum()==1
    short = df.micro_bs*df.n_acc*t.n_ranks-df.bs # Of today's last micro-batch alone
    assert ((short==0) | (df.bs==now) & (0<short) & (short<df.micro_bs*t.n_ranks)).all()
    ran = {m: (secs-once,once) for m,secs,once in plan.facts.device.timed}
    same('step_time', [bs/t.n_ranks/m*ran[m][0]+ran[m][1] if ran else nan for bs,m in zip(df.bs, df.micro_bs)])
    if math.isnan(noise):
        assert df[['steps','examples','time']].isna().to_numpy().all()
        return
    # Steps, examples and seconds to a loss
    same('steps', 1+noise/df.bs)
    same('examples', df.steps*df.bs/noise if noise else inf) # A step takes a batch, and the fewest examples are a noise scale to each of the fewest steps
    time = df.steps*df.step_time
    same('time', time/time[df.bs==now].item())
    # The rate
    shown = float(f'{noise:.3g}') # The rule has three digits of the noise scale
    if not t.adam and vars(plan.facts.trial)==vars(Trial()): same('lr', lr*(1+shown/now)/(1+shown/df.bs))
