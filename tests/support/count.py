"""Count what a checkout holds: `python tests/support/count.py [PATH] [--pytest]`

The counts are symptoms to know, not limits. They work for a flat package and for one in folders, and for another version's checkout.
"""
import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import numpy as np

here = Path(__file__).resolve().parents[2]

def python_files(folder): return sorted(p for p in folder.rglob('*.py') if p.name!='_modidx.py' and '__pycache__' not in p.parts)
def lines_of(paths): return [line for p in paths for line in p.read_text().splitlines()]

def package_of(root):
    "The folder of the package, by what holds an `_modidx.py`, or the only one with an `__init__.py`"
    found = sorted(root.glob('*/_modidx.py')) or sorted(root.glob('*/__init__.py'))
    if not found: raise FileNotFoundError(f"{root} holds no package")
    return found[0].parent

# Floors of imports

def module_name(package, path):
    "As 'fastai_bs.noise.noise_scale.estimator'; a folder for its `__init__.py`"
    parts = path.relative_to(package.parent).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1]=='__init__' else parts)

def imported(tree, name, is_package, names):
    "Our modules that a module imports, at its top or in a function"
    res = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): res |= {a.name for a in node.names} & names
        if not isinstance(node, ast.ImportFrom): continue
        base = name.split('.')
        if node.level: base = base[:len(base)-node.level+is_package]
        source = '.'.join([*(base if node.level else []), *([node.module] if node.module else [])])
        if source in names: res.add(source)
        res |= {f'{source}.{a.name}' for a in node.names} & names # `from . import module`
    return res-{name}

def import_graph(package):
    "For each module, those of ours that it imports; without what holds no code of its own"
    paths = {module_name(package, p): p for p in python_files(package)}
    skipped = {nm for nm,p in paths.items() if p.name=='__init__.py'}
    trees = {nm: ast.parse(p.read_text()) for nm,p in paths.items()}
    return {nm: imported(tree, nm, paths[nm].name=='__init__.py', set(paths)-skipped) for nm,tree in trees.items() if nm not in skipped}

def circles(graph):
    "Modules that import themselves by way of others, in groups"
    @cache
    def reach(nm):
        seen,todo = set(),list(graph[nm])
        while todo:
            o = todo.pop()
            if o not in seen:
                seen.add(o)
                todo += graph[o]
        return frozenset(seen)
    groups = {frozenset(o for o in graph if o in reach(nm) and nm in reach(o)) for nm in graph if nm in reach(nm)}
    return sorted(map(sorted, groups))

def longest_chain(graph):
    "Module names from the top to the bottom of the longest chain of imports; empty where there are circles"
    if circles(graph): return []
    @cache
    def below(nm): return [nm, *max(map(below, sorted(graph[nm])), key=len, default=[])]
    return max(map(below, graph), key=len, default=[])

# Style

def in_f_strings(paths):
    "Conditional expressions within f-strings"
    fields = (o for p in paths for o in ast.walk(ast.parse(p.read_text())) if isinstance(o, ast.FormattedValue))
    return sum(isinstance(o, ast.IfExp) for field in fields for o in ast.walk(field.value))

def begin_with_of(paths):
    "Docstrings, and comments, that begin with 'Of'"
    docs = comments = 0
    for p in paths:
        for node in ast.walk(ast.parse(p.read_text())):
            if not isinstance(node, (ast.Module,ast.ClassDef,ast.FunctionDef,ast.AsyncFunctionDef)): continue
            docs += bool(re.match(r'Of\b', ast.get_docstring(node) or ''))
        tokens = tokenize.generate_tokens(io.StringIO(p.read_text()).readline)
        comments += sum(bool(re.match(r'#\s*Of\b', o.string)) for o in tokens if o.type==tokenize.COMMENT)
    return docs,comments

# Prose

def cells(path): return [(c['cell_type'], ''.join(c['source'])) for c in json.loads(path.read_text())['cells']]

def notebooks(root):
    folder = root/'nbs'
    return sorted(p for p in folder.rglob('*.ipynb') if not any(o.startswith(('.','_')) for o in p.relative_to(folder).parts))

def n_words(text): return len(text.split())

def exported(package):
    "Names that `from fastai_bs.all import *` brings, as the file says"
    path = package/'all.py'
    if not path.exists(): return []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', None)=='__all__': return list(ast.literal_eval(node.value))
    return []

def n_tests(root):
    "Cases that pytest collects"
    cmd = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-p', 'no:cacheprovider', 'tests']
    done = subprocess.run(cmd, cwd=root, env={**os.environ, 'PYTHONPATH': str(root)}, capture_output=True, text=True)
    found = re.search(r'(\d+)(?:/\d+)? tests? collected', done.stdout)
    return int(found[1]) if found else f'not known: {done.stdout[-300:]}'

def counts(root, with_pytest=False):
    "What is counted, as `{what: how much}`"
    package = package_of(root)
    own = python_files(package)
    graph = import_graph(package)
    chain,loops = longest_chain(graph),circles(graph)
    nbs = notebooks(root)
    lengths = np.array([len(o) for o in lines_of(own)])
    docs,comments = begin_with_of(own)
    code = [s for p in nbs for kind,s in cells(p) if kind=='code']
    prose = [s for p in nbs for kind,s in cells(p) if kind=='markdown']
    pages = [p for pattern in ('docs/*.md','benchmarks/**/*.md','*.md') for p in root.glob(pattern)]
    res = {
        'Python files of the package': len(own),
        'folders within the package': len({p.parent for p in own if p.parent!=package}),
        'floors of imports': len(chain),
        'longest chain': ' > '.join(o.split('.', 1)[1] for o in chain),
        'circles of imports': '; '.join(', '.join(o) for o in loops) or 0,
        'lines of the package': len(lengths),
        'lines of tests': len(lines_of(python_files(root/'tests'))),
        'lines of benchmarks': len(lines_of(python_files(root/'benchmarks'))),
        'lines of code in notebooks': sum(len(o.splitlines()) for o in code),
        'words of prose in notebooks': sum(map(n_words, prose)),
        'notebooks (pages of the site)': len(nbs),
        'pages in Markdown': len(pages),
        'words of pages in Markdown': sum(n_words(p.read_text()) for p in pages),
        'line length, 90th percentile': int(np.percentile(lengths, 90)),
        'lines over 120, percent': round(100*float((lengths>120).mean()), 1),
        'conditional expressions in f-strings': in_f_strings(own),
        'docstrings that begin with Of': docs,
        'comments that begin with Of': comments,
        'names in fastai_bs.all': len(exported(package))}
    if with_pytest: res['cases that pytest collects'] = n_tests(root)
    return res

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('path', nargs='?', default=here, type=Path, help="a checkout; by default this one")
    parser.add_argument('--pytest', action='store_true', help="count the cases of the test suite too, which takes a minute")
    args = parser.parse_args()
    for what,n in counts(args.path.resolve(), args.pytest).items(): print(f'{what:40} {n}')

if __name__=='__main__': main()
