"""ResNet-18 on Fashion-MNIST, after a course on several GPUs: batch 256 at 0.1 on one device, and 512 at 0.2 on one and on two.

    python benchmarks/resnet.py --full --data DIR     # DIR/fashion_mnist; half an hour on two cores

The course's network has a 3 x 3 stem without pooling, and weights normal x 0.01. For two cores it is narrow here, 16 to 128 channels in place of 64 to 512, the
pictures have 14 x 14 pixels, and there are 20,480 of them."""
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.torch_core import set_seed
from fastai_bs.all import GradAccum

from frame import main, md_table, measured
from ranks import Rows, device, fashion_mnist, fit, on_ranks, world

width,n_epoch,n_items = 16,10,20_480
# Ranks, micro-batches in a step, and the rate; a micro-batch has 256 items on each rank
arms = {'one process, 256': (1,1,0.1), 'one process, 512 as 2 x 256': (1,2,0.2), 'two ranks, 2 x 256': (world,1,0.2),
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

class Dealt(Rows):
    "Its micro-batches are those that the ranks have in a step, one after the other"
    def get_idxs(self):
        idxs,self.epoch = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)),self.epoch+1
        return torch.cat([torch.cat(o) for o in zip(*(h.split(self.bs) for h in idxs.chunk(world)))]).tolist()

def train(r, data, arm, seed, n_epoch, n):
    "Training loss, test accuracy in percent, and the weights in the end"
    ranks,k,lr = arms[arm]
    sets = [(nn.functional.avg_pool2d(x, 2).to(device(r)),y.to(device(r))) for x,y in fashion_mnist(data)]
    (x,y),(tx,ty) = [o[:n] for o in sets[0]],sets[1]
    dls = DataLoaders((Dealt if k>1 else Rows)(x, y, 256, shuffle=True), Rows(tx, ty, 1000), device=x.device)
    learn = Learner(dls, resnet18(seed), loss_func=nn.CrossEntropyLoss(), opt_func=SGD, metrics=accuracy, cbs=[GradAccum(k)]*(k>1))
    if ranks>1: fit(learn, n_epoch, lr)
    else:
        with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, lr)
    weights = torch.cat([p.detach().flatten() for p in learn.model.parameters()]).double().cpu()
    return [(o[0],100*o[2]) for o in learn.recorder.values],weights

def run(args, t):
    for seed in args.seeds or ([0] if args.quick else [0,1,2]):
        last = {}
        for arm,(ranks,_,lr) in arms.items():
            if t.has(arm=arm, seed=seed): continue
            job = args.data,arm,seed,2 if args.quick else n_epoch,2_048 if args.quick else n_items
            epochs,last[arm] = on_ranks(train, *job)[0] if ranks>1 else train(0, *job)
            one = last.get('one process, 512 as 2 x 256')
            apart = ((last[arm]-one).norm()/one.norm()).item() if ranks>1 and one is not None else None
            t.add_all([dict(arm=arm, seed=seed, lr=lr, epoch=i+1, loss=l, accuracy=a, apart=apart) for i,(l,a) in enumerate(epochs)])

def page(df):
    last = df[df.epoch==df.epoch.max()]
    rows = [[arm,f'{of.lr.iloc[0]:g}',f'{of.loss.mean():.3f}',', '.join(f'{o:.2f}' for o in of.accuracy),f'{of.accuracy.mean():.2f}',
             f'{swing.mean():.2f}'] for arm,of in last.groupby('arm', sort=False)
            for swing in [df[(df.arm==arm) & (df.epoch>df.epoch.max()//2)].groupby('seed').accuracy.std()]]
    apart = last.apart.dropna()
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}', f"Narrow, 16 to 128 channels in place of 64 to 512, on {n_items:,} pictures of 14 x 14 pixels; "
        f"3 x 3 stem without pooling, weights normal x 0.01, SGD without momentum at a constant rate, {df.epoch.max()} epochs. BatchNorm has 256 items in all "
        "arms; the two micro-batches of a step of one process are those that the two ranks have.",
        md_table(['trained by','rate','training loss','test accuracy, %, by seed','mean','its swing over the second half of the epochs'], rows),
        f"Weights of the two ranks and of the one process at 512 in the end: {apart.min():.1e} to {apart.max():.1e} of their norm apart." if len(apart) else '',
        measured(df)])

if __name__=='__main__': main(__doc__, ['resnet'], run, page)
