"""Interrupt each tool that leaves a learner as it was, at random times, once and twice, and look whether it did

`python tests/support/interrupts.py [--single 300] [--double 200] [--seed 0] [--only TEXT]` draws a tool and a time, raises SIGINT there as Ctrl-C does, for
the second kind once more 2 to 60 ms later, and compares the whole learner and the process with what they were. Then it trains on, beside a learner that was
never measured: all bits must be the same. A trial counts where all of its interrupts come before the tool has ended. The exit code is 1 where anything
differs.
"""
import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import redirect_stdout
from io import StringIO

import fastai.torch_core
import torch
from torch import nn
from fastai.callback.tracker import SaveModelCallback
from fastai.optimizer import Adam

from fastai_bs.all import batch_size, GhostBatchNorm, GradAccum, NoiseScale, unchanged
from fastai_bs.finder.timing import StepTimer, StepTimes
from helpers import changes, left_behind, loaders, picture, process, quiet_learner, regression, seed_torch, set_seed

# Tools and their learner

def learner():
    "Holds state of each kind: moments of Adam, running statistics, dropout, shuffled items; callbacks that accumulate, measure, save and change layers"
    set_seed(0)
    def block(n): return nn.Sequential(nn.Linear(n,16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
    model = nn.Sequential(block(5), *(block(16) for _ in range(8)), nn.Linear(16,2))
    learn = quiet_learner(loaders(regression(96, dtype=torch.float32), 8, regression(32, dtype=torch.float32), shuffle=True), model, opt_func=Adam,
                          cbs=[GradAccum(2),NoiseScale(),SaveModelCallback(),GhostBatchNorm(4)])
    learn.fit(1, 0.01)
    return learn

def _unchanged(learn):
    with unchanged(learn):
        learn.remove_cbs([GradAccum,NoiseScale])
        learn.model = nn.Sequential(learn.model, nn.Identity())
        learn.fit(2, 0.1)
        learn.create_opt()

tools = {
    'unchanged': _unchanged, 'bs_find': lambda learn: learn.bs_find(0.01, num_it=40, n_batch=4, show_plot=False),
    'bs_find, by short trainings': lambda learn: learn.bs_find(0.01, n_epoch=300, step_times={16: 0.01, 32: 0.01, 8: 0.01}, show_plot=False),
    'max_bs_find': lambda learn: learn.max_bs_find(max_bs=32, limit='1GB'), 'memory_report': lambda learn: learn.memory_report(),
    'check_accum': lambda learn: learn.check_accum(3), 'accum_to': lambda learn: learn.accum_to(32, limit='1GB'),
    'bs_verify': lambda learn: learn.bs_verify(0.01, [32], 1, n_epoch=40)}

# What there is one of

def of_process():
    "What a tool may have changed in the process"
    return {nm: get() for nm,(get,_) in process.items()} | {
        'as_subclass': torch.Tensor.as_subclass, 'maybe_gather': fastai.torch_core.maybe_gather, 'filters of warnings': list(warnings.filters),
        'hooks of saved tensors': torch._C._autograd._top_saved_tensors_default_hooks(False),
        'modes': torch.overrides._get_current_function_mode_stack(), 'modes of dispatch': torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        'handler': signal.getsignal(signal.SIGINT)}

# Interrupts

class Interrupts:
    "Raises SIGINT, as Ctrl-C does, in the block at the given times in seconds; notes where"
    def __init__(self, *times): self.times,self.places = times,[]

    def _set(self): signal.setitimer(signal.ITIMER_REAL, max(1e-6, self.times[len(self.places)]-(time.perf_counter()-self.begin)))

    def _raise(self, signum, frame):
        self.places.append(' < '.join(f'{o.name}:{o.lineno}' for o in reversed(traceback.extract_stack(frame, 8))))
        if len(self.places)<len(self.times): self._set()
        signal.raise_signal(signal.SIGINT)

    def __enter__(self):
        self.own = signal.signal(signal.SIGALRM, self._raise)
        self.begin = time.perf_counter()
        self._set()
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.own)

def trial(tool, times):
    "Interrupt a tool; return what differs afterwards, in the learner, in the process and in the training after it, and the interrupts"
    learn,other = learner(),learner()
    was,of = picture(learn),of_process()
    interrupts,errors = Interrupts(*times),[]
    try:
        try:
            with interrupts: tools[tool](learn)
        except KeyboardInterrupt as e: errors.append(e) # Kept, as a notebook keeps it: nothing is put back because a traceback goes
        interrupts.__exit__()
    except KeyboardInterrupt as e: errors.append(e) # Between the two
    interrupts.__exit__()
    if tool=='accum_to' and batch_size(learn)==32: return [],interrupts # Done before the interrupt, or at the same time
    left = changes(was, picture(learn)) + [nm for nm,o in of_process().items() if o!=of[nm]]
    for nm in left:
        if nm in process: process[nm][1](of[nm])
    if left: return left,interrupts
    try:
        for o in (learn,other):
            seed_torch(1); random.seed(1)
            o.fit(1, 0.01)
    except Exception as e: return [f'the training after it: {e}'],interrupts
    return changes(left_behind(learn), left_behind(other)),interrupts

def seconds(tool):
    learn,begin = learner(),time.perf_counter()
    tools[tool](learn)
    return time.perf_counter()-begin

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for nm,n in (('single',300),('double',200),('seed',0)): p.add_argument(f'--{nm}', type=int, default=n)
    p.add_argument('--only', default='')
    args = p.parse_args()
    faulthandler.enable() # Says where, if torch ends the process
    sys.unraisablehook = lambda *args: None # Python itself drops an interrupt in a `__del__`
    os.chdir(tempfile.mkdtemp()) # For the weights that a callback saves
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    StepTimer.patience,StepTimer.most = 1.,2 # As few steps are timed as will do
    StepTimes.budget = StepTimes.part = StepTimes.slack = float('inf')
    StepTimes.n_rounds = 2
    rng,names = random.Random(args.seed),[o for o in tools if args.only in o]
    with redirect_stdout(StringIO()): takes = {nm: min(seconds(nm),seconds(nm)) for nm in names}
    print(', '.join(f'{nm} {secs:.2f} s' for nm,secs in takes.items()), flush=True)
    n_failed = 0
    for kind,n in (('single',args.single),('double',args.double)):
        n_tried = n_whole = 0
        while n_whole<n:
            nm = names[n_tried%len(names)]
            times = [rng.uniform(0, takes[nm])]
            if kind=='double': times.append(times[0]+rng.uniform(0.002, 0.06))
            with redirect_stdout(StringIO()): left,interrupts = trial(nm, times)
            n_tried += 1
            n_whole += len(interrupts.places)==len(times)
            if not left: continue
            n_failed += 1
            print(f'{kind} {n_tried}, {nm}: {len(left)} differ, as {left[:6]}\n  '+'\n  '.join(interrupts.places), flush=True)
        print(f'{kind}: {n_whole} trials, and {n_tried-n_whole} in which the tool ended first')
    print(f'{n_failed} differ')
    return n_failed>0

if __name__=='__main__': sys.exit(main())
