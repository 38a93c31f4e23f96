"""The state of a fit's callbacks, for its backup."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Collection, Sequence
from typing import Any

import keras

from tfdist.artifacts import backup_file, callback_values
from tfdist.compat.code_origin import is_of_keras, package_of
from tfdist.compat.object_attributes import attributes_of, slots_of

Facts = dict[str, tuple[Any, ...]]  # name of an attribute -> facts that tell whether it has changed
Path = tuple[Any, ...]  # name of the callback, of its attribute, then keys and places in containers
KNOWN = "_tfdist_known"  # an attribute: what fits know of a callback (fit_state.py)
_OF_TENSORBOARD = ("_global_train_batch", "_global_test_batch")  # the steps of its points
# append_header: whether a CSV file already has its header.
_NOT_STATE = ("model", "_model", "params", "_params", "validation_data", "append_header", KNOWN)


def state_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """The attributes that are plain values, containers of them, variables or random generators: counters, best values,
    lists of arrays, a rate that changes.

    Private attributes of TensorBoard are left out but for its counts: they describe what this process has open.
    """
    found = {}
    for name, value in _attributes(callback).items():
        plain = callback_values.to_plain(value)
        if backup_file.is_storable(plain):
            found[name] = plain
    return found


def not_held(callback: keras.callbacks.Callback, state: dict[str, Any]) -> list[str]:
    """The names of attributes with data that `state_of` leaves out; empty for Keras' own callbacks."""
    if is_of_keras(callback):
        return []
    return [
        name for name, value in _attributes(callback).items() if name not in state and callback_values.is_data(value)
    ]


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """The attributes of a callback, including containers that are class attributes: `self.rows.append` changes them."""
    is_tensorboard = isinstance(callback, keras.callbacks.TensorBoard)
    in_classes = {
        name: member
        for kind in reversed(type(callback).__mro__)
        if package_of(kind.__module__) != "keras"
        for name, member in vars(kind).items()
        if isinstance(member, callback_values.OBJECTS) and not name.startswith("__")
    }
    return {
        name: value
        for name, value in (in_classes | attributes_of(callback)).items()
        if name not in _NOT_STATE and not (is_tensorboard and name.startswith("_") and name not in _OF_TENSORBOARD)
    }


def facts_of(
    callbacks: Sequence[keras.callbacks.Callback],
    states: Sequence[dict[str, Any]],
    shared: Sequence[Sequence[Path]],
    first: Sequence[Facts] = (),
) -> list[Facts]:
    """Facts that tell whether an attribute has changed: its value, and where else the objects that it holds are held.

    states: by `state_of`. shared: by `shared_in`. first: the earlier facts that these will be compared with.
    """
    elsewhere = collections.defaultdict(list)
    for paths in shared:
        for owner in {path[:2] for path in paths}:
            elsewhere[owner].append(paths)
    return [
        {
            attribute: (*_of_value(value, before.get(attribute)), elsewhere[name, attribute])
            for attribute, value in state.items()
        }
        for name, state, before in zip(names_of(callbacks), states, first or [{}] * len(states), strict=True)
    ]


def _of_value(value: Any, before: tuple[Any, ...] | None) -> tuple[int, tuple[bytes, ...]]:
    """Returns (number of items, bytes of the value). No bytes if the number tells enough: to encode a long list takes
    time, and the backup that holds it encodes it once more."""
    items = len(value) if isinstance(value, backup_file.CONTAINERS) else 0
    return items, () if before is not None and before[0] != items else backup_file.parts_of(value)


def changed(state: dict[str, Any], now: Facts, first: Facts, known: Collection[str] = frozenset()) -> dict[str, Any]:
    """The attributes that have changed, and so are not settings: a program that is started again with another patience
    shall use the new one. now, first: by `facts_of`. known: attributes that are no settings, whatever they are now."""
    return {name: value for name, value in state.items() if name in known or now[name] != first.get(name)}


def deleted(callbacks: Sequence[keras.callbacks.Callback], before: Sequence[Collection[str]]) -> list[list[str]]:
    """For each callback, the attributes that it had and no longer has. before: their names, such as by `facts_of`."""
    return [
        [name for name in names if name not in attributes]
        for attributes, names in zip(map(_attributes, callbacks), before, strict=True)
    ]


def values_in(facts: Facts, names: Collection[str]) -> tuple[dict[str, Any], list[Sequence[Path]]]:
    """Returns (the values of the named attributes when the facts were found, the places that shared one object with
    them). facts: by `facts_of`, without earlier ones."""
    found = {name: facts[name] for name in names if name in facts}
    values = {name: backup_file.value_of(parts) for name, (_, parts, _) in found.items()}
    return values, [paths for _, _, elsewhere in found.values() for paths in elsewhere]


def names_of(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """The callbacks' classes, numbered: with these names a program that is started again with more callbacks, or in
    another order, finds the state of each."""
    kinds = [type(callback).__qualname__ for callback in callbacks]
    return [f"{kind} {kinds[:place].count(kind)}" for place, kind in enumerate(kinds)]


def shared_in(callbacks: Sequence[keras.callbacks.Callback]) -> list[list[Path]]:
    """The places of each container or array that is held by several attributes, or by containers in them."""
    places = [list(filter(backup_file.is_storable, paths)) for _, paths in _objects_in(callbacks)]
    return [paths for paths in places if len(paths) > 1]


def restore(
    callbacks: Sequence[keras.callbacks.Callback],
    states: dict[str, dict[str, Any]],
    shared: Sequence[Sequence[Path]],
    without: dict[str, Sequence[str]],
) -> None:
    """Restores what `state_of` returned. Attributes that shared one object share one again; others do not.

    states: of the callbacks, by `names_of`. shared: by `shared_in`. without: by `deleted`.
    """
    restored = _Restored(callbacks, states, shared)
    for callback, name in zip(callbacks, names_of(callbacks), strict=True):
        held = _attributes(callback)
        for attribute, value in states.get(name, {}).items():
            merged = restored.value((name, attribute), value, held.get(attribute))
            if attribute in slots_of(type(callback)):
                setattr(callback, attribute, merged)
            elif attribute in callback.__dict__ or merged is not held.get(attribute):  # else it is a class attribute
                callback.__dict__[attribute] = merged
        for attribute in set(without.get(name, ())) & attributes_of(callback).keys():
            with contextlib.suppress(AttributeError):  # for a property that cannot be deleted
                object.__delattr__(callback, attribute)


def _objects_in(callbacks: Sequence[keras.callbacks.Callback]) -> list[tuple[Any, list[Path]]]:
    """Containers and arrays, each with all the places where it is held."""
    found: dict[int, tuple[Any, list[Path]]] = {}

    def look(held: Any, path: Path) -> None:
        if isinstance(held, callback_values.OBJECTS):
            is_known = id(held) in found
            found.setdefault(id(held), (held, []))[1].append(path)
            if is_known:
                return
        if isinstance(held, (dict, list, tuple, collections.deque)):
            for key, item in held.items() if isinstance(held, dict) else enumerate(held):
                if isinstance(item, (*callback_values.OBJECTS, tuple)):
                    look(item, (*path, key))

    for callback, name in zip(callbacks, names_of(callbacks), strict=True):
        for attribute, held in _attributes(callback).items():
            with contextlib.suppress(RecursionError):  # nested too deep for any backup
                look(held, (name, attribute))
    return list(found.values())


class _Restored:
    """The content of a backup as objects of this process. Existing objects are reused where the same attributes share
    them, because others may hold them, too."""

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], states: Collection[str], shared: Sequence[Sequence[Path]]
    ) -> None:
        self._groups = {path: number for number, paths in enumerate(shared) for path in paths}
        # Looked up before anything is changed. Callbacks that the backup does not know do not count.
        self._held = {
            path: (held, [place for place in paths if place[0] in states])
            for held, paths in _objects_in(callbacks)
            for path in paths
        }
        self._made: dict[Any, Any] = {}  # number of a group, or path -> object

    def value(self, path: Path, value: Any, held: Any = None) -> Any:
        """Returns the restored object. held: the object at `path` in this process, if it is not a container."""
        if not isinstance(value, callback_values.OBJECTS) or (held is not None and path not in self._held):
            return callback_values.from_plain(held, self._with_parts(path, value))
        key = self._key(path)
        if key not in self._made:
            merged = self._with_parts(path, value)
            held, places = self._held.get(path, (None, []))
            stays = all(self._key(place) == key for place in places)
            self._made[key] = callback_values.from_plain(held if stays else copy.copy(held), merged)
        return self._made[key]

    def _key(self, path: Path) -> Any:
        return self._groups.get(path, path)

    def _with_parts(self, path: Path, value: Any) -> Any:
        if isinstance(value, dict):
            merged = copy.copy(value)
            for key, item in value.items():
                merged[key] = self.value((*path, key), item)
            return merged
        if isinstance(value, (list, tuple, collections.deque)):
            parts = [self.value((*path, place), item) for place, item in enumerate(value)]
            return (
                collections.deque(parts, value.maxlen) if isinstance(value, collections.deque) else type(value)(parts)
            )
        return value
