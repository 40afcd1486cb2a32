"""Compiles a C file of this package at first use with the machine's own compiler, and caches it for later processes.

The library is stored in $XDG_CACHE_HOME/seqmix or ~/.cache/seqmix, named by a hash of the source, the compiler, the flags and
the CPU, so that different machines can share a home folder. If that folder cannot be written, this process uses
a private temporary one.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

# contraction makes a*b + c one instruction; the other two allow vectorised loops and change no result
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
# the first that compiles is used: not every compiler supports -march=native or OpenMP
TARGETS = (("-march=native", "-fopenmp"), ("-march=native", "-pthread"), ("-fopenmp",), ("-pthread",))


@functools.cache
def load(source: Path) -> ctypes.CDLL | str:
    """The library compiled from `source`, or the reason why there is none."""
    compilers = [found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := _which(name))]
    if not compilers:
        return "no C compiler (cc, gcc, clang or $CC)"
    compiler = compilers[0]
    said = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    code = source.read_bytes() + (Path(__file__).parent / "vector.h").read_bytes()
    key = hashlib.sha256(repr((code, compiler, said.stdout, FLAGS, TARGETS, _cpu())).encode()).hexdigest()[:16]
    name = f"{source.parent.name}-{key}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqmix"
    try:
        return ctypes.CDLL(str(folder / name))
    except OSError:
        pass  # missing or not loadable: compiled below
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = _compile(compiler, source, Path(scratch) / name)
            if isinstance(made, str):
                return made
            os.replace(made, folder / name)  # atomic: another process never sees part of it
        return ctypes.CDLL(str(folder / name))
    except OSError:  # no home, no space, read-only, or mounted noexec
        with tempfile.TemporaryDirectory(prefix="seqmix-") as scratch:
            made = _compile(compiler, source, Path(scratch) / name)
            return made if isinstance(made, str) else ctypes.CDLL(str(made))  # stays mapped after the file is deleted


def _which(command: str) -> list[str] | None:
    """$CC may hold a launcher or flags: "ccache gcc -m64"."""
    first, *rest = command.split()
    found = shutil.which(first)
    return [found, *rest] if found else None


def _compile(compiler: list[str], source: Path, to: Path) -> Path | str:
    for target in TARGETS:
        command = [*compiler, *FLAGS, *target, str(source), "-o", str(to)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return to
    return f"{compiler[0]} failed: {done.stderr.strip()[-500:]}"


def _cpu() -> str:
    """Model and instruction sets, which -march=native depends on."""
    try:
        info = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in info if line.startswith(("model name", "flags", "Features", "CPU part")))
