"""What memory_report says of the activations, against what the allocator gave out; on a CUDA device also the largest batch of a ResNet-50.

    python benchmarks/memory.py --full     # A minute on a CPU

Bytes per item: the report's row, and how much the memory in use grows from half of the items to all of them, as the backward pass begins and at its peak. On a
CUDA device that is what its allocator says, elsewhere what the events of torch's profiler add up to. At the peak there are gradients of activations too, which
the report counts as workspace on a CUDA device, and cannot see elsewhere."""
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torchvision.models import resnet18, resnet50
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastai.tabular.model import TabularModel
from fastai_bs.all import GradAccum # noqa: F401 (adds `memory_report` and `max_bs_find`)

from frame import main, md_table, measured

device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')

class Items:
    "Random inputs, made as they are asked for"
    def __init__(self, make, n): self.make,self.n = make,n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i>=self.n: raise IndexError
        return self.make()

class Copies:
    "Two batches made beforehand, a copy of each when its turn comes: fastai's loader holds the items of a batch besides"
    def __init__(self, items, bs):
        self.bs,self.dataset,self.n_inp = bs,items,len(items[0])-1
        self.batches = [tuple(torch.stack(o).to(device) for o in zip(*(items.make() for _ in range(bs)))) for _ in range(2)]
    def __len__(self): return 2
    def __iter__(self): return (tuple(o.clone() for o in b) for b in self.batches)

class Encoder(nn.Module):
    "A small transformer over 64 tokens"
    def __init__(self):
        super().__init__()
        self.emb,self.head = nn.Embedding(1000,128),nn.Linear(128,1000)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.), 2)
    def forward(self, x): return self.head(self.body(self.emb(x))).transpose(1,2)

class Rows(TabularModel):
    def forward(self, x_cat, x_cont): return super().forward(x_cat, x_cont)[:,0]

def image(px): return torch.randn(3,px,px),torch.randint(10, ())
def tokens(): return torch.randint(1000, (64,)),torch.randint(1000, (64,))
def row(): return torch.randint(50, (20,)),torch.randn(16),torch.randn(())
def vector(): return torch.randn(256),torch.randint(10, ())

def mlp(): return nn.Sequential(nn.Linear(256,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(), nn.Linear(1024,10))
def table(): return Rows([(50,20)]*20, 16, 1, [1000,500])

# Inputs, model, loss and items in a micro-batch
cases = {'MLP 256-1024-1024-10': (vector,mlp,nn.CrossEntropyLoss,512), 'ResNet-18, 64 px': (partial(image, 64),resnet18,nn.CrossEntropyLoss,32),
         'tabular, 20 embeddings, [1000, 500]': (row,table,nn.MSELoss,512), 'transformer, 64 tokens': (tokens,Encoder,nn.CrossEntropyLoss,32)}
opts = {'SGD': SGD, 'momentum': partial(SGD, mom=0.9), 'Adam': Adam}

def loader(items, bs): return DataLoader(items, bs=bs, device=device)

def learner(make, model, loss, bs, opt_func, n=None, dl=loader):
    items = Items(make, n or 4*bs)
    dls = DataLoaders(*(dl(items, bs) for _ in range(2)), device=device)
    for dl in dls.loaders: dl.n_inp = len(make())-1
    return Learner(dls, model().to(device), loss_func=loss(), opt_func=opt_func)

class Mark(Callback):
    "Note the memory in use as the backward pass begins"
    order = 1000
    def before_backward(self):
        with record_function('begins'): self.in_use = torch.cuda.memory_allocated() if device.type=='cuda' else None

def in_use(learn):
    "Bytes as the backward pass begins, and at most, in two training steps once the optimizer has its state"
    def _fit():
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.)
    learn._do_epoch_validate = lambda *args, **kwargs: None
    learn.add_cb(Mark())
    _fit()
    if device.type=='cuda':
        torch.cuda.reset_peak_memory_stats()
        _fit()
        return learn.mark.in_use,torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof: _fit()
    events = prof.profiler.kineto_results.events()
    at,n = zip(*sorted((e.start_ns(),e.nbytes()) for e in events if e.name()=='[memory]'))
    used = np.cumsum(n)
    return used[np.searchsorted(at, max(e.start_ns() for e in events if e.name()=='begins'))-1],max(used)

def rows_of(name):
    make,model,loss,bs = cases[name]
    all_of,half = (np.array(in_use(learner(make, model, loss, o, SGD, dl=Copies))) for o in (bs,bs//2))
    begins,most = (all_of-half)/(bs-bs//2)
    for i,(nm,opt_func) in enumerate(opts.items()):
        learn = learner(make, model, loss, bs, opt_func)
        size = sum(p.numel()*p.element_size() for p in learn.model.parameters())
        report = learn.memory_report()
        fixed = report.bytes[:3].tolist()
        yield dict(model=name, optimizer=nm, **dict(zip(('params_mb','grads_mb','state_mb'), (o/1e6 for o in fixed))), exact=fixed==[size,size,i*size],
                   report=report.per_item['activations'], begins=begins, peak=most)

def resnet50_learner(bs, n, half):
    learn = learner(partial(image, 224), resnet50, nn.CrossEntropyLoss, bs, Adam, n)
    return learn.to_fp16() if half else learn

def largest(half):
    "The size that is found, whether an epoch's steps run at it, and whether a quarter more fails"
    learn = resnet50_learner(16, 4096, half)
    bs,ends = learn.max_bs_find(),[]
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
        if not t.has(model=name): t.add_all([*rows_of(name)])
    if device.type!='cuda' or args.quick: return
    for half in (False,True):
        if not t_largest.has(precision='fp16' if half else 'fp32'): t_largest.add(**largest(half))

def page(df, found):
    rows = [(o.model,o.optimizer,f'{o.params_mb:,.3f} / {o.grads_mb:,.3f} / {o.state_mb:,.3f}','yes' if o.exact else 'NO',f'{o.report:,.0f}',
             f'{o.begins:,.0f}',f'{o.report/o.begins:.3f}',f'{o.peak:,.0f}') for o in df.itertuples()]
    heads = 'model','optimizer','fixed, MB','exact','activations, report','in use as backward begins','ratio','at the peak'
    large = f"""
The largest micro-batch of a ResNet-50 at 224 px with Adam, ten steps at it, and at 1.25 times it. {measured(found)}

{md_table(['','found','at it','at 1.25 times it'], found[['precision','found','at','beyond']].values)}""" if len(found) else ''
    return f"""# `memory_report` against the allocator

Megabytes of parameters, gradients and optimizer state, whether they are the exact byte counts, and bytes per item of the activations: by the report, and as
the memory in use grows with the items, when the backward pass begins (and the ratio of the two), and at its peak.
{measured(df)} `benchmarks/memory.py` says what is run.

{md_table(heads, rows)}
{large}"""

if __name__=='__main__': main(__doc__, ['memory','memory_largest'], run, page)
