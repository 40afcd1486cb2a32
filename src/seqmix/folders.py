"""Run folders: finding them, reading their files, and a lock that lets one process at a time write to a folder.

Neither torch nor Hydra is imported here: the report reads run folders with this module.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from seqmix.display import refuse

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, if PyYAML has it, is ten times as fast
WANDB_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-")  # wandb's own folder of a run, which has a config.yaml, too
_locks: dict[Path, int] = {}  # folder -> descriptor of its .lock; the locks that this process holds


def walk(place: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """As os.walk, but follows symbolic links, visits each folder once, and skips those of Hydra, submitit and wandb."""
    seen = set()
    for folder, children, files in os.walk(place, followlinks=True, onerror=_say_unreadable):
        real = os.path.realpath(folder)
        if real in seen:
            children.clear()
            continue
        seen.add(real)
        of_wandb = os.path.basename(folder) == "wandb"
        kept = [c for c in children if c not in (".hydra", ".submitit") and not (of_wandb and WANDB_RUN.match(c))]
        children[:] = sorted(kept, key=lambda c: (os.path.islink(os.path.join(folder, c)), c))
        yield Path(folder), children, files


def _say_unreadable(error: OSError) -> None:
    log.warning("%s cannot be read (%s) and is skipped", error.filename, error.strerror)


def read_file(path: Path, kind: type = dict) -> dict | list:
    """The dict or list in a YAML or JSON file. ValueError, in one line that names the file, if there is none in it."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=LOADER)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {reason}") from error
    if not isinstance(value, kind):
        found = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise ValueError(f"{path} {found}, but a {kind.__name__} is needed")
    return value


def lock(folder: Path) -> int:
    """Make `folder` and hold its lock until this process ends, even if it is killed; returns the descriptor of `.lock`.

    Exits with code 2 and a one-line error if another process holds the lock, or if the folder cannot be written to.

    The lock is flock(2). A forked child does not keep it, but a child that is given the descriptor does. On NFS it also holds
    between machines, unless the mount disables this (nolock, local_lock). Without flock (Windows, some parallel file systems)
    a warning says that nothing keeps a second process from writing to the folder.
    """
    key = folder.resolve()
    if key in _locks:
        return _locks[key]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        refuse(f"cannot write to {folder}: {error.strerror} ({error.filename})")
    try:
        if fcntl is None:
            raise OSError(None, "this system has no flock")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
        os.close(descriptor)
        refuse(f"{holder} is writing to {folder}; wait until it ends, or name another folder")
    except OSError as error:
        log.warning("%s cannot be locked (%s): nothing keeps a second process from writing to it", folder, error.strerror)
    with contextlib.suppress(OSError):  # on a full disk the lock still holds
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
    _locks[key] = descriptor
    return descriptor


def _drop_locks() -> None:
    """Close the locks in a forked child (a data-loading worker), which may outlive its parent by seconds."""
    while _locks:
        os.close(_locks.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_locks)
