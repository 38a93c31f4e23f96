"""Stage 3 of ZeRO in the model: layers hold shards, and gather their full variables while they are called.

Each layer with trainable variables of its own gathers them when it is called, and frees them afterwards; in the
backward pass it gathers them again, and its gradients are reduce-scattered into shards. Layers inside such a layer are
gathered with it, as it is called as a whole in the backward pass, too. So are the cells of an RNN, which keep their
dropout masks from step to step, by the layer that calls them. TensorFlow would start all
gathers at once, as they depend on no data. So the gather of a layer waits for the input of the layer called before it:
one layer's parameters are on the way while another's are in use, and no more are held. The backward pass does the same
in reverse. There a gather also waits for the gradient shards of the layer before last, lest a pass that runs ahead of
the network fill memory with whole gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat import keras_layers, keras_variables
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.collectives import Group
from tfdist.training.parallel.recompute import recomputed
from tfdist.training.parallel.shards import ShardLayout


def gather_layers(
    model: keras.Model, variables: Sequence[keras.Variable], shards: Sequence[keras.Variable], groups: Sequence[Group]
) -> None:
    """Replaces `variables` of the model's layers by `shards`, each over its group, in place, and frees the memory of
    `variables`."""
    sharded = {
        id(variable): _Sharded(variable, shard, group)
        for variable, shard, group in zip(variables, shards, groups, strict=True)
    }
    turns = _Turns(_Turn(), _Turn())
    for layer in keras_layers.all_layers(model):
        if keras_layers.holds_cells(layer) or _sharded_of([layer], sharded):
            _gather_when_called(layer, _sharded_of(keras_layers.all_layers(layer), sharded), turns)
    for variable in variables:
        forbid_use(
            variable,
            f"--zero=3 keeps {variable.path} in shards, but it is used outside of its own layer's call: use --zero=2,"
            " or a model whose layers use their own variables only.",
        )


class _Sharded(NamedTuple):
    """A variable, what this worker holds of it, and the group that holds all of it."""

    variable: keras.Variable
    shard: keras.Variable
    group: Group
    is_inside: bool = False  # whether it belongs to a layer inside the one that gathers it


def _sharded_of(layers: Sequence[keras.Layer], sharded: Mapping[int, _Sharded]) -> list[_Sharded]:
    """The sharded variables of these layers, each once: of the first layer itself, then of those inside it."""
    found: dict[int, _Sharded] = {}
    for layer in layers:
        for variable in keras_layers.own_trainable_variables(layer):
            if id(variable) in sharded:
                found.setdefault(id(variable), sharded[id(variable)]._replace(is_inside=layer is not layers[0]))
    return list(found.values())


def _gather_when_called(layer: keras.Layer, held: list[_Sharded], turns: _Turns) -> None:
    layouts = [
        (places, ShardLayout([held[place].variable.shape for place in places], held[places[0]].group))
        for places in _of_each_group(held)
    ]
    states = layer.non_trainable_variables
    inner = layer.call

    def call(*arguments: Any, **options: Any) -> Any:
        if all(keras_variables.has_value_in_scope(each.variable) for each in held):
            return inner(*arguments, **options)  # the layer around it has gathered them

        def bind(values: list[tf.Tensor], is_second: bool, first: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
            with tf.control_dependencies((turns.backward if is_second else turns.forward).take(first)):
                values = [tf.identity(_rounded(each, value)) for each, value in zip(held, values, strict=True)]
            return [
                (held[place].variable, whole)
                for places, layout in layouts
                for place, whole in zip(places, layout.gather([values[place] for place in places]), strict=True)
            ]

        return recomputed(
            lambda nest: inner(*nest[0], **nest[1]),
            (arguments, options),
            [each.shard for each in held],
            states,
            layer,
            bind,
            turns.backward.note_gradients,
        )

    layer.call = call


def _of_each_group(held: Sequence[_Sharded]) -> list[list[int]]:
    """The places of the variables of each group."""
    places: dict[Group, list[int]] = {}
    for place, each in enumerate(held):
        places.setdefault(each.group, []).append(place)
    return list(places.values())


def _rounded(each: _Sharded, value: tf.Tensor) -> tf.Tensor:
    """In the layer's compute type: half as many bytes travel, and the layer would round to it anyway. Not for layers
    inside: their types may differ, and if they are called in a loop, gradients must not be added up in half precision.
    """
    return value if each.is_inside else keras_variables.autocast(each.variable, value)


class _Turn:
    """The order of gathers: a gather may start once the previous layer has its input (or upstream gradient)."""

    def __init__(self) -> None:
        self._before: tf.Tensor | None = None
        self._sent: list[tf.Tensor] = []  # of the last two layers

    def take(self, mine: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors that the gather of the layer that starts with `mine` must wait for."""
        earlier = [
            tensor for tensor in (self._before, *self._sent[:-1]) if tensor is not None and tensor.graph is mine.graph
        ]
        self._before = mine
        return earlier or [mine]

    def note_gradients(self, shards: list[tf.Tensor]) -> None:
        """Records the gradient shards of the layer whose turn it is."""
        self._sent = [*self._sent[-1:], shards[0]]


class _Turns(NamedTuple):
    """The turns of the forward and the backward pass."""

    forward: _Turn
    backward: _Turn


def forbid_use(variable: keras.Variable, sentence: str) -> None:
    """Frees the variable's memory. Later uses, outside of a scope that gives the variable a value, raise a ConfigError
    with `sentence`.
    """

    def initializer(*_: Any, **__: Any) -> tf.Tensor:
        raise ConfigError(sentence)

    keras_variables.empty(variable, initializer)
