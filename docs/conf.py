"Sphinx's settings for the site; `docs/pages.py` makes the pages"
import re
from pathlib import Path

from nbdev.doclinks import NbdevLookup

import fastai_bs

project,author = 'fastai_bs','fastai_bs contributors'
release = version = fastai_bs.__version__
extensions = ['myst_nb', 'sphinx.ext.linkcode', 'sphinx_copybutton']
nb_execution_mode = 'off' # Outputs are those that are stored in the notebooks
nb_merge_streams = True
nb_render_markdown_format = 'myst' # Tables in outputs too
myst_enable_extensions = ['amsmath', 'colon_fence', 'dollarmath', 'html_image']
myst_heading_anchors = 3
if (Path(__file__).parent/'_static/tex-svg.js').exists(): mathjax_path = 'tex-svg.js' # Else Sphinx's own address, which is not ours
add_module_names = False
maximum_signature_line_length = 80
toc_object_entries = False
copybutton_selector = 'div.cell_input pre, div.highlight-python pre, div.highlight-sh pre'

def linkcode_resolve(domain, info): return NbdevLookup().code(info['fullname']) if domain=='py' else None

html_theme,html_title = 'furo','fastai_bs'
html_static_path,html_css_files,html_favicon = ['_static'],['custom.css'],'_static/favicon.svg'
html_extra_path = ['_build/extra'] # llms.txt, pages as plain text, pictures of the gallery
html_show_sourcelink = html_copy_source = False
html_theme_options = dict(source_repository='https://github.com/fastai-bs/fastai_bs/', source_branch='main', source_directory='nbs/',
                          top_of_page_buttons=[])

def accessible(html):
    "What Sphinx and the theme leave out for who reads with a keyboard or by ear; `docs/check.py` asks axe for it"
    html = html.replace('class="caption" role="heading">', 'class="caption" role="heading" aria-level="2">')
    html = re.sub(r'<th[^>]*>(<p></p>)?</th>', '<td></td>', html)
    # What is wider than the page is scrolled by keys too
    html = re.sub(r'<pre(?=[ >])|<div(?= class="(?:table-wrapper|cell_output))', r'\g<0> tabindex="0"', html)
    html = html.replace('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">')
    html = html.replace('<aside class="toc-drawer', '<aside aria-label="On this page" class="toc-drawer')
    def _plain(m): return re.sub(r'(</?)d[ld]>', r'\1div>', m[0]).replace('<div>', '<div class="sig-params">', 1)
    return re.sub(r'<dl>\s*(<dd><em class="sig-param">.*?</dd>\s*)+</dl>', _plain, html, flags=re.S) # Parameters, a line each: no list of terms

def write_accessible(app, exception):
    if exception is None:
        for p in Path(app.outdir).rglob('*.html'): p.write_text(accessible(p.read_text()))

def setup(app): app.connect('build-finished', write_accessible)
