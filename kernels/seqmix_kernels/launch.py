"""Launches Triton kernels for little Python time: a kernel's own call looks at each of its arguments and at each global it
reads, 50 to 90 us with fifty arguments; here a call like an earlier one goes straight to what was compiled for that."""

import torch
from torch import Tensor

_compiled: dict = {}
_MOST = 4096  # calls remembered


def launch(kernel, grid: tuple[int, ...], args: tuple, constants: dict, options: dict) -> None:
    """`kernel[grid](*args, **constants, **options)`, on the device of the first argument.

    args: tensors and integers, in the kernel's order. constants: all its tl.constexpr, which come last. options: num_warps,
    maxnreg and the like.
    """
    first = args[0]
    index = first.device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, grid, args, constants, options)
    # what Triton compiles for: dtypes, which pointers are multiples of 16, the integers (all of each: a little more often)
    shapes = tuple([(a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in args])
    key = (kernel, index, shapes, tuple(constants.values()), tuple(options.values()))
    found = _compiled.get(key)
    if found is not None:
        compiled, names = found
        compiled[grid + (1,) * (3 - len(grid))](*args, *[constants[n] for n in names])
        return None
    compiled = kernel[grid](*args, **constants, **options)
    if hasattr(compiled, "launch_metadata"):  # not under the interpreter
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled, kernel.arg_names[len(args) :]
    return None
