"""Output for people: standard output, standard error, train.log.

Output can fail: a pipe is closed (`| head`), a disk is full, an encoding lacks a character, a text looks like markup. Such a
failure ends that output, never the run, and does not change the run's files or its exit code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import select
import sys
import unicodedata
from collections.abc import Callable
from typing import NoReturn, TextIO

from rich.console import Console

log = logging.getLogger(__name__)
PROGRESS = "step "  # each line of progress begins with it: the table of a sweep finds the last one in a job's output.log


def guard_standard_streams() -> None:
    """Replace sys.stdout and sys.stderr by streams to the same places whose writes never raise an error.

    A character that the encoding lacks is written as its escape. After the first failed write the stream drops its output.
    A stream without a file descriptor (in a notebook) stays as it is; a closed one is replaced by os.devnull.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and not _is_guarded(stream):
            with contextlib.suppress(OSError):  # raised also by fileno() of a stream without a descriptor
                guarded = _guarded(stream.fileno(), "w", stream.encoding, stream.line_buffering, stream.write_through)
                setattr(sys, name, guarded)
                stream.flush()


class LogFile(logging.FileHandler):
    """A log file in UTF-8. If a write fails (full disk), one warning goes to standard error and the log ends there."""

    def _open(self) -> TextIO:
        return _guarded(self.baseFilename, self.mode, "utf-8")


class _GuardedFile(io.FileIO):
    """A file whose writes never raise: after an OSError all further output is dropped."""

    ended = False

    def write(self, data) -> int:
        if self.ended:
            return len(data)
        try:
            while (written := super().write(data)) is None:  # non-blocking, and its buffer is full
                select.select([], [self], [])
            return written
        except OSError as error:
            self.ended = True
            if error.errno != errno.EPIPE and self.fileno() != 2:  # no warning for a closed pipe (`| head`)
                place = "standard output" if self.fileno() == 1 else self.name
                print(f"warning: nothing more is written to {place}: {error.strerror}", file=sys.stderr)
            return len(data)


def _guarded(
    file: int | str, mode: str, encoding: str, line_buffering: bool = False, write_through: bool = False
) -> io.TextIOWrapper:
    raw = _GuardedFile(file, mode, closefd=not isinstance(file, int))
    binary = raw if write_through else io.BufferedWriter(raw)  # as in Python under PYTHONUNBUFFERED
    return io.TextIOWrapper(
        binary, encoding, errors="backslashreplace", line_buffering=line_buffering, write_through=write_through
    )


def _is_guarded(stream: io.TextIOWrapper) -> bool:
    return isinstance(getattr(stream.buffer, "raw", stream.buffer), _GuardedFile)


def console(file: TextIO | None = None, stderr: bool = False) -> Console:
    """A console that prints text literally: `[/x]` in a path is not markup, and `:100:` is not an emoji."""
    return Console(file=file, stderr=stderr, markup=False, highlight=False, emoji=False)


def visible(text: str) -> str:
    """The text with each control or format character, and each line end, written as its escape: safe for a terminal."""
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode() for c in text
    )


def attempt(what: str, draw: Callable[[], object]) -> bool:
    """Call `draw`; returns whether it succeeded. An error is logged as a warning, not raised."""
    try:
        draw()
    except Exception as error:
        log.warning("%s cannot be shown (%s: %s)", what, type(error).__name__, error)
        return False
    return True


def refuse(message: str) -> NoReturn:
    """Print a one-line error to standard error and exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
