"""Errors of the fused scan against the plain recurrence in float64, beside those of plain torch."""

from typing import NamedTuple

import torch

from seqmix_kernels.ops.selective_scan import fused, reference

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


def inputs(batch, length, width, n, groups=1, dtype=torch.bfloat16, without=(), seed=0, device="cuda"):
    """x, dt, A, B, C, D, z, dt_bias, initial_state as in a trained model: delta about 0.02, A = -1..-N."""
    r = torch.Generator(device).manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=r, device=device, dtype=torch.float32).to(dtype)

    wide, narrow = (batch, length, width), (batch, length, groups, n)
    A = -torch.arange(1, n + 1, device=device, dtype=torch.float32).repeat(width, 1)
    f32 = torch.float32
    values = (
        normal(*wide), normal(*wide), A, normal(*narrow), normal(*narrow), normal(width, dtype=f32), normal(*wide),
        normal(width, dtype=f32) - 4, normal(batch, width, n, dtype=f32),
    )  # fmt: skip
    return [None if name in without else v for name, v in zip(NAMES, values, strict=True)]


def gradients(args, run, dy, dfinal):
    """The outputs of `run` and the gradients of all args, given those of the outputs."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in args]
    y, final = run(leaves)
    given = [t for t in leaves if t is not None]
    return [y.detach(), final.detach(), *torch.autograd.grad((y, final), given, (dy, dfinal))]


class Errors(NamedTuple):
    """||got - true|| / ||true|| by name, of the fused scan and of plain torch on the same inputs; and whether two runs
    agreed."""

    ours: dict
    torch: dict
    same: bool


def errors(args, how=None, softplus=True, discretization="euler", seq_idx=None, chunk=None, dy=None):
    """Errors against the plain recurrence in float64, on the device of args. dy: the output's gradient, random if None."""
    x, A = args[0], args[2]
    r = torch.Generator(x.device).manual_seed(1)
    random = torch.randn(x.shape, generator=r, device=x.device).to(x.dtype)
    dy = random if dy is None else dy
    dfinal = torch.randn(x.shape[0], *A.shape, generator=r, device=x.device)

    def plain(t):
        return reference.sequential(*t[:8], softplus, discretization, t[8], seq_idx)

    want = gradients([None if t is None else t.double() for t in args], plain, dy.double(), dfinal.double())
    theirs = gradients(args, plain, dy, dfinal)
    settings = (softplus, discretization, chunk)
    y, final, *saved = fused.forward(*args, seq_idx, *settings, how=how)
    runs = [fused.backward(dy, dfinal, *args, seq_idx, y, *saved, *settings, how=how) for _ in range(2)]
    got = [y, final, *(g for g, t in zip(runs[0], args, strict=True) if t is not None)]
    names = ["y", "final", *("d" + name for name, t in zip(NAMES, args, strict=True) if t is not None)]

    def relative(values):
        return {
            k: ((v.double() - w).norm() / w.norm().clamp_min(1e-30)).item() for k, v, w in zip(names, values, want, strict=True)
        }

    same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    return Errors(relative(got), relative(theirs), same)
