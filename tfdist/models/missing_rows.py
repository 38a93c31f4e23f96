"""Lookups of rows that a table does not have, where TensorFlow does not say that they are none.

On a CPU TensorFlow's lookup is an error. XLA takes the first or last row in their place, a GPU zeros, without a word.
Here they are NaN, and so are the loss and the gradients: the step is one that --on_nan is about, and run/diagnosis.py
names the sample. As in Keras, -1 is the last row of a table.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers

_thread = threading.local()  # replicas are traced by threads, each of which waits for others in the middle of a model


def are_silent(jit_compile: bool = False) -> bool:
    """Whether such lookups would not be errors."""
    return jit_compile or bool(tf.config.list_logical_devices("GPU"))


@contextlib.contextmanager
def as_nan(wanted: bool) -> Iterator[None]:
    """While a model is traced inside, its Embedding layers look up NaN for rows that are not there, if `wanted`."""
    if not wanted:
        yield
        return
    _watch_embeddings()
    before, _thread.wanted = _is_wanted(), True
    try:
        yield
    finally:
        _thread.wanted = before


def _is_wanted() -> bool:
    return getattr(_thread, "wanted", False)


def told(found: tf.Tensor, rows: tf.Tensor, count: int) -> tf.Tensor:
    """found [..., D], the `rows` [...] of a table of `count`; NaN for those that are not there, inside `as_nan`."""
    return nan_for_missing(found, rows, count) if _is_wanted() else found


def from_the_front(rows: tf.Tensor, count: int) -> tf.Tensor:
    """Numbers of rows as they count from the first row of a table."""
    return tf.where(rows < 0, rows + count, rows)


def nan_for_missing(found: tf.Tensor, rows: tf.Tensor, count: int) -> tf.Tensor:
    """The same, always."""
    rows = tf.cast(rows, tf.int64)  # a uint8 holds no 300
    there = tf.expand_dims((rows >= -count) & (rows < count), -1)
    return tf.where(there, found, tf.constant(float("nan"), found.dtype))


def table_sizes(model: keras.Model) -> dict[str, int]:
    """How many rows the table has in which an input is looked up, by the place of the input in a sample (x, x[0],
    x['name']); of inputs that go to an Embedding as they are."""
    found: dict[str, int] = {}
    inputs = list(getattr(model, "inputs", None) or [])
    for layer in keras_layers.all_layers(model, include_self=False):
        if not isinstance(layer, keras.layers.Embedding):
            continue
        count = int(layer.input_dim)
        for place, each in enumerate(inputs):
            if any(each is taken for taken in keras_layers.inputs_of(layer)):
                for name in (*(["x"] if len(inputs) == 1 else []), f"x[{place}]", f"x[{each.name!r}]"):
                    found[name] = min(count, found.get(name, count))
    return found


@functools.cache
def _watch_embeddings() -> None:
    """From now on what Keras' Embedding looks up goes through `told`."""
    embedding: Any = keras.layers.Embedding
    of_keras: Callable = embedding.call

    @functools.wraps(of_keras)
    def call(layer: keras.layers.Embedding, inputs: Any, *args: Any, **options: Any) -> Any:
        found = of_keras(layer, inputs, *args, **options)
        if not isinstance(inputs, tf.Tensor) or not isinstance(found, tf.Tensor):  # sparse ones
            return found
        return told(found, inputs, int(layer.input_dim))

    embedding.call = call
