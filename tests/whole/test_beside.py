"What cannot share a training with `GradAccum`: an optimizer in the backward pass, another accumulator"
import pytest
import torch
from fastai.callback.core import (Callback, CancelBatchException, CancelFitException, CancelStepException)
from fastai.optimizer import SGD
from fastai.torch_core import find_bs
from fastai_bs.all import GradAccum, NoiseScale
from helpers import RaiseAt, flat, loaders, mlp, quiet_learner, regression

def learner(*cbs, n=32, bs=2, model=None, **kwargs): return quiet_learner(loaders(regression(n), bs), model or mlp(), opt_func=SGD, cbs=cbs, **kwargs)

# An optimizer that steps in the backward pass

def steps_at_once(p):
    with torch.no_grad(): p.sub_(p.grad, alpha=0.1)
    p.grad = None

def hooked(which=slice(None)):
    model = mlp()
    for p in list(model.parameters())[which]: p.register_post_accumulate_grad_hook(steps_at_once)
    return model

@pytest.mark.parametrize('accum,which', [(lambda: GradAccum(4),slice(None)), (lambda: GradAccum({1: 4}),slice(3,4)),
    (lambda: GradAccum(1, on_oom='split'),slice(3,4))])
def test_an_optimizer_in_the_backward_pass(accum, which):
    "Is refused before anything has changed, where batches have several passes"
    learn = learner(accum(), model=hooked(which))
    before = flat(learn).clone()
    with pytest.raises(ValueError, match='would be called for each micro-batch.*take an optimizer that steps in `opt.step`, or train without GradAccum'):
        learn.fit(2, 0.1)
    assert torch.equal(flat(learn), before)
    learner(GradAccum(1), model=hooked(which)).fit(1, 0.1) # Without windows it may

def test_parts_of_a_batch_are_not_tried_on_hooks():
    "Whatever they do, they would do it once more for each part"
    learn = learner(NoiseScale(every=1), bs=8, model=hooked())
    before = flat(learn).clone()
    with pytest.raises(ValueError, match='would be called for each part of a batch.*or train without NoiseScale'): learn.fit(1, 0.1)
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
