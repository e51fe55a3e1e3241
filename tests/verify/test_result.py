"`BatchVerification` on trainings that never ran: verdicts, numbers, and what follows"
import dataclasses
import json
import math
from functools import cache

import pytest
from fastai_bs.verify.compare import compared, log_losses
from fastai_bs.verify.advice import verified_words
from fastai_bs.verify.result import within
from trials import planned_of, trial

approx = lambda v: pytest.approx(v, rel=1e-9)

def changed(v, where, **values):
    "`v` with other values in the rows of `df` where `where(df)`"
    df = v.df.copy()
    for nm,o in values.items(): df.loc[where(df),nm] = o
    return dataclasses.replace(v, df=df)

cases = { # Verification; verdict, size
    'the plan holds': (lambda: trial({256: 1.005}),'use',256),
    'it ends lower': (lambda: trial({256: 0.9}),'use',256),
    'the fastest of several': (lambda: trial({128: 1.001, 256: 1.005, 512: 1.2}),'use',256),
    'it ends higher': (lambda: trial({256: 1.05}),'stay',64),
    'lower, but slower': (lambda: trial({32: 0.8}, planned=planned_of(32)),'stay',64),
    'perhaps': (lambda: trial({256: 1.015}, sd=0.01),'tied',64),
    'one is open, the others are worse': (lambda: trial({32: 1.2, 128: 1.019, 256: 1.2}, sd=3e-3),'tied',64),
    'one run': (lambda: trial({256: 1.}, n_runs=1),'unknown',64),
    'few runs': (lambda: trial({256: 1.}, n_runs=3),'unknown',64),
    'one size': (lambda: trial({}),'unknown',64),
    "today's has no loss": (lambda: changed(trial({256: 1.}), lambda df: df.bs==64, valid_loss=math.nan),'unknown',64)}

@cache
def case_of(nm): return cases[nm][0]()

@pytest.mark.parametrize('nm', cases)
def test_verdict_and_size(nm):
    v,(_,verdict,bs) = case_of(nm),cases[nm]
    assert (v.verdict,v.bs,v.plan.bs)==(verdict,bs,bs)
    assert v.is_known==(verdict!='unknown')==(v.no_plan_for is None)
    assert bool(v.open_sizes)==(verdict=='tied') or verdict=='use'
    assert (v.plan is v.planned)==(bs==v.planned.bs)

def test_why_nothing_is_known():
    assert [case_of(o).no_plan_for for o in ('one run','few runs','one size',"today's has no loss")]==['chance','chance','alone','today']

def test_a_size_that_ends_too_high_is_rarely_taken():
    "One that ends right at the margin is said to hold in a fortieth of the trials"
    n = 60
    assert sum(trial({256: 1+within}, sd=0.01, seed=seed).verdict=='use' for seed in range(n))<=5

# Numbers

def test_the_table_has_the_means_of_runs():
    v = trial({128: 1.01, 256: 1.02})
    t = v.table.set_index('bs')
    assert [*t.index]==[64,128,256]
    assert t.runs.tolist()==[4,4,4]
    mine = v.df[v.df.bs==256]
    for nm in ('steps','seconds','train_loss','valid_loss'): assert t.loc[256,nm]==approx(mine[nm].mean())
    assert t.loc[256,'passes']==approx(mine['items'].mean()/v.n_train)
    assert (t.micro_bs*t.n_acc==t.index).all()
    whole = compared(log_losses(v.runs), 64)
    for nm in ('diff','low','high'): assert t[nm].tolist()==approx(whole[nm].tolist())
    assert v.at(256).seconds==t.seconds[256]

def test_a_size_that_failed_once_is_out():
    "The other runs were lucky"
    v = changed(trial({128: 1., 256: 1.}), lambda df: (df.bs==128) & (df.run==2), valid_loss=math.nan)
    assert v.table.bs.tolist()==[64,256]
    assert v.bs==256

def test_a_run_that_was_not_ended_does_not_count():
    v = trial({256: 1.}, n_runs=5)
    cut = dataclasses.replace(v, df=v.df[:-1], interrupted=True)
    assert cut.n_runs==4
    assert cut.losses.equals(v.losses[:-1])
    assert cut.verdict=='use'

# What is left open

def test_items_that_were_seen_twice_are_cautioned_about():
    v = trial({256: 1.}, valid=False)
    assert v.decided_by=='train_loss'
    assert v.saw_twice
    assert any('overfitting' in o for o in verified_words(v)['caution'])
    assert not any('overfitting' in o for o in verified_words(trial({256: 1.})).get('caution', []))

# As values

@pytest.mark.parametrize('nm', ['the plan holds','one run'])
def test_to_dict_is_strict_json(nm):
    v = case_of(nm)
    values = json.loads(json.dumps(v.to_dict(), allow_nan=False))
    assert (values['verdict'],values['bs'],values['plan']['bs'])==(v.verdict,v.bs,v.bs)
    assert values['spread']['dof']==v.spread.dof
