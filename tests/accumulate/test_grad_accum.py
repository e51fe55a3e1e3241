"GradAccum against the large batch, by every way there is to make it wrong"
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
    CancelTrainException, TrainEvalCallback)
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import Adam, OptimWrapper, Optimizer, SGD
from fastai_bs.all import GradAccum, linear_scaling, ScaledLR, sqrt_scaling
from helpers import (changes, distance, exported, flat, left_behind, listed, loaders, mlp, pairwise, quiet_learner, RaiseAt,
    regression, ScaledLoss, set_seed)
from loss_cases import exact, ints

f64,inf = torch.float64,float('inf')

# Measures

class Spy(Optimizer):
    "Keeps what it is asked to step with, and moves nothing"
    def __init__(self, params, lr=0.1):
        super().__init__(params, [], lr=lr, mom=0.9, wd=0.)
        self.grads,self.hypers_seen = [],[]
    def step(self, closure=None):
        self.grads.append(torch.cat([p.grad.detach().flatten().clone() for pg in self.param_lists for p in pg if p.grad is not None]))
        self.hypers_seen.append(dict(self.hypers[-1]))

def spied(items, bs=2, model=None, loss_func=None, cbs=None, n_epoch=1, dls=None, fit=None, n_inp=1):
    "A learner that went through `items` without moving"
    dls = dls or loaders(items, bs)
    if n_inp is not None:
        for dl in dls.loaders: dl.n_inp = n_inp
    learn = quiet_learner(dls, model or mlp(), loss_func, opt_func=Spy, cbs=cbs)
    if fit: fit(learn)
    else: learn.fit(n_epoch, 0.1)
    return learn

def true_grad(model, loss_func, items, n_inp=1):
    "The gradient of the large batch made of `items`; zero where no element counts"
    model.train()
    model.zero_grad(set_to_none=True)
    b = [torch.stack(o) for o in zip(*items)]
    loss = loss_func(model(*b[:n_inp]), *b[n_inp:])
    if loss.isfinite(): loss.backward()
    res = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return res

def assert_windows(learn, items, windows, tol=1e-12, loss_func=None):
    "Each step of `learn` had the gradient of the items at the positions in `windows`"
    assert len(learn.opt.grads)==len(windows)
    for got,idxs in zip(learn.opt.grads, windows):
        want = true_grad(learn.model, loss_func or learn.loss_func, [items[i] for i in idxs])
        assert (got-want).abs().max() <= tol*want.abs().max().clamp(min=1e-3), f'window {list(idxs)}'

def micros(*idxs, bs=2): return [i*bs+j for i in idxs for j in range(bs)]

def assert_clean(learn, momentums=None):
    for p in learn.model.parameters():
        assert p.grad is None or not p.grad.any()
        assert not p._backward_hooks
        assert not p._post_accumulate_grad_hooks
    for m in learn.model.modules():
        assert not m._forward_hooks
        assert not m._forward_pre_hooks
        assert not m._backward_hooks
        assert not m._backward_pre_hooks
    if momentums is not None: assert [m.momentum for m in learn.model.modules() if hasattr(m, 'momentum')]==momentums
    assert not {'_do_epoch_train','_do_epoch','remove_cbs'} & {*vars(learn)}
    assert not any('after_batch' in vars(cb) for cb in learn.cbs if isinstance(cb, TrainEvalCallback))

def once(event, exc, at=1, order=0, times=1):
    "In the first epoch"
    return RaiseAt(event, exc, at, 0, order, times)

# The large batch, whatever the sizes

opt_funcs = dict(sgd=(partial(SGD, mom=0.9), 0.05), adam=(Adam, 0.01), torch_sgd=(partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9), 0.05),
                 torch_adamw=(partial(OptimWrapper, opt=torch.optim.AdamW), 0.01))

fits = dict(fit=lambda learn,n,lr,wd: learn.fit(n, lr, wd=wd), fit_one_cycle=lambda learn,n,lr,wd: learn.fit_one_cycle(n, slice(lr/10,lr), wd=wd),
            fit_sgdr=lambda learn,n,lr,wd: learn.fit_sgdr(n, 1, lr, wd=wd), fine_tune=lambda learn,n,lr,wd: learn.fine_tune(n, lr, wd=wd),
            start_epoch=lambda learn,n,lr,wd: learn.fit_one_cycle(n+1, lr, wd=wd, start_epoch=1))

class LargeBatches(Callback):
    "Epoch by epoch, batches as large as `n_accs` micro-batches of `bs` items"
    order = -50
    def __init__(self, bs, n_accs): self.bs,self.n_accs = bs,n_accs
    def before_epoch(self): self.dls.train.bs = self.bs*self.n_accs[min(self.epoch, len(self.n_accs)-1)]

@st.composite
def configs(draw):
    n_accs,bs,drop_last = draw(st.lists(st.integers(1,9), min_size=1, max_size=3)),draw(st.integers(1,9)),draw(st.booleans())
    scaled = dict(base_bs=max(1, n_accs[0]*bs//2), warmup_epochs=draw(st.sampled_from([None,0.7,1.3]))) if draw(st.booleans()) else None
    return dict(n_accs=n_accs, bs=bs, n=draw(st.integers(bs if drop_last else 1, 40)), drop_last=drop_last, fit=draw(st.sampled_from([*fits])),
                opt=draw(st.sampled_from([*opt_funcs])), wd=draw(st.sampled_from([None,0.,0.1])), clip=draw(st.sampled_from([None,0.1,3.])),
                n_epoch=draw(st.integers(1,2)), n_fits=draw(st.integers(1,2)), scaled=scaled)

def by_layer(m): return [list(m[:2].parameters()),list(m[2:].parameters())]

def trained(items, bs, fit, opt, wd, clip, n_epoch, n_fits, scaled, cbs, drop_last=False):
    opt_func,lr = opt_funcs[opt]
    if scaled: cbs = [*cbs, ScaledLR(rule=sqrt_scaling if 'adam' in opt else linear_scaling, **scaled)]
    if clip: cbs = [*cbs, GradientClip(clip)]
    learn = quiet_learner(loaders(items, bs, drop_last=drop_last), mlp(), opt_func=opt_func, cbs=cbs, splitter=by_layer)
    for _ in range(n_fits): fits[fit](learn, n_epoch, lr, wd)
    return learn

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:.warmup_epochs.')
@settings(max_examples=30, deadline=None, derandomize=True)
@given(configs())
def test_same_parameters_as_large_batch(cfg):
    "Under every schedule, whether or not the windows tile the epoch; what `drop_last` leaves out, the large batch does not see"
    n_accs,bs,n,drop_last = (cfg.pop(nm) for nm in ('n_accs','bs','n','drop_last'))
    items = regression(n)
    accum = trained(items, bs, cbs=[GradAccum(dict(enumerate(n_accs)))], drop_last=drop_last, **cfg)
    large = trained(items[:n-n%bs] if drop_last else items, bs, cbs=[LargeBatches(bs, n_accs)], **cfg)
    assert distance(accum, large) <= 1e-12
    assert distance(accum, quiet_learner(accum.dls, mlp())) > 1e-9 # It did train
    assert_clean(accum)

def test_gradient_left_by_someone_else_is_not_trained_on():
    items = regression(8)
    learn = quiet_learner(loaders(items, 2), mlp(), opt_func=Spy, cbs=GradAccum(4))
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    learn.fit(1, 0.1)
    assert_windows(learn, items, [range(8)])

@pytest.mark.parametrize('opt,wd', [('sgd',None), ('adam',0.1), ('torch_adamw',0.1)])
def test_grad_accum_of_1_changes_no_bit(opt, wd):
    opt_func,lr = opt_funcs[opt]
    def _run(*cbs):
        set_seed(0)
        model = nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.ReLU(), nn.Linear(4,3)).to(f64)
        items = [(x,ints(3, seed=i)) for i,(x,_) in enumerate(regression(23))]
        loss_func = nn.CrossEntropyLoss(torch.tensor([1.,2.,.5], dtype=f64))
        learn = quiet_learner(loaders(items, 4), model, loss_func, opt_func=opt_func, cbs=cbs, wd=wd, splitter=by_layer)
        learn.fit(1, lr)
        l1 = learn.recorder.losses
        learn.freeze()
        learn.fit_one_cycle(2, lr)
        return {**left_behind(learn), 'recorded': ([float(o) for o in (*l1,*learn.recorder.losses)], learn.recorder.lrs), 'position': learn.pct_train}
    assert changes(_run(GradAccum(1)), _run())==[]

# Every window, whatever is cancelled

items15 = regression(15) # 8 micro-batches of 2, the last of 1; windows of 3: (0,1,2) (3,4,5) (6,7)
def spied15(*cbs, **kwargs): return spied(items15, 2, cbs=[GradAccum(3), *cbs], **kwargs)
def idxs(*windows): return [[i for i in micros(*w) if i<15] for w in windows]

goes_on = {0: [(1,2,3),(4,5,6),(7,)], 1: [(0,2,3),(4,5,6),(7,)], 2: [(0,1,3),(4,5,6),(7,)], 3: [(0,1,2),(4,5,6),(7,)], 7: [(0,1,2),(3,4,5),(6,)]}
dropped = {0: [(1,2,3),(4,5,6),(7,)], 1: [(2,3,4),(5,6,7)], 2: [(3,4,5),(6,7)], 7: [(0,1,2),(3,4,5)]}

@pytest.mark.parametrize('event,order,at', [('before_batch',-1,3), # Right after a step, before GradAccum hears of it
    *pairwise(['before_batch','after_pred','after_loss','before_backward','cancel_backward'], [-1,8,70], [0,1,2,7])])
def test_batch_cancelled_before_its_backward_adds_nothing(event, order, at):
    "Neither does one of which the backward pass alone is cancelled. None of them has stepped"
    c,exc = Counts(),CancelBatchException
    if event=='cancel_backward': event,exc = 'before_backward',CancelBackwardException
    assert_windows(spied15(once(event, exc, at, order), c), items15, idxs(*goes_on[at]))
    assert exc is CancelBackwardException or not c.stepped[at]

after_backwards = [('after_backward',CancelBatchException),('before_step',CancelBatchException),('before_step',CancelStepException)]

@pytest.mark.parametrize('what,order,at', pairwise(after_backwards, [-1,8,70], [0,1,2,7], # There is no step in mid-window
    where=lambda what,order,at: what[0]!='before_step' or order<=GradAccum.order or at not in (0,1)))
def test_batch_cancelled_after_its_backward_drops_the_window(what, order, at):
    event,exc = what
    c = Counts()
    learn = spied15(once(event, exc, at, order), c)
    assert_windows(learn, items15, idxs(*dropped[at]))
    assert not c.stepped[at]
    assert any(c.stepped)
    assert_clean(learn)

@pytest.mark.parametrize('event,order', [('before_batch',-1),('after_pred',70),('before_backward',8),('after_backward',-1),('after_batch',70)])
def test_window_open_when_training_is_cancelled_is_closed(event, order):
    "The mean is over the micro-batches whose gradients it holds"
    learn = spied15(once(event, CancelTrainException, 4, order), n_epoch=2)
    last = (3,4) if event.startswith('after_b') else (3,)
    assert_windows(learn, items15, idxs((0,1,2), last, (0,1,2),(3,4,5),(6,7)))
    assert_clean(learn)

@pytest.mark.parametrize('event,order,again', [('before_step',-1,False),('before_step',8,True),('after_step',-1,True),('after_step',8,False)])
def test_training_cancelled_at_a_step_goes_on_with_the_next_epoch(event, order, again):
    "Nothing gets out of the fit, however often it is cancelled"
    learn = spied15(once(event, CancelTrainException, 2, order, times=inf if again else 1), n_epoch=2)
    assert_windows(learn, items15, idxs(*([] if event=='before_step' else [(0,1,2)]), (0,1,2),(3,4,5),(6,7)))

class CancelLast(Callback):
    "Cancels each epoch's last micro-batch"
    def __init__(self, event, order):
        self.order = order
        setattr(self, event, self._cancel)
    def _cancel(self):
        if self.iter==self.n_iter-1: raise CancelBatchException

@pytest.mark.parametrize('event,order', [('before_batch',-1),('after_loss',8),('before_backward',70)])
def test_a_window_is_closed_where_the_last_micro_batch_is_always_cancelled(event, order):
    learn = spied15(CancelLast(event, order), n_epoch=2)
    assert_windows(learn, items15, idxs((0,1,2),(3,4,5),(6,))*2)
    assert_clean(learn)

class Counts(Callback):
    order = 90
    def __init__(self):
        self.n,self.stepped,self.n_accs = Counter(),[],[]
        for e in ('before_step','after_step','after_cancel_step','after_cancel_batch','after_backward'): setattr(self, e, partial(self._add, e))
    def _add(self, e):
        self.n[e] += 1
        assert self.learn.grad_accum.stepped or e!='before_step'
    def after_batch(self):
        if not self.training: return
        self.stepped.append(self.learn.grad_accum.stepped)
        self.n_accs.append(self.learn.grad_accum.n_acc)

def test_events_of_a_step_are_fired_once_a_window():
    c = Counts()
    spied15(c, n_epoch=2)
    assert c.n=={'before_step':6, 'after_step':6, 'after_cancel_batch':10, 'after_backward':16} # `after_cancel_step` never
    assert c.stepped==[False,False,True,False,False,True,False,True]*2

# Recorder, by windows

def curves(bs, *cbs, n=50, method='fit_one_cycle', args=(2,0.1), loss_func=None, items=None, model=None, **kwargs):
    "Rates, losses and rows of Recorder, and where its epochs end"
    set_seed(0)
    learn = quiet_learner(loaders(items or regression(n), bs), model() if model else mlp(), loss_func, cbs=cbs, **kwargs)
    learn.recorder.train_metrics = True
    suggested = getattr(learn, method)(*args, **(dict(show_plot=False) if method=='lr_find' else {}))
    rec = learn.recorder
    assert_clean(learn)
    return rec.lrs,torch.stack(rec.losses),torch.tensor([list(o)[:2+2*len(learn.metrics)] for o in rec.values]),rec.iters,learn.train_iter,suggested

def assert_curves(small, large):
    assert small[0]==large[0]
    assert len(large[0])>5
    assert small[3:]==large[3:]
    for a,b in zip(small[1:3], large[1:3]): torch.testing.assert_close(a, b, rtol=1e-6, atol=0)

@pytest.mark.parametrize('case', ['mse','ce_sum','token_pad_weight'])
def test_recorder_has_the_rows_of_the_large_batch(case):
    "Windows that do not tile the epoch, and means over other numbers of elements"
    loss,items,model = exact[case]
    items = [*items]*4
    assert_curves(*(curves(bs, *cbs, loss_func=loss, items=items, model=model, args=(2,0.02)) for bs,cbs in ((2,[GradAccum(3)]),(6,[]))))

def test_lr_find_is_the_large_batchs(n=50):
    "One rate a window, as many windows as are asked for, one suggestion; the learner is as it was"
    small,large = (curves(bs, *cbs, n=n, method='lr_find', args=()) for bs,cbs in ((4,[GradAccum(3)]),(12,[])))
    assert_curves(small, large)
    assert len(large[0])>50
    assert large[-1].valley>1e-6

def bn_learner(*cbs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4, momentum=0.3), nn.Tanh(), nn.Linear(4,2)).to(f64)
    return quiet_learner(loaders(regression(16), 2), model, cbs=cbs)

@pytest.mark.parametrize('exc', [CancelEpochException,CancelFitException,KeyboardInterrupt])
def test_nothing_is_left_behind(exc):
    "Of a window that is under way"
    learn = bn_learner(GradAccum(3), bomb := once('after_backward', exc, 1))
    with suppress(exc): learn.fit(2, 0.1)
    assert bomb.raised==1
    assert_clean(learn, [0.3])

# Beside others

@pytest.mark.parametrize('other', [GradAccum(2), GradientAccumulation(4), type('Sub', (GradAccum,), {})(2)])
def test_only_one_may_decide_when_to_step(other):
    learn = quiet_learner(loaders(items15, 2), mlp(), cbs=[GradAccum(3), other])
    before = flat(learn).clone()
    to_remove = 'GradientAccumulation' if isinstance(other, GradientAccumulation) else 'GradAccum'
    with pytest.raises(ValueError, match=rf'Only one callback can decide when to step.*remove one of them, as with learn.remove_cb\({to_remove}\)$'):
        learn.fit(1, 0.1)
    assert torch.equal(before, flat(learn))
    assert_clean(learn)

class Overflow(Callback):
    "The scaled loss overflows at micro-batch `at`"
    order = MixedPrecision.order+5
    def __init__(self, at): self.at = at
    def before_backward(self):
        if self.iter==self.at: self.learn.loss_grad = self.loss_grad*float('inf')

@pytest.mark.parametrize('at,windows',
    [(None,[(0,1,2),(3,4,5),(6,7)]), (1,[(3,4,5),(6,7)]), (2,[(3,4,5),(6,7)]), (7,[(0,1,2),(3,4,5)])])
def test_overflow_drops_the_window(at, windows):
    c = Counts()
    learn = spied15(ScaledLoss(init_scale=2.**10), Overflow(at), c)
    assert_windows(learn, items15, idxs(*windows))
    assert sum(c.stepped)==len(windows)
    assert_clean(learn)

# Saved and copied

@pytest.mark.parametrize('n_acc', [{0:2,1:4}, lambda epoch: 2+epoch, 'items'])
def test_a_learner_with_it_is_exported_and_loaded(n_acc, tmp_path):
    how = dict(bs=6) if n_acc=='items' else dict(n_acc=n_acc)
    learn = quiet_learner(listed(), mlp(2, 1, dtype=torch.float32), cbs=GradAccum(**how, count=lambda learn: learn.y.numel()), path=tmp_path)
    learn.fit(1, 0.1)
    loaded = exported(learn, tmp_path)
    want = learn.get_preds()[0]
    assert torch.equal(loaded.get_preds(dl=learn.dls.valid)[0], want)
    loaded.dls = learn.dls
    for o in (loaded,learn): o.create_opt(); o.fit(1, 0.1)
    assert torch.equal(flat(loaded), flat(learn))

def test_a_callback_that_is_switched_off_does_not_count():
    "fastai switches it on again after the fit"
    learn = quiet_learner(loaders(regression(24), 4), mlp(), opt_func=SGD, cbs=[GradAccum(3),ScaledLR(4, warmup_epochs=0)])
    learn.grad_accum.run = False
    assert learn.batch_size==4
    learn.fit(1, 0.01)
    assert learn.recorder.lrs==[0.01]*6
    assert learn.batch_size==12

def test_frozen_parameters_as_in_large_batch():
    "fastai steps (decays) frozen parameters that hold a zero gradient: so it must with us"
    def _run(bs, *cbs):
        learn = quiet_learner(loaders(regression(31), bs), mlp(), opt_func=Adam, wd=0.1, cbs=cbs, splitter=by_layer)
        learn.fit(1, 0.01)
        learn.freeze()
        learn.fit(2, 0.01)
        learn.unfreeze()
        learn.fit_one_cycle(1, slice(0.001,0.01))
        return learn
    assert distance(_run(2, GradAccum(4)), _run(8)) <= 1e-9
