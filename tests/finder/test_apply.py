"`plan.apply` and `plan.undo`: what is refused before anything has changed, what a learner gets, and what it gets back"
import copy
import pickle
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, RandomSampler, SequentialSampler
from fastai.callback import schedule # noqa: F401 (patches `fit_one_cycle` into `Learner`)
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets
from fastai.losses import CrossEntropyLossFlat, MSELossFlat
from fastai.optimizer import Adam, Lamb, Larc, Lookahead, OptimWrapper, RAdam, RMSProp, SGD, ranger
from fastai_bs.accumulate.grad_accum import GradAccum, settings_text
import fastai_bs.finder.bs_find # noqa: F401 (patches `bs_find` into `Learner`)
from fastai_bs.finder.apply import PlannedFit, fit_of
from fastai_bs.learner.optimizer import divides_by_size
from fastai_bs.schedule.scaled_lr import ScaledLR
from fastai_bs.noise.noise_scale import NoiseScale
from fastai_bs.schedule.rules import sqrt_scaling
from helpers import changes, exported, flat, halves, loaders, mlp, momentum_sgd, picture, quiet_learner, random_states, regression
from plans import plan_of, readings, secs

f32 = torch.float32
pytestmark = pytest.mark.usefixtures('any_growth') # What is set up is the same with few epochs

def make(noise_scale=64., bs=8, times=((4,0.01,0.),(8,0.01,0.),(16,0.01,0.),(32,0.011,0.)), **kwargs):
    "Today 8 items a step with SGD; 32 are the fastest, in one micro-batch"
    return plan_of(bs, **{**dict(noise_scale=noise_scale, ci=(0.9*noise_scale,1.1*noise_scale), lr=0.1, adam=False, n_train=96, n_epoch=7, moved=False,
                                cool=None, times=times), **kwargs})

def accumulated(**kwargs): return make(**{**dict(noise_scale=1000., times=((4,0.01,0.009),(8,0.011,0.009))), **kwargs}) # As 4 x 8

def learner(n=96, bs=8, opt_func=momentum_sgd, loss_func=None, dls=None, cbs=None, splitter=None, **kwargs):
    return quiet_learner(dls or loaders(regression(n, dtype=f32), bs, shuffle=True, **kwargs), mlp(dtype=f32), loss_func, opt_func, cbs,
                         **({} if splitter is None else dict(splitter=splitter)))

def refused(plan, learn, match, error=ValueError):
    "With that message, and before anything has changed: no random number is drawn either"
    was,rng = picture(learn),random_states()
    with pytest.raises(error, match=match): plan.apply(learn)
    assert changes(was, picture(learn))==[]
    assert random_states()==rng

# What is refused

@pytest.mark.parametrize('plan,n', [(make(n_epoch=5, n_train=960),20),(make().at(16),10),(accumulated(),5)], ids=['32','chosen','today'])
def test_a_loader_that_would_yield_no_batch(plan, n):
    refused(plan, learner(n, bs=plan.micro_bs if n==5 else 4, drop_last=True), f'With {plan.micro_bs} items in a batch the training loader yields none')

class Own(BatchSampler): pass
items = regression(96, dtype=f32)
def in_batches(bs): return TorchDataLoader(items, batch_sampler=Own(SequentialSampler(items), bs, False))

def test_a_loader_that_cannot_change():
    dl = in_batches(8)
    refused(make(), learner(dls=DataLoaders(dl, dl), cbs=[GradAccum(2),ScaledLR(8)]), 'cannot be given batches of 32 items: make one')

def torchs(opt): return partial(OptimWrapper, opt=opt)

class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']: p.add_(p.grad.sign(), alpha=-g['lr'])

torch_kinds = dict(SGD=False, ASGD=False, Adagrad=True, Adadelta=True, AdamW=True, Adafactor=True, NAdam=True, Rprop=True, Muon=True,
    SparseAdam=True, LBFGS=False) # The last two cannot be tried, and are judged by the names of their hyper-parameters
kinds = dict(SGD=(SGD,False), Adam=(Adam,True), RMSProp=(RMSProp,True), Lamb=(Lamb,True), RAdam=(RAdam,True), ranger=(ranger,True),
    LARS=(partial(Larc, clip=False),True), lookahead=(lambda params,lr: Lookahead(SGD(params, lr)),False), SignSGD=(torchs(SignSGD),True),
    l2=(partial(SGD, mom=0.9, wd=0.1, decouple_wd=False),False), nesterov=(torchs(partial(torch.optim.SGD, momentum=0.9, nesterov=True)),False),
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
    assert changes(was, picture(learn))==[]
    assert random_states()==rng

@pytest.mark.parametrize('created', [False,True])
@pytest.mark.parametrize('opt_func,adam', [(SGD,False),(Adam,True),(torchs(torch.optim.AdamW),True)], ids=['SGD','Adam','AdamW'])
def test_an_optimizer_of_another_family(opt_func, adam, created):
    learn = learner(opt_func=opt_func)
    if created: learn.create_opt()
    refused(make(adam=not adam), learn, "another learning rate goes with it: make a plan with this optimizer, by learn.bs_find")
    make(adam=adam).apply(learn)
    assert (learn.opt is not None)==created

def summed(pred, targ): return ((pred-targ)**2).sum()
summed.reduction = 'sum'

@pytest.mark.parametrize('loss_func,sums', [(nn.MSELoss(reduction='sum'),True),(MSELossFlat(reduction='sum'),True),(summed,True),(nn.L1Loss(),False),
    (CrossEntropyLossFlat(),False)], ids=lambda o: getattr(o, '__name__', str(o)))
def test_a_sum_and_a_mean_are_not_the_same_loss(loss_func, sums):
    learn = learner(loss_func=loss_func)
    refused(make(sums=not sums), learn, 'make a plan with this loss, by learn.bs_find')
    make(sums=sums).apply(learn)

# What a learner gets

def test_a_learner_gets_larger_batches():
    "In a loader of its own; the validation loader stays what it is"
    learn = learner()
    before,valid = learn.dls.train,learn.dls.valid
    assert make().apply(learn).dls.train.bs==32
    assert before.bs==8
    assert learn.dls.valid is valid

def test_torch_loaders_keep_their_sampler_and_generator():
    gen = torch.Generator().manual_seed(3)
    sampler,state = RandomSampler(items, generator=gen),gen.get_state()
    dl = TorchDataLoader(items, batch_size=8, sampler=sampler, drop_last=True, generator=gen, collate_fn=list)
    train = make().apply(learner(dls=DataLoaders(dl, dl))).dls.train
    assert (train.batch_size,dl.batch_size,train.drop_last)==(32,8,True)
    assert (train.sampler,train.dataset,train.collate_fn,train.generator)==(sampler,items,list,gen)
    assert torch.equal(gen.get_state(), state)

def count(learn): return learn.yb[0].numel()
def accums(learn): return [cb for cb in learn.cbs if isinstance(cb, (GradAccum,GradientAccumulation,ScaledLR))]

@pytest.mark.parametrize('cbs', [[GradAccum(3)],[GradientAccumulation(16)],[GradAccum({0: 2}),ScaledLR(4, sqrt_scaling)],[ScaledLR(4)]])
def test_callbacks_take_the_place_of_others(cbs):
    noise,mine = NoiseScale(),Callback()
    learn = accumulated().apply(learner(cbs=[*cbs,noise,mine]))
    accum,scaled = accums(learn)
    assert (type(accum),accum.n_acc,scaled.base_bs,scaled.rule_name)==(GradAccum,4,8,'adascale_gain')
    assert noise in learn.cbs
    assert mine in learn.cbs

@pytest.mark.parametrize('plan', [make().at(8),make(n_windows=4),make(ci=(0.,float('inf'))),make(has_plan=True).at(8)], ids=lambda o: o.verdict)
def test_a_plan_that_changes_nothing_leaves_all_alone(plan):
    "Callbacks of the user's own go on accumulating and scaling; what another plan has set is taken back"
    cbs = [GradAccum(2),ScaledLR(4, sqrt_scaling)]
    learn = learner(bs=4, cbs=cbs)
    was = picture(learn)
    assert not plan.choice.option.changes
    assert plan.apply(learn) is learn
    assert changes(was, picture(learn))==[]
    assert accums(learn)==cbs
    if plan.facts.today.has_plan: return
    train = learn.dls.train
    make().apply(learn)
    assert plan.apply(learn).dls.train is train
    assert accums(learn)==cbs

def test_no_plan_is_applied_within_a_fit():
    "Which could not begin anew"
    class Applies(Callback):
        def before_epoch(self): make().apply(self.learn)
    learn = learner(cbs=Applies())
    with pytest.raises(ValueError, match='plan.apply sets a fit up, and one is under way'): learn.fit(1, 0.01)
    assert accums(learn)==[]

def test_what_belongs_to_the_model_stays():
    learn = learner(cbs=GradAccum(2, count=count, fix_bn=False))
    for _ in range(2):
        accum,_ = accums(accumulated().apply(learn))
        assert accum.count is count
        assert accum.fix_bn is False
        assert accum.n_acc==4

class Steps(Callback):
    "Notes what each optimizer step was made with"
    order,run_valid = 90,False
    def before_fit(self): self.items,self.lrs,self.wds,self.n = [],[],[],0
    def before_batch(self): self.n += len(self.x)
    def after_step(self):
        self.items.append(self.n)
        self.lrs.append([h['lr'] for h in self.opt.hypers])
        self.wds.append(self.opt.hypers[-1]['wd'])
        self.n = 0

@pytest.mark.parametrize('plan', [make,accumulated])
@pytest.mark.parametrize('lr', [0.01,slice(1e-3,1e-2),[1e-3,1e-2]], ids=str)
def test_a_fit_as_planned(plan, lr):
    "Steps of `bs` items at `scaled_lr`, once the warmup of a tenth of the fit is behind"
    plan = plan(lr=lr)
    learn = plan.apply(learner(cbs=Steps(), splitter=halves))
    learn.fit(10, plan.lr)
    scaled = plan.scaled_lr
    scaled = [scaled.start,scaled.stop] if isinstance(scaled, slice) else scaled if isinstance(scaled, list) else [scaled]*2
    assert learn.steps.items==[32]*30
    assert learn.steps.lrs[-1]==learn.steps.lrs[3]==pytest.approx(scaled)
    assert learn.steps.lrs[0]==pytest.approx([o/plan.rule(4) for o in scaled])
    assert learn.recorder.lrs[-1]==pytest.approx(scaled[-1])

@pytest.mark.parametrize('n,drop,bs', [(500,True,128),(650,False,320)])
def test_a_fit_counts_what_the_loader_gives(n, drop, bs):
    "Its epochs, its steps, and the sum of rate times weight decay over them, which is that of today's training"
    def _learn(): return learner(n, 16, partial(Adam, wd=0.1), cbs=Steps(), drop_last=drop)
    plan = make(bs=16, n_train=n, drops_last=drop, micro_bs=16, noise_scale=100., times=secs(16, 64, 128, 320), lr=0.01, **{**decaying, 'wd': 0.1}).at(bs)
    def _fit(learn, *args):
        learn.fit_one_cycle(*args)
        return learn.steps
    today,planned = _fit(_learn(), 7, 0.01),_fit(plan.apply(_learn()), plan.n_epoch, plan.lr)
    needed = sum(today.items)*(100+bs)/116
    assert len(today.items)==plan.facts.today.steps
    assert len(planned.items)==plan.choice.option.trained_steps
    assert 0.95*needed<=sum(planned.items)<needed+sum(planned.items)/plan.n_epoch
    decays = [sum(lr*wd for lrs,wd in zip(o.lrs, o.wds) for lr in lrs[-1:]) for o in (today,planned)]
    assert decays[1]==pytest.approx(decays[0], rel=0.05)

decaying = dict(adam=True, moved=True, **readings(), wd=0.01)

@pytest.mark.parametrize('plan', [make(lr=0.02),accumulated(lr=slice(1e-3,1e-2)),make(ci=(0.,float('inf'))),make(adam=True),make(noise_scale=123.456),
    make(base_bs=4, lr_factor=2., own_cbs=('ScaledLR',)),make(sums=True),make(**decaying),make(freeze_epochs=1, noise_scale=20.)], ids=lambda o: o.code[25:100])
def test_the_code_does_what_apply_does(plan):
    "Pasted where everything is imported, on a learner with loaders of `micro_bs`"
    own = [ScaledLR(4)] if plan.facts.today.own_cbs else []
    loss = MSELossFlat(reduction='sum') if plan.facts.today.sums else None
    opt_func = Adam if plan.facts.today.adam else momentum_sgd
    here,there = (learner(bs=bs, cbs=[Steps(),*own], splitter=halves, opt_func=opt_func, loss_func=loss) for bs in (plan.micro_bs,8))
    scope = dict(learn=here)
    exec('from fastai_bs.all import *', scope)
    exec(plan.code, scope)
    plan.apply(there)
    frozen = dict(freeze_epochs=plan.freeze_epochs) if plan.freeze_epochs else {}
    getattr(there, fit_of(plan))(plan.n_epoch, plan.lr, **frozen)
    assert here.steps.lrs==there.steps.lrs
    assert here.steps.items==there.steps.items==[plan.bs]*(plan.n_epoch*96//plan.bs)
    assert [o['wd'] for o in here.opt.hypers]==pytest.approx([o['wd'] for o in there.opt.hypers], rel=1e-2) # The code has three digits

def test_no_weight_decay_is_written_where_there_is_none():
    "Also on a learner that an earlier plan has set up"
    plan = make(has_plan=True)
    assert plan.wd is None and plan.to_dict()['wd'] is None
    assert 'wd' not in plan.code

def items_in(learn): return len(learn.x)

def test_what_the_learner_s_own_accumulation_knows_goes_on():
    "In a plan's callback, and in the line to paste, where a function goes by its name"
    own = GradAccum(2, count=items_in, fix_bn=False, on_oom='split')
    plan = accumulated(own_cbs=('GradAccum',), own_accum=settings_text(own))
    accum = plan.apply(learner(cbs=own)).grad_accum
    assert accum is not own and (accum.count,accum.fix_bn,accum.on_oom)==(items_in,False,'split')
    assert repr(accum)=="GradAccum(4, count=items_in, fix_bn=False, on_oom='split')" and repr(accum) in plan.code
    assert 'GradAccum(4)' in accumulated(own_cbs=('GradAccum',), own_accum=settings_text(GradAccum(2))).code

# A fit that is another one

def unlike(f):
    "In what a fit is not the planned one, as its warnings say: Python shows each once, also where both parts of `fine_tune` have it"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('default')
        f()
    return [re.search('not the planned .*, as (.*): ', str(o.message))[1] for o in said if 'not the planned' in str(o.message)]

cycled = partial(make, lr=0.01, moved=True, **readings())
tuned = partial(cycled, freeze_epochs=1, noise_scale=1000.)
def fit(method='fit_one_cycle', n_epoch=None, lr='lr', **kwargs):
    return lambda learn,plan: getattr(learn, method)(n_epoch or plan.n_epoch, getattr(plan, lr) if isinstance(lr, str) else lr, **kwargs)

as_planned = [(cycled,fit()), (cycled,fit(start_epoch=1)), (partial(cycled, lr=slice(1e-3,1e-2)),fit()), (partial(cycled, lr=[1e-3,1e-2]),fit()),
    (make,fit('fit')), (partial(cycled, lr=0.0123456),fit(lr=0.0123)), (lambda: tuned().at(32),fit('fine_tune')),
    (partial(cycled, has_lr=False),fit(lr=0.5)), (partial(cycled, has_n_epoch=False),fit(n_epoch=7)), (lambda: cycled().at(8),fit('fit', 1, 1.))]

@pytest.mark.parametrize('plan,train', as_planned, ids=map(str, range(len(as_planned))))
def test_nothing_is_said_of_a_fit_as_planned(plan, train):
    "Nor of the training that goes on"
    plan = plan()
    learn = plan.apply(learner(splitter=halves))
    assert unlike(lambda: train(learn, plan))==unlike(lambda: learn.fit_one_cycle(2, 1e-5))==[]
    assert ('planned_fit' in vars(learn))==plan.choice.option.changes

# The plan of `cycled` has 10 epochs of 32 for 7 of 8, at 0.03 for 0.01
@pytest.mark.parametrize('plan,train,says', [
    (cycled,fit(lr='scaled_lr'),['its rate is 0.03']), (cycled,fit(lr=1e-3),['its rate is 0.001']),
    (cycled,fit(n_epoch=2),['it has 2 epochs']), (cycled,fit(n_epoch=1, lr=0.02),['its rate is 0.02, and it has 1 epoch']),
    (cycled,fit('fine_tune'),['it is `fine_tune`']), (cycled,fit('fit'),['it is `fit`']),
    (lambda: tuned().at(32),fit(),['it is `fit_one_cycle`']),
    (lambda: tuned().at(32),fit('fine_tune', 3),['it has 3 epochs']),
    (lambda: tuned().at(32),fit('fine_tune', freeze_epochs=2),['it has 2 frozen epochs']),
    (lambda: tuned().at(32),fit('fine_tune', lr='scaled_lr'),['its rate is 0.0391','its rate is 0.0195'])],
    ids=lambda o: '; '.join(o) if isinstance(o, list) else '')
def test_a_fit_that_is_not_as_planned(plan, train, says):
    "Once said of each fit, before anything has changed, and trained as asked; by a learner without the callback to the bit as well"
    plan = plan()
    learn,twin = (plan.apply(learner(splitter=halves)) for _ in range(2))
    twin.remove_cb(PlannedFit)
    def _train(o):
        torch.manual_seed(0)
        o.dls.train.rng.seed(0)
        return unlike(lambda: train(o, plan))
    assert _train(learn)==says
    assert _train(twin)==[]
    assert torch.equal(flat(learn), flat(twin))

@pytest.mark.parametrize('plan,call', [(cycled,'fit_one_cycle(plan.n_epoch, plan.lr)'), (make,'fit(plan.n_epoch, plan.lr)'),
    (lambda: tuned().at(32),'fine_tune(plan.n_epoch, plan.lr)'),
    (lambda: tuned(noise_scale=1.).at(32),'fine_tune(plan.n_epoch, plan.lr, freeze_epochs=plan.freeze_epochs)')])
def test_the_call_that_trains_as_planned_is_said(plan, call):
    plan = plan()
    with pytest.warns(UserWarning, match=re.escape(f': call {call}, or for another training')): plan.apply(learner(splitter=halves)).fine_tune(1, 5e-3)

def test_each_fit_is_compared_until_the_planned_one():
    "But `lr_find` and mock trainings; a plan that was taken back compares none"
    plan = cycled()
    learn = plan.apply(learner())
    for f in (partial(learn.lr_find, num_it=6),partial(learn.bs_find, 0.02, num_it=24, max_bs=32)): assert unlike(lambda: f(show_plot=False))==[] # noqa: B023
    assert [unlike(lambda: fit(n_epoch=n, lr=lr)(learn, plan)) for n,lr in ((1,'lr'),(2,'lr'),(10,'lr'),(2,1e-3))]==[ # noqa: B023
        ['it has 1 epoch'],['it has 2 epochs'],[],[]]
    assert unlike(lambda: fit(n_epoch=2)(plan.undo(plan.apply(learn)), plan))==[]
    assert not hasattr(learn, 'planned_fit')

def test_few_steps_are_no_news_after_a_plan():
    "It has said so, and has tried the rate"
    plan,learn = cycled(),learner()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fit()(plan.apply(learn), plan)
    with pytest.warns(UserWarning, match='only 30 optimizer steps, at 3 times the rate'): fit(cbs=plan.cbs)(learner(bs=32), plan)

def test_a_second_callback_that_accumulates_is_refused_with_the_way_back():
    with pytest.raises(ValueError, match=r'Only one callback.*remove_cb\(GradAccum\), or call plan.undo\(learn\), as a plan has set this learner up'):
        accumulated().apply(learner()).fit(1, 0.1, cbs=GradAccum(2))

# There and back

@pytest.mark.parametrize('plan', [make,accumulated])
@pytest.mark.parametrize('cbs', [lambda: None,lambda: GradAccum(3),lambda: [Callback(),ScaledLR(4),GradAccum({0: 2}),NoiseScale()]])
@pytest.mark.parametrize('times', [1,3])
def test_undo(plan, cbs, times):
    "Loaders and callbacks are those that there were, in their order, however often a plan was applied; a second time does nothing"
    learn = learner(cbs=cbs())
    train,valid,before = learn.dls.train,learn.dls.valid,list(learn.cbs)
    was,rng = picture(learn, only=('model','opt','wd')),random_states()
    for i in range(times): (plan() if i<2 else plan().at(16)).apply(learn)
    assert list(learn.cbs)!=before
    for _ in range(2): assert plan().undo(learn) is learn
    assert learn.dls.train is train
    assert learn.dls.valid is valid
    assert len(learn.cbs)==len(before)
    assert {*map(id, learn.cbs)}=={*map(id, before)}
    assert all(getattr(learn, cb.name) is cb for cb in before)
    assert 'before_set_up' not in vars(learn)
    assert changes(was, picture(learn, only=('model','opt','wd')))==[]
    assert random_states()==rng

def test_what_came_since_stays():
    "Another training loader, and callbacks of other kinds; and a loader that was replaced is what the next plan goes from"
    mine,before = NoiseScale(),GradAccum(2)
    learn = make().apply(learner(cbs=before))
    learn.dls = theirs = loaders(regression(50, dtype=f32), 5)
    learn.add_cb(mine)
    make().apply(learn)
    assert learn.dls.train.bs==32
    assert len(learn.dls.train_ds)==50
    make().undo(learn)
    assert learn.dls.train is theirs.train
    assert learn.grad_accum is before
    assert mine in learn.cbs
    assert not hasattr(learn, 'scaled_lr')
    make().apply(learn).dls = theirs
    assert make().undo(learn).dls is theirs

@pytest.mark.parametrize('wd', [None,0.01])
@pytest.mark.parametrize('trained', [False,True])
@pytest.mark.parametrize('n', [1,2,3])
def test_weight_decay_is_set_and_put_back(wd, trained, n):
    "Also where the optimizer exists already, and after two plans: the next fit trains with the old one"
    learn,plan = learner(opt_func=partial(Adam, wd=0.01)),make(**decaying)
    learn.wd = wd
    if trained: learn.fit(1, 0.01)
    if n==3: plan.apply(learn)
    for o in (plan,plan.at(16))[:n]:
        o.apply(learn).fit(1, 0.01)
        assert o.choice.option.wd_factor!=1
        assert learn.wd==o.wd
        assert [h['wd'] for h in learn.opt.hypers]==[o.wd]
    plan.undo(learn)
    assert learn.wd==wd
    learn.fit(1, 0.01)
    assert [h['wd'] for h in learn.opt.hypers]==[0.01]

def test_a_plan_made_after_another_stands_on_it():
    "One that stays leaves that set-up as it is"
    learn,first = learner(opt_func=partial(Adam, wd=0.01)),make(**decaying)
    first.apply(learn).fit(1, 0.01)
    loader,wd = learn.dls.train,learn.wd
    assert wd!=0.01
    stays = make(**{**decaying, 'wd': wd}, bs=32, micro_bs=32, has_plan=True).at(32)
    assert stays.apply(learn).dls.train is loader
    assert learn.wd==wd

# Files and copies

@pytest.mark.filterwarnings('ignore')
def test_exported_learners_carry_no_old_loaders(tmp_path):
    dls = Datasets(range(96), [[lambda i: items[i][0]],[lambda i: items[i][1]]], splits=(list(range(64)),list(range(64,96)))).dataloaders(
        bs=8, num_workers=0, device='cpu')
    learn = make().apply(learner(dls=dls))
    learn.path = tmp_path
    loaded = exported(learn, tmp_path)
    assert b'PlannedFit' not in (tmp_path/'it.pkl').read_bytes()
    assert vars(loaded).get('before_set_up') is None
    assert make().undo(loaded) is loaded
    assert learn.before_set_up is not None
    assert make().undo(learn).dls.train.bs==8

@pytest.mark.parametrize('copied', [copy.deepcopy,lambda o: pickle.loads(pickle.dumps(o))])
def test_the_note_is_of_one_learner(copied): assert copied(make().apply(learner()).before_set_up) is None

# A plan that stays

def test_a_plan_that_stays_says_what_it_stays_with():
    "Its line names the callbacks that make today's batch, and a learner without them is told"
    stays = make(noise_scale=1000., n_epoch=20, bs=16, micro_bs=8, times=((8,0.01,0.),(16,0.02,0.)), own_cbs=('GradAccum',))
    assert stays.verdict=='stay'
    assert stays.code.endswith(' # with dls of bs=8 and your GradAccum')
    with pytest.warns(UserWarning, match='This plan stays at 16 items, and this learner trains with 8: give it the loader and callbacks of the one that'):
        stays.apply(learner(bs=8))
    own = learner(bs=8, cbs=[GradAccum(2)])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert stays.apply(own) is own
