"""Pages as plain text, for whoever reads without a browser: `page.html.md` beside each page, and `llms.txt` (https://llmstxt.org) with a line for each

They are made of the pages that `docs/pages.py` has written for Sphinx.
"""
import re
from html import unescape

fence = '```'

def plain(
    s, # MyST's markdown, as of `pages.markdown` and `pages.entry`
):
    "As markdown alone: an entry of the reference is a heading, a link to a page one to its text"
    s = re.sub(r'^````\{py:\w+\} (.*)\n:module: .*$', lambda m: f'### `{m[1]}`', s, flags=re.M)
    s = re.sub(r'^````$', '', s, flags=re.M)
    s = re.sub(r'\{py:obj\}`([^`<]+?) <[^`>]+>`', r'`\1`', s)
    s = re.sub(r'<a class="reference internal" href="([\w/.]+)\.html"><code[^>]*>([^<]*)</code></a>', lambda m: f'[`{unescape(m[2])}`]({m[1]}.html.md)', s)
    s = re.sub(r'\]\(([\w/.]+)\.ipynb(#[^)\s]*)?\)', r'](\1.html.md\2)', s)
    s = re.sub(r'\]\(((?:\.\./)*\w+)\.md(#[^)\s]*)?\)', r'](\1.html.md\2)', s) # Pages that are no notebooks
    s = re.sub(r'^<p class="(page-links|look-for)">.*</p>$\n?', '', s, flags=re.M)
    return s.strip()

def output_text(out, alt):
    "Of one output: its text, or the words for a picture"
    data = out.get('data', {})
    if 'image/png' in data: return f'*{alt}*'
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    text = ''.join(data.get('text/plain') or out.get('text') or '').strip('\n')
    return f'{fence}\n{text}\n{fence}' if text else ''

def cell_text(cell):
    if cell.cell_type=='markdown': return '' if cell.source.startswith(':::{toctree}') else plain(cell.source)
    tags,alt = cell.metadata.get('tags', []),cell.metadata.get('mystnb', {}).get('image', {}).get('alt', 'A picture')
    code = [] if 'remove-input' in tags or not cell.source else [f'{fence}python\n{cell.source}\n{fence}']
    outs = [] if 'remove-output' in tags else [output_text(o, alt) for o in cell.outputs]
    return '\n\n'.join(filter(None, [*code,*outs]))

def page_text(nb): return '\n\n'.join(filter(None, map(cell_text, nb.cells)))+'\n'

def llms(
    title, about, # Of the project
    parts, # `(name, rows)`, each row the name of a page, its title, and a line about it
    site, # Where it is
):
    "The text of `llms.txt`"
    lines = [f'# {title}','',f'> {about}']
    for nm,rows in parts: lines += ['',f'## {nm}','',*(f"- [{head}]({site}/{page}.html.md){f': {line}' if line else ''}" for page,head,line in rows)]
    return '\n'.join(lines)+'\n'
