"""The raw output of workers as lines fit for a terminal, and what tfdist itself says there."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import re
import select
import sys
import time
from collections.abc import Callable

_READER_HAS_GONE = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal
_LONGEST_LINE = 16_384  # characters; what goes on without a line end is shown in pieces of this size
_LONGEST_SENTENCE = 1200  # characters
_BAR_SECONDS = 10.0  # a line that is written over and over (a progress bar) is shown this often
# Everything that would move the cursor or ring the bell; colours may stay.
_CONTROL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


# In what another process says of itself: also colours, line ends, and what turns the direction of writing.
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """Another process's words as part of a line: what could forge lines, or act on a terminal, is replaced."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def as_line(text: str) -> str:
    """A text with anything in it as one line without colours: what users name and what their code says ends up in
    sentences of ours. Shortened in the middle where it is too long to be read.
    """
    line, half = printable(re.sub(r"\s*[\r\n]\s*", " ", _COLOURS.sub("", text))), _LONGEST_SENTENCE // 2
    return line if len(line) <= _LONGEST_SENTENCE else f"{line[:half]} ... {line[-half:]}"


def without_control(text: str) -> str:
    """A text without what would move the cursor or ring the bell; colours and line ends may stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class LineReader:
    """Turns raw output into lines fit for a terminal: whole, not endless, without control characters."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest, self._now, self._bar_shown = "", now, now()

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """The lines that `data` completes; with `final` also what has no line end. Of a progress bar the last state."""
        *lines, rest = re.split("\r?\n", self._rest + self._decoder.decode(data, final))
        if "\r" in rest:  # a line that is written over: earlier states are of no interest, and would pile up
            if self._now() - self._bar_shown > _BAR_SECONDS:
                self._bar_shown = self._now()
                lines.append(rest)
            rest = rest[rest.rstrip("\r").rfind("\r") + 1 :]
        while len(rest) > _LONGEST_LINE or (final and rest):
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._rest = rest
        return [_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line.rstrip("\r").rpartition("\r")[2]) for line in lines]


class _Unread(io.FileIO):
    """A file descriptor whose reader may go: what is written then goes nowhere."""

    before: io.TextIOWrapper

    def write(self, data, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_HAS_GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(memoryview(data).cast("B"))


def open_closed_streams() -> None:
    """Opens standard input, output and error where they are closed (`2>&-`, some daemons): nothing is read there, and
    what is written goes nowhere. Else the next file or socket would get that number, and what TensorFlow writes to
    standard error would end up in a snapshot."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115


def outlive_reader() -> None:
    """Lets standard output and error lose their reader (`| head`, a terminal that is closed): a command then goes on,
    and ends as it would have."""
    for name in ("stdout", "stderr"):
        _outlive_reader_of(name)


def say(sentence: str) -> None:
    """Says something to the user, as tfdist, on standard error: standard output is for what a program asks for."""
    print(f"tfdist: {sentence}", file=sys.stderr, flush=True)


def say_at_once(line: str) -> None:
    """Writes on standard error from a signal handler: print() may have been interrupted by it, and would deadlock on
    its own lock; and what the handler is for must happen though nobody reads any more."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # else it is full
            os.write(2, f"{line}\n".encode())


def _outlive_reader_of(name: str) -> None:
    old = getattr(sys, name)
    if not isinstance(old, io.TextIOWrapper) or isinstance(getattr(old.buffer, "raw", old.buffer), _Unread):
        return
    try:
        old.flush()
        raw = _Unread(old.fileno(), "wb", closefd=False)
        raw.before = old  # would close the descriptor when it is collected
    except (OSError, ValueError):  # closed, or none
        return
    made = io.TextIOWrapper(
        raw if old.write_through else io.BufferedWriter(raw),  # type: ignore[arg-type]  # as Python itself does
        old.encoding,
        old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    setattr(sys, name, made)
