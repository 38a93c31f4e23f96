"""A global batch for trying a model outside of its steps: the last one that is known, or a made-up one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.row_checks.model_probe import Take

_UNKNOWN_DIM = 4


class ExampleBatch:
    """An example of a batch. Attributes: inputs, the model's inputs for a global batch; None if unknown."""

    def __init__(self) -> None:
        self.inputs: Any = None

    def like(self, x: Any, cut: Sequence[bool]) -> Any:
        """Returns inputs with values that have the structure of x, which may be some of the rows of a batch: x itself
        if it has values, the known global batch if it fits, else made-up values. cut: see `taking`.
        """
        wanted, given = keras.tree.flatten(x), keras.tree.flatten(self.inputs)
        if all(hasattr(leaf, "numpy") for leaf in wanted):
            return x
        flags = iter(cut)
        specs = [
            tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank and next(flags) else leaf.shape, leaf.dtype)
            for leaf in wanted
        ]
        if len(given) == len(specs) and all(
            isinstance(one, tf.Tensor) and one.dtype == spec.dtype and spec.shape.is_compatible_with(one.shape)
            for one, spec in zip(given, specs, strict=True)
        ):
            return keras.tree.pack_sequence_as(x, given)
        return keras.tree.pack_sequence_as(x, [_made_up(spec) for spec in specs])

    def rows(self, least: int, otherwise: int) -> int:
        """The number of rows of the global batch if it is known, at least `least`; else `otherwise`."""
        dims = [leaf.shape[0] for leaf in keras.tree.flatten(self.inputs) if leaf is not None and leaf.shape.rank]
        known = [dim for dim in dims if dim is not None]
        return max(least, known[0]) if known else otherwise


def taking(x: Any, cut: Sequence[bool]) -> tuple[Take, int]:
    """Returns (a function that takes some rows of inputs like x, the number of rows of x).

    cut: for each tensor with rows in x, whether its rows are the batch's.
    """
    tensors = [leaf for leaf in keras.tree.flatten(x) if leaf.shape.rank]
    count = next(leaf.shape[0] for leaf, is_cut in zip(tensors, cut, strict=True) if is_cut)

    def take(x: Any, rows: Sequence[int]) -> Any:
        flags = iter(cut)
        return keras.tree.map_structure(
            lambda leaf: tf.gather(leaf, list(rows)) if leaf.shape.rank and next(flags) else leaf, x
        )

    return take, count


def _made_up(spec: tf.TensorSpec) -> tf.Tensor:
    shape = [_UNKNOWN_DIM if dim is None else dim for dim in spec.shape]
    if spec.dtype.is_floating:
        return tf.cast(tf.constant(np.random.default_rng(0).normal(size=shape)), spec.dtype)
    # Indices that are valid in any table of at least two rows. Neighboring rows differ in every number.
    rows = np.arange(shape[0] if shape else 1).reshape(shape[:1] + [1] * (len(shape) - 1))
    return tf.cast(tf.constant(np.broadcast_to(rows % 2, shape)), spec.dtype)
