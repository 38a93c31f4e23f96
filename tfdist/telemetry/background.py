"""An observer that runs in its own thread: for trackers that talk to a server, which may be slow or gone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tfdist.telemetry.events import Event, Observer, Tell, observer_of

_MOST_WAITING = 10_000  # events; more of them mean that the server does not keep up
_LAST_SECONDS = 30.0  # wait at the end of the run for events not yet passed on


class Background(Observer):
    """Makes an observer and passes events to it in order, without delaying their sender. A failure is raised at the
    next event, or at the close.

    Sections are not passed on: they would arrive too late, and some occur a hundred times a second.
    """

    def __init__(self, name: str, make: Callable[[], Tell], last_seconds: float = _LAST_SECONDS):
        self._make, self._last_seconds = make, last_seconds
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.name = name
        self._thread = threading.Thread(target=self._work, name=f"tfdist-{name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._error:
            raise self._error
        if self._events.qsize() >= _MOST_WAITING:
            self._last_seconds = 0.0  # the run continues without it, and does not wait for it at the end
            raise TimeoutError(f"{self._events.qsize():,} events are waiting to be passed on")
        self._events.put(event)

    def close(self) -> None:
        """Waits, for a limited time, until all events have been passed on.

        Raises the error of a failed observer, TimeoutError if it is too slow.
        """
        self._events.put(None)
        self._thread.join(self._last_seconds)
        if self._error:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"{self._events.qsize()} events were not passed on within {self._last_seconds:g} s")

    def _work(self) -> None:
        try:
            observer = observer_of(self._make())
            while (event := self._events.get()) is not None:
                observer(event)
            observer.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised in the thread that sends events
            self._error = error
