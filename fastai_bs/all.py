"Everything with one import: `from fastai_bs.all import *`"
from .estimator import *
from .scaling import *
from .snapshot import *
from .accumulate import *
from .noise import *
from .plan import *
from .finder import *
