"""Is an implementation right on the device at hand, and how fast? Run once a case, before the first real call."""

import torch

LENGTH = 333  # of the numeric probe: no multiple of any tile
TIMED = 2048
REPEATS = 10


def milliseconds(run, case) -> float:
    """Median time of `run` in this case, backward included where the case trains. ArithmeticError where it is wrong.

    Its outputs and gradients may be off, in norm, by four rounding units of their dtype from the equation in float32.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("nothing can be measured while a CUDA graph is captured: call attention once before")
    with torch.device(case.device), torch.random.fork_rng([case.device]), torch.inference_mode(False):
        torch.manual_seed(0)
        if not case.dropout:  # whose draws differ
            _compare(run, case)
        leaves, options, dy = _inputs(case, 4, TIMED, 8)
        return _time(lambda: _outputs(run, leaves, options, dy))


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
    from .op import attention  # the choice imports the probe

    leaves, options, dy = _inputs(case, 2, LENGTH, 2)
    got = _outputs(run, leaves, options, dy)
    exact = [t.detach().float().requires_grad_(case.train) for t in leaves]
    want = _outputs(lambda *args: attention(*args, impl="math"), exact, options, dy.float())
    for name, a, b in zip(("y", "dq", "dk", "dv"), got, want, strict=False):
        error = ((a.float() - b).norm() / b.norm()).item()
        budget = max(4 * torch.finfo(case.dtype).eps, 1e-4)  # float32 may be tensor cores' tf32, as the user has set it
        if case.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            budget = 4 * 2.0**-10
        if not error <= budget:
            raise ArithmeticError(f"{name} is off by {error:.1e} of its norm, {budget:.1e} is allowed")


def _time(call) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[REPEATS // 2]
