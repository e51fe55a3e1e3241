"What the tests stand on: that no test inherits from another, and that few cases hold every pair"
import random
from itertools import combinations, product

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.torch_core import defaults
from helpers import as_it_was, pairwise, process, random_states

def _autocast(): torch.autocast('cpu', dtype=torch.float16, cache_enabled=False).__enter__()
def _deterministic(): torch.use_deterministic_algorithms(True, warn_only=True)
def _cudnn(): torch.backends.cudnn.deterministic = True
def _profiler(): torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).__enter__()

leaves = [(_autocast,'autocast'), (_profiler,'profiler'), (lambda: torch.set_grad_enabled(False),'grad mode'),
    (lambda: torch.set_default_dtype(torch.float64),'default dtype'),
    (lambda: torch.set_default_device('meta'),'default device'), (lambda: torch.set_num_threads(3),'number of threads'),
    (_deterministic,'deterministic algorithms'), (_cudnn,'flags of cuDNN'), (lambda: defaults.callbacks.append(Callback),'defaults.callbacks')]

@pytest.mark.parametrize('leave,nm', leaves)
def test_what_is_left_changed_is_put_back_and_named(leave, nm):
    was = {k: get() for k,(get,_) in process.items()}
    with pytest.raises(AssertionError, match=f'left changed: {nm}$'), as_it_was(): leave()
    assert {k: get() for k,(get,_) in process.items()}==was
    with as_it_was(failed=lambda: True): leave() # One error says enough
    assert {k: get() for k,(get,_) in process.items()}==was

def test_random_numbers():
    "The same at the beginning of each test, and what a test draws is not missing afterwards"
    def draw(): return random.random(),np.random.rand(),torch.rand(1).item()
    def _in_test():
        with as_it_was(): return draw()
    torch.manual_seed(5); random.seed(5); np.random.seed(5)
    state = random_states()
    first = _in_test()
    assert random_states()==state
    draw()
    assert _in_test()==first

@pytest.mark.parametrize('axes', [('ab',), ('ab',(0,1),(True,False),range(5),'uvw'), (range(9),range(17),'ab')], ids=len)
@pytest.mark.parametrize('where', [lambda *case: True, lambda *case: (case[0],case[-1]) not in {('a',1),('b','x'),(0,'a')}], ids=['all','some'])
def test_pairwise(axes, where):
    "Each pair that is in a case of the product is in one of these; they are few, in order, and the same each time"
    cases,pairs = pairwise(*axes, where=where),lambda cs: {p for c in cs for p in combinations(enumerate(c), 2)} or set(cs)
    whole = [c for c in product(*axes) if where(*c)]
    assert pairs(cases)==pairs(whole)
    assert cases==[c for c in whole if c in cases]==pairwise(*axes, where=where)
    assert len(set(cases))==len(cases)
    two_largest = sorted(map(len, axes))[-2:]
    assert len(cases)<=1.5*np.prod(two_largest) # The largest two alone need their product

