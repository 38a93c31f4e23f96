"""Contexts that say what the code inside them is part of."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager


class ThreadScope:
    """A context of the thread that enters it: others may prepare data meanwhile. May be entered inside itself."""

    def __init__(self) -> None:
        self._thread: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether what asks runs inside."""
        return self._thread == threading.get_ident()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before, self._thread = self._thread, threading.get_ident()
        try:
            yield
        finally:
            self._thread = before


class Once:
    """A context that may be entered inside itself; only the outermost entry counts."""

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
