"""What the callbacks of a fit have come to, for its backup."""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import io
import os
import random
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_fit import backup_file

Path = tuple[Any, ...]  # name of the callback, of its attribute, then keys and places in containers
_VARIABLES = (keras.Variable, tf.Variable)
# Of Keras and TensorFlow, what changes while it trains and is not the model's.
_DATA = (*_VARIABLES, tf.Tensor, keras.metrics.Metric)
# What is not missed where it begins anew: kinds, and where the classes of others come from.
_NO_DATA = (
    *(type(None), bool, str, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(keras.Layer, keras.Optimizer, keras.Loss, keras.callbacks.Callback, tf.Module, io.IOBase, os.PathLike),
)
_NO_DATA_OF = (
    *("keras", "tensorflow", "tfdist", "absl", "io", "csv", "logging", "tempfile", "socket", "subprocess", "queue"),
    *("threading", "thread", "multiprocessing", "concurrent", "contextlib", "functools", "weakref", "re"),
)
_OBJECTS = (list, dict, set, collections.deque, np.ndarray)  # that several may hold, and each may change
# append_header: whether a CSV file has its header yet.
_NOT_STATE = ("model", "_model", "params", "_params", "validation_data", "append_header")
_LISTS = (list, set, collections.deque)


class _Kind(NamedTuple):
    """told: an attribute -> a plain value. again: (the attribute of a new callback, that value) -> the attribute; of
    values of the type `plain`, others are the attribute themselves."""

    told: Callable[[Any], Any]
    again: Callable[[Any, Any], Any]
    plain: type | tuple[type, ...] = object


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


def _plain(kind: type) -> Callable[[Any], Any]:
    """A class of the user's own, and a function that makes what is missing, are those of the new callback."""
    return lambda held: held if backup_file.is_storable(held) else kind(held)


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
    dict: _Kind(_plain(dict), _set(lambda held, value: (held.clear(), held.update(value))), dict),
    list: _Kind(list, _set(lambda held, value: held.__setitem__(slice(None), value)), list),
    collections.deque: _Kind(_plain(list), _set(lambda held, value: (held.clear(), held.extend(value))), _LISTS),
    set: _Kind(_plain(list), _set(lambda held, value: (held.clear(), held.update(value))), _LISTS),
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
    in_slots = {name: getattr(callback, name) for name in _slots(callback) if hasattr(callback, name)}
    return {
        name: value
        for name, value in (callback.__dict__ | in_slots).items()
        if name not in _NOT_STATE and not (is_tensorboard and name.startswith("_"))
    }


def _slots(callback: keras.callbacks.Callback) -> list[str]:
    kinds = type(callback).__mro__
    return [name for kind in kinds for name, member in vars(kind).items() if inspect.ismemberdescriptor(member)]


def _is_data(value: Any) -> bool:
    """What a fit that goes on may miss: not functions, layers, open files and the like, nor containers of them."""
    if isinstance(value, backup_file.CONTAINERS):
        try:
            return not value or any(map(_is_data, value.values() if isinstance(value, dict) else value))
        except RecursionError:  # a list in itself
            return True
    comes_from = type(value).__module__.partition(".")[0].lstrip("_")
    return isinstance(value, _DATA) or not (isinstance(value, _NO_DATA) or comes_from in _NO_DATA_OF)


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


def shared_in(callbacks: Sequence[keras.callbacks.Callback]) -> list[list[Path]]:
    """Of each container or array that several attributes, or containers in them, hold: where it is held."""
    places = [list(filter(backup_file.is_storable, paths)) for _, paths in _objects_in(callbacks)]
    return [paths for paths in places if len(paths) > 1]


def restore(
    callbacks: Sequence[keras.callbacks.Callback], states: dict[str, dict[str, Any]], shared: Sequence[Sequence[Path]]
) -> None:
    """Gives back what `state_of` told. What was one object is one again, and what was not is not.

    states: of the callbacks by `names_of`. shared: by `shared_in`.
    """
    restored = _Restored(callbacks, states, shared)
    for callback, name in zip(callbacks, names_of(callbacks), strict=True):
        held = _attributes(callback)
        for attribute, value in states.get(name, {}).items():
            again = restored.value((name, attribute), value, held.get(attribute))
            if attribute in _slots(callback):
                setattr(callback, attribute, again)
            else:
                callback.__dict__[attribute] = again


def _objects_in(callbacks: Sequence[keras.callbacks.Callback]) -> list[tuple[Any, list[Path]]]:
    """Containers and arrays, each with all places where it is held."""
    found: dict[int, tuple[Any, list[Path]]] = {}

    def look(held: Any, path: Path) -> None:
        if isinstance(held, _OBJECTS):
            is_known = id(held) in found
            found.setdefault(id(held), (held, []))[1].append(path)
            if is_known:
                return
        if isinstance(held, dict):
            for key, item in held.items():
                look(item, (*path, key))
        elif isinstance(held, (list, tuple, collections.deque)):
            for place, item in enumerate(held):
                look(item, (*path, place))

    for callback, name in zip(callbacks, names_of(callbacks), strict=True):
        for attribute, held in _attributes(callback).items():
            with contextlib.suppress(RecursionError):  # of such depth that no backup holds it
                look(held, (name, attribute))
    return list(found.values())


class _Restored:
    """What a backup holds, as objects of this process: those that are there stay, as others may hold them, too, where
    the same attributes share them."""

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        states: dict[str, dict[str, Any]],
        shared: Sequence[Sequence[Path]],
    ) -> None:
        self._states, self._shared = states, shared
        self._groups = {path: number for number, paths in enumerate(shared) for path in paths}
        # Looked up before anything is changed. Of callbacks that the backup does not know, nothing is asked.
        self._held = {
            path: (held, [place for place in paths if place[0] in states])
            for held, paths in _objects_in(callbacks)
            for path in paths
        }
        self._made: dict[Any, Any] = {}  # number of a group, or path -> object

    def value(self, path: Path, value: Any, held: Any = None) -> Any:
        """held: what stands at `path` in this process, where it is no container."""
        if not isinstance(value, _OBJECTS) or (held is not None and path not in self._held):
            return _of_kind(held, self._with_parts(path, value))
        key = self._key(path)
        if key not in self._made:
            again = self._with_parts(path, value)
            held, places = self._held.get(self._unchanged(key) or path, (None, []))
            stays = all(self._key(place) == key for place in places)
            self._made[key] = _of_kind(held if stays else copy.copy(held), again)
        return self._made[key]

    def _unchanged(self, key: Any) -> Path | None:
        """Where the object stands in an attribute that is as it was at first, and therefore not in the backup."""
        for path in self._shared[key] if isinstance(key, int) else ():
            if path in self._held and path[0] in self._states and path[1] not in self._states[path[0]]:
                return path
        return None

    def _key(self, path: Path) -> Any:
        return self._groups.get(path, path)

    def _with_parts(self, path: Path, value: Any) -> Any:
        if isinstance(value, dict):
            again = copy.copy(value)
            for key, item in value.items():
                again[key] = self.value((*path, key), item)
            return again
        if isinstance(value, (list, tuple, collections.deque)):
            parts = [self.value((*path, place), item) for place, item in enumerate(value)]
            return (
                collections.deque(parts, value.maxlen) if isinstance(value, collections.deque) else type(value)(parts)
            )
        return value


def _of_kind(held: Any, value: Any) -> Any:
    kind = _kind_of(held)
    return kind.again(held, value) if kind is not None and isinstance(value, kind.plain) else value
