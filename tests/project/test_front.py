"What a visitor sees first: lines run, and what stands in several files is the same in all of them"
import json
import re
import subprocess

import fastai_bs
import pytest
from helpers import cells_of, root

if not (root/'nbs').is_dir(): pytest.skip("in a checkout only: nbs", allow_module_level=True)
tomllib = pytest.importorskip('tomllib', reason="part of Python from 3.11 on")
project = tomllib.loads((root/'pyproject.toml').read_text())['project']
readme = (root/'README.md').read_text()
guides = [p for p in sorted((root/'nbs/guides').glob('*.ipynb')) if any(kind=='code' for kind,_ in cells_of(p))]

def test_the_picture_is_of_the_stored_results(monkeypatch):
    "What the picture holds as its text is what `benchmarks/front.py` would draw now"
    Image = pytest.importorskip('PIL.Image')
    monkeypatch.syspath_prepend(str(root/'benchmarks'))
    import front
    assert Image.open(front.path).info['Description']==front.caption(), "python benchmarks/front.py"

def test_the_first_page_shows_a_plan_as_it_is_printed():
    "That of the guide, to the figure; lines may break elsewhere"
    shown = re.search(r'```text\n(Use .*?)```', readme, flags=re.S)[1]
    guide = json.loads((root/'nbs/guides/choose.ipynb').read_text())
    printed = [''.join(o['data']['text/plain']) for c in guide['cells'] for o in c.get('outputs',[]) if 'data' in o]
    assert shown.split() in [o.split() for o in printed]

# Install

def test_nothing_in_the_readme_is_relative():
    "An index of packages shows it too, and has no other file of ours"
    assert re.findall(r'\]\((?!https://|#)[^)]*\)', readme)==[]

def test_one_line_installs():
    assert f"```sh\ngit clone {project['urls']['Repository']} && pip install ./fastai_bs\n```" in readme.split('\n## ')[0]

@pytest.mark.parametrize('path', guides, ids=lambda o: o.stem)
def test_a_guide_installs_in_colab_alone(path):
    "Its first cell: hidden, not run by `make test`, no part of a module, and nothing happens where there is no /content"
    kind,source = cells_of(path)[1]
    lines = source.splitlines()
    assert kind=='code'
    assert lines[:2]==['#| hide','#| eval: false']
    assert f"pip install -q git+{project['urls']['Repository']} #" in source
    assert all(o.startswith('! [ -e /content ] && ') for o in lines[2:])
    for o in lines[2:]: assert subprocess.run(['sh','-c',o[2:].replace('/content', '/not/there')], capture_output=True).stdout==b''
    uses = any('../benchmarks' in o for kind,o in cells_of(path) if kind=='code')
    assert uses==('/benchmarks' in source)

def test_citation():
    text = (root/'CITATION.cff').read_text()
    for o in (f'version: {fastai_bs.__version__}', f"abstract: {project['description']}", f"license: {project['license']}",
              f"repository-code: {project['urls']['Repository']}", f"name: {project['authors'][0]['name']}"): assert o in text

def test_the_release_looks_where_the_version_is():
    "The same look at the same file, so that a tag of another version stops it"
    step = (root/'.github/workflows/release.yml').read_text()
    command = re.search(r'version=\$\((.*)\)', step)[1]
    assert subprocess.run(['bash','-c',command], cwd=root, capture_output=True, text=True).stdout.strip()==fastai_bs.__version__
    assert f'\n## {fastai_bs.__version__}\n' in (root/'CHANGELOG.md').read_text()
    assert step.count('id-token: write')==1
    assert step.index('id-token')>step.index('publish:')

# The lines of the page "Which of these do I need?"

def test_which():
    "Each row has a line of ours, or says that none is needed, and a guide that there is"
    import fastai_bs.all as everything
    from fastai.learner import Learner
    of_fastai = 'set_seed','SaveModelCallback'
    rows = [o.strip('|').split(' | ') for o in (root/'docs/which.md').read_text().splitlines() if o.startswith('| ')][1:]
    assert len(rows)>20
    for what,line,guide in rows:
        nb, = re.findall(r'\]\(\.\./nbs/([\w/]+\.ipynb)(?:#[\w-]+)?\)', guide)
        assert (root/'nbs'/nb).exists(), what
        for code in re.findall(r'`([^`]+)`', line):
            for nm in re.findall(r'(?<![.\w])([A-Za-z_]\w+)\(', code): assert hasattr(everything, nm) or nm in of_fastai, (what,nm)
            for nm in re.findall(r'learn\.(\w+)', code): assert hasattr(Learner, nm) or nm=='distrib_ctx', (what,nm)
            for nm in re.findall(r'plan\.(\w+)', code): assert hasattr(everything.BatchPlan, nm) or nm in everything.BatchPlan.__dataclass_fields__, (what,nm)

