"The first picture of README and site, from what `pays.py` has stored: `python benchmarks/front.py` writes nbs/images/front.png"
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

import pays
from frame import here

epochs = 1
names = dict(mnist='MNIST', rossmann='Rossmann store sales', ratings='MovieLens ratings', shakespeare='tiny Shakespeare', fashion='Fashion-MNIST',
             adult='Adult')

def above_best(name):
    "Validation loss by batch size, over that of the best one, all in the time of today's training and at their best rates"
    valid = pays.curve(name, epochs).valid
    return valid/valid.min()-1

def planned(name):
    "The middle one of the plans"
    df = pays.rows('plan', name)
    return int(df[df.epochs==epochs].bs.median())

def draw():
    with plt.style.context({'font.size': 10, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.titlesize': 11}):
        fig,axs = plt.subplots(2, 3, figsize=(9,4.8), layout='constrained', sharey=True, sharex=True, facecolor='w') # White, also on a dark page
        for ax,name in zip(axs.flat, pays.tasks):
            y,bs = above_best(name),planned(name)
            ax.axvline(pays.base_bs, color='0.5', ls='--', lw=1.2, label=f"today's, {pays.base_bs}")
            ax.plot(y.index, y, 'o-', color='C0', ms=4, label='each size at its best rate')
            ax.plot(bs, y[bs], '*', color='C1', ms=17, mec='k', zorder=3, label="the plan's")
            ax.annotate(f'{bs}', (bs,y[bs]), (0,11), textcoords='offset points', ha='center', fontweight='bold')
            ax.set(xscale='log', title=names[name], ylim=(-0.05,0.6))
            ax.set_xticks(pays.sizes[::2], pays.sizes[::2])
            ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            ax.minorticks_off()
        fig.supylabel('validation loss at equal time, above the best', fontsize=10)
        fig.supxlabel('batch size', fontsize=10)
        fig.legend(*axs[0,0].get_legend_handles_labels(), loc='outside upper center', ncol=3, frameon=False)
    return fig

if __name__=='__main__': draw().savefig(here.parent/'nbs/images/front.png', dpi=100, pil_kwargs=dict(optimize=True))
