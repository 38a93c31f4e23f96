"""Random access by byte ranges to the records of TFRecord files in an object store, if no local copies are kept.

The index of a file is made once, by one process per machine, which reads the file from front to back, and is kept in
the cache. Afterwards, records that lie close together are fetched in one range, and several ranges at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tfdist.compat.tensorflow_checksums import FRAME_BYTES, HEADER_BYTES
from tfdist.data.sources.records import Rows, checked, offsets_of
from tfdist.storage.data_cache import DataCache
from tfdist.storage.in_threads import in_threads

_INDEX_BYTES = 1 << 23  # read at a time to find the records
_GAP_BYTES = 1 << 16  # the bytes between two records are read, too, if they are no more than this
_RANGE_BYTES = 1 << 25  # most bytes in one range, unless it is a single record


class StoredRecords:
    """Reads records as records.RecordFiles does, but without local files. Raises what DataCache.piece raises, and
    DataError for a file that is damaged or no TFRecord file."""

    def __init__(self, cache: DataCache, paths: Sequence[str]):
        self._cache, self._paths = cache, list(paths)
        found: dict[int, np.ndarray] = {}

        def look(number: int) -> None:
            path = self._paths[number]
            made = cache.derived(path, lambda: _offsets(cache, path).tobytes())
            found[number] = np.frombuffer(made, np.int64)

        in_threads(look, ((number,) for number in range(len(self._paths))))
        offsets = [found[number] for number in range(len(self._paths))]
        ends = [np.append(each, cache.size(path))[1:] for each, path in zip(offsets, self._paths, strict=True)]
        self.offsets, self._ends = np.concatenate(offsets), np.concatenate(ends).astype(np.int64)
        self.files = np.repeat(np.arange(len(offsets), dtype=np.int32), [len(each) for each in offsets])

    def __len__(self) -> int:
        return len(self.offsets)

    def select(self, rows: np.ndarray) -> None:
        """Keeps only these records (int64 indices), in this order."""
        self.offsets, self._ends, self.files = self.offsets[rows], self._ends[rows], self.files[rows]

    def read(self, indices: Rows) -> list[bytes]:
        """Returns the data of these records. Safe to call from several threads."""
        rows = [int(row) for row in indices]
        found: dict[int, bytes] = {}

        def bring(near: list[int]) -> None:
            path, start = self._paths[self.files[near[0]]], int(self.offsets[near[0]])
            piece = self._cache.piece(path, start, int(max(self._ends[row] for row in near)) - start)
            for row in near:
                offset, end = int(self.offsets[row]), int(self._ends[row])
                data = piece[offset - start + HEADER_BYTES : end - start]
                found[row] = checked(path, offset, data, end - offset - FRAME_BYTES, self._cache.named)

        in_threads(bring, ((near,) for near in self._ranges(rows)))
        return [found[row] for row in rows]

    def _ranges(self, rows: list[int]) -> Iterator[list[int]]:
        """Yields groups of records to read in one range, each in the order of their file."""
        near: list[int] = []
        for row in sorted(set(rows), key=lambda row: (self.files[row], self.offsets[row])):
            if near and not (
                self.files[row] == self.files[near[-1]]
                and self.offsets[row] - self._ends[near[-1]] <= _GAP_BYTES
                and self._ends[row] - self.offsets[near[0]] <= _RANGE_BYTES
            ):
                yield near
                near = []
            near.append(row)
        if near:
            yield near


def _offsets(cache: DataCache, path: str) -> np.ndarray:
    """Returns the offsets of the records of a file. Reads it once, or only the headers where records are large."""
    size, start, piece = cache.size(path), 0, b""

    def header(offset: int, before: int) -> bytes:
        nonlocal start, piece
        if not start <= offset <= start + len(piece) - HEADER_BYTES:
            wanted = _INDEX_BYTES if before < _INDEX_BYTES // 8 else HEADER_BYTES
            start, piece = offset, cache.piece(path, offset, min(wanted, size - offset))
        return piece[offset - start : offset - start + HEADER_BYTES]

    return offsets_of(cache.named(path), size, header)
