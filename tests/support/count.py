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

def comments_beside_code(paths):
    "Count the comments that stand behind code"
    def _lines(p): return p.read_text().splitlines()
    def _tokens(p): return (o for o in tokenize.generate_tokens(io.StringIO(p.read_text()).readline) if o.type==tokenize.COMMENT)
    return sum(bool(lines[o.start[0]-1][:o.start[1]].strip()) for p in paths for lines in [_lines(p)] for o in _tokens(p))

def code_only(lines): return [o for o in lines if o.strip() and not o.strip().startswith('#')]

def class_sizes(trees):
    "Return `(lines, members, name)` of each class, the longest first; methods that are patched in elsewhere are not among them"
    classes = [o for tree in trees for o in ast.walk(tree) if isinstance(o, ast.ClassDef)]
    return sorted(((o.end_lineno-o.lineno+1,sum(isinstance(m, (ast.FunctionDef,ast.AnnAssign)) for m in o.body),o.name) for o in classes), reverse=True)

def members(trees, name):
    "Count the fields, properties and methods of a class, those that are patched in among them"
    def _of(o): return isinstance(o, ast.FunctionDef) and bool(o.args.args) and getattr(o.args.args[0].annotation, 'id', None)==name
    patched = sum(_of(o) and any('patch' in ast.unparse(d) for d in o.decorator_list) for tree in trees for o in ast.walk(tree))
    return patched+sum(n for _,n,nm in class_sizes(trees) if nm==name)

# Tests

def joined(trees):
    "Count the asserts that join several facts by `and`"
    return sum(isinstance(o, ast.Assert) and isinstance(o.test, ast.BoolOp) and isinstance(o.test.op, ast.And) for tree in trees for o in ast.walk(tree))

def with_tests(root, own):
    "Return the modules in folders, and those of them that have a test file of their name"
    tests = {(p.parent.name,p.stem) for p in (root/'tests').rglob('test_*.py')}
    modules = [p for p in own if p.parent!=root/'fastai_bs' and p.stem!='__init__']
    return modules,[p for p in modules if (p.parent.name,f'test_{p.stem}') in tests]

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
    exported = [len(code_only(o.splitlines())) for o in code if '#| export' in o]
    in_long = sum(n for n in exported if n>100)
    code_lines,tests = code_only(lines_of(own)),[ast.parse(p.read_text()) for p in python_files(root/'tests')]
    (modules,tested),longest = with_tests(root, own),class_sizes(trees)[0]
    def _percent(n, all_of): return round(100*n/len(all_of), 1)
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
        'comments that begin with Of': comments_with_of(own),
        'comments beside code, percent of its lines': _percent(comments_beside_code(own), code_lines),
        'lines of code over 100, percent': _percent(sum(len(o)>100 for o in code_lines), code_lines),
        'longest class, in lines': f'{longest[0]} ({longest[2]})',
        'members of BatchPlan': members(trees, 'BatchPlan'),
        'longest cell, in lines of code': max(exported),
        'code in cells of over 100 lines, percent': round(100*in_long/sum(exported), 1),
        'modules with a test file of their name': f'{len(tested)} of {len(modules)}',
        'asserts that join facts by and': joined(tests)}

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('path', nargs='?', default=here, type=Path, help="a checkout; by default this one")
    for what,n in counts(parser.parse_args().path.resolve()).items(): print(f'{what:40} {n}')

if __name__=='__main__': main()
