"""Decisions that one worker makes for all, and flags and texts that workers tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tfdist.control import exit_codes
from tfdist.control.exit_codes import ConfigError, TfdistError
from tfdist.runtime.base import Runtime

_Found = TypeVar("_Found")


def of_the_chief(runtime: Runtime, find: Callable[[], _Found]) -> _Found:
    """Returns on every worker what `find` returns on the chief; other workers do not call it. A collective call.

    find: returns a value of a type that encoding.py knows.
    Raises: the TfdistError that `find` raises on the chief, on every worker, so that nobody waits for ended workers.
    """
    message: list = []
    failure: TfdistError | None = None
    if runtime.rank == 0:
        try:
            message = [find()]
        except TfdistError as error:
            failure, message = error, [type(error).__name__, str(error)]
    message = runtime.broadcast_object(message)
    if len(message) == 1:
        return message[0]
    name, sentence = message
    kind = getattr(exit_codes, name, None)
    raise failure or (kind if isinstance(kind, type) and issubclass(kind, TfdistError) else ConfigError)(sentence)


def any_worker(runtime: Runtime, flag: bool) -> bool:
    """Whether the flag is set on at least one worker. A collective call."""
    return bool(_flags(runtime, flag).any())


def every_worker(runtime: Runtime, flag: bool) -> bool:
    """Whether the flag is set on all workers. A collective call."""
    return bool(_flags(runtime, flag).all())


def texts_of_all(runtime: Runtime, text: str, size: int) -> list[str]:
    """Returns the text of each worker, in rank order, without trailing white space. A collective call.

    size: bytes per text, the same on all workers; longer texts are cut off.
    """
    padded = text.encode()[:size].ljust(size)
    return [
        row.tobytes().decode("utf-8", "replace").rstrip() for row in runtime.all_gather(np.frombuffer(padded, np.uint8))
    ]


def check_same_communication(asked: Sequence[str]) -> None:
    """Raises ConfigError unless all workers ask for the same. asked: the --communication of each, in rank order."""
    for rank, communication in enumerate(asked):
        if communication != asked[0]:
            raise ConfigError(
                f"--communication={asked[0]} on rank 0, but --communication={communication} on rank {rank}: give all"
                " workers the same."
            )


def _flags(runtime: Runtime, flag: bool) -> np.ndarray:
    return runtime.all_gather(np.array([flag], np.int64))
