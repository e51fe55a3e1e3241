"Verifications whose plans are of little matter"
import pytest
from fastai.learner import Learner

@pytest.fixture
def short_find(monkeypatch):
    "What the plan says matters little here: of the time of trials, most would be its mock training"
    find = Learner.bs_find
    monkeypatch.setattr(Learner, 'bs_find', lambda self, *args, **kwargs: find(self, *args, **{**kwargs, 'num_it': 40}))
    return find # Of its own length
