"What a verification says: a headline, a line to run, and no number that is not known"
import re
from dataclasses import replace

import pytest
from fastai_bs.finder.facts import Trial
from fastai_bs.verify.advice import headline, headlines, run_line, sizes_table, verified_words
from plans import plan_of, secs
from trials import trial
from verify.test_result import case_of, cases

@pytest.mark.parametrize('nm', cases)
def test_words_of_each_verdict_are_of_what_is_known(nm):
    "One headline, a line of Python to run, and no number that is not known"
    v = case_of(nm)
    words,everything = verified_words(v),f"{v!r} {v.details()}"
    template = headlines[v.no_plan_for or v.verdict]
    assert re.fullmatch(re.sub(r'\\{\w+\\}', '.+', re.escape(template)), headline(v))
    assert words['do']==[headline(v)]
    assert len(words.get('caution', []))<=3
    assert not re.search(r'\b(nan|inf|None)\b', everything)
    assert 'e+0' not in everything # 1320 steps are not 1.32e+03
    compile(run_line(v), 'line', 'eval' if v.verdict in ('use','stay') else 'exec')
    assert ('bs_verify' in run_line(v))==(v.verdict in ('tied','unknown'))
    assert ('v.plan.apply' in run_line(v))==v.plan.choice.option.changes*(v.verdict in ('use','stay'))
    assert '<table' in v._repr_html_()

def test_the_line_to_run_again_asks_the_same_with_more_runs():
    "Sizes of one's own again, 16 trainings with each of the three"
    v = trial({32: 1., 256: 1.015}, sd=0.01)
    assert v.verdict=='tied'
    assert run_line(v)=='v = learn.bs_verify(v.planned, sizes=[32], n_runs=16)  # Takes about 13 min 17 s'
    assert 16*v.table.seconds.sum()==pytest.approx(797.5, abs=0.5)

def test_a_plan_for_fine_tune_is_run_by_fine_tune():
    "With the frozen epochs that were tried"
    planned = plan_of(trial=Trial(256, 64., 3910), freeze_epochs=1, frozen=0.00656).at(256)
    v = replace(trial({256: 0.9}, sd=1e-3), planned=planned)
    assert (v.verdict,v.bs)==('use',256)
    assert planned.freeze_epochs>1
    assert run_line(v)==f'v.plan.apply(learn).fine_tune({planned.n_epoch}, {planned.lr}, freeze_epochs={planned.freeze_epochs})'
    assert f'Pass {planned.lr} to `fine_tune`' in ' '.join(repr(v).split())
    stays = replace(trial({256: 1.5}, sd=1e-3), planned=planned)
    assert (stays.verdict,run_line(stays))==('stay',f'learn.fine_tune({planned.facts.today.n_epoch}, {planned.facts.today.lr})')

def test_today_s_batch_is_no_planned_one_where_the_plan_only_splits_it():
    "It was trained as it is"
    v = trial({128: 1.03, 256: 1.05}, planned=None)
    marked = sizes_table(v).bs.tolist()
    assert any('planned' in o for o in marked)
    v = replace(v, planned=replace(v.planned, choice=replace(v.planned.choice, verdict='split')))
    assert not any('planned' in o for o in sizes_table(v).bs)
    split = plan_of(micro_bs=16, times=secs(16, 32, 64, a=0.01, c=1e-5), noise_scale=100., ci=(80.,130.))
    said = "As planned, 64 is made up of other micro-batches than today's, to save time; the trainings compared here had today's."
    assert split.verdict=='split'
    assert said in ' '.join(repr(replace(v, planned=split)).split())
    assert said not in ' '.join(repr(v).split())

def test_what_was_measured_is_of_the_plan():
    "Not about a smaller one of one's own that ends lower"
    v = trial({128: 1.03, 256: 1.05}, planned=None)
    assert 'Measured: the validation loss of 256 ended 5% above that of 64 (with 95% confidence, from 4.' in ' '.join(repr(v).split())
    assert 'of the time.' in ' '.join(repr(v).split())

@pytest.mark.parametrize('times,sd,says', [(1.0004,1e-7,'0% above.*from 0% above to 0% above'),(0.973,1e-7,'2.7% below'),(1.15,1e-3,'15% above'),
    (1.0204,0.0056,r'2.\d?% above.*from [\d.]+% [ab]\w+ to [\d.]+% above')])
def test_percents_have_one_decimal_at_most(times, sd, says):
    "And two digits, in the sentence and in the table"
    v = trial({256: times}, sd=sd)
    text = ' '.join([*repr(v).split(),*sizes_table(v)["above today's"]])
    assert re.search(f'ended {says}', text)
    assert not re.search(r'\d\.\d\d+%|\d\d\.\d+%|\[.*\d\.\d\d|-0\b(?!\.)', text)
