"""What is shown: standard output, standard error, train.log.

Showing something can fail: a pipe is closed (`| head`), a disk is full, an encoding lacks a character, a text looks like
markup. Such a failure ends that display, never the run, and does not change its files or its exit code.
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

    A character that the encoding lacks is written as its escape. After the first failed write nothing more goes there.
    A stream without a file descriptor (of a notebook) stays as it is; one that was closed leads to os.devnull.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and not _is_guarded(stream):
            with contextlib.suppress(OSError):  # of a stream without a descriptor, too
                guarded = _guarded(stream.fileno(), "w", stream.encoding, stream.line_buffering, stream.write_through)
                setattr(sys, name, guarded)
                stream.flush()


class LogFile(logging.FileHandler):
    """A log file in UTF-8; if it cannot be written to (a full disk), standard error says so once and the log ends there."""

    def _open(self) -> TextIO:
        return _guarded(self.baseFilename, self.mode, "utf-8")


class _GuardedFile(io.FileIO):
    """A file whose writes succeed as far as the writer can see; after an OSError the rest is dropped."""

    ended = False

    def write(self, data) -> int:
        if self.ended:
            return len(data)
        try:
            while (written := super().write(data)) is None:  # it is non-blocking, and full
                select.select([], [self], [])
            return written
        except OSError as error:
            self.ended = True
            if error.errno != errno.EPIPE and self.fileno() != 2:  # a reader who leaves (`| head`) has seen enough
                place = "standard output" if self.fileno() == 1 else self.name
                print(f"warning: nothing more is written to {place}: {error.strerror}", file=sys.stderr)
            return len(data)


def _guarded(
    file: int | str, mode: str, encoding: str, line_buffering: bool = False, write_through: bool = False
) -> io.TextIOWrapper:
    raw = _GuardedFile(file, mode, closefd=not isinstance(file, int))
    binary = raw if write_through else io.BufferedWriter(raw)  # as Python has it under PYTHONUNBUFFERED
    return io.TextIOWrapper(
        binary, encoding, errors="backslashreplace", line_buffering=line_buffering, write_through=write_through
    )


def _is_guarded(stream: io.TextIOWrapper) -> bool:
    return isinstance(getattr(stream.buffer, "raw", stream.buffer), _GuardedFile)


def console(file: TextIO | None = None, stderr: bool = False) -> Console:
    """A console to which every text is a text: `[/x]` in a path is no markup, `:100:` no emoji."""
    return Console(file=file, stderr=stderr, markup=False, highlight=False, emoji=False)


def visible(text: str) -> str:
    """The text without what steers a terminal: each control or format character, and each line end, as its escape."""
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode() for c in text
    )


def attempt(what: str, draw: Callable[[], object]) -> bool:
    """Whether `draw` has shown it; an error in showing it is logged and goes no further."""
    try:
        draw()
    except Exception as error:
        log.warning("%s cannot be shown (%s: %s)", what, type(error).__name__, error)
        return False
    return True


def refuse(message: str) -> NoReturn:
    """One line on standard error, and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
