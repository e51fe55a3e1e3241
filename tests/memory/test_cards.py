"Cards by their names, what they leave to a training, and limits that may mean several things"
import numpy as np
import pytest

from fastai_bs.memory.cards import Card, card_of, limit_bytes, margin_text
from fastai_bs.utils.checks import n_bytes

GiB = 2**30
# GiB that PyTorch has called the total of such a card, in errors and in `get_device_properties`
totals = {'T4': (14.56,14.76), 'L4': (21.9,22.2), 'A10G': (21.9,22.3), 'V100-16': (15.7,15.8), 'V100-32': (31.7,31.75),
    'P100': (15.85,15.9), 'A100-40': (39.3,39.6), 'A100-80': (79.1,79.35), 'H100': (79.1,79.4), 'RTX 3060': (11.6,11.8),
    'RTX 3090': (23.6,23.7), 'RTX 4090': (23.5,23.7), 'RTX 5090': (31.3,31.9)}

@pytest.mark.parametrize('name', totals)
def test_what_a_card_leaves(name):
    "Between a quarter and one GiB less than the total, or a hundredth of it more: a context takes 0.3 to 0.6"
    left = limit_bytes(name)/GiB
    low,high = totals[name]
    assert low-0.6-0.02*low<=left<=high-0.25

@pytest.mark.parametrize('name,meant', [('t4','T4'), (' NVIDIA L4 ','L4'), ('nvidia a100-sxm4-80gb','A100-80'),
    ('Tesla P100-PCIE-16GB','P100'), ('NVIDIA H100 80GB HBM3','H100'), ('NVIDIA GeForce RTX 3090','RTX 3090'),
    ('rtx3090ti','RTX 3090 Ti'), ('RTX 4060 Ti 8GB','RTX 4060 Ti'), ('RTX 4060','RTX 4060')])
def test_cards_are_known_by_several_names(name, meant): assert card_of(name).name==meant and limit_bytes(name)==limit_bytes(meant)

@pytest.mark.parametrize('name,near', [('V100','V100-16, V100-32'), ('A100','A100-40, A100-80, A10'), ('RTX 4060 Ti 16GB','RTX 4060, RTX 4060 Ti'),
    ('RTX 309','RTX 3090, RTX 3090 Ti')])
def test_unknown_names_of_cards_are_refused(name, near):
    "With names that begin alike, and those of several sizes are not guessed"
    with pytest.raises(ValueError, match=f"No card is known by the name '{name}': say how much memory it has, as '16GB', or take a name as {near}$"):
        card_of(name)

@pytest.mark.parametrize('name', ['gpu','GeForce','kaggle','RTX 9090'])
def test_where_no_name_begins_alike(name):
    "Cards that many have, those of Kaggle and Colab first, and each is known"
    with pytest.raises(ValueError, match='or take a name as T4, P100, L4, A100-40') as e: card_of(name)
    assert all(card_of(o).name==o for o in str(e.value).partition(' a name as ')[2].split(', '))

@pytest.mark.parametrize('limit', ['16GB', ' 500 MiB', '15KB', 1e6, 16e9])
def test_sizes_in_memory_are_no_cards(limit): assert card_of(limit) is None and limit_bytes(limit)==n_bytes(limit)

def test_what_a_card_loses_is_said():
    "All in one unit, so that it can be checked by hand"
    text = 'T4: 15.2 GB of 17.2 GB (16 GiB) are left for a training, after 6.25% for ECC, 2% for the driver and 537 MB for the CUDA context'
    assert str(card_of('T4'))==text
    assert margin_text(card_of('T4').usable, 0.05)=='`margin` keeps 5% of that free: 14.5 GB may be filled'
    assert 'ECC' not in str(card_of('RTX 3060'))
    assert Card('x', 10, False).usable==9.3*GiB

@pytest.mark.parametrize('limit,meant', [('4090',"the card 'RTX 4090' or '4090MB'"), (4090,"the card 'RTX 4090' or '4090MB'"), (6,"'6GB'"), (16,"'16GB'"),
    (np.int64(16),"'16GB'"), (' 24 ',"'24GB'"), ('40',"the card 'A40' or the card 'L40S' or '40GB'"), (1635.,"'1635.0MB'"), ('16000000000',"'16 GB'")])
def test_numbers_that_are_no_memory(limit, meant):
    "A text of digits, and fewer bytes than any training holds; the error has what was meant"
    with pytest.raises(ValueError, match='did you mean ') as e: limit_bytes(limit)
    assert str(e.value).endswith(f"did you mean {meant}?")
