"""Records the order in which a worker launches its collectives.

NCCL hangs where two devices launch what they share in different orders. TensorFlow keeps to the traced order among
operations that use the same variable, their ordering token: all collectives of a device share one, over all groups.
That suits everybody if one order of all collectives exists that contains the order of each rank: what is recorded here
is compared by tests/gpu/launch_order.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

_recordings: list[list[Launch]] = []
_token: tf.Variable | None = None


class Launch(NamedTuple):
    """A collective as it was traced. Its members give it the same group and number."""

    group: int
    number: int
    ranks: tuple[int, ...]
    kind: str


def note(launch: Launch) -> None:
    """Records that a collective is traced."""
    for recording in _recordings:
        recording.append(launch)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Gives a list of all collectives that are traced within it, in order."""
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
