"How the package is built: what may import what, and whose business is whose"
import ast
from pathlib import Path

import fastai_bs
import pytest

package = Path(fastai_bs.__file__).parent
# From below to above: each imports from those before it only
layers = ['text','checks','estimator','scaling','step_time','snapshot','draws','distributed','loaders','hypers','loop','logs','columns','losses',
          'n_acc','window','mock','pairs','gradients','norms','split','batch_size','accumulate','sources','plots','plots_noise','plots_plan','plots_memory','plots_schedule','plots_verify','noise','lr',
          'schedule','set_up','trial_sizes','timing','too_high','cycle','short_cycle','cards','memory','group_norm','max_bs',
          'layout','advice','plan','asked','finder','grow','compare','halving','trainings','left_open','verify_advice','verify_text','verification',
          'trials','verify','both_ways','micros','why_not','accum_check']
above = 'all','__main__' # Re-export, and the demonstration
trees = {p.stem: ast.parse(p.read_text()) for p in package.glob('*.py') if p.stem not in ('_modidx','__init__')}

def imports(tree):
    "`(module, name)` of what a module imports from ours"
    return [(node.module,a.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level for a in node.names]

def private(nm): return nm.startswith('_') and not nm.startswith('__')

def test_all_modules_are_in_the_layers(): assert set(trees)=={*layers,*above}

@pytest.mark.parametrize('mod', layers)
def test_imports_go_down_only(mod):
    assert not [o for o,_ in imports(trees[mod]) if layers.index(o)>=layers.index(mod)]

@pytest.mark.parametrize('mod', [*layers,*above])
def test_no_module_imports_a_private_name(mod): assert not [nm for _,nm in imports(trees[mod]) if private(nm)]

# torch's own, for which it has no public name
of_torch = {'_C','_schema','_indices','_values','_foreach_norm','_foreach_div_','_foreach_mul_','_foreach_add_','_foreach_zero_','_scale',
            '_shutdown_workers','_get_default_store','_post_accumulate_grad_hooks'}
of_python = {'_fields'} # Of a named tuple

def accesses(tree):
    "Private names that are looked up on what is not the object itself: `x._name`, where x is not self, cls or super()"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not private(node.attr) or node.attr in of_torch | of_python: continue
        x = node.value
        if isinstance(x, ast.Name) and x.id in ('self','cls'): continue
        if isinstance(x, ast.Call) and getattr(x.func, 'id', None)=='super': continue
        yield node.lineno,ast.unparse(node)

def test_accesses_are_seen():
    "Does this test see what it should?"
    seen = [o for _,o in accesses(ast.parse('self._a; cls._a; super()._a; o.__dict__; torch._foreach_norm(x); accum._window; self.learn._step()'))]
    assert seen==['accum._window','self.learn._step']

# `distributed` knows two of fastai's and accelerate's beside `loop`: how ranks share a loader, and what a wrapper is remembered by
@pytest.mark.parametrize('mod', [o for o in [*layers,*above] if o!='loop'])
def test_nobody_touches_the_private_names_of_others(mod):
    known = {'distributed': {'DistributedDL._broadcast','cb.accelerator._models'}}.get(mod, set())
    assert not [o for o in accesses(trees[mod]) if o[1] not in known]
