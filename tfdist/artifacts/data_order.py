"""Whether the training data of a fit come in the same order when another process reads them, and by which seeds."""

from __future__ import annotations

import random
import zlib
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat import keras_epochs, tensorflow_data, tensorflow_random

_BLOCK = 624  # numbers that Python's generator makes at a time
_BLOCKS = 50_000  # that are looked at, in 0.8 s: 31 million numbers


class NoOrder(NamedTuple):
    """Why data come in another order when they are read again. why: continues "the data"; fix: what gives them one
    order; again: what gives them the order in which they have been read, if anything does."""

    why: str
    fix: str
    again: str = ""


_SEED = "call keras.utils.set_random_seed(1) before the data are made (a dataset can have its own, shuffle(n, seed=1))"
_SEED_AGAIN = "set the seed of the fit that wrote it (keras.utils.set_random_seed before the data are made)"
_NO_SEED = NoOrder("are shuffled without a seed", _SEED, _SEED_AGAIN)
_NOT_DETERMINISTIC = NoOrder(
    "are read with deterministic=False, so that what is ready first comes first",
    "drop that argument (of map, interleave, batch), or option",
)


def no_order(adapter: Any) -> NoOrder | None:
    """Why the data come in another order in another process, as far as this can be seen; None if they come in the same
    one. adapter: Keras' of the data."""
    if (read := keras_epochs.dataset_of(adapter)) is not None:
        if [0, 0] in tensorflow_data.seeds_of_order(read):
            return _NO_SEED
        parts = tensorflow_data.with_inputs(read)
        not_deterministic = read.options().deterministic is False or any(map(tensorflow_data.in_any_order, parts))
        return _NOT_DETERMINISTIC if not_deterministic else None
    seed = tensorflow_random.users_seed()
    if keras_epochs.shuffles_pages(adapter):
        return _NO_SEED if seed is None or not _seeds_python(seed) else None
    return _NO_SEED if keras_epochs.shuffles_arrays(adapter) and seed is None else None


def _seeds_python(seed: int) -> bool:
    """Whether Python's random numbers, too, were given this seed; False if very many have been drawn since."""
    present, own = random.getstate()[1][:_BLOCK], random.Random(int(seed))
    for _ in range(_BLOCKS):
        if own.getstate()[1][:_BLOCK] == present:
            return True
        own.getrandbits(32 * _BLOCK)
    return False


def shuffled_by(adapter: Any) -> list:
    """The seeds by which the data are shuffled, as far as they can be seen; JSON to be saved. By the same ones another
    process draws the same order."""
    if (read := keras_epochs.dataset_of(adapter)) is not None:
        return tensorflow_data.seeds_of_order(read)
    if keras_epochs.shuffles_arrays(adapter):
        seed = tensorflow_random.global_seed()
        return [None if seed is None else int(seed)]  # NumPy's are no JSON
    # By Python's random numbers, whose seed cannot be seen.
    return [zlib.crc32(repr(random.getstate()).encode())] if keras_epochs.shuffles_pages(adapter) else []


def other_seeds(before: list | None, now: list) -> NoOrder | None:
    """`no_order` of data that were shuffled by the seeds `before` (None: not known), and now are by others."""
    if before in (None, now):
        return None
    return NoOrder(f"are shuffled with another seed (the seeds were {before} and are {now})", _SEED, _SEED_AGAIN)


def seeded_shuffles(adapter: Any) -> list[tf.data.Dataset]:
    """The parts of the data whose next iterator comes in another order, which their seed determines."""
    read = keras_epochs.dataset_of(adapter)
    return [] if read is None else seeded_shuffles_in(read)


_KEEP_ROWS = ("BatchDataset", "CacheDataset", "ConcatenateDataset", "FlatMapDataset", "InterleaveDataset", "MapDataset")
_KEEP_ROWS += ("OptionsDataset", "PaddedBatchDataset", "ParallelBatchDataset", "ParallelInterleaveDataset")
_KEEP_ROWS += ("ParallelMapDataset", "PrefetchDataset", "RestructuredDataset", "ShuffleDataset", "UnbatchDataset")


def reads_all_rows(dataset: tf.data.Dataset) -> bool:
    """Whether a pass certainly has all rows of the shuffles in it, so that their order does not choose."""
    if not seeded_shuffles_in(dataset):
        return True
    keeps_rows = tensorflow_data.kind(dataset) in _KEEP_ROWS and not tensorflow_data.drops_a_remainder(dataset)
    return keeps_rows and all(map(reads_all_rows, tensorflow_data.inputs_of(dataset)))


def seeded_shuffles_in(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """As `seeded_shuffles`, of a dataset."""
    return [
        each
        for each in tensorflow_data.with_inputs(dataset)
        if tensorflow_data.shuffles_anew(each) and not tensorflow_data.shuffles_without_a_seed(each)
    ]
