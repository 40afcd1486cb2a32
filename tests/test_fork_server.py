"""A child of the fork server is a process of its own: how it ends, what it prints, what its signals and its server's end do."""

import atexit
import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from seqmix.fork_server import Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child outlives its server")


def nothing():
    pass


def prepare_badly():
    raise RuntimeError("it cannot be imported")


def end(how):
    """In a child."""
    atexit.register(print, "the last word", flush=True)
    match how:
        case "exit":
            sys.exit(3)
        case "error":
            raise ValueError("no such thing")
        case "interrupt":
            raise KeyboardInterrupt
        case "abort":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "thread":
            threading.Thread(target=lambda: (time.sleep(0.3), print("a thread", flush=True))).start()
        case "children":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(pool.map(abs, [-1, -2]), flush=True)
        case "C":
            os.write(1, b"one "), os.write(2, b"two\n")
        case "signal":
            signal.signal(signal.SIGUSR1, lambda *_: print("noted", flush=True))
            pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(8)]
            os.kill(os.getpid(), signal.SIGUSR1)
            print("quiet" if not select.select([at for at, _ in pipes], [], [], 0)[0] else "a descriptor of the server's")


def sleep(deaf, ready):
    """In a child. deaf: to SIGTERM. ready: a descriptor that is closed when it has begun."""
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(ready)
    time.sleep(60)


@pytest.fixture
def server():
    return Server(nothing)


def begin(server, deaf=False):
    """A child that sleeps."""
    begun, ready = os.pipe()
    child = server.start(sleep, deaf, descriptors=[ready])
    os.close(ready)
    assert os.read(begun, 1) == b""
    os.close(begun)
    return child


def is_running(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def ended(pid):
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


@pytest.mark.parametrize(
    ("how", "code", "printed"),
    [
        ("nothing", 0, ["the last word"]),
        ("exit", 3, ["the last word"]),
        ("error", 1, ["Traceback", "ValueError: no such thing", "the last word"]),
        ("interrupt", -signal.SIGINT, ["KeyboardInterrupt", "the last word"]),
        ("abort", -signal.SIGABRT, []),
        ("kill", -signal.SIGKILL, []),
        ("thread", 0, ["a thread", "the last word"]),
        ("children", 0, ["[1, 2]", "the last word"]),
        ("C", 0, ["one two", "the last word"]),
        ("signal", 0, ["noted", "quiet", "the last word"]),
    ],
)
def test_a_child_ends_as_an_interpreter_does(tmp_path, how, code, printed):
    with (tmp_path / "log").open("w") as output:
        server = Server(nothing, output=output)
    child = server.start(end, how)
    assert child.poll(20) == child.returncode == child.poll() == code
    text = (tmp_path / "log").read_text()
    at = [text.index(word) for word in printed]
    assert at == sorted(at) and text.count("the last word") == ("the last word" in printed), text


def test_children_run_at_once_and_each_has_the_exit_code_of_its_own(server):
    slow = [begin(server) for _ in range(3)]
    assert server.start(end, "exit").poll(20) == 3 and [child.poll() for child in slow] == [None] * 3
    for child, number in zip(slow, (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1), strict=True):
        os.killpg(child.pid, number)
        assert child.poll(20) == -number
    assert server.is_alive()


def test_a_signal_to_a_childs_group_is_never_lost(server):
    """Not one that is sent as soon as its process id is known; and it reaches no other process."""
    children = []
    for _ in range(20):
        children.append(server.start(time.sleep, 60))
        os.killpg(children[-1].pid, signal.SIGTERM)
    assert [child.poll(20) for child in children] == [-signal.SIGTERM] * 20 and server.is_alive()


def test_a_creator_that_is_killed_takes_its_server_and_its_children_along():
    code = (
        "import time; from test_fork_server import Server, begin, nothing; server = Server(nothing); "
        "print(server.pid, begin(server).pid, flush=True); time.sleep(60)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as creator:
        pids = [int(word) for word in creator.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        creator.kill()
    assert all(map(ended, pids))


def test_a_server_that_is_let_go_is_ended():
    server = Server(nothing)
    server.start(nothing).poll(20)
    pid = server.pid
    del server
    assert not Path(f"/proc/{pid}").exists(), "it has been waited for, too"


def test_a_server_that_dies_ends_its_children_and_starts_no_more(server):
    """Whatever another child does, which does not end when it is told to."""
    child, deaf = begin(server), begin(server, deaf=True)
    assert child.poll() is None
    os.kill(server.pid, signal.SIGKILL)
    assert child.poll(20) == -signal.SIGTERM and ended(child.pid)
    for _ in range(2):
        with pytest.raises(OSError, match="exit code -9"):
            server.start(nothing)
    assert not server.is_alive() and deaf.poll() is None
    os.killpg(deaf.pid, signal.SIGKILL)
    assert deaf.poll(20) == -signal.SIGTERM, "nobody could tell"


def test_a_server_that_cannot_import_says_so(tmp_path):
    with (tmp_path / "log").open("w") as output:
        server = Server(prepare_badly, output=output)
    with pytest.raises(OSError, match="exit code 1"):
        server.start(nothing)
    assert "RuntimeError: it cannot be imported" in (tmp_path / "log").read_text()
