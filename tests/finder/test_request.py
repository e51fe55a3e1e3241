"What `bs_find` is asked for: refused before anything changes, and epochs that were taken for something else"
import math
import re
import warnings

import pytest
from fastai_bs.finder.facts import unfrozen_lr
from fastai_bs.finder.request import Request
from test_bs_find import _refused, reg_learner

inf,nan = math.inf,math.nan

@pytest.mark.parametrize('lr,how,passed,trained,freeze_epochs', [
    (0.02,'fit_one_cycle',0.02,0.02,0), (None,'fit_one_cycle',None,None,0),
    (0.02,'fine_tune',0.02,unfrozen_lr(0.02),1), (None,'fine_tune',0.002,unfrozen_lr(0.002),1)])
def test_fine_tune_has_a_rate_to_pass_and_one_that_trains(lr, how, passed, trained, freeze_epochs):
    "By default those of fastai"
    request = Request(lr, how=how)
    assert request.passed_lr==passed
    assert request.trained_lr==trained
    assert request.freeze_epochs==freeze_epochs

refused = {
    ValueError: dict(num_it=(0,6), n_epoch=(0,-1), n_batch=(1,), beta=(0,1,nan), ci=(0,95), seed=(-1,), tol=(-1,nan), max_bs=(0,-8,3),
                     lr=(-1,nan,inf,slice(-1e-3,1e-2),[0.1,nan]), how=('fit',None),
                     step_times=({}, {8: 0.1}, {4: 0.}, {4: -1.}, {4: nan}, {4: inf}, {4: 0.1, 0: 0.1})),
    TypeError: dict(num_it=(1.5,True,'9'), n_epoch=('5',True,[1],0.5,2.5,nan,inf), n_batch=(2.5,None), seed=(1.5,'3',True), tol=('x',),
                    max_bs=('yes',True,4.,nan), lr=('x',True,slice(None),[None]), step_times=([0.1], 0.1, {4.: 0.1}, {4: '1'}, {'4': 0.1}))}
bad = [(nm,v,error) for error,args in refused.items() for nm,values in args.items() for v in values]

@pytest.mark.parametrize('nm,v,error', bad, ids=str)
def test_bs_find_refuses_bad_arguments(nm, v, error): assert _refused(reg_learner(), error, rf'`{nm}(\[4\])?`', **{nm: v})==[]

def test_what_fits_here_and_times_of_another_device():
    "A bound is taken with both"
    times = {o: 0.1 for o in (4,8,16)}
    assert _refused(reg_learner(), ValueError, "`max_bs='auto'`", step_times=times, max_bs='auto')==[]
    plan = reg_learner().bs_find(1e-3, n_epoch=30, step_times=times, max_bs=8, show_plot=False)
    assert [o for o,*_ in plan.facts.device.times]==[4,8]

@pytest.mark.parametrize('args,kwargs,call', [((5,1e-3), {}, '0.001, n_epoch=5'), ((1,1e-3), {}, '0.001, n_epoch=1'),
    ((3,slice(1e-4,1e-3)), dict(seed=2), 'slice(0.0001, 0.001, None), n_epoch=3, seed=2')])
def test_epochs_before_the_rate(args, kwargs, call):
    with pytest.raises(TypeError, match=re.escape(f'write learn.bs_find({call})')): reg_learner().bs_find(*args, **kwargs)

@pytest.mark.parametrize('args,kwargs,call', [
    ((1e-3,10), {}, '0.001, n_epoch=10'), ((slice(1e-4,0.00123456),12), dict(tol=0), 'slice(0.0001, 0.00123456), n_epoch=12, tol=0'),
    ((None,8), {}, 'n_epoch=8'), ((3,80), {}, 'n_epoch=3'), ((2,), dict(num_it=11, ci=0.9), 'n_epoch=2, ci=0.9'),
    ((1e-3,80), {}, None), ((1,80), {}, None), ((1e-3,10), dict(n_epoch=5), None), ((3,10), dict(n_epoch=5), None)], ids=str)
def test_epochs_taken_for_something_else(args, kwargs, call, short):
    "Once said, with the call that keeps what was given; then done as asked"
    learn = reg_learner(lr=0.01)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        plan = learn.bs_find(*args, show_plot=False, max_bs=8, **kwargs)
    said = [str(o.message) for o in said if ' was taken as `' in str(o.message)]
    assert [o.split('write ')[1] for o in said]==([f'learn.bs_find({call}, max_bs=8, show_plot=False)'] if call else [])
    assert plan.facts.measured.n_seen<=(args[1] if len(args)>1 else 11)

@pytest.mark.parametrize('lr', [1e-3,0])
def test_epochs_that_are_too_few_micro_batches(lr):
    with pytest.raises(ValueError, match='write epochs as n_epoch=5'), pytest.warns(UserWarning, match='n_epoch=5'): reg_learner().bs_find(lr, 5)
