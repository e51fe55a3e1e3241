"""Two ranks that train together: how often they reduce the gradient, what a step takes, and LeNet on Fashion-MNIST on one and on two.

    python benchmarks/ranks.py --full --data FOLDER                 # FOLDER/fashion_mnist/*.gz; an hour
    python benchmarks/ranks.py --full --parts reductions speed      # These need no data

A rank per GPU over NCCL where there are two, else over gloo on the CPU, a thread each. Each section of ranks.md says what is compared with what."""
import datetime, multiprocessing, os, random, tempfile, time, warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
import accelerate, torch
import fastai.distributed # noqa: F401 Learner.distrib_ctx
import numpy as np
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import OptimWrapper, SGD
from fastai.torch_core import set_seed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock
from fastai_bs.all import GradAccum, ScaledLR
from fastai_bs.learner.loop import fastai_on_ranks

from frame import digits28, main, md_table, measured

world,n_acc = 2,4
on_gpus = torch.cuda.device_count()>=world

# Ranks

def _rank(r, n_ranks, folder, f, args):
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    os.environ.update(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(n_ranks), MASTER_ADDR='localhost', MASTER_PORT='29501', OMP_NUM_THREADS='1')
    if on_gpus: torch.cuda.set_device(r)
    dist.init_process_group('nccl' if on_gpus else 'gloo', init_method=f'file://{folder}/store', rank=r, world_size=n_ranks,
                            timeout=datetime.timedelta(minutes=2))
    try: return f(r, *args)
    finally: dist.destroy_process_group()

def on_ranks(f, *args, n_ranks=world):
    "What `f(rank, *args)` returns on each rank"
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(n_ranks, multiprocessing.get_context('spawn')) as pool:
        return [o.result() for o in [pool.submit(_rank, r, n_ranks, folder, f, args) for r in range(n_ranks)]]

def device(r=0): return torch.device('cuda', r) if torch.cuda.is_available() else torch.device('cpu')

class Rows(DataLoader):
    "Batches of tensors that fit in memory, in another order each epoch, the same wherever it is asked for"
    def __init__(self, x, y, bs, shuffle=False, dealt=1, each=None, **kwargs):
        super().__init__(range(len(y)), bs=bs, device=x.device, num_workers=0, **kwargs)
        self.x,self.y,self.shuffled,self.dealt,self.each,self.epoch = x,y,shuffle,dealt,each or bs//dealt,0
    def get_idxs(self):
        if not self.shuffled: return list(range(self.n))
        idxs,self.epoch = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)),self.epoch+1
        # In the order in which as many ranks have them: `each` items of a step, or as many as make a batch of all
        return torch.cat([torch.cat(o) for o in zip(*(h.split(self.each) for h in idxs.chunk(self.dealt)))]).tolist()
    def create_batches(self, samps):
        for idx in torch.tensor(list(samps)).split(self.bs): yield self.x[idx],self.y[idx]

class Link:
    "With a communication hook for DDP: counts the buckets of each reduction of the gradient, and waits before each as over a slow link"
    def __init__(self, seconds=0): self.seconds,self.buckets,self.begins = seconds,[],True
    def reduce(self, _, bucket):
        if self.begins: self.buckets.append(0)
        self.buckets[-1] += 1
        self.begins = bucket.is_last()
        time.sleep(self.seconds)
        return allreduce_hook(None, bucket)

class Over(Callback):
    "The model's gradients go over `link`"
    order = 12 # After DistributedTrainer has wrapped the model
    def __init__(self, link): self.link = link
    def before_fit(self): self.learn.model.register_comm_hook(None, self.link.reduce)

class Accumulate(Callback):
    "accelerate's `accumulate`, in fastai's loop"
    order,run_valid = GradientAccumulation.order,False
    def before_batch(self):
        self.accelerator = self.learn.distributed_trainer.accelerator
        self.context = self.accelerator.accumulate(self.learn.model)
        self.context.__enter__()
    def before_backward(self): self.learn.loss_grad = self.learn.loss_grad/n_acc # As `accelerator.backward` does
    def before_step(self):
        if not self.accelerator.sync_gradients: raise CancelBatchException
    def after_batch(self): self.context.__exit__(None, None, None)

def now(): return time.perf_counter(),time.process_time()

class Steps(Callback):
    "When each optimizer step was done, by the clock and in this process's own time"
    order = 70
    def before_fit(self): self.at = []
    def after_step(self): self.at.append(now())

sgd = partial(OptimWrapper, opt=torch.optim.SGD) # The same in all loops
grad_accum,fastai_own = '`GradAccum`','fastai `GradientAccumulation`'
accelerate_in_fastai,bare = 'accelerate `accumulate`, fastai loop','accelerate `accumulate`, bare loop'

def accumulator(how, bs):
    "`n_acc` micro-batches of `bs` items on each rank"
    return {grad_accum: lambda: GradAccum(n_acc), fastai_own: lambda: GradientAccumulation(n_acc*bs), accelerate_in_fastai: Accumulate}[how]()

def learner(how, model, x, y, bs, link):
    learn = Learner(DataLoaders(Rows(x, y, bs), Rows(x[:2], y[:2], 2), device=x.device), model, loss_func=nn.CrossEntropyLoss(), opt_func=sgd,
                    cbs=[accumulator(how, bs), Over(link), Steps()])
    learn._do_epoch_validate = lambda *args, **kwargs: None
    return learn

def fit(learn, *args, **kwargs):
    # accelerate keeps one number of steps for the whole process, so it is given in all ways
    with learn.distrib_ctx(cpu=not on_gpus, sync_bn=False, gradient_accumulation_steps=n_acc, **kwargs), learn.no_bar(), learn.no_logging(), \
         fastai_on_ranks(): # On CPU ranks fastai's own loaders need it
        learn.fit(*args)

def bare_fit(accelerator, model, opt, dl, loss_func=nn.CrossEntropyLoss()): # noqa: B008
    "An epoch; when each step was done"
    at = []
    for x,y in dl:
        with accelerator.accumulate(model):
            accelerator.backward(loss_func(model(x), y))
            opt.step()
            opt.zero_grad()
            if accelerator.sync_gradients: at.append(now())
    return at

def bare_parts(model, dl, link, *handlers):
    "Model, optimizer and loader as accelerate wraps them"
    accelerator = Accelerator(cpu=not on_gpus, gradient_accumulation_steps=n_acc, kwargs_handlers=list(handlers))
    model,opt,dl = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), dl)
    model.register_comm_hook(None, link.reduce)
    return accelerator,model,opt,dl

def mlp(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*[o for a,b in zip(sizes, sizes[1:]) for o in (nn.Linear(a, b), nn.ReLU())][:-1])

def noise(n, n_in, r): return torch.randn(n, n_in, device=device(r)),torch.randint(10, (n,), device=device(r))

# Reductions

models = {'12 thousand parameters': ((64,128,32,10),25), '1.1 million parameters, buckets of 0.25 MB': ((512,512,512,512,256,10),0.25),
          '15 million parameters': ((1024,2048,2048,2048,2048,10),25)}

class Others:
    "Counts collective operations that are called in Python, those of the hook included"
    def __enter__(self):
        self.own,self.n = {nm: getattr(dist, nm) for nm in ('all_reduce','all_gather')},0
        for nm,f in self.own.items(): setattr(dist, nm, partial(self.call, f))
        return self
    def call(self, f, *args, **kwargs):
        self.n += 1
        return f(*args, **kwargs)
    def __exit__(self, *_):
        for nm,f in self.own.items(): setattr(dist, nm, f)

def count(r, n_items, bs):
    "Of each model and way: reductions of the gradient, buckets in them, steps, other collective operations"
    res = []
    for nm,(sizes,cap) in models.items():
        for how in (grad_accum,fastai_own,accelerate_in_fastai,bare):
            torch.manual_seed(0)
            (x,y),link,handler = noise(n_items, sizes[0], r),Link(),DistributedDataParallelKwargs(bucket_cap_mb=cap)
            if how==bare:
                accelerator,model,opt,dl = bare_parts(mlp(*sizes).to(x.device), TorchDataLoader(TensorDataset(x, y), bs), link, handler)
                with Others() as others: at = bare_fit(accelerator, model, opt, dl)
            else:
                learn = learner(how, mlp(*sizes), x, y, bs, link)
                with Others() as others: fit(learn, 1, 1e-3, kwargs_handlers=[handler])
                at = learn.steps.at
            first,*rest = link.buckets
            assert len(set(rest))==1
            n = sum(link.buckets)
            res.append(dict(model=nm, accumulation=how, reductions=len(link.buckets), buckets=n, first=first, rest=rest[0], steps=len(at), messages=others.n-n))
    return res

micro_bs,n_micro = 8,10

def reductions(args, t):
    if not len(t.df): t.add_all([{**o, **where()} for o in on_ranks(count, world*((n_micro-1)*micro_bs+5), micro_bs)[0]])

# Speed

def pieces(r, sizes, hows, bs, n_windows, seconds, reps, skip=2):
    "Seconds per optimizer step of each way in each repetition, by the clock and of processor time"
    torch.manual_seed(0)
    (x,y),link = noise(world*n_windows*n_acc*bs, sizes[0], r),Link(seconds)
    learns = {how: learner(how, mlp(*sizes), x, y, bs, link) for how in hows if how!=bare}
    # The bare loop's batches are this rank's already: cut with nothing of a loader around them
    accelerator,model,opt,_ = bare_parts(mlp(*sizes).to(x.device), [], link)
    mine = list(zip(*(t.chunk(world)[r].split(bs) for t in (x,y))))
    def once(how):
        dist.barrier()
        if how==bare: at = bare_fit(accelerator, model, opt, mine)
        else:
            fit(learns[how], 1, 1e-3)
            at = learns[how].steps.at
        return [(b-a)/(len(at)-skip) for a,b in zip(at[skip-1], at[-1])]
    rng,res = random.Random(0),[]
    for how in hows: once(how)
    for _ in range(reps):
        order = rng.sample(hows, len(hows))
        took = {how: once(how) for how in order}
        res.append([took[how] for how in hows])
        if r==0: print(' '.join(f'{o:.3f} ({cpu:.3f})' for o,cpu in res[-1]), flush=True)
    return np.array(res)

def interval(x):
    "Of the median, 95%, by resampling"
    return np.quantile(np.median(np.random.default_rng(0).choice(x, (4000,len(x))), axis=1), [0.025,0.975])

sleep = 0.03 # Seconds before a bucket is reduced, on the slowed link

def speed(args, t):
    hows,(n_windows,reps) = [grad_accum,accelerate_in_fastai,bare,fastai_own],(4,3) if args.quick else (8,15)
    for nm,secs in (('as it is',0),('slowed',sleep)):
        if t.has(link=nm): continue
        res = on_ranks(pieces, models['15 million parameters'][0], hows, micro_bs, n_windows, secs, reps)
        clock,cpu = res[0][...,0],sum(o[...,1] for o in res)
        rows = []
        for i in (0,3,1,2):
            (spread_low,spread_high),row = np.quantile(clock[:,i], [0.25,0.75])/np.median(clock[:,i]),{}
            for key,o in (('',clock),('process_',cpu)) if i else ():
                ratio = o[:,0]/o[:,i]
                low,high = interval(ratio)
                row |= {f'{key}over': np.median(ratio), f'{key}low': low, f'{key}high': high}
            rows.append(dict(link=nm, accumulation=hows[i], seconds=np.median(clock[:,i]), spread_low=spread_low, spread_high=spread_high,
                             process=np.median(cpu[:,i]), **row, repetitions=reps, windows=n_windows, **where()))
        t.add_all(rows)

# LeNet

def fashion_mnist(data): return [(x[:,None].float()/255,y.long()) for x,y in digits28(data, 'fashion_mnist')]

def lenet(seed=0):
    set_seed(seed)
    net = nn.Sequential(nn.Conv2d(1,20,3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20,50,5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
                        nn.Linear(800,128), nn.ReLU(), nn.Linear(128,10))
    for o in net:
        if isinstance(o, (nn.Conv2d,nn.Linear)): nn.init.normal_(o.weight, 0, 0.01), nn.init.zeros_(o.bias)
    return net

class Losses(Callback):
    "Of each micro-batch, with its items; and the accuracies"
    run_valid,order = False,70
    def before_fit(self): self.losses,self.items,self.accuracies,self.epochs = [],[],[],[]
    def after_loss(self):
        self.losses.append(self.learn.loss.item())
        self.items.append(len(self.y))
        self.epochs.append(self.epoch)
    def after_epoch(self): self.accuracies.append(self.learn.recorder.log[3])

class Float32Loss(Callback):
    "For Recorder, which smooths in float32"
    order = 40
    def after_batch(self): self.learn.loss = self.learn.loss.float()

# Ranks, items of a micro-batch on each, micro-batches in a step, and who sets the rate
arms = {'one process, 256': (1,256,1,False), 'two ranks, 2 x 128': (2,128,1,False), 'two ranks, 2 x 2 x 64, `GradAccum(2)`': (2,64,2,False),
        'two ranks, 2 x 256, `ScaledLR`': (2,256,1,True)}

def train(r, data, arm, n_epoch, dtype, n_items):
    ranks,bs,k,scaled = arms[arm]
    (x,y),(tx,ty) = [(a[:n_items].to(device(r), dtype), b[:n_items].to(device(r))) for a,b in fashion_mnist(data)]
    dls = DataLoaders(Rows(x, y, bs, shuffle=True, dealt=world if ranks==1 else 1), Rows(tx, ty, 1000), device=x.device)
    note = Losses()
    learn = Learner(dls, lenet().to(dtype), loss_func=nn.CrossEntropyLoss(), opt_func=SGD, metrics=accuracy,
                    cbs=[*[GradAccum(k)]*(k>1), *[ScaledLR(256)]*scaled, note, Float32Loss()])
    if ranks>1: fit(learn, n_epoch, 0.2)
    else:
        with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, 0.2)
    factor = learn.scaled_lr.factor if scaled else 1.
    return note.losses,note.items,note.epochs,note.accuracies,factor

def curves(data, arm, n_epoch, dtype, n_items):
    "Loss of each step over all ranks, a row per epoch; test accuracies; the factor on the rate"
    ranks,_,k,_ = arms[arm]
    if ranks==1: torch.set_num_threads(1)
    res = on_ranks(train, data, arm, n_epoch, dtype, n_items) if ranks>1 else [train(0, data, arm, n_epoch, dtype, n_items)]
    losses,items,epochs = [np.array([o[i] for o in res]) for i in range(3)]
    rows = []
    for e in range(n_epoch):
        l,n = losses[:,epochs[0]==e],items[:,epochs[0]==e]
        starts = np.arange(0, l.shape[1], k)
        rows.append(np.add.reduceat((l*n).sum(0), starts)/np.add.reduceat(n.sum(0), starts))
    return np.array(rows),res[0][3],res[0][4]

def lenet_of(args, t, t_steps, dtype, names, n_epoch):
    "A row per arm and epoch; of the first arm the losses of the steps are needed, so they are run together"
    if t.has(dtype=dtype): return
    res,rows,points,one = {},[],[],None
    for arm in names:
        losses,accs,factor = res[arm] = curves(args.data, arm, n_epoch, getattr(torch, dtype), 3_000 if args.quick else 60_000)
        one = losses if one is None else one
        apart = np.abs(losses-one).max(1) if losses.shape==one.shape else [None]*n_epoch
        rows += [dict(dtype=dtype, arm=arm, epoch=i+1, loss=losses[i].mean(), accuracy=100*accs[i], apart=apart[i] if arm!=names[0] else None,
                      factor=factor, **where()) for i in range(n_epoch)]
        l = losses.ravel()
        mean = l[:len(l)//20*20].reshape(-1, 20).mean(1) # 20 steps to a point
        points += [dict(dtype=dtype, arm=arm, epoch=(i+0.5)*20/losses.shape[1], loss=o) for i,o in enumerate(mean)]
        print(arm, *(f'{l:.4f} {100*a:.2f}%,' for l,a in zip(losses.mean(1), accs)), flush=True)
    t.add_all(rows)
    t_steps.add_all(points)

def lenet_part(args, t, t_steps): lenet_of(args, t, t_steps, 'float32', list(arms), 2 if args.quick else 10)
def exact_part(args, t, t_steps): lenet_of(args, t, t_steps, 'float64', list(arms)[:3], 2)

def draw(_, __, ___, df, ____):
    "The loss; the steps of the first run were not kept, so its picture stays"
    if not len(df): return None
    import matplotlib.pyplot as plt
    fig,ax = plt.subplots(figsize=(8,4))
    for arm,(color,ls,lw) in zip(arms, (('0.75','-',6),('C0','-',2),('C1',':',2.5),('C2','-',1.5))):
        o = df[(df.arm==arm) & (df.dtype=='float32')]
        ax.plot(o.epoch, o.loss, color=color, ls=ls, lw=lw, label=arm.replace('`', ''))
    ax.set(xlabel='epochs', ylabel='loss in training')
    ax.legend()
    fig.tight_layout()
    return fig

# ResNet-18

width = 16
# Ranks, micro-batches in a step, and the rate; a micro-batch has 256 items on each rank
resnets = {'one process, 256': (1,1,0.1), 'one process, 512 as 2 x 256': (1,2,0.2), 'two ranks, 2 x 256': (world,1,0.2),
           'one process, 512 as 2 x 256, rate as before': (1,2,0.1)}

def layer(ni, nf, stride):
    down = None if ni==nf else nn.Sequential(nn.Conv2d(ni, nf, 1, stride, bias=False), nn.BatchNorm2d(nf))
    return nn.Sequential(BasicBlock(ni, nf, stride, down), BasicBlock(nf, nf))

def resnet18(seed, w=width):
    set_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, w, 3, 1, 1), nn.BatchNorm2d(w), nn.ReLU(), layer(w, w, 1), layer(w, 2*w, 2), layer(2*w, 4*w, 2), layer(4*w, 8*w, 2),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8*w, 10))
    for o in net.modules():
        if isinstance(o, (nn.Conv2d,nn.Linear)): nn.init.normal_(o.weight, 0, 0.01)
    return net

def train_resnet(r, data, arm, seed, n_epoch, n):
    "Training loss and test accuracy of each epoch, and the weights in the end"
    ranks,k,lr = resnets[arm]
    train_set,test_set = [(nn.functional.avg_pool2d(x, 2).to(device(r)),y.to(device(r))) for x,y in fashion_mnist(data)]
    dls = DataLoaders(Rows(*(o[:n] for o in train_set), 256, shuffle=True, dealt=k, each=256), Rows(*test_set, 1000), device=device(r))
    learn = Learner(dls, resnet18(seed), loss_func=nn.CrossEntropyLoss(), opt_func=SGD, metrics=accuracy, cbs=[GradAccum(k)]*(k>1))
    if ranks>1: fit(learn, n_epoch, lr)
    else:
        with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, lr)
    return [(o[0],o[2]) for o in learn.recorder.values],torch.cat([p.detach().flatten() for p in learn.model.parameters()]).double().cpu()

def resnet_part(args, t):
    "A row per arm, seed and epoch; 512 items by one process and by two ranks are compared, so all arms of a seed are run together"
    n_epoch,n = (2,2_048) if args.quick else (10,20_480) # Whole batches of 512
    for seed in args.seeds or ([0] if args.quick else [0,1,2]):
        if t.has(seed=seed): continue
        rows,ends = [],{}
        for arm,(ranks,_,lr) in resnets.items():
            job = args.data,arm,seed,n_epoch,n
            epochs,ends[arm] = on_ranks(train_resnet, *job)[0] if ranks>1 else train_resnet(0, *job)
            rows += [dict(arm=arm, seed=seed, lr=lr, items=n, epoch=i+1, loss=l, accuracy=100*a, **where()) for i,(l,a) in enumerate(epochs)]
            print(arm, seed, *(f'{l:.4f} {100*a:.2f}%,' for l,a in epochs), flush=True)
        one,two = (ends[o] for o in resnets if o.endswith('2 x 256'))
        t.add_all([{**o, 'apart': ((two-one).norm()/one.norm()).item()} for o in rows])

# The page

def where():
    place = f"{world} GPUs over NCCL" if on_gpus else f"{world} ranks over gloo on one machine's CPU of {os.cpu_count()} cores"
    return dict(accelerate=accelerate.__version__, ranks=place)

def run(args, t_reductions, t_speed, t_lenet, t_steps, t_resnet):
    jobs = dict(reductions=partial(reductions, args, t_reductions), speed=partial(speed, args, t_speed), lenet=partial(lenet_part, args, t_lenet, t_steps),
                exact=partial(exact_part, args, t_lenet, t_steps), resnet=partial(resnet_part, args, t_resnet))
    for o in args.parts: jobs[o]()

def said(df): return f"{measured(df, 'accelerate')[:-1]}; {df.ranks.iloc[0]}, a thread each."

def differences(df):
    names = [o for o in arms if df[df.arm==o].apart.notna().any()]
    cells = df.pivot(index='epoch', columns='arm', values='apart')[names]
    return md_table(['epoch',*names], [(e,*(f'{v:.1e}' for v in o)) for e,o in zip(cells.index, cells.values)])

def resnet_section(df):
    if not len(df): return ''
    n,last = df.epoch.max(),df[df.epoch==df.epoch.max()]
    swing = df[df.epoch>n//2].groupby(['arm','seed']).accuracy.std().groupby('arm').mean()
    rows = [[arm,f'{of.lr.iloc[0]:g}',f'{of.loss.mean():.3f}',', '.join(f'{o:.2f}' for o in of.accuracy),f'{of.accuracy.mean():.2f}',f'{swing[arm]:.2f}']
            for arm,of in last.groupby('arm', sort=False)]
    return f"""

## ResNet-18 on one process and on two ranks

As in the same course, with a 3 x 3 stem without pooling and weights normal x 0.01, but narrow for two cores: {width} to {8*width} channels in place of
64 to 512, on {df['items'].iloc[0]:,} pictures of Fashion-MNIST at 14 x 14 pixels, {n} epochs of SGD at a constant rate. BatchNorm has 256 items in all
arms; the two micro-batches of a step of one process (`GradAccum(2)`) are those that the two ranks have. In the end the weights of these two arms are
{f'up to {last.apart.max():.1e} of their norm apart' if last.apart.max() else 'alike to the last bit'}, for each seed;
their accuracies differ by BatchNorm's running statistics, of which each rank sees its own items. The training loss is Recorder's moving mean, which is further
behind where it hears of half as many losses. The deviation is the standard deviation of a seed's accuracy over the last half of the epochs, mean of the seeds.

{md_table(['trained by','rate','training loss','test accuracy, %, by seed','mean','deviation over the epochs'], rows)}

{said(df)}"""

def page(reductions, speed, lenet, _, resnet):
    def _number(v, spec): return '' if np.isnan(v) else format(v, spec)
    def _between(low, high): return '' if np.isnan(low) else f'{low:.3f} to {high:.3f}'
    reduced = [(o.model,o.accumulation,o.reductions,f'{o.buckets}: {o.first}, then {o.rest} each',o.steps,o.messages) for o in reductions.itertuples()]
    took = [(o.link,o.accumulation,f'{o.seconds:.3f}',f'{o.spread_low:.2f} to {o.spread_high:.2f}',_number(o.over, '.3f'),_between(o.low, o.high),
             f'{o.process:.3f}',_number(o.process_over, '.3f'),_between(o.process_low, o.process_high),o.repetitions) for o in speed.itertuples()]
    single,double = (lenet[lenet.dtype==o] for o in ('float32','float64'))
    losses,accs = (single.pivot(index='epoch', columns='arm', values=o)[list(arms)] for o in ('loss','accuracy'))
    trained = [(e,*(f'{a:.4f}, {b:.2f}%' for a,b in zip(losses.loc[e], accs.loc[e]))) for e in losses.index]
    return f"""# {__doc__.splitlines()[0]}

`benchmarks/ranks.py` says what is run.

## How often the gradient is reduced

An epoch of {n_micro} micro-batches on each rank, of {micro_bs} items and 5 in the last one; windows of 4, 4 and 2. `GradAccum({n_acc})` has to reduce the
gradient 3 times, once per window. fastai's `GradientAccumulation({n_acc*micro_bs})` counts a rank's items, reduces in each micro-batch, and takes no step for
the last window. accelerate's `accumulate` knows of the epoch's end from accelerate's own loader, in the bare loop; in fastai's loop it reduces and steps for
full windows only. A hook counts the buckets as they are reduced; DDP forms them anew after the first time.

Other messages are a few numbers each, those at the start of a fit aside. `GradAccum` sends one per window with elements and losses, one at the end of the
epoch to agree that no window is open, and one in the first micro-batch of a fit. fastai's Recorder gathers the loss of each micro-batch.

{md_table(['model','accumulation','reductions','buckets reduced','optimizer steps','other messages'], reduced)}

{said(reductions)}

## What a step takes

An MLP of 15 million parameters (4 x 2048 hidden), {n_acc} micro-batches of {micro_bs} items on each rank per optimizer step, torch's SGD in all. On the slowed
link a communication hook sleeps {1000*sleep:.0f} ms before it reduces a bucket, in all ways alike. All rows but the last are fastai's loop with its Recorder,
which gathers each micro-batch's loss from the ranks; accelerate's `accumulate` is its own context there, entered by a small callback. The bare loop has no
events and no Recorder. A repetition runs each way once, in random order: the mean step time of {speed.windows.iloc[0]-2} steps. Ratios are taken within a
repetition; median, and its 95% interval by resampling. Spread: the middle half of a way's own times over their median. Processor time, of both ranks
together, leaves out what other programs on the machine take, and waiting.

{md_table(['link','accumulation','step, s','spread','`GradAccum` over it','95% interval','processor time, s','`GradAccum` over it','95% interval',
           'repetitions'], took)}

{said(speed)}

## LeNet on one process and on two ranks

LeNet as in a course on multi-GPU training: convolutions of 20 channels at 3x3 and 50 at 5x5, average pooling, 800-128-10, ReLU, weights normal x 0.01, biases
0; Fashion-MNIST, SGD at 0.2. One process with batches of 256, each of which holds the items that two ranks have in the same step; two ranks with 128 each; the
same in two micro-batches with `GradAccum(2)`; and two ranks at batch 512 with `ScaledLR(base_bs=256)`, the rate then 0.2 x {single.factor.max():.3g} after a
warmup of a tenth of the fit. Mean loss in training and test accuracy:

{md_table(['epoch',*arms], trained)}

The largest difference of a step's loss to that of one process, in each epoch. The way off the plateau magnifies the rounding of float32, as the next section
shows:

{differences(single)}

![Loss along the steps](ranks.png)

{said(single)}

## The same curve in float64

As above in float64: the largest difference of a step's loss to that of one process, in each epoch:

{differences(double)}

{said(double)}{resnet_section(resnet)}"""

names = ['ranks_reductions','ranks_speed','ranks_lenet','ranks_steps','ranks_resnet']
if __name__=='__main__': main(__doc__, names, run, page, draw, parts=('reductions','speed','lenet','exact','resnet'))
