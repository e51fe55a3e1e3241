"A window as a value: weights and the mean, for counts that are numbers and for counts on a device"
import math

import numpy as np
import pytest
import torch
from fastai_bs.noise.norms import MicroNorms, RankWindow, unweighed_window, weighed_window, without_scales
from fastai_bs.accumulate.window import (MicroBatch, Position, mean_divisor, reference,
    weight)

def double(x): return torch.tensor(x, dtype=torch.float64)

rng = np.random.default_rng(0)
windows = [[4.,4.,2.], [0.,4.,2.], [0.,0.,3.], [0.,0.,0.], [5.], [0.], [0.5,1.75,0.25], *(rng.integers(0, 5, 6).astype(float).tolist() for _ in range(20))]

@pytest.mark.parametrize('as_count', [float, double])
def test_weighted_sum_over_divisor_is_the_mean(as_count):
    "sum(w_i g_i)/divisor is sum(n_i g_i)/sum(n_i), and 0 where nothing counts"
    for ns in windows:
        gs,n_ref,total = rng.normal(size=len(ns)),None,0.
        for n,g in zip(ns, gs):
            n_ref = reference(n_ref, as_count(n))
            total += float(weight(as_count(n), 5*n_ref))*g
        expected = np.dot(ns, gs)/sum(ns) if sum(ns) else 0.
        assert total/float(mean_divisor(as_count(sum(ns)), 5*n_ref))==pytest.approx(expected, rel=1e-12, abs=0), ns
    assert mean_divisor(12., 4., 2)==1.5 # The mean over 2 ranks of sums is half of the sum

# A measurement

def micro_norms(n, w, scale): return MicroNorms(MicroBatch(n, w, scale), None, 2)

@pytest.mark.parametrize('is_sum', [False, True])
@pytest.mark.parametrize('as_scale', [float, torch.tensor])
def test_all_scales_are_divided_out(is_sum, as_scale):
    "What `.grad` and the hooks see is multiplied by weights, elements of a summed loss, and the scale of mixed precision; a micro-batch of nothing is left out"
    ns,ws,scale = [3.,0.,5.],[1.,0.,5/3],256.
    true,mean = np.array([2.,9.,4.]),7.
    seen = [t*((n if is_sum else w)*scale)**2 for t,n,w in zip(true, ns, ws)] + [mean*((8. if is_sum else 1.)*scale)**2]
    micros = [micro_norms(n, 1. if is_sum else w, as_scale(scale)) for n,w in zip(ns, ws)]
    w = without_scales(micros, double(seen), is_sum, 8. if is_sum else 1.)
    assert (w.n,w.n_items)==([3.,5.],6)
    assert w.sq==pytest.approx([2.,4.])
    assert w.sq_mean==pytest.approx(7.)
    m = weighed_window(w)
    assert (m.n_micro,m.n_elems,m.n_items)==(2,8.,6)
    assert m.total==pytest.approx(3*2.+5*4.)
    assert m.moments==pytest.approx((26-8*7, 7-(26-8*7)/8))

@pytest.mark.parametrize('ns', [[4.,4.,4.], [1.,2.,6.]], ids=str)
def test_a_mean_of_means_is_as_noisy_as_it_is(ns, monkeypatch):
    "Ranks of `n` elements each, in expectation: what they know gives back what they were made of"
    monkeypatch.setattr('fastai_bs.noise.norms.over_ranks', lambda t: t) # This process holds what all of them would
    n,K,g_sq,tr_sigma = np.array(ns),len(ns),2.,3.
    mean = g_sq + tr_sigma*(1/n).sum()/K**2
    assert unweighed_window(RankWindow(ns, (g_sq+tr_sigma/n).tolist(), K*mean, 6), K, False).moments==pytest.approx((tr_sigma,g_sq))

@pytest.mark.parametrize('n_acc,n_iter', [(1,1),(1,7),(3,7),(3,9),(4,3),(5,50),(7,50)])
@pytest.mark.parametrize('heard', [lambda i: True, lambda i: i%3!=1], ids=['always','now and then'])
def test_position_is_that_of_the_large_batchs_loop(n_acc, n_iter, heard):
    "By the same additions, also where nobody asks for a while: a window is under way"
    large,step = [2/3],1./(math.ceil(n_iter/n_acc)*3)
    for _ in range(math.ceil(n_iter/n_acc)): large.append(large[-1]+step)
    position,pct = Position(n_acc),2/3
    for i in range(n_iter):
        if not heard(i): continue
        pct = position.after(pct, i, n_iter, 3)
        assert pct==large[-1 if i==n_iter-1 else (i+1)//n_acc]

