"The picture of a verification"
import numpy as np
import matplotlib.pyplot as plt
import pytest
from pictures import misplaced, narrow, tick_texts
from verify.test_result import case_of

@pytest.mark.parametrize('nm,title', [('the plan holds','use 256'), ('it ends higher','stay at 64'), ('perhaps','not clear'), ('one run','not clear')])
def test_a_verification_is_drawn(nm, title):
    v = case_of(nm)
    ax = v.plot()
    line = ax.lines[[o.get_label() for o in ax.lines].index('mean of runs')]
    assert line.get_xdata().tolist()==v.table.bs.tolist()
    dashes, = [o for o in ax.lines if o.get_marker()=='_'] # For each run of each size
    assert len(dashes.get_xdata())==v.losses.size
    for bs in v.losses:
        assert np.allclose(dashes.get_ydata()[dashes.get_xdata()==bs], np.expm1(v.losses[bs]-v.losses[v.bs_now]))
    assert 'single runs' in [o.get_text() for o in ax.get_legend().get_texts()]
    assert ax.get_title()==f'Final loss: {title}'
    assert any('chosen' in o.get_label() for o in ax.lines)==(title!='not clear')
    bottom,top = ax.get_ylim()
    diffs = v.table['diff']
    assert bottom<min([0,*diffs])
    assert top>max([0.02,*diffs])
    other = narrow()
    assert v.plot(ax=other) is other
    for o in (ax,other):
        assert misplaced(o.figure)==[]
        assert {*tick_texts(o.xaxis).values()}<={v.bs_now,v.planned.bs,*v.table.bs}
    plt.close('all')
