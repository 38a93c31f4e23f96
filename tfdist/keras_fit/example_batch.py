"""A global batch to try a model with, outside of its steps: the last one that is known, or one that is made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.loss_probe import Take

_UNKNOWN_DIM = 4


class ExampleBatch:
    """Attributes: inputs, of a global batch, as the model is called with them; None where none is known."""

    def __init__(self) -> None:
        self.inputs: Any = None

    def like(self, x: Any) -> Any:
        """Inputs with values, made like x: x itself if it has values, what is known if it fits, else made up."""
        if all(hasattr(leaf, "numpy") for leaf in keras.tree.flatten(x)):
            return x
        given, wanted = keras.tree.flatten(self.inputs), keras.tree.flatten(x)
        if len(given) == len(wanted) and all(
            isinstance(one, tf.Tensor) and one.dtype == leaf.dtype and leaf.shape.is_compatible_with(one.shape)
            for one, leaf in zip(given, wanted, strict=True)
        ):
            return keras.tree.pack_sequence_as(x, given)
        return keras.tree.map_structure(_made_up, x)


def taking(x: Any, cut: Sequence[bool]) -> tuple[Take, int]:
    """(what takes some rows of inputs like x, how many rows x has).

    cut: for each tensor with rows in x whether they are those of the batch.
    """
    tensors = [leaf for leaf in keras.tree.flatten(x) if leaf.shape.rank]
    count = next(leaf.shape[0] for leaf, is_cut in zip(tensors, cut, strict=True) if is_cut)

    def take(x: Any, rows: Sequence[int]) -> Any:
        flags = iter(cut)
        return keras.tree.map_structure(
            lambda leaf: tf.gather(leaf, list(rows)) if leaf.shape.rank and next(flags) else leaf, x
        )

    return take, count


def _made_up(leaf: tf.Tensor) -> tf.Tensor:
    shape = [_UNKNOWN_DIM if dim is None else dim for dim in leaf.shape]
    values = np.random.default_rng(0).normal(size=shape)
    return tf.cast(tf.constant(values if leaf.dtype.is_floating else (values > 0).astype(np.int64)), leaf.dtype)
