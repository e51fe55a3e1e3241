"`accum_to`: micro-batches that fit and divide the batch, and what was there is put back"
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation

import fastai_bs.memory.accum_to # noqa: F401 (it patches `accum_to` into `Learner`)
from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.noise.noise_scale import NoiseScale
from helpers import mlp
from plans import plan_of
from test_max_bs import f32, inf, limited, tried, unmoved

def small(cbs=None, most=9, n=48, **kwargs): return limited(most, n=n, cbs=cbs, **kwargs)
def cbs_of(learn): return [type(cb) for cb in learn.cbs]

def test_a_batch_that_does_not_fit_trains_as_if_it_did():
    "Six micro-batches of 8 are the batch of 48, and nothing is left of them afterwards"
    large,learn = small(most=inf, bs=48, model=mlp(seed=1, dtype=f32)),small(model=mlp(seed=1, dtype=f32))
    setup = learn.accum_to(48, limit=inf)
    assert (setup.bs,setup.micro_bs,setup.n_acc,learn.batch_size)==(48,8,6,48)
    assert repr(setup)=='Batches of 48 items, in 6 micro-batches of 8'
    for o in (large,learn): o.fit(3, 0.01)
    for a,b in zip(large.model.parameters(), learn.model.parameters()): assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    other = small()
    with other.accum_to(48, limit=inf): assert other.batch_size==48
    assert (other.batch_size,cbs_of(other))==(4,cbs_of(small()))

@pytest.mark.parametrize('bs,micro_bs', [(9,9), (3,3), (16,8), (45,9)])
def test_the_size_of_micro_batches(bs, micro_bs):
    "The largest that fit and divide; where all of it fits nothing accumulates"
    learn = small()
    assert learn.accum_to(bs, limit=inf).micro_bs==learn.dls.train.bs==micro_bs
    assert learn.batch_size==bs
    assert (GradAccum in cbs_of(learn))==(micro_bs<bs)

def test_a_number_with_few_divisors_is_warned_of():
    "Its micro-batches may be far smaller than what fits"
    learn = small()
    with pytest.warns(UserWarning, match=r'47 items divide into micro-batches of 1 or of 47, and 47 do not fit: a number near it with more'):
        assert learn.accum_to(47, limit=inf).n_acc==47

@pytest.mark.parametrize('limit', [inf,'report'])
def test_only_divisors_are_tried(limit):
    "Of what a step holds, in place of the largest size of all; with room for the margin"
    learn = small(most=40, n=200, bs=8)
    if limit=='report': limit = f"{sum(learn.memory_report().step(45).values())}B"
    learn.limit.seen().clear()
    assert learn.accum_to(128, limit=limit, margin=0).micro_bs==32
    assert {*tried(learn)}<={8,16,32,64}
    learn = small(most=33, n=200, bs=8)
    assert learn.accum_to(128, limit=inf).micro_bs==32
    assert tried(learn)==[8,16,32,64,33]
    assert small(most=32, n=200, bs=8).accum_to(128, limit=inf).micro_bs==16

@pytest.mark.parametrize('own', [lambda: GradAccum(3, count=lambda o: len(o.x), fix_bn=False, on_oom='split'),
    lambda: GradientAccumulation(12), lambda: NoiseScale()])
def test_callbacks_are_put_back(own):
    "What accumulated before gives way, and the second setup takes the place of the first"
    learn = small(own())
    was,dl = list(learn.cbs),learn.dls.train
    first = learn.accum_to(16, limit=inf)
    if hasattr(was[-2], 'count'): assert [getattr(learn.grad_accum, o) for o in ('count','fix_bn','on_oom')]==[was[-2].count,False,'split']
    second = learn.accum_to(8, limit=inf)
    assert learn.batch_size==8
    assert GradAccum not in cbs_of(learn)
    learn.fit(1, 0.01)
    first.undo() # It is taken back already
    assert learn.batch_size==8
    second.undo(),second.undo()
    assert {*map(id, learn.cbs)}=={*map(id, was)}
    assert learn.dls.train is dl

def test_a_setup_and_a_plan_make_way_for_each_other():
    "A plan takes the place of a setup, and a setup refuses to take a plan's; what is taken back last leaves what there was first"
    plan,learn = plan_of(8, noise_scale=64., ci=(60.,70.), lr=0.1, adam=True, n_train=48, n_epoch=14, times=((8,0.01,0.),(16,0.01,0.),(32,0.011,0.))),small()
    was,dl = cbs_of(learn),learn.dls.train
    setup = learn.accum_to(24, limit=inf)
    plan.undo(learn) # It was not applied
    assert learn.batch_size==24
    plan.apply(learn)
    n = learn.batch_size
    setup.undo() # The plan has taken it back
    assert n==learn.batch_size==plan.bs!=24
    assert 'A plan has set this learner up' in str(unmoved(lambda o: o.accum_to(24, limit=inf), learn))
    plan.undo(learn)
    assert cbs_of(learn)==was
    assert learn.dls.train is dl
    assert learn.accum_to(24, limit=inf).bs==24

def test_a_setup_in_a_fit_is_refused():
    "A setup is refused, and the fit ends as it would"
    class Calls(Callback):
        def before_batch(self):
            with pytest.raises(ValueError, match=r'accum_to\(8\) sets a fit up, and one is under way: call it before learn.fit'): self.learn.accum_to(8)
    learn = small(Calls())
    learn.fit(1, 0.01)
    assert learn.dls.train.bs==4

@pytest.mark.parametrize('bs,error,says', [(0,ValueError,'`bs` must be at least 1 item'), (8.,TypeError,'`bs` must be a whole number'),
    (49,ValueError,'`bs`=49 items are more than the 48 of the training set')])
def test_targets_of_accum_to_that_are_refused(bs, error, says):
    res = unmoved(lambda o: o.accum_to(bs, limit=inf), small())
    assert isinstance(res, error)
    assert says in str(res)
