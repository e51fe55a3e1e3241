"""Look at every page of the site in a real browser: `python docs/check.py [_docs]`

Headless Chromium loads each page, wide and narrow, light and dark. No error on the console, no failed request, none to another host; every link
within the site leads somewhere; no table or formula is left as markup; the page is no wider than the screen; the search finds what the first page
suggests to look for; and axe (https://github.com/dequelabs/axe-core), where `make docs` could have it, finds nothing that keeps a reader out.
Screenshots go to `docs/_build/shots`. Without a browser that is an error, unless the environment says BROWSER=none.
"""
import base64, http.server, json, os, shutil, subprocess, sys, tempfile, threading, time, urllib.request
from functools import partial
from pathlib import Path
from urllib.parse import urldefrag, urljoin

root = Path(__file__).resolve().parent.parent
sizes = dict(wide=(1400,1800), half=(820,1800), narrow=(390,1400))
axe = root/'docs/_build/axe.min.js'
# A page of each kind, for axe
read_aloud = 'index.html','guides/choose.html','schedule/scaled_lr.html','reference/bs_find.html','names.html','matrix.html','gallery.html'
failed = "axe.run({resultTypes: ['violations']}).then(r => r.violations.map(o => `${o.id} (${o.nodes.length}): ${o.nodes[0].html.slice(0, 90)}`))"

class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

def serve(folder):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f'http://127.0.0.1:{server.server_address[1]}/'

class Browser:
    "A tab of headless Chromium, spoken to over its debugging protocol"
    def __init__(self, path):
        from websocket import create_connection
        self.folder = tempfile.mkdtemp()
        self.process = subprocess.Popen([path, '--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-background-networking',
            '--remote-debugging-port=0', '--remote-allow-origins=*', f'--user-data-dir={self.folder}', 'about:blank'],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = Path(self.folder)/'DevToolsActivePort'
        until = time.monotonic()+30
        while not (port_file.exists() and port_file.read_text().strip()):
            if time.monotonic()>until: raise RuntimeError('Chromium did not start')
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        tabs = json.load(urllib.request.urlopen(f'http://127.0.0.1:{port}/json'))
        self.socket = create_connection(next(o for o in tabs if o['type']=='page')['webSocketDebuggerUrl'], timeout=60)
        self.n,self.events = 0,[]
        for domain in ('Page','Runtime','Network','Log'): self.ask(f'{domain}.enable')

    def ask(self, method, **params):
        self.n += 1
        self.socket.send(json.dumps(dict(id=self.n, method=method, params=params)))
        while True:
            msg = json.loads(self.socket.recv())
            if msg.get('id')==self.n:
                if 'error' in msg: raise RuntimeError(f"{method}: {msg['error']}")
                return msg['result']
            self.events.append(msg)

    def run(self, code): return self.ask('Runtime.evaluate', expression=code, returnByValue=True, awaitPromise=True)['result'].get('value')

    def wait_for(self, code, what, seconds=20):
        until = time.monotonic()+seconds
        while not self.run(code):
            if time.monotonic()>until: raise RuntimeError(f'{what} did not come about within {seconds} seconds')
            time.sleep(0.05)

    def open(self, url, size=(1400,1800), scheme='light'):
        "Load a page; what went wrong on it"
        self.events = []
        self.ask('Emulation.setDeviceMetricsOverride', width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
        self.ask('Emulation.setEmulatedMedia', features=[dict(name='prefers-color-scheme', value=scheme)])
        self.ask('Page.navigate', url=url)
        self.wait_for(f"document.readyState=='complete' && location.href.startsWith({json.dumps(url.split('#')[0])})", url)
        self.wait_for("!window.MathJax || !MathJax.startup || !MathJax.startup.promise || MathJax.startup.promise.then(()=>true)", 'the formulas')
        return self.problems(urljoin(url, '/'))

    def problems(self, base):
        res,urls = [],{}
        for e in self.events:
            p = e.get('params', {})
            if e['method']=='Network.requestWillBeSent':
                urls[p['requestId']] = url = p['request']['url']
                if not url.startswith((base,'data:','blob:','about:')): res.append(f'a request to {url}')
            if e['method']=='Network.responseReceived' and p['response']['status']>=400: res.append(f"{p['response']['status']} for {p['response']['url']}")
            if e['method']=='Network.loadingFailed' and not p.get('canceled'): res.append(f"{urls.get(p['requestId'])} failed: {p.get('errorText')}")
            if e['method']=='Runtime.exceptionThrown': res.append(f"an exception: {p['exceptionDetails'].get('text')}")
            if e['method']=='Runtime.consoleAPICalled' and p['type'] in ('error','warning'): res.append(f"on the console: {p['args'][0].get('value')}")
            if e['method']=='Log.entryAdded' and p['entry']['level']=='error': res.append(f"in the log: {p['entry']['text']} {p['entry'].get('url', '')}")
        return res

    def shot(self, path): path.write_bytes(base64.b64decode(self.ask('Page.captureScreenshot', captureBeyondViewport=False)['data']))

    def close(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

def check(folder, browser, shots):
    "All that is wrong, as lines"
    base,wrong,links,anchors = serve(folder),[],{},{}
    pages = sorted(p.relative_to(folder).as_posix() for p in folder.rglob('*.html') if '_static' not in p.parts)
    for page in pages:
        for nm,size in sizes.items():
            for scheme in ('light','dark'):
                wrong += [f'{page}, {nm}, {scheme}: {o}' for o in browser.open(base+page, size, scheme)]
                wide = browser.run('document.documentElement.scrollWidth')
                if wide>size[0]: wrong.append(f'{page}, {nm}: {wide} pixels wide on a screen of {size[0]}')
                browser.shot(shots/f"{page.removesuffix('.html').replace('/', '-')}-{nm}-{scheme}.png")
                if page in read_aloud and axe.exists():
                    browser.run(axe.read_text())
                    wrong += [f'{page}, {nm}, {scheme}, axe: {o}' for o in browser.run(failed)]
        raw = browser.run(r"[...document.querySelectorAll('article p')].map(o=>o.textContent).filter(o=>/\|\s*[-—]+\s*\||\$\$/.test(o))")
        wrong += [f'{page}: a table or a formula that was not rendered: {o[:60]}' for o in raw]
        links[page] = browser.run("[...document.querySelectorAll('a[href]')].map(o=>o.href)")
        anchors[page] = set(browser.run("[...document.querySelectorAll('[id]')].map(o=>o.id)"))
    browser.open(f'{base}index.html')
    searches = browser.run("[...document.querySelectorAll('a[data-finds]')].map(o=>[o.innerText, o.href, o.dataset.finds])")
    if not searches: wrong.append('the first page suggests nothing to look for')
    for page,hrefs in links.items():
        for href in sorted({o for o in hrefs if o.startswith(base)}):
            url,anchor = urldefrag(href)
            target = url.removeprefix(base).partition('?')[0] or 'index.html'
            if not (folder/target).exists(): wrong.append(f'{page}: a link to {target}, which is not there')
            elif anchor and target in anchors and anchor not in anchors[target]:
                wrong.append(f'{page}: a link to #{anchor} of {target}, which has no such place')
    for words,url,page in searches:
        wrong += browser.open(url)
        browser.wait_for("document.querySelector('#search-results .search-summary')?.innerText.match(/found|matching/)", f'a search for {words}')
        time.sleep(1) # Results come one after another
        found = browser.run("[...document.querySelectorAll('#search-results li a')].map(o=>o.href)")
        if not any(o.split('#')[0].split('?')[0].endswith(page) for o in found): wrong.append(f'a search for {words!r} does not find {page}, but {found[:5]}')
    return pages,wrong

def main(folder):
    if os.environ.get('BROWSER')=='none': return print('The site was not looked at in a browser, as BROWSER=none asked')
    path = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
    if path is None and shutil.which('apt-get') and os.geteuid()==0:
        print('Installing Chromium')
        install = 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium'
        subprocess.run(install, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        path = shutil.which('chromium')
    if path is None: sys.exit('The site must be looked at in a browser, and there is no Chromium here: install it, or say BROWSER=none to do without')
    shots = root/'docs/_build/shots'
    shutil.rmtree(shots, ignore_errors=True)
    shots.mkdir(parents=True)
    browser = Browser(path)
    try: pages,wrong = check(folder, browser, shots)
    finally: browser.close()
    if not axe.exists(): print('axe did not look at the pages: npm is missing')
    print('\n'.join(wrong) or f'{len(pages)} pages are in order; screenshots in {shots.relative_to(root)}')
    if wrong: sys.exit(1)

if __name__=='__main__': main(Path(sys.argv[1]) if len(sys.argv)>1 else root/'_docs')
