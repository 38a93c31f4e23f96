"""Makes printable lines from the raw output of workers, and prints tfdist's own messages."""

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
_LONGEST_LINE = 16_384  # characters; longer output without a line end is shown in pieces of this size
_LONGEST_SENTENCE = 1200  # characters
_BAR_SECONDS = 10.0  # a line that is overwritten again and again (a progress bar) is shown this often
# Everything that would move the cursor or ring the bell, but not colors.
_CONTROL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


# For text from another process: also colors, line ends, and characters that change the writing direction.
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """Makes text from another process safe as part of a line: replaces what could forge lines or control a terminal."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def as_line(text: str) -> str:
    """Turns any text into one printable line without colors, since users' names and messages of their code become parts
    of our sentences. A text that is too long to be read is shortened in the middle.
    """
    line, half = printable(re.sub(r"\s*[\r\n]\s*", " ", _COLOURS.sub("", text))), _LONGEST_SENTENCE // 2
    return line if len(line) <= _LONGEST_SENTENCE else f"{line[:half]} ... {line[-half:]}"


def without_control(text: str) -> str:
    """Replaces what would move the cursor or ring the bell; keeps colors and line ends."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class LineReader:
    """Turns raw output into lines for a terminal: whole, of limited length, without control characters."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest, self._now, self._bar_shown = "", now, now()

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """Returns the lines that `data` completes; with `final` also the rest without a line end. Of a progress bar,
        only the last state is returned."""
        *lines, rest = re.split("\r?\n", self._rest + self._decoder.decode(data, final))
        if "\r" in rest:  # an overwritten line: earlier states are not needed and would pile up
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
    """A file descriptor whose reader may go away: output is then discarded."""

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
    """Opens standard input, output and error on the null device if they are closed (`2>&-`, some daemons). Otherwise
    the next file or socket would get that descriptor, and TensorFlow's messages on standard error would end up in a
    snapshot."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115


def outlive_reader() -> None:
    """Lets a command continue, and end as usual, after the reader of standard output or error has gone (`| head`, a
    closed terminal)."""
    for name in ("stdout", "stderr"):
        _outlive_reader_of(name)


def say(sentence: str) -> None:
    """Prints a message of tfdist on standard error: standard output is for the results that were asked for."""
    print(f"tfdist: {sentence}", file=sys.stderr, flush=True)


def say_at_once(line: str) -> None:
    """Writes on standard error from a signal handler. print() is not used: the signal may have interrupted another
    print(), whose lock would cause a deadlock. Never blocks: the handler must do its work even if nobody reads."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # otherwise its buffer is full
            os.write(2, f"{line}\n".encode())


def _outlive_reader_of(name: str) -> None:
    old = getattr(sys, name)
    if not isinstance(old, io.TextIOWrapper) or isinstance(getattr(old.buffer, "raw", old.buffer), _Unread):
        return
    try:
        old.flush()
        raw = _Unread(old.fileno(), "wb", closefd=False)
        raw.before = old  # kept alive: it would close the descriptor when garbage-collected
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
