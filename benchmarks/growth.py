"""How what this package adds to a training grows: with parameters, tensors, micro-batches, ranks and steps.

    python benchmarks/growth.py --full                      # Half an hour
    python benchmarks/growth.py --full --parts ranks steps  # Some of it

What a callback adds to an optimizer step is the difference of two fits, with and without it, one right after the other: in processor time, without the first
two steps. A slope is that of the line of least squares through the sizes, within each repetition; median, with its interval of 95%, over the repetitions."""
import gc, math, resource, time
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastai_bs.all import GradAccum, NoiseScale, ScaledLR
from fastai_bs.noise.norms import Measurement

from cost import Repeated
from frame import Bare, Clock, arguments, main, md_table, measured, middle

bs,skip = 8,2 # Items in a micro-batch; optimizer steps before the clock runs

class BareOnRanks(Bare):
    "The same on ranks, where it does as DDP's `no_sync`"
    def before_batch(self): self.learn.model.require_backward_grad_sync = (self.n+1)%self.n_acc==0

# What is added, and to what; `n` micro-batches in a step
added = {'`GradAccum(n)`, to a bare callback': (lambda n: [GradAccum(n)], lambda n: [BareOnRanks(n)]),
         '`NoiseScale`, to `GradAccum(n)`': (lambda n: [GradAccum(n),NoiseScale(every=1)], lambda n: [GradAccum(n)]),
         '`ScaledLR`, to `GradAccum(n)`': (lambda n: [GradAccum(n),ScaledLR(bs)], lambda n: [GradAccum(n)]),
         '`NoiseScale` in parts, at each step, to nothing': (lambda n: [NoiseScale(every=1)], lambda n: [])}
# Sizes, which argument of `learner` they are, what a slope is per, and its unit
scans = {'parameters': ([1e5,1e6,1e7,1e8], 'n_params', 'parameter', 'ns', 1e9), 'tensors': ([4,16,64,256,1024], 'n_tensors', 'tensor', 'µs', 1e6),
         'micro-batches': ([2,4,8,16,32], 'n_acc', 'micro-batch', 'µs', 1e6)}

class Stack(nn.Module):
    "`n_tensors` square matrices, one after the other"
    def __init__(self, n_params, n_tensors):
        super().__init__()
        side = round(math.sqrt(n_params/n_tensors))
        self.ws = nn.ParameterList(torch.randn(side, side)/side**0.5 for _ in range(n_tensors))
    def forward(self, x):
        for w in self.ws: x = x@w
        return x

def repeated(xy, n): return Repeated([xy]*n, bs)

def learner(cbs, n_params=1e6, n_tensors=16, n_acc=2, n_steps=30, loader=repeated):
    torch.manual_seed(0)
    model = Stack(n_params, n_tensors)
    xy = (torch.randn(bs, len(model.ws[0])),)*2
    learn = Learner(DataLoaders(loader(xy, n_acc*n_steps), loader(xy, 0), device='cpu'), model, loss_func=nn.MSELoss(), opt_func=SGD,
                    cbs=[*cbs(n_acc),Clock()])
    learn._do_epoch_validate = lambda *args, **kwargs: None
    return learn

def step_time(learn):
    "Seconds of an optimizer step"
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-6)
    at = learn.clock.at
    return (at[-1]-at[skip-1])/(len(at)-skip)

def scan(args, t, nm):
    xs,arg,*_ = scans[nm]
    if args.quick: xs = xs[:3]
    for what,hows in added.items():
        if t.has(scan=nm, what=what) or nm=='micro-batches' and 'nothing' in what: continue
        pairs = [[learner(how, n_steps=int(np.clip(2e8/x, 3, 30))+skip if arg=='n_params' else 30, **{arg: x if arg=='n_params' else int(x)})
                  for how in hows] for x in xs]
        rows = []
        for i in range(-1, 3 if args.quick else 7): # The first warms up
            for x,pair in zip(xs, pairs):
                order = (0,1) if i%2 else (1,0)
                took = {k: step_time(pair[k]) for k in order}
                if i>=0: rows.append(dict(scan=nm, what=what, size=int(x), repetition=i, seconds=took[0], without=took[1]))
        t.add_all(rows)
        del pairs,pair
        gc.collect() # Learners are in cycles, and hold as much as 0.8 GB each

# Ranks

def on_rank(r, n_reps):
    "Processor seconds of an optimizer step of this rank, with and without each callback; and messages of a step"
    from ranks import Others, Rows, fit
    def _loader(xy, n): return Rows(*(o.repeat(max(n, 1)*dist.get_world_size(), 1) for o in xy), bs)
    res = []
    for what,hows in list(added.items())[:2]:
        learns = [learner(how, loader=_loader) for how in hows]
        for i in range(-1, n_reps):
            took = {}
            for k in ((0,1) if i%2 else (1,0)):
                with Others() as others: fit(learns[k], 1, 1e-6)
                at = learns[k].clock.at
                took[k] = (at[-1]-at[skip-1])/(len(at)-skip),others.n/len(at)
            if i>=0: res.append(dict(what=what, repetition=i, seconds=took[0][0], without=took[1][0], messages=took[0][1], messages_without=took[1][1]))
    return res

def ranks_part(args, t):
    from ranks import on_ranks
    for n in (2,) if args.quick else (2,4,8):
        if t.has(ranks=n): continue
        of_ranks = on_ranks(on_rank, 3 if args.quick else 7, n_ranks=n)
        t.add_all([{**rows[0], 'ranks': n, **{k: np.mean([o[k] for o in rows]) for k in ('seconds','without')}} for rows in zip(*of_ranks)])

# Steps

class Drawn:
    "In place of windows of two micro-batches: their sums as gradients of 100 numbers have them, |G|² 1 and tr(Σ) 50"
    def __init__(self, n, block=10_000):
        self.rng,self.block,self.i,self.n_steps = np.random.default_rng(0),block,0,0
    def close(self):
        if self.i%self.block==0:
            g = 0.1+self.rng.normal(size=(self.block,2,100))*np.sqrt(0.5/bs)
            self.sq,self.sq_mean = (g**2).sum(-1),(g.mean(1)**2).sum(-1)
        i,self.i = self.i%self.block,self.i+1
        return Measurement(2., 2.*bs, 2*bs, float(bs*self.sq[i].sum()), float(self.sq_mean[i]))

def rss(): return int(open('/proc/self/statm').read().split()[1])*resource.getpagesize()/1e6

def steps_part(args, t):
    "`NoiseScale` takes in a million windows"
    if len(t.df): return
    n,noise = 20_000 if args.quick else 1_000_000,NoiseScale(every=1)
    noise.learn,noise._holds_twice,noise.source = SimpleNamespace(cbs=[]),lambda: False,Drawn(n)
    rows,start = [],time.process_time()
    for i in range(1, n+1):
        noise.close_window()
        if i%(n//20)==0:
            rows.append(dict(windows=i, us=1e6*(time.process_time()-start)/(n//20), mb=rss(), rows=len(noise.rows), noise_scale=noise.noise_scale))
            start = time.process_time()
    t.add_all(rows)

def run(args, t, t_ranks, t_steps):
    for nm in scans:
        if nm in args.parts: scan(args, t, nm)
    if 'ranks' in args.parts: ranks_part(args, t_ranks)
    if 'steps' in args.parts: steps_part(args, t_steps)

# The page

def slope(df, col):
    "Of the line of least squares, in each repetition"
    return [np.polyfit(o['size'], o[col], 1)[0] for _,o in df.groupby('repetition')]

def slopes(df):
    rows = []
    for nm,(*_,per,unit,factor) in scans.items():
        for what,o in df[df.scan==nm].groupby('what', sort=False):
            mid,low,high = (factor*v for v in middle(slope(o.assign(more=o.seconds-o.without), 'more')))
            base = factor*np.median(slope(o, 'without'))
            rows.append((f"{nm}, {o['size'].min():,} to {o['size'].max():,}",what,f'{mid:.3g} {unit} a {per}',f'{low:.3g} to {high:.3g}',
                         f'{base:.3g} {unit}',f'{100*mid/base:.1f}%'))
    return md_table(['along','what is added','slope','interval','slope of the step without it','part of it'], rows)

def points(df):
    "Ratio of the step's times at each size"
    for nm in scans:
        at = df[df.scan==nm].assign(over=df.seconds/df.without).groupby(['what','size'], sort=False).over.median().unstack()
        rows = [(what,*(f'{v:.3f}' for v in row)) for what,row in at.iterrows()]
        yield md_table([f'time of a step over that without it; {nm}', *(f'{x:,}' for x in at)], rows)

def all_reduce(n_ranks, n_bytes, latency=10e-6, bandwidth=1e10):
    "Seconds, by the model of Thakur, Rabenseifner and Gropp 2005: short messages by recursive doubling, long ones by reduce-scatter and all-gather"
    steps = math.log2(n_ranks)
    return min(steps*(latency+n_bytes/bandwidth), 2*steps*latency+2*(n_ranks-1)/n_ranks*n_bytes/bandwidth)

def ranks_tables(df):
    rows,along = [],[]
    for what,of in df.groupby('what', sort=False):
        mid,low,high = (1e6*v for v in middle(slope(of.assign(size=of.ranks, more=of.seconds-of.without), 'more')))
        along.append(f'{what}, {mid:.0f} µs [{low:.0f}, {high:.0f}]')
    for (what,n),o in df.sort_values('ranks').groupby(['what','ranks']):
        mid,low,high = (1e6*v for v in middle(o.seconds-o.without))
        messages = o.messages.median()-o.messages_without.median()
        rows.append((what,n,f'{mid:.0f} µs',f'{low:.0f} to {high:.0f}',f'{1e3*o.without.median():.1f} ms',f'{messages:.2f}'))
    grads = 4*25e6
    model = [(n,f'{2e3*all_reduce(n, grads):.1f} ms',f'{1e3*all_reduce(n, grads):.1f} ms',f'{1e3*all_reduce(n, 40):.3f} ms') for n in (2,8,64,1024)]
    return ('; '.join(along), md_table(['what is added','ranks','to a step, processor time of a rank','interval','step without it','messages more'], rows),
            md_table(['ranks','gradient in each of 2 micro-batches','gradient once','a message of `GradAccum` or `NoiseScale`'], model))

def page(df, df_ranks, df_steps):
    along,ranks_table,model = ranks_tables(df_ranks)
    later = df_steps[df_steps.windows>df_steps.windows.max()/10]
    per_million,mb = (1e6*np.polyfit(later.windows, later[o], 1)[0] for o in ('us','mb'))
    tables = '\n\n'.join(points(df))
    return f"""# {__doc__.splitlines()[0]}

What a callback adds to an optimizer step is the difference of two fits, with and without it, one right after the other in alternating order: processor time,
without the first two steps; {df.repetition.max()+1} repetitions. A slope is that of the line of least squares through the sizes within a repetition: median,
and its interval of 95%, over repetitions. The model is a stack of square matrices, {bs} items in a micro-batch, plain SGD: as little as a step can be for its
parameters, so that parts of it are the most they can be. Where a size is not the one that grows: 1,000,000 parameters, 16 tensors, n = 2.
{measured(df)} `benchmarks/growth.py` says what is run.

{slopes(df)}

![Time of a step over that without what is added](growth.png)

{tables}

## Ranks

As many processes on one machine, over gloo, with DDP; the bare callback sends the gradient once in a step, as `GradAccum` does. {measured(df_ranks)}

{ranks_table}

A rank more adds to a step of each rank: {along}. The processor time of gloo's own threads, which pass the messages on, is in it.

Beyond one machine, a model and no measurement: 25 million parameters in float32, 10 µs of latency and 10 GB/s between any two ranks; short messages by
recursive doubling, long ones by reduce-scatter and all-gather (Thakur, Rabenseifner and Gropp 2005, Int. J. High Perform. Comput. Appl. 19). A message of
ours is five numbers in double precision, and each of the two has one in a window.

{model}

## Steps

`NoiseScale` takes in {df_steps.windows.max():,} simulated windows (noise scale 50; measured {df_steps.noise_scale.iloc[-1]:.1f} in the end). A window takes
{df_steps.us.median():.0f} µs, {df_steps.us.min():.0f} to {df_steps.us.max():.0f} in twentieths of the run; the line through all but the first two goes up by
{per_million:.2f} µs in a million windows, and the memory of the process by {mb:.1f} MB. `df` has {df_steps.rows.iloc[-1]:,} rows. {measured(df_steps)}"""

def draw(df, df_ranks, df_steps):
    "Time of a step over that without it, along each size; what measures in parts is far above, and in the table"
    import matplotlib.pyplot as plt
    fig,axs = plt.subplots(1, len(scans), figsize=(13,4.4), sharey=True, layout='constrained')
    for ax,nm in zip(axs, scans):
        of = df[df.scan==nm]
        for i,what in enumerate(o for o in added if 'nothing' not in o):
            o = of[of.what==what]
            q = (o.seconds/o.without).groupby(o['size']).quantile([0.25,0.5,0.75]).unstack()
            ax.plot(q.index, q[0.5], 'o-', ms=4, color=f'C{i}', label=what.replace('`', ''))
            ax.fill_between(q.index, q[0.25], q[0.75], color=f'C{i}', alpha=0.15, lw=0)
        ax.axhline(1, color='0.5', lw=0.8)
        ax.set(title=f'along the {nm}', xlabel=nm, xscale='log')
        ax.set_xticks(q.index, [f'{x:,}' for x in q.index])
        ax.minorticks_off()
    axs[0].set_ylabel('time of a step over that without it')
    fig.legend(*axs[0].get_legend_handles_labels(), loc='outside upper center', ncols=4, frameon=False)
    return fig

if __name__=='__main__': main(__doc__, ['growth','growth_ranks','growth_steps'], run, page, draw, arguments(__doc__, parts=(*scans,'ranks','steps')))
