"""Time limits per section of a run: what a worker is doing, since when, and what happens when it takes too long.

The watched code only says which section it is in. A thread checks the clock; it runs even while the main thread is
blocked in Python or inside TensorFlow.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from tfdist.control import sections

_FRAMES_SHOWN = 6
# Frames in these packages show how a call is made, not what is called.
_PLUMBING = ("/tensorflow/", "/keras/", "/absl/", "/contextlib.py", "/runpy.py", "<frozen runpy>")
_LOOKING = threading.Lock()  # so that no stack walk turns garbage collection on again during another


class Watchdog:
    """Calls `on_expiry(section, seconds)` once, in its thread, when a section outlasts its limit.

    Args:
      limits: section -> seconds; a section without an entry, or with 0, has no limit.
      on_expiry: usually ends the process.
    """

    def __init__(
        self,
        limits: Mapping[str, float],
        on_expiry: Callable[[str, float], None],
        *,
        interval: float = 0.25,
        now: Callable[[], float] = time.monotonic,
    ):
        self.limits, self.on_expiry, self.interval, self._now = dict(limits), on_expiry, interval, now
        self.name, self.since, self.calls = sections.START_UP, now(), 0
        self._stop_at: float | None = None
        self._stop_seconds = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfdist-watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()

    def enter(self, name: str) -> None:
        """Enters section `name`; `calls` counts the entries, so that workers can be compared."""
        self.name, self.since, self.calls = name, self._now(), self.calls + 1

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Context manager: enters section `name`, and returns to the enclosing section at exit."""
        outer = self.name
        self.enter(name)
        try:
            yield
        finally:
            self.enter(outer)

    def stop_within(self, seconds: float) -> None:
        """Requires the process to end within this time: section "stopping" starts now, in parallel with the others.

        For signal handlers.
        """
        if self._stop_at is None:
            self._stop_at, self._stop_seconds = self._now() + seconds, seconds

    def stop_in_any_time(self) -> None:
        """Removes the limit of `stop_within`: nothing can be lost any more, however long the process takes to end."""
        self._stop_at = None

    def seconds(self) -> float:
        """Returns the seconds spent in the current section."""
        return self._now() - self.since

    def expired(self) -> tuple[str, float] | None:
        """Returns (section, seconds) of a section that has exceeded its limit, or None."""
        name, seconds, stop_at = self.name, self.seconds(), self._stop_at
        if 0 < self.limits.get(name, 0) < seconds:
            return name, seconds
        if stop_at is not None and self._now() > stop_at:
            return sections.STOPPING, self._stop_seconds
        return None

    def _watch(self) -> None:
        while not self._closed.wait(self.interval):
            if found := self.expired():
                self.on_expiry(*found)
                return


def main_thread_at() -> str:
    """Returns where the main thread is, innermost frame first: "loop.py:80 train < session.py:210 run". Library frames
    are left out."""
    main = _main_thread()
    stack = _stacks(main).get(main)
    if stack is None:
        return "ended"
    shown = [place for place in stack if not any(part in place.file for part in _PLUMBING)][:_FRAMES_SHOWN]
    return " < ".join(f"{Path(place.file).name}:{place.line} {place.function}" for place in shown)


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def all_stacks() -> str:
    """Returns the Python stacks of all threads except this one, as text for the log; the main thread's comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {ident: stack for ident, stack in _stacks().items() if ident != threading.get_ident()}
    main = _main_thread()
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{_as_text(stacks[ident])}"
        for ident in sorted(stacks, key=lambda ident: ident != main)
    )


class _Place(NamedTuple):
    """The source location of a frame."""

    file: str
    line: int | None
    function: str


def _as_text(stack: Sequence[_Place]) -> str:
    """Formats a stack as Python formats a traceback."""
    frames = [traceback.FrameSummary(place.file, place.line, place.function) for place in reversed(stack)]
    return "".join(traceback.StackSummary.from_list(frames).format())


def _stacks(only: int | None = None) -> dict[int, list[_Place]]:
    """Returns thread id -> source locations of its frames, innermost first. only: the one thread to include; None: all.

    Garbage collection is off meanwhile. A walk over frames creates objects, which in Python 3.11 may start a
    collection; a finalizer may then let the other thread run, and the frame being walked disappears. This crashed a
    worker about once in ten thousand walks. faulthandler is no alternative: it also crashes, when it reads threads
    while TensorFlow is creating some.
    """
    with _LOOKING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return _walked(only)
        finally:
            if collects:
                gc.enable()


def _walked(only: int | None) -> dict[int, list[_Place]]:
    stacks: dict[int, list[_Place]] = {}
    for ident, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost if only in (None, ident) else None
        while frame is not None:
            stacks.setdefault(ident, []).append(_Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
    return stacks
