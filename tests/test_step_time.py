"Which batch sizes are compared, how each is reached, and which is taken: figures by hand. The formulas themselves are in test_scaling"
import math

import numpy as np
import pytest
from fastai_bs.step_time import best_split, candidates, fit_step_time, relative_time, smallest_of_fastest, splits

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
    assert [o[1:] for o in res]==[o[1:] for o in ways] and [o[0] for o in res]==pytest.approx([o[0] for o in ways])

@pytest.mark.parametrize('ways,micro_bs', [
    ([(1.,16,4),(1.,32,2)], 32), ([(1.,16,4),(1.05,32,2)], 32), ([(1.,16,4),(1.051,32,2)], 16), ([(2.,16,4),(1.,32,2)], 32), ([(nan,16,4)], 16)])
def test_best_split(ways, micro_bs):
    "The largest within 5% of the fastest; one that was not timed will do where there is no other"
    assert best_split(ways)[1]==micro_bs

def test_relative_time():
    "(1 + 100/bs) steps of 2, 1.5 and 3 s: 6, 3 and 4.5 s"
    assert relative_time([50,100,200], [2.,1.5,3.], 100., bs_now=100).tolist()==[2.,1.,1.5]
    assert relative_time([50,100], [1.,nan], 100., bs_now=50).tolist()==[1.,pytest.approx(nan, nan_ok=True)]
    assert np.isnan(relative_time([50,100], [1.,1.], nan, bs_now=50)).all()

@pytest.mark.filterwarnings('error')
def test_relative_time_of_a_noise_scale_without_end(): assert np.isnan(relative_time([50,100], [1.,1.], math.inf, bs_now=50)).all()

@pytest.mark.parametrize('time,bs', [([1.,1.,1.], 25), ([1.051,1.,2.], 50), ([1.049,1.,2.], 25), ([nan,2.,1.], 100), ([nan,nan,nan], None)])
def test_smallest_of_fastest(time, bs): assert smallest_of_fastest([25,50,100], time)==bs

@pytest.mark.filterwarnings('error')
def test_smallest_is_a_whole_number_of_python():
    assert type(smallest_of_fastest(np.array([25,50]), np.array([1.,1.]))) is int

@pytest.mark.parametrize('n', [3,4,6])
def test_the_fit_takes_arrays_and_iterators(n):
    bs = 2**np.arange(n)
    seconds = 0.01*(1+0.1*np.cos(np.arange(n)))+1e-4*bs
    as_lists = fit_step_time(bs.tolist(), seconds.tolist())
    assert fit_step_time(bs, seconds)==pytest.approx(as_lists, rel=1e-12)==fit_step_time(iter(bs), iter(seconds))
