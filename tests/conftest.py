import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)
