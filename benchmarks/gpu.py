"""All that no CPU can tell: a GPU in ten minutes, one part after another, each on its own and within its minutes.

    make gpu                # The same as: python benchmarks/gpu.py --full; with DATA=FOLDER plans are trained, too, five minutes more
    make gpu DEVICE=cpu     # Small, on a CPU, in a few minutes, to see that all of it runs: into results/quick, and nothing of it on the page

`--parts` takes some of them. A part that cannot run on this device says so, and the others go on. Rows are of the card that they were measured on: what is
stored of this card is not run again. With BatchNorm an accumulated batch is not the large one, so models have GroupNorm in its place."""
import ast, gc, gzip, os, subprocess, sys, time, traceback
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8') # Deterministic algorithms ask for it before CUDA starts

import torch # noqa: E402
from torch import nn # noqa: E402
from torch.profiler import ProfilerActivity, profile # noqa: E402
from torchvision.models import resnet18, resnet50 # noqa: E402
from fastai.callback.core import Callback, CancelStepException # noqa: E402
from fastai.data.core import DataLoaders # noqa: E402
from fastai.learner import Learner # noqa: E402
from fastai.losses import CrossEntropyLossFlat # noqa: E402
from fastai.optimizer import SGD # noqa: E402
from fastai.torch_core import set_seed # noqa: E402
from fastai_bs.all import GradAccum, NoiseScale, bn_to_gn # noqa: E402

import kinds, memory # noqa: E402
from frame import Bare, Half, Table, TensorLoader, arguments, folder, in_pairs, machine, main, md_table, measured, middle, step_peak # noqa: E402
from overhead import arms # noqa: E402
from pays import loss_of, pct # noqa: E402

minutes = 1.25 # Of a part: it ends with the row that it is at
plan_minutes = 5 # Of the trainings as planned

class Unfit(Exception): "This device cannot run it"

def on_gpu(): return memory.device.type=='cuda'

# Learners: inputs, model, and items in a micro-batch

def convnet(): return nn.Sequential(nn.Conv2d(3,8,3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128,10))

def tasks():
    if not on_gpu(): return {'convnet, 16 px': (partial(memory.image, 16),convnet,2), 'transformer': (memory.tokens,memory.Encoder,2)}
    return {'ResNet-50, 128 px': (partial(memory.image, 128),partial(resnet50, num_classes=10),64), 'transformer': (memory.tokens,memory.Encoder,256)}

@cache
def data(task, n): return [torch.stack(o).to(memory.device) for o in zip(*(tasks()[task][0]() for _ in range(n)))]

def learner(task, cbs=(), n=8, factor=1, precision='fp32', change=None, **kwargs):
    "A learner on items for `n` micro-batches, its own batches `factor` micro-batches each, without dropout; `change` is called with the model"
    set_seed(0)
    _,make,micro_bs = tasks()[task]
    model = bn_to_gn(make()).to(memory.device)
    for m in model.modules():
        if isinstance(m, nn.Dropout): m.p = 0.
        if isinstance(m, nn.MultiheadAttention): m.dropout = 0.
    if change: change(model)
    dl = TensorLoader(*data(task, int(n*micro_bs)), int(factor*micro_bs))
    learn = Learner(DataLoaders(dl, dl), model, loss_func=CrossEntropyLossFlat(), opt_func=partial(SGD, mom=0.9), cbs=list(cbs))
    learn._do_epoch_validate = lambda *args, **kwargs: None
    if precision=='fp16':
        if not on_gpu(): raise Unfit("fastai has float16 on CUDA only")
        return learn.to_fp16(**kwargs)
    if precision=='bf16': learn.to_bf16() if on_gpu() else learn.add_cb(Half())
    return learn

def fit(learn, n_epoch=1, lr=1e-3):
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, lr)
    return learn

def flat(learn): return torch.cat([p.detach().flatten().double() for p in learn.model.parameters()])

def clocked(f):
    "What comes of it, and seconds by the clock, the device's included"
    if on_gpu(): torch.cuda.synchronize()
    begin = time.perf_counter()
    res = f()
    if on_gpu(): torch.cuda.synchronize()
    return res,time.perf_counter()-begin

def wall(learn): return clocked(lambda: fit(learn))[1]

def beyond(task, tf32=False, **kwargs):
    "How far training in micro-batches ends from training in the large batch, as a share of the way that this went; `tf32`: convolutions as torch has them"
    was,torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32,tf32
    try: start,large,accum = flat(learner(task)),fit(learner(task, factor=4, **kwargs)),fit(learner(task, [GradAccum(4)], **kwargs))
    finally: torch.backends.cudnn.allow_tf32 = was
    return ((flat(accum)-flat(large)).norm()/(flat(large)-start).norm()).item()

# Parts: each yields rows

class Skipped(Callback):
    "Counts steps that were skipped"
    order = 71
    def before_fit(self): self.n = 0
    def after_cancel_step(self): self.n += 1

def accumulation(quick):
    "Accumulated beside the large batch: the difference after two steps, over the way that these went"
    for task in tasks():
        for precision in ('fp32','bf16','fp16')[:3 if on_gpu() else 2]: yield dict(what=f'{task}, {precision}', value=beyond(task, precision=precision))
        if on_gpu(): yield dict(what=f'{task}, fp32, convolutions in TF32 as torch has them', value=beyond(task, tf32=True))
    for task in tasks():
        for nm,cbs,factor in (('accumulated',[GradAccum(4)],1),('large batch',[],4)):
            learn = fit(learner(task, [*cbs,Skipped()], n=32, factor=factor, precision='fp16', init_scale=2.**20))
            yield dict(what=f'{task}, steps of 8 skipped from a scale of 2^20 on: {nm}', value=learn.skipped.n)

def observers(quick):
    "Are the weights the same to the bit (1) with an observer, under deterministic algorithms?"
    def _look(learn):
        with learn.no_bar():
            learn.memory_report()
            learn.max_bs_find(max_bs=8)
            learn.bs_find(1e-3, num_it=20, n_batch=2, show_plot=False)
        return learn
    flags = torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark = True,False
    try:
        for task in tasks():
            plain = flat(fit(learner(task, [GradAccum(4)])))
            makes = {'nothing else': lambda: learner(task, [GradAccum(4)]), 'NoiseScale()': lambda: learner(task, [GradAccum(4),NoiseScale()]), # noqa: B023
                     'a look by memory_report, max_bs_find, bs_find': lambda: _look(learner(task, [GradAccum(4)], n=32 if quick else 64))} # noqa: B023
            for nm,make in makes.items():
                learn = make()
                learn.dls.loaders[0] = learner(task).dls.train
                yield dict(what=f'{task}, {nm}', value=float(torch.equal(flat(fit(learn)), plain)))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark = flags

waiting = 'cudaStreamSynchronize','cudaDeviceSynchronize','cudaEventSynchronize'

def waits(quick):
    "How often a window of 4 waits for the device, by torch's profiler; on a CPU, where nobody waits, how often a number is read"
    names = waiting if on_gpu() else ('aten::_local_scalar_dense',)
    for task,(*_,bs) in tasks().items():
        for nm,cbs in {'bare': [Bare(4)], **{nm: make(bs) for nm,make in arms.items()}}.items():
            learn = fit(learner(task, cbs, n=16)) # A first fit waits more often
            with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu() else [])]) as prof: fit(learn)
            yield dict(what=f'{task}, {nm}', value=sum(o.count for o in prof.key_averages() if o.key in names)/4)

def cost(quick):
    "Seconds over those with a bare callback that accumulates, pairs of fits; on a GPU in float16"
    for task,(*_,bs) in tasks().items():
        for nm,make in arms.items():
            one,bare = (learner(task, cbs, 16, precision='fp16' if on_gpu() else 'fp32') for cbs in (make(bs),[Bare(4)]))
            value,low,high = middle([a/b for a,b in in_pairs(lambda: wall(one), lambda: wall(bare), 2 if quick else 11)]) # noqa: B023
            yield dict(what=f'{task}, {nm}', value=value, low=low, high=high)

def steps(quick):
    "Milliseconds of a training step, by items; it is flat as long as the device has room for more at once"
    for task,(*_,bs) in tasks().items():
        for factor in [2.**i for i in range(-1 if quick else -5, 2 if quick else 4)]:
            if bs*factor<1: continue
            try:
                learn = learner(task, n=8*factor, factor=factor, precision='fp16' if on_gpu() else 'fp32') # Eight batches of any size
                wall(learn)
                each = [1e3*wall(learn)/len(learn.dls.train) for _ in range(2 if quick else 7)]
            except torch.OutOfMemoryError: break
            value,low,high = middle(each)
            yield dict(what=f'{task}, {int(bs*factor)} items', value=value, low=low, high=high)

def allocator(quick):
    "What the report and a trace say is held at the peak, over what the allocator saw; and does the size that max_bs_find finds train, and 1.25 times it?"
    for task in tasks():
        peak = step_peak(learner(task))
        yield dict(what=f'{task}, memory_report over the allocator', value=learner(task).memory_report().bytes['total']/peak)
        traced = learner(task).memory_report(precision='fp32')
        yield dict(what=f'{task}, traced over the allocator', value=traced.bytes['total']/peak)
    if not on_gpu(): raise Unfit("max_bs_find: only a GPU's memory runs out")
    for half in (False,True):
        found = memory.largest(half)
        yield dict(what=f"ResNet-50, 224 px, {found['precision']}: {found['at']} at what was found, at 1.25 times it {found['beyond']}", value=found['found'])

class WithoutFirst(Callback):
    "Leaves out the first `n` optimizer steps"
    order = 71 # As `Skipped`: after `GradAccum`, for which most batches take no step
    def __init__(self, n): self.n = n
    def before_step(self):
        self.n -= 1
        if self.n>=0: raise CancelStepException

def runs_out(quick):
    """Memory that runs out in training with `on_oom='split'`, as the allocator may have 0.6 of what a step takes: windows that are lost, parts of a
    micro-batch from then on, and how far training ends from one that leaves the same windows out, as a share of the way that this went; rounding alone
    makes the difference between that one and the same in twice as many micro-batches of half the size"""
    if not on_gpu(): raise Unfit("only a GPU's memory runs out")
    total = torch.cuda.get_device_properties(0).total_memory
    was,torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32,False
    try:
        for task in tasks():
            start,peak = flat(learner(task, n=32)),step_peak(learner(task, n=32))
            gc.collect() # Learners of before
            torch.cuda.empty_cache()
            limit = torch.cuda.memory_allocated()+0.6*peak
            split = learner(task, [GradAccum(4, on_oom='split')], n=32)
            torch.cuda.set_per_process_memory_fraction(limit/total)
            try: fit(split)
            finally: torch.cuda.set_per_process_memory_fraction(1.)
            lost = split.grad_accum.n_lost
            left,halves = (fit(learner(task, [GradAccum(int(4/o)),WithoutFirst(lost)], n=32, factor=o)) for o in (1,0.5))
            yield dict(what=f'{task}: windows lost', value=lost)
            yield dict(what=f'{task}: parts', value=split.grad_accum.n_parts)
            for nm,o in {'difference': split, 'rounding': halves}.items():
                yield dict(what=f'{task}: {nm}', value=((flat(o)-flat(left)).norm()/(flat(left)-start).norm()).item())
    finally: torch.backends.cudnn.allow_tf32 = was

def compiled(quick):
    "Accumulated beside the large batch, as in the first part, and milliseconds of a micro-batch, in other ways to run a model"
    backend = 'inductor' if on_gpu() else 'aot_eager'
    ways = {'as it is': None, 'channels_last': lambda m: m.to(memory_format=torch.channels_last), 'torch.compile': lambda m: m.compile(backend=backend)}
    for task in reversed(tasks()): # A ResNet-50 takes minutes to compile
        for nm,change in ways.items():
            if nm=='channels_last' and task=='transformer': continue
            learn = learner(task, [GradAccum(4)], change=change)
            wall(learn)
            yield dict(what=f'{task}, {nm}: difference', value=beyond(task, change=change))
            yield dict(what=f'{task}, {nm}: milliseconds', value=1e3*min(wall(learn) for _ in range(2))/8)
    if not on_gpu(): raise Unfit("CUDA graphs: a CPU has none")
    try: fit(learner(task, [GradAccum(4)], change=lambda m: m.compile(mode='reduce-overhead')))
    except ValueError as e: refusal = str(e)
    else: refusal = ''
    yield dict(what='CUDA graphs are refused (1)', value=float('CUDA graphs' in refusal))

def weights_of(r, alone=False):
    "After five steps of 64 items: `alone` in one batch, else on two ranks in 4 micro-batches of 8 on each"
    import ranks # It needs accelerate
    set_seed(0)
    x,y = ranks.noise(64, 20, r)
    model = ranks.mlp(20, 50, 10).to(x.device)
    learn = ranks.learner(ranks.grad_accum, model, x, y, 64 if alone else 8, ranks.Link())
    if alone:
        learn.cbs = learn.cbs.filter(lambda cb: not isinstance(cb, (GradAccum,ranks.Over)))
        fit(learn, 5, 0.1)
    else: ranks.fit(learn, 5, 0.1)
    return flat(learn).cpu()

def several(quick):
    "Two ranks beside one process with the large batch, over the way of five steps: over NCCL on two GPUs, on a CPU over gloo"
    if on_gpu() and torch.cuda.device_count()<2: raise Unfit("it takes two GPUs")
    try: import ranks
    except ImportError as e: raise Unfit(f"{e.name} is missing") from e
    set_seed(0)
    large,start = weights_of(0, alone=True),torch.cat([p.detach().flatten().double() for p in ranks.mlp(20, 50, 10).parameters()])
    for r,o in enumerate(ranks.on_ranks(weights_of)): yield dict(what=f'rank {r}', value=((o-large).norm()/(large-start).norm()).item())

def matrix(quick):
    "Learners of all kinds, our tools and their companions, each two of them together, as in docs/matrix.md: how many of these small trainings work here"
    script = Path(__file__).parents[1]/'tests/support/matrix.py'
    words = [sys.executable,str(script),'-n',str(min(6, os.cpu_count())),*(['--only','a step of its own'] if quick else [])]
    lines = subprocess.run(words, env={**os.environ, 'DEVICE': memory.device.type}, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for nm,n in ast.literal_eval(lines[-1].partition('minutes: ')[2]).items(): yield dict(what=nm, value=n)
    for o in lines:
        if ' fails ' in o: yield dict(what='this fails: '+o.partition(' fails ')[2].strip().replace(' | ', ', '), value=1)

# Plans that are trained: as in keeps.py, with this card's own step times and seconds by the clock

class Language(nn.Module):
    "The next character by six layers of a transformer"
    def __init__(self, n_chars, width=384, length=256):
        super().__init__()
        self.emb,self.at = nn.Embedding(n_chars, width),nn.Parameter(torch.randn(length, width)/50)
        layer = nn.TransformerEncoderLayer(width, 6, 4*width, dropout=0.2, batch_first=True, norm_first=True)
        self.body,self.norm,self.out = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),nn.LayerNorm(width),nn.Linear(width, n_chars)
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.out(self.norm(self.body(self.emb(x)+self.at, mask=mask, is_causal=True))).flatten(0, 1)

def language(data, name, n): return kinds.sequences(gzip.open(folder(data, name)/'input.txt.gz').read(), n, 256, Language)

def small_resnet():
    "For pictures of 32 pixels"
    model = resnet18(num_classes=10)
    model.conv1,model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False),nn.Identity()
    return model

def pictures(data, name, n):
    train,valid,_,loss = kinds.cifar(data, name, n)
    return train,valid,small_resnet,loss

@dataclass
class OnCard(kinds.Kind):
    half:bool = True # In float16?

planned = {'ResNet-18, CIFAR-10': OnCard(pictures, 'cifar10_jpg', 20_000, 3e-3, 64),
           'transformer, Shakespeare': OnCard(language, 'tinyshakespeare', 3300, 1e-3, 16, (6,)),
           **{nm: replace(kinds.tasks[nm], epochs=(n,)) for nm,n in dict(digits=16, cifar=4, rossmann=4, ratings=1, adult=4, gru=16, awd=16, cifar_sgd=4,
                                                                         table_sgd=4).items()}}
no_data = 'digits', # Comes with scikit-learn

def loaded(name, data):
    "The task, its data on the device"
    task = planned[name]
    if not hasattr(task, 'train'):
        task.load(data)
        task.train,task.valid = ([x.to(memory.device) for x in o] for o in (task.train,task.valid))
    return task

def best_rate(table, name, task, epochs):
    "As it was found for keeps.py, or for this page in the same way"
    rates = Table('keeps')
    return kinds.best_rate(rates if rates.has(part='rate', task=name, epochs=epochs) else table, name, task, epochs)

def of_plan(task, seed):
    learn = kinds.learner(task, task.bs, seed)
    return learn.to_fp16() if on_gpu() and getattr(task, 'half', False) else learn

def trained(task, learn, n_epoch, lr):
    "Losses at the end and seconds of the whole fit"
    with learn.no_logging(): secs = clocked(lambda: learn.fit_one_cycle(n_epoch, lr))[1]
    return dict(train=loss_of(task, learn.model, [o[:10_000] for o in task.train]), valid=loss_of(task, learn.model, task.valid), secs=secs)

def train_plan(table, name, task, seed):
    "A row: the plan for the task's longest training, and losses and seconds of today's and of the one as planned"
    epochs = task.epochs[-1]
    key = dict(part='plan', task=name, epochs=epochs, seed=seed)
    if table.has(**key, machine=machine()): return
    lr = best_rate(table, name, task, epochs)
    learn = of_plan(task, seed)
    with learn.no_bar(), learn.no_logging(): plan,find = clocked(lambda: learn.bs_find(lr, n_epoch=epochs, show_plot=False))
    now = trained(task, of_plan(task, seed), epochs, lr)
    then = trained(task, plan.apply(of_plan(task, seed)), plan.n_epoch, plan.lr) if plan.bs!=task.bs else now
    table.add(**key, lr=lr, bs_now=task.bs, bs=plan.bs, n_epoch=plan.n_epoch, factor=plan.choice.option.lr_factor, reason=plan.choice.reason,
              steps=plan.facts.today.steps, predicted=plan.duration[0]/plan.duration[1], find=find, **{f'{nm}_now': v for nm,v in now.items()}, **then,
              cuda=torch.version.cuda)

def train_plans(args, table):
    "Two seeds of each task; those that the fewest plans are stored of come first, whatever card trained them"
    begin,df = time.perf_counter(),table.df
    stored = df[df.part=='plan'].task.value_counts() if len(df) else {}
    for seed in (0,) if args.quick else (0,1):
        for name in no_data if args.quick or args.data is None else sorted(planned, key=lambda nm: stored.get(nm, 0)):
            train_plan(table, name, loaded(name, args.data), seed)
            if not args.quick and time.perf_counter()-begin>60*plan_minutes: raise Unfit(f"its {plan_minutes:g} minutes are over")
    if args.data is None: raise Unfit("all but one task take --data")

parts = dict(accumulation=accumulation, observers=observers, matrix=matrix, waits=waits, cost=cost, steps=steps, allocator=allocator, runs_out=runs_out,
             compiled=compiled, several=several)

def run(args, t, t_plans):
    if args.device=='cpu' and torch.cuda.is_available(): raise SystemExit("there is a GPU: hide it, CUDA_VISIBLE_DEVICES= python benchmarks/gpu.py ...")
    if args.device=='cpu' and args.full: raise SystemExit("a CPU's figures are no card's: run it with --quick")
    if args.device=='cuda' and not torch.cuda.is_available(): raise SystemExit("torch sees no GPU here: --quick --device cpu shows that all of it runs")
    if args.quick:
        for o in (t,t_plans): o.path.unlink(missing_ok=True)
    failed = []
    for nm in args.parts:
        if t.has(part=nm, machine=machine()): continue
        begin = time.perf_counter()
        try:
            if nm=='plans': train_plans(args, t_plans)
            else:
                for row in parts[nm](args.quick):
                    t.add(part=nm, low=row.pop('low', float('nan')), high=row.pop('high', float('nan')), **row, cuda=torch.version.cuda)
                    if nm=='matrix': continue # All its rows are there by now
                    if not args.quick and time.perf_counter()-begin>60*minutes: raise Unfit(f"its {minutes:g} minutes are over")
        except Unfit as e: print(f'{nm}: not run, or not to its end: {e}')
        except Exception:
            traceback.print_exc()
            failed.append(nm)
        print(f'{nm}: {time.perf_counter()-begin:.0f} seconds')
    if failed: raise SystemExit(f"failed: {', '.join(failed)}")

def value_of(o): return f'{o.value:.4g}'+f' ({o.low:.4g} to {o.high:.4g})'*(o.low==o.low)

def plan_section(df):
    "What was planned and trained, a row for each"
    went = df.assign(changed=df.bs!=df.bs_now, d_train=(df.train/df.train_now-1).where(df.train_now>0.01), d_valid=df.valid/df.valid_now-1,
                     time=df.secs/df.secs_now, cost=df.find/df.secs_now)
    new = went[went.changed]
    def _span(o, f): return f"{f(o.median())}, {f(o.min())} to {f(o.max())}"
    def _planned(r): return [f'{r.n_epoch:.3g}',f'{r.factor:.2g}',pct(r.d_train),pct(r.d_valid),f'{r.time:.2f}',f'{r.predicted:.2f}'] if r.changed else ['']*6
    def _size(r): return f'{r.bs_now:.0f} to {r.bs:.0f}' if r.changed else f'{r.bs:.0f} ({r.reason})'
    lines = [[r.machine,r.task,r.epochs,r.seed,f'{r.lr:.2g}',f'{r.secs_now:.1f}',f'{r.find:.1f}',_size(r),*_planned(r)] for r in went.itertuples()]
    said = [f"* {len(went)} plans, {(~went.changed).sum()} of which stay. `bs_find` takes {_span(went.cost, lambda o: f'{o:.2f}')} of today's training."]
    if len(new):
        said += [f"* Those that change something: training loss {_span(new.d_train, pct)}; validation loss {_span(new.d_valid, pct)}.",
                 f"* Their whole fit takes {_span(new.time, lambda o: f'{o:.2f}')} of today's seconds; predicted {_span(new.predicted, lambda o: f'{o:.2f}')}. "
                 f"With `bs_find` the first one takes {_span(new.time+new.cost, lambda o: f'{o:.2f}')}."]
    heads = ['card','task','epochs','seed','rate',"today's training, s",'`bs_find`, s','batch','epochs of the plan','factor on the rate','training loss',
             'validation loss','time','predicted']
    how = """Today's training at its best rate and the one as planned, from the same new weights, both in seconds by the clock; the plan is made here, with this
card's own step times. ResNet-18 and the transformer are in float16 and have helped to find no rule; the others are those of [keeps.py](keeps.md). Losses are
over today's; no ratio where today's is below 0.01. Since 2026-11-29 a plan for six epochs or more is for at most twice today's batch; those here are older."""
    return '\n\n'.join(["## plans",' '.join(how.split()),'\n'.join(said),md_table(heads, lines)])

def sentence(text): return ' '.join(text.split())+'.'*(text[-1] not in '.?')

def missing(df):
    "Say which parts no card has run"
    left = [nm for nm in parts if not len(df) or not (df.part==nm).any()]
    return f" Parts of it that no card has run yet: {', '.join(map(repr, left))}." if left else ''

def page(df, plans):
    cards = df.machine.dropna().unique()
    head = f"""# On a GPU

What no CPU can tell, measured by `make gpu`. Cards that it has seen: {', '.join(cards) or 'none yet'}. {measured(df, 'cuda')}{missing(df)}
[A day with a GPU](../CONTRIBUTING.md#a-day-with-a-gpu) says how to add yours.
"""
    def _section(nm, o): return f"## {nm}\n\n{sentence(parts[nm].__doc__)}\n\n{md_table(['card','what','value'], o)}\n"
    rows = {nm: [(o.machine,o.what,value_of(o)) for o in df[df.part==nm].itertuples()] for nm in parts} if len(df) else {}
    trained = plans[plans.part=='plan'] if len(plans) else plans
    return '\n'.join([head, *([plan_section(trained)+'\n'] if len(trained) else []), *(_section(nm, o) for nm,o in rows.items() if o)])

def parser():
    p = arguments(__doc__, [*parts,'plans'])
    p.add_argument('--device', default='cuda', choices=['cuda','cpu'], help="'cpu': with --quick alone")
    return p

if __name__=='__main__': main(__doc__, ['gpu','gpu_plans'], run, page, parser=parser())
