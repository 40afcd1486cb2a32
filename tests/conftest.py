import seqmix.quick_lightning  # noqa: F401  before torch and Lightning

# isort: split
import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)
