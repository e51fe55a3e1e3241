"""Accumulation beside its peers: the error of gradients and weights, the time and memory of a window, and what an exception leaves. `peers.py` runs it.

Each tool is used as its own pages say: accelerate's `accumulate` with a prepared loader, model, optimizer and schedule; its recipe for losses over tokens, that
counts those of a window before its first micro-batch, as a row of its own; Lightning's `Trainer(accumulate_grad_batches=...)` with a schedule in steps.
All step with the same optimizers of torch, on the same batches in the same order, from the same weights."""
import itertools, logging, statistics, time, warnings
from functools import partial
from types import SimpleNamespace

import torch
from fastai.callback.schedule import ParamScheduler, combined_cos
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset
from torchvision.models import resnet18

from fastai_bs.all import GradAccum
from frame import Bare, TensorLoader, in_pairs, middle, peak

n_acc = 4 # Micro-batches in a window
one_cycle = combined_cos(0.25, 1/25, 1, 1e-5) # Of a part of the training, the factor on its rate

def peer(name):
    "One that comes with the extra `peers`"
    import importlib
    try: return importlib.import_module(name)
    except ImportError as e: raise SystemExit(f"{e}: the peers come with pip install -e '.[peers]'") from e

def versions()->dict: return {nm: peer(nm).__version__ for nm in ('accelerate','lightning')}

# What is trained

class Tagger(nn.Module):
    "Tokens, each from the one before"
    def __init__(self):
        super().__init__()
        self.emb,self.hid,self.out = nn.Embedding(40,24),nn.Linear(24,32),nn.Linear(32,40)
    def forward(self, x): return self.out(torch.tanh(self.hid(self.emb(x)))).transpose(1,2)

def rows(n, dtype): return torch.randn(n, 20, dtype=torch.float64).to(dtype),torch.randint(5, (n,))

def tokens(n, dtype):
    "Sequences of 2 to 32 tokens in any order; the rest of the targets is padding"
    x,lens = torch.randint(40, (n,32)),torch.randint(2, 33, (n,))
    return x,torch.where(torch.arange(32)<lens[:,None], torch.randint(40, (n,32)), -100)

def mlp(): return nn.Sequential(nn.Linear(20,64), nn.Tanh(), nn.Linear(64,5))
sgd = dict(opt=torch.optim.SGD, lr=0.05, momentum=0.9)
adam = dict(opt=torch.optim.Adam, lr=2e-3)
def run_of(data, model, n, bs, opt, sched=False, n_epoch=5): return SimpleNamespace(**locals())
runs = {'ragged, SGD': run_of(rows, mlp, 100, 16, sgd, n_epoch=10), 'tokens, SGD': run_of(tokens, Tagger, 64, 4, sgd),
        'one-cycle, SGD': run_of(rows, mlp, 128, 8, sgd, True), 'one-cycle, Adam': run_of(rows, mlp, 128, 8, adam, True),
        'ragged tokens, one-cycle, Adam': run_of(tokens, Tagger, 53, 4, adam, True)}

class Job:
    "One training: its model and batches, and the gradient of each step that its optimizer takes"
    def __init__(self, run, seed, dtype=torch.float32, n_epoch=None, lr=None):
        torch.manual_seed(seed)
        self.run,self.n_epoch,self.grads,self.loss_func = run,n_epoch or run.n_epoch,[],nn.CrossEntropyLoss() # Which ignores targets of -100
        self.x,self.y = run.data(run.n, dtype)
        self.model = run.model().to(dtype)
        self.lr,self.n_micro = run.opt['lr'] if lr is None else lr,-(-run.n//run.bs)
        self.n_steps = self.n_epoch*-(-self.n_micro//n_acc)
        self.start = self.weights()
    def weights(self): return torch.cat([p.detach().double().flatten() for p in self.model.parameters()])
    def factor(self, step): return one_cycle(min(1, step/self.n_steps)) if self.run.sched else 1.
    def watch(self, opt):
        "After the step: where a closure computes the last micro-batch, its gradient is there by then only"
        opt.register_step_post_hook(lambda *_: self.grads.append(torch.cat([p.grad.double().flatten() for p in self.model.parameters()])))
        return opt
    def optimizer(self):
        opt,kw = self.run.opt['opt'],{nm: v for nm,v in self.run.opt.items() if nm!='opt'}
        return self.watch(opt(self.model.parameters(), **{**kw, 'lr': self.lr}))
    def schedule(self, opt): return torch.optim.lr_scheduler.LambdaLR(opt, self.factor)
    def loader(self, bs=None): return TorchDataLoader(TensorDataset(self.x, self.y), bs or self.run.bs)

# The tools

def uncut(job):
    "What all of them are to be: the large batch"
    opt = job.optimizer()
    sched = job.schedule(opt)
    for _ in range(job.n_epoch):
        for x,y in job.loader(job.run.bs*n_acc):
            job.loss_func(job.model(x), y).backward()
            opt.step(); opt.zero_grad(); sched.step()

def bare(job):
    "As it is mostly written, with a step after the last micro-batch of an epoch too"
    opt = job.optimizer()
    sched = job.schedule(opt)
    for _ in range(job.n_epoch):
        for i,(x,y) in enumerate(job.loader()):
            (job.loss_func(job.model(x), y)/n_acc).backward()
            if (i+1)%n_acc==0 or i+1==job.n_micro: opt.step(); opt.zero_grad(); sched.step()

def with_learner(job, cb):
    if not hasattr(job, 'learn'):
        def opt_func(params, **kw):
            res = OptimWrapper(params, **{**job.run.opt, **kw})
            job.watch(res.opt)
            return res
        job.learn = Learner(DataLoaders(*(TensorLoader(job.x, job.y, job.run.bs) for _ in range(2)), device='cpu'), job.model, loss_func=job.loss_func,
                            opt_func=opt_func, cbs=cb)
        job.learn._do_epoch_validate = lambda *args, **kwargs: None
    with job.learn.no_bar(), job.learn.no_logging():
        job.learn.fit(job.n_epoch, job.lr, cbs=ParamScheduler({'lr': lambda pct: job.lr*one_cycle(pct)}) if job.run.sched else None)

def ours(job): with_learner(job, GradAccum(n_acc))
def fastai(job): with_learner(job, GradientAccumulation(job.run.bs*n_acc)) # It counts items

def prepared(job):
    from accelerate import Accelerator
    if hasattr(job, 'acc'): return job.acc
    acc,opt = Accelerator(gradient_accumulation_steps=n_acc, cpu=True),job.optimizer()
    job.acc = (acc,*acc.prepare(job.model, opt, job.loader(), job.schedule(opt)))
    return job.acc

def accelerate(job):
    "huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, 'Letting Accelerate handle gradient accumulation'"
    acc,model,opt,dl,sched = prepared(job)
    for _ in range(job.n_epoch):
        for x,y in dl:
            with acc.accumulate(model):
                acc.backward(job.loss_func(model(x), y))
                opt.step(); sched.step(); opt.zero_grad()

def accelerate_tokens(job):
    "The same page, 'Gradient accumulation on training samples of variable size': the loss is a sum over what the window holds"
    acc,model,opt,dl,sched = prepared(job)
    for _ in range(job.n_epoch):
        it = iter(dl)
        while window := list(itertools.islice(it, n_acc)):
            n_elems = sum((y!=-100).sum() for _,y in window)
            for x,y in window: # One process has nothing to hold back by `no_sync`
                acc.backward(nn.functional.cross_entropy(model(x), y, reduction='sum')*n_acc/n_elems)
            opt.step(); sched.step(); opt.zero_grad()

def module_of(job, manual=False):
    import lightning.pytorch as pl
    class Module(pl.LightningModule):
        automatic_optimization = not manual
        def __init__(self):
            super().__init__()
            self.model = job.model
        def training_step(self, batch, i):
            loss = job.loss_func(self.model(batch[0]), batch[1])
            if not manual: return loss
            self.manual_backward(loss/n_acc)
            if (i+1)%n_acc==0: self.optimizers().step(); self.optimizers().zero_grad()
        def configure_optimizers(self):
            opt = job.optimizer()
            return opt if manual else dict(optimizer=opt, lr_scheduler=dict(scheduler=job.schedule(opt), interval='step'))
    return Module()

def trainer_of(n_epoch, **kwargs):
    import lightning.pytorch as pl
    for nm in ('lightning.pytorch','lightning.fabric','lightning.pytorch.utilities.rank_zero'): logging.getLogger(nm).setLevel(logging.ERROR)
    warnings.filterwarnings('ignore')
    return pl.Trainer(max_epochs=n_epoch, accelerator='cpu', devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, **kwargs)

def lightning(job):
    "lightning.ai/docs/pytorch/stable/advanced/training_tricks.html, 'Accumulate Gradients'"
    job.module = getattr(job, 'module', None) or module_of(job)
    job.trainer = trainer_of(job.n_epoch, accumulate_grad_batches=n_acc)
    job.trainer.fit(job.module, job.loader())

arms = {'uncut, single precision': uncut, 'GradAccum': ours, "fastai's GradientAccumulation": fastai, "accelerate's accumulate": accelerate,
        "accelerate's recipe for tokens": accelerate_tokens, "Lightning's accumulate_grad_batches": lightning, 'bare loop': bare}

# Errors

def apart(a, b): return ((a-b).norm()/b.norm()).item()

def errors(run, arm, seed):
    "Of the gradient of the worst window of an epoch at fixed weights, one without a step counting as 0; and of the weights in the end"
    fixed,ref = Job(run, seed, n_epoch=1, lr=0.),Job(run, seed, torch.float64, n_epoch=1, lr=0.)
    arm(fixed); uncut(ref)
    grad = max(apart(g, r) for g,r in itertools.zip_longest(fixed.grads[:len(ref.grads)], ref.grads, fillvalue=torch.zeros_like(ref.grads[0])))
    job,ref = Job(run, seed),Job(run, seed, torch.float64)
    arm(job); uncut(ref)
    far = (job.weights()-ref.weights()).norm()
    return dict(gradient=grad, weights=(far/ref.weights().norm()).item(), of_way=(far/(ref.weights()-ref.start).norm()).item(), steps=len(job.grads),
                due=job.n_steps)

# After an exception

class Failing(nn.Module):
    "Fails at its sixth micro-batch, the second of a window, and never again"
    def __init__(self, model): super().__init__(); self.model,self.n = model,0
    def forward(self, x):
        self.n += 1
        if self.n==6: raise FloatingPointError
        return self.model(x)

def left(arm, seed):
    "By a training that fails in mid-window: gradient, over that of a window; and the error of the first window of the next training, with the same objects"
    run = runs['one-cycle, SGD']
    job = Job(SimpleNamespace(**{**vars(run), 'sched': False}), seed, n_epoch=1, lr=0.)
    ref = Job(job.run, seed, torch.float64, n_epoch=1, lr=0.)
    uncut(ref)
    job.model = Failing(job.model)
    cbs = lambda: [type(o).__name__ for o in job.learn.cbs] if hasattr(job, 'learn') else [type(o).__name__ for o in job.trainer.callbacks] \
        if hasattr(job, 'trainer') else []
    try: arm(job)
    except FloatingPointError: pass
    g = [torch.zeros_like(p) if p.grad is None else p.grad for p in job.model.parameters()]
    rest,before = torch.cat([o.double().flatten() for o in g]).norm()/ref.grads[0].norm(),cbs()
    n = len(job.grads)
    arm(job)
    return dict(gradient_left=rest.item(), next_window=apart(job.grads[n], ref.grads[0]), cbs_differ=before!=cbs())

# Time and memory

def bare_learner(job): with_learner(job, Bare(n_acc))
def bare_lightning(job):
    job.module = getattr(job, 'module', None) or module_of(job, manual=True)
    trainer_of(job.n_epoch).fit(job.module, job.loader())

def convnet():
    return nn.Sequential(nn.Unflatten(1, (1,28,28)), nn.Conv2d(1,16,5,2,2), nn.ReLU(), nn.Conv2d(16,32,3,2,1), nn.ReLU(), nn.Flatten(),
                         nn.Linear(1568,128), nn.ReLU(), nn.Linear(128,10))
def wide(): return nn.Sequential(nn.Linear(20,2048), nn.ReLU(), nn.Linear(2048,10))
def pictures(n, dtype): return torch.randn(n, 784),torch.randint(10, (n,))
def images(n, dtype): return torch.randn(n,3,32,32),torch.randint(10, (n,))
# And pairs of trainings: short ones and many, as what else is done on a machine comes and goes
timed = {'MLP, 128 items': (run_of(rows, wide, 128*24, 128, sgd, n_epoch=1),151),
         'convnet, 32 pictures': (run_of(pictures, convnet, 32*24, 32, sgd, n_epoch=1),151),
         'ResNet-18, 16 x 32 x 32': (run_of(images, partial(resnet18, num_classes=10), 16*12, 16, sgd, n_epoch=1),31)}
# Each over as little as does the same in the same surroundings
over = {'GradAccum': (ours,bare_learner), "fastai's GradientAccumulation": (fastai,bare_learner), "accelerate's accumulate": (accelerate,bare),
        "Lightning's accumulate_grad_batches": (lightning,bare_lightning)}

def window_time(r, arm): # A function
    "Trains, and returns the processor time of a window: the median of those from one optimizer step to the next"
    job,at = Job(r, 0),[]
    def watch(opt):
        opt.register_step_post_hook(lambda *_: at.append(time.process_time()))
        return opt
    job.watch = watch
    opt = job.optimizer()
    job.optimizer = lambda: opt # It and its state stay from one training to the next, as a learner's do
    def _train():
        at.clear()
        arm(job)
        return statistics.median(b-a for a,b in itertools.pairwise(at))
    return _train

# All of it

def run(args, table):
    torch.set_num_threads(1)
    more = versions()
    for (nm,r),(how,arm),seed in itertools.product(runs.items(), arms.items(), args.seeds or range(1 if args.quick else 3)):
        if not table.has(part='error', run=nm, how=how, seed=seed): table.add(part='error', run=nm, how=how, seed=seed, **errors(r, arm, seed), **more)
    for how,arm in arms.items():
        if arm not in (uncut,accelerate_tokens) and not table.has(part='exception', how=how): table.add(part='exception', how=how, **left(arm, 0), **more)
    for (nm,(r,n_pairs)),(how,(arm,base)) in itertools.product(timed.items(), over.items()):
        if table.has(part='time', run=nm, how=how): continue
        pairs = in_pairs(window_time(r, arm), window_time(r, base), 3 if args.quick else n_pairs)
        m,low,high = middle([a/b for a,b in pairs])
        small = SimpleNamespace(**{**vars(r), 'n': r.bs*8})
        extra = peak(window_time(small, arm))-peak(window_time(small, base))
        table.add(part='time', run=nm, how=how, ratio=m, low=low, high=high, memory=extra/(4*len(Job(small, 0).start)), pairs=len(pairs), **more)
