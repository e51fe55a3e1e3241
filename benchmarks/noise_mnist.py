"""The gradient noise scale of MNIST along three epochs: some tens of items at first, many hundreds later.

    python benchmarks/noise_mnist.py --full --data FOLDER     # FOLDER/mnist/*.gz; some minutes

An article on a batch size finder quotes McCandlish et al. 2018 with a noise scale of about 50 at first and about 900 in the end."""
from functools import partial

import numpy as np
import pandas as pd
from torch import nn
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.torch_core import set_seed
from fastai_bs.all import GradAccum, NoiseScale
from fastai_bs.noise.estimator import pooled

from frame import TensorLoader, digits28, main, md_table, measured, standardized

micro_bs,n_acc,n_epoch,lr = 32,2,3,0.05 # A window is a usual batch of 64
n_first = 50 # Micro-batches
stretches = {f'first {n_first} micro-batches': None, 'first tenth of epoch 1': (0,0.1), 'rest of epoch 1': (0.1,1), 'epoch 2': (1,2), 'epoch 3': (2,3)}
edges = [0, 0.025, 0.05, 0.1, 0.2, *np.arange(0.4, n_epoch+0.1, 0.2)] # Of the curve, in epochs

# What the network sees: pixels p from 0 to 255
inputs = {'(p/255 - 0.1307)/0.3081': (0.1307,0.3081), 'p/255': (0,1)}

def convnet():
    return nn.Sequential(nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(),
                         nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))

def train(data, mean, std, seed):
    "The windows of a training, with the epoch at which each begins, and the test accuracy"
    set_seed(seed)
    (x,y),(tx,ty) = [(standardized(x, mean, std), y.long()) for x,y in data]
    dls = DataLoaders(TensorLoader(x, y, micro_bs, shuffle=True), TensorLoader(tx, ty, 1000), device='cpu')
    noise = NoiseScale(every=1)
    learn = Learner(dls, convnet(), loss_func=nn.CrossEntropyLoss(), opt_func=partial(SGD, mom=0.9), metrics=accuracy, cbs=[GradAccum(n_acc), noise])
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, lr)
    df = noise.df
    return df.assign(epoch=(df.step-1)/-(-len(dls.train)//n_acc)), learn.recorder.values[-1][2] # After the two losses

def summed_up(df):
    "Weighted means of the windows, their ratio and its Fieller interval"
    p = pooled(df)
    low,high = p.interval()
    return dict(windows=p.n_windows, tr_sigma=p.tr_sigma, g_sq=p.g_sq, noise_scale=p.noise_scale, low=low, high=high)

def summary(df):
    "A row per stretch, and one per piece of the curve"
    between = lambda a,b: df[(df.epoch>=a) & (df.epoch<b)]
    rows = [dict(stretch=nm, **summed_up(between(*o) if o else df[df.step<=n_first//n_acc])) for nm,o in stretches.items()]
    return pd.DataFrame(rows + [dict(stretch=f'{a:.3g} to {b:.3g}', **summed_up(between(a, b))) for a,b in zip(edges, edges[1:])])

def draw(df):
    "The noise scale of each piece of the curve, a panel per input and a line per seed"
    import matplotlib.pyplot as plt
    df = df.assign(seed=df.seed.astype(str))
    x = np.convolve(edges, [0.5,0.5], 'valid')
    fig,axs = plt.subplots(1, len(inputs), figsize=(11,4), sharey=True)
    for ax,inp in zip(axs,inputs):
        for i,(seed,o) in enumerate(df[(df.input==inp) & ~df.stretch.isin(list(stretches))].groupby('seed')):
            ok = np.isfinite(o.noise_scale.values)
            style = dict(lw=2, marker='.') if seed=='all' else dict(lw=0.8)
            ax.plot(x[ok], o.noise_scale[ok], color=f'C{i}', label='all seeds, with interval' if seed=='all' else f'seed {seed}', **style)
            if seed=='all': ax.fill_between(x, o.low.clip(lower=1), o.high.clip(upper=1e5), color=f'C{i}', alpha=0.25, lw=0)
        for v in (50,900): ax.axhline(v, color='grey', ls='--', lw=1)
        ax.set(yscale='log', xlabel='epochs', ylim=(5,2e4), title=f'input: {inp}')
        ax.yaxis.set_major_formatter('{x:.0f}')
        ax.legend(loc='lower right')
    axs[0].set_ylabel('gradient noise scale (items)')
    fig.tight_layout()
    return fig

def run(args, t):
    data = digits28(args.data)
    if args.quick: data[0] = [o[:12_800] for o in data[0]]
    seeds = args.seeds or range(3)
    for inp,(mean,std) in inputs.items():
        if t.has(input=inp, seed='all'): continue
        runs,accs = zip(*(train(data, mean, std, seed) for seed in seeds))
        for seed,df,acc in [*zip(seeds, runs, accs), ('all', pd.concat(runs), np.mean(accs))]: # The windows of all seeds say more than a mean of ratios
            t.add_all(summary(df).assign(input=inp, seed=seed, accuracy=acc).to_dict('records'))

def page(df):
    rows = []
    for (inp,seed),o in df.groupby(['input','seed'], sort=False): # As they were run
        r = o.set_index('stretch').loc[list(stretches)]
        rows.append((inp, seed, *(f'{n:.0f} [{low:.0f}, {high:.0f}]' for n,low,high in zip(r.noise_scale, r.low, r.high)), f'{100*o.accuracy.iloc[0]:.2f}'))
    return f"""# {__doc__.splitlines()[0]}

A convnet of two convolutions and two linear layers (52,266 parameters), SGD with momentum 0.9 at {lr}, batches of {micro_bs*n_acc} as {n_acc} micro-batches of
{micro_bs}, measured by `NoiseScale` while it trains. Each entry pools all windows of its stretch with equal weights and has its 95% interval (Fieller's);
'all' pools the windows of the seeds. The weights move meanwhile, so it is a mean over the stretch, in which large gradients weigh most. An upper end of inf
says that these windows do not bound it. p is a pixel, 0 to 255; how it is scaled matters in the first steps, in which the gradient of p/255 is small until the
network begins to learn. An article on a batch size finder quotes McCandlish et al. 2018 with a noise scale of about 50 at first and about 900 in the end.
{measured(df)} `results/noise_mnist.csv` has the curve too, `noise_mnist.py` is the program.

{md_table(['input','seed',*stretches,'test accuracy, %'], rows)}

![The noise scale along the training; dashed: 50 and 900, the values quoted](noise_mnist.png)"""

if __name__=='__main__': main(__doc__, ['noise_mnist'], run, page, draw)
