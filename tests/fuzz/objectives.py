"""Objectives of the fuzzer's models with named outputs, given to tfdist as `tests.fuzz.objectives:NAME`."""

from __future__ import annotations


def both(outputs, y, w):
    """Classes and a value."""
    import tensorflow as tf

    from tfdist.training.objectives import Scores

    kind = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y["kind"], logits=tf.cast(outputs["kind"], tf.float32))
    size = tf.reduce_mean(tf.square(tf.cast(outputs["size"], tf.float32) - tf.cast(y["size"], tf.float32)), -1)
    return Scores(kind + 0.5 * size, w, {"size_error": size})


def only(outputs, y, w):
    """What tfdist would choose, of one output that is named."""
    from tests.fuzz.models import ONLY
    from tfdist.training.objectives import classification, regression

    y = y[ONLY]
    return (classification() if y.dtype.is_integer else regression())(outputs[ONLY], y, w)
