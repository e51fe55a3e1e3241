"`plan.apply` and `plan.undo`: what is refused before anything has changed, what is put back, and whoever trains at the scaled rate is told"
import copy
import pickle
import warnings
from functools import partial

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, SequentialSampler
from fastcore.foundation import L
from fastai.callback import schedule # noqa: F401 (patches `fit_one_cycle` into `Learner`)
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat, MSELossFlat
from fastai.optimizer import Adam, Lamb, Larc, Lookahead, OptimWrapper, RAdam, RMSProp, SGD, ranger
from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.learner.optimizer import divides_by_size
from fastai_bs.schedule.scaled_lr import ScaledLR
from fastai_bs.finder.plan import BatchPlan
from fastai_bs.schedule.rules import no_scaling, sqrt_scaling
from helpers import changes, exported, loaders, mlp, momentum_sgd, picture, quiet_learner, random_states, regression

f32 = torch.float32

def make(noise_scale=64., times=((4,0.01,0.),(8,0.01,0.),(16,0.01,0.),(32,0.011,0.)), **kwargs):
    "Of 8 items a step; 32 are the fastest, in one micro-batch"
    return BatchPlan(**{**dict(noise_scale=noise_scale, ci=(0.9*noise_scale,1.1*noise_scale), base_bs=8, bs_now=8, micro_now=8, base_lr=0.1, n_windows=30,
        trend=0, n_train=96, n_seen=50, n_passes=1., moved=False, loss_rose=False, level=0.95, df=pd.DataFrame(), times=times, epochs_now=3), **kwargs})

def accumulated(**kwargs): return make(**{**dict(noise_scale=1000., times=((4,0.01,0.009),(8,0.011,0.009))), **kwargs}) # As 4 x 8

def learner(n=96, bs=8, opt_func=momentum_sgd, loss_func=None, dls=None, cbs=None, **kwargs):
    return quiet_learner(dls or loaders(regression(n, dtype=f32), bs, shuffle=True, **kwargs), mlp(dtype=f32), loss_func, opt_func, cbs)

def refused(plan, learn, match, error=ValueError):
    "With that message, and before anything has changed: no random number is drawn either"
    was,rng = picture(learn),random_states()
    with pytest.raises(error, match=match): plan.apply(learn)
    assert changes(was, picture(learn))==[] and random_states()==rng

def test_these_plans():
    assert [(p.bs,p.micro_bs,p.n_acc) for p in (make(),accumulated())]==[(32,32,1),(32,8,4)]

# What is refused

@pytest.mark.parametrize('plan,n', [(make(), 20), (make().at(16), 10), (accumulated(), 5)], ids=['32','chosen','today'])
def test_a_loader_that_would_yield_no_batch_is_refused(plan, n):
    m = plan.micro_bs
    refused(plan, learner(n, bs=m if n==5 else 4, drop_last=True), f'With {m} items in a batch the training loader yields none: it has {n} and.*'
                                            'Take a smaller size by plan.at, a loader without `drop_last`, or more items')

def test_a_torch_loader_that_would_yield_no_batch_is_refused():
    items = regression(20, dtype=f32)
    refused(make(), learner(dls=DataLoaders(TorchDataLoader(items, 8, drop_last=True), TorchDataLoader(items, 8))), 'yields none: it has 20')

def test_a_small_loader_without_drop_last_is_no_error():
    "One batch of all items is a training"
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn = make().apply(learner(20))
    assert len(learn.dls.train)==1

def test_fewer_items_than_a_step_are_a_caution():
    with pytest.warns(UserWarning, match='An optimizer step of this plan takes 4 batches of 8 items, and the training loader yields 3 in an epoch'):
        learn = accumulated().apply(learner(20))
    assert learn.grad_accum.n_acc==4
    learn.fit(1, 0.01)

def test_a_step_as_large_as_the_epoch_is_none():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        accumulated().apply(learner(26))

def torchs(opt): return partial(OptimWrapper, opt=opt)
sgds = SGD,momentum_sgd,torchs(torch.optim.SGD),lambda params,lr: Lookahead(SGD(params, lr))
adams = Adam,partial(Adam, lr=1e-3),RMSProp,Lamb,torchs(torch.optim.AdamW),lambda params,lr: Lookahead(Adam(params, lr))

@pytest.mark.parametrize('created', [False,True])
@pytest.mark.parametrize('opt_func,adam', [*((o,False) for o in sgds), *((o,True) for o in adams)], ids=lambda o: '')
def test_an_optimizer_of_another_family_is_refused(opt_func, adam, created):
    "Also before there is one: the learner stays without"
    learn = learner(opt_func=opt_func)
    if created: learn.create_opt()
    refused(make(adam=not adam), learn, "another learning rate goes with it: make a plan with this optimizer, by learn.bs_find")
    assert (learn.opt is not None)==created
    make(adam=adam).apply(learn)
    assert (learn.opt is not None)==created

def test_an_optimizer_says_what_it_is():
    refused(make(adam=True), learner(opt_func=SGD), "for Adam and its kin, and the learner's optimizer does not divide by the size of the gradient")
    refused(make(), learner(opt_func=Adam), "for SGD, and the learner's optimizer divides by the size of the gradient")

class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']: p.add_(p.grad.sign(), alpha=-g['lr'])

torch_kinds = dict(SGD=False, ASGD=False, Adagrad=True, Adadelta=True, Adafactor=True, Adamax=True, NAdam=True, RAdam=True, RMSprop=True, Rprop=True, Muon=True,
    SparseAdam=True, LBFGS=False) # The last two cannot be tried, and are judged by the names of their hyper-parameters
kinds = dict(SignSGD=(torchs(SignSGD),True), nesterov=(torchs(partial(torch.optim.SGD, momentum=0.9, nesterov=True)),False),
    RAdam=(RAdam,True), ranger=(ranger,True), LARS=(partial(Larc, clip=False),True), l2=(partial(SGD, mom=0.9, wd=0.1, decouple_wd=False),False),
    **{f'torch_{nm}': (torchs(getattr(torch.optim, nm)),divides) for nm,divides in torch_kinds.items() if hasattr(torch.optim, nm)})

@pytest.mark.parametrize('created', [False,True])
@pytest.mark.parametrize('nm', kinds)
def test_the_kind_of_an_optimizer_is_told_by_what_a_step_does(nm, created):
    "Whatever its hyper-parameters are called and whatever the rate is; neither the learner nor its hooks nor the random numbers notice"
    opt_func,divides = kinds[nm]
    learn = quiet_learner(loaders(regression(8, dtype=f32), 4), nn.Linear(5,2,bias=False), opt_func=opt_func)
    if created:
        learn.create_opt()
        learn.opt.set_hyper('lr', 0.)
        learn.model.weight.grad = torch.ones(2,5)
        if nm.startswith('torch'): learn.opt.opt.register_step_pre_hook(lambda *args: pytest.fail('a hook was called'))
    was,rng = picture(learn),random_states()
    assert divides_by_size(learn) is divides
    assert changes(was, picture(learn))==[] and random_states()==rng

def test_a_ready_made_optimizer():
    "`learn.opt_func` may be one"
    model = mlp(dtype=f32)
    opt = OptimWrapper(opt=torch.optim.Adam(model.parameters()))
    refused(make(), learner(opt_func=opt), 'This plan is for SGD')

def test_an_optimizer_that_cannot_be_tried_is_taken():
    "One that is made for the model's own parameters"
    def opt_func(params, lr):
        if len(L(params).concat())<3: raise RuntimeError
        return SGD(params, lr)
    assert make().apply(learner(opt_func=opt_func)).dls.train.bs==32

def test_a_loader_that_does_not_say_its_size_is_refused():
    "No training could be scaled with it; also where the plan's micro-batches are what it has, as it was measured with it"
    batches = [tuple(map(torch.stack, zip(*regression(8, dtype=f32)))) for _ in range(12)]
    refused(accumulated(), learner(dls=DataLoaders(batches, batches)), 'A training loader of type list cannot be given batches of 8 items: make one')

def test_a_loader_with_the_batches_of_another_is_refused():
    "It says that it has others than the plan's"
    class Own(BatchSampler): pass
    items = regression(96, dtype=f32)
    for bs in (8,4):
        dl = TorchDataLoader(items, batch_sampler=Own(SequentialSampler(items), bs, False))
        learn = learner(dls=DataLoaders(dl, dl))
        if bs==8: assert accumulated().apply(learn).dls.train is dl and learn.grad_accum.n_acc==4
        else: refused(accumulated(), learn, 'A training loader of type DataLoader cannot be given batches of 8 items: make one')

def summed(pred, targ): return ((pred-targ)**2).sum()
summed.reduction = 'sum'

@pytest.mark.parametrize('loss_func,sums', [(nn.MSELoss(reduction='sum'),True), (MSELossFlat(reduction='sum'),True), (summed,True), (nn.L1Loss(),False),
    (CrossEntropyLossFlat(),False)], ids=lambda o: getattr(o, "__name__", str(o)))
def test_a_sum_and_a_mean_are_not_the_same_loss(loss_func, sums):
    "Which mean does not matter"
    learn = learner(loss_func=loss_func)
    refused(make(sums=not sums), learn, f"for a loss that is a {'mean' if sums else 'sum'} over items, and the learner's is a {'sum' if sums else 'mean'}, so "
                                        "another learning rate goes with it: make a plan with this loss, by learn.bs_find")
    make(sums=sums).apply(learn)

@pytest.mark.parametrize('f', ['apply','undo'])
def test_plans_are_for_learners(f):
    with pytest.raises(TypeError, match='A plan is applied to a Learner, got DataLoaders'): getattr(make(), f)(learner().dls)

# There and back

class Mine(Callback): pass

before = [lambda: None, lambda: GradAccum(3), lambda: [GradientAccumulation(16),ScaledLR(4, sqrt_scaling)],
    lambda: [Mine(),ScaledLR(4),GradAccum({0: 2}),Callback()]]

@pytest.mark.parametrize('plan', [make, accumulated])
@pytest.mark.parametrize('cbs', before)
@pytest.mark.parametrize('times', [1,2,3])
def test_undo(plan, cbs, times):
    "Loaders and callbacks are the very ones that there were, in their order, however often a plan was applied; a second time does nothing"
    learn = learner(cbs=cbs())
    dls,ldrs,train,own = learn.dls,learn.dls.loaders,learn.dls.train,list(learn.cbs)
    was,rng = picture(learn, only=('dls','model')),random_states()
    for i in range(times): (plan() if i<2 else plan().at(16)).apply(learn)
    assert list(learn.cbs)!=own
    for _ in range(2): assert plan().undo(learn) is learn
    assert learn.dls is dls and learn.dls.loaders is ldrs and learn.dls.train is train
    assert len(learn.cbs)==len(own) and all(a is b for a,b in zip(learn.cbs, own))
    assert all(cb.learn is learn and getattr(learn, cb.name) is cb for cb in learn.cbs) and 'before_set_up' not in vars(learn)
    for nm,cls in (('grad_accum',GradAccum),('scaled_lr',ScaledLR)): assert (nm in vars(learn))==any(isinstance(cb, cls) for cb in own)
    assert changes(was, picture(learn, only=('dls','model')))==[] and random_states()==rng

def test_undo_where_no_plan_was_applied_does_nothing():
    learn = learner(cbs=[GradAccum(2),ScaledLR(8)])
    was = picture(learn)
    assert make().undo(learn) is learn and changes(was, picture(learn))==[]

def test_training_is_as_before():
    "After `undo` the same losses as without a plan; weights are not put back"
    def losses(*plans):
        learn = learner(cbs=GradAccum(2))
        for plan in plans: plan.undo(plan.apply(learn))
        learn.dls.train.rng.seed(1)
        torch.manual_seed(1)
        learn.fit(2, 0.05)
        return learn.recorder.losses
    assert losses()==losses(make())==losses(make(), accumulated())
    learn = make().apply(learner())
    learn.fit(1, 0.05)
    trained = [p.clone() for p in learn.model.parameters()]
    make().undo(learn)
    assert all(torch.equal(a, b) for a,b in zip(trained, learn.model.parameters())) and learn.opt is not None

def test_one_learner_of_several():
    "Who shares the loaders keeps them, and a plan may be applied to several"
    plan,dls = make(),loaders(regression(96, dtype=f32), 8)
    a,b = (plan.apply(learner(dls=dls)) for _ in range(2))
    plan.undo(a)
    assert a.dls is dls and dls.train.bs==8 and b.dls.train.bs==32
    plan.undo(b)
    assert b.dls is dls

def test_callbacks_that_came_and_went_meanwhile():
    noted,mine,gone = GradAccum(2),Mine(),Callback()
    learn = make().apply(learner(cbs=[gone,noted]))
    own = [cb for cb in learn.cbs if not isinstance(cb, (GradAccum,ScaledLR)) and cb is not gone]
    learn.remove_cb(gone)
    learn.add_cb(mine)
    make().undo(learn)
    assert all(a is b for a,b in zip(learn.cbs, [*own,noted,mine])) and len(learn.cbs)==len(own)+2

def test_scaled_lr_that_was_taken_off():
    "As the docs advise before `lr_find`"
    learn = make().apply(learner(cbs=[ScaledLR(4)]))
    scaled = learn.before_set_up.cbs[-1]
    learn.remove_cb(ScaledLR)
    make().undo(learn)
    assert learn.scaled_lr is scaled and learn.dls.train.bs==8 and not hasattr(learn, 'grad_accum')

left = 'Since the plan was applied somebody has replaced what it set: left as it is now is {}. Everything else'

def test_loaders_that_were_replaced_are_left():
    learn = make().apply(learner(cbs=GradAccum(2)))
    learn.dls = theirs = loaders(regression(50, dtype=f32), 5)
    with pytest.warns(UserWarning, match=left.format('the training loader')): make().undo(learn)
    assert learn.dls is theirs and theirs.train.bs==5 and learn.grad_accum.n_acc==2 and not hasattr(learn, 'scaled_lr')
    was = picture(learn)
    make().undo(learn)
    assert changes(was, picture(learn))==[]

def test_a_loader_that_was_replaced_in_place_is_left():
    learn = make().apply(learner())
    learn.dls.loaders[0] = theirs = DataLoader(regression(50, dtype=f32), bs=5)
    with pytest.warns(UserWarning, match=left.format('the training loader')): make().undo(learn)
    assert learn.dls.train is theirs

def test_another_validation_loader_is_kept():
    "The training loader is put back beside it"
    learn = make().apply(learner())
    own,theirs = learn.before_set_up.dls,DataLoader(regression(50, dtype=f32), bs=5)
    learn.dls.loaders[1] = theirs
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        make().undo(learn)
    assert learn.dls.train is own.train and learn.dls.valid is theirs and own.valid is not theirs

def test_callbacks_that_were_replaced_are_left():
    learn = make().apply(learner(cbs=[GradAccum(2),ScaledLR(4)]))
    scaled,accum = learn.before_set_up.cbs[-1],GradAccum(7)
    learn.remove_cb(GradAccum)
    learn.add_cb(accum)
    with pytest.warns(UserWarning, match=left.format('GradAccum')): make().undo(learn)
    assert learn.grad_accum is accum and learn.scaled_lr is scaled and sum(isinstance(cb, GradAccum) for cb in learn.cbs)==1
    assert learn.dls.train.bs==8

def test_a_second_one_beside_ours_is_left_alone():
    "As somebody added it without looking: a fit would refuse both"
    learn = make().apply(learner())
    accum = GradAccum(7)
    learn.add_cb(accum)
    with pytest.warns(UserWarning, match=left.format('GradAccum')): make().undo(learn)
    assert learn.grad_accum is accum and [cb for cb in learn.cbs if isinstance(cb, GradAccum)]==[accum]

def test_ones_own_that_was_put_back_by_hand():
    own = GradAccum(2)
    learn = make().apply(learner(cbs=own))
    learn.remove_cb(GradAccum)
    learn.add_cb(own)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        make().undo(learn)
    assert learn.grad_accum is own and learn.dls.train.bs==8

def test_applied_again_after_a_change_of_the_loaders():
    "Back to what there was when the second plan was applied, as far as somebody has set it since the first"
    own = GradAccum(2)
    learn = make().apply(learner(cbs=own))
    learn.dls = theirs = loaders(regression(50, dtype=f32), 5)
    make().apply(learn)
    assert learn.dls.train.bs==32
    make().undo(learn)
    assert learn.dls is theirs and learn.grad_accum is own

def test_a_refused_plan_leaves_the_note():
    learn = make().apply(learner())
    dls = learn.before_set_up.dls
    refused(make(adam=True), learn, 'This plan is for Adam')
    make().undo(learn)
    assert learn.dls is dls

# Weight decay

def decays(learn): return [h['wd'] for h in learn.opt.hypers]

def decaying(**kwargs): return make(adam=True, moved=True, **{**dict(wd_now=0.01), **kwargs})

@pytest.mark.parametrize('wd', [None,0.01])
@pytest.mark.parametrize('trained', [False,True])
@pytest.mark.parametrize('n', [1,2])
def test_weight_decay_is_set_and_put_back(wd, trained, n):
    "Also where the optimizer exists already, and after two plans: the next fit trains with the old one"
    learn,plan = learner(opt_func=partial(Adam, wd=0.01)),decaying()
    learn.wd = wd
    if trained: learn.fit(1, 0.01)
    for o in (plan,plan.at(16))[:n]:
        o.apply(learn)
        assert o.wd_factor!=1 and learn.wd==o.wd
        learn.fit(1, 0.01)
        assert decays(learn)==[o.wd]
    plan.undo(learn)
    assert learn.wd==wd
    learn.fit(1, 0.01)
    assert decays(learn)==[0.01]

def test_a_plan_that_leaves_weight_decay_takes_back_that_of_another():
    learn,plan = learner(opt_func=partial(Adam, wd=0.01)),decaying()
    plan.apply(learn).fit(1, 0.01)
    plan.at(8).apply(learn).fit(1, 0.01)
    assert learn.wd is None and decays(learn)==[0.01]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        plan.undo(learn)
    assert learn.wd is None

def test_a_plan_made_after_another_goes_by_what_was_set():
    "Its decay is that of the first as it stands, scaled or not; undo goes back to before both"
    learn,plan = learner(opt_func=partial(Adam, wd=0.01)),decaying()
    plan.apply(learn).fit(1, 0.01)
    for bs in (32,16):
        second = decaying(wd_now=plan.wd, bs_now=32, base_bs=8, micro_now=32, set_up=True).at(bs)
        second.apply(learn).fit(1, 0.01)
        assert learn.wd==second.wd and decays(learn)==[second.wd] and (second.wd==plan.wd)==(bs==32)
    plan.undo(learn).fit(1, 0.01)
    assert learn.wd is None and decays(learn)==[0.01]

def test_weight_decay_that_was_changed_since_is_left():
    learn = decaying().apply(learner(opt_func=Adam))
    learn.wd = 0.3
    with pytest.warns(UserWarning, match=left.format('`learn.wd`')): make().undo(learn)
    assert learn.wd==0.3
    learn = make(adam=True).apply(learner(opt_func=Adam)) # It says nothing of it
    learn.wd = 0.3
    assert make().undo(learn).wd==0.3

# Files and copies

@pytest.mark.filterwarnings('ignore')
def test_exported_learners_carry_no_old_loaders(tmp_path):
    items = regression(96, dtype=f32)
    dls = Datasets(range(96), [[lambda i: items[i][0]],[lambda i: items[i][1]]], splits=(list(range(64)),list(range(64,96)))).dataloaders(
        bs=8, num_workers=0, device='cpu')
    learn = make().apply(learner(dls=dls))
    learn.path = tmp_path
    loaded = exported(learn, tmp_path)
    assert vars(loaded).get('before_set_up') is None and make().undo(loaded) is loaded and loaded.grad_accum.n_acc==1
    assert learn.before_set_up is not None and make().undo(learn).dls.train.bs==8

@pytest.mark.parametrize('copied', [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_the_note_is_of_one_learner(copied):
    assert copied(make().apply(learner()).before_set_up) is None

# Whoever trains at `plan.lr` is told

rates = [0.02,slice(1e-3,1e-2),[1e-3,1e-2]]
def halves(model): return [list(model[:1].parameters()),list(model[1:].parameters())]

def said(plan, lr, fit='fit_one_cycle', **kwargs):
    learn = plan.apply(quiet_learner(loaders(regression(96, dtype=f32), 8), mlp(dtype=f32), splitter=halves, **kwargs))
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        for _ in range(2): getattr(learn, fit)(2, lr)
    return [str(w.message) for w in ws if 'scaled already' in str(w.message)]

@pytest.mark.parametrize('fit', ['fit','fit_one_cycle','fit_flat_cos'])
@pytest.mark.parametrize('base_lr', rates, ids=str)
@pytest.mark.parametrize('plan', [make, accumulated])
def test_a_rate_that_would_be_scaled_twice_is_told_once(plan, base_lr, fit):
    plan = plan(base_lr=base_lr)
    words, = said(plan, plan.lr, fit)
    assert 'train at `plan.base_lr`, or take ScaledLR off the learner' in words
    assert not said(plan, plan.base_lr, fit)

def test_other_rates_are_nobodys_business():
    plan = make()
    assert not said(plan, 0.9*plan.lr) and not said(make(adam=True), make(adam=True).lr, opt_func=Adam) and not said(plan.at(8), plan.at(8).lr)

def test_the_plans_own_callbacks_know_it_too():
    plan = make()
    learn = learner(bs=32, cbs=plan.cbs)
    with pytest.warns(UserWarning, match='scaled already'): learn.fit(1, plan.lr)

def test_without_scaled_lr_it_is_the_rate():
    plan = make()
    learn = plan.apply(learner())
    learn.remove_cb(ScaledLR)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1, plan.lr)

@pytest.mark.parametrize('rule,name', [('sqrt','sqrt_scaling'), ('linear','linear_scaling'), ('adascale','adascale_gain'), ('none','no_scaling'),
    ('capped_sqrt_scaling','capped_sqrt_scaling'), ('Adam','adam_scaling'), ('surge','surge_scaling'), ('root','linear_scaling'), (2,'linear_scaling'),
    (None,'linear_scaling')])
def test_a_rule_by_name_is_told_the_function(rule, name):
    with pytest.raises(TypeError, match=rf"`rule` must be a function .*, got {rule!r}: take ScaledLR\(64, {name}\)"): ScaledLR(64, rule)

def test_rules_are_functions(): assert ScaledLR(64, no_scaling).rule_name=='no_scaling'
