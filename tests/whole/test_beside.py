"What cannot share a training with `GradAccum`: an optimizer in the backward pass, another accumulator, a static graph"
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from fastai.callback.core import (Callback, CancelBatchException, CancelFitException, CancelStepException)
from fastai.optimizer import SGD
from fastai.torch_core import find_bs
from fastai_bs.all import GradAccum, NoiseScale
from helpers import RaiseAt, flat, loaders, mlp, quiet_learner, regression
from gloo_ranks import on_ranks

def learner(*cbs, n=32, bs=2, model=None, **kwargs): return quiet_learner(loaders(regression(n), bs), model or mlp(), opt_func=SGD, cbs=cbs, **kwargs)

# An optimizer that steps in the backward pass

def steps_at_once(p):
    with torch.no_grad(): p.sub_(p.grad, alpha=0.1)
    p.grad = None

def steps_on_data(p):
    "Of which the tensor's version does not tell"
    p.data.sub_(p.grad, alpha=0.1)

def hooked(hook, which=slice(None)):
    model = mlp()
    for p in list(model.parameters())[which]: p.register_post_accumulate_grad_hook(hook)
    return model

@pytest.mark.parametrize('hook,which,n_acc', [(steps_at_once,slice(None),4),(steps_on_data,slice(None),{0: 1, 1: 4}),(steps_at_once,slice(3,4),4)])
def test_an_optimizer_in_the_backward_pass(hook, which, n_acc):
    "Is refused in the first window of several, with the values as they were"
    learn,values = learner(GradAccum(n_acc), model=hooked(hook, which)),[]
    class Look(Callback):
        def before_backward(self): values.append(flat(self.learn).clone())
    learn.add_cb(Look())
    with pytest.raises(ValueError, match='changes its value in the backward pass.*4 micro-batches would take 4 steps.*take an optimizer'):
        learn.fit(2, 0.1)
    assert torch.equal(flat(learn), values[-1])
    assert len(values)==(1 if n_acc==4 else 17)
    learner(GradAccum(1), model=hooked(hook, which)).fit(1, 0.1) # Without windows it may

def test_a_hook_may_look():
    "Also at a parameter that is not a number, and the model learns as without"
    seen,models = [],[hooked(lambda p: seen.append(p.grad.norm())),mlp()]
    for m in models: m[0].bias.data[0] = float('nan')
    a,b = (learner(GradAccum(4), model=m) for m in models)
    for o in (a,b): o.fit(1, 0.1)
    assert len(seen)==64
    assert torch.equal(flat(a).nan_to_num(), flat(b).nan_to_num())

def test_parts_of_a_batch_are_not_tried_on_hooks():
    "Whatever they do, they would do it once more for each part"
    learn = learner(NoiseScale(every=1), bs=8, model=hooked(steps_at_once))
    before = flat(learn).clone()
    with pytest.raises(ValueError, match=r'would be called for parts of a batch too.*use GradAccum\(2\)'): learn.fit(1, 0.1)
    assert torch.equal(flat(learn), before)

# Another one that accumulates

class Foreign(Callback):
    "As a package has it that does not know of ours: counts items, and cancels the batch until it has enough"
    run_valid = False
    def __init__(self, items, order=GradAccum.order): self.items,self.order = items,order
    def before_train(self): self.count = 0
    def before_step(self):
        self.count += find_bs(self.learn.yb)
        if self.count<self.items: raise CancelBatchException
        self.count = 0

@pytest.mark.parametrize('cbs', [[Foreign(8),GradAccum(4)],[GradAccum(4),Foreign(64)],[GradAccum(4),Foreign(8, -5)]], ids=['before','after','far before'])
def test_a_foreign_accumulator(cbs):
    "An epoch that ends in the middle of what it waits for"
    learn = learner(*cbs, n=30)
    before = flat(learn).clone()
    with pytest.raises(RuntimeError, match=r'No optimizer step was tried in epoch 0.* \d+ times, as a second.*remove the other one'):
        learn.fit(2, 0.1)
    assert torch.equal(flat(learn), before)
    assert not any(p.grad.any() for p in learn.model.parameters())

@pytest.mark.parametrize('cb', [Foreign(8), RaiseAt('before_step', CancelStepException, order=-5), RaiseAt('before_batch', CancelBatchException),
    RaiseAt('after_backward', CancelFitException, 2)])
def test_no_step_for_another_reason(cb):
    "Another one that lets steps through, a step that was skipped, batches without gradients, a training that was cancelled"
    learner(GradAccum(4), cb).fit(1, 0.1)

# DDP with a static graph

def static_rank(rank):
    return [static_fit(n_acc) for n_acc in (4,{0: 1, 3: 4})]

def static_fit(n_acc):
    model = DistributedDataParallel(mlp(), static_graph=True)
    learn = learner(GradAccum(n_acc), n=16, model=model)
    before = flat(learn).clone()
    try: learn.fit(1, 0.1)
    except ValueError as e: return str(e),torch.equal(flat(learn), before)
    return '',torch.equal(flat(learn), before)

def test_static_graph():
    for (said,same),other in on_ranks(static_rank, 2):
        assert same
        assert said.startswith('DistributedDataParallel(static_graph=True)')
        assert 'without static_graph' in said
        assert other==('',False) # A fit of one epoch, which does not accumulate
