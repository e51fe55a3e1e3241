"""What accumulation costs: processor time of a fit with GradAccum over the same fit with a bare callback that accumulates.

    python benchmarks/overhead.py --full     # Several minutes

The bare callback divides each loss by 4 and lets the optimizer step after every fourth micro-batch: nothing less accumulates. Beside it fastai's own
`GradientAccumulation`, and what `NoiseScale` and `ScaledLR` add to `GradAccum(4)`; `NoiseScale` measures each step, as the first 100 of a fit, or every 4th,
as from then on. Pairs of fits, one right after the other and in alternating order; the figure is the median of the pairs' ratios."""
import statistics

import torch
from torch import nn
from torchvision.models import resnet18
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from fastai_bs.all import GradAccum, NoiseScale, ScaledLR

from frame import Bare, in_pairs, main, md_table, measured, middle, seconds

def mlp(n_hid): return nn.Sequential(nn.Linear(20,n_hid), nn.ReLU(), nn.Linear(n_hid,10))

# Model, shape of an item, items in a micro-batch, micro-batches in an epoch
cases = {'MLP of 2,397 parameters, 16': (lambda: mlp(77),(20,),16,200), 'MLP with 2,048 hidden units, 128': (lambda: mlp(2048),(20,),128,100),
         'ResNet-18, 16 x 32 x 32': (lambda: resnet18(num_classes=10),(3,32,32),16,16)}
arms = {"fastai's GradientAccumulation": lambda bs: [GradientAccumulation(4*bs)], 'GradAccum(4)': lambda bs: [GradAccum(4)],
        'GradAccum(4), NoiseScale(every=1)': lambda bs: [GradAccum(4),NoiseScale(every=1)],
        'GradAccum(4), NoiseScale(every=4)': lambda bs: [GradAccum(4),NoiseScale(every=4)], 'GradAccum(4), ScaledLR': lambda bs: [GradAccum(4),ScaledLR(bs)]}

def learner(case, cbs):
    make,shape,bs,n = cases[case]
    torch.manual_seed(0)
    x,y = torch.randn(n*bs, *shape),torch.randint(10, (n*bs,))
    dl = DataLoader(list(zip(x, y)), bs=bs, num_workers=0)
    learn = Learner(DataLoaders(dl, DataLoader([], bs=bs, num_workers=0), device='cpu'), make(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs)
    learn._do_epoch_validate = lambda *args, **kwargs: None
    return learn

def run(args, t):
    for case,(*_,bs,n) in cases.items():
        for nm,make in arms.items():
            if t.has(model=case, cbs=nm): continue
            learn,bare = learner(case, make(bs)),learner(case, [Bare(4)])
            pairs = in_pairs(lambda: seconds(learn), lambda: seconds(bare), 3 if args.quick else 41) # noqa: B023
            time,low,high = middle([a/b for a,b in pairs])
            t.add(model=case, cbs=nm, pairs=len(pairs), time=time, low=low, high=high, bare_ms=1e3*statistics.median(b for _,b in pairs)/n,
                  more_ms=1e3*statistics.median(a-b for a,b in pairs)/n)

def page(df):
    rows = [(o.model,o.cbs,f'{o.time:.3f}',f'{o.low:.3f} to {o.high:.3f}',f'{o.bare_ms:.2f}',f'{o.more_ms:+.3f}') for o in df.itertuples()]
    return f"""# What accumulation costs

Processor time of a fit over that of the same fit with a bare callback, which divides each loss by 4 and steps after every fourth micro-batch: median of
{df.pairs.min()} pairs with its interval of 95%; and in milliseconds per micro-batch. {measured(df)}
`benchmarks/overhead.py` says what is run.

{md_table(['model, micro-batch','with','time','interval','bare, ms','more, ms'], rows)}"""

if __name__=='__main__': main(__doc__, ['overhead'], run, page)
