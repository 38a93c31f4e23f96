"""tf.data pipelines without tf.data's tuner, a thread of each iterator that can hold the whole process up.

An iterator that is let go waits for the end of its tuner, with Python's lock held. The tuner is woken before it can see
that it is to end; on a busy core it often looks too early, and sleeps on: as long as it last slept, which doubles from
10 ms to a minute while the iterator lives (measured, one core, iterators of 6 to 20 s: 4, 10 and 20 s in three of five
cases). Meanwhile no thread of Python runs, heartbeats neither, so that the other workers take this one for dead.
"""

from __future__ import annotations

import tensorflow as tf


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset; what is left to tf.data (AUTOTUNE) is as many calls at the same time as there are threads, at most
    16, and what is prefetched grows while it is waited for."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
