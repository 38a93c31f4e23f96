"""Checksums of what a split holds: workers compare them before they train, and a run that goes on with its snapshot.

Each worker takes its slices of one order, by number. If one of them holds other samples, or the same ones in another
order, for example because its train and evaluation part were split at random without a seed, then some samples are
taken twice, others never, and training goes on as if nothing were wrong.

Arrays in memory are read whole (0.03 s for 100 MB), very large ones by a sample of their rows. Of other splits a few
samples are read, or the first of a stream. All workers read the same ones.
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
    """A checksum for each tensor of (x, y, w), or for what the source has told to look at instead."""
    if split.contents is not None:
        return split.contents()
    if split.size is None:
        samples = [tf.nest.flatten(sample) for sample in split.stream(0, 1).take(SAMPLED).as_numpy_iterator()]
        return [checksum(np.stack(column)) for column in zip(*samples, strict=True)]
    return [checksum(host_view(part)) for part in tf.nest.flatten(split.fetch(tf.constant(sampled_rows(split.size))))]


def identity(split: Split) -> dict[str, Any]:
    """The values that `changed` compares, for JSON."""
    return {"size": split.size, "stream_size": _stream_size(split), "checksums": checksums(split)}


def _stream_size(split: Split) -> int | None:
    """The number of samples of a stream, where TensorFlow knows it without reading; None: not known, or no stream."""
    return None if split.size is not None or split.stream is missing else known_length(split.stream(0, 1))


def known_length(dataset: tf.data.Dataset) -> int | None:
    """The number of elements, where TensorFlow knows it without reading and there is an end; else None."""
    known = int(dataset.cardinality())
    return known if known >= 0 else None


def changed(split: Split, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The difference between two `identity`s, of which `now` is that of `split`; "" if there is none.

    Nothing is said of what differs from one reading to the next.
    """
    for kind in ("size", "stream_size"):
        if before.get(kind, now[kind]) != now[kind]:
            return f"{split.name} had {_counted(before[kind])}, and has {_counted(now[kind])}"
    old, new = before.get("checksums"), now["checksums"]
    # An earlier version may have looked at less of the source.
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
    """Raises DataError on all workers unless all hold the same samples in the same order. A collective.

    What differs from one reading to the next on the same worker, such as noise that is drawn in __getitem__, is not
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
    # A stream is told by what it yields: if all of that changes, so may the order.
    if ranks := _others(_gathered(runtime, split, kept if steady or split.size is not None else found)):
        raise DataError(
            f"Rank {', '.join(map(str, ranks))} and rank 0 hold different samples, or an order that differs, in"
            f" {split.name}: {_FIX}."
        )


_FIX = (
    "all workers must hold the same data in the same order; seed what shuffles, draws or splits it, for example by "
    "np.random.default_rng(0), and give all of them the same files and package versions"
)


def _gathered(runtime: Runtime, split: Split, parts: Sequence[int]) -> np.ndarray:
    """int64 [workers]: one number for the kind and the contents of the samples of each."""
    return runtime.all_gather(np.array([checksum_of([repr((split.element_spec, list(parts))).encode()])], np.int64))[
        :, 0
    ]


def _others(values: np.ndarray) -> list[int]:
    """The ranks whose value is not rank 0's."""
    return np.flatnonzero(values != values[0]).tolist()
