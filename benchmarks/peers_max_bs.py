"""The largest batch and the finders' time, beside their peers. `peers.py` runs it.

Memory runs out by hand: the model raises what torch raises, for more than `limit` items. accelerate's decorator is given a function which makes model, loader
and optimizer within and trains three steps, as its page shows; Lightning's tuner has its own defaults. Theirs and ours take three steps for a size."""
import itertools, random
from functools import partial

import numpy as np
import torch
from fastai.callback.schedule import Learner
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import Adam, SGD
from fastai.tabular.model import TabularModel
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset

from fastai_bs.all import GradAccum # noqa: F401 (adds `bs_find` and `max_bs_find`)
from frame import TensorLoader, clocked, digits28, in_pairs, middle, standardized
from peers_accum import trainer_of, versions

limits,n_items,bs_now = (37,100,300,777),2000,16

taken = [0,0] # Batches and items trained on, or tried; no attribute of the model, which a search may put back

class Limited(nn.Module):
    "A device with room for `limit` items"
    def __init__(self, limit):
        super().__init__()
        self.body,self.limit = nn.Sequential(nn.Linear(20,32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32,5)),limit
    def forward(self, x):
        if self.training: taken[:] = taken[0]+1,taken[1]+len(x)
        if len(x)>self.limit: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")
        return self.body(x)

def data():
    torch.manual_seed(0)
    return torch.randn(n_items, 20),torch.randint(5, (n_items,))

def drawn(): return torch.get_rng_state().tolist(),str(np.random.get_state()[1].tolist()),random.getstate()

class Noted:
    "What a search may have changed, by name"
    def __init__(self, model, more): self.model,self.more,self.before = model,more,self.now(model, more)
    def now(self, model, more):
        return {'weights': [o.clone() for o in model.parameters()], 'buffers': [o.clone() for o in model.buffers()], 'gradients': [o.grad for o in
                model.parameters()], 'mode': model.training, 'random numbers': drawn(), **{nm: f() for nm,f in more.items()}}
    def changed(self):
        after = self.now(self.model, self.more)
        def same(a, b): return all(torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x is y for x,y in zip(a, b))
        return [nm for nm,v in self.before.items() if not (same(v, after[nm]) if nm in ('weights','buffers','gradients') else v==after[nm])]

def ours(limit, start=None):
    x,y = data()
    learn = Learner(DataLoaders(*(DataLoader(list(zip(x, y)), bs=bs_now, num_workers=0) for _ in range(2)), device='cpu'), Limited(limit),
                    loss_func=nn.CrossEntropyLoss(), opt_func=SGD)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    opt = lambda: str([(sorted(s), [v.tolist() if isinstance(v, torch.Tensor) else v for v in s.values()]) for s in learn.opt.state.values()])
    noted = Noted(learn.model, {'optimizer': opt, 'batch size': lambda: learn.dls.train.bs, 'callbacks': lambda: [*map(str, learn.cbs)]})
    taken[:] = 0,0
    with learn.no_bar(): res = learn.max_bs_find(start=start, margin=0)
    return res,*taken,noted.changed()

def accelerate(limit, start):
    from accelerate.utils import find_executable_batch_size
    x,y = data()
    before,taken[:] = drawn(),(0,0)
    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size):
        model = Limited(limit)
        opt,it = torch.optim.SGD(model.parameters(), lr=1e-3),iter(TorchDataLoader(TensorDataset(x, y), batch_size))
        for a,b in itertools.islice(itertools.cycle(it), 3): nn.functional.cross_entropy(model(a), b).backward(); opt.step(); opt.zero_grad()
        return batch_size
    return train(),*taken,['random numbers'] if drawn()!=before else []

def lightning(limit, mode):
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner
    x,y = data()
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model,self.batch_size = Limited(limit),bs_now
        def train_dataloader(self): return TorchDataLoader(TensorDataset(x, y), self.batch_size)
        def training_step(self, batch, i): return nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=1e-3)
    module,trainer = Module(),trainer_of(1)
    noted = Noted(module.model, {'batch size': lambda: module.batch_size, 'callbacks': lambda: [*map(str, trainer.callbacks)]})
    taken[:] = 0,0
    res = Tuner(trainer).scale_batch_size(module, mode=mode)
    return res,*taken,noted.changed()

searches = {'max_bs_find()': ours, f'max_bs_find(start={bs_now})': partial(ours, start=bs_now), "accelerate's, from 128": partial(accelerate, start=128),
            f"accelerate's, from {n_items}": partial(accelerate, start=n_items), "Lightning's, power": partial(lightning, mode='power'),
            "Lightning's, binsearch": partial(lightning, mode='binsearch')}

# The finders' time

def convnet():
    return nn.Sequential(nn.Conv2d(1,8,5,2,2), nn.ReLU(), nn.Conv2d(8,16,3,2,1), nn.ReLU(), nn.Flatten(), nn.Linear(784,64), nn.ReLU(), nn.Linear(64,10))

def mnist(folder):
    (x,y),(tx,ty) = ((standardized(x), y.long()) for x,y in digits28(folder))
    return Learner(DataLoaders(TensorLoader(x, y, 64, True), TensorLoader(tx, ty, 64), device='cpu'), convnet(), loss_func=nn.CrossEntropyLoss(),
                   opt_func=partial(SGD, mom=0.9), lr=0.02)

class Rows(TabularModel):
    "fastai's, of rows that hold categories and numbers side by side"
    def forward(self, x): return super().forward(x[:,:22].long(), x[:,22:])[:,0]

def tabular(folder):
    "A model of the size of fast.ai's Rossmann lesson"
    torch.manual_seed(0)
    sizes,n = [1116,8,4,13,32,3,26,27,5,4,4,24,9,13,53,22,7,7,4,4,9,9],60_000
    x = torch.cat([torch.stack([torch.randint(s, (n,)) for s in sizes], 1).float(), torch.randn(n, 16)], 1)
    y = x[:,22:26].sum(1) + 0.1*x[:,1] + torch.randn(n)
    return Learner(DataLoaders(TensorLoader(x, y, 64, True), TensorLoader(x[:640], y[:640], 64), device='cpu'),
                   Rows([(s,min(600, round(1.6*s**0.56))) for s in sizes], 16, 1, [1000,500], ps=[0.001,0.01], embed_p=0.04), loss_func=nn.MSELoss(),
                   opt_func=Adam, lr=1e-3)

def run(args, table):
    torch.set_num_threads(1)
    more = versions()
    for (how,f),limit in itertools.product(searches.items(), limits):
        if table.has(part='search', how=how, limit=limit): continue
        res,n,items,changed = f(limit)
        table.add(part='search', how=how, limit=limit, answer=res, forward=n, items=items, changed=', '.join(changed) or 'nothing', **more)
    for nm,make in (('convnet on MNIST',mnist),('tabular model',tabular)):
        if table.has(part='finders', how=nm): continue
        learn = make(args.data)
        with learn.no_bar(), learn.no_logging():
            pairs = in_pairs(*(clocked(partial(f, show_plot=False)) for f in (learn.bs_find,learn.lr_find)), 1 if args.quick else 7)
        m,low,high = middle([a/b for a,b in pairs])
        table.add(part='finders', how=nm, ratio=m, low=low, high=high, pairs=len(pairs), **more)
