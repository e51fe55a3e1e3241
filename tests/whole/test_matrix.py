"A sample of the matrix of learners, tools and companions; `make matrix` tries all of it"

import pytest
from matrix import entries, is_refused, sample, try_cell
from zoo import companions, does_not_apply, models

some = sample()

@pytest.mark.parametrize('cell', some, ids=' | '.join)
def test_cell(cell, short):
    state,words = try_cell(cell)
    assert state==('refused' if any(is_refused(cell.entry, who) for who in cell) else 'works'), words

def test_sample():
    "Each model, tool and companion is in it"
    missing = {'TensorBoardCallback'} if does_not_apply('collab', 'TensorBoardCallback') else set()
    assert {o for cell in some for o in cell}=={*models, *entries, *companions}-missing
