"""Times the loss per token from hidden states, and a path in which each operation stores another tensor of logits.

    python -m seqmix_kernels.cross_entropy.bench [--shapes 16384x50277x768,...] [--dtype bfloat16] [--scored 1.0] [--count 10]

A shape is T x V x D: tokens, classes, width. x in `dtype`, the weight in float32, under autocast to `dtype`. One JSON line per
shape and variant gives milliseconds of the GPU alone, by CUDA graphs (../graph_timing.py), and the peak MiB above the inputs,
including gradients, of the forward without gradients (fwd) and of forward and backward (both).

before   that path: F.pad of the weight, F.linear, the slice of V columns, cross_entropy, argmax
"""

import argparse
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph_timing import graph_milliseconds
from .op import cross_entropy, linear_cross_entropy


def inputs(
    tokens: int, classes: int, width: int, dtype: torch.dtype, device: str = "cuda", scored: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, and targets, of which a fraction of about `scored` is scored."""
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, width, generator=g, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width, generator=g, device=device) * width**-0.5).requires_grad_()
    targets = torch.randint(classes, (tokens,), generator=g, device=device)
    return x, weight, targets.where(torch.rand(tokens, generator=g, device=device) < scored, -100)


def before(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    classes = len(weight)
    rows = F.pad(weight, (0, 0, 0, -classes % 64)) if classes % 8 else weight
    logits = F.linear(x, rows)[..., :classes]
    return cross_entropy(logits, targets), (logits.argmax(-1) == targets) & (targets != -100)


def peak_mib(call: Callable[[], object]) -> float:
    call()  # the workspaces of libraries are not counted
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.cross_entropy.bench", description=__doc__)
    parser.add_argument("--shapes", default="16384x50277x768,262144x16x64,2048x256x128")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--scored", type=float, default=1.0, help="the fraction of tokens whose targets are not ignored")
    parser.add_argument("--count", type=int, default=10)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype, "scored": args.scored}
    for shape in args.shapes.split(","):
        tokens, classes, width = map(int, shape.split("x"))
        x, weight, targets = inputs(tokens, classes, width, dtype, scored=args.scored)
        for run in (before, linear_cross_entropy):

            def losses(run=run, given=(x, weight, targets)):
                with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                    return run(*given)

            def forward(losses=losses):
                with torch.no_grad():
                    losses()

            def both(losses=losses, leaves=(x, weight)):
                # both results are held until the gradients are computed, as in a training step
                values, right = losses()
                return torch.autograd.grad(values.sum() / len(values), leaves), right

            row = {"T": tokens, "V": classes, "D": width, "variant": run.__name__}
            for name, call in (("fwd", forward), ("both", both)):
                row[f"{name}_mib"] = peak_mib(call)
                row[f"{name}_ms"] = graph_milliseconds(call, args.count, 4)
                torch.cuda.empty_cache()  # memory held by the graph
            print(json.dumps(about | row), flush=True)


if __name__ == "__main__":
    main()
