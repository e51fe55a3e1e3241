"Every public name is documented, and its example runs"
import importlib
import importlib.util
import inspect
import re
from functools import cache

import pytest
from helpers import cells_of, root

if not (root/'nbs').is_dir(): pytest.skip("in a checkout only: nbs", allow_module_level=True)
pytest.importorskip('nbdev', reason='pages are made by nbdev, which is for newer versions of fastcore')
spec = importlib.util.spec_from_file_location('pages', root/'docs/pages.py')
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)

notebooks = sorted((root/'nbs').glob('*.ipynb'))
mods = pages.modules(notebooks)
public = [(mod,nm) for mod in mods.values() for nm in pages.documented(mod)]

for_users = {'Learner.bs_find','Learner.check_accum','Learner.max_bs_find','Learner.memory_report','Recorder.plot_noise_scale'}

def thing(mod, nm):
    for part in nm.split('.'): mod = getattr(mod, part)
    return mod

def test_what_is_public():
    "All that `fastai_bs.all` exports, and what it adds to fastai's classes"
    names = {nm for _,nm in public}
    assert set(importlib.import_module('fastai_bs.all').__all__) <= names
    assert for_users <= names
    assert len(names)>60

@pytest.mark.parametrize('mod,nm', public, ids=lambda o: getattr(o, '__name__', o))
def test_entry(mod, nm):
    "A docstring, and a table of parameters and what is returned without an empty cell"
    o = thing(mod, nm)
    assert inspect.getdoc(o), f'{nm} has no docstring'
    rows = pages.table(o)
    assert all(str(cell).strip() for row in rows for cell in row), [row for row in rows if not all(str(c).strip() for c in row)]
    pars = {} if inspect.isclass(o) and '__init__' not in vars(o) else inspect.signature(o).parameters
    assert {row[0].strip('`') for row in rows} >= {nm for nm,p in pars.items() if nm not in ('self','cls') and p.kind not in (p.VAR_POSITIONAL,p.VAR_KEYWORD)}

@cache
def code_of(path):
    return "\n".join(source for kind,source in cells_of(path) if kind=='code' and "#| export" not in source and "eval: false" not in source)

@pytest.mark.parametrize('nm', [*importlib.import_module('fastai_bs.all').__all__, *sorted(for_users)])
def test_example(nm):
    "A cell of a notebook, which `make test` runs, uses it"
    assert re.search(rf"\b{nm.rpartition('.')[2]}\b", '\n'.join(map(code_of, notebooks)))

def test_guides(): assert set(pages.guides) <= {pages.page_name(p) for p in notebooks}

def test_links():
    "Between notebooks, each leads to one that there is"
    names = {p.name for p in notebooks}
    for p in notebooks:
        for kind,source in cells_of(p):
            if kind=='markdown': assert {m for m in re.findall(r'\]\((\w+\.ipynb)', source)} <= names, p.name

@pytest.mark.parametrize('source,text', [
    ('[`GradAccum`](https://fastai-bs.github.io/fastai_bs/accumulate.html#gradaccum)', '{py:obj}`GradAccum <fastai_bs.accumulate.GradAccum>`'),
    ('[`pooled`](https://fastai-bs.github.io/fastai_bs/estimator.html#pooled)', '{py:obj}`pooled <fastai_bs.estimator.pooled>`'),
    ('[`Pool`](https://fastai-bs.github.io/fastai_bs/estimator.html#pool)', '{py:obj}`Pool <fastai_bs.estimator.Pool>`'),
    ('[text](../docs/matrix.md#a)', '[text](matrix.md#a)'), ('[text](11_accumulate.ipynb#a)', '[text](accumulate.ipynb#a)'), ('[o](https://a.b/03_c.ipynb)', '[o](https://a.b/03_c.ipynb)'),
    ('::: {.callout-note}\nx\n:::', ':::{note}\nx\n:::')])
def test_markdown(source, text): assert pages.markdown(source, mods)==text
