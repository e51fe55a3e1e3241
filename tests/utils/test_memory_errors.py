"Which errors say that memory has run out, and what is freed"
import weakref
from types import SimpleNamespace

import torch
from fastai_bs.utils.memory_errors import free_memory, out_of_memory

surely = [MemoryError(), *map(RuntimeError, ('MPS backend out of memory', "DefaultCPUAllocator: can't allocate memory",
    'DefaultCPUAllocator: not enough memory: you tried'))]
perhaps = list(map(RuntimeError, ('CUBLAS_STATUS_ALLOC_FAILED', 'CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED',
    'cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This', 'Invalid buffer size: 9.75 GiB',
    '!block->expandable_segment_ INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":2814, please')))

def test_errors_that_mean_memory():
    "Surely, or perhaps; also where another error hides them"
    assert all(out_of_memory(e, surely=True) for e in surely)
    assert all(out_of_memory(e) and not out_of_memory(e, surely=True) for e in perhaps)
    cause = ValueError('the batch failed')
    cause.__cause__ = torch.OutOfMemoryError()
    assert out_of_memory(cause)
    assert not out_of_memory(ValueError('memory'))

def test_a_step_that_failed_is_freed():
    "With the graph of its loss"
    loss = torch.ones(3, requires_grad=True).sum()
    learn = SimpleNamespace(xb=(torch.ones(3),), yb=(), pred=loss, loss=loss, loss_grad=loss)
    held = weakref.ref(loss)
    del loss
    free_memory(learn)
    assert held() is None
    assert learn.xb==learn.yb==(None,)
