"""Functions that the Triton kernels of several operators call."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    e = tl.exp2(-tl.abs(x) * LOG2E)  # in (0, 1]: no overflow for either sign
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)); log1p(u) = 2 atanh(u / (2 + u)), the series cut at 1e-8 for u in [0, 1]."""
    u = tl.exp2(-tl.abs(x) * LOG2E)
    s = u / (2.0 + u)
    r = s * s
    p = 0.142857143 + r * (0.111111111 + r * (0.0909090909 + r * 0.0769230769))
    p = 1.0 + r * (0.33333333 + r * (0.2 + r * p))
    return tl.where(x > 0, x, 0.0) + 2.0 * s * p  # maximum would drop a NaN


@triton.jit
def zoh(q):
    """g(q) = expm1(q) / q and its derivative; series near 0, where the quotients cancel."""
    small = tl.abs(q) < 0.5
    qs = tl.where(small, q, 0.0)
    qb = tl.where(small, 1.0, q)
    g0 = 1.0 + qs * (0.5 + qs * (1.6666667e-1 + qs * (4.1666667e-2 + qs * (8.3333333e-3 + qs * (1.3888889e-3
        + qs * (1.9841270e-4 + qs * 2.4801587e-5))))))  # fmt: skip
    d0 = 0.5 + qs * (3.3333333e-1 + qs * (1.25e-1 + qs * (3.3333333e-2 + qs * (6.9444444e-3 + qs * (1.1904762e-3
        + qs * (1.7361111e-4 + qs * 2.2045855e-5))))))  # fmt: skip
    e = tl.exp2(qb * LOG2E)
    g1 = (e - 1.0) / qb
    return tl.where(small, g0, g1), tl.where(small, d0, (e - g1) / qb)
