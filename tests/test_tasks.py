"""Tasks: rows are pure functions of (seed, split, index); every target is reproduced by a plain-Python oracle."""

import copy
import inspect
import itertools
import json
import pickle
import textwrap
import types
from pathlib import Path

import hydra
import lightning as L
import pytest
import torch
from omegaconf import ListConfig, OmegaConf

from seqmix.tasks import rng
from seqmix.tasks.base import AHEAD_BATCHES, ENDLESS, IGNORE, Batch, Loader, TrainLoader
from seqmix.tasks.copy import Copy
from seqmix.tasks.selective_copy import SelectiveCopy

CONF = Path(__file__).parents[1] / "conf" / "task"

# Lightning 2.6.6 asks torch's pytree for its leaves in a way that torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


def rows(task, split="train", n=64):
    batch = task.sample(split, torch.arange(n))
    return list(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))


# The generator of random numbers


def splitmix_finaliser(x):
    """m of rng.py in Python's own integers."""
    x = (x * rng.GAMMA + rng.GAMMA) % rng.WORD
    x = ((x ^ (x >> 30)) * rng.FIRST) % rng.WORD
    x = ((x ^ (x >> 27)) * rng.SECOND) % rng.WORD
    return x ^ (x >> 31)


def test_hash_equals_its_definition_in_python_integers():
    # The first outputs of splitmix64 from state 0, as its authors' reference code prints them.
    assert [splitmix_finaliser(0), splitmix_finaliser(1)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    index = torch.tensor([0, 1, 12345678901234, 2**62 - 1])
    for seed, split in [(0, "train"), (7, "val"), (2**63, "test")]:
        got = rng.bits(rng.row_keys(seed, split, index), 3, stream=5).tolist()
        for i, line in zip(index.tolist(), got, strict=True):
            key = splitmix_finaliser((rng.SPLITS.index(split) << 62) + i) + splitmix_finaliser(seed)
            key = splitmix_finaliser(key % rng.WORD)
            words = [splitmix_finaliser((key + splitmix_finaliser((5 << 32) + c)) % rng.WORD) for c in range(3)]
            assert line == [word >> 1 for word in words]


def test_random_bits_are_balanced_and_unrelated():
    words = rng.bits(rng.row_keys(3, "train", torch.arange(4096)), 16, stream=1)  # (4096, 16)
    bit = torch.stack([(words >> i) & 1 for i in range(63)]).double() * 2 - 1  # (63, 4096, 16), of mean 0
    n = words.numel()
    # Each number below is a mean of n coin tosses; 6 deviations happen once in 5e8, and under 1e4 are looked at.
    bound = 6 / n**0.5
    assert bit.mean((1, 2)).abs().max() < bound
    flat = bit.reshape(63, -1)
    assert ((flat @ flat.T) / n - torch.eye(63)).abs().max() < bound  # bit against bit
    assert (bit[:, 1:] * bit[:, :-1]).mean((1, 2)).abs().max() < bound * 1.01  # row against the next
    assert (bit[:, :, 1:] * bit[:, :, :-1]).mean((1, 2)).abs().max() < bound * 1.04  # column against the next
    other = rng.bits(rng.row_keys(4, "train", torch.arange(4096)), 16, stream=1)
    assert (bit[0] * (((other & 1) * 2) - 1)).mean().abs() < bound  # seed against the next


def test_integers_and_subsets_are_uniform():
    keys = rng.row_keys(0, "train", torch.arange(20000))
    counts = rng.integers(keys, 5, 7, stream=0).flatten().bincount(minlength=7).double()
    expected = 100000 / 7
    assert ((counts - expected) ** 2 / expected).sum() < 38  # chi squared of 6 degrees passes 38 once in 1e6
    chosen = rng.subset(keys, 2, 5, stream=1)
    assert (chosen[:, 0] < chosen[:, 1]).all()
    counts = (chosen[:, 0] * 5 + chosen[:, 1]).bincount(minlength=25).double()
    counts = counts[counts > 0]
    assert len(counts) == 10
    assert ((counts - 2000) ** 2 / 2000).sum() < 46  # 9 degrees
    assert rng.subset(keys[:3], 4, 4, stream=1).tolist() == [[0, 1, 2, 3]] * 3
    assert rng.subset(keys[:2], 1, 1, stream=1).tolist() == [[0], [0]]


def test_permutation_holds_each_number_once_and_turns():
    first, second = rng.permutation(0, 101, 0), rng.permutation(0, 101, 1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(101))
    assert first.tolist() != second.tolist()
    assert first.tolist() != rng.permutation(1, 101, 0).tolist()


# The rows

TASKS = [
    SelectiveCopy(4, 6, 16),
    SelectiveCopy(5, 14, 11, variant="s4"),
    SelectiveCopy(5, 14, 23, variant="mad"),
    SelectiveCopy(3, 60, 9, n_noise=4, marker="once"),
    SelectiveCopy(3, 15, 9, marker="none"),
    SelectiveCopy(3, 5, 9, variant="mad", marker="repeat", n_noise=2),
    Copy(4, 6, 16),
    Copy(3, 60, 13, variant="markers"),
    Copy(3, 5, 11, variant="delay"),
]
OF_CONF = [OmegaConf.create({"seed": 0, "task": OmegaConf.load(file)}).task for file in sorted(CONF.glob("*.yaml"))]
TASKS += [hydra.utils.instantiate(conf) for conf in OF_CONF if "source" not in conf]  # text has tests of its own


def name(task):
    return "-".join(str(value) for value in task.definition().values())


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_a_row_depends_on_nothing_but_seed_split_and_index(task):
    whole = task.sample("train", torch.arange(30))
    assert whole.inputs.dtype == whole.targets.dtype == torch.int64
    assert whole.inputs.shape == whole.targets.shape == (30, task.seq_len)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    order = torch.tensor([29, 3, 3, 17])
    for got, want in zip(task.sample("train", order), whole, strict=True):
        assert got.equal(want[order])
    assert torch.get_rng_state().equal(state)
    again = copy.deepcopy(task)
    again.batch_size = 7
    assert rows(again) == rows(task)


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_ids_stay_in_the_vocabulary_and_all_are_used(task):
    batch = task.sample("train", torch.arange(2000))
    assert set(batch.inputs.flatten().tolist()) == set(range(task.vocab_size))
    scored = batch.targets[batch.targets != IGNORE]
    assert scored.min() >= 0 and scored.max() < task.vocab_size


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_splits_are_disjoint_and_evaluation_ignores_the_seed(task):
    other = copy.copy(task)
    other.seed = task.seed + 1
    for split in ("val", "test"):
        assert rows(other, split) == rows(task, split)
    assert rows(other) != rows(task)
    assert rows(task) != rows(task, "val") != rows(task, "test")


def test_no_evaluation_row_is_in_the_train_stream():
    task = SelectiveCopy(8, 14, 64)
    train = {tuple(row) for row in task.sample("train", torch.arange(10000)).inputs.tolist()}
    val = {tuple(row) for row in task.sample("val", torch.arange(2048)).inputs.tolist()}
    test = {tuple(row) for row in task.sample("test", torch.arange(2048)).inputs.tolist()}
    assert len(train) == 10000 and len(val) == len(test) == 2048
    assert not train & val and not train & test and not val & test


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", TASKS, ids=name)
def test_rows_are_the_same_bits_on_cuda(task):
    index = torch.arange(1000)
    for here, there in zip(task.sample("train", index), task.sample("train", index.cuda()), strict=True):
        assert there.is_cuda and here.equal(there.cpu())


@pytest.mark.parametrize("task", [task for task in TASKS if isinstance(task, SelectiveCopy)], ids=name)
def test_selective_copy_targets_are_the_data_tokens_in_order(task):
    noise = range(task.first_noise, task.first_noise + task.n_noise)
    symbols = range(task.first_symbol, task.first_symbol + task.n_symbols)
    M = task.n_tokens
    for inputs, targets in rows(task):
        body, query = inputs[: task.span], inputs[task.span :]
        data = [x for x in body if x in symbols]
        assert len(data) == M and all(x in noise or x in symbols for x in body)
        assert targets == [IGNORE] * (len(inputs) - M) + data
        answer = {"repeat": [task.marker_id] * M, "once": [task.marker_id] + [noise[0]] * M, "none": [noise[0]] * M}
        assert query == answer[task.marker]
        assert task.variant != "mad" or body[-1] in symbols


@pytest.mark.parametrize("task", [task for task in TASKS if isinstance(task, Copy)], ids=name)
def test_copy_targets_are_the_tokens_after_the_delay(task):
    M, L, n = task.n_tokens, task.seq_len, task.n_symbols
    for inputs, targets in rows(task):
        if task.variant == "delay":
            assert targets == [IGNORE] * M + inputs[:-M]
            continue
        start = 1 if task.variant == "markers" else 0
        tokens = inputs[start : start + M]
        assert all(1 <= x <= n for x in tokens)
        assert targets == [IGNORE] * (L - M) + tokens
        if task.variant == "s4":
            assert inputs[M:] == [0] * (L - 2 * M) + [n + 1] * M
        else:
            assert inputs[:1] + inputs[M + 1 :] == [n + 1] + [0] * (L - 2 * M - 2) + [n + 2] + [0] * M


def test_selective_copy_lengths_and_vocabularies_are_those_of_its_sources():
    paper = SelectiveCopy(16, 14, 4096)
    assert (paper.span, paper.seq_len, paper.vocab_size) == (4096, 4112, 16)
    assert 2**paper.answer_bits == pytest.approx(14**16)
    assert SelectiveCopy(16, 15, 4096, marker="none").vocab_size == 16
    s4 = SelectiveCopy(16, 14, 4096, variant="s4")
    assert (s4.seq_len, s4.vocab_size, s4.first_noise, s4.marker_id) == (4128, 16, 0, 15)
    mad = SelectiveCopy(16, 14, 256, variant="mad")
    assert (mad.span, mad.seq_len, mad.vocab_size, mad.first_noise, mad.marker_id) == (239, 256, 16, 14, 15)


def test_mad_noise_falls_evenly_before_the_tokens():
    task = SelectiveCopy(4, 4, 4 + 5 + 8, variant="mad")
    places = task._places(task.row_keys("train", torch.arange(20000)))  # (B, 4)
    gaps = torch.diff(places, dim=1, prepend=torch.full((20000, 1), -1)) - 1
    assert gaps.sum(1).eq(8).all()
    # Each gap is binomial(8, 1/4): mean 2, variance 1.5; five deviations of the mean of 20000.
    assert (gaps.double().mean(0) - 2).abs().max() < 5 * (1.5 / 20000) ** 0.5


@pytest.mark.parametrize(
    "task",
    [SelectiveCopy(4, 6, 16), *(Copy(4, 6, 16, variant=variant) for variant in ("s4", "markers", "delay"))],
    ids=name,
)
def test_docstring_draws_row_0(task, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    picture = task.render(task.sample("train", torch.arange(1)))
    assert textwrap.indent(picture, "    ") + "\n" in inspect.getdoc(type(task))


def test_render_wraps_and_keeps_columns_aligned(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    task = SelectiveCopy(16, 60, 48)
    batch = task.sample("train", torch.arange(2))
    blocks = task.render(batch, 1).split("\n\n")
    assert len(blocks) > 2
    read = {"inputs": [], "targets": [], "loss": []}
    for block in blocks:
        lines = block.split("\n")
        assert max(map(len, lines)) <= 40
        read["inputs"] += lines[0].removeprefix("inputs").split()
        read["targets"] += lines[1].removeprefix("targets").split()
        read["loss"] += lines[2].removeprefix("loss").split()
        for i, mark in enumerate(lines[2]):
            assert mark != "^" or lines[1][i] != " "
    assert read["inputs"] == task.cells(batch.inputs[1].tolist())
    assert read["targets"] == task.cells(batch.targets[1, -16:].tolist())
    assert read["loss"] == ["^"] * 16
    assert task.decode(batch.targets[1, -16:]) == " ".join(read["targets"])


def test_facts_are_json():
    for task in TASKS:
        assert json.loads(json.dumps(task.facts())) == task.facts()


def test_noise_copier_and_constant_score_no_better_than_chance():
    task = SelectiveCopy(8, 14, 64)
    inputs, targets = task.sample("test", torch.arange(4096))
    scored = targets != IGNORE
    assert scored.sum(1).eq(8).all()
    assert (inputs == targets)[scored].sum() == 0  # says the token it sees
    n = int(scored.sum())
    p = task.chance_token_accuracy
    right = (targets[scored] == task.first_symbol).double().mean()
    assert abs(right - p) < 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: SelectiveCopy(17, 14, 16), ["n_tokens=17", "seq_len=16"]),
        (lambda: SelectiveCopy(16, 14, 20, variant="mad"), ["n_tokens=16", "seq_len=20", "3 positions"]),
        (lambda: SelectiveCopy(8, 14, 1), ["n_tokens=8", "seq_len=1"]),
        (lambda: SelectiveCopy(0, 14, 16), ["n_tokens=0"]),
        (lambda: SelectiveCopy(8, 1, 16), ["n_symbols=1", "2"]),
        (lambda: SelectiveCopy(8, 14, 1e3), ["seq_len=1000.0", "write 1000"]),
        (lambda: SelectiveCopy(8, 14, 10.5), ["seq_len=10.5", "not an integer"]),
        (lambda: SelectiveCopy(8, 14, True), ["seq_len=True"]),
        (lambda: SelectiveCopy(8, 14, "64"), ["seq_len='64'"]),
        (lambda: Copy(8, 14, 15), ["n_tokens=8", "seq_len=15", "16"]),
        (lambda: Copy(8, 14, 17, variant="markers"), ["n_tokens=8", "seq_len=17", "18"]),
        (lambda: Copy(8, 14, 8, variant="delay"), ["n_tokens=8", "seq_len=8", "9"]),
        (lambda: Copy(n_symbols=1), ["n_symbols=1"]),
        (lambda: Copy(variant="mad"), ["variant='mad'"]),
        (lambda: SelectiveCopy(marker="twice"), ["marker='twice'", "repeat"]),
        (lambda: SelectiveCopy(variant="h3"), ["variant='h3'", "mamba, s4, mad"]),
        (lambda: SelectiveCopy(batch_size=0), ["batch_size=0"]),
        (lambda: SelectiveCopy(seed=-1), ["seed=-1"]),
        (lambda: SelectiveCopy(train_samples=0), ["train_samples=0"]),
        (lambda: SelectiveCopy(num_workers=2), ["num_workers=2", "make_on=loader"]),
        (lambda: SelectiveCopy(make_on="gpu"), ["make_on='gpu'"]),
    ],
)
def test_impossible_settings_are_refused_by_name_and_number(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), error.value


def test_no_noise_is_possible():
    task = SelectiveCopy(16, 14, 16)
    inputs, targets = task.sample("train", torch.arange(8))
    assert inputs[:, :16].equal(targets[:, 16:])
    full = SelectiveCopy(4, 14, 9, variant="mad")
    inputs, targets = full.sample("train", torch.arange(8))
    assert inputs[:, :4].equal(targets[:, 5:])


# The loaders


class Numbered(SelectiveCopy):
    """Each row begins with its number."""

    def sample(self, split, index):
        batch = super().sample(split, index)
        batch.inputs[:, 0] = index
        return batch


def take(loader, n):
    return [batch.inputs[:, 0].tolist() for batch in itertools.islice(loader, n)]


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def test_ranks_share_the_train_stream_without_overlap():
    task = Numbered(batch_size=3)
    alone = TrainLoader(Numbered(batch_size=6), "train", 0, 1)
    pair = [TrainLoader(task, "train", rank, 2) for rank in range(2)]
    assert [a + b for a, b in zip(*[take(loader, 5) for loader in pair], strict=True)] == take(alone, 5)
    assert len(alone) == ENDLESS


@pytest.mark.parametrize("n, B, W", [(10, 3, 1), (10, 3, 2), (11, 4, 3), (3, 1, 3), (7, 100, 2)])
def test_evaluation_rows_are_shared_without_duplicates_or_padding(n, B, W):
    task = Numbered(eval_samples=n, eval_batch_size=B)
    seen = []
    for rank in range(W):
        loader = Loader(task, "val", rank, W)
        batches = list(loader)
        assert len(batches) == len(loader) > 0
        assert all(len(batch.inputs) == B for batch in batches[:-1]) and 0 < len(batches[-1].inputs) <= B
        seen += [i for batch in batches for i in batch.inputs[:, 0].tolist()]
    assert sorted(seen) == list(range(n))


def test_rows_made_ahead_are_the_same_and_count_when_they_are_handed_out():
    task = Numbered(batch_size=2, seq_len=30)
    made = []
    plain = task.sample
    task.sample = lambda split, index: made.append(len(index)) or plain(split, index)
    loader = TrainLoader(task, "train", 0, 1)
    assert take(loader, 3) == [[0, 1], [2, 3], [4, 5]]
    assert made == [2 * AHEAD_BATCHES] and loader.state_dict()["rows"] == 6
    assert take(loader, 2) == [[6, 7], [8, 9]]
    long = TrainLoader(Numbered(batch_size=2, seq_len=1 << 19, n_tokens=1), "train", 0, 1)
    assert take(long, 1) == [[0, 1]], "and not 64 of them, which would not fit"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("train_samples", [None, 50])
@pytest.mark.parametrize("task", TASKS, ids=name)
def test_on_a_gpu_rows_from_a_graph_are_the_rows(task, train_samples):
    here, there = (copy.copy(task) for _ in range(2))
    strategy, module = types.SimpleNamespace(root_device=torch.device("cuda")), types.SimpleNamespace(cuda_graph="auto")
    there.trainer = types.SimpleNamespace(strategy=strategy, lightning_module=module)
    loaders = []
    for one in (here, there):
        one.batch_size, one.train_samples = 3, train_samples
        loaders.append(TrainLoader(one, "train", 0, 1))
    for i, (want, got) in enumerate(zip(*(itertools.islice(loader, 3 * AHEAD_BATCHES) for loader in loaders), strict=True)):
        assert torch.equal(want.inputs, got.inputs.cpu()) and torch.equal(want.targets, got.targets.cpu()), i
    assert loaders[1]._graph is not None
    there.teardown("fit")


def test_fewer_rows_than_ranks_is_an_error():
    with pytest.raises(ValueError, match="2 rows in val cannot be shared by 3 ranks"):
        len(Loader(SelectiveCopy(eval_samples=2), "val", 0, 3))


@pytest.mark.parametrize("n, B", [(10, 4), (4, 4), (3, 8), (1, 2)])
def test_train_samples_are_seen_once_a_pass_and_shuffled_anew(n, B):
    loader = TrainLoader(Numbered(batch_size=B, train_samples=n), "train", 0, 1)
    stream = joined(take(loader, 3 * n))
    passes = [stream[i : i + n] for i in range(0, 3 * B * n, n)]
    assert all(sorted(one) == list(range(n)) for one in passes)
    assert n < 4 or len(set(map(tuple, passes))) > 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12+, on fork
def test_workers_make_the_same_batches_and_leave_nothing_behind():
    want = take(TrainLoader(Numbered(batch_size=4), "train", 0, 1), 8)
    task = Numbered(batch_size=4, eval_samples=9, eval_batch_size=4, make_on="loader", num_workers=2)
    train, val = task.train_dataloader(), task.val_dataloader()
    state = torch.get_rng_state()
    got = take(train, 3)
    assert train.state_dict()["rows"] == 3 * 4  # though more are prefetched
    got += take(train, 5)  # a second iteration goes on from there
    assert got == want
    shapes = [[len(batch.inputs) for batch in val] for _ in range(2)]  # persistent: twice through the same workers
    assert shapes == [[4, 4, 1]] * 2
    assert torch.get_rng_state().equal(state)
    alive = [process for loader in (train, val) for process in loader._workers._iterator._workers]
    assert len(alive) == 4 and all(process.is_alive() for process in alive)
    task.teardown("fit")
    assert not any(process.is_alive() for process in alive)


def test_a_task_can_be_sent_to_a_spawned_worker():
    task = SelectiveCopy(make_on="loader")
    loader = task.val_dataloader()
    task.trainer = open(__file__)  # like a trainer it cannot be pickled
    sent = pickle.loads(pickle.dumps(loader))
    task.trainer.close()
    assert sent.task.trainer is None and sent[0].inputs.equal(loader[0].inputs)


def test_loaders_take_their_rank_from_the_trainer():
    task = Numbered(batch_size=2, eval_samples=4, eval_batch_size=4)
    strategy = types.SimpleNamespace(root_device=torch.device("cpu"))
    task.trainer = types.SimpleNamespace(global_rank=1, world_size=2, strategy=strategy)
    assert take(task.train_dataloader(), 2) == [[2, 3], [6, 7]]
    assert take(task.val_dataloader(), 9) == [[1, 3]]


# In the configuration


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_configuration_names_every_argument_and_builds(file):
    conf = OmegaConf.create({"seed": 3, "task": OmegaConf.load(file)})
    target = hydra.utils.get_class(conf.task._target_)
    keys = set(conf.task) - {"_target_"}
    assert keys == set(inspect.signature(target).parameters)
    task = hydra.utils.instantiate(conf.task)
    assert task.seed == 3
    defaults = target()
    for key in keys - {"seed"}:
        assert getattr(defaults, key) == getattr(task, key), key
        # what a checkpoint or a worker may carry off is Python's own
        assert not isinstance(getattr(task, key), ListConfig), key


# In the trainer


class Recorder(L.LightningModule):
    """Learns one number, and writes down every batch it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_rows, self.val_rows, self.test_rows = [], [], []

    def training_step(self, batch, batch_idx):
        assert isinstance(batch, Batch)
        self.train_rows.append(batch.inputs.tolist())
        return (self.weight - batch.inputs.double().mean()) ** 2

    def validation_step(self, batch, batch_idx):
        self.val_rows.append(batch.inputs.tolist())

    def test_step(self, batch, batch_idx):
        self.test_rows.append(batch.inputs.tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder, steps, **more):
    return L.Trainer(
        default_root_dir=folder,
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=None,
        val_check_interval=4,
        num_sanity_val_steps=0,
        **more,
    )


def fit(folder, task, steps, ckpt=None, **more):
    module, it = Recorder(), trainer(folder, steps, **more)
    it.fit(module, datamodule=task, ckpt_path=ckpt)
    it.save_checkpoint(folder / "last.ckpt")
    return module


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("stop", [3, 4])  # in the middle of things, and right at a validation
@pytest.mark.parametrize("loader", [{}, {"make_on": "loader", "num_workers": 1}], ids=["device", "workers"])
def test_resume_goes_on_with_the_next_batch(tmp_path, loader, stop):
    def task():
        return SelectiveCopy(batch_size=2, eval_samples=5, eval_batch_size=2, **loader)

    unbroken = fit(tmp_path, task(), 10)
    assert joined(unbroken.train_rows) == task().sample("train", torch.arange(20)).inputs.tolist()
    first = fit(tmp_path, task(), stop)
    second = fit(tmp_path, task(), 10, tmp_path / "last.ckpt")
    assert first.train_rows + second.train_rows == unbroken.train_rows
    assert second.weight.equal(unbroken.weight)
    assert joined(unbroken.val_rows[:3]) == task().sample("val", torch.arange(5)).inputs.tolist()


def test_epochs_cut_by_a_limit_do_not_see_the_same_rows(tmp_path):
    task = SelectiveCopy(batch_size=2, eval_samples=2)
    module = fit(tmp_path, task, 6, limit_train_batches=3, limit_val_batches=0)
    assert joined(module.train_rows) == task.sample("train", torch.arange(12)).inputs.tolist()


def test_testing_sees_the_test_rows(tmp_path):
    task, module = SelectiveCopy(eval_samples=5, eval_batch_size=2), Recorder()
    trainer(tmp_path, 1).test(module, datamodule=task, verbose=False)
    assert joined(module.test_rows) == task.sample("test", torch.arange(5)).inputs.tolist()


def test_resume_with_other_data_or_vocabulary_is_refused(tmp_path):
    fit(tmp_path, SelectiveCopy(batch_size=4, eval_samples=2), 3)
    ckpt = tmp_path / "last.ckpt"
    with pytest.raises(ValueError, match=r"another vocabulary: size=16 in the checkpoint, 17 now"):
        fit(tmp_path, SelectiveCopy(n_symbols=15, batch_size=4), 5, ckpt)
    with pytest.raises(ValueError, match=r"another data: seed=0 in the checkpoint, 1 now"):
        fit(tmp_path, SelectiveCopy(seed=1, batch_size=4), 5, ckpt)
    with pytest.raises(ValueError, match=r"12 rows, no multiple of batch_size=5"):
        fit(tmp_path, SelectiveCopy(batch_size=5, eval_samples=2), 5, ckpt)
    half = fit(tmp_path, SelectiveCopy(batch_size=2, eval_samples=2), 5, ckpt)
    assert half.train_rows[0] == SelectiveCopy().sample("train", torch.arange(12, 14)).inputs.tolist()
    # Other lengths and seeds can be tested from the same checkpoint.
    fit(tmp_path, SelectiveCopy(batch_size=4, eval_samples=2), 3)
    longer = SelectiveCopy(seq_len=128, seed=1, eval_samples=2)
    trainer(tmp_path, 1).test(Recorder(), datamodule=longer, ckpt_path=ckpt, verbose=False)
