"Where the loop of the large batch would be"
import math

import pytest
from fastai_bs.accumulate.progress import Position

@pytest.mark.parametrize('n_acc,n_iter', [(1,1),(1,7),(3,7),(3,9),(4,3),(5,50),(7,50)])
@pytest.mark.parametrize('heard', [lambda i: True, lambda i: i%3!=1], ids=['always','now and then'])
def test_position_is_that_of_the_large_batchs_loop(n_acc, n_iter, heard):
    "By the same additions, also where nobody asks for a while: a window is under way"
    large,step = [2/3],1./(math.ceil(n_iter/n_acc)*3)
    for _ in range(math.ceil(n_iter/n_acc)): large.append(large[-1]+step)
    position,pct = Position(n_acc),2/3
    for i in range(n_iter):
        if not heard(i): continue
        pct = position.after(pct, i, n_iter, 3)
        assert pct==large[-1 if i==n_iter-1 else (i+1)//n_acc]

def test_windows_of_another_size_share_what_is_left_of_the_epoch():
    position,pct = Position(2, at=6, begin=6, goal=1.),0.5
    for i in range(6, 10): pct = position.after(pct, i, 10, 1)
    assert pct==pytest.approx(1, rel=1e-12)
