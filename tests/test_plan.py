"`BatchPlan`: what is said about a measured noise scale, sentence by sentence, and how it is drawn"
import dataclasses
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from fastai_bs.noise import NoiseScale
from fastai_bs.plan import BatchPlan, balanced_bs

inf,nan = math.inf,math.nan

def rows(n=30, noise_scale=100., low=80., high=130., n_items=40):
    return pd.DataFrame(dict(step=range(1,n+1), n_items=n_items, n_elems=float(n_items), tr_sigma=noise_scale, g_sq=1., noise_scale=noise_scale, low=low,
        high=high))

def make(noise_scale=100., ci=(80.,130.), **kwargs):
    "A plan about which there is nothing else to say"
    return BatchPlan(**{**dict(noise_scale=noise_scale, ci=ci, base_bs=100, bs_now=kwargs.get('base_bs', 100), micro_bs=100, base_lr=0.1, n_windows=30,
        trend=0, n_train=10_000, n_seen=50, n_passes=1., moved=False, loss_rose=False, level=0.95, df=rows()), **kwargs})

def test_advice_is_about_todays_batch_size():
    "Not about the one that the learning rate belongs to, where a ScaledLR makes them differ"
    plan = make(base_bs=16, bs_now=100)
    assert plan.advice==make().advice and '100' in plan.advice and repr(plan).split('\n')[0].endswith('base_bs=16, bs_now=100)')
    assert [o for o in plan.plot().get_legend_handles_labels()[1] if 'today' in o]==["today's batch size, 100"]

@pytest.mark.parametrize('noise_scale,bs',
    [(0,1),(0.3,1),(1,1),(1.4,1),(1.5,2),(3,4),(45,32),(46,64),(90.5,64),(90.6,128),(1000,1024),(1e7,2**23),(-3.,1),(inf,None),(nan,None)])
def test_balanced_bs(noise_scale, bs): assert balanced_bs(noise_scale)==bs==make(noise_scale).balanced_bs

@pytest.mark.parametrize('noise_scale', np.geomspace(1.01, 1e5, 97))
def test_balanced_bs_is_within_2_42_of_both_minima(noise_scale):
    "S = S_min (1 + r/B) steps and E = E_min (1 + B/r) examples"
    b = balanced_bs(noise_scale)
    assert max(1+noise_scale/b, 1+b/noise_scale)<2.42

few = "Only 9 windows were measured, too few for advice: run longer, with num_it=200 say, or take smaller windows with n_batch."
leave = "Today's batch of 100 items is as large as the noise scale, within its interval: leave it."
later = "It is the noise scale of this part of the training and tends to rise: measure again later."
no_noise = "There is no noise in the gradient, as if all items were alike: any batch size takes the same steps, so use the smallest batch."
unknown = "The noise scale cannot be known from these data: run longer, with num_it=200 say."
at_least = "The noise scale is at least {} items; these data do not bound it from above, so run longer, with num_it=200 say."
rose = "The loss rose during the mock training, so the learning rate may be too high for this to mean much."
larger = ("A batch of 128 items takes 1.78 times the fewest steps and 2.28 times the fewest examples; "
          "today's 32 takes 4.12 times the fewest steps and 1.32 times the fewest examples. Where memory allows, set the loader to it; else ")
smaller = "Today's batch of 512 items is above this noise scale: a smaller one, about 128, learns the same from fewer examples."
small_set = "The training set of {} items is small beside that: within it the noise scale is {}, and a batch of 128 leaves {} steps per epoch."

advice = dict(
    few_windows=(dict(n_windows=9, trend=1, moved=True, n_passes=1.2), few),
    few_windows_of_few_items=(dict(n_windows=9, n_passes=9.), few.replace('say,', 'say, or measure on more items,')),
    as_large=(dict(), leave),
    as_large_at_lower_end=(dict(base_bs=80), leave.replace('100','80')),
    as_large_at_upper_end=(dict(base_bs=130), leave.replace('100','130')),
    larger=(dict(base_bs=32, micro_bs=32), larger+"add GradAccum(4)."),
    larger_with_more_accumulation=(dict(base_bs=32, micro_bs=16), larger+"replace the accumulation by GradAccum(8)."),
    near_below=(dict(noise_scale=85., ci=(82.,88.), base_bs=80, micro_bs=80), "Today's batch of 80 items is near the noise scale: leave it."),
    near_above=(dict(noise_scale=56., ci=(50.,59.), base_bs=60, micro_bs=60), "Today's batch of 60 items is near the noise scale: leave it."),
    smaller=(dict(base_bs=512), smaller),
    smaller_but_rising=(dict(base_bs=512, trend=1), f"{smaller} But it was rising, so leave the batch as it is and measure again. "
            "The noise scale rose during the mock training; this is the value of its last 30 windows, so measure again later in training."),
    all_of_a_batch=(dict(base_bs=4096, micro_bs=4096), smaller.replace('512','4096')),
    no_noise=(dict(noise_scale=0., ci=(0.,0.9), moved=True), no_noise),
    hardly_any_noise=(dict(noise_scale=1.9, ci=(1.8,2.), base_bs=16), "Today's batch of 16 items is above this noise scale: a smaller one, about 2, "
            "learns the same from fewer examples."),
    unbounded=(dict(noise_scale=300., ci=(60.,inf)), at_least.format(60)),
    unbounded_and_larger=(dict(noise_scale=300., ci=(140.,inf), moved=True),
            at_least.format(140)+" Up to there a batch larger than today's 100 saves steps at little cost in examples."),
    no_estimate=(dict(noise_scale=inf, ci=(60.,inf)), at_least.format(60)),
    unknown=(dict(noise_scale=inf, ci=(0.,inf), moved=True), unknown),
    unknown_and_rising=(dict(noise_scale=inf, ci=(0.,inf), trend=1, n_windows=22), f"{unknown} The noise scale rose during the mock training; "
            "this is the value of its last 22 windows, so measure again later in training."),
    loss_rose=(dict(noise_scale=inf, ci=(0.,inf), moved=True, loss_rose=True), f"{rose} {unknown}"),
    moved=(dict(moved=True), f"{leave} {later}"),
    rose=(dict(moved=True, trend=1, n_windows=15),
            f"{leave} The noise scale rose during the mock training; this is the value of its last 15 windows, so measure again later in training."),
    fell=(dict(trend=-1, n_windows=15),
            f"{leave} The noise scale fell during the mock training; this is the value of its last 15 windows, so measure again later in training."),
    passes=(dict(n_passes=13.37, n_train=500), f"{leave} The measurement went through the training set 13.4 times, so it speaks of these 500 items only."),
    passes_once_and_a_half=(dict(n_passes=1.5), leave),
    small_set=(dict(n_train=200), f"{leave} {small_set.format(200, 66.7, 1.56)}"),
    not_small_set=(dict(n_train=400), leave),
    several=(dict(base_bs=32, micro_bs=32, moved=True, n_passes=4., n_train=100), f"{larger}add GradAccum(4). {later}"
            f" The measurement went through the training set 4 times, so it speaks of these 100 items only. {small_set.format(100, 50, 0.781)}"))

@pytest.mark.parametrize('kwargs,words', advice.values(), ids=advice)
def test_advice(kwargs, words): assert make(**kwargs).advice==words

@pytest.mark.parametrize('value,shown',
    [(0,'0'),(0.00123,'0.00123'),(0.5,'0.5'),(1,'1'),(3.14159,'3.14'),(9.999,'10'),(99.96,'100'),(10,'10'),(100,'100'),(1234.5,'1230'),(1e6,'1000000'),
    (inf,'inf'),(nan,'nan')])
def test_numbers_of_three_digits(value, shown): assert f'noise_scale={shown} [' in repr(make(value))

def test_repr():
    head,*rest = repr(make(512.3, (430.1,640.7), base_bs=64, micro_bs=64)).split('\n')
    assert head=='BatchPlan(noise_scale=512 [430, 641], balanced_bs=512, base_bs=64)'
    assert ' '.join(o.strip() for o in rest)==make(512.3, (430.1,640.7), base_bs=64, micro_bs=64).advice
    assert repr(make(inf, (0.,inf))).startswith('BatchPlan(noise_scale=inf [0, inf], balanced_bs=None, base_bs=100)\n')
    assert repr(make(500., (90.,inf))).startswith('BatchPlan(noise_scale=500 [90, inf], balanced_bs=512 (not bounded), base_bs=100)\n')

def test_a_plan_is_a_record():
    "It cannot be altered, and compares by identity: it holds a data frame"
    plan = make()
    with pytest.raises(dataclasses.FrozenInstanceError): plan.noise_scale = 1.
    assert plan==plan and plan!=make() and len({plan,make()})==2

def test_columns(): assert list(NoiseScale().df.columns)==['step','n_items','n_elems','tr_sigma','g_sq','noise_scale','low','high']==list(make().df.columns)

# The plot

def _band(ax, i=0): return ax.collections[i].get_paths()[0].vertices
def _line(ax, label): return next(o for o in ax.lines if o.get_label().startswith(label))

def test_plot():
    df = rows(30, noise_scale=np.linspace(50,150,30), low=np.linspace(20,100,30), high=np.linspace(300,200,30))
    ax = make(df=df, base_bs=64).plot()
    assert (ax.get_yscale(),ax.get_xlabel(),ax.get_ylabel())==('log','items seen','gradient noise scale (items)')
    assert np.allclose(_line(ax, 'moving mean').get_xydata(), np.c_[np.arange(1,31)*40, df.noise_scale]) and list(_line(ax,
        "today's batch size, 64").get_ydata())==[64,64]
    assert {'moving mean (lags)','its interval',"today's batch size, 64",'the plan: 100 [80, 130] at 95%'}=={t.get_text() for t in ax.get_legend().get_texts()}
    bottom,top = ax.get_ylim()
    assert bottom<20 and top>300 and (_band(ax)[:,1].min(),_band(ax)[:,1].max())==(20,300)

def test_plot_of_the_last_stretch():
    "The plan's own value and its interval, whole, over the windows that it speaks of"
    ax = make(1000., (600.,2500.), n_windows=12).plot()
    x,y = _line(ax, 'the plan').get_data()
    assert list(x)==[19*40,30*40] and list(y)==[1000,1000]
    band = _band(ax, 1)
    assert (band[:,1].min(),band[:,1].max())==(600,2500) and (band[:,0].min(),band[:,0].max())==(760,1200)
    assert ax.get_ylim()[0]<80 and ax.get_ylim()[1]>2500

@pytest.mark.parametrize('noise_scale,ci', [(inf,(60.,inf)), (0.,(0.,1.))])
def test_plot_of_a_value_that_no_log_axis_shows(noise_scale, ci, tmp_path):
    ax = make(noise_scale, ci).plot()
    assert not any(o.get_label().startswith('the plan') for o in ax.lines)
    _drawn(ax, tmp_path)

def test_plot_on_given_axes():
    _,axs = plt.subplots(1,2)
    assert make().plot(axs[1]) is axs[1] and make().plot(ax=axs[0]) is axs[0]
    assert len(plt.get_fignums())==1 and all(len(a.lines)>=2 for a in axs)

holes = dict(nan=dict(noise_scale=nan, low=nan, high=nan), unbounded=dict(high=inf), no_estimate=dict(noise_scale=inf, low=30., high=inf),
    nothing_known=dict(noise_scale=inf, low=0., high=inf),
             no_noise=dict(noise_scale=0., low=0., high=0.))

def _drawn(ax, tmp_path):
    "The picture, and that every number on it is one"
    ax.figure.savefig(tmp_path/'plot.png')
    assert all(np.isfinite(v) and v>0 for v in ax.get_ylim()) and all(np.isfinite(line.get_ydata()).all() for line in ax.lines)
    return plt.imread(tmp_path/'plot.png')

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('hole', holes.values(), ids=holes)
def test_plot_with_rows_that_say_nothing(hole, tmp_path):
    df = rows()
    df.loc[:4,list(hole)] = list(hole.values())
    ax = make(df=df).plot()
    _drawn(ax, tmp_path)
    known = np.isfinite(df.noise_scale) & (df.noise_scale>0)
    assert _line(ax, 'moving mean').get_ydata().tolist()==[100.]*known.sum() and ax.get_ylim()==(40, 260) # A few low ends apart do not move it
    assert np.isfinite(_band(ax)).all()

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('hole', holes.values(), ids=holes)
def test_plot_of_nothing_else(hole, tmp_path):
    "Where no row says anything, today's batch size is still drawn"
    df = rows()
    df[list(hole)] = list(hole.values())
    ax = make(df=df).plot()
    _drawn(ax, tmp_path)
    assert list(_line(ax, "today's batch size, 100").get_ydata())==[100,100]

def test_plot_without_a_row(tmp_path): _drawn(make(nan, (0.,inf), n_windows=0, df=rows(0)).plot(), tmp_path)
