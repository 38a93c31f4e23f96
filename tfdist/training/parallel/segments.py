"""Cuts a functional model between its blocks (models/blocks.py) into a sequence of segments. Each can be treated
separately: recomputed in the backward pass, or assigned to a stage of a pipeline.

Block NN runs from the input of the layer block_NN_norm_1 to the output of block_NN_mlp_add; a user's own model whose
layers have these names can be cut as well. The segments share the model's layers and variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.keras_tensors import as_called, carry_mask, functional_of, inputs_in_order, mask_of, node_of
from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.assigned_weights import refuse_assigned
from tfdist.training.parallel.recompute import recomputed


class Segment(NamedTuple):
    """A part of the model: computes the tensors named `gives` from those named `takes`."""

    part: keras.Model
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    masks: tuple[tuple[int, int], ...]  # (place of a tensor in `takes`, place of its mask)
    recompute: bool = False  # recomputed in the backward pass, not kept


class Cut(NamedTuple):
    """A model as segments, and the names of its inputs and outputs, in the model's order."""

    segments: list[Segment]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def blocks(model: keras.Model, flag: str) -> list[str]:
    """Returns the names of the model's blocks, in order: "block_00", ...

    Raises ConfigError, which names `flag`, if there are no blocks, or if the model computes more than its layers do.
    """
    found = sorted({match[1] for layer in model.layers if (match := re.fullmatch(r"(block_\d+)_norm_1", layer.name))})
    if not found or not isinstance(model, keras.models.Model) or not hasattr(model, "inputs"):
        raise ConfigError(
            f"{flag}: {model.name} has no layers called block_00_norm_1 to block_NN_mlp_add to cut it at: use"
            " --model=transformer or vit, give your own layers such names, or drop the flag."
        )
    if keras_layers.has_own_call(model):
        raise ConfigError(
            f"{flag}: {type(model).__name__} {model.name} has its own call, which is lost once its layers are cut into"
            " blocks: make it a layer of the model, or drop the flag."
        )
    return found


def cut_into_blocks(model: keras.Model, flag: str) -> Cut:
    """Cuts into [everything before the blocks, block 0, block 1, ..., everything after them]."""
    names = blocks(model, flag)
    ends = {"start": model.get_layer(f"{names[0]}_norm_1").input}
    return _cut(model, ends | {name: model.get_layer(f"{name}_mlp_add").output for name in names})


def cut_out_attention(model: keras.Model, flag: str) -> Cut:
    """Cuts each block into three: up to queries, keys and values; attention itself, whose activations grow with T^2;
    the rest of the block."""
    names = blocks(model, flag)
    ends = {"start": model.get_layer(f"{names[0]}_norm_1").input}
    for name in names:
        ends[f"{name}_qkv"], ends[f"{name}_joined"] = (
            model.get_layer(f"{name}_attention_{part}").output for part in ("qkv", "joined")
        )
        ends[name] = model.get_layer(f"{name}_mlp_add").output
    return _cut(model, ends)


def recompute(model: keras.Model, kind: str, storage: Mapping[int, keras.Variable]) -> None:
    """Applies --recompute=`kind`, block or attention, to a functional model, in place: it runs by segments.

    storage: id of a trainable variable -> the variable that the model computes with, if it differs (a shard).
    Raises ConfigError if the model has no blocks.
    """
    flag = f"--recompute={kind}"
    cut = cut_into_blocks(model, flag) if kind == "block" else cut_out_attention(model, flag)
    wanted = blocks(model, flag)
    segments = with_recompute(
        model, cut.segments, wanted if kind == "block" else [f"{name}_joined" for name in wanted], flag
    )
    functional = functional_of(model)

    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        given = inputs_in_order(functional, inputs)
        tensors = run(segments, dict(zip(cut.inputs, given, strict=True)), training, storage)
        return outputs_as_given(functional, [tensors[name] for name in cut.outputs])

    model.call = call


def outputs_as_given(functional: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Packs a functional model's outputs into the structure in which Keras returns them."""
    return as_called(keras.tree.pack_sequence_as(functional.output, list(tensors)))


def with_recompute(model: keras.Model, segments: Sequence[Segment], names: Sequence[str], flag: str) -> list[Segment]:
    """Marks the segments `names` for recomputation in the backward pass.

    Makes it a ConfigError if a layer sets weights in them.
    """
    chosen = [segment._replace(recompute=segment.gives[0] in names) for segment in segments]
    refuse_assigned(
        model,
        {
            id(variable): variable
            for segment in chosen
            if segment.recompute
            for variable in segment.part.trainable_variables
        }.values(),
        flag,
    )
    return chosen


def run(
    segments: Sequence[Segment],
    inputs: Mapping[str, tf.Tensor],
    training: bool | None,
    storage: Mapping[int, keras.Variable],
    added: list[tf.Tensor] | None = None,
) -> dict[str, tf.Tensor]:
    """Runs the segments; returns `inputs` and all that the segments give, by name. See `recompute` for the rest.

    added: receives the losses that the segments' layers add. Only for segments that are not called by their model, so
    that each call begins a new record of losses.
    """
    tensors = dict(inputs)
    for segment in segments:
        given = [tensors[name] for name in segment.takes]
        one = _runner(segment, training)
        if segment.recompute and training:
            parameters = [storage.get(id(variable), variable) for variable in segment.part.trainable_variables]
            # Losses are added to a layer, which shares them with the whole model: a functional model accepts none.
            given = recomputed(one, given, parameters, segment.part.non_trainable_variables, segment.part.layers[-1])
        else:
            given = one(given)
        if added is not None:
            regularizers = sum(variable.regularizer is not None for variable in segment.part.trainable_variables)
            losses = segment.part.losses  # those of weights come last
            added += losses[: len(losses) - regularizers]
        tensors.update(zip(segment.gives, given, strict=True))
    return tensors


def _runner(segment: Segment, training: bool | None) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
    def one(given: list[tf.Tensor]) -> list[tf.Tensor]:
        for place, mask in segment.masks:
            carry_mask(given[place], given[mask])
        return tf.nest.flatten(segment.part(given if len(given) > 1 else given[0], training=training))

    return one


def _cut(model: keras.Model, ends: Mapping[str, Any]) -> Cut:
    """Cuts the model into segments: each ends at one of `ends`, in order, and the last at the model's outputs.

    A segment computes all that its end needs and that no earlier segment has computed. So every tensor that is computed
    before a cut and used after it crosses the cut: the end, and also masks of crossing tensors (Keras leaves it to
    tensors to carry masks from layer to layer), inputs that are used late, and outputs that are made early.
    """
    ends = {**ends, "outputs": None}
    made_in = {id(tensor): -1 for tensor in model.inputs}  # id of a tensor -> the number of its segment
    used: list[dict[int, Any]] = []  # for each segment, the tensors that it computes with
    made: list[dict[int, Any]] = []
    for number, end in enumerate(ends.values()):
        waiting, uses, makes = [*(model.outputs if end is None else [end])], {}, {}
        while waiting:
            tensor = waiting.pop()
            if id(tensor) not in made_in:
                node = node_of(tensor)
                made_in |= {id(output): number for output in node.output_tensors}
                makes |= {id(output): output for output in node.output_tensors}
                uses |= {id(source): source for source in node.input_tensors}
                waiting += [*node.input_tensors, *_masks(node.output_tensors).values()]
        used.append(uses | _masks([source for key, source in uses.items() if key not in makes]))
        made.append(makes)
    names = {id(tensor): f"inputs_{number}" if number else "inputs" for number, tensor in enumerate(model.inputs)}
    for name, tensors in ((name, model.outputs if end is None else [end]) for name, end in ends.items()):
        for number, tensor in enumerate(tensors):
            names.setdefault(id(tensor), f"{name}_{number}" if number else name)
    outputs = {id(tensor) for tensor in model.outputs}
    segments = []
    for number, (end, uses, makes) in enumerate(zip(ends, used, made, strict=True)):
        takes = [source for key, source in uses.items() if key not in makes]
        gives = [
            tensor
            for key, tensor in makes.items()
            if key in outputs or any(key in later for later in used[number + 1 :])
        ]
        gives.sort(key=lambda tensor, end=end: names.get(id(tensor)) != end)
        if gives:
            segments.append(
                _segment(
                    takes,
                    gives,
                    *(tuple(names.setdefault(id(tensor), tensor.name) for tensor in each) for each in (takes, gives)),
                )
            )
    return Cut(
        segments,
        tuple(names[id(tensor)] for tensor in model.inputs),
        tuple(names[id(tensor)] for tensor in model.outputs),
    )


def _masks(tensors: Sequence[Any]) -> dict[int, Any]:
    """The masks that Keras has attached to any of these symbolic tensors."""
    return {id(mask): mask for mask in map(mask_of, tensors) if mask is not None}


def _segment(inputs: list, outputs: list, takes: tuple[str, ...], gives: tuple[str, ...]) -> Segment:
    part = keras.Model(inputs if len(inputs) > 1 else inputs[0], outputs if len(outputs) > 1 else outputs[0])
    part.input_spec = None  # where layers are spread, actual inputs are smaller than the symbolic ones
    part.supports_masking, part.compute_mask = (
        True,
        lambda inputs, previous_mask: None,
    )  # its layers set the masks of its outputs
    places = {id(tensor): place for place, tensor in enumerate(inputs)}
    masks = [(place, places[id(mask)]) for place, tensor in enumerate(inputs) if (mask := mask_of(tensor)) is not None]
    return Segment(part, takes, gives, tuple(masks))
