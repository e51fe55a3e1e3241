"""The noise scale beside its peers: error at the same data, time and memory. `peers.py` runs it.

Stacking, as earlier finders for fastai do, is written anew: the flat gradients of `n_acc` micro-batches are kept and averaged; |G|² and tr(Σ) follow from the
squared norms of the average and of the small gradients (of the last one only, or of all), their exponential averages are divided. Per-item gradients come from
`torch.func`, of each window their mean and spread. The weights stay where they are, so the gradients of all items give the exact answer."""
import itertools, math
from functools import partial

import numpy as np
import torch
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import nn
from torch.func import functional_call, grad, vmap

from fastai_bs.all import GradAccum, NoiseScale
from frame import Bare, TensorLoader, clocked, in_pairs, middle, peak

bs,n_acc,n_items,beta = 8,20,6400,0.999 # Of the small run; what is left of the average at each window, as the article has it

def net(n_in, *hid): return nn.Sequential(*itertools.chain(*((nn.Linear(a, b), nn.Tanh()) for a,b in zip((n_in,*hid), hid))), nn.Linear(hid[-1], 10))

def classes(n, n_in, noise=1.):
    "Ten of them, in part by chance"
    x = torch.randn(n, n_in)
    return x,(x[:,:10]+noise*torch.randn(n, 10)).argmax(1)

def item_grads(model, x, y):
    "Of each parameter, with an item in each row; by `torch.func`"
    params = {nm: p.detach() for nm,p in model.named_parameters()}
    one = lambda ps,a,b: nn.functional.cross_entropy(functional_call(model, ps, (a[None],)), b[None])
    return [*vmap(grad(one), (None,0,0))(params, x, y).values()]

# The estimates, each of one epoch in a given order

def of_moments(small, big, b, B): return (small-big)/(1/b-1/B),(B*big-b*small)/(B-b) # `(tr_sigma, g_sq)`

def averaged(moments):
    "Exponential averages from 0 on: what they lack is the same in both"
    tr = g_sq = 0.
    for t,g in moments: tr,g_sq = beta*tr+(1-beta)*t,beta*g_sq+(1-beta)*g
    return tr/g_sq

def stacked(rows, last_only):
    "From the gradients of items in their order"
    res = []
    for w in rows.split(bs*n_acc):
        gs = w.unflatten(0, (n_acc,bs)).mean(1)
        sq = gs.square().sum(1)
        res.append([o.item() for o in of_moments(sq[-1] if last_only else sq.mean(), gs.mean(0).square().sum(), bs, bs*n_acc)])
    return averaged(res)

def per_item(rows, n=bs*n_acc):
    "From the items of each window"
    m = [of_moments(w.square().sum(1).mean(), w.mean(0).square().sum(), 1, len(w)) for w in rows.split(n)]
    return (sum(t for t,_ in m)/sum(g for _,g in m)).item()

def learner(model, x, y, cbs):
    learn = Learner(DataLoaders(TensorLoader(x, y, bs), TensorLoader(x[:bs], y[:bs], bs), device='cpu'), model, loss_func=nn.CrossEntropyLoss(), opt_func=SGD,
                    cbs=cbs)
    learn._do_epoch_validate = lambda *args, **kwargs: None
    return learn

def fit(learn):
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.)

def ours(model, x, y):
    noise = NoiseScale(every=1)
    fit(learner(model, x, y, [GradAccum(n_acc),noise]))
    return noise.noise_scale,averaged(zip(noise.df.tr_sigma, noise.df.g_sq))

def problem():
    "Model, items, their gradients in double precision and the exact noise scale of drawing from them without replacement"
    torch.manual_seed(0)
    x,y = classes(n_items, 20)
    model = net(20, 24)
    rows = torch.cat([g.flatten(1) for g in item_grads(model.double(), x.double(), y)], 1)
    s2,g2 = rows.var(0).sum(),rows.mean(0).square().sum()
    return model.float(),x,y,rows,(s2/(g2-s2/n_items)).item()

def errors(n_reps, table):
    model,x,y,rows,exact = problem()
    for seed in range(n_reps):
        if table.has(part='error', seed=seed): continue
        idx = torch.randperm(n_items, generator=torch.Generator().manual_seed(seed))
        r = rows[idx]
        by_default,slow = ours(model, x[idx], y[idx])
        vals = {'NoiseScale': by_default, 'NoiseScale, beta as in stacking': slow, 'stacked, the last norm': stacked(r, True),
                'stacked, all norms': stacked(r, False),
                'per item, same items': per_item(r), 'per item, as many gradients': per_item(r[:n_items//bs])}
        for how,v in vals.items(): table.add(part='error', how=how, seed=seed, noise_scale=v, exact=exact)

# Time and memory

class Stacks(Callback):
    "As earlier finders do: the flat gradients of a window are kept, and their mean is the step's"
    order,run_valid = Bare.order,False
    def __init__(self, n): self.n = n
    def before_fit(self): self.held = []
    def before_step(self):
        params = list(self.learn.model.parameters())
        self.held.append(torch.cat([p.grad.flatten() for p in params]))
        if len(self.held)<self.n:
            self.learn.opt.zero_grad()
            raise CancelBatchException
        gs = torch.stack(self.held)
        g = gs.mean(0)
        of_moments((gs.norm(dim=1)**2).mean().item(), g.norm().item()**2, bs, self.n*bs)
        for p,o in zip(params, g.split([p.numel() for p in params])): p.grad = o.view_as(p).clone() # fastai detaches it in place, and a view cannot be
        self.held = []

class PerItem(Callback):
    "The gradient of each item, in place of the backward pass; their mean is the step's"
    order,run_valid = Bare.order,False
    def __init__(self, n): self.n = n
    def before_fit(self): self.seen,self.sq,self.sums = 0,0.,None
    def before_backward(self):
        gs = item_grads(self.learn.model, *self.learn.xb, *self.learn.yb)
        self.sq = self.sq+sum(g.norm()**2 for g in gs)
        self.sums = [g.sum(0) for g in gs] if self.sums is None else [o.add_(g.sum(0)) for o,g in zip(self.sums, gs)]
        raise CancelBackwardException
    def before_step(self):
        self.seen += 1
        if self.seen<self.n: raise CancelBatchException
        n = self.n*bs
        of_moments(self.sq.item()/n, sum(o.norm().item()**2 for o in self.sums)/n**2, 1, n)
        for p,o in zip(self.learn.model.parameters(), self.sums): p.grad = o/n
        self.before_fit()

tools = {'NoiseScale': lambda n: [GradAccum(n),NoiseScale(every=1)], 'stacked': lambda n: [Stacks(n)], 'per item': lambda n: [PerItem(n)]}

def cost(n, how, n_windows):
    "`(with it, without)`, functions of no argument"
    torch.manual_seed(0)
    x,y = classes(bs*n*n_windows, 784)
    return tuple(partial(fit, learner(net(784, 512, 256), x, y, cbs)) for cbs in (tools[how](n),[Bare(n)]))

def run(args, table):
    torch.set_num_threads(1)
    errors(5 if args.quick else 120, table)
    n_params = sum(p.numel() for p in net(784, 512, 256).parameters())
    for n,how in itertools.product((5,20,80), tools):
        if table.has(part='cost', how=how, n_acc=n): continue
        pairs = in_pairs(*map(clocked, cost(n, how, max(1, 160//n))), 3 if args.quick else 9)
        m,low,high = middle([a/b for a,b in pairs])
        extra = np.subtract(*map(peak, cost(n, how, 2)))/(4*n_params)
        table.add(part='cost', how=how, n_acc=n, ratio=m, low=low, high=high, memory=float(extra), pairs=len(pairs))

def summary(df):
    "By estimate: bias and root mean square of the error of its logarithm, with intervals of 95%; values that are not positive are counted and left out"
    res = {}
    for how,o in df[df.part=='error'].groupby('how', sort=False):
        e = np.log(o.noise_scale[(o.noise_scale>0) & np.isfinite(o.noise_scale)]/o.exact.iloc[0])
        rng = np.random.default_rng(0)
        boot = np.sqrt((rng.choice(e.to_numpy(), (2000,len(e)))**2).mean(1))
        res[how] = dict(bias=e.mean(), bias_half=1.96*e.std()/math.sqrt(len(e)), rms=math.sqrt((e**2).mean()), low=np.quantile(boot, 0.025),
                        high=np.quantile(boot, 0.975), n=len(o), bad=len(o)-len(e))
    return res
