"""What a batch size pays at equal time: six tasks, three lengths of training, every size at its best of five learning rates.

    python benchmarks/pays.py --full --data FOLDER     # Three hours on one core; its parts one after another, `--parts` for some of them

* time: seconds of a step by batch size, on a machine with nothing else to do
* grid: each size and rate, one seed; seeds: two more at each size's best rate
* plan: what `bs_find` says at the rate that is best at 64, as it is and with `num_it=660`, five seeds; what it and `lr_find` take

FOLDER holds mnist/, fashion_mnist/, rossmann/, adult/, ml-latest-small/ and tinyshakespeare/."""
import gzip, math, time
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from torch import nn
from fastai.callback.core import Callback, CancelFitException, CancelValidException
from fastai.callback.schedule import Learner # noqa: F401 With fit_one_cycle
from fastai.collab import EmbeddingDotBias
from fastai.data.block import CategoryBlock, RegressionBlock
from fastai.data.core import DataLoaders
from fastai.tabular.core import Categorify, FillMissing, Normalize, TabularPandas
from fastai.tabular.model import TabularModel, get_emb_sz
from fastai.torch_core import set_seed
from fastai_bs.finder import bs_find as finder
from fastai_bs.finder.options import fit_time_of
from fastai_bs.all import * # noqa: F403 bs_find
from fastai_bs.finder.timing import time_steps as time_steps_of_finder

from frame import Table, digits28, folder, main, md_table, measured, standardized

base_bs = 64
sizes = [2**i for i in range(4, 13)]
lengths = 0.25,1,4 # Epochs at `base_bs`
rate_factors = 1/3,1,3,10,30

# The tasks: tensors of the training and of the validation set, and a model

def images(data, name, n, conv):
    train,valid = [(standardized(x), y.long()) for x,y in digits28(data, name)]
    return [o[:n] for o in train],valid,conv,nn.CrossEntropyLoss()

def convnet(bn):
    def _block(ni, nf): return [nn.Conv2d(ni, nf, 3, 2, 1, bias=not bn), *([nn.BatchNorm2d(nf)] if bn else []), nn.ReLU()]
    return nn.Sequential(*_block(1, 8), *_block(8, 16), *_block(16, 32), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))

def tabular(df, n, n_valid, cats, conts, y, block, layers, n_out, loss, **kwargs):
    idx = np.random.default_rng(0).permutation(len(df))[:n+n_valid]
    df = df.iloc[idx].reset_index(drop=True)
    to = TabularPandas(df, [FillMissing, Categorify, Normalize], cats, conts, y, y_block=block, splits=(list(range(n)),list(range(n, n+n_valid))))
    def _tensors(o):
        ys = torch.tensor(o.ys.values)[:,0]
        return torch.tensor(o.cats.values).long(),torch.tensor(o.conts.values).float(), ys.long() if n_out>1 else ys.float()[:,None]
    model = partial(TabularModel, get_emb_sz(to), len(to.cont_names), n_out, layers, **kwargs)
    return _tensors(to.train),_tensors(to.valid),model,loss

def rossmann(data, _, n):
    import rossmann as r
    df = r.cached(data)
    df = df.assign(Sales=np.log(df.Sales))
    return tabular(df, n, 20_000, list(r.cat_names), list(r.cont_names), 'Sales', RegressionBlock(), [1000,500], 1, nn.MSELoss(), ps=[0.001,0.01],
                   embed_p=0.04, y_range=(0,df.Sales.max()+np.log(1.2)))

def adult(data, name, n):
    df = pd.read_csv(folder(data, name)/'adult.csv.gz')
    cats = ['workclass','education','marital-status','occupation','relationship','race','sex','native-country']
    conts = ['age','fnlwgt','education-num','capital-gain','capital-loss','hours-per-week']
    return tabular(df, n, 7_500, cats, conts, 'salary', CategoryBlock(), [200,100], 2, nn.CrossEntropyLoss())

class Ratings(nn.Module):
    "A rating from the numbers of a user and of a film"
    def __init__(self, n_users, n_items):
        super().__init__()
        self.model = EmbeddingDotBias(50, n_users, n_items, y_range=(0,5.5))
    def forward(self, x): return self.model(x)[:,None]

def ratings(data, name, n):
    df = pd.read_csv(folder(data, name)/'ratings.csv.gz').sample(frac=1, random_state=0)
    users,films = (pd.factorize(df[o])[0] for o in ('userId','movieId'))
    x,y = torch.tensor(np.stack([users,films], 1)),torch.tensor(df.rating.values).float()[:,None]
    return (x[:n],y[:n]),(x[n:],y[n:]),partial(Ratings, users.max()+1, films.max()+1),nn.MSELoss()

class CharGRU(nn.Module):
    "The next character from those before it"
    def __init__(self, n_chars, hidden=128):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(n_chars, 32),nn.GRU(32, hidden, batch_first=True),nn.Linear(hidden, n_chars)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0]).flatten(0, 1)

def flat_loss(pred, targ): return nn.functional.cross_entropy(pred, targ.flatten())

def shakespeare(data, name, n, length=32):
    text = gzip.open(folder(data, name)/'input.txt.gz').read()
    chars,ids = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    cut = len(ids)//(length+1)
    seqs = torch.tensor(ids[:cut*(length+1)]).view(cut, length+1).long()
    x,y = seqs[:,:-1].contiguous(),seqs[:,1:].contiguous()
    return (x[:n],y[:n]),(x[-3000:],y[-3000:]),partial(CharGRU, len(chars)),flat_loss

@dataclass
class Task:
    make:object # Function of `--data`, the set's folder in it and a number of items: tensors of both sets, the model, and the loss
    folder:str
    n:int # Items of the training set; an epoch of them at batch 64 takes some four seconds
    lr:float # The second of the five rates

    def load(self, data):
        self.train,self.valid,self.model,self.loss = self.make(data, self.folder, self.n)
        return self

tasks = dict(mnist=Task(partial(images, conv=partial(convnet, True)), 'mnist', 60_000, 3e-3),
             rossmann=Task(rossmann, 'rossmann', 40_000, 1e-3),
             ratings=Task(ratings, 'ml-latest-small', 80_000, 1e-3),
             shakespeare=Task(shakespeare, 'tinyshakespeare', 20_000, 1e-3),
             fashion=Task(partial(images, conv=partial(convnet, False)), 'fashion_mnist', 60_000, 1e-3),
             adult=Task(adult, 'adult', 25_000, 1e-3))

# A training of so many steps

class StepsLoader:
    "`n_steps` batches of `bs` items, through one order of the items after another"
    def __init__(self, items, bs, n_steps): self.items,self.bs,self.n_steps = items,bs,n_steps
    def __len__(self): return self.n_steps
    def __iter__(self):
        n,left = len(self.items[0]),torch.empty(0, dtype=torch.long)
        for _ in range(self.n_steps):
            while len(left)<self.bs: left = torch.cat([left, torch.randperm(n)])
            idx,left = left[:self.bs],left[self.bs:]
            yield tuple(o[idx] for o in self.items)

class NoValidation(Callback):
    def before_validate(self): raise CancelValidException
    def after_batch(self):
        if self.learn.iter%50==0 and not torch.isfinite(self.learn.loss): raise CancelFitException

def learner(task, bs, n_steps, seed):
    set_seed(seed)
    loader = StepsLoader(task.train, bs, n_steps)
    return Learner(DataLoaders(loader, loader, device='cpu'), task.model(), loss_func=task.loss, cbs=NoValidation())

def loss_of(task, model, items):
    model.eval()
    with torch.no_grad():
        parts = [(len(b[-1]),task.loss(model(*b[:-1]), b[-1]).item()) for b in zip(*(o.split(1000) for o in items))]
    return np.average([o for _,o in parts], weights=[n for n,_ in parts])

def train(task, bs, n_steps, lr, seed):
    "A row: one-cycle over `n_steps`, losses at the end, processor seconds"
    learn = learner(task, bs, n_steps, seed)
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, lr)
    secs = time.process_time()-start
    some = [o[:10_000] for o in task.train]
    return dict(steps=n_steps, process=secs, train=loss_of(task, learn.model, some), valid=loss_of(task, learn.model, task.valid))

# What was run

files = {'pays': ['part','task','epochs','bs','lr','seed','steps','process','train','valid'],
         'pays_plans': ['part','how','task','epochs','bs','lr','seed','n_epoch','time_ratio','noise_scale','reason','find','timing','lr_find']}
tables = {o: Table(o) for o in files}

def file_of(part): return 'pays_plans' if part=='plan' else 'pays'

def rows(part, task=None):
    df = tables[file_of(part)].df
    df = df.reindex(columns=[*dict.fromkeys([*files[file_of(part)], *df])]) # A new file has those of its rows only
    return df[(df.part==part) & ((df.task==task) if task else True)]

def add(part, **row): tables[file_of(part)].add(part=part, **row)

def time_steps(name, task, n_rounds=3):
    "Seconds of a step with each size: medians over rounds, the sizes in turn"
    if len(rows('time', name)): return
    secs = {bs: [] for bs in sizes}
    for _ in range(n_rounds):
        for bs in sizes:
            n = max(6, min(100, 4000//bs))
            learn = learner(task, bs, n, 0)
            with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.) # Warms up
            learn.dls.train.n_steps = n
            start = time.process_time()
            with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.)
            secs[bs].append((time.process_time()-start)/n)
    for bs,o in secs.items(): add('time', task=name, bs=bs, process=np.median(o))

def n_steps_of(name, task):
    "Function of epochs and batch size: the steps that take as long as these epochs at `base_bs`"
    secs = rows('time', name).set_index('bs').process
    def _secs(bs): return secs[bs] if bs in secs else secs[sizes[-1]]*bs/sizes[-1] # Beyond those timed: no cheaper per item
    return lambda epochs,bs: max(1, round(epochs*task.n/base_bs*secs[base_bs]/_secs(bs)))

def at_rates(name, epochs, bs, rates):
    "`(train, valid)` by index of the rate, of what was run"
    df = rows('grid', name)
    df = df[(df.epochs==epochs) & (df.bs==bs)]
    return {i: (r.train,r.valid) for r in df.itertuples() for i,lr in enumerate(rates) if abs(math.log(r.lr/lr))<0.01}

def grid(name, task, epochs, n_steps, least_steps=10):
    "Each size at the five rates, those beside the best first; a rate that is two steps from both best ones, by training and by validation loss, is left out"
    rates,centre = [task.lr*o for o in rate_factors],1
    for bs in sizes:
        n = n_steps(epochs, bs)
        if n<least_steps: continue
        done = at_rates(name, epochs, bs, rates)
        wanted = [] if done else [centre]
        while wanted or done:
            for i in wanted:
                row = train(task, bs, n, rates[i], 0)
                add('grid', task=name, epochs=epochs, bs=bs, lr=rates[i], seed=0, **row)
                print(name, epochs, bs, f'{rates[i]:.4g}', {k: f'{v:.4g}' for k,v in row.items()}, flush=True)
            done = at_rates(name, epochs, bs, rates)
            best = {min(done, key=lambda i: done[i][k] if math.isfinite(done[i][k]) else math.inf) for k in (0,1)} # noqa: B023
            wanted = sorted({i+d for i in best for d in (-1,1)} & set(range(len(rates))) - set(done))
            if not wanted: break
        centre = max(best)

def best(name, epochs, by='valid'):
    "A row per batch size: the run of the grid with the lowest loss"
    df = rows('grid', name)
    df = df[df.epochs==epochs]
    return df.loc[df.groupby('bs')[by].idxmin()].set_index('bs')

def again(name, task, n_steps, seeds=(1,2), worst=1.5):
    "More seeds at each size's best rate; sizes whose loss is more than `worst` times the best are left out"
    for epochs in lengths:
        of = best(name, epochs)
        for bs,r in of[of.valid<=worst*of.valid.min()].iterrows():
            for seed in seeds:
                done = rows('seeds', name)
                if ((done.epochs==epochs) & (done.bs==bs) & (done.seed==seed)).any(): continue
                add('seeds', task=name, epochs=epochs, bs=bs, lr=r.lr, seed=seed, **train(task, bs, n_steps(epochs, bs), float(r.lr), seed))
        print(name, epochs, flush=True)

class EpochLoader:
    "An epoch in random order, as any loader's, of `n` items where not of all; `new` is how fastai's have it"
    def __init__(self, items, bs, n=None): self.items,self.bs,self.n,self.dataset = items,bs,n or len(items[0]),items[0]
    def __len__(self): return -(-self.n//self.bs)
    def new(self, bs=None): return EpochLoader(self.items, bs or self.bs, self.n)
    def __iter__(self):
        for idx in torch.randperm(len(self.items[0]))[:self.n].to(self.items[0].device).split(self.bs): yield tuple(o[idx] for o in self.items)

def best_lr(name, epochs):
    "The rate that is best at `base_bs`"
    return float(best(name, epochs).lr[base_bs])

def todays(task, seed, epochs):
    "A learner for today's training; less than an epoch is one of fewer items"
    set_seed(seed)
    train = EpochLoader(task.train, base_bs, round(min(1, epochs)*task.n))
    return Learner(DataLoaders(train, EpochLoader(task.valid, 1000), device='cpu'), task.model(), loss_func=task.loss)

def timed(what, *args):
    "What comes of it, and processor seconds: other work may run on the machine"
    start = time.process_time()
    res = what(*args)
    return res,time.process_time()-start

hows = dict(plain={}, measured=dict(num_it=660)) # Of `bs_find`

def find(learn, lr, epochs, how):
    "The plan, processor seconds of the whole of `bs_find`, and of those for timing"
    parts = []
    def _time_steps(*args):
        res,secs = timed(time_steps_of_finder, *args)
        parts.append(secs)
        return res
    with learn.no_bar(), learn.no_logging(), patch('time.perf_counter', time.process_time), patch.object(finder, 'time_steps', _time_steps):
        return *timed(lambda: learn.bs_find(lr, n_epoch=epochs, show_plot=False, **hows[how])),sum(parts)

def plans(name, task, seeds=range(5)):
    "A row per length, seed and way to ask: the plan, and processor seconds of the whole of `bs_find`, of its timing alone, and of `lr_find`"
    for epochs,seed,how in product(lengths, seeds, hows):
        key = dict(task=name, epochs=epochs, seed=seed, how=how)
        if tables['pays_plans'].has(**key): continue
        p,secs,timing = find(todays(task, seed, epochs), best_lr(name, epochs), math.ceil(epochs), how)
        learn = todays(task, seed, epochs)
        with learn.no_bar(), learn.no_logging(): lr_find = timed(partial(learn.lr_find, show_plot=False))[1]
        o = p.choice.option
        ratio = fit_time_of(p.facts, o.epochs, o.freeze_epochs, o.epoch_time)/p.duration.today
        add('plan', **key, bs=p.bs, lr=p.scaled_lr, n_epoch=o.epochs, time_ratio=ratio, noise_scale=p.noise_scale, reason=p.choice.reason, find=secs,
            timing=timing, lr_find=lr_find)

# The report

near_loss = 1.5 # Times the lowest: sizes beyond are no choice
few_passes = 8 # Through the training set, at the plan's size: beyond, the validation loss is one of overfitting

def runs_at(name, epochs, bs):
    "All trainings of this length with this size, at its best rate"
    df = pd.concat([rows(o, name) for o in ('grid','seeds')])
    df = df[(df.epochs==epochs) & (df.bs==bs)]
    if not len(df): return df
    return df[abs(np.log(df.lr.astype(float)/best(name, epochs).lr[bs]))<0.01].drop_duplicates('seed')

def curve(name, epochs):
    "A row per size at its best rate: mean losses over the seeds, the spread of the validation loss over them, the rate, and passes through the training set"
    return _curve(name, epochs, len(tables['pays'].df))

@cache # A page asks for each many times
def _curve(name, epochs, n_rows):
    out = {}
    for bs in sizes:
        r = runs_at(name, epochs, bs)
        if len(r): out[bs] = dict(lr=r.lr.iloc[0], train=r.train.mean(), valid=r.valid.mean(), spread=r.valid.std(ddof=1), n=len(r),
                                  passes=r.steps.iloc[0]*bs/tasks[name].n)
    return pd.DataFrame.from_dict(out, orient='index')

def summary(how):
    "A row per task and length, by the plans that were asked for in this way"
    out = []
    for name,epochs in ((name,e) for name in tasks for e in lengths):
        c,p = curve(name, epochs),rows('plan', name)
        p = p[(p.epochs==epochs) & (p.how==how)]
        if not len(p): continue
        b,bs = c.valid.idxmin(),int(p.bs.median())
        row = dict(task=name, epochs=epochs, rate=best_lr(name, epochs), best=b, best_train=c.train.idxmin(), passes=c.passes[bs],
                   spread=c.spread[b]/c.valid[b], plans=sorted(p.bs.astype(int)), bs=bs, noise_scale=p.noise_scale.median(),
                   predicted=p.time_ratio[p.bs==bs].median(),
                   find=(p.find/p.lr_find).median(), mock=((p.find-p.timing)/p.lr_find).median(), timing=(p.timing/p.lr_find).median())
        for by in ('train','valid'):
            above = c[by]/c[by].min()-1
            row |= {f'plan {by}': above[p.bs.astype(int)].mean(), f'128 {by}': above[128]}
        out.append(row)
    return pd.DataFrame(out)

about = """Trainings by `fit_one_cycle` with fastai's Adam (wd 0.01), new weights, one thread, for the processor time that today's training takes, `epochs`
epochs at batch 64: a number of steps fixed beforehand, from step times measured one after another with nothing else on the machine (`time` in
`results/pays.csv`). Each size at the best of five learning rates from a third to thirty times the second (by the validation loss, one seed; a rate two
steps away from the best by training and by validation loss was left out), then two more seeds at it. Losses are of the finished model, over 10,000
items of the training set and over the validation set. Validation rows of Rossmann and Adult are drawn at random, so that days and people are alike in
both sets. `plan` is `learn.bs_find(lr, n_epoch=epochs)` on new weights at the rate that is best at 64, five seeds (a quarter of an epoch: one epoch of a
quarter of the items); measured: the same with `num_it=660`. Ratings helped to make the rule of plans; MNIST, Rossmann, ratings and Shakespeare that of the
noise scale. 128 is 128 items whatever the task. Excess: the loss with that size over that of the best size, all at their best rates, means of three seeds
(five plans). ± is the standard deviation over seeds. A plan does not aim at the best loss at equal time, but at today's loss in less; what
a training *as planned* comes to is in [keeps](keeps.md)."""

titles = dict(mnist='MNIST, 60,000 images: 3 convolutions with BatchNorm', rossmann="Rossmann, 40,000 rows: lesson 6's embeddings and [1000, 500], log sales",
    ratings='ml-latest-small, 80,000 ratings: dot product of 50 factors', shakespeare='tiny Shakespeare, 20,000 pieces of 32 characters: GRU of 128',
    fashion='Fashion-MNIST, 60,000 images: 3 convolutions without BatchNorm', adult='Adult, 25,000 rows: tabular model of [200, 100]')

def pct(x): return '' if math.isnan(x) else f'{100*x:+.1f}%'

def sizes_text(o): return ', '.join(f'{bs}' + (f' ({o.count(bs)})' if len(set(o))>1 else '') for bs in sorted(set(o)))

def overview(df, measured):
    heads = ['data','epochs','rate at 64','best size by validation / training loss','passes with the plan','plan of five seeds',"plan's excess",
             'spread of seeds',"128's excess",'time as planned, predicted','`bs_find` over `lr_find`','plan, measured','noise scale']
    return md_table(heads, [[r['task'],f"{r['epochs']:g}",f"{r['rate']:.3g}",f"{r['best']} / {r['best_train']}",f"{r['passes']:.1f}",sizes_text(r['plans']),
        pct(r['plan valid']),f"{100*r['spread']:.1f}%",pct(r['128 valid']),f"{r['predicted']:.2f}".replace('nan', ''),f"{r['find']:.1f}",sizes_text(m['plans']),
        f"{m['noise_scale']:.0f}"] for r,m in zip(df.to_dict('records'), measured.to_dict('records'))])

def parts(df):
    "What `bs_find` takes"
    d = df.groupby('task', sort=False)[['mock','timing','find']].median()
    return md_table(['data','trainings','timing of steps','all'], [[o.Index,*(f'{x:.1f}' for x in o[1:])] for o in d.itertuples()])

def beside(df):
    plan,other = df['plan valid'],df['128 valid']
    return f"lower in {(plan<other).sum()} and higher in {(plan>other).sum()} of {len(df)} (median excess {pct(plan.median())} and {pct(other.median())})"

def verdict(df):
    few,n = df[df.passes<=few_passes],len(df)
    off = {o: abs(np.log2(df.bs/df[o])) for o in ('best','best_train')}
    within = {o: (v<=1).sum() for o,v in off.items()}
    either = (np.minimum(*off.values())<=1).sum()
    def _three(d, by): return ', '.join(f"{o} {pct(d[f'{o} {by}'].mean())} (worst {pct(d[f'{o} {by}'].max())})" for o in ('plan','128'))
    return '\n'.join([
        f"* The plan is within a factor of two of the size with the best training loss in {within['best_train']}, of the one with the best validation loss in "
        f"{within['best']}, of either in {either} of {n}.",
        f"* Mean excess of the validation loss where the plan passes at most {few_passes} times through its data, "
        f"{len(few)} of {n}: {_three(few, 'valid')}.",
        f"* Over all {n}: {_three(df, 'valid')}. Of the training loss, where few passes are made: {_three(few, 'train')}.",
        f"* The plan's validation loss beside that of 128: {beside(few)} where few passes are made, {beside(df)} in all.",
        f"* The plans of five seeds differ by at most one power of two in {sum(max(o)<=2*min(o) for o in df.plans)} of {n}.",
        f"* `bs_find`, all of it, takes {df.find.median():.1f} times as long as `lr_find` (median), {df.find.min():.1f} to {df.find.max():.1f}."])

def losses(name):
    "Losses by size, three columns per length"
    curves = {e: curve(name, e) for e in lengths}
    def _cell(c, bs, by):
        v = c[by][bs]
        text = f'**{v:.4g}**' if v==c[by].min() else f'{v:.4g}'
        return text + (f' ± {c.spread[bs]:.2g}' if by=='valid' and c.n[bs]>1 else '')
    lines = [[bs,*(o for c in curves.values() for o in ((_cell(c, bs, 'train'),_cell(c, bs, 'valid'),f'{c.lr[bs]:.2g}') if bs in c.index else ('','','')))]
             for bs in sizes]
    return md_table(['batch',*(f'{what}, {e:g} epochs' for e in lengths for what in ('training','validation','rate'))], [o for o in lines if any(o[1:])])

def findings(df):
    "More of what the tables say, in words"
    curves = [curve(r.task, r.epochs) for r in df.itertuples()]
    near = [c.valid[bs]/c.valid[best]-1 for c,best in zip(curves, df.best) for bs in (best//2,2*best) if bs in c.index]
    grown = ', '.join(f"{np.exp(np.log(d.best_train).mean()):.0f} at {e:g}" for e,d in df.groupby('epochs'))
    many = df[df.passes>few_passes]
    apart = '; '.join(f'{r.task} for {r.epochs:g}: {r.best_train} and {r.best}' for r in many.itertuples())
    return f"""* Near the best size the loss is flat: a factor of two from it costs {np.median(near):.1%} of the validation loss (median of {len(near)}).
* A short training stands no large batch, however noisy its gradients: it needs its steps. The size with the best training loss, geometric mean of
  the tasks: {grown} epochs.
* Many passes through few items, and larger batches make more: where the plan makes more than {few_passes}, the best sizes by training and by
  validation loss are far apart (with the epochs at 64, {apart}). No gradient tells that beforehand; the plan says how many passes it would make."""

def draw(*_):
    import matplotlib.pyplot as plt
    fig,axs = plt.subplots(2, 3, figsize=(13,7), layout='constrained')
    for ax,name in zip(axs.flat, tasks):
        for epochs,color in zip(lengths, ('C0','C1','C2')):
            c,p = curve(name, epochs),rows('plan', name)
            y,bs = c.valid/c.valid.min(),p[(p.epochs==epochs) & (p.how=='plain')].bs.median()
            ax.plot(c.index, y, 'o-', ms=3, color=color, label=f'{epochs:g} epochs at 64')
            ax.fill_between(c.index, (c.valid-c.spread)/c.valid.min(), (c.valid+c.spread)/c.valid.min(), color=color, alpha=0.15, lw=0)
            if bs in y.index: ax.plot(bs, y[bs], '*', ms=15, color=color, mec='black', zorder=3)
        ax.axvline(base_bs, color='grey', ls='--', lw=1)
        ax.set(xscale='log', title=titles[name].split(':')[0], ylim=(0.98,1.6))
        ax.set_xticks(sizes, sizes, rotation=45)
        ax.minorticks_off()
    for ax in axs[:,0]: ax.set_ylabel('validation loss at equal time, over the best')
    for ax in axs[1]: ax.set_xlabel('batch size (star: the plan)')
    axs[0,0].legend()
    return fig

def page(*_): # The tables are this module's own
    df,of_noise = map(summary, hows)
    when = measured(pd.concat([o.df for o in tables.values()]))
    text = [f'# {__doc__.splitlines()[0]}',' '.join(f'{about} {when}'.split()),'## In short',verdict(df),'With the noise scale measured:',verdict(of_noise),
            '![Validation loss at equal time by batch size, with the plans](pays.png)','## Each task and length',overview(df, of_noise),
            '## What `bs_find` takes','Over the time of `lr_find` on the same learner; medians.',parts(df),'With the noise scale measured:',parts(of_noise),
            '## What it says',findings(df)]
    return '\n\n'.join([*text, *(o for name in tasks for o in (f'## {titles[name]}',losses(name)))])

jobs = {'time': time_steps, 'grid': lambda name, task: [grid(name, task, o, n_steps_of(name, task)) for o in (1,0.25,4)],
        'seeds': lambda name, task: again(name, task, n_steps_of(name, task)), 'plan': plans}

def run(args, *own):
    tables.update(zip(files, own))
    if args.quick: # One task, a small one
        for o in [o for o in tasks if o!='adult']: del tasks[o]
        tasks['adult'].n = 2_500
    loaded = {}
    for part in args.parts:
        for name,task in tasks.items():
            if name not in loaded: loaded = {name: task.load(args.data)}
            jobs[part](name, task)

if __name__=='__main__': main(__doc__, list(files), run, page, draw, parts=jobs)
