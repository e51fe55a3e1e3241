"Factors on the learning rate"
import pytest
from fastai_bs.scaling import linear_scaling, sqrt_scaling

@pytest.mark.parametrize('rule,k,factor', [(linear_scaling,1,1), (linear_scaling,32,32), (linear_scaling,0.25,0.25),
                                           (sqrt_scaling,1,1), (sqrt_scaling,16,4), (sqrt_scaling,0.25,0.5)])
def test_factor(rule, k, factor): assert rule(k)==factor

@pytest.mark.parametrize('rule', [linear_scaling, sqrt_scaling])
@pytest.mark.parametrize('k', [0, -4, float('nan'), '4'])
def test_a_ratio_is_positive(rule, k):
    with pytest.raises((ValueError,TypeError), match='`k`'): rule(k)
