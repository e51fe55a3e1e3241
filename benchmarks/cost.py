"""What NoiseScale costs: the time and the memory of a training with it, over those of the same training without it.

    python benchmarks/cost.py                    # cost.md; several minutes
    python benchmarks/cost.py --pairs 2          # a quick look, which writes nothing

Pairs of trainings, with and without, one right after the other and in alternating order; the figure is the median of the pairs' ratios."""
import argparse, datetime, platform, statistics, warnings
from pathlib import Path
import fastai, torch
import numpy as np
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchvision.models import resnet18
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastai.tabular.model import TabularModel
import fastai_bs
from common import seconds
from fastai_bs.all import GradAccum, NoiseScale

warnings.filterwarnings('ignore')

class Repeated:
    "The same batches in each epoch, made beforehand: what loading takes is not what is measured"
    def __init__(self, batches, bs): self.batches,self.bs,self.dataset = batches,bs,range(len(batches)*bs)
    def __len__(self): return len(self.batches)
    def __iter__(self): return iter(self.batches)

def images(bs, n):
    "ResNet-18 on 64x64 pixels, SGD with momentum"
    batches = [(torch.randn(bs,3,64,64),torch.randint(10, (bs,))) for _ in range(4)]*(n//4)
    return batches,resnet18(num_classes=10),nn.CrossEntropyLoss(),lambda p,**kw: SGD(p, mom=0.9, **kw)

class Rows(TabularModel):
    "fastai's, of a single loss"
    def forward(self, x_cat, x_cont): return super().forward(x_cat, x_cont)[:,0]

def tabular(bs, n):
    "A tabular model of the size of fast.ai's Rossmann lesson, Adam"
    sizes = [1116,8,4,13,32,3,26,27,5,4,4,24,9,13,53,22,7,7,4,4,9,9]
    emb = [(s,min(600, round(1.6*s**0.56))) for s in sizes]
    batches = [(torch.stack([torch.randint(s, (bs,)) for s in sizes], 1),torch.randn(bs,16),torch.randn(bs)) for _ in range(10)]*(n//10)
    return batches,Rows(emb, 16, 1, [1000,500], ps=[0.001,0.01], embed_p=0.04),nn.MSELoss(),Adam

# Model, items in a batch, optimizer steps in a training, and as many again before it starts to count
cases = {'ResNet-18, 32 x 64 x 64': (images,32,40), 'tabular, 256': (tabular,256,200)}
# How: micro-batches in a step, and the callback. A batch is the same in all of them
modes = {'GradAccum(2)': (2,NoiseScale), 'parts of the batch, every 40th step': (1,NoiseScale)}

def learner(make, bs, n_steps, n_acc, cbs):
    torch.manual_seed(0)
    batches,model,loss_func,opt_func = make(bs//n_acc, n_steps*n_acc)
    n_inp = len(batches[0])-1
    dls = DataLoaders(Repeated(batches, bs//n_acc), Repeated([], bs), device='cpu')
    dls.n_inp = n_inp
    learn = Learner(dls, model, loss_func=loss_func, opt_func=opt_func, cbs=[*([GradAccum(n_acc)] if n_acc>1 else []), *cbs])
    learn._do_epoch_validate = lambda *args, **kwargs: None
    return learn

def ratios(make, bs, n_steps, n_acc, cb, pairs):
    plain,watched = learner(make, bs, n_steps, n_acc, []),learner(make, bs, n_steps, n_acc, [cb()])
    for o in (plain,watched): seconds(o)
    res = []
    for i in range(pairs):
        order = (plain,watched) if i%2 else (watched,plain)
        took = {id(o): seconds(o) for o in order}
        res.append(took[id(watched)]/took[id(plain)])
    return res

def peak(make, bs, n_acc, cbs):
    "Most bytes that tensors hold at a time in 8 steps, beyond those of before; and the bytes of the parameters"
    learn = learner(make, bs, 40, n_acc, cbs)
    learn.dls.train.batches = learn.dls.train.batches[:8*n_acc]
    seconds(learn) # The optimizer has its state now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof: seconds(learn)
    events = sorted((e.start_ns(),e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name()=='[memory]')
    return max(np.cumsum([o for _,o in events])),sum(p.numel()*p.element_size() for p in learn.model.parameters())

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--pairs', type=int, default=15)
    p.add_argument('--cases', nargs='*', default=list(cases))
    a = p.parse_args()
    torch.set_num_threads(1)
    lines = []
    for case in a.cases:
        make,bs,n_steps = cases[case]
        for mode,(n_acc,cb) in modes.items():
            rs = sorted(ratios(make, bs, n_steps, n_acc, cb, a.pairs))
            (with_it,size),(without,_) = (peak(make, bs, n_acc, o) for o in ([cb()],[]))
            middle = f'{rs[len(rs)//4]:.3f} to {rs[-1-len(rs)//4]:.3f}'
            lines.append(f"| {case} | {mode} | {a.pairs} | {statistics.median(rs):.3f} | {middle} | {100*(with_it-without)/size:.2f}% |")
            print(lines[-1], flush=True)
    if a.pairs<5: return
    path = Path(__file__).parent/'cost.md'
    old = [o for o in path.read_text().splitlines() if o.startswith(tuple(f'| {c} |' for c in cases if c not in a.cases))] if path.exists() else []
    path.write_text(f"""# What `NoiseScale` costs

Processor time of a training with it over that of the same training without it, median and middle half of the pairs; and how much more memory tensors hold at
their peak, as a part of the parameters' size. {datetime.date.today()}, fastai_bs {fastai_bs.__version__}, fastai {fastai.__version__},
torch {torch.__version__}, Python {platform.python_version()}, CPU, 1 thread. `benchmarks/cost.py` says what is run.

| training | measured | pairs | time | middle half | memory |
|---|---|---|---|---|---|
""" + '\n'.join([*old, *lines]) + '\n')

if __name__=='__main__': main()
