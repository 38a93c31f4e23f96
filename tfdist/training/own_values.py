"""What functions and objects of the user's own hold: what makes one compute something else than another of the same
code.

A function: its code, which tells two lambdas of one file apart, its defaults, and the numbers that it has from around
it. An object: the numbers with a decimal point among its attributes, such as a rate; whole ones may count, or be a
rank.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

LIBRARIES = ("keras", "tensorflow", "tfdist", "builtins", "numpy")
_DEEPEST = 4
_LATEST = 1e9  # larger ones are points in time
_LARGEST = 1 << 20  # numbers of an array that are looked at
_MANY = 1000  # entries of a list


def own_value(value: Any, depth: int = 0) -> Any:
    """The same for what computes the same, made of numbers, strings, arrays, lists and mappings: {attribute: what it
    holds} of an object.

    depth: how many objects hold it, of which one may be itself.
    """
    if isinstance(value, (functools.partial, FunctionType, MethodType)):
        return _function(value, depth)
    return _attributes(getattr(value, "__dict__", {}), depth)


def _attributes(held: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    if depth > _DEEPEST or len(held) > _MANY:
        return {}
    found = {str(name): _attribute(each, depth + 1) for name, each in held.items()}
    return {name: each for name, each in found.items() if each is not None}


def _attribute(value: Any, depth: int) -> Any:
    if isinstance(value, (functools.partial, FunctionType)):
        return _function(value, depth)
    if isinstance(value, Mapping):
        return _attributes(value, depth) or None
    if isinstance(value, (float, np.floating)):
        return float(value) if abs(value) < _LATEST else None
    if callable(value) and not isinstance(value, (type, keras.layers.Layer)) and not _is_from_libraries(type(value)):
        return own_value(value, depth) or None  # a regularizer, or a schedule
    return None


def _function(function: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        return "deeper"
    if isinstance(function, functools.partial):
        held = _held(function.args, depth), _held(dict(sorted(function.keywords.items())), depth)
        return [_function(function.func, depth + 1), *held]
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or _is_from_libraries(function):
        return getattr(function, "__qualname__", type(function).__name__)
    cells = [_cell(cell, depth) for cell in function.__closure__ or ()]
    held = _held(function.__defaults__, depth), _held(function.__kwdefaults__, depth)
    return [zlib.crc32(repr(_code(function.__code__)).encode()), *held, cells]


def _is_from_libraries(definition: FunctionType | type) -> bool:
    return (definition.__module__ or "").partition(".")[0] in LIBRARIES


def _code(code: CodeType) -> list[Any]:
    """Without where it stands."""
    constants = [
        _code(each) if isinstance(each, CodeType) else each
        for each in code.co_consts
        if not (isinstance(each, str) and "/" in each) and not isinstance(each, frozenset)
    ]
    return [code.co_code, constants, code.co_names]


def _cell(cell: Any, depth: int) -> Any:
    try:
        return _held(cell.cell_contents, depth)
    except ValueError:  # that is empty yet
        return "empty"


def _held(value: Any, depth: int) -> Any:
    """Of what a function has from elsewhere, such as its defaults."""
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, (functools.partial, FunctionType, MethodType)):
        return _function(value, depth + 1)
    if isinstance(value, (Mapping, Sequence)) and (depth > _DEEPEST or len(value) > _MANY):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): _held(each, depth + 1) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_held(each, depth + 1) for each in value]
    if isinstance(value, (np.ndarray, np.generic)) or isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        array = np.asarray(value)
        if array.dtype != object and array.size <= _LARGEST:
            return array
    return type(value).__name__
