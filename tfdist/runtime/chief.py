"""What one worker finds out for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tfdist.control import exit_codes
from tfdist.control.exit_codes import ConfigError, TfdistError
from tfdist.runtime.base import Runtime

_Found = TypeVar("_Found")


def of_the_chief(runtime: Runtime, find: Callable[[], _Found]) -> _Found:
    """What `find` returns on the chief, on every worker; the others do not call it. A collective.

    find: returns a value of a kind that encoding.py knows.
    Raises: the TfdistError that `find` raises on the chief, on every worker, so that nobody waits for those that ended.
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
