"How the package is built: what may import what, and whose business is whose"
import ast
from pathlib import Path

import fastai_bs
import pytest

package = Path(fastai_bs.__file__).parent
# From below to above: a folder imports from those before it only
floors = [['utils'],['learner'],['accumulate'],['noise','memory'],['schedule'],['finder'],['verify']]
floor_of = {folder: i for i,folders in enumerate(floors) for folder in folders}
at_top = {'all','__init__','__main__','_modidx'} # What users import, the version, the demonstration, and nbdev's index
trees = {p.relative_to(package).with_suffix('').as_posix(): ast.parse(p.read_text()) for p in package.rglob('*.py') if p.stem not in ('_modidx','__init__')}
in_folders = [nm for nm in trees if '/' in nm]

def imports(nm):
    "`(module, name)` of what a module imports from ours, the module as 'learner/loop'"
    folder = nm.split('/')[:-1]
    for node in ast.walk(trees[nm]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[:len(folder)-node.level+1]
            path = '/'.join([*base,*(node.module or '').split('.')]).strip('/')
            for a in node.names: yield (path,a.name) if path in trees else (f'{path}/{a.name}'.strip('/'),None)

@pytest.mark.parametrize('nm', in_folders)
def test_what_is_ours_is_imported_by_its_place(nm):
    "As `from ..learner.loop import`; an `import fastai_bs.finder.bs_find` that only patches a learner is seen by its name"
    assert not [o.module for o in ast.walk(trees[nm]) if isinstance(o, ast.ImportFrom) and not o.level and o.module.startswith('fastai_bs')]

def private(nm): return nm.startswith('_') and not nm.startswith('__')

def test_the_folders():
    assert {p.name for p in package.iterdir() if p.is_dir() and p.name!='__pycache__'}==set(floor_of)
    assert {p.stem for p in package.glob('*.py')}==at_top

@pytest.mark.parametrize('nm', in_folders)
def test_imports_go_down_only(nm):
    "To lower floors, or within a folder"
    folder = nm.split('/')[0]
    others = {o.split('/')[0] for o,_ in imports(nm)}-{folder}
    assert all(floor_of[o]<floor_of[folder] for o in others), others

pages = {f'{p.parent.name}/{p.stem[3:]}': p.name for p in (package.parent/'nbs').rglob('[0-9][0-9]_*.ipynb')} # Notebooks of modules, by the module

@pytest.mark.parametrize('nm', sorted(pages))
def test_a_page_builds_on_pages_before_it(nm):
    "Within a folder notebooks are numbered in the order of their imports, so that a reader can begin with the first"
    folder = nm.split('/')[0]
    assert not [o for o,_ in imports(nm) if o.startswith(f'{folder}/') and pages[o]>=pages[nm]]

@pytest.mark.parametrize('nm', [o for o in trees if o!='all'])
def test_no_module_imports_a_private_name(nm): assert not [o for _,o in imports(nm) if o and private(o)]

# torch's own, for which it has no public name
of_torch = {'_C','_schema','_indices','_values','_foreach_norm','_foreach_div_','_foreach_mul_','_foreach_add_','_foreach_zero_','_scale',
            '_shutdown_workers','_get_default_store','_post_accumulate_grad_hooks','_scaled_dot_product_efficient_attention',
            '_len_torch_dispatch_stack','_pop_torch_dispatch_stack','_len_torch_function_stack','_pop_torch_function_stack'}
of_python = {'_fields'} # What a named tuple has

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

# `ranks` knows two of fastai's and accelerate's beside `loop`: how ranks share a loader, and what a wrapper is remembered by
@pytest.mark.parametrize('nm', [o for o in trees if o!='learner/loop'])
def test_nobody_touches_the_private_names_of_others(nm):
    known = {'learner/ranks': {'DistributedDL._broadcast','cb.accelerator._models'}}.get(nm, set())
    assert not [o for o in accesses(trees[nm]) if o[1] not in known]
