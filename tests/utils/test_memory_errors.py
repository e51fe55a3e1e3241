"Which errors say that memory has run out, and what is freed"
import weakref
from types import SimpleNamespace

import torch
from fastai_bs.utils.memory_errors import free_memory, out_of_memory

surely = [MemoryError(), *map(RuntimeError, ('MPS backend out of memory', "DefaultCPUAllocator: can't allocate memory",
    'DefaultCPUAllocator: not enough memory: you tried', 'std::bad_alloc', '[Errno 12] Cannot allocate memory'))]

# Errors that had too little memory as their cause, and where they were met
perhaps = list(map(RuntimeError, (
    'CUBLAS_STATUS_ALLOC_FAILED', 'CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED', 'cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This',
    'Invalid buffer size: 9.75 GiB', '!block->expandable_segment_ INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":2814, please',
    'Unable to find a valid cuDNN algorithm to run convolution', # ultralytics/yolov5#4463
    'CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`', # EleutherAI/lm-evaluation-harness#1689
    'level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)', # pytorch/pytorch#190972
    'GET was unable to find an engine to execute this computation', # QwenLM/Qwen3-VL#151
    'DataLoader worker (pid 11011) is killed by signal: Bus error', # pytorch/pytorch#108861
    'cublas runtime error : resource allocation failed at THCGeneral.cpp:250', # huggingface/transfer-learning-conv-ai#10
    'could not create a primitive', # AUTOMATIC1111/stable-diffusion-webui#16571
    'NCCL Error 1: unhandled cuda error'))) # PKU-YuanGroup/Open-Sora-Plan#386
others = [ValueError('memory'), *map(RuntimeError, ( # A kernel's limit
    'CUDA error: invalid configuration argument', # pytorch/pytorch#142228
    'Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.', # pytorch/pytorch#80020
    'nonzero is not supported for tensors with more than INT_MAX elements', # KevinMusgrave/pytorch-metric-learning#367
    'too many resources requested for launch', # dusty-nv/jetson-inference#959
    'cuDNN error: CUDNN_STATUS_EXECUTION_FAILED'))] # pytorch/pytorch#17774

def test_errors_that_mean_memory():
    "Surely, or perhaps; also where another error hides them"
    assert all(out_of_memory(e, surely=True) for e in surely)
    assert all(out_of_memory(e) and not out_of_memory(e, surely=True) for e in perhaps)
    assert not any(map(out_of_memory, others))
    cause = ValueError('the batch failed')
    cause.__cause__ = torch.OutOfMemoryError()
    assert out_of_memory(cause)

def test_a_step_that_failed_is_freed():
    "With the graph of its loss"
    loss = torch.ones(3, requires_grad=True).sum()
    learn = SimpleNamespace(xb=(torch.ones(3),), yb=(), pred=loss, loss=loss, loss_grad=loss)
    held = weakref.ref(loss)
    del loss
    free_memory(learn)
    assert held() is None
    assert learn.xb==learn.yb==(None,)
