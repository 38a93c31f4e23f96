"""Records the order in which a worker launches its collectives.

NCCL hangs if two devices launch their common collectives in different orders. TensorFlow keeps the traced order among
operations that use the same variable, their ordering token: all collectives of a device share one token, over all
groups. This works if there is one order of all collectives that contains the order of each rank:
tests/gpu/launch_order.py compares the orders recorded here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

_recordings: list[list[Launch]] = []
_token: tf.Variable | None = None


class Launch(NamedTuple):
    """A collective as it was traced. All its members give it the same group and number."""

    group: int
    number: int
    ranks: tuple[int, ...]
    kind: str


def note(launch: Launch) -> None:
    """Records that a collective has been traced."""
    for recording in _recordings:
        recording.append(launch)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Context manager that returns a list of all collectives traced inside it, in order."""
    _recordings.append([])
    try:
        yield _recordings[-1]
    finally:
        _recordings.pop()


def ordering_token() -> tf.Variable:
    """The ordering token of this process's GPU."""
    global _token
    if _token is None:
        with tf.init_scope():
            _token = tf.Variable(tf.constant(0.0), trainable=False, name="tfdist_order")
    return _token
