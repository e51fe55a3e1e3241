"A mock training: the learner as others train it, and afterwards as it was"
import pytest
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import Adam
from fastai_bs.all import NoiseScale
from fastai_bs.learner.mock import mock_training, trained_as
from helpers import changes, loaders, mlp, picture, quiet_learner, regression

def by_layer(m): return [[*m[0].parameters()],[*m[2].parameters()]]

def test_a_mock_training_is_without_our_callbacks_and_logs(tmp_path):
    "Trackers and loggers of others see that it is none of theirs, as under `lr_find`"
    class Mine(Callback): pass
    learn = quiet_learner(loaders(regression(8), 4), mlp(), opt_func=Adam, cbs=[Mine(),NoiseScale(),GradientAccumulation(8),CSVLogger()], path=tmp_path)
    learn.fit(1, 0.01)
    file = (tmp_path/'history.csv').read_text()
    was = picture(learn)
    with pytest.raises(KeyError, match='the one'), mock_training(learn):
        names = {type(o).__name__ for o in learn.cbs}
        assert 'Mine' in names
        assert not names & {'NoiseScale','GradientAccumulation','CSVLogger'}
        assert hasattr(learn, 'lr_finder')
        learn.fit(1, 0.01)
        assert changes(was, picture(learn))
        raise KeyError('the one')
    assert changes(was, picture(learn))==[]
    assert (tmp_path/'history.csv').read_text()==file

@pytest.mark.parametrize('how,trains', [('fit_one_cycle',False), ('fine_tune',True)])
def test_a_frozen_learner_is_unfrozen_as_fine_tune_trains_it(how, trains):
    learn = quiet_learner(loaders(regression(8), 4), mlp(), opt_func=Adam, splitter=by_layer)
    learn.freeze()
    was = picture(learn)
    with trained_as(learn, how):
        assert learn.model[0].weight.requires_grad==trains
        assert learn.opt.frozen_idx==(0 if trains else 1)
    assert changes(was, picture(learn))==[]
