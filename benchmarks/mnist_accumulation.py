"""A gradient accumulation tutorial's run, through `GradAccum(2)`: an MLP on MNIST, batch 64 as 2 x 32, SGD at 0.01, 3 epochs.

    python benchmarks/mnist_accumulation.py --full --data FOLDER     # FOLDER/mnist/*.gz; a minute or two

The tutorial (MindSpore's, on gradient accumulation) prints accuracies of 84.8, 90.1 and 92.0% after the three epochs, and average test
losses of 0.528, 0.340 and 0.281. Its framework's initialisation is part of it: weights normal with standard deviation 0.01, biases 0."""
import numpy as np
import torch
from torch import nn
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.torch_core import set_seed
from fastai_bs.all import GradAccum

from frame import TensorLoader, digits28, main, md_table, measured, standardized

tutorial = (84.8,90.1,92.0),(0.528,0.340,0.281)

def mlp():
    net = nn.Sequential(nn.Linear(784,512), nn.ReLU(), nn.Linear(512,512), nn.ReLU(), nn.Linear(512,10))
    for o in net:
        if isinstance(o, nn.Linear): nn.init.normal_(o.weight, 0, 0.01), nn.init.zeros_(o.bias)
    return net

def flat(model): return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

class Note(Callback):
    "The parameters after 100 optimizer steps, and a row per epoch"
    order = 70
    def __init__(self, n_acc): self.n_acc,self.rows = n_acc,[]
    def after_batch(self):
        if self.training and self.train_iter==100*self.n_acc: self.early = flat(self.learn.model)
    def after_epoch(self): self.rows.append(self.learn.recorder.log[2:4])

def train(data, seed, n_acc):
    set_seed(seed)
    dls = DataLoaders(TensorLoader(*data[0], 64//n_acc, shuffle=True), TensorLoader(*data[1], 1000), device='cpu')
    note = Note(n_acc)
    learn = Learner(dls, mlp(), loss_func=nn.CrossEntropyLoss(), opt_func=SGD, metrics=accuracy, cbs=[*[GradAccum(n_acc)]*(n_acc>1), note])
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 0.01)
    loss,acc = np.array(note.rows, float).T
    return 100*acc,loss,note.early,flat(learn.model)

def far(a, b): return ((a-b).norm()/b.norm()).item()

def run(args, t):
    data = [(standardized(x).flatten(1), y.long()) for x,y in digits28(args.data)]
    if args.quick: data[0] = [o[:12_800] for o in data[0]]
    for seed in args.seeds or range(3):
        if t.has(seed=seed): continue
        (acc,loss,early,end),(acc64,_,early64,end64) = train(data, seed, 2),train(data, seed, 1)
        t.add_all([dict(seed=seed, epoch=i+1, accuracy=acc[i], loss=loss[i], accuracy_64=acc64[i], apart_100=far(early, early64), apart_end=far(end, end64))
                   for i in range(3)])

def page(df):
    def _three(o, digits): return ' / '.join(f'{v:.{digits}f}' for v in o)
    rows = [(seed,_three(o.accuracy, 2),_three(o.loss, 3),_three(o.accuracy_64, 2),f'{o.apart_100.iloc[0]:.1e}',f'{o.apart_end.iloc[0]:.1e}')
            for seed,o in df.groupby('seed')]
    heads = 'seed','accuracy, %','test loss','accuracy, batch 64','after 100 steps','after 3 epochs'
    return f"""# {__doc__.splitlines()[0]}

{measured(df)} `benchmarks/mnist_accumulation.py` says what is run. The last columns are of the
parameters, the distance to those of batch 64 on the same items over their norm.

{md_table(heads, [('the tutorial',_three(tutorial[0], 1),_three(tutorial[1], 3),'','',''), *rows])}"""

if __name__=='__main__': main(__doc__, ['mnist_accumulation'], run, page)
