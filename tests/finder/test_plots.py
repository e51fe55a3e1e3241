"`BatchPlan.plot`: what the panels show, and where"
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from fastai_bs.finder.facts import Trial
from fastai_bs.finder.plots import _plot_time
from fastai_bs.noise.estimator import NoiseEstimate
from pictures import misplaced, narrow, tick_texts
from plans import plan_of, secs, window_rows

inf,nan = math.inf,math.nan
bare = dict(noise_scale=nan, ci=(nan,nan), n_windows=None, cool=None, df=None) # Nothing was measured
flat = secs(16, 32, 64, 128, 256, c=1e-6)
by_hand = ((16,0.02,0.001),(32,0.021,0.001),(64,0.022,0.001),(128,0.05,0.001))

# Name: the plan's facts, its title, and what stands below the title
cases = dict(
    faster=(dict(), 'Use 128 (today 64)', '256 would save less than 10% more'),
    fastest=(dict(times=secs(16, 32, 64, 128, 256, 512, 1024, c=1e-6)), 'Use 1024 (today 64)', ''),
    trial=(dict(**bare, trial=Trial(256, 300., 240)), 'Use 128 (today 64)', '256 would save less than 10% more'),
    no_further=(dict(**bare, trial=Trial(128, 3000., 240, failed=256), times=flat), 'Use 128 (today 64)', ''),
    many_passes=(dict(**bare, n_epoch=6, trial=Trial(256, 3000., 240), times=flat), 'Use 128 (today 64)', "with so many epochs at most 2 times today's batch"),
    many_untried=(dict(n_epoch=6), 'Use 128 (today 64)', "with so many epochs at most 2 times today's batch"),
    many_little=(dict(n_epoch=6, noise_scale=1e5, ci=(9e4,1.1e5), times=((64,0.02,0.),(128,0.037,0.),(256,0.05,0.))), 'Stay at 64',
                 "with so many epochs at most 2 times today's batch"),
    never=(dict(**bare), 'Stay at 64', '8 times the batch must save 24.9% to be planned'),
    one=(dict(**bare, times=secs(64), n_train=100, n_epoch=500), 'Stay at 64', ''),
    two=(dict(**bare, times=secs(64, 128), n_train=300, n_epoch=100), 'Stay at 64', 'twice the batch must save 9.1% to be planned'),
    many=(dict(bs=16, **bare, trial=Trial(65536, 3e4, 240), times=secs(*(2**i for i in range(13)), c=1e-6), n_train=10**6), 'Use 4096 (today 16)',
          '32768 would save less than 10% more'),
    large=(dict(bs=512, noise_scale=2e5, ci=(1.5e5,3e5), times=secs(64, 128, 256, 512, 1024, c=1e-6), n_train=10**7), 'Use 1024 (today 512)',
           '4096 would save less than 10% more'),
    odd=(dict(bs=90, times=secs(45, 90, 128, 180, 256)), 'Use 180 (today 90)', ''),
    given=(dict(**bare, given=True, times=flat, trial=Trial(128, 300., 240)), 'Use 128 (today 64)', ''),
    costly=(dict(**bare, times=flat, trial=Trial(64, skipped=128, hoped_noise=500., saving=3., cost=4.)), 'Stay at 64',
            'trying 128 takes too long for what it could save'),
    useless=(dict(**bare, times=((64,0.01,0.),(128,0.0165,0.),(256,0.032,0.)), n_epoch=50,
                  trial=Trial(64, skipped=256, hoped_noise=560., saving=-1., cost=4.)), 'Stay at 64', '256 would save no time'),
    nowhere=(dict(**bare, times=flat, trial=Trial(64, failed=128)), 'Stay at 64', '128 learned too little in a short training'),
    slower=(dict(noise_scale=30., ci=(20.,40.), times=secs(64, 128, 256)), 'Stay at 64', ''),
    gain=(dict(adam=False, times=secs(16, 32, 64, 128, 256, c=3e-4)), 'Stay at 64', 'twice the batch must save 9.1% to be planned'),
    error=(dict(spread=0.4), 'Stay at 64', 'step times varied by 40%, so that is not sure'),
    split=(dict(micro_bs=16, times=by_hand, noise_scale=100., ci=(80.,130.)), 'Stay at 64, as 1 x 64', ''),
    split_stays=(dict(**bare, micro_bs=16, times=by_hand[:3]), 'Stay at 64, as 1 x 64', 'larger sizes were not tried'),
    chosen=(dict(chosen=16), 'You chose 16 (today 64)', 'as you chose'),
    open=(dict(noise_scale=inf, ci=(60.,inf)), 'Stay at 64', ''),
    fixed=(dict(cool=None), 'Use 128 (today 64)', '256 would save less than 10% more'),
    untimed=(dict(times=()), 'Use 512 (today 64)', "today's step could not be timed"),
    nothing=(dict(**bare, times=()), 'Stay at 64', "today's step could not be timed"),
    short=(dict(n_windows=5), 'Stay at 64', 'no plan: too few windows'),
    too_high=(dict(bs=256, micro_bs=256, n_train=600, n_epoch=100, loss_rose=True), 'Stay at 256', 'no plan: the loss rose')) # The curve is lowest there

def plan_for(nm):
    kwargs = dict(cases[nm][0])
    chosen = kwargs.pop('chosen', None)
    plan = plan_of(**kwargs)
    return plan.at(chosen) if chosen else plan

@pytest.mark.parametrize('nm,label', [('costly','time, if all goes well'), ('never','time, if as many epochs as today were enough'),
    ('trial','time of the whole fit')])
def test_the_curve_says_what_it_assumes(nm, label):
    assert label in [o.get_label() for o in plan_for(nm).plot().lines]

def star_of(ax): return next((o for o in ax.lines if o.get_marker()=='*'), None)

@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close('all')

@pytest.mark.parametrize('nm', cases)
def test_the_right_panel_says_what_the_plan_says(nm):
    "The title has its size, the star stands at its time, and where another size is lower a line says why"
    plan = plan_for(nm)
    ax = np.ravel(plan.plot())[-1]
    (_,title,note),o,today = cases[nm],plan.choice.option,plan.duration.today
    assert (ax.get_title(),''.join(t.get_text() for t in ax.texts))==(title,note)
    assert repr(plan).startswith(title.partition(' (')[0].partition(',')[0])
    if not plan.facts.device.timed: return
    assert (star_of(ax).get_xdata()[0],star_of(ax).get_ydata()[0])==(plan.bs,pytest.approx(o.trained_time/today))
    curve = next((o for o in ax.lines if o.get_label().startswith('time')), None)
    if len(plan.options)==1:
        assert curve is None
        return
    assert curve.get_xdata().tolist()==[o.bs for o in plan.options]
    assert curve.get_ydata().tolist()==pytest.approx([o.trained_time/today for o in plan.options])
    assert note or star_of(ax).get_ydata()[0]==min(curve.get_ydata())
    how = 'chosen' if nm=='chosen' else 'as today' if note.startswith('no plan') else 'planned'
    assert star_of(ax).get_label()==f'{how}, {plan.bs}'

def test_a_batch_that_is_split_anew_is_drawn_over_today_s_training():
    "As the text has it, not over itself, and with a dot for what it is over"
    plan = plan_for('split')
    right = plan.plot()[-1]
    star = star_of(right)
    dot, = [o for o in right.lines if o.get_color()=='grey' and o.get_marker()=='o']
    assert (dot.get_xydata().tolist(),dot.get_label())==([[64,1]],"today's, 4 x 16")
    assert f'about {100*star.get_ydata()[0]:.0f}% of the time' in repr(plan)

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('nm', cases)
def test_nothing_runs_out_of_the_frame_and_ticks_are_at_sizes_and_at_round_numbers(nm):
    "In the default figure and in small ones of the user's"
    plan = plan_for(nm)
    if plan.df is not None: assert misplaced(plan.plot(narrow()).figure)==[] # Else it has the right panel alone
    for whole in (plan.plot(), _plot_time(plan, narrow())):
        ax = np.ravel(whole)[-1]
        assert misplaced(ax.figure)==[] # Which draws it
        sizes,times = tick_texts(ax.xaxis),tick_texts(ax.yaxis)
        assert all(t.get_text()==str(int(x)) for t,x in sizes.items())
        assert {*sizes.values()}<={o.bs for o in plan.options}
        assert {*ax.get_xticks(minor=True)}>={o.bs for o in plan.options}-{*sizes.values()}
        assert plan.facts.today.bs in sizes.values()
        assert all(ax.get_xlim()[0]<o.get_xdata()[0]<ax.get_xlim()[1] for o in ax.lines)
        assert all(float(t.get_text()[:-1])==pytest.approx(100*y) and t.get_text()[-1]=='%' for t,y in times.items())
        assert 2<=len(times)<=9
        assert ax.get_xscale()==ax.get_yscale()=='log'
        assert '(log)' in ax.get_ylabel()
        top = max([0,*(max(o.get_ydata()) for o in ax.lines if o.get_label().startswith('time'))])
        assert top<2.5 or max(times.values())>1

def test_a_dark_style_is_that_of_the_whole_picture():
    "Texts have its colour, and no line or marker is black or white"
    df = window_rows().assign(g_sq=np.linspace(-0.02, 0.02, 30), tr_sigma=3.)
    for kwargs in (dict(df=df), dict(df=df, cool=None), bare):
        with plt.style.context('dark_background'):
            figure = np.ravel(plan_of(**kwargs).plot())[0].figure
            figure.canvas.draw()
            assert {to_hex(o.get_color()) for ax in figure.axes for o in ax.findobj(Text)}=={'#ffffff'}
        for o in (o for ax in figure.axes for o in ax.lines): assert not {to_hex(o.get_color()),o.get_markerfacecolor()} & {'#ffffff','#000000','w','k'}

def test_what_was_measured_and_what_the_plan_makes_of_it_are_two_lines():
    "The first over the cool stretch, the second over all"
    left,_ = plan_of(noise_scale=60., ci=(50.,70.)).plot()
    measured,whole = (next(o for o in left.lines if str(o.get_label()).startswith(nm)) for nm in ('pooled (band): 400','plan: 60'))
    assert set(measured.get_ydata())=={400.}
    assert set(whole.get_ydata())=={60.}

@pytest.mark.parametrize('low,high,drawn', [(80.,130.,True), (0.,math.inf,False)])
def test_intervals_are_in_the_legend_where_there_are_some(low, high, drawn, monkeypatch):
    monkeypatch.setattr('fastai_bs.finder.plots.along', lambda *args: NoiseEstimate(100., (low,high), 30))
    left,_ = plan_of().plot()
    labels = [o.get_text() for o in left.get_legend().get_texts()]
    assert labels[0]=='mean of 5 or 6 measurements'
    assert ('its interval, if bounded' in labels)==drawn

def test_at_fixed_weights_the_noise_scale_is_that_of_the_last_windows():
    left,_ = plan_of(cool=None, df=window_rows(16), n_windows=12).plot()
    points,measured = (next(o for o in left.lines if str(o.get_label()).startswith(nm)) for nm in ('mean of 5 or 6','pooled (band): 512'))
    assert len(points.get_xdata())==3
    assert measured.get_xdata().tolist()==[4.5,16.5]
    left.figure.canvas.draw()
    assert all(x%1==0 for x in left.get_xticks())

def test_axes_of_one_s_own_are_drawn_on():
    mine = plt.subplots(1, 2)[1]
    assert plan_for('faster').plot(mine) is mine
    assert plan_for('never').plot(mine) is mine[-1]
    assert plan_for('never').plot(mine[0]) is mine[0]
