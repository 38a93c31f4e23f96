"""Which samples a run takes, in order; and that each pass takes every sample once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def order_of(case: Mapping[str, Any]) -> np.ndarray:
    """The samples of all steps of a case of tfdist.train: the positions in tfdist's own order, which is checked
    here.
    """
    import tensorflow as tf

    from tfdist.data import order

    size, options = case["data"]["size"], case["options"]
    count = sum(case["calls"]) * options["global_batch"]
    passes = -(-count // size)
    samples = order.sample_of(
        tf.range(passes * size, dtype=tf.int64), size, options.get("seed", 0), options.get("shuffle", True)
    ).numpy()
    for each in samples.reshape(passes, size):
        if sorted(each) != list(range(size)):
            raise AssertionError(f"a pass over {size} samples does not take each once: {each.tolist()}")
    return samples[:count]
