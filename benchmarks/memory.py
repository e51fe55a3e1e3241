"""What a traced training step holds at its peak, against what the allocator gave out in a training; on a CUDA device also the largest batch of a ResNet-50.

    python benchmarks/memory.py --full     # Some minutes on a CPU

The peak of the second step of a training with fastai's `Learner`: on a CUDA device what its allocator says, elsewhere what the events of torch's profiler add
up to. In half precision the forward pass is in autocast with bfloat16."""
import time
from functools import partial

import torch
from torch import nn
from torchvision.models import resnet18, resnet50
from fastai.callback.rnn import ModelResetter, RNNCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastai.tabular.model import TabularModel
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import get_language_model
from fastai.vision.learner import create_body
from fastai.vision.models.unet import DynamicUnet
from fastai_bs.all import GradAccum # noqa: F401 (adds `memory_report` and `max_bs_find`)
from fastai_bs.memory.trace import TracedStep

from frame import Half, main, md_table, measured, step_peak

device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')

class Items:
    "One random item again and again: what items take before they are a batch is not the step's"
    def __init__(self, make, n): self.item,self.n = make(),n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i>=self.n: raise IndexError
        return self.item

class Encoder(nn.Module):
    "A small transformer over 64 tokens"
    def __init__(self):
        super().__init__()
        self.emb,self.head = nn.Embedding(1000,128),nn.Linear(128,1000)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)
    def forward(self, x): return self.head(self.body(self.emb(x)))

def image(px): return torch.randn(3,px,px),torch.randint(10, ())
def mask(): return torch.randn(3,64,64),torch.randint(3, (64,64))
def tokens(): return torch.randint(1000, (64,)),torch.randint(1000, (64,))
def row(): return torch.randint(50, (20,)),torch.randn(16),torch.randint(2, ())
def vector(): return torch.randn(256),torch.randint(10, ())

def mlp(): return nn.Sequential(nn.Linear(256,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(), nn.Linear(1024,10))
def table(): return TabularModel([(50,20)]*20, 16, 2, [1000,500])
def lstm():
    config = dict(emb_sz=100, n_hid=200, n_layers=2, pad_token=1, bidir=False, output_p=0.1, hidden_p=0.1, input_p=0.1, embed_p=0.02, weight_p=0.2,
                  tie_weights=True, out_bias=True)
    return get_language_model(AWD_LSTM, 1000, config=config)
def unet(): return DynamicUnet(create_body(resnet18(), pretrained=False), 3, (64,64))

# Inputs, model, axis of the classes, and items in a micro-batch
cases = {'MLP 256-1024-1024-10': (vector,mlp,-1,512), 'ResNet-18, 64 px': (partial(image, 64),partial(resnet18, num_classes=10),-1,16),
         'ResNet-50, 64 px': (partial(image, 64),partial(resnet50, num_classes=10),-1,16), 'tabular, 20 embeddings, [1000, 500]': (row,table,-1,512),
         'AWD-LSTM, 64 tokens': (tokens,lstm,-1,16), 'transformer, 64 tokens': (tokens,Encoder,-1,32), 'U-Net on a ResNet-18, 64 px': (mask,unet,1,8)}
opts = {'momentum': partial(SGD, mom=0.9), 'Adam': Adam, "torch's AdamW": partial(OptimWrapper, opt=torch.optim.AdamW)}

def learner(make, model, axis, bs, opt_func, n=None):
    items = Items(make, n or 4*bs)
    dls = DataLoaders(*(DataLoader(items, bs=bs, device=device) for _ in range(2)), device=device)
    for dl in dls.loaders: dl.n_inp = len(make())-1
    cbs = [ModelResetter(), RNNCallback()] if model is lstm else []
    return Learner(dls, model().to(device), loss_func=CrossEntropyLossFlat(axis=axis), opt_func=opt_func, cbs=cbs)

def row_of(name, opt, precision):
    make,model,axis,bs = cases[name]
    learn = learner(make, model, axis, bs, opts[opt])
    begin = time.perf_counter()
    traced = sum(TracedStep(learn, precision=precision)(bs).values())
    secs = time.perf_counter()-begin
    if precision=='bf16': learn.add_cb(Half())
    return dict(model=name, optimizer=opt, precision=precision, bs=bs, traced=traced, peak=step_peak(learn), secs=secs)

def resnet50_learner(bs, n, half):
    learn = learner(partial(image, 224), resnet50, -1, bs, Adam, n)
    return learn.to_fp16() if half else learn

def largest(half):
    "The size that is found, whether an epoch's steps run at it, and whether a quarter more fails"
    learn = resnet50_learner(16, 4096, half)
    bs,ends = learn.max_bs_find(margin=0),[]
    for o in (bs,int(1.25*bs)):
        del learn
        torch.cuda.empty_cache()
        learn = resnet50_learner(o, 10*o, half)
        try:
            with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-4)
            ends.append('ran')
        except torch.OutOfMemoryError: ends.append('out of memory')
    return dict(precision='fp16' if half else 'fp32', found=bs, at=ends[0], beyond=ends[1])

def run(args, t, t_largest):
    for name in list(cases)[:1 if args.quick else None]:
        for opt in opts:
            for precision in ('fp32','bf16'):
                if not t.has(model=name, optimizer=opt, precision=precision): t.add(**row_of(name, opt, precision))
    if device.type!='cuda' or args.quick: return
    for half in (False,True):
        if not t_largest.has(precision='fp16' if half else 'fp32'): t_largest.add(**largest(half))

def page(df, found):
    ratio = (df.traced/df.peak).groupby([df.model,df.precision], sort=False).agg(['min','max']).unstack()
    rows = [(o.model,o.optimizer,o.precision,o.bs,f'{o.traced/1e6:,.1f}',f'{o.peak/1e6:,.1f}',f'{o.traced/o.peak:.3f}',f'{o.secs:.1f}')
            for o in df.itertuples()]
    heads = 'model','optimizer','precision','items','traced, MB','allocator, MB','ratio','seconds of the trace'
    short = [(nm,*(f"{o['min',p]:.2f} to {o['max',p]:.2f}" for p in ('fp32','bf16'))) for nm,o in ratio.iterrows()]
    large = f"""
The largest micro-batch of a ResNet-50 at 224 px with Adam, ten steps at it, and at 1.25 times it. {measured(found)}

{md_table(['','found','at it','at 1.25 times it'], found[['precision','found','at','beyond']].values)}""" if len(found) else ''
    return f"""# A traced step against the allocator

{' '.join(__doc__.split(chr(10)*2)[2].split())} {measured(df)}

Traced over allocated, lowest and highest of the optimizers. What oneDNN's LSTM keeps for the backward pass is reckoned.

{md_table(['model','fp32','bf16'], short)}

## Each training

{md_table(heads, rows)}
{large}"""

if __name__=='__main__': main(__doc__, ['memory','memory_largest'], run, page)
