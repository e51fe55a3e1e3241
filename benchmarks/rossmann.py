"""Rossmann store sales, after lesson 6 of fast.ai's course of 2019: the noise scale, the plan, and batch 512 against 64.

    python benchmarks/rossmann.py noise noise_windows noise_cycle --data FOLDER --cache FOLDER --seeds 2     # FOLDER/rossmann/*.csv.gz
    python benchmarks/rossmann.py whole equal_time --data FOLDER --cache FOLDER     # The joined table is kept in the cache
    python benchmarks/rossmann.py train --data FOLDER --cache FOLDER     # Hours; goes on after the last cycle that is in rossmann.csv
    python benchmarks/rossmann.py train --data FOLDER --cache FOLDER --rows 100000 --cycles 1     # Shorter, and said to be

Each part writes its own section of rossmann.md. An article on a batch size finder finds a noise scale near 500 here, and with batch 512 a quarter of
the time and better losses and metric after three cycles of five epochs."""
import argparse, platform, re, time
from datetime import date, datetime
from pathlib import Path
from unittest.mock import patch

import fastai
import numpy as np
import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.data.block import RegressionBlock
from fastai.metrics import exp_rmspe
from fastai.tabular.core import Categorify, FillMissing, Normalize, TabularPandas
from fastai.tabular.data import TabularDataLoaders # noqa: F401 (TabularPandas.dataloaders makes one)
from fastai.tabular.learner import tabular_learner
from fastai.tabular.model import tabular_config
from fastai.torch_core import set_seed
from fastai_bs import __version__
from fastai_bs.all import GradAccum, NoiseScale
from fastai_bs.estimator import pooled

here = Path(__file__).parent
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

def cached(path, make):
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make().to_pickle(path)
    return pd.read_pickle(path)

def table(args):
    "`TabularPandas` of the log sales, and the largest log sales with a fifth more"
    df = cached(args.cache/'rossmann.pkl', lambda: joined(args.data/'rossmann'))
    df = df.assign(Sales=np.log(df.Sales))[:n_valid+args.rows if args.rows else None]
    splits = list(range(n_valid, len(df))),list(range(n_valid))
    to = TabularPandas(df, [FillMissing, Categorify, Normalize], cat_names, cont_names, 'Sales', y_block=RegressionBlock(), splits=splits)
    return to, df.Sales.max()+np.log(1.2)

def learner(to, top, bs, **kwargs):
    config = tabular_config(ps=[0.001,0.01], embed_p=0.04, y_range=(0,top))
    return tabular_learner(to.dataloaders(bs=bs, val_bs=4096), [1000,500], config=config, wd=0.2, metrics=exp_rmspe, **kwargs)

# The parts

def section(out, title, text, about):
    "Put the section into rossmann.md, in the place of an earlier one"
    path = out/'rossmann.md'
    old = path.read_text() if path.exists() else f'# {__doc__.splitlines()[0]}\n'
    old = re.sub(rf'\n## {title}\n.*?(?=\n## |\Z)', '', old, flags=re.S)
    path.write_text(f'{old}\n## {title}\n\n{text}\n\n{about}\n')
    print(text)

def cell(ns, ci): return f'{ns:.0f} [{ci[0]:.0f}, {ci[1]:.0f}]'

def reading(df):
    p = pooled(df.tr_sigma, df.g_sq, df.n_elems)
    return cell(p.noise_scale, p.interval())

def watched(args, to, top, title, micro_bs, n_acc, fit, how, n_pieces=10):
    "Noise scale along an epoch, a row per seed"
    parts = [f'{i/n_pieces:.1f} to {(i+1)/n_pieces:.1f}' for i in range(n_pieces)]
    rows = [f"| seed | {' | '.join(parts)} | valid loss | exp_rmspe |", '|---'*(n_pieces+3)+'|']
    for seed in range(args.seeds):
        set_seed(seed)
        watch = NoiseScale()
        learn = learner(to, top, micro_bs, cbs=[GradAccum(n_acc), watch])
        with learn.no_bar(), learn.no_logging(): fit(learn)
        df,(_,valid_loss,metric) = watch.df,learn.recorder.values[-1][:3]
        pieces = [df[n_pieces*(df.step-1)//watch.n_steps==i] for i in range(n_pieces)]
        rows.append(f"| {seed} | {' | '.join(reading(o) for o in pieces)} | {valid_loss:.4f} | {metric:.4f} |")
        print(rows[-1], flush=True)
    return title, (f"In items, with 95% intervals, along one epoch of {len(to.train):,} rows with {how}: {watch.n_steps} steps of {micro_bs*n_acc}, measured "
        f"by `NoiseScale` with `GradAccum({n_acc})` over micro-batches of {micro_bs}; each entry pools a tenth of the epoch. BatchNorm's noise is part of it."
        "\n\n"+'\n'.join(rows))

def noise(args, to, top):
    return watched(args, to, top, "Noise scale, steps of 64", bs_now//2, 2, lambda o: o.fit(1, lr), f'`fit(1, {lr})`')
def noise_windows(args, to, top):
    return watched(args, to, top, "Noise scale, steps of 1280", bs_now, 20, lambda o: o.fit(1, lr), f'`fit(1, {lr})`')
def noise_cycle(args, to, top):
    return watched(args, to, top, "Noise scale, one cycle", bs_now//2, 2, lambda o: o.fit_one_cycle(1, lr), f'`fit_one_cycle(1, {lr})`')

def whole(args, to, top):
    "Plans for whole trainings, and the one of an epoch carried out beside today's"
    lines,plans = ['| planned for | noise scale | near the peak of the rate | at the end | plan.bs | plan.n_epoch | plan.duration |', '|---'*7+'|'],{}
    for n_epoch in (1,5,15):
        set_seed(0)
        learn = learner(to, top, bs_now)
        with learn.no_bar(), patch('time.perf_counter', time.process_time): # Other work may run on the machine
            p = plans[n_epoch] = learn.bs_find(lr, n_epoch=n_epoch, show_plot=False)
        lines.append(f'| {n_epoch} epochs of {bs_now} | {cell(p.noise_scale, p.ci)} | {cell(p.at_peak.noise_scale, p.at_peak.ci)} | '
                     f'{cell(p.at_end.noise_scale, p.at_end.ci)} | {p.bs} | {p.n_epoch} | {p.duration} |')
        print(lines[-1], flush=True)
    runs = ['| batch | epochs | seed | train loss | valid loss | exp_rmspe | processor minutes |', '|---'*7+'|']
    p = plans[1]
    arms = [(bs_now,1),(p.bs,p.n_epoch)]+([(p.bs,round(1/p.duration.planned*p.duration.today*p.n_epoch))] if p.duration.planned<0.75*p.duration.today else [])
    for seed in range(args.seeds):
        for bs,n_epoch in arms:
            set_seed(seed)
            learn = learner(to, top, bs)
            start = time.process_time()
            with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n_epoch, lr)
            train_loss,valid_loss,metric = learn.recorder.values[-1][:3]
            runs.append(f"| {bs} | {n_epoch} | {seed} | {train_loss:.4f} | {valid_loss:.4f} | {metric:.4f} | {(time.process_time()-start)/60:.1f} |")
            print(runs[-1], flush=True)
    return 'The plan for a whole training', (f"`learn.bs_find({lr}, n_epoch=...)` on new weights at today's batch of {bs_now}:\n\n"+'\n'.join(lines)+
        f"\n\n`fit_one_cycle(epochs, {lr})`, validation included: an epoch of {bs_now}, what the plan says instead of it, and as many epochs as take about "
        "as long:\n\n"+'\n'.join(runs))

def equal_time(args, to, top):
    "More epochs with a larger batch, in about the same processor time"
    rows = ['| batch | epochs | learning rate | train loss | valid loss | exp_rmspe | processor minutes |', '|---'*7+'|']
    for bs,n_epoch,rate in ((bs_now,1,lr),(256,2,2*lr),(bs_large,3,lr),(bs_large,3,lr*8**0.5)):
        set_seed(0)
        learn = learner(to, top, bs)
        set_seed(1)
        start = time.process_time()
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n_epoch, rate)
        train_loss,valid_loss,metric = learn.recorder.values[-1][:3]
        rows.append(f"| {bs} | {n_epoch} | {rate:.3g} | {train_loss:.4f} | {valid_loss:.4f} | {metric:.4f} | {(time.process_time()-start)/60:.1f} |")
        print(rows[-1], flush=True)
    return 'Equal time', ("One run each of `fit_one_cycle(epochs, rate)`, validation included, from the same weights; the last two at the article's rate, and "
        "at the one by the square root.\n\n"+'\n'.join(rows))

class Rows(Callback):
    "A row per epoch; the time is that of training and validation"
    def before_fit(self): self.rows = []
    def before_epoch(self): self.start = time.time()
    def after_epoch(self):
        train_loss,valid_loss,metric = self.learn.recorder.log[1:4]
        self.rows.append(dict(epoch=self.epoch+1, train_loss=train_loss, valid_loss=valid_loss, exp_rmspe=metric, seconds=time.time()-self.start))

def train(args, to, top):
    path,given = args.out/'rossmann.csv',dict(rows=len(to.train), epochs=args.epochs, threads=torch.get_num_threads())
    key = ['bs','seed','cycle',*given]
    for seed in range(args.seeds):
        learns = {}
        for bs in (bs_large,bs_now):
            set_seed(seed) # The same weights at first
            learns[bs] = learner(to, top, bs, path=args.cache)
        for cycle in range(1, args.cycles+1): # In turn, so that both see the same of whatever else the machine does
            for bs,learn in learns.items():
                this = dict(bs=bs, seed=seed, cycle=cycle, **given)
                done = pd.read_csv(path)[key].drop_duplicates().to_dict('records') if path.exists() else []
                save = '_'.join(map(str, this.values()))
                if this in done: learn.load(save); continue
                set_seed(100*seed+cycle)
                note = Rows()
                with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(args.epochs, lr, cbs=note)
                learn.save(save)
                df = pd.DataFrame(note.rows)
                for i,(k,v) in enumerate(this.items()): df.insert(i, k, v)
                df.to_csv(path, mode='a', header=not path.exists(), index=False, float_format='%.6g')
                print(df.iloc[-1].to_dict(), flush=True)
    df = pd.read_csv(path)
    df = df[(df[list(given)]==pd.Series(given)).all(axis=1)]
    ends = df.groupby(['seed','bs','cycle']).agg(train_loss=('train_loss','last'), valid_loss=('valid_loss','last'), exp_rmspe=('exp_rmspe','last'),
                                                 best=('exp_rmspe','min'), seconds=('seconds','sum')).reset_index()
    ends['seconds'] = ends.groupby(['seed','bs']).seconds.cumsum()
    rows = ['| seed | batch | cycle | train loss | valid loss | exp_rmspe | its best epoch in the cycle | minutes so far |', '|---'*8+'|']
    for o in ends.itertuples():
        rows.append(f'| {o.seed} | {o.bs} | {o.cycle} | {o.train_loss:.5f} | {o.valid_loss:.5f} | {o.exp_rmspe:.4f} | {o.best:.4f} | {o.seconds/60:.1f} |')
    full = (args.rows,args.epochs,args.cycles)==(None,5,3)
    short = '' if full else " **Shorter than the article's run**, which takes all rows and three cycles of five epochs."
    return 'Training', (f"{len(to.train):,} rows to train on, {len(to.valid):,} later ones to validate, `fit_one_cycle({args.epochs}, {lr})` a cycle.{short} "
        "The train loss is `Recorder`'s, a moving average over some 50 batches. `rossmann.csv` has a line per epoch.\n\n"+'\n'.join(rows))

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {f.__name__: f for f in (noise,noise_windows,noise_cycle,whole,equal_time,train)}
    parser.add_argument('parts', nargs='+', choices=list(parts))
    parser.add_argument('--data', type=Path, required=True)
    parser.add_argument('--cache', type=Path, required=True, help="folder for the joined table and the trained models")
    parser.add_argument('--out', type=Path, default=here, help="folder of rossmann.md and rossmann.csv")
    parser.add_argument('--seeds', type=int, default=1)
    parser.add_argument('--rows', type=int, help="latest rows to train on; all by default")
    parser.add_argument('--epochs', type=int, default=5, help="in a cycle")
    parser.add_argument('--cycles', type=int, default=3)
    parser.add_argument('--threads', type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    about = (f"{date.today()}, fastai_bs {__version__}, fastai {fastai.__version__}, torch {torch.__version__}, Python {platform.python_version()}, CPU, "
             f"{args.threads} thread{'s'*(args.threads>1)}.")
    to,top = table(args)
    for o in args.parts: section(args.out, *parts[o](args, to, top), about)
