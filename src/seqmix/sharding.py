"""Fully sharded data parallelism (FSDP2): each rank keeps a share of every parameter, gradient and optimizer state.

A block's parameters are gathered when it runs and let go after it (Zhao et al. 2023, "PyTorch FSDP"; torch's
`fully_shard`). Parameters keep their names and their dimensions, so decay by dimension and checkpoints stay as they are.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share `model` out over the ranks of `mesh`, block by block; in place, once: a second call does nothing.

    model: its `blocks` are the units; they and the model have their other ways in beside `forward`.
    """
    if isinstance(model, FSDPModule):
        return
    units = [*model.blocks, model]  # the last takes what is left: embedding, final norm
    for unit in units:
        fully_shard(unit, mesh=mesh)
        for method in ("score", "init_state", "prefill", "prefill_last", "step"):  # they gather, too
            if hasattr(unit, method):
                register_fsdp_forward_method(unit, method)
