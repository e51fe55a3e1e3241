"What loggers keep: each measurement on TensorBoard and at Weights & Biases, where it belongs, and what an epoch comes to in all of them"
import sys
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import lr_find # noqa: F401, it adds the method
from fastai.learner import Recorder
from helpers import flat, loaders, mlp, pairwise, quiet_learner, regression, set_seed

tensorboard = pytest.importorskip('fastai.callback.tensorboard', reason="tensorboard is not installed here")

of_step = ['noise_scale','tr_sigma','g_sq','n_items']
of_epoch = ['noise_scale','noise_low','noise_high','tr_sigma','g_sq','batch_size','n_acc']

def board(log_dir='runs'): return tensorboard.TensorBoardCallback(log_dir, trace_model=False, log_preds=False)

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

ways = {'windows': lambda: [GradAccum(4),NoiseScale()], 'parts': lambda: [NoiseScale(every=3)],
        'both': lambda: [GradAccum({0: 1, 1: 3}),NoiseScale(every=2)],
        'schedule': lambda: [BatchSchedule({0: 4, 1: 12}, max_micro_bs=4),NoiseScale()]}

def small(way=None, cbs=(), n=52, **kwargs):
    "13 micro-batches of 4 in an epoch: the last window is a short one"
    set_seed(0)
    learn = quiet_learner(loaders(regression(n), 4, shuffle=True), mlp(), **kwargs)
    return learn.add_cbs([*(ways[way]() if way else []), *cbs])

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

@pytest.mark.parametrize('way,first', [(o,i%2==0) for i,o in enumerate(ways)])
def test_each_measurement(way, first, runs):
    "Those of `NoiseScale.df`, at the batch that was measured, whichever callback came first"
    loggers = [board(),WandbCallback()]
    learn = small(cbs=loggers*first)
    learn.add_cbs([*ways[way](), *loggers*(not first), Batches()])
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
    small,large = written('of 4'),written('of 16')
    assert small.keys()==large.keys()>={'train_loss','lr_0','valid_loss'}
    assert len(large['lr_0'][0])>=8
    for nm in large:
        assert small[nm][0]==large[nm][0]
        np.testing.assert_allclose(small[nm][1], large[nm][1], rtol=1e-6)
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

class Acts(Callback):
    "By `train_iter`, as a schedule of transforms does: in each micro-batch"
    def before_fit(self): self.at = []
    def after_batch(self):
        if self.training: self.at.append(self.train_iter)

def test_steps_are_counted_for_those_who_draw_them():
    "They are known by what they read, or say so; who acts in each micro-batch still does"
    learn = small('windows', [ShowGraph(),Logs(),Acts()], n=64)
    learn.fit(3, 0.01)
    losses,valid = learn.show_graph.graphs
    assert [i for i,_ in losses]==list(range(12))
    assert [i for i,_ in valid]==[4,8,12]
    assert learn.logs.at==[*range(1,13)]
    assert learn.acts.at==[*range(1,49)]

# Each epoch

class Known(Callback):
    "What is known by the end of each epoch"
    order = NoiseScale.order+1
    def before_fit(self): self.seen = []
    def after_validate(self):
        if not self.learn.lock.locked(): o = noise_of(self.learn); self.seen.append([o.noise_scale,*o.ci,o.tr_sigma,o.g_sq])

@pytest.mark.parametrize('way,csv', pairwise([*ways], [True,False]))
def test_each_epoch(way, csv, runs):
    "The table has the moments and `n_acc` only where it is written to a file, as it is shown; TensorBoard and W&B always have them"
    learn = small(way, [board(),WandbCallback(),Known(), *[CSVLogger()]*csv])
    learn.fit(2, 0.01)
    known = np.array(learn.known.seen)
    accum = getattr(learn, 'grad_accum', None)
    names = of_epoch if accum and accum.varies else of_epoch[:-2] # The batch size is shown where it may change
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

@pytest.mark.parametrize('way', ['parts','schedule'])
def test_not_a_bit_changes(way, runs, tmp_path):
    bare,learn = small(way),small(way, [board(),WandbCallback(),CSVLogger()])
    assert not [*tmp_path.iterdir()]
    for o in (bare,learn):
        o.fit_one_cycle(2, 0.01)
        if o is bare:  # The fixture of all tests has us in an empty folder
            assert not [*tmp_path.iterdir()]
            assert not runs.rows
    assert (flat(bare)==flat(learn)).all()
    assert noise_of(bare).df.equals(noise_of(learn).df)

def test_nothing_while_a_rate_is_looked_for(runs):
    "fastai's callbacks are off then"
    learn = small('windows', [board(),WandbCallback()])
    learn.lr_find(num_it=20, show_plot=False, suggest_funcs=())
    assert not runs.rows
    learn.bs_find(0.01, num_it=40, n_batch=4, show_plot=False)
    assert not runs.rows

