"""Lookups of rows that a table does not have, where TensorFlow does not say that they are none.

On a CPU TensorFlow's lookup is an error. XLA takes the first or last row in their place, a GPU zeros, without a word.
Here they are NaN, and so are the loss and the gradients: the step is one that --on_nan is about, and run/diagnosis.py
names the sample. It does not matter what looks them up (a layer of Keras, tf.gather, tf.gather_nd), nor whether
something is to be put there (tf.scatter_nd, sums over segments). As in Keras, -1 is the last row of an Embedding.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers, tensorflow_lookups
from tfdist.compat.keras_tensors import carry_mask, mask_of

_thread = threading.local()  # replicas are traced by threads, each of which waits for others in the middle of a model
_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128)


def are_silent(jit_compile: bool = False) -> bool:
    """Whether such lookups would not be errors."""
    return jit_compile or bool(tf.config.list_logical_devices("GPU"))


class _Lookups:
    """The lookups of a part of a program, while it is traced or run."""

    def __init__(self) -> None:
        self._graph = _graph()
        self._missing: list[tf.Tensor] = []  # of each lookup in this graph whether some of its rows are

    def checked(self, looks_up: bool, found: tf.Tensor, there: tf.Tensor) -> tf.Tensor:
        """The result `found`, with NaN where the mask `there` is false. Whole numbers become the first of their dtype,
        which in turn is no row of a table."""
        if getattr(found, "graph", None) is self._graph:
            self._missing.append(~tf.reduce_all(there))
            if not looks_up:  # `poisoned` does: another pass over the whole table where something was to be put
                return found
        if found.dtype in _FLOATS:
            return _where(there, found, float("nan"))
        return _where(there, found, found.dtype.min) if found.dtype in (tf.int32, tf.int64) else found

    def poisoned_in(self, results: Any) -> Any:
        """The results, spoilt where a lookup of this graph missed a row, see `poisoned`."""
        if not self._missing:
            return results
        missing = tf.reduce_any(self._missing)
        return keras.tree.map_structure(lambda result: _spoilt(result, missing), results)


def _graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def as_nan(wanted: bool) -> Iterator[None]:
    """A context in which a model that is traced or run looks up NaN for rows that are not there, if `wanted`."""
    if not wanted:
        yield
        return
    tensorflow_lookups.watch(_checked, _is_watching)
    with _watched_by(_Lookups()):
        yield


def poisoned(results: Any) -> Any:
    """A structure of what a model computed inside `as_nan`; NaN if a row was missing in any lookup so far. What comes
    of that row need not be NaN: XLA's maximum over numbers passes NaN over, and whole numbers have none. (Not if it was
    in a tf.cond, tf.while_loop or tf.function of the model's, whose tensors do not come out.)"""
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


def _spoilt(result: Any, missing: tf.Tensor) -> Any:
    """NaN if `missing`, and so is its gradient; else the same bits."""
    if not isinstance(result, tf.Tensor) or result.dtype not in _FLOATS:
        return result
    if result.dtype.is_complex:
        spoilt = _where(tf.logical_not(missing), result, float("nan"))
    else:
        spoilt = result * tf.where(missing, tf.constant(float("nan"), result.dtype), tf.constant(1.0, result.dtype))
    if (mask := mask_of(result)) is not None:
        carry_mask(spoilt, mask)
    return spoilt


def _where(there: tf.Tensor, found: tf.Tensor, other: float) -> tf.Tensor:
    constant: Any = complex(other, other) if found.dtype.is_complex else other
    chosen = tf.where(there, found, tf.constant(constant, found.dtype))
    chosen.set_shape(found.shape)
    return chosen


def from_the_front(rows: tf.Tensor, count: int) -> tf.Tensor:
    """Numbers of rows as they count from the first row of a table."""
    return tf.where(rows < 0, rows + count, rows)


def nan_for_missing(found: tf.Tensor, rows: tf.Tensor, count: int) -> tf.Tensor:
    """found [..., D], the `rows` [...] of a table of `count`, as they come out of it; NaN for those that are not there,
    always."""
    rows = tf.cast(rows, tf.int64)  # a uint8 holds no 300
    return _where(tf.expand_dims((rows >= -count) & (rows < count), -1), found, float("nan"))


def table_sizes(model: keras.Model) -> dict[str, int]:
    """The number of rows of the table in which an input is looked up, by the place of the input in a sample (x, x[0],
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
