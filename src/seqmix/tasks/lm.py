"""Language modelling: predict the next token of a text that is cut into train, val and test before any other processing."""

import hashlib
import io
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from seqmix.tasks import corpus, rng
from seqmix.tasks.base import IGNORE, Batch, Task, one_of, string, whole
from seqmix.tasks.token_file import TokenFile

ON_DEVICE = 1 << 30  # up to so many bytes of token ids are copied to the accelerator; more stay in main memory or their file
CHUNK = 1 << 20  # characters encoded at a time
CHECKED = 1 << 16  # tokens checked and counted at a time: few enough to not raise the run's peak memory
KINDS = {"uint8": 0xFF, "int16": 0xFFFF, "int32": 0xFFFFFFFF, "int64": -1}  # dtypes of stored ids, and the mask when widened


class LanguageModeling(Task):
    """Text in windows of seq_len tokens; each target is the next token, and every target is scored.

    A window of "To be, or not to be" with seq_len=9:

        inputs  To·be,·or
        targets o·be,·or·
        loss    ^^^^^^^^^

    The text is cut by position into three regions of lengths `split`, and no window crosses a cut. A train row starts
    anywhere in the train region, at a hash of its number. The val and test rows are windows that do not overlap: one
    row's last target is the next row's first input, so that every token but the first is a target once. The last window
    is padded with targets that are not scored. If there are more windows than eval_samples, that many are used, evenly
    spaced.

    tokenizer="byte": ids are bytes in any encoding, vocab_size=256. tokenizer="bpe": byte-level byte pairs, trained on
    the train region only, to vocab_size ids. Both can encode any text, so there is no unknown token.
    tokenizer="ids": the source is .bin (little-endian, of `dtype`) or .npy files, which hold ids below vocab_size.
    UTF-8 byte-order marks are dropped; line ends stay as they are. Files are joined by a newline.

    Args (the others are those of `Task`, without eval_seed; train_samples counts windows):
        source: what to read, see `seqmix.tasks.corpus`. wikitext-103 has its own val and test, so `split` is not used.
        tokenizer: "byte", "bpe" or "ids".
        vocab_size: number of ids.
        seq_len: L, tokens in a row.
        split: the shares of train, val and test.
        max_bytes: read no more of the source than this; None for all of it.
        text_field: the entry of a JSON line, or of a row of a hub data set, that holds the text.
        encoding: of files that are decoded as text: with tokenizer="bpe", and JSON lines.
        dtype: of .bin files.

    Raises:
        ValueError: in the constructor, with name and value, for invalid settings; in `setup`, for data that do not fit the
            settings (too short, of one symbol, ids out of range, bytes that are not text) or are damaged.
        OSError, ImportError: in `setup`, for data that cannot be read or fetched.
    """

    def __init__(
        self,
        source: str = "shakespeare",
        tokenizer: str = "byte",
        vocab_size: int = 256,
        seq_len: int = 256,
        *,
        split: Iterable[float] = (0.9, 0.05, 0.05),
        max_bytes: int | None = None,
        text_field: str = "text",
        encoding: str = "utf-8",
        dtype: str = "uint16",
        batch_size: int = 32,
        eval_batch_size: int = 64,
        eval_samples: int = 1024,
        seed: int = 0,
        train_samples: int | None = None,
        num_workers: int = 0,
        make_on: str = "device",
    ):
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            eval_samples=eval_samples,
            seed=seed,
            eval_seed=0,  # has no effect: the windows of val and test have fixed positions
            train_samples=train_samples,
            num_workers=num_workers,
            make_on=make_on,
        )
        self.source = string("source", source)
        self.tokenizer = one_of("tokenizer", tokenizer, ("byte", "bpe", "ids"))
        self.vocab_size = whole("vocab_size", vocab_size, 2)
        self.seq_len = whole("seq_len", seq_len, 1)
        self.max_bytes = None if max_bytes is None else whole("max_bytes", max_bytes, 1)
        self.text_field, self.encoding = string("text_field", text_field), string("encoding", encoding)
        self.dtype = one_of("dtype", dtype, ("uint8", "uint16", "int16", "int32", "uint32", "int64"))
        try:
            self.split = [float(share) for share in split]
            good = len(self.split) == 3 and min(self.split) > 0 and math.isclose(sum(self.split), 1, abs_tol=1e-6)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ValueError(f"split={split!r} is not three positive shares that sum to 1")
        if tokenizer == "byte" and vocab_size != 256:
            raise ValueError(f"vocab_size={vocab_size}, but there are 256 bytes; use tokenizer=bpe for a larger vocabulary")
        if tokenizer == "bpe" and vocab_size <= 256:
            raise ValueError(f"vocab_size={vocab_size} <= 256, the number of bytes that tokenizer=bpe starts with")
        try:
            "".encode(encoding)
        except LookupError as error:
            raise ValueError(f"encoding={encoding!r} is not a text encoding that Python knows") from error
        self.vocabulary = {"size": vocab_size, "tokenizer": tokenizer}
        if tokenizer == "byte":
            self.token_bytes = torch.ones(256, dtype=torch.int64)
        self._files = self._check_source()
        self._tokens: dict[str, Tensor | TokenFile] = {}
        self._moved: dict[str, dict[str, Tensor]] = {}
        self._facts: dict = {}
        self._bpe = None

    def _check_source(self) -> list[str]:
        """Check the source without reading it; returns the files that it names."""
        name = self.source.removeprefix("hf:")
        if self.source in ("shakespeare", "python") or name != self.source:
            if self.tokenizer == "ids":
                raise ValueError(f"source={self.source!r} is text; tokenizer=ids reads .bin and .npy files")
            if name != self.source and name not in (*corpus.HUB, *corpus.ZIPS) and "/" not in name:
                raise ValueError(
                    f"source={self.source!r} is not hf:OWNER/NAME or one of {', '.join((*corpus.HUB, *corpus.ZIPS))}"
                )
            if name == "fineweb-edu" and self.max_bytes is None:
                raise ValueError(f"source={self.source!r} is some 50 GB; set how much to read, as in max_bytes=1000000000")
            return []
        files = corpus.find(self.source)
        if corpus.holds_ids(files) and self.tokenizer != "ids":
            raise ValueError(f"source={self.source!r} holds token ids, not text; write tokenizer=ids")
        if not corpus.holds_ids(files) and self.tokenizer == "ids":
            raise ValueError(
                f"source={self.source!r}: tokenizer=ids reads .bin and .npy files, not {files[0]!r}; "
                "for text write tokenizer=byte or bpe"
            )
        return files

    # Reading

    def prepare_data(self) -> None:
        """Fetch and tokenise in one process per machine, so that the others find the results in the cache."""
        self._read()

    def setup(self, stage: str) -> None:
        self._read()

    def _read(self) -> None:
        if self._tokens:
            return
        self._tokens, facts = self._read_ids() if self.tokenizer == "ids" else self._read_text()
        total = sum(len(tokens) for tokens in self._tokens.values())
        if total <= self.seq_len:
            raise ValueError(f"source={self.source!r} has {total} tokens < {self.seq_len + 1} (seq_len + 1)")
        for split, tokens in self._tokens.items():
            least = self.seq_len + 1 if split == "train" else 2
            if len(tokens) < least:
                raise ValueError(
                    f"the {split} region has {len(tokens)} tokens < {least}"
                    + (f" (seq_len={self.seq_len}, plus 1)" if split == "train" else ", an input and a target")
                    + f"; source={self.source!r} has {total} in all, split={self.split}"
                )
        counts = sum(torch.bincount(chunk, minlength=self.vocab_size) for chunk in self._chunks("train"))
        if counts.count_nonzero() == 1:
            one = int(counts.argmax())
            raise ValueError(
                f"the train region of source={self.source!r} consists of token {one} {self.decode([one])!r} only: "
                "nothing can be learned from it"
            )
        self.chance_token_accuracy = counts.max().item() / counts.sum().item()
        self.chance_sequence_accuracy = self.chance_token_accuracy**self.seq_len
        self._facts = facts | {"tokens": {split: len(tokens) for split, tokens in self._tokens.items()}}
        if sum(tokens.nbytes for tokens in self._tokens.values()) > ON_DEVICE:
            self.make_on = "loader"  # rows are gathered in main memory, by workers if there are any

    def _read_text(self) -> tuple[dict[str, Tensor], dict]:
        texts = corpus.read(self.source, self.max_bytes, self.text_field, self.encoding)
        regions = {split: b"\n".join(text.data for text in texts[split]) for split in texts}
        facts = {
            "sha256": hashlib.sha256(b"".join(regions.values())).hexdigest(),
            "bytes": sum(map(len, regions.values())),
            "files": sum(map(len, texts.values())),
        }
        if self.tokenizer == "byte":
            if "all" in regions:
                regions = self._cut(regions["all"])
            return {
                split: torch.from_numpy(np.frombuffer(bytearray(regions[split]), np.uint8)) for split in rng.SPLITS
            }, facts

        words = {}
        for split, files in texts.items():
            *whole_files, last = files
            decoded = [corpus.decode(text) for text in whole_files]
            words[split] = "\n".join([*decoded, corpus.decode(last, cut=self.max_bytes is not None)])
        if "all" in words:
            words = self._cut(words["all"])
        self._bpe = trained(words["train"], self.vocab_size)
        digest = hashlib.sha256(self._bpe.to_str().encode()).hexdigest()
        self.token_bytes = torch.tensor(
            [len(self._bpe.id_to_token(i)) for i in range(self.vocab_size)]
        )  # one character per byte
        self.vocabulary |= {"sha256": digest}
        return {split: self._encoded(words[split], digest) for split in rng.SPLITS}, facts

    def _cut(self, whole_text: bytes | str | np.ndarray | TokenFile) -> dict:
        n = len(whole_text)
        first, second = round(n * self.split[0]), round(n * (self.split[0] + self.split[1]))
        return {"train": whole_text[:first], "val": whole_text[first:second], "test": whole_text[second:]}

    def _encoded(self, text: str, digest: str) -> TokenFile:
        """The ids of a text, from the cache if they are in it."""
        mark = hashlib.sha256(text.encode() + digest.encode()).hexdigest()[:32]
        kept = corpus.cache_folder() / f"ids-{mark}.npy"
        if not kept.exists():
            ids = [encoding.ids for encoding in self._bpe.encode_batch(list(pieces(text)))]
            out = io.BytesIO()
            np.save(out, pack(np.concatenate([np.array(part, np.int64) for part in ids or [[]]]), self.vocab_size))
            corpus.write_whole(kept, out.getvalue())
        return TokenFile.of(str(kept), self.dtype)

    def _read_ids(self) -> tuple[dict[str, Tensor | TokenFile], dict]:
        """A single token file is read in place; several are read and joined in memory."""
        files = [TokenFile.of(file, self.dtype) for file in self._files]
        ids = files[0] if len(files) == 1 else np.concatenate([np.asarray(file) for file in files])
        if self.max_bytes is not None:
            ids = ids[: self.max_bytes // ids.itemsize]
        digest = hashlib.sha256()
        for start in range(0, len(ids), CHECKED):
            chunk = np.asarray(ids[start : start + CHECKED])
            digest.update(chunk.tobytes())
            low, high = int(chunk.min()), int(chunk.max())
            if low < 0 or high >= self.vocab_size:
                worst = low if low < 0 else high
                name, place = self._place(files, start + int((chunk == worst).argmax()))
                raise ValueError(f"id {worst} at token {place} of {name} is not in 0..vocab_size={self.vocab_size}")
        facts = {"sha256": digest.hexdigest(), "bytes": ids.nbytes, "files": len(files)}
        parts = self._cut(ids)
        return parts if len(files) == 1 else {split: as_tensor(part) for split, part in parts.items()}, facts

    def _place(self, files: list[TokenFile], token: int) -> tuple[str, int]:
        """The file that contains a token, which is numbered over all files, and the token's number in that file."""
        for file in files:
            if token < len(file):
                break
            token -= len(file)
        return file.file.path, token

    def _chunks(self, split: str) -> Iterator[Tensor]:
        tokens = self._tokens[split]
        return (self._widen(as_tensor(tokens[i : i + CHECKED])) for i in range(0, len(tokens), CHECKED))

    # Rows

    def eval_rows(self, split: str) -> int:
        return min(self.eval_samples, self._windows(split))

    def _windows(self, split: str) -> int:
        return -(-(len(self._tokens[split]) - 1) // self.seq_len)

    def sample(self, split: str, index: Tensor) -> Batch:
        tokens = self._on(index.device)[split]
        if tokens.device != index.device:
            return Batch(*(part.to(index.device) for part in self.sample(split, index.cpu())))
        n, L = len(tokens), self.seq_len
        if split == "train":
            start = rng.integers(self.row_keys(split, index), 1, n - L, stream=0)  # (B, 1)
        else:
            start = (index * self._windows(split) // self.eval_rows(split) * L)[:, None]  # (B, 1)
        place = start + torch.arange(L + 1, device=index.device)  # (B, L + 1)
        if isinstance(tokens, TokenFile):
            window = torch.from_numpy(tokens.windows(start[:, 0].tolist(), L + 1))  # (B, L + 1)
        else:
            window = self._widen(tokens[place.clamp(max=n - 1)])  # (B, L + 1)
        return Batch(window[:, :-1], window[:, 1:].masked_fill(place[:, 1:] >= n, IGNORE))

    def _widen(self, ids: Tensor) -> Tensor:
        return ids.long() & KINDS[str(ids.dtype).removeprefix("torch.")]

    def _on(self, device: torch.device) -> dict[str, Tensor | TokenFile]:
        """The tokens on a device, copied there once. If there are too many, those in main memory or in their file."""
        if device.type == "cpu" or sum(tokens.nbytes for tokens in self._tokens.values()) > ON_DEVICE:
            return self._tokens
        if str(device) not in self._moved:
            self._moved[str(device)] = {split: as_tensor(tokens).to(device) for split, tokens in self._tokens.items()}
        return self._moved[str(device)]

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self._moved.clear()

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_moved": {}}

    # Facts and text

    def definition(self) -> dict:
        return {
            "task": "lm",
            "sha256": self._facts["sha256"],
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
            "split": self.split,
        }

    def file_facts(self) -> list[tuple[str, int, int]]:
        return corpus.file_facts(self.source, self.max_bytes)

    def facts(self) -> dict:
        windows = {split: self._windows(split) for split in ("val", "test")}
        return (
            {"source": self.source} | super().facts() | self._facts | {"eval_windows": windows, "made_on": self.make_on}
        )

    def encode(self, text: str) -> Tensor:
        """The ids of some text, (n,) int64; not for tokenizer="ids"."""
        if self.tokenizer == "ids":
            raise ValueError("tokenizer=ids has no text to encode")
        return torch.tensor(self._bpe.encode(text).ids if self._bpe else list(text.encode()), dtype=torch.int64)

    def decode(self, ids: Tensor | list[int]) -> str:
        ids = torch.as_tensor(ids).tolist()
        if self.tokenizer == "ids":
            return " ".join(map(str, ids))
        return self._bpe.decode(ids) if self._bpe else bytes(ids).decode(errors="replace")

    def cells(self, ids: list[int]) -> list[str]:
        shown = {" ": "·", "\n": "↵", "\t": "→", "\r": "←"}
        texts = (self.decode([i]) for i in ids)
        return ["".join(shown.get(c, c if c.isprintable() else "�") for c in text) for text in texts]


def pack(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """ids in the smallest dtype that holds 0..vocab_size-1. ValueError for other ids."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"ids from {ids.min()} to {ids.max()} are not in 0..vocab_size={vocab_size}")
    return ids.astype(next(kind for kind in (np.uint8, np.uint16, np.int32) if vocab_size - 1 <= np.iinfo(kind).max))


def as_tensor(ids: np.ndarray | Tensor | TokenFile) -> Tensor:
    """The ids in a dtype that torch can index, without a copy if they are in memory. `_widen` masks unsigned ids."""
    ids = np.asarray(ids)
    ids = ids if ids.dtype.isnative else ids.astype(ids.dtype.newbyteorder("="))
    kind = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[ids.itemsize]
    return torch.from_numpy(ids.view(kind))


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of about CHUNK characters, each ending at a line end if there is one."""
    start = 0
    while start < len(text):
        stop = text.rfind("\n", start, start + CHUNK) + 1 if start + CHUNK < len(text) else len(text)
        stop = stop if stop > start else start + CHUNK
        yield text[start:stop]
        start = stop


def trained(text: str, vocab_size: int):
    """A byte-level BPE tokenizer trained on this text, and kept in the cache. ValueError if the text has too few pairs."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("tokenizer=bpe needs the extra data: pip install 'seqmix[data]'") from error
    mark = hashlib.sha256(text.encode()).hexdigest()[:32]
    kept = corpus.cache_folder() / f"bpe-{mark}-{vocab_size}.json"
    if kept.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(kept))
        except Exception as error:  # tokenizers raises no other class
            raise ValueError(f"{kept} is damaged: {error}; remove the file, and it will be made again") from error
    learnt = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Training time grows with the square of the longest word, and text without spaces can be one word. So words that are
    # longer than those of any natural language are split for training.
    parts = tokenizers.pre_tokenizers.Split(tokenizers.Regex(".{256}"), "isolated")
    learnt.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, parts])
    learnt.train_from_iterator(pieces(text), trainer)
    learnt.pre_tokenizer = words
    if learnt.get_vocab_size() < vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}, but the train region of {len(text)} characters has pairs for"
            f" {learnt.get_vocab_size()} only"
        )
    corpus.write_whole(kept, learnt.to_str().encode())
    return learnt
