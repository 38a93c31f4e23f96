"""Trains a few steps in one process and prints its memory use, in bytes, as one line of JSON.

python -m tests.e2e.memory_worker TRAIN_FLAGS
"""

from __future__ import annotations

import json
import sys


def main(argv: list[str]) -> None:
    import tensorflow as tf

    from tfdist import build, flags
    from tfdist.control.cluster import Cluster

    config = flags.parse(argv).config
    runtime = build.start_runtime(config, Cluster())
    job = build.compose(config, runtime)
    size = lambda variables: sum(tf.size(v.value).numpy() * v.value.dtype.size for v in variables)  # noqa: E731
    trained = size(job.model.trainable_variables)
    slots = size(job.optimizer.variables)
    gradients = sum(tf.size(v.value).numpy() * 4 for v in job.model.trainable_variables)
    iterators = job.iterators(0)
    job.step(iterators, 1)  # traces
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    job.step(iterators, 2)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    print(
        json.dumps(
            {
                "parameters": int(trained),
                "gradients": int(gradients),
                "slots": int(slots),
                "before": before,
                "peak": peak,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
