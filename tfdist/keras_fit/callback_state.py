"""What the callbacks of a fit have come to, for its backup."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_fit import backup_file

_VARIABLES = (keras.Variable, tf.Variable)
# append_header: whether a CSV file has its header yet.
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_DATA = (np.ndarray, np.generic, tf.Tensor, tf.Variable, keras.Variable, keras.metrics.Metric)
_NOT_STATE = ("model", "_model", "params", "_params", "validation_data", "append_header")


class _Kind(NamedTuple):
    """told: an attribute -> a plain value. again: (the attribute of a new callback, that value) -> the attribute."""

    told: Callable[[Any], Any]
    again: Callable[[Any, Any], Any]


def _set(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The attribute stays the object that it is."""

    def again(held: Any, value: Any) -> Any:
        change(held, value)
        return held

    return again


def _array(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _of_state() -> _Kind:
    """Of a generator whose state is a variable."""
    return _Kind(lambda held: _array(held.state), _set(lambda held, value: held.state.assign(value)))


_KINDS: dict[type | tuple[type, ...], _Kind] = {
    _VARIABLES: _Kind(_array, _set(lambda held, value: held.assign(value))),
    keras.random.SeedGenerator: _of_state(),
    tf.random.Generator: _of_state(),
    # A subclass of the user's own, and a function that makes what is missing, are those of the new callback.
    dict: _Kind(lambda held: held, _set(lambda held, value: (held.clear(), held.update(value)))),
    collections.deque: _Kind(list, lambda held, value: collections.deque(value, held.maxlen)),
    set: _Kind(list, lambda _, value: set(value)),
    tuple: _Kind(lambda held: held, lambda held, value: type(held)(*value) if hasattr(held, "_fields") else value),
    random.Random: _Kind(lambda held: held.getstate(), _set(lambda held, value: held.setstate(value))),
    np.random.RandomState: _Kind(
        lambda held: held.get_state(legacy=False), _set(lambda held, value: held.set_state(value))
    ),
    np.random.Generator: _Kind(
        lambda held: held.bit_generator.state, _set(lambda held, value: setattr(held.bit_generator, "state", value))
    ),
}


def _kind_of(value: Any) -> _Kind | None:
    return next((kind for types, kind in _KINDS.items() if isinstance(value, types)), None)


def state_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """The attributes that are plain values, containers of them, variables or generators of random numbers: counters,
    best values, lists of arrays, a rate that changes.

    Of TensorBoard no private ones: they say what this process has open.
    """
    plain = _plain(callback)
    return {name: value for name, value in plain.items() if backup_file.is_storable(value)}


def not_held(callback: keras.callbacks.Callback) -> list[str]:
    """The names of attributes with data that `state_of` leaves out; a callback of Keras' own has none."""
    if type(callback).__module__.startswith("keras."):
        return []
    return [name for name, value in _plain(callback).items() if not backup_file.is_storable(value) and _is_data(value)]


def _plain(callback: keras.callbacks.Callback) -> dict[str, Any]:
    found = {}
    for name, value in callback.__dict__.items():
        if name in _NOT_STATE or name.startswith("_") and isinstance(callback, keras.callbacks.TensorBoard):
            continue
        kind = _kind_of(value)
        found[name] = value if kind is None else kind.told(value)
    return found


def _is_data(value: Any) -> bool:
    """Arrays, and containers of them and of what can be stored: not of layers, functions or open files."""
    if isinstance(value, _CONTAINERS):
        return all(map(_is_data, [*value, *value.values()] if isinstance(value, dict) else value))
    return isinstance(value, _DATA) or backup_file.is_storable(value)


def changed(state: dict[str, Any], first: dict[str, tuple]) -> dict[str, Any]:
    """What is no setting: a program that is started again with another patience shall have it.

    first: of the state at the start, by `backup_file.parts_of`.
    """
    return {name: value for name, value in state.items() if backup_file.parts_of(value) != first.get(name)}


def restore(callback: keras.callbacks.Callback, state: dict[str, Any]) -> None:
    for name, value in state.items():
        held = callback.__dict__.get(name)
        kind = _kind_of(held)
        callback.__dict__[name] = value if kind is None else kind.again(held, value)
