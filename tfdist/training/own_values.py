"""The values that a user's functions and objects hold, which can make two of the same code compute different things.

Of a function: its code, which tells two lambdas of one file apart, its defaults, and its closure. Of an object: the
functions, arrays and floats, such as a rate, among its attributes, their attributes, and so on. Integers of an object
are left out: they may be counters, or a rank.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import zlib
from collections.abc import Mapping, Sequence, Set
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.code_origin import package_of
from tfdist.compat.object_attributes import attributes_of

LIBRARIES = ("keras", "tensorflow", "tfdist", "builtins", "numpy")
_DEEPEST = 4
_LATEST = 1e9  # larger numbers are points in time
_LARGEST = 1 << 20  # larger arrays are not compared
_MANY = 1000  # entries of a list; longer ones are not compared
_CACHED = type(functools.cache(abs))
_FUNCTIONS = (functools.partial, FunctionType, MethodType, BuiltinFunctionType, np.ufunc, _CACHED)
_OF_KERAS = (keras.losses.Loss, keras.regularizers.Regularizer, keras.constraints.Constraint)  # they hold rates
_NO_OBJECTS = (type, ModuleType, keras.layers.Layer, keras.Variable, tf.Variable)  # compared elsewhere, or not at all


def own_value(value: Any) -> Any:
    """Returns a value that is equal for objects that compute the same, made of numbers, strings, arrays, lists and
    mappings: for an object {attribute: its value}.
    """
    return _function(value, 0) if isinstance(value, _FUNCTIONS) else _attributes(attributes_of(value), 0)


def _attributes(held: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    if depth > _DEEPEST or len(held) > _MANY:
        return {}
    found: dict[str, Any] = {}
    for name, each in held.items():
        with contextlib.suppress(Exception):  # attributes of a user's object may raise when read
            found[_name(name)] = _attribute(each, depth + 1)
    return {name: each for name, each in found.items() if each is not None}


def _name(key: Any) -> str:
    return "a path" if "/" in str(key) else str(key)


def _attribute(value: Any, depth: int) -> Any:
    """Returns the value of an attribute; None if it may differ between workers that compute the same, or if it holds
    only such values."""
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return None
    if isinstance(value, _FUNCTIONS):
        return _function(value, depth)
    if isinstance(value, (float, complex, np.inexact)):
        return [value.real, value.imag] if isinstance(value, (complex, np.complexfloating)) else _number(float(value))
    if (array := _array(value)) is not None:
        return array if array.ndim or array.dtype.kind == "f" else None
    if isinstance(value, enum.Enum):
        return _attribute(value.value, depth)
    if isinstance(value, Mapping):
        return _attributes(value, depth) or None
    if isinstance(value, Set):
        numbers = [each for each in value if isinstance(each, float)] if len(value) <= _MANY else []
        return sorted(numbers) or None
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, range, memoryview)):
        return _attributes(dict(enumerate(value)), depth) or None if len(value) <= _MANY else None
    return _attributes(attributes_of(value), depth) or None if _is_own(value) else None


def _number(value: float) -> float | None:
    return value if abs(value) < _LATEST else None


def _array(value: Any) -> np.ndarray | None:
    """Returns an array, or a tensor's value, as a NumPy array; None for anything else, and for very large arrays."""
    has_value = isinstance(value, (np.ndarray, np.generic)) or (
        isinstance(value, tf.Tensor) and hasattr(value, "numpy")
    )
    if not has_value:
        return None
    array = np.asarray(value)
    return array if array.dtype.kind in "biufc" and array.size <= _LARGEST else None


def _is_own(value: Any) -> bool:
    """Returns whether an object may hold values that a user has set: not an object of Python's library or of
    TensorFlow, which may hold times and counts."""
    if isinstance(value, (SimpleNamespace, *_OF_KERAS)):
        return True
    root = package_of(type(value).__module__)
    is_of_python = root in sys.stdlib_module_names and root != "__main__"
    return not (is_of_python or isinstance(value, _NO_OBJECTS) or _is_from_libraries(type(value)))


def _function(function: Any, depth: int) -> Any:
    """Returns {part of the function: its value}, or a name for a function of a library."""
    if depth > _DEEPEST:
        return "deeper"
    if isinstance(function, functools.partial):
        held = {f"argument {number}": _held(each, depth) for number, each in enumerate(function.args)}
        named = {f"argument {name}": _held(each, depth) for name, each in function.keywords.items()}
        return {"function": _function(function.func, depth + 1), **held, **named}
    if isinstance(function, _CACHED):
        return _function(function.__wrapped__, depth)
    if isinstance(function, MethodType):
        held = _attribute(function.__self__, depth)
        return {"function": _function(function.__func__, depth), **({"object": held} if held is not None else {})}
    if not isinstance(function, FunctionType) or _is_from_libraries(function):
        return getattr(function, "__qualname__", getattr(function, "__name__", type(function).__name__))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {
        "code": zlib.crc32(repr(_code(function.__code__)).encode()),
        "defaults": [_held(function.__defaults__, depth), _held(function.__kwdefaults__, depth)],
        **{f"variable {name}": _cell(cell, depth) for name, cell in cells},
        **_attributes(vars(function), depth),
    }


def _is_from_libraries(definition: FunctionType | type) -> bool:
    return package_of(definition.__module__) in LIBRARIES


def _code(code: CodeType) -> list[Any]:
    """Returns the content of a code object, without file name and line numbers."""
    constants = [
        _code(each) if isinstance(each, CodeType) else each
        for each in code.co_consts
        if not (isinstance(each, str) and "/" in each) and not isinstance(each, frozenset)
    ]
    return [code.co_code, constants, code.co_names]


def _cell(cell: Any, depth: int) -> Any:
    try:
        return _held(cell.cell_contents, depth)
    except ValueError:  # the cell is still empty
        return "empty"


def _held(value: Any, depth: int) -> Any:
    """Returns a value that a function gets from elsewhere, such as its defaults: integers and strings count, too."""
    if isinstance(value, enum.Enum):
        return _held(value.value, depth)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, (str, int, type(None))):
        return value
    if isinstance(value, _FUNCTIONS):
        return _function(value, depth + 1)
    if isinstance(value, (Mapping, Sequence)) and (depth > _DEEPEST or len(value) > _MANY):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {_name(key): _held(each, depth + 1) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, range, memoryview)):
        return [_held(each, depth + 1) for each in value]
    if (array := _array(value)) is not None:
        return array
    found = _attribute(value, depth + 1)
    return type(value).__name__ if found is None else [type(value).__name__, found]
