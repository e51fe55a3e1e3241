"""Goyal et al. 2017 at the size that fits a laptop: one learning rate, tuned for 64 items, and batches 8 and 32 times as large.

    python benchmarks/goyal.py --full --data FOLDER     # FOLDER/fashion_mnist/*.gz, the four files of github.com/zalandoresearch/fashion-mnist

    python benchmarks/goyal.py --full --data FOLDER --parts steps   # A rate that goes down in steps, after a warmup of 5 epochs

More than an hour on one core, and another one for the steps; several can share the work: `--seeds 0 1` here, `--seeds 2 3 4` there."""
import time
from functools import partial
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler, SchedCos, SchedNo, combine_scheds
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastai.torch_core import set_seed
from fastai_bs.all import GradAccum, NoiseScale, ScaledLR, adascale_gain

from frame import TensorLoader, arguments, digits28, main, md_table, measured

n_epoch,micro_bs,base_lr = 8,64,0.1
linear,no_warmup = {},dict(warmup_epochs=0) # Warmup as by default, over a tenth of the 8 epochs
# Arm: batch size as a multiple of 64, what is done about the learning rate, and the one at batch 64
arms = {'base': (1, None, base_lr), **{f'{k}x {nm}': (k, how, base_lr) for k in (8,32) for nm,how in (
            ('unscaled', None), ('linear, no warmup', no_warmup), ('linear, warmup', linear), ('gain, warmup', dict(rule=adascale_gain)))},
        **{f'8x linear, {nm}, 4 times the rate': (8, how, 4*base_lr) for nm,how in (('no warmup', no_warmup), ('warmup', linear))}}

# As the paper has it, in a fifth of its 90 epochs: a tenth of the rate from 1/3, 2/3 and 8/9 on, and a warmup of 5 epochs
stepped = 18
step_parts = 1/3,1/3,2/9,1/9
step_arms = {'base': (1, None), '8x unscaled': (8, None), '8x linear, no warmup': (8, no_warmup), '8x linear, warmup of 5 epochs': (8, dict(warmup_epochs=5))}

def cosine(lr): return SchedCos(lr, 0)
def steps(lr): return combine_scheds(step_parts, [SchedNo(o, o) for o in (lr,lr/10,lr/100,lr/1000)])

class Block(nn.Module):
    "Basic block of a ResNet; its last BatchNorm starts at 0, as in Goyal et al. 2017, section 5.1"
    def __init__(self, ni, nf, stride):
        super().__init__()
        conv = partial(nn.Conv2d, bias=False)
        self.path = nn.Sequential(conv(ni, nf, 3, stride, 1), nn.BatchNorm2d(nf), nn.ReLU(), conv(nf, nf, 3, 1, 1), nn.BatchNorm2d(nf))
        self.short = nn.Sequential(conv(ni, nf, 1, stride), nn.BatchNorm2d(nf))
        nn.init.zeros_(self.path[-1].weight)
    def forward(self, x): return F.relu(self.path(x) + self.short(x))

def resnet(w=8):
    net = nn.Sequential(nn.Conv2d(1, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(), Block(w, 2*w, 2), Block(2*w, 4*w, 2),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4*w, 10))
    return net.to(memory_format=torch.channels_last)

def fashion_mnist(data):
    "Images of 14x14 pixels, mean 0 and standard deviation 1, and labels: training set, test set"
    (x,y),(tx,ty) = digits28(data, 'fashion_mnist')
    x,tx = [F.avg_pool2d(o[:,None].float(), 2) for o in (x,tx)]
    mean,std = x.mean(),x.std()
    return [(((o-mean)/std).contiguous(memory_format=torch.channels_last), t.long()) for o,t in ((x,y),(tx,ty))]

def error(pred, targ): return 100*(pred.argmax(1)!=targ).float().mean()

class Rows(Callback):
    "A row per epoch"
    def before_fit(self): self.rows,self.start = [],time.time()
    def after_epoch(self):
        scaled,noise = getattr(self.learn, 'scaled_lr', None),getattr(self.learn, 'noise_scale', None)
        train_loss,_,err = self.learn.recorder.log[1:4]
        self.rows.append(dict(epoch=self.epoch+1, train_loss=train_loss, error=err, factor=scaled.factor if scaled else 1.,
                              noise_scale=noise.noise_scale if noise else np.nan, seconds=time.time()-self.start))

def train(data, k, how, lr, seed, n_epoch=n_epoch, sched=cosine):
    set_seed(seed)
    dls = DataLoaders(TensorLoader(*data[0], micro_bs, shuffle=True), TensorLoader(*data[1], 1000), device='cpu')
    noise = NoiseScale(beta=0.9, every=1) if how and how.get('rule') else None
    cbs = [GradAccum(k)]*(k>1) + [noise]*(noise is not None) + ([ScaledLR(micro_bs, noise_scale=noise, **how)] if how is not None else [])
    learn = Learner(dls, resnet(), loss_func=nn.CrossEntropyLoss(), opt_func=partial(SGD, mom=0.9), wd=1e-4, metrics=error, cbs=[*cbs, Rows()])
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, lr, cbs=ParamScheduler({'lr': sched(lr)}))
    return learn.rows.rows

def interval(x):
    "95% interval of the mean of paired differences, Student's t"
    from scipy import stats
    return stats.t.ppf(0.975, len(x)-1)*np.std(x, ddof=1)/len(x)**0.5 if len(x)>1 else np.nan

def last_errors(df):
    "Test error after the last epoch: a row per seed, a column per arm"
    return df[df.epoch==df.epoch.max()].pivot(index='seed', columns='arm', values='error')

def difference(a, b):
    "Mean difference of runs of the same seed, with its 95% interval"
    d = (a-b).dropna()
    return f'{d.mean():+.2f} ± {interval(d):.2f}'

def table(df):
    "Test error after the last epoch, and its differences to other arms of the same seed"
    last,factor = last_errors(df),df[df.epoch==n_epoch].groupby('arm').factor.mean()
    minus = lambda arm,other: difference(last[arm], last[other]) if arm!=other else ''
    rows = [(arm,f'{lr} x {factor[arm]:.3g}',f'{last[arm].mean():.2f}',minus(arm, 'base'),minus(arm, f'{k}x unscaled') if k>1 else '',last[arm].count())
            for arm,(k,_,lr) in arms.items()]
    return md_table(['','learning rate','test error, %','minus base, points','minus unscaled, points','seeds'], rows)

def pairs(df):
    "Warmup against none, and the gain against the linear rule"
    last = last_errors(df)
    warm = [(f'{k}x linear{o}: warmup minus none',f'{k}x linear, warmup{o}',f'{k}x linear, no warmup{o}') for k,o in ((8,''),(8,', 4 times the rate'),(32,''))]
    gain = [(f'{k}x with warmup: gain minus linear',f'{k}x gain, warmup',f'{k}x linear, warmup') for k in (8,32)]
    return md_table(['','points of test error'], [(nm,difference(last[a], last[b])) for nm,a,b in warm+gain])

def plot(df):
    "Mean test error along the epochs, a panel per batch size"
    import matplotlib.pyplot as plt
    fig,axs = plt.subplots(1, 2, figsize=(11,4), sharey=True)
    for ax,k in zip(axs, (8,32)):
        shown = ['base', *(o for o in arms if o.startswith(f'{k}x ') and 'times' not in o)]
        for arm,color,ls in zip(shown, ('black','C7','C1','C0','C2'), ('-',':','--','-','-.')):
            err = df[df.arm==arm].groupby('epoch').error.agg(['mean','min','max'])
            ax.plot(err.index, err['mean'], color=color, ls=ls, label=arm.replace(f'{k}x ', ''))
            ax.fill_between(err.index, err['min'], err['max'], color=color, alpha=0.12, lw=0)
        ax.set(title=f'batch {k*micro_bs}, base {micro_bs}', xlabel='epochs', yscale='log', yticks=[10,12,15,20,30,50,90])
        ax.yaxis.set_major_formatter('{x:.0f}')
        ax.minorticks_off()
        ax.legend()
    axs[0].set_ylabel('test error, %')
    fig.tight_layout()
    return fig

def run(args, t, t_steps):
    data = fashion_mnist(args.data)
    if args.quick: data = [[o[:n] for o in d] for d,n in zip(data, (4000,1000))]
    def _run(t, seeds, arms, *more):
        for seed in args.seeds or range(2 if args.quick else seeds):
            for arm,(k,how,lr) in arms.items():
                if not t.has(arm=arm, seed=seed): t.add_all([dict(arm=arm, seed=seed, **o) for o in train(data, k, how, lr, seed, *more)])
    if 'cosine' in args.parts: _run(t, 5, arms)
    if 'steps' in args.parts: _run(t_steps, 5, {nm: (*o,base_lr) for nm,o in step_arms.items()}, 4 if args.quick else stepped, steps)

def steps_section(df):
    if not len(df): return ''
    last = last_errors(df)
    minus = lambda arm,other: difference(last[arm], last[other]) if arm!=other else ''
    rows = [(arm,f'{base_lr} x {df[df.arm==arm].factor.max():.3g}',f'{last[arm].mean():.2f}',minus(arm, 'base'),minus(arm, '8x unscaled') if k>1 else '',
             last[arm].count()) for arm,(k,_) in step_arms.items() if arm in last]
    first,warmup = df.epoch.max()//3,step_arms['8x linear, warmup of 5 epochs'][1]['warmup_epochs']
    early = df[df.epoch==first].pivot(index='seed', columns='arm', values='error')
    ends = [(arm,', '.join(f'{o:.1f}' for o in early[arm])) for arm in step_arms if arm in early]
    return f"""

## In steps, with a warmup of 5 epochs

The schedule of the paper in a fifth of its epochs, {df.epoch.max()}: a tenth of the rate from a third of them on, and again from two thirds and eight ninths;
its warmup of 5 epochs is most of the first stretch here. Else as above. {measured(df)} `results/goyal_steps.csv` has a line per epoch.

{md_table(['','learning rate','test error, %','minus base, points','minus unscaled, points','seeds'], rows)}

At the end of the first stretch, {first} epochs, of which the arm with a warmup spends {warmup} on the way up to the full rate, test error in %, by seed:

{md_table(['','test error, %'], ends)}"""

def page(df, df_steps):
    noise = df[df.noise_scale.notna()].pivot_table(index='arm', columns='epoch', values='noise_scale', aggfunc='median')
    return f"""# {__doc__.splitlines()[0]}

A ResNet of 5 convolutions with BatchNorm on Fashion-MNIST at 14x14 pixels, 60,000 items, 8 epochs of SGD with momentum 0.9 and weight decay
1e-4, the learning rate going down by a cosine; micro-batches of 64 in all arms (so BatchNorm is the same), larger batches by `GradAccum`. Test error on the
10,000 test images after the last epoch; differences are means over runs of the same seed, ± half of their 95% interval (Student's t). The base
rate (0.1, not 0.05), the cosine (not steps) and the network were chosen with one seed and this test set, before the rest was run; of four and two times the
rate, four was taken further.
{measured(df)} `results/goyal.csv` has a line per epoch, `goyal.py` is the program.

{table(df)}

{pairs(df)}

Noise scale at the end of each epoch, medians, in items:

{md_table(['',*(f'epoch {e}' for e in noise)], [(nm,*(f'{v:.0f}' for v in o)) for nm,o in noise.iterrows()])}

![Test error along the epochs](goyal.png){steps_section(df_steps)}"""

if __name__=='__main__': main(__doc__, ['goyal','goyal_steps'], run, page, lambda df,_: plot(df), arguments(__doc__, parts=('cosine','steps')))
