"""Gives variables the chief's values on every worker. Values are sent together, since each message waits for all
workers, and only where they differ, since most programs make the same values everywhere.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import google_crc32c
import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.host import host_view

_BYTES_AT_ONCE = 2**24  # data on the way is held several times over


class _Workers(Protocol):
    """The part of a Runtime that this module needs."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_gather(self, array: np.ndarray) -> np.ndarray: ...
    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]: ...


@contextlib.contextmanager
def chiefs_first_values(
    workers: _Workers, create: Callable[..., tf.Variable] = lambda make, **arguments: make(**arguments)
) -> Iterator[None]:
    """Context manager: variables created inside have the chief's values afterwards; until then, each worker's own.

    All workers must create the same variables inside, in the same order. Raises ConfigError if they do not.

    Args:
      create: creates one variable, like a creator for tf.variable_creator_scope.
    """
    made: list[tf.Variable] = []

    def creator(make: Callable[..., tf.Variable], **arguments: object) -> tf.Variable:
        made.append(create(make, **arguments))
        return made[-1]

    with tf.variable_creator_scope(creator):
        yield
    if workers.size > 1:
        with tf.init_scope():
            take_the_chiefs(workers, made)


def take_the_chiefs(workers: _Workers, variables: Sequence[tf.Variable]) -> list[int]:
    """Gives every worker the chief's values, bit for bit; all workers must call it. Variables with two equal checksums
    count as equal. Returns the places of the variables that differed.

    Raises ConfigError if the workers' shapes differ, or if those differ that cannot be sent: strings, and variables
    without a fixed shape.
    """
    must_be_alike(workers, variables)
    found = workers.all_gather(np.array([_checksums(variable) for variable in variables], np.int64).reshape(-1, 2))
    are_alike = (found == found[0]).all(axis=(0, 2))
    waiting = [variable for variable, is_alike in zip(variables, are_alike, strict=True) if not is_alike]
    for variable in waiting:
        if variable.dtype == tf.string or not variable.shape.is_fully_defined():
            what = "strings" if variable.dtype == tf.string else "values of no fixed shape"
            raise ConfigError(
                f"The workers start with different {what} in {variable.name}: create the same on all of them, not from"
                " host names, times or random numbers, for example."
            )
    while waiting:
        some, size = [], 0
        while waiting and size < _BYTES_AT_ONCE:
            some.append(waiting.pop(0))
            size += some[-1].shape.num_elements() * some[-1].dtype.size
        received = workers.broadcast([host_view(variable) for variable in some])
        if workers.rank:
            for variable, value in zip(some, received, strict=True):
                variable.assign(value)
    return np.flatnonzero(~are_alike).tolist()


def _checksums(variable: tf.Variable) -> tuple[int, int]:
    """Two checksums of a variable: a single one would miss one difference in four billion."""
    array = np.ascontiguousarray(host_view(variable))
    if variable.dtype == tf.string or not variable.shape.is_fully_defined():
        array = np.frombuffer(repr((array.shape, array.reshape(-1).tolist())).encode(), np.uint8)
    content = array.reshape(-1).view(np.uint8)
    return google_crc32c.extend(0, content), zlib.crc32(content.data)


def must_be_alike(workers: _Workers, variables: Sequence[Any]) -> None:
    """Raises ConfigError unless all workers have variables of the same shapes and dtypes, in the same order: only bytes
    travel between them.
    """
    shapes = [(str(variable.shape), tf.as_dtype(variable.dtype).name) for variable in variables]
    counts = workers.all_gather(np.array([len(shapes), zlib.crc32(repr(shapes).encode())], np.int64))
    if (counts != counts[0]).any():
        raise ConfigError(
            f"The model and optimizer have {' and '.join(str(count) for count in counts[:, 0])} variables on the"
            " workers, of shapes that differ: build the same model on all of them."
        )
