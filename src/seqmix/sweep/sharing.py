"""Several jobs per GPU: how many fit, and the daemon under which their kernels run at the same time.

Processes that share a GPU take turns: twelve small jobs together make as many steps per second as one. Under NVIDIA's
Multi-Process Service (MPS) their kernels run side by side. MPS has one weakness: when a kernel of one process faults, the
GPU ends all processes that share the daemon. The queue runs these again without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig

from seqmix.build import build

log = logging.getLogger(__name__)
CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
MOST = 48  # clients of one daemon on one GPU (MPS documentation, "Limitations": 48 since Volta)
FILLS_A_GPU = 2 * 2**30  # bytes: a job that needs more gains nothing from sharing
ISOLATED = {PIPES: os.devnull + "/none"}  # the environment of a process that uses no daemon: there is none at that path
CONTEXT = 600 * 2**20  # bytes of a process besides its tensors: CUDA's context, loaded kernels, the workspace of cuBLAS


def bytes_of(cfg: DictConfig) -> int:
    """A generous estimate of the GPU memory of a run, from its resolved config: weights, their gradients and two moments in
    float32, and what a step keeps for its backward: 64 bytes per channel, layer and token, and 6 per logit.

    Measured in bfloat16 autocast on an H200, as a fraction of it: Mamba 130M 0.4, Transformer 125M 0.6.
    """
    task, d, n = build(cfg.task), cfg.size.d_model, cfg.size.n_layer
    weights = 12 * n * d**2 + task.vocab_size * d
    tokens = (cfg.micro_batch_size or task.batch_size) * task.seq_len
    return CONTEXT + 16 * weights + tokens * (64 * n * d + 6 * task.vocab_size)


def jobs_per_gpu(job_bytes: int, cores: int) -> int:
    """How many jobs of at most so many bytes may share a GPU for which there are so many cores: one per core, if the memory
    suffices; 1 for a job that fills a GPU by itself."""
    return 1 if job_bytes > FILLS_A_GPU else max(1, min(cores, MOST, int(0.9 * gpu_memory()) // job_bytes))


def gpu_memory() -> int:
    """Bytes of the smallest GPU, asked without opening one; 0 if the driver does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return min(int(line) for line in said.split("\n") if line) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


@contextlib.contextmanager
def daemon() -> Iterator[dict[str, str] | str]:
    """The environment of processes that share this machine's GPUs under MPS; or the reason why there is no daemon.

    A daemon that already serves this environment is used and left alone. Otherwise all sweeps of a user share one, which the
    last of them ends; one that was left by a sweep that was killed is used, too.
    """
    if shutil.which(CONTROL) is None:
        yield f"there is no {CONTROL} on the PATH"
    elif _answers(os.environ):
        yield {}
    else:
        folder = Path(tempfile.gettempdir()) / f"seqmix-mps-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            yield f"{folder} belongs to another user"
            return
        own = {PIPES: str(folder), LOGS: str(folder)}
        with (folder / "users").open("w") as users:  # locked by each sweep that uses the daemon
            with _changing(folder):
                fcntl.flock(users, fcntl.LOCK_SH)
                error = None if _answers(os.environ | own) else _start(os.environ | own)
            try:
                yield own if error is None else error
            finally:
                with _changing(folder), contextlib.suppress(BlockingIOError):
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another sweep uses it
                    _tell("quit -t 10", os.environ | own)


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Nobody else starts or ends the daemon meanwhile."""
    with (folder / "changing").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(env: Mapping[str, str]) -> str | None:
    """Start the daemon; None, or what it says instead."""
    env = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}  # clients choose among all GPUs
    done = subprocess.run([CONTROL, "-d"], env=env, capture_output=True, text=True, check=False)
    said = " ".join((done.stdout + done.stderr).split())
    return None if done.returncode == 0 and _answers(env) else f"{CONTROL} -d does not start: {said or 'it says nothing'}"


def _answers(env: Mapping[str, str]) -> bool:
    return _tell("get_server_list", env) == 0


def _tell(command: str, env: Mapping[str, str]) -> int:
    try:
        return subprocess.run([CONTROL], input=command + "\n", env=env, capture_output=True, text=True, timeout=30).returncode
    except subprocess.TimeoutExpired:
        return -1
