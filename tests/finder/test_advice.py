"The words of a plan: one thing to do, in plain English, about the plan's own numbers"
import math
import re

import pytest
from hypothesis import given, settings
from fastai_bs.finder.advice import _candidates_table, _on_rate, brief_words, cautions, ended_above, good_to_know, headline, plan_words, why
from fastai_bs.finder.choice import limit_text
from fastai_bs.finder.facts import Trial
from fastai_bs.finder.formulas import noise_of
from fastai_bs.finder.options import at_todays_size, option_of
from fastai_bs.noise.estimator import NoiseEstimate
from fastai_bs.utils.text import num, percent, time_text
from plans import plan_of, plans, secs

inf,nan = math.inf,math.nan
tight = dict(noise_scale=100., ci=(90.,110.)) # With the usual step times 128 items are the fastest
fixed = dict(cool=None, moved=False)

def sentences(plan):
    "All that is ever said of it"
    yield from (o for texts in plan_words(plan, 0).values() for o in texts)
    yield from (*cautions(plan),*good_to_know(plan))

# The wording that matters most

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('make,verdict,text', [
    (lambda: plan_of(), 'use', "Use 128 (today 64) for 6 epochs (today 5): about 83% of the time (53.5 s instead of 1 min 4 s)."),
    (lambda: plan_of(noise_scale=inf, ci=(0.,inf)).at(256), 'use',
        "You chose 256 (today 64): it was not tried. The line below is for 5 epochs, as today, so the loss may end higher."),
    (lambda: plan_of().at(1024), 'use', "You chose 1024 (today 64), which needs 14 epochs (today 5): slower, about 149% of the time "
        "(1 min 35 s instead of 1 min 4 s). A step is 4 x 256."),
    (lambda: plan_of(micro_bs=32, n_ranks=2, times=secs(32, 64, 128)).at(256), 'use',
        "Use 256 (today 64) for 7 epochs (today 5): about 61% of the time (31.2 s instead of 51.6 s)."),
    (lambda: plan_of(64, noise_scale=70., ci=(60.,75.), micro_bs=16, times=secs(16, 32, 64)), 'split',
        "Stay at 64, but as one micro-batch (today 4 x 16), for 5 epochs (today 5): about 38% of the time (1 min 4 s instead of 2 min 50 s)."),
    (lambda: plan_of(128, **tight), 'stay', "Stay at 128 for 5 epochs (45 s): no other size would save time."),
    (lambda: plan_of(100, noise_scale=100., ci=(99.,101.), n_epoch=1000, times=((100,0.02,0.),(400,0.02944,0.))), 'stay', # (1+1/4)/(1+1) of the steps
        "Stay at 100 for 1000 epochs (2 h 47 min): 400 would save 8% of the time, but 4 times the batch must save 17.4% to be planned."),
    (lambda: plan_of(freeze_epochs=1, frozen=0.00656), 'use',
        "Use 256 (today 64) for 1 + 7 epochs, frozen + unfrozen (today 1 + 5): about 74% of the time (51.5 s instead of 1 min 9 s)."),
    (lambda: plan_of(freeze_epochs=1, n_train=200, n_epoch=2), 'few_steps',
        "Stay at 64: this training has only 8 unfrozen steps, too few for a plan (80 at least): train as it is, "
        "or with a smaller batch, which makes more steps."),
    (lambda: plan_of(n_windows=4), 'short',
        "Stay at 64: only 4 windows of micro-batches could be measured, too few to tell the noise scale, so measure for longer first."),
    (lambda: plan_of(loss_rose=True), 'too_high', "Stay at 64: the loss rose during the mock training at 0.01, so measure with a lower rate first."),
    (lambda: plan_of(noise_scale=inf, ci=(0.,inf)), 'unknown', "Stay at 64: the noise scale cannot be told yet, so measure for longer first."),
    (lambda: plan_of(pairs=True), 'pairs',
        "Stay at 64: this loss needs another `count=` or `reduction`, or it compares the items of a batch, and learn.check_accum() says which.")])
def test_headlines(make, verdict, text):
    plan = make()
    assert plan.verdict==verdict
    assert headline(plan)==text
    assert repr(plan).replace('\n', ' ').startswith(text)

def test_what_another_size_gains_is_told_where_that_is_too_little():
    "Half the batch reaches a loss 2% earlier, and needs 3 of 4 validations: 4% are not the tenth that a halving is to save"
    plan = plan_of(100, noise_scale=100., ci=(99.,101.), n_epoch=1000, times=((50,0.0131,0.),(100,0.02,0.)), valid_time=1.)
    assert plan.choice.reason=='little'
    head = headline(plan)
    assert "50 would save 3.9% of the time, but half of the batch must save 9.1% to be planned" in head

def test_no_device_is_blamed_for_a_size_of_no_use():
    "Neither for a size that stays, nor for one that is smaller than it could be"
    kwargs = dict(noise_scale=5000., ci=(4000.,6000.), n_epoch=20)
    stays,smaller = (plan_of(trial=o, **kwargs) for o in (Trial(64, failed=128),Trial(128, 3000., 10_000, failed=256)))
    assert stays.choice.reason=='nowhere'
    assert "in short trainings 128 needed more than 1.52 times as much data as 64 for the same loss, too much for a plan." in headline(stays)
    assert not any('device' in o for o in why(stays))
    assert (smaller.verdict,smaller.bs)==('use',128)

def of_no_use(noise, **kwargs):
    "A plan after a trial in which 256 got too little further to be planned, on a device where it takes no longer than 64"
    return plan_of(**{**unmeasured, **kwargs}, trial=Trial(256, noise, 3910, failed=256), times=tuple((o,0.01,0.) for o in (64,128,256)))

def test_a_size_of_no_use_tells_of_one_between():
    plan = of_no_use(45.)
    assert (plan.bs,plan.n_epoch,plan.choice.reason)==(128,8,'faster')
    told, = [o for o in why(plan) if 'In short trainings' in o]
    assert told=="""In short trainings 256 needed 2.76 times as much data as 64 for the same loss. So 5 epochs at 64 become 7.94 at 128
(13.8 at 256), and 8 are planned. That is too much to plan with 256 itself.""".replace('\n', ' ')

@pytest.mark.parametrize('part,is_close', [(0.44,True), (0.5,True), (0.51,False)])
def test_a_close_call_is_told(part, is_close):
    "Repeated calls differ by a sixth"
    plan = plan_of(**unmeasured, trial=Trial(256, noise_of(part, 256, 64), 3910), times=tuple((o,0.01,0.) for o in (64,128,256)))
    assert plan.bs==256
    assert why(plan)[0].endswith(' With 2.3 times it would not be planned: a call with another seed may say so.')==is_close

def test_one_between_that_would_save_too_little_is_named():
    plan = of_no_use(8.)
    assert (plan.bs,plan.choice.reason)==(64,'nowhere')
    assert headline(plan).endswith("in short trainings 256 needed 3.67 times as much data as 64 for the same loss (above 2.3 it is not planned), "
                                   "and 128 would save too little.")
    assert next(cautions(plan))=='To judge sizes below 64, too: bs_find(..., num_it=660), which first measures the noise scale on 660 batches (about 6.6 s).'

def test_where_the_trial_decided_it_is_shown_beside_a_noise_scale():
    "Else that looks as if a larger batch would pay"
    plan = of_no_use(8., noise_scale=512., ci=(430.,640.), n_windows=30, cool=NoiseEstimate(600., (500.,750.), 12))
    assert plan.verdict=='stay'
    told,*_ = brief_words(plan)['how']
    assert told.startswith('The noise scale was measured as')
    assert told.endswith('So 256 was tried: it needed 3.67 times as much data as 64 for the same loss.')

@pytest.mark.parametrize('kwargs,bs,more', [(dict(),128,', and would be hardly faster than 128'),
    (dict(times=tuple((o,0.01,0.) for o in (64,128,256))),256,''), (dict(spread=0.4),64,'')])
def test_why_the_size_that_was_tried_is_not_planned(kwargs, bs, more):
    "At first sight; where it is, or step times vary too much for any, nothing is said"
    plan = plan_of(noise_scale=1100., ci=(900.,1500.), trial=Trial(256, 400., 3000), **kwargs)
    assert plan.bs==bs
    told,*_ = brief_words(plan)['how']
    assert told.endswith(f' times as much data as 64 for the same loss{more}.')

def test_a_given_noise_scale_of_which_nothing_is_known():
    plan = plan_of(noise_scale=300., ci=(0.,2000.), cool=NoiseEstimate(300., (0.,inf), 12), n_windows=None)
    assert "The noise scale that was given is about 300 items (any number is possible)." in ' '.join(str(plan).split())

@pytest.mark.usefixtures('any_growth')
def test_epochs_that_drop_more_items_are_named():
    "5 epochs of 1280 items, or 20 steps, become more of 1024, beside what the trial says"
    kwargs = dict(n_train=1300, n_epoch=50, drops_last=True, trial=Trial(512, 1e4, 1000), times=tuple((o,0.01,0.) for o in (64,128,256,512)))
    plan = plan_of(**unmeasured, **kwargs)
    assert f"{plan.bs}, where an epoch drops more items at its end" in why(plan)[0]
    assert 'drops' not in why(plan_of(**unmeasured, **{**kwargs, 'n_train': 1024}))[0]
    many = plan_of(**unmeasured, **{**kwargs, 'n_epoch': 50, 'n_train': 1500})
    assert many.bs==512 # As any size may be planned here
    smaller = many.at(128)
    assert f" ({num(many.choice.option.epochs)} at 512, where it drops more items at its end)" in ' '.join(why(smaller)) # An epoch of 1,024

@pytest.mark.parametrize('noise,told', [(300.,'1.53'),
    (noise_of(4**-0.125, 256, 64),'at most 1.19')])
@pytest.mark.parametrize('adam', [True,False])
def test_what_a_short_training_told(noise, told, adam):
    "How far the larger batch got, that the rest is a prediction, and what came of such ones; on the training of so many steps itself"
    plan = plan_of(trial=Trial(256, noise, 3910), adam=adam)
    longer = why(plan_of(trial=Trial(256, noise, 391), adam=adam))[1]
    got = f"In short trainings 256 needed {told} times as much data as 64 for the same loss"
    in_all = "in a whole training (today 3910 optimizer steps) that should be"
    assert longer.startswith(f"{got}; {in_all} {1.32 if noise==300. else 1.11} times. So 5 epochs at 64 become ")
    measured,as_it_is,record = why(plan)
    assert measured.startswith('The noise scale was measured')
    tried = f" ({5*(noise+256)/(noise+64):.3g} at 256)" if plan.bs==128 else ''
    assert as_it_is==f"{got}. So 5 epochs at 64 become {plan.choice.option.epochs:.3g} at {plan.bs}{tried}, and {plan.n_epoch} are planned."
    n,of,worst = ended_above[adam]
    who = 'Adam' if adam else 'SGD'
    assert record==(f"In our benchmarks with {who}, {n} of {of} plans made the validation loss over 5% worse, "
                    f"one by {percent(worst)} (https://github.com/fastai-bs/fastai_bs/blob/main/benchmarks/keeps.md).")
    assert len(why(plan.at(64)))==2
    assert why(plan.at(128 if plan.bs==256 else 256))[2:]==["Plans for chosen sizes were not benchmarked."]
    assert plan.at(plan.bs) is plan
    assert why(plan.at(32))==why(plan_of(adam=adam).at(32)) # Of smaller sizes it tells nothing

def test_what_is_not_known_of_a_plan_is_not_said():
    "Of `fine_tune` no benchmark has training losses; and where trying costs too much, the device is not the reason"
    plan = plan_of(trial=Trial(256, 300., 3910), freeze_epochs=1, frozen=0.00656)
    assert plan.verdict=='use'
    assert 'Few plans for `fine_tune` were benchmarked (https://github.com/fastai-bs/fastai_bs/blob/main/benchmarks/fine_tune.md).' in why(plan)
    stays = plan_of(trial=Trial(64, skipped=256, hoped_noise=536., saving=20., cost=30.))
    assert stays.choice.reason=='costly'
    assert not any('too little time' in o for o in why(stays))

@pytest.mark.parametrize('part,kwargs', [('14 times', dict(n_passes=14.)), ('may be larger still', dict(ci=(430.,inf)))])
def test_what_the_noise_scale_leaves_open_is_no_caution_where_a_size_was_tried(part, kwargs):
    plan = plan_of(**kwargs)
    assert any(part in o for o in cautions(plan))
    assert not any(part in o for o in cautions(plan_of(trial=Trial(256, 192., 3910), **kwargs)))

def test_the_table_compares_whole_fits():
    plan = plan_of()
    table = _candidates_table(plan).set_index(plan.table.bs)["of today's"]
    assert table[plan.facts.today.bs]==1
    assert table[plan.bs]==pytest.approx(plan.duration.planned/plan.duration.today)
    assert _candidates_table(plan_of(freeze_epochs=1, frozen=0.00656)).epochs.tolist()[2]=='1 + 5'

# When something is said

def test_the_gravest_caution_is_printed():
    "Few steps, then many passes, then a busy machine, then the loader; the others are among the details"
    grave = dict(loading=0.0055, too_large=512)
    for kwargs,part in ((grave,'The loader takes'), (grave | dict(spread=0.4),'Step times varied'), (grave | dict(n_epoch=20),'ends higher, try 20 epochs'),
                        (grave | dict(n_epoch=2, n_train=3000),'are the least sure'), (grave | dict(has_plan=True, n_epoch=20),'plan.undo(learn)')):
        plan = plan_of(**kwargs)
        said, = brief_words(plan)['caution']
        assert part in said
        assert said in repr(plan).replace('\n  ', ' ')
        for o in cautions(plan): assert ' '.join(o.split()) in ' '.join(plan.details().split())

def test_what_a_plan_prints():
    "What to do, how it is likely to end, the line to run, and from when on it pays; how and why are among the details"
    plan = plan_of(trial=Trial(256, 300., 3910), took=0.5, noise_scale=nan, ci=(nan,nan), n_windows=None, cool=None)
    assert list(brief_words(plan))==['do','how','run']
    assert brief_words(plan)['how']==why(plan)[1:2]
    assert repr(plan).splitlines()[-1]=="Finding this took 0.5 s: it should pay from the first training on. More in plan.details()."
    assert repr(plan_of(128, **tight, took=0.5)).splitlines()[-1]=="Finding this took 0.5 s. More in plan.details()."
    assert 'Finding' not in repr(plan.at(256))
    for o in (*plan_words(plan)['how'],why(plan)[0]):
        assert o not in ' '.join(repr(plan).split())
        assert o in ' '.join(plan.details().split())
    assert 'No rate was given' in ' '.join(repr(plan_of(has_lr=False)).split())
    said = ("The noise scale was measured as about 400 items (340 to 500) at the end of a mock training. Over 3910 steps it counts as 512: "
            "short trainings gain less from larger batches.")
    assert said in ' '.join(repr(plan_of()).split())
    assert 'present weights is about 512 items (430 to 640).' in ' '.join(repr(plan_of(**fixed)).split())

@pytest.mark.parametrize('part,kwargs,said', [
    ('loader', dict(loading=0.0055), True), ('loader', dict(loading=0.0054), False), ('frozen', dict(trained=0.25), True),
    ('fit in memory', dict(too_large=512), True), ('failed', dict(failed=((512,'ValueError: no'),)), True),
    ('Step times varied', dict(spread=0.8), True),
    ('num_it=1440 would tell more', dict(ci=(430.,inf)), True), ('only other items would tell more', dict(ci=(430.,inf), n_passes=14.), True),
    ('14 times through these 50000 items', dict(n_passes=14.), True), ('could not be timed', dict(times=()), True),
    ('Rounding up to whole epochs costs time here', dict(bs=8, n_epoch=1, noise_scale=100., ci=(90.,110.), times=secs(8, 16, 32, 64)), True),
    ('No n_epoch', dict(n_epoch=1, has_n_epoch=False), True),
    ('plan.undo(learn)', dict(has_plan=True), True), ('measure again later', fixed, True), ('validation loss', dict(n_epoch=20), True)])
def test_cautions(part, kwargs, said):
    assert any(part in o for o in cautions(plan_of(**kwargs)))==said
    if said: assert not any(part in o for o in cautions(plan_of()))

@pytest.mark.usefixtures('any_growth')
@pytest.mark.parametrize('noise_scale,n_epoch,said', [(1500.,12,True), (3000.,11,False)])
def test_a_tenth_more_passes_are_no_caution(noise_scale, n_epoch, said):
    plan = plan_of(n_epoch=10, noise_scale=noise_scale, ci=(0.9*noise_scale,1.1*noise_scale))
    assert (plan.bs,plan.n_epoch)==(256,n_epoch)
    assert any('may overfit' in o for o in cautions(plan))==said

@pytest.mark.parametrize('n_epoch', [5,6])
def test_with_many_passes_a_larger_size_that_was_tried_is_offered(n_epoch):
    plan = plan_of(n_epoch=n_epoch, trial=Trial(256, 900., 240))
    told = [o for o in good_to_know(plan) if 'plan.at(256)' in o]
    if n_epoch==5: assert (plan.bs,told)==(256,[])
    else:
        chosen = plan.at(256)
        assert (plan.bs,'at 128 (' in why(plan)[1],' at 256)' in why(plan)[1])==(128,True,True)
        assert told==["From 6 epochs on nothing above 128 is planned, 2 times today's batch: of larger ones more have ended above today's loss. "
                      f"plan.at(256) is for 256: {chosen.n_epoch} epochs, {time_text(chosen.duration.planned)}. Still larger ones were not tried."]
        assert not any('plan.at(' in o for o in good_to_know(chosen))
        untried = [o for o in good_to_know(plan_of(n_epoch=n_epoch)) if 'plan.at(256)' in o]
        assert len(untried)==1 and 'not tried' not in untried[0] # By a noise scale that was measured, no size was
        slow = plan_of(n_epoch=n_epoch, trial=Trial(256, 100., 240), times=((64,0.02,0.),(128,0.025,0.),(256,0.05,0.)))
        assert not any('plan.at(' in o for o in good_to_know(slow)) # 256 would take longer

def test_with_many_passes_only_sizes_that_may_be_planned_are_said_to_save():
    "256 would save more, but is not to be planned"
    times = (64,0.02,0.),(128,0.037,0.),(256,0.05,0.)
    little = plan_of(n_epoch=6, noise_scale=1e5, ci=(9e4,1.1e5), times=times)
    assert headline(little).startswith('Stay at 64 for 6 epochs (') and ': 128 would save ' in headline(little)
    nowhere = plan_of(n_epoch=6, times=times, trial=Trial(512, 5000., 240, failed=512))
    assert headline(nowhere).endswith('and 128 would save too little.')

def test_which_sizes_are_as_fast_is_known_only_where_one_was_tried():
    measured,tried = (' '.join(plan_words(plan_of(trial=o))['how']) for o in (None,Trial(256, 300., 3910)))
    assert 'Sizes from 128 to 256 may be about as fast, within 10%' in measured
    assert 'are about as fast' in tried

def test_a_batch_that_is_made_up_anew_has_today_s_row_beside_it():
    "As it is, at 100%; its epochs stay, whatever the loader leaves out"
    plan = plan_of(64, noise_scale=70., ci=(60.,75.), micro_bs=16, times=secs(16, 32, 64), n_train=5040, n_epoch=20, drops_last=True)
    df = _candidates_table(plan).set_index('batch size')
    assert plan.n_epoch==20
    assert df.index.tolist()[:4]==['16','32','64 (today)','64 (planned)']
    assert df.loc['64 (today)',['batches in a step','epochs',"of today's"]].tolist()==['4 x 16',20,1]
    assert df.loc['64 (planned)',['batches in a step','epochs']].tolist()==['1 x 64',20]

def test_a_plan_that_stays_names_no_range_of_sizes():
    "Which its own reason would contradict"
    plan = plan_of(64, noise_scale=100., ci=(90.,110.))
    assert plan.verdict=='stay' and len(plan.choice.as_fast)>1
    assert not any('about as fast' in o for o in plan_words(plan).get('how',()))

def test_what_a_size_further_away_has_to_save():
    now,*others = (option_of(plan_of().facts, 512., bs) for bs in (64,256,16,32))
    told = ["4 times the batch must save 17.4% to be planned", "1/4 of the batch must save 17.4% to be planned",
            "half of the batch must save 9.1% to be planned"]
    assert [limit_text(o, now, 0.03) for o in others]==told

@pytest.mark.parametrize('kwargs,larger', [(dict(max_bs=64),'with max_bs=64 no micro-batch larger than 64 is compared'),
    (dict(max_bs=100),'with max_bs=100 no micro-batch larger than 64'),
    (dict(failed=((128,'mine'),)),'larger micro-batches could not be timed'), (dict(max_bs=128, failed=((128,'mine'),)),'could not be timed'),
    (dict(too_large=128),'larger micro-batches do not fit in memory'),
    (dict(n_train=200, n_epoch=100),'an epoch of 200 items does not hold two larger micro-batches'),
    (dict(n_epoch=6, times=secs(64, 256)),'no micro-batch of up to 128 was timed'),
    (dict(given=True),'no time was given for a larger micro-batch'), ({},'no larger micro-batch was timed,')])
def test_why_no_larger_micro_batch_is_compared(kwargs, larger):
    plan = plan_of(**unmeasured, **{'times': secs(64), **kwargs})
    assert plan.choice.reason=='single'
    assert larger in headline(plan)
    assert headline(plan).endswith(", and larger batches made up of 64 at a time save too little.")

@pytest.mark.parametrize('given,after', [(False,' (about 11 s; trials come on top)'), (True,'')])
def test_what_measuring_would_cost(given, after):
    "660 micro-batches of 16 ms, where those are this device's"
    plan = plan_of(**unmeasured, trial=Trial(64, skipped=256, hoped_noise=536., saving=20., cost=30.), given=given)
    told = ("To try larger sizes whatever that costs, and judge smaller ones: bs_find(..., num_it=660), which first measures the noise scale on 660 batches"
        f"{after}.")
    assert told in cautions(plan)

def test_no_measurement_is_advised_that_takes_longer_than_the_training():
    "It stands in the details alone"
    short = plan_of(**unmeasured, n_train=20_000, n_epoch=1, trial=Trial(64, skipped=256, hoped_noise=536., saving=1., cost=3.))
    assert not any('num_it' in o for o in cautions(short))
    assert 'To try larger sizes whatever that costs, and judge smaller ones: bs_find(..., num_it=660)' in ' '.join(short.details().split())
    assert short.details().count('num_it=660')==1

def test_a_learner_that_accumulates_measures_with_more():
    "Where that is said, also in the details"
    short = plan_of(**unmeasured, micro_bs=8, times=secs(8, 16), n_train=20_000, n_epoch=1, trial=Trial(64, skipped=256, hoped_noise=536., saving=1., cost=3.))
    assert not any('num_it' in o for o in cautions(short))
    assert [o for o in good_to_know(short) if 'num_it=2760' in o] and not any('num_it=660' in o for o in good_to_know(short))

def test_why_nothing_larger_is_planned():
    "Beyond what was tried, and beside a batch that is only made up in another way"
    plan = plan_of(**unmeasured, n_epoch=20, trial=Trial(128, 3000., 10_000))
    assert plan.bs==128
    assert 'No size above 128 is planned, as none was tried' in ' '.join(plan.details().split())
    for failed,told in ((inf,'none would be clearly faster'),(512,'512 got too little further')): # After a measurement all that may pay was tried
        asked = plan_of(n_epoch=20, trial=Trial(128, 3000., 10_000, failed))
        assert [o for o in good_to_know(asked) if 'above 128' in o]==[f'No size above 128 is planned: {told}.']
    split = plan_of(64, **unmeasured, micro_bs=16, times=secs(16, 32, 64, 128), trial=Trial(64, skipped=256, hoped_noise=536., saving=20., cost=30.))
    assert split.verdict=='split'
    untried = 'Larger sizes: trying 256 takes 30 s, above the limit of 10 s, as it saves 20 s per training at best, with 7 epochs (today 5)'
    assert untried in ' '.join(split.details().split())

def test_what_is_shown_is_the_fit_as_it_is_trained():
    "In the table and in the first sentence, also where a part of an epoch is cut off; a number of epochs that is whole is not rounded"
    for noise,epochs,rounded in ((180.,'5.09',True),(1e7,'4',False)):
        plan = plan_of(trial=Trial(256, noise, 3910), n_epoch=4, noise_scale=nan, ci=(nan,nan), n_windows=None, cool=None).at(128)
        o,row = plan.choice.option,_candidates_table(plan).set_index(plan.table.bs).loc[128]
        assert (o.n_epoch,num(o.epochs))==(round(o.epochs),epochs)
        assert row['time (s)']==plan.duration.planned==o.trained_time
        assert (o.fit_time>1.001*o.trained_time)==rounded
        assert row["of today's"]==plan.duration.planned/plan.duration.today
        assert ('are planned.' in why(plan)[0])==rounded

def test_what_was_measured_in_a_training_of_few_steps():
    "It says whether today's batch is too large"
    few = plan_of(n_train=200, n_epoch=2)
    assert few.verdict=='few_steps'
    assert 'The noise scale was measured as about 400 items (340 to 500) at the end of a mock training.' in cautions(few)
    assert not any('noise scale' in o for o in cautions(plan_of(n_train=200, n_epoch=2, cool=None)))

def test_what_a_slow_size_of_one_s_own_gives_away():
    plan = plan_of()
    slow,near = plan.at(4096),plan.at(plan.bs)
    fastest = min(slow.options, key=lambda o: o.fit_time)
    assert f"Of the sizes that were compared, {fastest.bs} is the fastest: {time_text(fastest.fit_time)}." in list(cautions(slow))
    assert not any('were compared' in o for o in cautions(near))
    assert not any('were compared' in o for o in cautions(plan_of(**unmeasured).at(128))) # All have today's epochs

def test_epochs_are_rounded_where_they_are_shown():
    table = str(plan_of(freeze_epochs=1, frozen=0.00656, has_n_epoch=False, n_epoch=4.0449438202247191).details())
    assert '1 + 4.04' in table
    assert not re.search(r'\+ \d+\.\d{4}', table)

@pytest.mark.parametrize('kwargs,told', [(dict(trial=Trial(64, failed=256)),'Only 256 was tried. To compare sizes between 64 and 256, and below 64: bs_find('),
    (dict(times=((64,0.01,0.),(128,0.019,0.))),'To judge sizes below 64, too: bs_find(..., num_it=660)'),
    (dict(micro_bs=8, times=((8,0.01,0.),(16,0.02,0.))),'bs_find(..., num_it=2760)')])
def test_how_to_have_other_sizes_compared(kwargs, told):
    "Not where the noise scale was measured or given: then they were"
    assert any(told in o for o in cautions(plan_of(**unmeasured, **kwargs)))
    for more in (dict(n_windows=30), {}):
        known = {**unmeasured, **kwargs, **more, 'noise_scale': 20., 'ci': (15.,28.)}
        assert not any('num_it' in o for o in cautions(plan_of(**known)))

def test_where_no_training_was_tried_nothing_is_said_of_its_weights():
    "Of `fine_tune`: its frozen epochs follow those that were tried or measured"
    kwargs = dict(freeze_epochs=1, frozen=0.00656)
    told = 'for the unfrozen epochs, from the present weights on'
    assert any(told in o for o in good_to_know(plan_of(**kwargs)))
    assert not any(told in o for o in good_to_know(plan_of(**unmeasured, **kwargs, trial=Trial(64, skipped=256, hoped_noise=536., saving=20., cost=30.))))

def test_a_size_of_one_s_own_is_slower_than_today_s_training_as_it_is():
    "Not than today's size made up in another way"
    plan = plan_of(64, micro_bs=16, times=secs(16, 32, 64, 128), noise_scale=70., ci=(56.,87.5), n_epoch=100).at(128)
    now = at_todays_size(plan.facts, plan.options)
    assert now.fit_time<plan.choice.option.fit_time<plan.duration.today
    assert not any('longer than today' in o for o in cautions(plan))

def test_the_headline_has_the_epochs_of_the_line():
    plan = plan_of(n_epoch=1000, noise_scale=120., ci=(110.,130.)).at(128)
    assert plan.n_epoch==1348
    assert '128 (today 64), which needs 1348 epochs (today 1000)' in headline(plan)
    assert '(1348, ' in plan_words(plan)['run'][0]

@pytest.mark.parametrize('kwargs,said', [
    (dict(moved=False, cool=None, has_lr=False), 'No rate was given: pass the one that you train with to `fit`, where it is scaled for you.'),
    (dict(has_lr=False), "No rate was given, so this is for the learner's own, 0.01: pass the one that you train with to `fit_one_cycle`, where it is"),
    (dict(base_bs=16, lr_factor=2.),
        'Pass 0.02 to `fit_one_cycle` in place of 0.01, as the plan takes the place of your ScaledLR, which made 0.02 of it.'),
    (dict(sums=True), 'Pass 0.005 to `fit_one_cycle` in place of 0.01, as the loss is a sum over items and grows with the batch.')])
def test_the_rate_to_pass(kwargs, said):
    plan = plan_of(adam=False, **kwargs)
    assert plan.bs==128
    assert plan_words(plan)['how'][0].startswith(said)

@pytest.mark.parametrize('make,code', [
    (lambda: plan_of(), 'plan.apply(learn).fit_one_cycle(6, 0.01)  # Rate scaled to 0.0148'),
    (lambda: plan_of(wd=0.03), 'plan.apply(learn).fit_one_cycle(6, 0.01)  # Rate scaled to 0.0148, weight decay to 0.0338'),
    (lambda: plan_of(n_train=500, n_epoch=1), 'learn.fit_one_cycle(1, 0.01)'),
    (lambda: plan_of(128, **tight), 'learn.fit_one_cycle(5, 0.01)'),
    (lambda: plan_of(**fixed), 'plan.apply(learn).fit(6, 0.01)'),
    (lambda: plan_of(has_lr=False, has_n_epoch=False), 'plan.apply(learn)  # Then train for 1.11 times the epochs, at 0.01 (scaled to 0.0148)'),
    (lambda: plan_of(64, noise_scale=70., ci=(60.,75.), micro_bs=16, times=secs(16, 32, 64), has_n_epoch=False),
        'plan.apply(learn)  # Then train for as many epochs, at 0.01'),
    (lambda: plan_of(adam=False, sums=True), 'plan.apply(learn).fit_one_cycle(6, 0.005)  # Rate scaled to 0.009'),
    (lambda: plan_of(freeze_epochs=1, frozen=0.00656), 'plan.apply(learn).fine_tune(7, 0.01)  # Rate scaled to 0.0196'),
    (lambda: plan_of(freeze_epochs=1).at(1024), 'plan.at(1024).apply(learn).fine_tune(14, 0.01, freeze_epochs=3)  # Rate scaled to 0.0245'),
    (lambda: plan_of(freeze_epochs=1, n_windows=4), "plan = learn.bs_find(0.01, n_epoch=5, num_it=1440, how='fine_tune')"),
    (lambda: plan_of(loss_rose=True, lr=0.03), 'plan = learn.bs_find(0.01, n_epoch=5)'),
    (lambda: plan_of(n_windows=4), 'plan = learn.bs_find(0.01, n_epoch=5, num_it=1440)'), (lambda: plan_of(pairs=True), None)])
def test_the_line_to_run(make, code): assert plan_words(make()).get('run')==([code] if code else None)

# Any plan

@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans())
def test_sentences_of_any_plan(plan):
    texts = [o for o in sentences(plan) if o]
    for text in texts:
        if not text.startswith('BatchPlan('): assert not re.search(r'\b(nan|None|inf)\b', text), text
        said = text.partition('  # ')[0]
        assert '{' not in text and '  ' not in said and (said[-1] in '.)' or text.startswith('The error')), text
    head = headline(plan)
    assert re.search(rf'\b{plan.bs}\b', head)
    assert re.search(rf'\b{plan.facts.today.bs}\b', head)
    assert head.startswith(('Use','You chose','Stay'))
    assert head.startswith('Stay')==(plan.verdict!='use')
    assert len(plan_words(plan).get('caution',()))<=3
    assert bool(why(plan))==plan.facts.can_plan
    said = repr(plan)
    assert head in ' '.join(said.split())
    assert all(len(line)<=110 or line.startswith('    ') for line in said.splitlines())
    is_decided = plan.verdict in ('use','split','stay')
    for text in list(cautions(plan))[:1 if is_decided else 3]: assert text in ' '.join(said.replace('* ', '').split())
    few_words = 105 if list(_on_rate(plan))==[] else 150 # All of these were asked to measure a noise scale; those that were not: below
    if is_decided: assert len(said.split())<=few_words, said

def test_html_holds_the_same_words_and_is_escaped():
    plan = plan_of(failed=((512,'ValueError: <b>no</b>'),))
    html = plan._repr_html_()
    assert headline(plan) in html
    assert '128 (planned)' in html
    assert '64 (today)' in html
    assert html.count('<tr')==len(plan.table)+1
    assert '<b>no</b>' not in plan.details()._repr_html_()
    assert '&lt;b&gt;no' in plan.details()._repr_html_()

def test_details():
    plan = plan_of(trained=0.25, seed=3, given=True, failed=((512,'ValueError: no'),), freeze_epochs=1)
    text = plan.details()
    for part in (headline(plan), *cautions(plan), *good_to_know(plan)):
        assert ' '.join(part.split()) in ' '.join(text.split())
    assert [o.split()[1] for o in good_to_know(plan)]==['the','step','error','was']
    assert list(good_to_know(plan_of()))==['In the table, 512 is made up as 2 x 256: a larger micro-batch was not timed, or is no faster.']
    assert isinstance(text, str)
    assert 'seed=3' in repr(plan)

# Without a mock training

unmeasured = dict(noise_scale=nan, ci=(nan,nan), n_windows=None, cool=None, df=None)

@pytest.mark.parametrize('kwargs,text', [
    (dict(times=((64,0.01,0.),(128,0.019,0.))),
        "Stay at 64 for 5 epochs (39 s): even if 128 needed no more epochs, it would save 5% of the time, but twice the batch must save 9.1% to be planned."),
    (dict(times=((64,0.01,0.),(128,0.013,0.)), spread=0.7),
        "Stay at 64 for 5 epochs (39 s): even if 128 needed no more epochs, it would save 35% of the time, but step times varied by 70%, so that is not sure."),
    (dict(times=((64,0.01,0.),(128,0.0201,0.))), "Stay at 64 for 5 epochs (39 s): no larger size would save time."),
    (dict(trial=Trial(64, skipped=256, hoped_noise=536., saving=20., cost=30.)),
        "Stay at 64 for 5 epochs (1 min 4 s): trying 256 takes 30 s, above the limit of 10 s, "
        "as it saves 20 s per training at best, with 7 epochs (today 5)."),
    (dict(n_epoch=6, trial=Trial(64, skipped=256, hoped_noise=536., saving=20., cost=30.)),
        "Stay at 64 for 6 epochs (1 min 17 s): trying 256 takes 30 s, above the limit of 15 s, "
        "as 128 saves 20 s per training at best, with 7 epochs (today 6)."),
    (dict(n_epoch=6, trial=Trial(64, skipped=256, hoped_noise=210., saving=-1., cost=30.)),
        "Stay at 64 for 6 epochs (1 min 17 s): even if all goes well 128 needs 8 epochs (today 6) and saves no time."),
    (dict(trial=Trial(64, skipped=256, hoped_noise=210., saving=-1., cost=30.)),
        "Stay at 64 for 5 epochs (1 min 4 s): even if all goes well 256 needs 9 epochs (today 5) and saves no time.")])
def test_why_nothing_was_tried(kwargs, text):
    plan = plan_of(**unmeasured, **kwargs)
    assert headline(plan)==text
    assert why(plan)==[]
    table = "The table has the time that other sizes would take for as many epochs as today."
    told = ["The epochs of larger sizes in the table are hoped for, not measured: they are enough if in short trainings 256 needs at most "
            "1.41 times as much data as 64 for the same loss; in a whole training that is less."]
    rule = "To be planned, another size must make a training 1.1 times as fast for each doubling or halving of the batch."
    rules = [rule] if plan.choice.reason=='never' else []
    assert [o for o in good_to_know(plan) if not o.startswith('In the table, ')]==(told if 'trial' in kwargs else [table, *rules])
    assert not any('about as fast' in o for o in plan_words(plan).get('how',()))
    assert any('which first measures the noise scale on 660 batches (about ' in o for o in cautions(plan))

@pytest.mark.parametrize('kwargs', [dict(), dict(adam=False, n_epoch=60), dict(freeze_epochs=1, frozen=0.00656, n_epoch=30), dict(loading=0.0055),
    dict(micro_bs=16, n_ranks=2, times=secs(16, 32, 64), n_epoch=40), dict(spread=0.4),
    dict(trial=Trial(64, skipped=256, hoped_noise=536., saving=20., cost=30.)),
    dict(trial=Trial(64, failed=256)), dict(times=((64,0.01,0.),(128,0.019,0.)), trial=None)])
@pytest.mark.parametrize('bs', [None,512])
def test_few_words_where_no_noise_scale_was_asked_for(kwargs, bs):
    "As planned, and for a size of one's own choice"
    plan = plan_of(**{**unmeasured, 'trial': Trial(256, 300., 3910), 'took': 500., **kwargs})
    if bs: plan = plan.at(bs)
    assert plan.verdict in ('use','stay')
    assert len(repr(plan).split())<=90, plan

@pytest.mark.parametrize('took,kwargs,said', [
    (5.,dict(),'it should pay from the first training on'), (113.,dict(),'it should pay from the 11th training on'),
    (220.,dict(),'it should pay from the 21st training on'), (20.,dict(),'it should pay from the second training on'), (300.,dict(),'th training on'),
    (5.,dict(given=True),None), (5.,dict(has_n_epoch=False),None), (nan,dict(),None)])
def test_from_when_on_a_plan_pays(took, kwargs, said):
    plan = plan_of(**unmeasured, trial=Trial(256, 300., 240), took=took, **kwargs)
    assert plan.verdict=='use'
    text = [o for o in plan.details().replace('\n  ', ' ').splitlines() if 'it should pay' in o]
    assert [said in o for o in text]==([True] if said else [])
    if said: assert plan.pays_after==math.ceil(took/(plan.duration.today-plan.duration.planned))
    assert not any('it should pay' in o for o in why(plan.at(256))) # Of a size of one's own choice nothing was found
    assert ('.fit_one_cycle(' in plan_words(plan)['run'][0])==kwargs.get('has_n_epoch', True)

def test_a_size_that_saves_nothing_never_pays():
    plan = plan_of(**unmeasured, took=1.)
    assert plan.pays_after==inf
    assert math.isnan(plan_of(**unmeasured, trial=Trial(256, 300., 240), took=1., given=True).pays_after)

@pytest.mark.parametrize('kwargs,words', [(dict(loss_rose=True),'the loss rose during a short training'), (dict(learned=False),'the loss of a short training')])
def test_alarms_of_a_short_training_are_told(kwargs, words):
    assert words in headline(plan_of(**unmeasured, **kwargs))
    assert words.replace('a short','the mock') in headline(plan_of(**kwargs))

@pytest.mark.parametrize('cool,told', [(NoiseEstimate(330., (nan,nan), 0),'330 items'), (NoiseEstimate(330., (240.,400.), 12),'about 330 items (240 to 400)')])
def test_a_noise_scale_that_was_given_is_told(cool, told):
    "On the first screen, too"
    plan = plan_of(**{**unmeasured, 'noise_scale': 300., 'ci': (200.,400.), 'cool': cool})
    text = f"The noise scale that was given is {told}. Over 3910 steps it counts as 300: short trainings gain less from larger batches."
    assert why(plan)[0]==brief_words(plan)['how'][0]==text
    assert not any('present weights' in o for o in cautions(plan))

def test_without_a_number_of_epochs_nothing_is_rounded():
    "The headline, the line, the seconds and the weight decay are for the same multiple of the epochs"
    plan = plan_of(n_epoch=1, has_n_epoch=False, wd=0.01)
    times = plan.choice.option.epochs
    assert headline(plan).startswith(f"Use {plan.bs} (today 64) for {num(times)} times the epochs: about ")
    assert plan.duration.planned==pytest.approx(times*plan.choice.option.epoch_time)
    assert plan.wd*plan.lr_factor*times*plan.choice.option.epoch.steps==pytest.approx(0.01*plan.facts.today.steps)
    assert f"({plan.duration})" in headline(plan)
    assert [o.startswith('No n_epoch was given: this is for 1 epoch of today.') for o in cautions(plan)][0]

def test_a_size_of_one_s_own_that_costs_too_much_to_try():
    "What it would need at best is known"
    as_planned = plan_of(**unmeasured, trial=Trial(64, skipped=256, hoped_noise=536., saving=20., cost=30.))
    df = _candidates_table(as_planned)
    assert (df['batch size'].tolist(),df.epochs.tolist())==(['64 (today)','128','256'],[5,6,7])
    assert as_planned.table.steps.isna().all() # None was measured
    plan = as_planned.at(256)
    assert headline(plan)==("You chose 256 (today 64): it was not tried. If all goes well it needs 7 epochs (today 5): about 76% of the time "
        "(48.7 s instead of 1 min 4 s).")
    made_up = plan_of(**{**unmeasured, 'times': secs(64)}, trial=as_planned.facts.trial).at(256)
    assert headline(made_up).endswith(" A step is 4 x 64.")
    assert plan.n_epoch==7
    assert plan.table.bs.tolist()==[64,128,256]
    assert plan.at(32).n_epoch==5

def test_a_size_of_one_s_own_without_a_noise_scale():
    plan = plan_of(**unmeasured).at(256)
    assert "it was not tried" in headline(plan)
    assert plan.n_epoch==5
