"Small learners and measures that several test files share"
import warnings
from functools import partial

import torch
from torch import nn
from torch.amp import GradScaler
from fastai.callback.core import Callback, CancelStepException, TrainEvalCallback
from fastai.callback.fp16 import MixedPrecision
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import CastToTensor, Learner, Recorder, load_learner
from fastai.optimizer import SGD
from fastai.torch_core import set_seed

def regression(n, n_in=5, n_out=2, dtype=torch.float64, seed=0):
    "`n` items `(x, y)`"
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n_in, n_out, generator=g, dtype=dtype)
    x = torch.randn(n, n_in, generator=g, dtype=dtype)
    return list(zip(x, x@w + torch.randn(n, n_out, generator=g, dtype=dtype)))

def loaders(items, bs, valid=None, **kwargs):
    "fastai loaders without workers, in the order of `items` unless `shuffle`"
    return DataLoaders(DataLoader(items, bs=bs, num_workers=0, **kwargs), DataLoader(valid or items[:2], bs=2, num_workers=0), device='cpu')

def mlp(n_in=5, n_out=2, n_hid=4, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(n_in,n_hid), nn.Tanh(), nn.Linear(n_hid,n_out)).to(dtype)

class Float32Loss(Callback):
    "Let Recorder, which smooths in float32, follow a float64 loss"
    order = 40
    def after_batch(self): self.learn.loss = self.learn.loss.float()

class ScaledLoss(Callback):
    "As `MixedPrecision`, without its float16, which no CPU has"
    order = MixedPrecision.order
    def __init__(self, **kwargs): self.kwargs = kwargs
    def before_fit(self): self.learn.scaler,self.scales = GradScaler('cpu', **self.kwargs),[]
    def before_backward(self): self.learn.loss_grad = self.learn.scaler.scale(self.loss_grad)
    def before_step(self):
        self.skipped = True
        self.scales.append(self.learn.scaler.get_scale())
        self.learn.scaler.step(self)
        if self.skipped: raise CancelStepException
    def after_step(self): self.learn.scaler.update()
    def after_fit(self): self.learn.scaler = None
    @property
    def param_groups(self): return self.opt.param_groups
    def step(self): self.skipped = False

momentum_sgd = partial(SGD, mom=0.9)

def quiet_learner(dls, model, loss_func=None, opt_func=momentum_sgd, cbs=None, **kwargs):
    "A learner without progress bar or log; it records"
    learn = Learner(dls, model, loss_func=loss_func or nn.MSELoss(), opt_func=opt_func, default_cbs=False,
                    cbs=[TrainEvalCallback, Recorder, CastToTensor, Float32Loss], **kwargs)
    learn.logger = lambda *args: None
    return learn.add_cbs(cbs)

def flat(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def distance(a, b):
    "Largest difference between two learners' parameters, relative to the largest parameter"
    a,b = flat(a),flat(b)
    return ((a-b).abs().max()/b.abs().max()).item()

def exported(learn, path):
    "`learn` after another epoch, `load` and `export`, as `load_learner` gives it back; it was saved before that epoch"
    learn.save('it')
    saved = flat(learn).clone()
    learn.fit(1, 0.1)
    assert not torch.equal(saved, flat(learn))
    learn.load('it')
    assert torch.equal(saved, flat(learn))
    learn.export('it.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return load_learner(path/'it.pkl')

__all__ = ['exported','ScaledLoss','momentum_sgd','regression','loaders','mlp','Float32Loss','quiet_learner','flat','distance','set_seed']
