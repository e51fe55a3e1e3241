"""This package beside what one would use instead, at the same work in one run: accumulation, the noise scale, the largest batch, the finders' time.

    python benchmarks/peers.py                     # peers.md from what is in results/peers_*.csv
    python benchmarks/peers.py --full --data DIR   # Runs what is not in there yet, some 15 minutes; DIR/mnist/*.gz
    python benchmarks/peers.py --quick --data DIR  # The same, shorter; nothing of it is on the page

The peers come with the extra `peers`: pip install -e '.[peers]'."""
import numpy as np
import peers_accum, peers_max_bs, peers_noise
from frame import main, md_table, measured

def run(args, accum, noise, max_bs):
    peers_noise.run(args, noise)
    peers_max_bs.run(args, max_bs)
    peers_accum.run(args, accum)

def sci(v): return f'{v:.1e}'
def times(o): return f'{o.ratio:.3f} ({o.low:.3f} to {o.high:.3f})'
def part(df, nm): return df[df.part==nm] if 'part' in df else df

def of_errors(df):
    "A row for each tool, a column for each run; the worst of the seeds"
    def table(nm): return df.pivot_table(index='how', columns='run', values=nm, aggfunc='max', sort=False)
    def said(nm): return md_table(['', *table(nm).columns], [[how, *map(sci, o)] for how,o in table(nm).iterrows()])
    mean = df.groupby(['how','run'], sort=False)[['steps','due']].max().reset_index()
    short = mean[mean.steps!=mean.due]
    return said('gradient'),said('weights'),said('of_way'),'; '.join(f'{o.how}, {o.run}: {int(o.steps)} of {int(o.due)}' for o in short.itertuples())

def compared(df):
    "Where a peer is off, how far is `GradAccum`? And where is it not the nearest?"
    t = df.pivot_table(index='run', columns='how', values='weights', aggfunc='max', sort=False)
    peers = [o for o in t if o not in ('GradAccum','uncut, single precision')]
    off = t[t[peers].max(1)>=1e-3]
    ours,floor = off['GradAccum'].max(),(t['GradAccum']/t['uncut, single precision']).max()
    worst = off[peers].max(axis=1)
    return (f"In the {len(off)} of {len(t)} runs in which some peer's weights end {sci(worst.min())} to {sci(worst.max())} apart, `GradAccum`'s end\n"
            f"at most {sci(ours)} apart{'' if ours<=1e-6 else ', which is more than the 1e-6 that was aimed at'}: {floor:.2f} times what single precision "
            "does to the uncut batch, at most. The tables show which peers agree to rounding, and in which runs.")

def of_noise(df):
    res,e = peers_noise.summary(df),part(df, 'error')
    wide = np.log(e.pivot(index='seed', columns='how', values='noise_scale')/e.exact.iloc[0]).replace([np.inf,-np.inf], np.nan).dropna()
    idx = np.random.default_rng(1).integers(len(wide), size=(2000,len(wide)))
    def rms(nm): return np.sqrt((wide[nm].to_numpy()[idx]**2).mean(1))
    def over(nm):
        if nm=='NoiseScale': return '1'
        r = rms(nm)/rms('NoiseScale')
        return f"{np.sqrt((wide[nm]**2).mean()/(wide['NoiseScale']**2).mean()):.3f} ({np.quantile(r, 0.025):.3f} to {np.quantile(r, 0.975):.3f})"
    return md_table(['', 'bias of the logarithm', 'root mean square of its error', "over `NoiseScale`'s", 'without an answer'],
                    [[nm, f"{o['bias']:+.3f} ± {o['bias_half']:.3f}", f"{o['rms']:.3f} ({o['low']:.3f} to {o['high']:.3f})", over(nm),
                      f"{o['bad']} of {o['n']}"]
                     for nm,o in res.items()])

def nearest(df):
    "The smallest error, if it is not ours"
    rms = (np.log(df.noise_scale/df.exact)**2).groupby(df.how).mean()**0.5
    return f"The smallest error is {'ours' if rms.idxmin()=='NoiseScale' else f'not ours but that of: {rms.idxmin()}'}."

def of_searches(df):
    t = df.pivot(index='how', columns='limit', values=['answer','forward','items']).reindex([o for o in peers_max_bs.searches if (df.how==o).any()])
    changed = df.groupby('how', sort=False).changed.agg(lambda o: ', '.join(dict.fromkeys(o)))
    return md_table(['', *(f'room for {int(o)}' for o in peers_max_bs.limits), 'changed'],
                    [[how, *(f"{int(o['answer'][n])}: {int(o['forward'][n])} batches, {int(o['items'][n]):,} items" for n in peers_max_bs.limits), changed[how]]
                     for how,o in t.iterrows()])

def page(accum, noise, max_bs):
    gradient,weights,way,short = of_errors(part(accum, 'error'))
    stop,clock,cost = part(accum, 'exception'),part(accum, 'time'),part(noise, 'cost')
    ours = clock[clock.how=='GradAccum']
    behind = [f'{o.run} ({o.ratio:.3f} against {b.ratio:.3f})' for o in ours.itertuples()
              for b in clock[(clock.run==o.run) & clock.how.str.startswith('fastai')].itertuples() if b.ratio<o.low]
    over = [f'{o.run} ({o.ratio:.3f})' for o in ours.itertuples() if o.ratio>1.02]
    e = part(noise, 'error')
    but = f", but for {', '.join(stop[stop.cbs_differ.astype(bool)].how)}" if stop.cbs_differ.astype(bool).any() else ' with all of them'
    return f"""# Beside its peers

The same work in one run: accumulation, the noise scale, the largest batch, and the time of the finders. accelerate {accum.accelerate.iloc[0]},
Lightning {accum.lightning.iloc[0]}; {measured(accum)}
`benchmarks/peers.py` runs all of it; `peers_accum.py`, `peers_noise.py` and `peers_max_bs.py` beside it say how each is used, and `results/peers_*.csv` have
every row. Times are processor time, as others may work on the machine: medians of the ratios in interleaved pairs, with intervals of 95%.

## Accumulation: errors

{peers_accum.n_acc} micro-batches in a window, 20 optimizer steps, against the uncut batch in double precision; the worst of {accum.seed.nunique()} seeds.
All step with the same optimizers of torch. Ragged: 100 items in batches of 16, so the last window of an epoch has two
of them and 4 items more. Tokens: sequences of 2 to 32, the loss a mean over those that are no padding. One-cycle: the rate follows
`fit_one_cycle`'s curve, a value for each optimizer step.
{compared(part(accum, 'error'))}
Where windows are all alike and the rate is stepped by the optimizer's steps, everybody is exact: nobody needs `GradAccum` for that.

The gradient of the worst window of an epoch, at weights that stay; a window without a step counts as a gradient of 0, an error of 1:

{gradient}

The weights after the training, norm of the difference over their norm:

{weights}

The same over the way that the weights went, which is shorter, so rounding shows more:

{way}

Optimizer steps where they are not as many as with the uncut batch: {short or 'none'}.

## Accumulation: an exception

The model fails at its sixth micro-batch, the second of a window. What `.grad` then holds, over the norm of a window's gradient; and the error of the first
window of the next training, begun with the same objects. The callbacks are those of a training that ended{but}.

{md_table(['', 'gradient left', "error of the next training's first window"], [[o.how, sci(o.gradient_left), sci(o.next_window)] for o in stop.itertuples()])}

## Accumulation: time and memory

Over as little as does the same in the same surroundings: in a `Learner` a callback that divides the loss and steps at every fourth micro-batch, for accelerate
a loop, for Lightning a module that steps by hand. Time: of a window, from one optimizer step to the next, the median of a training. Memory: what tensors
hold at their peak beyond that, as a part of the parameters.
{f"1.02 was aimed at for `GradAccum`, and not reached with {', '.join(over)}."
 if over else
 "`GradAccum` is within the 1.02 that were aimed at."}
{f"fastai's own, which weighs nothing, takes less with {', '.join(behind)}." if behind else ''}

{md_table(['', 'model, micro-batch', 'time', 'memory'], [[o.how, o.run, times(o), f'{100*o.memory:+.2f}%'] for o in clock.itertuples()])}

## Noise scale: error at the same data

An MLP at fixed weights, {peers_noise.n_items:,} items whose gradients give the exact answer, {e.exact.iloc[0]:.1f} items; {e.seed.nunique()} epochs,
each in another order, in windows of {peers_noise.n_acc} micro-batches of {peers_noise.bs}. `NoiseScale` with `GradAccum` and its
defaults. Stacking is that of earlier finders for fastai, written anew: from the norm of the last micro-batch of a window, or of all, averaged with beta
{peers_noise.beta}. Per item: the items of each window by `torch.func`; as many gradients are an eighth of the items.
The problem is the second one: with the first, of an exact 1,534 items, five epochs told little in any way, and it was left for an easier one.
Intervals of the last but one column come from resampling the same epochs for both.
{nearest(e)}

{of_noise(noise)}

## Noise scale: time and memory

An MLP of 784-512-256-10, micro-batches of {peers_noise.bs}; each as a callback, over the same training in a `Learner` with the bare callback of above. Of
`NoiseScale` that is with `GradAccum`; the others accumulate themselves, per-item gradients in place of the ordinary backward pass. Memory in copies of the
parameters: stacking holds the gradients of the window and their copy in one tensor, per-item gradients those of a micro-batch, `NoiseScale` a few numbers
for each micro-batch.

{md_table(['', 'micro-batches in a window', 'time', 'memory'], [[o.how, int(o.n_acc), times(o), f'{o.memory:.2f}'] for o in cost.itertuples()])}

## The largest batch

The model raises torch's out-of-memory error for more items than there is room for. What each search answers, and the batches and items that it ran or
tried on the way, three optimizer steps for a size; {peers_max_bs.n_items:,} items in all, {peers_max_bs.bs_now} in a batch so far. Beside it what it
leaves changed: Lightning sets the batch size it found, as it is meant to; accelerate's function makes a new model for each size, so only
random numbers are compared, and takes the first size that fits. Lightning's binary search leaves a margin of 5% on purpose; ours is asked for
the very edge (`margin=0`). On a CPU `max_bs_find` begins with what the memory report says, here all items. `memory_report().max_bs` is not among them: it
counts tensors, and a limit that a model makes up has none.

{of_searches(part(max_bs, 'search'))}

## The finders' time

{md_table(['', '`bs_find` over `lr_find`, both with their defaults', 'pairs'], [[o.how, times(o), int(o.pairs)] for o in part(max_bs, 'finders').itertuples()])}

{'' if len(part(max_bs, 'finders')) else 'Not measured yet.'}
`lr_find` takes a hundred steps and tells a rate; `bs_find` trains a mock training until its interval is narrow, and times steps of several sizes.
"""

if __name__=='__main__': main(__doc__, ['peers_accum','peers_noise','peers_max_bs'], run, page)
