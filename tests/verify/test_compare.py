"Pure statistics of trainings: which loss decides, intervals that hold as often as they say, and how many runs they need"
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from fastai_bs.verify.bs_verify import runs_wanted
from fastai_bs.verify.compare import compared, decides, least_dof, spread_of, with_loss

nan,inf = math.nan,math.inf
approx = lambda v: pytest.approx(v, rel=1e-9, abs=1e-12)

def losses_of(effects, n_runs, rng, sd=0.02):
    "Log losses of sizes 1, 2, 4, ...: of each its effect, of each run what it does to all, and chance"
    x = np.asarray(effects) + 0.1*rng.normal(size=(n_runs,1)) + sd*rng.normal(size=(n_runs,len(effects)))
    return pd.DataFrame(x, columns=[2**i for i in range(len(effects))])

# Which loss decides

def frame(items=100, train=0.3, valid=0.5, n=2):
    return pd.DataFrame([dict(bs=2**i, run=1, items=items, train_loss=train, valid_loss=valid) for i in range(n)])

@pytest.mark.parametrize('items,valid,loss', [(99,0.5,'train_loss'),(100,0.5,'train_loss'),(101,0.5,'valid_loss'),(101,nan,'train_loss')])
def test_the_loss_that_decides(items, valid, loss): assert decides(frame(items=items, valid=valid), 100)==loss

@pytest.mark.parametrize('loss', [nan,inf,0.,-1.])
def test_a_loss_without_a_ratio_is_none(loss): assert with_loss(frame(train=loss), 100).loss.isna().all()

# Intervals

def test_two_sizes_are_a_paired_t_test():
    losses = losses_of([0,-0.05], 5, np.random.default_rng(5))
    expected = stats.ttest_rel(losses[2], losses[1]).confidence_interval(0.95)
    table = compared(losses, 1)
    assert np.log1p(table.loc[2]).tolist()==approx([(losses[2]-losses[1]).mean(),expected.low,expected.high])
    assert table.loc[1].tolist()==[0,0,0]
    assert spread_of(losses).dof==4

def test_intervals_of_several_sizes_are_those_of_a_two_way_fit():
    "The noise is what the fit leaves over, and the sizes share what may go wrong"
    losses = losses_of([0,0.1,0.2], 4, np.random.default_rng(0))
    x = np.array([[run==r for r in range(4)]+[size==s for s in range(3)] for run in range(4) for size in range(3)], float)
    y = losses.to_numpy().ravel()
    sd = math.sqrt(((y-x@np.linalg.lstsq(x, y, rcond=None)[0])**2).sum()/6)
    assert spread_of(losses)==(approx(sd),6)
    low,high = (np.log1p(compared(losses, 1)[o]) for o in ('low','high'))
    assert ((high-low)/2)[[2,4]].tolist()==approx([stats.t.ppf(1-0.025/2, 6)*sd*math.sqrt(2/4)]*2)

@pytest.mark.parametrize('n_runs,n_sizes', [(1,3),(3,1),(3,2),(2,3)])
def test_few_runs_tell_nothing(n_runs, n_sizes):
    losses = losses_of([0.1*i for i in range(n_sizes)], n_runs, np.random.default_rng(2))
    assert spread_of(losses).dof==(n_runs-1)*(n_sizes-1)<least_dof
    table = compared(losses, 1)
    assert table.loc[1].tolist()==[0,0,0]
    assert (table.low[1:]==-1).all()
    assert np.isinf(table.high[1:]).all()

@pytest.mark.parametrize('n_sizes,n_runs,wanted', [(2,2,4),(2,3,4),(2,6,6),(3,2,3),(4,2,2),(2,1,1)])
def test_runs_are_added_until_the_noise_is_known(n_sizes, n_runs, wanted): assert runs_wanted(n_sizes, n_runs)==wanted
