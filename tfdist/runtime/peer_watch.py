"""Ends TensorFlow's collectives if other workers in them are gone.

A collective over gRPC may not notice for a long time, and one over NCCL never does. The separate ring of connections
(control_ring.py) notices: it is asked regularly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_PAUSE = 0.2  # seconds between two checks


class PeerWatch:
    """A thread that calls `end(sentence)`, once, when `lost()` returns a sentence while `is_waiting()` is true.

    A neighbor that ends while nothing waits for it is ignored.
    """

    def __init__(self, lost: Callable[[], str | None], is_waiting: Callable[[], bool], end: Callable[[str], None]):
        self._lost, self._is_waiting, self._end = lost, is_waiting, end
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="tfdist-peer-watch", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch: the other workers may leave from now on."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_PAUSE):
            sentence = self._lost()
            if sentence is not None and self._is_waiting():
                self._end(sentence)
                return
