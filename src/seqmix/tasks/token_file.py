"""Token ids that stay in their file and are read a window at a time.

The file is not mapped into memory. Pages of a mapped file count as memory of the process and of each of its workers. And if
such a file is cut short or its disk cannot be read, the system ends the process without a message (SIGBUS).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from seqmix.tasks import corpus


class Opened:
    """A file that stays open as long as something refers to this object, so its name may be removed or replaced meanwhile.

    Reads raise ValueError once the file has been written to. When pickled to another process, it is opened again by name.
    """

    def __init__(self, path: str, stamp: tuple[int, int] | None = None):
        self.path = path
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)
        self.stamp = stamp or self._stamp()
        self.refuse_change()

    def __reduce__(self):
        return Opened, (self.path, self.stamp)

    def _stamp(self) -> tuple[int, int]:
        status = os.fstat(self.number)
        return status.st_size, status.st_mtime_ns

    def refuse_change(self) -> None:
        if self._stamp() != self.stamp:
            raise ValueError(f"{self.path} has changed since this run began to read it")

    def read_into(self, out: np.ndarray, offset: int) -> None:
        """Fill `out`, (n,) uint8, from `offset` on, independently of other readers of the file."""
        view = memoryview(out)
        while view:
            count = os.preadv(self.number, [view], offset)
            if count == 0:
                raise ValueError(f"{self.path} ends at byte {offset}: it was cut while this run read it")
            view, offset = view[count:], offset + count


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The ids of a .bin or .npy file, (n,) integers of `kind`, or a slice of them. `np.asarray` reads them all.

    ValueError, with the file's name, if it holds something else or is damaged.
    """

    file: Opened
    kind: np.dtype
    offset: int  # bytes before the first id
    n: int
    device = torch.device("cpu")

    @classmethod
    def of(cls, path: str, dtype: str) -> TokenFile:
        """dtype: of the ids in a .bin file, which are little-endian; a .npy file records its own dtype."""
        file = Opened(path)
        size, _ = file.stamp
        head = np.empty(min(size, corpus.HEAD), np.uint8)
        file.read_into(head, 0)
        begun = corpus.format_of(path, head.tobytes())
        if corpus.suffix(path) == ".npy" and begun == "NumPy":
            try:
                ids = np.load(path, mmap_mode="r")  # checks the header, and the size against it
            except (ValueError, EOFError, OSError) as error:
                raise ValueError(f"{path} is not a whole NumPy array of integers: {error}") from error
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise ValueError(f"{path} holds {ids.dtype} of shape {ids.shape}, not a one-dimensional array of integers")
            return cls(file, ids.dtype, ids.offset if len(ids) else 0, len(ids))
        if begun is not None:
            raise ValueError(f"{path} holds {begun} data and not bare token ids; unpack, rename or fetch it first")
        kind = np.dtype(dtype).newbyteorder("<")
        if size == 0 or size % kind.itemsize:
            raise ValueError(f"{path} has {size} bytes, not a number of dtype={dtype} ids of {kind.itemsize} bytes each")
        return cls(file, kind, 0, size // kind.itemsize)

    def __len__(self) -> int:
        return self.n

    @property
    def itemsize(self) -> int:
        return self.kind.itemsize

    @property
    def nbytes(self) -> int:
        return self.n * self.itemsize

    def __getitem__(self, part: slice) -> TokenFile:
        start, stop, _ = part.indices(self.n)
        return replace(self, offset=self.offset + start * self.itemsize, n=max(0, stop - start))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self._read([0], self.n)[0].astype(dtype or self.kind, copy=False)

    def windows(self, start: Sequence[int], length: int) -> np.ndarray:
        """`length` ids from each start on; past the end the last id is repeated. (B, length) int64."""
        return self._read(start, length).astype(np.int64)

    def _read(self, start: Sequence[int], length: int) -> np.ndarray:
        self.file.refuse_change()
        out = np.empty((len(start), length), self.kind)
        for row, at in zip(out, start, strict=True):
            there = row[: self.n - at]
            self.file.read_into(there.view(np.uint8), self.offset + at * self.itemsize)
            row[len(there) :] = there[-1:]
        return out
