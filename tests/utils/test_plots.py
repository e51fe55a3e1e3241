"What all pictures share: axes, ticks, legends, and what a recorder keeps to draw"
import pickle
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from fastai_bs.utils.plots import ForPlots, legend_below, log_axis, new_axes, size_axis
from pictures import narrow, tick_texts

@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close('all')

def engine(ax): return type(ax.figure.get_layout_engine()).__name__

@pytest.mark.filterwarnings('error')
def test_axes_that_are_given_are_drawn_on_and_get_room():
    "Not where the figure has a layout of its own, or the axes were placed by hand"
    mine,by_hand = plt.subplots()[1],plt.figure().add_axes([0.2,0.2,0.7,0.7])
    assert new_axes(mine) is mine
    assert new_axes(None) is not mine
    assert engine(new_axes(plt.figure().subfigures(1, 2)[0].subplots()))==engine(mine)=='ConstrainedLayoutEngine'
    assert engine(new_axes(plt.subplots(layout='tight')[1]))=='TightLayoutEngine'
    assert engine(new_axes(by_hand))=='NoneType'
    by_hand.figure.canvas.draw()

@pytest.mark.parametrize('low,high,texts', [(0.92,1.1,['0.95','1','1.05','1.1']), (0.7,4.1,['1','2','3','4']), (0.15,12,['0.2','0.5','1','2','5','10']),
    (0.3,2e6,['1','10','100','1000','10000','100000','1000000'])])
def test_a_log_axis_has_round_numbers(low, high, texts):
    ax = narrow()
    log_axis(ax)
    ax.set_ylim(low, high)
    ax.figure.canvas.draw()
    assert [o.get_text() for o in tick_texts(ax.yaxis)]==texts
    assert not len(ax.get_yticks(minor=True))

@pytest.mark.parametrize('which', 'xy')
@pytest.mark.parametrize('sizes', [[64],[64,128],[90,100,120,1000],[2**i for i in range(20)]], ids=str)
def test_an_axis_of_batch_sizes_has_ticks_at_them(which, sizes):
    "Doublings are as far apart, and labels that would run into each other are left out, but those of `first`"
    ax,first = narrow(),[sizes[-1]]
    size_axis(ax, which, sizes, first)
    ax.figure.canvas.draw()
    axis = getattr(ax, f'{which}axis')
    labels = tick_texts(axis)
    assert {*labels.values()}<={*sizes}=={*axis.get_majorticklocs(),*axis.get_minorticklocs()}
    assert [o.get_text() for o in labels]==[str(o) for o in labels.values()]
    assert sizes[-1] in labels.values()
    boxes = [o.get_window_extent() for o in labels]
    assert not any(a.overlaps(b) for i,a in enumerate(boxes) for b in boxes[:i])
    assert axis.get_transform().base==2
    low,high = axis.get_view_interval()
    assert low<sizes[0]
    assert high>sizes[-1]

@pytest.mark.parametrize('text,ncols', [('short',2),('a text that is long for half of a small figure',1)])
def test_a_legend_below_is_as_wide_as_there_is_room(text, ncols):
    ax = new_axes(narrow())
    for i in range(2): ax.plot([1,2], label=f'{text} {i}')
    ax.set_xlabel('epochs')
    assert legend_below(ax)._ncols==ncols
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().y1<ax.xaxis.label.get_window_extent().y0

def test_what_is_kept_for_plots_is_pickled_as_plain_values():
    "So that no class of this package is named in an exported learner"
    class Local(SimpleNamespace): "Cannot be pickled itself"
    kept = ForPlots(Local(df=[1,2], bs=8), 'df', 'bs')
    assert kept.df==[1,2]
    data = pickle.dumps(kept)
    assert b'fastai' not in data
    assert pickle.loads(data)==SimpleNamespace(df=[1,2], bs=8)
