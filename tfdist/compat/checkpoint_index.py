"""Where in the data files of a TensorFlow checkpoint each array lies, or each slice of one (TensorFlow 2.21).

TensorFlow reads checkpoints from whole files, and says nowhere which bytes of them it would read. Relies on the format
of the index (tensorflow/core/util/tensor_bundle/, a table of LevelDB without compression) and on the names of slices in
it (saved_tensor_slice_util.cc); without it every worker would have to bring all of a snapshot from an object store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import tensor_bundle_pb2

Box = tuple[tuple[int, int], ...]
_FOOTER_BYTES = 48
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_TRAILER_BYTES = 5  # of a block: how it is compressed, and its checksum
_MASK = 0xA282EAD8


@dataclass(frozen=True)
class Stored:
    """A box of an array, ((start, length) for each dim), as it lies in the data file of a number."""

    box: Box
    file: int
    offset: int
    size: int
    checksum: int

    def is_intact(self, content: Iterable[bytes]) -> bool:
        """Whether these are the bytes that were written, one piece after the other."""
        found = size = 0
        for piece in content:
            found, size = google_crc32c.extend(found, piece), size + len(piece)
        masked = ((found >> 15 | found << 17) + _MASK) & 0xFFFFFFFF
        return size == self.size and masked == self.checksum


class CheckpointIndex:
    """The content of an index file. Raises ValueError if it is none, or of a kind that is not known here.

    files: how many data files there are.
    """

    def __init__(self, content: bytes):
        try:
            self._entries = dict(_table(content))
            header = tensor_bundle_pb2.BundleHeaderProto.FromString(self._entries.pop(b""))
        except (IndexError, KeyError, DecodeError) as error:
            raise ValueError(f"it is no index of a checkpoint ({type(error).__name__})") from None
        self.files = header.num_shards

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array. Raises KeyError."""
        return tuple(dim.size for dim in self._entry(name.encode()).shape.dim)

    def stored(self, name: str) -> list[Stored]:
        """The boxes in which an array lies. Raises KeyError, ValueError."""
        entry, shape = self._entry(name.encode()), self.shape(name)
        if not entry.slices:
            return [_stored(entry, tuple((0, size) for size in shape))]
        found = [_stored(self._entry(_name_of_slice(name, each)), _box(each, shape)) for each in entry.slices]
        for each in found:
            if math.prod(length for _, length in each.box) and not each.size:
                raise ValueError(f"a slice of {name} has no content")
        return found

    def _entry(self, name: bytes) -> tensor_bundle_pb2.BundleEntryProto:
        try:
            return tensor_bundle_pb2.BundleEntryProto.FromString(self._entries[name])
        except DecodeError:
            raise ValueError(f"what is said of {name!r} cannot be read") from None


def overlap(first: Box, second: Box) -> bool:
    """Whether two boxes of an array have an element in common."""
    return all(a < b + m and b < a + n for (a, n), (b, m) in zip(first, second, strict=True))


def _stored(entry: tensor_bundle_pb2.BundleEntryProto, box: Box) -> Stored:
    return Stored(box, entry.shard_id, entry.offset, entry.size, entry.crc32c)


def _box(told: Any, shape: tuple[int, ...]) -> Box:
    # A dim of which all is meant has no length.
    return tuple(
        (extent.start, extent.length) if extent.HasField("length") else (0, size)
        for extent, size in zip(told.extent, shape, strict=True)
    )


# -- a table of LevelDB ------------------------------------------------------------------------------------------------


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Its keys and values."""
    footer = content[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or footer[-8:] != _MAGIC:
        raise ValueError("it does not end as an index does")
    _, place = _handle(footer, 0)
    (start, size), _ = _handle(footer, place)
    for _, handle in _block(content, start, size):
        (start, size), _ = _handle(handle, 0)
        yield from _block(content, start, size)


def _block(content: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    block, kind = content[start : start + size], content[start + size]
    if kind or len(block) != size or start + size + _TRAILER_BYTES > len(content):
        raise ValueError("it is compressed, or cut short")
    end, place, key = size - 4 - 4 * int.from_bytes(block[-4:], "little"), 0, b""
    while place < end:
        shared, place = _number(block, place)
        more, place = _number(block, place)
        length, place = _number(block, place)
        key = key[:shared] + block[place : place + more]
        yield key, block[place + more : place + more + length]
        place += more + length


def _handle(data: bytes, place: int) -> tuple[tuple[int, int], int]:
    """((offset, size) of a block, where what follows begins)."""
    offset, place = _number(data, place)
    size, place = _number(data, place)
    return (offset, size), place


def _number(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, place = data[place], place + 1
        value, shift = value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, place


# -- how a slice is called ---------------------------------------------------------------------------------------------


def _name_of_slice(name: str, told: Any) -> bytes:
    """In TensorFlow's order-preserving code: 0, the name, the number of dims, start and length of each."""
    escaped = name.encode().replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff")
    numbers = b"".join(
        _signed(each.start) + _signed(each.length if each.HasField("length") else -1) for each in told.extent
    )
    return b"\x00" + escaped + b"\x00\x01" + _unsigned(len(told.extent)) + numbers


def _unsigned(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _signed(value: int) -> bytes:
    """Of a number from 0 on; -1 is a length that means all."""
    if value < 0:
        return bytes([0x80 ^ value & 0xFF])
    length = value.bit_length() // 7 + 1
    head = ((1 << length) - 1) << (16 - length)  # as many ones as there are bytes
    digits = bytearray(value.to_bytes(max(length, 2), "big")[-length:])
    digits[0] ^= head >> 8
    if length > 1:
        digits[1] ^= head & 0xFF
    return bytes(digits)
