"""Diversity bounds the batch size: 10,000 copies of a few pictures, and how the noise scale grows with how many they are.

    python benchmarks/diversity.py --full --data DIR     # DIR/mnist; minutes

With copies of one picture every batch has the same gradient, so a larger one only costs more: the noise scale is 0, and the plan must say so. For each number
of different pictures the noise scale at fixed weights, measured from batches by `NoiseScale` and exact from the gradient of each picture, and what `bs_find`
plans for twenty epochs."""
import time
from unittest.mock import patch
import numpy as np
import torch
import matplotlib.pyplot as plt
from torch import nn
from torch.func import functional_call, grad, vmap
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastai.torch_core import set_seed
from fastai_bs.all import GradAccum, NoiseScale

from frame import arguments, digits28, main, md_table, measured, standardized

n_items,bs,n_acc,lr = 10_000,32,8,0.1
plan_lr,plan_epochs = lr/10,20

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(196,32), nn.ReLU(), nn.Linear(32,10))

def pictures(data):
    x,y = digits28(data)[0]
    return nn.functional.avg_pool2d(standardized(x[:n_items]), 2),y[:n_items].long()

def learner(x, y, n_distinct, seed, cbs=()):
    "`n_items` of the first `n_distinct` pictures, over and over; the model has seen an epoch of all"
    set_seed(seed)
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr)
    for i in torch.randperm(len(x)).split(64):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x[i]), y[i]).backward()
        opt.step()
    which = torch.arange(n_items)%n_distinct
    dls = DataLoaders.from_dsets([(x[i],y[i]) for i in which.tolist()], [(x[0],y[0])], bs=bs, shuffle=True, num_workers=0, device='cpu')
    return Learner(dls, model, nn.CrossEntropyLoss(), opt_func=SGD, cbs=list(cbs))

def exact(model, x, y):
    "tr(Sigma) over |G|^2 of these pictures, each as likely as any other: McCandlish et al. 2018, equation 2.8"
    params = {k: p.detach() for k,p in model.named_parameters()}
    def _loss(params, x, y): return nn.functional.cross_entropy(functional_call(model, params, x[None]), y[None])
    g = torch.cat([o.flatten(1) for o in vmap(grad(_loss), in_dims=(None,0,0))(params, x, y).values()], 1).double()
    mean = g.mean(0)
    return ((g-mean).square().sum(1).mean()/mean.square().sum()).item()

def run(args, t):
    x,y = pictures(args.data)
    sizes = [1,16,256] if args.quick else [1,2,4,8,16,32,64,128,256,512,1024,2048,4096,10_000]
    for seed in args.seeds or ([0] if args.quick else [0,1,2]):
        for n in sizes:
            if t.has(distinct=n, seed=seed): continue
            learn = learner(x, y, n, seed, [GradAccum(n_acc),NoiseScale(beta=0.999, every=1)])
            with learn.no_bar(), learn.no_logging(): learn.fit(2 if args.quick else 10, 0.)
            noise = learn.noise_scale
            truth = exact(learn.model, x[:n], y[:n])
            fresh = learner(x, y, n, seed)
            with fresh.no_bar(), patch('time.perf_counter', time.process_time): # Other work may run
                plan = fresh.bs_find(plan_lr, n_epoch=plan_epochs, show_plot=False)
            t.add(distinct=n, seed=seed, exact=truth, noise_scale=noise.noise_scale, low=noise.ci[0], high=noise.ci[1], planned_noise_scale=plan.facts.noise,
                  plan_bs=plan.bs, headline=' '.join(repr(plan).split()).partition('. ')[0])

def cell(o): return f'{o.noise_scale:.3g} [{o.low:.3g}, {o.high:.3g}]'

def page(df):
    def _each(o): return ', '.join(f"{float(f'{v:.3g}'):g}" for v in o)
    rows = [[f'{n:,}',_each(of.exact),'; '.join(map(cell, of.itertuples())),_each(of.planned_noise_scale),', '.join(map(str, of.plan_bs))]
            for n,of in df.groupby('distinct')]
    one = df[df.distinct==1]
    held = ((df.low<=df.exact) & (df.exact<=df.high) | (df.exact<1e-9) & (df.noise_scale.abs()<1e-6)).mean()
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}',
        f"MNIST at 14 x 14 pixels, an MLP of {sum(p.numel() for p in mlp().parameters()):,} parameters after an epoch of 10,000 different ones. Measured: ten "
        f"epochs of the copies at fixed weights, steps of {n_acc} x {bs}, with intervals of 95%, which hold the exact value in {held:.0%} of {len(df)} runs. "
        f"Planned by `bs_find({plan_lr:g}, n_epoch={plan_epochs})`, steps timed by processor time: a plan goes by the noise scale along a mock training, where "
        "the rate has cooled down, and not by the one at the weights before it. "
        f"Seeds {', '.join(map(str, sorted(df.seed.unique())))}, in this order; today's batch is {bs}.",
        md_table(['different pictures','exact noise scale, items','measured','along the mock training, for the plan','plan.bs'], rows),
        "Of copies of one picture the plans say:", '\n'.join(f'* seed {o.seed}: "{o.headline}."' for o in one.itertuples()), measured(df)])

def draw(df):
    fig,ax = plt.subplots(figsize=(6,3.6), layout='constrained')
    some = df[df.distinct>1]
    for i,(seed,o) in enumerate(some.groupby('seed')):
        beyond = np.clip([o.noise_scale-o.low,o.high-o.noise_scale], 0, 20*o.noise_scale)
        ax.plot(o.distinct, o.exact, color=f'C{i}', lw=1, label=f'exact, seed {seed}')
        ax.errorbar(o.distinct, o.noise_scale, beyond, fmt='o', ms=3, lw=1, color=f'C{i}', label=None if i else 'measured, its interval of 95%')
    ax.set(xscale='log', yscale='log', xlabel='different pictures among 10,000', ylabel='noise scale, items')
    ax.legend(frameon=False)
    return fig

if __name__=='__main__': main(__doc__, ['diversity'], run, page, draw, parser=arguments(__doc__))
