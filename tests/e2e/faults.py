"""Models that break a run, given to tfdist as `tests.e2e.faults:NAME`."""

from __future__ import annotations

import itertools
import os
import time

import keras

from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.models.mlp import mlp
from tfdist.runtime.horovod import Horovod
from tfdist.runtime.multi_worker import MultiWorker
from tfdist.runtime.ring.ring import Ring
from tfdist.training.update import DataParallel


def unreduced_on_rank_1(x_spec, num_outputs: int) -> keras.Model:
    """The mlp; rank 1 takes part in every reduction, and then continues with its own gradients."""
    for kind in (Horovod, MultiWorker):

        def all_reduce(self, tensors, reduce=kind.all_reduce):
            reduced = reduce(self, tensors)
            if self.rank != 1 or len(tensors) < 2:
                return reduced
            return [tensor + 0.0 * other for tensor, other in zip(tensors[:-1], reduced[:-1], strict=True)] + reduced[
                -1:
            ]

        kind.all_reduce = all_reduce
    return mlp(x_spec=x_spec, num_outputs=num_outputs, widths=(16,))


class Keeps(keras.layers.Layer):
    """A layer with state of the type `kind`, which it computes from the rows that it sees."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def build(self, shape):
        self.kept = self.add_weight(shape=(), dtype=self.kind, initializer="zeros", trainable=False, name="kept")

    def call(self, x):
        self.kept.assign(keras.ops.cast(1e6 * keras.ops.mean(x), self.kind))
        return x


def keeping(x_spec, num_outputs: int, kind: str) -> keras.Model:
    """The mlp behind such a layer: every replica gets another state."""
    inputs = keras.Input(x_spec.shape)
    return keras.Model(inputs, mlp(x_spec=x_spec, num_outputs=num_outputs, widths=(16,))(Keeps(kind)(inputs)))


def slow_optimizer_on_rank_1(x_spec, num_outputs: int) -> keras.Model:
    """The mlp; an update takes 40 ms, from the 20th on 80 ms more on rank 1. (With 4 ms, a worker that had lost its
    core for a moment was taken for a slow one.)"""
    import numpy as np
    import tensorflow as tf

    updates = itertools.count(1)

    def pause() -> np.ndarray:
        time.sleep(0.12 if is_slow and next(updates) > 20 else 0.04)
        return np.int32(0)

    is_slow = '"index": 1' in os.environ["TF_CONFIG"]

    def apply(self, pieces, apply=DataParallel.apply):
        with tf.control_dependencies(pieces):
            begun = tf.numpy_function(pause, [], tf.int32)
        with tf.control_dependencies([begun]):
            apply(self, [tf.identity(piece) for piece in pieces])

    DataParallel.apply = apply
    return mlp(x_spec=x_spec, num_outputs=num_outputs, widths=(16,))


def slow_network(x_spec, num_outputs: int) -> keras.Model:
    """The mlp; each reduction takes 30 ms longer."""
    return _with_pause(Ring, "all_reduce", 0.03, x_spec, num_outputs)


def slow_storage(x_spec, num_outputs: int) -> keras.Model:
    """The mlp; each save takes 0.4 s longer."""
    return _with_pause(SnapshotFolder, "write", 0.4, x_spec, num_outputs)


def _with_pause(kind: type, name: str, seconds: float, x_spec, num_outputs: int) -> keras.Model:
    method = getattr(kind, name)

    def slow(self, *args, **named):
        time.sleep(seconds)
        return method(self, *args, **named)

    setattr(kind, name, slow)
    return mlp(x_spec=x_spec, num_outputs=num_outputs, widths=(16,))
