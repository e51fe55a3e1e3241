"`BatchVerification` on trials that never ran: verdicts, numbers, and what follows"
import dataclasses
import json
import math
from functools import cache

import pytest
from fastai_bs.schedule.scaled_lr import scale_lr
from fastai_bs.utils.text import rate_text
from fastai_bs.verify.advice import run_line, verified_words
from fastai_bs.verify.compare import compared, critical, critical_range, log_losses
from trials import planned_of, step_time, steps, trial, valley

nan,inf = math.nan,math.inf
approx = lambda v: pytest.approx(v, rel=1e-9)

def changed(v, where, **values):
    "`v` with other values in the rows of `df` where `where(df)`"
    df = v.df.copy()
    for nm,o in values.items(): df.loc[where(df),nm] = o
    return dataclasses.replace(v, df=df)

def without_end(df, bs): return (df.bs==bs) & (df.part==1)

cases = { # Trial; verdict, size
    'a larger one is better': (lambda: trial(valley(128)),'use',128),
    'a smaller one is better': (lambda: trial(valley(32)),'use',32),
    "today's is the best": (lambda: trial(valley(64)),'stay',64),
    'all alike': (lambda: trial(steps({})),'tied',64),
    'one is open, the others are worse': (lambda: trial(steps({32: 1.2, 128: 1.001, 256: 1.2})),'tied',64),
    'the best of several that are better': (lambda: trial(steps({32: 0.9, 128: 0.8, 256: 0.85})),'use',128),
    'one run': (lambda: trial(valley(128), n_runs=1),'unknown',64),
    'few runs': (lambda: trial(valley(128), sizes=(64,128), n_runs=3),'unknown',64),
    'one size': (lambda: trial(valley(128), whole=(64,)),'unknown',64),
    "today's has no loss": (lambda: changed(trial(valley(128)), lambda df: without_end(df, 64), valid_loss=nan),'unknown',64),
    'items: within 2% and faster': (lambda: trial(steps({32: 0.98, 128: 1.005, 256: 1.2}), equal='items', sd=1e-3),'use',128),
    'items: the fastest of several': (lambda: trial(steps({256: 1.001}), equal='items', sd=1e-3),'use',256),
    'items: lower, but slower': (lambda: trial(steps({32: 0.8, 128: 1.2, 256: 1.2}), equal='items', sd=1e-3),'stay',64),
    'items: perhaps within 2%': (lambda: trial(steps({128: 1.02, 256: 1.2}), equal='items', sd=0.01),'tied',64),
    'plan: it keeps its word': (lambda: trial(steps({256: 1.005}), sizes=(64,256), rates=(1,), equal='plan', sd=1e-3),'use',256),
    'plan: it ends higher': (lambda: trial(steps({256: 1.05}), sizes=(64,256), rates=(1,), equal='plan', sd=1e-3),'stay',64),
    'plan: perhaps': (lambda: trial(steps({256: 1.015}), sizes=(64,256), rates=(1,), equal='plan', sd=0.01),'tied',64)}

@cache
def case_of(nm): return cases[nm][0]()

@pytest.mark.parametrize('nm', cases)
def test_verdict_and_size(nm):
    v,(_,verdict,bs) = case_of(nm),cases[nm]
    assert (v.verdict,v.bs,v.plan.bs)==(verdict,bs,bs)
    assert v.is_known==(verdict!='unknown')==(v.no_plan_for is None)
    assert bool(v.open_sizes)==(verdict=='tied') or verdict=='use'
    if verdict=='unknown':
        assert v.factor==1
        assert v.critical_bs is None

@pytest.mark.parametrize('equal', ['time','items'])
def test_alike_sizes_are_rarely_told_apart(equal):
    "In the same time another one is said to be lower in a twentieth of the trials, half of these by the upper end of the interval, at most"
    n,margin = 25,dict(time=1., items=1.02)[equal]
    losses = {bs: margin for bs in (32,128,256)}
    if equal=='items': losses[32] = 1.5 # It is slower
    used = sum(trial(steps(losses), rates=(1,), sd=0.01, n_runs=3, equal=equal, seed=seed).verdict=='use' for seed in range(n))
    assert used<=3

# Numbers

def test_the_table_has_the_means_of_runs():
    v = trial(valley(128), sizes=(512,256,64,128,32), whole=(64,128,256))
    t = v.table.set_index('bs')
    assert [*t.index]==[32,64,128,256,512]
    assert t.part.tolist()==[0.25,1,1,1,0.25]
    assert t.runs.tolist()==[1,4,4,4,1]
    mine = v.df[without_end(v.df, 256)]
    for nm in ('steps','seconds','train_loss','valid_loss'): assert t.loc[256,nm]==approx(mine[nm].mean())
    assert t.loc[256,'passes']==approx(mine['items'].mean()/v.n_train)
    assert (t.micro_bs*t.n_acc==t.index).all()
    whole = compared(log_losses(v.runs[v.runs.part==1]), 64)
    for nm in ('diff','low','high'): assert t.loc[whole.index,nm].tolist()==approx(whole[nm].tolist())
    quarter = v.runs[v.runs.part==0.25].set_index('bs').loss
    assert t.loc[512,'diff']==approx(quarter[512]/quarter[64]-1)
    assert t.loc[[32,512],['low','high']].isna().all(axis=None)
    assert v.difference(128, 64)==approx(tuple(whole.loc[128]))
    assert v.difference(64, 128)[0]==approx(1/(1+whole['diff'][128])-1)

def test_a_size_that_failed_once_is_out_at_that_length():
    "The other runs were lucky"
    v = changed(trial(valley(128)), lambda df: without_end(df, 128) & (df.run==2), valid_loss=nan)
    assert v.table.set_index('bs').part.to_dict()=={32: 1, 64: 1, 128: 0.25, 256: 1}
    assert 128 not in v.losses

def test_a_run_that_was_not_ended_does_not_count():
    v = trial(valley(128), n_runs=5)
    cut = dataclasses.replace(v, df=v.df[:-2], interrupted=True)
    assert cut.n_runs==4
    assert cut.losses.equals(v.losses[:-1])
    assert cut.verdict=='use'

@pytest.mark.parametrize('lr,adam', [(0.01,True),(slice(1e-4,1e-2),False)])
def test_the_plan_has_the_rate_that_won(lr, adam):
    planned = planned_of(lr=lr, adam=adam)
    v = dataclasses.replace(trial(valley(128, best_rate=3), rates=(1,3,9)), planned=planned)
    tried,as_planned = v.plan.wd,dataclasses.replace(v, equal='plan').plan.wd # Trials of equal time have the learner's own decay
    assert tried==planned.facts.today.wd!=as_planned==planned.at(128).wd
    assert v.factor==3
    assert v.plan.bs==128
    assert v.planned.lr==lr
    assert rate_text(v.plan.lr)==rate_text(scale_lr(lr, 3))
    assert rate_text(v.plan.scaled_lr)==rate_text(scale_lr(planned.at(128).scaled_lr, 3))
    assert rate_text(v.plan.lr) in run_line(v)

def test_epochs_take_as_long_by_the_seconds_that_were_measured():
    v = trial(valley(128))
    assert v.epochs_in_time(5)==approx(5*128/64*step_time(64)/step_time(128))
    assert v.epochs==7
    slow = changed(v, lambda df: without_end(df, 128), seconds=2.3*v.at_best(128).seconds)
    assert slow.epochs_in_time(5)==approx(v.epochs_in_time(5)/2.3)
    assert slow.epochs==3
    assert trial(valley(64)).epochs_in_time(3)==3

@pytest.mark.parametrize('equal,n_epoch,epochs', [('time',5,7),('time',1,None),('time',0.5,None),('items',5,5)])
def test_epochs_are_whole_and_not_far_off_or_left_open(equal, n_epoch, epochs):
    v = trial(steps({128: 0.9, 256: 1.2}), equal=equal, n_epoch=n_epoch)
    assert v.bs==128
    assert v.epochs==epochs
    assert f'fit_one_cycle({epochs or "n_epoch"}, ' in run_line(v)

def test_critical_batch_size_is_of_equal_items():
    loss = lambda bs,f,p: 0.5*(1+max(0,bs-128)/1000)
    v = trial(loss, equal='items', sd=1e-4)
    assert v.critical_bs==128==critical(v.losses)
    assert v.critical_range==critical_range(v.losses)==(128,128)
    assert trial(loss).critical_bs is None is trial(loss).critical_range

# What is left open

def test_items_that_were_seen_twice_are_cautioned_about():
    v = trial(valley(128), valid=False)
    assert v.decided_by=='train_loss'
    assert v.saw_twice
    assert any('overfitting' in o for o in verified_words(v)['caution'])
    assert not trial(valley(128), n_epoch=0.5).saw_twice

# As values

@pytest.mark.parametrize('nm', ["today's is the best",'one run'])
def test_to_dict_is_strict_json(nm):
    v = case_of(nm)
    values = json.loads(json.dumps(v.to_dict(), allow_nan=False))
    assert (values['verdict'],values['bs'],values['plan']['bs'])==(v.verdict,v.bs,v.bs)
    assert values['spread']['dof']==v.spread.dof
