"Advice as values: its kinds and their order, and that it reads nothing but attributes. What is said, sentence by sentence, is in test_plan"
import ast
import math
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import fastai_bs.advice
from fastai_bs.cycle import Reading
from fastai_bs.step_time import Duration
from fastai_bs.advice import Advice, about_device, advice, headline, plan_html, plan_text, step_time_text

inf = math.inf
plain = dict(noise_scale=512., ci=(430.,640.), noise_known=512., n_windows=30, n_enough=None, n_seen=938, n_passes=1., trend=0, loss_rose=False,
    cool=Reading(380., (310.,470.), 30), at_peak=Reading(45., (40.,52.), 8), at_end=Reading(400., (210.,900.), 7),
    bs_now=64, base_bs=64, base_lr=1e-3, rate_given=True, adam=True, sums=False, trained=1., n_train=60_000, n_workers=0, n_ranks=1, micro_now=64,
    epochs_now=5, epochs_given=True,
    timed=((64,0.004,0.001),(128,0.006,0.001),(256,0.01,0.001)), step_time=(2e-3,3e-5,0.01), time_ratio=0.71, too_large=None, failed=(), max_bs=None,
    bs=128, bs_range=(128,128), micro_bs=128, n_acc=1, lr=1e-3, rule_name='no_scaling', balanced_bs=512, chosen=None,
    n_epoch=6, n_epoch_exact=5.56, duration=Duration(14., 18.3),
    table=pd.DataFrame(dict(bs=[64,128,512], micro_bs=[64,128,256], n_acc=[1,1,2], lr=1e-3, steps=2., examples=2., step_time=0.004, time=[1.,0.71,1.])))

def plan(**kwargs): return SimpleNamespace(**{**plain, **kwargs})

def kinds(**kwargs): return [o.kind for o in advice(plan(**kwargs))]

as_today = dict(bs=64, micro_bs=64, bs_range=(64,64))
unknown = dict(ci=(0.,inf), noise_known=math.nan, **as_today)
fixed = dict(cool=None, at_peak=None, at_end=None)

@pytest.mark.parametrize('kwargs,res', [
    ({}, ['why','do','do','do','why']),                                          # Below; take these; at this rate; no further; what it is for
    (dict(noise_known=200.), ['why','do','do','why']),
    (as_today, ['why','do','do','why']),
    (dict(micro_now=16, **as_today), ['why','do','do','do','why']),              # Another micro-batch alone
    (dict(bs_now=512, noise_known=200.), ['why','do','do','do','why']),          # Do not accumulate
    (dict(bs_now=512, micro_now=256, n_ranks=2, noise_known=200.), ['why','do','do','why']), # Nothing is accumulated
    (dict(timed=()), ['why','why']), (dict(timed=(), **fixed), ['why','next']),
    (dict(epochs_given=False), ['why','do','do','do','why']), (dict(epochs_given=False, **fixed), ['why','do','do','do','next','caution']),
    (dict(n_windows=4), ['do']), (dict(n_windows=4, loss_rose=True), ['caution','do']),
    (dict(loss_rose=True, noise_known=200.), ['caution','why','do','do','why']),
    (unknown, ['do']), (dict(n_train=100, **unknown), ['do']),                   # Run longer
    (dict(ci=(430.,inf), bs_range=(128,None)), ['why','do','do','caution','do','why','next']),
    (dict(noise_scale=inf, ci=(430.,inf), noise_known=430., bs_range=(128,None)), ['why','do','do','caution','do','why','next']),
    (dict(noise_scale=0., ci=(0.,0.5), timed=(), **fixed), ['why']),             # Use the smallest
    (dict(bs_now=1000, timed=()), ['why','why']), (dict(bs_now=500, timed=()), ['why','why']),
    (dict(bs_range=(64,256)), ['why','do','do','caution','do','why']),
    (dict(n_epoch=9), ['why','do','do','do','why','caution']),                   # Many passes
    (dict(duration=Duration(18.3, 18.3)), ['why','do','caution','do','do','why']), # What whole epochs make of it
    (dict(too_large=512), ['why','do','do','do','why','why']),
    (dict(failed=((512,'ValueError: no'),)), ['why','do','do','do','caution','why']),
    (dict(max_bs=300), ['why','do','do','do','caution','why']),
    (dict(trend=1, **fixed), ['why','do','do','do','next']),
    (dict(timed=(), trained=0.5), ['why','why','next']),
    (dict(timed=(), sums=True, adam=False), ['why','why','caution']), (dict(timed=(), sums=True, adam=False, **as_today), ['why','why']),
    (dict(timed=(), n_passes=4.), ['why','why','caution']),
    (dict(timed=(), n_train=1000, **as_today), ['why','why']),
    (dict(timed=(), n_train=1000, **as_today, **fixed), ['why','next','caution']), # Small beside the noise scale
    (dict(n_train=2500, n_workers=2, noise_known=200.), ['why','do','do','why','caution']),
    (dict(n_train=1500, n_workers=2, noise_known=200.), ['why','do','do','why','caution','caution']), # And fewer than 80 steps
    (dict(chosen=128), ['why','do','do','why']), (dict(chosen=512, bs=512, time_ratio=1.1, duration=Duration(20.2, 18.3)), ['why','do','do','caution','why']),
    (dict(chosen=512, bs=512, timed=()), ['why','do','do','why']), (dict(chosen=64, **as_today), ['why','do','why']),
    (dict(unknown, chosen=512, bs=512), ['do','do','do'])], ids=lambda o: str(o)[:80])
def test_kinds(kwargs, res): assert kinds(**kwargs)==res

def test_what_to_do_is_said_of_the_device():
    first,second,third = [o for o in advice(plan()) if o.kind=='do']
    assert 'in 77% of the time' in first.text and 'plan.apply(learn)' in second.text and 'Do not accumulate beyond it' in third.text

def test_one_thing_to_do():
    "Nothing that is said to be done is taken back by another sentence"
    for o in (plan(), plan(**as_today), plan(noise_scale=inf, ci=(430.,inf), noise_known=430., bs_range=(128,None)),
              plan(noise_scale=0., ci=(0.,0.5), noise_known=0.)):
        words = [a.text for a in advice(o) if a.kind=='do' and not a.text.startswith(('After plan.apply','Do not accumulate'))]
        assert len(words)==1 and ('leave it' in words[0] or 'take 128 a step' in words[0]) and not any('use the smallest batch' in a.text for a in advice(o))

def test_advice_is_a_value():
    o = Advice('do', 'This.')
    assert o==Advice('do', 'This.')!=Advice('why', 'This.') and hash(o)==hash(Advice('do', 'This.'))
    with pytest.raises(AttributeError): o.kind = 'why'

class Frozen:
    "Refuses to be changed"
    def __init__(self, **kwargs): vars(self).update(kwargs)
    def __setattr__(self, nm, v): raise AttributeError(nm)

@pytest.mark.parametrize('f', [lambda o: list(advice(o)), lambda o: list(about_device(o)), headline, step_time_text, plan_text, plan_html])
def test_pure(f):
    "The same each time, of any object with the attributes, which is left as it is"
    o = Frozen(**plain)
    was,table = dict(vars(o)),plain['table'].copy()
    res = f(o)
    assert res and f(o)==res==f(plan()) and vars(o)==was and table.equals(plain['table'])

def test_text_and_html_hold_all_of_it():
    words = [o.text for o in advice(plan())]
    text,html = ' '.join(plan_text(plan()).split()),plan_html(plan())
    assert text==' '.join([headline(plan()), *words, step_time_text(plan())])
    assert html.count('<p>')==3 and all(o in html for o in ('64 (today)','128 (planned)','512 (balanced)')) and words[1] in html and headline(plan()) in html

def test_imports_no_class_of_ours():
    "Functions alone: what is advised on is whatever has the attributes"
    tree = ast.parse(Path(fastai_bs.advice.__file__).read_text())
    ours = [o.name for node in tree.body if isinstance(node, ast.ImportFrom) and node.level for o in node.names]
    assert ours and all(o==o.lower() for o in ours)
