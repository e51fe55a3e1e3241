"""What `net.py` runs in each of the two versions: small trainings and measurements, as `{name: numbers}`

Only public names of `fastai_bs.all` are used, so that a case runs in any version. A clock that the model and the optimizer move forward takes the place
of `time.perf_counter`: what a step costs is then the same in each run.
"""
import math
import numbers
import os
import tempfile
import time
import warnings
from functools import partial

import matplotlib
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset

matplotlib.use('Agg')

class Clock:
    "Seconds in powers of two, which add up without rounding"
    def __init__(self): self.now = 0.
    def __call__(self): return self.now

clock = Clock()
time.perf_counter = clock # Before the package is imported, which may take the function itself

from fastai.callback.core import Callback # noqa: E402
from fastai.callback.mixup import MixUp # noqa: E402
from fastai.callback.progress import ProgressCallback # noqa: E402
from fastai.callback.schedule import SchedCos # noqa: E402
from fastai.callback.training import GradientClip # noqa: E402
from fastai.collab import CollabDataLoaders, collab_learner # noqa: E402
from fastai.data.core import DataLoaders # noqa: E402
from fastai.data.load import DataLoader # noqa: E402
from fastai.learner import Learner # noqa: E402
from fastai.losses import CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat # noqa: E402
from fastai.optimizer import Adam, OptimWrapper, SGD # noqa: E402
from fastai.tabular.core import Categorify, Normalize # noqa: E402
from fastai.tabular.data import TabularDataLoaders # noqa: E402
from fastai.tabular.learner import tabular_learner # noqa: E402
from fastai.tabular.model import tabular_config # noqa: E402
from fastai.text.data import LMDataLoader, pad_input # noqa: E402
from fastai.text.learner import language_model_learner, text_classifier_learner # noqa: E402
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config, awd_lstm_lm_config # noqa: E402
from fastai.torch_core import params, set_seed # noqa: E402
from fastai.vision.models.unet import DynamicUnet # noqa: E402
import fastai.distributed # noqa: E402,F401 (it adds distrib_ctx)
from fastai_bs.all import (BatchSchedule, GradAccum, NoiseScale, ScaledLR, adascale_gain, bn_to_gn, linear_scaling, no_scaling, # noqa: E402
                           sqrt_scaling)

lr,n_valid = 0.05,8
sgd = partial(SGD, mom=0.9)

# Items and loaders

def _gen(seed=0): return torch.Generator().manual_seed(seed)

def _images(n, size=8):
    "Images of three classes, one brighter in each channel"
    y = torch.arange(n)%3
    return torch.randn(n, 3, size, size, generator=_gen(n)) + F.one_hot(y, 3)[:,:,None,None], y

def _loaders(items, bs, n, **kwargs):
    train = DataLoader(items[:n], bs=bs, num_workers=0, shuffle=True, **kwargs)
    valid = DataLoader(items[n:], bs=bs, num_workers=0, **kwargs)
    return DataLoaders(train, valid, device='cpu')

def _image_loaders(n, bs): return _loaders(list(zip(*_images(n+n_valid))), bs, n)

# Learners: `(items of the training set, items of a micro-batch) -> Learner`

def mlp(n, bs, opt_func=sgd):
    g = _gen()
    x,w = torch.randn(n+n_valid, 5, generator=g),torch.randn(5, 2, generator=g)
    y = x@w + torch.randn(n+n_valid, 2, generator=g)
    return Learner(_loaders(list(zip(x, y)), bs, n), nn.Sequential(nn.Linear(5,4), nn.Tanh(), nn.Linear(4,2)), nn.MSELoss(), opt_func)

class FoldedSGD(torch.optim.Optimizer):
    "`v = mom*v + lr*grad`, and `v` is what moves the parameters: it keeps the learning rate"
    def __init__(self, params, lr=0.01, momentum=0.9): super().__init__(params, dict(lr=lr, momentum=momentum))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']:
                v = self.state[p].setdefault('v', torch.zeros_like(p))
                p.sub_(v.mul_(g['momentum']).add_(p.grad, alpha=g['lr']))

def sum_loss(n, bs):
    learn = mlp(n, bs)
    learn.loss_func = nn.MSELoss(reduction='sum')
    return learn

def _flat_net(): return nn.Sequential(nn.Flatten(), nn.Linear(192,5), nn.Tanh(), nn.Linear(5,3))
def _body(*norms): return nn.Sequential(nn.Conv2d(3, 4, 3, 2), *norms, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten())

def convnet(n, bs, opt_func=sgd, loss_func=None):
    model = nn.Sequential(*_body(nn.BatchNorm2d(4)), nn.Linear(16,3))
    return Learner(_image_loaders(n, bs), model, loss_func or CrossEntropyLossFlat(), opt_func)

def group_norm(n, bs):
    learn = convnet(n, bs)
    learn.model = bn_to_gn(learn.model, groups=2)
    return learn

def dropout(n, bs):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192,8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8,3))
    return Learner(_image_loaders(n, bs), model, CrossEntropyLossFlat(), sgd)

def unet(n, bs):
    x,_ = _images(n+n_valid)
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU())
    return Learner(_loaders(list(zip(x, (x[:,0]>0).long())), bs, n), DynamicUnet(encoder, 2, (8,8)), CrossEntropyLossFlat(axis=1), sgd)

def tabular(n, bs):
    rng,n_all = np.random.default_rng(0),n+n_valid
    df = pd.DataFrame(dict(a=rng.integers(0, 3, n_all), b=rng.integers(0, 4, n_all), u=rng.normal(size=n_all), v=rng.normal(size=n_all)))
    df['y'] = ((df.u+df.a)>1).map({False: 'no', True: 'yes'})
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['a','b'], cont_names=['u','v'], y_names='y',
                                     valid_idx=list(range(n, n_all)), bs=bs, val_bs=4, drop_last=False, num_workers=0, device='cpu')
    return tabular_learner(dls, layers=[6], config=tabular_config(use_bn=False, bn_cont=False), loss_func=CrossEntropyLossFlat(), opt_func=sgd)

def collab(n, bs):
    rng,n_all = np.random.default_rng(0),n+n_valid
    df = pd.DataFrame(dict(user=rng.integers(0, 4, n_all), item=rng.integers(0, 5, n_all), rating=rng.uniform(1, 5, n_all)))
    dls = CollabDataLoaders.from_df(df, valid_pct=n_valid/n_all, seed=0, bs=bs, drop_last=False, num_workers=0, device='cpu')
    return collab_learner(dls, n_factors=3, y_range=(0,5.5), opt_func=sgd)

_vocab = [f't{i}' for i in range(12)]
_small = dict(emb_sz=6, n_hid=7, n_layers=2)

def language_model(n, bs):
    text = torch.randint(2, 12, (4*n+1,), generator=_gen())
    train = LMDataLoader([(text,)], bs=bs, seq_len=3, num_workers=0)
    dls = DataLoaders(train, LMDataLoader([(text[:30],)], bs=2, seq_len=3, num_workers=0), device='cpu')
    dls.vocab = _vocab
    return language_model_learner(dls, AWD_LSTM, config={**awd_lstm_lm_config, **_small}, pretrained=False, opt_func=sgd)

def text_classifier(n, bs):
    g = _gen()
    y = torch.arange(n+n_valid)%2
    items = [(torch.randint(2+5*int(o), 7+5*int(o), (3+i%4,), generator=g), o) for i,o in enumerate(y)]
    dls = _loaders(items, bs, n, before_batch=partial(pad_input, pad_idx=1))
    dls.vocab,dls.c = _vocab,2
    return text_classifier_learner(dls, AWD_LSTM, config={**awd_lstm_clas_config, **_small}, pretrained=False, n_out=2, lin_ftrs=[5], seq_len=8,
                                   loss_func=CrossEntropyLossFlat(), opt_func=sgd)

class Transformer(nn.Module):
    "Tags tokens"
    def __init__(self):
        super().__init__()
        self.embed,self.tags = nn.Embedding(12,8),nn.Linear(8,4)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, 0., batch_first=True), 1, enable_nested_tensor=False)
    def forward(self, x): return self.tags(self.layers(self.embed(x))).transpose(1,2)

def transformer(n, bs, loss_func=None):
    "Each item has another number of targets that count"
    g = _gen()
    x = torch.randint(12, (n+n_valid,5), generator=g)
    y = (x%4).masked_fill(torch.arange(5)>torch.randint(5, (n+n_valid,1), generator=g), -100)
    return Learner(_loaders(list(zip(x,y)), bs, n), Transformer(), loss_func or nn.CrossEntropyLoss(), sgd)

def class_weights(n, bs): return transformer(n, bs, nn.CrossEntropyLoss(weight=torch.tensor([0.5,1,2,3])))

def plain_loaders(n, bs):
    x,y = _images(n+n_valid)
    train,valid = TensorDataset(x[:n], y[:n]),TensorDataset(x[n:], y[n:])
    return Learner(DataLoaders(TorchDataLoader(train, bs, shuffle=True), TorchDataLoader(valid, 4)), _flat_net(), CrossEntropyLossFlat(), sgd)

class TwoInTwoOut(nn.Module):
    "A class and a number, from an image and a few more numbers"
    def __init__(self):
        super().__init__()
        self.from_image,self.from_rest,self.out = nn.Linear(192,5),nn.Linear(3,5),nn.Linear(5,4)
    def forward(self, x, z):
        res = self.out(torch.tanh(self.from_image(x.flatten(1))+self.from_rest(z.flatten(1)[:,:3])))
        return res[:,:3],res[:,3]

class BothLosses:
    "The sum of a classification loss and a regression loss"
    y_int,reduction = True,'mean'
    def __call__(self, pred, y, z):
        return F.cross_entropy(pred[0], y, reduction=self.reduction) + F.mse_loss(pred[1], z, reduction=self.reduction)

def n_targets(learn): return len(learn.yb[0])

def several(n, bs):
    x,y = _images(n+n_valid)
    z = torch.randn(n+n_valid, 3, 1, 1, generator=_gen())
    dls = _loaders(list(zip(x, z, y, z.sum((1,2,3)))), bs, n)
    dls.n_inp = 2
    for dl in dls.loaders: dl.n_inp = 2
    return Learner(dls, TwoInTwoOut(), BothLosses(), sgd)

def _body_and_head(model): return [params(model[:-1]),params(model[-1])]

def groups(n, bs, opt_func=sgd):
    model = nn.Sequential(*_body(nn.GroupNorm(2,4)), nn.Linear(16,3))
    return Learner(_image_loaders(n, bs), model, CrossEntropyLossFlat(), opt_func, splitter=_body_and_head)

def frozen(n, bs):
    learn = groups(n, bs)
    learn.freeze()
    return learn

class OwnStep(Learner):
    "Adds to the loss a term that wants the predictions small, and has a backward pass of its own"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.own_loss(self.pred, *self.yb) if self.training else self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training: self._do_grad_opt()
    def own_loss(self, pred, *yb): return self.loss_func(pred, *yb) + 0.1*pred.pow(2).mean()
    def _backward(self): torch.autograd.backward(self.loss_grad)

def own_step(n, bs): return OwnStep(_image_loaders(n, bs), _flat_net(), CrossEntropyLossFlat(), sgd)

def tied(n, bs):
    g = _gen()
    x = torch.randint(7, (n+n_valid,4), generator=g)
    y = torch.where(torch.rand(n+n_valid, 4, generator=g)<0.3, x.roll(1, 1), torch.randint(7, (n+n_valid,4), generator=g))
    model = nn.Sequential(nn.Embedding(7,4), nn.Linear(4,4), nn.Tanh(), nn.Linear(4,7,bias=False))
    model[3].weight = model[0].weight
    return Learner(_loaders(list(zip(x, y)), bs, n), model, CrossEntropyLossFlat(), sgd)

def clipped(n, bs):
    learn = convnet(n, bs)
    return learn.add_cb(GradientClip(0.1))

def mixed_up(n, bs):
    learn = convnet(n, bs)
    return learn.add_cb(MixUp())

adam = partial(Adam, eps=1e-2)
adamw = partial(OptimWrapper, opt=torch.optim.AdamW, eps=1e-2)
smooth = LabelSmoothingCrossEntropyFlat

learners = {
    'mlp': mlp,
    'mlp, velocity with the rate': partial(mlp, opt_func=partial(OptimWrapper, opt=FoldedSGD)),
    'mlp, summed loss': sum_loss,
    'convnet, BatchNorm': convnet,
    'convnet, GroupNorm': group_norm,
    'convnet, Adam': partial(convnet, opt_func=adam),
    "convnet, torch's AdamW": partial(convnet, opt_func=adamw),
    'convnet, label smoothing': lambda n, bs: convnet(n, bs, loss_func=smooth()),
    'convnet, GradientClip': clipped,
    'convnet, MixUp': mixed_up,
    'dropout': dropout,
    'unet': unet,
    'tabular': tabular,
    'collab': collab,
    'language model': language_model,
    'text classifier': text_classifier,
    'transformer': transformer,
    'transformer, class weights': class_weights,
    'plain torch loaders': plain_loaders,
    'several inputs and targets': several,
    'parameter groups': groups,
    'frozen body': frozen,
    'a step of its own': own_step,
    'tied weights': tied}

# What a case gives

def _no_log(*args): pass

def made(nm, n=22, bs=4):
    "A learner, the same each time, that shows nothing"
    set_seed(0)
    learn = learners[nm](n, bs)
    learn.logger = _no_log
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    return learn

def weights(learn):
    "Parameters and buffers, and the losses that were recorded"
    res = {f'weights.{k}': v.detach().cpu().numpy().copy() for k,v in learn.model.state_dict().items()}
    return {**res, 'losses': np.array([float(o) for o in learn.recorder.losses])}

def trained(learn, cbs=(), n_epoch=2, lr=lr, cycle=True):
    set_seed(1)
    if cycle: learn.fit_one_cycle(n_epoch, lr, cbs=list(cbs))
    else: learn.fit(n_epoch, lr, cbs=list(cbs))
    return weights(learn)

def of_frame(df, prefix):
    "The numbers of a data frame, by column"
    return {f'{prefix}.{k}': df[k].to_numpy(float) for k in df if pd.api.types.is_numeric_dtype(df[k])}

def of_value(path, o):
    "The numbers in `o`, by path"
    if isinstance(o, dict): return {p: v for k,x in o.items() for p,v in of_value(f'{path}.{k}', x).items()}
    if isinstance(o, (list,tuple)): return {p: v for i,x in enumerate(o) for p,v in of_value(f'{path}.{i}', x).items()}
    if isinstance(o, slice): return of_value(path, [o.start,o.stop])
    if o is None: return {path: np.array(math.nan)}
    return {path: np.array(o, float)} if isinstance(o, (numbers.Number,np.generic)) else {}

def noise_of(noise): return {**of_value('noise_scale', noise.noise_scale), **of_value('ci', noise.ci), **of_frame(noise.df, 'df')}

# Accumulation, of each kind

def accum_args(nm): return dict(count=n_targets) if nm.startswith('several') else {}

def accumulate(nm, *args, n=22, **kwargs): return trained(made(nm, n), [GradAccum(*args, **kwargs, **accum_args(nm))])

class OutOfMemory:
    "Memory for no more than `most` items in training"
    def __init__(self, most): self.most = most
    def __call__(self, model, args):
        if model.training and len(args[0])>self.most: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

def split(nm):
    learn = made(nm)
    learn.model.register_forward_pre_hook(OutOfMemory(2))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return trained(learn, [GradAccum(2, on_oom='split', **accum_args(nm))])

def schedule(nm, **kwargs):
    learn = made(nm)
    return trained(learn, [BatchSchedule(**kwargs)], n_epoch=3)

# Noise

def noise(nm, n_acc=3, **kwargs):
    learn = made(nm)
    cbs = [GradAccum(n_acc, **accum_args(nm))] if n_acc>1 else []
    cb = NoiseScale(**kwargs)
    res = trained(learn, [*cbs, cb], n_epoch=3)
    return {**res, **noise_of(cb)}

# Learning rate

def scaled(nm, lr=lr, cycle=True, n_acc=3, **kwargs):
    learn = made(nm)
    res = trained(learn, [GradAccum(n_acc), ScaledLR(4, **kwargs)], n_epoch=3, lr=lr, cycle=cycle)
    hps = learn.recorder.hps if hasattr(learn.recorder, 'hps') else {}
    return {**res, 'lrs': np.array([float(o) for o in learn.recorder.lrs]), **of_value('hps', {k: [float(o) for o in v] for k,v in hps.items()})}

def rules():
    ks = [0.5, 1, 2, 3, 16, 1000]
    res = {f.__name__: np.array([f(k) for k in ks], float) for f in (linear_scaling,sqrt_scaling,no_scaling)}
    res['adascale_gain'] = np.array([adascale_gain(k, ns, 64) for k in ks for ns in (0., 1., 100., 1e6)], float)
    return res

# Finding, applying, verifying

class StepCost(Callback):
    "What an optimizer step costs beside its micro-batches"
    def after_step(self): clock.now += 2**-8

def pass_cost(model, args):
    "A forward pass costs more where a graph is kept"
    clock.now += (2**-7 + len(args[0])*2**-11)*(3 if torch.is_grad_enabled() else 1)

def timed(nm, n=256, bs=8):
    learn = made(nm, n, bs)
    learn.model.register_forward_pre_hook(pass_cost)
    return learn.add_cb(StepCost())

renamed = {'base_lr': 'lr', 'lr': 'scaled_lr'} # Where a plan still has `base_lr`

def _fit_rate(plan): return getattr(plan, 'base_lr', plan.lr)

def of_plan(plan):
    "The public numbers of a plan, under the names that it has today, and beside them all that it tells of itself"
    has_base = hasattr(plan, 'base_lr')
    public = {nm: getattr(plan, nm) for nm in ('noise_scale','ci','bs','micro_bs','n_acc','n_epoch','duration','wd','base_bs')}
    public.update(lr=_fit_rate(plan), scaled_lr=plan.lr if has_base else plan.scaled_lr)
    more = plan.to_dict()
    if has_base: more = {renamed.get(k, k): v for k,v in more.items()}
    res = {**of_value('plan', public), **of_value('more.to_dict', more)}
    return {**res, **of_frame(plan.table, 'more.table'), **of_frame(plan.df, 'more.df')}

def find(nm, lr=lr, n=256, bs=8, cbs=(), **kwargs):
    learn = timed(nm, n, bs).add_cbs(list(cbs))
    set_seed(2)
    plan = learn.bs_find(lr, show_plot=False, seed=3, **kwargs)
    return {**of_plan(plan), **trained(learn, n_epoch=1, lr=0.01)}

def apply(nm, at=None, **kwargs):
    learn = timed(nm)
    set_seed(2)
    plan = learn.bs_find(lr, show_plot=False, seed=3, n_epoch=2, **kwargs)
    if at: plan = plan.at(at)
    plan.apply(learn)
    res = trained(learn, n_epoch=1, lr=_fit_rate(plan))
    plan.undo(learn)
    return {**res, **{f'after undo.{k}': v for k,v in trained(learn, n_epoch=1).items()}}

def verify(nm, n=256, bs=8, **kwargs):
    learn = timed(nm, n, bs)
    set_seed(2)
    res = learn.bs_verify(lr, **kwargs)
    out = {**of_frame(res.table, 'table'), **of_frame(res.df, 'more.df'), **of_value('critical_range', res.critical_range), **of_value('bs', res.bs)}
    return {**out, **trained(learn, n_epoch=1, lr=0.01)}

def check(nm, n_acc=4):
    learn = made(nm)
    if nm.startswith('several'): n_acc = GradAccum(n_acc, **accum_args(nm))
    res = learn.check_accum(n_acc)
    return {'error': np.array(res.error), **trained(learn)}

def grow(nm):
    learn = timed(nm)
    set_seed(2)
    learn.fit_grow(3, lr)
    return weights(learn)

def largest(nm):
    "The largest micro-batch on a device that holds 37 items"
    learn = made(nm, 256)
    learn.model.register_forward_pre_hook(OutOfMemory(37))
    return of_value('max_bs', learn.max_bs_find())

# Two ranks

def _rank(r, folder, nm, kind):
    os.environ.update(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE='2', MASTER_ADDR='localhost', MASTER_PORT='29501', CUDA_VISIBLE_DEVICES='')
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    torch.distributed.init_process_group('gloo', init_method=f'file://{folder}/store', rank=r, world_size=2)
    learn = made(nm)
    cb = NoiseScale()
    cbs = dict(accum=[GradAccum(3)], noise=[GradAccum(2),cb], scaled=[GradAccum(2),ScaledLR(4)])[kind]
    with learn.distrib_ctx(cpu=True, sync_bn=False): res = trained(learn, cbs)
    if kind=='noise': res.update(noise_of(cb))
    np.savez(f'{folder}/{r}.npz', **res)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

def ranks(nm, kind):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,nm,kind), nprocs=2)
        return {f'rank {r}.{k}': v for r in range(2) for k,v in np.load(f'{folder}/{r}.npz').items()}

# All cases

def without(*nms): return [nm for nm in learners if nm not in nms]

rnns = 'language model','text classifier'
cases = {}
for nm in learners:
    cases[f'GradAccum(3): {nm}'] = partial(accumulate, nm, 3)
    cases[f'GradAccum(bs=8): {nm}'] = partial(accumulate, nm, bs=8)
    cases[f'GradAccum({{0:1,1:2}}): {nm}'] = partial(accumulate, nm, {0: 1, 1: 2})
    cases[f'NoiseScale, windows: {nm}'] = partial(noise, nm)
    cases[f'check_accum: {nm}'] = partial(check, nm)
for nm in without(*rnns, 'a step of its own', 'convnet, MixUp'): cases[f"on_oom='split': {nm}"] = partial(split, nm)
for nm in ('mlp','convnet, GroupNorm','dropout','transformer','plain torch loaders','tied weights'):
    cases[f'NoiseScale, parts: {nm}'] = partial(noise, nm, 1, every=2)
for nm in ('mlp','convnet, Adam',"convnet, torch's AdamW",'parameter groups'):
    for rule in (None,linear_scaling,sqrt_scaling,no_scaling):
        kwargs = {} if rule is None else dict(rule=rule)
        rule_name = rule.__name__ if rule else 'default'
        cases[f'ScaledLR, {rule_name}: {nm}'] = partial(scaled, nm, **kwargs)
    cases[f'ScaledLR, constant rate, no warmup: {nm}'] = partial(scaled, nm, cycle=False, warmup_epochs=0)
cases['ScaledLR, slice: parameter groups'] = partial(scaled, 'parameter groups', lr=slice(0.005, 0.05))
cases['ScaledLR, slice: convnet, Adam'] = partial(scaled, 'convnet, Adam', lr=slice(0.005, 0.05))
cases['ScaledLR, weight decay not scaled: mlp'] = partial(scaled, 'mlp', scale_wd=False)
cases['ScaledLR, momentum_correction'] = partial(scaled, 'mlp, velocity with the rate', momentum_correction=True)
cases['ScaledLR, adascale_gain: mlp'] = partial(scaled, 'mlp', rule=adascale_gain, noise_scale=20.)
cases['rules'] = rules
for nm in ('mlp','convnet, BatchNorm','convnet, Adam','plain torch loaders'):
    cases[f'BatchSchedule, by epoch: {nm}'] = partial(schedule, nm, bs={0: 4, 1: 8, 2: 16})
    cases[f'BatchSchedule, by progress: {nm}'] = partial(schedule, nm, bs=SchedCos(4, 16), rule=sqrt_scaling, max_micro_bs=8)
for nm in ('mlp','convnet, BatchNorm','convnet, Adam','transformer','plain torch loaders','parameter groups'):
    cases[f'bs_find: {nm}'] = partial(find, nm)
    cases[f'bs_find, n_epoch=5: {nm}'] = partial(find, nm, n_epoch=5)
cases['bs_find, fixed weights: mlp'] = partial(find, 'mlp', lr=0)
cases['bs_find, max_bs=16: mlp'] = partial(find, 'mlp', max_bs=16)
cases['bs_find, slice: parameter groups'] = partial(find, 'parameter groups', lr=slice(0.005, 0.05), n_epoch=3)
cases['bs_find beside GradAccum: convnet, BatchNorm'] = lambda: find('convnet, BatchNorm', cbs=[GradAccum(2)], n_epoch=3)
for nm in ('mlp','convnet, Adam'):
    cases[f'plan.apply: {nm}'] = partial(apply, nm)
    cases[f'plan.at(32).apply: {nm}'] = partial(apply, nm, 32, max_bs=16)
    for equal in ('time','items'): cases[f"bs_verify, {equal}: {nm}"] = partial(verify, nm, n_epoch=2, sizes=[8,16,32], equal=equal)
    cases[f'fit_grow: {nm}'] = partial(grow, nm)
cases["bs_verify, plan: mlp"] = partial(verify, 'mlp', n_epoch=2, sizes=[8,16], equal='plan')
cases['max_bs_find: convnet, GroupNorm'] = partial(largest, 'convnet, GroupNorm')
for kind in ('accum','noise','scaled'):
    for nm in ('mlp','transformer'): cases[f'two ranks, {kind}: {nm}'] = partial(ranks, nm, kind)
