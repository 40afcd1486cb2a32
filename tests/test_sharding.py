"""Fully sharded runs, on two processes of this machine's CPU; tests/test_gpu.py has the same on GPUs."""

import json
import math

import pytest
import torch
from runs import SELECTIVE_COPY, command, start

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


def test_a_sharded_run_is_the_run_of_one_and_goes_on_as_one(tmp_path):
    """s4 has parameters with learning rates of their own, which a sharded parameter must not lose."""
    base = ("logger=csv", *SELECTIVE_COPY, "model=s4", "size.n_layer=2", "optimizer.lr=1e-2", "callbacks=default")
    done = command(
        tmp_path, *base, "trainer=fsdp", "task.batch_size=2", "callbacks.last.every_n_steps=2", "callbacks.last.keep_steps=-1",
        launcher=TORCHRUN, env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    one = start(tmp_path / "one", *base)
    sharded, whole = (torch.load(at / "checkpoints/last.ckpt", weights_only=True) for at in (folder, tmp_path / "one"))
    groups = [c["optimizer_states"][0]["param_groups"] for c in (sharded, whole)]
    groups = [[(g["lr"], g["weight_decay"], len(g["params"])) for g in of_one] for of_one in groups]
    assert groups[0] == groups[1] and len(groups[0]) == 3
    assert sharded["state_dict"].keys() == whole["state_dict"].keys()
    for name in (name for name in whole["state_dict"] if name.startswith("model.")):  # beside it: rank 0's own sums
        value = whole["state_dict"][name]
        torch.testing.assert_close(sharded["state_dict"][name], value, atol=1e-5, rtol=1e-4, msg=name)

    resumed = start(tmp_path / "resumed", *base, f"ckpt={folder}/checkpoints/step_000002.ckpt")  # on one process
    for name in ("val/loss", "test/loss"):
        assert math.isfinite(one[name]) and resumed[name] == pytest.approx(one[name], abs=1e-5), name


@pytest.mark.slow
def test_a_sharded_run_without_torchrun_is_one_of_two_processes(tmp_path):
    base = ("logger=csv", *SELECTIVE_COPY, "model=rnn", "callbacks=none")
    done = command(tmp_path, *base, "trainer=fsdp", "task.batch_size=2", "trainer.enable_checkpointing=false", "test=false")
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    one = start(tmp_path / "one", *base, "test=false")
    assert json.loads((folder / "summary.json").read_text())["val/loss"] == pytest.approx(one["val/loss"], abs=1e-5)
