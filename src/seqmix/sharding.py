"""A run spread over several ranks: replicas of the whole model (data parallelism), or shares of it (FSDP2).

Fully sharded: each rank keeps a share of every parameter, gradient and optimizer state. A block's parameters are gathered
when it runs and let go after it (Zhao et al. 2023, "PyTorch FSDP"; torch's `fully_shard`). Parameters keep their names and
their dimensions, so decay by dimension and checkpoints stay as they are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class Replicas(DDPStrategy):
    """The whole model on each rank. The step itself adds the gradients up (step.py), in its CUDA graph where it has one: so
    there is no DistributedDataParallel around the model, whose hooks and buckets would do the same from the host."""

    def configure_ddp(self) -> None:
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor, src=0)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share `model` out over the ranks of `mesh`, block by block; in place, once: a second call does nothing.

    model: its `blocks` are the units; they and the model have their other ways in beside `forward`.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method  # half a second

    if isinstance(model, FSDPModule):
        return
    units = [*model.blocks, model]  # the last takes what is left: embedding, final norm
    for unit in units:
        fully_shard(unit, mesh=mesh)
        for method in ("score", "init_state", "prefill", "prefill_last", "step"):  # they gather, too
            if hasattr(unit, method):
                register_fsdp_forward_method(unit, method)
