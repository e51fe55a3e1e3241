"The edges of what a training may meet: each entry works there with a right number, or says in words what is wrong"
import math
import operator
import pickle
import warnings
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
import fastai.callback.hook # noqa: F401, it adds `summary`
from fastai.callback.core import Callback
from fastai.callback.schedule import fit_one_cycle, fine_tune, lr_find # noqa: F401, they are methods
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale, ScaledLR, sqrt_scaling
from fastai_bs.learner.loop import callback_of
from helpers import (RaiseAt, autocast_state, changes, flat, listed, loaders, mlp, needs_export, picture, quiet_learner, regression)
from torch import nn

def learner(n=96, bs=4, cbs=None, **kwargs): return quiet_learner(loaders(regression(n), bs), mlp(), cbs=cbs, **kwargs)

# Long trainings

def watched(beta):
    "A `NoiseScale` that has seen 150 windows"
    noise = NoiseScale(beta=beta, every=1)
    learner(400, cbs=[GradAccum(2), noise]).fit(3, 0.01)
    return noise

def test_memory_of_a_long_training_is_bounded(monkeypatch, beta=0.9):
    "Rows that stay are those of a training of which all are kept, evenly spread, and what is known in the end is the same"
    whole = watched(beta)
    monkeypatch.setattr(NoiseScale, 'most', 50)
    few = watched(beta)
    most = max(50, 4*round(1/(1-beta)))
    assert len(whole.df)==150
    assert most/4<len(few.df)<=most
    assert few.df.step.iloc[-1]==150
    pd.testing.assert_frame_equal(few.df.set_index('step'), whole.df.set_index('step').loc[few.df.step])
    assert few.noise_scale==whole.noise_scale
    assert few.ci==whole.ci
    steps = np.diff(few.df.step)
    assert (steps[-round(1/(1-beta))+1:]==1).all()
    assert max(few.df.step.iloc[0], steps.max())<=8*150/most

# Losses and gradients that say nothing

class Spoilt(Callback):
    "Losses of the training are multiplied by `v`, in micro-batches `at` or in all"
    order = 5
    def __init__(self, v, at=None): self.v,self.at = v,at
    def after_loss(self):
        if not self.training or (self.at is not None and self.iter not in self.at): return
        self.learn.loss_grad = self.learn.loss_grad*self.v
        self.learn.loss = self.learn.loss_grad.clone()

def said(f):
    "What it warns of"
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        f()
    return [str(o.message) for o in w if 'shadowing' not in str(o.message)]

@pytest.mark.parametrize('v,at,on_oom', [(math.nan,None,'raise'), (-math.inf,[9],'split')], ids=str)
def test_a_loss_that_is_not_finite_goes_where_the_large_batch_goes(v, at, on_oom):
    "Into the parameters, and nowhere else: no gradient is left, and NoiseScale says once what it left out"
    learn = learner(cbs=[GradAccum(2, on_oom=on_oom), NoiseScale(), Spoilt(v, at)])
    words = said(lambda: learn.fit(1, 0.05))
    assert not torch.isfinite(flat(learn)).all()
    assert all(not p.grad.any() for p in learn.model.parameters())
    assert len(words)==1
    assert learn.noise_scale.n_dropped==(8 if at else 12)

class Nothing(nn.Module):
    "A loss that the prediction has no part in, of a mean over items"
    reduction = 'mean'
    def forward(self, pred, targ): return (pred*0).sum()+3.

def test_where_nothing_is_measured_it_is_said():
    learn = learner(3, 8, [GradAccum(2),NoiseScale()])
    assert len(said(lambda: learn.fit(2, 0.05)))==2
    assert math.isnan(learn.noise_scale.noise_scale)

@pytest.mark.filterwarnings('ignore')
def test_gradients_of_zero_are_said():
    learn = learner(bs=8, loss_func=Nothing())
    before = picture(learn)
    with pytest.raises(ValueError, match='All gradients of the mock training are 0'): learn.bs_find(0.05, num_it=60)
    assert learn.check_accum(2).verdict=='zero'
    assert changes(before, picture(learn))==[]

def test_what_is_neither_true_nor_false_is_refused():
    for f in (lambda: BatchSchedule({0: 4}, fix_bn='no'), lambda: ScaledLR(4, scale_wd=1), lambda: learner().bs_find(0.05, show_plot='no')):
        with pytest.raises(TypeError, match='must be True or False'): f()

# Small things

def test_batches_of_one_item():
    large,small = (quiet_learner(loaders(regression(40), bs), mlp(), cbs=cbs) for bs,cbs in ((8,None),(1,GradAccum(8))))
    for o in (large,small): o.fit(2, 0.05)
    torch.testing.assert_close(flat(large), flat(small), rtol=1e-12, atol=1e-15)
    assert learner(40, 1).check_accum(4).same
    assert learner(40, 1).max_bs_find(max_bs=4)==4
    with pytest.raises(ValueError, match='parts of a batch of 1 item are too small'): learner(40, 1, NoiseScale()).fit(1, 0.05)

empty = dict(lr=lambda o: o.fit(1, 0.05, cbs=ScaledLR(4)), noise=lambda o: o.fit(1, 0.05, cbs=NoiseScale()),
    schedule=lambda o: o.fit(1, 0.05, cbs=BatchSchedule({0: 4})),
    max_bs_find=lambda o: o.max_bs_find(), memory_report=lambda o: o.memory_report(),
    bs_find=lambda o: o.bs_find(0.05), bs_verify=lambda o: o.bs_verify(0.05, n_epoch=8), check_accum=lambda o: o.check_accum(2))

@pytest.mark.parametrize('nm', empty)
def test_an_empty_training_set(nm):
    learn = quiet_learner(DataLoaders(*(loaders([], 4, valid=regression(2)).loaders), device='cpu'), mlp())
    with pytest.raises(ValueError, match='The training set is empty|yields 0 micro-batches in an epoch'): empty[nm](learn)

def test_a_training_set_smaller_than_a_batch():
    "One window of what there is"
    large,small = learner(3, 3),learner(3, 8, [GradAccum(2),ScaledLR(3)])
    for o in (large,small): o.fit(2, 0.05)
    assert torch.equal(flat(large), flat(small))
    assert small.scaled_lr.bs==3
    assert learner(3, 8).max_bs_find()==3
    for f in (lambda o: o.bs_find(0.05), lambda o: o.check_accum(2), lambda o: o.bs_verify(0.05, n_epoch=8)):
        with pytest.raises(ValueError, match='The training loader yields 1 micro-batch in an epoch'): f(learner(3, 8))
    whole = quiet_learner(loaders(regression(3), 8, drop_last=True), mlp()) # Whole batches only
    with pytest.raises(ValueError, match='yields 0 micro-batches in an epoch of 3 items with bs=8'): whole.bs_verify(0.05, n_epoch=8)

# What comes to a learner when or where it should not

class Adds(Callback):
    "Adds `cb` to the learner at `event`"
    order = -50
    def __init__(self, event, cb): self.cb = cb; setattr(self, event, self._add)
    def _add(self):
        if self.cb not in self.learn.cbs: self.learn.add_cb(self.cb)

late = dict(accum=partial(GradAccum, 2), lr=partial(ScaledLR, 8), noise=NoiseScale, schedule=partial(BatchSchedule, {0: 8}))

@pytest.mark.parametrize('nm,event', [*zip(late, ['before_fit','before_epoch','before_train','before_batch'], strict=True)])
def test_a_callback_that_comes_too_late_says_so(nm, event):
    cb = late[nm]()
    learn = learner(cbs=Adds(event, cb))
    before = flat(learn)
    with pytest.raises(ValueError, match=f'{type(cb).__name__} must check a fit before it begins'): learn.fit(2, 0.05)
    assert torch.equal(before, flat(learn)) or event=='before_batch' # Then it is told of the second batch first
    learn.remove_cb(Adds)
    learn.fit(1, 0.05) # From the start it is welcome
    assert cb in learn.cbs
    assert not cb.started

# A look at a learner is no fit: fastai fires `before_fit` and `after_fit` in it all the same

def block(learn):
    with learn: pass

looks = dict(summary=Learner.summary, tta=partial(Learner.tta, n=1), block=block, validate=Learner.validate, preds=Learner.get_preds)
looked_at = dict(accum=lambda: [GradAccum(2)], lr=lambda: [GradAccum(2),ScaledLR(2)], noise=lambda: [GradAccum(2),NoiseScale()],
    parts=lambda: [NoiseScale(every=2, n_micro=2)], schedule=lambda: [BatchSchedule({0: 2, 1: 4}, sqrt_scaling)])

def exportable(path, cbs=None):
    learn = quiet_learner(listed(), mlp(2, 1, dtype=torch.float32), cbs=cbs, path=path)
    learn.logger = print
    return learn

def quiet(f, learn):
    with learn.no_logging(): return f(learn)

def known(learn):
    "What our callbacks know and have written, and whatever stands in for a method"
    ours = [cb for cb in learn.cbs if type(cb).__module__.startswith('fastai_bs')]
    return ([(repr(cb),getattr(cb, 'started', None),cb.df.to_csv() if hasattr(cb, 'df') else None) for cb in ours],
        [o for o in ('_do_epoch_train','_with_events','remove_cbs') if o in vars(learn)],'before_fit' in vars(learn.recorder),
        {o.name: o.read_bytes() for o in (learn.path/'models').glob('*')})

@pytest.mark.parametrize('nm,look', [('noise','summary'), ('parts','tta'), ('lr','validate'), ('schedule','preds'), ('schedule','block')])
def test_a_look_is_no_fit(nm, look, tmp_path):
    "Neither before the first fit nor after one: the training is that of a learner that nobody looks at, and what is known of it stays"
    learn,twin = (exportable(tmp_path/o, looked_at[nm]()) for o in ('a','b'))
    for o in (None,learn,twin):
        if o: quiet(partial(Learner.fit, n_epoch=2, lr=0.05), o)
        before = known(learn)
        looks[look](learn) if look=='summary' else quiet(looks[look], learn)
        assert known(learn)==before
    assert torch.equal(flat(learn), flat(twin))
    assert known(learn)[:3]==known(twin)[:3]

class Looks(Callback):
    "Looks at the learner in each epoch of a fit, at an event that a look does not fire"
    def __init__(self, look): self.look = look
    def after_train(self): looks[self.look](self.learn)

def test_a_look_within_a_fit_does_not_end_it(tmp_path, look='tta'):
    learn,twin = (exportable(tmp_path, [GradAccum(2),ScaledLR(2, warmup_epochs=0),NoiseScale(),*cbs]) for cbs in ([Looks(look)],[]))
    for o in (learn,twin): quiet(partial(Learner.fit, n_epoch=3, lr=0.05), o)
    assert torch.equal(flat(learn), flat(twin))
    assert learn.noise_scale.df.equals(twin.noise_scale.df)
    assert len(twin.noise_scale.df)==18
    assert known(learn)[1:]==known(twin)[1:]

# What is exported when our callbacks are gone

def interrupted(learn):
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 0.05, cbs=[GradAccum(2),NoiseScale(),RaiseAt('after_backward', KeyboardInterrupt, at=3)])

def applied(learn):
    plan = learn.bs_find(0.05, num_it=40, show_plot=False).at(8)
    plan.apply(learn)
    learn.fit(1, 0.05)
    plan.undo(learn)

used = {'schedule': lambda learn: learn.fit(2, 0.05, cbs=looked_at['schedule']()), 'interrupted': interrupted, 'applied': applied}

@pytest.mark.parametrize('nm', used)
@pytest.mark.filterwarnings('ignore')
def test_nothing_of_ours_is_exported_without_our_callbacks(nm, tmp_path):
    needs_export()
    learn = exportable(tmp_path)
    quiet(used[nm], learn)
    learn.remove_cbs([GradAccum,NoiseScale,ScaledLR])
    learn.export('it.pkl')
    assert b'fastai_bs' not in (tmp_path/'it.pkl').read_bytes()

def test_pictures_of_a_fit_outlive_its_callbacks_and_looks(tmp_path):
    "Also in a learner that was pickled since, as values"
    needs_export()
    learn = exportable(tmp_path)
    quiet(partial(Learner.fit, n_epoch=3, lr=0.05, cbs=[BatchSchedule({0: 2, 1: 4}),NoiseScale(every=2, n_micro=2)]), learn)
    def _drawn(o): return [l.get_xydata().tolist() for ax in (o.recorder.plot_noise_scale(),o.recorder.plot_batch_size()) for l in ax.lines]
    drawn = _drawn(learn)
    assert drawn[-1][-1]==[3.,4.]
    quiet(block, learn)
    assert _drawn(learn)==drawn==_drawn(pickle.loads(pickle.dumps(learn)))
    plt.close('all')

def test_a_twin_that_is_refused_takes_nothing_along():
    first,twin = GradAccum(2),BatchSchedule({0: 8})
    learn,called = learner(cbs=first),first.name
    for _ in range(2):
        with pytest.raises(ValueError, match='Only one callback'): learn.fit(1, 0.05, cbs=twin)
        assert getattr(learn, called) is first
        assert first in learn.cbs
        assert twin not in learn.cbs
    learn.fit(1, 0.05)
    assert getattr(learn, called) is first

class Validates(Callback):
    order = 30
    def __init__(self, event): self.seen = []; setattr(self, event, self._validate)
    def _validate(self):
        if not self.learn.lock.locked(): self.seen.append(self.learn.validate())

def test_a_validation_within_a_fit(event='after_epoch'):
    "It does to the windows what it does to the large batch: fastai counts epochs anew from there on"
    a,b = learner(bs=12, cbs=Validates(event)),learner(cbs=[GradAccum(3), NoiseScale(), Validates(event)])
    for o in (a,b): o.fit_one_cycle(3, 0.05)
    torch.testing.assert_close(flat(a), flat(b), rtol=1e-10, atol=1e-14)
    assert len(b.validates.seen)==3
    assert not {'_do_epoch_train','one_batch'} & {*vars(b)}

# Faults

kinds = dict(windows=lambda: [GradAccum(3), NoiseScale(), ScaledLR(4)], split=lambda: [GradAccum(2, on_oom='split')],
    parts=lambda: [NoiseScale(every=1, n_micro=2)], schedule=lambda: [BatchSchedule({0: 8}, rule=sqrt_scaling, base_bs=4)])
events = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step',
    'after_cancel_batch','after_batch','after_train','before_validate','after_validate','after_epoch','after_fit']

def left(learn):
    "Of a fit, whatever callbacks there were"
    of = learn.model,learn.train_eval,learn.recorder
    yield from ((nm,o) for nm in ('_do_epoch_train','_with_events','remove_cbs','one_batch') for o in [vars(learn).get(nm)] if o)
    yield from (nm for nm,o in (('after_batch',of[1]),('before_fit',of[2])) if nm in vars(o))
    yield from ('momentum' for m in of[0].modules() if isinstance(m, nn.BatchNorm1d) and m.momentum!=0.1)
    yield from ('hooks' for p in of[0].parameters() if p._backward_hooks)
    yield from ('on_window' for cb in learn.cbs if getattr(cb, 'on_window', ()))
    if learn.lock.locked(): yield 'lock'
    if autocast_state()[0]: yield 'autocast'
    if callback_of(learn, GradAccum) and any(p.grad is not None and p.grad.any() for p in of[0].parameters()): yield 'gradients'

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('kind', kinds)
def test_nothing_is_left_of_a_fault(kind):
    "By an error and by an interrupt in any event, before our callbacks hear of it and after; also while losses are NaN. The next fit goes as one does"
    n = 0
    for i,event in enumerate(events):
        error,nan,order = (ValueError,KeyboardInterrupt)[i%2],i//2%2==1,(-60,200)[i//3%2]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Linear(4,2)).double()
        cbs = [*kinds[kind](), *([Spoilt(math.nan, [2,3])] if nan else [])]
        learn = quiet_learner(loaders(regression(20), 4), model, cbs=cbs)
        loaders_were,bomb = (learn.dls,*learn.dls.loaders),RaiseAt(event, error, [2,3], order=order)
        try: learn.fit(1, 0.05, cbs=bomb)
        except error: n += 1
        for _ in range(2):
            assert list(left(learn))==[]
            assert all(map(operator.is_, (learn.dls,*learn.dls.loaders), loaders_were))
            assert learn.dls.train.bs==4
            assert all(h['lr']==0.05 for h in learn.opt.hypers)
            learn.fit(1, 0.05)
        assert bomb not in learn.cbs
    assert n>=len(events)-2
