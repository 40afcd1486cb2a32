"""Parameter groups and schedules."""

import pytest
import torch
from torch import nn

from seqmix.mixers.base import no_weight_decay
from seqmix.optim import constant, cosine, param_groups


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.A_log = no_weight_decay(nn.Parameter(torch.ones(4, 2)))
        self.log_dt = no_weight_decay(nn.Parameter(torch.ones(4)), max_lr=1e-3)
        self.tied = self.linear.weight


def test_every_parameter_is_in_exactly_one_group():
    model = Marked()
    groups = param_groups(model, lr=1e-2, weight_decay=0.1)
    in_groups = [id(p) for group in groups for p in group["params"]]
    assert sorted(in_groups) == sorted({id(p) for p in model.parameters()})


def test_marks_are_read():
    model = Marked()
    of = {id(p): g for g in param_groups(model, lr=1e-2, weight_decay=0.1) for p in g["params"]}
    assert (of[id(model.linear.weight)]["lr"], of[id(model.linear.weight)]["weight_decay"]) == (1e-2, 0.1)
    assert of[id(model.linear.bias)]["weight_decay"] == 0.0
    assert (of[id(model.A_log)]["lr"], of[id(model.A_log)]["weight_decay"]) == (1e-2, 0.0)
    assert (of[id(model.log_dt)]["lr"], of[id(model.log_dt)]["weight_decay"]) == (1e-3, 0.0)


def test_marks_survive_compile():
    model = torch.compile(Marked(), backend="eager")
    lrs = {g["lr"] for g in param_groups(model, lr=1e-2, weight_decay=0.1)}
    assert lrs == {1e-2, 1e-3}


def test_a_max_lr_above_lr_changes_nothing():
    assert {g["lr"] for g in param_groups(Marked(), lr=1e-4, weight_decay=0.1)} == {1e-4}


@pytest.mark.parametrize(("lr", "decay"), [(0.0, 0.1), (-1.0, 0.1), (1e-3, -0.1), (float("nan"), 0.1)])
def test_impossible_values_are_refused(lr, decay):
    with pytest.raises(ValueError, match="must be"):
        param_groups(Marked(), lr=lr, weight_decay=decay)


def test_cosine_warms_up_and_ends_where_it_says():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = cosine(optimizer, total_steps=110, warmup_steps=10, final=0.1)
    lrs = []
    for _ in range(111):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert lrs[0] == pytest.approx(0.1) and lrs[9] == lrs[10] == pytest.approx(1.0)
    assert lrs[60] == pytest.approx(0.55) and lrs[110] == pytest.approx(0.1)


def test_constant_stays():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = constant(optimizer, total_steps=10, warmup_steps=2)
    lrs = []
    for _ in range(5):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert lrs == [0.5, 1.0, 1.0, 1.0, 1.0]
