"""tf.data pipelines without tf.data's tuner, a thread of each iterator that can block the whole process.

An iterator that is deleted waits for its tuner to end, and holds Python's GIL meanwhile. The tuner is woken before it
can see that it should end. On a busy core it often checks too early and sleeps again, as long as it slept last; that
time doubles from 10 ms to a minute while the iterator lives (measured, one core, iterators of 6 to 20 s: 4, 10 and 20 s
in three of five cases). Meanwhile no Python thread runs, not even heartbeats, so other workers take this one for dead.
"""

from __future__ import annotations

import tensorflow as tf


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without tuner. AUTOTUNE then means as many parallel calls as there are threads, at most 16,
    and a prefetch buffer that grows while the consumer waits for it."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
