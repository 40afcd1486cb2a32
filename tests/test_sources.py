"""What files hold is told by their content; what is damaged, or is no text, is refused with its name and its line."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import socket
import sys
import tarfile
import types
import zipfile

import numpy as np
import pytest
import torch

from seqmix.tasks.lm import LanguageModeling
from seqmix.tasks.selective_copy import SelectiveCopy

TEXT = "".join(f"To be, or not to be, that is question {i}\n" for i in range(200)).encode()
LINES = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(300))
JOINED = "\n\n".join(f"line {i}" for i in range(300)).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def read(name, content=None, **settings):
    """A task that has read a file of this name and content."""
    if content is not None:
        with open(name, "wb") as file:
            file.write(content)
    settings = {"seq_len": 16} | settings
    if name.lower().endswith((".npy", ".bin")):
        settings = {"tokenizer": "ids", "split": (0.5, 0.25, 0.25)} | settings
    task = LanguageModeling(name, **settings)
    task.prepare_data()
    return task


def text_of(task):
    return bytes(b for split in ("train", "val", "test") for chunk in task._chunks(split) for b in chunk.tolist())


def refused(name, content=None, **settings):
    with pytest.raises(ValueError) as error:
        read(name, content, **settings)
    message = str(error.value)
    assert "\n" not in message
    return message


def in_zip(name, content):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, content)
    return out.getvalue()


def in_tar(name, content, mode="w"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def saved(save, *what):
    out = io.BytesIO()
    save(out, *what)
    return out.getvalue()


def saved_by_torch():
    out = io.BytesIO()
    torch.save({"ids": torch.arange(1000)}, out)
    return out.getvalue()


# Formats


@pytest.mark.parametrize("name", ["a.txt.gz", "a.GZ", "a.txt", "a.log", "a.xz"])
@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_compressed_text_is_unpacked_by_what_it_is_not_by_its_name(name, pack):
    assert text_of(read(name, pack(TEXT))) == TEXT


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json", "c4-train.00000-of-01024.JSON"])
def test_json_lines_are_told_by_any_of_their_suffixes_also_behind_a_compression(name):
    for end, pack in {"": bytes, ".gz": gzip.compress, ".XZ": lzma.compress, ".bz2": bz2.compress}.items():
        assert text_of(read(name + end, pack(LINES.encode()))) == JOINED


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.zip", in_zip("a.txt", TEXT), "zip"),
        ("a.npz", saved(np.savez, np.arange(1000)), "zip"),
        ("a.txt", in_zip("a.txt", TEXT), "zip"),
        ("model.pt", saved_by_torch(), "zip"),
        ("a.tar", in_tar("a.txt", TEXT), "tar"),
        ("a.tgz", in_tar("a.txt", TEXT, "w:gz"), "tar data, inside gzip,"),
        ("a.txt.gz", gzip.compress(gzip.compress(TEXT)), "gzip data, inside gzip,"),
        ("a.dat", saved(np.save, np.arange(1000)), "NumPy"),
        ("a.dat.gz", gzip.compress(saved(np.save, np.arange(1000))), "NumPy data, inside gzip,"),
        ("a.zst", b"\x28\xb5\x2f\xfd" + TEXT, "zstd"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c" + TEXT, "7z"),
        ("a.parquet", b"PAR1\x15\x04" + TEXT + b"PAR1", "Parquet"),
        ("paper.pdf", b"%PDF-1.7\n" + TEXT, "PDF"),
        ("a.lzma", lzma.compress(TEXT, lzma.FORMAT_ALONE), "LZMA"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n", "Git LFS"),
    ],
)
def test_archives_and_binary_formats_are_refused_by_name(name, content, words):
    message = refused(name, content)
    assert name in message and words in message, message


@pytest.mark.parametrize("name", ["a.gz", "a.txt.XZ", "a.bz2", "a.zip", "a.zst", "a.npz", "a.br", "a.parquet", "a.Z"])
@pytest.mark.parametrize("content", [TEXT, b""])
def test_a_name_that_promises_what_the_content_is_not_is_refused(name, content):
    message = refused(name, content)
    assert name in message and ("To be" in message if content else "is empty" in message)


def test_text_that_only_resembles_a_format_is_text():
    for start in (b"BZh is not bzip2. ", b"PK, the initials. ", b"PAR1 and PAR2. ", b"Rar! they said. ", b"7z is a name. "):
        assert text_of(read("a.txt", start + TEXT)) == start + TEXT


def test_token_files_are_told_by_any_case_and_never_read_compressed():
    ids = np.arange(2000) % 200
    assert len(text_of(read("A.NPY", saved(np.save, ids)))) == len(text_of(read("a.BIN", ids.astype("<u2").tobytes()))) == 2000
    for name in ("a.npy.gz", "a.bin.XZ"):
        message = refused(name, gzip.compress(b"ids"), tokenizer="ids")
        assert f"{name} is a compressed token file, but ids are read in place: unpack it" in message
    for content, words in ((gzip.compress(TEXT), "gzip"), (saved(np.save, ids), "NumPy"), (in_zip("a", TEXT), "zip")):
        assert f"b.bin holds {words}" in refused("b.bin", content, vocab_size=65536)
    assert "reads .bin and .npy files, not 'a.npz'" in refused("a.npz", saved(np.savez, ids), tokenizer="ids")


# Damage


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_damaged_compressed_files_are_named(pack):
    whole = pack(os.urandom(3000).hex().encode())
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (whole[:-5], whole[:100], whole[:12], bytes(flipped)):
        assert "web.txt.gz is damaged" in refused("web.txt.gz", content)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": 3}', ["text_field='text' holds '3' of type int"]),
        ('{"text": null}', ["holds 'None' of type NoneType"]),
        ('{"text": ["a", "b"]}', ["of type list"]),
        ('{"body": "x", "id": 1}', ["no text_field='text'", "body, id"]),
        ("[1, 2]", ["not an object", "[1, 2]"]),
        ('"text"', ["not an object"]),
        ("null", ["not an object"]),
        ('{"text": ', ["not JSON", "Expecting value at character 9", '{"text": ']),
        ("To be, or not to be", ["not JSON", "To be", ".txt"]),
        ('{"text": "\\ud800"}', ["a surrogate without its other half"]),
        ("[" * 100_000, ["not JSON"]),
        ('{"text": ' + "1" * 5000 + "}", ["not JSON"]),
    ],
)
def test_a_bad_line_of_json_is_named_by_file_and_line(line, words):
    message = refused("web.jsonl", (LINES + line + "\n" + LINES).encode())
    assert message.startswith("web.jsonl line 301") and len(message) < 400, message
    assert all(word in message for word in words), message


def test_a_bad_row_of_the_hub_is_named_and_so_is_a_failed_fetch(monkeypatch):
    def load_dataset(name, configuration, split, streaming):
        if name == "some/one":
            return ({"text": text} for text in ["a", "b", None])
        raise ConnectionResetError("the network\nis away")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert "hf:some/one train row 2: text_field='text' holds 'None'" in refused("hf:some/one")
    with pytest.raises(OSError, match="hf:some/other cannot be fetched: the network is away"):
        read("hf:some/other")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (TEXT, "begins with b'To be, or not to'"),
        (saved(np.save, np.arange(2000))[:-100], "not a whole NumPy array"),
        (saved(np.save, np.arange(2000))[:70], "not a whole NumPy array"),
        (saved(np.save, np.array([1, "a"], dtype=object)), "not a whole NumPy array"),
        (saved(np.savez, np.arange(2000)), "holds zip data"),
        (saved(np.save, np.zeros((10, 10), int)), "holds int64 of shape (10, 10)"),
        (saved(np.save, np.zeros(1000)), "holds float64"),
        (saved(np.save, np.ones(1000, bool)), "holds bool"),
    ],
)
def test_a_damaged_or_wrong_npy_is_named(content, words):
    message = refused("ids.npy", content)
    assert message.startswith("ids.npy ") and words in message, message


def test_an_id_outside_the_vocabulary_is_placed_in_its_file():
    for name, worst in (("1.npy", 5), ("2.npy", 300), ("3.npy", 5)):
        np.save(name, np.array([0, 1, worst, 2] * 100))
    assert "id 300 at token 2 of 2.npy is not in 0..vocab_size=256" in refused("*.npy", vocab_size=256, tokenizer="ids")


def test_the_encoding_is_that_of_the_file_and_not_of_the_text_taken_from_its_lines():
    lines = "".join(json.dumps({"text": f"né à Ελσινώρη {i}"}, ensure_ascii=False) + "\n" for i in range(300))
    for encoding in ("utf-8", "utf-16", "cp1253"):
        readable = lines if encoding != "cp1253" else lines.replace("é", "Ω").replace("à", "ώ")
        settings = {"tokenizer": "bpe", "vocab_size": 300, "encoding": encoding}
        task = read("a.jsonl", readable.encode(encoding), **settings)
        first = json.loads(readable.split("\n")[0])["text"]
        assert task.decode(torch.cat(list(task._chunks("train")))).startswith(first + "\n\n")


def test_a_damaged_file_of_the_cache_is_named(tmp_path):
    settings = {"tokenizer": "bpe", "vocab_size": 300}
    read("a.txt", TEXT, **settings)
    for pattern in ("ids-*.npy", "bpe-*.json"):
        for kept in (tmp_path / "cache").glob(pattern):
            kept.write_bytes(kept.read_bytes()[:-40])
        message = refused("a.txt", **settings)
        assert pattern[:4] in message and str(tmp_path / "cache") in message, message


# Paths


def test_what_is_no_file_is_refused_also_among_others():
    os.symlink("nowhere", "broken.txt")
    os.symlink("loop.txt", "loop.txt")
    os.mkfifo("pipe.txt")
    with open("good.txt", "wb") as file:
        file.write(TEXT)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.txt")
    for name, words in {
        "broken.txt": "a symbolic link to 'nowhere', which cannot be reached",
        "loop.txt": "a symbolic link to 'loop.txt'",
        "pipe.txt": "a pipe or a device",
        "socket.txt": "a pipe or a device",
    }.items():
        assert f"{name} is {words}" in refused(name)
        assert f"{name} is {words}" in refused(f"[{name[0]}g]*.txt"), "a glob would leave it out without a word"


def test_a_path_that_may_not_be_searched_says_so(monkeypatch):
    def no(path, *_, **__):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "stat", no)  # root may do anything
    assert "source='locked/a.txt': Permission denied" in refused("locked/a.txt")


# What nothing can be learned from


@pytest.mark.parametrize("settings", [{}, {"tokenizer": "bpe", "vocab_size": 257}])
def test_text_of_one_symbol_is_refused(settings):
    message = refused("spaces.txt", b" " * 5000, **settings)
    assert "source='spaces.txt'" in message and "nothing can be learned" in message
    message = refused("ids.npy", saved(np.save, np.array([7] * 600 + [1, 2] * 300)), seq_len=8)
    assert "token 7 '7'" in message, "the train region counts, as that is what is learned from"
    read("two.txt", b" " * 4000 + b"\n" + b" " * 999)


def test_pairs_are_learnt_from_text_without_spaces_in_seconds():
    """The time grows with the square of the longest word: an hour for a word of a million letters, if it is not cut."""
    words = "".join(np.random.default_rng(0).choice(list("acgt"), 100_000))
    task = read("genome.txt", words.encode(), tokenizer="bpe", vocab_size=300, split=(0.8, 0.1, 0.1))
    assert task.decode(torch.cat(list(task._chunks("val")))) == words[80_000:90_000]
    assert len(task._tokens["train"]) < 40_000, "pairs were learnt"


# Token files in their place


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_token_file_is_in_memory_of_no_process():
    """As a mapped one would be, page by page, in the run's and in each worker's."""

    def resident():
        with open("/proc/self/status") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("RssFile", "RssAnon"))) / 1024

    (np.arange(32 << 20, dtype=np.uint32) % 251).astype("<u2").tofile("a.bin")  # 64 MiB
    read("a.bin").sample("train", torch.arange(8))  # what is loaded once
    before = resident()
    task = read("a.bin")
    for step in range(50):
        task.sample("train", torch.arange(256) + 256 * step)
    assert resident() - before < 24


def test_loader_workers_read_the_rows_of_the_main_process():
    ids = np.random.default_rng(0).integers(0, 60000, 5000)
    settings = {"vocab_size": 60000, "make_on": "loader", "batch_size": 4}
    for name, content in (("a.bin", ids.astype("<u2").tobytes()), ("b.npy", saved(np.save, ids.astype(">u4")))):
        here, there = read(name, content, **settings), read(name, num_workers=2, **settings)
        for _, one, other in zip(range(5), here.train_dataloader(), there.train_dataloader(), strict=False):
            assert one.inputs.equal(other.inputs) and one.targets.equal(other.targets)
        there.teardown("fit")


# Files that change


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_a_token_file_that_is_removed_or_replaced_is_read_to_the_end(name):
    ids = np.arange(600) % 250
    task = read(name, saved(np.save, ids) if name == "a.npy" else ids.astype("<u2").tobytes())
    before = task.sample("train", torch.arange(8))
    os.rename(name, "old")
    np.zeros(600).tofile(name)
    os.unlink("old")
    assert task.sample("train", torch.arange(8)).inputs.equal(before.inputs)


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_a_token_file_that_is_written_to_ends_the_run_with_its_name(name):
    ids = np.arange(600) % 250
    content = saved(np.save, ids) if name == "a.npy" else ids.astype("<u2").tobytes()
    task = read(name, content)
    sent = pickle.dumps(task)
    with open(name, "r+b") as file:
        file.truncate(300)
    for there in (lambda: task, lambda: pickle.loads(sent)):
        with pytest.raises(ValueError, match=f"{name} has changed since this run began to read it"):
            there().sample("train", torch.arange(8))


def test_files_are_told_by_name_size_and_time_without_being_read(monkeypatch):
    for name in ("1.txt", "2.txt"):
        with open(name, "wb") as file:
            file.write(TEXT)
    task = LanguageModeling("*.txt")
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", None)
        before = task.file_facts()
    assert [(name, size) for name, size, _ in before] == [("1.txt", len(TEXT)), ("2.txt", len(TEXT))]
    assert json.loads(json.dumps(before)) == [list(facts) for facts in before]
    assert LanguageModeling("*.txt", seq_len=9, seed=3).file_facts() == before
    os.utime("2.txt", ns=(0, 10**9))
    assert LanguageModeling("*.txt").file_facts() == [before[0], ("2.txt", len(TEXT), 10**9)]
    with open("3.txt", "wb") as file:
        file.write(TEXT)
    assert len(LanguageModeling("*.txt").file_facts()) == 3

    assert LanguageModeling("shakespeare").file_facts() == SelectiveCopy().file_facts() == []
    some = LanguageModeling("python", max_bytes=100_000).file_facts()
    assert some[0][0].endswith("__future__.py") and sum(size for _, size, _ in some[:-1]) < 100_000
    assert LanguageModeling("python", max_bytes=200_000).file_facts()[: len(some)] == some
