"""Saves time in a process of the parity tests, which traces a hundred small functions and runs each a few times."""

from __future__ import annotations

import gc


def prepare(oracle: bool = False) -> None:
    """To be called when all is imported. The `oracle` computes without TensorFlow's rewriting of graphs."""
    gc.collect()
    gc.freeze()  # else each keras.clear_session scans all of TensorFlow
    gc.set_threshold(50_000, 20, 50)
    if oracle:
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def next_model(collect: bool = False) -> None:
    """Makes Keras count layers from 0 again. collect: also runs Python's garbage collector; if it runs each time, that
    is a sixth of the time of such a process.
    """
    import keras

    keras.backend.clear_session(free_memory=collect)
