"The mock cycle: its rate is that of `fit_one_cycle`, it keeps to its micro-batches, and more windows are measured where they are needed"
import math
from types import SimpleNamespace

import numpy as np
import pytest
from fastai.callback.schedule import combined_cos

from fastai_bs.all import NoiseScale
from fastai_bs.finder.cycle import MockCycle, cool_rates, cool_stretch, cycle_of, places, rate_at
from fastai_bs.finder.mock import EndOfMock, MockWindows, cool_reading
from helpers import loaders, mlp, noted, pairwise, peak_lr, quiet_learner, regression

inf = math.inf

pytestmark = pytest.mark.usefixtures('short')

# Its rate

def test_the_rate_is_fastais():
    "At its ends and its peak exactly"
    pct = np.linspace(0, 1, 1001)
    fastais = combined_cos(0.25, 1/25, 1., 1/1e5)
    assert rate_at(pct).tolist()==pytest.approx([fastais(float(o)) for o in pct], rel=1e-4) # fastai's positions are in single precision
    assert (rate_at(0),rate_at(0.25),rate_at(1))==(1/25,1,pytest.approx(1e-5))
    assert rate_at(np.array(cool_stretch))==pytest.approx(cool_rates)

# Within its micro-batches

def mock_trained(n_iter, cycle, tol=0.25, lr=0.05):
    "A mock training without the rest of `bs_find`"
    learn = quiet_learner(loaders(regression(3*n_iter-1), 3, shuffle=True), mlp())
    windows = MockWindows(NoiseScale(), min(20, max(2, n_iter//8)), cycle, tol=tol)
    finder,(look,steps) = EndOfMock(windows, cycle.num_it),noted('before_step', peak_lr)
    learn.fit(math.ceil(cycle.num_it/n_iter), lr, cbs=[windows.accum, windows, finder.noise, finder, cycle, look])
    return SimpleNamespace(finder=finder, windows=windows, cycle=cycle, rows=windows.noise.rows, steps=steps)

@pytest.mark.parametrize('n_iter,today,which', pairwise([2,7,40], [1,3,5], range(4)))
def test_the_cycle_ends_within_num_it(n_iter, today, which):
    "In epochs shorter than the cycle, in which a window may be cut short and a left-over micro-batch may tell nothing"
    num_it = (2*max(today,4), 4*today+9, 61, 100)[which]
    o = mock_trained(n_iter, cycle_of(num_it, today, inf))
    assert o.cycle.is_over
    assert o.finder.n_seen==o.cycle.n_seen+1<=num_it
    assert len(o.steps)==o.cycle.n_steps+o.cycle.n_more
    assert len(o.rows)==len(o.windows.path)
    assert len(o.rows)>=(1 if num_it<60 else 10)
    assert o.cycle.n_more<=o.cycle.most_more<=len(places(60))//2
    assert o.cycle.n_measured<=len(o.cycle.places)

# More windows where they are needed

@pytest.mark.parametrize('tol,today', [(1e-9,4), (0,1)])
def test_more_windows_where_the_interval_is_wide(tol, today):
    "In the middle of the cool stretch, as many as were kept for at most; the cycle waits there for a step each. None with tol=0"
    o = mock_trained(400, MockCycle(60, 20, today, 60*today+20*6+10*(6+today)), tol, lr=0.001)
    c = o.cycle
    assert c.most_more>=8
    assert c.n_more==(0 if tol in (0,10) else c.most_more)
    pct = [at for _,at,_ in o.windows.path]
    assert len(o.steps)==60+c.n_more
    assert len(pct)==len(o.rows)==20+c.n_more
    assert pct==sorted(pct)
    rates = [0.001*rate_at(i/60) for i in range(60)]
    middle = math.ceil(sum(cool_stretch)/2*60)
    assert o.steps==pytest.approx(rates[:middle]+[rates[middle]]*c.n_more+rates[middle:], rel=1e-4)
    assert cool_reading(o.windows.placed(o.windows.noise.moments)).n_windows==10+c.n_more

