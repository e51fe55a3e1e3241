"`BatchPlan.plot`: what the panels show"
import math

import matplotlib.pyplot as plt
import pytest
from fastai_bs.finder.facts import Trial
from plans import plan_of, secs, window_rows

inf,nan = math.inf,math.nan

@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close('all')

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('kwargs', [dict(times=()), dict(noise_scale=inf, ci=(60.,inf)), dict(cool=None, at_peak=None, at_end=None),
    dict(df=window_rows(0))], ids=lambda o: ','.join(o))
def test_plots_are_drawn_without_a_warning(kwargs, tmp_path):
    axs = plan_of(**kwargs).plot()
    axs[0].figure.savefig(tmp_path/'plan.png')
    assert len(axs)==2
    assert not math.isnan(axs[0].get_ylim()[1])

def test_the_right_panel_has_the_whole_fit_over_today_s():
    "A point for each option, a star at the planned one, and the examples to a given loss"
    plan = plan_of(bs=25, noise_scale=100., ci=(80.,130.), adam=False, times=secs(25, 50, 100, 200))
    _,right = plan.plot()
    curve,examples = (next(o for o in right.lines if o.get_label()==label) for label in ('time of the whole fit','examples'))
    star, = [o for o in right.lines if o.get_label().startswith('planned')]
    now = plan.options[0].fit_time
    assert curve.get_xdata().tolist()==[o.bs for o in plan.options]
    assert curve.get_ydata().tolist()==pytest.approx([o.fit_time/now for o in plan.options])
    assert examples.get_ydata().tolist()==pytest.approx([(1+bs/100)/1.25 for bs in plan.table.bs])
    assert (star.get_xdata()[0],star.get_ydata()[0])==(plan.bs,pytest.approx(plan.choice.option.fit_time/now))

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('kwargs,title,label', [(dict(),'At best: stay at 64','time of as many epochs as today'),
    (dict(trial=Trial(256, 300., 240)),'Predicted here: use 128 (today 64)','time of the whole fit')])
def test_without_a_mock_training_there_is_the_time_alone(kwargs, title, label):
    "On axes of one's own too"
    plan = plan_of(noise_scale=nan, ci=(nan,nan), n_windows=None, cool=None, at_peak=None, at_end=None, df=None, **kwargs)
    ax = plan.plot()
    assert ax.get_title()==title
    assert label in [o.get_label() for o in ax.lines]
    assert plan.plot(ax) is ax
