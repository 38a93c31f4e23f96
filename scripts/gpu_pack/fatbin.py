"""GPU code in shared libraries: keeps what one GPU needs, and makes zeros of the rest.

The section .nv_fatbin of a library holds containers; a container has a header and entries, one for each architecture:
a cubin (machine code, an ELF file) or PTX (text that the driver compiles at the first start). NVIDIA does not describe
the layout; it was read from fatbin-decompress.h of https://github.com/n-eiling/cuda-fatbin-decompression and agrees
with what `cuobjdump --list-elf` says of TensorFlow 2.21. All numbers are little-endian:

    container  0 u32 0xBA55ED50   4 u16 version, 1   6 u16 size of this header, 16   8 u64 bytes of all entries
    entry      0 u16 kind, 1 is PTX, 2 a cubin       4 u32 size of this header       8 u64 bytes of code after it
              28 u32 architecture, 90 for compute capability 9.0

A container stays where it is. What it keeps moves to its beginning, its header says how long that is, and zeros follow
to where it ended, so sections, symbols and whatever points to containers are as before. (Entries that stayed in their
place with zeros for code would not do: `cuobjdump` decompresses all of them and gives up.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQQHHI")
PTX, CUBIN = 1, 2
GPU_SECTION = ".nv_fatbin"

# ELF, 64 bits: https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html, chapters "ELF Header" and "Sections".
SECTIONS_OFFSET, SECTIONS_COUNT, SEGMENTS_OFFSET, SEGMENTS_COUNT = 0x28, 0x3A, 0x20, 0x36
SECTION = struct.Struct("<IIQQQQIIQQ")
SEGMENT = struct.Struct("<IIQQQQQQ")
NO_BYTES = 8  # the type of a section that takes memory only, as .bss
LOADED = 2  # the flag of a section that is in memory at run time
Bytes = bytes | bytearray | mmap.mmap


class Section(NamedTuple):
    name: str
    offset: int
    size: int
    is_loaded: bool


class Entry(NamedTuple):
    """Code for one architecture: `size` bytes at `start`, with the header."""

    kind: int
    architecture: int
    start: int
    size: int


class Container(NamedTuple):
    """`size` bytes at `start`, with the header."""

    start: int
    size: int
    entries: list[Entry]


class Trimmed(NamedTuple):
    """What a library had: bytes of GPU code, how many of them the GPU needs, and for which architectures."""

    size: int
    needed: int
    architectures: frozenset[int]


def sections(data: Bytes) -> list[Section]:
    """Of an ELF file, those that have bytes in the file."""
    (offset,) = struct.unpack_from("<Q", data, SECTIONS_OFFSET)
    size, count, names = struct.unpack_from("<HHH", data, SECTIONS_COUNT)
    if not offset:
        return []
    found = [SECTION.unpack_from(data, offset + size * number) for number in range(count)]
    start, length = found[names][4:6]
    text = bytes(data[start : start + length])
    return [
        Section(text[name : text.index(b"\0", name)].decode(), where, bytes_, bool(flags & LOADED))
        for name, kind, flags, _, where, bytes_, *_ in found
        if kind not in (0, NO_BYTES)
    ]


def containers(data: Bytes, start: int, size: int) -> Iterator[Container]:
    """All that lie in these bytes."""
    end, at = start + size, start
    while (at := data.find(MAGIC, at, end)) >= 0:
        container = _container(data, at, end)
        if container:
            yield container
        at = container.start + container.size if container else at + len(MAGIC)


def _container(data: Bytes, at: int, end: int) -> Container | None:
    """None where the magic number stands by chance."""
    if at + CONTAINER.size > end:
        return None
    _, version, header, length = CONTAINER.unpack_from(data, at)
    where, stop, found = at + header, at + header + length, []
    if version != 1 or header != CONTAINER.size or stop > end:
        return None
    while where < stop:
        if where + ENTRY.size > stop:
            return None
        kind, _, size_of_header, size_of_code, _, _, _, architecture = ENTRY.unpack_from(data, where)
        if size_of_header < ENTRY.size or where + size_of_header + size_of_code > stop:
            return None
        found.append(Entry(kind, architecture, where, size_of_header + size_of_code))
        where += size_of_header + size_of_code
    return Container(at, header + length, found)


def needed(entries: list[Entry], architecture: int) -> list[Entry]:
    """What a GPU of this architecture takes: its own cubin. Without one the driver takes the cubin of an older GPU of
    the same major version, or compiles PTX that is not newer, so the newest of both stay (CUDA C++ Programming Guide,
    "Binary Compatibility" and "PTX Compatibility")."""
    own = [entry for entry in entries if entry.kind == CUBIN and entry.architecture == architecture]
    if own:
        return own
    older = [entry for entry in entries if entry.architecture <= architecture]
    cubins = [entry for entry in older if entry.kind == CUBIN and entry.architecture // 10 == architecture // 10]
    return _newest(cubins) + _newest([entry for entry in older if entry.kind == PTX])


def _newest(entries: list[Entry]) -> list[Entry]:
    newest = max((entry.architecture for entry in entries), default=0)
    return [entry for entry in entries if entry.architecture == newest]


def trim(file: Path, architecture: int) -> Trimmed:
    """Changes the file itself: GPU code of this architecture only, and no symbols for debuggers."""
    size, size_needed, seen = 0, 0, set()
    with open(file, "r+b") as opened:
        with mmap.mmap(opened.fileno(), 0) as data:
            for section in (section for section in sections(data) if section.name == GPU_SECTION):
                for container in containers(data, section.offset, section.size):
                    kept = needed(container.entries, architecture)
                    _keep(data, container, kept)
                    size += sum(entry.size for entry in container.entries)
                    size_needed += sum(entry.size for entry in kept)
                    seen |= {entry.architecture for entry in container.entries}
            end = _end_of_what_is_loaded(data)
            if end < len(data):
                data[SECTIONS_OFFSET : SECTIONS_OFFSET + 8] = bytes(8)  # the table of sections lay behind the end
                data[SECTIONS_COUNT : SECTIONS_COUNT + 6] = struct.pack("<HHH", SECTION.size, 0, 0)
        opened.truncate(end)
    return Trimmed(size, size_needed, frozenset(seen))


def _keep(data: mmap.mmap, container: Container, kept: list[Entry]) -> None:
    """A container without anything for this GPU stays as it is: an empty one was never seen."""
    if not kept:
        return
    entries = b"".join(data[entry.start : entry.start + entry.size] for entry in kept)
    made = CONTAINER.pack(*struct.unpack("<I", MAGIC), 1, CONTAINER.size, len(entries)) + entries
    data[container.start : container.start + container.size] = made.ljust(container.size, b"\0")


def _end_of_what_is_loaded(data: Bytes) -> int:
    """Behind it are names of functions (220 MB in TensorFlow), which only debuggers read."""
    (offset,) = struct.unpack_from("<Q", data, SEGMENTS_OFFSET)
    size, count = struct.unpack_from("<HH", data, SEGMENTS_COUNT)
    ends = [section.offset + section.size for section in sections(data) if section.is_loaded]
    if not ends:
        return len(data)
    for number in range(count):
        _, _, start, _, _, length, _, _ = SEGMENT.unpack_from(data, offset + size * number)
        ends.append(start + length)
    return max(*ends, offset + size * count)
