"""Variables begin with the chief's values on every worker: sent together, since each message waits for all workers."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError

_BYTES_AT_ONCE = 2**24  # what travels is held several times over


class _Workers(Protocol):
    """What is asked of a Runtime."""

    size: int

    def all_gather(self, array: np.ndarray) -> np.ndarray: ...
    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]: ...


@contextlib.contextmanager
def chiefs_first_values(
    workers: _Workers, create: Callable[..., tf.Variable] = lambda make, **arguments: make(**arguments)
) -> Iterator[None]:
    """Variables that are made inside have the chief's values afterwards; until then, each worker's own.

    All workers must make the same variables inside, in the same order. Raises ConfigError if they do not.

    Args:
      create: how one is made, like a creator for tf.variable_creator_scope.
    """
    made: list[tf.Variable] = []

    def creator(make: Callable[..., tf.Variable], **arguments: object) -> tf.Variable:
        made.append(create(make, **arguments))
        return made[-1]

    with tf.variable_creator_scope(creator):
        yield
    if workers.size == 1:
        return
    with tf.init_scope():
        must_be_alike(workers, made)
        while made:
            some, size = [], 0
            while made and size < _BYTES_AT_ONCE:
                some.append(made.pop(0))
                size += some[-1].shape.num_elements() * some[-1].dtype.size
            for variable, value in zip(some, workers.broadcast([variable.numpy() for variable in some]), strict=True):
                variable.assign(value)


def must_be_alike(workers: _Workers, variables: Sequence[Any]) -> None:
    """Raises ConfigError unless all workers have variables of the same shapes and types, in the same order: what
    travels between them is bytes.
    """
    shapes = [(tuple(variable.shape), tf.as_dtype(variable.dtype).name) for variable in variables]
    counts = workers.all_gather(np.array([len(shapes), zlib.crc32(repr(shapes).encode())], np.int64))
    if (counts != counts[0]).any():
        raise ConfigError(
            f"The model and optimizer have {' and '.join(str(count) for count in counts[:, 0])} variables on the"
            " workers, of shapes that differ: build the same model on all of them."
        )
