"""Private parts of Keras' metrics: what a mean counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.metrics import reduction_metrics

from tfdist.compat.temporary_attributes import attribute_replaced


@contextlib.contextmanager
def counted_by_means(see: Callable[[Any], None]) -> Iterator[None]:
    """Context manager in which `see` gets the values that a Mean, or a metric derived from it, adds up and counts: what
    it makes of the values that it is given. Relies on keras.src's `reduce_to_samplewise_values`; without it a mean over
    the rows of a worker is not refused.
    """
    reduce = reduction_metrics.reduce_to_samplewise_values

    def reduced(values: Any, sample_weight: Any, reduce_fn: Callable, dtype: Any) -> tuple[Any, Any]:
        counted, weights = reduce(values, sample_weight, reduce_fn, dtype)
        if reduce_fn is keras.ops.mean:  # in a Sum it is keras.ops.sum
            see(counted)
        return counted, weights

    with attribute_replaced(reduction_metrics, "reduce_to_samplewise_values", reduced):
        yield
