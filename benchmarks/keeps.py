"""Does a plan keep its word? Trainings as planned beside today's: many kinds of tasks, two optimizers, three devices.

    python benchmarks/keeps.py --full --data FOLDER     # Some hours on one core; `--parts` for some of the tasks

Today's is `fit_one_cycle(epochs, lr)`; planned is `plan.apply(learn).fit_one_cycle(plan.n_epoch, lr)` with the plan that `learn.bs_find(lr, n_epoch=epochs)`
makes from the same new weights: on this processor, and with `step_times=` that are flat up to 4 and up to 16 times today's batch, as a GPU's are. There the
losses are what counts; seconds are predicted. Losses are of the finished model: over at most 10,000 items of the training set, and over the validation set.
For classes of MNIST's digits that is the whole test set, and for textures 20,000: where a loss of 0.1 is that of a few pictures in a hundred, fewer tell too
little. Where today's loss, of training or validation, ends below a hundredth of that of the best constant guess, it is not
compared. The first nine tasks are trained by Adam for 1 and for 4 epochs of batch 64 (16 where the set is small), some for 16 as well. The others are of
other kinds: text, SGD with momentum, targets with many elements, longer trainings of small sets, in batches of 16 or 32. Rates: the best for today's training
by its validation loss in steps of two, and a third of it. Nothing is tuned for the plan. The rule was made on the tasks that are marked as settled on. Then it
was corrected, and each time tasks that nobody had trained were added to judge it; all of them are shown. Fresh ones came after the first correction, the last
ones after the second (sizes between today's and one that is of no use), the newest after the third (less is claimed of a short training), the unseen and the
longer ones after the fourth (no short training has fewer than 240 steps), the normed ones after plans for pictures in small batches got a `GhostBatchNorm`,
the doubled ones after plans for six epochs or more were held to twice today's batch, and the brief ones when all of that stood. Trainings and plans that a
correction did not change were not run again. FOLDER holds mnist/, fashion_mnist/, rossmann/, adult/, ml-latest-small/, tinyshakespeare/,
imdb_sample/ and cifar10_jpg/."""
import math, time
from unittest.mock import patch

import numpy as np
from fastai.optimizer import Adam
from fastai_bs.all import * # noqa: F403 bs_find

from frame import main, md_table, measured
from kinds import (best_rate, brief, clocked, doubled, first as first_nine, fitted, fresh, guess_loss, last, later, learner, longer, newest, normed, others,
    tasks, unseen)
from pays import pct

kinds = 'best','third'
seeds = 0,1
devices = dict(here=None, flat_4=4, flat_16=16) # Up to how many times today's batch a step takes the same time

def step_times(bs, flat):
    "Seconds of a step, the same up to `flat` times `bs` items; `None` for this processor's"
    return flat and {bs*2**i: 0.01*max(1, 2**i/flat) for i in range(7)}

def planned(table, key, task, lr, device, today, done):
    "A row for the training as planned on a device; one that was `done` before counts again"
    learn = learner(task, task.bs, key['seed'])
    times = step_times(task.bs, devices[device])
    with learn.no_bar(), learn.no_logging(), patch('time.perf_counter', time.process_time):
        plan,find = clocked(lambda: learn.bs_find(lr, n_epoch=key['epochs'], step_times=times, show_plot=False))
    o,trial = plan.choice.option,plan.facts.trial
    what = plan.bs,plan.n_epoch,round(o.lr_factor, 6)
    if what not in done: done[what] = fitted(task, plan.apply(learner(task, task.bs, key['seed'])), plan.n_epoch, plan.lr) if o.bs!=task.bs else today
    table.add(part='plan', device=device, **key, bs=plan.bs, n_epoch=plan.n_epoch, exact=o.epochs, factor=o.lr_factor, wd=o.wd_factor, tried=trial.largest,
              implied=trial.noise, failed=trial.failed, reason=plan.choice.reason, steps=plan.facts.today.steps,
              predicted=plan.duration[0]/plan.duration[1], find=find, **done[what])

def trainings(table, name, task, epochs, kind, seed, part=1.):
    "A row for today's training and one for the plan of each device, at `part` of the best rate"
    key = dict(task=name, epochs=epochs, kind=kind, seed=seed)
    wanted = [o for o in devices if not table.has(part='plan', device=o, **key)]
    if not wanted: return
    lr = float(f'{part*best_rate(table, name, task, epochs):.4g}')
    key['lr'] = lr
    if not table.has(part='today', **key):
        table.add(part='today', **key, bs=task.bs, n_epoch=epochs, guess=guess_loss(task), **fitted(task, learner(task, task.bs, seed), epochs, lr))
    df = table.df
    today = df[(df.part=='today') & (df.task==name) & (df.epochs==epochs) & (df.kind==kind) & (df.seed==seed)].iloc[0]
    done = {}
    for device in wanted: planned(table, key, task, lr, device, {o: today[o] for o in ('train','valid','secs')}, done)

# The report

def ratios(df):
    "A row for each training that was planned: losses and seconds over today's of the same seed"
    key = ['task','epochs','kind','seed']
    both = df[df.part=='plan'].merge(df[df.part=='today'], on=key, suffixes=('','_now'))
    def _over(o): return (both[o]/both[f'{o}_now']-1).where(both[f'{o}_now']>both.guess_now/100) # Of next to nothing no ratio means anything
    time,asking = both.secs/both.secs_now,(both.find/both.secs_now).where(both.device=='here') # What asking takes is not known for the others
    return both.assign(changed=both.bs!=both.bs_now, d_train=_over('train'), d_valid=_over('valid'), time=time, first=time+asking, ten=time+asking/10)

def by_plan(both):
    "Means over the seeds of those that change something"
    key = ['task','epochs','kind','device']
    went = both[both.changed].groupby(key, sort=False)
    columns = ['d_train','d_valid','time','first','ten','predicted','factor','n_epoch','lr','train','train_now']
    return went[columns].mean().assign(bs=went.bs.agg(lambda o: ', '.join(map(str, sorted(set(o))))), n=went.size()).reset_index()

others = {**others, **later}
groups = {'settled on': [nm for nm,o in tasks.items() if o.settled], 'first tasks, Adam': [nm for nm,o in first_nine.items() if not o.settled],
          'other kinds, Adam': [nm for nm,o in others.items() if not o.settled and o.opt is Adam],
          'other kinds, SGD': [nm for nm,o in others.items() if not o.settled and o.opt is not Adam],
          **{f'{group}, {opt}': [nm for nm,o in of.items() if (o.opt is Adam)==(opt=='Adam')]
             for group,of in dict(fresh=fresh, last=last, newest=newest, unseen=unseen, longer=longer, normed=normed, doubled=doubled, brief=brief).items()
            for opt in ('Adam','SGD')}}
names = dict(here='this processor', flat_4='flat up to 4 times', flat_16='flat up to 16 times')

def loss_words(o): return [pct(o.median()),f'{(o>0.05).sum()}',f'{(o<-0.3).sum()}',f'{pct(o.min())} to {pct(o.max())}']

def in_short(both):
    "A row for each device and group of tasks"
    went,rows = by_plan(both),[]
    for group,of in groups.items():
        for device,where in names.items():
            mine,n = went[went.task.isin(of) & (went.device==device)],(both.task.isin(of) & (both.device==device)).sum()
            if not n: continue
            time = f'{mine.time.median():.2f}, {mine.predicted.median():.2f}' if device=='here' else f'{mine.predicted.median():.2f}'
            stay = (~both[both.task.isin(of) & (both.device==device)].changed).sum()
            if len(mine): rows.append([group,where,f'{stay} of {n}',len(mine),*loss_words(mine.d_train),*loss_words(mine.d_valid),time])
    heads = ['tasks','device','stay','change (means of seeds)']
    of_loss = [f'{o}: {p}' for o in ('training loss','validation loss') for p in ('median','above +5%','below -30%','from, to')]
    return md_table([*heads,*of_loss,'time, predicted'], rows)

def different(went):
    "Those that were trained: devices with the same plan share a training"
    return went.drop_duplicates(['task','epochs','kind','d_train','d_valid'])

def sentences(both):
    "What is cited elsewhere"
    went,here = by_plan(both),both[both.device=='here']
    def _line(o): return f"median {pct(o.median())}, above +5% in {(o>0.05).sum()} of {o.notna().sum()}, from {pct(o.min())} to {pct(o.max())}"
    def _losses(o): return f"training loss {_line(o.d_train)}; validation loss {_line(o.d_valid)}"
    def _plans(o): return f"({len(o)} plans that change something, each the mean of its seeds)"
    of = {device: went[went.device==device] for device in devices}
    stays = [(o,(~both.changed[both.device==device]).sum(),(both.device==device).sum()) for device,o in names.items()]
    off = np.abs(np.log(of['here'].time/of['here'].predicted))
    other = different(went)
    kinds_of = {'With Adam': other.task.map(is_adam), 'With SGD': ~other.task.map(is_adam), 'Text': other.task.isin(text)}
    long = both[both.steps>=1100]
    shares = [f"{long[long.device==device].changed.mean():.0%} ({where})" for device,where in names.items()]
    above = other[other.d_valid>0.05]
    return '\n'.join([f"* Run so far: {both.task.nunique()} of {len(tasks)} tasks, {len(both)} plans, of which {(~both.changed).sum()} stay.",
        f"* On this processor {_plans(of['here'])}: {_losses(of['here'])}.",
        f"* There the whole fit takes {of['here'].time.median():.2f} of today's time (median, each plan the mean of its seeds); as predicted within 15% in "
        f"{(off<math.log(1.15)).sum()} of {len(off)}.",
        *(f"* With steps {names[device]} today's batch {_plans(of[device])}: {_losses(of[device])}; predicted {of[device].predicted.median():.2f} of the "
          "time (median)."
          for device in ('flat_4','flat_16')),
        f"* Where two devices have the same plan it was trained once: {len(other)} different trainings as planned. The next three lines count each "
        "once. Counts are of those whose loss is compared.",
        *(f"* {nm}: {_losses(other[which])}." for nm,which in kinds_of.items()),
        f"* Calls that stay at today's size: {', '.join(f'{n} of {of_all} ({where})' for where,n,of_all in stays)}.",
        f"* Of calls for trainings of 1100 steps or more there change something: {', '.join(shares)}. Of shorter ones "
        f"{both[(both.steps<1100) & both.changed].shape[0]} of {(both.steps<1100).sum()} do.",
        f"* Of the different trainings as planned with a validation loss above +5%, {(above.task.map(lambda o: tasks[o].n)<=5000).sum()} of {len(above)} have "
        "5000 items or fewer.",
        *of_cost(here)])

def of_cost(here):
    "What asking takes on this processor, over today's whole training or in seconds; and the first training with a plan, the asking included"
    cost,went,is_long,stays = here.find/here.secs_now,by_plan(here),here.steps>=500,here[~here.changed].reason
    short = here[here.steps<1100]
    def _of(which): return f"{cost[which].median():.2f}, {cost[which].min():.2f} to {cost[which].max():.2f}"
    def _first(which): return f"{went['first'][which].median():.2f} (median of {which.sum()})"
    reasons = ', '.join(f"{nm} in {n}" for nm,n in stays.value_counts().items())
    return [f"* `bs_find` takes {cost.median():.2f} of today's whole training (median of {len(cost)}), {cost.min():.2f} to {cost.max():.2f}; where the plan "
            f"changes something {_of(here.changed)}; where no size can win {_of(here.reason=='never')}; where trying one costs too much for what it can "
            f"win {_of(here.reason=='costly')}.",
            f"* For trainings of 500 steps or more that is {_of(is_long)}; shorter ones take {here.find[~is_long].max():.1f} s at most.",
            f"* The first training with a plan that changes something, with what finding it takes, lasts {_first(went.epochs>0)} of today's; of 1 to 3 "
            f"epochs {_first(went.epochs<4)}, of 4 {_first(went.epochs==4)}, of more {_first(went.epochs>4)}; each of ten, with one call for all, "
            f"{went.ten.median():.2f}; each training alone {went.time.median():.2f}. Each plan is the mean of its seeds.",
            f"* Plans that stay on this processor: {len(stays)} of {len(here)} (of those for fewer than 1100 steps {(~short.changed).sum()} of {len(short)}); "
            f"{reasons}."]

def cost_table(here):
    "A row for each task and number of epochs"
    rows = []
    for (task,epochs),o in here.groupby(['task','epochs'], sort=False):
        rows.append([task,epochs,f'{o.steps.iloc[0]:.0f}',f'{o.secs_now.mean():.1f}',f'{o.find.mean():.1f}',f'{(o.find/o.secs_now).median():.2f}',
                     f'{o.changed.sum()} of {len(o)}',f'{o["first"][o.changed].median():.2f}' if o.changed.any() else '',', '.join(sorted(set(o.reason)))])
    heads = ['data','epochs','steps',"today's training, s",'`bs_find`, s',"over today's",'change',"first training with the plan, over today's",'reason']
    return md_table(heads, rows)

reasons_text = ("Reasons to stay: `costly`, a trial would have taken too large a part of what it could save, if anything; `nowhere`, a larger batch got too "
    "little further in one; `never` and `little`, there is too little time to win; `few_steps` and `not_learned`, nothing can be planned.")

def is_adam(name): return tasks[name].opt is Adam
text = ('shakespeare','reviews','gru','awd','transformer','letters','genres','review_words','letters_sgd','char_conv','genres_sgd','letters_long',
        'letters_gru','letters_transformer','letters_more','letters_9','genres_8_sgd','char_conv_8','letters_gru_8_sgd','reviews_20',
        'letters_transformer_5')

def page(df):
    both = ratios(df)
    heads = ['data','epochs','rate','steps','plan','epochs of it','factor on the rate','training loss','validation loss','time','predicted','seeds']
    def _mark(nm): return nm+(' (settled on)' if tasks[nm].settled else '')
    order = {nm: i for i,nm in enumerate(tasks)}
    went = by_plan(both).sort_values(['task','epochs','kind'], key=lambda o: o.map(order) if o.name=='task' else o, kind='stable')
    lines = [[_mark(r.task),r.epochs,f'{r.kind}, {r.lr:.2g}',names[r.device],r.bs,f'{r.n_epoch:.3g}',f'{r.factor:.2f}',pct(r.d_train),
              pct(r.d_valid),f'{r.time:.2f}' if r.device=='here' else '',f'{r.predicted:.2f}',r.n] for r in went.itertuples()]
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}',' '.join(__doc__.split('\n\n')[2].split()),measured(df),'## In short',sentences(both),in_short(both),
                        "Time: of the whole fit over today's, as measured on this processor and as predicted; median.",
                        "## What asking costs, on this processor",reasons_text,cost_table(both[both.device=='here']),
                        "## Each plan that changes something","Over today's training from the same weights; means of the seeds.",md_table(heads, lines)])

def run(args, table):
    for seed in args.seeds or (seeds[:1] if args.quick else seeds):
        for name,task in tasks.items():
            if name not in args.parts: continue
            if not hasattr(task, 'train'): task.load(args.data)
            for epochs in task.epochs[:1] if args.quick else task.epochs:
                for kind in kinds: trainings(table, name, task, epochs, kind, seed, 1/3 if kind=='third' else 1.)

if __name__=='__main__': main(__doc__, ['keeps'], run, page, parts=tasks)
