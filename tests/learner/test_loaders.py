"with_micro_bs: the same items in other batches, whatever the loader knows besides"
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, IterableDataset, WeightedRandomSampler
from fastai.callback.core import Callback
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.load import DataLoader
from fastai.text.data import LMDataLoader, SortedDL, pad_input_chunk
from fastai_bs.all import GradAccum
from fastai_bs.learner.loaders import drops_last, micro_batch_size, n_items, SetUp, with_micro_bs
from helpers import loaders, mlp, quiet_learner, regression

items = regression(200, dtype=torch.float32)

class Numbers:
    "Items 0, 1, 2, ..., each with itself as its target"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i>=self.n: raise IndexError
        return torch.tensor(float(i)),torch.tensor(float(i))

def seen(dl): return [int(o) for b in dl for o in b[0]]

def test_what_fastais_loaders_know_besides_stays():
    "Weights of items, and a part in each epoch"
    dl = with_micro_bs(WeightedDL(Numbers(200), wgts=np.array([0.]*150+[1.]*50), bs=8, shuffle=True, num_workers=0), 32)
    assert dl.bs==32
    assert min(seen(dl))>=150
    dl = with_micro_bs(PartialDL(Numbers(200), partial_n=64, bs=8, num_workers=0), 16)
    assert len(dl)==4
    assert len(seen(dl))==n_items(dl)==64
    assert seen(dl)!=seen(dl)
    assert seen(with_micro_bs(DataLoader(Numbers(200), bs=8, n=40), 16))==list(range(40))

def test_items_come_in_the_same_order_as_before():
    a,b = (DataLoader(Numbers(50), bs=5, shuffle=True) for _ in range(2))
    b.rng.setstate(a.rng.getstate())
    new = with_micro_bs(a, 10)
    first,second = seen(new),seen(new)
    assert first!=second
    assert [seen(b),seen(b)]==[first,second]
    assert [seen(a),seen(a)]==[first,second] # It has a generator of its own

@pytest.mark.parametrize('num_workers', [0,2])
def test_workers_serve_the_new_loader(num_workers):
    dl = DataLoader(Numbers(24), bs=4, num_workers=num_workers, persistent_workers=num_workers>0)
    list(dl)
    new = with_micro_bs(dl, 8)
    assert new.fake_l.d is new
    assert new.fake_l.num_workers==num_workers
    assert [len(b[0]) for b in new]==[8]*3
    assert [len(b[0]) for b in dl]==[4]*6

def test_a_language_model_is_cut_into_rows_anew():
    text = [torch.arange(100)]
    new = with_micro_bs(LMDataLoader(text, bs=2, seq_len=5, num_workers=0), 4)
    assert new.bl==24
    assert next(iter(new))[0].shape==(4,5)
    assert [o[0].item() for o in next(iter(new))[0]]==[0,24,48,72]

def test_a_batch_sampler_keeps_what_it_draws():
    "Given to a torch loader, which itself has a sampler of all items in their order then"
    drawn = WeightedRandomSampler([0.]*30+[1.]*10, 18)
    dl = TorchDataLoader(Numbers(40), batch_sampler=BatchSampler(drawn, 4, True))
    other = with_micro_bs(dl, 8)
    xs = [x for x,_ in other]
    assert other.batch_sampler.sampler is drawn
    assert [len(x) for x in xs]==[8,8]
    assert torch.cat(xs).min()>=30
    assert n_items(dl)==n_items(other)==18
    assert with_micro_bs(dl, 4) is dl

@pytest.mark.parametrize('make', [lambda: DataLoader(Numbers(20), bs=4, shuffle=True), lambda: TorchDataLoader(Numbers(20), batch_size=4, shuffle=True),
    lambda: SortedDL([(torch.arange(n%7),n) for n in range(20)], bs=4, before_batch=partial(pad_input_chunk, pad_idx=0), num_workers=0, shuffle=True)])
def test_items_come_in_a_given_order(make):
    order = list(range(19,-1,-1))
    new = with_micro_bs(make(), 4, order)
    assert [int(o) for b in new for o in b[1]]==order
    if type(new) is DataLoader: assert seen(pickle.loads(pickle.dumps(new)))==order # As it is sent to workers that are spawned

class Interrupted(Callback):
    "Ctrl-C comes while it gets its name on the learner"
    @property
    def name(self): raise KeyboardInterrupt

def test_shared_loaders_stay_as_they_are():
    "What is done to one learner is not done to another with the same `dls`"
    dls = loaders(items, 8)
    a,b = (quiet_learner(dls, mlp(dtype=torch.float32)) for _ in range(2))
    with SetUp(a, 'set_up', with_micro_bs(dls.train, 16), [], ()): assert (a.dls.train.bs,b.dls.train.bs,dls.train.bs)==(16,8,8)
    assert a.dls.train is b.dls.train is dls.train

def test_batches_that_are_made_beforehand_keep_their_size():
    with pytest.raises(ValueError, match='cannot be given batches of 16'): with_micro_bs(DataLoader([torch.zeros(8,5)]*3, bs=None), 16)

@pytest.mark.parametrize('loader,name', [(TorchDataLoader,'bs'), (partial(DataLoader, num_workers=0),'batch_size')])
def test_a_data_set_of_batches(loader, name):
    "What is advised makes its items known, and leaves the batches as they are"
    dl = loader([(torch.zeros(8, 5),torch.zeros(8))]*3, **{'bs' if loader is not TorchDataLoader else 'batch_size': None})
    assert math.isinf(n_items(dl))
    with pytest.raises(ValueError, match=f'set `learn.dls.train.{name}`'): micro_batch_size(dl)
    setattr(dl, name, 8)
    assert (micro_batch_size(dl),n_items(dl),[len(b[0]) for b in dl])==(8,24,[8]*3)

class Drawn(IterableDataset):
    "Knows its length"
    def __len__(self): return 20
    def __iter__(self): return iter(items[:20])

def test_what_drops_a_last_batch():
    "A language model's last one is as large as all, and shorter"
    assert not drops_last(TorchDataLoader(Drawn(), batch_size=8))
    assert drops_last(TorchDataLoader(Drawn(), batch_size=8, drop_last=True))
    assert drops_last(DataLoader(Numbers(20), bs=8, drop_last=True))
    assert not drops_last(LMDataLoader([torch.arange(100)], bs=2, seq_len=5, num_workers=0, drop_last=True))

def test_half_a_set_up_is_none():
    "What an interrupt leaves of it is taken back at once"
    learn = quiet_learner(loaders(items, 4), mlp(dtype=torch.float32))
    learn.add_cb(GradAccum(2))
    was,cbs = learn.dls.train,set(learn.cbs)
    with pytest.raises(KeyboardInterrupt): SetUp(learn, 'set_up', with_micro_bs(was, 8), [Interrupted()], (GradAccum,Interrupted))
    assert learn.dls.train is was
    assert set(learn.cbs)==cbs
    assert learn.grad_accum in cbs
    assert 'set_up' not in vars(learn)

def test_items_come_in_a_given_order_to_workers_that_are_spawned():
    new = with_micro_bs(DataLoader(Numbers(20), bs=4, shuffle=True), 5, list(range(19,-1,-1)))
    assert seen(pickle.loads(pickle.dumps(new)))==list(range(19,-1,-1))
