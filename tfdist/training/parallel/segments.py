"""A functional model as a sequence of segments, cut between its blocks (models/blocks.py), each of which can be treated
on its own: computed again in the backward pass, or given to a stage of a pipeline.

A block NN runs from the input of the layer block_NN_norm_1 to the output of block_NN_mlp_add; a model of the user's own
whose layers have these names can be cut as well. The segments share the model's layers and variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.recompute import recomputed


class Segment(NamedTuple):
    """A part of the model: from the tensors called `takes` to those called `gives`."""

    part: keras.Model
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    again: bool = False  # computed again in the backward pass


def blocks(model: keras.Model, flag: str) -> list[str]:
    """The names of the model's blocks, in order: "block_00", ... Raises ConfigError, which names `flag`, if there are none."""
    found = sorted({match[1] for layer in model.layers if (match := re.fullmatch(r"(block_\d+)_norm_1", layer.name))})
    if not found or not isinstance(model, keras.models.Model) or not hasattr(model, "inputs"):
        raise ConfigError(f"{flag}: {model.name} has no layers called block_00_norm_1 to block_NN_mlp_add to cut it at: use --model=transformer or vit, or drop the flag.")
    return found


def cut_into_blocks(model: keras.Model, flag: str) -> list[Segment]:
    """[everything before the blocks, block 0, block 1, ..., everything after them]."""
    names = blocks(model, flag)
    segments, here, place = [], model.inputs, "inputs"
    for name in names:
        start = model.get_layer(f"{name}_norm_1").input
        if not segments:
            segments.append(_segment(here, [start], (place,), ("start",)))
            here, place = [start], "start"
        end = [model.get_layer(f"{name}_mlp_add").output]
        segments.append(_segment(here, end, (place,), (name,)))
        here, place = end, name
    segments.append(_segment(here, model.outputs, (place,), ("outputs",)))
    return segments


def cut_out_attention(model: keras.Model, flag: str) -> list[Segment]:
    """Each block in three: up to queries, keys and values; attention itself, whose activations grow with T^2; the rest."""
    segments, here, place = [], model.inputs, "inputs"
    for name in blocks(model, flag):
        start, qkv, joined = (model.get_layer(f"{name}_{part}") for part in ("norm_1", "attention_qkv", "attention_joined"))
        if not segments:
            segments.append(_segment(here, [start.input], (place,), ("start",)))
            here, place = [start.input], "start"
        end = [model.get_layer(f"{name}_mlp_add").output]
        segments += [
            _segment(here, [qkv.output], (place,), ("qkv",)),
            _segment([qkv.output], [joined.output], ("qkv",), ("joined",)),
            _segment([joined.output, *here], end, ("joined", place), (name,)),
        ]
        here, place = end, name
    segments.append(_segment(here, model.outputs, (place,), ("outputs",)))
    return segments


def recompute(model: keras.Model, kind: str, holders: Mapping[int, keras.Variable]) -> None:
    """--recompute=`kind`, block or attention, on a functional model, in place: its call goes from segment to segment.

    holders: id of a trainable variable -> the variable that the model computes with, if that is another one (a shard).
    Raises ConfigError if the model has no blocks.
    """
    flag = f"--recompute={kind}"
    segments = cut_into_blocks(model, flag) if kind == "block" else cut_out_attention(model, flag)
    wanted = ("joined",) if kind == "attention" else tuple(blocks(model, flag))
    segments = [segment._replace(again=segment.gives[0] in wanted) for segment in segments]

    model.call = lambda inputs, training=None, mask=None: run(segments, inputs, training, holders)


def run(segments: Sequence[Segment], inputs: tf.Tensor, training: bool | None, holders: Mapping[int, keras.Variable], added: list[tf.Tensor] | None = None) -> tf.Tensor:
    """From what the first segment takes to what the last one gives. See `recompute` for the others.

    added: gets the losses that the segments' layers add. For segments that are not called by their model: each begins a record anew.
    """
    tensors = {segments[0].takes[0]: inputs}
    for segment in segments:
        given = [tensors[name] for name in segment.takes]
        one = _runner(segment.part, training)
        if segment.again and training:
            parameters = [holders.get(id(variable), variable) for variable in segment.part.trainable_variables]
            # Losses go to a layer, which shares them with the whole model: a functional model takes none.
            given = recomputed(one, given, parameters, segment.part.non_trainable_variables, segment.part.layers[-1])
        else:
            given = one(given)
        if added is not None:
            regularizers = sum(variable.regularizer is not None for variable in segment.part.trainable_variables)
            losses = segment.part.losses  # those of weights come last
            added += losses[:len(losses) - regularizers]
        tensors.update(zip(segment.gives, given, strict=True))
    return tensors[segments[-1].gives[0]]


def _runner(part: keras.Model, training: bool | None) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
    return lambda given: tf.nest.flatten(part(given if len(given) > 1 else given[0], training=training))


def _segment(inputs: list, outputs: list, takes: tuple[str, ...], gives: tuple[str, ...]) -> Segment:
    part = keras.Model(inputs if len(inputs) > 1 else inputs[0], outputs if len(outputs) > 1 else outputs[0])
    part.input_spec = None  # where layers are spread, what it is called with is smaller than its symbols say
    return Segment(part, takes, gives)
