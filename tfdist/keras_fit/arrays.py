"""Shuffled arrays, and batches of a PyDataset, in the same order on every worker though nobody has set a seed.

Keras shuffles arrays with TensorFlow's random numbers. Where keras.utils.set_random_seed was called alike on all
workers these agree, and Keras' own order is kept (it is then the same in every epoch). Else the arrays become a dataset
that draws a new order in each epoch from a seed of the chief's. The batches of a PyDataset it shuffles with Python's
random numbers, which all take from the chief.
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

from tfdist.compat import keras_arrays, tensorflow_random
from tfdist.control.exit_codes import DataError
from tfdist.keras_fit.epoch_backup import EpochBackup
from tfdist.runtime.base import Runtime

_DEFAULT_BATCH = 32  # Keras'


def shuffle_alike(
    runtime: Runtime, x: Any, y: Any, arguments: dict[str, Any], backup: EpochBackup | None
) -> tuple[Any, Any]:
    """(x, y) for `model.fit`; `arguments` is changed to suit.

    Called by all workers. A backup keeps the seed for the runs that resume.
    """
    if isinstance(x, keras.utils.PyDataset) and arguments["shuffle"]:
        _draw_alike(runtime)
        return x, y
    leaves = [leaf for leaf in keras.tree.flatten((x, y, arguments["sample_weight"])) if leaf is not None]
    if (
        _random_numbers_agree(runtime)
        or arguments["shuffle"] is not True
        or not all(isinstance(leaf, (np.ndarray, tf.Tensor)) for leaf in leaves)
    ):
        return x, y
    size = len(leaves[0])
    if any(len(leaf) != size for leaf in leaves):
        raise DataError(
            f"The arrays have {', '.join(str(len(leaf)) for leaf in leaves)} samples: give x, y and sample_weight as"
            " many rows each."
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
    size = next(len(leaf) for leaf in keras.tree.flatten(prepared) if leaf is not None)
    steps = arguments["steps_per_epoch"]
    batch = arguments["batch_size"] or (math.ceil(size / steps) if steps else _DEFAULT_BATCH)  # as Keras does
    arguments["validation_batch_size"] = arguments["validation_batch_size"] or arguments["batch_size"]
    arguments.update(sample_weight=None, class_weight=None, batch_size=None, validation_split=0.0, shuffle=False)
    return _in_drawn_order(prepared, size, batch, seed), None


def _in_drawn_order(arrays: Any, size: int, batch: int, seed: int) -> tf.data.Dataset:
    """Batches of the rows of all arrays, in another order in each epoch."""
    tensors = _mapped(tf.convert_to_tensor, arrays)
    order = tf.data.Dataset.range(size).shuffle(size, seed=seed).batch(batch)
    return order.map(lambda rows: _mapped(lambda tensor: tf.gather(tensor, rows), tensors)).prefetch(2)


def _mapped(function: Callable[[Any], Any], arrays: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), arrays)


def _draw_alike(runtime: Runtime) -> None:
    """Gives Python's random numbers of all workers the chief's state, unless they have one."""
    state = random.getstate()
    digests = runtime.all_gather(np.array([zlib.crc32(repr(state).encode())], np.uint32))
    if (digests != digests[0]).any():
        version, numbers, following = runtime.broadcast_object(state, "random")
        random.setstate((version, tuple(numbers), following))


def _random_numbers_agree(runtime: Runtime) -> bool:
    """Whether a seed was set, and all workers have drawn alike since."""
    states = runtime.all_gather(np.array([tensorflow_random.state_digest()], np.uint32))
    return bool(states.all() and (states == states[0]).all())
