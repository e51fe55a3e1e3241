"Gradients of a window: models that replay CUDA graphs, whose gradients cannot be held, are refused"
import pytest
import torch
from torch import nn
from fastai_bs.accumulate import gradients
from fastai_bs.all import GradAccum, NoiseScale
from helpers import changes, loaders, mlp, picture, quiet_learner, regression

@pytest.fixture
def on_a_gpu(monkeypatch): monkeypatch.setattr(gradients, '_device_of', lambda model: 'cuda')

@pytest.mark.parametrize('cb', [GradAccum({1: 2}), GradAccum(1, on_oom='split'), NoiseScale()], ids=['dict','split','parts'])
def test_cuda_graphs_are_refused(cb, on_a_gpu):
    "Before anything has changed"
    learn = quiet_learner(loaders(regression(24), 4), torch.compile(mlp(), mode='reduce-overhead'), cbs=cb)
    before = picture(learn, only=('model',))
    with pytest.raises(ValueError, match="compiled to replay CUDA graphs.*mode='max-autotune-no-cudagraphs'"): learn.fit(2, 0.1)
    assert changes(before, picture(learn, only=('model',)))==[]
    assert all(p.grad is None for p in learn.model.parameters())

def test_models_that_replay_cuda_graphs_are_told_from_others(on_a_gpu, monkeypatch):
    "By mode or option, also in a part of the model; not without, and not on a CPU, where inductor records none"
    graphs = dict(mode='max-autotune'),dict(options={'triton.cudagraphs': True})
    models = [nn.Sequential(nn.Linear(5,5,dtype=torch.float64), torch.compile(mlp(), **kwargs)) for kwargs in graphs]
    for model in models:
        with pytest.raises(ValueError, match='CUDA graphs'): gradients.refuse_cuda_graphs(model)
    for kwargs in ({},dict(mode='max-autotune-no-cudagraphs'),dict(backend='eager')): gradients.refuse_cuda_graphs(torch.compile(mlp(), **kwargs))
    monkeypatch.undo()
    for model in models: gradients.refuse_cuda_graphs(model)
