"""The fused attention step and rotation compiled for sm_90 without a GPU, for test_attention.py: one JSON line a form."""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seqmix_kernels.ops.attention import fused_rotary, fused_step

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# P, query heads a key head, splits, rotary, windowed, sloped
FORMS = (
    (64, 1, 16, True, False, False), (64, 4, 1, True, False, False), (128, 8, 8, True, False, False),
    (64, 1, 8, False, True, False), (64, 1, 8, False, False, True),
)  # fmt: skip


def compiled(P, G, splits, rotary, windowed, sloped):
    constants = {
        "G": G, "P": P, "HALF": P // 2 if rotary else 0, "WINDOWED": windowed, "SLOPED": sloped, "SPLITS": splits,
        "BG": max(16, triton.next_power_of_2(G)), "BP": P, "BN": fused_step.BLOCK,
    }  # fmt: skip
    low, wide = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "y"), "*bf16"), {"parts": "*fp32", "stats": "*fp32"}
    pointers = low | wide | {"length": "*i32", "after": "*i32"}
    optional = {"frequency": ("*fp32", rotary), "windows": ("*i32", windowed), "slopes": ("*fp32", sloped)}
    signature, given, hints = {}, {}, {}
    for i, name in enumerate(fused_step.attend.arg_names):
        if name in optional:
            kind, there = optional[name]
            pointers = pointers | ({name: kind} if there else {})
            constants = constants | ({} if there else {name: None})
        if name in constants:
            signature[name], given[(i,)] = "constexpr", constants[name]
        elif name in pointers:
            signature[name], hints[(i,)] = pointers[name], [["tt.divisibility", 16]]
        elif name in ("scale", "shrink"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name != "H_kv":
                hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fused_step.attend, signature=signature, constexprs=given, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})


def rotation(back):
    """24 heads of 64, all of which turn."""
    constants = {"H": 12, "H_KV": 12, "P": 64, "HALF": 32, "BACK": back, "BT": 8, "BH": 32, "BR": 1}
    signature, given, hints = {}, {}, {}
    for i, name in enumerate(fused_rotary.turn.arg_names):
        if name in constants:
            signature[name], given[(i,)] = "constexpr", constants[name]
        elif i < 6:
            signature[name] = {"positions": "*i64", "frequency": "*fp32"}.get(name, "*bf16")
            hints[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "shrink" else "i32"
            hints |= {} if name in ("shrink", "pos_l") else {(i,): [["tt.divisibility", 16]]}
    source = ASTSource(fn=fused_rotary.turn, signature=signature, constexprs=given, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def report(kernel, **more):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
        usage = subprocess.run([BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, env=env).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    facts = {"registers": found["REG"], "stack": found["STACK"], "shared": kernel.metadata.shared}
    print(json.dumps(facts | {"async_copies": "cp.async" in kernel.asm["ptx"]} | more))


for form in FORMS:
    report(compiled(*form), rotary=form[3])
for back in (False, True):
    report(rotation(back), back=back)
