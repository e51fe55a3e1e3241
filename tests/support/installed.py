"""Whether what is built is what was tested: `python tests/support/installed.py dist` installs the wheel and the source distribution, each in a
fresh environment, and passes tests there. These are the source distribution's own, in a folder without the package, so that only an installed one can be
imported.

What the package needs is lent by the environment that runs this: torch alone would be some 6 GB."""
import os, shutil, subprocess, sys, sysconfig, tarfile, tempfile, time, zipfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent.parent
# What may break by building and installing: each public entry, ranks, the demonstration, what is pickled. That the modules are the same is seen by their bytes
tests = ['project/test_supply','project/test_house','project/test_project','project/test_docs','project/test_demo','whole/test_properties',
         'schedule/test_rules','schedule/test_scaled_lr','finder/test_plan','schedule/test_batch_schedule','verify/test_compare',
         'verify/test_check_accum'] # None that looks at the clock
chosen = ['-m','not slow','-n','2','--dist','loadgroup','--no-loadscope-reorder',*(f'tests/{o}.py' for o in tests),
          'tests/whole/test_ranks.py::test_processes_apart']

def contents(path):
    "Files of a wheel or a source distribution by name, the latter without its folder"
    if path.suffix=='.whl':
        with zipfile.ZipFile(path) as z: return {nm: z.read(nm) for nm in z.namelist()}
    with tarfile.open(path) as t: return {m.name.partition('/')[2]: t.extractfile(m).read() for m in t if m.isfile()}

def check_contents(path):
    "The modules as they are here, every one of them, and the licence"
    files,here = contents(path),{p.relative_to(root).as_posix(): p.read_bytes() for p in (root/'fastai_bs').rglob('*.py')}
    assert {nm: o for nm,o in files.items() if nm.startswith('fastai_bs/')}==here, f"{path.name} has other modules than the checkout"
    assert (root/'LICENSE').read_bytes() in [o for nm,o in files.items() if nm.rpartition('/')[2]=='LICENSE'], f"{path.name} has no licence"

def fresh(folder):
    "The Python of a new environment, which finds what the package needs in this one"
    subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
    python = folder/'bin'/'python'
    site = subprocess.run([python, '-c', "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True).stdout.strip()
    # A line of a .pth file is a folder; the .pth files in that folder are not read, so an editable install there does not count
    Path(site, 'lent.pth').write_text('\n'.join(dict.fromkeys((sysconfig.get_path('purelib'),sysconfig.get_path('platlib')))))
    return python,site

def passes(path, sdist, folder):
    "Install `path` in `folder`, and pass the tests of `sdist`"
    began = time.time()
    check_contents(path)
    python,site = fresh(folder/'env')
    subprocess.run([python, '-m', 'pip', 'install', '-q', '--no-deps', '--ignore-installed', '--disable-pip-version-check', path], check=True)
    shutil.unpack_archive(sdist, folder)
    away, = (o for o in folder.iterdir() if o.is_dir() and o.name!='env')
    for o in ('fastai_bs','fastai_bs.egg-info'): shutil.rmtree(away/o) # pytest puts this folder first on the path
    env = {k: v for k,v in os.environ.items() if k!='PYTHONPATH'}
    where = subprocess.run([python, '-c', 'import fastai_bs; print(fastai_bs.__file__)'], cwd=away, env=env, capture_output=True, text=True, check=True)
    assert where.stdout.startswith(site), f"the package was imported from {where.stdout.strip()}, not from {site}"
    res = subprocess.run([python, '-m', 'pytest', '-q', '-rs', *chosen], cwd=away, env=env).returncode
    print(f"{path.name}: {'passed' if res==0 else 'FAILED'} in {(time.time()-began)/60:.1f} min", flush=True)
    return res

if __name__=='__main__':
    wheel,sdist = (next(Path(sys.argv[1]).resolve().glob(o)) for o in ('*.whl','*.tar.gz'))
    res = []
    for path in (wheel,sdist):
        with tempfile.TemporaryDirectory() as tmp: res.append(passes(path, sdist, Path(tmp)))
    sys.exit(max(res))
