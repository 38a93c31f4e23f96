"""LevelDB tables without compression, as TensorFlow 2.21 writes the index of a checkpoint
(tensorflow/core/lib/io/table_builder.cc): keys and values, in the order of the keys.

Reading is needed to fetch only some bytes of a snapshot from an object store; writing, to write the data files of a
snapshot ourselves. TensorFlow has no public function for either. `table` returns, byte for byte, what TensorFlow would
have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import google_crc32c

from tfdist.compat.tensorflow_checksums import masked

_FOOTER_BYTES = 48
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_TRAILER_BYTES = 5  # of a block: kind of compression, and checksum
_BLOCK_BYTES = 1 << 18  # a block of this size or more is full
_RESTART_INTERVAL = 16  # number of entries after which a key is written in full again


def number(value: int) -> bytes:
    """Encodes a number >= 0 with seven bits per byte (a varint)."""
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


# -- reading -----------------------------------------------------------------------------------------------------------


def entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table. Raises ValueError or IndexError if `content` is not a table."""
    footer = content[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or footer[-8:] != _MAGIC:
        raise ValueError("it does not end as an index does")
    _, place = _read_handle(footer, 0)
    (start, size), _ = _read_handle(footer, place)
    for _, handle in _read_block(content, start, size):
        (start, size), _ = _read_handle(handle, 0)
        yield from _read_block(content, start, size)


def _read_block(content: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    block, kind = content[start : start + size], content[start + size]
    if kind or len(block) != size or start + size + _TRAILER_BYTES > len(content):
        raise ValueError("it is compressed, or truncated")
    end, place, key = size - 4 - 4 * int.from_bytes(block[-4:], "little"), 0, b""
    while place < end:
        shared, place = _read_number(block, place)
        more, place = _read_number(block, place)
        length, place = _read_number(block, place)
        key = key[:shared] + block[place : place + more]
        yield key, block[place + more : place + more + length]
        place += more + length


def _read_handle(data: bytes, place: int) -> tuple[tuple[int, int], int]:
    """Returns ((offset, size) of a block, the position after the handle)."""
    offset, place = _read_number(data, place)
    size, place = _read_number(data, place)
    return (offset, size), place


def _read_number(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, place = data[place], place + 1
        value, shift = value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, place


# -- writing -----------------------------------------------------------------------------------------------------------


def table(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the table of these keys and values; keys must increase."""
    content, block, last = bytearray(), _Block(_RESTART_INTERVAL), b""
    blocks: list[tuple[bytes, bytes]] = []  # (the last key, the handle) of the full blocks
    index = _Block(1)  # a key for each block: >= its last key, < the first key of the next block
    for key, value in rows:
        if block.is_new and blocks:
            index.add(_between(blocks[-1][0], key), blocks[-1][1])
        block.add(key, value)
        last = key
        if block.size >= _BLOCK_BYTES:
            blocks.append((last, _append(content, block)))
            block = _Block(_RESTART_INTERVAL)
    if not block.is_new:
        blocks.append((last, _append(content, block)))
    meta = _append(content, _Block(_RESTART_INTERVAL))
    if blocks:
        index.add(_after(blocks[-1][0]), blocks[-1][1])
    footer = meta + _append(content, index)
    return bytes(content) + footer.ljust(_FOOTER_BYTES - len(_MAGIC), b"\0") + _MAGIC


class _Block:
    """A sequence of entries; each key shares its prefix with the key before."""

    def __init__(self, restart_interval: int):
        self._interval, self._content, self._restarts, self._count, self._last = (
            restart_interval,
            bytearray(),
            [0],
            0,
            b"",
        )

    @property
    def is_new(self) -> bool:
        return not self._content

    @property
    def size(self) -> int:
        return len(self._content) + 4 * len(self._restarts) + 4

    def add(self, key: bytes, value: bytes) -> None:
        shared = 0
        if self._count < self._interval:
            shared = _shared(self._last, key)
        else:
            self._restarts.append(len(self._content))
            self._count = 0
        head = number(shared) + number(len(key) - shared) + number(len(value))
        self._content += head + key[shared:] + value
        self._count, self._last = self._count + 1, key

    def bytes(self) -> bytes:
        ends = b"".join(place.to_bytes(4, "little") for place in [*self._restarts, len(self._restarts)])
        return bytes(self._content) + ends


def _append(content: bytearray, block: _Block) -> bytes:
    """Adds a block to the table. Returns its handle."""
    written = block.bytes()
    handle = number(len(content)) + number(len(written))
    kind = b"\0"  # not compressed
    content += written + kind + masked(google_crc32c.value(written + kind)).to_bytes(4, "little")
    return handle


def _shared(first: bytes, second: bytes) -> int:
    """The length of the common prefix of two keys."""
    limit = min(len(first), len(second))
    return next((place for place in range(limit) if first[place] != second[place]), limit)


def _between(last: bytes, following: bytes) -> bytes:
    """A short key that is >= `last` and < `following`."""
    place = _shared(last, following)
    if place < min(len(last), len(following)) and last[place] < 0xFF and last[place] + 1 < following[place]:
        return last[:place] + bytes([last[place] + 1])
    return last


def _after(last: bytes) -> bytes:
    """A short key that is >= `last`."""
    place = next((place for place, byte in enumerate(last) if byte != 0xFF), None)
    return last if place is None else last[:place] + bytes([last[place] + 1])
