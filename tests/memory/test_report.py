"`memory_report` of steps that run: their bytes as counted by hand, and what a limit or a card holds by them"
import gc
import math
import pickle
import weakref
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.optimizer import Adam, OptimWrapper, SGD

from fastai_bs.learner.loaders import by_size, micro_batch_size
from fastai_bs.memory import report as report_module
from fastai_bs.memory.cards import card_of, limit_bytes, margin_text
from fastai_bs.memory.report import MemoryReport, _measured_report, held_bytes, process_bytes
from fastai_bs.utils.checks import n_bytes
from fastai_bs.utils.text import bytes_text
from helpers import changes, loaders, mlp, picture, quiet_learner, RaiseAt, regression
from pictures import misplaced, narrow
from test_trace import Attention, classifier, learners

nan,f32 = math.nan,torch.float32

def learner(n=50, bs=4, model=None, dls=None, **kwargs):
    dls = dls or loaders(regression(n, dtype=f32), bs, shuffle=True)
    return quiet_learner(dls, model or mlp(dtype=f32), **kwargs)

def measured(learn, bs=None):
    "The report of steps that are run, as on a GPU"
    dl = learn.dls.train
    return _measured_report(learn, bs or micro_batch_size(dl), by_size(dl))

def size_of(ts): return sum(t.numel()*t.element_size() for t in ts)

def no_hook_left():
    top = getattr(torch._C._autograd, '_top_saved_tensors_default_hooks', None) # An older torch cannot be asked
    return top is None or top(True) is None

# What does not depend on the batch

def mlp_learner(**kwargs):
    items = list(zip(torch.randn(20, 5), torch.randint(3, (20,))))
    return classifier(items, nn.Sequential(nn.Linear(5,7), nn.ReLU(), nn.Linear(7,3)), **kwargs)

learners = dict(learners, mlp=mlp_learner)

# Optimizer; tensors of state for each parameter; bytes of the steps of each
optimizers = dict(sgd=(SGD,0,0), momentum=(partial(SGD, mom=0.9),1,0), adam=(Adam,2,0),
    torch_adamw=(partial(OptimWrapper, opt=torch.optim.AdamW),2,4),
    torch_momentum=(partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9),1,0))

@pytest.mark.parametrize('make,opt', [*(('mlp',o) for o in optimizers), *((o,'adam') for o in learners if o!='mlp')])
def test_bytes_are_those_counted_by_hand(make, opt):
    "As counted by hand, before and after a training; none of these grows with the batch, and the learner is as it was"
    opt_func,n_state,step = optimizers[opt]
    learn = learners[make](opt_func=opt_func)
    learn.model.eval()
    was = picture(learn)
    report = measured(learn)
    assert changes(was, picture(learn))==[]
    assert no_hook_left()
    assert report.bs==learn.dls.train.bs
    params = list(learn.model.parameters())
    assert report.bytes['parameters']==report.bytes['gradients']==size_of(params)
    assert report.bytes['optimizer state']==n_state*size_of(params)+step*len(params)
    assert report.bytes['buffers']==size_of(learn.model.buffers())
    assert (report.per_item[:4]==0).all()
    assert report.per_item['activations']>0
    assert np.isnan(report.loc['workspace']).all()
    for nm in report.columns: assert report[nm]['total']==report[nm].drop('total').sum()
    learn.fit(1, 0.001)
    pd.testing.assert_frame_equal(measured(learn), report)

def test_a_frozen_body_has_no_gradients_and_no_state():
    "Frozen parameters have no state, and a gradient only where they hold one from before"
    learn = mlp_learner(opt_func=Adam)
    for p in learn.model[0].parameters(): p.requires_grad_(False)
    report = measured(learn)
    head = size_of(learn.model[2].parameters())
    assert report.bytes['parameters']==size_of(learn.model.parameters())
    assert report.bytes['gradients']==head
    assert report.bytes['optimizer state']==2*head
    assert report.per_item['activations']==4*(7+3)+8 # Not its input, which nothing needs
    for p in learn.model[0].parameters(): p.grad = torch.ones_like(p)
    assert measured(learn).bytes['gradients']==size_of(learn.model.parameters())

def test_what_shares_memory_counts_once():
    "Tied weights, with their gradient and state, and a buffer that is a part of another"
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb,self.out = nn.Embedding(20,8),nn.Linear(8,20,bias=False)
            self.out.weight = self.emb.weight
            self.register_buffer('whole', torch.zeros(10))
            self.register_buffer('part', self.whole[:4])
        def forward(self, x): return self.out(self.emb(x))
    report = measured(classifier([(torch.tensor(i%20),torch.tensor((i+1)%20)) for i in range(20)], Tied(), opt_func=Adam))
    assert report.bytes.iloc[:4].tolist()==[640,640,1280,40]

def test_sparse_gradients_count_as_indices_and_values():
    "Indices and values"
    items = [(torch.tensor([i,i+1,i+2]),torch.tensor(0.)) for i in range(16)]
    model = nn.Sequential(nn.Embedding(20,8,sparse=True), nn.Flatten(), nn.Linear(24,1))
    report = measured(learner(dls=loaders(items, 4), model=model, opt_func=SGD, loss_func=lambda p,y: p.sum()))
    assert report.bytes['gradients']==12*(8+8*4)+25*4
    assert report.bytes['parameters']==160*4+25*4

# Activations

@pytest.mark.parametrize('bs', [1,2,20])
def test_activations_of_the_mlp(bs):
    "Input, ReLU's output, log-softmax, target; and the one number that the loss divides by. Of one item, they are those of a second"
    report = measured(mlp_learner(), bs)
    by_hand = 4*(5+7+3)+8
    assert report.per_item['activations']==by_hand
    assert 0<=report.bytes['activations']-bs*by_hand<=4
    assert report.bs==bs
    assert report.per_item['total']==by_hand

class Sums(nn.Module):
    "A layer, and what `f` makes of it"
    def __init__(self, f):
        super().__init__()
        self.lin,self.f = nn.Linear(5,4),f
        self.register_buffer('const', torch.full((4,), 0.5))
    def forward(self, x): return self.f(self, self.lin(x))

def sums(f, **kwargs): return learner(model=Sums(f), loss_func=lambda p,y: p.sum(), **kwargs)

@pytest.mark.parametrize('f,floats,const', [
    (lambda m,h: h, 5, 0),
    (lambda m,h: h.view(-1,2,2).sin()*h.view(-1,2,2), 5+4+4, 0), # The same storage twice, and the sine
    (lambda m,h: h[:,:1]*h[:,1:2], 5+4, 0), # Two parts of one storage
    (lambda m,h: h*m.const, 5, 0), # A buffer counts as one
    (lambda m,h: h@m.lin.weight, 5+4, 0), # A parameter too
    (lambda m,h: h.detach().exp()+h, 5, 0),
    (lambda m,h: h@(m.lin.weight*torch.ones(4,5)), 5+4, 2*80), # A mask on weights and what it makes of them
], ids=['nothing','view','parts','buffer','parameter','detached','mask'])
def test_each_storage_once(f, floats, const):
    report = measured(sums(f), 6)
    assert report.per_item['activations']==4*floats
    assert report.bytes['activations']==6*4*floats+const

def test_what_grows_faster():
    "`per_item` is the slope between the report's size and half of it; and a report's total holds the report's batch"
    learn = sums(lambda m,h: (h@h.t()).exp())
    report = measured(learn, 9)
    def by_hand(n): return 4*(5*n+4*n+n*n)
    assert report.bytes['activations']==by_hand(9)
    assert report.per_item['activations']==(by_hand(9)-by_hand(4))/5
    for bs in (2,9):
        report = measured(learn, bs)
        assert report.items_in(report.bytes['total'], margin=0)==bs

def test_only_training_batches_of_its_size_count():
    "The left-over of an epoch does not, nor does validation"
    seen = []
    class Look(Callback):
        def after_pred(self): seen.append((len(self.x),self.training))
    report = measured(learner(n=7, cbs=Look()), 4)
    assert seen==[(4,True),(4,True),(2,True),(2,True)]
    assert report.bytes['activations']==4*4*(5+4+2+2)

def test_what_callbacks_do_counts():
    "Before and after the forward pass; not in the backward pass, where a second derivative would keep more"
    class Keeps(Callback):
        def before_batch(self): self.learn.xb = ((self.x*torch.ones(5, requires_grad=True)).tanh(),)
        def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+(self.pred*self.pred).sum()
        def after_backward(self):
            with torch.enable_grad(): self.kept = (self.x*torch.ones(5, requires_grad=True)).exp()
    base,more = (measured(learner(cbs=cbs), 8) for cbs in ([],[Keeps()]))
    # x itself, not the 5 ones; tanh's output, which the first layer keeps too. The prediction is kept by the loss anyway
    assert more.per_item['activations']-base.per_item['activations']==4*5
    assert more.bytes['activations']-base.bytes['activations']==8*4*5

# The learner afterwards

def test_after_an_exception_no_hook_is_left():
    "It is raised as it is, and no hook stays behind"
    learn = learner(cbs=RaiseAt('after_pred', KeyError), opt_func=Adam)
    was = picture(learn)
    with pytest.raises(KeyError, match='the one'): measured(learn)
    assert changes(was, picture(learn))==[]
    assert no_hook_left()

@pytest.mark.parametrize('fails', [False,True])
def test_no_tensor_is_held(fails):
    "Neither by the report nor by the learner, nor by a graph that never saw its backward pass"
    refs = []
    class Look(Callback):
        def after_loss(self):
            refs.append(weakref.ref(self.pred))
            if fails and len(refs)==2: raise KeyError('mine')
    learn = sums(lambda m,h: h.tanh(), cbs=Look())
    if fails:
        with pytest.raises(KeyError): measured(learn)
    else: report = measured(learn) # noqa: F841, to be held
    gc.collect()
    assert len(refs)==(2 if fails else 4)
    assert all(o() is None for o in refs)

@pytest.mark.parametrize('bs,says', [(0,"`bs` must be at least 1 item, got 0"), (51,r"`bs`=51 items are more than the 50 of the training set, .*\(51\) draws")])
def test_bad_sizes_of_micro_batches_are_refused(bs, says):
    with pytest.raises(ValueError, match=says): learner().memory_report(bs)

class Fixed:
    "A loader of its own kind, which knows one batch size"
    bs = 4
    def __len__(self): return 5
    def __iter__(self): return iter([(torch.ones(self.bs,5),torch.ones(self.bs,2))]*5)

def test_what_an_item_more_takes_is_not_known():
    "The report of today's batch says all else"
    report = measured(learner(dls=DataLoaders(Fixed(), Fixed())))
    assert report.bytes['activations']>0
    assert math.isnan(report.per_item['activations'])
    assert math.isnan(report.per_item['total'])
    with pytest.raises(ValueError, match="By this report an item more takes an unknown amount of memory"): report.max_bs('1GB')

def test_sizes_that_never_come():
    "A loader that has them by name only"
    class Liar(Fixed):
        def new(self, bs): return Liar()
    with pytest.raises(ValueError, match="In 40 micro-batches no 2 optimizer steps were taken with 8 items: see that"):
        measured(learner(dls=DataLoaders(Liar(), Liar())), 8)

# The report as a frame

def report_of(activations=100., per_item=25., fixed=(400.,400.,800.,10.), workspace=(nan,nan)):
    rows = [(o,0.) for o in fixed]+[(activations,per_item),workspace]
    rows.append(tuple(np.nansum([o[i] for o in rows]) for i in range(2)))
    names = ['parameters','gradients','optimizer state','buffers','activations','workspace','total']
    res = MemoryReport(rows, index=names, columns=['bytes','per_item'])
    res.bs = 4
    return res

@pytest.mark.parametrize('limit,n', [('1635B',1), ('1659.9B',1), ('1660B',2), ('1709B',3), ('1710B',4), ('26610B',1000), ('2KB',15), ('2KiB',17)])
def test_the_largest_batch_is_what_the_limit_holds(limit, n):
    report = report_of()
    assert report.max_bs(limit, margin=0)==n
    assert type(report.max_bs(limit, margin=0)) is int
    assert report.max_bs(f'{2*n_bytes(limit)}B', margin=0.5)==n

@pytest.mark.parametrize('report,limit,says', [
    (report_of(), '1634.9B', "`limit` leaves 1.63 KB, and less `margin`=0 that does not hold a micro-batch of one item, which takes 1.64 KB: take a "
                             "smaller model"),
    (report_of(per_item=-5.), '1GB', "By this report an item more takes no memory")], ids=['an item','less'])
def test_no_largest_batch_is_an_error(report, limit, says):
    with pytest.raises(ValueError, match=says): report.max_bs(limit, margin=0)

def test_a_report_is_a_frame():
    "It is pickled with all that it knows; a part of it is a plain frame"
    report = report_of()
    for part in (report.iloc[:4], report[['bytes']], report/2, pd.concat([report, report])): assert type(part) is pd.DataFrame
    kept = pickle.loads(pickle.dumps(report))
    assert kept.max_bs('1735B', margin=0)==5
    assert kept.bs==4
    assert repr(kept)==repr(report)

def test_a_report_is_shown_with_units():
    lines = repr(report_of()).splitlines()
    assert lines[0]=='Memory of a training step, micro-batches of 4 items, measured'
    assert [o.rsplit(maxsplit=4) for o in lines[-3:]]==[['activations','100','B','25','B'],['workspace'],['total','1.71','KB','25','B']]
    html = report_of()._repr_html_()
    assert '<td>1.71 KB</td>' in html
    assert 'nan' not in html.lower()

def test_a_report_is_drawn():
    "On axes that are given, or new ones; grey and blue make the row"
    report = report_of(130.)
    ax = narrow()
    assert report.plot_memory(ax=ax) is ax
    assert report.plot_memory() is not ax
    assert report.plot(2).get_title()=='A training step of 2 items' # As a plan is drawn; pandas' would draw lines
    assert misplaced(ax.figure)==[]
    assert all(t.get_window_extent().x1<ax.bbox.x1 for t in ax.texts)
    assert ax.get_xlabel()=='KB'
    assert [o.get_text() for o in ax.get_yticklabels()]==['parameters','gradients','optimizer state','buffers','activations','total']
    stays,grows = ([p.get_width()*1000 for p in c] for c in ax.containers)
    assert stays==pytest.approx([400,400,800,10,30,1640])
    assert grows==pytest.approx([0,0,0,0,100,100])
    assert [p.get_x()*1000 for p in ax.containers[1]]==pytest.approx([400,400,800,10,30,1640])
    assert [t.get_text() for t in ax.texts]==['400 B','400 B','800 B','10 B','130 B','1.74 KB']
    assert ax.yaxis_inverted()
    assert legend_of(ax)==['whatever the batch size','for 4 items']

def legend_of(ax): return [o.get_text() for o in ax.get_legend().get_texts()]

@pytest.mark.parametrize('report,shown', [(report_of(0., 0.),['whatever the batch size']), (report_of(100., 25., fixed=(0.01,0.01,0.02,0.)),['for 4 items'])])
def test_the_legend_names_what_is_seen(report, shown): assert legend_of(report.plot_memory())==shown

def test_what_grows_is_no_longer_than_its_row():
    "Where the peak is another with more items, which then hold more than by the row"
    stays,grows = ([p.get_width()*1000 for p in c] for c in report_of(100., 50.).plot_memory().containers)
    assert (stays[-2],grows[-2])==pytest.approx((0,100))

def test_few_sizes_are_traced_where_items_are_compared_in_pairs():
    "Memory that grows with the square of the items, from a size that is thousands of times too small"
    report,sizes = sums(lambda m,h: (h@h.t()).exp()).memory_report(),[]
    step = report.step
    def _step(n, on_card):
        sizes.append(n)
        assert len(sizes)<=8
        return step(n, on_card)
    report.step = _step
    n = report.items_in(15e9, 0.05)
    assert 0.98*0.95*15e9<sum(step(n, False).values())<=0.95*15e9

def test_a_batch_that_cannot_be_run_is_drawn():
    "More items than the training set has, as the step predicts it; of a card, with its kernels, its total and what it leaves"
    report = sums(lambda m,h: nn.functional.dropout((h@h.t()).exp(), 0.5)).memory_report()
    for limit,on_card in ((None,False),('T4',True)):
        ax = report.plot_memory(3000, limit=limit, ax=narrow())
        want = report.step(3000, on_card)
        rows = [o for o in want.values()]+[sum(want.values())]
        assert [t.get_text() for t in ax.texts]==[bytes_text(o) for o in rows]
        assert ax.get_title()=='A training step of 3000 items'
        assert misplaced(ax.figure)==[]
    line, = ax.lines
    assert line.get_xdata()[0]*1e9==pytest.approx(limit_bytes('T4'))
    assert 'T4 leaves 15.2 GB' in legend_of(ax)
    full = report.plot_memory(report.max_bs('T4'), limit='T4')
    assert full.texts[-1].get_ha()=='right' # Beside the bar it would lie on the line
    assert full.texts[0].get_ha()=='left'

def test_a_measured_batch_is_drawn_along_its_line():
    "And where there is none, only the report's own size"
    report = report_of()
    report.held = 10**6
    ax = report.plot_memory(1000, limit='3MB')
    assert [t.get_text() for t in ax.texts]==['400 B','400 B','800 B','10 B','25 KB','26.6 KB']
    assert ax.lines[0].get_xdata()[0]==2
    assert 'limit leaves 2 MB' in legend_of(ax)
    assert report.bs==4 and report.bytes['activations']==100
    with pytest.raises(ValueError, match='`bs` must be at least 1 item, got 0'): report.plot_memory(0)
    unknown = report_of(per_item=nan)
    unknown.loc['total','per_item'] = nan
    unknown.plot_memory(limit='T4')
    with pytest.raises(ValueError, match='an unknown amount of memory, so it tells nothing of 5 items: leave out `bs`'): unknown.plot_memory(5)

# Another card

def test_a_card_is_said(capsys):
    assert report_of().max_bs('T4')==report_of().max_bs(limit_bytes('T4'))
    assert capsys.readouterr().out==f"{card_of('T4')}. {margin_text(limit_bytes('T4'), 0.05)}\n"

@pytest.mark.parametrize('p,said', [(0.1,True),(0.,False)])
def test_kernels_of_a_card_are_said_where_they_hold_others(p, said, capsys):
    "Attention with dropout keeps its weights on a CPU"
    items = list(zip(torch.randn(8, 196, 64), torch.randn(8, 196, 64)))
    report = quiet_learner(loaders(items, 4), Attention(p)).memory_report(precision='fp32')
    n = report.max_bs('T4')
    assert ('A card has kernels of its own for attention and dropout: with them 4 items take ' in capsys.readouterr().out)==said
    report.max_bs('1GB')
    assert 'kernels of its own' not in capsys.readouterr().out
    assert (n>1.2*report.max_bs(limit_bytes('T4')))==said

# What the process holds

def test_bytes_of_the_process():
    "Grow with a tensor, and what a step counts is not among those beside it"
    gc.collect()
    was = process_bytes()
    if was==0: pytest.skip("This system does not say")
    x = torch.ones(5*10**7)
    grown = process_bytes()
    most = pytest.importorskip('resource').getrusage(0).ru_maxrss*1024 # Linux counts in KiB
    assert most/20<was<=1.05*most
    assert grown-was==pytest.approx(x.nbytes, rel=0.1)

def test_what_a_limit_leaves(monkeypatch, capsys):
    "Of a size in the memory that the learner trains in; all of a card, and all of another device"
    learn = mlp_learner(opt_func=Adam)
    learn.fit(1, 0.)
    own = 4*size_of(learn.model.parameters()) # With gradients and two tensors of state
    monkeypatch.setattr(report_module, 'process_bytes', lambda: 10**9+own)
    report = learn.memory_report()
    assert report.held==held_bytes(learn)==10**9
    assert report.max_bs('2GB')==report.items_in(1e9, 0.05)
    out = capsys.readouterr().out
    assert 'This process holds 1 GB beside the model (Python, torch, data), so 1 GB are left for a training step. `margin` keeps 5% of that' in out
    assert report.max_bs('T4')==report.items_in(limit_bytes('T4'), 0.05)
    assert pickle.loads(pickle.dumps(report)).held==10**9
    with pytest.raises(ValueError, match='This process holds 1 GB already, .* and `limit` is 900 MB for all of it: take a higher'): report.max_bs('900MB')
    monkeypatch.setattr(report_module, 'training_device', lambda learn: torch.device('cuda'))
    assert held_bytes(learn)==0
