"""Launches Triton kernels with little Python time. Triton's own call inspects each argument and each global that the kernel
reads, which takes 50 to 90 us with fifty arguments; here a call like an earlier one reuses that one's compiled kernel directly.
"""

import functools

import torch
import triton
from torch import Tensor

_compiled: dict = {}
_kernels: dict = {}  # by id (hashing is slow): the kernel, held so that its id stays valid, and its number of tensors
_MOST = 4096  # calls that are cached


def launch(kernel, grid: tuple[int, ...], args: tuple, constants: dict, options: dict) -> None:
    """`kernel[grid](*args, **constants, **options)`, on the device of the first argument.

    args: tensors, then integers, in the kernel's order. constants: all its tl.constexpr, which come last. options: num_warps,
    maxnreg and the like.
    """
    index = args[0].get_device()
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return launch(kernel, grid, args, constants, options)
    name = id(kernel)
    if name not in _kernels:
        _kernels[name] = kernel, sum(isinstance(a, Tensor) for a in args)
    count = _kernels[name][1]
    tensors, numbers = args[:count], args[count:]
    pointers = [t.data_ptr() for t in tensors]  # Triton passes a number directly, but queries and checks a tensor
    low = 0
    for pointer in pointers:
        low |= pointer
    # what Triton specialises on: dtypes, pointer alignment to 16 bytes, integers (here exactly, so it compiles slightly more)
    odd = tuple([p % 16 for p in pointers]) if low % 16 else None
    key = (name, index, odd, tuple([t.dtype for t in tensors]), numbers, tuple(constants.values()), tuple(options.values()))
    found = _compiled.get(key)
    if found is not None:
        compiled, run, function, packed, stream, ordered = found
        x, y, z = grid + (1,) * (3 - len(grid))
        if watched():
            compiled[x, y, z](*pointers, *numbers, *ordered)
        else:  # the same without the calls of empty hooks and their arguments
            run(x, y, z, stream(index), function, packed, None, None, None, *pointers, *numbers, *ordered)
        return None
    # explicit, because Triton 3.9 warns that its default will change, and the kernels rely on it
    compiled = kernel[grid](*args, **constants, **options, enable_fp_fusion=True)
    if hasattr(compiled, "launch_metadata"):  # not under the interpreter
        if len(_compiled) >= _MOST:
            _compiled.clear()
        ordered = tuple([constants[n] for n in kernel.arg_names[len(args) :]])
        stream = triton.runtime.driver.active.get_current_stream
        _compiled[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, stream, ordered
    return None


def watched() -> bool:
    """Whether a profiler has hooked Triton's launches."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    # a chain of hooks, or one hook that replaced it
    return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))


@functools.cache
def programmatic(device: torch.device) -> bool:
    """Whether a kernel on `device` can start before the kernel it depends on has finished."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
