"""Checksums of the data of a split. Workers compare them before training, and a resumed run with those of its snapshot.

All workers take slices of one order, by number. If a worker holds other samples, or the same samples in another order
(for example because training and evaluation parts were split at random without a seed), some samples are taken twice
and others never, and training continues as if nothing were wrong.

Arrays in memory are read whole (0.03 s for 100 MB); of very large ones, a sample of rows is read. Of other splits a few
samples are read, or the first samples of a stream. All workers read the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import DataError
from tfdist.data.checksums import SAMPLED, checksum, checksum_of, sampled_rows
from tfdist.data.sources.split import Split, missing
from tfdist.runtime.base import Runtime
from tfdist.runtime.host import host_view


def checksums(split: Split) -> list[int]:
    """Returns a checksum for each tensor of (x, y, w), or those that the source computes itself (`Split.contents`)."""
    if split.contents is not None:
        return split.contents()
    if split.size is None:
        samples = [tf.nest.flatten(sample) for sample in split.stream(0, 1).take(SAMPLED).as_numpy_iterator()]
        return [checksum(np.stack(column)) for column in zip(*samples, strict=True)]
    return [checksum(host_view(part)) for part in tf.nest.flatten(split.fetch(tf.constant(sampled_rows(split.size))))]


def identity(split: Split) -> dict[str, Any]:
    """Returns the values that `changed` compares, as JSON types."""
    return {"size": split.size, "stream_size": _stream_size(split), "checksums": checksums(split)}


def _stream_size(split: Split) -> int | None:
    """Returns the number of samples of a stream if TensorFlow knows it without reading; else, or if no stream, None."""
    return None if split.size is not None or split.stream is missing else known_length(split.stream(0, 1))


def known_length(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements if TensorFlow knows it without reading and it is finite; else None."""
    known = int(dataset.cardinality())
    return known if known >= 0 else None


def changed(split: Split, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes the difference between two results of `identity`, `now` being that of `split`; "" if there is none.

    Parts that differ from one reading to the next are not reported.
    """
    for kind in ("size", "stream_size"):
        if before.get(kind, now[kind]) != now[kind]:
            return f"{split.name} had {_counted(before[kind])}, and has {_counted(now[kind])}"
    old, new = before.get("checksums"), now["checksums"]
    # An earlier version may have checked less of the source.
    looked_at = len(old) if split.contents is not None and isinstance(old, list) else None
    if old is None or old == (new := new[:looked_at]):
        return ""
    alike = isinstance(old, list) and len(old) == len(new)
    if alike and not any(a != b and b == c for a, b, c in zip(old, new, checksums(split)[:looked_at], strict=True)):
        return ""
    return f"{split.name} had other samples, or another order of them"


def _counted(size: Any) -> str:
    return "no known number of samples" if size is None or size < 0 else f"{size:,} samples"


def must_be_same_data(runtime: Runtime, split: Split) -> None:
    """Raises DataError on all workers unless all hold the same samples in the same order. A collective call.

    Parts that differ from one reading to the next on the same worker, such as noise drawn in __getitem__, are not
    compared.
    """
    if runtime.size == 1:
        return
    known = _stream_size(split) if split.size is None else split.size
    sizes = runtime.all_gather(np.array([-1 if known is None else known], np.int64))[:, 0]
    if ranks := _others(sizes):
        raise DataError(
            f"Rank {ranks[0]} has {_counted(sizes[ranks[0]])} in {split.name}, rank 0 has {_counted(sizes[0])}: {_FIX}."
        )
    found = checksums(split)
    if not _others(_gathered(runtime, split, found)):
        return
    steady = sum(1 << part for part, (a, b) in enumerate(zip(found, checksums(split), strict=False)) if a == b)
    steady = int(np.bitwise_and.reduce(runtime.all_gather(np.array([steady], np.int64))[:, 0]))
    kept = [crc if steady >> part & 1 else 0 for part, crc in enumerate(found)]
    # A stream is identified by what it yields: if no part of that is steady, its order may vary, too; compare all.
    if ranks := _others(_gathered(runtime, split, kept if steady or split.size is not None else found)):
        raise DataError(
            f"Rank {', '.join(map(str, ranks))} and rank 0 have different samples, or a different order, in"
            f" {split.name}: {_FIX}."
        )


_FIX = (
    "all workers must have the same data in the same order; seed all shuffling, drawing and splitting, for example with"
    " np.random.default_rng(0), and give all of them the same files and package versions"
)


def _gathered(runtime: Runtime, split: Split, parts: Sequence[int]) -> np.ndarray:
    """Returns int64 [workers]: one number per worker for the type and the contents of its samples."""
    return runtime.all_gather(np.array([checksum_of([repr((split.element_spec, list(parts))).encode()])], np.int64))[
        :, 0
    ]


def _others(values: np.ndarray) -> list[int]:
    """Returns the ranks whose value differs from rank 0's."""
    return np.flatnonzero(values != values[0]).tolist()
