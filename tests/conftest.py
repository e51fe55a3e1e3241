"Set-up of all tests: one thread, plots in memory, an empty folder for each, and a process that is left as it was found"
import gc
import math
import os
import shutil
import signal

import pytest

failed = pytest.StashKey()
os.environ['MPLBACKEND'] = 'Agg'

def pytest_configure(config):
    if config.getoption('numprocesses', None): return # The process that hands out the tests needs no torch, and waits for no import of it
    import torch
    torch.set_num_threads(1) # Tiny models: a second thread only costs
    if signal.getsignal(signal.SIGINT)==signal.SIG_IGN: # So in a job in the background; tests press Ctrl-C themselves
        signal.signal(signal.SIGINT, signal.default_int_handler)

@pytest.hookimpl(tryfirst=True) # Before xdist reads the groups
def pytest_collection_modifyitems(items):
    "The cases of a test go to one worker, as they share what is computed for all of them; those that wait most go first"
    for item in items:
        if item.get_closest_marker('xdist_group') is None: item.add_marker(pytest.mark.xdist_group(item.nodeid.partition('[')[0]))
    items.sort(key=lambda item: item.get_closest_marker('first') is None)

@pytest.fixture(autouse=True, scope='module')
def frozen():
    "What is there by now stays: those who collect garbage, as a search for the largest batch does after each failure, need not look at it each time"
    gc.collect()
    gc.freeze()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.stash[failed] = report.failed
    return report

@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    from helpers import as_it_was
    with as_it_was(failed=lambda: request.node.stash.get(failed, False)): yield

@pytest.fixture
def short(monkeypatch):
    "As few steps are timed as will do, and of all sizes, once: for tests in which it does not matter what they take"
    from fastai_bs.finder.timing import StepTimer, StepTimes
    for nm,v in (('patience',1.),('most',2)): monkeypatch.setattr(StepTimer, nm, v)
    for nm in ('budget','part'): monkeypatch.setattr(StepTimes, nm, math.inf)
    monkeypatch.setattr(StepTimes, 'slack', math.inf)
    monkeypatch.setattr(StepTimes, 'n_rounds', 1)

@pytest.fixture(autouse=True)
def close_figures(nothing_left_behind):
    yield
    import matplotlib.pyplot as plt
    plt.close('all')

@pytest.fixture(scope='session')
def empty_folder(tmp_path_factory): return tmp_path_factory.mktemp('empty')

@pytest.fixture(autouse=True)
def own_folder(nothing_left_behind, request, empty_folder, monkeypatch):
    "Each test runs in an empty folder, so that files left behind show: its own `tmp_path` if it asks for that, else one that is emptied"
    folder = request.getfixturevalue('tmp_path') if 'tmp_path' in request.fixturenames else empty_folder
    monkeypatch.chdir(folder)
    yield
    if folder is empty_folder:
        for o in folder.iterdir(): shutil.rmtree(o) if o.is_dir() else o.unlink()

@pytest.fixture
def any_growth(monkeypatch):
    "Plans for many epochs may be for any size, as those for few are"
    monkeypatch.setattr('fastai_bs.finder.choice.many_epochs', math.inf)
