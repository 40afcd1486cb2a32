"""Several jobs per GPU, with a stand-in for NVIDIA's MPS daemon: how many share, who starts and ends it, and faults."""

import json
import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest
from hydra import compose
from runs import CONF
from test_sweep import jobs_of, queue, statuses  # noqa: F401  queue is a fixture

from seqmix.config import hydra_at, register_resolvers
from seqmix.sweep import sharing
from seqmix.sweep.names import resolved

register_resolvers()
CONTROL = """#!{python}
import os, pathlib, sys
folder = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "{default}"))
runs = folder / "runs"
if sys.argv[1:] == ["-d"]:
    if "{broken}": sys.exit("{broken}")
    runs.touch(exist_ok=False)
    (folder / "starts").open("a").write("start ")
else:
    command = sys.stdin.read().split()[0]
    if not runs.exists(): sys.exit("Cannot find MPS control daemon process")
    if command == "quit": runs.unlink()
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Puts a stand-in for nvidia-cuda-mps-control on the PATH; the folder of the daemon that sweeps share."""

    def install(broken=""):
        path = tmp_path / "bin" / "nvidia-cuda-mps-control"
        path.parent.mkdir(exist_ok=True)
        path.write_text(CONTROL.format(python=sys.executable, default=tmp_path / "default", broken=broken))
        path.chmod(stat.S_IRWXU)

    install()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(sharing, "gpu_memory", lambda: 80 * 2**30)
    install.folder = tmp_path / f"seqmix-mps-{os.getuid()}"
    return install


def test_sweeps_share_one_daemon_which_the_last_one_ends(control):
    runs = control.folder / "runs"
    with sharing.daemon() as first:
        with sharing.daemon() as second:
            assert first == second and first["CUDA_MPS_PIPE_DIRECTORY"] == str(control.folder) and runs.exists()
        assert runs.exists(), "the first sweep still uses it"
    assert not runs.exists() and (control.folder / "starts").read_text() == "start "


def test_a_sweep_that_is_interrupted_ends_its_daemon(control):
    with pytest.raises(SystemExit), sharing.daemon():
        assert (control.folder / "runs").exists()
        raise SystemExit(130)
    assert not (control.folder / "runs").exists()


def test_a_daemon_left_by_a_sweep_that_was_killed_is_used_and_ended(control):
    control.folder.mkdir()
    (control.folder / "runs").touch()
    with sharing.daemon() as env:
        assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(control.folder) and not (control.folder / "starts").exists()
    assert not (control.folder / "runs").exists()


def test_a_daemon_of_the_user_is_used_and_left_alone(control, tmp_path):
    (tmp_path / "default").mkdir()
    (tmp_path / "default/runs").touch()
    with sharing.daemon() as env:
        assert env == {}
    assert (tmp_path / "default/runs").exists() and not control.folder.exists()


def test_without_a_daemon_the_reason_is_given(control, monkeypatch):
    control(broken="no right to do so")
    with sharing.daemon() as found:
        assert found == "nvidia-cuda-mps-control -d does not start: no right to do so"
    monkeypatch.setenv("PATH", "/nowhere")
    with sharing.daemon() as found:
        assert "no nvidia-cuda-mps-control" in found


def config(*overrides):
    with hydra_at(CONF):
        return resolved(compose("train", overrides=list(overrides), return_hydra_config=True), "/folder")


def test_large_jobs_do_not_share_and_small_ones_do_as_cores_and_memory_allow(control, monkeypatch):
    small, large = sharing.bytes_of(config()), sharing.bytes_of(config("size=130m", "task.seq_len=2048"))
    assert small < sharing.FILLS_A_GPU < large
    assert sharing.jobs_per_gpu(small, 16) == 16 and sharing.jobs_per_gpu(small, 500) == sharing.MOST
    assert sharing.jobs_per_gpu(large, 16) == 1
    monkeypatch.setattr(sharing, "gpu_memory", lambda: 4 * small)
    assert sharing.jobs_per_gpu(small, 16) == 3
    monkeypatch.setattr(sharing, "gpu_memory", lambda: 0)  # unknown
    assert sharing.jobs_per_gpu(small, 16) == 1


def test_jobs_that_share_a_gpu_use_the_daemon(queue, control, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("seqmix.sweep.queue._cores", lambda: 3)
    _, happened = queue(range(4), {"0": ["slow"]}, gpus=("0",))
    envs = [event[3] for event in happened if event[0] == "start"]
    assert {(env["CUDA_VISIBLE_DEVICES"], env["CUDA_MPS_PIPE_DIRECTORY"]) for env in envs} == {("0", str(control.folder))}
    assert "at most 3 at once under MPS, at most about 0.6 GiB each" in capsys.readouterr().err
    _, happened = queue(range(4, 6), gpus=("0", "1"), jobs_per_gpu=1)
    assert not any("CUDA_MPS_PIPE_DIRECTORY" in event[3] for event in happened)


@pytest.mark.parametrize(("settings", "how"), [({}, "one job at a time"), ({"jobs_per_gpu": 3}, "take turns")])
def test_without_mps_the_sweep_says_how_it_runs(queue, control, monkeypatch, caplog, capsys, settings, how):  # noqa: F811
    control(broken="not here")
    monkeypatch.setattr("seqmix.sweep.queue._cores", lambda: 4)
    queue(range(3), gpus=("0",), **settings)
    assert caplog.text.count("not here") == 1 and how in caplog.text
    assert f"at most {settings.get('jobs_per_gpu', 1)} at once\n" in capsys.readouterr().err


def test_a_job_that_a_gpu_fault_ended_runs_again_without_mps(queue, control):  # noqa: F811
    """CUDA does not say which of the processes that share a GPU has caused a fault that ended them all."""
    fake = {"0": ["gpu fault", "complete"], "1": ["gpu fault", "gpu fault"], "2": ["SIGABRT", "complete"], "3": ["exit1"]}
    _, happened = queue(range(5), fake, gpus=("0",), jobs_per_gpu=3)
    pipes = [(event[1], event[3]["CUDA_MPS_PIPE_DIRECTORY"]) for event in happened if event[0] == "start"]
    shared, alone = str(control.folder), sharing.ISOLATED["CUDA_MPS_PIPE_DIRECTORY"]
    assert {*pipes} == {*((str(seed), shared) for seed in range(5)), *((str(seed), alone) for seed in range(3))}
    assert statuses(queue.folder) == ["complete", "failed", "complete", "failed", "complete"]
    jobs = jobs_of(queue.folder)
    assert [(job["attempts"], job["isolated"], job["retried"]) for job in jobs] == [(2, True, 0)] * 3 + [(1, False, 0)] * 2
    assert [json.loads((Path(job["folder"]) / "summary.json").read_text())["job"]["mps"] for job in jobs] == [
        False, False, False, True, True,
    ]  # fmt: skip
