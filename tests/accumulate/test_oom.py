"GradAccum(on_oom='split'): wherever memory runs out, that window takes no step, and all others are as if it had not"
import pickle, random, warnings
from functools import partial

import pytest
import torch
from torch import nn
from fastai.callback import schedule # noqa: F401 (patches `fit_one_cycle` into `Learner`)
from fastai.callback.core import Callback, CancelBatchException, CancelStepException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientClip
from fastai.learner import Learner
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.torch_core import find_bs
from fastai_bs.all import GradAccum, NoiseScale, ScaledLR
from helpers import distance, flat, loaders, mlp, momentum_sgd, quiet_learner, regression, ScaledLoss, SkipSteps, token_model, tokens

def oom(): return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

class Strike(Callback):
    "Raise at `event` in the micro-batches `at`, counted from 0 over the fit, where more than `most` items are on the device; `times` at most"
    run_valid = False
    def __init__(self, event, at, most=0, times=1, order=20, error=oom):
        self.event,self.at,self.most,self.times,self.order,self.error,self.struck = event,at,most,times,order,error,0
        if event not in ('forward','backward','step'): setattr(self, event, self.strike)
    def strike(self, *args):
        if self.learn.train_iter in self.at and find_bs(self.learn.xb)>self.most and self.struck<self.times:
            self.struck += 1
            raise self.error()
    def before_fit(self):
        model = getattr(self.learn.model, 'module', self.learn.model)
        if self.event=='forward': model[1].register_forward_pre_hook(lambda m,x: self.strike() if m.training else None)
        if self.event=='backward': model[1].register_full_backward_hook(lambda *args: self.strike())
        if self.event=='step':
            step = self.learn.opt.step
            self.learn.opt.step = lambda *args: (self.strike(),step())

def summed(pred, targ): return pred.sum()

def learner(cbs, bs=4, n=50, n_acc=3, model=None, loss_func=None, items=None, opt_func=momentum_sgd, on_oom='split', **kwargs):
    learn = quiet_learner(loaders(items or regression(n), bs), model or mlp(), loss_func, opt_func, metrics=summed, **kwargs)
    learn.recorder.train_metrics = True
    for dl in learn.dls.loaders: dl.n_inp = 1
    learn.add_cbs([GradAccum(n_acc, on_oom=on_oom), GradientClip(0.5), NoiseScale(), *cbs])
    learn.window_losses = []
    learn.grad_accum.on_window.append(lambda: learn.window_losses.append(learn.grad_accum.window_loss))
    return learn

def fit(learn, n_epoch=2):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn.fit_one_cycle(n_epoch, 0.1, wd=0.1)
    return [str(o.message) for o in said if 'Out of memory' in str(o.message)]

def without(seq, places): return [o for i,o in enumerate(seq) if i not in places]

def assert_same(struck, plain, lost, tol=1e-9):
    "Weights, rates and losses are those of a fit in which the steps of the `lost` windows were cancelled"
    assert struck.grad_accum.n_lost==len(lost)
    assert distance(struck, plain)<tol
    assert struck.recorder.lrs==without(plain.recorder.lrs, lost)
    for a,b in zip(struck.window_losses, without(plain.window_losses, lost), strict=True): torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert struck.noise_scale.n_steps==plain.noise_scale.n_steps-len(lost)
    assert struck.opt.hypers==plain.opt.hypers

def both(strike, lost, prepare=None, model=mlp, exc=CancelStepException, **kwargs):
    "The same fit with the strike, and without it but with the steps of the `lost` windows cancelled"
    struck,plain = (learner([cb], model=model(), on_oom=on_oom, **kwargs) for cb,on_oom in ((strike,'split'),(SkipSteps(*lost, exc=exc),'raise')))
    for o in (struck,plain):
        if prepare: prepare(o)
    said = fit(struck)
    fit(plain)
    assert strike.struck
    return struck,plain,said

places = ['before_batch','forward','after_pred','after_loss','before_backward','backward','after_backward']

def window_of(i, n_acc, n_iter=13): # Of the micro-batch `i` of the fit
    epoch,at = divmod(i, n_iter)
    return epoch*-(-n_iter//n_acc) + at//n_acc

@pytest.mark.parametrize('seed', range(30))
def test_one_window_is_lost_and_all_others_are_as_before(seed):
    "Up to two strikes anywhere in two epochs of 13 micro-batches, the last one of 2 items; a second strike in a window that is lost changes nothing"
    draw = random.Random(seed)
    n_acc,at = draw.choice([1,2,3,5,13]),sorted(draw.sample(range(26), draw.choice([1,2])))
    if at[-1]%13==12: at = at[-1:] # Two items do not run in four parts
    lost = sorted({window_of(i, n_acc) for i in at})
    strike = Strike(draw.choice(places), at, times=len(at), order=draw.choice([-3,20]))
    struck,plain,said = both(strike, lost, n_acc=n_acc)
    assert len(said)==len(lost)
    assert struck.grad_accum.n_parts==2**len(lost)
    assert_same(struck, plain, lost)

@pytest.mark.parametrize('n_acc', [1,3])
def test_memory_may_run_out_before_we_hear_of_a_batch_that_follows_a_step(n_acc):
    struck,plain,_ = both(Strike('before_batch', [n_acc], order=-3), [1], n_acc=n_acc)
    assert_same(struck, plain, [1])

class Decay(Callback):
    "Lowers the rate with each batch"
    order,run_valid = 70,False
    def before_batch(self): self.opt.set_hyper('lr', 0.95*self.opt.hypers[-1]['lr'])

def test_a_rate_that_a_callback_changes_is_changed_once_a_batch():
    struck,plain = learner([Decay(), Strike('forward', [0])]),learner([Decay(), SkipSteps(0)], on_oom='raise')
    for o in (struck,plain):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            o.fit(2, 0.1)
    assert plain.opt.hypers[-1]['lr']==pytest.approx(0.1*0.95**26)
    assert_same(struck, plain, [0])

@pytest.mark.parametrize('most,lost', [(4,[0]), (1,[0,1,3])])
def test_a_batch_is_split_until_it_fits(most, lost):
    "8 items at a time do not fit, ever: each window that is lost doubles the parts, and they are kept; the epoch's last batch has 2 items, which fit sooner"
    struck,plain,said = both(Strike('forward', range(100), most=most, times=100), lost, bs=8)
    n_lost = len(lost)
    assert len(said)==n_lost
    for i,o in enumerate(said): assert f'Out of memory with {8//2**i} items at a time' in o
    assert all(o in said[-1] for o in (f'in {2**n_lost} parts', f'take micro-batches of {8//2**n_lost} item'))
    assert struck.grad_accum.n_acc==3 # Micro-batches of the loader, as asked for
    assert_same(struck, plain, lost)

def test_it_says_what_did_not_fit():
    "Not what closed the window: an epoch of 50 items ends with a batch of 2"
    said, = fit(learner([Strike('forward', [0])], n_acc=13))
    assert 'Out of memory with 4 items at a time' in said
    assert said.endswith('take micro-batches of 2 items or fewer')

def test_an_item_that_does_not_fit_is_an_error():
    "Smaller parts cannot help; nothing is left behind"
    learn = learner([s := Strike('after_pred', range(100), times=100)])
    with pytest.raises(torch.OutOfMemoryError, match=r'with a single item.*memory_report\(\).*to_fp16\(\).*checkpoint'): fit(learn)
    assert s.struck==3 # 4 items, 2, and 1
    assert 'one_batch' not in vars(learn)
    assert all(p.grad is None or not p.grad.any() for p in learn.model.parameters())
    learn.remove_cb(learn.strike)
    assert fit(learn)==[]

@pytest.mark.parametrize('event', ['backward','step'])
def test_no_batch_is_split_for_another_error_or_unasked(event):
    learn = learner([s := Strike(event, [2], error=lambda: RuntimeError('another one'))])
    with pytest.raises(RuntimeError, match='another one'): fit(learn)
    assert s.struck==1
    learn = learner([Strike(event, [2])], on_oom='raise')
    with pytest.raises(torch.OutOfMemoryError): fit(learn)

@pytest.mark.parametrize('event,at', [('before_step',2), ('step',2), ('after_step',2), ('after_batch',1), ('after_batch',2), ('after_cancel_batch',1)])
def test_what_has_begun_to_step_is_not_taken_back(event, at):
    learn = learner([s := Strike(event, [at])])
    with pytest.raises(torch.OutOfMemoryError): fit(learn)
    assert s.struck==1

def test_a_window_is_lost_with_any_loss():
    "A sum; and parts in which other numbers of tokens count, or none"
    def strike(): return Strike('backward', [1,5], most=1, times=2)
    struck,plain,_ = both(strike(), [0,1], loss_func=nn.MSELoss(reduction='sum'))
    assert_same(struck, plain, [0,1])
    items = tokens(40, n_tok=5, length=3, kept=lambda i: 3*(i%3>0), pad=0)
    def count(learn): learn.grad_accum.count = lambda learn: (learn.y!=0).sum()
    def loss_func(pred, targ): return nn.functional.cross_entropy(pred, targ, ignore_index=0)
    struck,plain,_ = both(strike(), [0,1], count, items=items, model=partial(token_model, 5), loss_func=loss_func)
    assert_same(struck, plain, [0,1])

class Autocast(Callback):
    "As MixedPrecision, on the CPU"
    order = MixedPrecision.order
    def before_batch(self):
        self.depths = [*getattr(self, 'depths', []), torch.is_autocast_enabled('cpu')]
        self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)
        self.autocast.__enter__()
    def after_loss(self): self.autocast.__exit__(None, None, None)

@pytest.mark.parametrize('event', ['before_batch','forward'])
def test_autocast_is_closed(event):
    "Where the error leaves that of the forward pass open, and in the batches that are skipped after it"
    learn = learner([Autocast(), Strike(event, [0])], model=mlp(dtype=torch.float32), items=regression(50, dtype=torch.float32))
    fit(learn)
    assert not any(learn.autocast.depths)
    assert not torch.is_autocast_enabled('cpu')

def test_the_loss_scale_stays():
    struck,plain,_ = both(Strike('backward', [2]), [0], lambda learn: learn.add_cb(ScaledLoss(init_scale=1024.)), exc=CancelBatchException)
    assert {*struck.scaled_loss.scales}=={1024.}
    assert_same(struck, plain, [0])

def test_nothing_is_kept_of_the_parts():
    "The learner can be pickled, and callbacks find a loss of no graph after the batch that was lost"
    seen = []
    class Look(Callback):
        def after_batch(self): seen.append((self.learn.grad_accum.window.lost,self.loss.requires_grad,self.xb[0].shape[0]))
    learn = learner([Look(), Strike('after_pred', [4], most=2)])
    fit(learn, 1)
    assert [o for o in seen if o[0]]==[(True,False,4)] # The window ends with the micro-batch 5
    assert 'one_batch' not in vars(learn)
    for nm in ('strike','look'): learn.remove_cb(getattr(learn, nm))
    learn.logger = print
    learn.grad_accum.on_window.clear()
    pickle.loads(pickle.dumps(learn.grad_accum))

def test_no_bit_changes_without_an_error():
    a,b = learner([]),learner([], on_oom='raise')
    assert fit(a)==fit(b)==[]
    assert torch.equal(flat(a), flat(b))
    assert a.recorder.losses==b.recorder.losses

@pytest.mark.parametrize('n_acc,at,lost', [(1,[3,16],[3,16]), (3,[0,3],[0,1])])
def test_a_scaled_rate_counts_each_batch_once(n_acc, at, lost):
    "ScaledLR is told of each batch once, however many parts it is in"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        struck,plain,_ = both(Strike('forward', at, times=2), lost, lambda learn: learn.add_cb(ScaledLR(6, warmup_epochs=0.5)), n_acc=n_acc)
    assert_same(struck, plain, lost)

# Bad input

def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="`on_oom` must be 'raise' or 'split', got 'retry'"): GradAccum(2, on_oom='retry')
    class Own(Learner):
        def _do_one_batch(self): super()._do_one_batch()
    learn = Own(loaders(regression(8), 4), mlp(), loss_func=nn.MSELoss(), cbs=GradAccum(2, on_oom='split'))
    with pytest.raises(ValueError, match=r"a loop of its own \(_do_one_batch\).*use on_oom='raise'"): learn.fit(1)
    learn = quiet_learner(loaders(regression(8), 4), nn.Sequential(AWD_LSTM(10, 4, 4, 1)), cbs=[GradAccum(2, on_oom='split')])
    with pytest.raises(ValueError, match="AWD_LSTM goes on from the batch before.*use on_oom='raise'"): learn.fit(1)
