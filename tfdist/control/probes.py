"""Probes which processes of a parameter-server job are still there: each answers at its TF_CONFIG address.

The chief watches the parameter servers, without which it cannot continue; workers and parameter servers watch the
chief, without which they have nothing to do. A probe is a TCP connection that is closed again at once; it does not
disturb TensorFlow's server on the port.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from tfdist.control.preflight import answers, did_not_appear
from tfdist.control.terminal import say

_PAUSE_SECONDS = 0.2
_REPORT_SECONDS = 10.0
_FAILED_PROBES = 3  # unanswered in a row, after which a process counts as gone


class Prober:
    """Probes `addresses` (name -> host:port) every `interval` seconds, in a thread."""

    def __init__(self, addresses: Mapping[str, str], interval: float = 0.5):
        self.addresses, self.interval = dict(addresses), interval
        self._unanswered = dict.fromkeys(addresses, 0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._probe, name="tfdist-presence", daemon=True)
        self._thread.start()

    def gone(self) -> list[str]:
        """Returns the names of the processes that no longer answer."""
        return [name for name, count in self._unanswered.items() if count >= _FAILED_PROBES]

    def close(self) -> None:
        self._closed.set()

    def _probe(self) -> None:
        while not self._closed.wait(self.interval):
            for name, address in self.addresses.items():
                self._unanswered[name] = 0 if answers(address) else self._unanswered[name] + 1


def await_all(addresses: Mapping[str, str], timeout: float, give_up: Callable[[], bool] = lambda: False) -> None:
    """Returns when every address (name -> host:port) has answered a probe, or when `give_up()` returns True.

    Raises: StartupError naming those that have not answered within `timeout` seconds.
    """
    missing, start = dict(addresses), time.monotonic()
    reported = start
    while missing and not give_up():
        missing = {name: address for name, address in missing.items() if not answers(address)}
        now, names = time.monotonic(), ", ".join(missing)
        if missing and now - start > timeout:
            raise did_not_appear(names, len(missing), timeout)
        if missing and now - reported > _REPORT_SECONDS:
            reported = now
            say(f"waiting for {names}, {now - start:.0f} s of {timeout:g} s.")
        if missing:
            time.sleep(_PAUSE_SECONDS)
