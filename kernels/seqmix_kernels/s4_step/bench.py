"""Times one step of a stack of S4 or S4D layers under a CUDA graph: the fused step and plain torch.

    python -m seqmix_kernels.s4_step.bench [--kinds s4,s4d] [--batches 1,16,64] [--states 64] [--tune]

Every layer has its own parameters and states, so that they come from memory and not from the cache, as in a model.
Times are microseconds per layer (../graph_timing.py): of the step, and of the step with the gated projection after it.
floor: the time to move parameters once and states twice at the GPU's measured bandwidth. --tune: tries several numbers of
rows per program.
"""

import argparse
import json
import math

import torch

from ..graph_timing import graph_milliseconds, memory_bandwidth
from .op import gated_projection, s4_step


def layer(kind: str, batch: int, width: int, modes: int, dtype: torch.dtype, g: torch.Generator) -> tuple[dict, dict]:
    def normal(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    sets = 1 if kind == "s4" else width  # as the models have them
    own = {
        "x": normal(batch, width, modes, 2),
        "log_dt": math.log(1e-3) + math.log(100) * torch.rand(width, generator=g, device="cuda"),
        "log_decay": torch.full((sets, modes), math.log(0.5), device="cuda"),
        "imag": math.pi * torch.arange(modes, device="cuda").repeat(sets, 1).float(),
        "C": normal(width, modes, 2), "D": normal(width),
    }  # fmt: skip
    if kind == "s4":
        own |= {name: normal(1, modes, 2) * modes**0.5 for name in "PB"}
    weights = {name: (normal(width, width) * width**-0.5).to(dtype) for name in ("gate_proj", "out_proj")}
    return own, weights | {name: normal(width).to(dtype) for name in ("gate_bias", "out_bias")}


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.s4_step.bench", description=__doc__)
    parser.add_argument("--kinds", default="s4,s4d")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--states", type=int, default=64)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args(argv)
    dtype, bandwidth = getattr(torch, args.dtype), memory_bandwidth()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype, "E": args.d_model}
    for kind in args.kinds.split(","):
        for batch in map(int, args.batches.split(",")):
            g = torch.Generator("cuda").manual_seed(0)
            layers = [layer(kind, batch, args.d_model, args.states // 2, dtype, g) for _ in range(args.layers)]
            u = torch.randn(batch, args.d_model, generator=g, device="cuda").to(dtype)

            def floor(*groups):
                numbers = [(2 if name == "x" else 1) * t.numel() * t.element_size() for d in groups for name, t in d.items()]
                return 1e6 * sum(numbers) / bandwidth

            row = {"kind": kind, "N": args.states, "batch": batch, "floor_us": floor(layers[0][0])}
            row["floor_whole_us"] = floor(*layers[0])
            if args.tune:
                print(json.dumps(about | row | tuned(u, layers)), flush=True)
                continue
            for impl in ("fused", "reference"):

                def steps(impl=impl, u=u, layers=layers):
                    for own, _ in layers:
                        u, _ = s4_step(u, **own, impl=impl)

                def whole(impl=impl, u=u, layers=layers):
                    for own, weights in layers:
                        y, _ = s4_step(u, **own, impl=impl)
                        u = gated_projection(y, **weights, impl=impl)

                for name, call in (("step", steps), ("whole", whole)):
                    row[f"{impl}_{name}_us"] = 1e3 * graph_milliseconds(call, calls=1) / args.layers
            print(json.dumps(about | row), flush=True)


def tuned(u: torch.Tensor, layers: list) -> dict:
    from . import fused

    found = {}
    for rows in (1, 2, 4, 8, 16):
        if rows > len(u):
            break

        def steps(rows=rows, u=u):
            for own, _ in layers:
                given = (own.get(name) for name in ("x", "log_dt", "log_decay", "imag", "P", "B", "C", "D"))
                u, _ = fused.step(u, *given, "zoh", "gelu", u.dtype, False, rows)

        found[f"rows_{rows}_us"] = 1e3 * graph_milliseconds(steps, calls=1) / len(layers)
    return found


if __name__ == "__main__":
    main()
