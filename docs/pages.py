"""Turn the notebooks into pages for Sphinx: `python docs/pages.py` writes them to `docs/_build/src`

nbdev adds the documentation of what a notebook exports, and links names to where they are documented. What it writes is made for Quarto;
here it becomes what myst-nb reads: entries of Sphinx's Python domain (so that search and other sites find them), admonitions, tags of cells.
"""
import ast, base64, importlib, inspect, re, shutil, sys
from dataclasses import is_dataclass
from functools import cached_property
from html import escape
from operator import attrgetter
from pathlib import Path
from urllib.parse import quote_plus

import yaml
from fastai.callback.core import Callback
from fastcore.docments import docments
from fastcore.nbio import mk_cell, read_nb, write_nb
from nbdev.config import get_config
from nbdev.doclinks import _build_modidx
from nbdev.serve import proc_nbs

sys.path.insert(0, str(Path(__file__).parent))
from plain import llms, page_text, plain # noqa: E402 From this folder

root = Path(__file__).resolve().parent.parent
guides = [f'guides/{o}' for o in ('choose','prove','accumulation','where_memory_goes','learning_rate','growing','noise_scale','several_gpus','coming_from',
                                  'faq')] # In this order
# How it works: pages of each folder, in the order of a reader; a page that is not named comes after these
how = {'accumulate': ('One optimizer step from several micro-batches', 'grad_accum weights window losses sizes progress gradients batch_norm recording oom'),
       'noise': ('The noise scale, measured', 'noise_scale estimator sources norms plots'),
       'finder': ('From step times and short trainings to a plan',
                  'bs_find formulas cycle loss_checks timing mock facts options choice trial request plan advice apply plots'),
       'schedule': ('Learning rate and batch size along a training', 'rules scaled_lr batch_schedule'),
       'memory': ('What fits in memory', 'report trace max_bs group_norm'),
       'verify': ('Trainings and gradients, compared', 'bs_verify trainings compare result advice plots check_accum window_gradients'),
       'learner': ("What is known of fastai's Learner", 'loop snapshot mock loaders optimizer columns ranks'),
       'utils': ('What all of them use', 'checks text plots'), 'demo': ('All of it on digits', '')}
site = 'https://fastai-bs.github.io/fastai_bs'
repo = 'fastai-bs/fastai_bs'
nbs_path = root/'nbs'
# Pages that are no notebooks
written = dict(which='docs/which.md', matrix='docs/matrix.md', changelog='CHANGELOG.md', contributing='CONTRIBUTING.md', log='benchmarks/LOG.md')
# What a visitor may look for, and a page that must then be among the results: `docs/check.py` tries it
look_for = {'out of memory': 'oom.html', 'learning rate': 'scaled_lr.html', 'noise scale': 'noise_scale.html', 'gradient accumulation': 'accumulation.html',
            'warmup': 'rules.html', 'bs_find': 'bs_find.html', 'GradAccum': 'GradAccum.html'}

def page_name(
    nb, # Path of a notebook below nbs, as 'learner/01_ranks.ipynb'
)->str: # Its page, as 'learner/ranks'
    "The page of a notebook; the number in front is for the order on disk"
    path = Path(nb)
    return (path.parent/re.sub(r'^\d+[a-z]*_', '', path.stem)).as_posix()

def notebooks():
    "Paths of all notebooks, those of examples that are no pages left out"
    return [p for p in sorted(nbs_path.rglob('*.ipynb')) if p.parent==nbs_path or (p.parent.parent==nbs_path and not p.parent.name.startswith(('.','_')))]

def modules(
    nbs, # Paths of notebooks
)->dict: # By the name of the page
    "The module that a notebook exports to"
    res = {}
    for p in nbs:
        found = re.search(r'#\|\s*default_exp\s+([\w.]+)', '\n'.join(c.source for c in read_nb(p).cells if c.cell_type=='code'))
        if found: res[page_name(p.relative_to(nbs_path))] = importlib.import_module(f'fastai_bs.{found[1]}')
    return res

# Text

def full_name(
    page, # Its name
    anchor, # Lower case, as nbdev makes them
    text, # Of the link
    mods, # As `modules`
): # As 'fastai_bs.accumulate.grad_accum.GradAccum', or `None`
    "What nbdev's link to a page and an anchor is about; of two that differ by case the one that the text names"
    mod = mods.get(page)
    names = [nm for nm in documented(mod) if nm.lower()==anchor] if mod else []
    names.sort(key=lambda nm: nm.rpartition('.')[2]!=text.rpartition('.')[2])
    return f'{mod.__name__}.{names[0]}' if names else None

def documented(
    mod, # A module
)->list: # Of names, as 'GradAccum' or 'Learner.bs_find'
    "What has an entry: what the module exports, and what it adds to fastai's classes"
    idx = importlib.import_module('fastai_bs._modidx').d['syms'].get(mod.__name__, {})
    names = [k.removeprefix(f'{mod.__name__}.') for k in idx]
    patched = [nm for nm in names if nm.startswith(('Learner.','Recorder.')) and not nm.rpartition('.')[2].startswith('_')]
    return [*(nm for nm in getattr(mod, '__all__', []) if callable(getattr(mod, nm))), *patched]

def page_path(
    link, # Path of a notebook, as a link has it
)->str: # Of its page, beside it
    folder,_,name = link.rpartition('/')
    return f"{folder}{'/' if folder else ''}{page_name(name)}"

def _code_link(m): return f'<a class="reference internal" href="{m[2]}.html"><code class="docutils literal">{escape(m[1])}</code></a>' # MyST drops such a text

def markdown(s, mods):
    "nbdev's and Quarto's markdown as MyST's"
    def _ref(m):
        full = full_name(m[2], m[3], m[1].strip('`'), mods)
        return f"{{py:obj}}`{m[1].strip('`')} <{full}>`" if full else m[0]
    s = re.sub(r'\[\[(`[^`]+`)\]\([^)]*\)\]\(', r'[\1](', s) # nbdev links a name within a link too
    s = re.sub(rf'\[(`[^`\]]+`)\]\({site}/([\w/]+)\.html(?:\.md)?#([^)\s]+)\)', _ref, s)
    s = re.sub(r'\]\(((?:\.\./)*)\.\./docs/(\w+\.md)', r'](\1\2', s)
    s = re.sub(r'\]\((?!https?:)(?:\.\./nbs/)?([\w/.]+\.ipynb)(#[^)\s]*)?\)', lambda m: f"]({page_path(m[1])}.ipynb{m[2] or ''})", s)
    s = re.sub(r'\[`([^`\]]+)`\]\(([\w/.]+)\.ipynb\)', _code_link, s)
    return re.sub(r'^:::+\s*\{\.callout-(\w+)[^}]*\}\s*$', r':::{\1}', s, flags=re.M)

# Entries of the reference

def _name(o): return o if isinstance(o, str) else getattr(o, '__name__', None) or str(o)

def _value(o):
    "A default as it is written"
    if callable(o): return 'lambda' if _name(o)=='<lambda>' else _name(o)
    return repr(o)

def signature(o):
    "As text, without `self` and without addresses in memory"
    if inspect.isclass(o) and '__init__' not in vars(o): return '()' # Nothing of its own
    try: sig = inspect.signature(o)
    except (TypeError,ValueError): return '(...)'
    pars,star = [],False
    for i,p in enumerate(sig.parameters.values()):
        if i==0 and p.name in ('self','cls'): continue
        star = star or p.kind is p.VAR_POSITIONAL
        if p.kind is p.KEYWORD_ONLY and not star: pars,star = [*pars,'*'],True
        text = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '') + p.name
        if p.annotation is not p.empty: text += f': {_name(p.annotation)}'
        if p.default is not p.empty: text += f'{" = " if ": " in text else "="}{_value(p.default)}'
        pars.append(text)
    returns = '' if sig.return_annotation in (sig.empty,None) or inspect.isclass(o) else f' -> {_name(sig.return_annotation)}'
    return f"({', '.join(pars)}){returns}"

def table(o):
    "Parameters and what is returned, from the comments beside them; rows of (name, default, details)"
    if inspect.isclass(o) and '__init__' not in vars(o): return []
    try: pars,sig = docments(o, full=True, returns=True),inspect.signature(o)
    except (TypeError,ValueError): return []
    rows = []
    for nm,p in sig.parameters.items():
        if nm in ('self','cls') or nm not in pars or p.kind in (p.VAR_POSITIONAL,p.VAR_KEYWORD) and not pars[nm].docment: continue
        rows.append((f'`{nm}`', '*required*' if p.default is p.empty else f'`{_value(p.default)}`', pars[nm].docment or ''))
    ret = pars.get('return')
    if ret is not None and not inspect.isclass(o) and (ret.docment or ret.anno is not inspect.Parameter.empty):
        anno = '' if ret.anno in (inspect.Parameter.empty,None) else f'`{_name(ret.anno)}`'
        rows.append(('**returns**', anno or '*see right*', ret.docment or f'a {anno}'))
    return rows

def _cell(s): return ' '.join(str(s).split()).replace('|', '\\|')

def entry(nm, mod, doc, mods):
    "Of `nm` in `mod`, with the documentation that nbdev has linked"
    o = mod
    for part in nm.split('.'): o = getattr(o, part)
    kind = 'class' if inspect.isclass(o) else 'property' if isinstance(o, property) else 'method' if '.' in nm else 'function'
    rows = table(o)
    lines = ['', '| parameter | default | what it is |', '|---|---|---|', *(f"| {' | '.join(map(_cell, row))} |" for row in rows)] if rows else []
    sig = '' if kind=='property' else signature(o)
    return '\n'.join([f'````{{py:{kind}}} {nm}{sig}', f':module: {mod.__name__}', '', markdown(doc, mods), *lines, '````'])

def doc_of(outputs):
    "The docstring in what nbdev shows of a name, with its links: the text between the signature and the table"
    text = ''.join(''.join(o.get('data', {}).get('text/markdown', [])) for o in outputs)
    text = text.split('```')[-1] if '```' in text else text
    text = re.split(r'^\|', text, maxsplit=1, flags=re.M)[0].strip()
    return re.sub(r'^\*(.*)\*$', r'\1', text, flags=re.S)

def _shown(source):
    "The name that a cell of nbdev's shows the documentation of"
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr) and getattr(getattr(node.value, 'func', None), 'id', '')=='show_doc': return ast.unparse(node.value.args[0])

# Pages

def convert(cell, page, mods):
    "A cell of a processed notebook as one for Sphinx, or `None`"
    if cell.cell_type=='raw' or 'WARNING: THIS FILE WAS AUTOGENERATED' in cell.source: return None
    if cell.cell_type=='markdown': return mk_cell(markdown(cell.source, mods), 'markdown')
    directives = {k: str(v).strip().lower() or 'true' for k,v in cell.directives.items()} # nbdev drops the value where it is true
    cell.remove_directives()
    if 'show_doc' in cell.source and (nm := _shown(cell.source)):
        return mk_cell(entry(nm, mods[page], doc_of(cell.outputs), mods), 'markdown') if nm in documented(mods[page]) else None
    if directives.get('include')=='false': return None
    tags = [tag for nm,value,tag in (('echo','false','remove-input'),('output','false','remove-output'),('code-fold','true','hide-input'))
            if directives.get(nm)==value]
    return mk_cell(cell.source, outputs=cell.outputs, metadata={'tags': tags} if tags else {})

def front(nb):
    "Title and one line of a processed notebook"
    raw = next((c.source for c in nb.cells if c.cell_type=='raw' and c.source.startswith('---')), '')
    head = yaml.safe_load(raw.strip().strip('-')) or {}
    return [head.get(k) or '' for k in ('title','description')]

def page_links(
    source, # Path in the repository
    page, # Its name
):
    "A line of HTML below the title: the notebook in Colab, its source, and the page as plain text"
    links = [('Open in Colab',f'https://colab.research.google.com/github/{repo}/blob/main/{source}')] if source.endswith('.ipynb') and page!='index' else []
    links += [('Edit this page',f'https://github.com/{repo}/edit/main/{source}'),('Plain text',f"{page.rpartition('/')[2]}.html.md")]
    first = '' if page in guides else f' title="Begin there with !pip install git+https://github.com/{repo}"' # Guides have a cell for it
    return f"""<p class="page-links">{' '.join(f'<a href="{url}"{first if "colab" in url else ""}>{nm}</a>' for nm,url in links)}</p>"""

def search_links():
    "A line of HTML for the first page: what one may look for"
    links = [f'<a href="search.html?q={quote_plus(o)}" data-finds="{page}">{o}</a>' for o,page in look_for.items()]
    return f'<p class="look-for">Look for: {" ".join(links)}</p>'

def describe_pictures(cells, title):
    "A text for each picture, for who does not see it: what it belongs to"
    place = title
    for c in cells:
        if c.cell_type=='markdown' and (heads := re.findall(r'^#+ (.+)$', re.sub(r'^```.*?^```', '', c.source, flags=re.M|re.S), flags=re.M)): place = heads[-1]
        if c.cell_type=='code' and any('image/png' in o.get('data', {}) for o in c.outputs):
            c.metadata['mystnb'] = {'image': {'alt': f"Picture: {re.sub('[`*$]', '', place)}"}}

def write_page(path, source, dest, mods):
    "Write the page of the processed notebook at `path`, which is `source` below nbs; returns its title and a line about it"
    nb,page = read_nb(path),page_name(source)
    title,line = front(nb)
    head = [f'# {title or page}',*([f'*{line}*'] if line else []),*([search_links()] if page=='index' else []),page_links(f'nbs/{source.as_posix()}', page)]
    cells = [mk_cell('\n\n'.join(head), 'markdown')]
    cells += [o for c in nb.cells if (o := convert(c, page, mods)) is not None]
    describe_pictures(cells, title or page)
    for i,c in enumerate(cells): c['id'] = f'c{i}'
    nb.cells = cells
    nb.metadata = {'kernelspec': {'name': 'python3', 'display_name': 'Python 3', 'language': 'python'},
                   'language_info': {'name': 'python', 'pygments_lexer': 'ipython3'}}
    (dest/f'{page}.ipynb').parent.mkdir(parents=True, exist_ok=True)
    write_nb(nb, dest/f'{page}.ipynb')
    return title or page,line

def write_markdown(page, dest, extra, mods):
    "A page that is markdown already, with its links; its title and a line about it"
    text = (root/written[page]).read_text()
    title,rest = text.removeprefix('# ').split('\n', 1)
    (dest/f'{page}.md').write_text(f'# {title}\n\n{page_links(written[page], page)}\n{markdown(rest, mods)}')
    (extra/f'{page}.html.md').write_text(plain(markdown(text, mods))+'\n')
    return title,''

def write_gallery(pages, dest, extra):
    "Every picture of the guides, as their notebooks hold it, each with a link to its page"
    (extra/'gallery').mkdir()
    lines = ['# Gallery','','*Every picture of the guides; each leads to the guide that draws it*','','<div class="gallery">']
    for page,title in pages.items():
        n = 0
        for c in read_nb(dest/f'{page}.ipynb').cells:
            for data in (o.get('data', {}) for o in getattr(c, 'outputs', [])):
                if 'image/png' not in data: continue
                n += 1
                nm = f"gallery/{page.rpartition('/')[2]}-{n}.png"
                (extra/nm).write_bytes(base64.b64decode(''.join(data['image/png'])))
                what = escape(c.metadata['mystnb']['image']['alt'].removeprefix('Picture: '))
                picture = f'<a href="{page}.html"><img src="{nm}" alt="{what}" loading="lazy"></a>'
                lines.append(f'<figure>{picture}<figcaption><b>{escape(title)}</b><br>{what}</figcaption></figure>')
    (dest/'gallery.md').write_text('\n'.join([*lines,'</div>',''])) # HTML goes on to the first empty line

def contents(caption, pages):
    return '\n'.join([':::{toctree}', ':hidden:', *([f':caption: {caption}'] if caption else []), '', *pages, ':::'])

# The reference: a page for each section of `nbs/reference.ipynb`, and one of all names

def sections(cells):
    "Cells of each section by the name in its heading, as 'learn.bs_find'"
    res = {}
    for c in cells:
        if c.cell_type=='markdown' and (head := re.match(r'## .*?`([\w.]+)', c.source)): res[head[1]] = []
        if res: next(reversed(res.values())).append(c)
    return res

def own_page(name): return f"reference/{name.rpartition('.')[2]}" # Of a heading, or of a documented name

def line_of(o):
    "The first sentence of its documentation, or the comment beside what it returns"
    f = o.fget if isinstance(o, property) else getattr(o, 'func', o)
    returned = docments(f, full=True, returns=True).get('return') if inspect.isfunction(f) else None
    return (inspect.getdoc(f) or getattr(returned, 'docment', None) or '').split('\n\n')[0]

def members(cls):
    "A table of what a result of ours has, with a line for each: methods first"
    fields = docments(cls, full=True) if is_dataclass(cls) else {}
    found = {k: v for k,v in vars(cls).items() if not k.startswith('_')}
    rows = [(f'{k}()',line_of(v)) for k,v in found.items() if inspect.isfunction(v)]
    rows += [(k,p.docment) for k,p in fields.items() if not k.startswith('_')]
    rows += [(k,line_of(v)) for k,v in found.items() if isinstance(v, (property,cached_property))]
    return '\n'.join([f'## What a `{cls.__name__}` has', '', '| name | what it is |', '|---|---|', *(f'| `{k}` | {_cell(line)} |' for k,line in rows if line)])

def take_entry(path, nm):
    "The entry of `nm` on the page at `path`, which gets a link to the page of its own instead"
    nb = read_nb(path)
    cell, = [c for c in nb.cells if re.match(rf'````\{{py:\w+\}} {re.escape(nm)}\(', c.source)]
    text,cell.source = cell.source,f'Arguments, and what it returns: [{nm}](../{own_page(nm)}.ipynb)'
    write_nb(nb, path)
    return text

def write_reference(dest, mods, titles):
    "A page for each section of the reference: the call, its arguments, what it returns, the example; titles and lines by page"
    nb,heads = read_nb(dest/'reference.ipynb'),{}
    where = {nm: page for page,mod in mods.items() for nm in documented(mod)}
    (dest/'reference').mkdir()
    for head,(first,*example) in sections(nb.cells).items():
        nm = head.replace('learn.', 'Learner.')
        page,mod = own_page(head),mods[where[nm]]
        o = attrgetter(nm)(mod)
        result = getattr(o, '__annotations__', {}).get('return')
        call = re.sub(r'\]\((?!https?:|#)', '](../', re.sub('^.*\n', '', first.source))
        texts = [f"# {head}\n\n{page_links('nbs/reference.ipynb', page)}\n{call}", take_entry(dest/f'{where[nm]}.ipynb', nm),
                 '## An example', f'## How it works\n\n[{titles[where[nm]][0]}](../{where[nm]}.ipynb)']
        title,table,example_head,link = (mk_cell(o, 'markdown') for o in texts)
        has = [mk_cell(members(result), 'markdown')] if inspect.isclass(result) and result.__module__.startswith('fastai_bs') else []
        nb.cells = [title,table,example_head,*example,*has,link]
        for i,c in enumerate(nb.cells): c['id'] = f'c{i}'
        write_nb(nb, dest/f'{page}.ipynb')
        heads[page] = head,line_of(o)
    (dest/'reference.ipynb').unlink()
    return heads

def all_names(mods, own):
    "The page of all public names, a line each; those in `own` have a page of their own"
    import fastai_bs.all as everything
    names = {nm: mod for mod in mods.values() for nm in documented(mod) if nm in everything.__all__ or '.' in nm}
    def _kind(nm):
        o = attrgetter(nm)(names[nm])
        if '.' in nm: return 'Methods of a learner and its recorder'
        return 'Functions' if not inspect.isclass(o) else 'Callbacks' if issubclass(o, Callback) else 'Results'
    def _row(nm):
        text = nm.replace('Learner.', 'learn.').replace('Recorder.', 'learn.recorder.')
        link = f'[`{text}`]({own_page(nm)}.ipynb)' if own_page(nm) in own else f'{{py:obj}}`{text} <{names[nm].__name__}.{nm}>`'
        return f'| {link} | {_cell(line_of(attrgetter(nm)(names[nm])))} |'
    lines = ['# All of fastai_bs','','*Every public name in one line; `from fastai_bs.all import *` brings all of them, and `learn.batch_size`*']
    for kind in ('Methods of a learner and its recorder','Callbacks','Functions','Results'):
        lines += ['',f'## {kind}','','| name | what it does |','|---|---|',*(_row(nm) for nm in names if _kind(nm)==kind)]
    return '\n'.join(lines)+'\n'

def reading_order(pages, folder):
    "Pages of a folder as a reader wants them"
    named = [f'{folder}/{o}' for o in how[folder][1].split()]
    found = [o for o in pages if o.split('/')[0]==folder]
    return sorted(found, key=lambda o: named.index(o) if o in named else len(named))

def write_how(dest, pages, heads):
    "The page of all notebooks that make the modules, a line each"
    lines = ['# How it works','','*Each module is a notebook that explains itself: prose, a small piece of code, a lesson that runs*']
    for folder,(title,_) in how.items():
        of = reading_order(pages, folder)
        lines += ['',f'## {title}','',*(f'* [{heads[o][0]}]({o}.ipynb): {heads[o][1]}' for o in of),'',contents('', of)]
    (dest/'how.md').write_text('\n'.join(lines)+'\n')

def build(dest):
    "Pages for Sphinx, and beside them, in `extra`, what the site takes as it is"
    sys.path.insert(0, str(root/'benchmarks')) # Notebooks import from there
    cfg,extra = get_config(),dest.parent/'extra'
    _build_modidx()
    processed = proc_nbs(n_workers=0)
    paths = sorted(processed.rglob('*.ipynb'))
    mods = modules(notebooks())
    for o in (dest,extra):
        shutil.rmtree(o, ignore_errors=True)
        o.mkdir(parents=True)
    of_path = {page_name(p.relative_to(nbs_path)): p.relative_to(nbs_path) for p in notebooks()}
    heads = {}
    for p in paths: # nbdev may have taken the number off already
        page = page_name(p.relative_to(processed))
        heads[page] = write_page(p, of_path[page], dest, mods)
    own = write_reference(dest, mods, heads)
    del heads['reference']
    first = [o for o in guides if o in heads]
    rest = [o for o in heads if o!='index' and o not in mods and o not in first]
    modules_pages = [o for folder in how for o in reading_order([o for o in heads if o in mods], folder)]
    heads |= own
    heads |= {o: write_markdown(o, dest, extra, mods) for o in written}
    write_gallery({o: heads[o][0] for o in (*first,*rest)}, dest, extra)
    write_how(dest, modules_pages, heads)
    (dest/'names.md').write_text(all_names(mods, own))
    for o in ('how','names'): (extra/f'{o}.html.md').write_text(plain((dest/f'{o}.md').read_text())+'\n')
    for p in dest.rglob('*.ipynb'):
        text = (extra/p.relative_to(dest)).with_suffix('.html.md')
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(page_text(read_nb(p)))
    heads |= {'names': ('All of fastai_bs','Every public name in one line'),'how': ('How it works','')}
    parts = {'Start': [*first[:1],'which'], 'Guides': [*first[1:],*rest,'matrix'], 'Reference': ['names',*own], 'How it works': modules_pages,
             'Project': ['changelog','log','contributing']}
    (extra/'llms.txt').write_text(llms(*heads['index'], [(nm,[(o,*heads[o]) for o in pages]) for nm,pages in parts.items()], site))
    shown = parts | {'Guides': [*parts['Guides'],'gallery'], 'How it works': ['how']}
    index = read_nb(dest/'index.ipynb')
    index.cells += [mk_cell(contents(*o), 'markdown', id=f'contents-{i}') for i,o in enumerate(shown.items())]
    write_nb(index, dest/'index.ipynb')
    if (cfg.nbs_path/'images').exists(): shutil.copytree(cfg.nbs_path/'images', dest/'images')

if __name__=='__main__': build(Path(sys.argv[1]) if len(sys.argv)>1 else root/'docs/_build/src')
