"""Launches Triton kernels for little Python time: a kernel's own call looks at each of its arguments and at each global it
reads, 50 to 90 us with fifty arguments; here a call like an earlier one goes straight to what was compiled for that."""

import torch
from torch import Tensor

_compiled: dict = {}
_pointers: dict = {}  # how many tensors a kernel takes
_MOST = 4096  # calls remembered


def launch(kernel, grid: tuple[int, ...], args: tuple, constants: dict, options: dict) -> None:
    """`kernel[grid](*args, **constants, **options)`, on the device of the first argument.

    args: tensors, then integers, in the kernel's order. constants: all its tl.constexpr, which come last. options: num_warps,
    maxnreg and the like.
    """
    first = args[0]
    index = first.device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, grid, args, constants, options)
    count = _pointers.get(kernel)
    if count is None:
        count = _pointers[kernel] = sum(isinstance(a, Tensor) for a in args)
    tensors, numbers = args[:count], args[count:]
    pointers = [t.data_ptr() for t in tensors]  # a number is taken as it is, a tensor asked and checked once more
    low = 0
    for pointer in pointers:
        low |= pointer
    # what Triton compiles for: dtypes, which pointers are multiples of 16, the integers (all of each: a little more often)
    odd = tuple([p % 16 for p in pointers]) if low % 16 else None
    dtypes = tuple([t.dtype for t in tensors])
    key = (kernel, index, odd, dtypes, numbers, tuple(constants.values()), tuple(options.values()))
    found = _compiled.get(key)
    if found is not None:
        compiled, names = found
        compiled[grid + (1,) * (3 - len(grid))](*pointers, *numbers, *[constants[n] for n in names])
        return None
    # said outright: Triton 3.9 warns that its default is about to change, and the kernels count on it
    compiled = kernel[grid](*args, **constants, **options, enable_fp_fusion=True)
    if hasattr(compiled, "launch_metadata"):  # not under the interpreter
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled, kernel.arg_names[len(args) :]
    return None
