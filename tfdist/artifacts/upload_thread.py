"""The thread that sends snapshots to an object store: one after another, with retries, until all are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tfdist.control.terminal import say
from tfdist.control.user_errors import first_line
from tfdist.storage.store_errors import StoreError

_LOOK_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0


class UploadThread:
    """unsent: returns the steps that are not in the store. send: sends the most urgent one, if there is any. Both are
    called in the thread; what they raise is `trouble`, and they are called again.
    """

    def __init__(self, unsent: Callable[[], list[int]], send: Callable[[], None], lost: Callable[[], list[int]] = list):
        self.unsent, self._send, self.lost = unsent, send, lost
        self._trouble: StoreError | None = None
        self._busy = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="tfdist-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def trouble(self) -> StoreError | None:
        """The reason why the last attempt failed, if it did."""
        return self._trouble

    def is_at_work(self) -> bool:
        """Whether anything may still be sent."""
        return self._thread.is_alive()

    def finish_soon(self, seconds: float) -> list[int]:
        """Waits until all is sent and old snapshots are removed, for at most `seconds`. Returns the steps that are not
        sent.
        """
        begun = time.monotonic()
        while self._thread.is_alive() and (self.unsent() or self._busy) and time.monotonic() - begun < seconds:
            time.sleep(_LOOK_SECONDS / 10)
        return self.unsent()

    def end(self, seconds: float = 0.0) -> None:
        """Stops sending; waits at most `seconds` for an upload under way."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _keep(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                self._busy = bool(self.unsent())
                if self._busy:
                    self._send()
                    self._trouble = None
            except StoreError as error:
                self._trouble = error
            except Exception as error:  # noqa: BLE001 - of the local disk, for one; it must not end this thread unsaid
                self._trouble = StoreError(f"a snapshot cannot be sent ({type(error).__name__}: {first_line(error)})")
            finally:
                self._busy = False


def sent_within(sender: UploadThread, place: str, deadline: float) -> list[int]:
    """Waits until all is sent to `place`, and reports what is under way; until the deadline (time.monotonic()). Returns
    the steps that are not sent, or never will be.
    """
    while left := sender.finish_soon(min(_PROGRESS_SECONDS, deadline - time.monotonic())):
        if time.monotonic() >= deadline or not sender.is_at_work():
            break
        steps = ", ".join(map(str, left))
        say(f"sending the snapshots of steps {steps} to {place} ...")
    return [*left, *sender.lost()]
