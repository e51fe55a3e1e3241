"What the benchmarks share: reading MNIST's files, a loader for tensors, and the processor time of a fit"
import gzip, time

import numpy as np
import torch

def read_idx(path):
    with gzip.open(path) as f: data = f.read()
    shape = np.frombuffer(data, '>i4', data[3], 4)
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4+4*data[3]).reshape(*shape).copy())

class TensorLoader:
    "Batches of tensors that fit in memory"
    def __init__(self, x, y, bs, shuffle=False): self.x,self.y,self.bs,self.shuffle,self.dataset,self.n = x,y,bs,shuffle,y,len(y)
    def __len__(self): return -(-self.n//self.bs)
    def new(self, bs=None): return TensorLoader(self.x, self.y, bs or self.bs, self.shuffle) # As fastai's loaders have it
    def __iter__(self):
        for idx in (torch.randperm(self.n) if self.shuffle else torch.arange(self.n)).split(self.bs): yield self.x[idx],self.y[idx]

def seconds(learn):
    "Processor time of an epoch; other work on the machine is not in it"
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    return time.process_time()-start
