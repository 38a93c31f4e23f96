"""How a run reads its samples, and the shapes of the batches that it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from tfdist.data.augment import Augmentation
from tfdist.data.sources.split import Sample, Split
from tfdist.runtime import negative_weights


@dataclass(frozen=True)
class Reading:
    """How a run reads a split; the same on all replicas.

    augment: see augment.py. threads: number of batches made in parallel; 0: one per thread, at most 16.
    cut: number of shards into which a stream is cut; None: the result of `streams.stream_cut`.
    """

    seed: int
    shuffle: bool
    augment: Augmentation | None = None
    threads: int = 0
    cut: int | None = None


def as_is(function: Callable) -> Callable:
    """Keeps AutoGraph from rewriting the function, which would hide our errors behind one of AutoGraph's."""
    return tf.autograph.experimental.do_not_convert(function)


def weighted(sample: Sample, split: Split, numbers: tf.Tensor) -> Sample:
    """(x, y) -> (x, y, ones). (x, y, w) stays; a negative weight is an error. numbers: [n], those of the samples."""
    if len(sample) == 3:
        return *sample[:2], negative_weights.refused(sample[2], split.name, numbers)
    return *sample, tf.ones([tf.shape(numbers)[0]], tf.float32)


def masked(w: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """Sets w to 0 in rows (first dim) that are not real. `where`, not a product: the weight there may be anything."""
    real = tf.reshape(real, tf.concat([tf.shape(real), tf.ones([tf.rank(w) - 1], tf.int32)], 0))
    return tf.where(real, tf.cast(w, tf.float32), 0.0)


def shaper(rows: int | None, spec: tuple | None) -> Callable[..., Sample]:
    """Returns (x, y, w) -> the same with static shapes, which Python sources lose: `rows`, then `spec`'s if given."""

    def shaped(x, y, w):
        if spec is None:
            tf.nest.map_structure(lambda t: t.set_shape([rows, *t.shape[1:]]), (x, y, w))
        else:
            full = (*spec, tf.TensorSpec([], tf.float32))[:3]
            tf.nest.map_structure(lambda t, s: t.set_shape([rows, *s.shape]), (x, y, w), full)
        return x, y, w

    return shaped
