"""A process that has imported what its children need and is forked for each of them: a child starts in milliseconds.

The jobs of a sweep and the points of the benchmark start this way. The server has one thread, and makes no CUDA context:
a fork of a process that has one could not use the GPU.

multiprocessing's forkserver is not used because its children are not processes of their own in all that a job needs: they
skip what is registered with atexit, turn Ctrl-C into exit code 1, may not start before they have run the parent's
`__main__`, and outlive a parent that is killed. A child of this server ends as an interpreter does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import IO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_DESCRIPTORS = 8  # handed to one child


class Child:
    """A process that the server has started, in a process group of its own; `pid`, `poll` and `returncode` as Popen's.

    returncode is -SIGTERM where the server has died before it could report another: its children are sent that signal.
    """

    def __init__(self, pid: int, status: Connection):
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self, seconds: float | None = 0.0) -> int | None:
        """The exit code, or None if the process is still running after `seconds` (None: wait for its end)."""
        if self.returncode is None and self._status.poll(seconds):
            try:
                self.returncode = self._status.recv()
            except (EOFError, ConnectionResetError):  # the child holds the other end too: it has ended as well
                self.returncode = -signal.SIGTERM
            self._status.close()
        return self.returncode


class Server:
    """Start the server, which then calls `prepare(*args)`, for what that imports, while the caller goes on.

    env: its environment. output: where it and its children print. It is ended with its creator, however that ends, and its
    children are then sent SIGTERM (on Linux).
    """

    def __init__(self, prepare: Callable, *args: object, env: Mapping[str, str] | None = None, output: IO | None = None):
        self._channel, there = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from seqmix.fork_server import serve; serve({there.fileno()})"
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
                start_new_session=True, pass_fds=[there.fileno()],
            )  # fmt: skip
        weakref.finalize(self, _end, self._channel, self._process)
        self._connect().send((prepare, args))

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, function: Callable, *args: object, descriptors: Sequence[int] = ()) -> Child:
        """Call `function(*args, *descriptors)` in a new process, which has descriptors of its own for the same files.

        OSError if the server has ended.
        """
        try:
            status = self._connect(*descriptors)
            pid = status.recv()
        except (EOFError, OSError) as error:
            raise OSError(f"the server that starts processes has ended with exit code {self._process.wait()}") from error
        with contextlib.suppress(BrokenPipeError):  # it has been killed meanwhile, which its exit code will say
            status.send((function, args))
        return Child(pid, status)

    def _connect(self, *descriptors: int) -> Connection:
        here, there = Pipe()
        with there:
            socket.send_fds(self._channel, [b"."], [there.fileno(), *descriptors])
        return here


def _end(channel: socket.socket, process: subprocess.Popen) -> None:
    channel.close()
    process.kill()
    process.wait()


def serve(descriptor: int) -> None:
    """The life of the server and of its children. A child returns when its work is done: its interpreter ends as any does."""
    channel = socket.socket(fileno=descriptor)
    prepare, args = _accept(channel)[0].recv()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch then counts GPUs without CUDA, which a fork could not use
    prepare(*args)
    gc.collect()
    gc.freeze()  # the children share these pages: none of their collections writes to them
    server, children = os.getpid(), {}
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([channel, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            for pid in [*children]:
                ended, code = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with children.pop(pid) as status:
                        _tell(status, os.waitstatus_to_exitcode(code))
        if channel in ready:
            status, descriptors = _accept(channel)
            pid = os.fork()
            if pid == 0:
                break
            os.setpgid(pid, pid)  # before anyone knows of the child: a signal to its group is never lost
            children[pid] = status
            _tell(status, pid)
            for number in descriptors:
                os.close(number)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for unused in (channel, woken, wake, *children.values()):
        unused.close()
    die_with_parent()
    if os.getppid() != server:  # it has died before
        raise SystemExit(128 + signal.SIGTERM)
    function, args = status.recv()
    function(*args, *descriptors)


def die_with_parent() -> None:
    """From now on this process is sent SIGTERM when its parent dies (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _accept(channel: socket.socket) -> tuple[Connection, list[int]]:
    data, (*descriptors,), _, _ = socket.recv_fds(channel, 1, 1 + MAX_DESCRIPTORS)
    if not data:  # whoever started the server has ended
        os._exit(0)
    return Connection(descriptors[0]), descriptors[1:]


def _tell(status: Connection, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        status.send(number)
