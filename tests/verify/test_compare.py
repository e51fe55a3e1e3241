"Which of several trainings is best: paired differences, a pooled spread, and intervals that hold as often as they say"
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from fastai_bs.verify.compare import (Spread, about_as_good, compared, critical, critical_range, decides, fit_runs, spread_of, tied, tolerance, with_loss)

inf,nan = math.inf,math.nan
approx = lambda v: pytest.approx(v, rel=1e-9, abs=1e-12)

def runs_of(effects, counts, sd=0.01, of_run=0.1, rng=None, part=1.):
    "Sizes 1, 2, 4, ... whose log loss is `effects`, each with so many runs; what a run does to all is `of_run`"
    rng = rng or np.random.default_rng(0)
    shift = of_run*rng.normal(size=max(counts))
    return pd.DataFrame([dict(bs=2**i, factor=1., part=part, run=run, loss=math.exp(e+shift[run]+sd*rng.normal()))
                         for i,(e,n) in enumerate(zip(effects, counts)) for run in range(n)])

# What decides

def frame(part=1., items=100, train=0.3, valid=0.5, n=2):
    return pd.DataFrame([dict(bs=2**i, factor=1., part=part, run=0, items=items, train_loss=train, valid_loss=valid) for i in range(n)])

@pytest.mark.parametrize('items,valid,which', [(99,0.5,'train_loss'),(100,0.5,'train_loss'),(101,0.5,'valid_loss'),(101,nan,'train_loss')])
def test_decides(items, valid, which): assert decides(frame(items=items, valid=valid), 100)==which

def test_one_training_that_saw_an_item_twice_decides_for_all():
    df = frame()
    df.loc[1,'items'] = 101
    df.loc[0,'valid_loss'] = nan
    assert decides(df, 100)=='valid_loss' and with_loss(df, 100).loss.isna().tolist()==[True,False]

def test_each_length_has_a_loss_of_its_own():
    df = pd.concat([frame(1., 400),frame(0.25, 100)], ignore_index=True)
    assert with_loss(df, 100).loss.tolist()==[0.5,0.5,0.3,0.3] and 'loss' not in df
    assert len(with_loss(df[:0], 100))==0

# The fit

@pytest.mark.parametrize('n', [4,5,9])
def test_two_arms_are_a_paired_t_test(n):
    df = runs_of([0,-0.05], [n]*2)
    a,b = (np.log(df.loss[df.bs==bs].to_numpy()) for bs in (1,2))
    expected = stats.ttest_rel(b, a).confidence_interval(0.9)
    fit,spread = fit_runs(df),spread_of(df)
    diff,sd = fit.difference(1, 0)
    half = spread.interval(sd, 0.9)
    assert spread.dof==n-1 and diff==approx((b-a).mean()) and (diff-half,diff+half)==pytest.approx((expected.low,expected.high), rel=1e-6)

def test_what_a_run_does_to_all_cancels():
    df = runs_of([0,0.1,0.2], [3,3,2])
    other = df.assign(loss=df.loss*np.array([1.,2.,7.])[df.run])
    assert [fit_runs(df).difference(i, 0) for i in (1,2)]==[approx(fit_runs(other).difference(i, 0)) for i in (1,2)]
    assert spread_of(df).sd==approx(spread_of(other).sd) and spread_of(df).dof==spread_of(other).dof==8-3-3+1

def test_unbalanced_runs_are_compared_within_runs():
    "An arm that had only the easy run is no better for it"
    df = pd.DataFrame([dict(bs=bs, factor=1., part=1., run=run, loss=(1.,0.1)[run]) for bs,run in ((1,0),(1,1),(2,1))])
    assert fit_runs(df).difference(1, 0)[0]==approx(0) and np.exp(fit_runs(df).effects)==approx([0.1**0.5]*2)

def test_effects_are_means_of_a_full_table():
    df = runs_of([0,0.3], [4,4])
    assert fit_runs(df).effects==approx([np.log(df.loss[df.bs==bs]).mean() for bs in (1,2)])

def test_arms_are_sizes_at_rates():
    df = pd.concat([runs_of([0,1], [2,2]),runs_of([0.5], [2]).assign(factor=3.)])
    assert fit_runs(df).arms==[(1,1.),(1,3.),(2,1.)]

@pytest.mark.parametrize('pairs,known', [([(1,0),(2,1)],False),([(1,0),(2,1),(4,0),(4,1)],True),([(1,0),(2,0)],True)])
def test_a_difference_without_a_chain_of_runs_is_not_known(pairs, known):
    df = pd.DataFrame([dict(bs=bs, factor=1., part=1., run=run, loss=1.+bs) for bs,run in pairs])
    fit = fit_runs(df)
    assert math.isfinite(fit.difference(0, 1)[1])==known and fit.difference(0, 0)==(0,0)
    assert Spread(0.01, 9).interval(fit.difference(0, 1)[1])<inf or not known
    assert math.isinf(compared(df, Spread(0., 9)).high.max())==(not known)

# Chance

def test_spread_is_pooled_over_lengths():
    a,b = runs_of([0,0.1], [3,3], 0.01),runs_of([0,0.2,0.1], [2,2,1], 0.05, part=0.25)
    fits = fit_runs(a),fit_runs(b)
    assert [f.dof for f in fits]==[2,1]
    spread = spread_of(pd.concat([a,b]))
    assert spread.dof==3 and spread.sd==approx(math.sqrt(sum(f.rss for f in fits)/3))

@pytest.mark.parametrize('counts', [[1,1,1],[1],[3],[]])
def test_without_repeats_nothing_is_known(counts):
    spread = spread_of(runs_of([0]*len(counts), counts) if counts else pd.DataFrame(columns=['bs','part','run','loss']))
    assert spread.dof==0 and math.isnan(spread.sd) and spread.interval(1.)==inf

@pytest.mark.parametrize('dof,known', [(2,False),(3,True)])
def test_least_degrees_of_freedom(dof, known): assert math.isfinite(Spread(0.01, dof).interval(1.))==known

@pytest.mark.parametrize('level', [0.8,0.95])
def test_interval_of_two_is_students(level):
    assert Spread(0.02, 4).interval(1.5, level)==pytest.approx(stats.t.ppf((1+level)/2, 4)*0.02*1.5, rel=1e-4)
    assert Spread(0.02, 4).interval(1.5, level, 1)==Spread(0.02, 4).interval(1.5, level)<Spread(0.02, 4).interval(1.5, level, 3)<Spread(0.02, 4).interval(1.5,
        level, 5)

def within(share, n, expected, sds=3.5): return abs(share-expected)<=sds*math.sqrt(expected*(1-expected)/n)

def holds(effects, counts, rng, sd=0.02):
    "Does each interval of the difference to the size that looks best have the true one in it?"
    df = runs_of(effects, counts, sd, rng=rng)
    table = compared(df, spread_of(df))
    best = effects[int(np.log2(table.bs[table['diff']==0].iloc[0]))]
    return [bool(row.low-1e-12<=math.expm1(e-best)<=row.high+1e-12) for e,row in zip(effects, table.itertuples())]

@pytest.mark.slow
@pytest.mark.parametrize('effects,counts', [([0.]*2,[5,5]),([0.]*5,[2]*5),([0.]*4,[3,3,3,1])], ids=['two','five','unbalanced'])
def test_intervals_hold_as_often_as_they_say(effects, counts):
    "All of them at once, with sizes that are alike: the hardest case, where the best is the luckiest"
    rng,n = np.random.default_rng(1),500
    assert within(sum(all(holds(effects, counts, rng)) for _ in range(n))/n, n, 0.95)

@pytest.mark.slow
@pytest.mark.parametrize('effects', [[0.1,0.03,0.,0.02,0.2],[0.,0.01,0.02,0.03,0.04]], ids=['a valley','a slope'])
def test_intervals_hold_where_sizes_differ(effects):
    rng,n = np.random.default_rng(2),200
    assert sum(all(holds(effects, [2]*5, rng)) for _ in range(n))/n>=0.93

@pytest.mark.slow
def test_intervals_hold_where_the_leaders_are_repeated():
    "Which arms are run more often is found out by the first run"
    rng,n,hits,told = np.random.default_rng(3),200,0,0
    for _ in range(n):
        full = runs_of([0.]*5, [3]*5, 0.02, rng=rng)
        leaders = full[full.run==0].sort_values('loss').bs[:2].tolist()
        df = full[(full.run==0) | full.bs.isin([*leaders,1])]
        spread = spread_of(df)
        table = compared(df, spread)
        hits += bool((table.low<=1e-12).all())
        told += spread.dof>=2
    assert told==n and hits/n>=0.93

def test_sizes_that_are_alike_are_rarely_told_apart():
    "Student's t would tell some of them apart in a fifth of the trials"
    rng = np.random.default_rng(4)
    assert sum(not all(holds([0.]*5, [2]*5, rng)) for _ in range(100))<=12

# Which size is best

def test_compared_takes_the_best_rate_of_each_size():
    df = pd.concat([runs_of([0.3,0.2], [2,2], 0.),runs_of([0.1,0.4], [2,2], 0.).assign(factor=3.)])
    table = compared(df, Spread(0.01, 4))
    assert table.bs.tolist()==[1,2] and table.factor.tolist()==[3.,1.] and table['diff'].tolist()==approx([0,math.expm1(0.1)])
    assert table.loss.iloc[1]/table.loss.iloc[0]==approx(math.exp(0.1))
    half = Spread(0.01, 4).interval(1., n_arms=4) # Each rate had its chance to look best
    assert [*table[['low','high']].iloc[1]]==approx([math.expm1(0.1-half),math.expm1(0.1+half)]) and [*table[['low','high']].iloc[0]]==[0,0]

@pytest.mark.parametrize('to', [1,2,4])
def test_compared_to_a_size_that_is_asked_for(to):
    df = runs_of([0.3,0.2,0.25], [2,2,2])
    table,best = compared(df, spread_of(df), to=to),compared(df, spread_of(df))
    at = table.bs.tolist().index(to)
    assert [*table.iloc[at][['diff','low','high']]]==[0,0,0]
    assert table['diff'].tolist()==approx([(1+o)/(1+best['diff'][at])-1 for o in best['diff']])

def test_compared_where_chance_is_not_known():
    table = compared(runs_of([0,1.], [1,1]), Spread(nan, 0))
    assert table.low.tolist()==[0,-1] and table.high.tolist()==[0,inf] and table['diff'].iloc[1]>0

def table_of(loss, low, high=0.):
    return pd.DataFrame(dict(bs=[2**i for i in range(len(loss))], loss=loss, diff=np.array(loss)/min(loss)-1, low=low, high=high))

@pytest.mark.parametrize('loss,low,high,ties,good', [
    ([1.,1.,1.],[0,-.01,-.01],[0,.01,.01],[1,2,4],[1,2,4]), ([1.05,1.,1.005],[-.1,0,-.1],[.2,0,.1],[1,2,4],[2]),
    ([1.005,1.,1.2],[.001,0,.1],[.009,0,.3],[2],[1,2]),
    ([1.005,1.,1.01],[-1,0,-1],[.02,0,.0202],[1,2,4],[1,2]), ([1.],[0],[0],[1],[1]), ([1.2,1.,1.1],[0.,0,.01],[math.inf]*3,[1,2],[2])])
def test_ties(loss, low, high, ties, good):
    "As good is what is known to be within 2%, and not what might be"
    table = table_of(loss, low, high)
    assert (tied(table),about_as_good(table))==(ties,good)

@pytest.mark.parametrize('loss,bs', [([1.,1.,1.,1.],8),([1.,1.009,1.02,1.03],2),([1.,0.9,0.905,1.2],4),([1.,0.9,0.95,0.85],8),([1.,1.02,1.,1.5],4),([1.,1.1],1),
    ([1.],1),([1.,0.99,0.999,1.003],4),([2.,1.5,1.,1.005],8)])
def test_critical(loss, bs): assert critical(table_of(loss, 0))==bs

def test_critical_range_has_the_point_in_it_and_closes_on_it():
    rng = np.random.default_rng(5)
    for _ in range(30):
        effects = 0.02*rng.normal(size=5)
        df = runs_of(effects, [3]*5, 0.02, rng=rng)
        low,high = critical_range(df, spread_of(df))
        assert low<=critical(compared(df, spread_of(df)))<=high
        assert critical_range(df, Spread(1e-9, 4))==(critical(compared(df, spread_of(df))),)*2 or low<high

@pytest.mark.parametrize('spread', [Spread(nan, 0),Spread(10., 4)])
def test_critical_range_where_nothing_can_be_told(spread): assert critical_range(runs_of([0.,0.2,0.4], [2]*3), spread)==(1,4)

@pytest.mark.slow
def test_critical_range_has_the_truth_in_it():
    "Here 4 is the last that is within 1% of the best of all smaller"
    effects,rng,n = [0.,0.002,0.004,0.03,0.06,0.2],np.random.default_rng(6),300
    def _range():
        df = runs_of(effects, [3]*6, 0.01, rng=rng)
        return critical_range(df, spread_of(df))
    found = [_range() for _ in range(n)]
    assert sum(low<=4<=high for low,high in found)/n>=0.95 and sum(high<=8 for _,high in found)/n>0.5

def test_tolerance(): assert math.exp(tolerance)==approx(1.01)
