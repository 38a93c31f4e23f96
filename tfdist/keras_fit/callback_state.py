"""What the callbacks of a fit have come to, for its backup."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_fit import backup_file

_VARIABLES = (keras.Variable, tf.Variable)
_DATA = (bytearray, np.ndarray, np.generic, tf.Tensor, tf.Variable, keras.Variable, keras.metrics.Metric)
# append_header: whether a CSV file has its header yet.
_NOT_STATE = ("model", "_model", "params", "_params", "validation_data", "append_header")


class _Kind(NamedTuple):
    """told: an attribute -> a plain value. again: (the attribute of a new callback, that value) -> the attribute; of
    values of the type `plain`, others are the attribute themselves."""

    told: Callable[[Any], Any]
    again: Callable[[Any, Any], Any]
    plain: type = object


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


def _plain_dict(held: dict[Any, Any]) -> Any:
    """A class of the user's own, and a function that makes what is missing, are those of the new callback."""
    return held if backup_file.is_storable(held) else dict(held)


def _array_again(held: np.ndarray, value: Any) -> Any:
    fits = held.shape == value.shape and held.dtype == value.dtype
    if not fits or not held.flags.writeable:
        return value
    held[...] = value
    return held


_KINDS: dict[type | tuple[type, ...], _Kind] = {
    _VARIABLES: _Kind(_array, _set(lambda held, value: held.assign(value)), np.ndarray),
    keras.random.SeedGenerator: _of_state(),
    tf.random.Generator: _of_state(),
    # They stay the objects that they are, of whatever class: others may hold them, too.
    dict: _Kind(_plain_dict, _set(lambda held, value: (held.clear(), held.update(value))), dict),
    list: _Kind(list, _set(lambda held, value: held.__setitem__(slice(None), value)), list),
    collections.deque: _Kind(list, _set(lambda held, value: (held.clear(), held.extend(value))), list),
    set: _Kind(list, _set(lambda held, value: (held.clear(), held.update(value))), list),
    np.ndarray: _Kind(lambda held: held, _array_again, np.ndarray),
    tuple: _Kind(tuple, lambda held, value: type(held)(*value) if hasattr(held, "_fields") else value, tuple),
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
    found = {}
    for name, value in _attributes(callback).items():
        kind = _kind_of(value)
        plain = value if kind is None else kind.told(value)
        if backup_file.is_storable(plain):
            found[name] = plain
    return found


def not_held(callback: keras.callbacks.Callback, state: dict[str, Any]) -> list[str]:
    """The names of attributes with data that its `state_of` leaves out; a callback of Keras' own has none."""
    if type(callback).__module__.startswith("keras."):
        return []
    return [name for name, value in _attributes(callback).items() if name not in state and _is_data(value)]


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    is_tensorboard = isinstance(callback, keras.callbacks.TensorBoard)
    return {
        name: value
        for name, value in callback.__dict__.items()
        if name not in _NOT_STATE and not (is_tensorboard and name.startswith("_"))
    }


def _is_data(value: Any) -> bool:
    """Arrays, and containers of them and of what can be stored: not of layers, functions or open files."""
    if isinstance(value, backup_file.CONTAINERS):
        try:
            return all(map(_is_data, [*value, *value.values()] if isinstance(value, dict) else value))
        except RecursionError:  # a list in itself
            return True
    return isinstance(value, _DATA) or backup_file.is_storable(value)


def changed(state: dict[str, Any], first: dict[str, tuple]) -> dict[str, Any]:
    """What is no setting: a program that is started again with another patience shall have it.

    first: of the state at the start, by `backup_file.parts_of`.
    """
    return {name: value for name, value in state.items() if backup_file.parts_of(value) != first.get(name)}


def names_of(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """Their classes, numbered: by these a program that is started again with more of them, or in another order, finds
    the state of each."""
    kinds = [type(callback).__qualname__ for callback in callbacks]
    return [f"{kind} {kinds[:place].count(kind)}" for place, kind in enumerate(kinds)]


def restore(callback: keras.callbacks.Callback, state: dict[str, Any]) -> None:
    for name, value in state.items():
        held = callback.__dict__.get(name)
        kind = _kind_of(held)
        if kind is not None and isinstance(value, kind.plain):
            value = kind.again(held, value)
        callback.__dict__[name] = value
