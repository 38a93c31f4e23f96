"""Finds out, by trying, whether a user's augmentation mixes samples: whether its result for a sample depends on the
other samples of the batch. row_mixing.py does the same for models.

A replica augments several micro-batches in one call if that is cheaper, and a micro-batch is a part of a global batch.
So an augmentation that mixes samples (mixup by `tf.roll`, a mean over the batch), or uses another sample's seed, would
depend on how the data are read and on the number of workers. Such an augmentation is given whole micro-batches. If
these are parts of a global batch it is refused, unless --row_mixing=replica permits it to mix them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow_functions import always_traced
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data import augment, input_pipeline, order
from tfdist.data.augmentation_names import AUGMENTATIONS
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.reading import Reading
from tfdist.data.sources.split import Split
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import any_worker
from tfdist.training.row_checks.added_losses import take_rows
from tfdist.training.row_checks.row_proof import rows_tried
from tfdist.training.row_checks.row_trials import come_in_parts
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import ROUNDED, TOLERANCE, any_differ, differ

_ROWS = 8  # samples in the first trial, and the most of them that are looked at one by one
_SLOW_S = 5.0  # after a trial as long as that, one with more samples is not made: each worker would start late
# What happens to one batch of fifty shows in 200 draws with a chance of 98 %. No more are made than this time allows.
_DRAWS, _DRAWS_S = 200, 0.3

Outputs = Callable[[Sequence[int], int], list[np.ndarray]]


def with_whole_batches_if_it_mixes(config: Config, runtime: Runtime, split: Split, plan: BatchPlan) -> Split:
    """Returns the split, to be read one micro-batch at a time if its augmentation mixes samples. A collective call,
    unless the augmentation is a built-in one. Raises ConfigError if it mixes and a global batch comes in parts."""
    name = config.data.augment
    if name in AUGMENTATIONS:
        return split
    found = False
    with generators_kept():
        with contextlib.suppress(Exception):  # errors of user code are reported later, when it is traced
            found = _mixes(augment.load_augmentation(name), split, config.run.seed, plan)
        tf.random.set_seed(config.run.seed)  # as before: so a dataset that draws without a seed draws the same
    if not any_worker(runtime, found):
        return split
    if config.model.row_mixing == "refuse" and come_in_parts(config, runtime, plan):
        raise ConfigError(
            f"The result of --augment={name} for a sample depends on the other samples of its batch, on their number or"
            " on its place among them, but workers and micro-batches have some of the samples each, so they would train"
            " on other data than one process: make it depend on the sample and its own seed only, train on one device"
            " with --accumulation=1, or let it mix the samples of its micro-batch with --row_mixing=replica."
        )
    return dataclasses.replace(split, cheap=False)


def _mixes(function: augment.Augmentation | None, split: Split, seed: int, plan: BatchPlan) -> bool:
    """Returns whether the augmentation mixes a few samples, a micro-batch of them, or more."""
    numbers = (_ROWS, plan.micro_batch, rows_tried(plan.global_batch, plan.micro_batch, split.sample_bytes))
    reading = Reading(seed, False, threads=1)  # one batch is read, not several in advance
    dataset = input_pipeline.train_dataset(split, reading, plan=BatchPlan(max(numbers), 1, 1), replica=0, consumed=0)
    samples = next(iter(dataset))[:2]
    for number in dict.fromkeys(numbers):
        begun = time.monotonic()
        with contextlib.suppress(Exception):  # errors of user code, which may take another number of samples only
            if _mixes_samples(function, take_rows(samples, range(number)), seed, number):
                return True
        if number >= plan.micro_batch and time.monotonic() - begun > _SLOW_S:
            break
    return False


def _mixes_samples(function: augment.Augmentation | None, samples: Any, seed: int, number: int) -> bool:
    given = (*samples, order.element_seeds(tf.range(number, dtype=tf.int64), seed))
    traced: dict[int, Any] = {}

    def outputs(places: Sequence[int], draw: int) -> list[np.ndarray]:
        """Returns the augmented samples of these places. The same `draw` gives the same random numbers of NumPy, if
        any."""
        if draw not in traced or not stateless:
            keras.utils.set_random_seed(draw)
            traced[draw] = always_traced(function)
        return _numbers(traced[draw](*take_rows(given, places)))

    stateless, every = False, range(number)
    together = outputs(every, 0)
    stateless = not any_differ(together, outputs(every, 1), TOLERANCE)
    if _depends_on_others(outputs, together, number):
        return True
    return stateless and (
        _depends_on_its_place(outputs, together, number)
        or (number == _ROWS and _mixes_now_and_then(traced[0], samples, seed))
    )


def _numbers(augmented: Any) -> list[np.ndarray]:
    values = tf.nest.flatten(augmented)
    return [tf.cast(value, tf.float64).numpy() for value in values if value.dtype.is_numeric or value.dtype.is_bool]


def _depends_on_others(outputs: Outputs, together: Sequence[np.ndarray], number: int) -> bool:
    found = any(
        differ(whole[place], alone[place], TOLERANCE)
        for place in (range(number) if number <= _ROWS else (0, number - 1))
        for whole, alone in zip(together, outputs([place] * number, 0), strict=True)
    )
    # If the result cannot be repeated, a difference tells nothing.
    return found and not any_differ(together, outputs(range(number), 0), TOLERANCE)


def _depends_on_its_place(outputs: Outputs, together: Sequence[np.ndarray], number: int) -> bool:
    """Returns whether a sample's place or the number of rows matters: a division by that number, or one seed for each
    place."""
    places = [number - 1, 1, 0]
    return any(differ(whole[places], moved, ROUNDED) for whole, moved in zip(together, outputs(places, 0), strict=True))


def _mixes_now_and_then(augmented: Callable[..., Any], samples: Any, seed: int) -> bool:
    """Returns whether the first _ROWS samples are mixed with the seeds of other positions: a coin, tossed with one of
    these seeds, may decide whether a batch is mixed. Compares a sample among the others with the same sample, and the
    same seed, among copies of itself."""
    turns = _DRAWS // _ROWS
    positions = tf.range(turns * _ROWS * _ROWS, dtype=tf.int64)
    seeds = order.element_seeds(positions, seed).numpy().reshape(turns, _ROWS, _ROWS, 2)
    begun = time.monotonic()
    for turn in range(turns):
        place = turn % _ROWS
        # In one call: a seed that the sample has in each draw of this turn.
        copies = _numbers(augmented(*take_rows(samples, [place] * _ROWS), tf.constant(seeds[turn, :, place])))
        for draw in range(_ROWS):
            given = (*samples, tf.constant(seeds[turn, draw]))
            one, alone = _row(augmented(*given), place), [copy[draw] for copy in copies]
            if any_differ(one, alone, ROUNDED) and not any_differ(one, _row(augmented(*given), place), TOLERANCE):
                return True
            if time.monotonic() - begun > _DRAWS_S:
                return False
    return False


def _row(augmented: Any, place: int) -> list[np.ndarray]:
    return [values[0] for values in _numbers(take_rows(augmented, [place]))]
