"What `bs_find` is asked for: refused before anything changes, and epochs that were taken for something else"
import math
import re
import warnings

import pytest
from fastai.callback.schedule import fit_one_cycle, SchedExp # noqa: F401, the first adds the method
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale, ScaledLR, linear_scaling
from fastai_bs.finder.facts import unfrozen_lr
from fastai_bs.finder.formulas import for_training
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

@pytest.mark.parametrize('cb,n_epoch,varies', [(GradAccum({0: 1, 2: 4}),3,True), (GradAccum({0: 1, 2: 4}),2,False), (GradAccum({0: 2}),5,False),
    (GradAccum(lambda epoch: 1+epoch),2,True), (BatchSchedule({0: 4, 1: 8}),2,True), (BatchSchedule({0: 4}),9,False),
    (BatchSchedule({0: 8}, max_micro_bs=4),9,False), (BatchSchedule(SchedExp(4, 16)),1,True)])
def test_a_batch_that_changes_along_the_training_is_refused(cb, n_epoch, varies):
    "A plan is for one size"
    learn = reg_learner()
    learn.add_cb(cb)
    if varies: assert _refused(learn, ValueError, 'is for one batch size.*`with learn.removed_cbs', n_epoch=n_epoch)==[]
    else: learn.bs_find(1e-3, n_epoch=n_epoch, show_plot=False)

@pytest.mark.parametrize('n_epoch', [None,9])
def test_micro_batches_that_are_not_the_loader_s_are_refused(n_epoch):
    "Its times would be of others than those of the training"
    learn = reg_learner()
    learn.add_cb(BatchSchedule({0: 8}))
    assert _refused(learn, ValueError, 'which have 4 items, .* train with 8 at a time: make the loader with bs=8', n_epoch=n_epoch)==[]
    learn.dls.train.bs = None # As with a loader that does not say it
    with pytest.raises(ValueError, match='does not say how many items it puts in a batch'): learn.bs_find(1e-3, n_epoch=n_epoch)

@pytest.mark.parametrize('args,kwargs,call', [((5,1e-3), {}, '0.001, n_epoch=5'), ((1,1e-3), {}, '0.001, n_epoch=1'),
    ((3,slice(1e-4,1e-3)), dict(seed=2), 'slice(0.0001, 0.001, None), n_epoch=3')])
def test_epochs_before_the_rate(args, kwargs, call):
    with pytest.raises(TypeError, match=re.escape(f'write learn.bs_find({call})')): reg_learner().bs_find(*args, **kwargs)

@pytest.mark.parametrize('args,kwargs,call', [
    ((1e-3,10), {}, '0.001, n_epoch=10'), ((slice(1e-4,0.00123456),12), dict(tol=0), 'slice(0.0001, 0.00123456), n_epoch=12'),
    ((None,8), {}, 'n_epoch=8'), ((3,80), {}, 'n_epoch=3'), ((2,), dict(num_it=11), 'n_epoch=2'),
    ((1e-3,80), {}, None), ((1,80), {}, None), ((1e-3,10), dict(n_epoch=5), None), ((3,10), dict(n_epoch=5), None)], ids=str)
def test_epochs_taken_for_something_else(args, kwargs, call, short):
    "Once said, with the call for epochs; then done as asked"
    learn = reg_learner(lr=0.01)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        plan = learn.bs_find(*args, show_plot=False, max_bs=8, **kwargs)
    said = [str(o.message) for o in said if ' was taken as `' in str(o.message)]
    assert [o.split('write ')[1] for o in said]==([f'learn.bs_find({call})'] if call else [])
    assert plan.facts.measured.n_seen<=(args[1] if len(args)>1 else 11)

@pytest.mark.parametrize('lr', [1e-3,0])
def test_epochs_that_are_too_few_micro_batches(lr):
    with pytest.raises(ValueError, match='write epochs as n_epoch=5'), pytest.warns(UserWarning, match='n_epoch=5'): reg_learner().bs_find(lr, 5)

# A noise scale that is given

@pytest.mark.parametrize('v,error', [(-1,ValueError), (nan,ValueError), (inf,ValueError), ('x',TypeError), (True,TypeError), (NoiseScale(),ValueError)])
def test_a_noise_scale_that_is_none(v, error):
    assert _refused(reg_learner(), error, '`noise_scale`', noise_scale=v, num_it=None, n_epoch=5)==[]

@pytest.mark.parametrize('kwargs,match', [(dict(num_it=60),'leave one of them out'), (dict(lr=0, num_it=None),'at a rate of 0 there is none')])
def test_a_noise_scale_takes_the_place_of_measuring(kwargs, match):
    assert _refused(reg_learner(), ValueError, match, noise_scale=50., **kwargs)==[]

def watched(n_epoch=4, lr=1e-2, cbs=None, fit='fit_one_cycle', **kwargs):
    learn,noise = reg_learner(cbs=cbs, **kwargs),NoiseScale()
    getattr(learn, fit)(n_epoch, lr, cbs=noise)
    return noise

@pytest.mark.parametrize('noise,match', [
    (lambda: watched(fit='fit'), 'measured nothing at the end of a one-cycle'), (lambda: watched(bs=8), 'batches of 8, and this learner has 4'),
    (lambda: watched(cbs=GradAccum(2)), 'batches of 8, and this learner has 4'), (lambda: watched(lr=2e-2), 'rate rose to 0.02, and here it is 0.01'),
    (lambda: watched(lr=8e-3), 'here it is 0.01')])
def test_a_noise_scale_of_another_training(noise, match):
    "Refused before anything has changed"
    assert _refused(reg_learner(), ValueError, match, noise_scale=noise(), lr=1e-2, num_it=None, n_epoch=5)==[]

def test_a_number_takes_the_place_of_measuring(short):
    given = reg_learner().bs_find(1e-2, n_epoch=4, noise_scale=30., show_plot=False)
    assert given.noise_scale==for_training(30., 200, 4)
    assert math.isnan(given.ci[0]+given.ci[1])

@pytest.mark.parametrize('cbs,factor', [(lambda: None,1),(lambda: ScaledLR(2, linear_scaling),2)])
def test_a_watched_training_takes_the_place_of_measuring(cbs, factor, short):
    "Its reading on the cool stretch, for the whole training; on a learner with new weights, also where a ScaledLR makes the rate"
    noise = watched(n_epoch=10, cbs=cbs())
    plan = reg_learner(cbs=cbs()).bs_find(1e-2, n_epoch=10, noise_scale=noise, show_plot=False)
    e = noise.cool
    low,high = (for_training(o, 200, 10) for o in e.ci)
    assert plan.ci==pytest.approx((low,high))
    assert plan.noise_scale==pytest.approx(for_training(e.noise_scale, 200, 10) if math.isfinite(e.noise_scale) else low)
    assert plan.facts.measured.n_windows is None
    assert plan.facts.measured.n_seen==2
    assert plan.df is None
    assert plan.facts.today.lr_factor==factor

def test_a_watched_training_that_says_nothing(short):
    "All noise, and no interval: as if none was given"
    noise = watched()
    noise.cool_rows = [o._replace(g_sq=-abs(o.g_sq)) for o in noise.cool_rows[:2]]
    assert noise.cool.ci==(0,inf)
    plan = reg_learner().bs_find(1e-2, n_epoch=4, noise_scale=noise, show_plot=False)
    assert math.isnan(plan.noise_scale)
    assert plan.facts.can_plan
