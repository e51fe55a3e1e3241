"Going on from a checkpoint: as if there had been no interruption, from fastai's own files and what `SaveState` writes beside them"
import os
import random
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import fastai.callback.schedule # noqa: F401, it adds fit_one_cycle
import fastai_bs.finder # noqa: F401, it adds bs_find
from torch import nn
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.schedule import SchedExp, lr_find # noqa: F401, it adds the method
from fastai.callback.tracker import SaveModelCallback
from fastai.optimizer import Adam, OptimWrapper
from fastai_bs.accumulate import GradAccum
from fastai_bs.adaptive import AdaptiveAccum
from fastai_bs.lr import ScaledLR
from fastai_bs.noise import NoiseScale
from fastai_bs.resume import SaveState, plain_numbers
from fastai_bs.scaling import capped_sqrt_scaling, sqrt_scaling
from fastai_bs.schedule import BatchSchedule
from helpers import FoldedSGD, flat, loaders, momentum_sgd, pairwise, quiet_learner, regression, set_seed

class Draws(Callback):
    "The order of the items and dropout of an epoch are its own, whatever was drawn before: fastai saves no generator"
    order = -50
    def before_train(self):
        torch.manual_seed(7+self.epoch)
        self.dls.train.rng = random.Random(7+self.epoch)

class Crash(Callback):
    order = 200
    def before_epoch(self):
        if self.epoch==2: raise CancelFitException

optimizers = {'SGD': momentum_sgd, 'Adam': Adam, 'folded': partial(OptimWrapper, opt=FoldedSGD)}
noisy = lambda: (noise := NoiseScale(0.9), [GradAccum(3), ScaledLR(2, capped_sqrt_scaling, warmup_epochs=0, noise_scale=noise), noise])[1] # noqa: E731
stateless = {'nothing': lambda: [], 'accum': lambda: [GradAccum(3)], 'by epoch': lambda: [GradAccum({0: 1, 1: 2, 3: 4})],
             'scaled': lambda: [GradAccum(3),ScaledLR(2, sqrt_scaling, warmup_epochs=3, scale_wd=False)],
             'sizes': lambda: [BatchSchedule({0: 4, 2: 12, 3: 16}, sqrt_scaling)], 'progress': lambda: [BatchSchedule(SchedExp(4, 24), max_micro_bs=8)]}
stateful = {'windows': lambda: [GradAccum(3),NoiseScale(0.9)], 'parts': lambda: [NoiseScale(0.9, every=5, n_micro=2)],
            'both': lambda: [GradAccum({0: 2, 1: 1}),NoiseScale(every=3, n_micro=2)],
            'groups': lambda: [GradAccum(2),NoiseScale(by_group=True)], 'rule': noisy, 'adaptive': lambda: [AdaptiveAccum(2, max_acc=8, beta=0.8, target=4.)],
            'adaptive beside': lambda: [AdaptiveAccum(2, max_acc=8, beta=0.8, target=4.),NoiseScale(0.8)],
            'velocity': lambda: [GradAccum(2),ScaledLR(2, warmup_epochs=3, momentum_correction=True)]}

def learner(cbs, opt='SGD', dtype=torch.float32):
    set_seed(0)
    model = nn.Sequential(nn.Linear(5,8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8,2)).to(dtype)
    return quiet_learner(loaders(regression(52, dtype=dtype), 4, shuffle=True), model, opt_func=optimizers[opt], cbs=[*cbs,Draws()])

def trained(cbs, opt='SGD', more=(), start_epoch=0, load=True):
    "Four epochs of one-cycle, or what is left of them"
    learn = learner(cbs, opt)
    if start_epoch and load: learn.load(f'model_{start_epoch-1}')
    learn.fit_one_cycle(4, 0.01, cbs=more, start_epoch=start_epoch)
    return learn

def saves(): return [SaveModelCallback(every_epoch=True, with_opt=True),SaveState()]
def files(): return sorted(os.listdir('models')) if os.path.exists('models') else []
def same(a, b): return torch.equal(flat(a), flat(b)) and all(torch.equal(x, y) for x,y in zip(a.model.buffers(), b.model.buffers(), strict=True))
def noises(learn): return [o for o in (getattr(learn, 'noise_scale', None), getattr(getattr(learn, 'grad_accum', None), 'own', None)) if o]

def assert_all_alike(a, b):
    "Weights, all that was measured, and the way of an adaptive size, to the bit"
    assert same(a, b)
    for x,y in zip(noises(a), noises(b), strict=True):
        pd.testing.assert_frame_equal(x.df, y.df, check_exact=True)
        pd.testing.assert_frame_equal(x.table, y.table, check_exact=True)
        assert repr(x)==repr(y) and (x.n_steps,x.n_items,x.next,x.ci)==(y.n_steps,y.n_items,y.next,y.ci)
        assert vars(x.pool)==vars(y.pool)
    if isinstance(a.cbs[-2], AdaptiveAccum): pd.testing.assert_frame_equal(a.grad_accum.df, b.grad_accum.df, check_exact=True)

# As if there had been no interruption

@pytest.mark.parametrize('nm,opt', pairwise([*stateless], ['SGD','Adam']))
def test_what_goes_by_the_epoch_needs_nothing(nm, opt):
    "fastai's own checkpoint is all there is"
    whole = trained(stateless[nm](), opt)
    trained(stateless[nm](), opt, [saves()[0],Crash()])
    assert files()==['model_0.pth','model_1.pth']
    again = trained(stateless[nm](), opt, start_epoch=2)
    assert same(whole, again)

each_state = [(nm,'folded' if nm=='velocity' else ('SGD','Adam')[i%2]) for i,nm in enumerate(stateful)]

@pytest.mark.parametrize('nm,opt', each_state)
def test_what_was_measured_goes_along(nm, opt):
    whole = trained(stateful[nm](), opt)
    trained(stateful[nm](), opt, [*saves(),Crash()])
    assert files()==['model_0.pth','model_1.pth','state_0.pth','state_1.pth']
    again = trained(stateful[nm](), opt, [SaveState()], start_epoch=2)
    assert_all_alike(whole, again)
    if nm=='adaptive': assert whole.grad_accum.df.epoch.between(0.1, 2).any() # Its size was not `start` by then
    lost = trained(stateful[nm](), opt, start_epoch=2) # Without it these begin anew, so this test can fail
    if noises(whole): assert len(noises(lost)[0].df)<len(noises(whole)[0].df)
    assert same(whole, lost)==(nm in ('windows','parts','both','groups'))

@pytest.mark.parametrize('nm', ['windows','parts','adaptive'])
def test_by_hand(nm):
    "`state_dict` and `load_state_dict` without `SaveState`; a state that was loaded goes on without a `start_epoch` too"
    first,again = learner(stateful[nm]()),learner(stateful[nm]())
    first.fit(2, 0.01)
    cb,other = (o.grad_accum if nm=='adaptive' else o.noise_scale for o in (first,again))
    other.load_state_dict(cb.state_dict())
    first.save('it')
    again.load('it')
    n = len(cb.df)
    assert other.df.equals(cb.df) and other.n_steps==cb.n_steps>0
    again.fit(1, 0.01)
    assert other.df[:n].equals(cb.df) and other.n_steps>cb.n_steps and (nm=='adaptive' or len(other.df)>n)
    again.fit(1, 0.01)
    assert other.n_steps<cb.n_steps # As any other fit

def test_of_a_long_training_whose_rows_were_thinned_out():
    "What was known by each row that is left cannot be reckoned from those"
    noise = NoiseScale(0.5)
    noise.most = 8
    learn = learner([GradAccum(2),noise])
    learn.fit(6, 0.01)
    again = NoiseScale(0.5)
    again.load_state_dict(noise.state_dict())
    assert noise.pool.n_windows>len(noise.df) and again.df.equals(noise.df) and again.table.equals(noise.table)

@pytest.mark.slow
def test_in_a_fresh_process():
    "The same script again, which loads and says where to start"
    whole = trained(stateful['adaptive']())
    trained(stateful['adaptive'](), more=[*saves(),Crash()])
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import torch, test_resume as t"\
           "; l = t.trained(t.stateful['adaptive'](), more=t.saves(), start_epoch=2)\n" \
           "torch.save([t.flat(l), torch.tensor(l.grad_accum.df.to_numpy()), torch.tensor(l.grad_accum.own.df.to_numpy())], 'there.pth')"
    subprocess.run([sys.executable,'-W','ignore','-c',code], check=True)
    for a,b in zip((flat(whole),whole.grad_accum.df,whole.grad_accum.own.df), torch.load('there.pth'), strict=True): np.testing.assert_array_equal(a, b)
    assert files()==sorted(f'{o}_{e}.pth' for o in ('model','state') for e in range(4))

# What is in the files

def test_plain_numbers():
    assert plain_numbers({'a': (np.float64(1.5),[np.int64(2)]), 'b': None})=={'a': [1.5,[2]], 'b': None}
    def _kinds(o):
        if isinstance(o, dict): return set().union(*map(_kinds, o.values()))
        return set().union(*map(_kinds, o)) if type(o) is list else {type(o)}
    for nm,make in stateful.items():
        learn = learner(make(), 'folded' if nm=='velocity' else 'Adam')
        learn.fit(2, 0.01)
        for cb in SaveState.with_state(SimpleOf(learn)).values(): assert _kinds(cb.state_dict())<={int,float,bool,str,type(None)}, nm

class SimpleOf:
    def __init__(self, learn): self.learn = learn

def test_in_the_name_and_the_folder_that_was_said():
    learn = learner(stateful['windows']())
    learn.model_dir = 'elsewhere'
    learn.fit(1, 0.01, cbs=SaveState('noise'))
    assert os.listdir('elsewhere')==['noise_0.pth'] and [*torch.load('elsewhere/noise_0.pth')]==['of the fit','noise_scale']

def test_epochs_that_are_skipped_keep_their_files():
    trained(stateful['windows'](), more=[*saves(),Crash()])
    was = torch.load('models/state_0.pth'),os.stat('models/state_1.pth').st_mtime_ns
    trained(stateful['windows'](), more=[SaveState()], start_epoch=2)
    assert (torch.load('models/state_0.pth'),os.stat('models/state_1.pth').st_mtime_ns)==was and 'state_3.pth' in files()

def test_nothing_is_written_unasked():
    "Nor in a mock training, in `validate` or in `get_preds`"
    learn = learner(stateful['windows']())
    learn.fit(1, 0.01)
    learn.add_cb(SaveState())
    learn.validate()
    learn.get_preds()
    with pytest.warns(UserWarning, match='counts micro-batches'): learn.lr_find(num_it=20, show_plot=False, suggest_funcs=())
    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch, 'save', lambda *args: pytest.fail("written"))
        learn.bs_find(0.01, num_it=40, n_batch=4, show_plot=False)
    assert 'state_0.pth' not in files()
    learn.fit(1, 0.01)
    assert 'state_0.pth' in files()

def test_the_first_rank_writes(monkeypatch):
    monkeypatch.setenv('RANK', '1')
    cb = SaveState()
    cb.learn = learner([])
    cb.learn.epoch = 0
    cb.after_epoch()
    assert not files()

def test_nothing_that_was_pickled_is_loaded():
    class Harm:
        def __reduce__(self): return os.mkdir,('harmed',)
    learn = learner(stateful['windows']())
    os.mkdir('models')
    torch.save({'noise_scale': Harm()}, 'models/state_0.pth')
    with pytest.raises(Exception, match='[Ww]eights'): learn.fit(2, 0.01, start_epoch=1, cbs=SaveState())
    assert not os.path.exists('harmed')

# What cannot be gone on from

def test_no_file():
    learn = learner(stateful['windows']())
    before = flat(learn).clone()
    with pytest.raises(FileNotFoundError, match='start_epoch=2 goes on from what was written after epoch 1, and there is no .*state_1.pth'):
        learn.fit(4, 0.01, start_epoch=2, cbs=SaveState())
    assert torch.equal(before, flat(learn)) and not files()

def test_a_model_that_does_not_go_on():
    "Of another epoch, or without its optimizer: refused before `SaveModelCallback` writes the files of skipped epochs anew. Another length is said"
    trained(stateful['windows'](), more=saves())
    def _contents(): return {o: Path('models', o).read_bytes() for o in files()}
    was = _contents()
    with pytest.raises(ValueError, match=r"state_1.pth is of another model: .* by learn.load\('model_1'\)"):
        trained(stateful['windows'](), more=saves(), start_epoch=2, load=False)
    learn = learner(stateful['windows']()).load('model_1', with_opt=False)
    with pytest.raises(ValueError, match="The optimizer has no state, and had one when state_1.pth was written"):
        learn.fit_one_cycle(4, 0.01, cbs=saves(), start_epoch=2)
    assert _contents()==was
    with pytest.warns(UserWarning, match="state_1.pth was of 4 epochs, and this one is of 5"):
        learner(stateful['windows']()).load('model_1').fit_one_cycle(5, 0.01, cbs=SaveState(), start_epoch=2)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='The fit that wrote')
        trained(stateful['windows'](), more=[SaveState()], start_epoch=2)

def test_a_callback_that_was_not_there_begins_anew():
    learn = learner([GradAccum(3)])
    learn.fit(1, 0.01, cbs=saves())
    again = learner(stateful['windows']())
    again.load('model_0')
    again.fit(2, 0.01, start_epoch=1, cbs=SaveState())
    assert len(again.noise_scale.df)==4 # Of the second epoch

@pytest.mark.parametrize('one,other', [(lambda: NoiseScale(0.9),lambda: NoiseScale(0.8)), (NoiseScale,lambda: NoiseScale(by_group=True)),
    (AdaptiveAccum,lambda: AdaptiveAccum(2)), (AdaptiveAccum,lambda: AdaptiveAccum(shrinks=True))],
    ids=['beta','by_group','start','shrinks'])
def test_a_state_of_another_kind(one, other):
    cb = other()
    before = dict(vars(cb))
    with pytest.raises(ValueError, match='The state is that of .*Make it with the same arguments'): cb.load_state_dict(one().state_dict())
    assert vars(cb)==before
    NoiseScale(every=3, n_micro=2, ci=0.9).load_state_dict(NoiseScale().state_dict()) # These are free
