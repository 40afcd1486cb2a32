"""A C file of ours, compiled at first use with the machine's own compiler and kept for the next process.

The result lies in $XDG_CACHE_HOME/seqmix or ~/.cache/seqmix, named by a hash of the source, the compiler, the flags and
the CPU, so that a home folder shared by different machines is safe. Where that folder cannot be written, a private
temporary one serves this process.
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

# contraction makes a*b + c one instruction; the other two let a loop be a vector loop and change no result
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
# the first that compiles is kept: not every compiler knows -march=native, or comes with OpenMP
TARGETS = (("-march=native", "-fopenmp"), ("-march=native", "-pthread"), ("-fopenmp",), ("-pthread",))


@functools.cache
def load(source: Path) -> ctypes.CDLL | str:
    """The library made of `source`, or why there is none."""
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
        pass  # not there yet, or not readable as a library: made below
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = _compile(compiler, source, Path(scratch) / name)
            if isinstance(made, str):
                return made
            os.replace(made, folder / name)  # atomic: another process sees all of it or nothing
        return ctypes.CDLL(str(folder / name))
    except OSError:  # no home, no space, read-only, or mounted noexec
        with tempfile.TemporaryDirectory(prefix="seqmix-") as scratch:
            made = _compile(compiler, source, Path(scratch) / name)
            return made if isinstance(made, str) else ctypes.CDLL(str(made))  # stays mapped when the file is gone


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
