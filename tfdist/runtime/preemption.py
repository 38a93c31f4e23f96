"""Watches for preemption notices from the platform itself, where it gives them before it sends SIGTERM."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tfdist.compat.tensorflow_preemption import google_announces_termination

_ASK_EVERY_SECONDS = 1.0  # as TensorFlow's PreemptionCheckpointHandler does


def watch(platform: str, on_notice: Callable[[], None]) -> None:
    """Calls `on_notice` once, in a separate thread, when the platform announces the end of this machine.

    platform: "gce" asks Google Compute Engine's metadata server through TensorFlow's own watcher (host maintenance that
    terminates GPU machines is announced an hour ahead); "none" does nothing.
    """
    if platform == "gce":
        arguments = (google_announces_termination, on_notice)
        threading.Thread(target=_ask_always, args=arguments, name="tfdist-preemption", daemon=True).start()


def _ask_always(announced: Callable[[], bool], on_notice: Callable[[], None]) -> None:
    never = threading.Event()
    while not never.wait(_ASK_EVERY_SECONDS):
        try:
            if announced():
                on_notice()
                return
        except OSError:  # the metadata server does not answer at the moment
            continue
