"""What a process of the parity tests does without: it traces a hundred small functions and runs each a few times."""

from __future__ import annotations

import gc


def prepare(oracle: bool = False) -> None:
    """Call it when all is imported. The `oracle` computes plainly: without TensorFlow's rewriting of graphs."""
    gc.collect()
    gc.freeze()  # else each keras.clear_session looks at all that TensorFlow consists of
    gc.set_threshold(50_000, 20, 50)
    if oracle:
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def next_model(collect: bool = False) -> None:
    """Keras counts layers from 0 again. collect: and Python's collector runs, a sixth of the time of such a process if
    it does so each time.
    """
    import keras

    keras.backend.clear_session(free_memory=collect)
