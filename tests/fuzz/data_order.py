"""Computes which samples a run takes, in order, and checks that each pass takes every sample once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fuzz import rollbacks, stored_data


def batch_sizes(case: Mapping[str, Any]) -> list[int]:
    """Returns the global batch of each step. After a stop it may be another one."""
    batch, steps = case["options"]["global_batch"], sum(case["calls"])
    other = case.get("changed", {}).get("batch", batch)
    first = case["calls"][0]
    return [batch] * first + [other] * (steps - first)


def order_of(case: Mapping[str, Any]) -> np.ndarray:
    """Returns the samples of all steps of a case of tfdist.train, in tfdist's own order, which is checked here."""
    if "rolled" in case:
        return path_of(case).samples
    return samples_of(case, sum(batch_sizes(case)))


def path_of(case: Mapping[str, Any]) -> rollbacks.Path:
    """Returns the path of a run that rolls back from bad numbers."""
    return rollbacks.path(case, samples_of(case, rollbacks.longest(case)))


def samples_of(case: Mapping[str, Any], count: int) -> np.ndarray:
    """Returns the first `count` samples."""
    import tensorflow as tf

    from tfdist.data import order

    if case.get("data_in_store") == "by_file":
        return np.fromiter(itertools.islice(stored_data.by_file(case), count), np.int64)
    size, options = case["data"]["size"], case["options"]
    passes = -(-count // size)
    samples = order.sample_of(
        tf.range(passes * size, dtype=tf.int64), size, options.get("seed", 0), options.get("shuffle", True)
    ).numpy()
    for each in samples.reshape(passes, size):
        if sorted(each) != list(range(size)):
            raise AssertionError(f"a pass over {size} samples does not take each once: {each.tolist()}")
    return samples[:count]
