"Set-up of all tests: two threads at most, plots in memory, no progress bars"
import matplotlib
import pytest
import torch

matplotlib.use('Agg')
torch.set_num_threads(1) # Tiny models: a second thread only costs

@pytest.fixture(autouse=True)
def close_figures():
    yield
    import matplotlib.pyplot as plt
    plt.close('all')

@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    "Each test runs in an empty folder of its own, so that files left behind show"
    monkeypatch.chdir(tmp_path)
