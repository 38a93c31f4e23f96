"""The file format of a backup: arrays and JSON under a checksum. Reading it executes nothing, whoever wrote it.

    MAGIC | SHA-256 of what follows | length of the JSON | JSON | bytes of the arrays

A value is None, a bool, number, text, bytes, array, tensor, range, one of Keras' two comparison functions, or a list,
tuple, dict, set or one of the containers in `collections`, holding such values.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.control.own_files import flush_to_disk, written_whole

_MAGIC = b"tfdist backup 1\n"
_LENGTH = 8  # bytes that hold the length of the JSON
_COMPARISONS = {"less": keras.ops.less, "greater": keras.ops.greater}  # for `monitor_op` of Keras' callbacks

_FACTORIES: dict[str, Any] = {factory.__name__: factory for factory in (int, float, list, dict, set)}
_OF_ITEMS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}  # besides lists, which JSON has
_OF_PAIRS: dict[str, Any] = {"counter": collections.Counter, "ordered": collections.OrderedDict, "dict": dict}
CONTAINERS = (list, dict, collections.deque, *_OF_ITEMS.values())
_OF_JSON = {type(None), bool, int, float, str}
_PLAIN = {*_OF_JSON, np.str_, complex, bytes, range}  # not classes derived from them, such as enums


def is_storable(value: Any) -> bool:
    """Whether `write` takes the value and `parse` returns it unchanged: nothing in it is of a user's class, and nothing
    contains itself."""
    try:
        return _is_storable(value)
    except RecursionError:
        return False


def _is_storable(value: Any) -> bool:
    if type(value) is list and set(map(type, value)) <= _OF_JSON:  # fast, also for a million numbers
        return True
    if isinstance(value, CONTAINERS):
        if isinstance(value, collections.defaultdict):
            is_known = type(value) is collections.defaultdict and value.default_factory in _FACTORIES.values()
        else:
            is_known = type(value) in (*CONTAINERS, *_OF_PAIRS.values())
        parts = (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
        return is_known and all(map(_is_storable, parts))
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, str):
        # Not NumPy's other kinds of arrays, such as masked arrays.
        return (type(value) is np.ndarray or isinstance(value, np.generic)) and _has_numbers(value.dtype)
    if isinstance(value, tf.Tensor):
        return hasattr(value, "numpy") and _has_numbers(np.dtype(value.dtype.as_numpy_dtype))
    return type(value) in _PLAIN or _comparison(value) is not None


def parts_of(value: Any) -> tuple[bytes, ...]:
    """Returns bytes that are equal for two storable values if the values are the same."""
    arrays = _Arrays()
    text = json.dumps(_encoded(value, arrays)).encode()
    return (text, *(array.tobytes() for array in arrays))


def value_of(parts: Sequence[bytes]) -> Any:
    """The inverse of `parts_of`."""
    text, *arrays = parts
    return _decoded(json.loads(text), memoryview(b"".join(arrays)))


def write(path: Path, value: Any) -> None:
    """Writes the file under another name, flushes and renames it. Only the owner may read it."""
    parts = _parts_of_file(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path, "wb", flushed=True, mode=0o600, aside=f"{path.name}.writing") as file:
        for part in parts:
            file.write(part)
    flush_to_disk(path.parent)


def to_bytes(value: Any) -> bytes:
    """Returns the bytes that `write` would write."""
    return b"".join(bytes(part) for part in _parts_of_file(value))


def _parts_of_file(value: Any) -> list[Any]:
    arrays = _Arrays()
    text = json.dumps(_encoded(value, arrays)).encode()
    parts = [len(text).to_bytes(_LENGTH, "big"), text, *(array.reshape(-1).view(np.uint8) for array in arrays)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return [_MAGIC, digest.digest(), *parts]


def parse(data: bytes) -> Any:
    """Returns the value in the bytes of a file. Raises ValueError if they are not a backup, or are damaged."""
    body = memoryview(data)[len(_MAGIC) + hashlib.sha256().digest_size :]
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it is not a backup of tfdist")
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : len(data) - len(body)]:
        raise ValueError("its checksum does not match")
    end = _LENGTH + int.from_bytes(body[:_LENGTH], "big")
    try:
        return _decoded(json.loads(bytes(body[_LENGTH:end])), body[end:])
    except (KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"it has unexpected contents ({error})") from None


def as_array(value: Any) -> np.ndarray:
    """The bytes that `write` would write, as an array beside others."""
    return np.frombuffer(to_bytes(value), np.uint8)


def value_in(array: np.ndarray | None) -> Any:
    """The inverse of `as_array`; None if there is no array."""
    return None if array is None else parse(array.tobytes())


class _Arrays(list[np.ndarray]):
    """The arrays that come after the JSON."""

    nbytes = 0

    def add(self, array: np.ndarray) -> int:
        """Adds an array. Returns the offset of its first byte."""
        self.append(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
        self.nbytes += array.nbytes
        return self.nbytes - array.nbytes


@functools.cache
def _has_numbers(dtype: np.dtype) -> bool:
    """Whether TensorFlow knows the dtype by the same name, and it is numeric."""
    try:
        return dtype.kind not in "OSUMm" and tf.as_dtype(dtype.name).as_numpy_dtype == dtype.newbyteorder("=")
    except TypeError:  # for records, and for types with more digits
        return False


def _name_of(value: Any, kinds: dict[str, Any]) -> str:
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "")


def _comparison(value: Any) -> str | None:
    return next((name for name, function in _COMPARISONS.items() if value is function), None)


def _encoded(value: Any, arrays: _Arrays) -> Any:
    """The value as JSON, in which lists stand for themselves and a dict of one entry for anything else."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, np.ndarray) and value.dtype == object:  # of a variable of strings
        return {"strings": [list(value.shape), *(text.hex() for text in value.reshape(-1))]}
    if isinstance(value, (np.ndarray, np.generic)):
        place = arrays.add(np.asarray(value))
        return {"array": [place, value.dtype.name, list(value.shape), isinstance(value, np.generic)]}
    if isinstance(value, tf.Tensor):
        return {"tensor": _encoded(np.asarray(value.numpy()), arrays)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, list):
        return value if set(map(type, value)) <= _OF_JSON else [_encoded(item, arrays) for item in value]
    if name := _name_of(value, _OF_ITEMS):
        items = [_encoded(item, arrays) for item in value]
        # Items of a set are sorted: their order must not depend on how the set was made.
        return {name: items if name == "tuple" else sorted(items, key=json.dumps)}
    if isinstance(value, collections.deque):
        return {"deque": [value.maxlen, _encoded(list(value), arrays)]}
    if isinstance(value, dict):
        pairs = [[_encoded(key, arrays), _encoded(item, arrays)] for key, item in value.items()]
        if isinstance(value, collections.defaultdict):
            (name,) = (name for name, factory in _FACTORIES.items() if factory is value.default_factory)
            return {"defaultdict": [name, pairs]}
        return {_name_of(value, _OF_PAIRS): pairs}
    return {"comparison": _comparison(value)} if _comparison(value) else value


def _decoded(value: Any, data: memoryview) -> Any:
    if isinstance(value, list):
        return [_decoded(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _OF_ITEMS:
        return _OF_ITEMS[kind](_decoded(content, data))
    if kind in _OF_PAIRS:
        return _OF_PAIRS[kind](_pairs(content, data))
    if kind == "deque":
        return collections.deque(_decoded(content[1], data), content[0])
    if kind == "defaultdict":
        return collections.defaultdict(_FACTORIES[content[0]], _pairs(content[1], data))
    if kind == "tensor":
        return tf.constant(_decoded(content, data))
    if kind == "range":
        return range(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "strings":
        shape, *texts = content
        return np.array([bytes.fromhex(text) for text in texts], object).reshape(shape)
    if kind == "complex":
        return complex(*content)
    if kind == "comparison":
        return _COMPARISONS[content]
    offset, dtype, shape, scalar = content
    array = np.frombuffer(data, tf.as_dtype(dtype).as_numpy_dtype, int(np.prod(shape, dtype=np.int64)), offset).reshape(
        shape
    )
    return array[()] if scalar else array.copy()


def _pairs(content: Any, data: memoryview) -> dict[Any, Any]:
    return {_decoded(key, data): _decoded(item, data) for key, item in content}
