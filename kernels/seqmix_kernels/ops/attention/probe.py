"""Checks whether an implementation is correct on this device, and times it. Runs once per case, before the first real call."""

import contextlib

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

CHECKED = (2, 333, 2)  # B, L, key heads of the numeric probe: L is not a multiple of any tile
TIMED = (4, 4096, 16)
REPEATS = 8
HEAD_START = 60_000_000  # cycles that the GPU sleeps while the host queues the timed calls: about 30 ms


def check(run, case) -> None:
    """Raises ArithmeticError if `run` is wrong in this case: outputs and, if the case trains, gradients may differ in norm by
    four rounding units of their dtype from the equation in float32. Dropout is not compared, because its draws differ."""
    if case.dropout:
        return
    with _apart(case):
        _compare(run, case)


def milliseconds(run, case) -> float:
    """Mean GPU time per call of `run` in this case, including the backward if the case trains."""
    with _apart(case):
        leaves, options, dy = _inputs(case, *TIMED)
        return _time(lambda: _outputs(run, leaves, options, dy))


@contextlib.contextmanager
def _apart(case):
    """Runs on the case's device, isolated from the caller's state (autocast, inference mode, random numbers, fake tensors)."""
    with (
        unset_fake_temporarily(),
        torch.cuda.device(case.device),
        torch.device(case.device),
        torch.autocast("cuda", enabled=False),
        torch.random.fork_rng([case.device]),
        torch.inference_mode(False),
    ):
        torch.manual_seed(0)
        yield


def _inputs(case, B, L, H_kv):
    S = L if case.square else L + 200
    P = case.head_dim

    def normal(*shape):
        return torch.randn(*shape).to(case.dtype).requires_grad_(case.train)

    H = H_kv * case.shared
    seq_idx = (torch.arange(L) // 100).expand(B, L) if case.packed else None
    options = (100,) * H if case.windowed else None, None, seq_idx, None, 0.1 if case.dropout else 0.0
    return (normal(B, L, H, P), normal(B, S, H_kv, P), normal(B, S, H_kv, P)), options, torch.randn(B, L, H, P).to(case.dtype)


def _outputs(run, leaves, options, dy):
    with torch.set_grad_enabled(leaves[0].requires_grad):
        y = run(*leaves, *options)
        return [y, *torch.autograd.grad(y, leaves, dy)] if y.requires_grad else [y]


def _compare(run, case):
    from .op import attention  # imported here, because op imports the probe

    leaves, options, dy = _inputs(case, *CHECKED)
    got = _outputs(run, leaves, options, dy)
    exact = [t.detach().float().requires_grad_(case.train) for t in leaves]
    want = _outputs(lambda *args: attention(*args, impl="math"), exact, options, dy.float())
    for name, a, b in zip(("y", "dq", "dk", "dv"), got, want, strict=False):
        error = ((a.float() - b).norm() / b.norm()).item()
        budget = max(4 * torch.finfo(case.dtype).eps, 1e-4)  # float32 products may be tf32, if the user has set that
        if case.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            budget = 4 * 2.0**-10
        if not error <= budget:
            raise ArithmeticError(f"{name} is off by {error:.1e} of its norm, {budget:.1e} is allowed")


def _time(call) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS
