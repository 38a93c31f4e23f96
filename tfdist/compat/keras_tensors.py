"""What tensors carry in Keras (masks, logits), the calls that made its symbolic tensors, and its sign function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.tensorflow import numpy as backend_numpy


def mask_of(tensor: Any) -> tf.Tensor | None:
    """The mask that a tensor carries to the next layer. Relies on keras.src's `get_keras_mask` (an attribute of the
    tensor); without it padding would count in models that are cut or spread.
    """
    return get_keras_mask(tensor)


def carry_mask(tensor: Any, mask: Any) -> None:
    """Makes the tensor carry this mask. Relies on keras.src's `set_keras_mask`."""
    set_keras_mask(tensor, mask)


def carry_alike(copy: Any, tensor: Any, like: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Makes a copy of a tensor carry what Keras reads beside its values: its mask, and the logits of a probability, in
    copies made by `like`. Relies on `_keras_logits`; without it see `taken_apart`, which also gives copies the logits
    that a tensor does not carry, but in place of the values: a gradient with respect to these is None then.
    """
    if (mask := mask_of(tensor)) is not None:
        carry_mask(copy, like(mask))
    if (logits := getattr(tensor, "_keras_logits", None)) is not None:
        copy._keras_logits = like(logits)


def taken_apart(structure: Any) -> tuple[list[tf.Tensor], Callable[[Iterable], Any]]:
    """Returns (tensors, a function that makes the structure from copies of them).

    A mere copy of a tensor lacks what layers and losses of Keras read beside its values: its mask; and the logits of a
    probability, which are those that it carries, or the input of the Softmax or Sigmoid that made it. Relies on
    `_keras_logits`, and on what `_get_logits` of keras.src's nn backend takes for logits; without this, crossentropies
    of copies cut off probabilities at 1e-7: large logits have a wrong loss, and no gradient.
    """
    flat = keras.tree.flatten(structure)
    shape = keras.tree.map_structure(lambda leaf: None, structure)
    each = [_tensor_taken_apart(leaf) if isinstance(leaf, tf.Tensor) else ([], None) for leaf in flat]

    def put_together(copies: Iterable) -> Any:
        rest = iter(copies)
        made = [
            leaf if make is None else make([next(rest) for _ in parts])
            for leaf, (parts, make) in zip(flat, each, strict=True)
        ]
        return keras.tree.pack_sequence_as(shape, made)

    return [part for parts, _ in each for part in parts], put_together


_OF_LOGITS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.sigmoid}


def _tensor_taken_apart(tensor: tf.Tensor) -> tuple[list[tf.Tensor], Callable[[list], tf.Tensor]]:
    carried, mask = getattr(tensor, "_keras_logits", None), mask_of(tensor)
    made_by = tensor.op if hasattr(tensor, "graph") and tensor.op.type in _OF_LOGITS else None
    activation, parts = None, [tensor]
    if made_by is not None and (carried is None or carried is made_by.inputs[0]):
        activation, parts = _OF_LOGITS[made_by.type], [made_by.inputs[0]]  # a copy of the logits is enough
    elif carried is not None:
        parts.append(carried)
    has_mask, carries_logits = mask is not None, carried is not None
    if mask is not None:
        parts.append(mask)

    def put_together(copies: list) -> tf.Tensor:
        whole = copies[0] if activation is None else activation(copies[0])
        if carries_logits:
            whole._keras_logits = copies[-1 - has_mask]
        if has_mask:
            carry_mask(whole, copies[-1])
        return whole

    return parts, put_together


def argmax_within_gpus() -> contextlib.AbstractContextManager:
    """Context manager in which Keras' argmax (part of every accuracy) compares signs as uint32; the values are the
    same. GPUs do not compare int32, so predictions would pass through host memory. Relies on `signbit` of keras.src's
    numpy backend; without it, or without a GPU, argmax stays as it is."""
    if not (tf.config.list_logical_devices("GPU") and hasattr(backend_numpy, "signbit")):
        return contextlib.nullcontext()
    return _with_signbit(sign_of_float)


def sign_of_float(x: Any) -> tf.Tensor:
    """keras.ops.signbit of floating-point numbers."""
    bits = tf.bitcast(tf.cast(x, tf.float32), tf.uint32)
    return tf.greater_equal(bits, tf.constant(1 << 31, tf.uint32))


@contextlib.contextmanager
def _with_signbit(of_float: Callable[[Any], tf.Tensor]) -> Iterator[None]:
    before = backend_numpy.signbit

    def signbit(x: Any) -> tf.Tensor:
        return of_float(x) if keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)) else before(x)

    backend_numpy.signbit = signbit
    try:
        yield
    finally:
        backend_numpy.signbit = before


def node_of(tensor: Any) -> Any:
    """The call that made a symbolic tensor: a node with `input_tensors` and `output_tensors`. Relies on
    `KerasTensor._keras_history` and `Operation._inbound_nodes`; without them a functional model cannot be cut into
    segments (--recompute, pipelines).
    """
    operation, place, _ = tensor._keras_history
    return operation._inbound_nodes[place]


def call_again(node: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Repeats a call (of `node_of`) with these tensors in place of its `input_tensors`, not in training; returns its
    outputs. Relies on `Node.arguments.fill_in`. (keras.Model of those tensors would leave a second call behind in the
    layer.)"""
    given = {id(symbol): tensor for symbol, tensor in zip(node.input_tensors, tensors, strict=True)}
    args, kwargs = node.arguments.fill_in(given)
    layer = node.operation
    training = {"training": False} if isinstance(layer, keras.Layer) else {}
    return layer(*args, **{**kwargs, **training})


def functional_of(model: keras.Model) -> Any:
    """The functional model that computes a model: the model itself, or the one in a Sequential. Relies on
    `Sequential._functional`.
    """
    return getattr(model, "_functional", None) or model


def as_called(output: Any) -> Any:
    """Returns `model.output`, or outputs of its structure, as the call of a functional model would: a list or tuple
    with a single item becomes that item. Does the same as `unpack_singleton` of keras.src; without it a model with one
    output in a list is taken for one that returns a list.
    """
    return output[0] if isinstance(output, list | tuple) and len(output) == 1 else output


def outputs_of(model: keras.Model, x_spec: Any) -> Any:
    """Symbolic tensors for what the model returns. x_spec: nest of TensorSpec, of one sample. If the model does not
    know its outputs, raises whatever its call raises."""
    try:
        return as_called(model.outputs if isinstance(model, keras.Sequential) else model.output)
    except (AttributeError, ValueError):
        symbols = tf.nest.map_structure(lambda spec: keras.KerasTensor((None, *spec.shape), spec.dtype.name), x_spec)
        return model.compute_output_spec(symbols)


def inputs_in_order(functional: Any, inputs: Any) -> list[tf.Tensor]:
    """A functional model's inputs as a list in the model's own order, whatever structure they come in. Relies on
    `Functional._standardize_inputs`; without it models of several inputs could not be recomputed.
    """
    return functional._standardize_inputs(inputs)
