"Learners of every kind, tiny, and what trainings bring along: the rows and columns of the matrix"
import os
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset
from fastai.callback.core import Callback
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.fp16 import MixedPrecision, ModelToHalf, NonNativeMixedPrecision
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.progress import CSVLogger, ProgressCallback, ShowGraphCallback
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.callback.training import GradientClip, ShortEpochCallback
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.distributed import ParallelTrainer
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat
from fastai.optimizer import SGD, OptimWrapper
from fastai.tabular.core import Categorify, Normalize
from fastai.tabular.data import TabularDataLoaders
from fastai.tabular.learner import tabular_learner
from fastai.tabular.model import tabular_config
from fastai.text.data import LMDataLoader, pad_input
from fastai.text.learner import language_model_learner, text_classifier_learner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config, awd_lstm_lm_config
from fastai.torch_core import params, set_seed, trainable_params
from fastai.vision.models.unet import DynamicUnet
from helpers import no_bf16_lstm
try: from fastai.callback.tensorboard import TensorBoardCallback
except ImportError: TensorBoardCallback = None

lr,n_valid = 0.05,8
device = torch.device(os.environ.get('DEVICE', 'cpu')) # By the environment, so that all processes of the matrix have one
sgd = partial(SGD, mom=0.9)

# Items and loaders

def _gen(seed=0): return torch.Generator().manual_seed(seed)

def _images(n, size=8):
    "Of three classes, one brighter in each channel"
    y = torch.arange(n)%3
    return torch.randn(n, 3, size, size, generator=_gen(n)) + F.one_hot(y, 3)[:,:,None,None],y

def _loaders(items, bs, n, **kwargs):
    train,valid = (DataLoader(o, bs=bs, num_workers=0, shuffle=s, **kwargs) for o,s in ((items[:n],True),(items[n:],False)))
    return DataLoaders(train, valid, device=device)

def image_loaders(n, bs): return _loaders(list(zip(*_images(n+n_valid))), bs, n)

# Learners: `(items of the training set, items of a micro-batch) -> Learner`

def _body(*norms): return nn.Sequential(nn.Conv2d(3, 4, 3, 2), *norms, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten())

def convnet(n, bs):
    model = nn.Sequential(*_body(nn.BatchNorm2d(4)), nn.Linear(16,3))
    return Learner(image_loaders(n, bs), model, CrossEntropyLossFlat(), sgd)

def unet(n, bs):
    x,_ = _images(n+n_valid, 8)
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU())
    return Learner(_loaders(list(zip(x, (x[:,0]>0).long())), bs, n), DynamicUnet(encoder, 2, (8,8)), CrossEntropyLossFlat(axis=1), sgd)

def tabular(n, bs):
    rng,n_all = np.random.default_rng(0),n+n_valid
    df = pd.DataFrame(dict(a=rng.integers(0, 3, n_all), b=rng.integers(0, 4, n_all), u=rng.normal(size=n_all), v=rng.normal(size=n_all)))
    df['y'] = ((df.u+df.a)>1).map({False: 'no', True: 'yes'})
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['a','b'], cont_names=['u','v'], y_names='y', valid_idx=list(range(n, n_all)),
                                     bs=bs, val_bs=4, drop_last=False, num_workers=0, device=device)
    return tabular_learner(dls, layers=[6], config=tabular_config(use_bn=False, bn_cont=False), loss_func=CrossEntropyLossFlat(), opt_func=sgd)

def collab(n, bs):
    rng,n_all = np.random.default_rng(0),n+n_valid
    df = pd.DataFrame(dict(user=rng.integers(0, 4, n_all), item=rng.integers(0, 5, n_all), rating=rng.uniform(1, 5, n_all)))
    dls = CollabDataLoaders.from_df(df, valid_pct=n_valid/n_all, seed=0, bs=bs, drop_last=False, num_workers=0, device=device)
    return collab_learner(dls, n_factors=3, y_range=(0,5.5), opt_func=sgd)

_vocab = [f't{i}' for i in range(12)]
_small = dict(emb_sz=6, n_hid=7, n_layers=2)

def language_model(n, bs):
    text = torch.randint(2, 12, (4*n+1,), generator=_gen())
    train = LMDataLoader([(text,)], bs=bs, seq_len=3, num_workers=0)
    dls = DataLoaders(train, LMDataLoader([(text[:30],)], bs=2, seq_len=3, num_workers=0), device=device)
    dls.vocab = _vocab
    return language_model_learner(dls, AWD_LSTM, config={**awd_lstm_lm_config, **_small}, pretrained=False, opt_func=sgd)

def text_classifier(n, bs):
    g = _gen()
    y = torch.arange(n+n_valid)%2
    items = [(torch.randint(2+5*int(o), 7+5*int(o), (3+i%4,), generator=g),o) for i,o in enumerate(y)]
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

def transformer(n, bs):
    g = _gen()
    x = torch.randint(12, (n+n_valid,5), generator=g)
    y = (x%4).masked_fill(torch.arange(5)>torch.randint(5, (n+n_valid,1), generator=g), -100) # Of each item as many tags count as it happens
    return Learner(_loaders(list(zip(x,y)), bs, n), Transformer(), nn.CrossEntropyLoss(), sgd)

def _flat_net(): return nn.Sequential(nn.Flatten(), nn.Linear(192,5), nn.Tanh(), nn.Linear(5,3))

def plain_loaders(n, bs):
    x,y = _images(n+n_valid)
    train,valid = TensorDataset(x[:n], y[:n]),TensorDataset(x[n:], y[n:])
    return Learner(DataLoaders(TorchDataLoader(train, bs, shuffle=True), TorchDataLoader(valid, 4)), _flat_net(), CrossEntropyLossFlat(), sgd)

class TwoInTwoOut(nn.Module):
    "A class and a number, from an image and a few more numbers"
    def __init__(self):
        super().__init__()
        self.of_image,self.of_rest,self.out = nn.Linear(192,5),nn.Linear(3,5),nn.Linear(5,4)
    def forward(self, x, z):
        res = self.out(torch.tanh(self.of_image(x.flatten(1))+self.of_rest(z.flatten(1)[:,:3])))
        return res[:,:3],res[:,3]

class BothLosses:
    "Of a class and a number"
    y_int = True
    def __init__(self, smoothing=0.): self.reduction,self.smoothing = 'mean',smoothing
    def __call__(self, pred, y, z):
        return F.cross_entropy(pred[0], y, reduction=self.reduction, label_smoothing=self.smoothing) + F.mse_loss(pred[1], z, reduction=self.reduction)

def several(n, bs):
    x,y = _images(n+n_valid)
    z = torch.randn(n+n_valid, 3, 1, 1, generator=_gen())
    dls = _loaders(list(zip(x, z, y, z.sum((1,2,3)))), bs, n)
    dls.n_inp = 2
    for dl in dls.loaders: dl.n_inp = 2
    return Learner(dls, TwoInTwoOut(), BothLosses(), sgd)

def _body_and_head(model): return [params(model[:-1]),params(model[-1])]

def frozen(n, bs):
    model = nn.Sequential(*_body(nn.GroupNorm(2,4)), nn.Linear(16,3))
    learn = Learner(image_loaders(n, bs), model, CrossEntropyLossFlat(), sgd, splitter=_body_and_head)
    learn.freeze()
    return learn

class OwnStep(Learner):
    "With a term of the loss that wants the predictions small, and a backward pass of its own"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb) + 0.1*self.pred.pow(2).mean()*self.training
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training: self._do_grad_opt()
    def _backward(self): torch.autograd.backward(self.loss_grad)

def own_step(n, bs): return OwnStep(image_loaders(n, bs), _flat_net(), CrossEntropyLossFlat(), sgd)

def n_targets(learn):
    "What the loss averages over, counted without our own way of counting"
    y = learn.yb[0]
    return int((y!=-100).sum()) if y.dtype is torch.long else y.numel()

@dataclass
class Kind:
    "A kind of learner"
    make:callable # `(items, micro_bs) -> Learner`
    exact:bool = True # Is a large batch's gradient the mean of its micro-batches'?
    count:callable = None # As of `GradAccum`
    images:bool = False # Can items be mixed?
    classes:bool = True
    tunes:bool = False # By `fine_tune`?
    rnn:bool = False # An `AWD_LSTM`, which goes on from the batch before?
    cost:float = 1. # Of a training, roughly

models = {
    'tiny convnet, BatchNorm': Kind(convnet, False, images=True),
    'unet': Kind(unet, False, images=True, cost=4.),
    'tabular': Kind(tabular, cost=2.),
    'collab': Kind(collab, classes=False, cost=2.),
    'AWD-LSTM language model': Kind(language_model, False, rnn=True, cost=3.),
    'text classifier': Kind(text_classifier, False, rnn=True, cost=3.),
    'transformer': Kind(transformer, cost=1.5),
    'plain torch loaders': Kind(plain_loaders, images=True),
    'several inputs and targets': Kind(several, count=lambda learn: len(learn.yb[0]), images=True),
    'fine_tune with freezing': Kind(frozen, images=True, tunes=True, cost=2.),
    'a step of its own': Kind(own_step, images=True)}

# Companions

class Around(nn.Module):
    "Something around a model, which shows itself as the model does"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def reset(self): getattr(self.model, 'reset', lambda: None)()
    def forward(self, *x):
        res = self.model(*x)
        if not isinstance(res, tuple): return self.more(res, *x)
        return (self.more(res[0], *x),*res[1:])

class Tied(Around):
    "Two layers with the same weights"
    def __init__(self, model):
        super().__init__(model)
        self.a,self.b = (nn.PReLU(1, 0.3) for _ in range(2))
        self.b.weight = self.a.weight
    def more(self, out, *x): return out + self.b(self.a(out))

class Sparse(Around):
    "An embedding whose gradient is sparse, in what it adds to the output"
    def __init__(self, model):
        super().__init__(model)
        self.embed = nn.Embedding(5, 1, sparse=True)
    def more(self, out, x, *rest):
        i = (x.flatten(1).float().sum(1).abs()*10).long()%5
        return out + self.embed(i).squeeze(1).reshape(-1, *[1]*(out.dim()-1))

class Checkpointed(nn.Module):
    "A part that is run again in the backward pass"
    def __init__(self, part):
        super().__init__()
        self.part = part
    def forward(self, *x): return checkpoint(self.part, *x, use_reentrant=False)

def _goes_on(model):
    "Does it begin with an `AWD_LSTM`, which goes on from where it was?"
    first = model[0] if isinstance(model, nn.Sequential) else None
    return isinstance(getattr(first, 'module', first), AWD_LSTM)

def _in_part(learn, f):
    "`f` of all of the model; where it begins with an `AWD_LSTM`, of what comes behind that and knows no lengths of text"
    model = learn.model
    if not _goes_on(model): _around(learn, f)
    elif hasattr(model[1], 'layers'): model[1].layers = f(model[1].layers)
    else: model[1].decoder = f(model[1].decoder)

def _with_checkpoints(learn):
    _in_part(learn, Checkpointed)

def _inner(model): return getattr(model, '_orig_mod', None) or getattr(model, 'model', None) or getattr(model, 'part', None)

class _Split:
    "The parameter groups of the model inside, and those of what is around it with the last of them"
    def __init__(self, splitter): self.splitter = splitter
    def __call__(self, model):
        groups = self.splitter(_inner(model))
        groups = [list(o) for o in groups] if isinstance(groups[0], (list,tuple)) or hasattr(groups[0], 'map') else [list(groups)]
        known = {id(p) for g in groups for p in g}
        groups[-1] += [p for p in params(model) if id(p) not in known]
        return groups

def _around(learn, cls):
    learn.splitter = _Split(learn.splitter) if learn.splitter is not trainable_params else trainable_params
    learn.model = cls(learn.model)
    if learn.opt is not None: learn.create_opt()

def _compiled(learn):
    torch._dynamo.reset()
    _in_part(learn, partial(torch.compile, backend='aot_eager'))

class OnCPU(MixedPrecision):
    "On a machine without a GPU too: as fastai's, in half precision and with a scaler, but of the CPU"
    def before_fit(self):
        super().before_fit()
        dtype = torch.float16 if self.kwargs['enabled'] else torch.bfloat16
        self.autocast,self.learn.scaler = autocast('cpu', dtype=dtype),GradScaler('cpu', init_scale=1024., enabled=self.kwargs['enabled'])
    @property
    def name(self): return 'mixed_precision'

class NonNativeOnCPU(NonNativeMixedPrecision):
    "As fastai's, which asks for a GPU"
    dls = SimpleNamespace(device=torch.device('cuda'))
    @property
    def name(self): return 'non_native_mixed_precision'

class EMA(Callback):
    "A moving average of the weights, in whose place the model has it after the fit; one move for each optimizer step"
    order,run_valid = MixedPrecision.order+1,False
    def before_fit(self):
        self.run,self.n = not hasattr(self.learn, 'lr_finder'),0
        if self.run: self.start()
    def start(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
    def after_step(self):
        self.n += 1
        self.move()
    @torch.no_grad()
    def move(self):
        for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p, 0.3)
    @torch.no_grad()
    def after_fit(self):
        for a,p in zip(self.avg, self.model.parameters()): p.copy_(a)
        self.avg = None

class Averaged(EMA):
    "The same by torch's means"
    def start(self): self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    def move(self): self.averaged.update_parameters(self.model)
    def after_fit(self):
        self.avg,self.averaged = [*self.averaged.parameters()],None
        super().after_fit()

def _smooth(learn):
    f = learn.loss_func
    if isinstance(f, BothLosses): f.smoothing = 0.1
    elif isinstance(f, nn.CrossEntropyLoss): f.label_smoothing = 0.1
    elif getattr(f, 'axis', -1)==1: learn.loss_func = LabelSmoothingCrossEntropyFlat(axis=1)
    else: learn.loss_func = LabelSmoothingCrossEntropyFlat()

def _torchs_adamw(learn):
    learn.opt_func = partial(OptimWrapper, opt=torch.optim.AdamW, eps=1e-2)
    if learn.opt is not None: learn.create_opt()

@dataclass
class Companion:
    "What a training brings along"
    cbs:callable = list # They stay on the learner
    change:callable = None # Of the learner
    exact:bool = True # Can a training with the large batch be compared?
    tol:float = 1e-3 # Up to which weights are the same, relative to the way that they went
    epochs:int = 2
    one_cycle:bool = True
    fit:dict = field(default_factory=dict) # More arguments
    items:int = 22 # Of the training set: by default the last micro-batch is short
    cost:float = 1.

companions = {
    'none': Companion(),
    'MixUp': Companion(lambda: [MixUp()], exact=False),
    'CutMix': Companion(lambda: [CutMix()], exact=False),
    'label smoothing': Companion(change=_smooth),
    'GradientClip': Companion(lambda: [GradientClip(0.1)]),
    'fp16': Companion(lambda: [OnCPU()], exact=False, tol=2e-2),
    'bf16': Companion(lambda: [OnCPU('bf16')], exact=False, tol=2e-2),
    'NonNativeMixedPrecision': Companion(lambda: [ModelToHalf(),NonNativeOnCPU(max_loss_scale=64.)], exact=False, tol=2e-2),
    'SaveModel': Companion(lambda: [SaveModelCallback(every_epoch=True, with_opt=True)]),
    'EarlyStopping': Companion(lambda: [EarlyStoppingCallback(min_delta=1e6, patience=1)], epochs=3),
    'ReduceLROnPlateau': Companion(lambda: [ReduceLROnPlateau(min_delta=1e6, patience=1, factor=4)], epochs=3, one_cycle=False),
    'CSVLogger': Companion(lambda: [CSVLogger()]),
    'TensorBoardCallback': Companion(lambda: [TensorBoardCallback('runs', trace_model=False, log_preds=False)]),
    'ShowGraph': Companion(lambda: [ProgressCallback(),ShowGraphCallback()]),
    'EMA': Companion(lambda: [EMA()]),
    "torch's AveragedModel": Companion(lambda: [Averaged()]),
    'ShortEpoch': Companion(lambda: [ShortEpochCallback(0.6)], exact=False),
    'SkipToEpoch': Companion(fit=dict(start_epoch=1)),
    'ChannelsLast': Companion(lambda: [ChannelsLast()]),
    'to_parallel': Companion(lambda: [ParallelTrainer(None)]),
    "torch's AdamW": Companion(change=_torchs_adamw),
    'torch.compile (aot_eager)': Companion(change=_compiled, items=20, cost=20.), # In batches of two sizes it would be compiled as often
    'gradient checkpointing': Companion(change=_with_checkpoints),
    'tied weights': Companion(change=partial(_around, cls=Tied)),
    'sparse embeddings': Companion(change=partial(_around, cls=Sparse))}

def does_not_apply(model, companion):
    "Why the two are never together; `None` where they can be"
    kind = models[model]
    if companion in ('MixUp','CutMix') and model.startswith('several'): return f"fastai's {companion} is for one input and one target"
    if companion in ('MixUp','CutMix') and not kind.images: return f"{companion} is for images: there is nothing between two categories or two tokens"
    if companion=='MixUp' and model=='unet': return "fastai's MixUp weighs items, and this loss comes pixel by pixel"
    if companion=='label smoothing' and not kind.classes: return "there are no classes"
    if companion=='torch.compile (aot_eager)' and model=='unet': return "torch does not compile fastai's DynamicUnet"
    if kind.rnn and companion=='fp16': return "torch has no LSTM in float16 on a CPU"
    if kind.rnn and companion=='bf16': return no_bf16_lstm()
    if kind.rnn and companion=="torch's AveragedModel": return "torch does not copy an AWD_LSTM that has dropped weights"
    if companion=='TensorBoardCallback' and TensorBoardCallback is None: return "tensorboard is not installed here"

class Learners:
    "Makes learners, each the same, of a kind and with a companion"
    def __init__(self, model, companion): self.kind,self.with_ = models[model],companions[companion]

    def make(self, n=None, bs=4):
        set_seed(0)
        learn = self.kind.make(n or self.with_.items, bs)
        learn.model.to(device) # As a fit does, but before there is anything to compare with
        learn.logger = _no_log
        learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
        if self.with_.change: self.with_.change(learn)
        return learn.add_cbs(self.with_.cbs())

    def train(self, learn, cbs=()):
        set_seed(1)
        c,kwargs = self.with_,dict(cbs=list(cbs), **self.with_.fit)
        if self.kind.tunes: learn.fine_tune(c.epochs, lr, freeze_epochs=2, lr_mult=10, **kwargs)
        elif c.one_cycle: learn.fit_one_cycle(c.epochs, lr, **kwargs)
        else: learn.fit(c.epochs, lr, **kwargs)
        return learn

def _no_log(*args): pass
