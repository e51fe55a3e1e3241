"The facts of the project stand in several files: they must agree"
import configparser
import re
import subprocess
import sys
import warnings

import pytest
import torch
import fastai_bs
from fastai_bs.__main__ import digits_learner
from helpers import needs, root

tomllib = pytest.importorskip('tomllib', reason="part of Python from 3.11 on")
classic = configparser.ConfigParser()
classic.read(root/'settings.ini')
classic = classic['DEFAULT']
project = tomllib.loads((root/'pyproject.toml').read_text())['project']

def test_settings_agree_with_pyproject():
    assert classic['lib_name']==project['name']=='fastai_bs'
    assert classic['description']==project['description']
    assert classic['requirements'].split()==project['dependencies']
    assert classic['min_python']==project['requires-python'].removeprefix('>=')
    assert classic['git_url']==project['urls']['Repository']
    assert classic['doc_host']+classic['doc_baseurl']==project['urls']['Documentation']

def test_one_version():
    assert classic['version']==fastai_bs.__version__

@needs('docs', 'nbs')
def test_what_is_written_from_notebooks_is_up_to_date():
    "README, and the rooms of the house"
    pytest.importorskip('nbdev', reason='notebooks are read by nbdev, which is for newer versions of fastcore')
    sys.path.insert(0, str(root/'docs'))
    try: from readme import readme, rooms
    finally: sys.path.pop(0)
    assert (root/'README.md').read_text()==readme(), "run `make sync`"
    assert (root/'CONTRIBUTING.md').read_text()==rooms(), "run `make sync`"

def test_the_first_page_is_short():
    "Words of prose: not code, headings, tables, pictures, comments and addresses"
    text = re.sub(r'(?s)```.*?```|<!--.*?-->', '', (root/'README.md').read_text())
    text = re.sub(r'(?m)^[#|].*$|\[!\[.*?\]\(.*?\)\]\(.*?\)|!\[.*?\]\(.*?\)', '', text)
    assert len(re.sub(r'\]\(.*?\)', ']', text).split())<=800

@pytest.mark.slow
def test_import_changes_nothing_of_fastai():
    "Importing adds these methods, and replaces no function, class or attribute in any of fastai's modules and classes, and no callback that users get"
    code = """
import importlib, inspect, pkgutil
import fastai
for m in pkgutil.walk_packages(fastai.__path__, 'fastai.'):
    try: importlib.import_module(m.name)
    except Exception: pass # Some need what is not installed
from fastai.basics import defaults

def everything():
    mods = {nm: m for nm,m in sys.modules.items() if nm.partition('.')[0]=='fastai' and m is not None}
    classes = {f'{o.__module__}.{o.__qualname__}': o for m in mods.values() for o in vars(m).values() if inspect.isclass(o) and o.__module__ in mods}
    return {f'{nm}.{k}': v for nm,o in {**mods, **classes}.items() for k,v in vars(o).items()}

import sys
before,callbacks = everything(),list(defaults.callbacks)
import fastai_bs.all
after = everything()
assert len(before)>5000, len(before)
assert list(defaults.callbacks)==callbacks
print('new', sorted(set(after)-set(before)))
print('replaced', sorted(k for k in before if after.get(k) is not before[k] and not k.endswith('.__warningregistry__')))
"""
    out = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert out.returncode==0, out.stderr
    new,replaced = out.stdout.splitlines()[-2:]
    names = ['Learner.accum_to','Learner.batch_size','Learner.bs_find','Learner.bs_verify','Learner.check_accum','Learner.max_bs_find',
             'Learner.memory_report','Recorder.plot_batch_size','Recorder.plot_noise_scale']
    assert new==f"new {[f'fastai.learner.{o}' for o in names]}"
    assert replaced=='replaced []'

@needs('nbs')
def test_no_output_holds_a_path_of_somebodys_machine():
    for p in (root/'nbs').rglob('*.ipynb'):
        for place in ('/opt/', '/tmp/', '/home/', '/root/', '/usr/', 'site-packages'): assert place not in p.read_text(), (p.name, place)

@pytest.mark.slow
def test_the_code_of_the_readme_runs(short, monkeypatch):
    "Each block as it stands, on a new learner; but for `bs_verify`, which takes longest and whose notebook runs it"
    for nm in ('deterministic','benchmark'): monkeypatch.setattr(torch.backends.cudnn, nm, getattr(torch.backends.cudnn, nm)) # Put back: the digits set them
    plans,fits,calls = re.findall(r'```python\n(.*?)```', (root/'README.md').read_text(), flags=re.S)
    scope = dict(learn=digits_learner(64))
    with warnings.catch_warnings(), scope['learn'].no_bar(), scope['learn'].no_logging():
        warnings.simplefilter('ignore')
        exec(plans, scope)
        assert len(scope['learn'].recorder.values)==scope['plan'].n_epoch
        exec(fits, scope)
        scope['learn'] = digits_learner(64) # The plan has set the first one up
        with scope['learn'].no_bar(), scope['learn'].no_logging(): exec(re.sub('(?m)^learn.bs_verify.*$', '', calls), scope)
