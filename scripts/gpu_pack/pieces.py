"""Turns files into compressed streams, and streams into pieces of a limited size. unpack.py reads the pieces.

A piece consists of b"TFDPIECE", u32 length of the index, the index (JSON, in xz), and streams one after the other (xz
each). The index of each piece lists all files and links, so that pieces may be unpacked in any order, but only the
streams of its own piece.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import mmap
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from gpu_pack.fatbin import GPU_SECTION, sections
from gpu_pack.unpack import MAGIC

MIB = 1 << 20
LARGE = MIB  # files of this size or more have streams of their own
TOGETHER = 16 * MIB  # bytes of small files in one stream
LONGEST = 64 * MIB  # bytes of a stream: few enough to keep sixteen cores busy; compressing one needs 0.7 GB of memory
SMALLEST_SECTION = MIB // 4
INDEX = MIB  # reserved for the index of a piece
# Kinds of bytes, and the xz options that suit each: instructions, tables of 8-byte and 4-byte numbers, names.
CODE, LONG_NUMBERS, NUMBERS, NAMES, OTHER = "code", "long numbers", "numbers", "names", "other"
KINDS = {
    ".text": CODE,
    GPU_SECTION: OTHER,
    ".rela.dyn": LONG_NUMBERS,
    ".rela.plt": LONG_NUMBERS,
    ".eh_frame": NUMBERS,
    ".eh_frame_hdr": NUMBERS,
    ".dynstr": NAMES,
    ".dynsym": OTHER,
    ".rodata": OTHER,
}
BITS = {
    CODE: {"lc": 4, "pb": 0},
    LONG_NUMBERS: {"lc": 0, "lp": 3, "pb": 3},
    NUMBERS: {"lc": 0, "lp": 2, "pb": 2},
    NAMES: {"lc": 4, "pb": 0},
    OTHER: {},
}


class File(NamedTuple):
    """`name`: the path to unpack to. `path`: where the bytes are. `layout`: the library whose section table applies."""

    name: str
    path: Path
    layout: Path | None = None


class Part(NamedTuple):
    file: int  # index in the list of files
    offset: int
    length: int


class Raw(NamedTuple):
    """Bytes that will become a stream."""

    kind: str
    parts: list[Part]


class Packed(NamedTuple):
    """A compressed stream in a file of its own."""

    path: Path
    size: int
    crc: int
    parts: list[Part]


def raw_streams(files: list[File], longest: int) -> list[Raw]:
    """Divides the bytes of all files into streams; each byte belongs to one stream."""
    found: list[Raw] = []
    small: list[tuple[bool, str, Part]] = []
    for number, file in enumerate(files):
        size = file.path.stat().st_size
        if size >= LARGE:
            ranges = _library_ranges(file.layout or file.path, size) if is_library(file.path) else [(OTHER, 0, size)]
            found += _cut(number, ranges, longest)
        elif size:
            small.append((is_library(file.path), file.path.suffix, Part(number, 0, size)))
    for are_libraries, members in groupby(sorted(small), key=lambda member: member[0]):
        parts: list[Part] = []
        for _, _, part in members:
            if parts and sum(other.length for other in parts) + part.length > min(TOGETHER, longest):
                found.append(Raw(CODE if are_libraries else OTHER, parts))
                parts = []
            parts.append(part)
        found.append(Raw(CODE if are_libraries else OTHER, parts))
    return found


def is_library(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _library_ranges(layout: Path, size: int) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, offset, length) of the large sections and of the gaps between them."""
    with open(layout, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        known = sorted((each.offset, each.size, KINDS[each.name]) for each in sections(data) if each.name in KINDS)
    at = 0
    for offset, length, kind in known:
        if length >= SMALLEST_SECTION and at <= offset and offset + length <= size:
            yield OTHER, at, offset - at
            yield kind, offset, length
            at = offset + length
    yield OTHER, at, size - at


def _cut(file: int, ranges: Iterable[tuple[str, int, int]], longest: int) -> Iterator[Raw]:
    """Cuts ranges into equal lengths, at whole table entries; all short ranges go into one stream."""
    short: list[Part] = []
    for kind, offset, length in ranges:
        if length < SMALLEST_SECTION:
            short += [Part(file, offset, length)] if length else []
            continue
        step = -(-length // -(-length // longest))
        step = min(longest, -(-step // 48) * 48)
        for at in range(offset, offset + length, step):
            yield Raw(kind, [Part(file, at, min(step, offset + length - at))])
    if short:
        yield Raw(OTHER, short)


def packed_streams(files: list[File], folder: Path, longest: int, jobs: int) -> list[Packed]:
    """Compresses all streams; reuses those that an earlier call left in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    streams = raw_streams(files, longest)
    done: list[Packed] = []
    with ThreadPoolExecutor(jobs) as pool:  # lzma releases the GIL
        for packed in pool.map(lambda stream: _packed(stream, files, folder), streams):
            done.append(packed)
            length = sum(part.length for part in packed.parts)
            print(
                f"pack_for_gpu: {len(done)} of {len(streams)} streams, {files[packed.parts[0].file].name}:"
                f" {length / 1e6:.1f} -> {packed.size / 1e6:.1f} MB",
                flush=True,
            )
    return done


def _packed(stream: Raw, files: list[File], folder: Path) -> Packed:
    data = b"".join(_read(files[part.file].path, part) for part in stream.parts)
    path = folder / hashlib.sha256(stream.kind.encode() + data).hexdigest()
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(
            lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=_filters(stream.kind, len(data)))
        )
        temporary.rename(path)
    return Packed(path, path.stat().st_size, zlib.crc32(data), stream.parts)


def _read(path: Path, part: Part) -> bytes:
    with open(path, "rb") as file:
        file.seek(part.offset)
        return file.read(part.length)


def _filters(kind: str, length: int) -> list[dict[str, int]]:
    dictionary = min(LONGEST, max(1 << 16, 1 << length.bit_length()))  # bytes of history; the memory is 11 times this
    xz = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "nice_len": 273, "dict_size": dictionary}
    return [{"id": lzma.FILTER_X86}] * (kind == CODE) + [xz | BITS[kind]]


def write_pieces(out: Path, files: list[File], links: dict[str, str], streams: list[Packed], limit: int) -> list[Path]:
    """Writes as few pieces of at most `limit` bytes as possible, of about the same size; returns their paths."""
    shares = _shares(streams, limit - INDEX)
    names = [(file.name, file.path.stat().st_size, file.path.stat().st_mode & 0o777) for file in files]
    build = hashlib.sha256(repr((names, links, [stream.path.name for stream in streams])).encode()).hexdigest()[:12]
    for old in out.glob("piece*"):
        old.unlink()
    written = []
    for number, share in enumerate(shares):
        index = {
            "build": build,
            "piece": number,
            "pieces": len(shares),
            "files": names,
            "links": sorted(links.items()),
            "streams": [{"size": stream.size, "crc": stream.crc, "parts": stream.parts} for stream in share],
        }
        head = lzma.compress(json.dumps(index).encode(), preset=9)
        temporary, path = out / f"piece{number}.tmp", out / f"piece{number}"
        with open(temporary, "wb") as file:
            file.write(MAGIC + struct.pack("<I", len(head)) + head)
            for stream in share:
                file.write(stream.path.read_bytes())
        temporary.rename(path)
        written.append(path)
    return written


def _shares(streams: list[Packed], limit: int) -> list[list[Packed]]:
    """Assigns streams to pieces: the largest first, each to the piece with the fewest bytes so far."""
    largest = max(stream.size for stream in streams)
    count = max(1, -(-sum(stream.size for stream in streams) // max(limit, largest)))
    while True:
        shares: list[list[Packed]] = [[] for _ in range(count)]
        sizes = [0] * count
        for stream in sorted(streams, key=lambda stream: -stream.size):
            least = sizes.index(min(sizes))
            shares[least].append(stream)
            sizes[least] += stream.size
        if max(sizes) <= max(limit, largest):
            return shares
        count += 1
