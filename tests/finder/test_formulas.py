"What an epoch of a loader holds, counted by going through it, and the seconds that it takes"
import math

import pytest
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, SequentialSampler
from fastai.data.load import DataLoader
from fastai_bs.finder.formulas import epoch_of, epoch_seconds, extrapolated
from fastai_bs.learner.loaders import drops_last, micro_batch_size

def fastais(n, bs, drop): return DataLoader(list(range(n)), bs=bs, drop_last=drop)
def torchs(n, bs, drop): return TorchDataLoader(range(n), bs, drop_last=drop)
def sampled(n, bs, drop): return TorchDataLoader(range(n), batch_sampler=BatchSampler(SequentialSampler(range(n)), bs, drop))

@pytest.mark.parametrize('loader', [fastais,torchs,sampled])
@pytest.mark.parametrize('drop', [False,True])
@pytest.mark.parametrize('n,bs,n_acc', [(500,16,1),(500,16,8),(500,128,1),(650,320,1),(650,10,64),(64,16,2),(33,32,3)])
def test_an_epoch_is_what_the_loader_gives(loader, drop, n, bs, n_acc):
    dl = loader(n, bs, drop)
    sizes = [len(b) for b in dl]
    windows = [sizes[i:i+n_acc] for i in range(0, len(sizes), n_acc)] # The last one ends with the epoch
    epoch = epoch_of(n, micro_batch_size(dl), n_acc, drops_last=drops_last(dl))
    assert epoch==(sum(sizes),len(sizes),sizes[-1],len(windows))

@pytest.mark.parametrize('drop,n_micro,items,last', [(False,3,90,13),(True,2,64,16)])
def test_ranks_share_an_epoch(drop, n_micro, items, last):
    "90 items are 45 on each of two"
    assert epoch_of(90, 16, 2, n_ranks=2, drops_last=drop)==(items,n_micro,last,math.ceil(n_micro/2))

def test_seconds_of_an_epoch():
    "Each micro-batch by its items, and each step once; a last micro-batch between the timed sizes, below all, and of next to no time"
    times = [(bs,0.002+1e-4*bs,0.002) for bs in (16,32,64)]
    for n,bs,n_acc in ((640,64,1),(650,64,4),(660,32,3),(641,16,8)):
        n_steps = math.ceil(math.ceil(n/bs)/n_acc)
        assert epoch_seconds(epoch_of(n, bs, n_acc), bs, times)==pytest.approx(n*1e-4+n_steps*0.002)
    one = [(32,0.01,0.004)]
    assert epoch_seconds(epoch_of(33, 32), 32, one)==pytest.approx(0.006+2*0.004+max(0, extrapolated(1, [32], [0.01])-0.004))
