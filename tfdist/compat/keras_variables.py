"""Internals of Keras' variables: values without autocast, parts that are replaced, names that are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope


def stored_value(variable: keras.Variable) -> tf.Variable | None:
    """The TensorFlow variable that holds the value; None after `empty`. Relies on `Variable._value`."""
    return variable._value


def value_here(variable: keras.Variable) -> np.ndarray:
    """The value on the first replica of this process, without asking other replicas for theirs, which may differ.
    Relies on `Variable._value` and on `DistributedVariable.values`; without them a trial of a model waits for other
    workers."""
    stored: Any = variable._value
    return getattr(stored, "values", (stored,))[0].numpy()


def empty(variable: keras.Variable, refuse: Callable[..., Any]) -> None:
    """Frees the variable's memory. Code that uses the variable afterwards, outside a scope that gives it a value, gets
    the error that `refuse` raises. Relies on `Variable._value` and on `_initializer`, which Keras calls where there is
    no value; without them ZeRO-3 holds whole variables.
    """
    variable._value, variable._initializer = None, refuse


def replace_value(variable: keras.Variable, value: tf.Variable) -> None:
    """Replaces the value of the Keras variable by `value`, which has another shape. Relies on `Variable._shape` and
    `_initialize`; without them no layer can be cut."""
    variable._shape = tuple(value.shape)
    variable._initialize(value)


def like(whole: keras.Variable, value: Any) -> keras.Variable:
    """Returns a Keras variable with another value, but with the type, name, path and autocast of `whole`. Relies on
    `Variable._autocast` and `_path`; without the path slots get other names, and snapshots do not fit.
    """
    variable = keras.Variable(value, dtype=whole.dtype, name=whole.name, autocast=whole._autocast)
    variable._path = whole.path
    return variable


def autocast(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """The value in the type in which the variable would be read here. Relies on `Variable._maybe_autocast`; without it
    ZeRO-3 sends float32 where the layer computes in half the bytes.
    """
    return variable._maybe_autocast(value)


def value_without_autocast(variable: keras.Variable) -> Any:
    """The value in the type in which it is stored. Relies on keras.src's `AutocastScope`; there is no public way."""
    with AutocastScope(None):
        return variable.value


def has_value_in_scope(variable: keras.Variable) -> bool:
    """Whether a stateless scope around gives the variable a value. Relies on keras.src's `get_stateless_scope`; without
    it a layer inside another one under ZeRO-3 would gather its variables again."""
    scope = get_stateless_scope()
    return scope is not None and scope.get_current_value(variable) is not None


def autocast_dtype() -> str | None:
    """The compute type in force in the current layer call. Relies on keras.src's `get_autocast_scope`."""
    scope = get_autocast_scope()
    return scope.dtype if scope else None


@contextlib.contextmanager
def autocast_to(dtype: str | None) -> Iterator[None]:
    """Context manager in which variables are read in this compute type; None: in their own. (In an AutocastScope(None)
    a variable of any type would report float32, and would be computed with, and kept, as float32.)

    Relies on keras.src's `AutocastScope` and the global attribute "autocast_scope"; without them a second forward pass
    computes in another type than the first.
    """
    with AutocastScope(dtype):
        if dtype is None:
            global_state.set_global_attribute("autocast_scope", None)
        yield
