"The loss of a window in a training"
import pytest
import torch
from fastai.callback.core import Callback
from fastai_bs.all import GradAccum
from loss_cases import exact
from test_grad_accum import spied

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
