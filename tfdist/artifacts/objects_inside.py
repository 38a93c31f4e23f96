"""What the user's own objects hold: a walk through containers, attributes and closures, in an order that is the same in
every process."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_variables
from tfdist.compat.code_origin import module_of, package_of
from tfdist.compat.object_attributes import attributes_of

DEPTH = 4  # nesting depth of lists, dictionaries and objects
_MOST = 10_000  # entries of a list that are searched: longer lists are data
# Packages of objects that contain nothing of the user's.
_NOT_OWN = ("keras", "tensorflow", "tfdist", "numpy", "builtins", "functools", "inspect", "enum", "_thread")
_OF_TENSORS = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
TRACKED = (keras.Layer, keras.random.SeedGenerator)  # Keras tracks these in layers
_PLAIN = {bool, int, float, str, bytes, type(None)}  # types of most attributes: testing for them first saves time


def objects_inside(value: Any, depth: int, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yields variables, generators, metrics and layers. seen: objects by id that were searched, and are not again."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, (tf.Variable, tf.random.Generator, keras.metrics.Metric, *TRACKED)):
        yield value
        return
    if isinstance(value, keras.Variable):
        if (stored := keras_variables.stored_value(value)) is not None:
            yield stored
        return
    if seen is not None:
        if id(value) in seen:
            return
        seen[id(value)] = value
    for each in _parts(value) if depth else ():
        yield from objects_inside(each, depth - 1, seen)


def _parts(value: Any) -> Iterable[Any]:
    """The objects inside a user-defined value, in an order that is the same in every process; else none."""
    if isinstance(value, (list, tuple, collections.deque)):
        return value if len(value) <= _MOST else ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, tf.types.experimental.PolymorphicFunction):
        decorated: Any = value
        value = decorated.python_function
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    is_not_own = (
        package_of(module_of(value)) in _NOT_OWN
        and not isinstance(value, keras.losses.Loss)
        and type(value) is not tf.Module
    )
    if isinstance(value, type) or is_not_own:
        return ()
    if isinstance(value, types.FunctionType):
        return _closed_over(value)
    return attributes_of(value).values()


def _closed_over(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found


def tensors_in(value: Any) -> list[tf.Tensor]:
    """The tensors in a value: in containers, and in objects of the user's own classes; not in layers."""
    return [] if type(value) in _PLAIN else list(_tensors_in(value, DEPTH, set()))


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[tf.Tensor]:
    if isinstance(value, tf.Tensor):
        yield value
    elif isinstance(value, _OF_TENSORS):
        yield from tf.nest.flatten(value, expand_composites=True)
    elif type(value) not in _PLAIN and not isinstance(value, keras.Layer) and id(value) not in seen and depth:
        seen.add(id(value))
        is_container = isinstance(value, (list, tuple, dict))
        for each in _parts(value):
            yield from _tensors_in(each, depth if is_container else depth - 1, seen)
