"Several processes on this machine that train together over gloo, for tests"
import gc
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch

context = mp.get_context('forkserver') # Imports once; each rank is a fork of that, with nothing of the test in it
context.set_forkserver_preload(['pytest', 'fastai_bs.all', 'fastai.distributed', 'fastai.vision.all', 'fastai.text.all'])

def _rank(r, world, store, conn, f, args, timeout, linger):
    # accelerate would ask for a thread for each core, of which ranks have too few
    os.environ.update(OMP_NUM_THREADS='1', RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(world),
        MASTER_ADDR='localhost', MASTER_PORT='29501', CUDA_VISIBLE_DEVICES='')
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    gc.freeze() # As in conftest
    torch.distributed.init_process_group('gloo', init_method=store, rank=r, world_size=world, timeout=timedelta(seconds=timeout))
    try: res = 'result',f(r, *args)
    except BaseException as e: res = 'error',(f'{type(e).__name__}: {e}', traceback.format_exc())
    conn.send(res)
    if linger: conn.poll(30) # Until all have sent: the end of this process closes its connections to the others
    os._exit(0) # The end of the process, not of its threads

def start(f, world, *args, timeout=60, linger=True):
    "Start `world` ranks that run `f(rank, *args)`, a function of a module, and end, with `linger` once all are through; `results` returns what they return"
    store,res = f'file://{tempfile.mkdtemp()}/store',[]
    for r in range(world):
        here,there = context.Pipe()
        p = context.Process(target=_rank, args=(r, world, store, there, f, args, timeout, linger), daemon=True)
        p.start()
        there.close()
        res.append((p,here))
    return res

def results(ranks, patience=300, errors=False):
    "What each rank returned; with `errors` an exception's text where it raised, and 'Died' where it was killed, else those are raised"
    until,res = time.monotonic()+patience,[]
    for _,conn in ranks:
        try: kind,val = conn.recv() if conn.poll(max(0, until-time.monotonic())) else ('error',('Hung', 'hung'))
        except EOFError: kind,val = 'error',('Died', 'died')
        res.append((kind,val))
    for _,conn in ranks: conn.close()
    for p,_ in ranks:
        p.join(max(1, until-time.monotonic()))
        if p.is_alive(): os.kill(p.pid, signal.SIGKILL)
    if not errors:
        for r,(kind,val) in enumerate(res):
            if kind=='error': raise AssertionError(f'rank {r}: {val[1]}')
    return [val if kind=='result' else val[0] for kind,val in res]

def on_ranks(f, world, *args, **kwargs):
    "What `f(rank, *args)` returns on each of `world` ranks"
    return results(start(f, world, *args, **kwargs))

@contextmanager
def fastai_on_cpu_ranks():
    "fastai sends the order of the items as a CUDA tensor, on CPU ranks too; in this block it does not, for fits without our callbacks"
    from fastai.distributed import DistributedDL
    def _broadcast(self, t, rank):
        t = torch.tensor(t)
        torch.distributed.broadcast(t, rank)
        return t.tolist()
    own,DistributedDL._broadcast = DistributedDL._broadcast,_broadcast
    try: yield
    finally: DistributedDL._broadcast = own
