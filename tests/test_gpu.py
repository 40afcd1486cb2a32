"""What needs several GPUs: runs spread over two of them, and a sweep that gives each job one of its own."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from runs import SELECTIVE_COPY, command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ON_GPU = ("logger=csv", *SELECTIVE_COPY, "trainer.accelerator=cuda")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
# what each process says of the GPU it has used, when it ends: the sweep's own record could be wrong
WITNESS = """
import atexit, json, os, sys, time
began = time.time()
def note():
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        at = {"began": began, "ended": time.time(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
              "gpus": [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())],
              "peak": torch.cuda.max_memory_allocated()}
        with open(os.path.join(os.environ["WITNESS"], f"{os.getpid()}.json"), "w") as file:
            json.dump(at, file)
atexit.register(note)
"""


def spread(place, strategy, *overrides):
    """train.py under torchrun on two GPUs: its folder, what it printed."""
    place.mkdir()
    done = command(
        place, *ON_GPU, f"trainer={strategy}", "trainer.precision=bf16-mixed", "size.n_layer=2", "size.d_model=64",
        "task.batch_size=2", "callbacks.last.every_n_steps=2", "callbacks.last.keep_steps=-1", *overrides, launcher=TORCHRUN,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if "arning" not in line and "elastic" not in line]
    assert done.returncode == 0, f"{strategy}: " + "\n".join(lines)[-6000:]
    (folder,) = (place / "outputs" / "runs").iterdir()
    return folder


@pytest.mark.parametrize("model", ["transformer", "mamba"])
def test_ddp_and_fsdp_train_resume_and_test_on_two_gpus(model, tmp_path):
    with ThreadPoolExecutor(2) as both:
        whole = list(both.map(lambda s: spread(tmp_path / s, s, f"model={model}"), ("ddp", "fsdp")))
        resumed = list(
            both.map(
                lambda at: spread(
                    tmp_path / f"{at[0]}_resumed", at[0], f"model={model}", f"ckpt={at[1]}/checkpoints/step_000002.ckpt"
                ),
                zip(("ddp", "fsdp"), whole, strict=True),
            )
        )
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (*whole, *resumed)]
    for summary in summaries:
        assert summary["status"] == "complete" and summary["steps"] == 4, summary
        assert summary["environment"]["device"] == "cuda"
        for name in ("train/loss", "val/loss", "test/loss"):  # the test loads best.ckpt, of whole tensors in both
            assert math.isfinite(summary[name]), (name, summary)
            # one rule for both strategies and for a run that was stopped: rounding alone tells them apart
            assert summary[name] == pytest.approx(summaries[0][name], rel=5e-3), name
    ddp, fsdp = (torch.load(at / "checkpoints/last.ckpt", weights_only=True, map_location="cpu") for at in whole)
    for name in (name for name in ddp["state_dict"] if name.startswith("model.")):
        torch.testing.assert_close(fsdp["state_dict"][name], ddp["state_dict"][name], atol=5e-3, rtol=5e-2, msg=name)


def test_a_sweep_gives_each_job_a_gpu_of_its_own(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITNESS)
    done = command(
        tmp_path, *ON_GPU, "model=transformer", "seed=0,1,2,3", multirun=True,
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "WITNESS": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    seen = sorted((json.loads(file.read_text()) for file in tmp_path.glob("*.json")), key=lambda at: at["began"])
    recorded = [json.loads(file.read_text())["job"]["gpus"] for file in tmp_path.glob("outputs/sweeps/*/*/summary.json")]
    print(*seen, recorded, sep="\n")
    assert len(seen) == 4 and all(len(at["gpus"]) == 1 and at["peak"] > 0 for at in seen)
    assert sorted(recorded) == sorted(at["visible"] for at in seen)
    by_gpu = {gpu: [at for at in seen if at["gpus"] == [gpu]] for gpu in {at["gpus"][0] for at in seen}}
    assert sorted(map(len, by_gpu.values())) == [2, 2]
    for jobs in by_gpu.values():
        assert jobs[0]["ended"] <= jobs[1]["began"], "two jobs at once on one GPU"
    assert seen[1]["began"] < seen[0]["ended"], "the first two did not run at once"
