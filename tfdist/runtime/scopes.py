"""Context managers that mark the code inside them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager


class ThreadScope:
    """A reentrant context manager for the thread that enters it only: other threads may prepare data meanwhile, or
    trace another replica."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is inside."""
        return getattr(self._local, "entries", 0) > 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before = getattr(self._local, "entries", 0)
        self._local.entries = before + 1
        try:
            yield
        finally:
            self._local.entries = before


class Once:
    """A reentrant context manager; only the outermost entry enters `context`."""

    def __init__(self, context: Callable[[], AbstractContextManager]):
        self._context, self._entries = context, 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self._entries += 1
        try:
            with self._context() if self._entries == 1 else contextlib.nullcontext():
                yield
        finally:
            self._entries -= 1
