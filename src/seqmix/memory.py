"""How much memory a run takes: its peaks, what a backward keeps, and whether there was too little.

Allocators are handed in, so that tests can lie about them. What a state weighs is in state.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

MIB = 2**20


class PeakMemory:
    """Largest memory since `reset`, in MiB; None where it cannot be known, never 0 for "unknown".

        allocated()   of tensors on the accelerator    reserved()   held by the caching allocator (None on a CPU)
        host()        of this process, in main memory (None on an accelerator, where it is not what limits a run)

    allocator is torch.cuda, or anything with its max_memory_allocated, max_memory_reserved and reset_peak_memory_stats.
    """

    def __init__(self, device: torch.device, allocator=torch.cuda, host: HostPeak | None = None):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.allocator = allocator
        self._host = host or HostPeak()

    def reset(self) -> None:
        if self.on_gpu:
            self.allocator.reset_peak_memory_stats(self.device)
        else:
            self._host.reset()

    def allocated(self) -> float | None:
        return self.allocator.max_memory_allocated(self.device) / MIB if self.on_gpu else None

    def reserved(self) -> float | None:
        return self.allocator.max_memory_reserved(self.device) / MIB if self.on_gpu else None

    def host(self) -> float | None:
        return None if self.on_gpu else self._host.read()


class HostPeak:
    """Peak memory of this process since `reset`, in MiB: the resident pages that no file backs. Loader workers not counted.

    These are the tensors, the interpreter's objects and shared memory. Pages of libraries and of mapped files are left out:
    other processes share them, and the system drops and reads them again as it likes.

    It is the high-water mark of the whole resident set less the pages that files back when it is read (VmHWM and RssFile,
    proc_pid_status(5)), as Linux keeps no mark of the rest alone. So it is off by as much as those pages have changed in
    number between the peak and the reading. Where the system does not tell them apart (macOS), they are counted.

    The mark is the process's, so a small run after a large one would show the large one's. Linux can lower it
    (proc_pid_clear_refs(5)); where that is refused, a mark that has not moved since `reset` is unknown: None.

    resident: gives (high-water mark, pages backed by files) in MiB, or None; lower: lowers the mark, and says whether it did.
    """

    def __init__(
        self, resident: Callable[[], tuple[float, float] | None] | None = None, lower: Callable[[], bool] | None = None
    ):
        self._resident = resident or _resident_mib
        self._lower = lower or _lower_high_water
        self._floor: float | None = None

    def reset(self) -> None:
        resident = None if self._lower() else self._resident()
        self._floor = resident and resident[0]

    def read(self) -> float | None:
        resident = self._resident()
        if resident is None or (self._floor is not None and resident[0] <= self._floor):
            return None
        high_water, of_files = resident
        return high_water - of_files


def _resident_mib() -> tuple[float, float] | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if value.endswith("kB")}
    if "VmHWM" in kib and "RssFile" in kib:
        return kib["VmHWM"] / 2**10, kib["RssFile"] / 2**10
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak / MIB if sys.platform == "darwin" else peak / 2**10), 0.0


def _lower_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class SavedForBackward(torch.autograd.graph.saved_tensors_hooks):
    """While it is entered, counts what autograd keeps for a backward: `bytes` of distinct storages, those of `parameters`
    left out."""

    def __init__(self, parameters: Iterable[Tensor]):
        self._storages: dict[int, int] = {}
        self._known = {p.untyped_storage().data_ptr() for p in parameters}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self._storages.values())


def out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or an error that caused it, says that memory ran out. torch's CPU allocator has no type of its own for
    it, so there the text tells."""
    if error is None:
        return False
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return of_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError) or out_of_memory(error.__cause__)


def gpu_fault(error: BaseException | None) -> bool:
    """Whether `error`, or an error that caused it, says that the GPU cannot be used any more by this process. Triton and some
    of torch's own code have no type for it, so there the text tells."""
    if error is None or out_of_memory(error):
        return False
    of_text = isinstance(error, RuntimeError) and ("CUDA error" in str(error) or "Triton Error [CUDA]" in str(error))
    return of_text or isinstance(error, torch.AcceleratorError) or gpu_fault(error.__cause__)
