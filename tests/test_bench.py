"""The benchmark: what is asked for, a process a point and how each can end, where one model passes another, the report."""

import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest
import torch
from offline import Read
from runs import CONF, names

from seqmix import figures
from seqmix.bench import pool, results
from seqmix.bench.__main__ import _unused, compose_bench, main, to_wandb, write
from seqmix.bench.grid import Point, grid
from seqmix.bench.kernels import OPS, Case, cases, kernel_cost
from seqmix.bench.point import attempt
from seqmix.config import register_resolvers
from seqmix_kernels.frame import CannotRun

register_resolvers()


def points_of(*overrides):
    return grid(compose_bench(list(overrides), CONF), CONF)


# What is asked for


def test_the_default_grid_on_a_gpu_has_five_models_at_six_lengths_of_as_many_parameters():
    from omegaconf import OmegaConf

    from seqmix.build import build_model
    from seqmix.measure import parameter_count

    points = points_of("bench=gpu")
    training = [p for p in points if p.part == "training"]
    assert {p.model for p in training} == {p.model for p in points if p.part == "context"} and len(training) == 30
    assert {p.length for p in training} == {128, 512, 2048, 8192, 32768, 131072}
    assert {p.length * p.batch for p in training} == {131072}, "the same tokens a step at every length"
    sizes = []
    for point in {p.model: p for p in training}.values():
        with torch.device("meta"):
            model = build_model(OmegaConf.create(point.config["model"]), 256)
        sizes.append(parameter_count(model).non_embedding)
    assert max(sizes) < 1.1 * min(sizes), sizes


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("length=[1]", "length"),
        ("+length=[1]", "'length'"),
        ("+patince=3", "'patience'"),
        ("models=[mambo]", "mambo"),
        ("models=mamba", "list[str]"),  # which is a list of its letters
        ("sizes=tiny", "list[str]"),
        ("parts=training", "list[str]"),
        ("parts=[trains]", "trains"),
        ("kernels.ops=selective_scan", "kernels.ops"),
        ("lengths=128", "list[int]"),
        ("lengths=[0]", "lengths"),
        ("decode.batches=4", "decode.batches"),
        ("+overrides.tiny={lstmm:[]}", "overrides.tiny.lstmm"),
        ("+overrides.tinny={lstm:[]}", "overrides.tinny.lstm"),
        ("device=gpu", "'cpu' | 'cuda'"),
        ("autocast=float8", "autocast"),
        ("matmul_precision=best", "matmul_precision"),
        ("wandb=never", "'disabled'"),
        ("seed=null", "seed"),
        ("patience=0", "patience"),
        ("time_limit=soon", "time_limit"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("bench=x", "x"),
    ],
)
def test_what_cannot_be_is_refused(capsys, typed, words):
    assert main(["bench=cpu", typed] if not typed.startswith("bench") else [typed]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said and said.count("\n") == 1, said


def test_a_key_that_is_set_twice_is_refused(capsys):
    assert main(["bench=cpu", "seed=1", "seed=2"]) == 2
    assert "seed=1 and seed=2 both set seed" in capsys.readouterr().err


def test_every_key_is_shown(capsys):
    assert main(["--cfg", "bench=cpu", "seconds=0.25"]) == 0
    assert "seconds: 0.25" in capsys.readouterr().out


# Processes


def point(name, length=1):
    return Point("training", name, "tiny", length, 1, {})


def behave(at, known, answer):
    """Stands in for the measurement, in the process of a point."""
    if at.model == "quiet":
        os._exit(3)
    if at.model.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, at.model))
    if at.model == "slow":
        time.sleep(60)
    call = {"step_ms": 1e3 * int(at.model[0])} if at.model.endswith(" s") else {}
    answer.send(({"status": "ok", **call, "pid": os.getpid(), "known": sorted(known)}, {at.model: 1}))


def test_each_point_has_a_process_and_what_ends_one_ends_that_one():
    asked = [point(name) for name in ("a", "quiet", "b", "SIGKILL", "SIGSEGV", "c")]
    rows = {at.model: row for at, row in pool.run(asked, patience=60, serve=behave)}
    assert list(rows) == [at.model for at in asked]
    assert [rows[name]["known"] for name in "abc"] == [[], ["a"], ["a", "b"]], "what one found, later ones know"
    assert len({rows[name]["pid"] for name in "abc"} | {os.getpid()}) == 4
    assert rows["SIGKILL"]["status"] == "oom" and "SIGKILL" in rows["SIGKILL"]["error"]
    assert rows["SIGSEGV"]["status"] == rows["quiet"]["status"] == "failed"
    assert "SIGSEGV" in rows["SIGSEGV"]["error"] and "exit code 3" in rows["quiet"]["error"]


def test_a_slow_point_is_ended_and_longer_ones_of_its_curve_are_not_begun():
    asked = [point("slow", 10), point("slow", 100), point("a", 100), point("slow", 5)]
    began = time.monotonic()
    rows = [row for _, row in pool.run(asked, patience=1.0, serve=behave)]
    assert time.monotonic() - began < 20
    assert [row["status"] for row in rows] == ["slow", "slow", "ok", "slow"]
    assert "not begun" in rows[1]["error"] and "process_seconds" not in rows[1] and "not done" in rows[3]["error"]


def test_points_after_the_time_limit_are_recorded_as_not_run():
    clock = itertools.count(0, 10)
    rows = [row for _, row in pool.run([point("a"), point("b"), point("c")], 60, 15, serve=behave, clock=lambda: next(clock))]
    assert [row["status"] for row in rows] == ["ok", "not run", "not run"]
    assert "not begun" in rows[1]["error"]


def test_a_point_that_the_time_limit_ends_is_not_called_slow():
    asked = [point("a"), point("slow", 10), point("slow", 100)]
    rows = [row for _, row in pool.run(asked, patience=60, time_limit=2.0, serve=behave)]
    assert [row["status"] for row in rows] == ["ok", "not run", "not run"]
    assert "not done in the 2 s" in rows[1]["error"] and "not begun in the 2 s" in rows[2]["error"]


def test_after_a_dear_point_the_longer_ones_of_its_curve_come_last():
    asked = [point("a", 10), point("4 s", 10), point("4 s", 20), point("4 s", 40), point("a", 100)]
    came = [(at.model, at.length, row["status"]) for at, row in pool.run(asked, patience=30, serve=behave)]
    assert came == [("a", 10, "ok"), ("4 s", 10, "ok"), ("a", 100, "ok"), ("4 s", 20, "ok"), ("4 s", 40, "ok")]


def test_after_a_call_of_a_fifth_of_the_patience_what_is_four_times_as_long_is_not_begun():
    asked = [point("7 s", 10), point("7 s", 40), point("a", 40)]
    rows = [*pool.run(asked, patience=30, serve=behave)]
    assert [(at.model, row["status"]) for at, row in rows] == [("7 s", "ok"), ("a", "ok"), ("7 s", "slow")]
    assert "at length 10 a call took 7 s, 30 s are" in rows[-1][1]["error"] and "process_seconds" not in rows[-1][1]


def test_what_processes_share_is_there_and_no_gpu_is_touched_for_it():
    """In a process of its own: what others import must not be asked here."""
    pytest.importorskip("triton")
    code = (
        "import sys; from seqmix.bench import pool; from seqmix import preload; preload.load(*pool.PRELOADED); import torch; "
        "assert not torch.cuda.is_initialized(); "
        "from triton.runtime import driver; assert driver._active is None and driver._default is None; "
        "from triton.runtime.cache import triton_key; assert triton_key.cache_info().currsize == 1; "
        "print(*sys.modules)"
    )
    loaded = {*subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()}
    root = CONF.parent
    wanted = [*root.glob("src/seqmix/mixers/*.py"), *root.glob("kernels/seqmix_kernels/ops/*/fused*.py")]
    wanted = [".".join(path.relative_to(root).with_suffix("").parts[1:]).removesuffix(".__init__") for path in wanted]
    assert len(wanted) > 12 and loaded.issuperset(wanted), {*wanted} - loaded


# Where one passes another


def test_a_crossing_lies_between_the_lengths_where_the_lead_changes():
    """One grows with the length, the other with its square; they are equal at 1000, on a straight line in logarithms."""
    lengths = (100, 400, 1600, 6400)
    line, square = {x: float(x) for x in lengths}, {x: x * x / 1000 for x in lengths}
    (found,) = results.crossings(line, square, ("line", "square"), more_is_better=False)
    assert (found.better, found.worse, found.between) == ("line", "square", (400, 1600))
    assert found.at == pytest.approx(1000)
    (found,) = results.crossings(square, line, ("square", "line"), more_is_better=True)
    assert (found.better, found.worse) == ("square", "line") and found.at == pytest.approx(1000)


def test_no_crossing_is_said_too_and_cells_without_a_number_take_no_part():
    a, b = {1: 1.0, 2: 1.0, 4: 1.0}, {1: 2.0, 2: 3.0}
    assert results.crossings(a, b, ("a", "b"), more_is_better=False) == [results.Crossing("a", "b", None, None)]
    assert results.crossings(a, {4: 9.0}, ("a", "b"), more_is_better=False) == []
    assert results.crossings(a, {x: 1.01 * y for x, y in a.items()}, ("a", "b"), more_is_better=False) == [], "equal"
    twice = results.crossings({1: 1, 2: 3, 4: 1}, {1: 2, 2: 2, 4: 2}, ("a", "b"), more_is_better=False)
    assert [(c.better, c.between) for c in twice] == [("b", (1, 2)), ("a", (2, 4))]


def made_row(model, length, **numbers):
    given = {"part": "context", "model": model, "size": "tiny", "length": length, "batch": 1, "status": "ok"}
    given |= {"environment": {"device_name": "card <1>", "torch": "2", "triton": None, "threads": 1}, "params": 10}
    given |= {"date": "2026-11-30T00:00:00", "commit": "abc", "command": "typed"}
    return given | numbers


ROWS = [
    made_row("a", 100, prefill_ms=1.0, graph_tokens_per_second=None, eager_tokens_per_second=50.0, state_bytes=2**20),
    made_row("a", 1000, prefill_ms=9.0, graph_tokens_per_second=80.0, eager_tokens_per_second=50.0, state_bytes=2**21),
    made_row("b", 100, prefill_ms=3.0, graph_tokens_per_second=10.0, eager_tokens_per_second=5.0, state_bytes=2**19),
    made_row("b", 1000, status="oom", error="OutOfMemoryError: 1 < 2"),
]


def test_the_report_has_every_cell_and_says_what_has_no_number():
    text = results.markdown(ROWS, ["prefill.svg"])
    assert "| a | 1.00 | 9.00 |" in text and "| b | 3.00 | oom |" in text
    assert "| a | 50.0 | 80.0 |" in text, "without a graph, eagerly"
    assert "context b tiny, length 1,000, batch 1: oom, OutOfMemoryError: 1 < 2" in text
    assert "card <1>" in text and text.count("`typed`") == 1 and "2026-11-30" in text
    assert "- a, attention: cudnn (fastest) [context, length 100, 1,000; decode, batch 1]" in results.markdown(
        [row | {"kernels": {"attention": "cudnn (fastest)"}} for row in (*ROWS[:2], ROWS[0] | {"part": "decode"})], []
    )


def test_figures_draw_every_point_and_a_cross_for_what_ran_out_of_memory():
    measure = next(m for m in results.MEASURES if m.name == "prefill")
    drawn = figures.figure(
        "A <title>", "length", "ms", results.curves(ROWS, measure), results.missing(ROWS, measure), ["typed & said", "card"]
    )
    root = ET.fromstring(drawn)
    tag = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in root.iter(f"{tag}text")]
    assert "A <title>" in texts and "typed & said" in texts and "b: oom" in texts
    marks = [*root.iter(f"{tag}circle"), *root.iter(f"{tag}polygon")]
    assert len(marks) == 3 + 2, "a mark a point, one in each legend"
    across, up = zip(*((float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{tag}circle")), strict=True)
    assert across[1] < across[2] and up[1] > up[2], "to the right and up"
    assert len([p for p in root.iter(f"{tag}path") if "cross" in p.get("class")]) == 1


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.0012345, "0.00123"), (1.2345, "1.23"), (1234.5, "1,230"), (0, "0"), (99.96, "100"), (5, "5.00"), (2e6, "2,000,000")],
)
def test_numbers_have_three_digits(number, shown):
    assert results.show(number) == shown


# All of it, on this machine


def test_a_small_grid_is_measured_drawn_and_drawn_again(tmp_path, capsys):
    typed = ["bench=cpu", f"out={tmp_path}", "models=[rnn,mamba]", "lengths=[8,16]", "parts=[training,context,capacity]"]
    typed += ["wandb=disabled", "training.tokens=32", "context.vocab_size=16", "capacity.length=8", "seconds=0.01", "threads=1"]
    assert main(typed) == 0
    shown = capsys.readouterr().out
    rows = results.read(tmp_path / "points.jsonl")
    assert len(rows) == 10 and all(row["status"] == "ok" for row in rows)
    assert all("selective_scan" in row["kernels"] for row in rows if row["model"] == "mamba")
    assert not any("unknown" in row["kernels"] for row in rows)
    assert "State of one row:" in shown and "rnn leads mamba" in shown
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert pictures == sorted(f"{m.name}.svg" for m in results.MEASURES if m.part != "decode")
    states = {row["length"]: row["state_bytes"] for row in rows if row["part"] == "context" and row["model"] == "mamba"}
    assert states[8] == states[16] > 0
    before = (tmp_path / "report.md").read_text()
    (tmp_path / "report.md").unlink()
    assert main([f"redraw={tmp_path}", "wandb=disabled"]) == 0 and (tmp_path / "report.md").read_text() == before
    assert str(tmp_path) not in json.dumps([{k: v for k, v in row.items() if k != "command"} for row in rows])


def test_numbers_that_are_there_are_not_written_over(tmp_path):
    bench_cpu = tmp_path / "bench_cpu"
    assert _unused(bench_cpu) == bench_cpu
    for taken in ("bench_cpu", "bench_cpu_2"):
        (tmp_path / taken).mkdir()
        (tmp_path / taken / "points.jsonl").write_text("{}\n")
    assert _unused(bench_cpu) == tmp_path / "bench_cpu_3"


@pytest.mark.parametrize("line", ["{", "[]", '{"part": "training"}'])
def test_a_point_that_cannot_be_read_is_named(tmp_path, capsys, line):
    (tmp_path / "points.jsonl").write_text('{"part": "kernels", "status": "ok"}\n' + line + "\n")
    assert main([f"redraw={tmp_path}"]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / 'points.jsonl'}, line 2" in message and message.count("\n") == 1


def test_nothing_to_redraw_is_one_line(tmp_path, capsys):
    assert main([f"redraw={tmp_path / 'nowhere'}"]) == 2
    assert capsys.readouterr().err == f"error: redraw={tmp_path / 'nowhere'}: there is no points.jsonl in it\n"


def test_help_is_the_docstring(capsys):
    assert main(["--help"]) == 0 and "redraw=" in capsys.readouterr().out


def test_wandb_gets_every_row_and_a_line_a_measure(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    rows = [*ROWS, made_row("c", 100, prefill_ms=0.5), made_row("c", 1000, prefill_ms=20.0)]
    write(rows, tmp_path)
    to_wandb(rows, tmp_path, compose_bench(["bench=cpu", "wandb=offline"], CONF))
    run = Read(tmp_path / "outputs")
    assert run.exit_code == 0 and run.run.run_group == "bench"
    until = time.monotonic() + 20  # wandb's service copies files after finish() has come back
    while not (tables := list(run.folder.glob("files/media/table/points*.json"))) and time.monotonic() < until:
        time.sleep(0.05)
    (table,) = tables
    table = json.loads(table.read_text())
    got = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [{k: v for k, v in row.items() if v is not None} for row in got] == [
        {k: v for k, v in row.items() if v is not None and not isinstance(v, dict)} for row in rows
    ]
    logged = {key for row in run.history for key in row}
    assert {"prefill_table", "state_bytes_table", "figures/prefill"} <= {key.split(".")[0] for key in logged}
    assert "a passes c at" in run.summary["crossings"]


def small(case: Case) -> Case:
    most = {"L": 70, "B": 2, "D": 64, "E": 64, "H": 64, "V": 64}
    return case._replace(shape=" ".join((*(f"{k}{min(v, most.get(k, v))}" for k, v in case.sizes.items()), "float32")))


def cases_here():
    """Each implementation of each operator at its default shapes, and once each peer of plain torch and each variant."""
    letters = {"B": 2, "L": 70, "D": 6, "E": 64, "H": 2, "K": 2, "M": 6, "N": 4, "P": 8, "V": 33, "W": 3}
    found = [small(case) for case in cases("cpu")]
    for name, op in OPS.items():
        asked = [peer for peer in op.peers if op.peers[peer].package is None] if op.shapes else [*op.impls]
        shape = " ".join((*(f"{k}{letters[k]}" for k in [*inspect.signature(op.inputs).parameters][2:]), "float32"))
        found += [Case(name, impl, shape) for impl in asked if impl not in ("sdpa_cudnn", "flash_attn_4")]
    return found


@pytest.mark.parametrize("case", cases_here(), ids=lambda case: f"{case.op}-{case.impl}")
def test_every_kernel_that_runs_here_is_checked_and_timed(case):
    try:
        numbers = kernel_cost(case, torch.device("cpu"), seconds=0.01)
    except CannotRun:
        assert case.impl not in ("auto", "reference", "sequential", "torch", "math")
        return
    assert numbers["forward_ms"] > 0 and numbers["check_error"] < 1e-3
    _, twice = OPS[case.op].work(4, **case.sizes)
    assert numbers["both_ms"] > 0 if "both_ms" in numbers else "no_backward" in numbers or twice is None


def test_every_operator_declares_what_is_measured_on_both_devices():
    folders = {path.parent.name for path in (CONF.parent / "kernels/seqmix_kernels/ops").glob("*/op.py")}
    declared = {op.inputs.__module__.split(".")[-2] for op in OPS.values() if op.shapes.keys() == {"cpu", "cuda"}}
    assert declared == folders
    assert all(not op.shapes or op.shapes.keys() == {"cpu", "cuda"} for op in OPS.values())


def test_a_shape_is_measured_by_the_operators_that_have_its_letters():
    shape = "B1 L9 D6 N4 bfloat16"
    found = cases("cpu", impls=["fused", "naive", "torch"], shapes=[shape, "B3 L9 D6 W2 float32"])
    assert found == [
        *(Case("causal_conv1d", impl, "B3 L9 D6 W2 float32") for impl in ("fused", "torch")),
        *(Case("selective_scan", impl, shape) for impl in ("fused", "naive")),
    ]
    (first, *_) = points_of("parts=[kernels]", "kernels.ops=[selective_scan_zoh]", f"kernels.shapes=[{shape}]")
    assert (first.model, first.size, first.length, first.batch) == ("selective_scan_zoh", "sequential", 9, 1)
    assert (first.config["case"][2], len(cases("cpu", ["attention"], None, ["B1 L9 H4 K2 P8 float32"]))) == (shape, 6)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ops": ["scan"]}, "got 'scan'"),
        ({"ops": ["attention_window"]}, "attention_window has no default shapes: .* B, L, H, P, K .optional."),
        ({"impls": ["fussed"]}, "got 'fussed'"),
        ({"impls": ["mamba_ssm"]}, "needs the package mamba_ssm"),
        ({"shapes": ["B8 L2048"]}, "got 'B8 L2048'"),
        ({"shapes": ["B8 X2 float32"]}, "'B8 X2 float32' fits none"),
    ],
)
def test_what_no_kernel_has_is_refused(asked, words):
    with pytest.raises(ValueError, match=words):
        cases("cpu", **asked)


def test_floors_count_each_tensor_once():
    """Of B8 L2048 D3072 N16: four wide bf16 tensors, B and C; one exponential a state and step (baselines.md's floors)."""
    once, twice = OPS["selective_scan"].work(2, B=8, L=2048, D=3072, N=16)
    wide, narrow = 8 * 2048 * 3072 * 2, 8 * 2048 * 16 * 2
    assert once.bytes == 4 * wide + 2 * narrow and once.specials == 8 * 2048 * 3072 * 16
    assert twice.bytes == 11 * wide + 6 * narrow and twice.specials == 2 * once.specials
    attention, _ = OPS["attention"].work(2, B=8, L=2048, H=24, P=64)
    assert attention.flops == 4 * 8 * 24 * 64 * 2048**2 / 2


def test_the_models_of_the_grids_exist():
    for device in ("cpu", "gpu"):
        assert set(compose_bench([f"bench={device}"], CONF).models) <= set(names("model"))


@pytest.mark.parametrize(
    "op, peer, shape",
    [("selective_scan", "mamba_ssm", "B2 L9 D6 N4 float32"), ("causal_conv1d", "causal_conv1d", "B2 L9 D6 W3 float32")],
)
def test_peers_are_timed_in_their_own_layout(op, peer, shape, monkeypatch):
    """Tensors of another's layout, which are made once; what comes out is compared as ours is."""
    from seqmix_kernels.ops.causal_conv1d import causal_conv1d
    from seqmix_kernels.ops.selective_scan import selective_scan

    seen = []

    def selective_scan_fn(x, dt, A, B, C, D, z, bias, delta_softplus):
        seen.append(x.data_ptr())
        assert x.shape == (2, 6, 9) and x.is_contiguous() and B.shape == (2, 1, 4, 9) and delta_softplus
        x, dt, z = (t.transpose(1, 2) for t in (x, dt, z))
        B, C = (t.permute(0, 3, 1, 2) for t in (B, C))
        return selective_scan(x, dt, A, B, C, D, z, bias, impl="sequential")[0].transpose(1, 2)

    def causal_conv1d_fn(x, weight, bias, activation):
        seen.append(x.data_ptr())
        assert x.shape == (2, 6, 9) and x.is_contiguous() and activation == "silu"
        return causal_conv1d(x.transpose(1, 2), weight, bias, activation, impl="reference")[0].transpose(1, 2)

    theirs = {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": selective_scan_fn},
        "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
    }
    for name, contents in theirs.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    numbers = kernel_cost(Case(op, peer, shape), torch.device("cpu"), seconds=0.01)
    assert numbers["check_error"] < 1e-6 and numbers["both_ms"] > 0
    assert len(seen) > 4 and len(set(seen)) == 1, "leaves share the memory of what was turned once"


def test_a_backward_without_the_memory_leaves_the_forwards_numbers(monkeypatch):
    def grad(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB")

    monkeypatch.setattr(torch.autograd, "grad", grad)
    numbers = kernel_cost(small(cases("cpu", ["fft_conv"])[1]), torch.device("cpu"), seconds=0.01)
    assert numbers["forward_ms"] > 0 and numbers["no_backward"] == "oom" and "both_ms" not in numbers
    row = ROWS[0] | numbers | {"part": "kernels", "model": "fft_conv", "size": "torch"}
    (line,) = [line for line in results.markdown([ROWS[0], row], []).splitlines() if line.startswith("| fft_conv")]
    assert line.split(" | ")[4] == "oom", line


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CannotRun("scan='fused'", "it needs a CUDA device"), "not here"),
        (ValueError("this cannot run here: said otherwise"), "failed"),
    ],
)
def test_what_cannot_run_here_is_known_by_its_type(monkeypatch, error, status):
    def numbers(_):
        raise error

    monkeypatch.setattr("seqmix.bench.point.numbers", numbers)
    row = attempt(None)
    assert row["status"] == status and str(error) in row["error"]
