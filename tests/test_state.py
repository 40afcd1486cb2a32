"""What a state weighs, and its copies."""

from typing import NamedTuple

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from runs import CONF, names

from seqmix.model import SequenceModel
from seqmix.state import held_bytes, owned, repeated, reserved, state_bytes, tensors


def test_held_bytes_are_those_of_storages_each_once():
    whole = torch.zeros(8, dtype=torch.float32)
    assert held_bytes((whole[:2], (whole[4:], torch.zeros(1, dtype=torch.int64)))) == 32 + 8
    assert state_bytes((whole[:2],)) == 8


class Inner(NamedTuple):
    h: torch.Tensor
    position: int


class Outer(NamedTuple):
    conv: torch.Tensor
    layers: list


def test_state_bytes_sums_every_tensor_in_any_nesting():
    state = Outer(
        conv=torch.zeros(1, 3, 5, dtype=torch.bfloat16),  # 30 bytes
        layers=[
            Inner(torch.zeros(1, 4, 2, dtype=torch.complex64), 7),  # 64
            (torch.zeros(2, 2, dtype=torch.float64), {"k": torch.zeros(3, dtype=torch.int64), "none": None}),  # 32 + 24
            torch.zeros(0, 9),  # nothing
        ],
    )
    assert state_bytes(state) == 30 + 64 + 32 + 24
    assert state_bytes(torch.zeros(8, 100)[:, 0]) == 32, "a view counts its own elements"
    assert state_bytes(()) == 0


@pytest.mark.parametrize("name", names("model"))
@torch.no_grad()
def test_copies_of_a_state_decode_as_the_state_and_share_no_storage_with_it(name):
    torch.manual_seed(0)
    config = OmegaConf.load(CONF / "model" / f"{name}.yaml")
    model = SequenceModel(13, 32, 2, instantiate(config.model), instantiate(config.channel_mixer)).eval()
    tokens = torch.randint(13, (2, 9))
    _, state = model.prefill(tokens, model.init_state(2))
    want, _ = model.step(tokens[:, 0], state)
    many = repeated(state, 5)
    torch.testing.assert_close(model.step(tokens[[0, 1, 0, 1, 0], 0], many)[0], want[[0, 1, 0, 1, 0]])
    torch.testing.assert_close(model.step(tokens[:, 0], reserved(state, 7))[0], want)
    own = owned(state, 7)
    torch.testing.assert_close(model.step(tokens[:, 0], own)[0], want)
    places = [t.untyped_storage().data_ptr() for copy in (state, many, own) for t in tensors(copy)]
    assert len(set(places)) == len(places)
