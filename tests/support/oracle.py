"Slow and obvious: the gradient of every single item, and what must be measured from them"
import pandas as pd
import torch

def item_grads(model, loss_func, items):
    "A row for each of `items` `(x, y)`: its own gradient over the parameters that are trained, flat; `loss_func` is a mean"
    params,rows = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad],[]
    for x,y in items:
        loss = loss_func(model(torch.as_tensor(x)[None]), torch.as_tensor(y)[None])
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        rows.append(torch.cat([torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten() for p,g in zip(params,grads)]))
    return torch.stack(rows)

def moments(rows, elems=None):
    """`tr_sigma` and `g_sq` for drawing without replacement from `rows`: `S²` with the divisor `D-1`, and `|G|² - S²/D`. With `elems`, the weights of
    the rows in the mean of a micro-batch, they are those of an element, to first order in the spread of the weights"""
    w = torch.ones(len(rows), dtype=rows.dtype) if elems is None else elems.to(rows.dtype)
    D = len(rows)
    mean = (w[:,None]*rows).sum(0)/w.sum()
    S2 = (w**2*((rows-mean)**2).sum(1)).sum().item()/(D-1)/w.mean().item() # Of one element, in the mean of many
    return S2,(mean@mean).item() - S2/w.sum().item()

def noise_scale(rows, elems=None):
    "The ratio of the `moments`, in rows or in elements"
    tr_sigma,g_sq = moments(rows, elems)
    return tr_sigma/g_sq

def windows_in_order(n, bs, n_acc):
    "Items of each micro-batch of each window of an epoch without shuffling"
    micro = [list(range(i, min(i+bs,n))) for i in range(0, n, bs)]
    return [micro[i:i+n_acc] for i in range(0, len(micro), n_acc)]

def moments_of_micros(gs, ns):
    "`tr_sigma` and `g_sq` of a window from the mean gradient of each micro-batch and its elements (McCandlish et al. 2018, for parts of unequal size)"
    N = sum(ns)
    g = sum(n*o for n,o in zip(ns, gs))/N
    tr_sigma = (sum(n*(o@o) for n,o in zip(ns, gs)) - N*(g@g))/(len(gs)-1)
    return float(tr_sigma),float(g@g-tr_sigma/N)

def window_rows(rows, windows, elems=None):
    "What must be measured: moments of each of `windows`, of several micro-batches that hold elements, from the gradients of their items"
    w = torch.ones(len(rows), dtype=rows.dtype) if elems is None else elems.to(rows.dtype)
    res = []
    for window in windows:
        gs = [((w[m,None]*torch.nan_to_num(rows[m])).sum(0)/w[m].sum(), w[m].sum()) for m in window if w[m].sum()>0]
        if len(gs)<2: continue
        res.append((sum(len(m) for m in window), sum(n for _,n in gs).item(), *moments_of_micros(*zip(*gs))))
    return pd.DataFrame(res, columns=['n_items','n_elems','tr_sigma','g_sq'])

def z_score(df, exact):
    "Standard errors between the measured windows of `df` and the `exact` noise scale, in elements"
    e = df.tr_sigma - exact*df.g_sq
    return (e.mean()/e.sem()).item()
