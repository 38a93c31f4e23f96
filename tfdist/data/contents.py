"""Checksums of the data of a split. Workers compare them before training, and a resumed run with those of its snapshot.

All workers take slices of one order, by number. If a worker holds other samples, or the same samples in another order
(for example because training and evaluation parts were split at random without a seed), some samples are taken twice
and others never, and training continues as if nothing were wrong.

Arrays in memory are read whole (0.03 s for 100 MB); of very large ones, a sample of rows is read. Of other splits a few
samples are read, or the first samples of a stream. All workers read the same ones.

Parts of samples may be drawn anew at each reading (noise, augmentation); they can't be compared. But a stream of which
all parts differ at a second reading may come in another order, too. Only a part that is the same both times, and varies
from sample to sample, shows that it does not: one label for all would be the same in any order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


_COUNTS = (SAMPLED, 64, 512)  # how many samples of a stream are looked at, until they show its order
_ENOUGH_ORDERS = 10**6  # two readings in different orders then give a part the same values once in a million times


class TwoReadings(NamedTuple):
    """What two readings of a split have in common.

    steady: for each part (or checksum of the source's own), whether it was the same both times.
    shows_order: False if the samples may come in another order at each reading.
    first_samples: of a stream, count -> a checksum of each part of its first `count` samples, as far as was looked.
    """

    steady: list[bool]
    shows_order: bool
    first_samples: dict[str, list[int]]


Agree = Callable[[list[list[int]], list[bool]], list[bool]]


def read_twice(split: Split, agree: Agree = lambda columns, steady: steady) -> TwoReadings:
    """Returns what is the same at two readings of what is compared.

    agree: called after each look with the checksums of each part (a list of them for the samples of a stream), and with
    `steady`; returns which parts count as steady.
    """
    if not _is_read_in_order(split):
        first = checksums(split)
        steady = agree([[crc] for crc in first], [a == b for a, b in zip(first, checksums(split), strict=True)])
        return TwoReadings(steady, True, {})
    same, steady, looks = [], [], {}
    for count in _COUNTS:
        first, second = _columns(split, count), _columns(split, count)
        looks[str(count)] = [checksum(np.array(column)) for column in first]
        steady = agree(first, [a == b for a, b in itertools.zip_longest(first, second)])  # one of them may be empty
        same = max(itertools.compress(first, steady), key=_orders, default=[])
        if not same or _orders(same) >= math.log(_ENOUGH_ORDERS) or len(same) < count:
            break
    return TwoReadings(steady, len(set(same)) > 1 or (bool(steady) and all(steady)), looks)


def _is_read_in_order(split: Split) -> bool:
    """Whether the split is a stream that only its samples identify. The order of samples read by number is known."""
    return split.size is None and split.contents is None


def _columns(split: Split, count: int) -> list[list[int]]:
    """Returns for each part of (x, y, w) the checksums of its first `count` samples."""
    rows = [
        [checksum(np.asarray(part, object) if isinstance(part, bytes) else part) for part in tf.nest.flatten(sample)]
        for sample in split.stream(0, 1).take(count).as_numpy_iterator()
    ]
    return [list(column) for column in zip(*rows, strict=True)]


def _orders(values: Sequence[int]) -> float:
    """Returns the logarithm of the number of different orders in which values can come."""
    return math.lgamma(len(values) + 1) - sum(math.lgamma(count + 1) for count in Counter(values).values())


def identity(split: Split) -> dict[str, Any]:
    """Returns the values that `changed` compares, as JSON types."""
    return {
        "size": split.size,
        "stream_size": _stream_size(split),
        "checksums": checksums(split),
        "first_samples": read_twice(split).first_samples if _is_read_in_order(split) else {},
    }


def _stream_size(split: Split) -> int | None:
    """Returns the number of samples of a stream if TensorFlow knows it without reading; else, or if no stream, None."""
    return None if split.size is not None or split.stream is missing else known_length(split.stream(0, 1))


def known_length(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements if TensorFlow knows it without reading and it is finite; else None."""
    known = int(dataset.cardinality())
    return known if known >= 0 else None


def changed(split: Split, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes the difference between two results of `identity`, `now` being that of `split`; "" if there is none.

    Parts that differ from one reading to the next are not reported, unless nothing shows that their order is the same.
    """
    for kind in ("size", "stream_size"):
        if before.get(kind, now[kind]) != now[kind]:
            return f"{split.name} had {_counted(before[kind])}, and has {_counted(now[kind])}"
    pairs = [(before["checksums"], now["checksums"])] if before.get("checksums") is not None else []
    pairs += [(old, now["first_samples"].get(count, old)) for count, old in before.get("first_samples", {}).items()]
    differing = [(old, new) for old, new in pairs if old != new]
    if not differing:
        return ""
    steady, shows_order, _ = read_twice(split)
    comparable = shows_order and all(isinstance(old, list) and len(old) == len(new) for old, new in differing)
    if comparable and not any(a != b and same for pair in differing for a, b, same in zip(*pair, steady, strict=False)):
        return ""
    return f"{split.name} had other samples, or another order of them"


def _counted(size: Any) -> str:
    return "no known number of samples" if size is None or size < 0 else f"{size:,} samples"


def must_be_same_data(runtime: Runtime, split: Split) -> None:
    """Raises DataError on all workers unless all hold the same samples in the same order. A collective call.

    Parts that differ from one reading to the next on the same worker, such as noise drawn in __getitem__, are not
    compared, unless nothing shows that the order is the same.
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

    def agree(columns: list[list[int]], steady: list[bool]) -> list[bool]:
        compare([len(steady)])  # a stream that is empty here alone has no parts
        agreed = [bool(each) for each in runtime.all_gather(np.array(steady, np.uint8)).min(axis=0)]
        compare([column if same else [] for column, same in zip(columns, agreed, strict=False)])
        return agreed

    def compare(values: list) -> None:
        if ranks := _others(_gathered(runtime, split, values)):
            raise DataError(
                f"Rank {', '.join(map(str, ranks))} and rank 0 have different samples, or a different order, in"
                f" {split.name}: {_FIX}."
            )

    if not read_twice(split, agree).shows_order:
        compare(found)


_FIX = (
    "all workers must have the same data in the same order; seed all shuffling, drawing and splitting, for example with"
    " np.random.default_rng(0), and give all of them the same files and package versions"
)


def _gathered(runtime: Runtime, split: Split, parts: Sequence[Any]) -> np.ndarray:
    """Returns int64 [workers]: one number per worker for the type and the contents of its samples."""
    return runtime.all_gather(np.array([checksum_of([repr((split.element_spec, list(parts))).encode()])], np.int64))[
        :, 0
    ]


def _others(values: np.ndarray) -> list[int]:
    """Returns the ranks whose value differs from rank 0's."""
    return np.flatnonzero(values != values[0]).tolist()
