"Benchmarks: a page is what its script makes of the stored results, all take the same arguments, and who cites a figure has it from there"
import inspect
import json
import math
import re
import runpy
import sys
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from fastai.callback.core import Callback
from fastai.callback.schedule import combined_cos
from fastai.optimizer import Adam
from fastai_bs.all import batch_size
from fastai_bs.finder.advice import ended_above
from helpers import cells_of, loaders, mlp, quiet_learner, regression, root

folder = root/'benchmarks'
if not folder.is_dir(): pytest.skip("in a checkout only: benchmarks", allow_module_level=True)
sys.path.insert(0, str(folder))
import frame # noqa: E402
from frame import Table # noqa: E402
from kinds import tasks # noqa: E402

# The others are libraries, and a picture for the README
scripts = [p.stem for p in sorted(folder.glob('*.py')) if re.search(r"(?s)if __name__=='__main__'.*main\(__doc__", p.read_text())]

@cache
def script(nm):
    "What it calls `frame.main` with"
    with pytest.MonkeyPatch.context() as m:
        found = {}
        signature = inspect.signature(frame.main)
        m.setattr(frame, 'main', lambda *args, **kwargs: found.update(signature.bind(*args, **kwargs).arguments))
        m.setattr(sys, 'argv', [str(folder/f'{nm}.py')])
        runpy.run_path(sys.argv[0], run_name='__main__')
    return SimpleNamespace(**{'parts': (), 'parser': None, **found})

@cache
def result(nm): return Table(nm).df

# Scripts and pages

@pytest.mark.parametrize('nm', [pytest.param(o, marks=pytest.mark.slow) if o=='pays' else o for o in scripts])
def test_a_page_is_written_from_the_results(nm):
    s = script(nm)
    if not (folder/f'{nm}.md').exists() and not any(Table(o).path.exists() for o in s.names): pytest.skip("not measured yet")
    text = s.page(*(Table(o).df for o in s.names)).rstrip()+'\n'
    assert text==(folder/f'{nm}.md').read_text(), f"python benchmarks/{nm}.py"
    for o in re.findall(r'\]\((\w+\.\w+)\)', text): assert (folder/o).exists(), o

@pytest.mark.parametrize('nm', scripts)
def test_arguments(nm):
    s = script(nm)
    parser = s.parser or frame.arguments(s.doc, s.parts)
    for o in ('quick','full'): assert getattr(parser.parse_args([f'--{o}','--data','here','--seeds','3','4']), o)
    bare = parser.parse_args([])
    assert not (bare.quick or bare.full or bare.data)
    with pytest.raises(SystemExit): parser.parse_args(['--quick','--full'])
    assert f'python benchmarks/{nm}.py' in s.doc

def test_all_results_are_on_a_page():
    of = {o for nm in scripts for o in script(nm).names}
    assert {p.stem for p in (folder/'results').glob('*.csv')}<=of
    for o in of: assert {*frame.about_cols}-{'commit'}<=set(result(o)), o # That is younger than some
    assert not list(folder.glob('*.csv'))

def test_the_list_of_them():
    "A row for each script, with its page"
    rows = dict(re.findall(r'^\| \[`(\w+)\.py`\]\(\1\.py\) \|.*\| \[page\]\((\w+)\.md\) \|$', (folder/'README.md').read_text(), flags=re.M))
    assert rows=={o: o for o in scripts}

def test_a_day_with_a_gpu():
    "Who has one reads of each part, in its order"
    text = (root/'CONTRIBUTING.md').read_text().split('## A day with a GPU')[1].split('\n## ')[0]
    assert re.findall(r'^\| `(\w+)` \|', text, flags=re.M)==[*script('gpu').parser.parse_args([]).parts]
    for o in script('gpu').names: assert f'`benchmarks/results/{o}.csv`' in text

# The frame

@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(frame, 'here', tmp_path)
    return Table('some')

def test_a_row_is_added_once_and_found(table):
    assert not table.has(seed=0)
    table.add(arm='a', seed=0, lr=10**-1.5, loss=1/3)
    for o in (dict(arm='a', seed=0, lr=10**-1.5), dict(arm='a'), dict(seed=np.int64(0), loss=np.float64(1/3))): assert table.has(**o), o
    for o in (dict(arm='a', seed=1), dict(arm='b', seed=0), dict(lr=0.0317), dict(other=0)): assert not table.has(**o), o
    row, = table.df.itertuples()
    assert row.date and row.torch and row.threads
    assert row.loss==pytest.approx(1/3, rel=1e-5)

def test_quick_is_apart(table):
    quick = Table('some', quick=True)
    quick.add(seed=0)
    assert not table.has(seed=0)
    assert quick.path.parent.name=='quick'
    assert f'{quick.path.parent.relative_to(frame.here)}/' in '\n'.join(o.removeprefix('benchmarks/') for o in (root/'.gitignore').read_text().splitlines())

def test_main(tmp_path, monkeypatch, capsys):
    "Without an argument it measures nothing"
    monkeypatch.setattr(frame, 'here', tmp_path)
    def _run(args, t): t.add(seed=len(t.df))
    def _page(df): return f'{len(df)} rows'
    def _main(*argv):
        monkeypatch.setattr(sys, 'argv', ['some.py', *argv])
        frame.main('A benchmark.', ['some'], _run, _page)
        return (tmp_path/'some.md').read_text()
    assert _main()=='0 rows\n'
    assert _main('--quick')=='0 rows\n'
    assert (tmp_path/'results/quick/some.md').read_text()=='1 rows\n'
    assert (_main('--full'),_main('--full'))==('1 rows\n','2 rows\n')

# Who cites a figure

def md(path): return '\n'.join(source for kind,source in cells_of(root/path) if kind=='markdown')

def missing(text, *figures):
    "Those that do not stand in `text` as numbers of their own, however it is worded"
    return [o for o in figures if not re.search(rf'(?<![\d.,-]){re.escape(o.lstrip("+"))}(?![\d%]|[.,]\d)', text)]

entries = (folder/'LOG.md').read_text().split('\n## ')[1:]

@pytest.mark.parametrize('entry', entries, ids=lambda o: o.partition('\n')[0])
def test_the_log_has_its_figures_from_the_pages_that_it_links(entry):
    pages = '\n'.join((folder/f'{o}.md').read_text() for o in re.findall(r'/benchmarks/(\w+)\.md\)', entry))
    text = re.sub(r'\]\([^)]*\)', '', entry.partition('\n')[2])
    assert pages
    assert not missing(pages, *re.findall(r'(?<![\w.,-])(?:\d+\.\d+(?:e-\d+)?%?|\d+%)', text))

def test_the_log_is_newest_first():
    dates = [o[:10] for o in entries]
    assert dates==sorted(dates, reverse=True)

def figures(page, pattern):
    "What the groups of `pattern` match in a benchmark's page"
    found = re.search(pattern, (folder/f'{page}.md').read_text(), flags=re.M)
    assert found, f'{page}.md has no {pattern!r}'
    return found.groups()

losses = r'training loss median (\S+), above \+5% in (\d+ of \d+), .*; validation loss median (\S+), above \+5% in (\d+ of \d+),'
plans = r'\((\d+) plans that change something, each the mean of its seeds\)'
here,flat = rf'On this processor {plans}: {losses}.*\n.*fit takes (\S+) of',rf"flat up to 4 times today's batch {plans}: {losses}.* predicted (\S+) of"

on_devices = 'On this processor',"flat up to 4 times today's batch"

def test_the_first_page_s_table(monkeypatch):
    "Medians of all dots of its picture, a column for each device"
    monkeypatch.syspath_prepend(str(folder))
    import front
    of = front.found()[1].groupby('device').median(numeric_only=True)
    def _row(col, digits=0): return ['not measured' if math.isnan(of[col][o]) else f'{of[col][o]:+.{digits}%}' for o in front.devices]
    table = [o.split('|') for o in md('nbs/index.ipynb').splitlines() if o.startswith('|')]
    said = figures('keeps', r'with what finding it takes, lasts (\S+) .*; each of ten, with one call for all, (\S+); each training alone (\S+)\. Each')
    assert [float(o) for o in said]==[round(1+of[o]['here'], 2) for o in ('first','ten','time')]
    worse = [figures('keeps', rf'{which} {plans}: {losses}')[2::2] for which in on_devices]
    medians = *map(_row, ('time','first','ten')), _row('d_train', 1), _row('d_valid', 1)
    assert [list(map(str.strip, o[2:-1])) for o in table[2:]]==[*medians, *map(list, zip(*worse))]

def test_what_the_first_page_says_below_its_table():
    risk,price,stays = (o for o in md('nbs/index.ipynb').splitlines() if o.startswith(('* **Risk','* **Price','* **Often')))
    *_,worst = figures('keeps', rf"{on_devices[0]} {plans}: {losses} from \S+ to \+(\S+%)")
    (n,of,most),(n_sgd,of_sgd,most_sgd) = (ended_above[o] for o in (True,False))
    assert f'in either column: {n} of {of} with Adam, {n_sgd} of {of_sgd} with SGD.' in risk
    on_gpu = figures('keeps', rf"{on_devices[1]} {plans}: {losses} from \S+ to \+(\S+%)")[-1]
    worst,on_gpu = (f'{float(o[:-1]):.0f}%' for o in (worst,on_gpu))
    assert worst==f'{most_sgd:.0%}'
    assert most<float(on_gpu[:-1])/100 # So that one is SGD's, too
    assert f"the validation loss was {worst} above today's on a CPU and {on_gpu} on the assumed GPU, both with SGD, and {most:.0%} with Adam." in risk
    takes = [f'{float(o):.0%}' for o in figures('keeps', r'`bs_find` takes (\S+) of today.*changes something (\S+), ')]
    assert 'On a CPU `bs_find` takes {0} of a training with present settings, and {1} where it ends in a larger batch (medians).'.format(*takes) in price
    calls = result('keeps').query("part=='plan'")
    calls = calls.assign(changes=calls.bs!=calls.task.map(lambda o: tasks[o].bs))
    short,longer = calls[calls.steps<1100],calls[calls.steps>=1100].groupby('device').changes.mean()
    assert not short.changes.any()
    for o in (f"All {(short.device=='here').sum()} calls for trainings of fewer than 1,100 steps keep the batch size",
              f'{longer.here:.0%} change it on a CPU, and {longer.flat_4:.0%} on the assumed GPU'): assert o in stays

def test_what_the_first_page_says_of_a_gpu():
    "The time of all plans, of two cards, and who ended worst"
    plans = result('gpu_plans')
    new = plans[plans.bs!=plans.bs_now].query("part=='plan'")
    time,first = new.secs/new.secs_now,(new.secs+new.find)/new.secs_now
    line, = [o for o in md('nbs/index.ipynb').splitlines() if '/benchmarks/gpu.md' in o]
    train,worst = (sorted((o/now-1)[now>0.01], reverse=True) for o,now in ((new.train,new.train_now),(new.valid,new.valid_now)))
    assert {o.replace('NVIDIA ', '').split()[0] for o in plans.machine}=={'H100','H200'} and 'On an [H100 and an H200]' in line
    assert worst[2]<0.05 and train[1]<0.06 and (plans.part=='plan').sum()==len(new)+1
    for o in (f"one of {len(new)+1} plans keeps the batch size, the others took {1-time.max():.0%} to {1-time.min():.0%} less time",
              f"between {1-first.min():.0%} less and {first.max()-1:.0%} more",
              f"One plan made the validation loss {worst[0]:.0%} worse. Another made both losses worse: training {train[0]:.0%}, validation "
              f"{worst[1]:.0%}."): assert o in line
    assert (new.train/new.train_now).where(new.train_now>0.01).idxmax()==(new.valid/new.valid_now).sort_values().index[-2]

@pytest.mark.parametrize('adam,who', [(True,'Adam'),(False,'SGD')])
def test_what_a_plan_says_of_its_promise(adam, who):
    *_,above,most = figures('keeps', rf'With {who}: {losses} from \S+ to (\S+%)')
    n,of,worst = ended_above[adam]
    assert (f'{n} of {of}',f'{worst:+.1%}')==(above,most)

def test_the_finder_s_page():
    assert not missing(md('nbs/finder/15_bs_find.ipynb'), *figures('keeps', here), *figures('keeps', flat))

def test_the_finder_s_picture_is_the_page_s(): assert (root/'nbs/images/pays.png').read_bytes()==(folder/'pays.png').read_bytes()

@pytest.mark.parametrize('nb', ['memory/02_report','index'])
def test_what_a_memory_report_sees(nb):
    df = result('memory')
    ratio = df.traced/df.peak
    assert f'{ratio.min():.2f} to {ratio.max():.2f}' in md(f'nbs/{nb}.ipynb')
    assert df.model.nunique()==7
    assert 0.95<ratio.min()<ratio.max()<1.06

def test_rates_that_are_too_high():
    "No alarm at a good rate, and one at each rate that is too high"
    assert result('too_high').groupby(lambda i: result('too_high').kind[i].split(',')[0]).alarm.mean().to_dict()=={'anew': 0, 'new': 0, 'flung': 1}

def test_what_watching_costs():
    "Of a ResNet-18 and a tabular model, in parts; and beside `GradAccum`, at first and later"
    df = result('cost')
    more = {(o.training.split(',')[0],o.measured.partition(', ')[2]): f'{100*(o.time-1):.0f}%' for o in df.itertuples()}
    words = ('`NoiseScale` [makes](https://github.com/fastai-bs/fastai_bs/blob/main/benchmarks/cost.md) the training of a ResNet-18 slower by {}, and that of '
             'a small tabular model by {}. With a `GradAccum` it costs {} and {} in the first 100 steps. Then it measures every 4th step, at a cost too small '
             'to tell.')
    assert words.format(*(more[nm,when] for when in ('every 60th step','each step') for nm in ('ResNet-18','tabular'))) in md('nbs/guides/choose.ipynb')
    later = df[df.measured.str.endswith('every 4th step')]
    assert len(later)==2
    assert (later.low<1).all()
    assert (later.high>1).all()

def test_goyal():
    text,page = md('nbs/guides/learning_rate.ipynb'),(folder/'goyal.md').read_text()
    warm,gain = (figures('goyal', rf'^\| {o} \| (\S+) ± (\S+) \|$') for o in
                 ('8x linear, 4 times the rate: warmup minus none','8x with warmup: gain minus linear'))
    assert f'{-float(warm[0]):.1f} ± {float(warm[1]):.1f}' in text
    assert ' ± '.join(gain) in text
    over = dict(re.findall(r"^\| (8x [^|]*) \| 0\.1 x \S+ \| \S+ \| ([^|]*) \|", page.partition('## In steps')[2], flags=re.M))
    for arm in ('8x linear, warmup of 5 epochs','8x linear, no warmup','8x unscaled'): assert over[arm] in text, arm

@cache
def growing(): return runpy.run_path(str(folder/'grows.py'))['growing']

def test_growth_is_by_the_lines_of_the_guide():
    assert inspect.getsource(growing()).rstrip() in '\n'.join(o for _,o in cells_of(root/'nbs/guides/growing.ipynb'))

class Steps(Callback):
    "Progress, batch size, micro-batch and rate of each optimizer step"
    order,run_valid = 1000,False
    def before_fit(self): self.seen = []
    def before_batch(self):
        if self.learn.grad_accum.starts_window: self.pct = self.learn.pct_train
    def after_step(self): self.seen.append((self.pct,batch_size(self.learn),self.learn.dls.train.bs,self.opt.hypers[-1]['lr']))

def test_growth_takes_the_place_of_the_fall():
    "The batch over the fall of the rate, in the nearest number of micro-batches up to the limit; the rate of Adam falls by the root"
    learn,steps,f = quiet_learner(loaders(regression(240), 4), mlp(), opt_func=Adam),Steps(),combined_cos(0.25, 1/25, 1, 1e-5)
    learn.fit_one_cycle(4, 0.05, cbs=[growing()(4, 37), steps])
    for pct,bs,micro_bs,lr in steps.seen:
        want = 4/f(pct) if pct>0.25 else 4
        assert bs==micro_bs*max(1, min(round(want/micro_bs), 37//micro_bs))
        assert lr==pytest.approx(0.05*f(pct)*(bs/4)**0.5, rel=1e-6)
    assert {bs for _,bs,*_ in steps.seen}>={4,8,36}
    assert {micro_bs for *_,micro_bs,_ in steps.seen}=={4,12}
    assert len(steps.seen)<0.7*240

def test_what_growth_saves():
    line,text = re.search(r'same items: (.*?)\. ', (folder/'grows.md').read_text())[1],md('nbs/guides/growing.ipynb')
    steps,loss = zip(*((int(o),float(p)) for o,p in re.findall(r'\w+ (\d+)% \(training loss \+(\S+)%\)', line)))
    assert len(steps)==3
    assert 'some 30% of the optimizer steps' in text
    assert all(25<o<35 for o in steps)
    assert f'training loss ends {min(loss)}% to {max(loss)}% higher' in text

def test_what_a_plateau_costs():
    over = re.findall(r'\w+ ([+-]\d+)% \(growth (\S+)%\)', (folder/'grows.md').read_text())
    plateau,grow = ([float(o) for o in col] for col in zip(*over))
    assert len(over)==3
    assert f'{min(plateau):.0f}% to {max(plateau):.0f}% above' in md('nbs/guides/growing.ipynb')
    assert max(map(abs, grow))<2

def shown(nb, pattern):
    "What cells whose code has `pattern` have stored as their output"
    cells = json.loads((root/f'nbs/{nb}.ipynb').read_text())['cells']
    res = [''.join(o['data']['text/markdown']).strip() for c in cells if re.search(pattern, ''.join(c['source'])) for o in c.get('outputs', [])]
    assert res
    return res

@pytest.mark.parametrize('nb,page,pattern', [('guides/noise_scale','rossmann','rossmann.md'),
                                             ('guides/accumulation','mnist_accumulation','mnist_accumulation.md'),
                                             ('guides/learning_rate','goyal',r'Markdown\((table|pairs)\(df\)\)')])
def test_a_table_of_a_guide_is_the_page_s(nb, page, pattern):
    for o in shown(nb, pattern): assert o in (folder/f'{page}.md').read_text()

def test_a_table_of_a_guide_has_the_columns_of_the_page():
    text, = shown('guides/where_memory_goes', r'memory\.md')
    assert text.splitlines()==[o for o in (folder/'memory.md').read_text().partition('## Each')[0].splitlines() if o.startswith('|')]
