"Write README.md from nbs/index.ipynb, and the rooms in CONTRIBUTING.md from the first cells of the notebooks: `python docs/readme.py`"
import re
from pathlib import Path
from fastcore.nbio import read_nb

root = Path(__file__).resolve().parent.parent
repo = 'https://github.com/fastai-bs/fastai_bs'
here = f'{repo}/blob/main/nbs/'
raw = 'https://raw.githubusercontent.com/fastai-bs/fastai_bs/main'
# On GitHub only: pages of the site ask no other host for anything
badges = ' '.join([f'[![{nm}]({repo}/actions/workflows/{nm.lower()}.yml/badge.svg)]({repo}/actions/workflows/{nm.lower()}.yml)' for nm in ('Test','Docs')]
                  + [f'[![License](https://img.shields.io/badge/license-Apache--2.0-blue)]({repo}/blob/main/LICENSE)'])

def output_text(out):
    "The text of a cell's output, as an indented block"
    data = out.get('data', {})
    txt = ''.join(data.get('text/markdown') or data.get('text/plain') or out.get('text', ''))
    return '\n'.join(f'    {o}'.rstrip() for o in txt.strip().splitlines())

def cell_text(cell):
    "Markdown of a cell: its text, or its code and outputs; nothing where it is hidden"
    if cell.cell_type=='markdown':
        text = re.sub(r'\]\(([\w/]+\.ipynb)\)', rf']({here}\1)', cell.source).replace('](../docs/', f']({repo}/blob/main/docs/')
        return text.replace('](images/', f']({raw}/nbs/images/') # Whole addresses: an index of packages shows this page too
    if cell.cell_type!='code' or '#| hide' in cell.source: return ''
    return '\n\n'.join([f'```python\n{cell.source}\n```', *filter(None, map(output_text, cell.outputs))])

def readme():
    cells = filter(None, (cell_text(c).strip() for c in read_nb(root/'nbs/index.ipynb').cells))
    title,*rest = cells
    return '\n\n'.join([title, badges, '<!-- Written by docs/readme.py from nbs/index.ipynb: edit that one -->', *rest]) + '\n'

floors = 'utils','learner','accumulate','noise','memory','schedule','finder','verify'

def rooms():
    "CONTRIBUTING.md with a line for each module, below its folder: what its notebook says in its first cell"
    def _line(p): return read_nb(p).cells[0].source.partition('\n> ')[2].strip()
    def _folder(nm):
        return '\n'.join([f'**{nm}**\n',*(f'- `{p.stem[3:]}`: {_line(p)}' for p in sorted((root/'nbs'/nm).glob('[0-9]*.ipynb')))])
    before,begin,rest = (root/'CONTRIBUTING.md').read_text().partition('<!-- Written by docs/readme.py -->\n')
    return before+begin+'\n'+'\n\n'.join(map(_folder, floors))+'\n\n'+rest[rest.index('<!-- Until here -->'):]

if __name__=='__main__':
    (root/'README.md').write_text(readme())
    (root/'CONTRIBUTING.md').write_text(rooms())
