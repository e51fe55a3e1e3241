"How numbers are written, what JSON is made of, and what a notebook shows"
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from fastai.callback.core import Callback
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale
from fastai_bs.utils.text import (as_plain, bytes_text, counted, num, rate_text, time_text)
from helpers import loaders, mlp, quiet_learner, regression

@pytest.mark.parametrize('x,text', [(0,'0'), (0.00123,'0.00123'), (9.999,'10'), (99.96,'100'), (1234.5,'1230'), (1e6,'1000000'), (-250.4,'-250'),
    (math.inf,'inf'), (math.nan,'nan')])
def test_numbers_have_three_digits(x, text): assert num(x)==text

@pytest.mark.parametrize('n,text', [(0,'0 items'), (1,'1 item'), (0.9999,'1 item'), (61.26,'61.3 items'), (12345,'12345 items'), (12345.,'12300 items')])
def test_items_are_counted_or_estimated(n, text):
    "A count in full, an estimate in three digits"
    assert counted(n)==text

@pytest.mark.parametrize('lr,text', [(1,'1'), (0.12345,'0.123'), (slice(1e-3,1e-2),'slice(0.001, 0.01)'), (slice(None,1e-2),'slice(0.01)'),
    ([1e-4,1e-3],'[0.0001, 0.001]'), (np.array([0.1]),'[0.1]'), (np.float32(0.1),'0.1')])
def test_rates_are_written_as_python_reads_them(lr, text): assert rate_text(lr)==text and rate_text(0.12345, '.15g')=='0.12345'

@pytest.mark.parametrize('n,text', [(math.nan,''), (0,'0 B'), (999.4,'999 B'), (999.5,'1 KB'), (1500,'1.5 KB'), (2.5e9,'2.5 GB'), (-3e6,'-3 MB'),
    (4e13,'40 TB')])
def test_bytes_have_a_unit(n, text): assert bytes_text(n)==text

@pytest.mark.parametrize('secs,text', [(math.nan,''), (0.0949,'0.09 s'), (0.095,'0.1 s'), (9.94,'9.9 s'), (9.96,'10 s'), (59.4,'59 s'), (59.6,'1 min'),
    (np.float64(190),'3 min 10 s'), (3599.4,'59 min 59 s'), (3599.6,'1 h'), (3660,'1 h 1 min'), (7199,'2 h'), (90_000,'25 h')])
def test_times_have_two_units_at_most(secs, text):
    "Two units at most, and never 60 of one"
    assert time_text(secs)==text

@dataclass
class Record: a:float; b:tuple

@pytest.mark.parametrize('v,res', [(1,1), ('a b','a b'), (None,None), (True,True), (np.float32(0.5),0.5), (np.int64(3),3), (np.array([1,2]),[1,2]),
    (slice(None,0.1),[None,0.1]), ((1,(2,3)),[1,[2,3]]), (Record(0.5, (np.int64(1),slice(1,2))),dict(a=0.5, b=[1,[1,2]])),
    ({'a': (np.float64(1),)},{'a': [1.]})], ids=str)
def test_json_gives_back_plain_values(v, res):
    "JSON gives back what went in"
    assert as_plain(v)==res==json.loads(json.dumps(as_plain(v)))

@pytest.mark.parametrize('cb', [NoiseScale(beta=0.5),BatchSchedule({0: 16, 1: 32})], ids=lambda o: type(o).__name__)
def test_callbacks_show_what_they_have(cb):
    "Before a fit a sentence, in it and afterwards their rows as well"
    assert cb._repr_html_()==f'<p>{cb!r}</p>'
    learn,shown = quiet_learner(loaders(regression(128), 16), mlp()),[]
    def _look(_): shown.append(cb._repr_html_())
    learn.fit(2, 1e-2, cbs=[cb,Callback(after_epoch=_look),*([GradAccum(2)] if isinstance(cb, NoiseScale) else [])])
    for html in (*shown,cb._repr_html_()):
        assert repr(cb).split('(')[0] in html
        assert '<details>' in html
        assert f'<td>{cb.df.iloc[0,-1]:.3g}</td>' in html
