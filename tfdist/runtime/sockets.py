"""Synchronous data parallelism of plain processes over TCP, without tf.distribute.

For programs that have used TensorFlow before they ask for a runtime: tf.distribute's multi-worker strategy, and
TensorFlow's collectives (tensorflow_peers.py), must be started before anything else, while these sockets can be opened
at any time, for an existing model. In addition to the rings of all runtimes of plain processes (control_ring.py) there
is one for gradients (RingReducer). GPU tensors pass through host memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.all_reduce_choice import GradientPath
from tfdist.runtime.host import as_list, on_host
from tfdist.runtime.operations import OUR_RING, Collective
from tfdist.runtime.peers import Peers
from tfdist.runtime.reducer import RingReducer, suits
from tfdist.runtime.ring.control_ring import ControlRing
from tfdist.runtime.ring.ring import Ring
from tfdist.runtime.ring.ring_error import RingError, user_error


class Sockets(Peers):
    """A runtime over sockets, see PeerRuntime in runtime/base.py. Created by peer_choice.py."""

    def __init__(self, config: Config, cluster: Cluster, control: ControlRing):
        super().__init__(cluster, control)
        self._last: tf.Operation | None = None  # of the gather that was traced last
        try:
            self._gradients = Ring(
                cluster, control.exchange, control.patience, share=config.strategy.communication == "auto"
            )
        except RingError as error:
            raise user_error(str(error)) from error
        self._reducer = RingReducer(self._gradients, int(config.strategy.pack_mb * 2**20))

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        suited = [index for index, tensor in enumerate(tensors) if suits(tensor)]
        others = [index for index in range(len(tensors)) if index not in set(suited)]
        reduced = dict(zip(suited, self._reducer([tensors[index] for index in suited]) if suited else [], strict=True))
        if others:
            rows = self.gather([tf.convert_to_tensor(tensors[index])[tf.newaxis] for index in others])
            reduced |= {index: tf.reduce_sum(stack, axis=0) for index, stack in zip(others, rows, strict=True)}
        return [reduced[index] for index in range(len(tensors))]

    def stacked(self, tensor: tf.Tensor) -> tf.Tensor:
        return self.gather([tensor[tf.newaxis]])[0]

    def gather(
        self, tensors: Sequence[tf.Tensor], same: Sequence[tf.Tensor] = (), stamp: Callable[[], int] = lambda: 0
    ) -> list[tf.Tensor]:
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        with tf.control_dependencies(self._previous()), on_host():
            rows = tf.numpy_function(
                functools.partial(self._exchange_rows, len(tensors), stamp),
                [*tensors, *same],
                [tensor.dtype for tensor in tensors],
            )
        rows = as_list(rows)
        if not tf.executing_eagerly():
            self._last = rows[0].op
        for row, tensor in zip(rows, tensors, strict=True):
            row.set_shape([None, *tensor.shape[1:]])
        return rows

    def _previous(self) -> list[tf.Operation]:
        """The previous gather, if it is in the graph that is being traced."""
        last = None if tf.executing_eagerly() else self._last
        return [last] if last is not None and last.graph is tf.compat.v1.get_default_graph() else []

    def _exchange_rows(self, count: int, stamp_of: Callable[[], int], *arrays: np.ndarray) -> list[np.ndarray]:
        arrays, same = arrays[:count], arrays[count:]
        lengths = np.array([len(array) for array in arrays], np.int64)
        blocks = self._control.gather_batches([lengths, *arrays], stamp_of(), same)
        parts: list[list[np.ndarray]] = [[] for _ in arrays]
        for block in blocks:
            offset = lengths.nbytes
            for part, array, length in zip(parts, arrays, np.frombuffer(block, np.int64, len(arrays)), strict=True):
                shape = (int(length), *array.shape[1:])
                part.append(np.frombuffer(block, array.dtype, math.prod(shape), offset).reshape(shape))
                offset += part[-1].nbytes
        return [np.concatenate(part) for part in parts]

    def agree_on(self, call: str) -> None:
        self._reducer.must_be_idle()
        super().agree_on(call)

    def collectives(self) -> dict[str, Collective]:
        return {
            "all_reduce": Collective(OUR_RING, lambda x: self.all_reduce([x])[0]),
            "all_gather": Collective(OUR_RING, lambda x: self.gather([x])[0]),
            "broadcast": Collective(OUR_RING, on_host=lambda array: self.broadcast([array])[0]),
        }

    def waiting_for(self) -> int | None:
        return super().waiting_for() if self._gradients.waiting_for is None else self._gradients.waiting_for

    def reduction_s(self) -> tuple[float, float] | None:
        return self._reducer.travel_s, self._reducer.wait_s

    def gradient_path(self) -> GradientPath:
        return self._gradients.gradient_path()
