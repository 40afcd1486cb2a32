"""A matrix product whose result may have a wider dtype than its factors: the gradient of a float32 weight under autocast."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a b into `out`, whose dtype may be wider: the sums are in float32 anyway and need not be rounded to 16 bits."""
    if out.dtype == b.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and torch.version.cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(a @ b)
