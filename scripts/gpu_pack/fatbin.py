"""Reduces the GPU code in shared libraries to what one GPU needs; zeros replace the rest.

The section .nv_fatbin of a library holds containers. A container has a header and entries, one for each architecture:
a cubin (machine code, an ELF file) or PTX (text that the driver compiles at the first start). NVIDIA does not document
the layout; it was taken from fatbin-decompress.h of https://github.com/n-eiling/cuda-fatbin-decompression and agrees
with the output of `cuobjdump --list-elf` for TensorFlow 2.21. All numbers are little-endian:

    container  0 u32 0xBA55ED50   4 u16 version, 1   6 u16 size of this header, 16   8 u64 bytes of all entries
    entry      0 u16 kind, 1 is PTX, 2 a cubin       4 u32 size of this header       8 u64 bytes of code after it
              28 u32 architecture, 90 for compute capability 9.0

A container stays where it is. The entries to keep move to its beginning, its header states their total length, and
zeros fill the space up to its old end. So sections, symbols and pointers to containers stay valid. (Leaving entries in
place and zeroing their code does not work: `cuobjdump` decompresses all of them and gives up.)
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
NO_BYTES = 8  # type of a section that occupies memory but no bytes in the file, such as .bss
LOADED = 2  # flag of a section that is in memory at run time
Bytes = bytes | bytearray | mmap.mmap


class Section(NamedTuple):
    name: str
    offset: int
    size: int
    is_loaded: bool


class Entry(NamedTuple):
    """Code for one architecture: `size` bytes at `start`, including the header."""

    kind: int
    architecture: int
    start: int
    size: int


class Container(NamedTuple):
    """`size` bytes at `start`, including the header."""

    start: int
    size: int
    entries: list[Entry]


class Trimmed(NamedTuple):
    """Result of `trim`: bytes of GPU code in the library, how many of them the GPU needs, architectures of the code."""

    size: int
    needed: int
    architectures: frozenset[int]


def sections(data: Bytes) -> list[Section]:
    """Returns the sections of an ELF file that have bytes in the file."""
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
    """Yields all containers in these bytes."""
    end, at = start + size, start
    while (at := data.find(MAGIC, at, end)) >= 0:
        container = _container(data, at, end)
        if container:
            yield container
        at = container.start + container.size if container else at + len(MAGIC)


def _container(data: Bytes, at: int, end: int) -> Container | None:
    """Returns the container at `at`, or None if the magic number is there by chance."""
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
    """Returns the entries that a GPU of this architecture uses: its own cubin. Without one, the driver takes the cubin
    of an older GPU of the same major version, or compiles PTX that is not newer; so the newest of both are returned
    (CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility")."""
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
    """Rewrites the file in place: keeps GPU code for this architecture only, and removes symbols for debuggers."""
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
                data[SECTIONS_OFFSET : SECTIONS_OFFSET + 8] = bytes(8)  # the section table was behind the new end
                data[SECTIONS_COUNT : SECTIONS_COUNT + 6] = struct.pack("<HHH", SECTION.size, 0, 0)
        opened.truncate(end)
    return Trimmed(size, size_needed, frozenset(seen))


def _keep(data: mmap.mmap, container: Container, kept: list[Entry]) -> None:
    """Writes the kept entries. A container without any stays as it is, since an empty container was never seen."""
    if not kept:
        return
    entries = b"".join(data[entry.start : entry.start + entry.size] for entry in kept)
    made = CONTAINER.pack(*struct.unpack("<I", MAGIC), 1, CONTAINER.size, len(entries)) + entries
    data[container.start : container.start + container.size] = made.ljust(container.size, b"\0")


def _end_of_what_is_loaded(data: Bytes) -> int:
    """Returns the offset behind which only function names follow (220 MB in TensorFlow), which only debuggers read."""
    (offset,) = struct.unpack_from("<Q", data, SEGMENTS_OFFSET)
    size, count = struct.unpack_from("<HH", data, SEGMENTS_COUNT)
    ends = [section.offset + section.size for section in sections(data) if section.is_loaded]
    if not ends:
        return len(data)
    for number in range(count):
        _, _, start, _, _, length, _, _ = SEGMENT.unpack_from(data, offset + size * number)
        ends.append(start + length)
    return max(*ends, offset + size * count)
