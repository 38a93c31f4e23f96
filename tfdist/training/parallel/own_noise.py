"""Random layers between layers that are cut: each rank sees a part of what one process sees, and must draw other
numbers for it than the others. Ranks along `model` share the states of seed generators, as layers that are whole need
it: on parts they would drop the same units, unit k together with k + F / m and so on, which is another distribution.

What has the same dims as in the whole model is drawn alike on all ranks: a number for each row, which all units share,
is one number. These dims are noted before the cut.

Legend. F units of a layer, m ranks along `model`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.keras_draws import Dims, seeds_changed
from tfdist.compat.keras_layers import keep_message
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.compat.tensorflow_graphs import draws_anew, kinds_made_here
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.collectives import Group

_ROWS = 7919  # in the trace: prime, so that dims which count rows are known by it


@dataclass
class DrawnDims:
    """Dims that a layer has in the whole model; None: of rows."""

    drawn: set[Dims] = field(default_factory=set)
    inputs: set[Dims] = field(default_factory=set)  # of its first input
    by_tensorflow: bool = False  # it, or one inside it, draws by tf.random


def own_noise(
    layer: keras.Layer, group: Group, is_part: Callable[[Dims | None, Dims], bool] = lambda drawn, inputs: True
) -> dict:
    """A layer whose draws are of a part: other ranks draw other numbers. is_part: takes the dims of a draw, None if
    they are not known, and of the layer's first input. Returns {}: no variable is cut.

    The states of generators are the same on all ranks behind it.
    """
    inner = layer.call

    def call(*args: Any, **options: Any) -> Any:
        inputs = _dims(args, options)

        def own(seed: tf.Tensor, drawn: Dims | None) -> tf.Tensor:
            return _folded(seed, group.index) if is_part(drawn, inputs) else seed

        with seeds_changed(own):
            return inner(*args, **options)

    layer.call = call
    return {}


def _folded(seed: tf.Tensor, number: int) -> tf.Tensor:
    fold_in = tf.random.experimental.stateless_fold_in  # pyright: ignore[reportAttributeAccessIssue] - not in stubs
    return tf.cast(fold_in(seed, number), seed.dtype)


def drawn_dims(model: keras.Model, rows: Any = None) -> dict[int, DrawnDims]:
    """id of a layer that draws -> what it draws in the whole model, in training and without; nothing of what comes
    after a call that fails. rows: x of some samples; None: as the model's inputs. No collective.
    """
    found: dict[int, DrawnDims] = {}
    with contextlib.ExitStack() as stack:
        for layer in keras_layers.all_layers(model):
            stack.enter_context(attribute_replaced(layer, "call", _noting(layer, found)))
        for training in (False, True):
            with contextlib.suppress(Exception):
                inputs = keras.tree.map_structure(
                    lambda each: tf.TensorSpec([_ROWS, *each.shape[1:]], each.dtype),
                    model.input if rows is None else rows,
                )
                tf.function(
                    lambda x, training=training: model(x, training=training), autograph=False
                ).get_concrete_function(inputs)
        for layer in keras_layers.all_layers(model):  # tensors of those graphs
            keras_layers.record_losses(layer, [])
    return found


def _noting(layer: keras.Layer, found: dict[int, DrawnDims]) -> Callable:
    inner = layer.call

    def call(*args: Any, **options: Any) -> Any:
        inputs = _dims(args, options)

        def note(seed: tf.Tensor, drawn: Dims | None) -> tf.Tensor:
            dims = found.setdefault(id(layer), DrawnDims())
            dims.inputs.add(inputs)
            if drawn is not None:
                dims.drawn.add(_without_rows(drawn))
            return seed

        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        with seeds_changed(note):
            result = inner(*args, **options)
        if any(map(draws_anew, kinds_made_here(graph, before))):
            dims = found.setdefault(id(layer), DrawnDims())
            dims.inputs.add(inputs)
            dims.by_tensorflow = True
        return result

    return call


def _dims(args: tuple, options: dict[str, Any]) -> Dims:
    """Of the first tensor, without those of rows."""
    tensors = [leaf for leaf in keras.tree.flatten((args, options)) if isinstance(leaf, tf.Tensor | keras.KerasTensor)]
    return _without_rows(tuple(tensors[0].shape)[1:]) if tensors else ()


def _without_rows(dims: Dims) -> Dims:
    return tuple(None if dim and dim % _ROWS == 0 else dim for dim in dims)


def own_noise_on_parts(model: keras.Model, whole: dict[int, DrawnDims], group: Group) -> None:
    """Makes the layers of the cut model draw numbers of their own where these have none of the dims that they had in
    the `whole` one; or, where these are not known, the layer's input has not. Those that draw by tf.random on a part
    raise ConfigError when they are called.
    """
    for layer in keras_layers.all_layers(model):
        if dims := whole.get(id(layer)):
            own_noise(layer, group, lambda drawn, inputs, dims=dims: _is_part(dims, drawn, inputs))
            if dims.by_tensorflow:
                _refuse_parts(layer, dims)


def _refuse_parts(layer: keras.Layer, whole: DrawnDims) -> None:
    inner = layer.call

    def call(*args: Any, **options: Any) -> Any:
        if _is_part(whole, None, _dims(args, options)):
            raise keep_message(
                ConfigError(
                    f"--mesh cuts the layers around {layer.name}, which draws by tf.random: every worker would draw the"
                    " same numbers for its part; draw by keras.random, as keras.random.normal(shape) for"
                    " tf.random.normal(shape), or give the workers to data=."
                )
            )
        return inner(*args, **options)

    layer.call = call


def _is_part(whole: DrawnDims, drawn: Dims | None, inputs: Dims) -> bool:
    dims, others = (inputs, whole.inputs) if drawn is None else (drawn, whole.drawn)
    return not any(_fits(dims, each) for each in others)


def _fits(dims: Dims, shape: Dims) -> bool:
    return len(dims) == len(shape) and all(
        None in (dim, other) or dim == other for dim, other in zip(dims, shape, strict=True)
    )
