"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): cuts single layers over the `model` axis.

The cuts are data: an ordered list of (pattern of layer names, rule); the first pattern that matches a layer applies. A
rule cuts the layer's variables, in place, down to this rank's part, and defines what travels when the layer is called.
The model remains the one that the registry built; layers that no pattern matches stay whole, and compute the same on
every rank of the axis.

    column   y_part = x @ W[:, part]: x is copied to all ranks (its gradient is summed); no traffic forward
    row      y = sum over ranks of x_part @ W[part, :], then the bias, once
So a column layer followed by a row layer costs one all-reduce forward and one backward.

Legend. B batch, T positions, D width, V vocabulary, m ranks along `model`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tfdist.compat import keras_layers, keras_variables
from tfdist.config import ModelConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.models import missing_rows
from tfdist.runtime.collectives import Group
from tfdist.training.objectives import Objective, Scores, weights_like
from tfdist.training.parallel.own_noise import Draws, draws_of, own_noise, own_noise_on_parts


@dataclass(frozen=True)
class VariablePart:
    """The part of a variable that a rank holds: the indices `places[index]` of dim `dim`."""

    shape: tuple[int, ...]  # of the whole
    dim: int
    places: tuple[np.ndarray, ...]  # of every member, in order
    index: int
    axis: str  # of the mesh

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], len(self.places[self.index]), *self.shape[self.dim + 1 :])

    def cut(self, whole: np.ndarray) -> np.ndarray:
        """Cuts this member's part out of the whole."""
        return np.take(whole, self.places[self.index], self.dim)

    def padded(self, part: np.ndarray) -> np.ndarray:
        """Pads the part to the size of the largest part, for collective calls that need one shape."""
        missing = max(map(len, self.places)) - part.shape[self.dim]
        return np.pad(part, [(0, missing if dim == self.dim else 0) for dim in range(part.ndim)])

    def join(self, padded: Sequence[np.ndarray]) -> np.ndarray:
        """Assembles the whole from every member's padded part."""
        whole = np.zeros(self.shape, padded[0].dtype)
        for places, part in zip(self.places, padded, strict=True):
            whole[(slice(None),) * self.dim + (places,)] = np.take(part, range(len(places)), self.dim)
        return whole


# Returns id of a variable that was cut -> the part that remains here.
Rule = Callable[[keras.Layer, Group], dict[int, VariablePart]]
Crossing = Callable[[tf.Tensor, Group], tf.Tensor]  # how a tensor enters or leaves the cut layers


def copied(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Passes x, the same on all members, into the parts: the identity, whose gradient is the sum over members."""
    return tf.custom_gradient(lambda t: (tf.identity(t), group.all_reduce))(x)


def summed(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Combines parts: the sum over members, whose gradient, the same on all, goes to every part unchanged."""
    return tf.custom_gradient(lambda t: (group.all_reduce(t), tf.identity))(x)


def static_dims(x: tf.Tensor) -> list[Any]:
    """The dims of a tensor; all but the first are known where layers are cut."""
    return x.shape.as_list()


# -- rules -------------------------------------------------------------------------------------------------------------


def column(blocks: int = 1, enter: Crossing = copied) -> Rule:
    """Cuts a Dense layer [in, out] to [in, out / m].

    `blocks`: the number of matrices that stand side by side in out; each of them is cut.
    """

    def rule(layer: keras.Layer, group: Group) -> dict[int, VariablePart]:
        if layer.activity_regularizer is not None:
            raise ConfigError(
                f"--mesh has model={group.size}, but {layer.name} has an activity regularizer, and each worker would"
                " have only a part of its activations: give it to a later layer, or drop it."
            )
        inner = layer.call
        parts = cut(keras_layers.stored_kernel(layer), 1, group, blocks)
        if layer.bias is not None:
            parts |= cut(layer.bias, 0, group, blocks)
        layer.call = lambda x, *rest, **options: inner(enter(x, group), *rest, **options)
        return parts

    return rule


def row(leave: Crossing = summed) -> Rule:
    """Cuts a Dense layer [in, out], whose input is a part, to [in / m, out]."""

    def rule(layer: keras.Layer, group: Group) -> dict[int, VariablePart]:
        parts = cut(keras_layers.stored_kernel(layer), 0, group)

        def call(x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            partial: Any = ops.matmul(x, layer.kernel)
            y = leave(partial, group)
            return layer.activation(y if layer.bias is None else ops.add(y, layer.bias))

        layer.call, layer.input_spec = call, None
        return parts

    return rule


def reshape(dim: int) -> Rule:
    """Reduces dim `dim` in the target of a Reshape layer to 1 / m."""

    def rule(layer: keras.Layer, group: Group) -> dict[int, VariablePart]:
        target = list(layer.target_shape)
        if target[dim] % group.size:
            raise ConfigError(
                f"--mesh has model={group.size}, which does not divide the {target[dim]} of layer {layer.name}: choose"
                " a number of heads that it divides, or another degree."
            )
        target[dim] //= group.size
        layer.target_shape = tuple(target)
        return {}

    return rule


def vocabulary(enter: Crossing = copied, leave: Crossing = summed) -> Rule:
    """Cuts a ReversibleEmbedding [V, D] to [V / m, D]. In reverse it returns this rank's logits [B, T, V / m]."""

    def rule(layer: keras.Layer, group: Group) -> dict[int, VariablePart]:
        inner = layer.call
        parts = cut(keras_layers.stored_embeddings(layer), 0, group)
        if not layer.tie_weights:
            parts |= cut(layer.reverse_embeddings, 1, group)
        places = parts[id(keras_layers.stored_embeddings(layer))].places[group.index]

        def call(x: tf.Tensor, reverse: bool = False) -> tf.Tensor:
            if reverse:
                return inner(enter(x, group), reverse=True)
            rows = tf.cast(x, tf.int32)
            local = missing_rows.from_the_front(rows, layer.input_dim) - int(places[0])
            inside = tf.logical_and(local >= 0, local < len(places))
            found = inner(tf.where(inside, local, 0))
            found = tf.where(tf.expand_dims(inside, -1), found, tf.zeros_like(found))
            # Otherwise rows that no rank has would silently be zeros.
            return leave(missing_rows.nan_for_missing(found, rows, layer.input_dim), group)

        layer.call = call
        return parts

    return rule


# For the blocks of models/blocks.py, and so for the transformer and the vit.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"^embed_tokens$", vocabulary()),
    (r"^block_\d+_attention_qkv$", column(blocks=3)),
    (r"^block_\d+_attention_(query|key|value)$", reshape(dim=1)),
    (r"^block_\d+_attention_weights_dropout$", own_noise),
    (r"^block_\d+_attention_joined$", reshape(dim=1)),
    (r"^block_\d+_attention_out$", row()),
    (r"^block_\d+_mlp_up$", column()),
    (r"^block_\d+_mlp_down$", row()),
)


def parallelize_layers(
    model: keras.Model,
    group: Group,
    axis: str = "model",
    rules: Sequence[tuple[str, Rule]] = RULES,
    fix: str = "use --model=transformer or vit",
    is_known: bool = False,
    rows: Any = None,
) -> dict[int, VariablePart]:
    """Applies the rules to the model, in place, before the optimizer is built. Returns id of a variable -> its part.

    Raises: ConfigError if no layer matches any rule, or if a matching layer is of another kind or cannot be cut into so
    many parts; `fix` says what to do. is_known: whether it is a tfdist model, whose random layers between cut layers
    have rules. rows: x of some samples, for other models.
    """
    parts: dict[int, VariablePart] = {}
    known = set[int]()  # layers with rules
    whole = Draws() if is_known else draws_of(model, rows)
    for layer in keras_layers.all_layers(model, include_self=False):
        for pattern, rule in rules:
            if re.search(pattern, layer.name):
                told = f"--mesh has {axis}={group.size}, which cuts layer {layer.name} of {model.name} by its name, but"
                if getattr(layer, "lora_enabled", False):
                    raise ConfigError(f"{told} it has LoRA weights: merge them, or give the workers to data=.")
                try:
                    parts |= rule(layer, group)
                except AttributeError:  # it lacks the weights or settings of the layer that the name stands for
                    raise ConfigError(
                        f"{told} its type is {type(layer).__name__}, which cannot be cut so: give it another name, or"
                        " the workers to data=."
                    ) from None
                known.add(id(layer))
                break
    if not known:
        raise ConfigError(
            f"--mesh has {axis}={group.size}, but no layer of {model.name} can be spread over it: {fix}, or give the"
            " workers to data=."
        )
    if whole.of_layer or whole.by_tensorflow:
        own_noise_on_parts(model, whole, draws_of(model, rows), group, known)
    return parts


def vocabulary_objective(config: ModelConfig, group: Group, size: int) -> Objective:
    """training.objectives.classification for logits that are cut along their last dim, V = `size`.

    Per token one number travels for each of: the largest logit, the sum of exponentials, the label's logit, the guess
    (for the accuracy), and, with label smoothing, the sum of logits.
    """
    if config.objective not in ("auto", "classification", "next_token"):
        raise ConfigError(
            f"--objective={config.objective} needs whole logits, but --mesh has model={group.size}, which spreads them:"
            " use --objective=next_token."
        )
    first, _ = share(size, group)

    def objective(outputs: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> Scores:
        logits, label = tf.cast(outputs, tf.float32), tf.cast(y, tf.int64)
        is_known, y = tf.logical_and(label >= 0, label < size), tf.cast(label, tf.int32)
        own_best = tf.reduce_max(logits, -1)
        best = group.all_max(own_best)
        log_sum = tf.math.log(summed(tf.reduce_sum(tf.exp(logits - tf.expand_dims(best, -1)), -1), group)) + best
        chosen = tf.reduce_sum(tf.where(tf.one_hot(y - first, tf.shape(logits)[-1], True, False), logits, 0.0), -1)
        losses = log_sum - summed(chosen, group)
        if config.label_smoothing:
            uniform = log_sum - summed(tf.reduce_sum(logits, -1), group) / size
            losses = (1 - config.label_smoothing) * losses + config.label_smoothing * uniform
        weights = weights_like(w, losses)
        # As on a GPU: no worker has the logit of a label that is none, and the rest would train without a word. A
        # factor makes the gradient NaN, too, which is all that float16 looks at.
        losses *= tf.where(tf.logical_or(is_known, tf.equal(weights, 0.0)), 1.0, math.nan)
        own_guess = tf.where(tf.equal(own_best, best), first + tf.argmax(logits, -1, output_type=tf.int32), size)
        guess = -group.all_max(-own_guess)  # the first of the largest, like tf.argmax
        return Scores(losses, weights, {"accuracy": tf.cast(tf.equal(guess, y), tf.float32)})

    return objective


def share(size: int, group: Group) -> tuple[int, int]:
    """(first, last + 1) of this member's share of `size` consecutive places."""
    return group.index * size // group.size, (group.index + 1) * size // group.size


def cut(
    variable: keras.Variable, dim: int, group: Group, blocks: int = 1, axis: str = "model"
) -> dict[int, VariablePart]:
    """Cuts a layer's variable along `dim` down to this member's part of `axis`, in place. Returns its id -> its
    part."""
    size = variable.shape[dim]
    other_ways = {"regularizer": "--weight_decay does much the same", "constraint": "or give the workers to data="}
    for kind, other_way in other_ways.items():
        if getattr(variable, kind) is not None:
            raise ConfigError(
                f"--mesh spreads {variable.path} over {group.size} workers, but it has a {kind}, which needs the whole"
                f" variable: drop it ({other_way})."
            )
    if size // blocks < group.size:
        raise ConfigError(
            f"--mesh has {axis}={group.size}, but {variable.path} has only {size // blocks} to share out: lower the"
            " degree."
        )
    if size % blocks:
        raise ConfigError(
            f"--mesh has {axis}={group.size}, which cuts {variable.path} as {blocks} matrices side by side, but {size}"
            f" is no multiple of {blocks}: give its layer another name, or the workers to data=."
        )
    block = np.arange(size).reshape(blocks, -1)
    points = [member * block.shape[1] // group.size for member in range(group.size + 1)]
    places = tuple(block[:, start:stop].reshape(-1) for start, stop in zip(points, points[1:], strict=False))
    part = VariablePart(tuple(variable.shape), dim, places, group.index, axis)
    name = variable.value.name.partition(":")[0]  # in TensorFlow's messages
    cut_value = tf.Variable(tf.constant(part.cut(variable.numpy())), trainable=variable.trainable, name=name)
    keras_variables.replace_value(variable, cut_value)
    return {id(variable): part}
