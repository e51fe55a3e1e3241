"What all pictures share: axes, and what a recorder keeps to draw"
import pickle
from types import SimpleNamespace

import matplotlib.pyplot as plt
from fastai_bs.utils.plots import ForPlots, new_axes

def test_axes_that_are_given_are_drawn_on():
    mine = plt.subplots()[1]
    assert new_axes(mine) is mine
    assert new_axes(None) is not mine

def test_what_is_kept_for_plots_is_pickled_as_plain_values():
    "So that no class of this package is named in an exported learner"
    class Local(SimpleNamespace): "Cannot be pickled itself"
    kept = ForPlots(Local(df=[1,2], bs=8), 'df', 'bs')
    assert kept.df==[1,2]
    data = pickle.dumps(kept)
    assert b'fastai' not in data
    assert pickle.loads(data)==SimpleNamespace(df=[1,2], bs=8)
