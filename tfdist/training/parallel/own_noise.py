"""Random layers between layers that are cut: each rank sees a part of what one process sees, and must draw other
numbers for it than the others. Ranks along `model` share the states of seed generators, as layers that are whole need
it: on parts they would drop the same units, unit k together with k + F / m and so on, which is another distribution.

A layer works on a part if its input has other dims than in the whole model, from which these are noted before the cut.

Legend. F units of a layer, m ranks along `model`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.runtime.collectives import Group

Shapes = set[tuple[int | None, ...]]  # without the batch dim
_BEHIND = 2**31 - 1  # folded into a state behind the layer, the same on all ranks: no rank has this index


def own_noise(layer: keras.Layer, group: Group, only_if: Callable[[tuple], bool] = lambda dims: True) -> dict:
    """A random layer on parts: other ranks draw other numbers. only_if: takes the dims of its input, without the
    batch's, when it is called. Returns {}: no variable is cut.

    Behind the layer the states are the same on all ranks again; and others, if it has drawn: a second call draws anew.
    """
    inner, generators = layer.call, keras_layers.own_seed_generators(layer)

    def call(*args: Any, **options: Any) -> Any:
        if not only_if(_dims(args, options)):
            return inner(*args, **options)
        states = [generator.state for generator in generators]
        before = [tf.identity(tf.convert_to_tensor(state.value)) for state in states]
        own = [_folded(value, group.index) for value in before]
        for state, value in zip(states, own, strict=True):
            state.assign(value)
        result = inner(*args, **options)
        for state, value, old in zip(states, own, before, strict=True):
            has_drawn = tf.reduce_any(tf.not_equal(tf.convert_to_tensor(state.value), value))
            state.assign(tf.where(has_drawn, _folded(old, _BEHIND), old))
        return result

    layer.call = call
    return {}


def _folded(state: tf.Tensor, number: int) -> tf.Tensor:
    fold_in = tf.random.experimental.stateless_fold_in  # pyright: ignore[reportAttributeAccessIssue] - not in stubs
    return tf.cast(fold_in(state, number), state.dtype)


def input_shapes(model: keras.Model) -> dict[int, Shapes]:
    """id of a random layer -> the shapes of its first input in the whole model, in training and without; none of what
    comes after a call that fails, as of a model without fixed inputs. No collective."""
    found: dict[int, Shapes] = {}
    with contextlib.ExitStack() as stack:
        for layer in keras_layers.all_layers(model, include_self=False):
            if keras_layers.own_seed_generators(layer):
                stack.enter_context(attribute_replaced(layer, "call", _noting(layer, found)))
                found[id(layer)] = set()
        if not found:
            return {}
        for training in (False, True):
            with contextlib.suppress(Exception):
                inputs = keras.tree.map_structure(
                    lambda each: tf.TensorSpec([2, *each.shape[1:]], each.dtype), model.input
                )
                tf.function(
                    lambda x, training=training: model(x, training=training), autograph=False
                ).get_concrete_function(inputs)
        for layer in keras_layers.all_layers(model):  # tensors of those graphs
            keras_layers.record_losses(layer, [])
    return {name: shapes for name, shapes in found.items() if shapes}


def _noting(layer: keras.Layer, found: dict[int, Shapes]) -> Callable:
    inner = layer.call

    def call(*args: Any, **options: Any) -> Any:
        found[id(layer)].add(_dims(args, options))
        return inner(*args, **options)

    return call


def _dims(args: tuple, options: dict[str, Any]) -> tuple[int | None, ...]:
    tensors = [leaf for leaf in keras.tree.flatten((args, options)) if isinstance(leaf, tf.Tensor | keras.KerasTensor)]
    return tuple(tensors[0].shape[1:]) if tensors else ()


def own_noise_on_parts(model: keras.Model, whole: dict[int, Shapes], group: Group) -> None:
    """Makes the random layers of the cut model whose input has none of the shapes that it had in the `whole` one draw
    numbers of their own."""
    for layer in keras_layers.all_layers(model, include_self=False):
        if shapes := whole.get(id(layer)):
            own_noise(layer, group, lambda dims, shapes=shapes: not any(_fits(dims, each) for each in shapes))


def _fits(dims: tuple, shape: tuple) -> bool:
    return len(dims) == len(shape) and all(
        None in (dim, other) or dim == other for dim, other in zip(dims, shape, strict=True)
    )
