"""Detects lookups of rows that a table does not have, where TensorFlow does not report them.

On a CPU TensorFlow's lookup raises an error. XLA silently takes the first or last row instead, and a GPU zeros. Here
missing rows are NaN, and so are the loss and the gradients: --on_nan handles the step, and run/bad_samples.py names the
sample. This covers all lookups (a layer of Keras, tf.gather, tf.gather_nd) and operations that write to rows
(tf.scatter_nd, sums over segments). As in Keras, -1 is the last row of an Embedding.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers, tensorflow_lookups
from tfdist.compat.keras_tensors import taken_apart

_thread = threading.local()  # replicas are traced in threads, which wait for each other in the middle of a model
_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128)


def are_silent(jit_compile: bool = False) -> bool:
    """Returns whether lookups of missing rows raise no error here."""
    return jit_compile or bool(tf.config.list_logical_devices("GPU"))


class _Lookups:
    """The lookups of a part of a program, while it is traced or run."""

    def __init__(self) -> None:
        self._graph = _graph()
        self._missing: list[tf.Tensor] = []  # for each lookup in this graph, whether some of its rows are missing

    def checked(self, looks_up: bool, found: tf.Tensor, there: tf.Tensor) -> tf.Tensor:
        """Returns the result `found`, with NaN where the mask `there` is false. Integers become the smallest of their
        dtype, which is not a row of any table either."""
        if getattr(found, "graph", None) is self._graph:
            self._missing.append(~tf.reduce_all(there))
            if not looks_up:  # a write: `poisoned` is enough, as marking here would be another pass over the table
                return found
        if found.dtype in _FLOATS:
            return _where(there, found, float("nan"))
        return _where(there, found, found.dtype.min) if found.dtype in (tf.int32, tf.int64) else found

    def poisoned_in(self, results: Any) -> Any:
        """Returns the results, all NaN if a lookup of this graph missed a row; see `poisoned`."""
        if not self._missing:
            return results
        missing = tf.reduce_any(self._missing)
        tensors, put_together = taken_apart(results)
        return put_together([_spoilt(tensor, missing) for tensor in tensors])


def _graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def as_nan(wanted: bool) -> Iterator[None]:
    """Context manager in which a model that is traced or run gets NaN for missing rows, if `wanted`."""
    if not wanted:
        yield
        return
    tensorflow_lookups.watch(_checked, _is_watching)
    with _watched_by(_Lookups()):
        yield


def poisoned(results: Any) -> Any:
    """Returns a structure of results computed inside `as_nan`, all NaN if a row was missing in any lookup so far. This
    is necessary because results of a missing row need not be NaN: XLA's maximum ignores NaN, and integers have no NaN.
    (Lookups in a tf.cond, tf.while_loop or tf.function of the model are not covered: their tensors stay inside.)"""
    lookups = _watching()
    with _watched_by(None):
        return results if lookups is None else lookups.poisoned_in(results)


@contextlib.contextmanager
def _watched_by(lookups: _Lookups | None) -> Iterator[None]:
    before, _thread.lookups = _watching(), lookups
    try:
        yield
    finally:
        _thread.lookups = before


def _watching() -> _Lookups | None:
    return getattr(_thread, "lookups", None)


def _is_watching() -> bool:
    return _watching() is not None


def _checked(looks_up: bool, found: tf.Tensor, mask: Callable[[], tf.Tensor | None]) -> tf.Tensor:
    lookups = _watching()
    assert lookups is not None  # `watch` asks first
    with _watched_by(None):
        there = mask()
        return found if there is None else lookups.checked(looks_up, found, there)


def _spoilt(result: tf.Tensor, missing: tf.Tensor) -> tf.Tensor:
    """Returns NaN if `missing`, with a gradient that is NaN, too; otherwise the same bits."""
    if result.dtype not in _FLOATS:
        return result
    if result.dtype.is_complex:
        return _where(tf.logical_not(missing), result, float("nan"))
    return result * tf.where(missing, tf.constant(float("nan"), result.dtype), tf.constant(1.0, result.dtype))


def _where(there: tf.Tensor, found: tf.Tensor, other: float) -> tf.Tensor:
    constant: Any = complex(other, other) if found.dtype.is_complex else other
    chosen = tf.where(there, found, tf.constant(constant, found.dtype))
    chosen.set_shape(found.shape)
    return chosen


def from_the_front(rows: tf.Tensor, count: int) -> tf.Tensor:
    """Returns row numbers counted from the first row of a table."""
    return tf.where(rows < 0, rows + count, rows)


def nan_for_missing(found: tf.Tensor, rows: tf.Tensor, count: int) -> tf.Tensor:
    """Returns found [..., D], the result of looking up `rows` [...] in a table of `count` rows, with NaN for missing
    rows, even outside `as_nan`."""
    rows = tf.cast(rows, tf.int64)  # a uint8 cannot hold a count of 300
    return _where(tf.expand_dims((rows >= -count) & (rows < count), -1), found, float("nan"))


def table_sizes(model: keras.Model) -> dict[str, int]:
    """Returns, by the place of an input in a sample (x, x[0], x['name']), the number of rows of the table in which it
    is looked up; for inputs that go directly to an Embedding."""
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
