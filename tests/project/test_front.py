"What a visitor sees first: figures are those of the benchmarks, lines run, and what stands in several files is the same in all of them"
import re
import subprocess

import fastai_bs
import pandas as pd
import pytest
from helpers import cells_of, root

if not (root/'nbs').is_dir(): pytest.skip("in a checkout only: nbs", allow_module_level=True)
tomllib = pytest.importorskip('tomllib', reason="part of Python from 3.11 on")
project = tomllib.loads((root/'pyproject.toml').read_text())['project']
readme = (root/'README.md').read_text()
page = '\n'.join(source for kind,source in cells_of(root/'nbs/index.ipynb') if kind=='markdown')
guides = [p for p in sorted((root/'nbs/guides').glob('*.ipynb')) if any(kind=='code' for kind,_ in cells_of(p))]

# Figures: what the benchmark's page says, and how the first screen says it

def of(nm, pattern):
    "What the groups of `pattern` match in a benchmark's page"
    found = re.search(pattern, (root/f'benchmarks/{nm}.md').read_text())
    assert found, f'{nm}.md has no {pattern!r}'
    return found.groups()

losses = r'training loss median (\S+), above \+5% in (\d+ of \d+), .*; validation loss median (\S+), above \+5% in (\d+ of \d+),'
figures = {'| on a processor |': rf'On this processor: {losses}.*\n.*fit takes (\S+) of',
           '| where a batch 4 times as large takes no longer |': rf"flat up to 4 times today's batch: {losses}.* predicted (\S+) of",
           '| where a batch 16 times as large takes no longer |': rf"flat up to 16 times today's batch: {losses}.* predicted (\S+) of",
           '| by SGD,': rf'With SGD: {losses}', '| text,': rf'\* Text: {losses}',
           '| `bs_find` |': r'`bs_find` takes (\S+) of today.* \(median of (\d+)\)', 'calls that say to stay': r'stay on this processor: (\d+ of \d+);',
           'asking, then training once': r'The first training .*? lasts (\S+) \(median of (\d+)\)', 'asking once, then': r'each of ten, with one call for all, (\S+)\.\n'}

@pytest.mark.parametrize('row', figures)
def test_figures_are_those_of_the_benchmark(row):
    "All that the page says stands in the row, however it is worded"
    line, = [o for o in page.splitlines() if o.startswith('|') and row in o]
    assert [o for o in of('keeps', figures[row]) if not re.search(rf'(?<![\d.+-]){re.escape(o)}(?![\d.]*\d)', line)]==[]
    assert '/benchmarks/keeps.md)' in page

def test_figures_of_a_gpu():
    "The small trainings by how they went, and the time of all plans, of one card"
    res,plans = (pd.read_csv(root/f'benchmarks/results/{o}.csv') for o in ('gpu','gpu_plans'))
    n = res[res.part=='matrix'].set_index('what').value.astype(int)
    went,new = sum(n[o] for o in ('works','refused','fails')),plans[plans.bs!=plans.bs_now].query("part=='plan'")
    time,first = new.secs/new.secs_now,(new.secs+new.find)/new.secs_now
    card, = {*res.machine,*plans.machine}
    line, = [o for o in page.splitlines() if '/benchmarks/gpu.md' in o]
    assert {'H100'}<={*re.findall(r'\w+', card)}
    for o in (f"of {went} small trainings {n['works']} work, {n['refused']} are refused with a reason, {n['fails']} fails",
              f"{len(new)} plans took {time.min():.2f} to {time.max():.2f} of today's time, {first.min():.2f} to {first.max():.2f} with `bs_find`",
              f"one ended {(new.valid/new.valid_now).max()-1:.0%} above today's validation loss"): assert o in line

def test_exact_accumulation():
    "The worst of the seeds"
    apart = re.findall(r'^\| \d+ \|.*\| (\S+) \| \S+ \|$', (root/'benchmarks/mnist_accumulation.md').read_text(), flags=re.M)
    assert len(apart)==3
    assert f'{max(map(float, apart)):.1e} of their norm at most' in page

def test_the_picture_is_of_the_stored_results(monkeypatch):
    "What the picture holds as its text is what `benchmarks/front.py` would draw now"
    Image = pytest.importorskip('PIL.Image')
    monkeypatch.syspath_prepend(str(root/'benchmarks'))
    import front
    assert Image.open(front.path).info['Description']==front.caption(), "python benchmarks/front.py"

# Install

def test_nothing_in_the_readme_is_relative():
    "An index of packages shows it too, and has no other file of ours"
    assert re.findall(r'\]\((?!https://|#)[^)]*\)', readme)==[]

def test_one_line_installs():
    repo = project['urls']['Repository']
    assert f'```sh\ngit clone {repo} && pip install ./fastai_bs\n```' in readme.split('\n## ')[0]
    line = f"pip install git+{repo}"
    for p in guides: assert f"{line.replace('install', 'install -q')} #" in cells_of(p)[1][1], p.name

@pytest.mark.parametrize('path', guides, ids=lambda o: o.stem)
def test_a_guide_installs_in_colab_alone(path):
    "Its first cell: hidden, not run by `make test`, no part of a module, and nothing happens where there is no /content"
    kind,source = cells_of(path)[1]
    lines = source.splitlines()
    assert kind=='code'
    assert lines[:2]==['#| hide','#| eval: false']
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

