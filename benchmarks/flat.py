"""What would a plan be worth on a device whose steps take the same time up to some batch size? A prediction, from measured noise scales.

    python benchmarks/flat.py       # Nothing is measured: noise scales and step times are what pays.py has stored

A processor's step time is nearly linear in items, a GPU's is flat up to some size. The plans of `pays.py` are made again with other step times."""
import pandas as pd
from fastai_bs.finder.facts import Device, Facts, Measured, RateTrial, Today
from fastai_bs.finder.plan import plan_of as plan_of_facts

import pays
from frame import main, md_table, measured
from pays import base_bs, best_lr, tasks

flats = 64,256,1024 # Items up to which a step takes the same time
lengths = 1,4 # Epochs of today's training

def flat_times(flat):
    "Seconds of a step: the same up to `flat` items, then linear"
    return {bs: max(1., bs/flat) for bs in pays.sizes}

def measured_times(name): return pays.rows('time', name).set_index('bs').process.to_dict()

def plan_of(name, epochs, times):
    "The plan for the task's median noise scale of five seeds"
    df = pays.rows('plan', name)
    df = df[df.epochs==epochs]
    noise,low,high = df[['noise_scale','low','high']].median()
    today = Today(base_bs, base_bs, best_lr(name, epochs), tasks[name].n, n_epoch=epochs, has_n_epoch=True, adam=True)
    measured = Measured(noise, (low,high), n_windows=100, n_seen=400, n_passes=1.)
    device = Device(times=tuple((int(bs),float(secs),0.) for bs,secs in sorted(times.items())))
    return plan_of_facts(Facts(today, measured, device, RateTrial(held=max(pays.sizes))))

def rows():
    for name in tasks:
        for epochs in lengths:
            ways = {'as measured': measured_times(name), **{f'flat up to {o}': flat_times(o) for o in flats}}
            for way,times in ways.items():
                plan = plan_of(name, epochs, times)
                yield dict(task=name, epochs=epochs, way=way, noise_scale=plan.noise_scale, bs=plan.bs, n_epoch=plan.n_epoch,
                           time=plan.duration.planned/plan.duration.today)

def run(*_): print("Nothing to run: all of it is reckoned from what pays.py has stored")

def page(*dfs):
    df = pd.DataFrame(rows())
    ways = df.way.unique()
    table = []
    for (name,epochs),of in df.groupby(['task','epochs'], sort=False):
        cells = [f'{100*o.time:.0f}% ({o.n_epoch} of {o.bs})' for o in of.itertuples()]
        table.append([name,epochs,f'{of.noise_scale.iloc[0]:.0f}',*cells])
    middle = df.groupby('way').time.median()
    return f"""# {__doc__.splitlines()[0]}

The time of the whole fit as planned over that of today's, {base_bs} items at its best rate, and in brackets the plan. Nothing here was timed on such a
device: in the columns "flat up to" a step takes the same time up to that many items, and then as much more as it has more items. Epochs are whole, and
validations are left out. The noise scale is the median of five plans. {measured(pd.concat(dfs))}

{md_table(['data','epochs','noise scale',*ways], table)}

Median: {', '.join(f'{way} {100*middle[way]:.0f}%' for way in ways)}."""

if __name__=='__main__': main(__doc__, ['pays','pays_plans'], run, page)
