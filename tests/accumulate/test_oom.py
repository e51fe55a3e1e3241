"GradAccum(on_oom='split'): wherever memory runs out in a window, training goes on as if it had not"
import pickle, warnings
from functools import cache, partial

import pytest
import torch
from torch import nn
from fastai.callback import schedule # noqa: F401 (patches `fit_one_cycle` into `Learner`)
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientClip
from fastai.learner import Learner
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.torch_core import find_bs
from fastai_bs.all import GradAccum, NoiseScale, ScaledLR
from helpers import distance, flat, loaders, mlp, momentum_sgd, quiet_learner, regression, ScaledLoss, token_model, tokens

def oom(): return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

class Strike(Callback):
    "Raise at `event` in the micro-batches `at`, counted from 0 over the fit, where more than `most` items are on the device; `times` at most"
    run_valid = False
    def __init__(self, event, at, most=0, times=1, order=20, error=oom):
        self.event,self.at,self.most,self.times,self.order,self.error,self.struck = event,at,most,times,order,error,0
        if event not in ('forward','backward','step','in_step'): setattr(self, event, self.strike)
    def strike(self, *args):
        if self.learn.train_iter in self.at and find_bs(self.learn.xb)>self.most and self.struck<self.times:
            self.struck += 1
            torch.rand(3) # What a pass that failed has drawn does not count
            raise self.error()
    def before_fit(self):
        model = getattr(self.learn.model, 'module', self.learn.model)
        if self.event=='forward': model[1].register_forward_pre_hook(lambda m,x: self.strike() if m.training else None)
        if self.event=='backward': model[1].register_full_backward_hook(lambda *args: self.strike())
        if self.event=='step':
            step = self.learn.opt.step
            self.learn.opt.step = lambda *args: (self.strike(),step())
        if self.event=='in_step': self.learn.opt.cbs.append(lambda p, **kw: self.strike())

def summed(pred, targ): return pred.sum()

def learner(cbs, bs=4, n=50, n_acc=3, model=None, loss_func=None, items=None, opt_func=momentum_sgd, on_oom='split', **kwargs):
    learn = quiet_learner(loaders(items or regression(n), bs), model or mlp(), loss_func, opt_func, metrics=summed, **kwargs)
    learn.recorder.train_metrics = True
    for dl in learn.dls.loaders: dl.n_inp = 1
    return learn.add_cbs([GradAccum(n_acc, on_oom=on_oom), GradientClip(0.5), NoiseScale(), *cbs])

@cache
def undisturbed(**kwargs):
    "A fit in which nothing happens; shared by all that are compared with it, which leave it alone"
    learn = learner([], on_oom='raise', **kwargs)
    assert fit(learn)==[]
    return learn

def fit(learn, n_epoch=2):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn.fit_one_cycle(n_epoch, 0.1, wd=0.1)
    return [str(o.message) for o in said if 'Out of memory' in str(o.message)]

def assert_same(a, b, tol=1e-9):
    assert distance(a, b)<tol
    assert a.recorder.lrs==b.recorder.lrs
    torch.testing.assert_close(torch.stack(a.recorder.losses), torch.stack(b.recorder.losses), rtol=1e-6, atol=0)
    torch.testing.assert_close(*(torch.tensor([list(o)[:4] for o in learn.recorder.values]) for learn in (a,b)), rtol=1e-6, atol=0) # With metrics
    da,db = a.noise_scale.df,b.noise_scale.df
    assert a.noise_scale.n_steps==b.noise_scale.n_steps
    items = dict(zip(da.step, da.n_items))
    assert len(items)==len(da)  # A window is one measurement; one of a single micro-batch is none
    assert items.items()>=dict(zip(db.step, db.n_items)).items()

places = ['before_batch','forward','after_pred','after_loss','before_backward','backward','after_backward','before_step','step']

# In the first, second and third of a window, and in the one that is a window by itself; early in the epoch and late, event by event in turn
struck_at = {3: [(0,11),(7,2,12)], 1: [(0,),(12,)]}

@pytest.mark.parametrize('event,n_acc,at', [(e,n_acc,at) for i,e in enumerate(places) for n_acc,ats in struck_at.items() for at in ats[i%2]])
def test_training_goes_on_as_if_nothing_had_happened(event, n_acc, at):
    "13 micro-batches in an epoch, the last one of 2 items: three to a window, or each on its own"
    plain,struck = undisturbed(n_acc=n_acc),learner([s := Strike(event, [13+at])], n_acc=n_acc)
    said = fit(struck)
    closing = n_acc==1 or at%3==2 or at==12
    assert s.struck==(1 if closing or event not in ('before_step','step') else 0)
    if not s.struck: assert said==[]
    else:
        m = 4 if at<12 else 2
        assert len(said)==1
        assert all(o in said[0] for o in (f'with {m} items', 'in 2 parts', f'GradAccum({2*n_acc})', f'of {m//2} items'))
    assert_same(struck, plain)

before,after = GradAccum.order-1,GradAccum.order+1

@pytest.mark.parametrize('most,n_parts', [(4,2), (1,8)])
def test_a_batch_is_split_until_it_fits(most, n_parts):
    "8 items at a time do not fit, ever"
    plain,struck = undisturbed(bs=8),learner([s := Strike('forward', range(100), most=most, times=100)], bs=8)
    said = fit(struck)
    assert len(said)==1
    assert f'in {n_parts} parts' in said[0]
    assert s.struck==n_parts.bit_length()-1 # The parts are kept for the rest of the fit
    assert struck.grad_accum.n_acc==3 # Micro-batches of the loader, as asked for
    assert_same(struck, plain)

def both(strike, prepare=None, **kwargs):
    "The same fit without and with the strike"
    plain,struck = (learner(cbs, **kwargs) for cbs in ([],[strike]))
    for o in (plain,struck):
        if prepare: prepare(o)
        fit(o)
    assert strike.struck
    return plain,struck

def test_an_item_that_does_not_fit_is_an_error():
    "A single item does not fit: the error is raised as it is, and nothing is left behind"
    learn = learner([s := Strike('after_pred', [4], times=100)])
    with pytest.raises(torch.OutOfMemoryError): fit(learn)
    assert s.struck==3 # 4 items, 2, and 1
    assert 'one_batch' not in vars(learn)
    assert all(not p.grad.any() for p in learn.model.parameters())
    learn.remove_cb(learn.strike)
    assert fit(learn)==[]

@pytest.mark.parametrize('event', ['backward','step'])
def test_no_batch_is_split_for_another_error_or_unasked(event):
    "Other errors, and any error where nobody has asked for it"
    learn = learner([s := Strike(event, [2], error=lambda: RuntimeError('another one'))])
    with pytest.raises(RuntimeError, match='another one'): fit(learn)
    assert s.struck==1
    learn = learner([Strike(event, [2])], on_oom='raise')
    with pytest.raises(torch.OutOfMemoryError): fit(learn)

@pytest.mark.parametrize('event', ['after_step','after_cancel_batch'])
def test_what_is_done_is_not_done_again(event):
    "The batch is through, or the step is: there is nothing to run again"
    learn = learner([s := Strike(event, [2] if event!='after_cancel_batch' else [1])])
    with pytest.raises(torch.OutOfMemoryError): fit(learn)
    assert s.struck==1

@pytest.mark.parametrize('event,opt_func', [('backward',Adam), ('step',partial(OptimWrapper, opt=torch.optim.AdamW))])
def test_a_batch_is_split_with_any_optimizer(event, opt_func):
    plain,struck = both(Strike(event, [2,17], times=2), opt_func=opt_func)
    assert_same(struck, plain, 1e-7) # A step by the sign of what is nearly zero

def test_a_batch_is_split_with_any_loss():
    "A sum; and parts in which other numbers of tokens count, or none"
    def strike(): return Strike('backward', [1,5], most=2, times=2)
    plain,struck = both(strike(), loss_func=nn.MSELoss(reduction='sum'))
    assert_same(struck, plain)
    items = tokens(40, n_tok=5, length=3, kept=lambda i: 3*(i%3>0), pad=0)
    plain,struck = (learner(cbs, items=items, model=token_model(5), loss_func=lambda p,y: nn.functional.cross_entropy(p, y, ignore_index=0))
                    for cbs in ([],[strike()]))
    for o in (plain,struck):
        o.grad_accum.count = lambda learn: (learn.y!=0).sum()
        fit(o)
    assert_same(struck, plain)

class Shifted(Callback):
    "Augmentation by random numbers of its own, and of torch"
    run_valid = False
    def before_batch(self): self.learn.xb = (self.xb[0]+1.,)

def test_random_numbers_go_on_as_they_would_have():
    "Batches that are augmented by the loader: what it draws afterwards is what it would have drawn"
    def prepare(learn):
        learn.add_cb(Shifted())
        learn.dls.train.shuffle = True
        learn.dls.train.after_batch = lambda b: (b[0]+0.1*torch.randn(b[0].shape, dtype=b[0].dtype),b[1])
        torch.manual_seed(4)
        learn.dls.train.rng.seed(1)
    plain,struck = both(Strike('backward', [1,5], most=2, times=2), prepare)
    assert_same(struck, plain)

def with_bn(): return nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Linear(4,2)).double()

def test_batch_norm_sees_each_item_once():
    "Its statistics are not those of the batch, but they are counted once"
    counts = []
    for cbs in ([],[Strike('backward', [1], times=1)]):
        torch.manual_seed(0)
        learn = learner(cbs, n=48, model=with_bn())
        fit(learn, 1)
        counts.append(learn.model[1].num_batches_tracked.item())
    assert counts==[12,24]
    assert learn.model[1].momentum==0.1

class Autocast(Callback):
    "As MixedPrecision, on the CPU"
    order = MixedPrecision.order
    def before_batch(self):
        self.depths = [*getattr(self, 'depths', []), torch.is_autocast_enabled('cpu')]
        self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)
        self.autocast.__enter__()
    def after_loss(self): self.autocast.__exit__(None, None, None)

def test_autocast_is_closed():
    "Also where the error leaves that of the forward pass open"
    learn = learner([Autocast(), Strike('forward', [1])], model=mlp(dtype=torch.float32), items=regression(50, dtype=torch.float32))
    fit(learn)
    assert not any(learn.autocast.depths)
    assert not torch.is_autocast_enabled('cpu')

@pytest.mark.parametrize('event', ['backward','step'])
def test_loss_scaling_begins_anew(event):
    plain,struck = both(Strike(event, [2]), lambda learn: learn.add_cb(ScaledLoss(init_scale=1024.)))
    assert {*struck.scaled_loss.scales}=={1024.}
    assert_same(struck, plain)

def test_nothing_is_kept_of_the_parts():
    "No memory grows, and the learner can be pickled"
    learn = learner([Strike('after_pred', range(100), most=2, times=100)])
    fit(learn)
    accum = learn.grad_accum
    assert accum._in_parts.kept==accum._in_parts.buffers==[]
    assert 'one_batch' not in vars(learn)
    learn.remove_cb(learn.strike)
    learn.logger = print
    pickle.loads(pickle.dumps(accum))

def test_no_bit_changes_without_an_error():
    "Without an error it is the same training"
    a,b = learner([]),undisturbed()
    fit(a)
    assert torch.equal(flat(a), flat(b))
    assert a.recorder.losses==b.recorder.losses

def scaled_fit(n_acc, method, *cbs):
    learn = learner([ScaledLR(6, warmup_epochs=0.5), *cbs], n_acc=n_acc)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        getattr(learn, method)(2, 0.01)
    return learn

@pytest.mark.parametrize('n_acc,at,method', [(1,[3,16],'fit'), (3,[0,1],'fit_one_cycle')])
def test_a_scaled_rate_counts_each_batch_once(n_acc, at, method):
    "ScaledLR is told of each batch once, however many parts it is in"
    plain,struck = scaled_fit(n_acc, method),scaled_fit(n_acc, method, Strike('forward', at, most=1, times=2))
    assert len(plain.recorder.lrs)==(26 if n_acc==1 else 10)
    assert [dict(h) for h in struck.opt.hypers]==[dict(h) for h in plain.opt.hypers]
    assert_same(struck, plain)

def test_memory_may_run_out_while_the_window_is_measured():
    "What measures it is called once: the window is trained on, and not measured"
    plain,struck = undisturbed(),learner([])
    noise,calls = struck.noise_scale,[]
    add = noise.add
    def failing(measurement):
        if measurement is None: return
        calls.append(measurement)
        if len(calls)==4: raise oom()
        add(measurement)
    noise.add = failing
    assert len(fit(struck))==1
    assert distance(struck, plain)<1e-9
    assert noise.n_steps==plain.noise_scale.n_steps
    assert 4 not in noise.df.step.values

def test_a_step_half_done_is_an_error():
    "The first of the parameters has moved already: a sum in half precision would be the same"
    model = nn.Linear(64,64).bfloat16()
    items = [(torch.randn(64).bfloat16(),torch.randn(64).bfloat16()) for _ in range(12)]
    learn = quiet_learner(loaders(items, 4), model, opt_func=partial(SGD, mom=0.), cbs=[GradAccum(1, on_oom='split'), s := Strike('in_step', [1], times=1)])
    with pytest.raises(RuntimeError, match="after some parameters had moved"): learn.fit(1, 1e-2)
    assert s.struck==1

# Bad input

def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="`on_oom` must be 'raise' or 'split', got 'retry'"): GradAccum(2, on_oom='retry')
    class Own(Learner):
        def _do_one_batch(self): super()._do_one_batch()
    learn = Own(loaders(regression(8), 4), mlp(), loss_func=nn.MSELoss(), cbs=GradAccum(2, on_oom='split'))
    with pytest.raises(ValueError, match=r"a loop of its own \(_do_one_batch\).*use on_oom='raise'"): learn.fit(1)
    learn = quiet_learner(loaders(regression(8), 4), nn.Sequential(AWD_LSTM(10, 4, 4, 1)), cbs=[GradAccum(2, on_oom='split')])
    with pytest.raises(ValueError, match="AWD_LSTM goes on from the batch before.*use on_oom='raise'"): learn.fit(1)
