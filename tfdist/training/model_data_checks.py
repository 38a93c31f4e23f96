"""Checks, before the first step, whether model, objective and data fit each other, with messages for the user.

A wrong number of outputs, or a label without an output, would end a run with an error from inside TensorFlow, on a GPU
with NaN, perhaps only after hours. Softmax outputs where logits are expected, and a batch larger than the data, do not
end a run: these are warnings.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.keras_tensors import call_again, functional_of, node_of, outputs_of
from tfdist.config import ModelConfig
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.split import Split

_LOOKED_AT = 32  # samples
_VIEWS = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims")


def check(
    config: ModelConfig,
    model: keras.Model,
    train: Split,
    held_out: Split | None,
    plan: BatchPlan,
    batch_spec: tuple | None = None,
) -> list[str]:
    """Returns warnings. Raises ConfigError or DataError for combinations that cannot work. A user's own objective is
    not checked.

    model: as it was built, before its layers are spread over workers. batch_spec: the spec of training batches, if they
    may differ from the samples of `train` (because of an augmentation).
    """
    if batch_spec:
        batch = tf.nest.flatten(batch_spec[0])[0].shape[0]
        spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), batch_spec)
        train = dataclasses.replace(train, element_spec=tuple(spec))
    else:
        batch = None
    flag = f"--model={config.model}"
    for split in filter(None, (train, held_out)):
        check_inputs(flag, model, split.element_spec[0], split.name, batch)
    warnings = []
    if plan.accumulation > 1 and any(map(_takes_moments, keras_layers.all_layers(model))):
        warnings.append(
            f"BatchNormalization takes its moments over the {math.ceil(plan.global_batch / plan.accumulation)} rows of"
            f" a micro-batch, not over all {plan.global_batch}, so that --accumulation={plan.accumulation} trains"
            " another function than --accumulation=1 does."
        )
    if train.size is not None and plan.global_batch > train.size:
        warnings.append(
            f"--global_batch={plan.global_batch} is more than the {train.size:,} samples of {train.name}: each batch"
            f" holds samples several times; lower it to at most {train.size}."
        )
    kind = "own" if ":" in config.objective else _kind_of(config, train.element_spec[1])
    if config.label_smoothing and kind != "classes":
        warnings.append(
            f"--label_smoothing={config.label_smoothing:g} has no effect, since --objective={config.objective} does not"
            " use it here: drop it."
        )
    if kind == "own":
        return warnings
    outputs = output_shape(flag, model, train.element_spec[0])
    if kind == "values":
        _refuse_one_hot(config, train)
        _check_regression(config, train, outputs)
        return warnings
    _check_classes(config, train, outputs)
    for split in filter(None, (train, held_out)):
        _check_labels(config, split, outputs[-1])
    if _ends_in_softmax(model, train.element_spec[0]):
        warnings.append(
            f"--model={config.model} ends in a softmax, but the loss takes logits and applies its own softmax: training"
            " would be slow and the loss wrong; drop the activation of the last layer."
        )
    return warnings


def _kind_of(config: ModelConfig, y: tf.TensorSpec) -> str:
    """Returns whether a built-in objective is about "classes" or "values"."""
    of_values = config.objective == "regression" or (config.objective == "auto" and not y.dtype.is_integer)
    return "values" if of_values else "classes"


def _takes_moments(layer: keras.Layer) -> bool:
    """Returns whether a layer, in training, normalizes by the moments of a batch."""
    return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable


def check_inputs(flag: str, model: keras.Model, x_spec: Any, of: str, batch: int | None = None) -> None:
    """Raises ConfigError unless the model that `flag` names accepts samples with such an x.

    batch: samples per call, if known. A model whose inputs are unknown before it is called is not checked.
    """
    try:
        inputs = model.inputs if isinstance(model, keras.Sequential) else model.input
    except (AttributeError, ValueError):
        return
    wanted, given = _named(inputs), _named(x_spec)
    if not isinstance(x_spec, dict):
        given = dict(zip(wanted, given.values(), strict=False)) if len(wanted) == len(given) else given
    if missing := [name for name in wanted if name not in given]:
        raise ConfigError(
            f"{flag} has the inputs {', '.join(wanted)}, but x of {of} has {', '.join(given)}: there is no"
            f" {missing[0]}."
        )
    for name, tensor in wanted.items():
        spec, place = given[name], f"x of {of}" if len(wanted) == 1 else f"{name} in x of {of}"
        shape, text = list(tensor.shape[1:]), tensor.dtype == "string"
        if text != (spec.dtype == tf.string) or not _takes(shape, list(spec.shape)):
            raise ConfigError(
                f"{flag} takes samples of {tensor.dtype} {shape}, but {place} is {spec.dtype.name}"
                f" {spec.shape.as_list()}: change one of the two."
            )
        if tensor.shape[0] not in (None, batch or tensor.shape[0]):
            raise ConfigError(
                f"{flag} takes batches of {tensor.shape[0]} only, but here are {batch}: drop its batch_size."
            )


def _named(nest: Any) -> dict[str, Any]:
    """Returns name -> tensor; tensors in a list go by their own names, or else by their places."""
    if isinstance(nest, dict):
        return {".".join(map(str, path)): tensor for path, tensor in keras.tree.flatten_with_path(nest)}
    return {getattr(tensor, "name", None) or str(at): tensor for at, tensor in enumerate(keras.tree.flatten(nest))}


def _takes(wanted: list[int | None], given: list[int]) -> bool:
    """Returns whether Keras accepts shape `given` for `wanted`: it adds or drops a last dim of 1."""
    if len(wanted) == len(given) + 1 and wanted[-1] == 1:
        given = [*given, 1]
    elif len(given) == len(wanted) + 1 and given[-1] == 1:
        given = given[:-1]
    return len(wanted) == len(given) and all(a in (None, b) for a, b in zip(wanted, given, strict=True))


def output_shape(flag: str, model: keras.Model, x_spec: Any) -> tuple[int | None, ...]:
    """Returns the shape of the outputs for one sample. Raises ConfigError for several or named tensors."""
    output = outputs_of(model, x_spec)
    if isinstance(output, dict | list | tuple):
        raise ConfigError(
            f"{flag} returns a {type(output).__name__} of {len(output)}, but tfdist's losses take one tensor: give"
            " --objective=package.module:function."
        )
    return tuple(output.shape[1:])


def _check_regression(config: ModelConfig, split: Split, outputs: tuple) -> None:
    y = tuple(split.element_spec[1].shape)
    if None not in outputs and math.prod(outputs) != math.prod(y):
        wanted = (
            f"--model_args=num_outputs={math.prod(y)}"
            if math.prod(outputs[:-1]) == 1
            else "a model whose outputs have the shape of y"
        )
        raise ConfigError(
            f"--model={config.model} returns {list(outputs)} for a sample, but y of {split.name} is"
            f" {split.element_spec[1].dtype.name} {list(y)}, which is regressed value by value: use {wanted}; for"
            " classes make y a whole number."
        )


def _check_classes(config: ModelConfig, split: Split, outputs: tuple) -> None:
    y = tuple(split.element_spec[1].shape)
    if split.element_spec[1].dtype.is_floating:
        raise ConfigError(
            f"--objective={config.objective} takes class numbers, but y of {split.name} is"
            f" {split.element_spec[1].dtype.name}: make it int32, or use --objective=regression."
        )
    if len(outputs) != len(y) + 1 or any(a not in (None, b) for a, b in zip(outputs, y, strict=False)):
        raise ConfigError(
            f"--model={config.model} returns {list(outputs)} for a sample, but y of {split.name} is"
            f" {split.element_spec[1].dtype.name} {list(y)}: classification takes one class number, from 0, for each"
            f" {f'place of {list(outputs[:-1])}' if outputs[:-1] else 'sample'}{_labels_fix(y, outputs)}."
        )
    if split.num_classes and outputs[-1] is not None and outputs[-1] < split.num_classes:
        raise ConfigError(
            f"--model={config.model} has {outputs[-1]} outputs, but {split.name} has {split.num_classes} classes, 0 to"
            f" {split.num_classes - 1}: give its last layer {split.num_classes} outputs (num_outputs in its signature"
            " is that number)."
        )


def _labels_fix(y: tuple[int, ...], outputs: tuple) -> str:
    """Returns the advice for labels of a wrong shape: they are one-hot vectors, a column, or something else."""
    if y and y[-1] == 1:
        return ": drop the last dim of y, y[..., 0]"
    if y and len(y) == len(outputs) and outputs[-1] in (None, y[-1]):
        return ", not one-hot vectors: make numbers of them, y.argmax(-1)"
    return "; otherwise give --objective"


def _refuse_one_hot(config: ModelConfig, split: Split) -> None:
    """Raises ConfigError if --objective=auto would mistake one-hot vectors of floats for regression targets."""
    spec = split.element_spec[1]
    if config.objective != "auto" or not spec.shape.rank or spec.shape[-1] < 2:
        return
    samples = (
        split.stream(0, 1).take(_LOOKED_AT).batch(_LOOKED_AT)
        if split.size is None
        else [split.fetch(tf.range(min(_LOOKED_AT, split.size), dtype=tf.int64))]
    )
    for sample in samples:
        y = np.asarray(sample[1], np.float32)
        if ((y == 0) | (y == 1)).all() and (y.sum(-1) == 1).all():
            raise ConfigError(
                f"--objective=auto takes floats for values, but y of {split.name}, {spec.dtype.name}"
                f" {spec.shape.as_list()}, looks like one-hot vectors of {spec.shape[-1]} classes: make numbers of"
                " them, y.argmax(-1), or give --objective=regression if values are meant."
            )


def _check_labels(config: ModelConfig, split: Split, classes: int | None) -> None:
    """Raises DataError for a label without an output. Checks all labels, if they are in memory; others are examined
    only when one of them has failed (data/flaws.py)."""
    labels = None if split.labels is None else split.labels()
    if labels is None or not labels.size:
        return
    low, high = int(labels.min()), int(labels.max())
    if low >= 0 and (classes is None or high < classes):
        return
    wrong = np.argwhere((labels < 0) | (labels >= (classes if classes is not None else high + 1)))
    known = "from 0" if classes is None else f"0 to {classes - 1}"
    raise DataError(
        f"Sample {wrong[0][0]} of {split.name} has the label {labels[tuple(wrong[0])]}, but --model={config.model} has"
        f" outputs for the classes {known} (labels that are none of these: {len(wrong):,}): fix them, raise num_outputs"
        " in --model_args, or leave out samples and tokens with a weight of 0 (and any valid label)."
    )


def _ends_in_softmax(model: keras.Model, x_spec: Any) -> bool:
    """Returns whether the last operation that computes something is a softmax."""
    kind = _last_computation_of_layers(model)
    if not kind:
        symbols = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), x_spec)
        kind = _last_computation(lambda x: model(x, training=False), symbols)
    return kind == "Softmax"


def _last_computation_of_layers(model: keras.Model) -> str:
    """Returns the type of the last computation, found by tracing the last calls of layers, which is quicker than
    tracing the whole model. "": there is no graph of layers."""
    outputs = () if keras_layers.has_own_call(model) else getattr(functional_of(model), "outputs", None) or ()
    tensor = outputs[0] if len(outputs) == 1 else None
    while tensor is not None:
        call = node_of(tensor)
        taken = call.input_tensors
        if not taken:  # an input of the model
            return ""
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in taken]
        if kind := _last_computation(functools.partial(call_again, call), specs):
            return kind
        tensor = taken[0]
    return ""


def _last_computation(function: Callable, taken: Any) -> str:
    """Returns the type of the last operation of `function`; "" if it returns its input."""
    traced = tf.function(function, autograph=False).get_concrete_function(taken)
    operation = traced.outputs[0].op
    while operation.type in _VIEWS:
        operation = operation.inputs[0].op
    return "" if operation.type == "Placeholder" else operation.type
