"The first picture of README and site, from what `keeps.py` has stored: `python benchmarks/front.py` writes nbs/images/front.png"
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

import keeps
from frame import Table, here
from kinds import first

path = here.parent/'nbs/images/front.png'
names = dict(mnist='MNIST', rossmann='Rossmann sales', ratings='MovieLens', shakespeare='Shakespeare', fashion='Fashion-MNIST', adult='Adult',
             reviews='IMDB reviews', cifar='CIFAR-10', digits='Digits')
devices = dict(here='on this processor', flat_4="steps as flat as a GPU's")
columns = dict(time='Time', d_train='Training loss', d_valid='Validation loss')

def changes():
    """How far time and losses are from today's, for each of the first nine tasks of `keeps.md`, each length, rate and two devices: means of the seeds

    A plan that stays changes nothing. Where steps are flat up to 4 times today's batch the time is predicted.
    """
    both = keeps.ratios(Table('keeps').df)
    both = both[(both.kind!='random') & both.device.isin(devices) & both.task.isin(list(names))]
    time = both.time.where(both.device=='here', both.predicted)
    both = both.assign(time=(time-1).where(both.changed, 0), changed=both.changed.astype(float))
    return both.groupby(['task','device','epochs','kind'], sort=False)[[*columns,'changed']].mean().reset_index()

def medians(df): return df.groupby('task')[[*columns]].median().sort_values('time', ascending=False) # Of both devices

def caption():
    "What the picture shows, in figures; stored within it, so that an old picture is told from a new one"
    return medians(changes()).round(3).to_csv()

def draw():
    df = changes()
    middle = medians(df)
    with plt.style.context({'font.size': 13, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.spines.left': False}):
        fig,axs = plt.subplots(1, 3, figsize=(10,5.2), layout='constrained', sharey=True, sharex=True, facecolor='w') # White, also on a dark page
        for ax,(col,title) in zip(axs, columns.items()):
            ax.axvspan(-1, 0, color='#e6f4ea', zorder=0)
            ax.axvline(0, color='0.3', lw=1.5)
            ax.barh(range(len(middle)), middle[col], height=0.55, color='C0', zorder=2)
            rows = df.task.map({nm: i for i,nm in enumerate(middle.index)})
            for device,shift,fill in (('here',-0.12,'k'),('flat_4',0.12,'w')):
                of = df.device==device
                ax.plot(df[of][col], rows[of]+shift, 'o', ms=4, mfc=fill, mec='k', alpha=0.6, mew=0.8, zorder=3, label=devices[device])
            ax.set_title(title, fontweight='bold')
            ax.set(xlim=(-0.95,0.55), xticks=(-0.8,-0.4,0,0.4))
            ax.tick_params(axis='y', length=0)
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axs[0].set_yticks(range(len(middle)), [names[o] for o in middle.index])
        for i,nm in enumerate(middle.index):
            if not df.changed[df.task==nm].any(): axs[0].annotate(f'stays at {first[nm].bs}', (0.03,i), va='center', fontsize=11, color='0.3')
        fig.legend(*axs[2].get_legend_handles_labels(), loc='outside upper right', ncols=2, fontsize=11)
        fig.supxlabel("a training as planned, against today's (green: better)", fontsize=13)
    return fig

if __name__=='__main__': draw().savefig(path, dpi=100, metadata={'Description': caption()})
