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
from address import texts # noqa: E402 Beside pages.py, which has put its folder on the path

notebooks = pages.notebooks()
mods = pages.modules(notebooks)
public = {mod: pages.documented(mod) for mod in mods.values()}

for_users = {'Learner.accum_to','Learner.bs_find','Learner.check_accum','Learner.max_bs_find','Learner.memory_report','Recorder.plot_noise_scale'}

def thing(mod, nm):
    for part in nm.split('.'): mod = getattr(mod, part)
    return mod

def test_what_is_public():
    "All that `fastai_bs.all` exports, and what it adds to fastai's classes"
    names = {nm for nms in public.values() for nm in nms}
    assert set(importlib.import_module('fastai_bs.all').__all__) <= names
    assert for_users <= names

@pytest.mark.parametrize('mod', public, ids=lambda o: o.__name__)
def test_entries(mod):
    "Each has a docstring, and a table of parameters and what is returned without an empty cell"
    for nm in public[mod]:
        o = thing(mod, nm)
        assert inspect.getdoc(o), f'{nm} has no docstring'
        rows = pages.table(o)
        assert all(str(cell).strip() for row in rows for cell in row), (nm,[row for row in rows if not all(str(c).strip() for c in row)])
        pars = {} if inspect.isclass(o) and '__init__' not in vars(o) else inspect.signature(o).parameters
        named = {k for k,p in pars.items() if k not in ('self','cls') and p.kind not in (p.VAR_POSITIONAL,p.VAR_KEYWORD)}
        assert {row[0].strip('`') for row in rows}>=named, nm

def test_the_first_cell_of_a_page_is_its_title():
    "And a line about it: nbdev makes the head of a page of that cell, and drops what else is in it"
    for path in notebooks:
        (kind,source),*_ = cells_of(path)
        assert [o for o in source.splitlines() if o and not o.startswith(('# ','> '))]==[], path

@cache
def code_of(path):
    return "\n".join(source for kind,source in cells_of(path) if kind=='code' and "#| export" not in source and "eval: false" not in source)

def test_examples():
    "A cell of a notebook, which `make test` runs, uses each"
    code = '\n'.join(map(code_of, notebooks))
    names = {nm.rpartition('.')[2] for nm in (*importlib.import_module('fastai_bs.all').__all__, *for_users)}
    assert {nm for nm in names if not re.search(rf"\b{nm}\b", code)}==set()

reference = pages.sections(pages.read_nb(root/'nbs/reference.ipynb').cells)
own = {pages.own_page(o) for o in reference}

@pytest.mark.parametrize('head', reference)
def test_a_section_of_the_reference(head):
    "Its name has an entry; a call and an example that runs follow"
    call,*example = reference[head]
    assert any(head.replace('learn.', 'Learner.') in nms for nms in public.values())
    assert f'{head}(' in re.search('```python\n(.*?)```', call.source, flags=re.S)[1]
    assert f"{head.rpartition('.')[2]}(" in '\n'.join(c.source for c in example if c.cell_type=='code')

def test_a_page_has_all_names():
    text = pages.all_names(mods, own)
    names = {*importlib.import_module('fastai_bs.all').__all__,*(o.replace('Learner', 'learn').replace('Recorder', 'learn.recorder') for o in for_users)}
    assert {nm for nm in names if not re.search(rf'^\| [^|]*`{re.escape(nm)}[` ].*\| \S.*\|$', text, flags=re.M)}==set()

def test_addresses_of_the_site():
    "Wherever one is named, in templates of issues too, there is such a page"
    made = {pages.page_name(p.relative_to(root/'nbs')) for p in notebooks}-{'reference'}
    made |= {*pages.written,*own,'names','how','gallery','search'}
    named = {(p.relative_to(root).as_posix(),o) for p,text in texts() for o in re.findall(rf'{re.escape(pages.site)}/([\w/.-]+)\.html', text)}
    assert [(p,o) for p,o in sorted(named) if o not in made]==[]
    assert {'.github/ISSUE_TEMPLATE/bug.yml','.github/ISSUE_TEMPLATE/question.yml','README.md'}<={p for p,_ in named}

def test_the_notebook_opens_in_colab_and_its_source_on_github():
    "A guide installs the package itself; a page without a notebook opens nowhere"
    repo,nb,line = 'fastai-bs/fastai_bs','nbs/guides/choose.ipynb','pip install git+'
    guide = pages.page_links(nb, 'guides/choose')
    assert re.findall('href="([^"]+)"', guide)==[f'https://colab.research.google.com/github/{repo}/blob/main/{nb}',f'https://github.com/{repo}/edit/main/{nb}',
                                                 'choose.html.md']
    assert line not in guide
    assert line in pages.page_links('nbs/schedule/02_scaled_lr.ipynb', 'lr')
    assert 'colab' not in pages.page_links('docs/which.md', 'which')

