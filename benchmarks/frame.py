"""What the benchmarks share: their arguments, the data, results as CSV, and pages that are written from them.

    python benchmarks/NAME.py                      # NAME.md, and its picture, from what is in results/NAME.csv
    python benchmarks/NAME.py --full --data DIR    # Runs what is not in there yet: cut off, it goes on where it was
    python benchmarks/NAME.py --quick --data DIR   # The same in minutes on two cores, shorter: all of it in results/quick, and nothing on the page

A script calls `main(__doc__, names, run, page, draw)`, with the names of its CSVs: `run(args, *tables)` fills them, `page(*dfs)` is the text of `NAME.md`,
`draw(*dfs)` its picture, or None where it stays as it is. To measure something anew, delete its rows."""
import argparse, datetime, gc, gzip, io, platform, statistics, subprocess, sys, time, warnings
from functools import cache as once
from pathlib import Path

import fastai
import numpy as np
import pandas as pd
import torch
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.callback.fp16 import MixedPrecision
from fastai.data.external import URLs, untar_data
from scipy.stats import binom
from torch.profiler import ProfilerActivity, profile, record_function

import fastai_bs
from fastai_bs.learner.loaders import tensors
from fastai_bs.learner.optimizer import inner_opt
from fastai_bs.memory.report import storage_bytes

here = Path(__file__).parent
cache = here/'results/cache' # What takes long to make, and is no result

# Results

def machine():
    "What computes: a GPU by its name, else the processor"
    if torch.cuda.is_available(): return torch.cuda.get_device_name()
    try: names = [o.partition(':')[2].strip() for o in Path('/proc/cpuinfo').read_text().splitlines() if o.startswith('model name')]
    except OSError: names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"

@once
def commit()->str:
    "Of the code that runs, with a plus where it was changed since; empty outside of a checkout"
    def _git(*words): return subprocess.run(['git',*words], cwd=here, capture_output=True, text=True)
    head = _git('rev-parse', '--short', 'HEAD')
    if head.returncode: return ''
    return head.stdout.strip()+'+'*bool(_git('diff', '--quiet', 'HEAD', '--', '*.py', '../fastai_bs').returncode)

def about()->dict:
    "When and with what a row was measured"
    return dict(date=f'{datetime.date.today()}', fastai_bs=fastai_bs.__version__, fastai=fastai.__version__, torch=torch.__version__,
                python=platform.python_version(), machine=machine(), threads=torch.get_num_threads(), commit=commit())

about_cols = 'date','fastai_bs','fastai','torch','python','machine','threads','commit' # The last one is younger than some of the rows

class Table:
    "A CSV below `results`: what is there is not run again. One process at a time adds to one"
    def __init__(self,
        name:str, # Of the file
        quick:bool=False, # Into a folder of its own?
    ):
        self.path,self.at = here/'results'/('quick' if quick else '')/f'{name}.csv',None

    @property
    def df(self)->pd.DataFrame:
        if not self.path.exists(): return pd.DataFrame(columns=list(about_cols))
        stat = self.path.stat()
        if self.at!=(at := (stat.st_mtime_ns,stat.st_size)): # Pages ask for it often
            self.at,self.read = at,pd.read_csv(self.path, dtype=dict.fromkeys(about_cols, str))
        return self.read.copy()

    def has(self, **key)->bool:
        "Is there a row with these values? Floats as far as they are written"
        df = self.df
        if not set(key)<=set(df): return False
        def _same(col, v):
            if isinstance(v, float) and col.dtype.kind in 'if': return np.isclose(col.astype(float), v, rtol=1e-5, atol=0)
            return col==v if col.dtype.kind in 'ifb' else col.astype(str)==str(v)
        return bool(np.logical_and.reduce([_same(df[nm], v) for nm,v in key.items()]).any())

    def add(self, **row): self.add_all([row])

    def add_all(self, rows):
        "More rows, with when and with what they were measured; all or none of them, and the last one is shown"
        def _read(file): return pd.read_csv(file, dtype=str, keep_default_na=False)
        new = _read(io.StringIO(pd.DataFrame([{**o, **about()} for o in rows]).to_csv(index=False, float_format='%.6g')))
        old = _read(self.path) if self.path.exists() else pd.DataFrame()
        if set(new)<=set(old): new.reindex(columns=old.columns).to_csv(self.path, mode='a', header=False, index=False)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            df,path = pd.concat([o for o in (old,new) if len(o)]),self.path.with_suffix('.part')
            df[[*(o for o in df if o not in about_cols), *about_cols]].to_csv(path, index=False)
            path.replace(self.path)
        print(', '.join(f'{nm} {v:.4g}' if isinstance(v, float) else f'{nm} {v}' for nm,v in rows[-1].items()), flush=True)

# Pages

def measured(df, *more)->str: # `more`: columns with the versions of other libraries
    "The line of a page that says when and with what, as far as it was noted"
    def _of(nm): return ' and '.join(sorted(df[nm].dropna().astype(str).unique())) if nm in df else ''
    heads = dict(date='', **{o: f'{o} ' for o in ('fastai_bs','fastai',*more,'torch')}, python='Python ', machine='')
    parts = [head+_of(nm) for nm,head in heads.items() if _of(nm)] + ([f"{_of('threads')} thread{'s'*(_of('threads')!='1')}"] if _of('threads') else [])
    if _of('commit'): parts.append(f"commit {_of('commit')}"+(' (not of all rows)' if df.commit.isna().any() else ''))
    return ', '.join(parts)+'.' if parts else ''

def md_table(heads, rows)->str:
    return '\n'.join([f"| {' | '.join(heads)} |", '|'+'---|'*len(heads), *(f"| {' | '.join(map(str, o))} |" for o in rows)])

# Times and memory

class Bare(Callback):
    "As little as accumulates `n_acc` micro-batches of one size in a `Learner`"
    order,run_valid = MixedPrecision.order-4,False
    def __init__(self, n_acc): self.n_acc = n_acc
    def before_fit(self): self.n = 0
    def before_backward(self): self.learn.loss_grad = self.learn.loss_grad/self.n_acc
    def before_step(self):
        self.n += 1
        if self.n%self.n_acc: raise CancelBatchException

class Clock(Callback):
    "This process's own time after each optimizer step"
    order = 70 # After all that has a part in the step
    def before_fit(self): self.at = []
    def after_step(self): self.at.append(time.process_time())

def peak(f):
    "Most bytes that tensors hold at a time, beyond those of before, in a second call"
    f()
    gc.collect() # Not in the middle of it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof: f()
    events = sorted((e.start_ns(),e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name()=='[memory]')
    return max(np.cumsum([o for _,o in events]))

class StepPeak(Callback):
    "Bytes at the peak of the second step of a fit, which it ends"
    order,run_valid = -1000,False
    def before_fit(self):
        self.on_gpu = next(self.model.parameters()).is_cuda
        if not self.on_gpu: return
        gc.collect() # Learners of before
        self.others = torch.cuda.memory_allocated()-storage_bytes([*self.model.parameters(), *self.model.buffers()]) # Data on the device, say
    def before_batch(self):
        if self.iter==1:
            if self.on_gpu: torch.cuda.reset_peak_memory_stats()
            with record_function('second'): pass
        if self.iter or self.on_gpu: return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        # Not the batch: the profiler does not see it go before the second step
        self.base = storage_bytes([*self.model.parameters(), *self.model.buffers(), *grads, *tensors(inner_opt(self.opt).state)])
        gc.collect() # Not in the middle of it
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()

    def after_batch(self):
        if self.iter<1: return
        self.bytes = torch.cuda.max_memory_allocated()-self.others if self.on_gpu else self._of_events()
        raise CancelFitException

    def _of_events(self):
        self.profile.__exit__(None, None, None)
        now,most,is_second = self.base,0,False
        for e in sorted(self.profile.profiler.kineto_results.events(), key=lambda o: o.start_ns()):
            is_second |= e.name()=='second'
            if e.name()=='[memory]':
                now += e.nbytes()
                if is_second: most = max(most, now)
        return most

def step_peak(learn):
    "Most bytes that the second step of a training holds: by CUDA's allocator, elsewhere by the events of torch's profiler"
    peak = StepPeak()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3, cbs=peak)
    return peak.bytes

class Half(Callback):
    "bfloat16 as fastai's `MixedPrecision` has it, on any device"
    def before_batch(self):
        self.context = torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16)
        self.context.__enter__()
    def after_pred(self): self.learn.pred = self.pred.float()
    def after_loss(self): self.context.__exit__(None, None, None)

def seconds(learn, n_epoch=1):
    "Processor time of a fit; other work on the machine is not in it"
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, 1e-3)
    return time.process_time()-start

def clocked(f): # A function
    "`f` that returns its processor time, as for `in_pairs`"
    def _f():
        start = time.process_time()
        f()
        return time.process_time()-start
    return _f

def in_pairs(a, b, n)->list: # `(seconds of a, seconds of b)`, n of them
    "Both functions, which return seconds, once to warm up; then `n` times one right after the other, in alternating order"
    a(),b()
    res = []
    for i in range(n):
        if i%2: y,x = b(),a()
        else: x,y = a(),b()
        res.append((x,y))
    return res

def middle(xs)->tuple: # `(median, low, high)`
    "Median, and its interval of 95% at least by order statistics (of 15 values: the 4th and the 12th); of fewer than 6 values the lowest and the highest"
    xs = sorted(xs)
    k = max(0, int(binom.ppf(0.025, len(xs), 0.5))-1)
    return statistics.median(xs),xs[k],xs[-1-k]

# Data

def read_idx(path):
    with gzip.open(path) as f: data = f.read()
    shape = np.frombuffer(data, '>i4', data[3], 4)
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4+4*data[3]).reshape(*shape).copy())

def _of_folders(folder):
    "Gray pictures in a folder for each class, as fastai's MNIST has them, in the order of their names"
    from PIL import Image
    files = sorted(folder.glob('*/*.png'))
    return torch.stack([torch.from_numpy(np.array(Image.open(o))) for o in files]),torch.tensor([int(o.parent.name) for o in files])

def folder(data, name):
    "Where a data set lies that only `--data` has"
    if data is None: raise SystemExit(f"give the folder that holds {name}/ by --data")
    return data/name

def digits28(data, name='mnist'):
    "`(pictures, labels)` of training and test set, bytes, from the idx files in `data/name`; without `data` fastai's own MNIST"
    if data is None and name=='mnist': return [_of_folders(untar_data(URLs.MNIST)/o) for o in ('training','testing')]
    return [tuple(read_idx(folder(data, name)/f'{o}-{k}-ubyte.gz') for k in ('images-idx3','labels-idx1')) for o in ('train','t10k')]

def standardized(x, mean=0.1307, std=0.3081): return ((x[:,None].float()/255)-mean)/std

class TensorLoader:
    "Batches of tensors that fit in memory"
    def __init__(self, x, y, bs, shuffle=False):
        self.x,self.y,self.bs,self.shuffle,self.dataset,self.n = x,y,bs,shuffle,y,len(y)
        self.device = x.device # Where a `Learner` trains
    def __len__(self): return -(-self.n//self.bs)
    def new(self, bs=None): return TensorLoader(self.x, self.y, bs or self.bs, self.shuffle) # As fastai's loaders have it
    def __iter__(self):
        for idx in (torch.randperm(self.n) if self.shuffle else torch.arange(self.n)).split(self.bs): yield self.x[idx],self.y[idx]

# A script

def arguments(doc, parts=()):
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--data', type=Path, help="folder with the data sets, each in one of its own")
    how = p.add_mutually_exclusive_group()
    how.add_argument('--quick', action='store_true', help="minutes on two cores; the page stays")
    how.add_argument('--full', action='store_true', help="all that is on the page and not in results/ yet")
    p.add_argument('--seeds', type=int, nargs='*', help="other ones than the script's own")
    if parts: p.add_argument('--parts', nargs='*', default=list(parts), choices=list(parts), help="some of what is run")
    return p

def main(doc, names, run, page, draw=None, parser=None, parts=()):
    "What a script does when it is called"
    args = (parser or arguments(doc, parts)).parse_args()
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    path = (here/'results/quick' if args.quick else here)/Path(sys.argv[0]).stem
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = [Table(o, args.quick) for o in names]
    if args.quick or args.full: run(args, *tables)
    dfs = [o.df for o in tables]
    if args.quick and not all(map(len, dfs)): return print("No page: it needs all parts")
    text = page(*dfs).rstrip()+'\n'
    if args.quick: text = text.replace('\n\n', '\n\n**Quick: on less than the text says.**\n\n', 1)
    path.with_suffix('.md').write_text(text)
    fig = draw(*dfs) if draw is not None else None
    if fig is not None: fig.savefig(path.with_suffix('.png'), dpi=80)
    if args.quick: print(text)
    print(f'{path}.md; processor minutes of this process: {time.process_time()/60:.1f}')
