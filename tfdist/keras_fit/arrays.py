"""Gives shuffled arrays, and the batches of a PyDataset, the same order on every worker even if nobody has set a seed.

Keras shuffles arrays with TensorFlow's random numbers. If keras.utils.set_random_seed was called alike on all workers,
these agree, and Keras' own order is kept (it is then the same in every epoch). Otherwise the arrays become a dataset
that draws a new order in each epoch from a seed of the chief's. Keras shuffles the batches of a PyDataset with Python's
random numbers, whose state all workers take from the chief.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.state import restore_generator_states
from tfdist.compat import keras_arrays, tensorflow_random
from tfdist.control.exit_codes import DataError
from tfdist.keras_fit.epoch_backup import EpochBackup
from tfdist.runtime.base import Runtime

_DEFAULT_BATCH = 32  # Keras'


def shuffle_alike(
    runtime: Runtime, x: Any, y: Any, arguments: dict[str, Any], backup: EpochBackup | None
) -> tuple[Any, Any]:
    """Returns (x, y) for `model.fit`, and changes `arguments` to match.

    Called by all workers. A backup keeps the seed for the runs that resume.
    """
    if isinstance(x, keras.utils.PyDataset) and arguments["shuffle"]:
        _draw_alike(runtime)
        return x, y
    agree, arrays = _random_numbers_agree(runtime), (x, y, arguments["sample_weight"])
    if agree or not arguments["shuffle"] or not keras_arrays.are_arrays(*arrays):
        return x, y
    sizes = [leaf.shape[0] if leaf.shape else 1 for leaf in keras.tree.flatten(arrays) if leaf is not None]
    if len(set(sizes)) > 1:
        raise DataError(
            f"The arrays have {', '.join(map(str, sizes))} samples: give x, y and sample_weight as many rows each."
        )
    seed = int(np.random.SeedSequence().generate_state(1)[0] // 2)
    if backup is not None:
        seed = backup.order = seed if backup.order is None else backup.order
    seed = int(runtime.broadcast([np.array(seed)])[0])
    weight = arguments["sample_weight"]
    if arguments["validation_split"] and arguments["validation_data"] is None:
        (x, y, weight), held_back = keras_arrays.split((x, y, weight), arguments["validation_split"])
        held_x, held_y, held_weight = held_back
        arguments["validation_data"] = keras.utils.pack_x_y_sample_weight(held_x, held_y, held_weight)
    prepared = keras_arrays.prepared(x, y, weight, arguments["class_weight"])
    size = next(int(leaf.shape[0]) for leaf in keras.tree.flatten(prepared) if leaf is not None)
    steps = arguments["steps_per_epoch"]
    batch = arguments["batch_size"] or (max(math.ceil(size / steps), 1) if steps else _DEFAULT_BATCH)  # as Keras does
    arguments["validation_batch_size"] = arguments["validation_batch_size"] or arguments["batch_size"]
    order = _within_batches(size, batch, seed) if arguments["shuffle"] == "batch" else _all(size, batch, seed)
    arguments.update(sample_weight=None, class_weight=None, batch_size=None, validation_split=0.0, shuffle=False)
    return _in_order(prepared, order), None


def _all(size: int, batch: int, seed: int) -> tf.data.Dataset:
    """Batches of row numbers, in another order in each epoch."""
    return tf.data.Dataset.range(size).shuffle(max(size, 1), seed=seed).batch(batch)


def _within_batches(size: int, batch: int, seed: int) -> tf.data.Dataset:
    """Batches of the same row numbers in each epoch, each batch in another order: Keras' shuffle="batch"."""
    numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)
    in_place = tf.data.Dataset.range(size).batch(batch)
    return tf.data.Dataset.zip(in_place, numbers).map(_shuffled)


def _shuffled(rows: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    drawn = tf.random.stateless_uniform(tf.shape(rows), tf.stack([number, tf.zeros_like(number)]))
    return tf.gather(rows, tf.argsort(drawn))


def _in_order(arrays: Any, order: tf.data.Dataset) -> tf.data.Dataset:
    """The rows of all arrays, a batch at a time."""
    with tf.device("CPU"):  # all the data may be too much for a GPU
        tensors = _mapped(tf.convert_to_tensor, arrays)
    return order.map(lambda rows: _mapped(lambda tensor: tf.gather(tensor, rows), tensors)).prefetch(2)


def _mapped(function: Callable[[Any], Any], arrays: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), arrays)


def _draw_alike(runtime: Runtime) -> None:
    """Gives Python's random numbers of all workers the chief's state, unless they already agree."""
    state = random.getstate()
    digests = runtime.all_gather(np.array([zlib.crc32(repr(state).encode())], np.uint32))
    if (digests != digests[0]).any():
        restore_generator_states({"python": runtime.broadcast_object(state, "random")})


def _random_numbers_agree(runtime: Runtime) -> bool:
    """Whether the user has set a seed, and all workers have drawn alike since."""
    states = runtime.all_gather(np.array([tensorflow_random.users_state_digest()], np.uint32))
    return bool(states.all() and (states == states[0]).all())
