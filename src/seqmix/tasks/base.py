"""A task: rows of tokens as a pure function of (seed, split, index), and the loaders that iterate over the indices.

    stream of the train split   row 0, 1, 2, ...                    (train_samples: n rows, reshuffled each pass)
    step k on rank r of W       rows [(k·W + r)·B, (k·W + r + 1)·B) of that stream

Nothing is drawn from a generator, so the rows do not depend on the batch size, the workers or a resume, and one number holds
the position of a run in the data. The train stream has no end: trainer.max_steps ends a run, and an epoch never ends.
"""

import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from seqmix.graphs import Graph
from seqmix.tasks import rng

IGNORE = -100  # a target that is not scored; the default ignore_index of torch's cross_entropy
# Batches in the train stream. It needs a length, because Lightning prefetches from a loader without one, and a checkpoint
# would then count the prefetched batch as seen.
ENDLESS = 1 << 40
AHEAD_BATCHES, AHEAD_BYTES = 64, 16 << 20  # most made at once: many small kernels cost the same for one batch as for all

shuffled = lru_cache(maxsize=2)(rng.permutation)  # a batch can straddle two passes

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Batch(NamedTuple):
    inputs: Tensor  # (B, L) int64
    targets: Tensor  # (B, L) int64, IGNORE where nothing is scored


def whole(name: str, value: int, least: int) -> int:
    """`value`, if it is an integer of at least `least`. ValueError otherwise, with the name and the value."""
    if isinstance(value, bool) or not isinstance(value, int):
        hint = f"; write {value:.0f}" if isinstance(value, float) and value.is_integer() else ""
        raise ValueError(f"{name}={value!r} is not an integer{hint}")
    if value < least:
        raise ValueError(f"{name}={value} < {least}, the smallest possible value")
    return value


def string(name: str, value: str) -> str:
    """`value`, if it is a string. ValueError otherwise, with the name and the value."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} is not a string; quote it, as in '{name}=\"{value}\"'")
    return value


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """`value`, if it is among `choices`. ValueError otherwise, which lists them."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
    return value


def symbol_names(n: int) -> list[str]:
    """How n symbols are printed: as letters if there are enough, else as numbers."""
    return list(LETTERS[:n]) if n <= len(LETTERS) else [str(i) for i in range(n)]


class Described:
    """What is known of every task once it is built (lm: the chances, and token_bytes of byte pairs, after `setup`)."""

    vocab_size: int  # V, ids are 0..V-1
    seq_len: int  # L, the length of an input row, even if the task's key `seq_len` counts something else
    token_bytes: Tensor | None = None  # (V,) int64: the number of bytes of text that each token encodes
    chance_token_accuracy: float  # accuracy of the best guess without the inputs
    chance_sequence_accuracy: float  # the same for a whole row
    answer_bits: float | None = None  # bits that must be remembered for one row's answer
    answers_are_inputs: bool = False  # whether a scored target is always the next input: the model can feed on its own answers
    vocabulary: dict  # describes what the ids mean; a checkpoint with another one is refused


@dataclass(eq=False, repr=False)
class Task(Described, L.LightningDataModule):
    """Base class of all tasks. A subclass is a dataclass too, and its fields are the keys of its file in conf/task. Its
    `__post_init__` checks them and sets what `Described` lists; it defines `sample`, `cells`, `definition`.

    Args:
        batch_size, eval_batch_size: rows per step on each rank, in training and in val/test.
        eval_samples: rows in val, and as many in test.
        seed: of the train rows.
        eval_seed: of the val and test rows, so that these do not change with the run's seed.
        train_samples: None for new rows at every step; n for repeated passes over rows 0..n-1, reshuffled each pass.
        num_workers: processes that make batches ahead of time; only for make_on="loader".
        make_on: "device" makes the rows on the device of the model, several batches at once; "loader" makes them on the CPU.
    """

    _: KW_ONLY
    batch_size: int = 32
    eval_batch_size: int = 256
    eval_samples: int = 2048
    seed: int = 0
    eval_seed: int = 1234
    train_samples: int | None = None
    num_workers: int = 0
    make_on: str = "device"

    def __post_init__(self) -> None:
        super().__init__()
        for name, least in dict(batch_size=1, eval_batch_size=1, eval_samples=1, seed=0, eval_seed=0, num_workers=0).items():
            whole(name, getattr(self, name), least)
        if self.train_samples is not None:
            whole("train_samples", self.train_samples, 1)
        one_of("make_on", self.make_on, ("device", "loader"))
        if self.num_workers and self.make_on == "device":
            raise ValueError(f"num_workers={self.num_workers} has no effect with make_on=device; use make_on=loader")
        self._loaders: list[Loader] = []

    def sample(self, split: str, index: Tensor) -> Batch:
        """The rows `index` of "train", "val" or "test". index: (B,) int64 on any device; the batch is made there."""
        raise NotImplementedError

    def cells(self, ids: list[int]) -> list[str]:
        """How `render` and `decode` print each id."""
        raise NotImplementedError

    def definition(self) -> dict:
        """All settings that decide what a row contains, except the seed: JSON-able. A resumed run must have the same."""
        raise NotImplementedError

    def evaluation(self) -> dict:
        """All settings that decide which rows val and test contain: JSON-able."""
        return self.definition() | {"eval_seed": self.eval_seed, "eval_samples": self.eval_samples}

    def facts(self) -> dict:
        """What a reader of the results should know about the data: JSON-able."""
        return self.definition() | {
            "vocab_size": self.vocab_size,
            "row_length": self.seq_len,
            "eval_rows": self.eval_rows("val"),
            "chance_token_accuracy": self.chance_token_accuracy,
            "chance_sequence_accuracy": self.chance_sequence_accuracy,
            "answer_bits": self.answer_bits,
        }

    def file_facts(self) -> list[tuple[str, int, int]]:
        """(name, bytes, nanoseconds since 1970 at the last change) of each data file, without reading it; [] if the rows
        are generated, or if the files cannot change. JSON-able. Works before `setup`."""
        return []

    def eval_rows(self, split: str) -> int:
        """How many rows "val" or "test" has."""
        return self.eval_samples

    def row_keys(self, split: str, index: Tensor) -> Tensor:
        """The random key of each row. (B,) to (B,) int64."""
        return rng.row_keys(self.seed if split == "train" else self.eval_seed, split, index)

    # Loaders

    def train_dataloader(self) -> "TrainLoader":
        return self._loader(TrainLoader(self, "train", *self._rank()))

    def val_dataloader(self) -> "Loader":
        return self._loader(Loader(self, "val", *self._rank()))

    def test_dataloader(self) -> "Loader":
        return self._loader(Loader(self, "test", *self._rank()))

    def _rank(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _loader(self, loader: "Loader") -> "Loader":
        self._loaders.append(loader)
        return loader

    @property
    def device(self) -> torch.device:
        """The device on which rows are made."""
        here = self.make_on == "loader" or self.trainer is None
        return torch.device("cpu") if here else self.trainer.strategy.root_device

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        if batch.inputs.device == device:
            return batch
        if device.type == "cuda":  # the host does not wait for a copy from pinned memory
            batch = Batch(*(part.pin_memory() for part in batch))
        return Batch(*(part.to(device, non_blocking=True) for part in batch))

    def teardown(self, stage: str) -> None:
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"trainer": None, "_loaders": []}  # a spawned worker gets a copy without these

    # Checkpoints

    def state_dict(self) -> dict:
        return {"vocabulary": self.vocabulary}

    def load_state_dict(self, state_dict: dict) -> None:
        """ValueError for a checkpoint whose ids have other meanings."""
        refuse_change("vocabulary", state_dict["vocabulary"], self.vocabulary)

    # Text

    def decode(self, ids: Tensor | list[int]) -> str:
        """The text of some ids, which are (n,) int64 or a list."""
        cells = self.cells(torch.as_tensor(ids).tolist())
        return ("" if all(len(cell) == 1 for cell in cells) else " ").join(cells)

    def render(self, batch: Batch, row: int = 0) -> str:
        """One row as text: inputs, targets and the loss mask, one below the other, wrapped to the width of the terminal."""
        inputs, targets = batch.inputs[row].tolist(), batch.targets[row].tolist()
        scored = [target != IGNORE for target in targets]
        lines = {
            "inputs": self.cells(inputs),
            "targets": [self.cells([y])[0] if on else "" for y, on in zip(targets, scored, strict=True)],
            "loss": ["^" if on else "" for on in scored],
        }
        widths = [max(map(len, column)) for column in zip(*lines.values(), strict=True)]
        gap = "" if max(widths, default=1) == 1 else " "
        label, room = 8, shutil.get_terminal_size().columns
        blocks, start = [], 0
        while start < len(widths):
            stop, used = start, label
            while stop < len(widths) and (stop == start or used + widths[stop] + len(gap) <= room):
                used += widths[stop] + len(gap)
                stop += 1
            part = slice(start, stop)
            blocks.append(
                "\n".join(
                    (name.ljust(label) + gap.join(map(str.ljust, line[part], widths[part]))).rstrip()
                    for name, line in lines.items()
                )
            )
            start = stop
        return "\n\n".join(blocks)


class Loader:
    """Batches of an evaluation split: rank r of W has the rows r, r + W, r + 2W, ..., without repeated or padded rows.

    Iterating yields `Batch`, on the device that makes the rows; the last one may be short. Each iteration starts over.
    """

    def __init__(self, task: Task, split: str, rank: int, world_size: int):
        self.task, self.split, self.rank, self.world_size = task, split, rank, world_size
        self._workers: DataLoader | None = None

    def __len__(self) -> int:
        return len(range(0, self._rows(), self.task.eval_batch_size))

    def _rows(self) -> int:
        rows = self.task.eval_rows(self.split)
        if rows < self.world_size:
            raise ValueError(f"{rows} rows in {self.split} cannot be shared by {self.world_size} ranks")
        return len(range(self.rank, rows, self.world_size))

    def index(self, k: int, count: int = 1) -> Tensor:
        """The row numbers of batch k and the `count - 1` batches after it, concatenated. (count · B,) int64."""
        B = self.task.eval_batch_size
        return torch.arange(k * B, min((k + count) * B, self._rows())) * self.world_size + self.rank

    def __getitem__(self, k: int) -> Batch:
        return self.task.sample(self.split, self.index(k))

    def order(self) -> Iterator[int]:
        """The numbers of the remaining batches."""
        return iter(range(len(self)))

    def __iter__(self) -> Iterator[Batch]:
        if self.task.make_on == "device":
            return self._made_ahead()
        if not self.task.num_workers:
            return map(self.__getitem__, self.order())
        if self._workers is None:
            self._workers = DataLoader(
                self,
                batch_size=None,
                sampler=_Order(self),
                num_workers=self.task.num_workers,
                persistent_workers=True,
                generator=torch.Generator(),  # else it draws from the global one, which changes the dropout masks
            )
        return iter(self._workers)

    def _made_ahead(self) -> Iterator[Batch]:
        """Makes several batches at once and yields them as views."""
        order, device = self.order(), self.task.device
        B = len(self.index(0))
        at_once = max(1, min(AHEAD_BATCHES, AHEAD_BYTES // (2 * 8 * self.task.seq_len * B)))
        while numbers := list(itertools.islice(order, at_once)):
            made = self._sample(self.index(numbers[0], len(numbers)), device)
            yield from map(Batch, *(part.split(B) for part in made))

    def _sample(self, index: Tensor, device: torch.device) -> Batch:
        if device.type == "cuda":  # else the copy would wait for all work queued on the device
            index = index.pin_memory().to(device, non_blocking=True)
        return self.task.sample(self.split, index)

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        if self._workers is not None and self._workers._iterator is not None:
            self._workers._iterator._shutdown_workers()  # as Lightning does; else they live until garbage collection
        self._workers = None

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_workers": None, "_graph": None}


class TrainLoader(Loader):
    """Batches of the train stream, which has no end. An iteration continues where the last one stopped.

    The loader's state is the number of rows that all ranks have received; prefetched rows do not count. Lightning saves it
    with the fit loop and loads it before the first batch of a resumed run.
    """

    done: int = 0  # batches yielded
    asked_at: float = 0.0  # time.perf_counter when the last batch was requested
    given_at: float = 0.0  # time.perf_counter when it was ready, or its making was queued on the device
    _graph: Graph | None = None

    def __len__(self) -> int:
        return ENDLESS

    def index(self, k: int, count: int = 1) -> Tensor:
        B, n = self.task.batch_size, self.task.train_samples
        if n is None:
            starts = (torch.arange(k, k + count) * self.world_size + self.rank) * B
            return (starts[:, None] + torch.arange(B)).flatten()
        if count > 1:
            return torch.cat([self.index(i) for i in range(k, k + count)])
        start = (k * self.world_size + self.rank) * B
        turns = range(start // n, (start + B - 1) // n + 1)  # more than one where a batch straddles two passes
        return torch.cat([shuffled(self.task.seed, n, t)[max(0, start - t * n) : start + B - t * n] for t in turns])

    def order(self) -> Iterator[int]:
        return iter(range(self.done, len(self)))

    def __iter__(self) -> Iterator[Batch]:
        batches = super().__iter__()
        while True:
            self.asked_at = time.perf_counter()
            batch = next(batches)
            self.given_at = time.perf_counter()
            self.done += 1
            yield batch

    def _sample(self, index: Tensor, device: torch.device) -> Batch:
        """On a GPU the many small kernels that make rows are replayed as one CUDA graph from the second call on."""
        if self._graph is not None:
            return self._graph(index.pin_memory())
        made = super()._sample(index, device)
        # cuda_graph=off also applies here
        if device.type == "cuda" and getattr(self.task.trainer.lightning_module, "cuda_graph", None) == "auto":
            self._graph = Graph(partial(self.task.sample, self.split), index.to(device))
        return made

    def close(self) -> None:
        super().close()
        self._graph = None

    def _stream(self) -> dict:
        return self.task.definition() | {"seed": self.task.seed, "train_samples": self.task.train_samples}

    def state_dict(self) -> dict:
        return {"rows": self.done * self.world_size * self.task.batch_size, "stream": self._stream()}

    def load_state_dict(self, state_dict: dict) -> None:
        """ValueError for a checkpoint of a run on other rows, or if the batch does not divide the rows already seen."""
        refuse_change("data", state_dict["stream"], self._stream())
        step = self.world_size * self.task.batch_size
        if state_dict["rows"] % step:
            raise ValueError(
                f"the checkpoint has seen {state_dict['rows']} rows, no multiple of batch_size={self.task.batch_size}"
                f" times {self.world_size} ranks"
            )
        self.done = state_dict["rows"] // step


class _Order:
    """The sampler of the workers. Each iteration starts at the position of its loader."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def __iter__(self) -> Iterator[int]:
        return self.loader.order()


def refuse_change(what: str, then: dict, now: dict) -> None:
    """ValueError, which names each difference, if a checkpoint (`then`) and this run (`now`) differ."""
    changed = [
        f"{key}={then.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    ]
    if changed:
        raise ValueError(f"the checkpoint was made with another {what}: {'; '.join(changed)}")
