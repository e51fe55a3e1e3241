"`BatchVerification`: what trainings of several sizes say, in numbers, sentence by sentence, in random trials, and drawn"
import dataclasses
import json
import math
import random
import re
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from fastai_bs.finder.advice import stays
from fastai_bs.verify.compare import compared, spread_of
from fastai_bs.schedule.scaled_lr import times
from fastai_bs.verify.plots import plot_curves, plot_sizes
from fastai_bs.utils.text import difference_text, rate_text
from fastai_bs.verify.advice import more_runs, rates_beyond, sizes_beyond
from fastai_bs.verify.advice import advice, headline
from fastai_bs.verify.advice import details, exponents, rule_text, verified_html, verified_text
from helpers import each_of
from plans import plan_of
from trials import trial, valley

inf,nan = math.inf,math.nan
approx = lambda v: pytest.approx(v, rel=1e-9)
alike = lambda bs,factor,part: 0.5

def told(v, *kinds): return ' '.join(o.text for o in (*advice(v),*details(v)) if o.kind in (kinds or ('do','how','run','why','caution','detail')))

def changed(v, where, **values):
    "`v` with other values in the rows of `df` where `where(df)`"
    df = v.df.copy()
    for nm,o in values.items(): df.loc[where(df),nm] = o
    return dataclasses.replace(v, df=df)

# Numbers

columns = 'bs micro_bs n_acc lr factor runs passes steps seconds train_loss valid_loss loss diff low high part'.split()

planned = [(1.,256,'Use 256 .today 64.: .* 256 ends '),(1.015,256,'Use 256 .* higher than that of 64'),
    (1.05,64,'Stay at 64: .* 256 ends .* higher than that of 64'),(0.9,256,'Use 256 .* lower than that of 64, in '),(nan,64,'Stay at 64: nothing can be told')]

@pytest.mark.parametrize('ratio,bs,text', planned)
def test_does_the_plan_keep_its_word(ratio, bs, text):
    "Up to 2% are no difference"
    v = trial(lambda bs,f,p: 0.5*(ratio if bs==256 else 1), sizes=(64,256), parts=(1.,), rates=(1,), equal='plan', sd=1e-4, n_runs=4)
    assert v.bs==bs and re.search(text, told(v, 'do')) and (bs in v.kept if v.told else ratio!=ratio)
    if v.told: assert f'.fit_one_cycle({v.epochs}, 0.01)' in told(v, 'run') and v.epochs==v.found.at(bs).n_epoch and v.critical_bs is None

def test_a_plan_that_ends_where_today_has_no_loss():
    v = trial(lambda bs,f,p: nan if bs==64 else 0.5+bs/1e4, sizes=(64,128,256), parts=(1.,), rates=(1,), equal='plan', sd=1e-4, n_runs=4)
    assert v.told and v.bs in (128,256) and "and today's does not" in told(v, 'do')

def test_table():
    v = trial(valley(128), sizes=(512,256,64,128,32), whole=(64,128,256))
    t = v.table.set_index('bs')
    assert [*v.table.columns]==columns and [*t.index]==[32,64,128,256,512] and t.part.tolist()==[0.25,1,1,1,0.25] and t.runs.tolist()==[1,3,3,3,1]
    mine = v.df[(v.df.bs==256) & (v.df.part==1)]
    for nm in ('steps','seconds','train_loss','valid_loss'): assert t.loc[256,nm]==approx(mine[nm].mean())
    assert t.loc[256,'passes']==approx(mine['items'].mean()/v.n_train) and t.loc[256,'lr']==0.01*v.found.at(256).rule(4) and (t.micro_bs*t.n_acc==t.index).all()
    whole = compared(v.runs[v.runs.part==1], spread_of(v.runs[v.runs.part>=0.25])).set_index('bs')
    for nm in ('loss','diff','low','high'): assert t.loc[whole.index,nm].tolist()==approx(whole[nm].tolist())
    # Dropped: behind the best of that length, without an interval
    quarter = v.runs[v.runs.part==0.25].set_index('bs').loss
    assert 0<t.loc[512,'diff']==approx(quarter[512]/quarter.min()-1) and t.loc[[32,512],['low','high']].isna().all(axis=None)

def test_table_has_each_size_at_its_best_rate_at_its_greatest_length():
    v = trial(valley(128, best_rate=3), sizes=(64,128), rates=(1,3), parts=(1.,))
    both = pd.concat([v.df,v.df.assign(factor=1., lr=0.01, valid_loss=v.df.valid_loss*1.1)], ignore_index=True)
    t = dataclasses.replace(v, df=both).table
    assert t.factor.tolist()==[3,3] and t.lr.tolist()==approx([0.03,0.03*v.found.at(128).rule(2)]) and t.runs.tolist()==[3,3]

@pytest.mark.parametrize('loss', [nan,inf,0.,-1.])
def test_a_rate_that_failed_once_is_out_at_that_length(loss):
    "The others were lucky; and only numbers above 0 have a ratio"
    v = changed(trial(valley(128)), lambda df: (df.bs==128) & (df.part==1) & (df.run==1), valid_loss=loss)
    assert v.table.set_index('bs').part.to_dict()=={32:1, 64:1, 128:0.25, 256:1} and v.bs in (64,256)
    if not math.isfinite(loss): assert "128 cannot be compared" in told(v, 'caution')
    v = changed(v, lambda df: df.part==1, valid_loss=loss, train_loss=loss)
    assert v.found.bs_now==v.bs and not v.told and v.best is None

def test_spread_is_of_a_quarter_and_of_the_whole():
    v = trial(valley(128))
    more = pd.concat([v.df,v.df[v.df.part<0.25].assign(run=1, valid_loss=lambda df: df.valid_loss*(1+df.bs))], ignore_index=True)
    assert dataclasses.replace(v, df=more).spread==v.spread==spread_of(v.runs[v.runs.part>=0.25])
    assert v.spread.dof==(3-1)*(4-1)

@pytest.mark.parametrize('loss,kwargs,bs', [
    (valley(128),{},128), (valley(64),{},64),
    (lambda bs,f,p: 0.5*(1.2 if bs==256 else 1),dict(sd=1e-4),32), # The smallest of those about as good
    (lambda bs,f,p: 0.5*(1.2 if bs==256 else 1),dict(sd=1e-4, equal='items'),128), # The one of fewest seconds
    (valley(128),dict(equal='items', sd=1e-4),128),
    (valley(128),dict(n_runs=1),64), (valley(128),dict(sizes=(128,)),64), (valley(128),dict(sizes=(128,256), n_runs=3),64), # Of 2 degrees of freedom
    (valley(128),dict(sizes=(128,256), n_runs=4),128), (valley(128),dict(parts=(1/16,1/4)),64)], ids=range(10))
def test_bs(loss, kwargs, bs): assert trial(loss, **kwargs).bs==bs

def test_fewest_seconds_are_measured():
    v = trial(lambda bs,f,p: 0.5*(1.2 if bs==256 else 1), sd=1e-4, equal='items')
    assert changed(v, lambda df: df.bs==32, seconds=1e-3).bs==32

@pytest.mark.parametrize('base_lr', [0.01,slice(1e-4,1e-2),[1e-3,1e-2]], ids=['number','slice','list'])
@pytest.mark.parametrize('adam', [True,False])
def test_plan(base_lr, adam):
    found = plan_of(adam=adam, base_lr=base_lr)
    v = trial(valley(128, best_rate=3), rates=(1,3,9), found=found)
    assert v.factor==3 and v.plan.bs==128 and rate_text(v.plan.base_lr)==rate_text(times(base_lr, 3)) and rate_text(found.base_lr)==rate_text(base_lr)
    assert rate_text(v.plan.lr)==rate_text(times(found.at(128).lr, 3)) and (v.plan.micro_bs,v.plan.n_acc)==(128,1)
    assert f"fit_one_cycle({v.epochs}, {rate_text(v.plan.base_lr)})" in told(v, 'run')

def test_plan_where_nothing_can_be_told_changes_nothing():
    v = trial(valley(128, best_rate=3), n_runs=1)
    assert v.factor==1 and v.plan.bs==64 and v.plan.base_lr==v.found.base_lr and stays(v.plan)

def test_epochs_take_as_long_by_the_seconds_that_were_measured():
    v = trial(valley(128))
    assert v.epochs_in_time(5)==approx(5*128/64*(2e-3+3e-5*64)/(2e-3+3e-5*128)) and v.epochs==7
    slow = changed(v, lambda df: (df.bs==128) & (df.part==1), seconds=2.3*v.at_best(128).seconds)
    assert slow.epochs_in_time(5)==approx(v.epochs_in_time(5)/2.3) and slow.epochs==3 and '3 epochs of 128 take about as long as 5 of 64' in told(slow)
    assert trial(valley(64)).epochs_in_time(3)==3

@pytest.mark.parametrize('n_epoch,epochs', [(5,7),(1,None),(0.5,None),(3,4),(30,41)])
def test_epochs_are_whole_and_not_far_off_or_left_open(n_epoch, epochs):
    v = trial(valley(128), n_epoch=n_epoch)
    assert v.epochs==epochs and f'fit_one_cycle({epochs or "n_epoch"}, ' in told(v, 'run')
    if epochs: assert abs(epochs/v.epochs_in_time(n_epoch)-1)<=0.1
    else: assert 'In the time of an epoch of 64 there are 1.34 of 128.' in told(v, 'how')

@pytest.mark.parametrize('n_epoch,epochs', [(5,5),(2.5,None),(0.5,None)])
def test_epochs_with_equal_items(n_epoch, epochs): assert trial(valley(128), equal='items', n_epoch=n_epoch).epochs==epochs

def test_epochs_where_today_was_not_tried():
    v = trial(valley(256), sizes=(128,256,512))
    assert math.isnan(v.epochs_in_time(1)) and v.epochs is None and 'fit_one_cycle(n_epoch, ' in told(v, 'run') and 'In the time' not in told(v)
    assert "Today's 64 has no training of the whole length" in told(v, 'caution')

@pytest.mark.parametrize('loss,bs,range,text', [
    (lambda bs,f,p: 0.5*(1+max(0,bs-128)/1000),128,(128,128),'is about 128 items: up to there nothing is lost per item'),
    (lambda bs,f,p: 0.5*(1+bs/100),32,(32,32),'is 32 at most, the smallest that was trained to the end'),
    (alike,256,(256,256),'is at least 256, the largest that was trained to the end')], ids=['between','smallest','largest'])
def test_critical_batch_size(loss, bs, range, text):
    v = trial(loss, equal='items', sd=1e-4)
    assert (v.critical_bs,v.critical_range)==(bs,range) and f'The critical batch size {text}' in told(v, 'why')

def test_critical_batch_size_has_a_range():
    v = trial(lambda bs,f,p: 0.5*(1+max(0,bs-128)/1000), equal='items', sd=0.004, sizes=(16,32,64,128,256,512), rates=(1,))
    assert v.critical_bs==128 and '128 items (16 to 128)' in told(v, 'why')
    v = trial(lambda bs,f,p: 0.5*(1.2 if bs==32 else 1), equal='items', sd=0.01, sizes=(32,64,128,256), rates=(1,))
    assert v.critical_range[1]==256 and f'({v.critical_range[0]} or more)' in told(v, 'why')

@pytest.mark.parametrize('kwargs', [dict(sd=0.05),dict(n_runs=1),dict(sizes=(64,))])
def test_critical_batch_size_that_cannot_be_told(kwargs):
    v = trial(alike, equal='items', **kwargs)
    assert (v.critical_bs is not None)==v.told==('but chance leaves any from 32 to 256 open' in told(v, 'why'))
    assert trial(alike).critical_bs is None is trial(alike).critical_range

@pytest.mark.parametrize('best,to,moves,text', [(256,32,1,'The best size grew'),(32,256,-1,'The best size shrank'),(128,128,0,'about the same at a quarter')])
def test_moves(best, to, moves, text):
    v = trial(valley(best, to=to))
    assert v.moves==moves and text in told(v)
    chance = trial(valley(best, depth=0.001, to=to), sd=0.02)
    assert chance.moves in (None,0) and 'grew' not in told(chance)
    assert trial(valley(best, to=to), parts=(1/16,1.)).moves is None is trial(valley(best, to=to), n_runs=1).moves

# What there is to try next

@pytest.mark.parametrize('loss,kwargs,sizes', [
    (valley(128),{},()), (valley(512),{},(256,512,1024)), (valley(8),{},(8,16,32)), (valley(512),dict(left_out=((512,'no'),)),()),
    (valley(512),dict(left_out=((1024,'no'),)),(256,512)), (valley(8),dict(left_out=((16,'no'),)),()), (valley(512),dict(found=plan_of(n_train=600)),
        (256,512)),
    (alike,{},()), (valley(512),dict(n_runs=1),())], ids=range(9))
def test_sizes_beyond(loss, kwargs, sizes):
    v = trial(loss, **{**dict(sd=0.003), **kwargs})
    assert sizes_beyond(v)==sizes and (f"sizes={sizes}" in told(v, 'caution'))==bool(sizes)

@pytest.mark.parametrize('best,rates,text', [(3,(1/3,1,3),'(3, 9, 27)'),(1/3,(1/3,1,3),'(1/27, 1/9, 1/3)'),(1,(1/3,1,3),''),(1,(1,),''),(2,(1,2),
    '(2, 4, 8)')])
def test_rates_beyond(best, rates, text):
    v = trial(valley(128, best_rate=best), rates=rates)
    assert bool(rates_beyond(v))==bool(text) and ('of the rates won' in told(v))==bool(text) and (not text or f'try rates={text}.' in told(v, 'caution'))

nine = tuple(3.**i for i in range(-4, 5))

@pytest.mark.parametrize('power,text', [(0,'stay as they are, whatever the size'),(0.5,'go with the square root of the size'),(1,'go with the size itself')])
def test_rule_of_the_rates_that_won(power, text):
    rates = tuple(2.**(i/2) for i in range(-8, 9))
    loss = lambda bs,f,p: 0.5*math.exp(0.001*math.log2(bs/128)**2+0.3*math.log(f/(bs/64)**power)**2)
    v = trial(loss, sizes=(16,64,256), rates=rates, sd=0.02, found=plan_of(rate_held=64)) # Whose rate stays, so a factor is the ratio of rates
    assert rule_text(v)==text and f'The best rates {text}, as far as steps of 1.41 can tell.' in told(v, 'detail')
    coarse = trial(loss, sizes=(64,128,256), rates=nine, sd=0.02, found=plan_of(rate_held=64))
    assert rule_text(coarse)=='' and 'The best rates' not in told(coarse)
    assert rule_text(dataclasses.replace(v, found=plan_of(sums=True)))=='' # The rate is that of a sum

@pytest.mark.parametrize('seed', range(20))
def test_exponents_are_those_of_all_lines_through_the_intervals(seed):
    rng = np.random.default_rng(seed)
    x,slope,half = np.sort(rng.uniform(0, 5, 4)),rng.uniform(-1, 2),0.3
    y = slope*x+rng.uniform(-half, half, 4)
    low,high = exponents(np.exp(x), np.exp(y), np.exp(y-half), np.exp(y+half))
    assert low<=slope<=high
    def _any_line(s): return (y-half-s*x).max()<=(y+half-s*x).min()+1e-12
    for s in np.linspace(low-1, high+1, 101): assert _any_line(s)==(low-1e-9<=s<=high+1e-9)

def test_a_rate_at_the_edge_bounds_on_one_side_only():
    "Nothing is known beyond it, so it cannot rule out a steeper line"
    def _trial(power): return trial(lambda bs,f,p: 0.5*math.exp(0.3*math.log(f/(bs/16)**power)**2), sizes=(16,256), rates=(1/4,1/2,1,2,4), sd=0.02, n_runs=5,
                                    found=plan_of())
    assert rule_text(_trial(0.5))=='' and rule_text(_trial(0))=='stay as they are, whatever the size'

def test_a_size_that_is_worse_has_no_say_in_the_rule():
    loss = lambda bs,f,p: 0.5*(3 if bs==512 else 1)*math.exp(0.3*math.log(f/(8 if bs==512 else 1))**2)
    assert rule_text(trial(loss, sizes=(16,64,256,512), rates=(1/2,1,2,4,8,16), sd=0.02, found=plan_of()))=='stay as they are, whatever the size'

def test_least_difference():
    v = trial(valley(128), sd=0.02)
    v = dataclasses.replace(v, df=v.df[~((v.df.bs==32) & (v.df.run>0))])
    half = np.log1p(v.whole.high)-np.log1p(v.whole['diff'])
    assert v.least_difference==approx(math.expm1(half[[1,3]].min())) and v.least_difference<0.9*math.expm1(half[0])
    assert math.isnan(trial(valley(128), n_runs=1).least_difference)

@pytest.mark.parametrize('kwargs,n', [(dict(n_runs=1),3),(dict(n_runs=1, sizes=(64,128)),5),(dict(n_runs=3, sizes=(64,128)),5),(dict(sd=0.03),12),
    (dict(sd=1e-4),0),
    (dict(sizes=(64,)),0)])
def test_more_runs(kwargs, n):
    v = trial(alike, rates=(1,), **kwargs)
    assert more_runs(v)==n and (f'n_runs={n}' in told(v, 'run'))==bool(n)

def test_runs_that_would_tell_are_enough():
    "With as many the interval is as wide as the difference"
    v = trial(lambda bs,f,p: 0.5*{32: 1.3, 64: 1.03}.get(bs, 1.), sizes=(32,64,128), n_runs=3, sd=0.02, rates=(1,))
    found = re.search(r'About n_runs=(\d+) would tell whether 128 is better than 64', told(v, 'caution'))
    diff,low,high = v.difference(128, 64)
    assert 'which may be chance' in told(v, 'do') and diff<0<high
    assert (math.log1p(high)-math.log1p(diff))*math.sqrt(3/int(found[1]))<=-math.log1p(diff)

# Sentences: each in a trial where it is said, and not where it is not

cases = { # Trial, what is said, what is not
    'larger, surely': (lambda: trial(valley(128)),[r"^Use 128 \(today 64\): in the same time its validation loss ends 5.6% \[3.4, 7.7\] lower\.",
        "Keep passing 0.01 to",
        "7 epochs of 128 take about as long as 5 of 64", r"v\.plan\.apply\(learn\)\.fit_one_cycle\(7, 0.01\)",
        "bs_find had planned 256, which agrees within"],
        ['may be chance','n_runs','try ']),
    'larger, perhaps': (lambda: trial(lambda bs,f,p: 0.5*{32: 1.3, 64: 1.03}.get(bs, 1.), sizes=(32,64,128), sd=0.02, rates=(1,)),
        [r"^Use 128 \(today 64\): .* ends [\d.]+% \[-[\d.]+, [\d.]+\] lower, which may be chance\."],[]),
    'smaller, as good': (lambda: trial(lambda bs,f,p: 0.5*(1.2 if bs==256 else 1), sizes=(32,64,256), sd=1e-4, rates=(1,)),
        [r"^Use 32 \(today 64\): in the same time the smaller one is about as good, and they cannot be told apart\."],['lower','32 and 64 cannot']),
    'three as good': (lambda: trial(lambda bs,f,p: 0.5*(1.2 if bs==32 else 1), sd=1e-4, rates=(1,)),
        ["^Stay at 64: in the same time no other size that was tried is better", r"64, 128 and 256 are about as good; the smallest does\.",
        "next best, 32, ends 20%"],
        []),
    'two as good': (lambda: trial(lambda bs,f,p: 0.5*(1 if bs in (64,128) else 1.2), sd=1e-4, rates=(1,)),
        [r"64 and 128 cannot be told apart; the smaller one does\."],[]),
    'stay': (lambda: trial(valley(64)),["^Stay at 64: in the same time no other", r"learn\.fit_one_cycle\(5, 0.01\)",
        r"The next best, 128, ends [\d.]+% \[.*\] higher\."],
        [r'v\.plan\.apply','take about as long']),
    'stay, with a next best that may be as good': (lambda: trial(lambda bs,f,p: 0.5*{64: 1., 128: 1.02}.get(bs, 1.3), sd=0.015, rates=(1,)),
        [r'The next best, 128, ends .* higher, which may be chance\.'],[]),
    'stay, at another rate': (lambda: trial(valley(64, best_rate=3), rates=(1,3,9)),["^Stay at 64, but at 3 times the rate:",
        "Pass 0.03 to .*, 3 times the rate that you gave"],[]),
    'stay, at a lower rate': (lambda: trial(valley(64, best_rate=1/3), rates=(1/9,1/3,1)),["^Stay at 64, but at 1/3 of the rate:"],['rates won']),
    'the highest rate': (lambda: trial(valley(128, best_rate=3)),[r"The highest of the rates won: try rates=\(3, 9, 27\)"],[]),
    'today was not tried': (lambda: trial(valley(256), sizes=(128,256,512)),["Today's 64 has no training of the whole length"],[]),
    'SGD': (lambda: trial(valley(128), found=plan_of(adam=False, base_lr=0.1)),[r"Keep passing 0.1 to `fit_one_cycle`: it is scaled to 0.18 for you\."],[]),
    'a sum': (lambda: trial(valley(128), found=plan_of(adam=False, base_lr=0.1, sums=True)),[r"Pass 0.05 to `fit_one_cycle`: it is scaled to 0.09 for you\.",
        r"\(7, 0.05\)"],
        ['Keep']),
    'all alike': (lambda: trial(alike, sd=1e-4),["^Use 32 .*: 32, 64, 128 and 256 cannot be told apart, and it is the smallest"],['Cannot','n_runs',
        'had planned']),
    "all alike, today's the smallest": (lambda: trial(alike, sd=1e-4, sizes=(64,128), n_runs=4),["^Stay at 64: 64 and 128 cannot be told apart"],
        ['v.plan.apply']),
    'all alike, for the same items': (lambda: trial(alike, sd=1e-4, equal='items'),["^Use 256 .* cannot be told apart, and it takes the fewest seconds"],[]),
    'all within chance': (lambda: trial(alike, sd=0.03, seed=1),["^Cannot tell which size is best: 32, 64, 128 and 256 end within chance",
        "ended lowest: `v.plan` is for ",
        r"n_epoch=5, sizes=\(32, 64, 128, 256\), n_runs=12\)", "Differences below .*% cannot be told: n_runs=12"],['v.plan.apply','had planned',
        'rates won','try ']),
    "today's dropped, the rest within chance": (lambda: trial(lambda bs,f,p: 0.5*(3. if bs==64 else 1)*(1+0.3*math.log(f)**2),
        whole=(128,256), sd=0.03, short_runs=3, seed=2),
        ["^Use (128|256) .*: (128|256) may be as good, but today's was .* behind at 1/4 of the length"],['Cannot',"Today's 64",'bs_verify']),
    'chance is not known': (lambda: trial(valley(128), n_runs=1),["^Stay at 64 until trainings were repeated more often", r"n_runs=3\)",
        "give 0 degrees of freedom, and 3"],
        ['fit_one_cycle','decides','had planned','Use']),
    'chance is hardly known': (lambda: trial(valley(128), sizes=(64,128), n_runs=2),["give 1 degree of freedom"],[]),
    'one size': (lambda: trial(valley(128), sizes=(128,)),["^Stay at 64: nothing can be told, as 128 alone", r"sizes=\(64, 128\)"],['fit_one_cycle',
        'Repeated']),
    'one size, and no other fits': (lambda: trial(valley(128), sizes=(64,), left_out=((32,'a'),(128,'b'))),["32 is left out: a","128 is left out: b"],
        ['bs_verify']),
    'one size, the others diverged': (lambda: changed(trial(valley(128)), lambda df: df.bs>32, train_loss=nan, valid_loss=nan),[r"rates=\(1/81, 1/27, 1/9\)",
        "64, 128 and 256 cannot be compared"],['sizes=']),
    'none came to the end': (lambda: changed(trial(valley(128)), lambda df: df.bs>0, train_loss=nan, valid_loss=nan),["no training came to its end", "rates="],
        ['heart']),
    'losses below 0': (lambda: changed(trial(valley(128)), lambda df: df.bs>0, valid_loss=-1.),["losses are compared by their ratio"],['bs_verify',
        'fit_one_cycle']),
    'interrupted': (lambda: trial(valley(128), whole=(64,128), n_runs=4, interrupted=True),[r"It was interrupted: this is from 2\d trainings\.",
        "32 and 256 came to 1/4 of the length only"],['dropped']),
    'interrupted at once': (lambda: trial(valley(128), whole=(64,), interrupted=True),[r"v = learn\.bs_verify\(0.01, n_epoch=5, sizes=\(32, 64, 128, 256\)\)"],
        ['rates=']),
    'interrupted at once, and some diverged': (lambda: changed(trial(valley(128), whole=(64,), interrupted=True), lambda df: df.factor>2, valid_loss=nan),
        [r"v = learn\.bs_verify\(0.01, n_epoch=5, sizes=\(32, 64, 128, 256\)\)"],['rates=']),
    'dropped': (lambda: trial(valley(64), whole=(32,64,128)),["256 was dropped at 1/4 of the length, for being behind"],['interrupted']),
    'today was dropped': (lambda: trial(valley(256), whole=(128,256,512), sizes=(64,128,256,512)),[r"Today's 64 was dropped at 1/4 of the length, 2\d% behind",
        "^Use 256 .* ends lowest"],['64 was dropped at 1/4 of the length, for']),
    'planned otherwise': (lambda: trial(valley(32)),["bs_find had planned 256, but the trial counts"],[]),
    'planned smaller': (lambda: trial(valley(512), sizes=(64,128,256,512), found=plan_of(300., (270.,330.))),
        [r"bs_find had planned \d+, but the trial counts"],[]),
    'planned as well': (lambda: trial(valley(256)),["bs_find had planned 256 as well", r"largest size .* try sizes=\(256, 512, 1024\)"],[]),
    'planned without a noise scale': (lambda: trial(valley(128), found=plan_of(inf, (0.,inf))),[],['had planned']),
    'no item twice': (lambda: trial(valley(128), n_epoch=0.5),["The training loss of the last tenth decides, as no training saw an item twice",
        "its training loss"],['heart']),
    'no validation': (lambda: trial(valley(128), valid=False),["The training loss decides, for want of a validation loss", "what is learnt by heart"],
        ['validation loss ends']),
    'took longer': (lambda: changed(trial(valley(128)), lambda df: df.bs==128, seconds=20.),
        ["128 took 31% longer beside the others than reckoned with, so times were not quite equal"],['as long as their steps']),
    'took less': (lambda: changed(trial(valley(128), rates=(1,2)), lambda df: df.bs==32, expected=30.),["32 took .*% less beside the others"],[]),
    'took less, of the same items': (lambda: changed(trial(valley(128), equal='items'), lambda df: df.bs==32, expected=30.),[],['reckoned']),
    'all took longer': (lambda: changed(trial(valley(128), rates=(1,2)), lambda df: df.bs>0, expected=10.),["times as long as their steps had been timed"],
        ['reckoned']),
    'planned to stay': (lambda: trial(valley(256), found=plan_of(40., (36.,44.))),["bs_find would have stayed at 64"],['had planned']),
    'seconds as expected': (lambda: changed(trial(valley(128)), lambda df: df.bs==128, expected=14.),[],['reckoned with']),
    'seconds not expected': (lambda: changed(trial(valley(128)), lambda df: df.bs>0, expected=nan),[],['reckoned with']),
    'items, larger': (lambda: trial(lambda bs,f,p: 0.5*(1+max(0,bs-128)/1000), equal='items', sd=1e-4),
        [r"^Use 128 \(today 64\): for the same items its validation loss ends within 2% of the best, in 74% of the time", r"fit_one_cycle\(5, 0.00333\)",
         "32, 64 and 128 are about as good; 128 takes the fewest seconds"],['had planned','in the same time','as long as']),
    'items, smaller': (lambda: trial(valley(32), equal='items'),["^Use 32 .* ends within 2% of the best\\."],['of the time']),
    'items, stay': (lambda: trial(valley(64), equal='items'),["^Stay at 64: of the sizes within 2% of the best it takes the fewest seconds"],[]),
}

@cache
def case(nm): return cases[nm][0]()

@pytest.mark.parametrize('nm', cases)
def test_sentences(nm):
    v,(_,there,not_there) = case(nm),cases[nm]
    everything = told(v)
    for o in there: assert re.search(o, everything), f"{o}\n{everything}"
    for o in not_there: assert not re.search(o, everything), f"{o}\n{everything}"
    check(v)

# What holds for every trial

negative = r"\b(no|not|nothing|none|never|cannot|without)\b"

def check(v):
    "Short sentences in their order, and nothing that contradicts anything else"
    said,do = [*advice(v),*details(v)],headline(v).text
    kinds,everything,run = [o.kind for o in said],told(v),told(v, 'run')
    order = dict(do=0, how=1, run=2, why=3, caution=4, detail=5)
    assert kinds.count('do')==1 and kinds.count('run')<=1 and kinds==sorted(kinds, key=order.get)
    for o in said:
        assert len(o.text.split())<=25, o.text
        if o.kind in ('caution','detail','why'): assert o.text.endswith('.') and not re.search(r'[.!?] ', o.text), o.text
        for part in re.split(r'[:;] ', o.text): assert len(re.findall(negative, part))<=1, o.text
    assert not re.search(r'\b(nan|None|inf)\b', re.sub(r'left out: .*?\.', '', everything)), everything
    # The size
    bs,now,whole = v.bs,v.found.bs_now,v.whole.bs.tolist()
    assert bs in whole or not v.told and bs==now
    if do.startswith('Use'): assert do.startswith(f'Use {bs} (today {now}): ') and bs!=now and v.told
    if do.startswith('Stay'): assert bs==now
    if do.startswith('Cannot'): assert v.all_tied and more_runs(v) or v.all_tied and len(v.good)<len(whole)
    assert v.told or do.startswith('Stay')
    assert v.plan.bs==bs and (v.best in whole if whole else v.best is None) and (not v.told or v.best in v.good and bs in v.good)
    # What is said of a difference is what the table has
    if v.told and (found := re.search(r'ends ([^ ]+%( \[.*?\])?) lower', do)):
        diff,low,high = v.difference(bs, now)
        assert found[1]==difference_text(-diff, -high, -low) and diff<0 and ('may be chance' in do)==(high>=0)
    # Do, or try again
    assert (run.startswith('v = learn.bs_verify(') or run=='') if not v.told else run
    again = run.startswith('v = ')
    assert not again or 'fit_one_cycle' not in everything
    if run and not again:
        assert run.startswith('learn.' if stays(v.plan) else 'v.plan.apply(learn).')
        rate = re.search(r'fit_one_cycle\(\w+, (.+)\)$', run)[1]
        assert re.search(rf'(Keep passing|Pass) {re.escape(rate)} to `fit_one_cycle`', everything)
        assert ('Keep passing' in everything)<=(v.factor==1)
    assert ('n_runs=' in run)<=(f'n_runs={more_runs(v)})' in run or 'equal' in run)
    # Beyond
    for o in re.findall(r'try sizes=\(([\d, ]+)\)', everything):
        sizes = [int(x) for x in o.split(', ')]
        assert len(set(sizes)&{*v.table.bs})==1 and set(sizes)-{*v.table.bs} and not set(sizes)&{b for b,_ in v.left_out} and max(sizes)<=v.n_train
    assert not ('longer training may take more' in everything and 'about the same at a quarter' in everything)
    assert ('critical' in everything)==(v.told and v.equal=='items')
    if v.critical_bs: assert v.critical_range[0]<=v.critical_bs<=v.critical_range[1]
    # As text
    assert max(map(len, verified_text(v).split('\n')))<=110 and 'nan' not in v.details().replace('was nan', '')
    json.dumps(v.to_dict(), allow_nan=False)

def random_trial(seed):
    r = random.Random(seed)
    sizes = tuple(sorted(r.sample([16,32,64,128,256,512], r.randint(1, 6))))
    rates = r.choice([(1.,),(1/3,1.,3.),(0.5,1.),(1.,10.)])
    whole = tuple(sorted(r.sample(sizes, r.randint(1, len(sizes)))))
    loss = r.choice([alike,lambda bs,f,p: 0.5*(1+bs/r_scale),valley(r.choice([8,32,64,256,2048]), r.choice([0.001,0.01,0.1,1.]), 0.2, r.choice([1/3,1,3]),
        r.choice([None,32,256]))])
    r_scale = r.choice([100,3000,1e5])
    n_train = r.choice([900,50_000])
    found = plan_of(**r.choice([{},dict(adam=False, base_lr=slice(1e-3,0.1)),dict(noise_scale=inf, ci=(0.,inf)),dict(adam=False, base_lr=0.1,
        sums=True)]), n_train=n_train)
    left = tuple((bs,r.choice(["does not fit in memory","its loss was nan at every rate"])) for bs in (1024,8) if r.random()<0.3)
    v = trial(loss, sizes, rates, whole, r.choice([1,2,3,3,5,8]), r.choice([1e-5,0.003,0.02,0.3]), r.choice(['time','time','items']), r.choice([0.3,1,
        2.5,6]), found,
              valid=r.random()<0.8, seed=seed, left_out=left, interrupted=r.random()<0.2, took=r.choice([nan,50.]))
    if r.random()<0.3: # Some diverge
        bad = np.random.default_rng(seed).random(len(v.df))<r.choice([0.1,0.5,1.])
        v = changed(v, lambda df: bad, train_loss=nan, valid_loss=nan)
    if r.random()<0.2: v = changed(v, lambda df: df.bs==df.bs.max(), seconds=v.df.seconds.median())
    if r.random()<0.2: v = changed(v, lambda df: df.bs>0, expected=nan)
    return v

@pytest.mark.slow
@pytest.mark.parametrize('block', range(4))
def test_random_trials(block):
    each_of(random_trial, check, range(8*block, 8*(block+1)))

# As words, as values, as a picture

def test_text_and_html_hold_the_same_words():
    for v in map(case, [*cases][::4]):
        text,html = ' '.join(repr(v).split()),v._repr_html_()
        words = ' '.join(re.sub('<.+?>', ' ', html.replace('<code>', '`').replace('</code>', '`')).split())
        cautions = 0
        for o in advice(v):
            cautions += o.kind=='caution'
            if o.kind!='caution' or cautions<=3: assert o.text in text and o.text in words, o
            else: assert o.text not in text and o.text in ' '.join(v.details().split())
        assert text.endswith('More in v.details().') and text==' '.join(verified_text(v).split()) and html==verified_html(v)
        assert not re.search(r'color|background|#[0-9a-f]{3}', html+v.details()._repr_html_())

def test_three_cautions_are_shown():
    v = trial(valley(128), left_out=tuple((bs,'no') for bs in (1,2,3,4,5)))
    for text in (repr(v),v._repr_html_(),v.advice): assert '3 is left out: no.' in text and '4 is left out' not in text
    assert '5 is left out: no.' in v.details()

def test_advice_is_one_paragraph():
    v = trial(valley(128))
    assert v.advice.startswith('Use 128') and 'Run v.plan.apply(learn).fit_one_cycle(7, 0.01).' in v.advice and '\n' not in v.advice

def test_details_have_the_table_with_its_marks():
    text = trial(valley(128), whole=(64,128,256)).details()
    for o in ('64 (today)','128 (chosen)','256 (planned)','best','1/4','whole',"equal='time'",'trainings=25','took=1 min 1 s'): assert o in text, o
    assert 'micro_bs' not in text and 'micro_bs' in trial(valley(128), sizes=(128,512)).details() # Where there is something to say
    assert 'critical_bs=' in trial(valley(128), equal='items').details()
    assert 'chosen' not in trial(valley(128), n_runs=1).details()

def test_to_dict():
    v = trial(valley(128))
    d = json.loads(json.dumps(v.to_dict(), allow_nan=False))
    assert (d['bs'],d['equal'],d['epochs'],d['critical_bs'],d['plan']['bs'],d['found']['bs'],d['spread']['dof'])==(128,'time',7,None,128,256,6)
    assert not {'df','curves','table'}&{*d} and d['advice']==v.advice

def test_nothing_is_changed():
    v = trial(valley(128))
    was = v.df.copy(),v.curves.copy()
    v.details(); v.plot(); v.to_dict()
    assert v.df.equals(was[0]) and v.curves.equals(was[1])
    with pytest.raises(dataclasses.FrozenInstanceError): v.bs_now = 3

def labels(ax): return [o.partition(',')[0] for o in ax.get_legend_handles_labels()[1]]

def line(ax, label): return next(o for o in ax.lines if str(o.get_label()).startswith(label))

def test_plot(tmp_path):
    v = trial(valley(128), whole=(64,128,256))
    left,right = v.plot()
    left.figure.savefig(tmp_path/'plot.png', dpi=40)
    assert labels(left)==["today's",'planned','1/16 of it','1/4 of it','whole length','chosen'] and labels(right)==['64','128','256']
    assert line(left, 'whole').get_xydata().ravel().tolist()==approx(v.whole[['bs','diff']].to_numpy().ravel().tolist())
    assert (line(left, "today's").get_xdata()[0],line(left, 'planned').get_xdata()[0],line(left, 'chosen').get_xydata().ravel().tolist())==(64,256,[128,0])
    assert len(left.collections)==1 and not left.texts
    # One family of colours, the whole length darkest
    colors = [sum(line(left, o).get_color()[:3]) for o in ('1/16','1/4','whole')]
    assert colors==sorted(colors, reverse=True)
    # The mean over the runs of each size
    mine = v.curves[(v.curves.bs==128) & (v.curves.part==1)]
    assert right.lines[1].get_ydata()[-1]==approx(math.exp(np.log(mine[mine.seconds==mine.seconds.max()].loss).mean()))
    assert right.lines[1].get_linewidth()>right.lines[0].get_linewidth()

def test_plot_of_the_rates_that_won():
    loss = lambda bs,f,p: 0.5*math.exp(0.05*math.log2(bs/128)**2+0.2*math.log(f/(bs/64), 3)**2)
    left,_ = trial(loss, sizes=(16,64,256), rates=(1/3,1,3), whole=(64,256)).plot()
    assert [(o.xy[0],o.get_text()) for o in left.texts]==[(16,'×1/3'),(64,'×1'),(256,'×3')] and '×: rate that won' in labels(left)

def test_plot_cuts_off_what_is_far_away():
    left,_ = trial(lambda bs,f,p: 0.5*{32: 30., 256: 1.1}.get(bs, 1.), whole=(64,128,256)).plot()
    far = [o for o in left.lines if o.get_marker()=='^' and len(o.get_xdata())]
    assert left.get_ylim()[1]<0.3 and [o.get_xdata().tolist() for o in far]==[[32],[32]]
    assert max(line(left, '1/4').get_ydata())<left.get_ylim()[1] # Its line is to be seen, too

def test_plot_has_a_band_only_where_chance_is_known():
    assert len(trial(valley(128)).plot()[0].collections)==1 and not trial(valley(128), n_runs=1).plot()[0].collections
    assert 'chosen' not in labels(trial(valley(128), n_runs=1).plot()[0])

def test_plot_on_given_axes():
    _,axs = plt.subplots(1, 3)
    v = trial(valley(128))
    assert v.plot(axs[1]) is axs[1] and axs[1].get_xlabel()=='batch size (items)'
    assert v.plot(axs[[0,2]])[1].get_xlabel()=='seconds'
    assert plot_sizes([], bs_now=64).get_xlabel() and plot_curves(v.curves, []).get_xlabel()

@pytest.mark.parametrize('nm', ['one size','none came to the end','chance is not known','one size, the others diverged','interrupted at once',
    'no item twice'])
def test_plots_are_drawn_without_a_warning(nm, tmp_path, recwarn):
    v = case(nm)
    if nm.startswith('none'): v = dataclasses.replace(v, curves=v.curves.assign(loss=nan))
    v.plot()[0].figure.savefig(tmp_path/'plot.png', dpi=40)
    assert not [o for o in recwarn if 'atplotlib' in str(o.filename)]

def test_plot_of_runs_of_which_one_ended_early():
    v = trial(valley(128))
    short = v.curves[~((v.curves.bs==128) & (v.curves.run==1) & (v.curves.part==1) & (v.curves.seconds>5))]
    assert len(dataclasses.replace(v, curves=short).plot()[1].lines[2].get_xdata())<50
    plt.close('all')
