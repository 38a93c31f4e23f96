"""Expert parallelism (Lepikhin et al. 2020, arXiv:2006.16668): spreads the experts of a mixture over the `expert` axis.

Workers along this axis read different samples, as along `data`, but each holds only E / n of the experts of each block
(models/experts.py); everything else is whole. In a block every member routes its own sequences; one all-to-all sends
each expert's inputs to the member that holds it, and another brings the results back:

    [B, E, C, D] -> all-to-all -> [n B, E / n, C, D] -> up, GELU, down -> all-to-all -> [B, E, C, D]

The backward pass takes the same path, and so brings each expert the gradient of all members' samples: a sum over
`expert`, which ordinary variables need an all-reduce for. So experts are summed over `data` alone (mesh_update.py).

Legend. B sequences of one member, E experts, C places, D width, n members.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.collectives import Group
from tfdist.training.parallel.tensor import Rule, VariablePart, cut, parallelize_layers, static_dims

_EXPERTS = re.compile(r"^block_\d+_experts_")


def to_experts(x_BECD: tf.Tensor, group: Group) -> tf.Tensor:
    """[B, E, C, D], this member's inputs of all experts -> [n B, E / n, C, D], all members' inputs of its experts."""
    _, experts, places, width = static_dims(x_BECD)
    x = tf.reshape(x_BECD, [-1, group.size, experts // group.size, places, width])
    rows = group.all_to_all(tf.transpose(x, [1, 0, 2, 3, 4]))
    return tf.reshape(rows, [-1, experts // group.size, places, width])


def from_experts(x: tf.Tensor, group: Group) -> tf.Tensor:
    """The inverse of `to_experts`."""
    _, local, places, width = static_dims(x)
    rows = group.all_to_all(tf.reshape(x, [group.size, -1, local, places, width]))
    rows = tf.reshape(rows, [group.size, -1, local, places, width])
    return tf.reshape(tf.transpose(rows, [1, 0, 2, 3, 4]), [-1, group.size * local, places, width])


def _first(layer: keras.Layer, group: Group) -> dict[int, VariablePart]:
    inner, parts = layer.call, _own_experts(layer, group)
    layer.call = lambda x, *rest, **options: inner(to_experts(x, group), *rest, **options)
    return parts


def _last(layer: keras.Layer, group: Group) -> dict[int, VariablePart]:
    inner, parts = layer.call, _own_experts(layer, group)
    layer.call = lambda x, *rest, **options: from_experts(inner(x, *rest, **options), group)
    return parts


RULES: tuple[tuple[str, Rule], ...] = ((r"^block_\d+_experts_up$", _first), (r"^block_\d+_experts_down$", _last))


def has_experts(model: keras.Model) -> bool:
    """Whether any layer is a mixture of experts."""
    return any(_EXPERTS.match(layer.name) for layer in keras_layers.all_layers(model, include_self=False))


def parallelize_experts(
    model: keras.Model, group: Group, is_known: bool = False, rows: Any = None
) -> dict[int, VariablePart]:
    """Spreads the experts over `group`, in place, before the optimizer is built. Returns id of a variable -> its part.
    is_known, rows: see tensor.parallelize_layers.

    Raises: ConfigError if the model has no experts, or their number is no multiple of the group's size.
    """
    fix = "use --model=transformer --model_args=experts=8"
    return parallelize_layers(model, group, "expert", RULES, fix, is_known, rows)


def _own_experts(layer: keras.Layer, group: Group) -> dict[int, VariablePart]:
    """Cuts the kernel [E, ...] and the bias [E, ...] down to this member's experts."""
    kernel = keras_layers.stored_kernel(layer)
    experts = kernel.shape[0]
    if experts % group.size:
        raise ConfigError(
            f"--mesh has expert={group.size}, which does not divide the {experts} experts of {layer.name}: choose"
            " another number of experts, or another degree."
        )
    return cut(kernel, 0, group, axis="expert") | cut(layer.bias, 0, group, axis="expert")
