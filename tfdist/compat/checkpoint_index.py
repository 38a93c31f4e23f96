"""Locates each array, or each slice of an array, in the data files of a TensorFlow checkpoint (TensorFlow 2.21).

TensorFlow reads checkpoints from whole files and does not tell which bytes it would read; it writes them through the
page cache only. This module relies on the format of the index (tensorflow/core/util/tensor_bundle/, a LevelDB table)
and on the names of slices in it (saved_tensor_slice_util.cc). Without reading the index, every worker would have to
fetch a whole snapshot from an object store; without writing it, a snapshot takes ten times the processor time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import tensor_bundle_pb2

from tfdist.compat import leveldb_table
from tfdist.compat.tensorflow_checksums import masked

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Stored:
    """A box of an array, ((start, length) for each dim), and its place: number of the data file, offset and size."""

    box: Box
    file: int
    offset: int
    size: int
    checksum: int

    def is_intact(self, content: Iterable[bytes]) -> bool:
        """Whether `content`, one piece after the other, holds the bytes that were written."""
        found = size = 0
        for piece in content:
            found, size = google_crc32c.extend(found, piece), size + len(piece)
        return size == self.size and masked(found) == self.checksum


class CheckpointIndex:
    """The content of an index file. Raises ValueError if `content` is not an index, or is of an unknown kind.

    files: the number of data files.
    """

    def __init__(self, content: bytes):
        try:
            self._entries = dict(leveldb_table.entries(content))
            header = tensor_bundle_pb2.BundleHeaderProto.FromString(self._entries.pop(b""))
        except (IndexError, KeyError, DecodeError) as error:
            raise ValueError(f"it is not an index of a checkpoint ({type(error).__name__})") from None
        self.files = header.num_shards

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array. Raises KeyError."""
        return tuple(dim.size for dim in self._entry(name.encode()).shape.dim)

    def stored(self, name: str) -> list[Stored]:
        """The boxes in which an array is stored. Raises KeyError, ValueError."""
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
            raise ValueError(f"the entry of {name!r} cannot be read") from None


@dataclass(frozen=True)
class Written:
    """An array, or a box of it, that was written into the only data file of a checkpoint.

    dtype: one of TensorFlow's DataType. shape: of the whole array. checksum: CRC-32C of the bytes.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    box: Box | None
    offset: int
    size: int
    checksum: int


def index(written: Iterable[Written]) -> bytes:
    """Returns the index file of a checkpoint with one data file, byte for byte as SaveV2 would have written it."""
    header = tensor_bundle_pb2.BundleHeaderProto(num_shards=1)
    header.version.producer = 1
    rows: dict[bytes, tensor_bundle_pb2.BundleEntryProto] = {}
    for each in written:
        place = tensor_bundle_pb2.BundleEntryProto(
            dtype=each.dtype, offset=each.offset, size=each.size, crc32c=masked(each.checksum)
        )
        if each.box is None:
            rows[each.name.encode()] = _of_shape(place, each.shape)
            continue
        whole = rows.setdefault(
            each.name.encode(), _of_shape(tensor_bundle_pb2.BundleEntryProto(dtype=each.dtype), each.shape)
        )
        entry = whole.slices.add()
        for start, length in each.box:
            entry.extent.add(start=start, length=length)
        rows[_name_of_slice(each.name, entry)] = _of_shape(place, [length for _, length in each.box])
    return leveldb_table.table(
        [(b"", header.SerializeToString()), *((name, rows[name].SerializeToString()) for name in sorted(rows))]
    )


def _of_shape(entry: tensor_bundle_pb2.BundleEntryProto, shape: Sequence[int]) -> tensor_bundle_pb2.BundleEntryProto:
    entry.shape.SetInParent()
    for size in shape:
        entry.shape.dim.add(size=size)
    return entry


def is_whole(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box covers the whole array."""
    return all(extent == (0, size) for extent, size in zip(box, shape, strict=True))


def overlap(first: Box, second: Box) -> bool:
    """Whether two boxes of an array have an element in common."""
    return all(a < b + m and b < a + n for (a, n), (b, m) in zip(first, second, strict=True))


def _stored(entry: tensor_bundle_pb2.BundleEntryProto, box: Box) -> Stored:
    return Stored(box, entry.shard_id, entry.offset, entry.size, entry.crc32c)


def _box(entry: Any, shape: tuple[int, ...]) -> Box:
    # An extent without a length means the whole dim.
    return tuple(
        (extent.start, extent.length) if extent.HasField("length") else (0, size)
        for extent, size in zip(entry.extent, shape, strict=True)
    )


# -- names of slices ---------------------------------------------------------------------------------------------------


def _name_of_slice(name: str, entry: Any) -> bytes:
    """The key in TensorFlow's order-preserving code: 0, the name, the number of dims, start and length of each dim."""
    escaped = name.encode().replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff")
    numbers = b"".join(
        _signed(each.start) + _signed(each.length if each.HasField("length") else -1) for each in entry.extent
    )
    return b"\x00" + escaped + b"\x00\x01" + _unsigned(len(entry.extent)) + numbers


def _unsigned(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _signed(value: int) -> bytes:
    """The code of a number >= 0, or of -1: as a length, the whole dim."""
    if value < 0:
        return bytes([0x80 ^ value & 0xFF])
    length = value.bit_length() // 7 + 1
    head = ((1 << length) - 1) << (16 - length)  # as many ones as there are bytes
    digits = bytearray(value.to_bytes(max(length, 2), "big")[-length:])
    digits[0] ^= head >> 8
    if length > 1:
        digits[1] ^= head & 0xFF
    return bytes(digits)
