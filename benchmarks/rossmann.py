"""Rossmann store sales, after lesson 6 of fast.ai's course of 2019: the noise scale, the plan, and batch 512 against 64.

    python benchmarks/rossmann.py --full --parts noise noise_windows whole equal_time --data FOLDER     # FOLDER/rossmann/*.csv.gz; an hour

The joined table is kept in results/cache. An article on a batch size finder finds a noise scale near 500 here; what it says of whole trainings is tried in
`rossmann_cycles.py`."""
import time
from datetime import datetime
from functools import partial
from unittest.mock import patch

import numpy as np
import pandas as pd
from fastai.data.block import RegressionBlock
from fastai.metrics import exp_rmspe
from fastai.tabular.core import Categorify, FillMissing, Normalize, TabularPandas
from fastai.tabular.data import TabularDataLoaders # noqa: F401 (TabularPandas.dataloaders makes one)
from fastai.tabular.learner import tabular_learner
from fastai.tabular.model import tabular_config
from fastai.torch_core import set_seed
from fastai_bs.all import GradAccum, NoiseScale
from fastai_bs.noise.estimator import pooled
from fastai_bs.finder.cycle import cool_stretch
from fastai_bs.noise import estimator
from fastai_bs.finder.formulas import Duration

from frame import arguments, cache, folder, main, md_table, measured

lr,bs_now,bs_large = 1e-3,64,512
n_valid = 41_395 # Latest rows: as many days as the competition's test set, by the lesson's cut
events = ['SchoolHoliday','StateHoliday','Promo']
cat_names = ['Store', 'DayOfWeek', 'Year', 'Month', 'Day', 'StateHoliday', 'CompetitionMonthsOpen', 'Promo2Weeks', 'StoreType', 'Assortment',
    'PromoInterval', 'CompetitionOpenSinceYear', 'Promo2SinceYear', 'State', 'Week', 'Events', 'Promo_fw', 'Promo_bw', 'StateHoliday_fw', 'StateHoliday_bw',
    'SchoolHoliday_fw', 'SchoolHoliday_bw']
weather_names = ['Max_TemperatureC', 'Mean_TemperatureC', 'Min_TemperatureC', 'Max_Humidity', 'Mean_Humidity', 'Min_Humidity', 'Max_Wind_SpeedKm_h',
    'Mean_Wind_SpeedKm_h', 'CloudCover']
cont_names = ['CompetitionDistance', *weather_names, 'trend', 'trend_DE', 'AfterStateHoliday', 'BeforeStateHoliday', 'Promo', 'SchoolHoliday']

# The table

def week_of_year(d): return d.dt.isocalendar().week.astype(int)

def elapsed(df):
    "Days since and to the event, and the events among the 7 rows before and after, for each store and date; as in the lesson, 0 where there is none"
    df = df.sort_values(['Store','Date'], ignore_index=True)
    res = df[['Store','Date']].copy()
    for o in events:
        days = df.Date.where(df[o]>0).groupby(df.Store)
        for nm,near in (('After',days.ffill()),('Before',days.bfill())): res[nm+o] = (df.Date-near).dt.days.fillna(0).astype(int)
        for nm,d in (('bw',df),('fw',df[::-1])):
            res[f'{o}_{nm}'] = d.groupby('Store')[o].rolling(7, min_periods=1).sum().droplevel(0).astype(int) # Its index puts the rows back in order
    return res

def joined(folder):
    "Train, store, state, weather and trend, a row per store and day that sold something, the latest first"
    read = lambda nm,**kw: pd.read_csv(folder/f'{nm}.csv.gz', **kw)
    days = [read(o, dtype={'StateHoliday': str}, parse_dates=['Date']) for o in ('train','test')]
    for o in days: o['StateHoliday'] = (o.StateHoliday!='0').astype(int)
    df = days[0].merge(elapsed(pd.concat([o[['Store','Date',*events]] for o in days])), 'left', ['Store','Date'])
    df['Year'],df['Month'],df['Day'],df['Week'] = df.Date.dt.year,df.Date.dt.month,df.Date.dt.day,week_of_year(df.Date)

    store = read('store').merge(read('store_states'), 'left', 'Store')
    for o,v in (('CompetitionOpenSinceYear',1900),('CompetitionOpenSinceMonth',1),('Promo2SinceYear',1900),('Promo2SinceWeek',1)):
        store[o] = store[o].fillna(v).astype(int)
    store['opened'] = pd.to_datetime(dict(year=store.CompetitionOpenSinceYear, month=store.CompetitionOpenSinceMonth, day=15))
    store['promo2'] = [datetime.fromisocalendar(y, w, 1) for y,w in zip(store.Promo2SinceYear, store.Promo2SinceWeek)]
    df = df.merge(store, 'left', 'Store')
    for o,since,year,unit,most in (('CompetitionMonthsOpen','opened','CompetitionOpenSinceYear',30,24), ('Promo2Weeks','promo2','Promo2SinceYear',7,25)):
        df[o] = ((df.Date-df[since]).dt.days.clip(lower=0).where(df[year]>=1990, 0)//unit).clip(upper=most)

    trend = read('googletrend')
    start = pd.to_datetime(trend.week.str[:10])
    trend = trend.assign(State=trend.file.str[12:].replace('NI', 'HB,NI'), Year=start.dt.year, Week=week_of_year(start))
    by = ['State','Year','Week']
    df = df.merge(trend[[*by,'trend']], 'left', by).merge(trend.loc[trend.State=='', [*by[1:],'trend']], 'left', by[1:], suffixes=('','_DE'))
    states = pd.read_csv(folder/'state_names.csv').set_index('StateName').State
    weather = read('weather', parse_dates=['Date'])
    weather['State'] = weather.file.map(states)
    df = df.merge(weather[['State','Date','Events',*weather_names]], 'left', ['State','Date'])
    assert len(df)==len(days[0]) and df[['trend','trend_DE','Mean_TemperatureC','State']].notna().all(axis=None), "a join went wrong"
    return df.loc[df.Sales!=0, [*cat_names, *cont_names, 'Sales']].reset_index(drop=True)

def cached(data):
    "The joined table, made once"
    path = cache/'rossmann.pkl'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        joined(folder(data, 'rossmann')).to_pickle(path)
    return pd.read_pickle(path)

def table(data, n_rows):
    "`TabularPandas` of the log sales, and the largest log sales with a fifth more"
    df = cached(data)
    df = df.assign(Sales=np.log(df.Sales))[:n_valid+n_rows if n_rows else None]
    splits = list(range(n_valid, len(df))),list(range(n_valid))
    to = TabularPandas(df, [FillMissing, Categorify, Normalize], cat_names, cont_names, 'Sales', y_block=RegressionBlock(), splits=splits)
    return to, df.Sales.max()+np.log(1.2)

def learner(to, top, bs, **kwargs):
    config = tabular_config(ps=[0.001,0.01], embed_p=0.04, y_range=(0,top))
    return tabular_learner(to.dataloaders(bs=bs, val_bs=4096), [1000,500], config=config, wd=0.2, metrics=exp_rmspe, **kwargs)

# The parts

def fit(learn, n_epoch, rate, how='fit_one_cycle', **kwargs):
    "The losses and the metric at the end, and processor minutes"
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): getattr(learn, how)(n_epoch, rate, **kwargs)
    train_loss,valid_loss,metric = learn.recorder.values[-1][:3]
    return dict(train_loss=train_loss, valid_loss=valid_loss, exp_rmspe=metric, minutes=(time.process_time()-start)/60)

readings = 'noise_scale','low','high'

def reading(df):
    p = pooled(df)
    return dict(zip(readings, (p.noise_scale,*p.interval())))

watched = dict(noise_windows=(bs_now,20,'fit'), noise=(bs_now//2,2,'fit'), noise_cycle=(bs_now//2,2,'fit_one_cycle')) # Micro-batch, n_acc and how to train
n_pieces = 10

def watch(part, args, t, to, top):
    "Noise scale along an epoch, a row per piece of it"
    micro_bs,n_acc,how = watched[part]
    for seed in args.seeds or range(1 if args.quick else 2):
        if t.has(part=part, seed=seed): continue
        set_seed(seed)
        noise = NoiseScale(every=1)
        end = fit(learner(to, top, micro_bs, cbs=[GradAccum(n_acc), noise]), 1, lr, how)
        df = noise.df
        t.add_all([dict(part=part, seed=seed, stretch=f'{i/n_pieces:.1f} to {(i+1)/n_pieces:.1f}', **reading(df[n_pieces*(df.step-1)//noise.n_steps==i]),
                        n_steps=noise.n_steps, rows=len(to.train), valid_loss=end['valid_loss'], exp_rmspe=end['exp_rmspe']) for i in range(n_pieces)])

def whole(args, t_plans, t_runs, to, top):
    "Plans for whole trainings, and the one of an epoch carried out beside today's"
    for n_epoch in (1,5,15):
        if t_plans.has(epochs=n_epoch): continue
        set_seed(0)
        learn = learner(to, top, bs_now)
        with learn.no_bar(), patch('time.perf_counter', time.process_time): # Other work may run
            p = learn.bs_find(lr, n_epoch=n_epoch, num_it=660, show_plot=False)
        at_peak,at_end = (estimator.along(p.df[o]) for o in (p.df.rate>0.9,p.df.pct>=cool_stretch[1]))
        found = {f'{nm}{k}': v for nm,o in (('',p),('peak_',at_peak),('end_',at_end)) for k,v in zip(readings, (o.noise_scale,*o.ci))}
        t_plans.add(epochs=n_epoch, **found, bs=p.bs, n_epoch=p.n_epoch, planned=p.duration.planned, today=p.duration.today)
    p = t_plans.df.iloc[0]
    more = [round(p.today/p.planned*p.n_epoch)] if p.planned<0.75*p.today else []
    for seed in args.seeds or [0]:
        for bs,n_epoch in [(bs_now,1),*((int(p.bs),int(o)) for o in (p.n_epoch,*more))]:
            if t_runs.has(part='whole', bs=bs, epochs=n_epoch, seed=seed): continue
            set_seed(seed)
            t_runs.add(part='whole', bs=bs, epochs=n_epoch, lr=lr, seed=seed, **fit(learner(to, top, bs), n_epoch, lr))

def equal_time(args, t, to, top):
    "More epochs with a larger batch, in about the same processor time"
    for bs,n_epoch,rate in ((bs_now,1,lr),(256,2,2*lr),(bs_large,3,lr),(bs_large,3,lr*8**0.5)):
        if t.has(part='equal_time', bs=bs, lr=rate): continue
        set_seed(0)
        learn = learner(to, top, bs)
        set_seed(1)
        t.add(part='equal_time', bs=bs, epochs=n_epoch, lr=rate, seed=0, **fit(learn, n_epoch, rate))

def run(args, t_noise, t_rates, t_plans, t_runs):
    data = table(args.data, args.rows or (20_000 if args.quick else None))
    jobs = {o: partial(watch, o, args, t_noise) for o in watched} | dict(
        whole=partial(whole, args, t_plans, t_runs), equal_time=partial(equal_time, args, t_runs))
    for o in args.parts: jobs[o](*data)

# The page

def cell(*o): return '{:.0f} [{:.0f}, {:.0f}]'.format(*o)

def along(title, df):
    "The section of a part that watches the noise scale along an epoch"
    if not len(df): return []
    micro_bs,n_acc,how = watched[df.part.iloc[0]]
    rows = [[seed,*map(cell, o.noise_scale, o.low, o.high),*(f'{v:.4f}' for v in o.iloc[0][['valid_loss','exp_rmspe']] if v==v)]
            for seed,o in df.groupby('seed')]
    heads = ['seed',*df.stretch.unique(),'valid loss','exp_rmspe'][:len(rows[0])]
    return [f'## {title}', f"In items, with 95% intervals, along one epoch of {df.rows.iloc[0]:,} rows with `{how}(1, {lr})`: {df.n_steps.iloc[0]} steps of "
            f"{micro_bs*n_acc}, measured by `NoiseScale` with `GradAccum({n_acc})` over micro-batches of {micro_bs}; each entry pools a tenth of the epoch. "
            "BatchNorm's noise is part of it.", md_table(heads, rows), measured(df)]

def results(o): return f'{o.train_loss:.4f}',f'{o.valid_loss:.4f}',f'{o.exp_rmspe:.4f}',f'{o.minutes:.1f}'
heads = 'train loss','valid loss','exp_rmspe','processor minutes'

def page(noise, rates, plans, runs):
    text = [f'# {__doc__.splitlines()[0]}']
    for part,title in (('noise_windows','steps of 1280'),('noise','steps of 64'),('noise_cycle','one cycle')):
        text += along(f'Noise scale, {title}', noise[noise.part==part])
    if len(rates):
        rows = [(o.weights,o.lr,cell(o.noise_scale, o.low, o.high),o.balanced_bs,o.bs) for o in rates.itertuples()]
        text += ['## Learning rates', "`bs_find` as it was before it planned for whole trainings, with steps at a constant rate between its windows. "
            "`learn.bs_find` at the rate of the article and at lower ones, to which a one-cycle falls, on new weights and after `fit_one_cycle(1, 0.001)` with "
            "batches of 64. At a high rate the weights bounce about, and the gradient that pulls them back is large beside its noise.",
            md_table(['weights','learning rate','noise scale','balanced_bs','plan.bs'], rows), measured(rates)]
    same,done = (runs[runs.part==o] for o in ('equal_time','whole'))
    text += ['## Equal time', "One run each of `fit_one_cycle(epochs, rate)`, validation included, from the same weights; the last two at the article's rate, "
        "and at the one by the square root.",
        md_table(['batch','epochs','learning rate',*heads], [(o.bs,o.epochs,f'{o.lr:.3g}',*results(o)) for o in same.itertuples()]), measured(same)]
    planned = [(f'{o.epochs} epochs of {bs_now}',cell(o.noise_scale, o.low, o.high),cell(o.peak_noise_scale, o.peak_low, o.peak_high),
                cell(o.end_noise_scale, o.end_low, o.end_high),o.bs,o.n_epoch,Duration(o.planned, o.today)) for o in plans.itertuples()]
    text += ['## The plan for a whole training', f"`learn.bs_find({lr}, n_epoch=...)` on new weights at today's batch of {bs_now}:",
        md_table(['planned for','noise scale','near the peak of the rate','at the end','plan.bs','plan.n_epoch','plan.duration'], planned),
        f"`fit_one_cycle(epochs, {lr})`, validation included: an epoch of {bs_now}, what the plan says instead of it, and as many epochs as take about as "
        "long:",
        md_table(['batch','epochs','seed',*heads], [(o.bs,o.epochs,o.seed,*results(o)) for o in done.itertuples()]), measured(done)]
    return '\n\n'.join(text)

names = [f'rossmann_{o}' for o in ('noise','rates','plans','runs')]
if __name__=='__main__':
    parser = arguments(__doc__, parts=(*watched,'whole','equal_time'))
    parser.add_argument('--rows', type=int, help="latest rows to train on; all by default")
    main(__doc__, names, run, page, parser=parser)
