"""Variables begin with the chief's values on every worker: sent together, since each message waits for all workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

_BYTES_AT_ONCE = 2**24  # what travels is held several times over


@contextlib.contextmanager
def chiefs_first_values(
    broadcast: Callable[[list[np.ndarray]], list[np.ndarray]],
    create: Callable[..., tf.Variable] = lambda make, **arguments: make(**arguments),
) -> Iterator[None]:
    """Variables that are made inside have the chief's values afterwards; until then, each worker's own.

    All workers must make the same variables inside, in the same order.

    Args:
      broadcast: the arrays of the chief for those of this worker (Runtime.broadcast).
      create: how one is made, like a creator for tf.variable_creator_scope.
    """
    made: list[tf.Variable] = []

    def creator(make: Callable[..., tf.Variable], **arguments: object) -> tf.Variable:
        made.append(create(make, **arguments))
        return made[-1]

    with tf.variable_creator_scope(creator):
        yield
    with tf.init_scope():
        while made:
            some, size = [], 0
            while made and size < _BYTES_AT_ONCE:
                some.append(made.pop(0))
                size += some[-1].shape.num_elements() * some[-1].dtype.size
            for variable, value in zip(some, broadcast([variable.numpy() for variable in some]), strict=True):
                variable.assign(value)
