"`BatchVerification` on trainings that never ran: verdicts, numbers, and what follows"
from functools import cache

import pytest
from fastai_bs.verify.compare import compared, log_losses
from fastai_bs.verify.advice import verified_words
from trials import planned_of, trial

approx = lambda v: pytest.approx(v, rel=1e-9)

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
    'one size': (lambda: trial({}),'unknown',64)}

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
    assert [case_of(o).no_plan_for for o in ('one run','few runs','one size')]==['chance','chance','alone']

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

def test_a_size_that_was_left_out_does_not_count():
    v = trial({128: 1., 256: 1.}, left_out=((128,'loss'),))
    assert v.table.bs.tolist()==[64,256]
    assert v.bs==256
    assert v.tried==[64,128,256]

# What is left open

def test_items_that_were_seen_twice_are_cautioned_about():
    v = trial({256: 1.}, valid=False)
    assert v.decided_by=='train_loss'
    assert v.saw_twice
    assert any('overfitting' in o for o in verified_words(v)['caution'])
    assert not any('overfitting' in o for o in verified_words(trial({256: 1.})).get('caution', []))
