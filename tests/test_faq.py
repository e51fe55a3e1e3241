"The FAQ explains every message of the package: errors, warnings and the sentences of a plan's advice"
import ast
import re
from functools import cache
from itertools import product
from pathlib import Path

import fastai_bs
import pytest
from helpers import cells_of, needs, root

faq = root/'nbs'/'39_messages.ipynb'
least = 8 # Words of a message's beginning that its row in the FAQ has at least

# What the package says

def texts(node):
    "All that an expression may say, with `...` for what is known only later"
    if isinstance(node, ast.Constant): return [node.value] if isinstance(node.value, str) else ['...']
    if isinstance(node, ast.FormattedValue): return texts(node.value)
    if isinstance(node, ast.JoinedStr): return [''.join(o) for o in product(*map(texts, node.values))]
    if isinstance(node, ast.IfExp): return texts(node.body)+texts(node.orelse)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add): return [a+b for a in texts(node.left) for b in texts(node.right)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(getattr(node.left, 'value', None), str):
        return ['',*texts(node.left)] # 's'*(n>1)
    if isinstance(node, ast.Call) and getattr(node.func, 'attr', None)=='join' and isinstance(node.args[0], ast.GeneratorExp): return texts(node.args[0].elt)
    return ['...']

def plain(s):
    "Without marks of code; one space between words, one `...` for several in a row, and none in front"
    s = re.sub(r'\.\.\.(\s*\.\.\.)+', '...', ' '.join(s.replace('`', '').split()))
    return re.sub(r'^[.\s]+', '', s)

def messages(source):
    "Of a module: `(line, texts)` of each message, which may have several forms"
    tree,found = ast.parse(source),[]
    def _add(node):
        forms = list(dict.fromkeys(plain(o) for o in texts(node)))
        if any(len(re.findall(r'[A-Za-z]{2,}', o))>1 for o in forms): found.append((node.lineno, forms))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args: _add(node.exc.args[0])
        if isinstance(node, ast.Call) and node.args and getattr(node.func, 'attr', getattr(node.func, 'id', None)) in ('warn','_say','error'):
            _add(node.args[0])
        if isinstance(node, ast.Call) and getattr(node.func, 'id', None)=='Advice': _add(node.args[1])
        if isinstance(node, ast.FunctionDef) and node.name in ('step_time_text','_who_failed'): # What stands below the advice; how a failed rank's error begins
            for o in ast.walk(node):
                if isinstance(o, ast.Return) and o.value is not None: _add(o.value)
    return found

said = [pytest.param(forms, id=f'{p.stem}-{line}') for p in sorted(Path(fastai_bs.__file__).parent.glob('*.py')) if p.name!='_modidx.py'
        for line,forms in messages(p.read_text())]

# What the FAQ has

@cache
def rows(path):
    "The messages in the tables of the FAQ: first cells that are code"
    md = '\n'.join(source for kind,source in cells_of(path) if kind=='markdown')
    return [m[2].strip() for m in re.finditer(r'^\| *(`+)(.+?)\1 *\|', md, flags=re.M)]

def cut(s): return re.sub(r'[\s.:,;]+$', '', s)

def explains(row, forms):
    "Does `row` have one of the forms, or a beginning of it that is long enough to know it by?"
    row = cut(plain(row))
    long = len(row.split())>=least
    return any(row==cut(o) or long and o.startswith(row) and not o[len(row)].isalnum() for o in forms)

in_the_faq = needs('nbs/39_messages.ipynb')

@in_the_faq
@pytest.mark.parametrize('forms', said)
def test_every_message_is_in_the_faq(forms):
    assert any(explains(o, forms) for o in rows(faq)), f"not in {faq.name}: {forms[0]}"

@in_the_faq
def test_the_faq_has_no_message_that_nobody_says():
    for row in rows(faq): assert any(explains(row, p.values[0]) for p in said), f"said nowhere, or with fewer than {least} words: {row}"

@in_the_faq
def test_no_message_is_explained_twice():
    found = rows(faq)
    assert len(found)==len(set(found))

# Do these tests see what they should?

def test_messages_are_found():
    "Of every kind, and as many as there are: an error, a warning, one said once, advice, a line below it, a rank's last words, the command line's"
    everything = [o for p in said for o in p.values[0]]
    assert len(said)>100
    for start in ("n_acc must be at least 1", "Out of memory with ... items", "ScaledLR does nothing during lr_find", "Accumulation is left out: ",
                  "Step times here are not", "The connection between the ranks was lost", "must be a folder"):
        assert any(o.startswith(start) for o in everything), start

def test_forms_of_a_message():
    code = '''
def f(n):
    if n<1: raise ValueError(f"The loader yields {n} batch{'es' if n==0 else ''} of " "items" + (f", {n} say" if n else ''))
    raise error
    raise CancelFitException
'''
    (_,forms), = messages(code)
    assert forms==['The loader yields ... batches of items, ... say', 'The loader yields ... batches of items',
                   'The loader yields ... batch of items, ... say', 'The loader yields ... batch of items']

def test_a_new_or_changed_message_is_missed():
    forms = ["The training loader yields ... micro-batch in an epoch, and at least 2 are needed: make them smaller"]
    assert explains("The training loader yields ... micro-batch in an epoch ...", forms)
    assert not explains("The training loader yields ...", forms) # Too little to know it by
    assert not explains("The training loader gives ... micro-batch in an epoch ...", forms)
    assert explains("Any batch will do.", ["Any batch will do."]) and not explains("Any batch will do.", ["Any batch will do, if not always."])
