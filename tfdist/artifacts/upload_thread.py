"""The thread that sends snapshots to an object store: one after the other, again and again, until all are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tfdist.control.terminal import say
from tfdist.storage.store_errors import StoreError

_LOOK_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0


class UploadThread:
    """unsent: the steps that are not in the store. send: sends what is to be sent first, if there is anything; may
    raise StoreError, and OSError of the disk here. Both are called in the thread.
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
        """Whether anything will be sent still."""
        return self._thread.is_alive()

    def finish_soon(self, seconds: float) -> list[int]:
        """Waits until all is sent, and what is to be removed after it, at most so long. Returns the steps that are not
        sent.
        """
        begun = time.monotonic()
        while self._thread.is_alive() and (self.unsent() or self._busy) and time.monotonic() - begun < seconds:
            time.sleep(_LOOK_SECONDS / 10)
        return self.unsent()

    def end(self, seconds: float = 0.0) -> None:
        """Sends no more; waits at most so long for what is being sent."""
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
            except OSError as error:  # of the disk here
                self._trouble = StoreError(f"a snapshot cannot be read ({error.strerror}: {error.filename})")
            finally:
                self._busy = False


def sent_within(sender: UploadThread, place: str, deadline: float) -> list[int]:
    """Waits until all is sent to `place`, and says what is on its way; until the deadline, of time.monotonic(). Returns
    the steps that are not sent, or never will be.
    """
    while left := sender.finish_soon(min(_PROGRESS_SECONDS, deadline - time.monotonic())):
        if time.monotonic() >= deadline or not sender.is_at_work():
            break
        steps = ", ".join(map(str, left))
        say(f"sending the snapshots of steps {steps} to {place} ...")
    return [*left, *sender.lost()]
