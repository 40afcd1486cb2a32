"""Runs the plain Triton scan under Triton's interpreter and prints one JSON line a case: errors beside torch's own.

A process of its own, because Triton reads TRITON_INTERPRET when a kernel is decorated.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from scan_errors import errors, inputs

from seqmix_kernels.ops.selective_scan import fused

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SEQ = torch.tensor([[0] * 5 + [1] + [2] * 14, [3] * 20])
BARE = ("D", "z", "dt_bias", "initial_state")
# (B, L, D, N, G, dtype, left out), keyword arguments of `errors`
CASES = {
    "one step": ((2, 1, 3, 1, 1, F32, ()), {}),
    "below a chunk": ((1, 15, 6, 5, 2, F32, ()), dict(chunk=16)),
    "past a chunk": ((1, 17, 7, 16, 1, F32, ()), dict(chunk=16)),
    "bare, zoh": ((1, 9, 5, 4, 1, F32, BARE), dict(discretization="zoh")),
    "no softplus": ((1, 9, 5, 4, 1, F32, ("dt_bias",)), dict(softplus=False)),
    "few documents, zoh": ((2, 8, 4, 4, 1, F32, ()), dict(seq_idx=SEQ[:, :8], discretization="zoh")),
    "few documents, groups": ((1, 8, 6, 4, 3, F32, ("D",)), dict(seq_idx=SEQ[:1, :8])),
    "float16": ((1, 20, 4, 16, 1, F16, ()), {}),
    "bfloat16": ((1, 20, 4, 16, 1, BF16, ()), {}),
    "many states": ((1, 2, 4, 200, 1, F32, ()), dict(chunk=16)),
    # from here on not in a short run
    "two steps": ((1, 2, 1, 3, 1, F32, ()), {}),
    "one chunk": ((1, 16, 4, 16, 1, F32, ()), dict(chunk=16)),
    "past 64": ((1, 65, 4, 3, 1, F32, ()), {}),
    "bare": ((1, 20, 5, 4, 1, F32, BARE), {}),
    "zoh": ((1, 20, 5, 4, 1, F32, ()), dict(discretization="zoh")),
    "documents": ((2, 20, 4, 4, 1, F32, ()), dict(seq_idx=SEQ)),
    "documents, zoh, groups": ((2, 17, 4, 4, 2, F32, ()), dict(seq_idx=SEQ[:, :17], discretization="zoh")),
    "past two chunks, float16": ((1, 40, 4, 16, 1, F16, ()), {}),
    "past two chunks, bfloat16": ((1, 40, 4, 16, 1, BF16, ()), {}),
}


def emit(name, e, **more):
    print(json.dumps({"case": name, "ours": e.ours, "torch": e.torch, "same": e.same} | more), flush=True)


def sliced(args):
    """The same values as views of wider tensors: a fused projection's slices, a reversed time axis, a repeated row."""
    out = list(args)
    for i in (0, 1, 3, 4, 6):
        t = args[i]
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), float("nan"), dtype=t.dtype)
        wide[..., 1::2] = t
        out[i] = wide[..., 1::2]
    out[0] = out[0].flip(1).contiguous().flip(1)
    return out


def main():
    from extent import some

    for name, (size, settings) in some(CASES.items(), 10):
        args = inputs(*size, device="cpu")
        if settings.get("softplus") is False:
            args[1] = args[1].abs()
        emit(name, errors(args, **settings))
    fused.PARTIALS = 1
    for length, n in some(((20, 3), (40, 17)), 1):
        emit("several pieces", errors(inputs(1, length, 20, n, device="cpu", dtype=F32), chunk=16))
    for bias in some((1.0, -4.6, 0.0), 1):  # what a padded tail must not do depends on softplus(bias)
        args = inputs(1, 19, 3, 4, device="cpu", dtype=F32)
        args[7] = torch.full((3,), bias)
        emit(f"tail, bias {bias}", errors(args, chunk=16))
    args = inputs(1, 12, 4, 3, device="cpu", dtype=F32)
    emit("expanded gradient", errors(args, dy=torch.ones(1, 1, 1).expand(1, 12, 4)))
    wide = torch.randn(1, 4, 24)[..., ::2].transpose(1, 2)
    emit("transposed gradient", errors(args, dy=wide))
    emit("sliced inputs", errors(sliced(args)))
    args[1] = torch.tensor([-100.0, -20, -5, 0, 20.5, 88, 100, 1e4, -4, -3, -2, -1])[None, :, None].expand(1, 12, 4)
    args[7] = None
    emit("softplus far out", errors(args))
    # a NaN stays in its row and its past's gradient, and nothing hangs
    args = inputs(2, 20, 4, 3, device="cpu", dtype=F16)
    args[0][0, 3] = float("nan")
    y, final, *saved = fused.forward(*args, None, True, "euler", 16)
    dx = fused.backward(torch.ones_like(y), None, *args, None, y, *saved, True, "euler", 16)[0]
    print(json.dumps({"case": "nan", "y": y[0, 3:].isnan().all().item(), "final": final[0].isnan().all().item(),
                      "clean": not (y[1].isnan().any() or dx[1].isnan().any() or y[0, :3].isnan().any()).item()}))  # fmt: skip
    for batch, length in ((2, 0), (0, 3)):
        args = inputs(batch, length, 3, 2, device="cpu", dtype=F32)
        y, final, *saved = fused.forward(*args, None, True, "euler", None)
        grads = fused.backward(y, final, *args, None, y, *saved, True, "euler", None)
        zero = all(not g.any() for i, g in enumerate(grads) if i != 8)
        through = torch.equal(final, args[8]) and torch.equal(grads[8], final)
        shapes = all(g.shape == t.shape for g, t in zip(grads, args, strict=True))
        print(json.dumps({"case": f"empty {batch} {length}", "zero": zero, "through": through, "shapes": shapes}))


if __name__ == "__main__":
    main()
