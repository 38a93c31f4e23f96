"""Encodes values as bytes and decodes them, for messages between workers: numbers, texts, arrays, and lists, tuples and
dicts of them.

Used instead of pickle: decoding gives only data, whatever the bytes are. A message is

  magic (4), length of the tree (4), tree, the arrays' bytes one after another

and the tree is JSON: null, true, 1, "text" stand for themselves; every other value is a list that begins with its kind.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError

_MAGIC = b"TFD1"
_HEAD = struct.Struct("!4sI")
_NUMPY_KINDS = "biufcmMSU"  # their memory holds no addresses
_MORE_TYPES = {
    name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")
}
_DEEPEST = 100


class Malformed(ValueError):
    """Bytes that `encode` cannot have made."""


def encode(value: Any) -> bytes:
    """Encodes the value as bytes. TensorFlow's tensors become NumPy arrays.

    Raises ConfigError for a value that is of none of the kinds above.
    """
    blocks: list[bytes] = []
    tree = json.dumps(_to_tree(value, blocks, 0), separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(_MAGIC, len(tree)), tree, *blocks])


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decodes the value that was given to `encode`. Raises Malformed."""
    try:
        magic, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or length > len(data) - _HEAD.size:
            raise Malformed("not a value of tfdist")
        reader = _Reader(memoryview(data)[_HEAD.size + length :])
        value = reader.read(json.loads(bytes(data[_HEAD.size : _HEAD.size + length])), 0)
    except Malformed:
        raise
    except (struct.error, ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError) as error:
        raise Malformed(str(error)) from None
    if reader.offset != len(reader.blocks):
        raise Malformed("bytes are left over")
    return value


def _to_tree(value: Any, blocks: list[bytes], depth: int) -> Any:
    if depth > _DEEPEST:
        raise ConfigError(f"A value for the other workers is nested deeper than {_DEEPEST}: make it flatter.")
    if isinstance(value, (tf.Tensor, tf.Variable)):
        value = np.asarray(value)
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["float", value.hex()]
    if kind is bytes:
        blocks.append(value)
        return ["bytes", len(value)]
    if kind is tuple or isinstance(value, list):
        return ["tuple" if kind is tuple else "list", *(_to_tree(item, blocks, depth + 1) for item in value)]
    if isinstance(value, dict):
        return [
            "dict",
            *([_to_tree(key, blocks, depth + 1), _to_tree(item, blocks, depth + 1)] for key, item in value.items()),
        ]
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_to_tree(value, blocks, depth)
    raise ConfigError(
        f"A {kind.__module__}.{kind.__qualname__} cannot be sent to the other workers: use numbers, strings, arrays,"
        " and lists, tuples and dicts of them."
    )


def _array_to_tree(value: np.ndarray | np.generic, blocks: list[bytes], depth: int) -> list:
    array = np.asarray(value)
    word = "array" if isinstance(value, np.ndarray) else "scalar"
    if array.dtype == object:
        return ["objects", list(array.shape), *(_to_tree(item, blocks, depth + 1) for item in array.reshape(-1))]
    if array.dtype.kind in _NUMPY_KINDS:
        name = array.dtype.str
    elif array.dtype.name in _MORE_TYPES:
        name = array.dtype.name
    else:
        raise ConfigError(f"An array of {array.dtype} cannot be sent to the other workers: use numbers or strings.")
    if not array.dtype.itemsize:  # texts without characters
        array = array.astype(f"{array.dtype.kind}1")
        name = array.dtype.str
    blocks.append(array.tobytes())
    return [word, name, list(array.shape)]


class _Reader:
    """Turns a tree back into its value; takes the arrays' bytes in the order in which they were written."""

    def __init__(self, blocks: memoryview):
        self.blocks, self.offset = blocks, 0

    def read(self, tree: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise Malformed("nested too deep")
        if not isinstance(tree, list):
            if isinstance(tree, (dict, float)):
                raise Malformed("an object or a bare fraction in a tree")
            return tree
        kind, *rest = tree
        if kind in ("list", "tuple"):
            items = [self.read(item, depth + 1) for item in rest]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {self.read(key, depth + 1): self.read(item, depth + 1) for key, item in rest}
        if kind == "objects":
            return self._objects(*rest, depth=depth + 1)
        make = {"float": float.fromhex, "bytes": self._bytes, "array": self._array, "scalar": self._scalar}[kind]
        return make(*rest)

    def _bytes(self, length: int) -> bytes:
        if type(length) is not int or not 0 <= length <= len(self.blocks) - self.offset:
            raise Malformed(f"{length} bytes, but only {len(self.blocks) - self.offset} are there")
        start, self.offset = self.offset, self.offset + length
        return bytes(self.blocks[start : self.offset])

    def _array(self, name: str, shape: list[int]) -> np.ndarray:
        if not isinstance(name, str):
            raise Malformed("a type that is not text")
        dtype = _MORE_TYPES.get(name) or np.dtype(name)
        if dtype.kind not in _NUMPY_KINDS and dtype.name not in _MORE_TYPES or not dtype.itemsize:
            raise Malformed(f"an array of {name}")
        data = self._bytes(dtype.itemsize * _size(shape))
        return np.frombuffer(bytearray(data), dtype).reshape(shape) if data else np.zeros(shape, dtype)

    def _scalar(self, name: str, shape: list[int]) -> Any:
        if shape != []:
            raise Malformed("a scalar with a shape")
        return self._array(name, shape)[()]

    def _objects(self, shape: list[int], *items: Any, depth: int) -> np.ndarray:
        if _size(shape) != len(items):
            raise Malformed(f"{len(items)} objects of shape {shape}")
        array = np.empty(len(items), object)
        for index, item in enumerate(items):
            array[index] = self.read(item, depth)
        return array.reshape(shape)


def _size(shape: list[int]) -> int:
    if (
        not isinstance(shape, list)
        or len(shape) > 32
        or not all(type(length) is int and 0 <= length < 2**48 for length in shape)
    ):
        raise Malformed(f"a shape {shape!r:.100}")
    return math.prod(shape)
