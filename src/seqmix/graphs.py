"""A function of tensors as a CUDA graph: all its kernels are launched at once, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Graph:
    """`function` captured with inputs like `tensors`. A call copies its arguments into these inputs, replays the graph, and
    returns the outputs of the function, which the next replay overwrites.

    The function must have run before, so that one-time compilation, tuning and allocation are not captured. pool: memory to
    share with another graph, None for its own. RuntimeError if the function waits for the device.
    """

    def __init__(
        self,
        function: Callable,
        *tensors: Tensor,
        pool: tuple[int, int] | None = None,
        stream: torch.cuda.Stream | None = None,
    ):
        self.inputs = tuple(tensor.clone() for tensor in tensors)
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's watchdog) may use the device during the capture
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.outputs = function(*self.inputs)

    def __call__(self, *tensors: Tensor) -> object:
        for own, new in zip(self.inputs, tensors, strict=True):
            own.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.outputs
