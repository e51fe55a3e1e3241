"What a notebook needs, with one import: `from fastai_bs.all import *`"
from .accum_check import AccumCheck # And `Learner.check_accum`
from .accumulate import GradAccum
from .batch_size import batch_size
from .both_ways import PlainLoop
from .finder import BSFinder  # noqa: F401 The import adds `Learner.bs_find`
from .lr import ScaledLR
from .schedule import BatchSchedule
from . import grow  # noqa: F401 The import adds `Learner.fit_grow`
from .group_norm import bn_to_gn
from .memory import MemoryReport # And `Learner.memory_report`
from . import max_bs  # noqa: F401 The import adds `Learner.max_bs_find`
from .noise import NoiseScale
from .plots_noise import plot_noise_scale
from . import plots_schedule  # noqa: F401 The import adds `Recorder.plot_batch_size`
from .plan import BatchPlan
from .scaling import adam_gain, adascale_gain, decay_factor, linear_scaling, no_scaling, sqrt_scaling, warmup_factor
from .snapshot import unchanged
from .verification import BatchVerification
from . import verify  # noqa: F401 The import adds `Learner.bs_verify`

__all__ = ['GradAccum', 'BatchSchedule', 'batch_size', 'NoiseScale', 'plot_noise_scale', 'ScaledLR', 'BatchPlan',
           'BatchVerification', 'AccumCheck', 'PlainLoop', 'MemoryReport', 'bn_to_gn', 'unchanged', 'linear_scaling', 'no_scaling', 'sqrt_scaling',
           'adascale_gain', 'adam_gain', 'warmup_factor', 'decay_factor']
