"What a notebook needs, with one import: `from fastai_bs.all import *`"
from .verify.check_accum import AccumCheck # And `Learner.check_accum`
from .accumulate.grad_accum import GradAccum
from .accumulate.sizes import batch_size
from .finder import bs_find  # noqa: F401 The import adds `Learner.bs_find`
from .schedule.scaled_lr import ScaledLR
from .schedule.batch_schedule import BatchSchedule
from .memory.group_norm import GhostBatchNorm, bn_to_gn
from .memory.report import MemoryReport # And `Learner.memory_report`
from .memory import max_bs  # noqa: F401 The import adds `Learner.max_bs_find`
from .memory import accum_to  # noqa: F401 The import adds `Learner.accum_to`
from .noise.noise_scale import NoiseScale
from .noise.plots import plot_noise_scale
from .schedule import batch_schedule  # noqa: F401 The import adds `Recorder.plot_batch_size`
from .finder.plan import BatchPlan
from .schedule.rules import adam_gain, adascale_gain, decay_factor, linear_scaling, no_scaling, sqrt_scaling, warmup_factor
from .learner.snapshot import unchanged
from .verify.result import BatchVerification
from .verify import bs_verify  # noqa: F401 The import adds `Learner.bs_verify`

__all__ = ['GradAccum', 'BatchSchedule', 'batch_size', 'NoiseScale', 'plot_noise_scale', 'ScaledLR', 'BatchPlan',
           'BatchVerification', 'AccumCheck', 'MemoryReport', 'GhostBatchNorm', 'bn_to_gn', 'unchanged', 'linear_scaling', 'no_scaling', 'sqrt_scaling',
           'adascale_gain', 'adam_gain', 'warmup_factor', 'decay_factor']
