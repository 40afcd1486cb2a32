"""The fused rotation under Triton's interpreter, for test_attention.py: one JSON line a case, errors against float64."""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch

from seqmix_kernels.ops.attention import fused_rotary, rotate_queries_and_keys
from seqmix_kernels.ops.attention.rotary import rotary_frequencies

# dtype, B, L, H, H_kv, P, width, positions: None for 0.., else one a row; is qk a slice of a wider tensor, or heads first?
CASES = (
    (torch.float32, 2, 11, 3, 1, 8, 8, None, "slice"),
    (torch.float32, 2, 5, 2, 2, 12, 6, (7, 1000), "slice"),
    (torch.float16, 1, 9, 2, 1, 64, 64, None, "dense"),
    (torch.float32, 2, 4, 2, 1, 7, 2, (3, 0), "heads first"),
)


def run(dtype, B, L, H, H_kv, P, width, starts, layout):
    torch.manual_seed(0)
    if layout == "heads first":
        qk = torch.randn(B, H + H_kv, L, P, dtype=dtype).transpose(1, 2)
    else:
        qk = torch.randn(B, L, H + H_kv + (2 if layout == "slice" else 0), P, dtype=dtype)[:, :, : H + H_kv]
    positions = torch.arange(L) if starts is None else torch.tensor(starts)[:, None] + torch.arange(L)
    frequency = rotary_frequencies(width, 100.0, qk.device, dtype)
    got = fused_rotary.forward(qk, positions, frequency, 1.5, H)
    exact = qk.double().requires_grad_()
    want = rotate_queries_and_keys(exact, H, positions, width, 100.0, 1.5)
    dq, dk = (torch.randn_like(t).to(dtype) for t in want)
    (dqk,) = torch.autograd.grad(want, exact, (dq.double(), dk.double()))
    back = fused_rotary.backward(dq.transpose(1, 2).contiguous().transpose(1, 2), dk, positions, frequency, 1.5)
    pairs = zip((*got, back), (*want, dqk), strict=True)
    worst = max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    case = f"{str(dtype)[6:]} H{H}/{H_kv} P{P} width {width} {starts} {layout}"
    return {"case": case, "eps": torch.finfo(dtype).eps, "error": worst}


for case in CASES:
    print(json.dumps(run(*case)))
