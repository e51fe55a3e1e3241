"""How many epochs does a larger batch need to end where today's training does? Ground truth, on tasks that no rule was tuned on.

    python benchmarks/worth.py --full --data FOLDER [--parts gru ...]    # Some hours on one core

Today's is `fit_one_cycle(epochs, lr)` at the rate that is best for it by its validation loss, in steps of two. With `k` times the batch, each training is run
at today's rate, at the root of `k` times and at `k` times that rate, for 1, 1.5, 2.2, 3.4 and 5 times the epochs, until the loss on the training set is down
to today's at one of the rates. Between the last two lengths the epochs that it takes are interpolated, by logarithms. Nothing of `bs_find` is used: the
table holds what a plan would have to say. `w` is what a step of the larger batch is worth, in steps of today's. The same is read from short
trainings: whole one-cycles of 50, 100 and 200 steps of the larger batch at the same three rates, and one-cycles of 1, 1.4, 2, 2.8 ... 16 times as many steps
of today's, from the same new weights. Weight decay goes with rate and steps, as in a
plan. SGD has a momentum of 0.9. FOLDER holds mnist/, fashion_mnist/, adult/ and tinyshakespeare/."""
import gzip, math
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from torch import nn
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.torch_core import set_seed
from fastai_bs.schedule.rules import decay_factor

import keeps, pays
from frame import digits28, folder, main, md_table, measured, standardized
from keeps import StopsAtNaN, fitted
from pays import EpochLoader, Task, flat_loss, loss_of

seeds,ks,lengths = (0,1),(2,4,8,16),(1,1.5,2.25,3.4,5)
short_lengths,short_ks,worths = (50,100,200),(4,16),(1,1.4,2,2.8,4,5.7,8,11.3,16)

# The tasks

@dataclass
class Kind(Task):
    bs:int = 32 # Today's batch
    epochs:int = 4 # Of today's training
    opt:object = Adam
    settled:bool = False # Was it looked at when a rule was made? Others judge it

    @property
    def opt_func(self): return partial(SGD, mom=0.9) if self.opt is SGD else self.opt

def characters(data, name, n, length, model):
    text = gzip.open(folder(data, name)/'input.txt.gz').read()
    chars,ids = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    seqs = torch.tensor(ids[:len(ids)//(length+1)*(length+1)]).view(-1, length+1).long()
    x,y = seqs[:,:-1].contiguous(),seqs[:,1:].contiguous()
    return (x[:n],y[:n]),(x[-1000:],y[-1000:]),partial(model, len(chars)),flat_loss

class CharLSTM(nn.Module):
    "An AWD-LSTM whose memory begins anew with each batch"
    def __init__(self, n_chars):
        super().__init__()
        self.rnn,self.out = AWD_LSTM(n_chars, 64, 128, 2, hidden_p=0.1, input_p=0.2, embed_p=0.05, weight_p=0.1),nn.Linear(64, n_chars)
    def forward(self, x):
        self.rnn.reset()
        return self.out(self.rnn(x)).flatten(0, 1)

class CharTransformer(nn.Module):
    "Two layers that look back only"
    def __init__(self, n_chars, width=64, length=64):
        super().__init__()
        self.emb,self.at = nn.Embedding(n_chars, width),nn.Parameter(torch.randn(length, width)/10)
        layer = nn.TransformerEncoderLayer(width, 4, 2*width, dropout=0.1, batch_first=True, norm_first=True)
        self.body,self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),nn.Linear(width, n_chars)
    def forward(self, x):
        n = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        return self.out(self.body(self.emb(x)+self.at[:n], mask=mask)).flatten(0, 1)

def autoencoder_net(): return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 784))

def autoencoder(data, name, n):
    (x,_),(x_valid,_) = [(standardized(x).flatten(1),y) for x,y in digits28(data, name)]
    return (x[:n],x[:n]),(x_valid[:2000],x_valid[:2000]),autoencoder_net,nn.MSELoss()

def images(data, name, n, conv):
    train,(x,y),model,loss = pays.images(data, name, n, conv)
    return train,(x[:2000],y[:2000]),model,loss

gru,awd,transformer = (partial(characters, length=40, model=o) for o in (pays.CharGRU,CharLSTM,CharTransformer))
plain_net = partial(images, conv=partial(pays.convnet, False))
tasks = dict(gru=Kind(gru, 'tinyshakespeare', 4600, 8e-3, settled=True),
             awd=Kind(awd, 'tinyshakespeare', 3000, 8e-3),
             transformer=Kind(transformer, 'tinyshakespeare', 4600, 4e-3),
             conv_sgd=Kind(plain_net, 'fashion_mnist', 10_000, 0.05, opt=SGD),
             table_sgd=Kind(pays.adult, 'adult', 8000, 0.02, opt=SGD),
             autoencoder_sgd=Kind(autoencoder, 'mnist', 5000, 0.2, bs=16, opt=SGD, settled=True),
             autoencoder=Kind(autoencoder, 'mnist', 5000, 2e-3, bs=16),
             digits_long=Kind(keeps.digits, '', 1440, 2e-3, bs=16, epochs=15, settled=True),
             table_long=Kind(pays.adult, 'adult', 3000, 1e-3, epochs=12),
             gru_long=Kind(gru, 'tinyshakespeare', 1500, 8e-3, epochs=12))

# Trainings

def learner(task, bs, seed):
    set_seed(seed)
    dls = DataLoaders(EpochLoader(task.train, bs), EpochLoader(task.valid, 1000), device='cpu')
    learn = Learner(dls, task.model(), loss_func=task.loss, opt_func=task.opt_func, cbs=StopsAtNaN())
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    return learn

def trained(task, k, factor, n_epoch, lr, seed):
    "Losses at the end of a training with `k` times the batch"
    learn = learner(task, k*task.bs, seed)
    n = len(task.train[0])
    steps_now,steps = (n_epoch*math.ceil(n/bs) for n_epoch,bs in ((task.epochs,task.bs),(n_epoch,k*task.bs)))
    if task.opt is Adam: learn.wd = 0.01*decay_factor(steps_now/steps, factor)
    res = fitted(task, learn, n_epoch, factor*lr)
    return {o: res[o] if math.isfinite(res[o]) else math.inf for o in ('train','valid')}

def best_rate(table, name, task, seed=100):
    "The rate at which today's training ends with the lowest validation loss, in steps of two"
    def _valid(lr):
        key = dict(part='rate', task=name, lr=float(f'{lr:.4g}'))
        if not table.has(**key): table.add(**key, k=1, factor=1., n_epoch=task.epochs, seed=seed, **trained(task, 1, 1., task.epochs, key['lr'], seed))
        df = table.df
        return df[(df.part=='rate') & (df.task==name) & np.isclose(df.lr, key['lr'], rtol=1e-5)].valid.iloc[0]
    lr = task.lr
    while True:
        higher,lower = _valid(2*lr)<_valid(lr),_valid(lr/2)<_valid(lr)
        if not (higher or lower): return float(f'{lr:.4g}')
        lr = 2*lr if higher else lr/2

def epochs_needed(table, name, task, k, lr, seed, today):
    "Train longer and longer, at three rates, until the training loss is down to today's"
    for length in lengths:
        n_epoch,rows = max(1, round(length*task.epochs)),[]
        for factor in (1.,k**0.5,float(k)):
            key = dict(part='trained', task=name, seed=seed, k=k, factor=float(f'{factor:.4g}'), n_epoch=n_epoch)
            if not table.has(**key): table.add(**key, lr=lr, **trained(task, k, factor, n_epoch, lr, seed))
        df = table.df
        rows = df[(df.part=='trained') & (df.task==name) & (df.seed==seed) & (df.k==k) & (df.n_epoch==n_epoch)]
        if (rows.train<=today).any(): return

def short_loss(task, k, factor, n_steps, lr, seed):
    "The training loss after a one-cycle of so many steps with `k` times the batch"
    set_seed(seed)
    loader = pays.StepsLoader(task.train, k*task.bs, n_steps)
    dls = DataLoaders(loader, loader, device='cpu')
    learn = Learner(dls, task.model(), loss_func=task.loss, opt_func=task.opt_func, cbs=pays.NoValidation())
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, factor*lr)
    loss = loss_of(task, learn.model, [o[:5_000] for o in task.train])
    return loss if math.isfinite(loss) else math.inf

def short_cycles(table, name, task, lr, seed):
    "Short trainings at today's batch, longer and longer, and with larger ones, at three rates"
    def _add(n_short, k, factor, n_steps):
        key = dict(part='short', task=name, seed=seed, n_short=n_short, k=k, factor=float(f'{factor:.4g}'), n_steps=n_steps)
        if not table.has(**key): table.add(**key, lr=lr, train=short_loss(task, k, factor, n_steps, lr, seed))
        df = table.df
        return df[(df.part=='short') & (df.task==name) & (df.seed==seed) & (df.n_short==n_short) & (df.k==k) & (df.n_steps==n_steps)].train.min()
    for n_short in short_lengths:
        losses = [min(_add(n_short, k, factor, n_short) for factor in (1.,k**0.5,float(k))) for k in short_ks]
        for times in worths:
            if _add(n_short, 1, 1., round(times*n_short))<=min(losses): break

def run(args, table):
    for name,task in tasks.items():
        if args.parts and name not in args.parts: continue
        if args.quick: task.n //= 4
        task.load(args.data)
        for seed in args.seeds or (seeds[:1] if args.quick else seeds):
            lr = best_rate(table, name, task)
            key = dict(part='today', task=name, seed=seed)
            if not table.has(**key): table.add(**key, k=1, factor=1., n_epoch=task.epochs, lr=lr, **trained(task, 1, 1., task.epochs, lr, seed))
            df = table.df
            today = df[(df.part=='today') & (df.task==name) & (df.seed==seed)].train.iloc[0]
            if not args.quick: short_cycles(table, name, task, lr, seed)
            for k in ks[1:2] if args.quick else ks: epochs_needed(table, name, task, k, lr, seed, today)

# The page

def needed(df, name, seed, k):
    "Epochs over today's, and the factor on the rate, at which the training loss is today's; `inf` where no length was enough"
    mine = df[(df.task==name) & (df.seed==seed)]
    today = mine[mine.part=='today']
    rows = mine[(mine.part=='trained') & (mine.k==k)]
    if not len(today) or not len(rows): return None
    best = rows.loc[rows.groupby('n_epoch').train.idxmin()].sort_values('n_epoch')
    loss,n_now = today.train.iloc[0],today.n_epoch.iloc[0]
    there = best[best.train<=loss]
    if not len(there): return math.inf,best.factor.iloc[-1],rows.n_epoch.nunique()==len(lengths)
    last,before = there.iloc[0],best[best.n_epoch<there.n_epoch.iloc[0]]
    if not len(before): return last.n_epoch/n_now,last.factor,True
    prev = before.iloc[-1]
    part = math.log(prev.train/loss)/math.log(prev.train/last.train) if last.train>0 else 1.
    return prev.n_epoch/n_now*(last.n_epoch/prev.n_epoch)**part,last.factor,True

def found(df):
    "A row for each task and k, over the seeds"
    rows = []
    for name in tasks:
        for k in ks:
            of_seeds = [o for seed in sorted(df.seed.unique()) if (o := needed(df, name, seed, k)) and o[2]]
            if of_seeds: rows.append(dict(task=name, k=k, epochs=np.exp(np.mean([math.log(o[0]) for o in of_seeds])), least=min(o[0] for o in of_seeds),
                                          most=max(o[0] for o in of_seeds), factor=np.mean([o[1] for o in of_seeds]), n=len(of_seeds)))
    return pd.DataFrame(rows)

def read_short(df, name, seed, n_short, k):
    "What a step of the larger batch is worth by the short trainings: 1 at least, `inf` where today's never got as far, and the factor on the rate"
    rows = df[(df.part=='short') & (df.task==name) & (df.seed==seed) & (df.n_short==n_short)]
    larger,today = rows[rows.k==k],rows[rows.k==1].groupby('n_steps').train.min().sort_index()
    if not len(larger) or not len(today): return None
    best = larger.loc[larger.train.idxmin()]
    there = today[today<=best.train]
    if not len(there): return (math.inf,best.factor) if today.index.max()>=worths[-1]*n_short else None # Cut off
    before = today[today.index<there.index[0]]
    if not len(before): return 1.,best.factor
    part = math.log(before.iloc[-1]/best.train)/math.log(before.iloc[-1]/there.iloc[0])
    return before.index[-1]*(there.index[0]/before.index[-1])**part/n_short,best.factor

def _worth(k, epochs):
    "Write what a step is worth by whole trainings"
    if math.isnan(epochs): return ''
    if math.isinf(epochs): return f'under {k/lengths[-1]:.1f}'
    return f'{k} or more' if epochs<=1 else f'{k/epochs:.1f}'

def _short(w): return f'over {worths[-1]}' if math.isinf(w) else f'{w:.1f}'

def short_table(df):
    "A row for each task and k: what a step is worth by short trainings of each length, and by whole ones"
    res,rows = found(df),[]
    for name in tasks:
        for k in short_ks:
            cells = []
            for n_short in short_lengths:
                of_seeds = [o for seed in sorted(df.seed.unique()) if (o := read_short(df, name, seed, n_short, k))]
                cells.append(', '.join(f'{_short(w)} (x {factor:.0f})' for w,factor in of_seeds))
            whole = res[(res.task==name) & (res.k==k)].epochs.tolist()
            if any(cells): rows.append([name,k,*cells,*map(partial(_worth, k), whole or [math.nan])])
    return md_table(['task','k',*(f'{n} steps' for n in short_lengths),'whole trainings'], rows)

def page(df):
    res = found(df)
    def _cell(o):
        if math.isinf(o.most): return f'over {lengths[-1]}'
        return f'{o.epochs:.2f} ({o.least:.2f} to {o.most:.2f}), w = {_worth(o.k, o.epochs)}, rate x {o.factor:.1f}'
    table = []
    for name,of in res.groupby('task', sort=False):
        task,cells = tasks[name],{o.k: _cell(o) for o in of.itertuples()}
        lr = df[(df.task==name) & (df.part=='today')].lr.iloc[0]
        nm = name+(' (settled on)' if task.settled else '')
        table.append([nm,f'{task.n} in {task.bs} x {task.epochs}',f'{lr:.3g}',*(cells.get(k, '') for k in ks)])
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}',' '.join(__doc__.split('\n\n')[2].split()),measured(df),
        "Epochs over today's (the seeds), what a step is worth, and the factor on the rate; at most 1 where one length of today's was enough already.",
        md_table(['task','items, batch, epochs','rate',*(f'k = {k}' for k in ks)], table),
        '![Epochs over today\'s against the ratio of batch sizes](worth.png)', '## By short trainings',
        "What a step of the larger batch is worth, for each seed, and in brackets the factor on the rate that did best.", short_table(df)])

def draw(df):
    "Epochs over today's against k, a line for each task, dashed where it is trained by SGD"
    fig,ax = plt.subplots(figsize=(7,4.6), layout='constrained')
    ax.plot(ks, ks, color='grey', ls=':', label='a larger batch helps nothing')
    for name,of in found(df).groupby('task', sort=False):
        of = of[np.isfinite(of.epochs)]
        ax.plot(of.k, of.epochs, 'o--' if tasks[name].opt is SGD else 'o-', ms=4, label=name)
    ax.set(xscale='log', yscale='log', xlabel='batch size over today\'s, k', ylabel="epochs over today's", ylim=(0.9,6))
    ax.set_xticks(ks, ks)
    ax.set_yticks((1,1.5,2,3,5), (1,1.5,2,3,5))
    ax.minorticks_off()
    ax.legend(fontsize='small', loc='upper left', bbox_to_anchor=(1,1))
    return fig

if __name__=='__main__': main(__doc__, ['worth'], run, page, draw, parts=tasks)
