"""What the benchmarks share: their arguments, the data, results as CSV, and pages that are written from them.

    python benchmarks/NAME.py                      # NAME.md, and its picture, from what is in results/NAME.csv
    python benchmarks/NAME.py --full --data DIR    # Runs what is not in there yet: cut off, it goes on where it was
    python benchmarks/NAME.py --quick --data DIR   # The same in minutes on two cores, shorter: into results/quick, and nothing of it is on the page

A script calls `main(__doc__, names, run, page)`, with the names of its CSVs: `run(args, *tables)` fills them, `page(*dfs)` gives the text of `NAME.md`."""
import argparse, datetime, gzip, platform, statistics, sys, time
from pathlib import Path

import fastai
import numpy as np
import pandas as pd
import torch
from fastai.data.external import URLs, untar_data

import fastai_bs

here = Path(__file__).parent

# Results

def machine():
    "What computes: a GPU by its name, else the processor"
    if torch.cuda.is_available(): return torch.cuda.get_device_name()
    try: names = [o.partition(':')[2].strip() for o in Path('/proc/cpuinfo').read_text().splitlines() if o.startswith('model name')]
    except OSError: names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"

def about()->dict:
    "When and with what a row was measured"
    return dict(date=f'{datetime.date.today()}', fastai_bs=fastai_bs.__version__, fastai=fastai.__version__, torch=torch.__version__,
                python=platform.python_version(), machine=machine(), threads=torch.get_num_threads())

about_cols = 'date','fastai_bs','fastai','torch','python','machine','threads'

class Table:
    "A CSV below `results`, a row at a time: what is there is not run again"
    def __init__(self,
        name:str, # Of the file
        quick:bool=False, # Into a folder of its own?
    ):
        self.path = here/'results'/('quick' if quick else '')/f'{name}.csv'

    @property
    def df(self)->pd.DataFrame: return pd.read_csv(self.path) if self.path.exists() else pd.DataFrame(columns=list(about_cols))

    def has(self, **key)->bool:
        "Is there a row with these values?"
        df = self.df
        if not set(key)<=set(df): return False
        return bool(np.logical_and.reduce([df[nm]==v if isinstance(v, (int,float)) else df[nm].astype(str)==str(v) for nm,v in key.items()]).any())

    def add(self, **row):
        "One more, with when and with what it was measured; shown as it comes"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        df = pd.concat([o for o in (self.df,pd.DataFrame([{**row, **about()}])) if len(o)])
        df[[*(o for o in df if o not in about_cols), *about_cols]].to_csv(self.path, index=False)
        print(', '.join(f'{nm} {v:.4g}' if isinstance(v, float) else f'{nm} {v}' for nm,v in row.items()), flush=True)

# Pages

def measured(df)->str:
    "The line of a page that says when and with what"
    def _of(nm): return ' and '.join(str(o) for o in sorted(df[nm].dropna().unique(), key=str))
    threads = _of('threads')
    return (f"{_of('date')}, fastai_bs {_of('fastai_bs')}, fastai {_of('fastai')}, torch {_of('torch')}, Python {_of('python')}, {_of('machine')}, "
            f"{threads} thread{'' if threads=='1' else 's'}.")

def md_table(heads, rows)->str:
    return '\n'.join([f"| {' | '.join(heads)} |", '|'+'---|'*len(heads), *(f"| {' | '.join(map(str, o))} |" for o in rows)])

# Times

def seconds(learn, n_epoch=1):
    "Processor time of a fit; other work on the machine is not in it"
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, 1e-3)
    return time.process_time()-start

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
    "Median, and its interval of 95% at least by order statistics (of 15 values: the 4th and the 12th)"
    xs = sorted(xs)
    k = max(0, int(len(xs)/2 - 0.98*len(xs)**0.5))
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

def digits28(data, name='mnist'):
    "`(pictures, labels)` of training and test set, bytes, from the idx files in `data/name`; without `data` fastai's own MNIST"
    if data is not None: return [tuple(read_idx(data/name/f'{o}-{k}-ubyte.gz') for k in ('images-idx3','labels-idx1')) for o in ('train','t10k')]
    if name!='mnist': raise SystemExit(f"{name} is none of fastai's data sets: give the folder that holds {name}/ by --data")
    return [_of_folders(untar_data(URLs.MNIST)/o) for o in ('training','testing')]

def standardized(x, mean=0.1307, std=0.3081): return ((x[:,None].float()/255)-mean)/std

class TensorLoader:
    "Batches of tensors that fit in memory"
    def __init__(self, x, y, bs, shuffle=False): self.x,self.y,self.bs,self.shuffle,self.dataset,self.n = x,y,bs,shuffle,y,len(y)
    def __len__(self): return -(-self.n//self.bs)
    def new(self, bs=None): return TensorLoader(self.x, self.y, bs or self.bs, self.shuffle) # As fastai's loaders have it
    def __iter__(self):
        for idx in (torch.randperm(self.n) if self.shuffle else torch.arange(self.n)).split(self.bs): yield self.x[idx],self.y[idx]

# A script

def arguments(doc):
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--data', type=Path, help="folder with the data sets, each in one of its own")
    how = p.add_mutually_exclusive_group()
    how.add_argument('--quick', action='store_true', help="minutes on two cores; the page stays")
    how.add_argument('--full', action='store_true', help="all that is on the page and not in results/ yet")
    p.add_argument('--seeds', type=int, nargs='*', help="other ones than the script's own")
    return p

def write(name, text): (here/f'{name}.md').write_text(text)

def main(doc, names, run, page, draw=None, parser=None):
    "What a script does when it is called"
    args = (parser or arguments(doc)).parse_args()
    name = Path(sys.argv[0]).stem
    tables = [Table(o, args.quick) for o in names]
    if args.quick or args.full: run(args, *tables)
    text = page(*(o.df for o in tables))
    if args.quick: return print(text)
    write(name, text)
    if draw is not None: draw(*(o.df for o in tables)).savefig(here/f'{name}.png', dpi=100)
