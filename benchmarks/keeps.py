"""Does a plan keep its word? Trainings as planned beside today's, on nine tasks, at three lengths and three learning rates.

    python benchmarks/keeps.py --full --data FOLDER     # Some hours on one core; `--parts` for some of the tasks, or random

Today's is `fit_one_cycle(epochs, lr)` at batch 64 (16 where the set is small); planned is `plan.apply(learn).fit_one_cycle(plan.n_epoch, lr)` with the plan
that `learn.bs_find(lr, n_epoch=epochs)` makes from the same new weights. Rates: the best for today's training by its validation loss in steps of two, a third
of it, and the valley of `lr_find`. Nothing is tuned for the plan. With `random` the rate is drawn from a thirtieth of the best to ten times as much, on all
tasks, one epoch or two, for a hundred plans. FOLDER holds mnist/, fashion_mnist/, rossmann/, adult/, ml-latest-small/, tinyshakespeare/,
imdb_sample/ and cifar10_jpg/."""
import collections, io, math, re, tarfile, time
from functools import partial
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.torch_core import set_seed
from fastai_bs.all import * # noqa: F403 bs_find

import pays
from frame import cache as cache_folder, folder, main, md_table, measured
from pays import EpochLoader, Task, loss_of

lengths = 1,2,4 # Epochs of today's training
kinds = 'best','third','valley'
seeds = 0,1,2,3,4

# Three tasks that were held out until the rule was settled

class BagOfWords(nn.Module):
    "Positive or negative, from the mean of the words' vectors"
    def __init__(self, n_words, width=64):
        super().__init__()
        self.emb = nn.EmbeddingBag(n_words, width, padding_idx=0)
        self.out = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2))
    def forward(self, x): return self.out(self.emb(x))

def reviews(data, name, n, length=300, n_words=5000):
    df = pd.read_csv(folder(data, name)/'texts.csv.gz')
    words = [re.findall(r"[a-z']+", o.lower()) for o in df.text]
    common = collections.Counter(w for o in words[:n] for w in o).most_common(n_words)
    ids = {w: i+1 for i,(w,_) in enumerate(common)}
    x = torch.zeros(len(words), length, dtype=torch.long)
    for row,o in zip(x, words):
        known = [ids[w] for w in o if w in ids][:length]
        row[:len(known)] = torch.tensor(known)
    y = torch.tensor((df.label=='positive').values).long()
    return (x[:n],y[:n]),(x[n:],y[n:]),partial(BagOfWords, n_words+1),nn.CrossEntropyLoss()

def _pictures(path):
    "`(pictures, labels)` of training and test set, from JPEGs in a folder for each class"
    found = {'train': [],'test': []}
    with tarfile.open(path) as tar:
        for m in tar:
            if m.name.endswith('.jpg'):
                *_,part,label,_ = m.name.split('/')
                picture = np.array(Image.open(io.BytesIO(tar.extractfile(m).read())).convert('RGB'))
                found['train' if part=='train' else 'test'].append((label,picture))
    labels = sorted({o for o,_ in found['train']})
    order = np.random.default_rng(0).permutation # In the file they come class by class
    found = [[v[i] for i in order(len(v))] for v in found.values()]
    return [(torch.tensor(np.stack([o for _,o in v])),torch.tensor([labels.index(o) for o,_ in v])) for v in found]

def cifar_net():
    def _block(ni, nf): return [nn.Conv2d(ni, nf, 3, 2, 1, bias=False), nn.BatchNorm2d(nf), nn.ReLU()]
    return nn.Sequential(*_block(3, 16), *_block(16, 32), *_block(32, 64), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10))

def cifar(data, name, n, n_valid=5000):
    path = cache_folder/'cifar10.pt'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_pictures(folder(data, name)/'cifar10_jpg.tar.xz'), path)
    (x,y),(x_valid,y_valid) = torch.load(path)
    def _float(x): return (x.permute(0,3,1,2).float()/255-0.47)/0.25
    return (_float(x[:n]),y[:n]),(_float(x_valid[:n_valid]),y_valid[:n_valid]),cifar_net,nn.CrossEntropyLoss()

def digits_net(): return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))

def digits(data, name, n):
    x,y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x,y = torch.tensor(x[order]/8-1).float(),torch.tensor(y[order]).long()
    return (x[:n],y[:n]),(x[n:],y[n:]),digits_net,nn.CrossEntropyLoss()

held_out = dict(reviews=Task(reviews, 'imdb_sample', 800, 3e-3), cifar=Task(cifar, 'cifar10_jpg', 20_000, 3e-3), digits=Task(digits, '', 1440, 3e-3))
tasks = {**pays.tasks, **held_out}
small_bs = dict(digits=16, reviews=16) # Today's batch of small sets

def bs_of(name): return small_bs.get(name, 64)

# Trainings

class StopsAtNaN(Callback):
    def after_batch(self):
        if self.training and self.iter%50==0 and not torch.isfinite(self.loss): raise CancelFitException

def learner(name, task, seed):
    set_seed(seed)
    loaders = EpochLoader(task.train, bs_of(name)),EpochLoader(task.valid, 1000)
    learn = Learner(DataLoaders(*loaders, device='cpu'), task.model(), loss_func=task.loss, cbs=StopsAtNaN())
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    return learn

def clocked(f):
    "What comes of it, and processor seconds"
    start = time.process_time()
    res = f()
    return res,time.process_time()-start

def fitted(task, learn, n_epoch, lr):
    "Losses at the end, and processor seconds of the whole fit"
    with learn.no_logging(): secs = clocked(lambda: learn.fit_one_cycle(n_epoch, lr))[1]
    some = [o[:10_000] for o in task.train]
    return dict(train=loss_of(task, learn.model, some), valid=loss_of(task, learn.model, task.valid), secs=secs)

def best_rate(table, name, task, epochs, seed=100):
    "The rate at which today's training ends with the lowest validation loss, in steps of two"
    def _valid(lr):
        lr = float(f'{lr:.4g}')
        key = dict(part='rate', task=name, epochs=epochs, lr=lr)
        if not table.has(**key): table.add(**key, seed=seed, bs=bs_of(name), **fitted(task, learner(name, task, seed), epochs, lr))
        df = table.df
        found = df[(df.part=='rate') & (df.task==name) & (df.epochs==epochs) & np.isclose(df.lr, lr, rtol=1e-5)].valid.iloc[0]
        return found if math.isfinite(found) else math.inf
    lr = task.lr
    while True:
        higher,lower = _valid(2*lr)<_valid(lr),_valid(lr/2)<_valid(lr)
        if not (higher or lower): return lr
        lr = 2*lr if higher else lr/2

def valley(name, task, seed):
    learn = learner(name, task, seed)
    with learn.no_bar(), learn.no_logging(): found,secs = clocked(lambda: learn.lr_find(show_plot=False))
    return float(found.valley),secs

def pair(table, name, task, epochs, kind, seed, part=1.):
    "A row for today's training and one for the plan's, at `part` of the best rate where that is not the valley's"
    if table.has(part='plan', task=name, epochs=epochs, kind=kind, seed=seed): return
    low,lr_find = valley(name, task, seed)
    lr = low if kind=='valley' else float(f'{part*best_rate(table, name, task, epochs):.4g}')
    learn = learner(name, task, seed)
    with learn.no_bar(), learn.no_logging(), patch('time.perf_counter', time.process_time):
        plan,find = clocked(lambda: learn.bs_find(lr, n_epoch=epochs, show_plot=False))
    key = dict(task=name, epochs=epochs, kind=kind, seed=seed, lr=lr)
    today = dict(part='today', **key, bs=bs_of(name), n_epoch=epochs, **fitted(task, learner(name, task, seed), epochs, lr))
    applied = plan.apply(learner(name, task, seed))
    factor = plan.rule(plan.bs/plan.base_bs)
    trial = plan.to_dict()['rate']
    planned = dict(part='plan', **key, bs=plan.bs, n_epoch=plan.n_epoch, factor=factor, wd=plan.choice.option.wd_factor, failed=trial['failed'],
                   low=trial['low'], noise_scale=plan.noise_scale, predicted=plan.duration[0]/plan.duration[1], find=find, lr_find=lr_find,
                   **fitted(task, applied, plan.n_epoch, lr))
    table.add_all([today, planned])

# The report

def ratios(df):
    "A row for each training that was planned: losses and seconds over today's of the same seed"
    key = ['task','epochs','kind','seed']
    both = df[df.part=='plan'].merge(df[df.part=='today'], on=key, suffixes=('','_now'))
    return both.assign(changed=both.bs!=both.bs_now, d_train=both.train/both.train_now-1, d_valid=both.valid/both.valid_now-1, time=both.secs/both.secs_now)

def random_case(seed):
    "Task, epochs, and the rate over the best one"
    rng = np.random.default_rng(seed)
    return rng.choice(list(tasks)).item(),int(rng.choice([1,2])),float(np.exp(rng.uniform(np.log(1/30), np.log(10))))

def of_random(both):
    "How trainings at random rates end"
    went = both[both.changed]
    lost = ~np.isfinite(went.train_now) # Today's diverges itself
    worse = went[~lost & ~(went.d_train<=0.2)]
    near = both[both.over_best.between(1/3, 3)]
    which = [f' ({r.task}, epochs {r.epochs}, rate {r.over_best:.2g} times the best: {pct(r.d_train)})' for r in worse.itertuples()]
    return f"""* Rates from {both.over_best.min():.2g} to {both.over_best.max():.2g} times the best; of {len(both)} plans {len(went)} change something.
* Today's own training diverged in {int(lost.sum())} of these; of the others {len(worse)} ended with a training loss that is no number or more than 20%
  above today's{','.join(which)}.
* Training loss over today's: median {pct(went.d_train.median())}; validation loss: {pct(went.d_valid.median())}.
* Within three times of the best rate {int((~near.changed).sum())} of {len(near)} plans stay."""

def by_plan(both):
    "Means over the seeds of those that change something"
    key = ['task','epochs','kind']
    went = both[both.changed].groupby(key, sort=False)
    return went[['d_train','d_valid','time','predicted','factor','n_epoch','lr']].mean().assign(bs=went.bs.agg(lambda o: ', '.join(map(str, sorted(set(o))))),
                                                                                             n=went.size()).reset_index()

def pct(x): return f'{x:+.1%}'

def in_short(both):
    went,each = by_plan(both),both[both.changed]
    def _line(col):
        o = went[col]
        return f"median {pct(o.median())}, above +5% in {(o>0.05).mean():.0%}, from {pct(o.min())} to {pct(o.max())}"
    off = np.abs(np.log(went.time/went.predicted))
    cost = both.find/both.lr_find
    return f"""* Run so far: {both.task.nunique()} of {len(tasks)} tasks, {both.seed.nunique()} of {len(seeds)} seeds.
* Of {len(both)} plans {(~both.changed).sum()} stay at today's batch.
* Training loss as planned over today's, mean of seeds: {_line('d_train')}.
* Validation loss: {_line('d_valid')}.
* Processor time of the whole fit: median {went.time.median():.2f} of today's; as predicted within 15% in {(off<math.log(1.15)).mean():.0%}.
* Plan by plan, not means of seeds: training loss above +5% in {(each.d_train>0.05).mean():.0%}, validation loss in {(each.d_valid>0.05).mean():.0%},
  time {each.time.median():.2f}, as predicted within 15% in {(np.abs(np.log(each.time/each.predicted))<math.log(1.15)).mean():.0%}.
* `bs_find` over `lr_find`: median {cost.median():.1f}, at most {cost.max():.1f}."""

def over_best(df, both):
    "The rate of each over that which was best for today's training"
    rates = df[df.part=='rate'].dropna(subset='valid')
    best = rates.loc[rates.groupby(['task','epochs']).valid.idxmin()].set_index(['task','epochs']).lr
    return [r.lr/best[r.task,r.epochs] for r in both.itertuples()]

def page(df):
    both = ratios(df)
    both,drawn = both[both.kind!='random'],both[both.kind=='random']
    heads = ['data','epochs','rate','plan','epochs of it','factor on the rate','training loss','validation loss','time','predicted','seeds']
    lines = [[r.task+(' (held out)' if r.task in held_out else ''),r.epochs,f'{r.kind}, {r.lr:.2g}',r.bs,f'{r.n_epoch:.3g}',f'{r.factor:.2f}',pct(r.d_train),
              pct(r.d_valid),f'{r.time:.2f}',f'{r.predicted:.2f}',r.n] for r in by_plan(both).itertuples()]
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}',' '.join(__doc__.split('\n\n')[2].split()),measured(df),'## In short',in_short(both),
                        "## Each plan that changes something","Over today's training from the same weights; means of the seeds.",md_table(heads, lines),
                        *(['## At random rates',of_random(drawn.assign(over_best=over_best(df, drawn)))] if len(drawn) else [])])

def cases(args, tasks, seeds):
    "Yield each task that is asked for, with each seed and each length"
    for name,task in tasks.items():
        if name not in args.parts: continue
        task.load(args.data)
        for seed in args.seeds or (seeds[:1] if args.quick else seeds):
            for epochs in lengths[:1] if args.quick else lengths: yield name,task,seed,epochs

def run(args, table):
    for name,task,seed,epochs in cases(args, tasks, seeds):
        for kind in kinds: pair(table, name, task, epochs, kind, seed, 1/3 if kind=='third' else 1.)
    if 'random' not in args.parts: return
    for seed in args.seeds or range(2 if args.quick else 100):
        name,epochs,part = random_case(seed)
        if not hasattr(tasks[name], 'train'): tasks[name].load(args.data)
        pair(table, name, tasks[name], epochs, 'random', 1000+seed, part)

if __name__=='__main__': main(__doc__, ['keeps'], run, page, parts=[*tasks,'random'])
