"""Ends collectives that do not end by themselves.

TensorFlow's own time-out of a collective leaves a sleeping thread behind for every call, until the time is over,
however soon the call ends: at 100 calls a second and a time-out of 1800 s that is 180,000 threads, and the process is
dead long before. So TensorFlow is given none, but where a group meets for the first time (collectives.py). Instead
whatever may wait for others counts, in the graph itself, when it begins and when it has ended, and one thread looks at
the counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_LOOKS = 40  # within a time-out
_LONGEST_PAUSE = 1.0  # seconds between two looks


class Overdue:
    """Calls `on_timeout`, once, when something that was begun has not ended, nor anything else begun or ended, for
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
        """Whether something has begun and not ended. Any thread may ask."""
        return int(self._begun.numpy()) > int(self._ended.numpy())

    def watched(self, run: Callable[[Callable, tuple], Any], fn: Callable, args: Sequence) -> Any:
        """`run(fn, args)`, watched from when the arguments are there until the results are, whenever the graph runs
        it.
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
            # A look that comes late finds a process that was stopped itself; that tells nothing about the others.
            waited = waited + min(now - looked, 2 * self._pause) if counts == before and counts[0] > counts[1] else 0.0
            before, looked = counts, now
        self._on_timeout()


def _tensors(nest: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if tf.is_tensor(leaf)]
