"Columns of the progress table: the noise scale, its interval and the batch size, in their order, at their values, and gone with the callback that had them"

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from torch.nn import functional as F
from fastai.callback.core import (Callback, CancelBatchException, CancelEpochException, CancelFitException, CancelTrainException,
                                  CancelValidException)
from fastai.callback.schedule import lr_find # noqa: F401, it adds the method
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.learner import Recorder
from fastai.metrics import mse
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale, ScaledLR
from helpers import RaiseAt, loaders, mlp, pairwise, quiet_learner, regression, set_seed

of_noise = ['noise_scale','noise_low','noise_high']
fastais = ['epoch','train_loss','valid_loss','time']
ways = {'accum': lambda: [GradAccum({0: 4})], 'noise': lambda: [NoiseScale(every=1)], 'both': lambda: [GradAccum({0: 4}),NoiseScale()],
        'swapped': lambda: [NoiseScale(),GradAccum({0: 4})]}
ours = {nm: ([] if nm=='accum' else of_noise)+([] if nm=='noise' else ['batch_size']) for nm in ways}
each_way = pytest.mark.parametrize('way', ['accum','noise','both'])

class Known(Callback):
    "What is known by the end of each epoch"
    order = NoiseScale.order+1
    def before_fit(self): self.seen = []
    def after_validate(self):
        if self.learn.lock.locked(): return
        noise = getattr(self.learn, 'noise_scale', None)
        self.seen.append([*([noise.noise_scale,*noise.ci] if noise else []), *([8] if hasattr(self.learn, 'grad_accum') else [])])

def small(way=None, bs=None, n=32, cbs=None, **kwargs):
    "Eight items an optimizer step, in four micro-batches where it accumulates"
    set_seed(0)
    bs = bs or (8 if way in (None,'noise') else 2)
    return quiet_learner(loaders(regression(n), bs, shuffle=True), mlp(), cbs=[*(ways[way]() if way else []), *L(cbs)], **kwargs)

def names(learn): return list(learn.recorder.metric_names)
def sizes(learn):
    if 'batch_size' not in names(learn): return None
    at = names(learn).index('batch_size')-1 # `values` have no epoch
    return [int(o[at]) if len(o)>at else None for o in learn.recorder.values]
def no_stand_in(learn): return not {'before_fit','after_epoch'} & {*vars(learn.recorder)}

# Which, and in which order

recorders = [(dict(), ['train_loss','valid_loss'], ['{}']), (dict(add_time=False), ['train_loss','valid_loss'], ['{}']),
             (dict(train_metrics=True), ['train_loss','valid_loss'], ['train_{}','valid_{}']),
             (dict(train_metrics=True, valid_metrics=False), ['train_loss'], ['{}'])]

@pytest.mark.parametrize('way,recorder,metrics', pairwise([*ways], range(4), [[],[F.l1_loss,mse]]))
def test_after_the_metrics_and_before_the_time(way, recorder, metrics):
    kwargs,losses,each = recorders[recorder]
    m,shown = [o.__name__ for o in metrics],[]
    expected = ['epoch'] + [nm for o in each for nm in ([l for l in losses if l.startswith(o[:5])] if len(each)>1 else losses) + [o.format(k) for k in m]]
    time = ['time'] if kwargs.get('add_time', True) else []
    learn = small(way, cbs=[Known()], metrics=metrics)
    learn.remove_cb(Recorder)
    learn.add_cb(Recorder(**kwargs))
    learn.logger = shown.append
    for _ in range(2): # A second fit has no more of them
        learn.fit(2, 0.01)
        assert names(learn)==[*expected,*ours[way],*time]
        assert no_stand_in(learn)
        assert [list(o)[-len(ours[way]):] for o in learn.recorder.values]==learn.known.seen
        assert len(learn.known.seen)==2
    assert [len(o) for o in shown]==[len(names(learn))]*4
    assert [o[0] for o in shown]==[0,1,0,1]
    if way!='noise':
        at = names(learn).index('batch_size')
        assert [type(o[at]) for o in shown]==[int]*4
        assert all(isinstance(v, float) for o in shown for v in o[1:at])
    if way!='accum': assert np.isfinite(learn.known.seen[-1][0])
    learn.remove_cbs([GradAccum,NoiseScale])
    learn.fit(1, 0.01)
    assert names(learn)==[*expected,*time]
    assert len(learn.recorder.values[-1])==len(expected)-1

# Its value

@pytest.mark.parametrize('cbs,expected', [([GradAccum({1: 4, 3: 100}), NoiseScale()],[2,8,8,26]), ([GradAccum({0: 3})],[6]*4),
    ([GradAccum(lambda e: 2**e)],[2,4,8,16]), ([BatchSchedule({0: 4, 1: 8})],[4,8,8,8])], ids=['dict','dict of one','function','schedule'])
@pytest.mark.filterwarnings('ignore:GradAccum.100. counts')
def test_of_each_epoch(cbs, expected):
    "No more than the epoch holds"
    learn = small(n=26, bs=2, cbs=cbs)
    learn.fit(4, 0.01)
    assert sizes(learn)==expected

@pytest.mark.parametrize('cbs', [lambda: [GradAccum(bs=8)], lambda: [GradAccum(4),ScaledLR(4)]], ids=['bs','scaled'])
def test_none_where_it_never_changes(cbs):
    "The row ends with the metric, as scripts read it"
    learn = small(bs=2, cbs=cbs(), metrics=mse)
    learn.fit(2, 0.01)
    assert names(learn)==['epoch','train_loss','valid_loss','mse','time']
    assert [len(o) for o in learn.recorder.values]==[3,3]
    assert learn.recorder.values[-1][-1]==learn.validate()[-1]

def test_epochs_that_are_skipped_have_fastais_row():
    learn = small(bs=2, cbs=GradAccum({0: 2, 2: 4, 3: 8}))
    learn.fit(4, 0.01, start_epoch=2)
    assert [len(o) for o in learn.recorder.values]==[0,0,3,3]
    assert sizes(learn)==[None,None,8,16]

# Who reads it

@pytest.mark.parametrize('monitor', ['noise_high','batch_size'])
def test_trackers(monitor):
    save = SaveModelCallback(monitor=monitor, comp=np.greater)
    learn = small(bs=2, cbs=[GradAccum({0: 1, 1: 4}), NoiseScale(), Known()])
    learn.fit(3, 0.01, cbs=save)
    assert save.best==np.nanmax([2,8,8] if monitor=='batch_size' else [o[of_noise.index(monitor)] for o in learn.known.seen])
    learn.fit(9, 0.01, cbs=EarlyStoppingCallback(monitor='batch_size', comp=np.greater, patience=2))
    assert sizes(learn)==[2,8,8,8] # Twice no larger

# What is no fit, or not all of one

@each_way
def test_validation_returns_none(way):
    plain,learn = small(bs=learn_bs(way), metrics=F.l1_loss),small(way, metrics=F.l1_loss)
    learn.fit(1, 0.01)
    row = list(learn.recorder.values[-1])
    plain.model.load_state_dict(learn.model.state_dict())
    for _ in range(2):
        assert list(learn.validate())==list(plain.validate())
        assert len(learn.validate())==2
    assert [torch.equal(a,b) for a,b in zip(learn.get_preds(), plain.get_preds(), strict=True)]==[True,True]
    assert names(learn)==names(plain)
    learn.fit(1, 0.01)
    assert len(learn.recorder.values[-1])==len(row)==3+len(ours[way])

def learn_bs(way): return 8 if way=='noise' else 2

cancels = [('before_batch',CancelValidException), ('before_batch',CancelTrainException), ('before_train',CancelEpochException),
           ('before_batch',CancelFitException), ('before_batch',CancelBatchException)]

class Cancel(Callback):
    "The second epoch, from its first batch on"
    def __init__(self, event, exc):
        self.exc,self.of_batch = exc,event=='before_batch'
        setattr(self, event, self._cancel)
    def _cancel(self):
        if self.epoch==1 and (not self.of_batch or self.iter==0 and self.training!=(self.exc is CancelValidException)): raise self.exc

@pytest.mark.parametrize('way,cancel,valid_metrics', pairwise(['accum','noise','both'], range(5), [True,False]))
def test_a_cancelled_epoch_keeps_the_row_of_fastai(way, cancel, valid_metrics):
    "Where values are missing ours are too: none stands under the name of another"
    learn,rows = small(way, cbs=Cancel(*cancels[cancel])),[]
    learn.recorder.valid_metrics = valid_metrics
    learn.logger = rows.append
    learn.fit(3, 0.01)
    event,exc = cancels[cancel]
    whole = exc is CancelBatchException or exc is CancelValidException and not valid_metrics # All that fastai has by then
    n = len(names(learn))
    assert [len(o)==n for o in rows]==([True] if exc is CancelFitException else [True,whole,True])
    for o in rows:
        if len(o)<n:
            assert len(o)<=n-len(ours[way])
            assert 8 not in [type(v) is int and v for v in o[1:]]
        elif way!='noise': assert o[-2]==8

events = [('before_fit',GradAccum.order+1), *((e,200) for e in ('before_batch','after_epoch'))]

@pytest.mark.parametrize('way,event,stays,exc', pairwise(['accum','noise','both'], events, ['stays','goes'], [ValueError,KeyboardInterrupt]))
def test_after_a_fit_that_failed(way, event, stays, exc):
    "Columns are those of the callbacks that are still there; validation has none"
    learn = small(way)
    stop = RaiseAt(event[0], exc, order=event[1])
    learn.add_cb(stop)
    with pytest.raises(exc, match='the one'): learn.fit(1, 0.01)
    learn.remove_cb(stop)
    if stays=='goes': learn.remove_cbs([GradAccum,NoiseScale])
    assert len(learn.validate())==1
    assert len(learn.get_preds())==2
    assert names(learn)==fastais
    added = ours[way] if stays=='stays' else []
    for _ in range(2):
        learn.fit(1, 0.01)
        assert names(learn)==[*fastais[:-1],*added,'time']
        assert len(learn.recorder.values[-1])==2+len(added)
        assert no_stand_in(learn)
