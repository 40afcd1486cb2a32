"""Matrix products whose factors or results have other dtypes than their weights, as under autocast."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in x's dtype, whatever the weight's."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a b into `out`, whose dtype may be wider (the gradient of a float32 weight under autocast): the sums are in
    float32 anyway and need not be rounded to 16 bits."""
    if out.dtype == b.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and torch.version.cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(a @ b)
