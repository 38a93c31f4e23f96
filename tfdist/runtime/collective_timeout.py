"""Ends collectives that do not end by themselves.

With TensorFlow's own time-out for collectives, every call leaves a sleeping thread until the time has passed, however
soon the call ends: at 100 calls per second and a time-out of 1800 s that is 180,000 threads, and the process dies long
before. So TensorFlow gets no time-out, except where a group meets for the first time (collectives.py). Instead,
whatever may wait for others counts its beginnings and ends in the graph itself, and one thread watches the counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_LOOKS = 40  # number of looks within a time-out
_LONGEST_PAUSE = 1.0  # seconds between two looks


class Overdue:
    """Calls `on_timeout`, once, if something has begun and not ended, and nothing else has begun or ended, for
    `timeout` seconds; 0: never.
    """

    def __init__(self, timeout: float, on_timeout: Callable[[], None]):
        self._timeout, self._on_timeout = timeout, on_timeout
        self._pause = min(_LONGEST_PAUSE, timeout / _LOOKS)
        with tf.init_scope(), tf.device("CPU:0"):
            self._begun, self._ended = (
                tf.Variable(tf.zeros([], tf.int64), trainable=False, name=f"tfdist_{name}")
                for name in ("begun", "ended")
            )
        if timeout:
            threading.Thread(target=self._watch, name="tfdist-overdue", daemon=True).start()

    def is_waiting(self) -> bool:
        """Whether something has begun and not ended. May be called from any thread."""
        return int(self._begun.numpy()) > int(self._ended.numpy())

    def watched(self, run: Callable[[Callable, tuple], Any], fn: Callable, args: Sequence) -> Any:
        """Returns `run(fn, args)`, watched whenever the graph runs it, from when the arguments are ready until the
        results are.
        """
        with tf.control_dependencies(_tensors(args)):
            self._begun.assign_add(1, read_value=False)
        result = run(fn, tuple(args))
        with tf.control_dependencies(_tensors(result)):
            self._ended.assign_add(1, read_value=False)
        return result

    def _watch(self) -> None:
        before, waited, looked = None, 0.0, time.monotonic()
        while waited < self._timeout:
            time.sleep(self._pause)
            counts = int(self._begun.numpy()), int(self._ended.numpy())
            now = time.monotonic()
            # A late look means that this process itself was stopped; that tells nothing about the others.
            waited = waited + min(now - looked, 2 * self._pause) if counts == before and counts[0] > counts[1] else 0.0
            before, looked = counts, now
        self._on_timeout()


def _tensors(nest: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if tf.is_tensor(leaf)]
