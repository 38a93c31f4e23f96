"""Functions of the user's own inside a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def functions_inline() -> Iterator[None]:
    """A context in which a tf.function that is called becomes part of the graph that is traced, and keeps nothing of
    it; for the whole process, so not while other threads train.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
