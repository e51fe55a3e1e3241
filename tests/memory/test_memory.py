"`memory_report`, `max_bs_find` and `bn_to_gn`: the bytes of a training step, the largest batch that trains, and a norm that does not ask for one"
import gc, math, pickle, sys, weakref
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset, SubsetRandomSampler
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock
from fastai.callback.data import PartialDL
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastai.tabular.model import TabularModel
from fastai.text.data import LMDataLoader, SortedDL
from fastai.torch_core import find_bs

from fastai_bs.finder import bs_find as finder # noqa: F401 (`finder` patches `bs_find` into `Learner`)
from fastai_bs.memory import group_norm, max_bs # noqa: F401 (`finder` patches `bs_find` into `Learner`)
from fastai_bs.memory import report as memory # noqa: F401 (`finder` patches `bs_find` into `Learner`)
from fastai_bs.learner import mock # noqa: F401 (`finder` patches `bs_find` into `Learner`)
from fastai_bs.finder import timing # noqa: F401 (`finder` patches `bs_find` into `Learner`)
from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.memory.report import card_of, limit_bytes
from fastai_bs.schedule.scaled_lr import ScaledLR
from fastai_bs.utils.checks import n_bytes
from fastai_bs.memory.group_norm import bn_to_gn
from fastai_bs.memory.report import MemoryReport
from fastai_bs.utils.text import bytes_text
from fastai_bs.memory.max_bs import largest
from fastai_bs.noise.noise_scale import NoiseScale
from helpers import changes, distance, flat, loaders, mlp, momentum_sgd, pairwise, picture, quiet_learner, regression
from gloo_ranks import on_ranks

inf,nan = math.inf,math.nan
f32 = torch.float32

def learner(n=50, bs=4, model=None, dls=None, seed=0, **kwargs):
    "On random numbers"
    dls = dls or loaders(regression(n, dtype=f32), bs, shuffle=True)
    torch.manual_seed(seed)
    dls.train.rng.seed(seed) if hasattr(dls.train, 'rng') else None
    return quiet_learner(dls, model or mlp(dtype=f32), **kwargs)

def size_of(ts): return sum(t.numel()*t.element_size() for t in ts)

def no_hook_left():
    top = getattr(torch._C._autograd, '_top_saved_tensors_default_hooks', None) # An older torch cannot be asked
    return top is None or top(True) is None

# The report: what does not depend on the batch

def classes(n, shape, n_class=3, seed=0):
    "`n` items of a shape, and their class"
    g = torch.Generator().manual_seed(seed)
    return list(zip(torch.randn(n, *shape, generator=g), torch.randint(0, n_class, (n,), generator=g)))

class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.enc,self.out = nn.Embedding(20,8),nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),nn.Linear(8,3)
    def forward(self, x): return self.out(self.enc(self.emb(x)).mean(1))

def mlp_learner(bs=8, **kwargs):
    return learner(bs=bs, dls=loaders(classes(20, (5,)), bs), model=nn.Sequential(nn.Linear(5,7), nn.ReLU(), nn.Linear(7,3)),
                   loss_func=nn.CrossEntropyLoss(), **kwargs)

def small_resnet():
    "torchvision's blocks, with few channels"
    down = nn.Sequential(nn.Conv2d(8,16,1,2,bias=False), nn.BatchNorm2d(16))
    return nn.Sequential(nn.Conv2d(3,8,3,bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), BasicBlock(8,8), BasicBlock(8,16,2,down),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16,3))

def resnet_learner(**kwargs):
    return learner(dls=loaders(classes(4, (3,12,12)), 4), model=small_resnet(), loss_func=nn.CrossEntropyLoss(), **kwargs)

def tabular_learner(**kwargs):
    items = [(torch.tensor([i%5,i%4]),x,y) for i,(x,y) in enumerate(classes(20, (3,)))]
    return learner(dls=loaders(items, 8), model=TabularModel([(5,3),(4,2)], 3, 3, [8,4]), loss_func=nn.CrossEntropyLoss(), **kwargs)

def transformer_learner(**kwargs):
    items = [(torch.randint(0, 20, (6,)),y) for _,y in classes(20, ())]
    return learner(dls=loaders(items, 8), model=Transformer(), loss_func=nn.CrossEntropyLoss(), **kwargs)

learners = dict(mlp=mlp_learner, resnet=resnet_learner, tabular=tabular_learner, transformer=transformer_learner)

# Optimizer; tensors of state for each parameter; bytes of the steps of each
optimizers = dict(sgd=(SGD,0,0), momentum=(partial(SGD, mom=0.9),1,0), adam=(Adam,2,0), torch_adamw=(partial(OptimWrapper, opt=torch.optim.AdamW),2,4),
    torch_momentum=(partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9),1,0))

@pytest.mark.parametrize('opt', optimizers)
@pytest.mark.parametrize('make', learners)
def test_exact_bytes(make, opt):
    "As counted by hand; none of these grows with the batch"
    opt_func,n_state,step = optimizers[opt]
    learn = learners[make](opt_func=opt_func)
    report = learn.memory_report()
    params = list(learn.model.parameters())
    assert report.bytes['parameters']==report.bytes['gradients']==size_of(params)
    assert report.bytes['optimizer state']==n_state*size_of(params)+step*len(params)
    assert report.bytes['buffers']==size_of(learn.model.buffers()) and (report.bytes['buffers']>0)==(make in ('resnet','tabular'))
    assert (report.per_item[:4]==0).all() and report.per_item['activations']>0
    assert np.isnan(report.loc['workspace']).all()
    for nm in report.columns: assert report[nm]['total']==report[nm].drop('total').sum()
    assert list(report.index)==['parameters','gradients','optimizer state','buffers','activations','workspace','total']
    assert report.bs==(4 if make=='resnet' else 8)

@pytest.mark.parametrize('opt', optimizers)
def test_frozen_body(opt):
    "Frozen parameters have neither gradient nor state"
    opt_func,n_state,step = optimizers[opt]
    learn = mlp_learner(opt_func=opt_func)
    for p in learn.model[0].parameters(): p.requires_grad_(False)
    report = learn.memory_report()
    head = list(learn.model[2].parameters())
    assert report.bytes['parameters']==size_of(learn.model.parameters()) and report.bytes['gradients']==size_of(head)
    assert report.bytes['optimizer state']==n_state*size_of(head)+step*len(head)
    assert report.per_item['activations']==4*(7+3)+8 # Not its input, which nothing needs

def test_gradients_that_frozen_parameters_hold():
    "They take their memory"
    learn = mlp_learner(opt_func=SGD)
    learn.fit(1, 0.1)
    for p in learn.model[0].parameters(): p.requires_grad_(False)
    assert learn.memory_report().bytes['gradients']==size_of(learn.model.parameters())

def test_tied_weights():
    "Count once, with their gradient and state"
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb,self.out = nn.Embedding(20,8),nn.Linear(8,20,bias=False)
            self.out.weight = self.emb.weight
            self.register_buffer('whole', torch.zeros(10))
            self.register_buffer('part', self.whole[:4])
        def forward(self, x): return self.out(self.emb(x))
    items = [(torch.tensor(i%20),torch.tensor((i+1)%20)) for i in range(20)]
    report = learner(dls=loaders(items, 4), model=Tied(), loss_func=nn.CrossEntropyLoss(), opt_func=Adam).memory_report()
    assert report.bytes.iloc[:4].tolist()==[640,640,1280,40]

@pytest.mark.parametrize('dtype,size', [(torch.bfloat16,2), (torch.float16,2), (torch.float64,8)])
def test_other_precisions(dtype, size):
    items = [(x.to(dtype),y.to(dtype)) for x,y in regression(20, dtype=f32)]
    learn = learner(dls=loaders(items, 8), model=mlp(dtype=dtype))
    report = learn.memory_report()
    assert report.bytes.iloc[:3].tolist()==[34*size]*3 and report.per_item['activations']==size*(5+4+2+2)

def test_sparse_gradients():
    "Indices and values"
    items = [(torch.tensor([i,i+1,i+2]),torch.tensor(0.)) for i in range(16)]
    learn = learner(dls=loaders(items, 4), model=nn.Sequential(nn.Embedding(20,8,sparse=True), nn.Flatten(), nn.Linear(24,1)), opt_func=SGD,
        loss_func=lambda p,y: p.sum())
    report = learn.memory_report()
    assert report.bytes['gradients']==12*(8+8*4)+25*4 and report.bytes['parameters']==160*4+25*4

def test_without_parameters_that_train_and_with_meta_state():
    assert memory.storage_bytes([torch.empty(5, device='meta')])==0
    t = torch.zeros(6)
    assert memory.storage_bytes([t, t[:2], t.view(2,3), torch.zeros(2, dtype=torch.int64)])==24+16
    assert len(memory.tensors({'a': [t,(t,{'b': t})], 'c': 'text', 'd': 3, 'e': None}))==3

# The report: activations

@pytest.mark.parametrize('bs', [2,3,8,16,20])
def test_activations_of_the_mlp(bs):
    "Input, ReLU's output, log-softmax, target; and the one number that the loss divides by"
    report = mlp_learner().memory_report(bs)
    by_hand = 4*(5+7+3)+8
    assert report.per_item['activations']==by_hand and 0<=report.bytes['activations']-bs*by_hand<=4
    assert report.bs==bs and report.per_item['total']==by_hand

class Sums(nn.Module):
    "A layer, and what `f` makes of it"
    def __init__(self, f):
        super().__init__()
        self.lin,self.f = nn.Linear(5,4),f
        self.register_buffer('const', torch.full((4,), 0.5))
    def forward(self, x): return self.f(self, self.lin(x))

def _sum(p, y): return p.sum()

@pytest.mark.parametrize('f,floats,const', [
    (lambda m,h: h, 5, 0),
    (lambda m,h: h*h, 5+4, 0),
    (lambda m,h: h.view(-1,2,2).sin()*h.view(-1,2,2), 5+4+4, 0), # The same storage twice, and the sine
    (lambda m,h: h.t()@h, 5+4, 0),
    (lambda m,h: h[:,:1]*h[:,1:2], 5+4, 0), # Two parts of one storage
    (lambda m,h: h*m.const, 5, 0), # A buffer counts as one
    (lambda m,h: h@m.lin.weight, 5+4, 0), # A parameter too
    (lambda m,h: h.detach().exp()+h, 5, 0),
    (lambda m,h: h@(m.lin.weight*torch.ones(4,5)), 5+4, 2*80), # A mask on weights and what it makes of them: as much whatever the batch
], ids=['nothing','once','view','transposed','parts','buffer','parameter','detached','mask'])
def test_each_storage_once(f, floats, const):
    learn = learner(model=Sums(f), loss_func=_sum)
    report = learn.memory_report(6)
    assert report.per_item['activations']==4*floats and report.bytes['activations']==6*4*floats+const

def test_of_one_item():
    "The bytes per item are those of a second one"
    report = mlp_learner().memory_report(1)
    assert report.bs==1 and report.per_item['activations']==68 and 68<=report.bytes['activations']<=72

def test_what_grows_faster():
    "`per_item` is the slope between the report's size and half of it"
    report = learner(model=Sums(lambda m,h: (h@h.t()).exp()), loss_func=_sum).memory_report(9)
    def by_hand(n): return 4*(5*n+4*n+n*n)
    assert report.bytes['activations']==by_hand(9) and report.per_item['activations']==(by_hand(9)-by_hand(4))/5

@pytest.mark.parametrize('bs', range(2, 20))
def test_its_own_total_holds_its_own_batch(bs):
    report = learner(model=Sums(lambda m,h: (h@h.t()).exp()), loss_func=_sum).memory_report(bs)
    assert report.max_bs(report.bytes['total'])==bs

def test_only_training_batches_of_its_size_count():
    "The left-over of an epoch does not, nor does validation"
    seen = []
    class Look(Callback):
        def after_pred(self): seen.append((len(self.x),self.training))
    report = learner(n=7, cbs=Look()).memory_report(4)
    assert seen==[(4,True),(4,True),(2,True),(2,True)] and report.bytes['activations']==4*4*(5+4+2+2)

def test_what_callbacks_do_counts():
    "Before and after the forward pass"
    class Keeps(Callback):
        def before_batch(self): self.learn.xb = ((self.x*torch.ones(5, requires_grad=True)).tanh(),)
        def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+(self.pred*self.pred).sum()
    base,more = (learner(cbs=cbs).memory_report(8) for cbs in ([],[Keeps()]))
    # x itself, not the 5 ones; tanh's output, which the first layer keeps too. The prediction is kept by the loss anyway
    assert more.per_item['activations']-base.per_item['activations']==4*5
    assert more.bytes['activations']-base.bytes['activations']==8*4*5

def test_the_backward_pass_is_not_in_it():
    "What a second derivative would keep in it is not there in a plain training"
    class Twice(Callback):
        def after_backward(self):
            with torch.enable_grad(): self.kept = (self.x*torch.ones(5, requires_grad=True)).exp()
    base,more = (learner(cbs=cbs).memory_report(8) for cbs in ([],[Twice()]))
    pd.testing.assert_frame_equal(base, more)

@pytest.mark.parametrize('make', learners)
def test_same_before_and_after_training(make):
    "What the optimizer will have is in it already"
    learn = learners[make](opt_func=Adam)
    before = learn.memory_report()
    learn.fit(1, 0.001)
    pd.testing.assert_frame_equal(learn.memory_report(), before)

def test_twice_the_same():
    learn = learner()
    pd.testing.assert_frame_equal(learn.memory_report(), learn.memory_report())
    assert learn.memory_report().bytes.equals(learn.memory_report(4).bytes)

def test_torch_loaders():
    items = regression(20, dtype=f32)
    learn = learner(dls=DataLoaders(TorchDataLoader(items, 4, shuffle=True), TorchDataLoader(items, 4), device='cpu'))
    pd.testing.assert_frame_equal(learn.memory_report(), learner().memory_report())
    assert learn.memory_report(10).bs==10

@pytest.mark.parametrize('cbs', [lambda: GradAccum(4), lambda: GradAccum(4, on_oom='split'), lambda: NoiseScale(), lambda: ScaledLR(2),
    lambda: GradientAccumulation(16),
    lambda: MixedPrecision(), lambda: CSVLogger(), lambda: SaveModelCallback(), lambda: EarlyStoppingCallback(), lambda: GradientClip(0.1),
    lambda: [GradAccum(4), NoiseScale(), ScaledLR(2), CSVLogger(), SaveModelCallback(), GradientClip(0.1), ProgressCallback()]])
def test_callbacks_on_the_learner(cbs, tmp_path, capsys):
    "The same bytes; they keep still, and write nothing"
    plain,learn = learner(opt_func=Adam),learner(opt_func=Adam, cbs=cbs())
    was = picture(learn)
    report = learn.memory_report()
    assert changes(was, picture(learn))==[] and list(tmp_path.iterdir())==[] and capsys.readouterr().out==''
    pd.testing.assert_frame_equal(report.iloc[:4], plain.memory_report().iloc[:4])
    if not hasattr(learn, 'mixed_precision'): pd.testing.assert_frame_equal(report, plain.memory_report())

class Skip(Callback):
    "Skips the first `n` steps of a fit, as mixed precision does until it has found its scale"
    order = 20
    def __init__(self, n): self.n = n
    def before_fit(self): self.k = 0
    def before_step(self):
        self.k += 1
        if self.k<=self.n: raise CancelStepException

@pytest.mark.parametrize('n', [0,1,2,4])
def test_steps_that_are_skipped_do_not_count(n):
    assert learner(opt_func=Adam, cbs=Skip(n)).memory_report().bytes['optimizer state']==2*34*4

# The report: the learner

@pytest.mark.parametrize('trained', [False,True], ids=['new','trained'])
@pytest.mark.parametrize('bs', [None,1,7])
@pytest.mark.parametrize('make', ['mlp','transformer'])
def test_the_learner_is_as_it_was(make, bs, trained):
    learn = learners[make](opt_func=Adam)
    if trained: learn.fit(1, 0.01)
    was = picture(learn)
    learn.memory_report(bs)
    assert changes(was, picture(learn))==[] and no_hook_left()
    if not trained: assert learn.opt is None and all(p.grad is None for p in learn.model.parameters()) and not hasattr(learn, 'lr_finder')

def test_buffers_and_modes_are_as_they_were():
    learn = tabular_learner()
    learn.model.eval()
    was = picture(learn)
    learn.memory_report()
    assert changes(was, picture(learn))==[]

@pytest.mark.parametrize('event',
    ['before_fit','before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch',
    'after_fit'])
def test_after_an_exception(event):
    "It is raised as it is, and no hook stays behind"
    class Fails(Callback): pass
    def fail(*args): raise KeyError('mine')
    learn = learner(cbs=Fails(**{event: fail}), opt_func=Adam)
    was = picture(learn)
    with pytest.raises(KeyError, match='mine'): learn.memory_report()
    assert changes(was, picture(learn))==[] and no_hook_left()
    learn.remove_cb(learn.fails)
    assert learn.memory_report().bytes['parameters']==34*4

def test_after_an_exception_in_the_model():
    def fail(m, h): raise RuntimeError('model')
    learn = learner(model=Sums(fail))
    was = picture(learn)
    with pytest.raises(RuntimeError, match='model'): learn.memory_report()
    assert changes(was, picture(learn))==[] and no_hook_left()

def test_memory_is_given_back():
    "Neither the report nor the learner holds a tensor of the step"
    refs = []
    class Look(Callback):
        def after_pred(self): refs.append(weakref.ref(self.pred))
    learn = learner(cbs=Look())
    report = learn.memory_report()
    gc.collect()
    assert len(refs)==4 and all(o() is None for o in refs) and report.bs==4

def test_memory_is_given_back_after_an_exception():
    "A graph that never saw its backward pass: it must not hold itself"
    refs = []
    class Fails(Callback):
        def after_loss(self):
            refs.append(weakref.ref(self.pred))
            if len(refs)==2: raise KeyError('mine')
    learn = learner(model=Sums(lambda m,h: h.tanh()), loss_func=_sum, cbs=Fails())
    with pytest.raises(KeyError): learn.memory_report()
    gc.collect()
    assert len(refs)==2 and all(o() is None for o in refs)

# The report: a frame

def report_of(activations=100., per_item=25., fixed=(400.,400.,800.,10.), bs=4, workspace=(nan,nan)):
    rows = [(o,0.) for o in fixed]+[(activations,per_item),workspace]
    rows.append(tuple(np.nansum([o[i] for o in rows]) for i in range(2)))
    res = MemoryReport(rows, index=['parameters','gradients','optimizer state','buffers','activations','workspace','total'], columns=['bytes','per_item'])
    res.bs = bs
    return res

@pytest.mark.parametrize('limit,n', [(1635,1), (1659.9,1), (1660,2), (1709,3), (1710,4), (1735,5), (26_610,1000), ('2KB',15), ('2KiB',17), ('1MB',39935),
    ('1.5 KB',None),
    (1634.9,None), (1610,None)])
def test_max_bs(limit, n):
    report = report_of()
    if n: assert report.max_bs(limit)==n and type(report.max_bs(limit)) is int
    else:
        with pytest.raises(ValueError, match="does not hold a micro-batch of one item: 1.61 KB are needed whatever the batch size, and 25 B for each item"):
            report.max_bs(limit)

def test_max_bs_with_what_is_there_whatever_the_batch():
    "Activations of 30 + 25n, workspace of 50 + 10n"
    report = report_of(130., 25., workspace=(90.,10.))
    assert [report.max_bs(1690+35*n+d) for n,d in ((1,0),(2,-1),(2,0),(2,34),(100,0))]==[1,1,2,2,100]

@pytest.mark.parametrize('fixed,row,size', [((3000.,1.,1.,1.),'parameters','3 KB'), ((1.,3000.,1.,1.),'gradients','3 KB'),
    ((1.,1.,4e6,1.),'optimizer state','4 MB'),
    ((1.,1.,1.,3000.),'buffers','3 KB'), ((3000.,3000.,6000.,1.),'parameters','3 KB')])
def test_a_limit_below_one_row(fixed, row, size):
    "The row is named"
    with pytest.raises(ValueError, match=f"The memory of the {row} alone is {size}, more than `limit`=2 KB: take a smaller model, an optimizer"):
        report_of(fixed=fixed).max_bs('2KB')

def test_a_limit_below_the_rows_together():
    with pytest.raises(ValueError,
        match="`limit`=1 KB does not hold a micro-batch of one item: 1.61 KB are needed whatever the batch size"): report_of().max_bs('1KB')

@pytest.mark.parametrize('per_item', [0.,-5.])
def test_nothing_grows(per_item):
    with pytest.raises(ValueError, match="By this report an item more takes no memory, so it says nothing of the largest batch"):
        report_of(per_item=per_item).max_bs('1GB')

def test_it_is_a_frame():
    report = report_of()
    assert isinstance(report, pd.DataFrame) and list(report.columns)==['bytes','per_item'] and report.dtypes.tolist()==[float,float]
    for part in (report.iloc[:4], report[['bytes']], report.loc[['total','buffers']], report.sort_values('bytes'), report.reset_index(), report.copy(),
        report/2, report.T,
                 pickle.loads(pickle.dumps(report))):
        assert isinstance(part, MemoryReport) and part.bs==4 and repr(part) and part._repr_html_()
    assert isinstance(report.bytes, pd.Series) and report.bytes.sum()>0
    assert pickle.loads(pickle.dumps(report)).max_bs(1735)==5

def test_a_frame_that_pandas_makes():
    report = report_of()
    assert repr(pd.concat([report, report])) and repr(MemoryReport({'bytes': [1.], 'per_item': [1.]}))

def testbytes_text():
    "For people; other columns as pandas shows them"
    report = report_of()
    assert repr(report).splitlines()==['Memory of a training step, micro-batches of 4 items', '                   bytes per_item',
        'parameters         400 B      0 B',
        'gradients          400 B      0 B', 'optimizer state    800 B      0 B', 'buffers             10 B      0 B', 'activations        100 B     25 B',
        'workspace                        ', 'total            1.71 KB     25 B']
    html = report._repr_html_()
    assert html.startswith('<p>Memory of a training step, micro-batches of 4 items</p><table') and '<td>1.71 KB</td>' in html and 'nan' not in html.lower()
    part = report[['bytes']]
    assert repr(part)==repr(pd.DataFrame(part)) and 'KB' not in repr(part) and '<table' in part._repr_html_() and 'KB' not in part._repr_html_()

def test_plot():
    "On axes that are given, or new ones; grey and blue make the row"
    import matplotlib.pyplot as plt
    report = report_of(130.)
    _,ax = plt.subplots()
    assert report.plot_memory(ax) is ax and report.plot_memory() is not ax
    assert ax.get_xlabel()=='KB (total 1.74 KB)' and ax.get_title()=='A training step, micro-batches of 4 items'
    assert [o.get_text() for o in ax.get_yticklabels()]==['parameters','gradients','optimizer state','buffers','activations']
    stays,grows = ([p.get_width()*1000 for p in c] for c in ax.containers)
    assert stays==pytest.approx([400,400,800,10,30]) and grows==pytest.approx([0,0,0,0,100])
    assert [p.get_x()*1000 for p in ax.containers[1]]==pytest.approx([400,400,800,10,30])
    assert [t.get_text() for t in ax.texts]==[' 400 B',' 400 B',' 800 B',' 10 B',' 130 B'] and ax.yaxis_inverted()
    assert [t.get_text() for t in ax.get_legend().get_texts()]==['whatever the batch size','for 4 items']

@pytest.mark.parametrize('size,label', [(1e10,'GB (total'), (1e7,'MB (total'), (1e4,'KB (total'), (10.,'bytes (total')])
def test_unit_of_the_plot(size, label):
    ax = report_of(fixed=(size,0.,0.,0.), activations=1., per_item=-1., workspace=(5.,nan)).plot_memory()
    assert ax.get_xlabel().startswith(label) and len(ax.texts)==6 and all(p.get_width()==0 for p in ax.containers[1])

# Sizes

@pytest.mark.parametrize('size,n', [('16GB',16e9), ('16GiB',16*2**30), ('16G',16e9), ('16Gi',16*2**30), ('500 MiB',500*2**20), ('1.5 KB',1500), ('1.5kB',1500),
    ('2 kiB',2048),
    ('2k',2000), ('7B',7), ('7',7), (' 7 B ',7), ('3TB',3e12), ('3TiB',3*2**40), ('12MB',12e6), ('12M',12e6), (12,12), (12.5,12.5), (np.int64(5),5),
        (np.float32(5),5)])
def test_n_bytes(size, n):
    assert n_bytes(size)==n and type(n_bytes(size)) is float

bad_sizes = [(o,ValueError,f"A size in memory must be a number of bytes, or a string as '16GB' or '500MiB', got {o!r}") for o in
             ('', 'GB', '16XB', '16 G B', '-5GB', '16GBs', 'auto', '1,5GB', '5iB', '5i', '16GB 3', '1.2.3GB', 'inf')]
bad_sizes += [(o,TypeError,"A size in memory must be a number of bytes, or a string as '16GB' or '500MiB', got") for o in (True, [1], 1j, b'5')]
bad_sizes += [(o,ValueError,f"A size in memory must be above 0 bytes and finite, got {o}") for o in (0, -1, nan, -inf, 0.)]

@pytest.mark.parametrize('size,error,says', bad_sizes)
def test_no_size(size, error, says):
    with pytest.raises(error) as e: n_bytes(size)
    assert says in str(e.value)

def test_no_size_at_all():
    with pytest.raises(ValueError): n_bytes('0GB')

@pytest.mark.parametrize('n,text', [(0,'0 B'), (12,'12 B'), (999,'999 B'), (999.4,'999 B'), (999.5,'1 KB'), (1000,'1 KB'), (1234,'1.23 KB'),
    (999_499,'999 KB'), (999_500,'1 MB'), (5e6,'5 MB'),
    (123456789,'123 MB'), (999.6e6,'1 GB'), (1.6e10,'16 GB'), (-5,'-5 B'), (-5e6,'-5 MB'), (nan,''), (0.25,'0.25 B'),
    (2e12,'2 TB')])
def test_bytes_for_people(n, text): assert bytes_text(n)==text

# The search by itself

def search(fits_up_to, start, most):
    tried = []
    return largest(lambda n: tried.append(n) or n<=fits_up_to, start, most),tried

def check_search(fits_up_to, start, most):
    res,tried = search(fits_up_to, start, most)
    assert res==min(fits_up_to, most)
    assert len(set(tried))==len(tried) and all(1<=n<=most for n in tried) and (res==0 or res in tried)
    assert len(tried)<=2*math.log2(most+1)+1
    if most: assert tried[0]==min(start, most)

def test_largest_exhaustively():
    for most in range(0, 26):
        for start in range(1, 28):
            for fits in range(0, 28): check_search(fits, start, most)

@given(st.integers(0, 10**7), st.integers(1, 10**7), st.integers(1, 10**7))
@settings(max_examples=300, deadline=None)
def test_largest(fits_up_to, start, most): check_search(fits_up_to, start, most)

@pytest.mark.parametrize('fits_up_to,start,most,tried', [(100,32,1000,[32,64,128,96,112,104,100,102,101]), (5,4,9,[4,8,6,5]), (99,4,9,[4,8,9]),
    (0,8,9,[8,4,2,1]), (1,1,1,[1]),
    (50,64,50,[50]), (3,1,8,[1,2,4,3])])
def test_the_way_it_goes(fits_up_to, start, most, tried): assert search(fits_up_to, start, most)[1]==tried

# The search on a learner

def oom(): return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

class Limit(Callback):
    "Memory for `most` items, in one part of the step; from the fit's step `since` on. What it saw is kept elsewhere: a search would undo it"
    order = 20
    def __init__(self, most, where='forward', since=0, error=oom):
        seen = [] # (items, in training?, weak reference to the prediction)
        self.most,self.where,self.since,self.error = most,where,since,error
        self.note,self.seen = seen.append,lambda: seen
    def before_fit(self):
        self.n = 0
        if self.where=='optimizer': self.opt.cbs.append(lambda p, **kwargs: self.check('optimizer'))
    def check(self, where):
        if where==self.where and self.n>=self.since and find_bs(self.learn.xb)>self.most: raise self.error()
    def after_pred(self):
        self.note((len(self.x),self.training,weakref.ref(self.pred)))
        if not self.training: return self.check('validation')
        self.check('forward')
        self.pred.register_hook(lambda g: self.check('backward'))
    def before_step(self): self.check('step')
    def after_step(self): self.n += 1

def tried(limit):
    "Sizes in training, in their order"
    res = []
    for n,training,_ in limit.seen():
        if training and (not res or res[-1]!=n): res.append(n)
    return res

places = ['forward','backward','step','optimizer','validation']

def limited(most, where='forward', since=0, error=oom, n=50, bs=4, valid_bs=None, opt_func=Adam, **kwargs):
    items = regression(n, dtype=f32)
    dls = DataLoaders(DataLoader(items, bs=bs, shuffle=True, num_workers=0), DataLoader(items, bs=valid_bs or bs, num_workers=0), device='cpu')
    learn = learner(dls=dls, opt_func=opt_func, **kwargs)
    return learn.add_cb(Limit(most, where, since, error))

@pytest.mark.parametrize('where,since,limit', pairwise(places, [0,1], [None,inf,'1MB']))
def test_where_memory_runs_out(where, since, limit):
    "From the first step on, or from the second, when the optimizer's state is there: 13 items fit, and nothing has happened to the learner"
    if where=='validation' and since: since = 3
    learn = limited(13, where, since)
    was = picture(learn)
    assert learn.max_bs_find(limit=limit)==13
    assert changes(was, picture(learn))==[] and no_hook_left()
    sizes = [o for o in tried(learn.limit) if o>4 or limit==inf] # Without those of the report, which bounds nothing here, but is where the search begins
    assert sizes==([4,8,16,12,14,13] if limit==inf else [50,25,12,18,15,13,14])
    assert (13,False) in [o[:2] for o in learn.limit.seen()]

@pytest.mark.parametrize('where', places)
@pytest.mark.parametrize('trained', [False,True], ids=['new','trained'])
def test_training_goes_on_as_if_nothing_had_happened(where, trained):
    a,b = limited(13, where),limited(13, where)
    for learn in (a,b):
        if trained: learn.fit(1, 0.01)
    b.max_bs_find()
    for learn in (a,b): learn.fit(1, 0.01)
    assert torch.equal(flat(a), flat(b)) and a.recorder.values==b.recorder.values
    assert torch.equal(torch.stack(a.recorder.losses), torch.stack(b.recorder.losses))

@pytest.mark.parametrize('where', places)
@pytest.mark.parametrize('most,sizes', [(5,[16,8,4,6,5]), (1,[16,8,4,2,1]), (15,[16,8,12,14,15])])
def test_at_the_first_trial(where, most, sizes):
    "Today's batch does not fit: smaller ones are tried"
    learn = limited(most, where, bs=16)
    assert learn.max_bs_find(limit=inf)==most and tried(learn.limit)==sizes

@pytest.mark.parametrize('kwargs', [{}, dict(limit='1MB'), dict(start=1)])
def test_at_the_first_trial_with_a_limit(kwargs): assert limited(5, bs=16).max_bs_find(**kwargs)==5

@pytest.mark.parametrize('where', places)
def test_at_every_size(where):
    "A clear error, with what the device said; the learner is as it was"
    learn = limited(0, where, bs=16)
    was = picture(learn)
    with pytest.raises(RuntimeError,
        match="(?s)Not even a micro-batch of one item can be trained on in this memory \\(.*CUDA out of memory. Tried to allocate 20.00 MiB.*\\): take "
                       "a smaller model or smaller items, half precision, or an optimizer that keeps less"): learn.max_bs_find(limit=inf)
    assert changes(was, picture(learn))==[] and tried(learn.limit)==[16,8,4,2,1] and no_hook_left()

@pytest.mark.parametrize('error', [oom, lambda: RuntimeError('MPS backend out of memory'), lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError, lambda: RuntimeError('[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.')])
def test_errors_that_mean_memory(error): assert limited(9, error=error).max_bs_find()==9

maybe_memory = dict(cublas='CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`', cudnn='cuDNN error: CUDNN_STATUS_ALLOC_FAILED',
    cudnn_9='cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED', cufft='cuFFT error: CUFFT_ALLOC_FAILED',
    layout='cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.', mps='Invalid buffer size: 9.75 GiB',
    allocator='!block->expandable_segment_ INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":2814, please report a bug to PyTorch.')

@pytest.mark.parametrize('text', maybe_memory.values(), ids=maybe_memory)
def test_errors_that_may_mean_memory(text):
    "Less is tried; where a single item fails too, the cause may be another one, and the error is raised as it is"
    assert limited(9, error=lambda: RuntimeError(text)).max_bs_find()==9
    learn = limited(0, error=lambda: RuntimeError(text), bs=4)
    with pytest.raises(RuntimeError) as e: learn.max_bs_find(limit=inf)
    assert text in str(e.value) and 'Not even' not in str(e.value) and tried(learn.limit)==[4,2,1]
    with pytest.raises(RuntimeError) as e: learn.memory_report()
    assert text in str(e.value) and 'does not fit' not in str(e.value)

@pytest.mark.parametrize('where', places)
def test_another_error(where):
    "Is not taken for the memory's, and says itself"
    learn = limited(9, where, error=lambda: KeyError('mine'))
    was = picture(learn)
    with pytest.raises(ValueError,
        match="(?s)Micro-batches of 50 items cannot be trained on, and memory is not the reason \\(KeyError: .*mine.*\\): see that the model, the loss and "
                       "the metrics take them, or set `start` or `max_bs`") as e: learn.max_bs_find()
    assert changes(was, picture(learn))==[] and isinstance(e.value.__cause__, KeyError) and e.value.__cause__.__traceback__ is None

@pytest.mark.parametrize('where', ['forward','backward','validation'])
@pytest.mark.parametrize('error,most', [(oom,9), (oom,0), (lambda: KeyError('mine'),9)], ids=['found','nothing','other'])
def test_no_tensor_is_pinned(where, error, most):
    "Not by the learner, nor by an error that is still held"
    learn,held = limited(most, where, error=error),None
    try: learn.max_bs_find(limit=inf)
    except (RuntimeError,ValueError) as e: held = e
    assert (held is None)==(most==9 and error is oom)
    gc.collect()
    refs = [o[2] for o in learn.limit.seen()]
    assert refs and all(o() is None for o in refs)

def test_a_trial_that_failed_is_gone_before_the_next():
    "Its tensors would be in the way: they are let go even where they lie in a cycle"
    alive = []
    class Cycle(Callback):
        order = 19
        def after_pred(self):
            alive.append(sum(o[2]() is not None and o[0]>13 for o in self.learn.limit.seen()))
            ring = [self.pred]
            ring.append(ring)
    learn = limited(13, cbs=Cycle())
    gc.disable()
    try: assert learn.max_bs_find(limit=inf)==13
    finally: gc.enable()
    big = [i for i,o in enumerate(learn.limit.seen()) if o[0]>13]
    assert len(big)==2 and alive[big[0]+1]==0 and alive[-1]==0

def test_twenty_searches():
    "Leave no object behind, least of all a tensor"
    learn = limited(5, n=8, bs=4)
    def count():
        gc.collect()
        objs = gc.get_objects()
        return sum(isinstance(o, torch.Tensor) for o in objs),len(objs)
    def run():
        assert learn.max_bs_find(limit=inf, n_steps=2)==5
        learn.limit.seen().clear()
    for _ in range(3): run()
    tensors,objs = count()
    for _ in range(20): run()
    now = count()
    assert now[0]==tensors and now[1]-objs<20 # One object a search would be 20

@pytest.mark.parametrize('kwargs,res,sizes', [({},50,[4,8,16,32,50]), (dict(start=1),50,[1,2,4,8,16,32,50]), (dict(start=50),50,[50]),
    (dict(max_bs=20),20,[4,8,16,20]),
    (dict(max_bs=3),3,[3]), (dict(start=7,max_bs=7),7,[7]), (dict(start=np.int64(5),max_bs=np.int64(9)),9,[5,9]), (dict(max_bs=1000),50,[4,8,16,32,50]),
        (dict(limit='1GB'),50,[4,2,50]), (dict(limit='1GB',max_bs=20),20,[4,2,20]), (dict(limit='1GB',start=8),50,[8,4,8,16,32,50])])
def test_start_and_max_bs(kwargs, res, sizes):
    learn = limited(1000)
    assert learn.max_bs_find(**{**dict(limit=inf), **kwargs})==res
    assert tried(learn.limit)==sizes and type(res) is int # The report's come first, where there is a limit

@pytest.mark.parametrize('n', [4,13,30])
@pytest.mark.parametrize('bs', [4,8])
def test_limit(n, bs):
    "By the report: so many items, and not one more"
    learn = limited(1000, bs=bs)
    report = learn.memory_report()
    limit = report.bytes['total']+(n-bs)*report.per_item['total']
    learn.limit.seen().clear()
    assert learn.max_bs_find(limit=limit)==n and max(tried(learn.limit))==max(n, bs)
    assert learn.max_bs_find(limit=limit-1)==n-1 and learn.max_bs_find(limit=limit, max_bs=n-1)==n-1

def test_limit_of_a_cpu(monkeypatch):
    "Half of the machine's memory where nothing else is said"
    learn = limited(1000)
    report = learn.memory_report()
    monkeypatch.setattr(max_bs, '_memory_of_machine', lambda: 2*(report.bytes['total']+9*report.per_item['total']))
    assert learn.max_bs_find()==13 and learn.max_bs_find(limit=inf)==50 and learn.max_bs_find(limit='1GB')==50
    monkeypatch.undo()
    assert 2**28<max_bs._memory_of_machine()<2**50 and max_bs._memory_of_machine()%2**10==0

def test_a_system_that_does_not_say(monkeypatch):
    monkeypatch.setattr(max_bs.os, 'sysconf', lambda nm: (_ for _ in ()).throw(ValueError('unrecognized configuration name')))
    assert max_bs._memory_of_machine()==inf and limited(13).max_bs_find()==13

@pytest.mark.parametrize('n_steps', [2,3,7])
def test_steps_of_a_trial(n_steps):
    "Then a batch of the validation set"
    learn = limited(1000, n=8, bs=8, opt_func=SGD)
    assert learn.max_bs_find(limit=inf, n_steps=n_steps)==8
    assert [o[:2] for o in learn.limit.seen()]==[(8,True)]*n_steps+[(8,False)]

def test_steps_that_were_skipped_do_not_count():
    learn = limited(1000, n=8, bs=8, cbs=Skip(4))
    assert learn.max_bs_find(limit=inf, n_steps=2)==8
    assert [o[:2] for o in learn.limit.seen()]==[(8,True)]*6+[(8,False)]

def test_batches_of_another_size_do_not_count():
    "What an epoch leaves over is not trained on"
    learn = limited(1000, n=11, bs=8)
    assert learn.max_bs_find(limit=inf, max_bs=8)==8
    assert [o[:2] for o in learn.limit.seen()]==[(8,True)]*3+[(8,False)]

def test_no_step_is_ever_taken():
    learn = limited(1000, cbs=Skip(10**9))
    with pytest.raises(ValueError, match="Micro-batches of 4 items cannot be trained on, "
                                         ".*in 61 micro-batches 0 steps were taken with 4 items, of 3 to be taken"):
        learn.max_bs_find(limit=inf)
    assert len(learn.limit.seen())<=20*3+1

def test_too_few_steps_are_no_trial():
    "A callback that steps every 40 batches: one step in 60 is not `n_steps`"
    class Every(Callback):
        order = 20
        def before_step(self):
            if (self.iter+1)%40: raise CancelStepException
    with pytest.raises(ValueError): limited(1000, n=200, bs=1, cbs=Every()).max_bs_find(limit=inf, max_bs=1)

def test_a_set_smaller_than_twice_the_batch():
    learn = limited(1000, n=6)
    assert learn.max_bs_find(limit=inf)==6 and tried(learn.limit)==[4,6]

@pytest.mark.parametrize('drop_last', [False,True])
@pytest.mark.parametrize('cls,kw', [(DataLoader,'bs'), (TorchDataLoader,'batch_size')], ids=['fastai','torch'])
def test_loaders(cls, kw, drop_last):
    items = regression(21, dtype=f32)
    dls = DataLoaders(*(cls(items, **{kw: 4}, shuffle=o, drop_last=drop_last and o, num_workers=0) for o in (True,False)), device='cpu')
    learn = learner(dls=dls, cbs=Limit(13))
    was = picture(learn)
    assert learn.max_bs_find()==13
    learn.limit.most = 1000
    assert learn.max_bs_find()==21 and learn.memory_report(21).bs==21
    learn.limit.most = 13
    assert changes(was, picture(learn))==[] and learn.dls.train is dls.loaders[0]

@pytest.mark.parametrize('drop_last', [False])
def test_a_sampler_of_a_part_of_the_set(drop_last):
    items = regression(40, dtype=f32)
    dl = TorchDataLoader(items, 4, sampler=SubsetRandomSampler(range(10)), drop_last=drop_last)
    assert learner(dls=DataLoaders(dl, TorchDataLoader(items, 4), device='cpu')).max_bs_find(limit=inf)==10

@pytest.mark.parametrize('valid_bs', [2,8,50])
def test_a_validation_loader_of_another_size_keeps_it(valid_bs):
    learn = limited(1000, valid_bs=valid_bs)
    assert learn.max_bs_find(limit=inf)==50
    assert {n for n,training,_ in learn.limit.seen() if not training}=={valid_bs}

def test_the_validation_loader_of_the_same_size_goes_along():
    learn = limited(1000)
    learn.max_bs_find(limit=inf)
    assert [n for n,training,_ in learn.limit.seen() if not training]==[4,8,16,32,50]

def test_an_empty_validation_set():
    items = regression(10, dtype=f32)
    dls = DataLoaders(DataLoader(items, bs=4, num_workers=0), DataLoader([], bs=4, num_workers=0), device='cpu')
    assert learner(dls=dls, cbs=Limit(7)).max_bs_find()==7

class OneSize(nn.Module):
    "Takes batches of 4 items and no others"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(20,8)
    def forward(self, x): return self.lin(x.reshape(20)).reshape(4,2)

@pytest.mark.parametrize('kwargs,bs', [(dict(limit=inf),8), (dict(limit=inf,start=3),3)])
def test_a_model_of_one_batch_size(kwargs, bs):
    items = regression(50, dtype=f32)
    dls = DataLoaders(*(DataLoader(items, bs=o, num_workers=0) for o in (4,4)), device='cpu')
    learn = learner(dls=dls, model=OneSize())
    with pytest.raises(ValueError,
        match=f"Micro-batches of {bs} items cannot be trained on, and memory is not the reason .RuntimeError: shape"): learn.max_bs_find(**kwargs)

def test_a_model_of_one_batch_size_on_a_cpu():
    with pytest.raises(ValueError, match="Micro-batches of [48] items cannot be trained on, and memory is not the reason"):
        learner(dls=loaders(regression(48, dtype=f32), 4, valid=regression(4, dtype=f32)), model=OneSize()).max_bs_find()

def bn_model(): return nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Linear(4,2))

def test_batchnorm_in_training():
    "Moved by the trials, and put back"
    learn = limited(13, model=bn_model())
    was = picture(learn)
    assert learn.max_bs_find()==13 and changes(was, picture(learn))==[]
    assert limited(13, model=bn_model(), n=9, bs=8).max_bs_find(limit=inf)==9 # A left-over batch of one item would not train

@pytest.mark.parametrize('bs', [2,3])
def test_batchnorm_with_few_items(bs): assert limited(13, model=bn_model(), bs=bs).memory_report().bs==bs

@pytest.mark.parametrize('cbs', [lambda: [GradAccum(4)], lambda: [GradAccum(4, on_oom='split')], lambda: [GradientAccumulation(8)], lambda: [MixedPrecision()],
    lambda: [GradAccum(4), NoiseScale(), ScaledLR(2), CSVLogger(), SaveModelCallback(monitor='train_loss'), EarlyStoppingCallback(monitor='train_loss'),
        GradientClip(0.1)]],
    ids=['GradAccum','split','GradientAccumulation','MixedPrecision','many'])
def test_callbacks_keep_still(cbs, tmp_path, capsys):
    learn = limited(13, cbs=cbs())
    was = picture(learn)
    assert learn.max_bs_find(limit=inf)==13 and tried(learn.limit)==[4,8,16,12,14,13]
    assert changes(was, picture(learn))==[] and list(tmp_path.iterdir())==[] and capsys.readouterr().out==''
    plain = limited(13)
    plain.max_bs_find(limit=inf, start=4) # Else it is known by now
    assert [o[:2] for o in learn.limit.seen()]==[o[:2] for o in plain.limit.seen()] # Each micro-batch is a step

def test_nothing_is_logged():
    "Though epochs end meanwhile"
    learn,lines = limited(13, n=8, bs=8),[]
    learn.logger = lines.append
    assert learn.max_bs_find(limit=inf)==8 and learn.memory_report().bs==8 and lines==[] and learn.logger==lines.append
    learn.fit(1, 0.)
    assert len(lines)==1

def test_progress_is_shown(capsys, monkeypatch):
    "By the bar that the learner has, to who can see it move; without one, and in a file, all is quiet"
    limited(13).max_bs_find(start=4)
    limited(13, cbs=ProgressCallback()).max_bs_find(start=4)
    assert capsys.readouterr().out==''
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    limited(13, cbs=ProgressCallback()).max_bs_find(start=4)
    out = capsys.readouterr().out
    assert 'measuring the memory of' in out and 'trying micro-batches of' in out

def test_the_bar_grows_where_more_is_tried_than_was_thought(monkeypatch):
    "It goes by micro-batches: of a single trial where the report's answer fits, else of as many as there are"
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    seen = []
    class Noted(mock.Ticks):
        def __init__(self, *args, **kwargs):
            seen.append([0,self])
            super().__init__(*args, **kwargs)
        def __call__(self, comment=None, more=None):
            seen[-1][0] += comment is None
            super().__call__(comment, more)
    monkeypatch.setattr(max_bs, 'Ticks', Noted)
    limited(1000, cbs=ProgressCallback()).max_bs_find()
    limited(13, where='optimizer', since=2, cbs=ProgressCallback()).max_bs_find()
    assert [(n,o.bar.total) for n,o in seen]==[(4,4+1), (2*4+5*2,7*4+1)] # Two of seven fit, and five fail in their third step

class Clock:
    "Stands still but for what it is told"
    def __init__(self): self.now = 0.
    def perf_counter(self): return self.now
    def go_on(self, secs): self.now += secs

class Takes(Callback):
    "A step that takes a second, and half of one for each item"
    def __init__(self, clock): self.go_on = clock.go_on # What a callback holds is put back, and time is not
    def after_pred(self):
        if self.training: self.go_on(1+len(self.x)/2)

def timed(monkeypatch, **kwargs):
    clock = Clock()
    for mod in (memory,max_bs): monkeypatch.setattr(mod, 'time', clock)
    return limited(1000, cbs=[Takes(clock),ProgressCallback()], **kwargs)

def test_what_a_trial_takes_is_said_before(monkeypatch, capsys):
    "By the report's steps, without what does not grow; nothing of short ones, or to nobody"
    learn = timed(monkeypatch)
    assert learn.memory_report().secs==0.5 and learn.memory_report(1).secs==1.5/2 # Half of it at least, as two steps may be noise
    learn.max_bs_find(limit='1MB')
    out = capsys.readouterr().out
    assert out.startswith('max_bs_find: by the memory report ') and out.endswith('items fit; a trial with 50 items takes about 1 min 23 s\n')
    learn.max_bs_find(limit='1MB', max_bs=1, start=1, n_steps=2)
    learn.remove_cb(ProgressCallback)
    learn.max_bs_find(limit='1MB', start=50)
    assert capsys.readouterr().out==''

def test_what_the_next_trial_takes_is_beside_the_bar(monkeypatch, capsys):
    learn = timed(monkeypatch)
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    learn.max_bs_find(limit=inf)
    assert 'trying micro-batches of 8 items, about 18 s' in capsys.readouterr().out # Three steps of a second and half of one for each of 4 items, twice

@pytest.mark.parametrize('kwargs,says', [(dict(limit=inf),'8 items fit, 16 were being tried. start=8 goes on from there'),
    (dict(limit='1KB'),'no size was tried to its end, 8 were being tried, the memory report says 8'), (dict(limit=inf,start=20),
     'no size was tried to its end, 20 were being tried')], ids=['on the way','report','first'])
def test_what_is_known_at_an_interrupt(kwargs, says, capsys):
    "Is said, and the interrupt goes on"
    learn = limited(13 if kwargs['limit']==inf else 4, error=KeyboardInterrupt, cbs=ProgressCallback())
    was = picture(learn)
    with pytest.raises(KeyboardInterrupt): learn.max_bs_find(**kwargs)
    assert changes(was, picture(learn))==[] and capsys.readouterr().out==f'max_bs_find was interrupted: {says}\n'

def test_a_card_by_its_name(capsys):
    "As much as it has left, which is said"
    learn = limited(1000)
    report = learn.memory_report()
    assert report.max_bs('T4')==report.max_bs(limit_bytes('T4')) and capsys.readouterr().out==f"{card_of('T4')}\n"
    learn.add_cb(ProgressCallback())
    assert learn.max_bs_find(limit='t4')==50 and capsys.readouterr().out==f"{card_of('T4')}\n"

def test_an_interrupt_is_raised():
    learn = limited(13, error=KeyboardInterrupt)
    was = picture(learn)
    with pytest.raises(KeyboardInterrupt): learn.max_bs_find()
    assert changes(was, picture(learn))==[]

# Items of different sizes

class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.out = nn.Embedding(20,8),nn.Linear(8,2)
    def forward(self, x): return self.out(self.emb(x).tanh().mean(1))

lens = [1+i%5 for i in range(40)]
lens[17],lens[33] = 30,20

def texts(lens=lens, as_numpy=False):
    res = [(torch.full((n,), 1+n%19),torch.tensor(i%2)) for i,n in enumerate(lens)]
    return [(x.numpy(),int(y)) for x,y in res] if as_numpy else res

def collate(b): return pad_sequence([torch.as_tensor(x) for x,_ in b], batch_first=True),torch.stack([torch.as_tensor(y) for _,y in b])
def pad(b): return list(zip(pad_sequence([x for x,_ in b], batch_first=True),[y for _,y in b]))

def text_loaders(kind, bs=4, items=None, valid_bs=None):
    items = items or texts()
    def make(shuffle, bs):
        if kind=='torch': return TorchDataLoader(items, bs, shuffle=shuffle, collate_fn=collate)
        if kind=='sorted': return SortedDL(items, bs=bs, shuffle=shuffle, before_batch=pad, num_workers=0, sort_func=lambda o: len(o[0]))
        return DataLoader(items, bs=bs, shuffle=shuffle, before_batch=pad, num_workers=0)
    return DataLoaders(make(True, bs), make(False, valid_bs or bs), device='cpu')

class Lengths(Callback):
    "Notes (items, length, in training?), and has memory for so many tokens"
    def __init__(self, tokens=inf):
        seen = []
        self.tokens,self.note,self.seen = tokens,seen.append,lambda: seen
    def after_pred(self):
        self.note((*self.x.shape,self.training))
        if self.x.numel()>self.tokens: raise oom()

def text_learner(dls, tokens=inf): return learner(dls=dls, model=Texts(), loss_func=nn.CrossEntropyLoss(), cbs=Lengths(tokens))

@pytest.mark.parametrize('kind', ['fastai','torch','sorted'])
def test_the_largest_items_are_tried(kind):
    "In the first batch of each trial, in training and in validation"
    learn = text_learner(text_loaders(kind), 30*11)
    was = picture(learn)
    assert learn.max_bs_find(limit=inf)==11 and changes(was, picture(learn))==[]
    seen = learn.lengths.seen()
    firsts = [b for a,b in zip([(None,None,False),*seen], seen) if b[0]!=a[0] or b[2]!=a[2]]
    assert all(n==30 for _,n,_ in firsts) and {o for o,_,training in firsts if training}=={4,8,16,12,10,11}
    assert (11,30,False) in seen

@pytest.mark.parametrize('kind', ['fastai','torch','sorted'])
def test_in_descending_order(kind):
    order = max_bs.by_size(text_loaders(kind).train)
    assert order[:2]==[17,33] and sorted(order)==list(range(40)) and all(lens[a]>=lens[b] for a,b in zip(order, order[1:]))
    assert all(type(i) is int for i in order)

def test_items_that_are_alike_or_cannot_be_told():
    "Are drawn as the loader does"
    class Stream(IterableDataset):
        def __iter__(self): return iter(texts())
    for dl in (text_loaders('torch', items=texts([3]*40)).train, TorchDataLoader(Stream(), 4, collate_fn=collate), DataLoader(Stream(), bs=4),
               LMDataLoader([(torch.arange(100),)], bs=4, seq_len=8, num_workers=0)): assert max_bs.by_size(dl) is None
    state = torch.get_rng_state()
    class Random(list):
        def __getitem__(self, i): return torch.rand(3+i%2)
    assert len(max_bs.by_size(TorchDataLoader(Random(range(9)), 4)))==9 and torch.equal(torch.get_rng_state(), state)

def test_items_of_numpy_arrays():
    dl = TorchDataLoader(texts(as_numpy=True), 4, shuffle=True, collate_fn=collate)
    assert max_bs.by_size(dl) is not None

def test_a_validation_loader_of_another_size_with_texts():
    learn = text_learner(text_loaders('torch', valid_bs=5), 30*11)
    assert learn.max_bs_find(limit=inf)==11
    assert {n for n,_,training in learn.lengths.seen() if not training}=={5}

def test_a_language_model():
    "Its loader arranges the text anew for each size"
    text = torch.arange(401)%20
    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb,self.out = nn.Embedding(20,8),nn.Linear(8,20)
        def forward(self, x): return self.out(self.emb(x)).transpose(1,2)
    dls = DataLoaders(*(LMDataLoader([(text,)], bs=4, seq_len=8, num_workers=0) for _ in range(2)), device='cpu')
    learn = learner(dls=dls, model=LM(), loss_func=nn.CrossEntropyLoss(), cbs=Lengths(90))
    learn.dls.train.new(bs=5) # fastai's own notes on the first loader what a batch holds
    was = picture(learn)
    assert learn.max_bs_find()==11 and changes(was, picture(learn))==[]

def test_a_limit_and_texts():
    "The second batch of 2 holds the longest text, that of 4 does not"
    items = texts([2,2,30,30]+[2]*16)
    dls = DataLoaders(*(TorchDataLoader(items, 4, collate_fn=collate) for _ in range(2)), device='cpu')
    assert text_learner(dls, 30*11).max_bs_find(limit='1MB')==11

# Bad input

@pytest.mark.parametrize('kwargs,error,says', [
    (dict(start=0),ValueError,"`start` must be at least 1 item, got 0: leave it out for the usual"),
    (dict(start=-4),ValueError,"`start` must be at least 1 item, got -4"),
    (dict(start=4.),TypeError,"`start` must be a whole number of items, got 4.0"),
    (dict(start=True),TypeError,"`start` must be a whole number of items, got True"),
    (dict(start='4'),TypeError,"`start` must be a whole number of items, got '4'"),
    (dict(max_bs=0),ValueError,"`max_bs` must be at least 1 item, got 0: leave it out for the usual"),
    (dict(max_bs=8.),TypeError,"`max_bs` must be a whole number of items, got 8.0"),
    (dict(max_bs=True),TypeError,"`max_bs` must be a whole number of items, got True"),
    (dict(max_bs='auto'),TypeError,"`max_bs` must be a whole number of items, got 'auto'"),
    (dict(n_steps=1),ValueError,"`n_steps` must be at least 2 steps, got 1: the optimizer's state is there from the second on"),
    (dict(n_steps=0),ValueError,"`n_steps` must be at least 2 steps, got 0"),
    (dict(n_steps=2.),TypeError,"`n_steps` must be a whole number of steps, got 2.0"),
    (dict(n_steps=True),TypeError,"`n_steps` must be a whole number of steps, got True"),
    (dict(start=9,max_bs=8),ValueError,"`start`=9 items are more than `max_bs`=8: begin with at most those"),
    (dict(start=51),ValueError,"`start`=51 items are more than the 50 of the training set: begin with at most those"),
    (dict(limit='many'),ValueError,"No card is known by the name 'many': say how much memory it has, as '16GB', or take one of P100, "),
    (dict(limit='16 EB'),ValueError,"A size in memory must be a number of bytes, or a string as '16GB' or '500MiB', got '16 EB'"),
    (dict(limit=0),ValueError,"A size in memory must be above 0 bytes and finite, got 0"),
    (dict(limit=True),TypeError,"A size in memory must be a number of bytes"),
    (dict(limit=nan),ValueError,"A size in memory must be above 0 bytes and finite, got nan"),
    (dict(limit='100B'),ValueError,"The memory of the parameters alone is 136 B, more than `limit`=100 B: take a smaller model, an optimizer"),
    (dict(limit='200B'),ValueError,"The memory of the optimizer state alone is 272 B, more than `limit`=200 B"),
    (dict(limit='500B'),ValueError,"`limit`=500 B does not hold a micro-batch of one item: 544 B are needed whatever the batch size, and 52 B for each item"),
    (dict(limit=595),ValueError,"`limit`=595 B does not hold a micro-batch of one item: 544 B are needed whatever the batch size, and 52 B for each item")])
def test_refused(kwargs, error, says):
    "And nothing has changed"
    learn = limited(13)
    was = picture(learn)
    with pytest.raises(error) as e: learn.max_bs_find(**kwargs)
    assert says in str(e.value) and changes(was, picture(learn))==[]
    if 'limit' not in kwargs: assert learn.limit.seen()==[] # Before anything is trained on

@pytest.mark.parametrize('bs,error,says', [(0,ValueError,"`bs` must be at least 1 item, got 0: that is the size of a micro-batch"),
    (-1,ValueError,"`bs` must be at least 1 item, got -1"),
    (4.,TypeError,"`bs` must be a whole number of items, got 4.0"), (True,TypeError,"`bs` must be a whole number of items, got True"),
    ('4',TypeError,"`bs` must be a whole number of items, got '4'"),
    (51,ValueError,"`bs`=51 items are more than the 50 of the training set, so no such batch can be measured: take at most those")])
def test_report_refused(bs, error, says):
    learn = limited(13)
    with pytest.raises(error) as e: learn.memory_report(bs)
    assert says in str(e.value) and learn.limit.seen()==[]

@pytest.mark.parametrize('f', [lambda o: o.max_bs_find(), lambda o: o.memory_report()], ids=['search','report'])
def test_batches_said_to_be_larger_than_the_set(f):
    "A loader of 64 with 50 items gives batches of 50, and trains"
    f(limited(1000, bs=64))

def test_a_training_set_of_one_item(): assert limited(1000, n=1, bs=1).max_bs_find()==1

class Fixed:
    "A loader of its own kind, which knows one batch size"
    def __init__(self, n=5, bs=4): self.bs,self.n = bs,n
    def __len__(self): return self.n
    def __iter__(self): return iter([(torch.ones(self.bs,5),torch.ones(self.bs,2))]*self.n)

@pytest.mark.parametrize('f', [lambda o: o.max_bs_find(), lambda o: o.max_bs_find(start=4), lambda o: o.max_bs_find(start=2),
    lambda o: o.max_bs_find(limit=inf, max_bs=9), lambda o: o.memory_report(8)])
def test_a_loader_that_cannot_change_its_batches(f):
    learn = learner(dls=DataLoaders(Fixed(), Fixed()), cbs=Limit(1000))
    was = picture(learn)
    with pytest.raises(ValueError,
        match="A training loader of type Fixed cannot be given batches of [0-9]+ items: make one that has them, or "
                       "give it an attribute `bs` and a method `new\\(bs=...\\)`"): f(learn)
    assert changes(was, picture(learn))==[]

def test_what_an_item_more_takes_is_not_known():
    "The report of today's batch says all else"
    report = learner(dls=DataLoaders(Fixed(), Fixed())).memory_report()
    assert report.bytes['activations']>0 and math.isnan(report.per_item['activations']) and math.isnan(report.per_item['total'])
    with pytest.raises(ValueError, match="What an item more takes could not be measured"): report.max_bs('1GB')

def test_a_set_of_unknown_length():
    "Needs a `max_bs`"
    class Stream(IterableDataset):
        def __iter__(self): return iter(regression(40, dtype=f32))
    def make(): return DataLoader(Stream(), bs=4, n=None, num_workers=0)
    class Long(DataLoader):
        def __len__(self): return 5
    items = regression(40, dtype=f32)
    dls = DataLoaders(Long(Stream(), bs=4, num_workers=0), DataLoader(items, bs=4, num_workers=0), device='cpu')
    learn = learner(dls=dls, cbs=Limit(13))
    assert memory.n_items(dls.train)==inf and memory.n_items(dls.valid)==40 and memory.n_items(Fixed())==inf
    with pytest.raises(ValueError,
        match="The training set does not say how many items it has, so the search has no end: set `max_bs`"): learn.max_bs_find(limit=inf)
    assert learn.max_bs_find(limit=inf, max_bs=20)==13

def test_sizes_that_never_come():
    "A loader that has them by name only"
    class Liar(Fixed):
        def new(self, bs): return Liar(self.n, self.bs)
    learn = learner(dls=DataLoaders(Liar(), Liar()))
    with pytest.raises(ValueError, match="In 40 micro-batches no two optimizer steps were taken with 8 items: see that"): learn.memory_report(8)
    with pytest.raises(ValueError,
        match="Micro-batches of 8 items cannot be trained on, .*in 61 micro-batches 0 steps were taken"): learn.max_bs_find(limit=inf, max_bs=9)

def test_n_items():
    items = regression(40, dtype=f32)
    assert [memory.n_items(o) for o in (DataLoader(items, bs=4), DataLoader(items, bs=4, n=12), TorchDataLoader(items, 4))]==[40,12,40]

# Several processes

@pytest.mark.parametrize('other,res', [(1000,13), (13,13), (9,9), (1,1), (0,None)])
def test_the_worst_of_all_counts(other, res, monkeypatch):
    "The other process has memory for `other` items"
    learn,train = limited(13),max_bs.TrialSearch._train
    monkeypatch.setattr(max_bs.TrialSearch, '_train', lambda self, bs: sizes.append(bs) or train(self, bs))
    # Before any trial the report's bound is agreed upon
    monkeypatch.setattr(max_bs, 'min_over_ranks', lambda fits: fits and sizes[-1]<=other if sizes else fits)
    sizes = []
    if res: assert learn.max_bs_find(limit=inf)==res
    else:
        with pytest.raises(RuntimeError, match="Not even a micro-batch of one item"): learn.max_bs_find(limit=inf)

def test_other_trainers_of_several_processes_are_left_out():
    "They would wait for each other where one fails"
    log = []
    DistributedTrainer = type('DistributedTrainer', (Callback,), dict(before_fit=lambda self: log.append('fit')))
    assert limited(13, cbs=DistributedTrainer()).max_bs_find(limit=inf)==13 and log==[]

def _worker(rank):
    "What two processes find"
    def text(limit): return text_learner(DataLoaders(*(TorchDataLoader(texts([5*(rank+1)]*40), 4, collate_fn=collate) for _ in range(2)),
        device='cpu')).max_bs_find(limit=limit)
    res = {}
    for nm,f in dict(memory=lambda: limited(5 if rank else 1000).max_bs_find(limit=inf), every=lambda: limited(0 if rank else 1000).max_bs_find(limit=inf),
                     validation=lambda: limited(1000 if rank else 7, 'validation').max_bs_find(limit=inf),
                     agree=lambda: [max_bs.min_over_ranks(2-rank), max_bs.min_over_ranks(rank)], limit=lambda: text('15KB')).items():
        try: res[nm] = f()
        except Exception as e: res[nm] = f'{type(e).__name__}: {e}'
    return res

@pytest.mark.slow
@pytest.mark.xdist_group('ranks')
def test_processes_agree():
    a,b = both = on_ranks(_worker, 2, timeout=8)
    assert a['limit']==b['limit'] and a['memory']==b['memory']==5 and a['validation']==b['validation']==7 and a['agree']==b['agree']==[1,0]
    for o in both: assert 'Not even a micro-batch of one item' in o['every']

# GroupNorm

@pytest.mark.parametrize('n,groups', [(2,1), (3,1), (4,2), (5,1), (6,3), (7,1), (9,3), (24,12), (32,16), (64,32), (96,32), (100,25), (128,32)])
@pytest.mark.parametrize('bn,shape', [(nn.BatchNorm2d,(3,3)), (nn.BatchNorm3d,(2,2,2)), (nn.SyncBatchNorm,(3,3))])
def test_groups(bn, shape, n, groups):
    "As many as divide the channels, 32 at most, and two channels in each"
    gn = bn_to_gn(nn.Sequential(bn(n)))[0]
    assert type(gn) is nn.GroupNorm and gn.num_groups==groups and gn.num_channels==n and not list(gn.buffers())
    assert gn(torch.randn(3, n, *shape)).isfinite().all()

@pytest.mark.parametrize('n,groups', [(4,1), (5,1), (31,1), (32,2), (64,4), (96,6), (100,5), (1024,32)])
@pytest.mark.parametrize('shape', [(),(3,)])
def test_groups_of_features(shape, n, groups):
    "16 at least, as there may be no positions to normalise over: of two values nothing would be left but their order"
    gn = bn_to_gn(nn.Sequential(nn.BatchNorm1d(n)))[0]
    assert type(gn) is nn.GroupNorm and gn.num_groups==groups and gn(torch.randn(3, n, *shape)).isfinite().all()

def test_columns_of_a_table():
    "Have nothing in common that could be normalised"
    for n_cont in (1,3,20):
        model = TabularModel([(3,2)], n_cont, 1, [8])
        with pytest.raises(ValueError, match="`bn_cont` of a TabularModel normalises the columns.*make the model with bn_cont=False"): bn_to_gn(model)
        assert isinstance(model.bn_cont, nn.BatchNorm1d)
    for model in (TabularModel([(3,2)], 3, 1, [8], bn_cont=False), TabularModel([(3,2)]*4, 0, 1, [8])):
        bn_to_gn(model)
        assert any(isinstance(m, nn.GroupNorm) for m in model.modules())

def test_at_most_so_many_groups():
    for n in range(2, 70):
        for groups in (1,2,3,7,16,32,100):
            for bn,least in ((nn.BatchNorm2d,2),(nn.BatchNorm1d,16)):
                if n<4: continue
                got = group_norm._groups_for(bn(n), groups, '')
                assert got==max(g for g in range(1, groups+1) if n%g==0 and (n//g>=least or g==1))
    assert bn_to_gn(nn.Sequential(nn.BatchNorm2d(12)), groups=4)[0].num_groups==4 and bn_to_gn(nn.BatchNorm2d(12), groups=np.int64(1)).num_groups==1

@pytest.mark.parametrize('dtype', [torch.float64,torch.float16])
@pytest.mark.parametrize('training', [False,True])
def test_its_weights_and_mode_stay(dtype, training):
    "The same parameter objects, frozen or not"
    bn = nn.BatchNorm2d(8, eps=1e-3).to(dtype).train(training)
    bn.weight.requires_grad_(False)
    weight,bias = bn.weight,bn.bias
    model = nn.Sequential(nn.Identity(), bn).train(training)
    res = bn_to_gn(model)
    gn = model[1]
    assert res is model and gn.weight is weight and gn.bias is bias and gn.weight.dtype==dtype and gn.eps==1e-3 and gn.affine and gn.training is training
    assert not gn.weight.requires_grad and gn.bias.requires_grad and list(gn.parameters())==[weight,bias]
    assert set(model.state_dict())=={'1.weight','1.bias'}

def test_what_it_computes():
    model,x = nn.Sequential(nn.BatchNorm2d(8)).double(),torch.randn(5,8,3,3, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters(): p.normal_()
    w,b = (p.detach().clone().view(1,8,1,1) for p in model.parameters())
    v = x.view(5,4,-1)
    by_hand = ((v-v.mean(-1, keepdim=True))/(v.var(-1, keepdim=True, correction=0)+1e-5).sqrt()).view_as(x)*w+b
    torch.testing.assert_close(bn_to_gn(model)(x), by_hand)

def test_without_weights():
    gn = bn_to_gn(nn.Sequential(nn.BatchNorm1d(8, affine=False, track_running_stats=False)))[0]
    assert gn.weight is None and gn.bias is None and not gn.affine and gn(torch.randn(2,8)).shape==(2,8) and repr(gn)

def test_a_layer_in_two_places_stays_one():
    bn,inner = nn.BatchNorm1d(8),nn.Module()
    model = nn.ModuleDict(dict(a=bn, b=nn.ModuleList([nn.Linear(8,8),bn]), c=inner, d=nn.Sequential(nn.Sequential(bn))))
    inner.norm = bn
    bn_to_gn(model)
    assert isinstance(model['a'], nn.GroupNorm) and model['a'] is model['b'][1] is model['c'].norm is model['d'][0][0]

def test_a_model_that_is_one():
    bn = nn.BatchNorm2d(6)
    gn = bn_to_gn(bn)
    assert isinstance(gn, nn.GroupNorm) and gn.weight is bn.weight and isinstance(bn, nn.BatchNorm2d)

def test_other_layers_stay():
    model = nn.Sequential(nn.Linear(5,4), nn.InstanceNorm1d(4), nn.GroupNorm(2,4), nn.LayerNorm(4))
    was = list(model)
    assert bn_to_gn(model) is model and all(a is b for a,b in zip(model, was))

def test_all_of_a_resnet():
    model = resnet18(num_classes=3)
    n = sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    params = list(model.parameters())
    bn_to_gn(model)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) and sum(isinstance(m, nn.GroupNorm) for m in model.modules())==n==20
    assert all(a is b for a,b in zip(params, model.parameters())) and not list(model.buffers())

@pytest.mark.parametrize('model,says', [(lambda: nn.Sequential(nn.BatchNorm1d(4),
    nn.LazyBatchNorm1d()),"1 is lazy and has no channels yet: pass one batch through the model first"),
    (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.LazyBatchNorm2d(affine=False))),"1.0 is lazy and has no channels yet"),
    (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.LazyLinear(4)),"1 is lazy and has no channels yet"),
    (lambda: nn.Sequential(nn.BatchNorm1d(4),
        nn.Sequential(nn.BatchNorm1d(1))),"1.0 normalises 1 feature, of which GroupNorm would leave little or nothing: leave it out of the model, and "
     "normalise the data")])
def test_layers_that_are_refused(model, says):
    "And the model is what it was"
    model = model()
    first = model[0]
    with pytest.raises(ValueError) as e: bn_to_gn(model)
    assert says in str(e.value) and model[0] is first and isinstance(first, nn.BatchNorm1d)

def test_a_single_feature_as_the_model():
    with pytest.raises(ValueError, match="The layer normalises 1 feature, of which GroupNorm would leave little or nothing"): bn_to_gn(nn.BatchNorm1d(1))
    for n in (2,3):
        with pytest.raises(ValueError, match=f"normalises {n} features"): bn_to_gn(nn.BatchNorm1d(n))

@pytest.mark.parametrize('groups,error,says', [(0,ValueError,"`groups` must be at least 1 group, got 0: 1 normalises over all channels"),
    (-1,ValueError,"got -1"),
    (4.,TypeError,"`groups` must be a whole number of groups, got 4.0"), (True,TypeError,"got True"), ('4',TypeError,"got '4'")])
def test_groups_that_are_refused(groups, error, says):
    model = nn.Sequential(nn.BatchNorm1d(4))
    with pytest.raises(error) as e: bn_to_gn(model, groups)
    assert says in str(e.value) and isinstance(model[0], nn.BatchNorm1d)

def gn_learner(bs, cbs=None, norm=True, opt_func=momentum_sgd):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5,8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8,2)).double()
    return quiet_learner(loaders(regression(32), bs), bn_to_gn(model) if norm else model, opt_func=opt_func, cbs=cbs)

@pytest.mark.parametrize('norm', [True,False], ids=['GroupNorm','BatchNorm'])
def test_accumulates_exactly(norm):
    "Four micro-batches are the large batch; with BatchNorm they are not"
    large,accumulated = gn_learner(16, norm=norm),gn_learner(4, GradAccum(4), norm=norm)
    for learn in (large,accumulated): learn.fit(3, 0.1)
    assert (distance(accumulated, large)<1e-9)==norm

def test_an_optimizer_goes_on():
    "With the parameters that it has, and their state"
    learn = gn_learner(16, norm=False, opt_func=Adam)
    learn.fit(1, 0.01)
    weight = learn.model[1].weight
    n_steps = learn.opt.state[weight]['step']
    bn_to_gn(learn.model)
    was = weight.detach().clone()
    opt = learn.opt
    for xb,yb in learn.dls.train:
        nn.functional.mse_loss(learn.model(xb), yb).backward()
        opt.step()
        opt.zero_grad()
    assert learn.model[1].weight is weight and not torch.equal(weight, was) and opt.state[weight]['step']==n_steps+2==4

# `bs_find(max_bs='auto')`

def find(learn, **kwargs): return learn.bs_find(**{**dict(lr=0.01, num_it=24, n_batch=2, show_plot=False, max_bs='auto'), **kwargs})

@pytest.mark.parametrize('where', places)
def test_bs_find_auto(where, short):
    "What does not fit is not timed, and the plan says so"
    learn = limited(9, where, n=200)
    was = picture(learn)
    plan = find(learn)
    assert changes(was, picture(learn))==[]
    sizes = [m for m,*_ in plan.device.times]
    assert max(sizes)==8 and 4 in sizes and plan.device.too_large==16 and plan.device.max_bs==9
    if not math.isnan(plan.noise_known): assert 'Micro-batches of 16 items did not fit in memory, 8 did.' in ' '.join(plan.details().split())

def test_bs_find_auto_where_all_fits(short):
    learn = limited(1000, n=200)
    plan = find(learn)
    assert plan.device.too_large is None and plan.device.max_bs==max(m for m,*_ in plan.device.times)

def test_bs_find_auto_that_fits_with_the_smallest(short):
    plan = find(limited(4, n=200))
    assert max(m for m,*_ in plan.device.times)==4 and plan.device.too_large==8 and plan.device.max_bs==4

# Where the reasons are others

def test_validation_batches_that_do_not_fit():
    "Of a loader with a size of its own: smaller training batches would not help"
    class Validation(Callback):
        def after_pred(self):
            if not self.training: raise torch.OutOfMemoryError("CUDA out of memory")
    items = regression(40, dtype=f32)
    dls = DataLoaders(DataLoader(items, bs=4, num_workers=0), DataLoader(items, bs=10, num_workers=0), device='cpu')
    with pytest.raises(ValueError, match="Training steps with micro-batches of 4 items fit in memory, but the validation loader's batches do not"):
        learner(dls=dls, cbs=Validation()).max_bs_find(limit=inf)

def test_a_part_in_each_epoch():
    dls = DataLoaders(PartialDL(regression(80, dtype=f32), partial_n=30, bs=8, num_workers=0), DataLoader(regression(8, dtype=f32), bs=8), device='cpu')
    assert learner(dls=dls).max_bs_find(limit=inf)==30

def test_without_a_validation_set():
    dls = DataLoaders(DataLoader(regression(20, dtype=f32), bs=4, num_workers=0), device='cpu')
    assert learner(dls=dls).max_bs_find(limit=inf)==20

def test_what_cannot_be_looked_at():
    "torch.func allows no hooks on saved tensors: without a limit the search does without the report"
    def loss(pred, targ): return torch.func.vjp(lambda p: ((p-targ)**2).mean(), pred)[0]
    learn = limited(13)
    learn.loss_func = loss
    assert learn.max_bs_find()==13
    with pytest.raises(Exception, match="saved tensor hooks"): learn.memory_report()
