"""What does asking cost, and does measuring pay? `bs_find` with a number of epochs alone, with a measured noise scale, and with one from a watched training.

    python benchmarks/asks.py --full --data FOLDER    # Half an hour on one core

Tasks of `kinds.py` with 4, 8, 12 or 16 epochs, at the rates of `repeat.py`; on this processor, and with steps that are flat up to 4 times today's batch. Asked:
`bs_find(lr, n_epoch=epochs)`, from the same weights, three orders of the items. Measured: with `num_it=660` as well. Watched: `noise_scale=noise`, of a
`NoiseScale()` in today's training from other weights. Where the size that was asked for and the measured one differ by a factor of two or more, both are
trained as planned, beside today's, with five seeds. Seconds are those of the processor. FOLDER holds mnist/, fashion_mnist/, adult/, imdb_sample/ and
cifar10_jpg/."""
import math, tempfile, time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import fastai.callback.schedule # noqa: F401 lr_find, fit_one_cycle
from fastai_bs.all import NoiseScale # With bs_find

from frame import main, md_table, measured
from keeps import devices, step_times
from pays import pct
from kinds import clocked, fitted, learner, tasks
from repeat import rates

cases = dict(digits=(4,8,16), reviews=(8,16), rows=(4,8), conv_sgd=(4,8), cifar_sgd=(4,8), table_sgd=(4,8), autoencoder=(4,8), masks=(4,8), table_long=(12,),
             cifar_long=(12,))
hows = 'asked','measured','watched'
orders,seeds = (None,1,2),range(5)

def rate_of(name): return rates.get(name, tasks[name].lr)

def training(t, name, task, epochs):
    "A row for today's training, and for `lr_find`; the noise scale that was watched in one from other weights"
    noise = NoiseScale()
    learn = learner(task, task.bs, 7)
    with learn.no_logging(): learn.fit_one_cycle(epochs, rate_of(name), cbs=noise)
    if t.has(part='today', task=name, epochs=epochs): return noise
    with tempfile.TemporaryDirectory() as tmp:
        learn = learner(task, task.bs, 0)
        learn.path = Path(tmp)
        with learn.no_bar(): lr_find = clocked(lambda: learn.lr_find(show_plot=False, suggest_funcs=()))[1]
    t.add(part='today', task=name, epochs=epochs, seed=0, bs=task.bs, lr=rate_of(name), lr_find=lr_find, cool=noise.cool.noise_scale, low=noise.cool.ci[0],
          high=noise.cool.ci[1], **fitted(task, learner(task, task.bs, 0), epochs, rate_of(name)))
    return noise

def plan(t, name, task, epochs, device, how, order, noise):
    "A plan, and a row for it"
    more = dict(measured=dict(num_it=660), watched=dict(noise_scale=noise)).get(how, {})
    learn,times = learner(task, task.bs, 0),step_times(task.bs, devices[device])
    with learn.no_bar(), learn.no_logging(), patch('time.perf_counter', time.process_time):
        p,find = clocked(lambda: learn.bs_find(rate_of(name), n_epoch=epochs, seed=order, step_times=times, show_plot=False, **more))
    t.add(part='plan', task=name, epochs=epochs, device=device, how=how, order=order or 0, bs=p.bs, n_epoch=p.n_epoch, exact=p.choice.option.epochs,
          reason=p.choice.reason, noise_scale=p.noise_scale, find=find, predicted=p.duration[0]/p.duration[1], steps=p.facts.today.steps)
    return p

def trained(t, name, task, epochs, device, plans):
    "Rows for both plans as planned, beside today's"
    key,lr = dict(part='trained', task=name, epochs=epochs),rate_of(name)
    for seed in seeds:
        if not t.has(**key, how='today', seed=seed):
            t.add(**key, how='today', seed=seed, bs=task.bs, **fitted(task, learner(task, task.bs, seed), epochs, lr))
        for how,p in plans.items():
            if t.has(**key, device=device, how=how, seed=seed): continue
            learn = p.apply(learner(task, task.bs, seed))
            t.add(**key, device=device, how=how, seed=seed, bs=p.bs, **fitted(task, learn, p.n_epoch, p.lr))

def run(args, t):
    for name,lengths in list(cases.items())[:1 if args.quick else None]:
        task = tasks[name].load(args.data)
        for epochs in lengths[:1] if args.quick else lengths:
            if t.has(part='done', task=name, epochs=epochs): continue
            noise = training(t, name, task, epochs)
            for device in ('here','flat_4'):
                plans = {how: [plan(t, name, task, epochs, device, how, order, noise) for order in (orders if how=='asked' else orders[:1])][0] for how in hows}
                asked,by = plans['asked'],plans['measured']
                if abs(math.log2(asked.bs/by.bs))>=1: trained(t, name, task, epochs, device, dict(asked=asked, measured=by))
            t.add(part='done', task=name, epochs=epochs)

def page(df):
    key = ['task','epochs']
    today,plans = df[df.part=='today'].set_index(key),df[df.part=='plan']
    first = plans[plans.order==0].set_index([*key,'device','how'])
    secs = today.secs.reindex(plans.set_index(key).index).values
    lr_find = today.lr_find.reindex(plans.set_index(key).index).values
    here = (plans.device=='here') & (plans.how=='asked')
    cost,over_lr = (plans.find/secs),(plans.find/lr_find)
    def _of(o): return f'{o.median():.2f} ({o.min():.2f} to {o.max():.2f})'
    pairs = first.bs.unstack('how')
    def _near(a, b): return f'{(np.abs(np.log2(pairs[a]/pairs[b]))<=1).sum()} of {len(pairs)}'
    orders = plans[plans.how=='asked'].groupby([*key,'device'], sort=False).bs.agg(lambda o: math.log2(o.max()/o.min()))
    rows = []
    for (task,epochs,device),o in plans.groupby([*key,'device'], sort=False):
        of = {how: o[o.how==how] for how in hows}
        sizes = [', '.join(f'{b:.0f}' for b in of[how].bs) for how in hows]
        rows.append([task,f'{epochs:.0f}',device.replace('_', ' '),f'{o.steps.iloc[0]:.0f}',f'{today.bs[task,epochs]:.0f}',*sizes,
                     *(f'{of[how].find.mean()/today.secs[task,epochs]:.2f}' for how in hows),of['asked'].reason.iloc[0]])
    heads = ['data','epochs','steps','steps of it','today',*(f'size, {o}' for o in hows),*(f'cost, {o}' for o in hows),'reason']
    t = df[df.part=='trained']
    lines = []
    if len(t):
        now = t[t.how=='today'].set_index([*key,'seed'])[['train','valid','secs']]
        for (task,epochs,device,how),o in t[t.how!='today'].groupby([*key,'device','how'], sort=False):
            r = o.set_index([*key,'seed'])[['train','valid']]/now.reindex(o.set_index([*key,'seed']).index)[['train','valid']]-1
            p = first.loc[task,epochs,device,how]
            lines.append([task,f'{epochs:.0f}',device.replace('_', ' '),how,f'{p.bs:.0f}',f'{p.n_epoch:.0f}',pct(r.train.mean()),pct(r.valid.mean()),
                          f'{pct(r.valid.min())} to {pct(r.valid.max())}',f'{p.predicted:.2f}'])
    by = {how: cost[(plans.device=='here') & (plans.how==how)] for how in hows}
    words = [f"* On this processor asking takes {_of(by['asked'])} of today's training, median and range of {here.sum()} calls; {_of(over_lr[here])} times as "
             "long as `lr_find`.",
             f"* With a measurement it takes {_of(by['measured'])} of today's training, with a watched noise scale {_of(by['watched'])}.",
             f"* Sizes within a factor of two: asked and measured in {_near('asked','measured')}, watched and asked in {_near('watched','asked')}.",
             f"* Three orders of the items: sizes within one power of two in {(orders<=1).sum()} of {len(orders)}."]
    trained_heads = ['data','epochs','steps','plan','size','epochs of it','training loss','validation loss','from, to','predicted time']
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}',' '.join(__doc__.split('\n\n')[2].split()),measured(df),'\n'.join(words),'## Each',
                        "Cost: seconds of `bs_find` over those of today's training.",md_table(heads, rows),'## Where they differ',
                        "Losses over today's, means of five seeds; and the range of the validation loss.",md_table(trained_heads, lines)])

if __name__=='__main__': main(__doc__, ['asks'], run, page)
