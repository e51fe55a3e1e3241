"What a notebook needs, with one import: `from fastai_bs.all import *`"
from .accumulate import GradAccum
from .finder import BSFinder  # noqa: F401 The import adds `Learner.bs_find`
from .noise import NoiseScale, plot_noise_scale
from .plan import BatchPlan
from .scaling import linear_scaling, sqrt_scaling
from .snapshot import unchanged

__all__ = ['GradAccum', 'NoiseScale', 'plot_noise_scale', 'BatchPlan', 'linear_scaling', 'sqrt_scaling', 'unchanged']
