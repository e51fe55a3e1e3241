"A sample of the matrix of learners, tools and companions; `make matrix` tries all of it"

import pytest
from fastai_bs.all import GradAccum, NoiseScale
from matrix import Cell, entries, is_refused, sample, try_cell
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

def test_noise_where_the_optimizer_steps_copies_of_the_parameters():
    "With `NonNativeMixedPrecision` it is measured as without it"
    known = []
    for companion in ('none','NonNativeMixedPrecision'):
        learn,noise = Cell('plain torch loaders', None, companion).learners.make(40, 4),NoiseScale()
        learn.fit(2, 1e-3, cbs=[noise,GradAccum(2)])
        known.append((noise.tr_sigma,noise.g_sq,noise.noise_scale,*noise.ci))
    assert known[0]==pytest.approx(known[1], rel=0.02)
