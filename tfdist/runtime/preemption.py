"""Notices of a coming preemption from the platform itself, where it gives them before it sends SIGTERM."""

from __future__ import annotations

import threading
from collections.abc import Callable

_ASK_EVERY_SECONDS = 1.0  # as TensorFlow's PreemptionCheckpointHandler does


def watch(platform: str, on_notice: Callable[[], None]) -> None:
    """Calls `on_notice` once, in a thread of its own, when the platform announces the end of this machine.

    platform: "gce" asks Google Compute Engine's metadata server through TensorFlow's own watcher (host maintenance that
    terminates GPU machines is announced an hour ahead); "none" does nothing.
    """
    if platform == "gce":
        threading.Thread(target=_ask_always, args=(_gce(), on_notice), name="tfdist-preemption", daemon=True).start()


def _gce() -> Callable[[], bool]:
    from tensorflow.python.distribute.failure_handling import failure_handling_util

    return failure_handling_util.termination_watcher_function_gce


def _ask_always(announced: Callable[[], bool], on_notice: Callable[[], None]) -> None:
    never = threading.Event()
    while not never.wait(_ASK_EVERY_SECONDS):
        try:
            if announced():
                on_notice()
                return
        except OSError:  # the metadata server does not answer now
            continue
