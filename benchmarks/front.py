"The first picture of README and site, from what `keeps.py` has stored: `python benchmarks/front.py` writes nbs/images/front.png"
import matplotlib.pyplot as plt
import numpy as np
from fastai.optimizer import SGD
from matplotlib.ticker import PercentFormatter

import keeps
from frame import Table, here
from kinds import tasks

path = here.parent/'nbs/images/front.png'
by_adam = {'Ratings,\nby Adam': ('ratings','ratings_net','ratings_net_8'),
           'Tables,\nby Adam': ('rossmann','adult','table_long','prices','tumours','teacher','sorting','rossmann_long','sorting_9','tumours_30',
                        'prices_5'),
           'Text,\nby Adam': ('shakespeare','reviews','gru','awd','transformer','letters','genres','review_words','char_conv','letters_long',
                        'letters_gru','letters_transformer','letters_more','letters_9','char_conv_8','reviews_20',
                        'letters_transformer_5'),
           'Pictures,\nby Adam': ('mnist','fashion','cifar','digits','rows','autoencoder','masks','digits_long','cifar_long','patches',
                        'textures','fashion_long','few_pictures','wrong_labels','colours','masks_long','clean','fashion_norm','textures_long',
                        'wrong_labels_long','residual','textures_12','residual_9','autoencoder_6','masks_10','fashion_norm_12',
                        'few_pictures_24','wrong_labels_16','residual_12','digits_norm','clean_9','patches_10',
                        'wrong_labels_4','textures_5','residual_4')}
rows = {**by_adam, 'All kinds,\nby SGD': tuple(nm for nm,o in tasks.items() if o.opt is SGD)}
devices = dict(here='on a CPU', flat_4='assumed GPU, where 4 times the batch takes no longer (time calculated)')
columns = dict(first='Time: bs_find and\nfirst training (CPU)', time='Time: each\nlater training', d_train='Training loss', d_valid='Validation loss')
numbers = ['time','first','ten','d_train','d_valid']

def found():
    """Return what `keeps.md` has of two devices: a row for each call of `bs_find`, and one for each plan that changes the batch size, the mean of its seeds

    A plan has how far time and losses are from today's. Where steps are flat up to 4 times today's batch the time is predicted, and what asking takes there
    is not known.
    """
    calls = keeps.ratios(Table('keeps').df)
    of_task = {nm: row for row,names in rows.items() for nm in names}
    calls = calls[calls.device.isin(devices)].assign(row=calls.task.map(of_task))
    assert calls.row.notna().all(), "a task without a row"
    plans = keeps.by_plan(calls)
    times = plans[['first','time','ten']].assign(time=plans.time.where(plans.device=='here', plans.predicted))-1
    return calls,plans.assign(row=plans.task.map(of_task), **times)[['row','device',*numbers]]

def medians(df): return df.groupby(['device','row'])[[*columns]].median().reindex([(d,o) for d in devices for o in rows])

def caption():
    "What the picture shows, in figures; stored within it, so that an old picture is told from a new one"
    calls,plans = found()
    return medians(plans).join(calls.groupby(['device','row']).changed.agg(['sum','size'])).round(3).to_csv()

def draw():
    calls,df = found()
    middle = medians(df)
    at = {nm: len(rows)-1-i for i,nm in enumerate(rows)} # From above
    with plt.style.context({'font.size': 13, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.spines.left': False}):
        fig,(of_all,*axs) = plt.subplots(1, 5, figsize=(12,4.6), width_ratios=(0.55,1,1,1,1), layout='constrained', sharey=True, facecolor='w')
        for ax,(col,title) in zip(axs, columns.items()):
            ax.axvspan(-1, 0, color='#e6f4ea', zorder=0)
            ax.axvline(0, color='0.3', lw=1.5)
            for device,shift,fill in (('here',0.17,'k'),('flat_4',-0.17,'w')):
                of,ys = df[df.device==device],np.array(list(at.values()))+shift
                ax.vlines(middle.loc[device][col], ys-0.16, ys+0.16, color='C1', lw=3, zorder=4, label='median' if device=='flat_4' else None)
                spread = np.tile(np.linspace(-0.12, 0.12, 5), len(of))[:len(of)] # So that dots are told apart
                ax.plot(of[col], of.row.map(at)+shift+spread, 'o', ms=3.5, mfc=fill, mec='k', alpha=0.6, mew=0.7, zorder=3, label=devices[device])
            ax.set_title(title, fontweight='bold', fontsize=12)
            ax.set(xlim=(-0.95,max(0.95, 1.05*df[[*columns]].max().max())), xticks=(-0.5,0,0.5,1)) # No dot lies outside
            ax.tick_params(axis='y', length=0)
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        for (device,row),of in calls.groupby(['device','row']).changed:
            where,shift = ('CPU',0.17) if device=='here' else ('GPU',-0.17)
            of_all.annotate(f'{where}: {of.sum()} of {len(of)}', (0.5,at[row]+shift), ha='center', va='center', fontsize=11)
        of_all.set_title('Calls that\nchange the size', fontweight='bold', fontsize=12, x=0.4)
        of_all.set(xticks=(), xlim=(0,1))
        of_all.spines['bottom'].set_visible(False)
        of_all.tick_params(axis='y', length=0)
        of_all.set_yticks(list(at.values()), list(at))
        fig.legend(*axs[2].get_legend_handles_labels(), loc='outside upper right', ncols=3, fontsize=11)
        fig.supxlabel("change with the plan, against today's settings (left, green: better)", fontsize=13)
    return fig

if __name__=='__main__': draw().savefig(path, dpi=100, metadata={'Description': caption()})
