"""Two ranks that train together: how often they reduce the gradient, what a step takes, and LeNet on Fashion-MNIST on one and on two.

    python benchmarks/ranks.py --data FOLDER                 # ranks.md and its picture; FOLDER/fashion_mnist/*.gz
    python benchmarks/ranks.py --parts reductions speed      # those parts of ranks.md; they need no data
    python benchmarks/ranks.py --parts lenet --data FOLDER --epochs 3

A rank per GPU over NCCL where there are two, else over gloo on the CPU, a thread each. Each section of ranks.md says what is compared with what."""
import argparse, datetime, multiprocessing, os, platform, random, re, tempfile, time, warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
import accelerate, fastai, torch
import fastai.distributed
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
import fastai_bs
from fastai_bs.all import GradAccum, ScaledLR
from fastai_bs.loop import fastai_on_ranks

from common import read_idx

here = Path(__file__).parent
world,n_acc = 2,4
on_gpus = torch.cuda.device_count()>=world

# Ranks

def _rank(r, folder, f, args):
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    os.environ.update(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(world), MASTER_ADDR='localhost', MASTER_PORT='29501', OMP_NUM_THREADS='1')
    if on_gpus: torch.cuda.set_device(r)
    dist.init_process_group('nccl' if on_gpus else 'gloo', init_method=f'file://{folder}/store', rank=r, world_size=world,
                            timeout=datetime.timedelta(minutes=2))
    try: return f(r, *args)
    finally: dist.destroy_process_group()

def on_ranks(f, *args):
    "What `f(rank, *args)` returns on each rank"
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, multiprocessing.get_context('spawn')) as pool:
        return [o.result() for o in [pool.submit(_rank, r, folder, f, args) for r in range(world)]]

def device(r=0): return torch.device('cuda', r) if torch.cuda.is_available() else torch.device('cpu')

class Rows(DataLoader):
    "Batches of tensors that fit in memory, in another order each epoch, the same wherever it is asked for"
    def __init__(self, x, y, bs, shuffle=False, dealt=1, **kwargs):
        super().__init__(range(len(y)), bs=bs, device=x.device, num_workers=0, **kwargs)
        self.x,self.y,self.shuffled,self.dealt,self.epoch = x,y,shuffle,dealt,0
    def get_idxs(self):
        if not self.shuffled: return list(range(self.n))
        idxs,self.epoch = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)),self.epoch+1
        # With `dealt` in mind: each batch holds those that as many ranks have in a step
        return torch.cat([torch.cat(o) for o in zip(*(h.split(self.bs//self.dealt) for h in idxs.chunk(self.dealt)))]).tolist()
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
            res.append((nm, how, len(link.buckets), f'{n}: {first}, then {rest[0]} each', len(at), others.n-n))
    return res

def reductions(args):
    bs,n_micro = 8,10
    rows = on_ranks(count, world*((n_micro-1)*bs+5), bs)[0]
    return [f"An epoch of {n_micro} micro-batches on each rank, of {bs} items and 5 in the last one; windows of 4, 4 and 2. `GradAccum({n_acc})` has "
            f"to reduce the gradient 3 times,",
            f"once per window. fastai's `GradientAccumulation({n_acc*bs})` counts a rank's items, reduces in each micro-batch, and takes no step for "
            f"the last window. accelerate's",
            "`accumulate` knows of the epoch's end from accelerate's own loader, in the bare loop; in fastai's loop it reduces and steps for full "
            "windows only. A hook counts the",
            "buckets as they are reduced; DDP forms them anew after the first time.", '',
            "Other messages are a few numbers each, those at the start of a fit aside. `GradAccum` sends one per window with elements and losses, one "
            "at the end of the epoch to",
            "agree that no window is open, and one in the first micro-batch of a fit. fastai's Recorder gathers the loss of each micro-batch.", '',
            '| model | accumulation | reductions | buckets reduced | optimizer steps | other messages |', '|---|---|---|---|---|---|',
            *(f"| {' | '.join(str(v) for v in o)} |" for o in rows)]

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
    medians = np.median(np.random.default_rng(0).choice(x, (4000,len(x))), axis=1)
    return f'{np.quantile(medians, 0.025):.3f} to {np.quantile(medians, 0.975):.3f}'

def speed(args):
    hows,bs = [grad_accum,accelerate_in_fastai,bare,fastai_own],args.micro_bs
    lines = [f"An MLP of 15 million parameters (4 x 2048 hidden), {n_acc} micro-batches of {bs} items on each rank per optimizer step, torch's SGD in "
             f"all. On the slowed link a",
             f"communication hook sleeps {1000*args.sleep:.0f} ms before it reduces a bucket, in all ways alike. All rows but the last are fastai's "
             f"loop with its Recorder, which gathers",
             "each micro-batch's loss from the ranks; accelerate's `accumulate` is its own context there, entered by a small callback. The bare loop "
             "has no events and no",
             f"Recorder. A repetition runs each way once, in random order: the mean step time of {args.windows-2} steps. Ratios are taken within a "
             f"repetition; median, and its 95%",
             "interval by resampling. Spread: the middle half of a way's own times over their median. Processor time, of both ranks together, leaves "
             "out what other programs",
             "on the machine take, and waiting.", '',
             '| link | accumulation | step, s | spread | `GradAccum` over it | 95% interval | processor time, s | `GradAccum` over it | 95% interval '
             '| repetitions |',
             '|---'*10+'|']
    for nm,seconds in (('as it is',0),('slowed',args.sleep)):
        res = on_ranks(pieces, models['15 million parameters'][0], hows, bs, args.windows, seconds, args.reps)
        clock,cpu = res[0][...,0],sum(o[...,1] for o in res)
        for i in (0,3,1,2):
            spread = np.quantile(clock[:,i], [0.25,0.75])/np.median(clock[:,i])
            over = [f'{np.median(t[:,0]/t[:,i]):.3f} | {interval(t[:,0]/t[:,i])}' if i else ' | ' for t in (clock,cpu)]
            lines.append(f"| {nm} | {hows[i]} | {np.median(clock[:,i]):.3f} | {spread[0]:.2f} to {spread[1]:.2f} | {over[0]} | "
                         f"{np.median(cpu[:,i]):.3f} | {over[1]} | {args.reps} |")
            print(lines[-1], flush=True)
    return lines

# LeNet

def fashion_mnist(folder):
    return [(read_idx(folder/f'{nm}-images-idx3-ubyte.gz')[:,None].float()/255, read_idx(folder/f'{nm}-labels-idx1-ubyte.gz').long())
            for nm in ('train','t10k')]

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

def train(r, folder, arm, n_epoch, dtype, n_items):
    ranks,bs,k,scaled = arms[arm]
    (x,y),(tx,ty) = [(a[:n_items].to(device(r), dtype), b[:n_items].to(device(r))) for a,b in fashion_mnist(folder)]
    dls = DataLoaders(Rows(x, y, bs, shuffle=True, dealt=world if ranks==1 else 1), Rows(tx, ty, 1000), device=x.device)
    note = Losses()
    learn = Learner(dls, lenet().to(dtype), loss_func=nn.CrossEntropyLoss(), opt_func=SGD, metrics=accuracy,
                    cbs=[*[GradAccum(k)]*(k>1), *[ScaledLR(256)]*scaled, note, Float32Loss()])
    if ranks>1: fit(learn, n_epoch, 0.2)
    else:
        with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, 0.2)
    factor = learn.scaled_lr.factor if scaled else 1.
    return note.losses,note.items,note.epochs,note.accuracies,factor

def curves(folder, arm, n_epoch, dtype, n_items):
    "Loss of each step over all ranks, a row per epoch; test accuracies; the factor on the rate"
    ranks,_,k,_ = arms[arm]
    if ranks==1: torch.set_num_threads(1)
    res = on_ranks(train, folder, arm, n_epoch, dtype, n_items) if ranks>1 else [train(0, folder, arm, n_epoch, dtype, n_items)]
    losses,items,epochs = [np.array([o[i] for o in res]) for i in range(3)]
    rows = []
    for e in range(n_epoch):
        l,n = losses[:,epochs[0]==e],items[:,epochs[0]==e]
        starts = np.arange(0, l.shape[1], k)
        rows.append(np.add.reduceat((l*n).sum(0), starts)/np.add.reduceat(n.sum(0), starts))
    return np.array(rows),res[0][3],res[0][4]

def plot(steps):
    "The loss, 20 steps to a point"
    import matplotlib.pyplot as plt
    fig,ax = plt.subplots(figsize=(8,4))
    for (arm,loss),(color,ls,lw) in zip(steps.items(), (('0.75','-',6),('C0','-',2),('C1',':',2.5),('C2','-',1.5))):
        l = loss.ravel()
        l = l[:len(l)//20*20].reshape(-1,20).mean(1)
        ax.plot((np.arange(len(l))+0.5)*20/loss.shape[1], l, color=color, ls=ls, lw=lw, label=arm.replace('`', ''))
    ax.set(xlabel='epochs', ylabel='loss in training')
    ax.legend()
    fig.tight_layout()
    fig.savefig(here/'ranks.png', dpi=80)

def run_arms(args, names, n_epoch, dtype):
    "Losses of the steps, accuracies and the factor on the rate, by arm"
    res = {}
    for arm in names:
        start = time.time()
        steps,accs,factor = res[arm] = curves(args.data/'fashion_mnist', arm, n_epoch, dtype, args.items)
        print(arm, *(f'{l:.4f} {100*a:.2f}%,' for l,a in zip(steps.mean(1), accs)), f'{factor:.3g}, {time.time()-start:.0f} s', flush=True)
    return res

def differences(res):
    "Of the loss of a step to that of the first arm, the largest in each epoch"
    one,*others = [o[0] for o in res.values()]
    names = list(res)[1:]
    return ['| epoch | '+' | '.join(names)+' |', '|---'*(len(names)+1)+'|',
            *(f"| {e+1} | "+' | '.join(f'{np.abs(o[e]-one[e]).max():.1e}' for o in others)+' |' for e in range(len(one)))]

def lenet_part(args):
    res = run_arms(args, arms, args.epochs, torch.float32)
    factor = res[list(arms)[3]][2]
    plot({arm: o[0] for arm,o in res.items()})
    return ["LeNet as in a course on multi-GPU training: convolutions of 20 channels at 3x3 and 50 at 5x5, average pooling, 800-128-10, ReLU, weights "
            "normal x 0.01, biases 0;",
            "Fashion-MNIST, SGD at 0.2. One process with batches of 256, each of which holds the items that two ranks have in the same step; two "
            "ranks with 128 each; the same in two",
            f"micro-batches with `GradAccum(2)`; and two ranks at batch 512 with `ScaledLR(base_bs=256)`, the rate then 0.2 x {factor:.3g} after a warmup of "
            "a tenth of the fit. Mean loss in",
            "training and test accuracy:", '',
            '| epoch | '+' | '.join(arms)+' |', '|---'*(len(arms)+1)+'|',
            *(f"| {e+1} | "+' | '.join(f"{steps[e].mean():.4f}, {100*accs[e]:.2f}%" for steps,accs,_ in res.values())+' |' for e in range(args.epochs)), '',
            "The largest difference of a step's loss to that of one process, in each epoch. The way off the plateau magnifies the rounding of "
            "float32, as the next section shows:", '',
            *differences({arm: res[arm] for arm in list(arms)[:3]}), '',
            '![Loss along the steps](ranks.png)']

def exact_part(args):
    return ["As above in float64: the largest difference of a step's loss to that of one process, in each epoch:", '',
            *differences(run_arms(args, list(arms)[:3], args.exact_epochs, torch.float64))]

# The page

titles = {'reductions': 'How often the gradient is reduced', 'speed': 'What a step takes', 'lenet': 'LeNet on one process and on two ranks',
          'exact': 'The same curve in float64'}

def save(part, lines):
    "`lines` as the section of `part`, the others as they are"
    path = here/'ranks.md'
    old = dict(re.findall(r'^## ([^\n]+)\n\n(.*?)(?=\n## |\Z)', path.read_text(), re.M|re.S)) if path.exists() else {}
    where = f"{world} GPUs over NCCL" if on_gpus else f"{world} ranks over gloo on one machine's CPU of {os.cpu_count()} cores, a thread each"
    versions = (f"{datetime.date.today()}, fastai_bs {fastai_bs.__version__}, fastai {fastai.__version__}, accelerate {accelerate.__version__}, "
                f"torch {torch.__version__}, Python {platform.python_version()}; {where}.")
    old[titles[part]] = '\n'.join([*lines, '', versions])+'\n'
    text = [f"# {__doc__.splitlines()[0]}\n\n`benchmarks/ranks.py` says what is run.\n", *(f"## {t}\n\n{old[t]}" for t in titles.values() if t in old)]
    path.write_text('\n'.join(text))

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--parts', nargs='*', default=list(titles), choices=list(titles))
    parser.add_argument('--data', type=Path)
    parser.add_argument('--epochs', type=int, default=10, help='of lenet')
    parser.add_argument('--exact_epochs', type=int, default=2, help='of lenet in float64, for exact')
    parser.add_argument('--items', type=int, default=60000, help='of lenet and exact')
    parser.add_argument('--reps', type=int, default=15, help='of speed')
    parser.add_argument('--windows', type=int, default=8, help='in a repetition of speed')
    parser.add_argument('--micro_bs', type=int, default=8, help='of speed')
    parser.add_argument('--sleep', type=float, default=0.03, help='seconds before a bucket is reduced, on the slowed link of speed')
    args = parser.parse_args()
    if {'lenet','exact'} & set(args.parts) and not args.data: parser.error('lenet and exact need --data FOLDER, with fashion_mnist/*.gz in it')
    for part in args.parts:
        lines = {'reductions': reductions, 'speed': speed, 'lenet': lenet_part, 'exact': exact_part}[part](args)
        print('\n'.join(lines), flush=True)
        save(part, lines)
