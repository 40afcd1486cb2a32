"""Peaks of memory of this run alone, and running out of it."""

import mmap
import sys

import pytest
import torch

from seqmix import memory


class Allocator:
    """torch.cuda's peak statistics, over a made-up history."""

    def __init__(self):
        self.current = self.peak = 0

    def use(self, mib: int) -> None:
        self.current = mib * memory.MIB
        self.peak = max(self.peak, self.current)

    def reset_peak_memory_stats(self, device):
        self.peak = self.current

    def max_memory_allocated(self, device):
        return self.peak

    def max_memory_reserved(self, device):
        return 2 * self.peak


def test_gpu_peaks_are_of_this_run_and_both_kinds_are_given():
    allocator = Allocator()
    peak = memory.PeakMemory(torch.device("cuda", 0), allocator=allocator)
    allocator.use(4096)  # an earlier, larger job, or autotuning
    allocator.use(10)
    peak.reset()
    allocator.use(100)
    allocator.use(20)
    assert (peak.allocated(), peak.reserved(), peak.host()) == (100, 200, None)


def test_on_a_cpu_gpu_peaks_are_null_and_the_hosts_is_of_this_run():
    peak = memory.PeakMemory(torch.device("cpu"))
    assert (peak.allocated(), peak.reserved()) == (None, None)
    grown, shrunk = [], []
    for _ in range(3):  # once is enough: the system may take other pages of the process meanwhile
        peak.reset()
        before = peak.host()
        block = mmap.mmap(-1, 48 * memory.MIB)  # from the system: what earlier tests have freed may be enough for a tensor
        for _ in range(48):
            block.write(bytes(memory.MIB))
        after = peak.host()
        assert after is not None
        grown.append(before is None or 40 < after - before < 80)
        block.close()
        peak.reset()
        again = peak.host()
        shrunk.append(again is None or again < after - 20)
    assert any(grown)
    assert any(shrunk), "a later, smaller job does not show the larger one's peak"


def test_a_host_peak_that_cannot_be_lowered_and_did_not_move_is_unknown():
    marks = [500.0]
    host = memory.HostPeak(resident=lambda: (marks[-1], 90.0), lower=lambda: False)
    host.reset()
    assert host.read() is None
    marks.append(700.0)
    assert host.read() == 610.0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a mapped file is counted")
def test_pages_of_mapped_files_are_not_memory_of_the_run(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes(64 * memory.MIB))
    peak = memory.PeakMemory(torch.device("cpu"))
    peak.reset()
    before = peak.host()
    with (tmp_path / "tokens.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        _, of_files = memory._resident_mib()
        assert not sum(mapped[:: mmap.PAGESIZE])
        assert memory._resident_mib()[1] > of_files + 50
        assert abs(peak.host() - before) < 10


def test_out_of_memory_is_told_from_other_errors_also_where_it_is_the_cause():
    with pytest.raises(RuntimeError) as on_a_cpu:
        torch.empty(1 << 58)
    wrapped = ValueError("model")
    wrapped.__cause__ = torch.OutOfMemoryError("of a GPU")
    assert all(map(memory.out_of_memory, (on_a_cpu.value, wrapped, wrapped.__cause__, MemoryError())))
    assert not any(map(memory.out_of_memory, (RuntimeError("of the GPU"), ValueError(), None)))
