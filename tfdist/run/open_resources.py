"""Keeps what a session has opened, so that everything is closed wherever the session ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


class OpenResources(contextlib.ExitStack):
    """Closes resources in reverse order. If the session fails, the callbacks of `on_failure` run before that."""

    def __init__(self) -> None:
        super().__init__()
        self._last_callbacks: list[Callable[[BaseException], object]] = []
        self._afterwards = contextlib.ExitStack()
        self.callback(self._afterwards.close)

    def afterwards(self, function: Callable[[], object]) -> None:
        """Registers a `function` to call when all else is closed; it may take long."""
        self._afterwards.callback(function)

    def on_failure(self, function: Callable[[BaseException], object]) -> None:
        """Registers a `function` to call with the session's error, in order of registration."""
        self._last_callbacks.append(function)

    def fail(self, error: BaseException) -> None:
        """Calls the functions of `on_failure`, then closes; further errors are suppressed so as not to hide `error`."""
        callbacks, self._last_callbacks = self._last_callbacks, []
        for function in callbacks:
            with contextlib.suppress(Exception):
                function(error)
        with contextlib.suppress(Exception):
            self.close()
