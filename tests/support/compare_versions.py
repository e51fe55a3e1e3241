"""Run the same trainings and measurements in an older version and in this one, and list every number that differs

`python tests/support/compare_versions.py [--base COMMIT] [--only TEXT]` runs the cases of `version_cases.py` side by side, on this machine, with one
thread each: weights and numbers must be the same to the last bit. The older version is checked out in a temporary folder. The exit code is 1 where
anything differs.
"""
import argparse
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np

root = Path(__file__).resolve().parents[2]

def _git(*args): subprocess.run(['git', '-C', str(root), *args], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

@contextmanager
def checked_out(commit, folder):
    "The tree of `commit`, in a work tree that is gone afterwards"
    path = Path(folder)/'base'
    _git('worktree', 'add', '--detach', str(path), commit)
    try: yield path
    finally: _git('worktree', 'remove', '--force', str(path))

# In each of the two processes

def run_cases(path, only):
    "Run all cases with the package that Python finds, and save their numbers"
    import torch
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter('ignore')
    import version_cases
    import fastai_bs
    package = Path(fastai_bs.__file__).resolve().parents[1]
    if str(package)!=os.environ['NET_ROOT']: raise ImportError(f"fastai_bs comes from {package}, not from {os.environ['NET_ROOT']}")
    res = {}
    for nm,case in version_cases.cases.items():
        if only not in nm: continue
        version_cases.clock.now = 0.
        try: numbers = case()
        except Exception as e: numbers = {f'{type(e).__name__}': np.array(1), 'message': np.array(str(e)[:300])}
        res.update({f'{nm}|{k}': v for k,v in numbers.items()})
        print('.', end='', file=sys.stderr, flush=True)
    np.savez(path, **res)

def start(checkout, path, only):
    env = {**os.environ, 'PYTHONPATH': str(checkout), 'NET_ROOT': str(Path(checkout).resolve()), 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}
    args = [sys.executable, __file__, '--child', str(path), '--only', only]
    return subprocess.Popen(args, env=env, cwd=Path(path).parent, stdout=subprocess.DEVNULL)

# What is told of them

def by_case(path):
    res = {}
    with np.load(path) as saved:
        for k in saved.files:
            case,nm = k.split('|', 1)
            res.setdefault(case, {})[nm] = saved[k]
    return res

def difference(a, b):
    "How far two arrays are apart: `None` where they are the same bit by bit, else in words"
    if a.shape!=b.shape: return f'shape {a.shape} became {b.shape}'
    if a.dtype!=b.dtype: return f'{a.dtype} became {b.dtype}'
    if a.tobytes()==b.tobytes(): return None
    if a.size==1: return f'{a} became {b}'
    gap,size = np.abs(a.astype(float)-b.astype(float)),np.abs(a.astype(float))
    return f'largest difference {np.nanmax(gap):.3g}, of values up to {np.nanmax(size):.3g}'

def compare(before, after):
    "For a case: how many numbers are the same, and differences in words; how an error is worded is free"
    same,differences = 0,[]
    for k in [k for k in {**before, **after} if k!='message']:
        if k not in after: differences.append(f'{k}: gone')
        elif k not in before: differences.append(f'{k}: new, {str(after[k])[:300]}')
        elif (text := difference(before[k], after[k])): differences.append(f'{k}: {text}')
        else: same += 1
    return same,differences

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--base', default='HEAD', help="commit to compare with")
    parser.add_argument('--only', default='', help="run only the cases that have this in their name")
    parser.add_argument('--child', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child: return run_cases(args.child, args.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) # So that the work tree goes when this is ended from outside
    with tempfile.TemporaryDirectory() as folder, checked_out(args.base, folder) as base:
        paths = [Path(folder)/'before'/'numbers.npz', Path(folder)/'after'/'numbers.npz']
        for path in paths: path.parent.mkdir()
        processes = [start(checkout, path, args.only) for checkout,path in zip((base,root), paths)]
        try: codes = [p.wait() for p in processes]
        finally:
            for p in processes: p.kill()
        print(file=sys.stderr)
        if any(codes): sys.exit(f"A version did not come to its end: exit codes {codes[0]} before, {codes[1]} now")
        before,after = map(by_case, paths)
    n_bad = 0
    for case in {**before, **after}:
        same,differences = compare(before.get(case, {}), after.get(case, {}))
        verdict = 'DIFFERS' if differences else 'same'
        print(f'{verdict:8} {case:60} {same:4} numbers and arrays')
        for when,numbers in (('before', before), ('now', after)):
            if 'message' in numbers.get(case, {}): print(f"           failed {when}: {numbers[case]['message']}")
        for o in differences[:8]: print(f'           {o}')
        if len(differences)>8: print(f'           and {len(differences)-8} more')
        n_bad += bool(differences)
    print(f'{len({**before, **after})} cases, {n_bad} with differences')
    sys.exit(int(n_bad>0))

if __name__=='__main__': main()
