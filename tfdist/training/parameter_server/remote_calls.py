"""Calls to workers that are under way: a parameter-server run makes many at a time, each in a thread that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import tensorflow as tf

from tfdist.training.parameter_server.remote_step import Result

# Gives a call with these arguments to a worker; returns a function that waits for the result. See ParameterServer.call.
Call = Callable[[Any, Sequence], Callable[[], tuple | None]]


class RemoteCalls:
    """Calls to workers, at most `most` at a time. `read`: converts what a worker returned to its result."""

    def __init__(self, call: Call, read: Callable[[tuple], Result], most: int):
        self._call, self._read, self.most = call, read, most
        self._pool = ThreadPoolExecutor(most, "tfdist-call")
        self._tags: dict[Future, Any] = {}

    def free(self) -> int:
        """The number of calls that may begin now."""
        return self.most - len(self._tags)

    def begin(self, tag: Any, function: Any, *numbers: int) -> None:
        """Begins a call with these numbers; its result comes back with `tag`."""
        arguments = tuple(tf.constant(number, tf.int64) for number in numbers)
        self._tags[self._pool.submit(self._make, function, arguments)] = tag

    def collect(self, seconds: float) -> list[tuple[Any, Result | None]]:
        """Returns (tag, result) of calls that ended within `seconds`; None: done, but the worker died before
        replying."""
        done, _ = wait(self._tags, seconds, FIRST_COMPLETED)
        return [(self._tags.pop(future), future.result()) for future in done]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, function: Any, arguments: tuple) -> Result | None:
        fetched = self._call(function, arguments)()
        return None if fetched is None else self._read(fetched)
