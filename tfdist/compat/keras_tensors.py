"""The masks that Keras lets tensors carry, and where its symbolic tensors come from."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask


def mask_of(tensor: Any) -> tf.Tensor | None:
    """The mask that a tensor carries to the next layer. Relies on keras.src's `get_keras_mask` (an attribute of the
    tensor); without it padding would count where a model is cut or spread.
    """
    return get_keras_mask(tensor)


def carry_mask(tensor: Any, mask: Any) -> None:
    """From now on the tensor carries this mask. Relies on keras.src's `set_keras_mask`."""
    set_keras_mask(tensor, mask)


def node_of(tensor: Any) -> Any:
    """The call that made a symbolic tensor, with `input_tensors` and `output_tensors`. Relies on
    `KerasTensor._keras_history` and `Operation._inbound_nodes`; without them a functional model cannot be cut into
    segments (--recompute, pipelines).
    """
    operation, place, _ = tensor._keras_history
    return operation._inbound_nodes[place]


def functional_of(model: keras.Model) -> Any:
    """The functional model that computes a model: itself, or that in a Sequential. Relies on
    `Sequential._functional`.
    """
    return getattr(model, "_functional", None) or model


def inputs_in_order(functional: Any, inputs: Any) -> list[tf.Tensor]:
    """A functional model's inputs as a list in the order of its own, whatever structure they come in. Relies on
    `Functional._standardize_inputs`; without it models of several inputs could not be recomputed.
    """
    return functional._standardize_inputs(inputs)
