"""Makes workers agree on the batches: either all read the same one, or all take the chief's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import google_crc32c
import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_epochs
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.control.terminal import say
from tfdist.runtime.base import PeerRuntime

END = object()  # of the data
_stamp = 0


def batch_stamp() -> int:
    """The checksum of the batch that the next step takes; 0 if workers need not hold the same one."""
    return _stamp


def _set_stamp(stamp: int) -> None:
    global _stamp
    _stamp = stamp


class Batches:
    """Hands out the batches of one loop over data.

    The first batches are compared. If the workers read the same, each continues with its own, and the messages of the
    step carry a checksum of the whole batch, so that a later difference is an error. If not (a shuffle without a seed,
    a generator with random numbers), all take the chief's from then on, over the network.

    Args: loop, its name: a worker that is in another loop (as when only the chief predicts in a callback) gets an
    error.
    """

    def __init__(self, runtime: PeerRuntime, loop: str):
        self._runtime, self._loop = runtime, loop
        self._have_met = False
        self._from_chief: bool | None = None  # not known yet
        self._like: Any = END  # the last batch of this worker

    def begin(self) -> None:
        """Begins a new loop over data."""
        self._have_met = False

    def next(self, iterator: Iterator) -> Any:
        """The next batch on every worker, or END on every worker."""
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            batch = END
        return self.agree(batch)

    def agree(self, batch: Any) -> Any:
        """Returns the batch, the same on every worker: this worker's own, or the chief's."""
        if not self._have_met:
            self._runtime.broadcast_object(None, self._loop)
            self._have_met = True
        if batch is not END:
            batch = self._like = keras.tree.map_structure(_as_tensor, batch)
        _set_stamp(0)
        if not self._from_chief:
            stamp = 0 if batch is END else digest(batch)
            if self._from_chief is None:
                self._compare(stamp)
                if batch is END and not self._from_chief:
                    raise DataError(
                        "The data do not contain a single batch: give x, or the dataset, at least one sample."
                    )
            if not self._from_chief:
                _set_stamp(stamp)
                return batch
        return self._of_the_chief(batch)

    def _compare(self, stamp: int) -> None:
        stamps = self._runtime.all_gather(np.array([stamp], np.uint32))
        self._from_chief = bool((stamps != stamps[0]).any())
        if self._from_chief and self._runtime.rank == 0:
            say(
                "the workers read different batches (a shuffle without a seed, or a PyDataset that changes itself?):"
                " all use the chief's, over the network. Call keras.utils.set_random_seed before the data is created to"
                " let each worker read its own."
            )

    def _of_the_chief(self, batch: Any) -> Any:
        leaves = [] if batch is END else keras.tree.flatten(batch)
        message = None
        if self._runtime.rank == 0 and batch is not END:
            # In TensorFlow's own serialized form, which supports every type.
            message = [
                (
                    None
                    if leaf is None
                    else [tf.as_dtype(leaf.dtype).name, np.frombuffer(tf.io.serialize_tensor(leaf).numpy(), np.uint8)]
                )
                for leaf in leaves
            ]
        message = self._runtime.broadcast_object(message, "batch")
        if message is None:
            return END
        if self._like is END or len(keras.tree.flatten(self._like)) != len(message):
            raise DataError(
                f"The batches of rank {self._runtime.rank} differ in structure from the chief's, which have"
                f" {len(message)} tensors: give all workers the same data."
            )
        received = [None if leaf is None else tf.io.parse_tensor(leaf[1].tobytes(), leaf[0]) for leaf in message]
        return keras.tree.pack_sequence_as(self._like, received)


def _as_tensor(leaf: Any) -> Any:
    """Returns None for the placeholders of None in Keras' iterators, and tensors for the NumPy arrays of
    train_on_batch."""
    leaf = keras_epochs.none_for_placeholder(leaf)
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def digest(batch: Any) -> int:
    """A checksum of everything in a batch: shapes, types and every byte. Raises ConfigError for leaves without rows."""
    value = 1
    for leaf in keras.tree.flatten(batch):
        if leaf is None:
            continue
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise ConfigError(
                f"tfdist.fit cannot split a {type(leaf).__name__} over workers: convert it to a dense tensor in the"
                " dataset."
            )
        array = np.asarray(leaf)
        value = zlib.crc32(f"{array.shape} {array.dtype}".encode(), value)
        data = (
            repr(array.tolist()).encode()
            if array.dtype == object
            else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
        value = google_crc32c.extend(value, data)
    return value
