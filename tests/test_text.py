"How numbers are written"
import math

import numpy as np
import pytest
from fastai_bs.text import counted, num, percent, rate_text, bytes_text, with_interval

@pytest.mark.parametrize('x,text', [(0,'0'), (0.00123,'0.00123'), (9.999,'10'), (99.96,'100'), (1234.5,'1230'), (1e6,'1000000'), (-250.4,'-250'),
    (math.inf,'inf'), (math.nan,'nan')])
def test_num(x, text): assert num(x)==text

@pytest.mark.parametrize('n,text', [(0,'0 items'), (1,'1 item'), (2,'2 items'), (1.,'1 item'), (0.9999,'1 item'), (61.26,'61.3 items'), (12345,'12345 items'),
    (np.int64(12345),'12345 items'), (12345.,'12300 items')])
def test_items(n, text):
    "A count in full, an estimate in three digits"
    assert counted(n)==text

@pytest.mark.parametrize('x,text', [(0.0123,'1.2%'), (0.636,'64%'), (0.9949,'99%'), (0.9951,'100%'), (1.234,'123%')])
def test_percent(x, text): assert percent(x)==text

def test_with_interval(): assert with_interval(512.3, (430.12,math.inf))=='512 [430, inf]'

@pytest.mark.parametrize('lr,text', [(1,'1'), (0.12345,'0.123'), (slice(1e-3,1e-2),'slice(0.001, 0.01)'), (slice(None,1e-2),'slice(0.01)'),
    ([1e-4,1e-3],'[0.0001, 0.001]'), (np.array([0.1]),'[0.1]'), (np.float32(0.1),'0.1')])
def test_rate_text(lr, text): assert rate_text(lr)==text

def test_rate_text_in_full(): assert rate_text(0.12345, '.15g')=='0.12345'

@pytest.mark.parametrize('n,text', [(math.nan,''), (0,'0 B'), (999,'999 B'), (999.6,'1 KB'), (1500,'1.5 KB'), (2.5e9,'2.5 GB'), (-3e6,'-3 MB'), (4e13,'40 TB')])
def test_bytes_text(n, text): assert bytes_text(n)==text
