"""One of two processes of tests/multi/test_horovod.py.

    python -m tests.multi.horovod_worker [train flags]

Checks fp16 compression and synchronised BatchNormalization against one process, then rank 1 gets stuck in Python.
"""

from __future__ import annotations

import os
import sys
import time


def check_compression(runtime) -> None:
    import numpy as np
    import tensorflow as tf

    def values(rank):
        return np.random.default_rng(rank).normal(size=(64, 64)).astype("float32"), np.array(
            [70000.0, 1e6 + rank], "float32"
        )

    large, small = tf.function(
        lambda: runtime.all_reduce([tf.constant(value) for value in values(runtime.rank)]), autograph=False
    )()
    exact = [sum(parts) for parts in zip(*map(values, range(runtime.size)), strict=True)]
    error = np.abs(large.numpy() - exact[0]).max()
    assert 1e-6 < error < 1e-2, f"float16 should err by about 1e-3, not {error}"
    assert small.numpy().tolist() == exact[1].tolist(), "what is small, and may be large in value, is not compressed"


def check_batchnorm(runtime) -> None:
    """Compares output, gradients and moving statistics of a sharded batch with those of the whole batch."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.runtime import batch_norm

    batch_norm.synchronize_with(runtime)
    x = np.random.default_rng(0).normal(300, 2, size=(12, 5, 5, 4)).astype("float32")
    target = np.random.default_rng(1).normal(size=x.shape).astype("float32")
    cut = slice(runtime.rank * 12 // runtime.size, (runtime.rank + 1) * 12 // runtime.size)

    def gradients(layer, x, target):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y * target)
        return y, tape.gradient(loss, x)

    alone, shared = (keras.layers.BatchNormalization(synchronized=synchronized) for synchronized in (False, True))
    alone.build(x.shape)
    shared.build(x.shape)
    expected = gradients(alone, tf.constant(x), tf.constant(target))
    found = tf.function(lambda: gradients(shared, tf.constant(x[cut]), tf.constant(target[cut])), autograph=False)()
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one[cut], other, atol=1e-4)
    np.testing.assert_allclose(alone.moving_mean, shared.moving_mean, atol=1e-5)
    np.testing.assert_allclose(alone.moving_variance, shared.moving_variance, atol=1e-5)


if __name__ == "__main__":
    from tfdist import build
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.flags import parse
    from tfdist.runtime.errors import explain

    cluster = resolve_cluster(os.environ)
    made = build.start_runtime(parse(sys.argv[1:]).config, cluster)
    check_compression(made)
    check_batchnorm(made)
    print("checks passed", flush=True)
    if made.rank == 1:  # its background thread is alive: only --collective_timeout notices
        time.sleep(60)
    try:
        made.barrier()
    except Exception as error:
        print(f"explained: {type(explain(error, cluster)).__name__} {explain(error, cluster)}", flush=True)
        os._exit(6)  # so that the launcher ends the other process
