"""The results of an objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf


class Scores(NamedTuple):
    """Unreduced results; all tensors float32 of one shape, [n] or [n, T]."""

    losses: tf.Tensor
    weights: tf.Tensor  # padding rows of an evaluation have w == 0 and count for nothing, whatever their weights here
    metrics: Mapping[str, tf.Tensor]  # name -> values, averaged with the same weights
