"Columns of the progress table, in their order, at their values, and gone with the callback that had them; and what TensorBoard and Weights & Biases are told"
import sys
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from torch.nn import functional as F
from fastcore.foundation import L
from fastai.callback.core import Callback, CancelBatchException, CancelEpochException, CancelFitException, CancelTrainException, CancelValidException
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import lr_find # noqa: F401, it adds the method
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.learner import Recorder
from fastai.metrics import mse
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale
from helpers import loaders, mlp, pairwise, quiet_learner, RaiseAt, regression, set_seed

# Columns of the progress table

of_noise = ['noise_scale','noise_low','noise_high']
fastais = ['epoch','train_loss','valid_loss','time']
ways = {'accum': lambda: [GradAccum({0: 4})], 'noise': lambda: [NoiseScale(every=1)], 'both': lambda: [GradAccum({0: 4}),NoiseScale()],
        'swapped': lambda: [NoiseScale(),GradAccum({0: 4})]}
ours = {nm: ([] if nm=='accum' else of_noise)+([] if nm=='noise' else ['batch_size']) for nm in ways}

class Known(Callback):
    "What is known by the end of each epoch"
    order = NoiseScale.order+1
    def before_fit(self): self.seen,self.moments = [],[]
    def after_validate(self):
        if self.learn.lock.locked(): return
        noise = getattr(self.learn, 'noise_scale', None)
        self.seen.append([*([noise.noise_scale,*noise.ci] if noise else []), *([8] if hasattr(self.learn, 'grad_accum') else [])])
        if noise: self.moments.append([noise.noise_scale,*noise.ci,noise.tr_sigma,noise.g_sq])

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

@pytest.mark.parametrize('way,kwargs', pairwise([*ways], [dict(),dict(add_time=False),dict(train_metrics=True)]))
def test_our_columns_stand_after_the_metrics_and_before_the_time(way, kwargs):
    "A second fit has no more of them, and one without our callbacks has none"
    plain,learn,shown = small(metrics=mse),small(way, cbs=[Known()], metrics=mse),[]
    for o in (plain,learn):
        o.remove_cb(Recorder)
        o.add_cb(Recorder(**kwargs))
    plain.fit(1, 0.01)
    at = len(names(plain))-kwargs.get('add_time', True)
    learn.logger = shown.append
    for _ in range(2):
        learn.fit(2, 0.01)
        assert names(learn)==[*names(plain)[:at],*ours[way],*names(plain)[at:]]
        assert no_stand_in(learn)
        assert [list(o)[-len(ours[way]):] for o in learn.recorder.values]==learn.known.seen
    assert [len(o) for o in shown]==[len(names(learn))]*4
    if way!='accum': assert np.isfinite(learn.known.seen[-1][0])
    learn.remove_cbs([GradAccum,NoiseScale])
    learn.fit(1, 0.01)
    assert names(learn)==names(plain)

# Its value

@pytest.mark.parametrize('cbs,expected', [([GradAccum({1: 4, 3: 100}), NoiseScale()],[2,8,8,26]), ([GradAccum({0: 3})],[6]*4),
    ([GradAccum(lambda e: 2**e)],[2,4,8,16]), ([BatchSchedule({0: 4, 1: 8})],[4,8,8,8])], ids=['dict','dict of one','function','schedule'])
@pytest.mark.filterwarnings('ignore:GradAccum.100. counts')
def test_the_batch_size_of_each_epoch_is_a_column(cbs, expected):
    "No more than the epoch holds"
    learn = small(n=26, bs=2, cbs=cbs)
    learn.fit(4, 0.01)
    assert sizes(learn)==expected

# Who reads it

@pytest.mark.parametrize('monitor', ['noise_high','batch_size'])
def test_trackers_read_our_columns(monitor):
    save = SaveModelCallback(monitor=monitor, comp=np.greater)
    learn = small(bs=2, cbs=[GradAccum({0: 1, 1: 4}), NoiseScale(), Known()])
    learn.fit(3, 0.01, cbs=save)
    assert save.best==np.nanmax([2,8,8] if monitor=='batch_size' else [o[of_noise.index(monitor)] for o in learn.known.seen])
    learn.fit(9, 0.01, cbs=EarlyStoppingCallback(monitor='batch_size', comp=np.greater, patience=2))
    assert sizes(learn)==[2,8,8,8] # Twice no larger

# What is no fit, or not all of one

def test_validation_returns_none_of_our_columns():
    plain,learn = small(bs=2, metrics=F.l1_loss),small('both', metrics=F.l1_loss)
    learn.fit(1, 0.01)
    plain.model.load_state_dict(learn.model.state_dict())
    for _ in range(2): assert list(learn.validate())==list(plain.validate())
    assert names(learn)==names(plain)

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
def test_columns_after_a_fit_that_failed(way, event, stays, exc):
    "Columns are those of the callbacks that are still there; validation has none"
    learn = small(way)
    stop = RaiseAt(event[0], exc, order=event[1])
    learn.add_cb(stop)
    with pytest.raises(exc, match='the one'): learn.fit(1, 0.01)
    learn.remove_cb(stop)
    if stays=='goes': learn.remove_cbs([GradAccum,NoiseScale])
    learn.validate()
    assert names(learn)==fastais
    added = ours[way] if stays=='stays' else []
    for _ in range(2):
        learn.fit(1, 0.01)
        assert names(learn)==[*fastais[:-1],*added,'time']
        assert len(learn.recorder.values[-1])==2+len(added)
        assert no_stand_in(learn)

# What loggers keep

of_step = ['noise_scale','tr_sigma','g_sq','n_items']
of_epoch = ['noise_scale','noise_low','noise_high','tr_sigma','g_sq','batch_size','n_acc']

def board(log_dir='runs'):
    tensorboard = pytest.importorskip('fastai.callback.tensorboard', reason="tensorboard is not installed here")
    return tensorboard.TensorBoardCallback(log_dir, trace_model=False, log_preds=False)

def written(log_dir='runs'):
    "All of an event file: `(steps, values)` by name"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    acc = EventAccumulator(str(log_dir), dict(scalars=0))
    acc.Reload()
    return {nm: ([o.step for o in acc.Scalars(nm)],[o.value for o in acc.Scalars(nm)]) for nm in acc.Tags()['scalars']}

class Runs:
    "In the place of `wandb`: what is logged joins the step that is open; a call without `step` and `commit=False` closes it"
    def __init__(self): self.rows,self.step = {},0
    def log(self, data, step=None, commit=None):
        assert commit is False or step is not None or not data # Else W&B would go on to a step of its own
        if step is not None and step<self.step: return # Too late for W&B
        if step is not None: self.step = step
        if data: self.rows.setdefault(self.step, {}).update(data)
        elif commit is not False: self.step += 1

class WandbCallback(Callback):
    "Logs when fastai's does"
    order = Recorder.order+1
    def before_fit(self): self.at,self.run = self.runs.step-1,not hasattr(self.learn, 'lr_finder')
    def after_batch(self):
        if not self.training: return
        self.at += 1
        self.runs.log(dict(train_iter=self.train_iter, n_iter=self.n_iter, raw_loss=float(self.learn.loss), train_loss=float(self.smooth_loss),
                           **{f'{k}_{i}': v for i,h in enumerate(self.opt.hypers) for k,v in h.items()}), step=self.at)
    def after_epoch(self):
        self.runs.log({k: v for k,v in zip(self.recorder.metric_names, self.recorder.log) if k not in ('train_loss','epoch','time')}, step=self.at)
    def after_fit(self):
        self.run = True
        self.runs.log({})

@pytest.fixture
def runs(monkeypatch):
    "As where somebody has fastai's module of W&B"
    mod = ModuleType('fastai.callback.wandb')
    mod.wandb,mod.WandbCallback = Runs(),WandbCallback
    monkeypatch.setattr(WandbCallback, 'runs', mod.wandb, raising=False)
    monkeypatch.setitem(sys.modules, mod.__name__, mod)
    return mod.wandb

measuring = {'windows': lambda: [GradAccum(4),NoiseScale()], 'parts': lambda: [NoiseScale(every=3)],
        'both': lambda: [GradAccum({0: 1, 1: 3}),NoiseScale(every=2)],
        'schedule': lambda: [BatchSchedule({0: 4, 1: 12}, max_micro_bs=4),NoiseScale()]}

def small_logged(way=None, cbs=(), n=52, **kwargs):
    "13 micro-batches of 4 in an epoch: the last window is a short one"
    set_seed(0)
    learn = quiet_learner(loaders(regression(n), 4, shuffle=True), mlp(), **kwargs)
    return learn.add_cbs([*(measuring[way]() if way else []), *cbs])

def noise_of(learn): return getattr(learn, 'noise_scale', None) or learn.grad_accum.noise

class Batches(Callback):
    "The batch of each measurement, as fastai counts them"
    order = 200
    def before_fit(self): self.at = []
    def after_batch(self):
        noise = noise_of(self.learn)
        at = getattr(self.learn, 'grad_accum', None) # Windows
        if self.training: self.at += [at.n_large if at else self.train_iter]*(len(noise.rows)-len(self.at))

# Each measurement

@pytest.mark.parametrize('way,first', [(o,i%2==0) for i,o in enumerate(measuring)])
def test_each_measurement_is_logged(way, first, runs):
    "Those of `NoiseScale.df`, at the batch that was measured, whichever callback came first"
    loggers = [board(),WandbCallback()]
    learn = small_logged(cbs=loggers*first)
    learn.add_cbs([*measuring[way](), *loggers*(not first), Batches()])
    learn.fit(2, 0.01)
    df,at = noise_of(learn).df,learn.batches.at
    assert len(df)==len(at)>=3
    assert df.noise_scale.nunique()>1
    tb = written()
    rows = {o['train_iter']: o for o in runs.rows.values() if 'noise/n_items' in o}
    assert sorted(rows)==at
    for nm in of_step:
        assert tb[f'noise/{nm}'][0]==at
        np.testing.assert_array_equal(tb[f'noise/{nm}'][1], df[nm].astype(np.float32)) # As precise as an event file is
        np.testing.assert_array_equal([rows[i][f'noise/{nm}'] for i in at], df[nm])
    micro = [4]*len(df) if way!='parts' else df.n_items
    n_acc = [rows[i]['noise/n_acc'] for i in at]
    assert all(0<=n*m-items<n*m for n,m,items in zip(n_acc, micro, df.n_items))  # Whole windows but the last of an epoch
    assert tb['noise/n_acc']==(at,n_acc)
    assert 1 in n_acc if way in ('parts','both') else 1 not in n_acc[1:]

def test_files_of_windows_and_of_the_large_batch_are_the_same(runs):
    "Steps, losses, rates and rows of epochs, whether the windows tile the epoch or not"
    rows = []
    for bs,cbs in ((4,[GradAccum(4)]),(16,[])):
        set_seed(0)
        learn = quiet_learner(loaders(regression(52), bs), mlp(), cbs=[board(f'of {bs}'),WandbCallback(),*cbs])
        learn.fit_one_cycle(2, 0.05)
        rows.append(runs.rows)
        runs.__init__()
    windows,large = written('of 4'),written('of 16')
    assert windows.keys()==large.keys()>={'train_loss','lr_0','valid_loss'}
    assert len(large['lr_0'][0])>=8
    for nm in large:
        assert windows[nm][0]==large[nm][0]
        np.testing.assert_allclose(windows[nm][1], large[nm][1], rtol=1e-6)
    assert rows[0].keys()==rows[1].keys()
    for i,o in rows[0].items(): assert o==pytest.approx(rows[1][i], rel=1e-6)

class ShowGraph(Callback):
    "Draws as tsai's does: the recorder's losses one by one, and validation losses at the `train_iter` that ends an epoch"
    order,run_valid = 65,False
    def before_fit(self): self.nb_batches = []
    def after_train(self): self.nb_batches.append(self.train_iter)
    def after_epoch(self):
        rec = self.learn.recorder
        self.graphs = [(i,float(o)) for i,o in enumerate(rec.losses)],[*zip(self.nb_batches, (v[1] for v in rec.values))]

class Logs(Callback):
    "A logger of the user's own, which says that it is one"
    run_valid,records_steps = False,True
    def before_fit(self): self.at = []
    def after_batch(self): self.at.append(self.train_iter)

def test_steps_are_counted_for_those_who_draw_them():
    "They are known by name, or say so"
    learn = small_logged('windows', [ShowGraph(),Logs()], n=64)
    learn.fit(3, 0.01)
    losses,valid = learn.show_graph.graphs
    assert [i for i,_ in losses]==list(range(12))
    assert [i for i,_ in valid]==[4,8,12]
    assert learn.logs.at==[*range(1,13)]

# Each epoch

@pytest.mark.parametrize('way,csv', pairwise([*measuring], [True,False]))
def test_each_epoch_is_logged(way, csv, runs):
    "The table has the moments and `n_acc` only where it is written to a file, as it is shown; TensorBoard and W&B always have them"
    learn = small_logged(way, [board(),WandbCallback(),Known(), *[CSVLogger()]*csv])
    learn.fit(2, 0.01)
    known = np.array(learn.known.moments)
    accum = getattr(learn, 'grad_accum', None)
    names = of_epoch if accum and accum.sizes.varies else of_epoch[:-2] # The batch size is shown where it may change
    row = names if csv else [o for o in names if o not in ('tr_sigma','g_sq','n_acc')]
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss',*row,'time']
    assert {len(o) for o in learn.recorder.values}=={2+len(row)}
    tb,ends = written(),[o for o in runs.rows.values() if 'valid_loss' in o]
    expected = dict(zip(of_epoch, known.T))
    if 'batch_size' in names:
        sizes = [4,12] if way in ('both','schedule') else [o['batch_size'] for o in ends]
        expected.update(batch_size=sizes, n_acc=[o//4 for o in sizes])
    steps = dict(parts=[13,26], both=[13,18], schedule=[13,18]).get(way, [4,8]) # Windows
    for nm in names:
        assert tb[nm][0]==steps
        assert [o[nm] for o in ends]==list(expected[nm])
        np.testing.assert_array_equal(tb[nm][1], np.float32(expected[nm]))
    if csv:
        file = pd.read_csv('history.csv')
        assert list(file.columns)==list(learn.recorder.metric_names)
        np.testing.assert_allclose(file[names], np.array([expected[nm] for nm in names]).T.astype(float), rtol=1e-12)

# Where nobody logs

def test_nothing_is_logged_while_a_rate_is_looked_for(runs):
    "fastai's callbacks are off then"
    learn = small_logged('windows', [board(),WandbCallback()])
    learn.lr_find(num_it=20, show_plot=False, suggest_funcs=())
    assert not runs.rows
    learn.bs_find(0.01, num_it=40, n_batch=4, show_plot=False)
    assert not runs.rows
