"A batch that is cut into micro-batches, step by step: `python docs/micro_batches.py` writes nbs/images/micro_batches.png"
from pathlib import Path
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrow, Rectangle

micro_bs,colors = 4,('C0','C1','C2') # One for each micro-batch
large,small = (3.,5.,7.),(2.6,5.,7.4) # Where a micro-batch begins within the batch, and by itself

def draw():
    fig,ax = plt.subplots(figsize=(9,5), layout='constrained', facecolor='w') # White, also on a dark page
    ax.set(xlim=(-0.1,9.6), ylim=(0,5.3), aspect='equal')
    ax.axis('off')
    def _text(x, y, text, **kwargs): ax.text(x, y, text, va='center', **{'fontsize': 14, 'ha': 'center', **kwargs})
    def _items(x, y, color):
        for i in range(micro_bs): ax.add_patch(Rectangle((x+i/2, y-0.21), 0.42, 0.42, facecolor=color, edgecolor='k', lw=0.8))
    def _arrow(x, y, dx, dy): ax.add_patch(FancyArrow(x, y, dx, dy, width=0.03, head_width=0.2, head_length=0.2, length_includes_head=True, color='0.3'))
    for y,text in ((4.9,'A batch of 12'),(3.7,'Cut'),(2.55,'Backward'),(1.45,'Add up'),(0.35,'Step')): _text(0, y, text, ha='left', fontweight='bold')
    for y,text in ((3.35,'3 micro-batches of 4'),(2.2,'one after another')): _text(0, y, text, ha='left', fontsize=11)
    for i,(a,b,color) in enumerate(zip(large, small, colors)):
        mid = b+0.96
        _items(a, 4.9, color)
        _arrow(a+0.96, 4.6, mid-a-0.96, -0.6)
        _items(b, 3.7, color)
        for y in (3.4,2.3): _arrow(mid, y, 0, -0.55)
        _text(mid, 2.55, f'$g_{i+1}$', fontsize=17, color=color)
        _text(mid, 1.45, f"${' + '.join(f'g_{j+1}' for j in range(i+1))}$")
        if i: _arrow(mid-1.7, 1.45, 0.6, 0)
    _arrow(small[-1]+0.96, 1.2, 0, -0.55)
    _text(small[-1]+1.7, 0.35, '$(g_1 + g_2 + g_3)/3$: one optimizer step', ha='right')
    return fig

if __name__=='__main__': draw().savefig(Path(__file__).parent.parent/'nbs/images/micro_batches.png', dpi=100)
