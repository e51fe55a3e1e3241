"Trainings of `bs_verify`: that they are the planned ones, and the losses of one"
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.callback.training import ShortEpochCallback
from fastai.optimizer import Adam, SGD
from fastai_bs.all import GradAccum, ScaledLR
from fastai_bs.verify.trainings import fit_at, train
from helpers import regression
from verify.test_bs_verify import plan_for, reg_learner, two_groups

pytestmark = pytest.mark.filterwarnings('ignore')

class Spy(Callback):
    "What each optimizer step of a fit has, after all other callbacks: rate, weight decay and items"
    order,run_valid = 10_000,False
    steps = [] # Of the class, as those of the learner are put back
    def before_fit(self): self.items = []
    def before_batch(self): self.items += self.yb[0][:,0].tolist()
    def before_step(self):
        Spy.steps.append((self.opt.hypers[-1]['lr'],self.opt.hypers[-1]['wd'],len(self.items),self.items))
        self.items = []

def steps_of(fit):
    Spy.steps = []
    fit()
    return Spy.steps

@pytest.mark.parametrize('cbs', [lambda: [], lambda: [GradAccum(2),ScaledLR(4, scale_wd=False)]], ids=['plain','accumulated'])
@pytest.mark.parametrize('opt_func', [partial(Adam, wd=0.1),partial(SGD, mom=0.9, wd=0.1)], ids=['adam','sgd'])
def test_a_training_is_the_one_that_is_planned(cbs, opt_func):
    "Step by step: today's is that of the learner as it is, another one that of the plan; only the warmup of `ScaledLR` is left out"
    def _learner(): return reg_learner(cbs=[*cbs(),Spy()], opt_func=opt_func)
    plan = plan_for(_learner(), 16)
    for bs in (4 if plan.facts.today.bs==4 else 8,16,32):
        planned = plan.at(bs)
        def _as_planned(): planned.apply(_learner()).fit_one_cycle(planned.n_epoch, planned.lr) # noqa: B023
        tried = steps_of(lambda: train(_learner(), fit_at(plan, bs), 1)) # noqa: B023
        fit = steps_of(_as_planned)
        assert len(tried)==len(fit)==fit_at(plan, bs).n_steps
        np.testing.assert_array_equal([o[2] for o in tried], [o[2] for o in fit])
        warm = math.ceil(len(fit)/10) # Where a `ScaledLR` warms up
        np.testing.assert_allclose([o[:2] for o in tried[warm:]], [o[:2] for o in fit[warm:]], rtol=1e-6)

@pytest.mark.parametrize('freeze_first,n_acc', [(True,1),(False,2)])
def test_a_plan_for_fine_tune_is_tried_by_fine_tune(freeze_first, n_acc):
    "Step by step, in both of its parts; only the warmup of `ScaledLR` is left out"
    def _learner(): return reg_learner(cbs=[Spy(),*([GradAccum(n_acc)] if n_acc>1 else [])], opt_func=partial(Adam, wd=0.1), splitter=two_groups)
    learn = _learner()
    if freeze_first: learn.freeze() # As `vision_learner` makes them
    trains = [p.requires_grad for p in learn.model.parameters()]
    plan = plan_for(learn, 8*n_acc, how='fine_tune')
    for bs in (4*n_acc,8*n_acc):
        planned = plan.at(bs)
        def _as_planned(): planned.apply(_learner()).fine_tune(planned.n_epoch, planned.lr, freeze_epochs=planned.freeze_epochs) # noqa: B023
        rows = []
        tried = steps_of(lambda: rows.append(train(learn, fit_at(plan, bs), 1))) # noqa: B023
        fit = steps_of(_as_planned)
        assert len(tried)==len(fit)==rows[0]['steps']
        assert rows[0]['items']==64*(planned.n_epoch+planned.freeze_epochs)
        n_frozen = planned.freeze_epochs*64//bs
        for part in (slice(math.ceil(n_frozen/10), n_frozen),slice(n_frozen+math.ceil((len(fit)-n_frozen)/10), None)):
            np.testing.assert_allclose([o[:3] for o in tried[part]], [o[:3] for o in fit[part]], rtol=1e-6)
    assert [p.requires_grad for p in learn.model.parameters()]==trains

def test_frozen_epochs_train_the_head_alone():
    learn,seen = reg_learner(splitter=two_groups),[]
    class Seen(Callback):
        def before_step(self): seen.append([p.requires_grad for p in self.model.parameters()])
    plan = plan_for(learn, how='fine_tune')
    learn.add_cb(Seen())
    train(learn, fit_at(plan, 4), 1)
    assert seen==[[False]*2+[True]*2]*16+[[True]*4]*80

def test_micro_batches_are_the_plan_s():
    "Also where the loader has others by now"
    plan = plan_for(reg_learner(bs=8), 16)
    learn = reg_learner(cbs=[GradAccum(2),Spy()])
    for bs in (8,16): assert {o[2] for o in steps_of(lambda: train(learn, fit_at(plan, bs), 1))}=={bs} # noqa: B023

def test_all_sizes_of_a_run_have_one_order_of_the_items():
    "And each run another one"
    learn = reg_learner(cbs=Spy())
    plan = plan_for(learn)
    def _items(bs, run): return sum((o[3] for o in steps_of(lambda: train(learn, fit_at(plan, bs), run))[:64//bs]), [])
    assert _items(4, 1)==_items(8, 1)
    assert _items(4, 2)==_items(8, 2)!=_items(4, 1)

def test_the_training_loss_is_that_of_the_last_tenth():
    "80 steps, of which 8 are in the mean"
    learn,losses = reg_learner(),[]
    class Losses(Callback):
        run_valid = False
        def after_loss(self): losses.append(self.learn.loss.item())
    plan = plan_for(learn)
    learn.add_cb(Losses())
    row = train(learn, fit_at(plan, 4), 1)
    assert row['train_loss']==pytest.approx(np.mean(losses[72:]), rel=1e-6)
    assert row['items']==320
    assert len(losses)==80

def test_a_loss_that_sums_is_divided_by_its_elements():
    "Or a micro-batch of 8 items would lose twice as much as one of 4"
    learn = reg_learner()
    mean = train(learn, fit_at(plan_for(learn), 4), 1)['train_loss']
    learn.loss_func = nn.MSELoss(reduction='sum')
    plan = plan_for(learn, lr=0.01)
    assert train(learn, fit_at(plan, 4), 1)['train_loss']==pytest.approx(mean, rel=0.05) # Adam's steps are almost the same

def test_validation_is_of_the_whole_set_at_the_end():
    "Of the model as it is then"
    learn,seen,other = reg_learner(valid=regression(200, dtype=torch.float32, seed=2)),[],reg_learner()
    class Seen(Callback):
        order = 1
        def before_batch(self): seen.append((self.training,len(self.yb[0])))
        def after_validate(self): other.model.load_state_dict(self.learn.model.state_dict())
    plan = plan_for(learn)
    learn.add_cb(Seen())
    row = train(learn, fit_at(plan, 4), 1)
    trains = [o for o,_ in seen]
    assert trains==sorted(trains, reverse=True)
    assert sum(n for is_training,n in seen if not is_training)==200
    x,y = (torch.stack(o) for o in zip(*learn.dls.valid.dataset))
    assert row['valid_loss']==pytest.approx(nn.MSELoss()(other.model(x), y).item(), rel=1e-5)

def test_a_callback_that_ends_epochs_is_named_as_an_error():
    learn = reg_learner()
    plan = plan_for(learn)
    learn.add_cb(ShortEpochCallback(0.6))
    said = 'must take all its 80 optimizer steps, but took 5. .*: remove the callback that cancels batches'
    with pytest.raises(ValueError, match=said): train(learn, fit_at(plan, 4), 1)
