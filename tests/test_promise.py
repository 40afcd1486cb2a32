"""The promise: a mixer or a task is one Python file and one YAML file, an operator is one folder, without an edit elsewhere.

Here a mixer whose state grows, a task and an operator are written into a copy of conf, train.py and the kernels. The laws hold
for them, and they are trained, resumed, measured and reported.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys

import pytest
import test_mixers
import test_tasks
from hydra.utils import instantiate
from omegaconf import OmegaConf
from runs import ROOT, small

FILES = {
    "mean_of_past.py": '''
"""y_t = W mean_{s <= t} gate_s x_s, from a cache of all gated tokens."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor

from seqmix.mixers.base import Mixer


class Cache(NamedTuple):
    x: torch.Tensor  # (B, C, D)
    length: torch.Tensor  # (B,) int32

    def reserve(self, tokens):
        room = max(self.length.tolist(), default=0) + tokens - self.x.shape[1]
        return self if room <= 0 else Cache(F.pad(self.x, (0, 0, 0, room)), self.length.clone())

    def rows(self, index):
        return Cache(self.x[index], self.length[index])


class MeanOfPast(Mixer):
    def __init__(self, d_model: int, bias: bool = True):
        super().__init__()
        self.gate = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.out_proj((self.gate(x).sigmoid() * x).cumsum(1) / count)

    def init_state(self, batch):
        W = self.out_proj.weight
        return Cache(W.new_zeros(batch, 0, len(W)), torch.zeros(batch, dtype=torch.int32, device=W.device))

    def prefill(self, x, state):
        B, L, D = x.shape
        at = state.length[:, None] + torch.arange(L, device=x.device)  # (B, L), each token's slot
        blind = torch.compiler.is_compiling() or isinstance(x, FakeTensor)
        if not (blind or (x.is_cuda and torch.cuda.is_current_stream_capturing())):  # else nothing may be asked or grown
            state = state.reserve(L)
        cache = state.x.scatter(1, at[..., None].long().expand(B, L, D), (self.gate(x).sigmoid() * x).to(state.x.dtype))
        seen = torch.arange(cache.shape[1], device=x.device) <= at[..., None]  # (B, L, C)
        y = seen.to(cache.dtype) @ cache / (at[..., None] + 1)
        return self.out_proj(y.to(x.dtype)), Cache(cache, state.length + L)
''',
    "conf/model/mean_of_past.yaml": """
# @package _global_
model:
  _target_: mean_of_past.MeanOfPast
  _partial_: true
  bias: true
channel_mixer:
  _target_: seqmix.channel_mixers.SwiGLU
  _partial_: true
  expand: 2.667
""",
    "last_word.py": '''
"""The second half of a row is its first half, a token later."""

import torch

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, symbol_names, whole


class LastWord(Task):
    def __init__(
        self, n_ids: int = 5, seq_len: int = 12, *, batch_size: int = 32, eval_batch_size: int = 256, eval_samples: int = 2048,
        seed: int = 0, eval_seed: int = 1234, train_samples: int | None = None, num_workers: int = 0, make_on: str = "device",
    ):
        super().__init__(
            batch_size=batch_size, eval_batch_size=eval_batch_size, eval_samples=eval_samples, seed=seed, eval_seed=eval_seed,
            train_samples=train_samples, num_workers=num_workers, make_on=make_on,
        )
        self.n_ids = self.vocab_size = whole("n_ids", n_ids, 2)
        self.seq_len = whole("seq_len", seq_len, 2)
        self.vocabulary = {"size": n_ids}
        self.chance_token_accuracy, self.chance_sequence_accuracy = 1 / n_ids, n_ids ** -float(seq_len // 2)

    def definition(self):
        return {"task": "last_word", "n_ids": self.n_ids, "seq_len": self.seq_len}

    def cells(self, ids):
        return [symbol_names(self.n_ids)[i] for i in ids]

    def sample(self, split, index):
        tokens = rng.integers(self.row_keys(split, index), self.seq_len, self.n_ids, stream=0)
        targets = torch.full_like(tokens, IGNORE)
        targets[:, self.seq_len // 2 :] = tokens[:, : self.seq_len - self.seq_len // 2]
        return Batch(tokens, targets)
''',
    "conf/task/last_word.yaml": """
_target_: last_word.LastWord
n_ids: 5
seq_len: 12
batch_size: 32
eval_batch_size: 256
eval_samples: 2048
seed: ${seed}
eval_seed: 1234
train_samples: null
num_workers: 0
make_on: device
""",
    "kernels/seqmix_kernels/ops/doubling/__init__.py": "from .op import doubling as doubling",
    "kernels/seqmix_kernels/ops/doubling/op.py": '''
"""y = 2 x."""

from ...frame import Impl, Operator

OPERATOR = Operator(__package__, Impl("reference"))


def doubling(x, impl="auto"):
    OPERATOR.choose(impl, x)
    return 2 * x
''',
    "kernels/seqmix_kernels/ops/doubling/bench.py": """
from ...benchmark import Op, Work
from .op import OPERATOR, doubling


def inputs(normal, dtype, B, L):
    return (normal(B, L).to(dtype),)


def work(size, B, L):
    return Work(2 * B * L * size), Work(4 * B * L * size)


SHAPES = {device: ("B2 L8 float32",) for device in ("cpu", "cuda")}
OPS = {
    "doubling": Op(
        OPERATOR.names, inputs, lambda impl, x: doubling(x, impl), lambda tensors, y: (y, 2 * tensors[0].double()), work, SHAPES
    )
}
""",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("promise")
    shutil.copytree(ROOT / "conf", root / "conf")
    shutil.copytree(ROOT / "kernels", root / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", root)
    for name, text in FILES.items():
        assert not (root / name).exists()
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text.lstrip())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        yield root


def cases(module, argument, over):
    """The laws of a test module that hold for each `argument` of `over`, with every value of their other arguments."""
    found = []
    for name, law in vars(module).items():
        marks = getattr(law, "pytestmark", [])
        values = {mark.args[0]: mark.args[1] for mark in marks if mark.name == "parametrize"}
        if values.pop(argument, None) is over and "gpu" not in {mark.name for mark in marks}:
            for combination in itertools.product(*values.values()):
                pairs = zip(values, combination, strict=True)
                parts = [zip(keys.split(", "), value if "," in keys else [value], strict=True) for keys, value in pairs]
                found.append(pytest.param(law, dict(itertools.chain(*parts)), id=f"{name}-{combination}"))
    return found


@pytest.mark.parametrize(("law", "arguments"), cases(test_mixers, "name", test_mixers.CONFIGS))
def test_the_laws_of_mixers_hold_for_it(tree, monkeypatch, law, arguments):
    monkeypatch.setitem(test_mixers.CONFIGS, "mean_of_past", OmegaConf.load(tree / "conf/model/mean_of_past.yaml"))
    law("mean_of_past", **arguments)


@pytest.mark.parametrize(("law", "arguments"), cases(test_tasks, "task", test_tasks.TASKS))
def test_the_laws_of_tasks_hold_for_it(tree, law, arguments):
    config = OmegaConf.create({"seed": 0, "task": OmegaConf.load(tree / "conf/task/last_word.yaml")})
    law(instantiate(config.task), **arguments)
    test_tasks.test_configuration_names_every_argument_and_builds(tree / "conf/task/last_word.yaml")


def test_they_are_trained_resumed_measured_and_reported(tree):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))}
    clean["PYTHONPATH"] = os.pathsep.join(map(str, (tree, tree / "kernels", ROOT / "src")))

    def python(*arguments):
        done = subprocess.run([sys.executable, *arguments], cwd=tree, env=clean, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run = ["train.py", *small("model=mean_of_past", "task=last_word", "logger=csv", "callbacks.last.every_n_steps=2")]
    python(*run, "hydra.run.dir=outputs/runs/first")
    resumed = [override.replace("max_steps=4", "max_steps=6") for override in run]
    python(*resumed, "hydra.run.dir=outputs/runs/second", "ckpt=last")
    first, second = (json.loads((tree / f"outputs/runs/{name}/summary.json").read_text()) for name in ("first", "second"))
    assert first["status"] == second["status"] == "complete" and (first["steps"], second["steps"]) == (4, 6)
    assert second["resumed_from"] == "outputs/runs/first/checkpoints/last.ckpt"
    assert first["memory/state_bytes"] == 4 * 12 * 16 + 4 and "test/token_accuracy" in second

    points = ["models=[mean_of_past]", "lengths=[8]", "context.vocab_size=16", "kernels.ops=[doubling]", "seconds=0.01"]
    python("-m", "seqmix.bench", "bench=cpu", "parts=[context,kernels]", *points, "out=bench", "wandb=disabled")
    mixer, operator = map(json.loads, (tree / "bench/points.jsonl").read_text().splitlines())
    assert mixer["status"] == operator["status"] == "ok" and (mixer["model"], operator["model"]) == ("mean_of_past", "doubling")
    assert mixer["state_bytes"] > 0 and operator["check_error"] == 0 and "doubling" in (tree / "bench/report.md").read_text()

    python("-m", "seqmix.report", "outputs/runs", "--out", "report")
    assert "mean_of_past" in (tree / "report/report.md").read_text() and "last_word" in (tree / "report/cells.csv").read_text()
