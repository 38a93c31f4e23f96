"""Stage 3 of ZeRO in the model: layers hold shards, and gather their full variables while they are called.

Each layer with trainable variables of its own gathers them when it is called, and frees them afterwards; in the
backward pass it gathers them again, and its gradients are reduce-scattered into shards. TensorFlow would start all
gathers at once, as they depend on no data. So the gather of a layer waits for the input of the layer called before it:
one layer's parameters are on the way while another's are in use, and no more are held. The backward pass does the same
in reverse. There a gather also waits for the gradient shards of the layer before last, lest a pass that runs ahead of
the network fill memory with whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    `variables`.

    All variables of one layer must have the same group.
    """
    shard_of = {id(variable): shard for variable, shard in zip(variables, shards, strict=True)}
    group_of = {id(variable): group for variable, group in zip(variables, groups, strict=True)}
    turns = _Turns(_Turn(), _Turn())
    for layer in keras_layers.all_layers(model):
        own_variables = [
            variable for variable in keras_layers.own_trainable_variables(layer) if id(variable) in shard_of
        ]
        if own_variables:
            inner_variables = [
                variable
                for variable in layer.trainable_variables
                if id(variable) in shard_of and all(variable is not own for own in own_variables)
            ]
            _gather_when_called(
                layer,
                own_variables,
                [shard_of[id(variable)] for variable in own_variables],
                [shard_of[id(variable)] for variable in inner_variables],
                group_of[id(own_variables[0])],
                turns,
            )
    for variable in variables:
        forbid_use(
            variable,
            f"--zero=3 keeps {variable.path} in shards, but it is used outside of its own layer's call: use --zero=2,"
            " or a model whose layers use their own variables only.",
        )


def _gather_when_called(
    layer: keras.Layer,
    own_variables: list[keras.Variable],
    shards: list[keras.Variable],
    inner_shards: list[keras.Variable],
    group: Group,
    turns: _Turns,
) -> None:
    """inner_shards: those of the layers inside, which gather for themselves. This layer's gradient is theirs, too."""
    layout = ShardLayout([variable.shape for variable in own_variables], group)
    states = layer.non_trainable_variables
    inner_call = layer.call

    def call(*arguments: Any, **options: Any) -> Any:
        def bind(values: list[tf.Tensor], is_second: bool, first: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
            inner = list(zip(inner_shards, values[len(own_variables) :], strict=True))
            with tf.control_dependencies((turns.backward if is_second else turns.forward).take(first)):
                # In the layer's compute dtype: half as many bytes travel, and the layer would round to it anyway.
                values = [
                    tf.identity(keras_variables.autocast(variable, value))
                    for variable, value in zip(own_variables, values, strict=False)
                ]
            return [*zip(own_variables, layout.gather(values), strict=True), *inner]

        return recomputed(
            lambda nest: inner_call(*nest[0], **nest[1]),
            (arguments, options),
            [*shards, *inner_shards],
            states,
            layer,
            bind,
            turns.backward.note_gradients,
        )

    layer.call = call


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
