"The weights of micro-batches and the mean, for counts that are numbers and on a device"
import numpy as np
import pytest
import torch
from fastai_bs.accumulate.weights import mean_divisor, reference, weight

def double(x): return torch.tensor(x, dtype=torch.float64)

rng = np.random.default_rng(0)
windows = [[4.,4.,2.], [0.,4.,2.], [0.,0.,3.], [0.,0.,0.], [5.], [0.], [0.5,1.75,0.25], *(rng.integers(0, 5, 6).astype(float).tolist() for _ in range(20))]

@pytest.mark.parametrize('as_count', [float, double])
def test_weighted_sum_over_divisor_is_the_mean(as_count):
    "sum(w_i g_i)/divisor is sum(n_i g_i)/sum(n_i), and 0 where nothing counts"
    for ns in windows:
        gs,n_ref,total = rng.normal(size=len(ns)),None,0.
        for n,g in zip(ns, gs):
            n_ref = reference(n_ref, as_count(n))
            total += float(weight(as_count(n), 5*n_ref))*g
        expected = np.dot(ns, gs)/sum(ns) if sum(ns) else 0.
        assert total/float(mean_divisor(as_count(sum(ns)), 5*n_ref))==pytest.approx(expected, rel=1e-12, abs=0), ns
    assert mean_divisor(12., 4., 2)==1.5 # The mean over 2 ranks of sums is half of the sum
