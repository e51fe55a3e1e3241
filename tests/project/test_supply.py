"What the package brings along, and what it asks of nobody: the licence, what it needs, no network, and nothing that is unpickled or run from outside"
import ast
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import fastai_bs
from helpers import root

package = Path(fastai_bs.__file__).parent
trees = {p.relative_to(package).as_posix(): ast.parse(p.read_text()) for p in package.rglob('*.py') if p.name!='_modidx.py'}

def top(nm): return nm.partition('.')[0]

def imported(tree):
    "Modules that are imported, but for those of the package itself"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level: yield node.module

# Of Python's own, those that reach neither a network, another program nor what somebody has pickled
harmless = {'argparse','collections','contextlib','copy','dataclasses','datetime','functools','gc','html','inspect','itertools','math','numbers','operator',
            'os','pathlib','random','re','signal','sys','tempfile','textwrap','threading','time','types','typing','warnings','weakref'}
# By name, wherever it is from: what is unpickled or downloaded, programs that are run, and Python's own ways to read a file or run a text
reads = re.compile(r'open|eval|exec|__import__|import_module|system|popen|environ|loads?|load_(?!digits\b|state_dict\b)\w+|Unpickler|hub|urlopen|'
                   r'untar_data|\w*download\w*|fromfile|memmap|read_(csv|json|pickle|html|excel|parquet|sql\w*|bytes|text)')
writes = re.compile(r'save(fig|z|_\w+)?|write(_\w+)?|dumps?|mkdir|mkstemp|to_(csv|json|pickle|parquet|excel)|\w*(TemporaryDirectory|TemporaryFile)')

def named(tree, pattern):
    "What is looked up or imported by a name of `pattern`; of Python's own functions, those that are called"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (pattern.fullmatch(node.attr) or pattern.fullmatch(ast.unparse(node))): yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and pattern.fullmatch(node.func.id): yield node.func.id
        elif isinstance(node, ast.ImportFrom): yield from (a.name for a in node.names if pattern.fullmatch(a.name))

def required(dist):
    "Names of the distributions that one needs, without extras"
    return {re.match(r'[\w.-]+', o)[0].lower().replace('_','-') for o in metadata.requires(dist) or () if 'extra ==' not in o}

@pytest.mark.skipif(sys.version_info<(3,11), reason="what of a distribution can be imported is known from Python 3.11 on")
def test_what_is_imported():
    "A harmless part of Python, what is asked for, or what fastai and pandas bring"
    brought = set().union(*map(required, ('fastai_bs','fastai','pandas')))
    of = metadata.packages_distributions()
    for nm,tree in trees.items():
        for mod in map(top, imported(tree)):
            known = {o.lower().replace('_','-') for o in of.get(mod, ())}
            assert mod in harmless or mod=='fastai_bs' or mod not in sys.stdlib_module_names and known & brought, f"{nm} imports {mod}"

@pytest.mark.parametrize('nm', trees)
def test_nothing_from_outside(nm):
    "No network, no other program, no file that is read: what a learner is loaded from stays fastai's business. Ranks of one training exchange objects"
    our_own = {'learner/mock.py': ['os.environ'], 'memory/report.py': ['open']} # Whether a console is PyCharm's; Linux's count of the process's memory
    assert [o for o in named(trees[nm], reads) if not o.endswith('.eval')]==our_own.get(nm, [])

def test_harm_is_seen():
    "Do these tests see what they should?"
    for code in ('torch.load(f)', 'pickle.loads(s)', 'from torch.hub import load_state_dict_from_url', 'load_learner(f)', 'open(f)', 'os.system(s)', 'eval(s)',
                 'pd.read_csv(url)', 'untar_data(URLs.MNIST)', 'np.load(f)', 'Path(f).read_text()'): assert [*named(ast.parse(code), reads)], code
    assert not [*named(ast.parse('model.load_state_dict(o); torch.compile(m); o.loaders; reopen'), reads)]
    assert [*imported(ast.parse('import urllib.request, socket\nfrom subprocess import run\nfrom .lr import x'))]==['urllib.request','socket','subprocess']

def test_only_the_demonstration_writes_files():
    "Its picture, and fastai's `lr_find` the weights for a while, in a temporary folder."
    assert {(nm,o) for nm,tree in trees.items() for o in named(tree, writes)}=={
        ('memory/report.py','probe.save'),('finder/mock.py','bar.write'), # What a hook saw; a line on the screen
        *(('__main__.py',o) for o in ('tempfile.TemporaryDirectory','a.out.mkdir','figure.savefig'))}

def test_the_licence_is_installed():
    "With its text. What a build leaves in the checkout has none"
    found = [d for d in metadata.distributions(name='fastai_bs') if d.read_text('licenses/LICENSE')]
    assert found
    assert all(d.metadata['License-Expression']=='Apache-2.0' and d.metadata.get_all('License-File')==['LICENSE'] for d in found)
    assert found[0].read_text('licenses/LICENSE')==(root/'LICENSE').read_text()

# Of what `torch.use_deterministic_algorithms` lists, all that a tensor or torch itself has, but for what pandas' frames have too
unordered = re.compile(r'(index_(add|copy|put|reduce)|(masked_)?scatter(_add|_reduce)?|put|bincount|histc|kthvalue|gather|grid_sample|interpolate)_?|'
                       r'repeat_interleave|torch\.(cumsum|median)')

def test_what_adds_up_in_any_order():
    "Nothing does"
    assert not {(nm,o) for nm,tree in trees.items() for o in named(tree, unordered)}
