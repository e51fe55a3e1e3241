"A batch that grows along the training: the maths by closed forms and properties, and what a plan makes of it"
import doctest
import math
import pickle

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from fastai.callback.core import Callback
from fastai.optimizer import Adam
from fastai_bs import growth
from fastai_bs.advice import advice
from fastai_bs.cycle import cool_stretch
from fastai_bs.growth import Growth, SizeAlong, evenness, least_needed, most_saved, rising, steps_along, with_mean
from fastai_bs.plan_growth import check_grows, grows, parts, stretches
from fastai_bs.plan_text import details
from fastai_bs.schedule import BatchSchedule
from helpers import loaders, mlp, momentum_sgd, quiet_learner, regression
from plans import inf, nan, plan_of, rises

a,c,B0 = 3e-3,1e-5,64 # Seconds of a step, and for each item; today's batch size

def any_size(noise, a=a, c=c, share=None, sizes=None, epochs_now=1e6, **kwargs):
    "On a device whose step takes `a + c*bs`, with sizes so close together that they are as good as any, and epochs as short"
    noise = np.asarray(noise, dtype=float)
    share = np.full(len(noise), 1/len(noise)) if share is None else share
    sizes = np.geomspace(0.05, 5e3, 40_001) if sizes is None else sizes
    return Growth(tuple(share), tuple(noise), B0, tuple(sizes), tuple(a+c*np.array(sizes)), epochs_now=epochs_now, **kwargs)

def closed(noise, a=a, c=c):
    "Seconds at the best constant size and with `sqrt(a/c*N)` at every moment, for each step of today's; by sums over today's steps, and that constant size"
    w = 1/(1+noise/B0)/len(noise)
    S,E,R = w.sum(),(w*noise).sum(),(w*noise**0.5).sum()
    return ((a*S)**0.5+(c*E)**0.5)**2,a*S+c*E+2*(a*c)**0.5*R,(a/c*E/S)**0.5

# The formulas

def test_docstrings(): assert doctest.testmod(growth).failed==0

def test_today_is_today():
    "Steps of today's size come as far as today's training does, whatever the noise scale"
    assert steps_along([0.2,0.8], [10.,5000.], B0, B0)==pytest.approx([0.2,0.8])

@pytest.mark.parametrize('bs', [1, 64, 1000])
def test_a_constant_size_is_as_by_the_mean_of_the_noise_scale(bs):
    "`S_min*(1 + B_crit/B)` steps; by an integral over `ds = w dn`"
    noise = np.geomspace(20, 5000, 400)
    S,E,_ = least_needed(np.full(400, 1/400), noise, B0)
    assert steps_along(np.full(400, 1/400), noise, B0, bs).sum()==pytest.approx(S*(1+E/S/bs), rel=1e-12)

@pytest.mark.parametrize('noise', [np.geomspace(20, 5000, 30), np.geomspace(100, 400, 7), np.linspace(1, 3000, 50)], ids=['250-fold','4-fold','even'])
@pytest.mark.parametrize('device', [(3e-3,1e-5), (1e-4,1e-3)], ids=['steps','items'])
def test_saving_in_the_linear_model(noise, device):
    "As the closed form to 1e-6, with sizes 0.03% apart; the best constant size, and the bound"
    g = any_size(noise, *device)
    fixed,grown,bs = closed(noise, *device)
    assert g.fixed[0]==pytest.approx(fixed, rel=1e-7) and g.least_seconds==pytest.approx(grown, rel=1e-7)
    assert 1-g.least_seconds/g.fixed[0]==pytest.approx(1-grown/fixed, abs=1e-6)
    assert g.fixed[1]==pytest.approx(bs, rel=1e-3) and np.array(g.sizes)==pytest.approx((device[0]/device[1]*noise)**0.5, rel=1e-3)
    assert 0<g.saves<=1-g.least_seconds/g.fixed[0]+1e-9 and g.saves==pytest.approx(1-grown/fixed, abs=1e-5) # In a million epochs
    assert g.saves<g.bound

def test_the_bound_is_reached():
    "Where `a*S_min = c*E_min`"
    noise = np.geomspace(20, 5000, 30)
    S,E,_ = least_needed(np.full(30, 1/30), noise, B0)
    g = any_size(noise, a=E, c=S)
    assert 1-g.least_seconds/g.fixed[0]==pytest.approx(g.bound, rel=1e-5) and g.bound==most_saved(evenness(g.share, g.noise, B0))

def test_a_noise_scale_that_stays_saves_nothing():
    g = any_size([300.]*7)
    assert g.saves<1e-12 and 0==pytest.approx(g.bound, abs=1e-12) and evenness(g.share, g.noise, B0)==1 and len(g.size.sizes)==1
    assert evenness([0.5,0.5], [0.,0.], B0)==1

noises = st.lists(st.floats(1e-2, 1e6), min_size=1, max_size=8)

@st.composite
def devices(draw):
    "Sizes, and step times that never fall with the size nor rise per item"
    logs = np.cumsum(draw(st.lists(st.floats(0.1, 2), min_size=1, max_size=8)))
    sizes = np.round(8*np.exp(logs)).astype(int)
    rise = [draw(st.floats(0, 1)) for _ in sizes]
    return tuple(sizes.tolist()),tuple(np.exp(np.cumsum(np.diff(np.log(sizes), prepend=0)*rise)).tolist())

@settings(deadline=None, derandomize=True, max_examples=60)
@given(noises, devices(), st.sampled_from([0.3,1,2,5,40]), st.integers(0, 10**6))
def test_any_noise_scale_on_any_device(noise, device, epochs_now, seed):
    share = np.random.default_rng(seed).dirichlet(np.ones(len(noise)))
    noise,(sizes,times) = rising(noise, np.ones(len(noise))),device
    g = Growth(tuple(share), tuple(noise), B0, sizes, times, n_steps=1000*epochs_now, epochs_now=epochs_now)
    assert list(g.sizes)==sorted(g.sizes) and list(g.size.sizes)==sorted(set(g.size.sizes)) and set(g.size.sizes)<=set(g.sizes) # It only grows
    assert g.least_seconds<=g.seconds*(1+1e-9) and g.least_seconds<=g.fixed[0]*(1+1e-9) and 0<=g.saves<1 and 0<=g.bound<=0.5
    S,E,_ = least_needed(share, noise, B0)
    D = E/S
    ds = share/(1+noise/B0)/S
    over = ds@np.maximum(0, noise-D)/D # The least of `t + N*t/B` is concave in N: by Jensen no device saves more
    assert 1-g.least_seconds/g.fixed[0]<=over+1e-9
    assert g.ends[-1]==1==g.size.ends[-1] and list(g.ends)==sorted(g.ends)
    assert all(abs(o*g.n_epoch-round(o*g.n_epoch))<1e-9 for o in g.size.ends) # Where an epoch begins
    if B0 in sizes: assert g.epochs_with(SizeAlong((1.,), (B0,)))==pytest.approx(epochs_now) # Today's

@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.one_of(st.floats(1, 1e5), st.just(nan)), min_size=1, max_size=9).filter(lambda o: not np.isnan(o).all()))
def test_rising(noise):
    "The nearest that never falls, up to the lowest stretch as there; by brute force over where blocks begin"
    res,y = rising(noise, [1]*len(noise)),np.log(noise)
    assert (np.diff(res)>=-1e-9).all() and res.min()==pytest.approx(np.nanmin(noise)) and res.max()<=np.nanmax(noise)*(1+1e-9)
    low = int(np.nanargmin(y))
    assert res[:low+1]==pytest.approx(np.full(low+1, noise[low]))
    told = [i for i in range(low, len(y)) if not math.isnan(y[i])]
    for k,i in enumerate(told): # Min-max formula of isotonic regression
        by_hand = max(min(np.mean(y[told[s:e+1]]) for e in range(k, len(told))) for s in range(k+1))
        assert math.log(res[i])==pytest.approx(by_hand, abs=1e-9)
    for i in range(1, len(y)):
        if math.isnan(y[i]) and i>low: assert res[i]==res[i-1]

def test_weights_of_what_is_taken_together(): assert rising([10, 80, 20], [1, 3, 1])==pytest.approx([10, *[math.exp((3*math.log(80)+math.log(20))/4)]*2])

@settings(deadline=None, derandomize=True, max_examples=30)
@given(noises, st.floats(0.1, 1e6))
def test_with_mean(noise, mean):
    share = np.full(len(noise), 1/len(noise))
    res = with_mean(share, noise, B0, mean)
    S,E,_ = least_needed(share, res, B0)
    assert E/S==pytest.approx(mean, rel=1e-6) and res/res[0]==pytest.approx(np.array(noise)/noise[0])

def test_size_along():
    size = SizeAlong((1/3,2/3,1.), (64,128,512))
    assert [size(o) for o in (0, 0.33, 1/3, 0.5, 2/3, 1, 1.01)]==[64,64,128,128,512,512,512]
    assert pickle.loads(pickle.dumps(size))==size==eval(repr(size), {'SizeAlong': SizeAlong}) and str(size)=='64, 128 from 33% on, 512 from 67% on'
    assert type(size(0.5)) is int

def test_progress_counts_items():
    "A stretch that is trained with a larger batch is a larger part of the items"
    g = Growth((0.5,0.5), (64.,6400.), 64, (64,640), (1.,1.5), epochs_now=1e4)
    assert g.sizes==(64,640) or g.sizes==(640,640)
    g = Growth((0.5,0.5), (4.,6400.), 64, (64,640), (1.,2.), epochs_now=1e5)
    items = np.array([0.5,0.5*(6400+640)/(6400+64)])
    assert g.sizes==(64,640) and g.ends[0]==pytest.approx(items[0]/items.sum()) and g.size.ends[0]==pytest.approx(g.ends[0], abs=1e-4)
    assert g.epochs_with(g.size)/1e5==pytest.approx(items.sum(), rel=1e-4) and abs(g.n_epoch-1e5*items.sum())<4 # Rounded up twice

def test_changes_come_where_an_epoch_begins():
    "The nearest; of a single epoch none. In 4 epochs the change would come at 25%, and 4.2 would be needed, so it is 5"
    kwargs = dict(share=(0.3,0.7), noise=(1.,6400.), bs_now=64, candidates=(64,128), step_times=(1.,1.05))
    g = Growth(**kwargs, epochs_now=4)
    assert g.epochs_with(SizeAlong((0.25,1.), (64,128)))>4.1 and g.n_epoch==5 and g.size==SizeAlong((0.2,1.), (64,128)) and g.seconds>g.least_seconds
    assert Growth(**kwargs, epochs_now=0.7).size==SizeAlong((1.,), (128,))
    assert Growth(**kwargs, epochs_now=0.7).saves==0

# Of a plan

def plan(by=1000., **kwargs): return plan_of(df=rises(by, **kwargs.pop('df', {})), **kwargs)

def test_stretches():
    "Four up to the cool stretch, two of it, and what comes after; each a part of the training"
    assert len(parts)==8 and parts[4]==cool_stretch[0] and parts[6]==cool_stretch[1] and np.diff(parts).sum()==1
    df = rises(100.)
    read = stretches(df)
    assert sum(o.n_windows for o in read)==len(df)
    for o,b,e in zip(read, parts, parts[1:]):
        m = df[(df.pct>=b) & (df.pct<e)]
        assert o.n_windows==len(m)>2 and o.noise_scale==pytest.approx(m.tr_sigma.sum()/m.g_sq.sum())

def test_growth_of_a_plan():
    "Its mean noise scale is the plan's, its candidates are the plan's, and the best constant size is the fastest of the plan's table"
    p = plan()
    g = p.growth
    S,E,_ = least_needed(g.share, g.noise, p.bs_now)
    assert E/S==pytest.approx(p.noise_scale) and g.share==tuple(np.diff(parts)) and g.bs_now==64 and g.epochs_now==5 and p.growth is g
    assert g.candidates==tuple(p.table.bs) and g.step_times==tuple(p.table.step_time)
    best = p.table.iloc[p.table.time.argmin()]
    assert g.fixed[1]==best.bs and g.fixed[0]==pytest.approx(best.time*p.seconds_of(5, 64))
    assert 0.05<g.saves<g.bound and g.sizes[0]<g.sizes[-1] and g.told==(True,)*7
    read = np.array([o.noise_scale for o in stretches(p.df)])
    assert np.array(g.noise)/g.noise[0]==pytest.approx(read/read[0])

def test_before_the_lowest_stretch():
    "In the warm-up as there, however high it reads"
    high = plan(df=dict(g_sq=lambda o: o.g_sq.where(o.pct>0.2, 1e-4)))
    assert high.growth.noise[0]==high.growth.noise[1]<high.growth.noise[2]

def test_what_could_not_be_told():
    "By the lower end of its interval, else as the stretch before; said by `told`"
    rng = np.random.default_rng(0)
    g = plan(df=dict(g_sq=lambda o: o.g_sq.where(o.pct<cool_stretch[1], -o.g_sq*(1+0.1*rng.normal(size=len(o)))))).growth
    assert g.told==(True,)*6+(False,) and g.noise[-1]>=g.noise[-2]
    p = plan()
    few = p.df[(p.df.pct<cool_stretch[1]) | (p.df.pct>0.995)]
    g = plan_of(df=few).growth
    assert stretches(few)[-1].n_windows==1 and g.told[-1] is False and g.noise[-1]==g.noise[-2]

unknown = {
    'fixed weights': (dict(cool=None, at_peak=None, at_end=None, moved=False), r'this plan is for fixed weights: .* by learn\.bs_find'),
    'no windows along a cycle': (dict(df=rises().drop(columns='pct')), 'this plan is for fixed weights'),
    'no upper end, no estimate': (dict(noise_scale=inf, ci=(209.,inf)), 'this plan has none'),
    'unknown': (dict(noise_scale=inf, ci=(0.,inf)), 'this plan has none'),
    'few windows': (dict(n_windows=4), 'this plan has none'), 'no noise': (dict(noise_scale=0., ci=(0.,0.2)), 'or one of 0: plan.advice says'),
    'pairs': (dict(pairs=True), 'this plan has none'), 'too high': (dict(loss_rose=True), 'this plan has none'),
    'no step times': (dict(times=()), "today's could not be timed: give sizes of your own to BatchSchedule"),
    'a sum': (dict(sums=True, adam=False), 'make the loss a mean'),
    'a short cycle': (dict(df=rises(n=4)), '0 of 7 stretches of this mock cycle could be told, .* by a larger num_it')}

@pytest.mark.parametrize('kwargs,words', unknown.values(), ids=unknown)
def test_what_cannot_be_known(kwargs, words):
    "Is refused with the reason, and nothing is said of it"
    p = plan_of(**{**dict(df=rises(1000.)), **kwargs})
    assert p.growth is None and not grows(p) and 'that grow' not in p.details()
    with pytest.raises(ValueError, match=words): check_grows(p)
    with pytest.raises(ValueError, match=words): p.schedule()

def test_a_sum_with_adam_grows_all_the_same(): assert plan(sums=True).growth is not None

def test_schedule():
    "Sizes of the growth; the plan's rule from the size that the rate goes with, and none for Adam; micro-batches that ran here"
    s = plan().schedule()
    assert isinstance(s, BatchSchedule) and (s.sizes,s.rule,s.max_micro_bs,s.base_bs)==(plan().growth.size,None,256,None)
    p = plan(adam=False, base_lr=0.1, base_bs=32)
    assert p.schedule().rule(2.)==p.rule(2.)!=1 and p.schedule().base_bs==32
    assert p.schedule() is not p.schedule() and str(p.growth.size) in repr(p.schedule())

class Seen(Callback):
    "Items of each batch, by epoch"
    order = 100
    def before_fit(self): self.items = {}
    def before_batch(self):
        if self.training: self.items.setdefault(self.epoch, set()).add((len(self.xb[0]),self.learn.grad_accum.n_acc))

@pytest.mark.parametrize('adam', [True,False])
def test_a_fit_with_it(adam):
    "Each epoch in micro-batches of the size that the growth has for it"
    p = plan(adam=adam, n_train=4096, noise_scale=500., ci=(430.,640.))
    g = p.growth
    learn = quiet_learner(loaders(regression(4096), 64, shuffle=True, drop_last=True), mlp(), opt_func=Adam if adam else momentum_sgd, cbs=Seen())
    learn.fit_one_cycle(g.n_epoch, 1e-3, cbs=p.schedule())
    assert learn.seen.items=={e: {(min(256, g.size(e/g.n_epoch)), max(1, g.size(e/g.n_epoch)//256))} for e in range(g.n_epoch)}
    assert len(g.size.sizes)>1 and learn.dls.train.bs==64

def texts(p, kind, f): return [o.text for o in f(p) if o.kind==kind and ('grows along' in o.text or 'grow along' in o.text)]

@pytest.mark.parametrize('by,spread,says', [(1000., 0.01, True), (1000., 0.2, False), (3., 0.01, False)], ids=['much','noisy clock','little'])
def test_what_is_said(by, spread, says):
    "From 5% on what it saves; below, or within the timing's error, that a fixed size will do"
    p = plan(by, spread=spread)
    g,head = p.growth,list(advice(p))[0].text
    assert grows(p)==says and (g.saves>=0.05)==(by>3)
    assert texts(p, 'why', advice)==([f"A batch that grows along the training saves about {100*g.saves:.2g}% over the best fixed size (at most "
                                      f"{100*g.bound:.2g}%): plan.schedule()."] if says else [])
    how = f"Sizes that grow along the training: {g.size}, by learn.fit_one_cycle({g.n_epoch}, 0.01, cbs=plan.schedule())."
    saves = 'less than 1%' if by==3 else f'about {100*g.saves:.2g}%'
    assert texts(p, 'detail', details)==[how if says else f"A batch that grows along the training would save {saves}, so a fixed size will do."]
    assert head==list(advice(plan_of(spread=spread)))[0].text # As without

def test_nothing_is_said_of_it_to_who_has_chosen():
    p = plan().at(512)
    assert p.growth is not None and not texts(p, 'why', advice) and not texts(p, 'detail', details)

def test_plot(tmp_path):
    "Sizes as stairs, a point for each stretch, hollow where it was not measured"
    g = plan(1e5, df=dict(g_sq=lambda o: o.g_sq.where(o.pct<0.93, -o.g_sq))).growth
    ax = g.plot()
    ax.figure.savefig(tmp_path/'growth.png', dpi=40)
    line = {o.get_label(): o for o in ax.lines}
    x,y = line['batch that grows'].get_data()
    assert list(x)==np.repeat([0,*g.size.ends], 2)[1:-1].tolist() and list(y)==np.repeat(g.size.sizes, 2).tolist()
    told,hollow = line['noise scale'].get_ydata(),line['noise scale, not measured there'].get_ydata()
    assert [*told,*hollow]==list(g.noise) and len(hollow)==2
    assert set(line[f'best fixed size, {g.fixed[1]}'].get_ydata())=={g.fixed[1]} and set(line["today's, 64"].get_ydata())=={64}
    assert ax.get_yscale()=='log' and len(ax.get_yticks())<=12
    _,own = plt.subplots()
    assert g.plot(own) is own

def test_repr_html():
    "The sentence, and a row for each size"
    g = plan().growth
    html = g._repr_html_()
    assert html.startswith(f'<p>{g!r}</p>') and html.count('<tr>')==len(g.size.sizes) and all(f'<td>{bs}</td>' in html for bs in g.size.sizes)
