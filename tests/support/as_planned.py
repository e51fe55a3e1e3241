"""Is what a plan says what the fit that follows really does? Plans of real learners, each fit by fastai, step by step beside the plan's numbers

`PYTHONPATH=.:tests/support python tests/support/as_planned.py` prints a line for each plan, what does not hold beneath it, and totals by reason
(`PYTHONPATH` of another checkout tries that one). `--learner NAME` tries one learner's plans.

Nothing here follows the package's own sums. A `Probe` notes at the moment of each optimizer step, after all other callbacks, the rate and weight decay
of `opt.hypers`, and the items and micro-batches whose gradients are in the step. A virtual clock (`time.perf_counter`) passes only where a model, an
optimizer step and the start of an epoch spend it, so that seconds are exact on any machine. What counts as what:

* Today: the learner as it was, `fit_one_cycle(n_epoch, lr)`. Planned: `plan.apply(learn)`, then `fit_one_cycle(plan.n_epoch, plan.lr)` on a fresh one.
* The peak of a fit is what its steps used over the one-cycle's shape, near its top: it does not depend on whether a step falls on the top.
* The decay of a fit is the sum over all steps of rate times weight decay, as fastai's SGD and Adam shrink weights by `1 - lr*wd` in each.
* `items`: today's fit trains on so many items, and by the noise scale the planned one needs `(N+bs)/(N+bs_now)` of them. That over
  `choice.option.epochs` is an epoch as the plan counts it, and `n_epoch` such epochs are promised: within 5%. `enough`: they are 95% of those needed,
  at least.
* `peak`: is `scaled_lr`, within 1%. `lr_factor`: is the planned peak over today's, within 1%. `wd`: is what the steps used, within 1%.
* `rule`: the factor is the one that the rule named by the plan gives from today's size to the planned one, within 2%: over `bs/bs_now` where the loss is a
  sum and the optimizer goes as far as the gradient is long, since that gradient grows with the batch; otherwise as it is.
* `decay`: the planned fit decays as much as today's, within 5%, where the noise scale is known.
* `seconds`, `seconds today`: both of `duration`, within 20%. `few steps`: the number of steps that a caution writes, where there are few, within 5%.
* `table`: its rows of today's size and of the planned one have the peaks that the optimizer uses, within 1%.
* `code`: the line, run on a fresh learner with a loader of the batches it names, does the same as the planned fit: peak, weight decay, items and
  micro-batches of a step, number of steps. The learner keeps its own `GradAccum` and `ScaledLR`, but those that the line names; where
  the line does as planned only on a learner without any, that is `code beside own callbacks`.
* `words`: so does the line that the plan prints under its headline, on a fresh learner; where it has no `apply`, on the learner as it is. 2%, as it rounds.
* `verify`: `bs_verify(plan)` trains both sizes as today's and the planned fit: steps and items within 5%, peak 1%, decay 5%.
* `stays`: where nothing changes, the same callbacks and loader are there after `apply`, `lr` is the one that was given, and the fit is today's.
* `trial`: of the short trainings of `bs_find` some have today's peak, and those with the planned size the planned one.
"""
import argparse
import contextlib
import io
import math
import re
import warnings
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import SGD, Adam
from fastai.torch_core import find_bs, set_seed
import fastai_bs
import fastai_bs.all as names
from fastai_bs.accumulate.grad_accum import GradAccum
from fastai_bs.finder.advice import cautions, plan_words
from fastai_bs.finder.timing import StepTimer, StepTimes
from fastai_bs.schedule.rules import adam_gain, sqrt_scaling
from fastai_bs.schedule.scaled_lr import rule_name, ScaledLR
from fastai_bs.verify.bs_verify import BatchVerification # noqa: F401, `bs_verify`
from helpers import mlp, quiet_learner, regression

# What a fit does

clock = SimpleNamespace(now=100.)
fits = [] # A list of steps for each fit; not an attribute of the callback, as `bs_find` puts those back

class Probe(Callback):
    "Note what each optimizer step really has; after all other callbacks"
    order,run_valid = 10_000,False
    def before_fit(self): fits.append(SimpleNamespace(n_epoch=self.learn.n_epoch, steps=[])); self._anew()
    def _anew(self): self.n_items = self.n_micro = 0
    def before_batch(self):
        if not hasattr(self, 'n_items'): self._anew()
    def after_backward(self): self.n_items += find_bs(self.yb); self.n_micro += 1
    def before_step(self):
        hyper = self.opt.hypers[-1]
        fits[-1].steps.append((hyper['lr'],hyper.get('wd') or 0.,self.n_items,self.n_micro)); self._anew()

class Costs(Callback):
    "What time passes for beside the model: an optimizer step, and the start of an epoch"
    order = 900
    def before_train(self): clock.now += 0.004
    def before_step(self): clock.now += 0.0003

class Slow(nn.Module):
    "A pass of training takes 4 ms and 0.05 ms for each item, one of validation a third of that"
    def __init__(self):
        super().__init__()
        self.layers = mlp(dtype=torch.float32)
    def forward(self, x):
        clock.now += (0.004+0.00005*len(x))/(1 if self.training else 3)
        return self.layers(x)

def shape(pct):
    "The rate of fastai's one-cycle over its peak, written anew"
    low,high,part = (1/25,1.,pct/0.25) if pct<0.25 else (1.,1e-5,(pct-0.25)/0.75)
    return low+(high-low)*(1-math.cos(math.pi*part))/2

class Done:
    "What a fit did"
    def __init__(self, steps, secs=math.nan):
        self.lr,self.wd,self.items_of,self.micro_of = np.array(steps, dtype=float).reshape(-1, 4).T
        self.secs,self.steps,self.items = secs,len(steps),int(self.items_of.sum())
        self.decay = float((self.lr*self.wd).sum())
        ideal = np.array([shape(i/self.steps) for i in range(self.steps)])
        top = ideal>=min(0.9, ideal.max(initial=0.))
        self.peak = float(np.median(self.lr[top]/ideal[top])) if self.steps else math.nan
        self.top_wd = float(np.median(self.wd[top])) if self.steps else math.nan
        self.most_micro,self.most_items = (int(o.max(initial=0)) for o in (self.micro_of,self.items_of))
    def __repr__(self):
        sizes = f"{self.items} items (x{self.most_items} in {self.most_micro})"
        return f"{self.steps} steps, {sizes}, peak {self.peak:.4g}, wd {self.top_wd:.4g}, decay {self.decay:.4g}"

def done(fit):
    "What `fit()` did, which makes one fit"
    set_seed(0)
    fits.clear(); begin = clock.now
    fit()
    return Done(fits[-1].steps, clock.now-begin)

def trained_as(done, other, tol=0.01, steps=0.05):
    "In which respects two fits differ"
    res = [nm for nm in ('peak','top_wd') if off(getattr(done, nm), getattr(other, nm))>tol]
    res += [nm for nm in ('most_micro','most_items') if getattr(done, nm)!=getattr(other, nm)]
    return res + [nm for nm in ('steps','items') if off(getattr(done, nm), getattr(other, nm))>steps]

def off(x, y):
    "How far `x` is from `y`, relative; 0 where both are 0"
    if x==y: return 0.
    return math.inf if not (x and y) or math.isnan(x) or math.isnan(y) else abs(x/y-1)

# Learners

def train_loader(kind, items, bs):
    where,keeps = kind.split()
    if where=='torch': return TorchDataLoader(items, batch_size=bs, shuffle=True, drop_last=keeps=='drop')
    return DataLoader(items, bs=bs, num_workers=0, shuffle=True, drop_last=keeps=='drop')

class Setting:
    "A learner that can be made again and again, as it trains today"
    def __init__(self, name, n, bs, sizes, kind='fastai drop', opt='sgd', loss='mean', cbs=lambda: [], wd=None, n_epoch=10, lr=None):
        self.name,self.n,self.bs,self.sizes,self.kind,self.cbs,self.wd,self.n_epoch = name,n,bs,sizes,kind,cbs,wd,n_epoch
        self.adam,self.sums = opt=='adam',loss=='sum'
        self.lr = lr or (0.003 if self.adam else 0.02)

    def learner(self, bs=None, without=()):
        "A fresh one, with a loader of other batches, or without its own callbacks of some kinds"
        set_seed(0)
        items = regression(self.n, dtype=torch.float32)
        dls = DataLoaders(train_loader(self.kind, items, bs or self.bs), DataLoader(items[:40], bs=20, num_workers=0), device='cpu')
        cbs = [cb for cb in self.cbs() if type(cb).__name__ not in without]
        opt = Adam if self.adam else partial(SGD, mom=0.9)
        return quiet_learner(dls, Slow(), nn.MSELoss(reduction='sum' if self.sums else 'mean'), opt, [Probe(),Costs(),*cbs], wd=self.wd)

    def measure(self):
        "The plan as found, what its trials did, and today's fit"
        learn = self.learner()
        fits.clear()
        self.plan = learn.bs_find(self.lr, num_it=600, n_epoch=self.n_epoch, show_plot=False)
        self.trials = [Done(o.steps) for o in fits if o.n_epoch==10_000]
        self.today = done(lambda: self.learner().fit_one_cycle(self.n_epoch, self.lr))

# Checks

def formula(name, k, noise, base, known):
    "The factor of a rule, written anew; `k` is the ratio of sizes"
    if name=='no_scaling': return 1.
    if name=='linear_scaling': return k
    if name=='sqrt_scaling': return k**0.5
    gain = k*(base+noise)/(k*base+noise)
    if name=='adascale_gain': return gain
    return gain**0.5*min(gain**(1/6), 1+max(0., 2-k/gain)/5) # adam_gain

def last(lr): return lr.stop if isinstance(lr, slice) else lr

def fit_of_code(setting, plan, without):
    "What the line to paste does, on a learner without its own callbacks of some kinds"
    learn = setting.learner(int(re.search(r'dls of bs=(\d+)', plan.code)[1]), without)
    return done(lambda: exec(plan.code, {**vars(names), 'learn': learn}))

def wrong_code(setting, plan, does):
    "How the line to paste goes wrong: `{}` where it does as planned"
    kinds,res = ('GradAccum','ScaledLR'),[]
    replaced = plan.code.partition(' and your ')[0] # What the comment calls yours stays
    for without in ([nm for nm in kinds if nm in replaced],kinds):
        try: pasted = fit_of_code(setting, plan, without)
        except ValueError as e: res.append(str(e).strip().splitlines()[-1]); continue
        wrong = trained_as(pasted, does)
        if not wrong: break
        res.append(f"{plan.code}: {wrong} in {pasted}")
    else: return {'code': (res,does)}
    return {'code beside own callbacks': (res,does)} if res else {}

def fit_of_words(setting, plan):
    "What the line under the headline does; `None` where it measures again"
    line, = plan_words(plan).get('run', [''])
    if 'bs_find' in line or not line: return None
    learn = setting.learner()
    return done(lambda: exec(line, dict(learn=learn, plan=setting.plan, n_epoch=plan.n_epoch, lr=plan.lr)))

def verified(setting, plan):
    "What `bs_verify` trains at today's size and at the planned one, and how its plan would fit; why not, where it trains nothing"
    learn = setting.learner()
    with contextlib.redirect_stdout(io.StringIO()):
        fits.clear()
        try: res = learn.bs_verify(plan, n_runs=1)
        except ValueError as e: return str(e)
    seen = {bs: Done(fit.steps) for bs,fit in zip(res.df.bs, [o for o in fits if any(lr for lr,*_ in o.steps)])} # Steps that are only timed have no rate
    if not {plan.bs,plan.facts.today.bs}<=set(seen): return f"bs_verify left out {set(res.left_out)}"
    learn = setting.learner()
    return seen,done(lambda: plan.apply(learn).fit_one_cycle(plan.n_epoch, plan.lr))

def own_parts(learn): return [id(cb) for cb in learn.cbs],id(learn.dls.train),learn.wd

def checks(setting, plan):
    "`{name: (says, is)}` of what does not hold"
    today,bad = setting.today,{}
    learn = setting.learner()
    before = own_parts(learn)
    plan.apply(learn)
    after = own_parts(learn)
    does = done(lambda: learn.fit_one_cycle(plan.n_epoch, plan.lr))

    def _check(nm, says, real, tol):
        if not off(says, real)<=tol: bad[nm] = says,real
    k = plan.bs/plan.facts.today.bs
    noise = plan.facts.noise if k>=1 else plan.facts.measured_noise
    needed = today.items*((noise+plan.bs)/(noise+plan.facts.today.bs) if plan.facts.can_plan else 1.)
    _check('items', plan.n_epoch*needed/plan.choice.option.epochs, does.items, 0.05)
    if does.items<0.95*needed: bad['enough'] = needed,does.items
    _check('peak', last(plan.scaled_lr), does.peak, 0.01)
    _check('lr_factor', plan.lr_factor, does.peak/today.peak, 0.01)
    if plan.verdict=='stay': rule = 1.
    else: rule = formula(rule_name(plan.rule), k, noise, plan.facts.today.bs, plan.facts.can_plan)/(k if setting.sums and not setting.adam else 1)
    _check('rule', rule, does.peak/today.peak, 0.02)
    if plan.wd is not None: _check('wd', last(plan.wd), does.top_wd, 0.01)
    if plan.facts.can_plan and today.decay: _check('decay', today.decay, does.decay, 0.05)
    _check('seconds', plan.duration.planned, does.secs, 0.2)
    _check('seconds today', plan.duration.today, today.secs, 0.2)
    for n in re.findall(r'The planned training has only (\d+) step', ' '.join(cautions(plan))): _check('few steps', int(n), does.steps, 0.05)
    rows = plan.table.set_index('bs').lr
    for bs,it in ((plan.facts.today.bs,today),(plan.bs,does)): _check('table', rows[bs], it.peak, 0.01)

    bad |= wrong_code(setting, plan, does)
    worded = fit_of_words(setting, plan)
    if worded and (wrong := trained_as(worded, does, 0.02)): bad['words'] = f"{plan_words(plan)['run'][0]}: {worded}",f"{wrong}, {does}"
    if plan.verdict=='use' and plan.facts.can_plan:
        found = verified(setting, plan)
        if isinstance(found, tuple):
            seen,fit = found
            for nm,bs,ref in (('today',plan.facts.today.bs,today),('planned',plan.bs,fit)):
                wrong = [o for o,tol in (('steps',0.05),('items',0.05),('peak',0.01),('decay',0.05)) if off(getattr(seen[bs], o), getattr(ref, o))>tol]
                if wrong: bad[f'verify {nm}'] = f"{seen[bs]}",f"{wrong}, {ref}"
        elif found: bad['verify none'] = found,None
    if not plan.choice.option.changes:
        if after!=before: bad['stays: parts'] = before,after
        if last(plan.lr)!=last(setting.lr): bad['stays: lr'] = plan.lr,setting.lr
        if wrong := trained_as(does, today): bad['stays: fit'] = f"{wrong}, {today}",f"{does}"
    if plan.choice.reason!='chosen' and setting.trials:
        peaks = [o.peak for o in setting.trials]
        if min(off(o, today.peak) for o in peaks)>0.02: bad['trial today'] = peaks,today.peak
        if plan.facts.trial.largest==plan.bs>plan.facts.today.bs and min(off(o, does.peak) for o in peaks)>0.02: bad['trial planned'] = peaks,does.peak
    return bad

# Settings

def ragged():
    "24 plans: loaders that drop the last batch, or keep it where it is short"
    def _of(kind, n, bs, sizes, **kwargs): return Setting(f'{kind} {n}/{bs}', n, bs, sizes, kind, **{**dict(wd=0.1, n_epoch=20), **kwargs})
    return [_of('fastai drop', 500, 16, (64,128,320)), _of('fastai drop', 650, 50, (100,200,300), opt='adam'),
            _of('fastai keep', 650, 32, (64,128,320), opt='adam'), _of('torch drop', 1000, 32, (64,128,320), opt='adam'),
            _of('torch keep', 650, 16, (64,128,320)), _of('fastai keep', 500, 50, (100,150,200), n_epoch=4)]

def scaled(*args, **kwargs): return lambda: [ScaledLR(*args, **kwargs)]
def accum(*args, **kwargs): return lambda: [GradAccum(*args, **kwargs)]
def both(one, two): return lambda: one()+two()

callbacks = {'': lambda: [], 'sqrt8': scaled(8, sqrt_scaling), 'linear4': scaled(4), 'gain64': scaled(64, adam_gain, noise_scale=200), 'acc2': accum(2),
             'accbs': accum(bs=32), 'acc2 sqrt8': both(accum(2), scaled(8, sqrt_scaling)), 'acc2 linear4': both(accum(2), scaled(4))}

def facts():
    "90 plans: learners that scale their own rate, accumulate, or have a loss that sums"
    kinds = [('adam','mean',o) for o in ('','sqrt8','gain64','acc2','accbs','acc2 sqrt8')] + [('adam','sum',o) for o in ('','sqrt8','acc2','acc2 sqrt8')]
    kinds += [('sgd',loss,o) for loss in ('mean','sum') for o in ('','sqrt8','linear4','acc2','accbs','acc2 linear4')]
    res = []
    for i,(opt,loss,cbs) in enumerate(kinds):
        bs = 32 if 'acc' in cbs else 16
        sizes = (2*bs,4*bs,bs//2,*([8*bs] if (opt,loss,cbs) in (('adam','mean','sqrt8'),('sgd','sum','')) else []))
        wd = (None,0.1,0.01)[i%3] # fastai's Adam has 0.01 of its own
        lr = 0.02/(bs/4 if 'linear' in cbs else 1)
        if opt=='sgd': wd = wd or 0.
        if opt=='sgd' and loss=='sum': lr,wd = lr/(2*bs),wd*2*bs # Over both outputs of all items: today the same as with the mean
        res.append(Setting(f'{opt} {loss} {cbs}'.strip(), 768, 16, sizes, opt=opt, loss=loss, cbs=callbacks[cbs], wd=wd, lr=0.003 if opt=='adam' else lr))
    return res

def plans_of(setting):
    "`(name, plan or the error)` of each plan of a setting"
    yield 'found',setting.plan
    for bs in setting.sizes:
        try: yield f'at({bs})',setting.plan.at(bs)
        except ValueError as e: yield f'at({bs})',e

@contextlib.contextmanager
def all_timed():
    "Time all sizes, as few steps of each as will do: this clock does not vary"
    with patch.multiple(StepTimer, most=2), patch.multiple(StepTimes, budget=math.inf, part=math.inf, slack=math.inf, n_rounds=2): yield

def all_checked(settings):
    "Measure each, and say of each plan what does not hold, which is returned as well"
    res = []
    for setting in settings:
        with warnings.catch_warnings(), patch('time.perf_counter', lambda: clock.now), all_timed():
            warnings.simplefilter('ignore')
            setting.measure()
            for nm,plan in plans_of(setting):
                res.append(bad := {'refused': (str(plan),None)} if isinstance(plan, Exception) else checks(setting, plan))
                print(f"{'BAD' if bad else 'ok '} {setting.name:22} {nm:9} {', '.join(bad)}", flush=True)
                for k,v in bad.items(): print(f"        {k}: {v}")
    return res

def main():
    p = argparse.ArgumentParser()
    p.add_argument('--learner')
    args = p.parse_args()
    torch.set_num_threads(1)
    print('fastai_bs of', fastai_bs.__file__)
    res = all_checked(o for o in ragged()+facts() if args.learner in (None,o.name))
    reasons = Counter(k for bad in res for k in bad)
    n_but = sum(not set(bad)-{'code beside own callbacks'} for bad in res)
    print(f"{sum(not bad for bad in res)} of {len(res)} plans do what they say, {n_but} but for the code beside own callbacks; {dict(reasons.most_common())}")

if __name__=='__main__': main()
