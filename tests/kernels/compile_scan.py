"""Compiles the kernels of the scan or the convolution for a GPU that is not there; one JSON line each on what came out.

    python tests/kernels/compile_scan.py 90 plain|gluon|conv [first]

The launchers run on CPU tensors with every kernel replaced by a recorder: what is compiled is what would be launched.
Run it in a process of its own: interpreted kernels cannot be compiled.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from extent import SHORT
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int16: "i16", torch.int64: "i64",
         torch.int32: "i32", torch.int8: "i8", torch.bool: "i1"}  # fmt: skip


SEEN = set()  # the kernels that `record` has returned


class Recorder:
    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **meta: self.launches.append((self.kernel, args, meta))


def record(modules, call):
    """The (kernel, args, meta) of each launch that `call` makes through kernels of `modules`.

    Where slow tests are left out (extent.py): of the first launch of each kernel.
    """
    launches, kept = [], []
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.jit.JITFunction) and name.endswith("_kernel"):
                kept.append((module, name, value))
                setattr(module, name, Recorder(value, launches))
    try:
        call()
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
    return [launch for launch in launches if not ((SHORT and launch[0] in SEEN) or SEEN.add(launch[0]))]


def build(kernel, args, meta, arch):
    """Compiled as a launch with these arguments would compile it."""
    constants, signature, attrs = {}, {}, {}
    options = {k: meta.pop(k) for k in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion") if k in meta}
    values = dict(zip(kernel.arg_names, args, strict=False)) | meta
    for i, p in enumerate(kernel.params):
        value = values[p.name]
        if p.is_constexpr or value is None:
            signature[p.name], constants[p.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[p.name] = "*" + TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif value == 1 and not p.do_not_specialize:
            signature[p.name], constants[p.name] = "constexpr", 1
        else:
            signature[p.name] = "i1" if isinstance(value, bool) else "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not p.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source
    src = source(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)


def report(compiled):
    """Registers, stack bytes (spills), shared memory, and the accesses to the stack in a loop that holds no other loop."""
    bin_dir = Path(triton.__file__).parent / "backends/nvidia/bin"

    def output(tool, flag):
        return subprocess.run([bin_dir / tool, flag, cubin], capture_output=True, text=True, check=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "k.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = output("cuobjdump", "-res-usage")
        registers, stack = (int(re.search(key + r":(\d+)", usage).group(1)) for key in ("REG", "STACK"))
        # a kernel without a stack does not access it, and the disassembler takes half a second
        sass = output("nvdisasm", "-c") if stack else ""
    ops = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9.]+)", sass, re.M)
    in_loop = sum(op.startswith(("LDL", "STL")) for first, last in innermost(sass) for op in ops[first:last])
    return {"registers": registers, "stack": stack, "shared": compiled.metadata.shared, "in_loop": in_loop}


def innermost(sass):
    """First and last instruction of every loop that holds no other: the branches backwards."""
    labels, loops, count = {}, [], 0
    for text in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", text):
            labels[label[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/\s", text):
            jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
            if jump and labels.get(jump[1], count) < count:  # a label further down is not known yet
                loops.append((labels[jump[1]], count))
            count += 1
    return [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]


def inputs(batch, length, width, n, groups=1, dtype=torch.bfloat16, z=True, D=True, bias=True, state=False, seq=False):
    wide = lambda: torch.zeros(batch, length, width, dtype=dtype)  # noqa: E731
    narrow = lambda: torch.zeros(batch, length, groups, n, dtype=dtype)  # noqa: E731
    vector = lambda: torch.zeros(width)  # noqa: E731
    return (
        wide(), wide(), torch.zeros(width, n), narrow(), narrow(), vector() if D else None, wide() if z else None,
        vector() if bias else None, torch.zeros(batch, width, n) if state else None,
        torch.zeros(batch, length, dtype=torch.int64) if seq else None,
    )  # fmt: skip


def launches(modules, fused, args, discretization="euler", chunk=None, **how):
    def call():
        y, final, *saved = fused.forward(*args, True, discretization, chunk, **how)
        fused.backward(torch.zeros_like(y), final, *args, y, *saved, True, discretization, chunk, **how)

    return record(modules, call)


CASES = {
    "plain": [
        ("bf16 N16", dict(n=16), "euler"),
        ("fp32 N16 groups state seq zoh", dict(n=16, groups=2, dtype=torch.float32, state=True, seq=True), "zoh"),
        ("bf16 N64", dict(n=64), "euler"),
        ("bf16 N256", dict(n=256), "euler"),
    ],
    "gluon": [
        ("bf16", dict(n=16), False, 1),
        ("bf16 few", dict(n=16, length=192), True, 2),
        ("fp32 N12 odd state", dict(n=12, dtype=torch.float32, length=90, width=72, state=True), False, 2),
        ("bf16 N40 documents", dict(n=40, seq=True), False, 2),
        ("bf16 zoh", dict(n=16), False, 1, "zoh"),
        ("bf16 few zoh documents, odd D", dict(n=16, length=192, width=63, seq=True), True, 2, "zoh"),
        ("fp32 N12 odd state zoh", dict(n=12, dtype=torch.float32, length=90, width=71, state=True), False, 2, "zoh"),
    ],
}


FIRST = ("bf16 N16", "bf16", "bf16 zoh")  # of each kind, what "first" compiles


def convolution(arch):
    from seqmix_kernels.ops.causal_conv1d import fused

    x, w, b = torch.zeros(1, 64, 128, dtype=torch.bfloat16), torch.zeros(128, 4), torch.zeros(128)
    state, seq = torch.zeros(1, 3, 128, dtype=torch.bfloat16), torch.zeros(1, 64, dtype=torch.int64)

    def call(*given):
        y, final = fused.forward(x, w, b, *given, True)
        fused.backward(y, final, x, w, b, *given, True)

    for name, given in (("plain", (None, None)), ("state and documents", (state, seq))):
        for kernel, args, meta in record([fused], lambda given=given: call(*given)):
            row = {"arch": arch, "case": name, "kernel": kernel.__name__} | report(build(kernel, args, meta, arch))
            print(json.dumps(row), flush=True)


def main(arch, kind, which="all"):
    if kind == "conv":
        return convolution(arch)
    from seqmix_kernels.ops.selective_scan import fused

    modules = [fused.tk]
    if kind == "gluon":
        from seqmix_kernels.ops.selective_scan import gluon_backward, gluon_forward

        modules += gluon_forward, gluon_backward
    blocks = (64, 32) if kind == "gluon" else (None,)
    for (name, kwargs, *rest), block in itertools.product(CASES[kind], blocks):
        if which != "all" and name not in FIRST:
            continue
        if kind == "gluon":
            few, segments, *rest = rest
            fused.SMS = 132 if few else 0  # two variants of the backward: by the number of CTAs
            how = {"how": fused.Plan(True, segments, segments, block, block)}
            rest = rest or ["euler"]
            name += f", CTAs of {block}"
        else:
            how = {}
        seen = set()
        size = {"batch": 1, "length": 96, "width": 64} | kwargs
        for kernel, args, meta in launches(modules, fused, inputs(**size), *rest, **how):
            if kernel.__name__ in seen or (kind == "gluon" and not kernel.is_gluon()):
                continue
            seen.add(kernel.__name__)
            row = {"arch": arch, "case": name, "kernel": kernel.__name__} | report(build(kernel, args, meta, arch))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
