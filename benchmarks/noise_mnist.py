"""The gradient noise scale of MNIST along three epochs: some tens of items at first, many hundreds later.

    python benchmarks/noise_mnist.py --data FOLDER     # FOLDER/mnist/*.gz
    python benchmarks/noise_mnist.py                   # noise_mnist.md and its picture from what has been run

An article on a batch size finder quotes McCandlish et al. 2018 with a noise scale of about 50 at first and about 900 in the end."""
import argparse, platform
from datetime import date
from functools import partial
from pathlib import Path

import fastai
import numpy as np
import pandas as pd
import torch
from torch import nn
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.torch_core import set_seed
from fastai_bs import __version__
from fastai_bs.all import GradAccum, NoiseScale
from fastai_bs.estimator import pooled

from common import TensorLoader, read_idx

here = Path(__file__).parent
micro_bs,n_acc,n_epoch,lr = 32,2,3,0.05 # A window is a usual batch of 64
n_first = 50 # Micro-batches
stretches = {f'first {n_first} micro-batches': None, 'first tenth of epoch 1': (0,0.1), 'rest of epoch 1': (0.1,1), 'epoch 2': (1,2), 'epoch 3': (2,3)}
edges = [0, 0.025, 0.05, 0.1, 0.2, *np.arange(0.4, n_epoch+0.1, 0.2)] # Of the curve, in epochs

# What the network sees: pixels p from 0 to 255
inputs = {'(p/255 - 0.1307)/0.3081': (0.1307,0.3081), 'p/255': (0,1)}

def mnist(folder):
    read = lambda nm,what: read_idx(folder/f'{nm}-{what}-ubyte.gz')
    return [(read(o, 'images-idx3')[:,None].float()/255, read(o, 'labels-idx1').long()) for o in ('train','t10k')]

def convnet():
    return nn.Sequential(nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(),
                         nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))

def run(train, test, mean, std, seed):
    "The windows of a training, with the epoch at which each begins, and the test accuracy"
    set_seed(seed)
    (x,y),(tx,ty) = [((x-mean)/std, y) for x,y in (train,test)]
    dls = DataLoaders(TensorLoader(x, y, micro_bs, shuffle=True), TensorLoader(tx, ty, 1000), device='cpu')
    noise = NoiseScale()
    learn = Learner(dls, convnet(), loss_func=nn.CrossEntropyLoss(), opt_func=partial(SGD, mom=0.9), metrics=accuracy, cbs=[GradAccum(n_acc), noise])
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, lr)
    df = noise.df
    return df.assign(epoch=(df.step-1)/-(-len(dls.train)//n_acc)), learn.recorder.values[-1][2] # After the two losses

def summed_up(df):
    "Weighted means of the windows, their ratio and its Fieller interval"
    p = pooled(df.tr_sigma, df.g_sq, df.n_elems)
    low,high = p.interval()
    return dict(windows=p.n_windows, tr_sigma=p.tr_sigma, g_sq=p.g_sq, noise_scale=p.noise_scale, low=low, high=high)

def summary(df):
    "A row per stretch, and one per piece of the curve"
    between = lambda a,b: df[(df.epoch>=a) & (df.epoch<b)]
    rows = [dict(stretch=nm, **summed_up(between(*o) if o else df[df.step<=n_first//n_acc])) for nm,o in stretches.items()]
    return pd.DataFrame(rows + [dict(stretch=f'{a:.3g} to {b:.3g}', **summed_up(between(a, b))) for a,b in zip(edges, edges[1:])])

def table(df):
    rows = ['| input | seed | '+' | '.join(stretches)+' | test accuracy, % |', '|---'*(len(stretches)+3)+'|']
    for (inp,seed),o in df.groupby(['input','seed'], sort=False): # As they were run
        r = o.set_index('stretch').loc[list(stretches)]
        cells = [f'{n:.0f} [{low:.0f}, {high:.0f}]' for n,low,high in zip(r.noise_scale, r.low, r.high)]
        rows.append(f"| {inp} | {seed} | {' | '.join(cells)} | {100*o.accuracy.iloc[0]:.2f} |")
    return '\n'.join(rows)

def plot(df):
    "The noise scale of each piece of the curve, a panel per input and a line per seed"
    import matplotlib.pyplot as plt
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

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data', type=Path)
    parser.add_argument('--seeds', type=int, nargs='*', default=range(3))
    parser.add_argument('--out', type=Path, default=here, help="folder of noise_mnist.csv, noise_mnist.md and noise_mnist.png")
    args = parser.parse_args()
    path = args.out/'noise_mnist.csv'
    if args.data:
        torch.set_num_threads(1)
        train,test = mnist(args.data/'mnist')
        rows = []
        for inp,(mean,std) in inputs.items():
            runs,accs = zip(*(run(train, test, mean, std, seed) for seed in args.seeds))
            seeds = [*zip(args.seeds, runs, accs), ('all', pd.concat(runs), np.mean(accs))] # The windows of all seeds together say more than a mean of ratios
            rows += [summary(df).assign(input=inp, seed=seed, accuracy=acc) for seed,df,acc in seeds]
        about = f"{date.today()}, fastai_bs {__version__}, fastai {fastai.__version__}, torch {torch.__version__}, Python {platform.python_version()}, CPU"
        path.write_text(f"# {about}\n{pd.concat(rows).to_csv(index=False, float_format='%.5g')}")
    about,df = path.read_text().splitlines()[0][2:],pd.read_csv(path, comment='#', dtype={'seed': str})
    text = [f'# {__doc__.splitlines()[0]}', '', f"A convnet of two convolutions and two linear layers (52,266 parameters), SGD with momentum 0.9 at {lr}, "
            f"batches of {micro_bs*n_acc} as {n_acc} micro-batches of {micro_bs}, measured by `NoiseScale` while it trains. Each entry pools all windows of "
            "its stretch with equal weights and has its 95% interval (Fieller's); 'all' pools the windows of the seeds. The weights move meanwhile, so it is a "
            "mean over the stretch, in which large gradients weigh most. An upper end of inf says that these windows do not bound it. p is a pixel, 0 to 255; "
            "how it is scaled matters in the first steps, in which the gradient of p/255 is small until the network begins to learn. An article on a batch "
            "size finder quotes McCandlish et al. 2018 with a noise scale of about 50 at first and about 900 in the end. "
            f"{about}. `noise_mnist.csv` has the curve too, `noise_mnist.py` is the program.", '',
            table(df), '', '![The noise scale along the training; dashed: 50 and 900, the values quoted](noise_mnist.png)']
    (args.out/'noise_mnist.md').write_text('\n'.join(text)+'\n')
    print(table(df))
    plot(df).savefig(args.out/'noise_mnist.png', dpi=80)
