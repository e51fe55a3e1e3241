"`python -m fastai_bs`: help, bad arguments, and one short run"
import re
import runpy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from fastai_bs.__main__ import main

@pytest.fixture(autouse=True)
def flags(monkeypatch):
    "The digits are the same each time for flags of cuDNN, which are put back"
    for nm in ('deterministic','benchmark'): monkeypatch.setattr(torch.backends.cudnn, nm, getattr(torch.backends.cudnn, nm))

@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
def test_help(capsys, monkeypatch):
    "As `python -m` runs it"
    monkeypatch.setattr(sys, 'argv', ['fastai_bs','--help'])
    with pytest.raises(SystemExit) as e: runpy.run_module('fastai_bs', run_name='__main__')
    out = capsys.readouterr().out
    assert e.value.code==0
    assert out.startswith('usage: python -m fastai_bs')
    for words in ('--bs', '--opt', '--epochs', '--seed', '--out', 'default: 16', 'nothing is downloaded'):
        assert words in ' '.join(out.split())

@pytest.mark.parametrize('args,words', [('--bs 361', 'argument --bs: must be at least 2 and at most 360, got 361'),
    ('--bs x', "argument --bs: must be a whole number, got 'x'"), ('--epochs 0', 'argument --epochs: must be at least 1, got 0'),
    ('--out a_file', 'argument --out: the folder a_file cannot be made: '), ('--nope', 'unrecognized arguments: --nope')])
def test_bad_arguments(args, words, capsys):
    "Said in words, with status 2, before anything is run or written"
    Path('a_file').touch()
    with pytest.raises(SystemExit) as e: main(args.split())
    out,err = capsys.readouterr()
    assert e.value.code==2
    assert words in err
    assert 'Traceback' not in err
    assert out==''
    assert [p.name for p in Path.cwd().iterdir()]==['a_file']

@pytest.mark.slow
def test_a_short_run(tmp_path, capsys, short, monkeypatch):
    "It prints the plan and the table, and leaves a picture and nothing else; here with fewer seeds"
    monkeypatch.setattr('fastai_bs.__main__.n_seeds', 2)
    main(['--epochs', '1', '--opt', 'sgd', '--out', str(tmp_path/'out'/'deeper')])
    out = capsys.readouterr().out
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*') if p.is_file())==['out/deeper/plan.png']
    assert plt.imread(tmp_path/'out'/'deeper'/'plan.png').std()>0.05
    assert '1. lr_find' in out
    assert '2. bs_find' in out
    assert '3. Training 1 epoch' in out
    lines = [o.split() for o in out.split('\n')]
    start = next(i for i,o in enumerate(lines) if o[:6]==['batch','size','as','lr','epochs','steps'])
    rows = [o for o in lines[start+1:] if o and o[0]!='Batches'] # The last line sums it up
    assert 1<=len(rows)<=2
    assert rows[0][:4]==['16','1','x','16']
    assert all(int(r[0])==int(r[1])*int(r[3]) for r in rows)
    if len(rows)>1: assert rows[1][5]==re.search(r'\.fit_one_cycle\((\d+), ', out)[1] # As many epochs as the plan says
    for row in rows: # Mean, lowest and highest accuracy of the seeds
        acc,low,high = (float(o.rstrip('%')) for o in row[-3:])
        assert low<=acc<=high
        assert low<high
    assert 10<float(rows[0][-1].rstrip('%'))<=100
