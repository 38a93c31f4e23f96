"""Custom objectives of the fuzzer, given to tfdist as `tests.fuzz.objectives:NAME`."""

from __future__ import annotations


def both(outputs, y, w):
    """For models with two outputs: classes and a value."""
    import tensorflow as tf

    from tfdist.training.objectives import Scores

    kind = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y["kind"], logits=tf.cast(outputs["kind"], tf.float32))
    size = tf.reduce_mean(tf.square(tf.cast(outputs["size"], tf.float32) - tf.cast(y["size"], tf.float32)), -1)
    return Scores(kind + 0.5 * size, w, {"size_error": size})


def only(outputs, y, w):
    """What tfdist would choose, for a model whose only output is named."""
    from tests.fuzz.models import ONLY
    from tfdist.training.objectives import classification, regression

    y = y[ONLY]
    return (classification() if y.dtype.is_integer else regression())(outputs[ONLY], y, w)


def hardest(outputs, y, w):
    """Hard example mining: only the half of the samples with the larger losses counts. For classes."""
    import tensorflow as tf

    from tfdist.training.objectives import Scores

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=tf.cast(outputs, tf.float32))
    middle = tf.sort(losses)[tf.shape(losses)[0] // 2]
    return Scores(losses, w * tf.cast(losses >= middle, tf.float32), {})


def masked(outputs, y, w):
    """For tokens, except those of class 0; ignores w."""
    import tensorflow as tf

    from tfdist.training.objectives import Scores

    logits = tf.cast(outputs, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    right = tf.equal(tf.argmax(logits, -1), tf.cast(y, tf.int64))
    return Scores(losses, tf.cast(y != 0, tf.float32), {"accuracy": tf.cast(right, tf.float32)})
