"Advice as values, in thirty situations and for random plans: one thing to do, and nothing that contradicts it. Sentence by sentence it is in test_plan"
import ast
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import fastai_bs.finder.advice
import fastai_bs.plan_text
import plans
from helpers import each_of
from plans import inf, nan, plan_of, rises
from fastai_bs.finder.advice import Advice, advice, cautions, headline, how, why
from fastai_bs.utils.text import Details
from fastai_bs.plan_text import details, joined, numbers_text, plan_details, plan_html, plan_text, shown, step_time_text
from fastai_bs.finder.steps import Duration
from fastai_bs.utils.text import counted, num, percent, rate_text

attributes = """noise_scale ci noise_known is_bound n_windows n_enough n_seen n_passes trend loss_rose seed took epoch_time cool at_peak at_end bs_now base_bs
    base_lr rate_given adam sums pairs trained n_train n_workers n_ranks micro_now epochs_now epochs_given in_whole_epochs epochs_at fastest timed step_time
    time_ratio too_large failed max_bs timing_error least_gain bs bs_range micro_bs n_acc lr rule_name balanced_bs chosen n_epoch n_epoch_exact duration
    table growth wd wd_now wd_factor set_up rate_held rate_failed rate_low rule valid_time epochs""".split()

def told(plan): return [*advice(plan),*details(plan)]

def texts(plan, *kinds): return [o.text for o in told(plan) if o.kind in kinds]

# What holds for every plan

def words(text): return len(text.split())

negative = r"\b(no|not|nothing|none|never|cannot|without|un(?:known|able))\b"

def check_form(plan):
    "One headline, three cautions at most, each a short sentence"
    said,kinds = shown(plan),[o.kind for o in told(plan)]
    assert kinds.count('do')==1 and kinds[0]=='do' and kinds.count('run')<=1 and kinds.count('how')<=3
    order = dict(do=0, how=1, run=2, why=3, caution=4, detail=5)
    assert [order[k] for k in kinds]==sorted(order[k] for k in kinds) and len(said.get('caution', []))<=3
    for text in texts(plan, 'caution'):
        assert words(text)<=20, text
        assert text.endswith('.') and not re.search(r'[.!?] ', text), f"one sentence: {text}"
    for text in texts(plan, 'do', 'how', 'why', 'caution', 'detail'):
        for part in re.split(r'[:;] ', text): assert len(re.findall(negative, re.sub(r'\(.*?\)', '', part)))<=1, f"double negative: {text}"
    everything = ' '.join([o.text for o in told(plan)]+[o.reason for o in told(plan)])
    assert not re.search(r'\b(nan|None|inf)\b', everything, flags=re.I), everything

def check_numbers(plan):
    "What the headline names is the plan's own"
    do,(planned,today),now = headline(plan).text,plan.duration,plan.bs_now
    known,stays = not math.isnan(plan.noise_known),(plan.bs,plan.micro_bs)==(now,plan.micro_now)
    if not plan.pairs and not (known or plan.chosen):
        assert do.startswith(f'Stay at {now} until you ')
        return
    if plan.pairs and not plan.chosen:
        assert do.startswith(f'Stay at {now}: this loss looks at pairs')
        return
    if plan.bs==now: assert do.startswith(f'Stay at {now}')
    else: assert re.match(rf'Use {plan.bs}( as [^:(]*)? \(today {now}\)', do)
    if stays:
        assert '%' not in do or percent(plan.least_gain) in do
        if plan.timed and not plan.chosen: assert (f'for {counted(plan.epochs_now, "epoch")} (' in do)==plan.epochs_given
    elif known:
        assert ('of the time' in do)==bool(plan.timed)
        took = planned if plan.in_whole_epochs else plan.time_ratio*today
        part,off = percent(took/today),1+plan.timing_error
        if off>1.1: part = f'{percent(took/today/off)} to {percent(took/today*off)}' # A noisy clock
        if plan.timed: assert f'about {part} of the time ({Duration(took, today)})' in do
        if plan.timed and plan.in_whole_epochs and plan.bs!=now and not plan.chosen: assert planned<today
        are = f'becomes? {plan.n_epoch}' if plan.in_whole_epochs else f'(is|are) worth {re.escape(num(plan.n_epoch_exact))}'
        if plan.bs!=now: assert re.search(rf': {re.escape(counted(plan.epochs_now, "epoch"))} of {now} {are} of {plan.bs}\b', do)
    if plan.n_acc>1 and not stays: assert f'as {plan.n_acc} x {plan.micro_bs}' in do
    # All of it by one noise scale
    if known and plan.timed and not plan.chosen:
        assert math.isclose(planned/plan.n_epoch*plan.n_epoch_exact/today, plan.time_ratio, rel_tol=1e-9)
        took = planned/today if plan.in_whole_epochs else plan.time_ratio
        if plan.bs==now: took = plan._row(now).step_time/plan.now_step_time # In other micro-batches
        assert stays or took*(1+plan.least_gain)<=1+1e-9, "a gain below the timing's error is none"

def check_consistent(plan):
    "Nothing that is said contradicts anything else"
    do,run = headline(plan).text,' '.join(texts(plan, 'run'))
    everything = ' '.join(o.text for o in told(plan))
    acts = plan.bs!=plan.bs_now or plan.micro_bs!=plan.micro_now
    if do.startswith('Stay at') and not acts: assert 'plan.apply' not in everything and 'scaled' not in everything
    if 'pairs' in do:
        assert not texts(plan, 'how', 'why', 'run', 'detail') and len(texts(plan, 'caution'))==2
        return
    if 'until you' in do: # Measure first, and nothing else
        assert all('rate may be too high' in o for o in texts(plan, 'caution'))
        assert not texts(plan, 'how', 'why') and (not run or run.startswith('plan = learn.bs_find('))
        return
    verb = 'fit_one_cycle' if plan.cool else 'fit'
    rate,*more = texts(plan, 'how')
    decay,sure = [o for o in more if o.startswith('Weight decay becomes')],[o for o in more if o.startswith('How sure')]
    assert len(more)==len(decay+sure) and len(decay)==(plan.wd_factor!=1 and rate_text(plan.wd)!=rate_text(plan.wd_now))
    if decay:
        becomes = f"Weight decay becomes {rate_text(plan.wd)} in place of {rate_text(plan.wd_now)}: it is set for you, unless you pass wd= to the fit."
        assert decay==[becomes] and acts
    assert re.fullmatch(rf"{re.escape('plan.apply(learn)' if acts else 'learn')}\.{verb}\(({plan.n_epoch}|n_epoch), (.+)\)", run)
    assert f'`{verb}`' in rate
    # One rate
    passed = run.split(', ', 1)[1].removesuffix(')')
    if plan.rate_given and not (plan.sums and not plan.adam): assert f'Keep passing {passed} to ' in rate and passed==rate_text(plan.base_lr)
    if not plan.rate_given: assert 'lr' in passed and 'Keep passing 0' not in rate
    assert (f'is scaled to {rate_text(plan.lr)}' in rate)<=(plan.rule_name!='no_scaling')
    assert not ('Keep' in rate and 'in place of' in rate)
    # How sure
    low,high = plan.bs_range
    assert len(sure)==(bool(plan.timed) and not plan.chosen)
    for_longer = plan.bs==plan.bs_now!=plan.fastest and not plan.chosen
    assert ('For a longer training' in everything)==for_longer>=bool(re.search('in whole epochs|as a whole fit', do))
    assert ('in whole epochs' in do)<=plan.in_whole_epochs and not ('as a whole fit' in do and plan.in_whole_epochs)
    if sure and sure[0][10].isdigit(): assert low<=plan.bs<=(high or inf) and sure[0]==f"How sure: {low} {'or more' if high is None else f'to {high}'}."
    assert plan.is_bound==(plan.noise_scale==inf or plan.noise_scale==plan.ci[0]>0)
    bounded = plan.cool is not None and 2*plan.noise_known<plan.cool.noise_scale and plan.ci[1]>=1
    assert (f"bounds it to {num(plan.noise_known)}, and today's" in ' '.join(texts(plan, 'why')))==bounded
    if plan.is_bound and plan.noise_known>0 and plan.ci[1]>=1 and not bounded:
        assert f"between {num(plan.ci[0])} and {num(plan.ci[1])}" in everything or 'at least' in everything
    if plan.is_bound and math.isinf(plan.ci[1]) and plan.noise_known>0 and not bounded:
        assert 'at least' in everything and f'at least {num(plan.ci[0])} ' in ' '.join(texts(plan, 'why'))
    # Accumulation, smaller and larger
    if plan.n_acc>1 and acts: assert not re.search('Accumulation is left out|would need accumulation', everything)
    if plan.bs<=plan.bs_now: assert 'A larger batch takes' not in everything and 'larger steps' not in everything and 'too low a rate' not in everything
    if plan.bs>=plan.bs_now: assert 'A smaller batch learns' not in everything and 'smaller steps' not in everything
    assert not ('measure again later, as a larger' in everything and 'measure again later, as a smaller' in everything)
    if not plan.chosen: assert 'This takes longer' not in everything and 'slower than need be' not in everything

def check(plan):
    for f in (check_form, check_numbers, check_consistent): f(plan)

# The situations

@pytest.mark.parametrize('nm', plans.situations)
def test_situation(nm): check(plans.situations[nm]())

def test_there_are_thirty_and_all_differ():
    said = [plan().details() for plan in plans.situations.values()]
    assert len(said)>=30 and len({*said})==len(said)

# Random plans

def random_plan(seed):
    "Of any measurement, training and device"
    r = random.Random(seed)
    def f(a, b): return math.exp(r.uniform(math.log(a), math.log(b)))
    micro,n_acc,ranks = r.choice([3,8,25,64]),r.choice([1,1,2,5]),r.choice([1,1,2])
    noise = r.choice([0.,inf,*4*[f(1, 6e4)]])
    low = r.choice([0.,0.3,0.9,1.])*(noise if noise<inf else f(1, 1e4))
    high = inf if r.random()<0.3 else (low if noise==inf else noise)*r.choice([1.1,3.])+1e-3
    a,c,once,busy = f(1e-4, 0.1),f(1e-6, 1e-2),r.choice([0.,0.3,0.9]),r.choice([0.,0.,0.02,0.3])
    sizes = [o for o in (micro//4,micro//2,micro,2*micro,4*micro,8*micro)[:r.randint(3,6)] if o]
    times = tuple((m,(a+c*m)*math.exp(busy*r.uniform(-1,1)),once*a) for m in sizes) if r.random()<0.9 else ()
    now,largest = micro*n_acc*ranks,max(sizes)
    mock = r.random()<0.7
    along = {} if mock else dict(cool=None, at_peak=None, at_end=None, moved=False, trend=r.choice([-1,0,1]))
    plan = plan_of(noise, (low,high), bs_now=now, base_bs=r.choice([now,now,2*now]), micro_now=micro, n_ranks=ranks, n_windows=r.choice([4,10,30,30,30]),
        times=times, adam=r.random()<0.5,
        spread=r.choice([nan,0.,0.05,0.4]), n_train=r.choice([2*now,1000,10**6]), epochs_now=r.choice([0.3,1,2.5,5,40]), epochs_given=r.random()<0.8,
        rate_given=mock and r.random()<0.8, base_lr=r.choice([0.1,0.0123,slice(1e-4,1e-2),[1e-3,1e-2]]), loss_rose=mock and r.random()<0.1,
        sums=r.random()<0.2, pairs=r.random()<0.05, took=r.choice([nan,5.,50.]),
        trained=r.choice([1.,1.,0.3]), n_passes=r.choice([0.2,1.2,4.,14.]), n_workers=r.choice([0,4]), too_large=r.choice([None,2*largest]),
        failed=r.choice([(),(),((2*largest,'ValueError: no'),(4*largest,'KeyError: 3'))]), max_bs=r.choice([None,None,largest]), n_enough=r.choice([None,
            500]), **along)
    if r.random()<0.5: plan = replace(plan, df=rises(f(1, 1e5), g_sq=lambda o: o.g_sq.where(o.pct<r.choice([0.9,1.]), -1.)))
    more = random.Random(f'more of {seed}') # The numbers above stay what they were
    plan = replace(plan, valid_time=more.choice([0.,0.,0.5,20.]), wd_now=more.choice([None,0.01,[0.01,0.1]]), set_up=more.random()<0.1)
    if plan.moved and plan.bs>now: plan = replace(plan, **more.choice([{},dict(rate_held=plan.bs, rate_low=plan.adam),dict(rate_failed=plan.bs)]))
    if r.random()<0.25:
        try: return plan.at(r.choice([now,micro*ranks,4*now]))
        except ValueError: pass # The epoch does not hold it, or it is not made of what ran
    return plan

@pytest.mark.parametrize('block', range(4))
def test_random_plans(block):
    each_of(random_plan, check, range(40*block, 40*(block+1)))

def test_random_plans_are_of_all_kinds():
    "Do these tests see what they should?"
    plans = [random_plan(o) for o in (*range(400),417,526)] # In the last two the batch grows, and one was chosen at which no rate was tried
    said = [headline(o).text for o in plans]
    for start in ('Use ', r'Stay at \d+ for', r'Stay at \d+: other', r'Stay at \d+: how', r'Stay at \d+, but as', r'Stay at \d+.*what other sizes gain',
        'Use .*as you chose',
                  'as you chose: nothing', 'epochs for it are unknown', 'lower rate', 'measured for longer', 'more items',
                  'in whole epochs', 'as a whole fit', 'is worth', 'are worth', 'pairs of items',
                      'on each of 2 ranks'):
        assert any(re.search(start, o) for o in said), start
    every = ' '.join(' '.join(texts(o, 'caution', 'detail')) for o in plans)
    source = ''.join(Path(o.__file__).read_text() for o in (fastai_bs.finder.advice, fastai_bs.plan_text))
    found = re.findall(r"""Advice\('(?:caution|detail)', f?(["'])([^{]{12,}?)[{"]""", source)
    assert len(found)>15
    for _,start in found: assert start in every, start

# As values

def plain(plan): return {nm: getattr(plan, nm) for nm in attributes}

class Frozen:
    "Refuses to be changed"
    def __init__(self, **kwargs): vars(self).update(kwargs)
    def __setattr__(self, nm, v): raise AttributeError(nm)

@pytest.mark.parametrize('f', [lambda o: list(advice(o)), headline, lambda o: list(how(o)), lambda o: list(why(o)), lambda o: list(cautions(o)),
    lambda o: list(details(o)),
    shown, joined, numbers_text, step_time_text, plan_text, plan_html, plan_details])
def test_pure(f):
    "The same each time, of any object with the attributes, which is left as it is"
    plan = plans.situations['a tiny set, many passes']()
    o = Frozen(**plain(plan))
    was,table = dict(vars(o)),plan.table.copy()
    res = f(o)
    assert res and f(o)==res==f(plan)==f(SimpleNamespace(**plain(plan))) and vars(o)==was and table.equals(plan.table)

def test_advice_is_a_value():
    o = Advice('do', 'This.')
    assert o==Advice('do', 'This.')!=Advice('why', 'This.') and hash(o)==hash(Advice('do', 'This.')) and o.reason==''
    with pytest.raises(AttributeError): o.kind = 'why'

def test_text_and_html_hold_the_same_words():
    for make in plans.situations.values():
        plan = make()
        text,html = ' '.join(plan_text(plan).split()),' '.join(re.sub('<.+?>', ' ', plan_html(plan).replace('<code>', '`').replace('</code>', '`')).split())
        for o in (x for kind,xs in shown(plan).items() for x in xs):
            assert o in text and o.replace('<', '&lt;') in html, o
        assert text.endswith('More in plan.details().') and 'More in `plan.details()`.' in html
        assert max(map(len, plan_text(plan).split('\n')))<=110

def test_details_are_a_string():
    text = Details('A\nB', '<p>A</p>')
    assert text=='A\nB'==repr(text)==str(text) and text._repr_html_()=='<p>A</p>' and text.split('\n')==['A','B']

def test_html_takes_the_colours_of_the_page():
    "Light or dark: it sets none"
    for make in plans.situations.values():
        for html in (plan_html(make()), make().details()._repr_html_()): assert not re.search(r'color|background|#[0-9a-f]{3}', html)

@pytest.mark.parametrize('mod', [fastai_bs.finder.advice, fastai_bs.plan_text])
def test_imports_no_class_of_ours(mod):
    "Functions alone: what is advised on is whatever has the attributes"
    tree = ast.parse(Path(mod.__file__).read_text())
    ours = [o.name for node in tree.body if isinstance(node, ast.ImportFrom) and node.level for o in node.names]
    assert ours and all(o==o.lower() or o in ('Advice','Duration') for o in ours)
