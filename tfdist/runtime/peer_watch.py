"""Ends collectives of TensorFlow whose other workers are gone.

A collective over gRPC may not notice for long, one of NCCL never does. The ring of connections beside them
(control_ring.py) does: it is asked now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_PAUSE = 0.2  # seconds between two looks


class PeerWatch:
    """A thread that calls `end(sentence)`, once, when `lost()` gives a sentence and `is_waiting()`.

    A neighbour that has come to its end while nothing waits for it is none of its business.
    """

    def __init__(self, lost: Callable[[], str | None], is_waiting: Callable[[], bool], end: Callable[[str], None]):
        self._lost, self._is_waiting, self._end = lost, is_waiting, end
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="tfdist-peer-watch", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch: nobody needs to be there any more."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_PAUSE):
            sentence = self._lost()
            if sentence is not None and self._is_waiting():
                self._end(sentence)
                return
