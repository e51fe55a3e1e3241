"Pure statistics of trials: which loss decides, intervals that hold as often as they say, the critical batch size, and what goes on"
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from fastai_bs.verify.compare import (Arm, best_rates, compared, critical, critical_range, decides, least_dof, spread_of,
    trial_sizes, with_loss, with_today)

nan,inf = math.nan,math.inf
approx = lambda v: pytest.approx(v, rel=1e-9, abs=1e-12)

def losses_of(effects, n_runs, rng, sd=0.02):
    "Log losses of sizes 1, 2, 4, ...: of each its effect, of each run what it does to all, and chance"
    x = np.asarray(effects) + 0.1*rng.normal(size=(n_runs,1)) + sd*rng.normal(size=(n_runs,len(effects)))
    return pd.DataFrame(x, columns=[2**i for i in range(len(effects))])

# Which loss decides

def frame(part=1., items=100, train=0.3, valid=0.5, n=2):
    return pd.DataFrame([dict(bs=2**i, factor=1., part=part, run=1, items=items, train_loss=train, valid_loss=valid) for i in range(n)])

@pytest.mark.parametrize('items,valid,loss', [(99,0.5,'train_loss'),(100,0.5,'train_loss'),(101,0.5,'valid_loss'),(101,nan,'train_loss')])
def test_the_loss_that_decides(items, valid, loss): assert decides(frame(items=items, valid=valid), 100)==loss

def test_each_length_has_a_loss_of_its_own():
    df = pd.concat([frame(1., 400),frame(0.25, 100)], ignore_index=True)
    assert with_loss(df, 100).loss.tolist()==[0.5,0.5,0.3,0.3]

# Intervals

def test_two_sizes_are_a_paired_t_test():
    losses = losses_of([0,-0.05], 5, np.random.default_rng(5))
    expected = stats.ttest_rel(losses[2], losses[1]).confidence_interval(0.9)
    table = compared(losses, 1, 0.9)
    assert np.log1p(table.loc[2]).tolist()==approx([(losses[2]-losses[1]).mean(),expected.low,expected.high])
    assert table.loc[1].tolist()==[0,0,0]
    assert spread_of(losses).dof==4

def test_spread_is_what_a_two_way_fit_leaves_over():
    losses = losses_of([0,0.1,0.2], 4, np.random.default_rng(0))
    x = np.array([[run==r for r in range(4)]+[size==s for s in range(3)] for run in range(4) for size in range(3)], float)
    y = losses.to_numpy().ravel()
    rss = ((y-x@np.linalg.lstsq(x, y, rcond=None)[0])**2).sum()
    assert spread_of(losses)==(approx(math.sqrt(rss/6)),6)

@pytest.mark.parametrize('n_runs,n_sizes', [(1,3),(3,1),(3,2),(2,3)])
def test_few_runs_tell_nothing(n_runs, n_sizes):
    losses = losses_of([0.1*i for i in range(n_sizes)], n_runs, np.random.default_rng(2))
    assert spread_of(losses).dof==(n_runs-1)*(n_sizes-1)<least_dof
    table = compared(losses, 1)
    assert table.loc[1].tolist()==[0,0,0]
    assert (table.low[1:]==-1).all()
    assert np.isinf(table.high[1:]).all()

def agrees(share, n, expected): return abs(share-expected)<=3.5*math.sqrt(expected*(1-expected)/n)

def holds(effects, losses):
    "Has each interval the true difference to the first size in it?"
    low,high = (np.log1p(compared(losses, 1)[o]).to_numpy()[1:] for o in ('low','high'))
    true = np.asarray(effects)[1:]-effects[0]
    return (low<=true) & (true<=high)

@pytest.mark.parametrize('effects,n_runs', [([0.,0.],4),([0.05,0.],6)])
def test_the_interval_holds_as_often_as_it_says(effects, n_runs):
    "Where nothing differs, the rest of the time is that of false alarms"
    rng,n = np.random.default_rng(3),500
    assert agrees(np.mean([holds(effects, losses_of(effects, n_runs, rng)).all() for _ in range(n)]), n, 0.95)

@pytest.mark.parametrize('effects', [[0.]*3,[0.,0.01,0.02,-0.03,0.04]])
def test_all_intervals_hold_together(effects):
    "Shared out by Bonferroni they hold somewhat more often, and each by itself more often than its share"
    rng,n = np.random.default_rng(4),500
    hits = np.array([holds(effects, losses_of(effects, 3, rng)) for _ in range(n)])
    share = hits.all(1).mean()
    assert share>=0.95-3.5*math.sqrt(0.95*0.05/n)
    assert share<0.985
    assert agrees(hits.mean(), n, 1-0.05/(len(effects)-1))

# The critical batch size

@pytest.mark.parametrize('loss,bs', [([1.,1.,1.,1.],8),([1.,1.009,1.02,1.03],2),([1.,0.9,0.905,1.2],4),([1.,0.9,0.95,0.85],8),([1.,1.02,1.,1.5],4),
    ([1.,1.1],1),([1.],1),([1.,0.99,0.999,1.003],4)])
def test_the_critical_batch_size_by_hand(loss, bs): assert critical(pd.DataFrame(np.log([loss]), columns=[2**i for i in range(len(loss))]))==bs

def test_the_range_has_the_truth_in_it():
    "Here 4 is the last that is within 1% of the best of all smaller"
    effects,rng,n = [0.,0.002,0.004,0.03,0.06,0.2],np.random.default_rng(6),100
    ranges = []
    for _ in range(n):
        losses = losses_of(effects, 3, rng, 0.01)
        low,high = critical_range(losses)
        assert low<=critical(losses)<=high
        ranges.append((low,high))
    assert np.mean([low<=4<=high for low,high in ranges])>=0.95
    assert np.mean([high<=8 for _,high in ranges])>0.5

# What goes on

def test_each_size_keeps_its_best_rates():
    order = [Arm(8,3),Arm(8,1),Arm(16,1),Arm(8,9),Arm(16,3)]
    assert best_rates(order)==[Arm(8,3),Arm(16,1)]
    assert best_rates(order, 2)==[Arm(8,3),Arm(8,1),Arm(16,1),Arm(16,3)]

def test_today_s_size_goes_on_however_far_behind():
    order = [Arm(64,3),Arm(32,1),Arm(16,1),Arm(128,3),Arm(128,1)]
    assert with_today(order, 3, 128)==[Arm(64,3),Arm(32,1),Arm(128,3)]
    assert with_today(order, 3, 32)==with_today(order, 3, 7)==order[:3]
    assert with_today(order, 9, 128)==order

@pytest.mark.parametrize('bs_now,planned', [(64,64),(64,128),(64,4096),(1024,16),(48,100),(3,5)])
def test_trial_sizes_are_around_those_of_today_and_of_the_plan(bs_now, planned):
    sizes = trial_sizes(bs_now, planned, lambda bs: True)
    assert {bs_now,planned}<=set(sizes)
    assert 3<=len(sizes)<=5
    assert sizes==sorted(set(sizes))
    assert min(sizes)>=min(bs_now, planned)//2
    assert max(sizes)<=4*max(bs_now, planned)
    assert trial_sizes(bs_now, planned, lambda bs: False)==sorted({bs_now,planned})
