"""What accumulation costs: processor time of a fit with GradAccum over the same fit with a bare callback that accumulates.

    python benchmarks/overhead.py                # overhead.md; several minutes
    python benchmarks/overhead.py --pairs 3      # a quick look, which writes nothing

The bare callback divides each loss by 4 and lets the optimizer step after every fourth micro-batch: nothing less accumulates. Beside it fastai's own
`GradientAccumulation`, and what `NoiseScale` and `ScaledLR` add to `GradAccum(4)`. Pairs of fits, one right after the other and in alternating order;
the figure is the median of the pairs' ratios."""
import argparse, datetime, platform, warnings
from pathlib import Path
import fastai, torch
import numpy as np
from torch import nn
from torchvision.models import resnet18
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
import fastai_bs
from common import seconds
from fastai_bs.all import GradAccum, NoiseScale, ScaledLR

warnings.filterwarnings('ignore')

class Bare(Callback):
    "As little as accumulates four micro-batches of one size"
    order,run_valid = MixedPrecision.order-4,False
    def before_fit(self): self.n = 0
    def before_backward(self): self.learn.loss_grad = self.learn.loss_grad/4
    def before_step(self):
        self.n += 1
        if self.n%4: raise CancelBatchException

def mlp(n_hid): return nn.Sequential(nn.Linear(20,n_hid), nn.ReLU(), nn.Linear(n_hid,10))

# Model, shape of an item, items in a micro-batch, micro-batches in an epoch
cases = {'MLP of 2,397 parameters, 16': (lambda: mlp(77),(20,),16,200), 'MLP with 2,048 hidden units, 128': (lambda: mlp(2048),(20,),128,100),
         'ResNet-18, 16 x 32 x 32': (lambda: resnet18(num_classes=10),(3,32,32),16,16)}
arms = {"fastai's GradientAccumulation": lambda bs: [GradientAccumulation(4*bs)], 'GradAccum(4)': lambda bs: [GradAccum(4)],
        'GradAccum(4), NoiseScale()': lambda bs: [GradAccum(4),NoiseScale()], 'GradAccum(4), ScaledLR': lambda bs: [GradAccum(4),ScaledLR(bs)]}

def learner(case, cbs):
    make,shape,bs,n = cases[case]
    torch.manual_seed(0)
    x,y = torch.randn(n*bs, *shape),torch.randint(10, (n*bs,))
    dl = DataLoader(list(zip(x, y)), bs=bs, num_workers=0)
    learn = Learner(DataLoaders(dl, DataLoader([], bs=bs, num_workers=0), device='cpu'), make(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs)
    learn._do_epoch_validate = lambda *args, **kwargs: None
    return learn

def middle(xs):
    "Median, and its interval of 95% at least by order statistics (of 15 values: the 4th and the 12th)"
    xs,k = sorted(xs),max(0, int(len(xs)/2 - 0.98*len(xs)**0.5))
    return np.median(xs),xs[k],xs[-1-k]

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--pairs', type=int, default=15)
    p.add_argument('--cases', nargs='*', default=list(cases))
    a = p.parse_args()
    torch.set_num_threads(1)
    lines = []
    for case in a.cases:
        n = cases[case][3]
        bare,learns = learner(case, [Bare()]),{nm: learner(case, make(cases[case][2])) for nm,make in arms.items()}
        for o in (bare,*learns.values()): seconds(o)
        for nm,learn in learns.items():
            pairs = []
            for i in range(a.pairs):
                took = {id(o): seconds(o) for o in ((bare,learn) if i%2 else (learn,bare))}
                pairs.append((took[id(learn)],took[id(bare)]))
            m,low,high = middle([x/y for x,y in pairs])
            base,more = np.median([y for _,y in pairs])/n,np.median([x-y for x,y in pairs])/n
            lines.append(f"| {case} | {nm} | {m:.3f} | {low:.3f} to {high:.3f} | {1e3*base:.2f} | {1e3*more:+.3f} |")
            print(lines[-1], flush=True)
    if a.pairs<15 or len(a.cases)<len(cases): return
    (Path(__file__).parent/'overhead.md').write_text(f"""# What accumulation costs

Processor time of a fit over that of the same fit with a bare callback, which divides each loss by 4 and steps after every fourth micro-batch: median of
{a.pairs} pairs with its interval of 95%; and in milliseconds per micro-batch. {datetime.date.today()}, fastai_bs {fastai_bs.__version__},
fastai {fastai.__version__}, torch {torch.__version__}, Python {platform.python_version()}, CPU, 1 thread. `benchmarks/overhead.py` says what is run.

| model, micro-batch | with | time | interval | bare, ms | more, ms |
|---|---|---|---|---|---|
""" + '\n'.join(lines) + '\n')

if __name__=='__main__': main()
