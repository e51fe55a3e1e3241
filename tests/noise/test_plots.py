"What is drawn of the noise scale: of its measurements, and by `Recorder` of a fit"
import math

import numpy as np
import pandas as pd
import pytest
from torch import nn
from fastai_bs.all import NoiseScale, plot_noise_scale
from helpers import mlp, regression
from noise.test_noise_scale import measure
from noise.test_sources import small
from pictures import misplaced, narrow

def test_the_noise_scale_is_drawn_over_the_steps():
    df = measure(regression(203), mlp(), nn.MSELoss()).df
    ax = plot_noise_scale(df, bs=10)
    line,base = ax.lines[:2]
    ok = np.isfinite(df.noise_scale)
    np.testing.assert_allclose(line.get_xydata(), np.stack([df.step[ok],df.noise_scale[ok]], 1))
    assert ax.get_yscale()=='log'
    assert set(base.get_ydata())=={10}
    assert len(ax.collections)==1

def test_recorder_draws_the_last_fit_that_was_measured():
    learn = small()
    for _ in range(2):
        with pytest.raises(ValueError, match=r'add NoiseScale\(\) to its callbacks'): learn.recorder.plot_noise_scale()
        learn.fit(1, 0.01)
    noise = NoiseScale(every=1)
    learn.fit(2, 0.01, cbs=noise)
    ax = learn.recorder.plot_noise_scale()
    np.testing.assert_allclose(ax.lines[0].get_ydata(), noise.df.noise_scale[np.isfinite(noise.df.noise_scale) & (noise.df.noise_scale>0)])
    mine = narrow()
    assert learn.recorder.plot_noise_scale(mine) is mine
    assert misplaced(mine.figure)==misplaced(ax.figure)==[]
    learn.fit(1, 0.01) # Its own columns are gone, the plot of the last measured fit is not
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','time']
    assert len(learn.recorder.plot_noise_scale().lines[0].get_ydata())>0

def test_a_curve_without_a_number_is_named():
    "Else one looks for it"
    df = pd.DataFrame(dict(step=[10,20], noise_scale=math.inf, low=[30.,40.], high=math.inf, mean_tr_sigma=1., mean_g_sq=[-1.,-0.5]))
    _,labels = plot_noise_scale(df).get_legend_handles_labels()
    assert {'moving mean (lags; no number anywhere)','noise: tr_sigma (right)','signal: g_sq (nowhere above 0)'}<=set(labels)
