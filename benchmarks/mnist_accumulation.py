"""A gradient accumulation tutorial's run, through `GradAccum(2)`: an MLP on MNIST, batch 64 as 2 x 32, SGD at 0.01, 3 epochs.

    python benchmarks/mnist_accumulation.py --data FOLDER --out benchmarks/mnist_accumulation.md     # FOLDER/mnist/*.gz

The tutorial (MindSpore's, on gradient accumulation) prints accuracies of 84.8, 90.1 and 92.0% after the three epochs, and average test
losses of 0.528, 0.340 and 0.281. Its framework's initialisation is part of it: weights normal with standard deviation 0.01, biases 0."""
import argparse, platform
from datetime import date
from pathlib import Path

import fastai
import numpy as np
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.torch_core import set_seed
from fastai_bs import __version__
from fastai_bs.all import GradAccum

from common import TensorLoader, read_idx

def mnist(folder):
    "Training set and test set, normalised as in the tutorial"
    return [(((read_idx(folder/f'{nm}-images-idx3-ubyte.gz').float()/255-0.1307)/0.3081).flatten(1), read_idx(folder/f'{nm}-labels-idx1-ubyte.gz').long())
            for nm in ('train','t10k')]

def mlp():
    net = nn.Sequential(nn.Linear(784,512), nn.ReLU(), nn.Linear(512,512), nn.ReLU(), nn.Linear(512,10))
    for o in net:
        if isinstance(o, nn.Linear): nn.init.normal_(o.weight, 0, 0.01), nn.init.zeros_(o.bias)
    return net

def flat(model): return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

class Note(Callback):
    "The parameters after 100 optimizer steps, and a row per epoch"
    order = 70
    def __init__(self, n_acc): self.n_acc,self.rows = n_acc,[]
    def after_batch(self):
        if self.training and self.train_iter==100*self.n_acc: self.early = flat(self.learn.model)
    def after_epoch(self): self.rows.append(self.learn.recorder.log[2:4])

def run(train, test, seed, n_acc):
    set_seed(seed)
    dls = DataLoaders(TensorLoader(*train, 64//n_acc, shuffle=True), TensorLoader(*test, 1000), device='cpu')
    note = Note(n_acc)
    learn = Learner(dls, mlp(), loss_func=nn.CrossEntropyLoss(), opt_func=SGD, metrics=accuracy, cbs=[*[GradAccum(n_acc)]*(n_acc>1), note])
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 0.01)
    loss,acc = np.array(note.rows, float).T
    return 100*acc,loss,note.early,flat(learn.model)

def far(a, b): return ((a-b).norm()/b.norm()).item()

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data', type=Path, required=True)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    train,test = mnist(args.data/'mnist')
    three = lambda o, digits: ' / '.join(f'{v:.{digits}f}' for v in o)
    lines = [f"# {__doc__.splitlines()[0]}", '', f"{date.today()}, fastai_bs {__version__}, fastai {fastai.__version__}, torch {torch.__version__}, "
             f"Python {platform.python_version()}, CPU. `benchmarks/mnist_accumulation.py` says what is run. The last columns are of the parameters, "
             "the distance to those of batch 64 on the same items over their norm.", '',
             '| seed | accuracy, % | test loss | accuracy, batch 64 | after 100 steps | after 3 epochs |', '|---|---|---|---|---|---|',
             '| the tutorial | 84.8 / 90.1 / 92.0 | 0.528 / 0.340 / 0.281 | | | |']
    for seed in range(args.seeds):
        (acc,loss,early,end),(acc64,_,early64,end64) = run(train, test, seed, 2),run(train, test, seed, 1)
        lines.append(f'| {seed} | {three(acc,2)} | {three(loss,3)} | {three(acc64,2)} | {far(early,early64):.1e} | {far(end,end64):.1e} |')
        print(lines[-1], flush=True)
    if args.out: args.out.write_text('\n'.join(lines)+'\n')
