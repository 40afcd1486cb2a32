"""Times the embedding and the gradient of its table, and plain torch, by CUDA graphs; one JSON line per shape, kind of
tokens and implementation.

    python -m seqmix_kernels.embedding.bench [--shapes 16384x50277x768,...] [--tokens uniform,zipf,one] [--count 20]

A shape is T x V x D: tokens, rows of the table, columns. Tokens: uniform; zipf, token v about as often as 1 / v, as in natural
text; one, all equal. *_of_copy: the time of a copy of the same bytes over the measured time. The bytes are the tokens, their
rows and the result in the forward, the result's gradient and that of the whole table in the backward. It can exceed 1 where
these fit into the L2 cache. launches: kernels, copies and fills of a forward and
backward.
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..graph_timing import beside_copy, memory_bandwidth
from .op import IMPLS, embedding


def tokens_of(kind: str, T: int, V: int, device: str = "cuda", seed: int = 0) -> Tensor:
    """T tokens of V, as the module's docstring says; "ends": only the first and the last token occur."""
    random = torch.rand(T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = {"uniform": V * random, "zipf": V**random - 1, "one": V // 2 + 0 * random, "ends": (V - 1) * (random > 0.3)}
    return values[kind].long().clamp(max=V - 1).to(device)


def launches(call: Callable[[], object]) -> int:
    """How many kernels, copies and fills a call launches."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in seen.events())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.embedding.bench", description=__doc__)
    shapes = "2304x16x64,4096x16x64,262144x16x64,4096x256x128,16384x50277x768,16384x50277x128,32x50277x768,1x16x64"
    parser.add_argument("--shapes", default=shapes)
    parser.add_argument("--tokens", default="uniform,zipf,one")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args(argv)
    dtype, bandwidth = getattr(torch, args.dtype), memory_bandwidth()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype}
    for shape in args.shapes.split(","):
        T, V, D = map(int, shape.split("x"))
        weight, dy = (torch.randn(n, D, device="cuda").to(dtype) for n in (V, T))
        weight.requires_grad_()
        for kind in args.tokens.split(","):
            tokens = tokens_of(kind, T, V)
            row = D * dtype.itemsize
            forward = 8 * T + (T + len(tokens.unique())) * row
            for impl in IMPLS[1:]:

                def run(weight, tokens=tokens, impl=impl):
                    return embedding(tokens, weight, impl=impl)

                times = beside_copy(run, [weight], [dy], (forward, forward + (T + V) * row), bandwidth, args.count)
                times["launches"] = launches(lambda run=run, given=(weight, dy): torch.autograd.grad(run(given[0]), *given))
                print(json.dumps(about | {"T": T, "V": V, "D": D, "tokens": kind, "impl": impl} | times), flush=True)


if __name__ == "__main__":
    main()
