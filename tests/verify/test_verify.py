"`learn.bs_verify`: what it trains, what it finds, that nobody can tell it was called, and what it refuses"
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD

from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.accumulate.sizes import batch_size
from fastai_bs.finder.mock_cycle import rate_at
from fastai_bs.verify.compare import Arm, beside, finalists, going_on, parts, rates_going_on, runs_wanted, trial_sizes
from fastai_bs.learner.loop import callback_of
from fastai_bs.schedule.scaled_lr import ScaledLR
from fastai_bs.finder.plan import BatchPlan
from fastai_bs.verify.trainings import ShortTraining
from fastai_bs.verify.trainings import Lengths, budget_of, default_epochs
import fastai_bs.verify.bs_verify # noqa: F401 bs_verify
from helpers import changes, loaders, mlp, picture, quiet_learner, RaiseAt, regression, set_seed
from test_finder import _after_training, _no_writing, _nothing, convnet_learner, learners, plain_training, training

pytestmark = [pytest.mark.usefixtures('short','short_find'), pytest.mark.filterwarnings('ignore')]

@pytest.fixture
def short_find(monkeypatch):
    "What the plan says matters little here: of the time of trials, most would be its mock training"
    find = Learner.bs_find
    monkeypatch.setattr(Learner, 'bs_find', lambda self, *args, **kwargs: find(self, *args, **{**kwargs, 'num_it': 40}))
    return find # Of its own length

def verify(learn, **kwargs): return learn.bs_verify(**{**dict(lr=0.01, n_epoch=5, sizes=[8,16], rates=(1,), n_runs=1), **kwargs})

# Nobody can tell it was called

@pytest.mark.slow
@pytest.mark.parametrize('nm,first', [('convnet',_after_training), ('awd_lstm',_nothing), ('scaled_lr',_nothing), ('mixup',_nothing),
    ('loss_scaler',_after_training), ('torch_loaders',_nothing), ('state_in_modules',_nothing), ('scheduler',_nothing)])
def test_cannot_be_noticed(nm, first):
    mock = partial(verify, sizes=[2,4], n_epoch=3) if nm=='awd_lstm' else partial(verify, sizes=[16,32], n_epoch=10) if nm=='scaled_lr' else verify
    assert changes(plain_training(nm, first), training(learners[nm], first, mock))==[]

def failing(learn, error, event, trial, **kwargs):
    "An exception in the so-manieth training of those that `bs_verify` runs after `bs_find`"
    cb = RaiseAt(event, error, range(1, 99))
    real = ShortTraining.__call__
    calls = []
    def _call(self, learn):
        calls.append(self)
        if len(calls)==trial: learn.add_cb(cb)
        try: return real(self, learn)
        finally: learn.remove_cb(cb)
    with pytest.MonkeyPatch.context() as m, pytest.raises(error, match='the one'):
        m.setattr(ShortTraining, '__call__', _call)
        verify(learn, **kwargs)
    assert len(calls)==trial

@pytest.mark.slow
@pytest.mark.parametrize('error,event,trial', [(ValueError,'before_fit',1), (ValueError,'after_pred',2), (KeyboardInterrupt,'after_backward',1),
    (KeyboardInterrupt,'before_step',3), (ValueError,'after_step',3), (KeyboardInterrupt,'before_validate',2), (ValueError,'after_fit',2)])
def test_an_exception_in_any_trial(error, event, trial):
    "Before two sizes were trained for the whole length an interrupt passes on"
    mock = partial(failing, error=error, event=event, trial=trial)
    assert changes(plain_training('convnet', _nothing), training(convnet_learner, mock=mock))==[]

@pytest.mark.slow
@pytest.mark.parametrize('trial,answered', [(2,False), (4,True)])
def test_an_interrupt_is_answered_where_two_sizes_were_trained(trial, answered, monkeypatch):
    real,calls = ShortTraining.__call__,[]
    def _call(self, learn):
        calls.append(self)
        if len(calls)==trial: raise KeyboardInterrupt
        return real(self, learn)
    monkeypatch.setattr(ShortTraining, '__call__', _call)
    learn = convnet_learner()
    was = picture(learn)
    if answered:
        v = verify(learn, equal='items', n_runs=2)
        assert v.interrupted and v.df.bs.tolist()==[8,16,8] and 'nterrupted' in v.advice
    else:
        with pytest.raises(KeyboardInterrupt): verify(learn, equal='items', n_runs=2)
    assert changes(was, picture(learn))==[]

def test_no_file_appears(tmp_path, monkeypatch):
    learn = convnet_learner(path=tmp_path)
    _no_writing(monkeypatch)
    verify(learn)
    assert list(tmp_path.iterdir())==[]

# What is trained

class Spy(Callback):
    "What each fit does"
    order,run_valid = 70,False
    def __init__(self): self.fits = []
    def before_fit(self):
        accum = callback_of(self.learn, GradAccum)
        Spy.fits.append(dict(n_acc=accum.n_acc_in(0) if accum else 1, bs=self.dls.train.bs, lrs=[], items=[], n_valid=0))
    def before_batch(self):
        fit = Spy.fits[-1]
        fit['lrs'].append(self.opt.hypers[-1]['lr'])
        fit['items'] += self.yb[0][:,0].tolist()

def reg_learner(n=64, bs=4, valid=None, opt_func=Adam, cbs=None, **kwargs):
    dls = loaders(regression(n, dtype=torch.float32), bs, valid=valid or regression(20, dtype=torch.float32, seed=1), shuffle=True, **kwargs)
    return quiet_learner(dls, mlp(dtype=torch.float32), opt_func=opt_func, cbs=cbs)

def spied(learn, **kwargs):
    Spy.fits = []
    learn.add_cb(Spy())
    return verify(learn, **kwargs)

@pytest.mark.parametrize('cbs,bs', [((),4), ((GradAccum(2),ScaledLR(4)),8)], ids=['plain','accumulated'])
def test_trials_are_annealed_from_here_at_the_rule_s_rates(cbs, bs):
    v = spied(reg_learner(cbs=list(cbs)), sizes=[bs,2*bs], rates=(0.5,2), n_epoch=12)
    lengths = Lengths(v.found, v.n_epoch, 'time')
    trials = [o for o in Spy.fits if max(o['lrs'], default=0)>0][-len(v.df):]
    for row,fit in zip(v.df.to_dict('records'), trials):
        p = v.found.at(row['bs'])
        assert (row['micro_bs'],row['n_acc'])==(p.micro_bs,p.n_acc)==(fit['bs'],fit['n_acc']) and row['bs']==p.micro_bs*p.n_acc
        assert row['lr']==pytest.approx(p.lr*row['factor']) and row['steps']==lengths.n_steps(row['bs'], row['part'])
        assert row['items']==len(fit['items'])
        n = row['n_acc']
        firsts = fit['lrs'][::n][:row['steps']] # Windows tile the epoch
        assert np.allclose(firsts, row['lr']*np.array([rate_at(i/row['steps']) for i in range(row['steps'])]), rtol=1e-4)
    assert set(v.df.factor)=={0.5,2.}
    by_run = {}
    for row,fit in zip(v.df.to_dict('records'), trials): by_run.setdefault(row['run'], []).append(fit['items'])
    for fits in by_run.values(): # The same order of the items in all arms
        for a in fits:
            n = min(len(a), len(fits[0]))
            assert a[:n]==fits[0][:n]
    firsts = {tuple(fits[0][:16]) for fits in by_run.values()}
    assert len(firsts)==len(by_run)>1 or len(by_run)==1

def test_all_lengths_take_as_long():
    v = verify(reg_learner(), sizes=[4,8,16], n_epoch=12)
    whole = v.df[v.df.part==1]
    time = v.n_epoch*v.found.epoch_time
    for r in whole.itertuples(): assert r.expected==pytest.approx(time, abs=v.found.at(r.bs).seconds_of(r.bs/v.n_train, r.bs))
    assert set(v.df.part)<=set(parts)

def test_shorter_lengths_are_parts_of_the_whole():
    v = verify(reg_learner(256), sizes=[4,8], n_epoch=4)
    steps = v.df.groupby(['bs','part']).steps.first().unstack()
    for part in steps.columns: assert np.allclose(steps[part], part*steps[1.], atol=1)
    assert len(steps.columns)==3

def test_each_run_has_an_order_of_its_own_and_each_rate_is_tried_once():
    v = spied(reg_learner(), sizes=[4,8], rates=(1,1.), n_epoch=3, n_runs=2)
    assert not v.df.duplicated(['bs','factor','part','run']).any()
    trials = [o for o in Spy.fits if o['lrs']][-len(v.df):] # A validation begins a fit, too
    assert len({(r.run,tuple(f['items'][:8])) for r,f in zip(v.df.itertuples(), trials)})==v.df.run.nunique()>1
    assert len({tuple(f['items'][:8]) for f in trials})==v.df.run.nunique()

def test_sizes_that_an_interrupt_left_out(monkeypatch):
    real,calls = ShortTraining.__call__,[]
    def _call(self, learn):
        calls.append(self)
        if len(calls)==3: raise KeyboardInterrupt
        return real(self, learn)
    monkeypatch.setattr(ShortTraining, '__call__', _call)
    assert verify(reg_learner(), sizes=[4,8,16], equal='items').left_out==((16,'was not trained before the interrupt'),)

def test_equal_items():
    v = verify(reg_learner(), sizes=[4,8,16], n_epoch=10, n_runs=2, equal='items')
    whole = v.df[v.df.part==1]
    assert set(whole['items'])=={640} and sorted(whole.bs)==[4,4,8,8,16,16]*(len(whole)//6) or len(whole)==9
    assert v.critical_bs in (4,8,16) and set(v.df[v.df.part<1].bs)==set()

def test_as_planned(monkeypatch):
    "Today's training and the plan's, as often as tells something: its rate, its epochs and its weight decay, whole trainings only"
    real,ran = ShortTraining.__call__,[]
    def _call(self, learn):
        ran.append((self.micro_bs*self.n_acc,self.n_steps,self.lr,self.wd))
        return real(self, learn)
    monkeypatch.setattr(ShortTraining, '__call__', _call)
    learn = reg_learner()
    was = picture(learn)
    v = verify(learn, sizes=[16], n_epoch=10, n_runs=2, rates=None, equal='plan')
    now,plan = v.found.bs_now,v.found.at(16)
    each = {(now,round(10*64/now),0.01,v.found.wd_now),(16,4*plan.n_epoch,plan.lr,plan.wd)}
    assert changes(was, picture(learn))==[] and {now,16}=={*v.df.bs}=={4,16} and set(ran)==each and len(ran)==len(v.df)==8
    assert (v.df.part==1).all() and v.told and v.rates==(1,) and v.bs in (4,16) and v.epochs==v.plan.n_epoch
    assert v.difference(16, 4) and '16 ends ' in v.advice and 'than that of 4' in v.advice

def test_a_plan_that_stays_has_no_promise(monkeypatch):
    monkeypatch.setattr(BatchPlan, 'bs', property(lambda self: self.bs_now))
    with pytest.raises(ValueError, match="The plan stays at today's 4, so there is no promise to try"):
        verify(reg_learner(), sizes=None, equal='plan')

def test_the_training_loss_is_that_of_the_last_tenth():
    learn = reg_learner()
    losses = []
    class Losses(Callback):
        run_valid = False
        def after_loss(self): losses.append(self.learn.loss.item())
    learn.add_cb(Losses())
    t = ShortTraining(4, 1, 0.01, 100, 0, 20)(learn)
    assert t.train_loss==pytest.approx(np.mean(losses[90:]), rel=1e-6) and t.items==400
    assert t.curve==pytest.approx(np.mean(np.reshape(losses, (50,2)), 1), rel=1e-6)

@pytest.mark.parametrize('n_steps', [1,3,8])
def test_few_steps_have_a_last_one(n_steps): assert math.isfinite(ShortTraining(4, 1, 0.01, n_steps, 0, 20)(reg_learner()).train_loss)

def test_validation_is_of_items_from_all_over_the_set():
    "Sorted by class, as it may be"
    learn,seen = reg_learner(valid=regression(1000, dtype=torch.float32, seed=2)),[]
    class Seen(Callback):
        def before_batch(self):
            if not self.training: seen.extend(self.yb[0][:,0].tolist())
    learn.add_cb(Seen())
    ShortTraining(4, 1, 0.01, 10, 0, 100)(learn)
    order = [y[0].item() for _,y in learn.dls.valid.dataset]
    at = [order.index(o) for o in seen]
    assert len(at)==100 and min(at)==0 and max(at)==999 and max(np.diff(at))<=11

def test_nothing_is_validated_on_the_way():
    learn,seen = reg_learner(),[]
    class Seen(Callback):
        def before_batch(self): seen.append(self.training)
    learn.add_cb(Seen())
    ShortTraining(4, 1, 0.01, 40, 0, 20)(learn) # Two and a half epochs
    assert seen==[True]*40+[False]*10

def test_validation_is_what_the_model_has_at_the_end():
    learn = reg_learner()
    t = ShortTraining(4, 1, 0.01, 32, 0, 1000)(learn)
    other = reg_learner()
    class Take(Callback):
        order = 99
        def after_fit(self): other.model.load_state_dict(self.learn.model.state_dict())
    learn.add_cb(Take())
    ShortTraining(4, 1, 0.01, 32, 0, 1000)(learn)
    x,y = (torch.stack(o) for o in zip(*learn.dls.valid.dataset))
    assert t.valid_loss==pytest.approx(nn.MSELoss()(other.model(x), y).item(), rel=1e-5)

# What it finds

def test_no_validation_set():
    dls = DataLoaders(DataLoader(regression(64, dtype=torch.float32), bs=4, num_workers=0), DataLoader([], bs=4, num_workers=0), device='cpu')
    learn = quiet_learner(dls, mlp(dtype=torch.float32), opt_func=Adam)
    v = verify(learn)
    assert v.df.valid_loss.isna().all() and v.df.train_loss.notna().all() and v.decided_by=='train_loss'

@pytest.mark.parametrize('sizes', [[8],[8,16]], ids=['one_size','two'])
def test_few_runs_tell_nothing(sizes):
    v = verify(reg_learner(), sizes=sizes)
    assert not v.told and v.bs==4 and 'an be told' in v.advice or 'annot be told' in v.advice

def test_a_size_whose_loss_is_nan_is_out():
    class Nan(Callback):
        def after_loss(self):
            if self.training and batch_size(self.learn)==16 and self.opt.hypers[-1]['lr']>0: self.learn.loss = self.learn.loss*math.nan
    v = verify(reg_learner(cbs=Nan()), sizes=[4,8,16])
    assert dict(v.left_out)[16].startswith('its loss was') and set(v.table.bs)=={4,8} and v.bs!=16

def test_a_size_that_does_not_fit_is_out(monkeypatch):
    real = ShortTraining.__call__
    def _call(self, learn):
        if self.micro_bs*self.n_acc==16: raise torch.OutOfMemoryError('CUDA out of memory')
        return real(self, learn)
    monkeypatch.setattr(ShortTraining, '__call__', _call)
    assert dict(verify(reg_learner(), sizes=[4,8,16]).left_out)=={16: 'does not fit in memory'}

def test_short_trials_are_validated_only_where_items_come_twice():
    v = verify(reg_learner(256), sizes=[4,8], n_epoch=1)
    assert v.df[v.df['part']<1].valid_loss.isna().all() and v.df[v.df['part']==1].valid_loss.notna().all()
    assert verify(reg_learner(64), n_epoch=8).df.valid_loss.notna().all()

def test_sizes_below_todays_micro_batch(): assert sorted(set(verify(reg_learner(), sizes=[2,4]).df.bs))==[2,4]

def test_sizes_of_its_own():
    v = verify(reg_learner(256), sizes=None, n_epoch=4)
    assert {v.found.bs_now,v.found.bs} <= set(v.df.bs) | {bs for bs,_ in v.left_out} and 2<=len(set(v.df.bs))<=5

def test_the_plan_is_for_the_size_and_the_rate_that_won():
    v = verify(reg_learner(opt_func=partial(SGD, mom=0.9)), sizes=[4,16], rates=(1/3,3), n_epoch=12, n_runs=2)
    row = v.table[v.table.bs==v.bs].iloc[0]
    assert v.plan.bs==v.bs and v.plan.lr==pytest.approx(v.found.at(v.bs).lr*row.factor)
    learn = v.plan.apply(reg_learner(opt_func=partial(SGD, mom=0.9)))
    assert learn.dls.train.bs*callback_of(learn, GradAccum).n_acc==v.bs

def test_default_length():
    "A minute or an epoch, and a sixteenth of it is a training"
    assert budget_of(default_epochs(1., 1000, 2), 2)==pytest.approx(60.) # An epoch of a second
    assert budget_of(default_epochs(600., 10_000, 2)*600, 2)==pytest.approx(600.)
    assert default_epochs(600., 100, 2)*100==pytest.approx(160) # Steps
    assert default_epochs(math.nan, 160, 2)==1

# The noisy quadratic, whose losses are known

def quadratic(seed, n=3000, dim=10):
    "Half the squared distance, weighted, to items around 0; from 3 in each direction"
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    h = torch.logspace(0, -1.5, dim)
    class Quad(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((dim,), 3.))
        def forward(self, x): return self.w-x
    def loss(d, y): return (0.5*h*d**2).sum(1).mean()
    set_seed(seed)
    learn = quiet_learner(loaders([(o,torch.zeros(1)) for o in x-x.mean(0)], 16, shuffle=True), Quad(), loss_func=loss, opt_func=partial(SGD, mom=0.),
                          cbs=GradAccum(1, count=lambda learn: len(learn.x)))
    return learn,h.double().numpy()

def exact_loss(h, bs, lr, n):
    "Mean loss of the last tenth, by the moments of the weights under a one-cycle of `n` steps"
    m,v,losses = np.full(len(h), 3.),np.zeros(len(h)),[]
    for i in range(n):
        losses.append((0.5*h*(m**2+v+1)).sum())
        r = lr*rate_at(i/n)
        m,v = (1-r*h)*m,(1-r*h)**2*v+r**2*h**2/bs
    return np.mean(losses[int(50*min(0.9, 1-1/n))*n//50:])

@pytest.mark.slow
@pytest.mark.parametrize('seed', [0,1])
def test_the_critical_batch_size_of_a_noisy_quadratic(seed, short_find, monkeypatch):
    monkeypatch.setattr(Learner, 'bs_find', short_find)
    learn,h = quadratic(seed)
    sizes = [16,64,128,256]
    v = learn.bs_verify(0.3, n_epoch=1, sizes=sizes, rates=(1,3), equal='items')
    best,critical = math.inf,None
    for bs in sizes:
        runs = v.df[v.df.bs==bs]
        loss = min(exact_loss(h, bs, lr, round(3000/bs)) for lr in set(runs.lr))
        if loss<=1.01*best: critical = bs
        best = min(best, loss)
    assert critical/2<=v.critical_bs<=2*critical and set(v.df[v.df.part==1].bs)==set(sizes)

# Which trainings are run

def test_what_goes_on():
    order = [Arm(bs, f) for f in (1,3) for bs in (64,32,128,16,256)]
    assert going_on(order)==order[:4] and set(o.bs for o in going_on(order))>={64,32,128}
    alone = [Arm(64, f) for f in (1,2,3,4)] + [Arm(128,1),Arm(32,1),Arm(16,1)]
    assert going_on(alone)==[*alone[:4],Arm(128,1),Arm(32,1)] # The neighbours, however far behind
    assert beside([Arm(64,1)])==[]

@pytest.mark.parametrize('now,planned', [(64,64),(64,128),(64,4096),(1024,16),(48,100),(3,5)])
def test_trial_sizes(now, planned):
    sizes = trial_sizes(now, planned, lambda bs: True)
    assert {now,planned}<=set(sizes) and 3<=len(sizes)<=5 and sizes==sorted(set(sizes)) and min(sizes)>=min(now,planned)//2 and max(sizes)<=4*max(now,planned)
    assert trial_sizes(now, planned, lambda bs: False)==sorted({now,planned})

def test_the_size_beside_the_leader_comes_from_a_shorter_length():
    order,first = [Arm(128,3),Arm(64,3)],[Arm(64,3),Arm(128,3),Arm(256,1),Arm(32,3)]
    assert finalists(order, first, 32)==[Arm(128,3),Arm(32,3),Arm(256,1),Arm(64,3)]

@pytest.mark.parametrize('n_arms', [2,3,4,5,9])
@pytest.mark.parametrize('n_runs', [2,3])
def test_runs_wanted(n_arms, n_runs): assert (runs_wanted(n_arms, n_runs)-1)*(n_arms-1)>=3 and runs_wanted(n_arms, n_runs)>=n_runs

def test_each_size_keeps_its_best_rates():
    order = [Arm(8,3),Arm(8,1),Arm(16,1),Arm(8,9),Arm(16,3)]
    assert rates_going_on(order, 1)==[Arm(8,3),Arm(16,1)] and rates_going_on(order, 2)==[Arm(8,3),Arm(8,1),Arm(16,1),Arm(16,3)]

# What is refused

bad = [(dict(lr=0), ValueError, '`lr` must be above 0, got 0'), (dict(lr=[0.,1.]), ValueError, '`lr` must be above 0'),
    (dict(lr=-1), ValueError, '`lr` must be 0 or more'),
    (dict(n_epoch=0), ValueError, '`n_epoch` must be the epochs of today.s batch that one trial is as long as, above 0, got 0'),
    (dict(n_epoch='x'), TypeError, '`n_epoch` must be'), (dict(n_epoch=math.inf), ValueError, '`n_epoch` must be'),
    (dict(n_epoch=0.5), ValueError, '`n_epoch`=0.5 is 8 steps of today.s batch, and 40 are needed to tell sizes apart: take n_epoch=2.5 or more'),
    (dict(sizes=16), TypeError, '`sizes` must be a list of batch sizes in items, as .64, 256., got 16'), (dict(sizes=[]), TypeError, '`sizes` must be a list'),
    (dict(sizes=[8,1.5]), TypeError, '`sizes` must be a whole number of items, got 1.5'), (dict(sizes=[0]), ValueError, '`sizes` must be at least 1 item'),
    (dict(sizes=[8,640]), ValueError, '`sizes` must be at most the 64 items of the training set, got 640'),
    (dict(rates=()), TypeError, '`rates` must be a list of factors on the learning rate'), (dict(rates=(1,0)), ValueError, '`rates` must be factors'),
    (dict(rates=3), TypeError, '`rates` must be a list'), (dict(equal='steps'), ValueError, "`equal` must be 'time', 'items' or 'plan', got 'steps'"),
    (dict(n_runs=0), ValueError, '`n_runs` must be at least 1 training, got 0'), (dict(n_runs=1.5), TypeError, '`n_runs` must be a whole number of trainings')]

@pytest.mark.parametrize('kwargs,error,match', bad, ids=[str(o[0]) for o in bad])
def test_bad_arguments(kwargs, error, match):
    learn = reg_learner()
    was = picture(learn)
    with pytest.raises(error, match=match): verify(learn, **kwargs)
    assert changes(was, picture(learn))==[]

def test_a_loss_that_is_nan_at_all_sizes():
    learn = reg_learner()
    class Nan(Callback):
        def after_loss(self):
            if type(callback_of(self.learn, GradAccum)).__name__!='MockAccum' and self.opt.hypers[-1]['lr']>0: self.learn.loss = self.learn.loss*math.nan
    with pytest.raises(ValueError, match='No training of the batch sizes 8, 16 ended with a loss that is finite'), learn.added_cbs(Nan()): verify(learn)

def test_it_says_how_long_it_takes(capsys):
    from fastai.callback.progress import ProgressCallback
    verify(reg_learner())
    assert 'bs_verify takes' not in capsys.readouterr().out
    learn = reg_learner(cbs=ProgressCallback())
    verify(learn)
    assert 'bs_verify takes about' in capsys.readouterr().out
