"What a verification says: a headline, a line to run, and no number that is not known"
import re

import pytest
from fastai_bs.verify.advice import headline, headlines, run_line, verified_words
from verify.test_result import case_of, cases

@pytest.mark.parametrize('nm', cases)
def test_words_of_each_verdict_are_of_what_is_known(nm):
    "One headline, a line of Python to run, and no number that is not known"
    v = case_of(nm)
    words,everything = verified_words(v),f"{v!r} {v.details()}"
    template = headlines[v.verdict][v.no_plan_for or dict(time='lower').get(v.equal, 'faster')]
    assert re.fullmatch(re.sub(r'\\{\w+\\}', '.+', re.escape(template)), headline(v))
    assert words['do']==[headline(v)]
    assert len(words.get('caution', []))<=3
    assert not re.search(r'\b(nan|inf|None)\b', everything.replace('critical_bs=None', ''))
    compile(run_line(v), 'line', 'eval' if v.verdict in ('use','stay') else 'exec')
    assert ('bs_verify' in run_line(v))==(v.verdict in ('tied','unknown'))
    assert ('v.plan.apply' in run_line(v))==v.plan.choice.option.changes*(v.verdict in ('use','stay'))
    assert '<table' in v._repr_html_()
    assert v.advice
