"Which batch sizes are compared and how each is reached, step times that can be, and what an epoch holds and takes: figures by hand"
import math

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, SequentialSampler
from fastai.data.load import DataLoader
from fastai_bs.finder.formulas import (best_split, between, candidates, check_reachable, epoch_of, epoch_seconds, epochs_needed, extrapolated, for_longer,
    for_training, monotone_step_times, noise_of, splits, whole_epochs)
from fastai_bs.learner.loaders import drops_last, micro_batch_size

inf,nan = math.inf,math.nan

# Batch sizes

@pytest.mark.parametrize('micro_sizes,bs_now,noise_scale,n_train,n_ranks,sizes', [
    ([16,32], 16, 20., 1000, 1, [16,32,64,128]),      # Up to 8 times the noise scale, 160
    ([16,32], 16, nan, 1000, 1, [16,32,64,128]),      # Or today's
    ([16,32], 16, inf, 1000, 1, [16,32,64,128]),
    ([16,32], 16, 2., 1000, 1, [16,32,64,128]),
    ([16,32], 16, 20., 127, 1, [16,32]),              # Two in an epoch at least
    ([16,32], 100, 20., 127, 1, [16,32,100]),         # But for today's
    ([16,32], 40, 20., 1000, 2, [32,40,64,128,256]),  # On each of two ranks
    ([8], 24, 0., 1000, 1, [8,16,24,32,64,128])])
def test_candidate_sizes(micro_sizes, bs_now, noise_scale, n_train, n_ranks, sizes):
    assert candidates(micro_sizes, bs_now, noise_scale, n_train, n_ranks)==sizes

times = (16,0.018,0.002),(32,0.034,0.002) # 1 ms per item, and 2 ms once per step

@pytest.mark.parametrize('bs,n_ranks,ragged,ways', [
    (64, 1, None, [(0.066,16,4),(0.066,32,2)]),
    (64, 2, None, [(0.034,16,2),(0.034,32,1)]),       # 32 on each rank
    (16, 1, None, [(0.018,16,1)]),
    (48, 1, None, [(0.05,16,3)]),
    (48, 1, 32, [(0.05,16,3),(0.05,32,2)]),           # 32 and 16
    (20, 1, None, []), (33, 2, None, [])])
def test_how_a_size_is_split(bs, n_ranks, ragged, ways):
    res = splits(bs, times, n_ranks, ragged)
    assert [o[1:] for o in res]==[o[1:] for o in ways]
    assert [o[0] for o in res]==pytest.approx([o[0] for o in ways])

@pytest.mark.parametrize('micro_bs,ways', [(24,[(0.026,24,1)]), (16,[]), (32,[]), (24.5,[]), (8,[]), (40,[])])
def test_a_micro_batch_between_two_that_ran(micro_bs, ways):
    assert [o[1:] for o in between(micro_bs, times)]==[o[1:] for o in ways]
    assert [o[0] for o in between(micro_bs, times)]==pytest.approx([o[0] for o in ways])
    assert between(micro_bs, ())==[]

def test_what_is_paid_once_per_step_is_read_off_too():
    "24 items between 16 and 32: 26 ms, 3 of them once; ten micro-batches in five steps"
    assert epoch_seconds(epoch_of(240, 24, 2), 24, ((16,0.018,0.002),(32,0.034,0.004)))==pytest.approx(10*0.023+5*0.003)

@pytest.mark.parametrize('ways,micro_bs', [
    ([(1.,16,4),(1.,32,2)], 32), ([(1.,16,4),(1.05,32,2)], 32), ([(1.,16,4),(1.051,32,2)], 16), ([(2.,16,4),(1.,32,2)], 32), ([(nan,16,4)], 16)])
def test_the_split_that_is_taken(ways, micro_bs):
    "The largest within 5% of the fastest; one that was not timed will do where there is no other"
    assert best_split(ways)[1]==micro_bs

@pytest.mark.parametrize('bs,micro_sizes,n_train,n_ranks,words', [(48,[16,32],1000,1,None), (64,[16,32],64,1,None), (96,[16,32],1000,2,None),
    (65,[16,32],64,1,'`bs`=65 is more than the 64 items of the training set'),
    (40,[16,32],1000,1,r'\(16, 32 items\), or lie between two of them, got 40: take 32 or 48, or'),
    (8,[16],1000,1,r'\(16 items\), got 8: take 16, or'), (60,[16],60,1,'got 60: take 48, or'),
    (24,[16,32],1000,1,None), (48,[16,32],1000,2,None), (49,[16,32],1000,2,'got 49: take 32 or 64, or'),
    (72,[16,32],1000,2,r'\(16, 32 items on each of 2 ranks\).*got 72: take 64 or 96, or'),
    (15,[16],15,1,"got 15: take today's, or")])
def test_sizes_within_reach(bs, micro_sizes, n_train, n_ranks, words):
    if words is None: assert check_reachable(bs, micro_sizes, n_train, n_ranks) is None
    else:
        with pytest.raises(ValueError, match=words): check_reachable(bs, micro_sizes, n_train, n_ranks)

# Step times that can be

@pytest.mark.parametrize('bs,seconds,mended', [
    ([64,128], [4.,1.], [2.,2.]),                   # A larger batch takes no less: both at their geometric mean
    ([64,128], [1.,8.], [2.,4.]),                   # An item in it takes no more: twice is the most
    ([64,192], [1.,27.], [3.,9.]),                  # Three times as many, three times as long at most
    ([25,50,100,200], [0.02,0.021,0.05,0.04], [0.02,*np.array([1,2,2])*(0.021*0.025*0.02)**(1/3)])]) # The last two alike, and twice the second
def test_step_times_that_cannot_be_are_mended(bs, seconds, mended): assert monotone_step_times(bs, seconds).tolist()==pytest.approx(mended, rel=1e-9)

@pytest.mark.parametrize('seed', range(6))
def test_mended_step_times_are_the_nearest(seed):
    "From there, no way to other step times that can be leads nearer: that is when a point of a convex set is the nearest"
    rng = np.random.default_rng(seed)
    n = rng.integers(2, 13)
    bs = np.sort(rng.choice(2.**np.arange(13) if seed%2 else np.arange(1., 600.), n, replace=False))
    seconds = (0.01+rng.choice([0,1e-4,0.1])*bs)*np.exp(rng.choice([0.05,0.3,1.])*rng.normal(size=n))
    t,order = monotone_step_times(bs, seconds),rng.permutation(n)
    steps,most,off = np.diff(np.log(t)),np.diff(np.log(bs)),np.log(seconds)-np.log(t)
    assert (steps>=-1e-12).all()
    assert (steps<=most+1e-12).all()
    nearer = off[::-1].cumsum()[::-1][1:] # By a larger increment
    assert off.sum()==pytest.approx(0, abs=1e-9)
    assert (np.maximum(0, nearer)*most-nearer*steps).sum()<1e-9

    assert monotone_step_times(bs[order], seconds[order])==pytest.approx(t[order], rel=1e-9)

# Epochs

@pytest.mark.parametrize('n,res', [(1e-3,1), (1.,1), (1.0499,1), (1.0501,2), (1.9999999999999,2), (2.0999,2), (2.1001,3),
    (100.0999,100), (100.1001,101)])
def test_whole_epochs(n, res):
    "No more than a tenth of an epoch, or 5% of one, is missing, and no epoch is made that is not needed for that"
    assert whole_epochs(n)==res

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

# For the whole of a training

def test_limits_of_for_training():
    ns = [0,1e-300,1e-3,1,10,1e3,1e6,1e300,inf]
    for n_train,n_epoch in ((50,0.01),(1000,1),(1000,10**6)):
        res = [for_training(o, n_train, n_epoch) for o in ns]
        assert res[0]==0
        assert (np.diff(res)>=0).all()
        assert res[-1]==pytest.approx(1/(1/n_train+80/n_train/n_epoch))
    assert math.isnan(for_training(nan, 1000, 1))

@pytest.mark.parametrize('part,epochs', [(0.9995,1/0.9995), (0.5,2.), (0.26,1/0.26), (0.25,4.), (0.1,4.)])
def test_a_part_of_the_items_is_a_noise_scale(part, epochs):
    "At which a training needs as many more epochs; four times the epochs are no noise at all"
    assert epochs_needed(256, 64, noise_of(part, 256, 64))==pytest.approx(epochs)

@pytest.mark.parametrize('times,grown', [(1,1.), (16,2.), (81,3.)])
def test_a_noise_scale_grows_as_the_fourth_root_of_the_steps(times, grown):
    assert for_longer(100., 50, 50*times)==pytest.approx(100*grown)
