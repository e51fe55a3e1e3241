"The facts of the project stand in several files: they must agree"
import configparser
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import fastai_bs

tomllib = pytest.importorskip('tomllib', reason="part of Python from 3.11 on")
root = Path(__file__).resolve().parent.parent
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
    assert f'## {fastai_bs.__version__}' in (root/'CHANGELOG.md').read_text()

def test_readme_is_up_to_date():
    sys.path.insert(0, str(root/'docs'))
    try: from readme import readme
    finally: sys.path.pop(0)
    assert (root/'README.md').read_text()==readme(), "run `make sync`"

def test_all_has_every_public_name():
    import fastai_bs.all as everything
    from fastai.learner import Learner
    for nm in ('GradAccum','NoiseScale','BatchPlan','unchanged','ScaledLR','linear_scaling','sqrt_scaling','adascale_gain',
               'surge_scaling','adam_scaling','warmup_factor'):
        assert hasattr(everything, nm), nm
    assert hasattr(Learner, 'bs_find')

@pytest.mark.slow
def test_import_changes_no_learner():
    "Importing adds three methods to `Learner`, beside fastai's own for several devices, and no callback to those that users make"
    code = ("from fastai.callback.all import *; import fastai.distributed; "
            "from fastai.basics import defaults, Learner; before = list(defaults.callbacks), set(vars(Learner)); "
            "import fastai_bs.all; assert list(defaults.callbacks)==before[0]; print(sorted(set(vars(Learner))-before[1]))")
    out = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=True).stdout
    assert out.strip()=="['bs_find', 'max_bs_find', 'memory_report']"

def test_no_output_holds_a_path_of_somebodys_machine():
    for p in (root/'nbs').glob('*.ipynb'):
        for place in ('/opt/', '/tmp/', '/home/', '/root/', '/usr/'): assert place not in p.read_text(), (p.name, place)

@pytest.mark.slow
def test_the_code_of_the_readme_runs(monkeypatch):
    "The examples from the digits on, as they stand there"
    for nm in ('deterministic','benchmark'): monkeypatch.setattr(torch.backends.cudnn, nm, getattr(torch.backends.cudnn, nm)) # Put back: the digits set them
    code = re.findall(r'```python\n(.*?)```', (root/'README.md').read_text(), flags=re.S)
    start = next(i for i,c in enumerate(code) if 'digits_learner' in c)
    assert len(code)-start>=4
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        exec('\n'.join(code[start:]), scope)
    assert scope['plan'].noise_scale>0 and 1<scope['largest']<=1024 and len(scope['noise'].df)
