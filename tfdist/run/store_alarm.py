"""Tells the user when an object store cannot be used: when that begins, and again while it lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tfdist.storage.store_errors import StoreError

SILENT_SECONDS = 60.0  # how long an operation may take before the user is told
_SAID_AGAIN_SECONDS = 600.0


class StoreAlarm:
    """The alarm for one store. what: names the affected data in the message."""

    def __init__(self, what: str = ""):
        self._what = what
        self._said: float | None = None  # when the user was last told of the present trouble

    def messages(self, trouble: StoreError | None) -> Iterator[str]:
        """Yields a sentence, if one is due. trouble: the present trouble, if any."""
        if trouble is None:
            self._said = None
        elif self._said is None or time.monotonic() - self._said > _SAID_AGAIN_SECONDS:
            self._said = time.monotonic()
            yield f"NOT SENT: {self._what}{trouble}. Training continues; the missing files are sent later."
