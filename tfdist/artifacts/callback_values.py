"""Decides which attributes of callbacks are state, by the kind of the value."""

from __future__ import annotations

import collections
import enum
import io
import os
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts import backup_file
from tfdist.compat.code_origin import package_of

_VARIABLES = (keras.Variable, tf.Variable)
# Types of Keras and TensorFlow that change during training and are not part of the model.
_DATA = (*_VARIABLES, tf.Tensor, tf.data.Iterator, keras.metrics.Metric)
# Not missed if they start over: types without those derived from them, types with those, and the packages of others.
_PLAIN = {type(None), bool, str}
_NO_DATA = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(keras.Layer, keras.Optimizer, keras.Loss, keras.callbacks.Callback, tf.Module, io.IOBase, os.PathLike),
)
_NO_DATA_OF = (
    *("keras", "tensorflow", "tfdist", "absl", "io", "csv", "logging", "tempfile", "socket", "subprocess", "queue"),
    *("threading", "thread", "multiprocessing", "concurrent", "contextlib", "functools", "weakref", "re"),
)
OBJECTS = (list, dict, set, collections.deque, np.ndarray)  # several may share one, and each may change it
_LISTS = (list, set, collections.deque)
_NUMBERS_AND_TEXTS = (int, float, str, bytes)  # as the members of IntEnum and StrEnum


class _Kind(NamedTuple):
    """to_plain: an attribute -> a plain value. from_plain: (the attribute of a new callback, a plain value) -> the
    restored attribute. plain: the type of values for `from_plain`; a value of any other type becomes the attribute
    itself.
    """

    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any, Any], Any]
    plain: type | tuple[type, ...] = object


def _set(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Changes the attribute in place: it stays the same object."""

    def from_plain(held: Any, value: Any) -> Any:
        change(held, value)
        return held

    return from_plain


def _array(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _of_state() -> _Kind:
    """The kind of a generator whose state is a variable."""
    return _Kind(lambda held: _array(held.state), _set(lambda held, value: held.state.assign(value)))


def _plain(kind: type) -> Callable[[Any], Any]:
    """Returns a function that keeps a value that a backup can store, and makes a `kind` of any other. So when a
    callback is restored, a user's own class and a default factory come from the new callback."""
    return lambda held: held if backup_file.is_storable(held) else kind(held)


def _value_of(held: enum.Enum) -> Any:
    """The value of a member that equals it. Others stay members, which no backup holds: where the new attribute is None
    at first, nothing would tell of which class they were."""
    return held.value if isinstance(held.value, _NUMBERS_AND_TEXTS) and held == held.value else held


def _member(held: enum.Enum, value: Any) -> Any:
    try:
        member: Any = type(held)(value)  # not one of `list(type(held))`, where those that combine flags are missing
    except (TypeError, ValueError):
        return value
    return member if member == value else value


def _array_from_plain(held: np.ndarray, value: Any) -> Any:
    fits = held.shape == value.shape and held.dtype == value.dtype
    if not fits or not held.flags.writeable:
        return value
    held[...] = value
    return held


_KINDS: dict[type | tuple[type, ...], _Kind] = {
    enum.Enum: _Kind(_value_of, _member, _NUMBERS_AND_TEXTS),
    _VARIABLES: _Kind(_array, _set(lambda held, value: held.assign(value)), np.ndarray),
    keras.random.SeedGenerator: _of_state(),
    tf.random.Generator: _of_state(),
    # These stay the same objects, of whatever class: others may hold them, too.
    dict: _Kind(_plain(dict), _set(lambda held, value: (held.clear(), held.update(value))), dict),
    list: _Kind(list, _set(lambda held, value: held.__setitem__(slice(None), value)), list),
    collections.deque: _Kind(_plain(list), _set(lambda held, value: (held.clear(), held.extend(value))), _LISTS),
    set: _Kind(_plain(list), _set(lambda held, value: (held.clear(), held.update(value))), _LISTS),
    np.ndarray: _Kind(lambda held: held, _array_from_plain, np.ndarray),
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


def to_plain(value: Any) -> Any:
    """The value in the form in which a backup holds it, if it is `backup_file.is_storable` in this form."""
    kind = _kind_of(value)
    return value if kind is None else kind.to_plain(value)


def from_plain(held: Any, value: Any) -> Any:
    """The value that replaces `held` after a restart, if a backup holds `value`."""
    kind = _kind_of(held)
    return kind.from_plain(held, value) if kind is not None and isinstance(value, kind.plain) else value


def is_data(value: Any) -> bool:
    """Whether a resumed fit would miss the value: not functions, layers, open files and the like, nor containers of
    them."""
    if isinstance(value, backup_file.CONTAINERS):
        parts = list(value.values() if isinstance(value, dict) else value)
        try:
            if not parts or any(map(is_data, parts)):
                return True
            # Held by no backup for another reason than its parts, for example members of an enum as keys.
            return {type(part) for part in parts} <= _PLAIN and not backup_file.is_storable(value)
        except RecursionError:  # a list that contains itself
            return True
    comes_from = package_of(type(value).__module__).lstrip("_")
    no_data = type(value) in _PLAIN or isinstance(value, _NO_DATA) or comes_from in _NO_DATA_OF
    return isinstance(value, _DATA) or not no_data
