"""Runs spread over GPUs, by DDP and FSDP over NCCL, and sweeps on them: on one GPU, and where there are two, on two."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from runs import SELECTIVE_COPY, command, metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ON_GPU = ("logger=csv", *SELECTIVE_COPY, "trainer.accelerator=cuda")
LOSSES = ("train/loss", "val/loss", "test/loss")
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


def trained(place, trainer, gpus, *overrides):
    """The folder of a run of train.py in `place`; all but trainer=default under torchrun, four rows a step in all."""
    place.mkdir()
    launcher = () if trainer == "default" else ("-m", "torch.distributed.run", f"--nproc-per-node={gpus}", "--standalone")
    done = command(
        place, *ON_GPU, f"trainer={trainer}", f"trainer.devices={gpus}", "trainer.precision=bf16-mixed", "size.n_layer=2",
        "size.d_model=64", f"task.batch_size={4 // gpus}", "callbacks.last.every_n_steps=2", "callbacks.last.keep_steps=-1",
        *overrides, launcher=launcher,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if "arning" not in line and "elastic" not in line]
    assert done.returncode == 0, f"{trainer}: " + "\n".join(lines)[-6000:]
    (folder,) = (place / "outputs" / "runs").iterdir()
    return folder


def read(folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "complete" and summary["steps"] == 4, summary
    assert summary["environment"]["device"] == "cuda"
    assert all(math.isfinite(summary[name]) for name in LOSSES), summary
    return summary


def witnessed(place, *overrides, env=None):
    """A sweep of train.py in `place`: what each job said of itself, by start, and the GPUs that its summary names."""
    (place / "sitecustomize.py").write_text(WITNESS)
    path = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = command(
        place, *ON_GPU, "model=transformer", *overrides, multirun=True,
        env={"PYTHONPATH": path, "WITNESS": str(place)} | (env or {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    seen = sorted((json.loads(file.read_text()) for file in place.glob("*.json")), key=lambda at: at["began"])
    summaries = [json.loads(file.read_text()) for file in place.glob("outputs/sweeps/*/*/summary.json")]
    assert all(summary["status"] == "complete" for summary in summaries), summaries
    recorded = [summary["job"]["gpus"] for summary in summaries]
    print(*seen, recorded, sep="\n")
    return seen, recorded


@pytest.mark.parametrize("model", ["transformer", "mamba"])
def test_ddp_and_fsdp_of_one_gpu_are_the_plain_run_and_go_on_as_it(model, tmp_path):
    with ThreadPoolExecutor(3) as at_once:
        trainers = ("default", "ddp", "fsdp")
        whole = list(at_once.map(lambda trainer: trained(tmp_path / trainer, trainer, 1, f"model={model}"), trainers))
        resumed = list(
            at_once.map(
                lambda trainer, folder: trained(
                    tmp_path / f"{trainer}_resumed", trainer, 1, f"model={model}", f"ckpt={folder}/checkpoints/step_000002.ckpt"
                ),
                ("ddp", "fsdp", "default"), (whole[1], whole[2], whole[2]),  # the plain run goes on from what FSDP has saved
            )
        )  # fmt: skip
    plain, curve = read(whole[0]), metrics(whole[0], "train/loss")
    assert len(curve) == 4
    for folder in (*whole[1:], *resumed):
        summary, steps = read(folder), metrics(folder, "train/loss")
        assert list(steps) == (list(curve) if folder in whole else list(curve)[2:])
        for step, loss in steps.items():
            assert float(loss) == pytest.approx(float(curve[step]), rel=1e-3), (folder, step)
        for name in LOSSES:
            assert summary[name] == pytest.approx(plain[name], rel=1e-3), (folder, name)


def test_two_jobs_of_a_sweep_share_one_gpu(tmp_path):
    one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    seen, recorded = witnessed(tmp_path, "seed=0,1", "hydra.launcher.n_jobs=2", env={"CUDA_VISIBLE_DEVICES": one})
    assert recorded == [one, one] and len(seen) == 2 and all(at["visible"] == one and at["peak"] > 0 for at in seen)
    assert seen[0]["gpus"] == seen[1]["gpus"] and len(seen[0]["gpus"]) == 1
    assert seen[1]["began"] < seen[0]["ended"], "they did not run at once"


@needs_two
@pytest.mark.parametrize("model", ["transformer", "mamba"])
def test_ddp_and_fsdp_train_resume_and_test_on_two_gpus(model, tmp_path):
    with ThreadPoolExecutor(2) as both:
        whole = list(both.map(lambda s: trained(tmp_path / s, s, 2, f"model={model}"), ("ddp", "fsdp")))
        resumed = list(
            both.map(
                lambda at: trained(
                    tmp_path / f"{at[0]}_resumed", at[0], 2, f"model={model}", f"ckpt={at[1]}/checkpoints/step_000002.ckpt"
                ),
                zip(("ddp", "fsdp"), whole, strict=True),
            )
        )
    summaries = [read(folder) for folder in (*whole, *resumed)]
    for summary in summaries:
        for name in LOSSES:  # the test loads best.ckpt, of whole tensors in both
            # one rule for both strategies and for a run that was stopped: rounding alone tells them apart
            assert summary[name] == pytest.approx(summaries[0][name], rel=5e-3), name
    ddp, fsdp = (torch.load(at / "checkpoints/last.ckpt", weights_only=True, map_location="cpu") for at in whole)
    for name in (name for name in ddp["state_dict"] if name.startswith("model.")):
        torch.testing.assert_close(fsdp["state_dict"][name], ddp["state_dict"][name], atol=5e-3, rtol=5e-2, msg=name)


@needs_two
def test_a_sweep_gives_each_job_a_gpu_of_its_own(tmp_path):
    seen, recorded = witnessed(tmp_path, "seed=0,1,2,3")
    assert len(seen) == 4 and all(len(at["gpus"]) == 1 and at["peak"] > 0 for at in seen)
    assert sorted(recorded) == sorted(at["visible"] for at in seen)
    by_gpu = {gpu: [at for at in seen if at["gpus"] == [gpu]] for gpu in {at["gpus"][0] for at in seen}}
    assert sorted(map(len, by_gpu.values())) == [2, 2]
    for jobs in by_gpu.values():
        assert jobs[0]["ended"] <= jobs[1]["began"], "two jobs at once on one GPU"
    assert seen[1]["began"] < seen[0]["ended"], "the first two did not run at once"
