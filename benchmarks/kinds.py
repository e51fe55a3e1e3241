"""What `keeps.py` and `worth.py` share: tasks of many kinds, and trainings of them as they are today"""
import collections, gzip, io, math, re, tarfile, time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits, make_friedman1
from torch import nn
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.torch_core import set_seed

import pays
from frame import cache as cache_folder, digits28, folder, standardized
from pays import EpochLoader, Task, flat_loss, loss_of

# Three more tasks of the kind of `pays.py`

class BagOfWords(nn.Module):
    "Positive or negative, from the mean of the words' vectors"
    def __init__(self, n_words, width=64):
        super().__init__()
        self.emb = nn.EmbeddingBag(n_words, width, padding_idx=0)
        self.out = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2))
    def forward(self, x): return self.out(self.emb(x))

def word_ids(texts, n, length, n_words):
    "Numbers of the words that are common in the first `n` texts, as rows that end in zeros"
    words = [re.findall(r"[a-z']+", o.lower()) for o in texts]
    common = collections.Counter(w for o in words[:n] for w in o).most_common(n_words)
    ids = {w: i+1 for i,(w,_) in enumerate(common)}
    x = torch.zeros(len(words), length, dtype=torch.long)
    for row,o in zip(x, words):
        known = [ids[w] for w in o if w in ids][:length]
        row[:len(known)] = torch.tensor(known)
    return x,len(ids)+1

def split(x, y, n): return (x[:n],y[:n]),(x[n:],y[n:])

def reviews(data, name, n, length=300, n_words=5000, model=BagOfWords):
    df = pd.read_csv(folder(data, name)/'texts.csv.gz')
    x,n_words = word_ids(df.text, n, length, n_words)
    return *split(x, torch.tensor((df.label=='positive').values).long(), n),partial(model, n_words),nn.CrossEntropyLoss()

def _pictures(path):
    "`(pictures, labels)` of training and test set, from JPEGs in a folder for each class"
    found = {'train': [],'test': []}
    with tarfile.open(path) as tar:
        for m in tar:
            if m.name.endswith('.jpg'):
                *_,part,label,_ = m.name.split('/')
                picture = np.array(Image.open(io.BytesIO(tar.extractfile(m).read())).convert('RGB'))
                found['train' if part=='train' else 'test'].append((label,picture))
    labels = sorted({o for o,_ in found['train']})
    order = np.random.default_rng(0).permutation # In the file they come class by class
    found = [[v[i] for i in order(len(v))] for v in found.values()]
    return [(torch.tensor(np.stack([o for _,o in v])),torch.tensor([labels.index(o) for o,_ in v])) for v in found]

def cifar_net():
    def _block(ni, nf): return [nn.Conv2d(ni, nf, 3, 2, 1, bias=False), nn.BatchNorm2d(nf), nn.ReLU()]
    return nn.Sequential(*_block(3, 16), *_block(16, 32), *_block(32, 64), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10))

def cifar(data, name, n, n_valid=5000):
    path = cache_folder/'cifar10.pt'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_pictures(folder(data, name)/'cifar10_jpg.tar.xz'), path)
    (x,y),(x_valid,y_valid) = torch.load(path)
    def _float(x): return (x.permute(0,3,1,2).float()/255-0.47)/0.25
    return (_float(x[:n]),y[:n]),(_float(x_valid[:n_valid]),y_valid[:n_valid]),cifar_net,nn.CrossEntropyLoss()

def digits_net(): return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))

def digits(data, name, n):
    x,y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x,y = torch.tensor(x[order]/8-1).float(),torch.tensor(y[order]).long()
    return *split(x, y, n),digits_net,nn.CrossEntropyLoss()

# Text, pictures of other kinds, and targets with many elements

def sequences(text, n, length, model):
    chars,ids = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    seqs = torch.tensor(ids[:len(ids)//(length+1)*(length+1)]).view(-1, length+1).long()
    x,y = seqs[:,:-1].contiguous(),seqs[:,1:].contiguous()
    return (x[:n],y[:n]),(x[-1000:],y[-1000:]),partial(model, len(chars)),flat_loss

def characters(data, name, n, length, model): return sequences(gzip.open(folder(data, name)/'input.txt.gz').read(), n, length, model)

class CharLSTM(nn.Module):
    "An AWD-LSTM whose memory begins anew with each batch"
    def __init__(self, n_chars):
        super().__init__()
        self.rnn,self.out = AWD_LSTM(n_chars, 64, 128, 2, hidden_p=0.1, input_p=0.2, embed_p=0.05, weight_p=0.1),nn.Linear(64, n_chars)
    def forward(self, x):
        self.rnn.reset()
        return self.out(self.rnn(x)).flatten(0, 1)

class CharTransformer(nn.Module):
    "Two layers that look back only"
    def __init__(self, n_chars, width=64, length=64):
        super().__init__()
        self.emb,self.at = nn.Embedding(n_chars, width),nn.Parameter(torch.randn(length, width)/10)
        layer = nn.TransformerEncoderLayer(width, 4, 2*width, dropout=0.1, batch_first=True, norm_first=True)
        self.body,self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),nn.Linear(width, n_chars)
    def forward(self, x):
        n = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        return self.out(self.body(self.emb(x)+self.at[:n], mask=mask)).flatten(0, 1)

def autoencoder_net(): return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 784))

def autoencoder(data, name, n):
    (x,_),(x_valid,_) = [(standardized(x).flatten(1),y) for x,y in digits28(data, name)]
    return (x[:n],x[:n]),(x_valid[:2000],x_valid[:2000]),autoencoder_net,nn.MSELoss()

def tested(name, x, y):
    "The items that losses at the end are of: all of MNIST's test set, as errors are few there, 2000 of Fashion-MNIST's"
    n = 10_000 if name=='mnist' else 2000
    return x[:n],y[:n]

def images(data, name, n, conv):
    train,valid,model,loss = pays.images(data, name, n, conv)
    return train,tested(name, *valid),model,loss

class RowsGRU(nn.Module):
    "The class of a picture that is read row by row"
    def __init__(self):
        super().__init__()
        self.rnn,self.out = nn.GRU(28, 64, batch_first=True),nn.Linear(64, 10)
    def forward(self, x): return self.out(self.rnn(x)[0][:,-1])

def rows(data, name, n):
    (x,y),(x_valid,y_valid) = [(standardized(x)[:,0],y.long()) for x,y in digits28(data, name)]
    return (x[:n],y[:n]),tested(name, x_valid, y_valid),RowsGRU,nn.CrossEntropyLoss()

def masks_net():
    def _block(ni, nf): return [nn.Conv2d(ni, nf, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*_block(1, 8), nn.MaxPool2d(2), *_block(8, 16), *_block(16, 16), nn.Upsample(scale_factor=2), nn.Conv2d(16, 1, 3, 1, 1))

def noisy(x, noise=1.): return x+noise*torch.randn(x.shape, generator=torch.Generator().manual_seed(0))

def masks(data, name, n, noise=2.):
    "Which pixels are lit, under noise"
    def _pair(x): return noisy(x, noise),(x>0).float()
    return *(_pair(standardized(x)[:m]) for (x,_),m in zip(digits28(data, name), (n,1000))),masks_net,nn.BCEWithLogitsLoss()

class CharLSTM2(nn.Module):
    "The next character by two layers of an LSTM"
    def __init__(self, n_chars, width=96):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(n_chars, 32),nn.LSTM(32, width, 2, batch_first=True, dropout=0.1),nn.Linear(width, n_chars)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0]).flatten(0, 1)

def letters(data, name, n, length=48, model=CharLSTM2):
    text = ' '.join(pd.read_csv(folder(data, name)/'texts.csv.gz').text).encode('ascii', 'ignore')
    return sequences(text, n, length, model)

def rossmann(data, name, n):
    train,valid,model,loss = pays.rossmann(data, name, n)
    return train,[o[:5000] for o in valid],model,loss

# Tasks that nobody had trained when the rule was made

def mlp(n_in, n_out, width=64, p=0.):
    return nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Dropout(p), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n_out))

def prices(data, name, n, n_valid=2000):
    "A number that depends on five of ten others, with noise (Friedman 1991)"
    x,y = (torch.tensor(o).float() for o in make_friedman1(n+n_valid, noise=1., random_state=0))
    return *split(2*x-1, (y[:,None]-14.4)/5, n),partial(mlp, 10, 1),nn.MSELoss()

def tumours(data, name, n):
    x,y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x = (x-x[order[:n]].mean(0))/x[order[:n]].std(0)
    return *split(torch.tensor(x[order]).float(), torch.tensor(y[order]).long(), n),partial(mlp, 30, 2, p=0.2),nn.CrossEntropyLoss()

class TitleGenres(nn.Module):
    "Which genres a film has, from the words of its title"
    def __init__(self, n_words, n_genres):
        super().__init__()
        self.emb,self.out = nn.EmbeddingBag(n_words, 48, padding_idx=0),mlp(48, n_genres, p=0.2)
    def forward(self, x): return self.out(self.emb(x))

def genres(data, name, n):
    df = pd.read_csv(folder(data, name)/'movies.csv.gz').sample(frac=1, random_state=0)
    x,n_words = word_ids(df.title, n, 8, 3000)
    y = df.genres.str.get_dummies('|')
    return *split(x, torch.tensor(y.values).float(), n),partial(TitleGenres, n_words, y.shape[1]),nn.BCEWithLogitsLoss()

class ReviewGRU(nn.Module):
    "Positive or negative, read word by word"
    def __init__(self, n_words):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(n_words, 32),nn.GRU(32, 48, batch_first=True, bidirectional=True),nn.Linear(96, 2)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0].amax(1))

class PatchTransformer(nn.Module):
    "The class of a picture, from its 16 patches"
    def __init__(self, width=48):
        super().__init__()
        self.emb,self.at = nn.Conv2d(1, width, 7, 7),nn.Parameter(torch.randn(16, width)/10)
        layer = nn.TransformerEncoderLayer(width, 4, 2*width, dropout=0.1, batch_first=True, norm_first=True)
        self.body,self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),nn.Linear(width, 10)
    def forward(self, x): return self.out(self.body(self.emb(x).flatten(2).transpose(1, 2)+self.at).mean(1))

def waves(n, seed, side=24, noise=2.):
    draw = torch.Generator().manual_seed(seed)
    def _rand(*shape): return torch.rand(n, *shape, generator=draw)
    y = torch.randint(8, (n,), generator=draw)
    angle,freq,phase = math.pi/8*(y[:,None,None]+0.6*(_rand(1, 1)-0.5)),0.5+0.7*_rand(1, 1),2*math.pi*_rand(1, 1)
    v,u = torch.meshgrid(torch.arange(side), torch.arange(side), indexing='ij')
    x = torch.sin(freq*(u*angle.cos()+v*angle.sin())+phase)
    return (x+noise*torch.randn(x.shape, generator=draw))[:,None]/2,y

def textures(data, name, n, n_valid=20_000):
    "Which of eight ways the waves of a picture run, under noise"
    train,valid = split(*waves(n+1000, 0), n)
    more = waves(n_valid-1000, 1) # A loss of 0.05 is that of some pictures in a hundred: of 1000 they are too few to compare
    return train,[torch.cat(o) for o in zip(valid, more)],partial(pays.convnet, True),nn.CrossEntropyLoss()

def clean(data, name, n):
    "The picture without the noise"
    def _pair(x): return noisy(x),x
    return *(_pair(standardized(x)[:m]) for (x,_),m in zip(digits28(data, name), (n,1000))),masks_net,nn.MSELoss()

# Tasks that nobody had trained when the rule was corrected for the first time

def wrong_labels(data, name, n, wrong=0.2):
    "Digits of which a part has the label of another picture"
    (x,y),(x_valid,y_valid) = [(standardized(x).flatten(1),y.long()) for x,y in digits28(data, name)]
    draw = torch.Generator().manual_seed(0)
    y = torch.where(torch.rand(n, generator=draw)<wrong, y[:n][torch.randperm(n, generator=draw)], y[:n])
    return (x[:n],y),tested(name, x_valid, y_valid),partial(mlp, 784, 10),nn.CrossEntropyLoss()

def teacher(data, name, n, n_valid=2000):
    "What another small network says, without noise"
    draw = torch.Generator().manual_seed(0)
    x,w,v = (torch.randn(*shape, generator=draw) for shape in ((n+n_valid,16),(16,8),(8,1)))
    return *split(x, (x@w/2).tanh()@v/2, n),partial(mlp, 16, 1),nn.MSELoss()

class RatingsNet(nn.Module):
    "A rating from the numbers of a user and of a film, by layers"
    def __init__(self, n_users, n_films, width=24):
        super().__init__()
        self.users,self.films,self.out = nn.Embedding(n_users, width),nn.Embedding(n_films, width),mlp(2*width, 1, p=0.1)
    def forward(self, x): return 5.5*self.out(torch.cat([self.users(x[:,0]),self.films(x[:,1])], 1)).sigmoid()

def ratings_net(data, name, n):
    train,valid,model,loss = pays.ratings(data, name, n)
    return train,[o[:10_000] for o in valid],partial(RatingsNet, *model.args),loss

class CharConv(nn.Module):
    "The next character by convolutions that look back only"
    def __init__(self, n_chars, width=96):
        super().__init__()
        self.emb,self.out = nn.Embedding(n_chars, 32),nn.Linear(width, n_chars)
        self.convs = nn.ModuleList(nn.Conv1d(ni, width, 3, dilation=by) for ni,by in ((32,1),(width,2),(width,4)))
    def forward(self, x):
        x = self.emb(x).transpose(1, 2)
        for conv in self.convs: x = conv(nn.functional.pad(x, (2*conv.dilation[0],0))).relu()
        return self.out(x.transpose(1, 2)).flatten(0, 1)

def colours_net():
    def _block(ni, nf, stride=1): return [nn.Conv2d(ni, nf, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*_block(1, 16), *_block(16, 24, 2), *_block(24, 24), nn.Upsample(scale_factor=2), nn.Conv2d(24, 3, 3, 1, 1))

def colours(data, name, n):
    "A picture's colours from its greys"
    (x,_),(x_valid,_),*_ = cifar(data, name, n, 1000)
    return *((o.mean(1, keepdim=True),o) for o in (x,x_valid)),colours_net,nn.MSELoss()

class Residual(nn.Module):
    def __init__(self, nf):
        super().__init__()
        def _conv(): return [nn.Conv2d(nf, nf, 3, 1, 1, bias=False), nn.BatchNorm2d(nf)]
        self.body = nn.Sequential(*_conv(), nn.ReLU(), *_conv())
    def forward(self, x): return (x+self.body(x)).relu()

def residual_net():
    return nn.Sequential(nn.Conv2d(1, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU(), Residual(16), nn.MaxPool2d(2), Residual(16), nn.Flatten(), nn.Linear(144, 10))

class Sorter(nn.Module):
    "Numbers in their order, by a transformer"
    def __init__(self, n_numbers=16, length=8, width=48):
        super().__init__()
        self.emb,self.at = nn.Embedding(n_numbers, width),nn.Parameter(torch.randn(length, width)/10)
        layer = nn.TransformerEncoderLayer(width, 4, 2*width, dropout=0., batch_first=True, norm_first=True)
        self.body,self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),nn.Linear(width, n_numbers)
    def forward(self, x): return self.out(self.body(self.emb(x)+self.at)).flatten(0, 1)

def sorting(data, name, n, n_valid=1000):
    x = torch.randint(16, (n+n_valid,8), generator=torch.Generator().manual_seed(0))
    return *split(x, x.sort().values, n),Sorter,flat_loss

# The tasks

@dataclass
class Kind(Task):
    bs:int = 32 # Today's batch
    epochs:tuple = (4,) # Of today's training
    opt:object = Adam # SGD has a momentum of 0.9
    settled:bool = False # Did it help to make the rule? The others judge it
    n_validated:int = None # Validation items after each epoch; `None`: all. Losses at the end are of all

    @property
    def opt_func(self): return partial(SGD, mom=0.9) if self.opt is SGD else self.opt

def _as_kind(task, **kwargs): return Kind(task.make, task.folder, task.n, task.lr, 64, (1,4), **kwargs)

few_validated = partial(Kind, n_validated=2000) # Of the 10,000 that are tested at the end
gru,awd,transformer = (partial(characters, length=40, model=o) for o in (pays.CharGRU,CharLSTM,CharTransformer))
plain_net = partial(images, conv=partial(pays.convnet, False))
first = {**{nm: _as_kind(o, settled=nm=='ratings') for nm,o in pays.tasks.items()},
         'reviews': Kind(reviews, 'imdb_sample', 800, 3e-3, 16, (1,4,16)),
         'cifar': Kind(cifar, 'cifar10_jpg', 20_000, 3e-3, 64, (1,4)),
         'digits': Kind(digits, '', 1440, 3e-3, 16, (1,4,16))}
first['adult'].epochs = 1,4,16
others = dict(gru=Kind(gru, 'tinyshakespeare', 4600, 8e-3, epochs=(4,16), settled=True),
              awd=Kind(awd, 'tinyshakespeare', 3000, 8e-3, epochs=(4,16), settled=True),
              transformer=Kind(transformer, 'tinyshakespeare', 4600, 4e-3),
              letters=Kind(letters, 'imdb_sample', 3000, 8e-3, bs=16),
              rows=few_validated(rows, 'mnist', 5000, 4e-3, settled=True),
              conv_sgd=Kind(plain_net, 'fashion_mnist', 10_000, 0.05, opt=SGD, settled=True),
              cifar_sgd=Kind(cifar, 'cifar10_jpg', 6000, 0.05, opt=SGD),
              table_sgd=Kind(pays.adult, 'adult', 8000, 0.02, opt=SGD),
              rossmann_sgd=Kind(rossmann, 'rossmann', 8000, 0.01, opt=SGD),
              autoencoder_sgd=Kind(autoencoder, 'mnist', 5000, 0.2, bs=16, opt=SGD, settled=True),
              autoencoder=Kind(autoencoder, 'mnist', 5000, 2e-3, bs=16),
              masks=Kind(masks, 'fashion_mnist', 3000, 4e-3, bs=16),
              digits_long=Kind(digits, '', 1440, 2e-3, bs=16, epochs=(15,), settled=True),
              table_long=Kind(pays.adult, 'adult', 3000, 1e-3, epochs=(12,)),
              cifar_long=Kind(cifar, 'cifar10_jpg', 2000, 4e-3, epochs=(12,)))
later = dict(prices=Kind(prices, '', 5000, 2e-3, epochs=(8,)),
             tumours=Kind(tumours, '', 455, 1e-3, bs=8, epochs=(20,)),
             genres=Kind(genres, 'ml-latest-small', 8000, 2e-3, epochs=(6,)),
             review_words=Kind(partial(reviews, length=60, n_words=2000, model=ReviewGRU), 'imdb_sample', 800, 2e-3, bs=16, epochs=(6,)),
             patches=Kind(partial(images, conv=PatchTransformer), 'fashion_mnist', 4000, 2e-3, epochs=(6,)),
             textures=Kind(textures, '', 2500, 4e-3, bs=16, epochs=(6,), n_validated=1000, settled=True),
             fashion_long=Kind(plain_net, 'fashion_mnist', 3000, 4e-3, epochs=(15,)),
             textures_sgd=Kind(textures, '', 2500, 0.1, bs=16, epochs=(6,), n_validated=1000, opt=SGD, settled=True),
             letters_sgd=Kind(letters, 'imdb_sample', 3000, 1., bs=16, opt=SGD),
             ratings_sgd=Kind(pays.ratings, 'ml-latest-small', 20_000, 0.2, epochs=(6,), opt=SGD),
             clean_sgd=Kind(clean, 'fashion_mnist', 2000, 0.01, bs=16, epochs=(6,), opt=SGD))
fresh = dict(few_pictures=Kind(cifar, 'cifar10_jpg', 1200, 2e-3, bs=16, epochs=(15,)),
             wrong_labels=few_validated(wrong_labels, 'mnist', 4000, 1e-3, epochs=(8,)),
             teacher=Kind(teacher, '', 4000, 4e-3, bs=16, epochs=(6,)),
             ratings_net=Kind(ratings_net, 'ml-latest-small', 40_000, 4e-3, bs=64, epochs=(3,)),
             char_conv=Kind(partial(characters, length=40, model=CharConv), 'tinyshakespeare', 4600, 4e-3, epochs=(6,)),
             colours=Kind(colours, 'cifar10_jpg', 2500, 4e-3, bs=16, epochs=(6,)),
             sorting=Kind(sorting, '', 6000, 2e-3, epochs=(6,)),
             residual_sgd=Kind(partial(images, conv=residual_net), 'fashion_mnist', 6000, 0.05, epochs=(5,), opt=SGD),
             digits_sgd=Kind(digits, '', 1440, 0.05, bs=16, epochs=(12,), opt=SGD),
             table_long_sgd=Kind(pays.adult, 'adult', 6000, 0.02, epochs=(8,), opt=SGD))
last = dict(rows_sgd=few_validated(rows, 'mnist', 6000, 0.1, epochs=(5,), opt=SGD),
            patches_sgd=Kind(partial(images, conv=PatchTransformer), 'fashion_mnist', 5000, 0.05, epochs=(6,), opt=SGD),
            genres_sgd=Kind(genres, 'ml-latest-small', 8000, 1., epochs=(5,), opt=SGD),
            teacher_sgd=Kind(teacher, '', 4000, 0.05, bs=16, epochs=(5,), opt=SGD),
            masks_long=Kind(masks, 'fashion_mnist', 3000, 8e-3, bs=16, epochs=(6,)),
            clean=Kind(clean, 'fashion_mnist', 3000, 4e-3, bs=16, epochs=(6,)),
            letters_long=Kind(letters, 'imdb_sample', 3000, 8e-3, bs=16, epochs=(6,)))
newest = dict(letters_gru=Kind(partial(letters, model=pays.CharGRU), 'imdb_sample', 4000, 8e-3, epochs=(8,)),
              letters_transformer=Kind(partial(letters, model=CharTransformer), 'imdb_sample', 3000, 4e-3, bs=16, epochs=(6,)),
              rossmann_long=Kind(rossmann, 'rossmann', 4000, 1e-3, bs=16, epochs=(8,)),
              fashion_norm=Kind(partial(images, conv=partial(pays.convnet, True)), 'fashion_mnist', 2500, 4e-3, bs=16, epochs=(8,)),
              autoencoder_long_sgd=Kind(autoencoder, 'fashion_mnist', 3000, 0.2, epochs=(10,), opt=SGD),
              few_pictures_sgd=Kind(cifar, 'cifar10_jpg', 3000, 0.02, bs=16, epochs=(8,), opt=SGD),
              prices_sgd=Kind(prices, '', 3000, 0.05, bs=16, epochs=(10,), opt=SGD))
unseen = dict(textures_long=Kind(textures, '', 2500, 4e-3, bs=16, epochs=(9,), n_validated=1000),
              wrong_labels_long=Kind(wrong_labels, 'fashion_mnist', 4000, 1e-3, epochs=(11,)),
              letters_more=Kind(letters, 'imdb_sample', 4000, 8e-3, bs=16, epochs=(5,)),
              residual=few_validated(partial(images, conv=residual_net), 'mnist', 3000, 2e-3, bs=16, epochs=(7,)),
              rows_long_sgd=Kind(rows, 'fashion_mnist', 6000, 0.1, epochs=(8,), opt=SGD),
              masks_sgd=Kind(masks, 'mnist', 3000, 0.5, bs=16, epochs=(8,), opt=SGD))
pictures_norm = partial(images, conv=partial(pays.convnet, True))
longer = dict(textures_12=Kind(textures, '', 2500, 4e-3, bs=16, epochs=(12,), n_validated=1000, settled=True),
              textures_12_sgd=Kind(textures, '', 2500, 0.1, bs=16, epochs=(12,), n_validated=1000, opt=SGD, settled=True),
              letters_9=Kind(letters, 'imdb_sample', 3000, 8e-3, bs=16, epochs=(9,)),
              residual_9=few_validated(partial(images, conv=residual_net), 'mnist', 3000, 2e-3, bs=16, epochs=(9,), settled=True),
              sorting_9=Kind(sorting, '', 6000, 2e-3, epochs=(9,)),
              teacher_7_sgd=Kind(teacher, '', 4000, 0.05, bs=16, epochs=(7,), opt=SGD),
              autoencoder_6=Kind(autoencoder, 'mnist', 5000, 2e-3, bs=16, epochs=(6,)),
              conv_6_sgd=Kind(plain_net, 'fashion_mnist', 10_000, 0.05, epochs=(6,), opt=SGD),
              masks_10=Kind(masks, 'fashion_mnist', 3000, 4e-3, bs=16, epochs=(10,)),
              fashion_norm_12=Kind(pictures_norm, 'fashion_mnist', 2500, 4e-3, bs=16, epochs=(12,), settled=True),
              few_pictures_24=Kind(cifar, 'cifar10_jpg', 1200, 2e-3, bs=16, epochs=(24,), settled=True),
              tumours_30=Kind(tumours, '', 455, 1e-3, bs=8, epochs=(30,)),
              wrong_labels_16=few_validated(wrong_labels, 'mnist', 4000, 1e-3, epochs=(16,)),
              genres_8_sgd=Kind(genres, 'ml-latest-small', 8000, 1., epochs=(8,), opt=SGD))
normed = dict(residual_12=Kind(partial(images, conv=residual_net), 'fashion_mnist', 2500, 2e-3, bs=16, epochs=(12,)),
              digits_norm=few_validated(pictures_norm, 'mnist', 2000, 2e-3, bs=8, epochs=(10,)),
              fashion_norm_sgd=Kind(pictures_norm, 'fashion_mnist', 3000, 0.05, bs=16, epochs=(10,), opt=SGD))
doubled = dict(cifar_10_sgd=Kind(cifar, 'cifar10_jpg', 2500, 0.05, bs=16, epochs=(10,), opt=SGD),
               clean_9=Kind(clean, 'mnist', 2000, 4e-3, bs=16, epochs=(9,)),
               rossmann_10_sgd=Kind(rossmann, 'rossmann', 3000, 0.01, bs=16, epochs=(10,), opt=SGD),
               char_conv_8=Kind(partial(characters, length=40, model=CharConv), 'tinyshakespeare', 3000, 4e-3, bs=16, epochs=(8,)),
               patches_10=few_validated(partial(images, conv=PatchTransformer), 'mnist', 3000, 2e-3, bs=16, epochs=(10,)),
               ratings_net_8=Kind(ratings_net, 'ml-latest-small', 15_000, 4e-3, bs=64, epochs=(8,)),
               letters_gru_8_sgd=Kind(partial(letters, model=pays.CharGRU), 'imdb_sample', 3000, 1., bs=16, epochs=(8,), opt=SGD),
               reviews_20=Kind(reviews, 'imdb_sample', 800, 3e-3, bs=8, epochs=(20,)))
brief = dict(wrong_labels_4=few_validated(wrong_labels, 'mnist', 20_000, 1e-3, bs=64, epochs=(4,)),
             rows_5_sgd=few_validated(rows, 'mnist', 10_000, 0.1, epochs=(5,), opt=SGD),
             letters_transformer_5=Kind(partial(letters, model=CharTransformer), 'imdb_sample', 5000, 4e-3, bs=16, epochs=(5,)),
             textures_5=Kind(textures, '', 8000, 4e-3, epochs=(5,), n_validated=1000),
             residual_4=Kind(partial(images, conv=residual_net), 'fashion_mnist', 10_000, 2e-3, epochs=(4,)),
             prices_5=Kind(prices, '', 8000, 2e-3, epochs=(5,)))
tasks = {**first, **others, **later, **fresh, **last, **newest, **unseen, **longer, **normed, **doubled, **brief}

# Trainings

class StopsAtNaN(Callback):
    def after_batch(self):
        if self.training and self.iter%50==0 and not torch.isfinite(self.loss): raise CancelFitException

def learner(task, bs, seed):
    set_seed(seed)
    valid = [o[:task.n_validated] for o in task.valid]
    dls = DataLoaders(EpochLoader(task.train, bs), EpochLoader(valid, 1000), device=task.train[0].device)
    learn = Learner(dls, task.model(), loss_func=task.loss, opt_func=task.opt_func, cbs=StopsAtNaN())
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    return learn

def clocked(f):
    "What comes of it, and processor seconds"
    start = time.process_time()
    res = f()
    return res,time.process_time()-start

def fitted(task, learn, n_epoch, lr):
    "Losses at the end, and processor seconds of the whole fit"
    with learn.no_logging(): secs = clocked(lambda: learn.fit_one_cycle(n_epoch, lr))[1]
    some = [o[:10_000] for o in task.train]
    return dict(train=loss_of(task, learn.model, some), valid=loss_of(task, learn.model, task.valid), secs=secs)

def guess_loss(task):
    "Loss of the constant that is the best guess for the targets of the training set"
    y = task.train[-1]
    if isinstance(task.loss, nn.MSELoss): return y.var(0, correction=0).mean().item()
    entropy = torch.special.entr
    if isinstance(task.loss, nn.BCEWithLogitsLoss): return (entropy(y.mean(0))+entropy(1-y.mean(0))).mean().item()
    return entropy(y.flatten().bincount()/y.numel()).sum().item()

def best_rate(table, name, task, epochs, seed=100):
    "The rate at which today's training ends with the lowest validation loss, in steps of two"
    def _valid(lr):
        lr = float(f'{lr:.4g}')
        key = dict(part='rate', task=name, epochs=epochs, lr=lr)
        if not table.has(**key): table.add(**key, seed=seed, bs=task.bs, **fitted(task, learner(task, task.bs, seed), epochs, lr))
        df = table.df
        found = df[(df.part=='rate') & (df.task==name) & (df.epochs==epochs) & np.isclose(df.lr, lr, rtol=1e-5)].valid.iloc[0]
        return found if math.isfinite(found) else math.inf
    lr = task.lr
    while True:
        higher,lower = _valid(2*lr)<_valid(lr),_valid(lr/2)<_valid(lr)
        if not (higher or lower): return float(f'{lr:.4g}')
        lr = 2*lr if higher else lr/2
