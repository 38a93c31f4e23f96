"""Random access to the records of TFRecord files: any order, without reading the rest of a file.

A TFRecord file is a sequence of records (compat/tensorflow_checksums.py). The length in each leads to the next one, so
the index is built by reading 12 bytes per record. (TensorFlow's own random reader is not used: it reads ahead, which
took 0.7 ms per record of 1.5 KB against 0.02 ms here, and it returned wrong records when several threads shared one
reader.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow_checksums import FRAME_BYTES, HEADER_BYTES, data_in, length_in
from tfdist.control.exit_codes import DataError
from tfdist.control.own_files import written_whole

Rows = Sequence[int] | np.ndarray  # record numbers
SLOW_INDEX_SECONDS = 5.0  # an index that took longer to build is saved beside the files


class RecordFiles:
    """The records of some TFRecord files as one sequence, in the order of the files.

    named: returns a path as messages show it. Raises DataError for a file that is not a TFRecord file, is cut short, or
    is compressed; `read` raises it for a record whose checksum is wrong.
    """

    def __init__(self, paths: Sequence[str], named: Callable[[str], str] = str):
        self.paths, self._named = list(paths), named
        self.offsets, self.files = _index(self.paths, named)

    def __len__(self) -> int:
        return len(self.offsets)

    def select(self, rows: np.ndarray) -> None:
        """Keeps only these records (int64 indices), in this order."""
        self.offsets, self.files = self.offsets[rows], self.files[rows]

    def read(self, indices: Rows) -> list[bytes]:
        """Returns the data of these records. Safe to call from several threads."""
        return [_read(self.paths[self.files[i]], int(self.offsets[i]), self._named) for i in indices]


def read_in_graph(read: Callable[[Rows], list[bytes]], indices: tf.Tensor) -> tf.Tensor:
    """Runs `read` as an operation: int64 [n] -> string [n]. read must be a function of the indices alone."""

    # stateful=False: otherwise op determinism forbids parallel reads.
    records = tf.numpy_function(lambda rows: as_objects(read(rows)), [indices], tf.string, stateful=False)
    return tf.ensure_shape(records, indices.shape)


def as_objects(records: list[bytes]) -> np.ndarray:
    """Returns the records as an object array, which TensorFlow takes unchanged from a Python function that it calls."""
    found = np.empty(len(records), object)  # an array of dtype bytes would drop zero bytes at the end
    found[:] = records
    return found


def _index(paths: list[str], named: Callable[[str], str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (offsets int64 [records], file numbers int32 [records])."""
    for path in paths:
        if not os.path.isfile(path):
            raise DataError(
                f"{path} cannot be read at random: it is not a local file; copy it here or use"
                " --source_args=stream=True."
            )
    cache = _cache_path(paths)
    with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), np.load(cache) as stored:
        return stored["offsets"], stored["files"]
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(functools.partial(_scan, named=named), paths))
    index = np.concatenate(found), np.repeat(np.arange(len(paths), dtype=np.int32), [len(f) for f in found])
    if time.monotonic() - began > SLOW_INDEX_SECONDS:
        _keep(cache, index)
    return index


def _scan(path: str, named: Callable[[str], str]) -> np.ndarray:
    """Returns the offsets of the records of one file, int64 [records]."""
    size = os.path.getsize(path)
    if size == 0:
        return np.zeros(0, np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return offsets_of(named(path), size, lambda offset, _: data[offset : offset + HEADER_BYTES])


def check_begin(path: str) -> None:
    """Raises DataError if a non-empty file does not begin with a record."""
    with open(path, "rb") as file:
        data_bytes(path, os.path.getsize(path), 0, file.read(HEADER_BYTES))


def offsets_of(path: str, size: int, read: Callable[[int, int], bytes]) -> np.ndarray:
    """Returns the offsets of the records of a file of `size` bytes, int64 [records]. Raises DataError.

    read: a function (offset, data bytes of the previous record) -> the header at the offset.
    """
    offsets, offset, length = [], 0, 0
    while offset < size:
        length = data_bytes(path, size, offset, read(offset, length) if offset + FRAME_BYTES <= size else b"")
        offsets.append(offset)
        offset += FRAME_BYTES + length
    return np.array(offsets, np.int64)


def data_bytes(path: str, size: int, offset: int, header: bytes) -> int:
    """Returns the number of data bytes of the record at `offset` in a file of `size` bytes. Raises DataError."""
    if offset + FRAME_BYTES <= size:
        if (length := length_in(header)) is None:
            raise DataError(
                f"{path} is not a TFRecord file, or is damaged at byte {offset}; if it is compressed use"
                " --source_args=stream=True,compression=GZIP."
            )
        if offset + FRAME_BYTES + length <= size:
            return length
    raise DataError(f"{path} ends within a record at byte {offset}: it was truncated; write it again.")


def _read(path: str, offset: int, named: Callable[[str], str]) -> bytes:
    # Opened for each record: that takes microseconds, and the number of descriptors is that of threads, not of files.
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size  # now, not when the index was made
        length = data_bytes(named(path), size, offset, os.pread(file, HEADER_BYTES, offset))
        data = os.pread(file, length + FRAME_BYTES - HEADER_BYTES, offset + HEADER_BYTES)
    finally:
        os.close(file)
    return checked(path, offset, data, length, named)


def checked(path: str, offset: int, data: bytes, length: int, named: Callable[[str], str]) -> bytes:
    """Returns the data of the record at `offset`, without the checksum after it. Raises DataError if that is wrong."""
    if (found := data_in(data, length)) is None:
        raise DataError(
            f"{named(path)} is damaged: the record at byte {offset} has a wrong checksum; restore the file."
        )
    return found


def _cache_path(paths: list[str]) -> str:
    """Returns the path of the index of these files. The name changes when a file changes."""
    stats = [(path, stat.st_size, stat.st_mtime_ns) for path in paths for stat in [os.stat(path)]]
    digest = hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
    return os.path.join(os.path.dirname(paths[0]), f".tfdist-index-{digest}.npz")


def _keep(cache: str, index: tuple[np.ndarray, np.ndarray]) -> None:
    """Writes the index beside the files, if permitted; atomically, since several workers may do it."""
    with contextlib.suppress(OSError), written_whole(Path(cache), "wb") as file:
        np.savez(file, offsets=index[0], files=index[1])
