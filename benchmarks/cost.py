"""What NoiseScale costs: the time and the memory of a training with it, over those of the same training without it.

    python benchmarks/cost.py --full     # Half an hour

Of a training the time of a step is the median of steps of its kind, as what else is done on a machine comes and goes. With `GradAccum(2)` each step is
measured, as the first 100 of a fit are, or every 4th, as from then on; the figure is the median of ratios in pairs of trainings, with and without, one right
after the other and in alternating order. Where every 60th is measured in parts it is the median of trainings by one-cycle, each of which has all kinds of
steps: one that is measured in parts, those of the cool stretch at the end, which are measured together, and the others, at which nothing is done but to look
at a number."""
import numpy as np
import torch
from torch import nn
from torchvision.models import resnet18
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastai.tabular.model import TabularModel
from fastai_bs.all import GradAccum, NoiseScale
from fastai_bs.noise.noise_scale import cool_rate

from frame import Clock, in_pairs, main, md_table, measured, middle, peak, seconds

class Repeated:
    "The same batches in each epoch, made beforehand: what loading takes is not what is measured"
    def __init__(self, batches, bs): self.batches,self.bs,self.dataset = batches,bs,range(len(batches)*bs)
    def __len__(self): return len(self.batches)
    def __iter__(self): return iter(self.batches)

def images(bs, n):
    "ResNet-18 on 64x64 pixels, SGD with momentum"
    batches = [(torch.randn(bs,3,64,64),torch.randint(10, (bs,))) for _ in range(4)]*-(-n//4)
    return batches,resnet18(num_classes=10),nn.CrossEntropyLoss(),lambda p,**kw: SGD(p, mom=0.9, **kw)

class Rows(TabularModel):
    "fastai's, of a single loss"
    def forward(self, x_cat, x_cont): return super().forward(x_cat, x_cont)[:,0]

def tabular(bs, n):
    "A tabular model of the size of fast.ai's Rossmann lesson, Adam"
    sizes = [1116,8,4,13,32,3,26,27,5,4,4,24,9,13,53,22,7,7,4,4,9,9]
    emb = [(s,min(600, round(1.6*s**0.56))) for s in sizes]
    batches = [(torch.stack([torch.randint(s, (bs,)) for s in sizes], 1),torch.randn(bs,16),torch.randn(bs)) for _ in range(10)]*-(-n//10)
    return batches,Rows(emb, 16, 1, [1000,500], ps=[0.001,0.01], embed_p=0.04),nn.MSELoss(),Adam

# Model, items in a batch, pairs of trainings
cases = {'tabular, 256': (tabular,256,41), 'ResNet-18, 32 x 64 x 64': (images,32,5)}
n_steps = 61 # Of a training: of the 60 after the first, one is measured where every 60th is

class Reads(Callback):
    "The gradient read once in each backward pass of every so many windows, and the window's once more"
    order = GradAccum.order+1 # A step that `GradAccum` skips does not come here
    def __init__(self, every): self.every = every
    def before_fit(self): self.n_steps = 0
    def _read(self):
        if self.n_steps%self.every==0: self.norms = torch._foreach_norm([p.grad for p in self.learn.model.parameters()])
    def after_backward(self): self._read()
    def before_step(self):
        self._read()
        self.n_steps += 1

class Passes(Callback):
    "Four parts of every so many batches through the model and back"
    order = GradAccum.order # After the batch is on its device
    def __init__(self, every): self.every = every
    def before_fit(self): self.n_steps = 0
    def before_batch(self):
        if self.n_steps%self.every==0:
            for *xb,yb in zip(*(o.chunk(4) for o in (*self.learn.xb,*self.learn.yb))): self.learn.loss_func(self.learn.model(*xb), yb).backward()
            self.learn.opt.zero_grad()
        self.n_steps += 1

def step_times(learn):
    "Seconds of each step of a training, but for the first"
    seconds(learn)
    return np.diff(learn.clock.at)

def step_time(learn, every):
    "Seconds of a step in the mean, of which every `every`-th may be measured"
    steps = step_times(learn)
    measured = np.arange(1, len(steps)+1)%every==0
    return sum(np.median(steps[o])*part for o,part in ((measured,1/every),(~measured,1-1/every)) if part)

def over_others(learn, every):
    "Seconds of a step of a one-cycle in the mean, over those of one at which nothing is measured; every `every`-th is in parts"
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, 1e-3)
    steps,lrs = np.diff(learn.clock.at),np.array(learn.recorder.lrs)[1:]
    in_parts = np.arange(1, len(steps)+1)%every==0
    is_cool = (lrs<=cool_rate*lrs.max()) & (np.arange(len(lrs))>lrs.argmax()) & ~in_parts
    other = np.median(steps[~in_parts & ~is_cool])
    return 1 + sum((np.median(steps[o])/other-1)*o.mean() for o in (in_parts,is_cool))

# How: micro-batches in a step, every how many steps are measured, the callback, and what it cannot do without. A batch is the same in all of them
modes = {'GradAccum(2), each step': (2,1,NoiseScale,Reads), 'GradAccum(2), every 4th step': (2,4,NoiseScale,Reads),
         'parts of the batch, every 60th step': (1,60,NoiseScale,Passes)}

def learner(make, bs, n_acc, cbs):
    torch.manual_seed(0)
    batches,model,loss_func,opt_func = make(bs//n_acc, n_steps*n_acc)
    batches = batches[:n_steps*n_acc]
    n_inp = len(batches[0])-1
    dls = DataLoaders(Repeated(batches, bs//n_acc), Repeated([], bs), device='cpu')
    dls.n_inp = n_inp
    learn = Learner(dls, model, loss_func=loss_func, opt_func=opt_func, cbs=[Clock(), *([GradAccum(n_acc)] if n_acc>1 else []), *cbs])
    learn._do_epoch_validate = lambda *args, **kwargs: None
    return learn

def peak_of(make, bs, n_acc, cbs):
    "Most bytes that tensors hold at a time in 8 steps, beyond those of before; and the bytes of the parameters"
    learn = learner(make, bs, n_acc, cbs)
    learn.dls.train.batches = learn.dls.train.batches[:8*n_acc]
    return peak(lambda: seconds(learn)),sum(p.numel()*p.element_size() for p in learn.model.parameters())

def run(args, t):
    for case,(make,bs,n_pairs) in cases.items():
        if args.quick: bs,n_pairs = bs//4,2
        for mode,(n_acc,every,cb,least) in modes.items():
            if t.has(training=case, measured=mode): continue
            def _over(cb): # Median with its interval
                watched = learner(make, bs, n_acc, [cb(every=every)]) # noqa: B023
                if n_acc==1: return middle([over_others(watched, every) for _ in range(n_pairs+1)][1:]) # noqa: B023
                plain = learner(make, bs, n_acc, []) # noqa: B023
                return middle([a/b for a,b in in_pairs(lambda: step_time(watched, every), lambda: step_time(plain, every), n_pairs)]) # noqa: B023
            (ratio,low,high),(least_ratio,least_low,least_high) = _over(cb),_over(least)
            (with_it,size),(without,_) = (peak_of(make, bs, n_acc, o) for o in ([cb(every=every)],[]))
            t.add(training=case, measured=mode, pairs=n_pairs, time=ratio, low=low, high=high, least=least_ratio, least_low=least_low, least_high=least_high,
                  memory=100*(with_it-without)/size)

def page(df):
    def _of(m, low, high): return f'{m:.3f} ({low:.3f} to {high:.3f})'
    rows = [(o.training,o.measured,o.pairs,_of(o.time, o.low, o.high),_of(o.least, o.least_low, o.least_high),f'{o.memory:.2f}%') for o in df.itertuples()]
    over = ', '.join(f'{o.training.split(",")[0]} with {o.measured} ({o.time:.3f})' for o in df.itertuples() if o.time>1.03)
    aimed = f'At most 1.03 was aimed at, and not reached: {over}.' if over else 'At most 1.03 was aimed at, and is kept.'
    return f"""# What `NoiseScale` costs

Processor time of a step of a training with it over that of one without it, median of pairs of trainings with its interval of 95%, or where every 60th step is
measured in parts of one-cycles, over their other steps; and how much more memory tensors hold at their peak, as a part of the parameters' size. The least:
with a bare callback in its place that reads the gradients as often and does nothing with them, or passes four parts of the batch through the model and back.
{aimed} {measured(df)} `benchmarks/cost.py` says what is run.

{md_table(['training','measured','pairs, or trainings','time','the least','memory'], rows)}"""

if __name__=='__main__': main(__doc__, ['cost'], run, page)
