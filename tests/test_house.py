"How the package is built: what may import what, how large a room may grow, and whose business is whose"
import ast
from pathlib import Path

import fastai_bs
import pytest

package = Path(fastai_bs.__file__).parent
# From below to above: each imports from those before it only
layers = ['text','checks','estimator','scaling','step_time','growth','snapshot','draws','distributed','loaders','hypers','loop','logs','columns','losses',
          'n_acc','window','pairs','gradients','measurement','split','batch_size','accumulate','sources','plots','plots_verify','plots_growth','noise','lr',
          'schedule','adaptive','resume','set_up','trial','timing','too_high','cycle','plan_growth','cards','memory','max_bs',
          'plan_numbers','layout','advice','plan_text','plan','asked','finder','grow','compare','halving','trainings','left_open','verify_advice','verify_text','verification',
          'trials','verify','both_ways','micros','why_not','accum_check']
above = 'all','__main__' # Re-export, and the demonstration
trees = {p.stem: ast.parse(p.read_text()) for p in package.glob('*.py') if p.stem not in ('_modidx','__init__')}

def imports(tree):
    "`(module, name)` of what a module imports from ours"
    return [(node.module,a.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level for a in node.names]

def private(nm): return nm.startswith('_') and not nm.startswith('__')

def is_patch(d): return getattr(d, 'id', None) or getattr(getattr(d, 'func', None), 'id', None)

def owner(fn):
    "The class that a function is patched into, or `None`"
    if any(is_patch(d)=='patch' for d in fn.decorator_list): return fn.args.args[0].annotation.id

def test_all_modules_are_in_the_layers(): assert set(trees)=={*layers,*above}

@pytest.mark.parametrize('mod', layers)
def test_imports_go_down_only(mod):
    assert not [o for o,_ in imports(trees[mod]) if layers.index(o)>=layers.index(mod)]

@pytest.mark.parametrize('mod', [*layers,*above])
def test_no_module_imports_a_private_name(mod): assert not [nm for _,nm in imports(trees[mod]) if private(nm)]

# torch's own, for which it has no public name
of_torch = {'_C','_schema','_indices','_values','_foreach_norm','_foreach_div_','_foreach_mul_','_scale','_shutdown_workers','_get_default_store'}
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

def lines_of(mod):
    "Of code and documentation, as a person reads them: without blank lines and nbdev's marks"
    return [o for o in (package/f'{mod}.py').read_text().splitlines() if o.strip() and not o.startswith(('# %%','# AUTO','__all__'))]

@pytest.mark.parametrize('mod', layers)
def test_no_room_is_too_large(mod): assert len(lines_of(mod))<=270

def class_lines():
    "Lines of each class, with what is patched into it"
    res = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            nm = node.name if isinstance(node, ast.ClassDef) else owner(node) if isinstance(node, ast.FunctionDef) else None
            if nm: res[nm] = res.get(nm, 0) + node.end_lineno - node.lineno + 1
    return {nm: n for nm,n in res.items() if nm not in ('Learner','Recorder')}

def test_no_class_body_is_too_large():
    "What is patched into a class is read with the prose before it"
    assert not {node.name: n for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
                and (n := node.end_lineno-node.lineno+1)>200}

if __name__=='__main__':
    arrows = sum(len({o for o,_ in imports(t)}) for t in trees.values())
    print(f"{len(trees)} modules, {arrows} arrows; lines {({m: len(lines_of(m)) for m in layers})}")
    print("classes with what is patched into them:", sorted(class_lines().items(), key=lambda o: -o[1])[:10])
