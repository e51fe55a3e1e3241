"""When does `bs_find` say that the rate is too high? Mock trainings that should raise no alarm, and some that should.

    python benchmarks/too_high.py --full --data FOLDER     # A quarter of an hour on one core

Batches of 64 items of the six tasks of `pays.py`, the small digits and two toys. FOLDER holds mnist/, fashion_mnist/, rossmann/, adult/,
ml-latest-small/ and tinyshakespeare/.

* anew: from weights at rest, after so many epochs of `fit_one_cycle`, at the rate of that; `small` is a training set of 2,000 items
* new: new weights, at a good rate, a thousandth of it and 1e-5; and fine-tuning
* flung: new weights, at 10, 30 and 100 times the largest rate on a grid of thirds whose epoch of `fit_one_cycle` ends below its start

`bs_find(lr)` with everything else as it is; the steps that it times are left out. An error for a loss of NaN or inf is an alarm."""
import math
from functools import cache, partial
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.schedule import Learner
from fastai.data.core import DataLoaders
from fastai.optimizer import Adam, SGD
from fastai.torch_core import set_seed
from sklearn.datasets import load_digits
from fastai_bs.all import * # noqa: F403 bs_find
from fastai_bs.finder.facts import Device, Trial
from fastai_bs.finder.loss_checks import LossPath

from frame import main, md_table, measured
from pays import EpochLoader, tasks

opts = dict(adam=Adam, sgd=partial(SGD, mom=0.9))
anew = [*(('adult','adam',1,1e-2,s) for s in range(4)), ('adult','adam',4,1e-2,0), ('adult','sgd',1,3e-2,0), ('adult','sgd',3,3e-2,1),
    ('adult small','adam',10,1e-2,0), ('digits','adam',1,1e-2,0), ('digits','adam',4,1e-2,1), ('digits','adam',20,1e-2,2), ('digits','sgd',4,0.1,0),
    ('digits','sgd',30,0.1,1), ('digits bn','adam',4,1e-2,0), ('digits bn','adam',20,1e-2,0), ('mnist','adam',1,1e-2,0), ('mnist','adam',2,1e-2,1),
    ('mnist','adam',1,3e-2,1), ('mnist','sgd',1,0.1,0), ('mnist small','adam',10,1e-2,0), ('rossmann','adam',1,3e-3,0), ('rossmann','adam',2,1e-2,1),
    ('rossmann small','adam',10,3e-3,1), ('ratings','adam',1,5e-3,0), ('ratings','adam',4,5e-3,1), ('ratings','adam',4,1e-2,2),
    ('shakespeare','adam',1,3e-3,0), ('shakespeare','adam',2,1e-2,0), ('shakespeare small','adam',20,3e-3,0), ('toy','adam',2,3e-2,0), ('toy','sgd',2,1e-2,0),
    ('toy mlp','adam',4,1e-2,0), ('toy mlp','adam',10,3e-2,0)]
new = [('adult','adam',1e-2), ('digits','adam',1e-2), ('digits','sgd',0.1), ('mnist','adam',1e-2), ('mnist','sgd',0.1), ('rossmann','adam',3e-3),
    ('ratings','adam',5e-3), ('shakespeare','adam',3e-3), ('toy','adam',3e-2), ('toy','sgd',1e-2), ('toy mlp','adam',1e-2)]
flung = [('adult','adam',1e-2), ('adult','sgd',0.1), ('digits','adam',1e-2), ('digits','sgd',0.1), ('digits bn','adam',1e-2), ('toy','adam',0.1),
    ('toy','sgd',1e-2), ('toy mlp','adam',3e-2), ('toy mlp','sgd',1e-2), ('mnist','adam',1e-2), ('mnist','sgd',0.1), ('rossmann','adam',1e-2),
    ('ratings','adam',1e-2), ('shakespeare','adam',1e-2), ('shakespeare','sgd',0.3), ('fashion','adam',1e-2)] # With the rate that the grid begins with

# Tasks: tensors of both sets, a model and a loss

def toy(bend, model):
    g = torch.Generator().manual_seed(0)
    x,w,noise = (torch.randn(*o, generator=g) for o in ((3000,10),(10,1),(3000,1)))
    y = x@w + 0.5*noise + bend*torch.sin(2*x[:,:1])
    return (x,y),(x[:500],y[:500]),model,nn.MSELoss()

def digits(*bn):
    data = load_digits()
    x,y = torch.tensor(data.data/16, dtype=torch.float32),torch.tensor(data.target)
    def _model(): return nn.Sequential(nn.Linear(64,100), *(o() for o in bn), nn.ReLU(), nn.Linear(100,10))
    return (x[:1408],y[:1408]),(x[1408:],y[1408:]),_model,nn.CrossEntropyLoss()

own = {'toy': partial(toy, 0, lambda: nn.Linear(10,1)), 'toy mlp': partial(toy, 1, lambda: nn.Sequential(nn.Linear(10,50), nn.ReLU(), nn.Linear(50,1))),
       'digits': digits, 'digits bn': partial(digits, partial(nn.BatchNorm1d, 100))}

@cache
def load(name, data):
    if name in own: return own[name]()
    task = tasks[name.split()[0]].load(data)
    return [o[:2000] for o in task.train] if 'small' in name else task.train,task.valid,task.model,task.loss

def learner(data, name, opt, seed, model=None, **kwargs):
    train,valid,make,loss = load(name, data)
    set_seed(seed)
    return Learner(DataLoaders(EpochLoader(train, 64), EpochLoader(valid, 1000), device='cpu'), model or make(), loss_func=loss, opt_func=opts[opt], **kwargs)

def fit(learn, epochs, lr):
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(epochs, lr)
    return learn

def fine_tuning(data, freezes):
    "A new head for Fashion-MNIST on what has learned MNIST"
    model = fit(learner(data, 'mnist', 'adam', 0), 1, 1e-2).model
    set_seed(0)
    model[-1] = nn.Linear(128, 10)
    learn = learner(data, 'fashion', 'adam', 0, model, splitter=lambda m: [list(m[:-1].parameters()),list(m[-1].parameters())])
    if freezes: learn.freeze()
    return learn

@cache
def largest_rate(data, name, opt, lr):
    "Of the grid, up to three in a row that end above their start, by the loss of 4,000 items"
    def _loss(learn):
        train,_,_,loss = load(name, data)
        learn.model.eval()
        idx = torch.randperm(len(train[-1]), generator=torch.Generator().manual_seed(1))[:4000]
        with torch.no_grad(): return np.mean([loss(learn.model(*(o[i] for o in train[:-1])), train[-1][i]).item() for i in idx.split(500)])
    good,bad = None,0
    while bad<3:
        learn = learner(data, name, opt, 0)
        start = _loss(learn)
        below = _loss(fit(learn.add_cb(NoValid()), 1, lr))<start
        good,bad,lr = (lr,0,3*lr) if below else (good,bad+1,3*lr)
    return good

class NoValid(Callback):
    def before_validate(self): raise CancelValidException

def look(learn, lr):
    "Is there an alarm? End over start, the highest window above the first one in scatters, and the end over a guess; NaN after an error"
    seen = []
    def _too_high(path, *args):
        seen.append(path)
        return too_high(path, *args)
    too_high = LossPath.too_high
    untimed = patch('fastai_bs.finder.bs_find.device_of', lambda *args: Device()),patch('fastai_bs.finder.bs_find.try_sizes', lambda *args: Trial())
    with patch.object(LossPath, 'too_high', _too_high), untimed[0], untimed[1], learn.no_bar():
        try: res = learn.bs_find(lr, show_plot=False).facts.measured.loss_rose
        except ValueError: return True,math.nan,math.nan,math.nan
    n,loss,loss_sq,guess,_ = seen[0].sums().T
    last = np.array(seen[0].at)>=seen[0].end
    N = n[last].sum()
    end,scatter = loss[last].sum()/N,math.sqrt((loss_sq-loss**2/n)[last].sum()/(N-last.sum()))
    start = loss[0]/n[0]
    return res,end/start,((loss/n).max()-start)/scatter,end/min(guess[0]/n[0], guess[last].sum()/N)

def trained(data, name, opt, seed, epochs, lr): return fit(learner(data, name, opt, seed), epochs, lr)
def flung_rate(factor, *args): return factor*largest_rate(*args)

def cases(data, small):
    "Kind, name, a function that makes the learner, and the rate or a function that finds it; `small` leaves out what needs data"
    def _some(all_of): return [o for o in all_of if not small or o[0] in own]
    for name,opt,epochs,lr,seed in _some(anew):
        yield 'anew',f'{name}, {opt}, {epochs} epoch{"s"*(epochs>1)} at {lr:g}, seed {seed}',partial(trained, data, name, opt, seed, epochs, lr),lr
    for name,opt,lr in _some(new):
        for o in sorted({lr,lr/1000,1e-5}): yield 'new',f'{name}, {opt}, {o:g}',partial(learner, data, name, opt, 1),o
    for freezes in () if small else (False,True): yield 'new',f'fine-tuning, {"the head" if freezes else "all"}',partial(fine_tuning, data, freezes),2e-3
    for name,opt,lr in _some(flung):
        for factor,seed in ((10,0),(10,1),(30,0),(100,0)):
            yield f'flung, x{factor}',f'{name}, {opt}, seed {seed}',partial(learner, data, name, opt, seed),partial(flung_rate, factor, data, name, opt, lr)

def run(args, t):
    for kind,name,make,lr in cases(args.data, args.quick):
        if t.has(kind=kind, case=name): continue
        lr = lr() if callable(lr) else lr
        t.add(kind=kind, case=name, lr=lr, **dict(zip(('alarm','end','highest','guess'), look(make(), lr))))

def page(df):
    heads = 'end over start','highest window above the first one, in scatters','end over guess'
    vals = ['end','highest','guess']
    def _range(o): return f'{o.min():.3g} to {o.max():.3g}'
    def _shown(o): return '' if math.isnan(o) else f'{o:.3g}'
    summary = [(k,len(o),o.alarm.sum(),o.end.isna().sum(),*(_range(o[v]) for v in vals)) for k,o in df.groupby('kind', sort=False)]
    each = [(o['kind'],o['case'],f"{o['lr']:.3g}",'yes' if o['alarm'] else '',*(_shown(o[v]) for v in vals)) for o in df.to_dict('records')]
    return f"""# Is the rate too high?

Mock trainings of `bs_find`, and how often it said that the rate is too high.

* anew: from weights at rest, after so many epochs of `fit_one_cycle`, at the rate of that; `small` is a training set of 2,000 items. An alarm is false
* new: new weights, at a good rate, a thousandth of it and 1e-5; and fine-tuning. An alarm is false
* flung: new weights, at 10, 30 and 100 times the largest rate on a grid of thirds whose epoch of `fit_one_cycle` ends below its start. An alarm is right

End over start: the loss of its last windows over that of the first. Scatter: the standard deviation of micro-batches' losses within the last windows. Guess:
the loss if predictions were made for other items of the batch, the lower one of both ends. Errors: where the loss was NaN or infinite, an alarm too.

{measured(df)}

{md_table(('mock training','cases','alarms','of these errors',*heads), summary)}

{md_table(('mock training','','rate','alarm',*heads), each)}"""

if __name__=='__main__': main(__doc__, ['too_high'], run, page)
