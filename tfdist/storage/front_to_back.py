"""Copies of objects that are read one after another, each from front to back: the next objects are fetched ahead, and
the part of an object that has arrived can be read before the copy is complete.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Sequence

from tfdist.control.own_files import locked
from tfdist.storage.data_cache import DataCache
from tfdist.storage.store_errors import as_sentence

_ASK_SECONDS = 0.25  # until an object that another process was fetching is requested again: that process may have ended


class FrontToBack:
    """Reads objects of one stream from front to back. at_a_time: how many objects are fetched at once, in the order of
    the requests. Paths are those of the copies, whether these exist or not."""

    def __init__(self, cache: DataCache, at_a_time: int):
        self._cache, self._at_a_time = cache, at_a_time
        self._guard = threading.Lock()  # protects all attributes below
        self._pins: dict[str, int] = {}  # path -> descriptor of its lock
        self._wanted: dict[str, None] = {}  # paths to read now, and (`_ahead`) next, in order
        self._ahead: dict[str, None] = {}
        self._coming: set[str] = set()
        self._failed: dict[str, Exception] = {}
        self._asked: dict[str, float] = {}  # path -> time of the last request, for paths being read
        self._threads, self._closed = 0, False

    def begin(self, path: str, ahead: Sequence[str], over: Sequence[str] = ()) -> bool:
        """Starts reading a path. Returns whether its copy is there. If not, it is fetched now, and those `ahead` after
        it. Those `over` are no longer read, and may be removed when space is needed. Raises ConfigError.
        """
        copy = self._cache.copy(path)
        self._hold(path, over)
        if there := copy.is_there():
            copy.mark_used()
        self._ask([] if there else [path], ahead)
        return there

    def whole(self, path: str, ahead: Sequence[str], over: Sequence[str] = ()) -> str:
        """Waits until the whole copy is there, and returns its path; otherwise as `begin`. Raises DataError,
        StartupError, ConfigError.
        """
        self._hold(path, over)
        with as_sentence("data_dir"):
            self._cache.copy(path).bring(wait=True)
        self._ask([], ahead)
        return path

    def read(self, path: str, start: int, least: int, most: int) -> bytes:
        """Reads bytes of a path that was begun, from `start` on: as many as have arrived, up to `most`; none while
        there are fewer than `least`. Raises DataError, StartupError, ConfigError.
        """
        with as_sentence("data_dir"):
            if len(found := self._cache.copy(path).read(start, most)) >= least:
                return found
            with self._guard:
                failure, now = self._failed.pop(path, None), time.monotonic()
                if ask := now - self._asked.get(path, now) > _ASK_SECONDS:
                    self._asked[path] = now
            if failure is not None:
                raise failure
            if ask:
                self._ask([path], [])
            return b""

    def close(self) -> None:
        """Ends reading; requested objects are still fetched."""
        with self._guard:
            self._closed = True
            while self._pins:
                os.close(self._pins.popitem()[1])

    __del__ = close

    def _hold(self, path: str, over: Sequence[str]) -> None:
        """Keeps a copy from being removed until it is among the `over` of a later call."""
        with as_sentence("data_dir"), self._guard:
            self._failed.pop(path, None)
            self._asked[path] = time.monotonic()
            self._pin(path)
            for each in over:
                if (descriptor := self._pins.pop(each, None)) is not None:
                    os.close(descriptor)

    def _pin(self, path: str) -> None:
        if path not in self._pins and not self._closed:
            self._pins[path] = locked(self._cache.copy(path).pin, fcntl.LOCK_SH)

    def _ask(self, wanted: Sequence[str], ahead: Sequence[str]) -> None:
        with self._guard:
            self._wanted.update((path, None) for path in wanted if path not in self._coming)
            self._ahead.update((path, None) for path in ahead if path not in self._coming and path not in self._pins)
            for _ in range(min(self._at_a_time - self._threads, len(self._wanted) + len(self._ahead))):
                self._threads += 1
                threading.Thread(target=self._fetch, name="tfdist-data-ahead", daemon=True).start()

    def _fetch(self) -> None:
        while path := self._next():
            failure = None
            try:
                self._cache.copy(path).bring(wait=False, growing=True)
            except Exception as error:  # raised when it is read
                failure = error
            with self._guard:
                self._coming.discard(path)
                if failure is not None:
                    self._failed[path] = failure

    def _next(self) -> str | None:
        """Returns the path to fetch next. None: there is none, and the thread ends."""
        with self._guard:
            asked = self._wanted or self._ahead
            if not asked:
                self._threads -= 1
                return None
            path = next(iter(asked))
            self._wanted.pop(path, None)
            self._ahead.pop(path, None)
            self._coming.add(path)
            try:
                self._pin(path)
            except OSError as error:
                self._failed[path] = error
            return path
