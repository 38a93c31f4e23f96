"""Agreement on the batches: that all workers hold the same one, or else that they take the chief's."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.sockets import Sockets

END = object()  # of the data
_BYTES = 4096  # of the first and of the last row that count in a digest


class Batches:
    """Hands out the batches of one loop over data.

    The first batches are compared. If the workers read the same, each goes on with its own (and rows.py notices if that
    changes). If not (a shuffle without a seed, a generator with random numbers), all
    take the chief's from then on, over the network.
    """

    def __init__(self, runtime: Sockets):
        self._runtime = runtime
        self._from_chief: bool | None = None  # not known yet

    def next(self, iterator: Iterator) -> Any:
        """The next batch on every worker, or END on every worker."""
        try:
            batch = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            batch = END
        return self.agree(batch)

    def agree(self, batch: Any) -> Any:
        """The batch, the same on every worker: the own one, or the chief's."""
        if batch is not END:
            batch = keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
        if self._from_chief is None:
            stamp = 0 if batch is END else digest(batch)
            stamps = self._runtime.all_gather(np.array([stamp], np.uint32))
            self._from_chief = bool((stamps != stamps[0]).any())
            if self._from_chief and self._runtime.rank == 0:
                print("tfdist: the workers read different batches (a shuffle without a seed?): all take the chief's, over the network. "
                      "Call keras.utils.set_random_seed before the data is made to let each read for itself.", file=sys.stderr, flush=True)
        if self._from_chief:
            host = None if batch is END else keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf), batch)
            host = self._runtime.broadcast_object(host, "batch")
            batch = END if host is None else keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), host)
        return batch


def digest(batch: Any) -> int:
    """A checksum of shapes, types and the beginnings of the first and last rows. Raises ConfigError for what has no rows."""
    value = 1
    for leaf in keras.tree.flatten(batch):
        if leaf is None:
            continue
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise ConfigError(f"tfdist.fit cannot split a {type(leaf).__name__} over workers: convert it to a dense tensor in the dataset.")
        ends = [leaf] if leaf.shape.rank == 0 else [leaf[:1], leaf[-1:]] if len(leaf) else []
        value = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), value)
        for end in ends:
            array = np.asarray(end)
            data = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
            value = zlib.crc32(data[:_BYTES], value)
    return value
