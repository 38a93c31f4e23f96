"""Time-outs per section of a run: what a worker is doing, since when, and what happens when it takes too long.

The watched code only says which section it is in. A thread looks at the clock; it runs even while the main thread is
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
# Frames below these packages tell how a call is made, not what is being called.
_PLUMBING = ("/tensorflow/", "/keras/", "/absl/", "/contextlib.py", "/runpy.py", "<frozen runpy>")
_LOOKING = threading.Lock()  # so that one look does not turn garbage collection on again while another goes on


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
        """A context in section `name`, and then back in the one around it."""
        outer = self.name
        self.enter(name)
        try:
            yield
        finally:
            self.enter(outer)

    def stop_within(self, seconds: float) -> None:
        """The process must have ended in this time: section "stopping" counts from now, beside the others.

        For signal handlers.
        """
        if self._stop_at is None:
            self._stop_at, self._stop_seconds = self._now() + seconds, seconds

    def stop_in_any_time(self) -> None:
        """Nothing is lost any more, however long the process takes to end."""
        self._stop_at = None

    def seconds(self) -> float:
        """The seconds spent in the present section."""
        return self._now() - self.since

    def expired(self) -> tuple[str, float] | None:
        """(section, seconds) of what has outlasted its limit, or None."""
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
    """The main thread's place, innermost first: "loop.py:80 train < session.py:210 run". No library frames."""
    main = _main_thread()
    stack = _stacks(main).get(main)
    if stack is None:
        return "ended"
    shown = [place for place in stack if not any(part in place.file for part in _PLUMBING)][:_FRAMES_SHOWN]
    return " < ".join(f"{Path(place.file).name}:{place.line} {place.function}" for place in shown)


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def all_stacks() -> str:
    """The Python stacks of all threads but this one, as text for the log; the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {ident: stack for ident, stack in _stacks().items() if ident != threading.get_ident()}
    main = _main_thread()
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{_as_text(stacks[ident])}"
        for ident in sorted(stacks, key=lambda ident: ident != main)
    )


class _Place(NamedTuple):
    """The place of a frame."""

    file: str
    line: int | None
    function: str


def _as_text(stack: Sequence[_Place]) -> str:
    """The stack as Python shows a traceback."""
    frames = [traceback.FrameSummary(place.file, place.line, place.function) for place in reversed(stack)]
    return "".join(traceback.StackSummary.from_list(frames).format())


def _stacks(only: int | None = None) -> dict[int, list[_Place]]:
    """thread, or only this one -> where its frames are, innermost first.

    Without garbage collection: a walk over frames makes objects; in Python 3.11 that may collect, a finalizer may let
    the other thread run on, and its frame is gone under the walk's feet. A worker died of that once in some ten
    thousand looks. Not with faulthandler, which reads threads while TensorFlow's are being made, and then crashes, too.
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
