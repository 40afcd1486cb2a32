"""Training on several ranks: replicas of the whole model (data parallelism), or shards of it (FSDP2).

Under FSDP2 each rank keeps a shard of every parameter, gradient and optimizer state. The parameters of a block are gathered
before it runs and freed after it (Zhao et al. 2023, "PyTorch FSDP"; torch's `fully_shard`). Parameters keep their names and
their dimensions, so decay by dimension and checkpoints stay as they are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class Replicas(DDPStrategy):
    """The whole model on each rank. The step itself sums the gradients (step.py), inside its CUDA graph if it has one. So the
    model is not wrapped in DistributedDataParallel, whose hooks and buckets would do the same from the host."""

    def configure_ddp(self) -> None:
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor, src=0)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard `model` over the ranks of `mesh`, block by block and in place. A second call does nothing.

    Each of the model's `blocks` is a unit, and so is the rest. Calls of their methods beside `forward` gather, too.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method  # takes half a second

    if isinstance(model, FSDPModule):
        return
    units = [*model.blocks, model]  # the last takes the rest: embedding, final norm
    for unit in units:
        fully_shard(unit, mesh=mesh)
        for method in ("score", "init_state", "prefill", "prefill_last", "step"):
            if hasattr(unit, method):
                register_fsdp_forward_method(unit, method)
