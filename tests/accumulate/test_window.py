"A window as a value: weights and the mean, for counts that are numbers and on a device; its loss"
import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai_bs.all import GradAccum
from fastai_bs.accumulate.window import mean_divisor, reference, weight
from loss_cases import exact
from test_grad_accum import spied

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

# In a training

class WindowLosses(Callback):
    order = 45
    def __init__(self): self.losses = []
    def after_batch(self):
        if self.training and self.learn.grad_accum.stepped: self.losses.append(self.learn.grad_accum.window_loss)

@pytest.mark.parametrize('n_acc', [1,3])
@pytest.mark.parametrize('case', ['ce_sum','token_empty_flat','token_pad_weight'])
def test_window_loss_is_that_of_the_large_batch(case, n_acc):
    loss,items,model = exact[case]
    w = WindowLosses()
    learn = spied(items, 2, model(), loss, [GradAccum(n_acc), w])
    b = [torch.stack(o) for o in zip(*items)]
    want = [loss(learn.model(b[0][i:i+2*n_acc]), b[1][i:i+2*n_acc]) for i in range(0, 13, 2*n_acc)]
    assert len(w.losses)==len(want)
    torch.testing.assert_close(torch.stack(w.losses), torch.stack(want), rtol=1e-12, atol=0., equal_nan=True)
    assert not w.losses[0].requires_grad
