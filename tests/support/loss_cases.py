"Losses of torch and of fastai, each with items and a model: what they average over differs from item to item"
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, FocalLossFlat, LabelSmoothingCrossEntropyFlat, MSELossFlat
from helpers import mlp, regression, token_model, tokens

f64 = torch.float64

def rand(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)
def ints(high, *shape, seed=0): return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))

weight = torch.tensor([0.5,2.,1.,3.], dtype=f64)
classes = [(rand(5,seed=i), ints(4,seed=i)) for i in range(13)]
probs = [(x, rand(4,seed=i+50).softmax(0)) for i,(x,_) in enumerate(classes)]
binary = [(x, ints(2,2,seed=i).to(f64)) for i,(x,_) in enumerate(classes)]
reals = regression(13)

seqs = tokens(13, n_tok=4, length=3)

def padded(*empty, pad=-100):
    "Items in each of which one to three tokens count, and none in those at `empty`"
    return tokens(13, n_tok=4, length=3, kept=lambda i: 0 if i in empty else 1+i%3, pad=pad)

def cls(loss, model=None): return loss,classes,model or (lambda: mlp(5,4))
def real(loss): return loss,reals,mlp
def bina(loss, model=mlp): return loss,binary,model
def token(loss, items, last=True): return loss,items,partial(token_model, 4, last=last)
log_mlp = lambda: nn.Sequential(mlp(5,4), nn.LogSoftmax(-1))

zero_weighted = [(x, torch.tensor(0 if i in (0,1,8,9) else 1+i%3)) for i,(x,_) in enumerate(classes)] # Whole micro-batches of class 0

exact = {
    'ce': cls(nn.CrossEntropyLoss()), 'ce_weight': cls(nn.CrossEntropyLoss(weight)), 'ce_sum': cls(nn.CrossEntropyLoss(reduction='sum')),
    'ce_smooth_weight': cls(nn.CrossEntropyLoss(weight, label_smoothing=0.1)), 'f_ce_weight': cls(partial(F.cross_entropy, weight=weight)),
    'nll_weight': cls(nn.NLLLoss(weight), log_mlp), 'ce_flat_weight': cls(CrossEntropyLossFlat(weight=weight)),
    'smooth_flat': cls(LabelSmoothingCrossEntropyFlat()), 'focal_flat_weight': cls(FocalLossFlat(weight=weight)),
    'multi_margin': cls(nn.MultiMarginLoss()), 'ce_probs_weight': (nn.CrossEntropyLoss(weight), probs, lambda: mlp(5,4)),
    'kl': (nn.KLDivLoss(reduction='batchmean'), probs, log_mlp),
    'mse': real(nn.MSELoss()), 'mse_flat': real(MSELossFlat(floatify=False)),
    'smooth_l1': real(F.smooth_l1_loss), 'bce_logits_pos': bina(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.,3.], dtype=f64))),
    'bce_logits_flat': bina(BCEWithLogitsLossFlat()), 'multilabel_soft': bina(nn.MultiLabelSoftMarginLoss()),
    'token_axis1': token(CrossEntropyLossFlat(axis=1), seqs, False), 'token_pad': token(CrossEntropyLossFlat(ignore_index=9), padded(pad=9)),
    'token_pad_weight': token(nn.CrossEntropyLoss(weight), padded(), False),
    'token_pad_smooth_weight': token(nn.CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.1), padded(pad=3), False),
    'token_empty_flat': token(CrossEntropyLossFlat(), padded(0,1,8,9,12)), 'token_empty_window': token(nn.CrossEntropyLoss(), padded(*range(6)), False),
    'token_empty_sum': token(nn.CrossEntropyLoss(reduction='sum'), padded(0,1), False),
    'token_empty_weight': token(nn.CrossEntropyLoss(weight), padded(0,1,6,7), False),
    'token_empty_all': token(nn.CrossEntropyLoss(), padded(*range(13)), False),
    'weight_zero': (nn.CrossEntropyLoss(torch.tensor([0.,1.,2.,3.], dtype=f64)), zero_weighted, lambda: mlp(5,4)),
}
