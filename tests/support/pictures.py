"Where the texts of a picture stand, as it is drawn"
import matplotlib.pyplot as plt

def tick_texts(axis):
    "The labels of an axis that are seen, with their places"
    low,high = sorted(axis.get_view_interval())
    ticks = [(x,o) for x,tick in zip(axis.get_majorticklocs(), axis.get_major_ticks()) for o in (tick.label1,tick.label2)]
    return {o: x for x,o in ticks if axis.get_visible() and o.get_visible() and o.get_text() and low<=x<=high}

def _boxes(figure):
    for ax in figure.axes:
        texts = [ax.title, *ax.texts, *(o for axis in (ax.xaxis,ax.yaxis) if axis.get_visible() for o in (axis.label,*tick_texts(axis)))]
        yield from ((o.get_text(),o.get_window_extent()) for o in texts if o.get_text())
        if ax.get_legend(): yield 'the legend',ax.get_legend().get_window_extent()
        yield from (('a star',ax.transData.transform(o.get_xydata()[0])) for o in ax.lines if o.get_marker()=='*')

def misplaced(figure):
    "List the texts that run out of a figure or into each other, and the stars at the edge of its axes"
    figure.canvas.draw()
    boxes = list(_boxes(figure))
    stars = [at for nm,at in boxes if nm=='a star']
    texts = [(nm,box.padded(-0.5)) for nm,box in boxes if nm!='a star']
    inside = [ax.get_window_extent().padded(-6*figure.dpi/72) for ax in figure.axes]
    out = [nm for nm,o in texts if not (figure.bbox.contains(*o.min) and figure.bbox.contains(*o.max))]
    over = [(nm,other) for i,(nm,o) in enumerate(texts) for other,box in texts[:i] if o.overlaps(box)]
    return out + over + [tuple(at) for at in stars if not any(o.contains(*at) for o in inside)]

def narrow():
    "Axes of a small figure, without a layout of its own"
    return plt.subplots(figsize=(4,3))[1]
