"A training step that is traced: its peak against the allocator of a CPU, its rows by hand, and nothing allocated, changed or run"
import signal
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock
from fastai.callback.fp16 import MixedPrecision, NonNativeMixedPrecision
from fastai.callback.rnn import ModelResetter, RNNCallback
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import get_language_model
from fastai.torch_core import TensorCategory, TensorImage

from fastai_bs.memory.cards import limit_bytes
from fastai_bs.memory.report import _measured_report
from fastai_bs.memory.trace import LiveBytes, TracedStep, _kernels_of_card, _rnn_of_cudnn
from helpers import changes, loaders, mlp, no_bf16_lstm, picture, quiet_learner, regression, root
from fastai_bs.all import GradAccum # noqa: F401 (adds `memory_report` and `max_bs_find`)
from test_snapshot import net_learner

f32 = torch.float32

sys.path.insert(0, str(root/'benchmarks'))
def frame(): return pytest.importorskip('frame', reason="in a checkout only: benchmarks")
def peak_of(learn): return frame().step_peak(learn)

def classifier(items, model, bs=8, **kwargs):
    return quiet_learner(loaders(items, bs), model, loss_func=CrossEntropyLossFlat(), **kwargs)

def dense(**kwargs):
    model = nn.Sequential(nn.Linear(200,300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300,300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300,10))
    return classifier(list(zip(torch.randn(256, 200), torch.randint(10, (256,)))), model, 64, **kwargs)

def conv(items=None, **kwargs):
    model = nn.Sequential(nn.Conv2d(3,32,7,2,bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2), BasicBlock(32,32),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32,10))
    return classifier(items or list(zip(torch.randn(16, 3, 64, 64), torch.randint(10, (16,)))), model, **kwargs)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.emb,self.body,self.head = nn.Embedding(200,64),nn.TransformerEncoder(layer, 1),nn.Linear(64,200)
    def forward(self, x): return self.head(self.body(self.emb(x)))

def tokens(n=32): return list(zip(torch.randint(200, (n,40)), torch.randint(200, (n,40))))
def encoder(**kwargs): return classifier(tokens(), Encoder(), **kwargs)

learners = dict(dense=dense, conv=conv, encoder=encoder)
adamw = partial(OptimWrapper, opt=torch.optim.AdamW)

@pytest.mark.parametrize('make,opt_func', [('dense',SGD),('dense',adamw),('conv',partial(SGD, mom=0.9)),('encoder',Adam)])
def test_the_peak_is_that_of_the_allocator(make, opt_func):
    "Gradients that fastai's optimizers keep, and that torch's let go of; few channels are copied into oneDNN's layout, which nobody sees"
    learn = learners[make](opt_func=opt_func)
    assert (0.87 if make=='conv' else 0.99)<sum(TracedStep(learn)(learn.dls.train.bs).values())/peak_of(learn)<1.01

def test_tensors_of_fastais_own_types():
    "Pictures hold as much as plain tensors"
    items = list(zip(torch.randn(16, 3, 64, 64), torch.randint(10, (16,))))
    plain,own = (TracedStep(conv(items=o))(8) for o in (items,[(TensorImage(x),TensorCategory(y)) for x,y in items]))
    assert own==plain

def test_half_precision_is_traced_before_it_is_set():
    learn = encoder(opt_func=Adam)
    held = sum(TracedStep(learn, precision='bf16')(learn.dls.train.bs).values())
    assert 0.98<held/peak_of(encoder(opt_func=Adam, cbs=frame().Half()))<1.02
    assert held<sum(TracedStep(learn)(learn.dls.train.bs).values())
    learn.add_cb(MixedPrecision('bf16'))
    assert sum(TracedStep(learn)(learn.dls.train.bs).values())==held # As it trains now

@pytest.mark.parametrize('precision', ['fp32','bf16'])
def test_a_language_model_is_traced(precision, capsys):
    "`RNNCallback` takes the first of what it returns; oneDNN's LSTM keeps more than half of the peak, and a GPU's keeps less, as is said"
    if precision=='bf16' and no_bf16_lstm(): pytest.skip(no_bf16_lstm())
    config = dict(emb_sz=20, n_hid=64, n_layers=2, pad_token=1, bidir=False, output_p=0.1, hidden_p=0.1, input_p=0.1, embed_p=0.02, weight_p=0.2,
                  tie_weights=True, out_bias=True)
    learn = classifier(tokens(), get_language_model(AWD_LSTM, 200, config=config), 16, cbs=[ModelResetter(),RNNCallback()])
    report = learn.memory_report(precision=precision)
    if precision=='bf16': learn.add_cb(frame().Half())
    assert 0.9<report.bytes['total']/peak_of(learn)<1.05
    assert report.max_bs('1GB')
    assert 'more items may fit there' in capsys.readouterr().out

class Attention(nn.Module):
    "By `F.scaled_dot_product_attention`; a mask of its own, or none"
    def __init__(self, p, masked=False):
        super().__init__()
        self.qkv,self.out,self.p,self.masked = nn.Linear(64,192),nn.Linear(64,64),p,masked
    def forward(self, x):
        q,k,v = (o.view(*x.shape[:2],2,32).transpose(1,2) for o in self.qkv(x).chunk(3, -1))
        mask = torch.ones(len(x), 1, 1, x.shape[1], dtype=torch.bool) if self.masked else None
        return self.out(F.scaled_dot_product_attention(q, k, v, mask, self.p if self.training else 0.).transpose(1,2).flatten(2))

def bert(p): return nn.TransformerEncoderLayer(64, 2, 256, dropout=p, activation='gelu', batch_first=True)

def per_item(model, on_card, precision='fp32', n=40):
    items = list(zip(torch.randn(8, 196, 64), torch.randn(8, 196, 64)))
    step = TracedStep(quiet_learner(loaders(items, 4), model), precision=precision)
    a,b = (sum(step(o, on_card).values()) for o in (n,2*n))
    return (b-a)/n

@pytest.mark.parametrize('precision', ['fp32','bf16'])
@pytest.mark.parametrize('make', [Attention,partial(Attention, masked=True),bert], ids=['attention','masked','bert'])
def test_dropout_on_a_card(make, precision):
    "Costs a byte for a number, or nothing in attention, where a CPU keeps all its weights"
    own = F.scaled_dot_product_attention,F.dropout
    plain,card,cpu = (per_item(make(p), on_card, precision) for p,on_card in ((0.,True),(0.1,True),(0.1,False)))
    assert 1<=card/plain<1.2
    assert cpu/plain>1.8
    assert (F.scaled_dot_product_attention,F.dropout)==own

def test_attention_of_which_a_card_has_no_kernel():
    "As the memory-efficient one takes no odd widths: it is traced as on the CPU"
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(64,63)
        def forward(self, x): return F.scaled_dot_product_attention(*3*[self.lin(x)[:,None]], dropout_p=0.1).flatten(2)
    items = list(zip(torch.randn(8, 50, 64), torch.randn(8)))
    step = TracedStep(quiet_learner(loaders(items, 4), Odd(), loss_func=lambda p,y: p.sum()))
    assert step(4, on_card=True)==step(4)

def test_a_mask_on_a_card():
    "Is made of numbers first, once for all heads"
    class Masked(Attention):
        def forward(self, x):
            q = self.out(x).view(*x.shape[:2],2,32).transpose(1,2)
            mask = torch.ones(len(x), 1, *2*x.shape[1:2], dtype=torch.bool) if self.masked else None
            return F.scaled_dot_product_attention(q, q, q, mask).transpose(1,2).flatten(2)
    for precision,size in (('fp32',4),('bf16',2)):
        more = per_item(Masked(0., True), True, precision)-per_item(Masked(0.), True, precision)
        assert size*196**2<=more<(size+2)*196**2

def test_attention_of_queries_in_single_precision():
    "As positions are added: a card casts for its kernel, so its output is half as large"
    seen = []
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(64,64)
        def forward(self, x):
            v = self.lin(x)[:,None]
            seen.append(F.scaled_dot_product_attention(v.float(), v.float(), v, dropout_p=0.1))
            return seen[-1][:,0]
    assert 0<per_item(Single(), True, 'bf16')<per_item(Single(), False, 'bf16')
    assert {o.dtype for o in seen}=={torch.bfloat16}

def test_a_card_by_its_name_holds_more():
    "Items with dropout than so many bytes of main memory"
    items = list(zip(torch.randn(8, 196, 64), torch.randn(8, 196, 64)))
    dropped,plain = (quiet_learner(loaders(items, 4), Attention(p)).memory_report() for p in (0.1,0.))
    size = f"{limit_bytes('T4')}B"
    assert dropped.max_bs('T4')==plain.max_bs('T4')>1.8*dropped.max_bs(size)
    with pytest.raises(KeyError), _kernels_of_card(): raise KeyError
    assert F.dropout.__module__=='torch.nn.functional'

def test_the_gradient_of_batchnorm_is_made_twice():
    "Its kernel on a CPU makes the gradient twice, here at the peak"
    model = nn.Sequential(nn.Linear(5,8), nn.ReLU(), nn.Linear(8,400), nn.BatchNorm1d(400), nn.Linear(400,3))
    learn = classifier(list(zip(torch.randn(1024, 5), torch.randint(3, (1024,)))), model, 512)
    assert 0.97<sum(TracedStep(learn)(512).values())/peak_of(learn)<1.03

def test_the_reserve_of_cudnn():
    "The two that cuDNN asked for in https://github.com/pytorch/pytorch/issues/2895, at most a quarter more"
    x = torch.empty(1000, 25, 123, device='meta')
    for asked in (736e6,864e6): assert asked<=_rnn_of_cudnn(x, 320, 4, 1, True)[0]<1.25*asked

def test_rows_are_those_counted_by_hand():
    "With many items: input, ReLU's output, the prediction that the learner holds, and the target; the last layer's gradient on its way"
    learn = classifier(list(zip(torch.randn(20, 5), torch.randint(3, (20,)))), nn.Sequential(nn.Linear(5,7), nn.ReLU(), nn.Linear(7,3)), opt_func=Adam)
    small,large = (TracedStep(learn)(bs) for bs in (1000,2000))
    n = 4*(5*7+7+7*3+3)
    assert [small[o] for o in ('parameters','gradients','optimizer state','buffers')]==[n,n,2*n,0]
    assert large['activations']-small['activations']==1000*(4*(5+7+3)+8)
    assert 0<large['workspace']-small['workspace']<=1000*4*2*7

def test_a_frozen_body_and_tied_weights_take_less():
    learn = dense(opt_func=Adam)
    for p in learn.model[0].parameters(): p.requires_grad_(False)
    rows,whole = TracedStep(learn)(8),TracedStep(dense(opt_func=Adam))(8)
    frozen = 4*(200*300+300)
    assert [whole[o]-rows[o] for o in ('parameters','gradients','optimizer state')]==[0,frozen,2*frozen]
    learn = encoder()
    learn.model.head.weight = learn.model.emb.weight
    assert TracedStep(encoder())(8)['parameters']-TracedStep(learn)(8)['parameters']==4*200*64

def test_a_trace_changes_nothing():
    "Not the learner, its random numbers and its loader; a batch of terabytes is no matter"
    learn = dense(opt_func=Adam)
    was,own = picture(learn),torch.Tensor.as_subclass
    report = learn.memory_report()
    assert torch.Tensor.as_subclass is own
    assert report.bytes['total']>0
    assert report.step
    assert sum(report.step(10**6).values())>10**9
    assert changes(was, picture(learn))==[]
    assert 'traced' in repr(report)

def test_ctrl_c_waits_for_the_end_of_a_trace():
    "It goes on to the end of its two steps, and the report is not made"
    seen = []
    class Pressed(nn.MSELoss):
        def forward(self, pred, targ):
            seen.append(type(pred))
            signal.raise_signal(signal.SIGINT)
            return super().forward(pred, targ)
    learn = net_learner(loss_func=Pressed())
    was = picture(learn)
    with pytest.raises(KeyboardInterrupt): learn.memory_report()
    assert seen==[FakeTensor]*2
    assert type(torch.zeros(1)) is torch.Tensor
    assert changes(was, picture(learn))==[]

class Asks(nn.Module):
    "Its control flow depends on its data"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5,2)
    def forward(self, x): return self.lin(x) if x.sum()>0 else -self.lin(x)

def test_what_cannot_be_traced(capsys):
    "Is run and measured, and the report says why and that the workspace is not in it; in another precision it is not known"
    learn = quiet_learner(loaders(regression(20, dtype=f32), 4), Asks())
    report = learn.memory_report()
    assert report.step is None
    assert 'DataDependentOutputException' in report.untraced
    assert 'measured, as it cannot be traced (' in repr(report)
    assert "Nothing has to be done. These are the bytes of real steps" in repr(report)
    assert '-0 B' not in repr(report)
    capsys.readouterr()
    assert report.max_bs('T4')>1
    assert "These are the bytes of real steps on this device. A GPU's kernels take some more for a while, so a card may hold" in capsys.readouterr().out
    traced = quiet_learner(learn.dls, learn.model.lin).memory_report()
    assert report.max_bs(1e6, margin=0)>traced.max_bs(1e6, margin=0)
    with pytest.raises(ValueError, match="cannot be traced .*so its memory in fp16 is not known: leave out `precision`"): learn.memory_report(precision='fp16')

def test_a_model_that_a_callback_changes():
    "Half precision by hand begins with the fit"
    with pytest.raises(TypeError, match='NonNativeMixedPrecision changes the model'): TracedStep(dense(cbs=NonNativeMixedPrecision()))

@pytest.mark.parametrize('make,times', [('dense',40),('encoder',1.3)])
def test_the_largest_batch_by_a_trace_fits(make, times):
    "Never more than fits, and nearly all"
    report = learners[make](opt_func=Adam).memory_report()
    limit = times*report.bytes['total']
    n = report.max_bs(limit)
    assert n>report.bs
    assert sum(report.step(n).values())<=0.95*limit
    assert sum(report.step(n).values())>=0.85*limit or sum(report.step(n+1).values())>0.95*limit

def test_the_largest_batch_of_a_model_that_takes_no_single_item(monkeypatch):
    "As BatchNorm: two are traced in its place; and few sizes are, though a line from no items at all only creeps on"
    report,traced,count = dense(opt_func=Adam).memory_report(),[],TracedStep._count
    limit = sum(report.step(2).values())
    monkeypatch.setattr(TracedStep, '_count', lambda self, n, on_card: traced.append(n) or count(self, n, on_card))
    assert report.max_bs(limit, margin=0)>1
    with pytest.raises(ValueError, match="does not hold a micro-batch of one item, which takes .* MB: take a smaller model"): report.max_bs(limit-1, margin=0)
    assert len(traced)<=16

def test_no_size_is_traced_twice(monkeypatch):
    "Of a report, for one limit after the other; of a card those are others"
    report,traced,count = dense(opt_func=Adam).memory_report(),[],TracedStep._count
    monkeypatch.setattr(TracedStep, '_count', lambda self, *args: traced.append(args) or count(self, *args))
    most = [report.max_bs(o) for o in ('8MB','T4','16MB','L4','8MB')]
    assert most[0]==most[-1]<most[2]<most[1]<most[3]
    assert len(traced)==len(set(traced))>4
    items = list(zip(torch.randn(8, 196, 64), torch.randn(8, 196, 64)))
    step = TracedStep(quiet_learner(loaders(items, 4), Attention(0.1)))
    assert 1.1*sum(step(40, True).values())<sum(step(40, False).values())

def test_validation_keeps_nothing_for_a_backward_pass():
    "One layer's input and output, where training keeps ten"
    items = list(zip(torch.randn(20, 50), torch.randint(50, (20,))))
    step = TracedStep(classifier(items, nn.Sequential(*(nn.Sequential(nn.Linear(50,50), nn.Sigmoid()) for _ in range(10)))), ds_idx=1)
    assert 1000*50*4*2<step.valid(1000)<1000*50*4*5
    assert step(1000)['activations']>1000*50*4*10

def test_the_largest_validation_batch_of_a_card():
    "As `max_bs_find` has it; a report that was measured in training cannot know"
    learn = dense(opt_func=Adam)
    report = learn.memory_report()
    n = report.max_bs('8MB', for_='valid')
    assert n>2*report.max_bs('8MB')
    assert 0.9*8e6<TracedStep(learn, ds_idx=1).valid(n)<=0.95*8e6
    with pytest.raises(ValueError, match="`for_` must be 'train' or 'valid', got 'test'"): report.max_bs('T4', for_='test')
    with pytest.raises(ValueError, match="was measured in training steps, which says nothing of for_='valid': trace one"):
        _measured_report(learn, 4).max_bs('T4', for_='valid')

@pytest.mark.parametrize('margin', [-0.1,1,'5%'])
def test_bad_margin_and_precision_are_refused(margin):
    learn = quiet_learner(loaders(regression(20, dtype=f32), 4), mlp(dtype=f32))
    with pytest.raises(ValueError, match="`precision` is one of 'fp32', 'fp16', 'bf16', or None"): learn.memory_report(precision='half')
    for f in (partial(learn.memory_report().max_bs, '1GB'), learn.max_bs_find):
        with pytest.raises((ValueError,TypeError), match='`margin` must be the share of the memory that stays free'): f(margin=margin)

def test_live_bytes_are_those_of_storages():
    "A view is no storage of its own; an address that is used again is another storage; a sparse tensor has two"
    with LiveBytes() as live:
        x = torch.ones(1000)
        y = (x*2).view(10, 100)
        del x
        for _ in range(3): y+1
        assert (live.now,live.peak)==(4000,8000)
        live.start_peak()
        z = torch.ones(500).to_sparse()
        del y
    assert live.peak-4000>=500*(8+4)
    assert live.now==500*(8+4)
    assert z.is_sparse
