"""Count what a checkout holds: `python tests/support/count.py [PATH] [--pytest]`

The counts are symptoms to know, not limits."""
import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

def python_files(folder): return sorted(p for p in folder.rglob('*.py') if p.name!='_modidx.py')

def n_lines(paths): return sum(len(p.read_text().splitlines()) for p in paths)

def words_of(nb):
    "Words of prose in a notebook"
    return sum(len(''.join(c['source']).split()) for c in json.loads(nb.read_text())['cells'] if c['cell_type']=='markdown')

def n_tests(root):
    "Cases that pytest collects"
    cmd = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-p', 'no:cacheprovider', 'tests']
    done = subprocess.run(cmd, cwd=root, env={**os.environ, 'PYTHONPATH': str(root)}, capture_output=True, text=True)
    found = re.search(r'(\d+)(?:/\d+)? tests? collected', done.stdout)
    return int(found[1]) if found else f'not known: {done.stdout[-300:]}'

def counts(root):
    "`{what: how much}`"
    package,nbs = python_files(root/'fastai_bs'),[p for p in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts]
    lengths = sorted(len(line) for p in package for line in p.read_text().splitlines())
    return {'files of the package': len(package), 'lines of the package': len(lengths), 'lines of tests': n_lines(python_files(root/'tests')),
        'lines of benchmarks': n_lines(python_files(root/'benchmarks')), 'notebooks': len(nbs), 'words of prose in notebooks': sum(map(words_of, nbs)),
        'line length, 90th percentile': lengths[len(lengths)*9//10], 'lines over 120, percent': round(100*sum(o>120 for o in lengths)/len(lengths), 1)}

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('path', nargs='?', default=Path(__file__).resolve().parents[2], type=Path, help="a checkout; by default this one")
    parser.add_argument('--pytest', action='store_true', help="count the cases of the test suite too, which takes a minute")
    args = parser.parse_args()
    res = counts(args.path.resolve())
    if args.pytest: res['cases that pytest collects'] = n_tests(args.path.resolve())
    for what,n in res.items(): print(f'{what:40} {n}')
