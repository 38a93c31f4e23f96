"""Keeps what a session has opened, so that nothing stays open wherever it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


class OpenResources(contextlib.ExitStack):
    """Closes in the opposite order. Before, if the session fails, whatever wants to save or say something may."""

    def __init__(self) -> None:
        super().__init__()
        self._last_callbacks: list[Callable[[BaseException], object]] = []
        self._afterwards = contextlib.ExitStack()
        self.callback(self._afterwards.close)

    def afterwards(self, function: Callable[[], object]) -> None:
        """`function` is called when all else is closed: it may take its time."""
        self._afterwards.callback(function)

    def on_failure(self, function: Callable[[BaseException], object]) -> None:
        """`function` is called with the error that the session fails with, in the order of these calls."""
        self._last_callbacks.append(function)

    def fail(self, error: BaseException) -> None:
        """Does all that is to be done on a failure, then closes; what goes wrong meanwhile must not hide the error."""
        callbacks, self._last_callbacks = self._last_callbacks, []
        for function in callbacks:
            with contextlib.suppress(Exception):
                function(error)
        with contextlib.suppress(Exception):
            self.close()
