"""The structures of tensors that a model takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras_tensors import taken_apart


def with_tensors(structure: Any) -> Any:
    """The structure with tensors in place of NumPy arrays."""
    flat = [
        tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in keras.tree.flatten(structure)
    ]
    return keras.tree.pack_sequence_as(structure, flat)


def tensors_of(structure: Any) -> tuple[list[tf.Tensor], Callable[[list], Any]]:
    """Returns (the tensors in a structure, a function that rebuilds the structure with other tensors)."""
    flat = keras.tree.flatten(structure)
    shape = keras.tree.map_structure(lambda leaf: None, structure)
    places = [index for index, leaf in enumerate(flat) if isinstance(leaf, tf.Tensor)]

    def rebuild(tensors: list) -> Any:
        among = dict(zip(places, tensors, strict=True))
        return keras.tree.pack_sequence_as(shape, [among.get(index, leaf) for index, leaf in enumerate(flat)])

    tensors = [flat[index] for index in places]
    for index in places:
        flat[index] = None  # `rebuild` may live long
    return tensors, rebuild


def compiled(function: Callable) -> Callable:
    """Returns a function that XLA compiles.

    `function`: (tensors) -> (a structure, any number of other results). The tensors and the structure keep the masks
    and logits that they carry.
    """

    def call(tensors: list[tf.Tensor]) -> tuple:
        parts, inside = taken_apart(tensors)
        outside: Callable = inside

        @tf.function(jit_compile=True, autograph=False)
        def on_parts(parts: list[tf.Tensor]) -> tuple:
            nonlocal outside
            structure, *others = function(inside(parts))
            results, outside = taken_apart(structure)
            return results, others

        results, others = on_parts(parts)
        return outside(results), *others

    return call
