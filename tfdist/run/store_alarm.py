"""Tells the user when an object store cannot be used: when that begins, and again while it lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tfdist.storage.store_errors import StoreError

SILENT_SECONDS = 60.0  # for which an operation may go on until the user is told
_SAID_AGAIN_SECONDS = 600.0


class StoreAlarm:
    """The alarm for one store. what: is in trouble, for the message."""

    def __init__(self, what: str = ""):
        self._what = what
        self._said: float | None = None  # when the user was told of a trouble that lasts

    def messages(self, trouble: StoreError | None) -> Iterator[str]:
        """A sentence, if it is time for one. trouble: what there is of it now."""
        if trouble is None:
            self._said = None
        elif self._said is None or time.monotonic() - self._said > _SAID_AGAIN_SECONDS:
            self._said = time.monotonic()
            yield f"NOT SENT: {self._what}{trouble}. Training goes on; what is missing in the store is sent later."
