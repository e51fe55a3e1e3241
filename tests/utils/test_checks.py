"Sizes in memory: what is read as one, and what is refused"
import math

import numpy as np
import pytest
from fastai_bs.utils.checks import n_bytes

@pytest.mark.parametrize('size,n', [('16GB',16e9), ('16G',16e9), ('500 MiB',500*2**20), ('1.5kB',1500), (' 7 B ',7), (12.5,12.5), (np.int64(5),5)])
def test_sizes_in_memory_are_read(size, n): assert n_bytes(size)==n and type(n_bytes(size)) is float

@pytest.mark.parametrize('size,error,says', [*((o,ValueError,'or a text such as') for o in ('', '16XB', '-5GB', '1,5GB')), (True,TypeError,'or a text such as'),
    *((o,ValueError,'above 0 bytes and finite') for o in (-1, math.nan, '0GB'))])
def test_what_is_no_size_in_memory_is_refused(size, error, says):
    with pytest.raises(error, match=says): n_bytes(size)
