"Which batch sizes are compared, how each is reached, and which is taken: figures by hand. The formulas themselves are in test_scaling"
import math

import numpy as np
import pytest
from fastai_bs.finder.formulas import best_split, candidates, check_reachable, monotone_step_times, splits, whole_epochs

nan = math.nan

@pytest.mark.parametrize('micro_sizes,bs_now,noise_scale,n_train,n_ranks,sizes', [
    ([16,32], 16, 20., 1000, 1, [16,32,64,128]),      # Up to 8 times the noise scale, 160
    ([16,32], 16, nan, 1000, 1, [16,32,64,128]),      # Or today's
    ([16,32], 16, 2., 1000, 1, [16,32,64,128]),
    ([16,32], 16, 20., 127, 1, [16,32]),              # Two in an epoch at least
    ([16,32], 100, 20., 127, 1, [16,32,100]),         # But for today's
    ([16,32], 40, 20., 1000, 2, [32,40,64,128,256]),  # On each of two ranks
    ([8], 24, 0., 1000, 1, [8,16,24,32,64,128])])
def test_candidates(micro_sizes, bs_now, noise_scale, n_train, n_ranks, sizes):
    assert candidates(micro_sizes, bs_now, noise_scale, n_train, n_ranks)==sizes

times = (16,0.018,0.002),(32,0.034,0.002) # 1 ms per item, and 2 ms once per step

@pytest.mark.parametrize('bs,n_ranks,ragged,ways', [
    (64, 1, None, [(0.066,16,4),(0.066,32,2)]),
    (64, 2, None, [(0.034,16,2),(0.034,32,1)]),       # 32 on each rank
    (16, 1, None, [(0.018,16,1)]),
    (48, 1, None, [(0.05,16,3)]),
    (48, 1, 32, [(0.05,16,3),(0.05,32,2)]),           # 32 and 16
    (20, 1, None, []), (33, 2, None, [])])
def test_splits(bs, n_ranks, ragged, ways):
    res = splits(bs, times, n_ranks, ragged)
    assert [o[1:] for o in res]==[o[1:] for o in ways]
    assert [o[0] for o in res]==pytest.approx([o[0] for o in ways])

@pytest.mark.parametrize('ways,micro_bs', [
    ([(1.,16,4),(1.,32,2)], 32), ([(1.,16,4),(1.05,32,2)], 32), ([(1.,16,4),(1.051,32,2)], 16), ([(2.,16,4),(1.,32,2)], 32), ([(nan,16,4)], 16)])
def test_best_split(ways, micro_bs):
    "The largest within 5% of the fastest; one that was not timed will do where there is no other"
    assert best_split(ways)[1]==micro_bs

@pytest.mark.parametrize('bs,micro_sizes,n_train,n_ranks,words', [(48,[16,32],1000,1,None), (64,[16,32],64,1,None), (96,[16,32],1000,2,None),
    (65,[16,32],64,1,'`bs`=65 is more than the 64 items of the training set'),
    (40,[16,32],1000,1,'of 16, 32 items, those that ran here, got 40: take 32 or 48, or'),
    (8,[16],1000,1,'got 8: take 16, or'), (60,[16],60,1,'got 60: take 48, or'),
    (48,[16,32],1000,2,'of 16, 32 items on each of 2 ranks.*got 48: take 32 or 64, or'),
    (15,[16],15,1,"got 15: take today's, or")])
def test_sizes_within_reach(bs, micro_sizes, n_train, n_ranks, words):
    if words is None: assert check_reachable(bs, micro_sizes, n_train, n_ranks) is None
    else:
        with pytest.raises(ValueError, match=words): check_reachable(bs, micro_sizes, n_train, n_ranks)

# Step times that can be

@pytest.mark.parametrize('bs,seconds,mended', [
    ([64,128], [4.,1.], [2.,2.]),                   # A larger batch takes no less: both at their geometric mean
    ([128,64], [1.,4.], [2.,2.]),                   # In the order they came in
    ([64,128], [1.,8.], [2.,4.]),                   # An item in it takes no more: twice is the most
    ([64,192], [1.,27.], [3.,9.]),                  # Three times as many, three times as long at most
    ([64,64,128], [1.,4.,3.], [2.,2.,3.]),          # Twice the same size
    ([64,64,128], [1.,1.,8.], [4**(1/3),4**(1/3),2*4**(1/3)]), # Where two readings outweigh one
    ([25,50,100,200], [0.02,0.021,0.05,0.04], [0.02,*np.array([1,2,2])*(0.021*0.025*0.02)**(1/3)])]) # The last two alike, and twice the second
def test_step_times_that_cannot_be_are_mended(bs, seconds, mended): assert monotone_step_times(bs, seconds).tolist()==pytest.approx(mended, rel=1e-9)

@pytest.mark.parametrize('seed', range(6))
def test_mended_step_times_are_the_nearest(seed):
    """From there, no way to other step times that can be leads nearer: that is when a point of a convex set is the nearest

    The ways are all of them longer or shorter together, and the increments of the logarithm between 0 and their most
    """
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

    assert monotone_step_times(bs, t)==pytest.approx(t, rel=1e-9) # There is nothing left to mend
    assert monotone_step_times(bs[order], seconds[order])==pytest.approx(t[order], rel=1e-9)
    assert monotone_step_times(8*bs, 1e-3*seconds)==pytest.approx(1e-3*t, rel=1e-9)

@pytest.mark.parametrize('n,res', [(1e-3,1), (1.,1), (1.0499,1), (1.0501,2), (1.9999999999999,2), (2.0999,2), (2.1001,3),
    (100.0999,100), (100.1001,101)])
def test_whole_epochs(n, res):
    "No more than a tenth of an epoch, or 5% of one, is missing, and no epoch is made that is not needed for that"
    assert whole_epochs(n)==res
    assert type(whole_epochs(n)) is int
    assert res>=n-0.1
    assert res<=2 or res-1<n-0.1

