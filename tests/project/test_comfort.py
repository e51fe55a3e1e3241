"What a user of fastai expects of each method: a signature that says all, help that names its source, and each thing shown once"
import inspect

import matplotlib.pyplot as plt
import pytest
import fastai_bs.all as everything
from fastai.learner import Learner, Recorder
from fastai_bs.all import BatchSchedule, GradAccum, NoiseScale
from helpers import loaders, mlp, quiet_learner, regression

of_learner = ['accum_to','bs_find','bs_verify','check_accum','max_bs_find','memory_report']
of_recorder = ['plot_batch_size','plot_noise_scale']
methods = [*((Learner,nm) for nm in of_learner),*((Recorder,nm) for nm in of_recorder)]
functions = [(everything,nm) for nm in everything.__all__]
with_methods = [(cls,nm) for cls in map(vars(everything).get, everything.__all__) if inspect.isclass(cls) and not hasattr(cls, 'to_csv') # None of pandas'
                for nm,f in vars(cls).items() if not nm.startswith('_') and inspect.isfunction(f)]

def test_a_signature_says_all():
    "No `*args` and no `**kwargs` behind which arguments hide"
    for of,nm in (*methods,*functions,*with_methods):
        pars = inspect.signature(getattr(of, nm)).parameters.values()
        assert not [p for p in pars if p.kind in (p.VAR_POSITIONAL,p.VAR_KEYWORD)], nm

def test_a_method_is_one_of_fastais():
    "By its name, by what help shows first, and by where it is to be found"
    for of,nm in methods:
        f = getattr(of, nm)
        assert f.__qualname__==f'{of.__name__}.{nm}'
        assert inspect.getdoc(f)
        assert inspect.getsourcefile(f)
        assert next(iter(inspect.signature(f).parameters))=='self'

def learner(cbs=()): return quiet_learner(loaders(regression(64), 4, shuffle=True), mlp(), cbs=cbs)

shown = {'bs_find': (lambda l: l.bs_find(0.01, num_it=40, n_batch=4),1),
         'bs_find, none asked for': (lambda l: l.bs_find(0.01, num_it=40, n_batch=4, show_plot=False),0),
         'check_accum': (lambda l: l.check_accum(2),0), 'memory_report': (lambda l: l.memory_report(),0),
         'bs_verify': (lambda l: l.bs_verify(0.01, [8], 1, n_epoch=6),0), 'max_bs_find': (lambda l: l.max_bs_find(max_bs=8),0)}

@pytest.mark.parametrize('nm', shown)
def test_nothing_is_shown_twice(nm, short, capsys):
    "A picture where `show_plot` says so, as of `lr_find`; what a notebook makes of the result draws and prints nothing more"
    call,n = shown[nm]
    plt.close('all')
    res = call(learner())
    assert len(plt.get_fignums())==n
    said = capsys.readouterr().out
    for show in ('__repr__','_repr_html_'): assert getattr(type(res), show, None) is None or getattr(res, show)()
    assert len(plt.get_fignums())==n
    assert not capsys.readouterr().out
    assert all(said.count(o)==1 for o in said.splitlines() if o.strip() and '\r' not in o), said
    if hasattr(res, 'plot') and nm=='bs_find': # One more, where it is asked for
        res.plot()
        assert len(plt.get_fignums())==n+1
    plt.close('all')

@pytest.mark.parametrize('cb', [lambda: GradAccum(2),NoiseScale,lambda: BatchSchedule({0: 8})], ids=['GradAccum','NoiseScale','BatchSchedule'])
def test_a_training_shows_fastais_table_only(cb, capsys):
    plt.close('all')
    learn = learner([cb()])
    learn.fit(1, 0.01)
    assert not plt.get_fignums()
    assert not capsys.readouterr().out
