"""How many epochs does a plan save where a batch reaches few of the parameters, as with embeddings of many rows?

    python benchmarks/reach.py --full --data FOLDER [--parts network ...]    # Half an hour

At the size and the rate of the plan that `learn.bs_find(lr, n_epoch=epochs)` makes, trainings of `E/f**p` epochs to the nearest, beside today's of batch 64
(16 for reviews) from the same weights: `E` are the epochs that the noise scale asks for, `f` is the factor on the rate, at most the root of the ratio of the
batch sizes, and `p` goes from 0 to 1. Weight decay goes with the epochs, as in a plan. Rates: the best for today's training by its validation loss in steps
of two, and a third of it. The power was settled on ratings and reviews; network and crosses were held out. A plan takes 0.5 where a batch reaches less than
half of the parameters. In the last task it reaches all of them, and the plan takes 0. Network: ratings by a network on embeddings instead of their dot
product. Crosses: sales of Rossmann from embeddings of store and weekday, and store and month. Common: made-up ratings of 200 films by 300 people. FOLDER
holds ml-latest-small/, imdb_sample/ and rossmann/."""
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import nn
from fastai.collab import EmbeddingNN
from fastai_bs.all import * # noqa: F403 bs_find
from fastai_bs.finder.formulas import epochs_needed
from fastai_bs.learner.loaders import with_micro_bs
from fastai_bs.schedule.rules import decay_factor

import keeps, pays
from frame import main, md_table, measured
from keeps import best_rate, bs_of, cases, fitted, learner, pct
from pays import Task

seeds,powers = (0,1,2),(0,0.25,0.5,0.75,1)
kinds = dict(best=1., third=1/3)

# The tasks that were added

class RatingsNet(nn.Module):
    def __init__(self, n_users, n_items):
        super().__init__()
        self.model = EmbeddingNN([(n_users,50),(n_items,50)], [64], y_range=(0,5.5))
    def forward(self, x): return self.model(x)

def network(data, name, n):
    train,valid,model,loss = pays.ratings(data, name, n)
    return train,valid,partial(RatingsNet, *model.args),loss

class Crosses(nn.Module):
    def __init__(self, sizes, width=16):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(o, width) for o in sizes)
        self.net = nn.Sequential(nn.Linear(len(sizes)*width, 64), nn.ReLU(), nn.Linear(64, 1))
    def forward(self, x): return self.net(torch.cat([emb(x[:,i]) for i,emb in enumerate(self.embs)], 1))

def crosses(data, _, n):
    import rossmann as r
    df = r.cached(data).sample(frac=1, random_state=0)[:n+20_000]
    pairs = [pd.factorize(df.Store.astype(str)+' '+df[o].astype(str))[0] for o in ('DayOfWeek','Month')]
    y = np.log(df.Sales.values)
    x,y = torch.tensor(np.stack(pairs, 1)),torch.tensor((y-y.mean())/y.std()).float()[:,None]
    return (x[:n],y[:n]),(x[n:],y[n:]),partial(Crosses, [int(o.max())+1 for o in pairs]),nn.MSELoss()

def common(data, _, n, n_people=300, n_films=200):
    rng = np.random.default_rng(0)
    people,films = rng.standard_normal((n_people,5)),rng.standard_normal((n_films,5))
    x = np.stack([rng.integers(o, size=n+2_400) for o in (n_people,n_films)], 1)
    y = np.clip(3 + (people[x[:,0]]*films[x[:,1]]).sum(1)/2 + 0.3*rng.standard_normal(len(x)), 0.5, 5)
    x,y = torch.tensor(x),torch.tensor(y).float()[:,None]
    return (x[:n],y[:n]),(x[n:],y[n:]),partial(pays.Ratings, n_people, n_films),nn.MSELoss()

added = dict(network=Task(network, 'ml-latest-small', 80_000, 1e-3),
             crosses=Task(crosses, '', 40_000, 3e-3),
             common=Task(common, '', 9_600, 1e-2))
tasks = {**{o: keeps.tasks[o] for o in ('ratings','reviews')}, **added}

def run(args, table):
    for name,task,seed,epochs in cases(args, tasks, seeds):
        for kind,part in kinds.items(): trainings(table, name, task, seed, epochs, kind, part)

def trainings(table, name, task, seed, epochs, kind, part):
    "A row for each power, with the losses over those of today's training"
    key = dict(part='power', task=name, epochs=epochs, kind=kind, seed=seed)
    if table.has(**key): return
    lr = float(f'{part*best_rate(table, name, task, epochs):.4g}')
    learn = learner(name, task, seed)
    with learn.no_bar(), learn.no_logging(): plan = learn.bs_find(lr, n_epoch=epochs, show_plot=False)
    now = fitted(task, learner(name, task, seed), epochs, lr)
    t,factor = plan.facts.today,plan.lr_factor
    needed = epochs*(epochs_needed(plan.bs, t.bs, plan.facts.noise) if plan.facts.can_plan else 1)
    rows,done,root = [],{},(plan.bs/t.bs)**0.5
    for power in powers:
        n = max(1, round(needed/min(factor, root)**power))
        if n not in done:
            learn = learner(name, task, seed)
            learn.dls.loaders[0] = with_micro_bs(learn.dls.train, plan.bs)
            learn.wd = t.wd*decay_factor(plan.bs/t.bs, factor, n/epochs)
            done[n] = now if plan.bs==t.bs else fitted(task, learn, n, lr*factor)
        reach = plan.facts.measured.reach_of(plan.bs/t.micro_bs)
        rows.append(dict(**key, lr=lr, bs=plan.bs, reach=reach, factor=factor, needed=needed, power=power, n_epoch=n, train=done[n]['train'],
                         valid=done[n]['valid'], d_train=done[n]['train']/now['train']-1, d_valid=done[n]['valid']/now['valid']-1))
    table.add_all(rows)

def page(df):
    df = df[(df.part=='power') & (df.bs!=df.task.map(bs_of))]
    df = df.assign(task=pd.Categorical(df.task, list(tasks))).sort_values(['task','epochs','kind','power'], kind='stable')
    cols = ['reach','factor','needed','n_epoch','d_train','d_valid']
    means = df.groupby(['task','epochs','kind','power'], sort=False, observed=True)[cols].mean().reset_index()
    def _short(o): return [f'{pct(v.median())}, {(v>0.05).mean():.0%} above +5%' for v in (o.d_train,o.d_valid)]
    heads = ['tasks','p','training loss','validation loss']
    groups = {'settled on': ['ratings','reviews'], 'held out': ['network','crosses'], 'common': ['common']}
    short = [[nm,p,*_short(means[means.task.isin(names) & (means.power==p)])]
             for nm,names in groups.items() if means.task.isin(names).any() for p in powers]
    each = [[task+(' (held out)' if task in groups['held out'] else ''),epochs,kind,f'{o.reach.iloc[0]:.2f}',f'{o.factor.iloc[0]:.2f}',
             f'{o.needed.iloc[0]:.1f}',
             *(f'{r.n_epoch:.3g}: {pct(r.d_train)}, {pct(r.d_valid)}' for r in o.itertuples())]
            for (task,epochs,kind),o in means.groupby(['task','epochs','kind'], sort=False, observed=True)]
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}',' '.join(__doc__.split('\n\n')[2].split()),measured(df),'## In short',
                        "Over today's training, means of the seeds; plans that stay are left out.",md_table(heads, short),'## Each',
                        "Epochs of the plan: training loss, validation loss.",
                        md_table(['data','epochs','rate','reach','f','E',*(f'p = {p}' for p in powers)], each)])

if __name__=='__main__': main(__doc__, ['reach'], run, page, parts=tasks)
