"Batch size tools for fastai: gradient accumulation, the gradient noise scale, and `learn.bs_find(lr)`"
__version__ = "0.1.0"
