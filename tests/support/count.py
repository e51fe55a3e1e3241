"""Count what a checkout holds: `python tests/support/count.py [PATH]`

The counts are symptoms to know, not limits. `tests/project/test_house.py` checks which folder imports from which.
"""
import argparse
import ast
import io
import json
import re
import tokenize
from pathlib import Path

import numpy as np

here = Path(__file__).resolve().parents[2]

def python_files(folder): return sorted(p for p in folder.rglob('*.py') if p.name!='_modidx.py' and '__pycache__' not in p.parts)
def lines_of(paths): return [line for p in paths for line in p.read_text().splitlines()]

# Style

def in_f_strings(trees):
    "Count the conditional expressions within f-strings"
    fields = (o for tree in trees for o in ast.walk(tree) if isinstance(o, ast.FormattedValue))
    return sum(isinstance(o, ast.IfExp) for field in fields for o in ast.walk(field.value))

def docs_with_of(trees):
    "Count the docstrings that begin with 'Of'"
    kinds = ast.Module,ast.ClassDef,ast.FunctionDef,ast.AsyncFunctionDef
    return sum(bool(re.match(r'Of\b', ast.get_docstring(o) or '')) for tree in trees for o in ast.walk(tree) if isinstance(o, kinds))

def comments_with_of(paths):
    "Count the comments that begin with 'Of'"
    tokens = (o for p in paths for o in tokenize.generate_tokens(io.StringIO(p.read_text()).readline) if o.type==tokenize.COMMENT)
    return sum(bool(re.match(r'#\s*Of\b', o.string)) for o in tokens)

# Prose

def cells(path): return [(c['cell_type'], ''.join(c['source'])) for c in json.loads(path.read_text())['cells']]

def notebooks(root):
    folder = root/'nbs'
    return sorted(p for p in folder.rglob('*.ipynb') if not any(o.startswith(('.','_')) for o in p.relative_to(folder).parts))

def n_words(text): return len(text.split())

def counts(root):
    "Return what is counted, as `{what: how much}`"
    own,nbs = python_files(root/'fastai_bs'),notebooks(root)
    trees,lengths = [ast.parse(p.read_text()) for p in own],np.array([len(o) for o in lines_of(own)])
    code,prose = ([s for p in nbs for kind,s in cells(p) if kind==wanted] for wanted in ('code','markdown'))
    pages = [p for pattern in ('docs/*.md','benchmarks/**/*.md','*.md') for p in root.glob(pattern)]
    return {
        'Python files of the package': len(own),
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
        'conditional expressions in f-strings': in_f_strings(trees),
        'docstrings that begin with Of': docs_with_of(trees),
        'comments that begin with Of': comments_with_of(own)}

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('path', nargs='?', default=here, type=Path, help="a checkout; by default this one")
    for what,n in counts(parser.parse_args().path.resolve()).items(): print(f'{what:40} {n}')

if __name__=='__main__': main()
