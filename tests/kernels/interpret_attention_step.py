"""The fused attention step under Triton's interpreter, for test_attention.py: one JSON line a case.

Errors of what is returned and of what is written, against float64 in plain torch; every slot behind the lengths holds NaN.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch

from seqmix_kernels.ops.attention import attention_step, fused_step
from seqmix_kernels.ops.attention.reference import constant
from seqmix_kernels.ops.attention.rotary import rotary_frequencies

FAR = torch.iinfo(torch.int32).max
# dtype, H, H_kv, P, C, lengths, rotary_dim, windows, slopes, splits
CASES = (
    (torch.float32, 4, 2, 8, 64, (40, 0), 8, None, None, 1),
    (torch.float32, 4, 2, 24, 160, (140, 63), 8, None, None, 2),
    (torch.float16, 3, 3, 64, 192, (191, 64), 64, None, None, 4),
    (torch.float32, 4, 1, 16, 192, (150,), 0, (3, None, 1, 200), None, 2),
    (torch.float32, 4, 4, 16, 192, (150, 2), 16, (3,) * 4, None, 4),
    (torch.float32, 4, 2, 16, 192, (150,), 0, None, (0.5, 0.25, 0.1, 0.0), 2),
    (torch.float32, 2, 1, 129, 70, (64,), 128, None, None, 2),
)


def run(dtype, H, H_kv, P, C, lengths, rotary, windows, slopes, splits):
    torch.manual_seed(0)
    B, n = len(lengths), torch.tensor(lengths, dtype=torch.int32)
    fused = torch.randn(B, H + 2 * H_kv, P, dtype=dtype)
    q, k, v = fused.split((H, H_kv, H_kv), dim=1)
    caches = [torch.randn(B, H_kv, C, P, dtype=dtype) for _ in range(2)]
    exact = [t.double() for t in caches]
    for cache in caches:
        cache.masked_fill_((torch.arange(C) >= n[:, None])[:, None, :, None], float("nan"))
    told = (n, rotary, 10_000.0, 2.0, windows, slopes)
    want, _ = attention_step(q.double(), k.double(), v.double(), *exact, *told, impl="torch")
    wide = None if windows is None else constant(tuple(FAR if w is None else w for w in windows), torch.int32, n.device)
    frequency = rotary_frequencies(rotary, 10_000.0, n.device, dtype) if rotary else None
    steep = None if slopes is None else torch.tensor(slopes)
    y, after = fused_step.step(q, k, v, *caches, n, frequency, wide, steep, 2.0, n_splits=splits)
    pairs = [(a[b, :, : m + 1], t[b, :, : m + 1]) for a, t in zip(caches, exact, strict=True) for b, m in enumerate(lengths)]
    return {
        "case": f"{str(dtype)[6:]} H{H}/{H_kv} P{P} {lengths} {windows} {slopes}",
        "after": (after == n + 1).all().item(),
        "eps": torch.finfo(dtype).eps,
        "y": ((y.double() - want).norm() / want.norm()).item(),
        "written": max((a.double() - b).abs().max().item() for a, b in pairs),
        "spare_untouched": all(cache[b, :, m + 1 :].isnan().all().item() for cache in caches for b, m in enumerate(lengths)),
    }


def past_the_capacity():
    """Nothing is written, there or anywhere, and the row's output is NaN; the other row is as it would be."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 16)
    caches = [torch.randn(2, 2, 70, 16) for _ in range(2)]
    before = [t.clone() for t in caches]
    y, _ = fused_step.step(q, k, v, *caches, torch.tensor([70, 5], dtype=torch.int32), None, None, None, 1.0, n_splits=2)
    same = all(torch.equal(a[0], b[0]) for a, b in zip(caches, before, strict=True))
    return {"case": "past the capacity", "nan": y[0].isnan().all().item(), "same": same, "other": y[1].isfinite().all().item()}


for case in CASES:
    print(json.dumps(run(*case)))
print(json.dumps(past_the_capacity()))
