"""Finds the bad values in samples after a loss was not finite or a label fitted no output: which sample, which part and
which value. Values that are not finite are bad, and so are whole numbers outside a part's `Choices`.

The search runs only after such an event, over the samples just trained on or evaluated: checking all samples all the
time would cost too much, and a NaN that no loss depends on does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.data import order, streams
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.reading import Reading
from tfdist.data.sources.split import Sample, Split, places

_CHUNK = 64  # samples read at once
_SECONDS = 20.0  # a slow source is not read for longer
_NAMED = 3


class Choices(NamedTuple):
    """The whole numbers that a part of a sample may have. words: describes any other number, for messages."""

    least: int
    largest: int
    words: str


def classes(count: int) -> Choices:
    """Returns the valid labels."""
    return Choices(0, count - 1, f"which is not a class of 0 to {count - 1}")


def rows(count: int) -> Choices:
    """Returns the valid row numbers of a table. As in Keras, -1 is the last row."""
    return Choices(-count, count - 1, f"where its table has the rows 0 to {count - 1}")


NONE: Mapping[str, Choices] = {}  # by place: see data/sources/split.py


def find_trained(
    split: Split,
    plan: BatchPlan,
    reading: Reading,
    *,
    first: int,
    count: int,
    choices: Mapping[str, Choices] = NONE,
) -> str:
    """Searches `count` samples of the training order from position `first` on. For a stream, `reading.cut` must be set.
    Returns the text of `_sentence`."""
    positions = np.arange(first, first + count)
    if split.size is None:
        assert reading.cut
        numbered = streams.ordered_stream(split, plan, reading, first, reading.cut).take(count).batch(1)
        chunks = ((positions[at : at + 1], split.samples(read)) for at, (_, read) in enumerate(numbered))
        return _sentence(split, chunks, choices)
    samples = order.sample_of(tf.constant(positions, tf.int64), split.size, reading.seed, reading.shuffle)
    return _sentence(split, _read(split, samples.numpy()), choices)


def find_evaluated(split: Split, *, limit: int = 0, choices: Mapping[str, Choices] = NONE) -> str:
    """Searches the samples of an evaluation. Returns the text of `_sentence`."""
    if split.size is None:
        samples = split.stream(0, 1).take(limit or -1)
        return _sentence(
            split,
            ((np.array([at]), tf.nest.map_structure(lambda t: t[None], sample)) for at, sample in enumerate(samples)),
            choices,
        )
    return _sentence(split, _read(split, np.arange(min(limit or split.size, split.size))), choices)


def _read(split: Split, samples: np.ndarray) -> Iterator[tuple[np.ndarray, Sample]]:
    for start in range(0, len(samples), _CHUNK):
        chunk = samples[start : start + _CHUNK]
        yield chunk, split.fetch(tf.constant(chunk, tf.int64))


def _sentence(split: Split, chunks: Iterator[tuple[np.ndarray, Sample]], choices: Mapping[str, Choices]) -> str:
    """Returns "Sample 70 of NAME has NaN in x at [3]." and perhaps two more; an empty text if nothing was found."""
    word = "Sample" if split.size is not None else "The sample at position"
    found: dict[int, str] = {}
    began = time.monotonic()
    for numbers, sample in chunks:
        for place, part in zip(places(sample), tf.nest.flatten(sample), strict=True):
            for row, value in _bad(part.numpy(), choices.get(place)):
                found.setdefault(int(numbers[row]), f"{value.format(place)}")
        if len(found) >= _NAMED or time.monotonic() - began > _SECONDS:
            break
    return " ".join(f"{word} {number} of {split.name} has {what}." for number, what in sorted(found.items())[:_NAMED])


def _bad(values: np.ndarray, choices: Choices | None) -> Iterator[tuple[int, str]]:
    """Yields (row, what is wrong in it) for a part of several samples."""
    none = ""
    if choices and values.dtype.kind in "iu":
        wrong = (values < choices.least) | (values > choices.largest)
        none = f", {choices.words}"
    elif values.dtype.kind == "f":
        wrong = ~np.isfinite(values)
    else:
        return
    for row in np.flatnonzero(wrong.reshape(len(values), -1).any(axis=1)):
        at = tuple(np.argwhere(wrong[row])[0].tolist())
        value = values[row][at]
        what = f"{value}" if none else "NaN" if np.isnan(value) else "an infinite value"
        yield int(row), f"{what} in {{}}" + (f" at {list(at)}" if at else "") + none
