"""Builds a Keras model from a name of model_names.py, or from package.module:function.

To add a model, write a function `builder(*, x_spec, num_outputs, **options) -> keras.Model` in a file of this folder,
and add one line to model_names.py. The file is imported on demand. A model returns logits in float32 and is made of
layers and operations that Keras ships, so that its .keras file loads without tfdist.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_layers
from tfdist.compat.keras_addition import add_rows_to_rows
from tfdist.compat.keras_tensors import outputs_of
from tfdist.config import ModelConfig, parse_args
from tfdist.control.exit_codes import ConfigError
from tfdist.control.user_errors import without_internals
from tfdist.models.compiled_functions import compile_functions
from tfdist.models.fused_attention import fuse_attention
from tfdist.models.model_names import MODELS
from tfdist.models.nested_functions import trace_anew
from tfdist.plugins import check_switches, own_code, resolve

_NAME = re.compile(r"[A-Za-z0-9_.\\/>-]+")  # of a TensorFlow scope within another one


def build_model(config: ModelConfig, x_spec: Any, num_outputs: int | None) -> keras.Model:
    """Builds the model of `--model` with `--model_args`, for samples of `x_spec` (no batch dim).

    `num_outputs` is the number of classes or the size of the vocabulary, None if the source does not know it;
    --model_args=num_outputs=N takes precedence. Call it in the scope of the strategy, under the precision policy of the
    run, and after the seed is set: builders draw the initial weights from Keras' seed alone.

    A user's function gets those of x_spec, input_shape (the shape of x_spec as a tuple), num_outputs and the options of
    --model_args that its signature names. A model of KerasHub, for example, is
    `--model=my_models:gpt2 --model_args=preset=gpt2_base_en` with, in my_models.py:

        def gpt2(preset):
            backbone = keras_hub.models.GPT2Backbone.from_preset(preset)
            tokens = keras.Input((None,), dtype="int32")
            hidden = backbone({"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)})
            logits = backbone.token_embedding(hidden, reverse=True)
            return keras.Model(tokens, keras.layers.Activation("linear", dtype="float32")(logits))

    Raises ConfigError for an unknown model or option, a model that does not fit the data, or half-precision outputs.
    """
    fuse_attention()
    compile_functions()
    add_rows_to_rows()
    builder = resolve("model", config.model, MODELS)
    input_shape = tuple(x_spec.shape) if isinstance(x_spec, tf.TensorSpec) else None
    arguments = _arguments(config, builder, {"x_spec": x_spec, "input_shape": input_shape, "num_outputs": num_outputs})
    build = _build_ours if config.model in MODELS else _build_users
    model = build(config, builder, arguments, x_spec)
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"--model={config.model} returned {type(model).__name__}: it must return a keras.Model of Keras 3."
        )
    with own_code("model", config.model):
        built = model.built  # a class whose __init__ does not call super().__init__() lacks this attribute
    if not built:
        raise ConfigError(
            f"--model={config.model} returned a model without variables: call its build(input_shape), or start it with"
            " keras.Input."
        )
    if not model.trainable_variables:
        raise ConfigError(f"--model={config.model} returned a model that has no variables to train.")
    _check_names(config.model, model)
    trace_anew(model)
    _check_output_types(config.model, model, x_spec)
    synchronize_batchnorm(model, config.sync_batchnorm)
    return model


def _check_names(name: str, model: keras.Model) -> None:
    """Raises ConfigError for names that a TensorFlow scope cannot have."""
    for layer in keras_layers.all_layers(model):
        if not _NAME.fullmatch(layer.name):
            raise ConfigError(
                f"--model={name} has a layer, or a model, called {layer.name!r}: give it a name of only ASCII letters,"
                " digits and _ . -, as TensorFlow requires."
            )


def _build_users(config: ModelConfig, builder: Callable, arguments: dict[str, Any], x_spec: Any) -> Any:
    try:
        with own_code("model", config.model):
            return builder(**arguments)
    except ConfigError as error:
        if "num_outputs" in arguments and arguments["num_outputs"] is None:
            raise ConfigError(
                f"{error} (It was given num_outputs=None, because --source does not give the number of classes, as it"
                " does with integers of shape [n] from 0: convert y to these, or add the number to the model's options,"
                " for example --model_args=num_outputs=10.)"
            ) from error
        raise


def _build_ours(config: ModelConfig, builder: Callable, arguments: dict[str, Any], x_spec: Any) -> Any:
    if not isinstance(x_spec, tf.TensorSpec):
        raise ConfigError(
            f"--model={config.model} takes one tensor, but a sample's x is {x_spec}: use a model of your own,"
            " --model=package.module:function."
        )
    try:
        return builder(**arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # Keras' errors for layers=two, or for an image that is too small
        raise ConfigError(
            f"--model={config.model} with --model_args={config.model_args!r} cannot be built for x of shape"
            f" {tuple(x_spec.shape)}: {without_internals(str(error))}"
        ) from error


def synchronize_batchnorm(model: keras.Model, synchronized: bool) -> None:
    """Makes every BatchNormalization of the model, at any depth, compute its statistics over all replicas, or only over
    its own replica.

    Works on a built model: Keras 3.15 reads the attribute when the layer is called. Call it before the step is traced.
    """
    for layer in keras_layers.all_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = synchronized


def _arguments(config: ModelConfig, builder: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the builder: those of `given` that it accepts, and the options of --model_args."""
    options = parse_args("model_args", config.model_args)
    check_switches("model_args", options, builder)
    kinds = inspect.Parameter
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(builder).parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD)
    }
    open_ended = any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values())
    named = [
        name for name, parameter in parameters.items() if name not in given and parameter.kind is not kinds.VAR_KEYWORD
    ]
    for name in options:
        override = name == "num_outputs" and name in parameters
        if not override and (name in given or (name not in named and not open_ended)):
            raise ConfigError(
                f"--model_args={config.model_args}: --model={config.model} has no option {name!r}; it accepts"
                f" {', '.join(named) or 'none'}."
            )
    missing = [name for name in named if parameters[name].default is kinds.empty and name not in options]
    if missing:
        raise ConfigError(
            f"--model={config.model} needs {', '.join(missing)}: give for example --model_args={missing[0]}=VALUE."
        )
    # A value that the source does not know leaves the builder's default in place.
    unknown = {
        name
        for name, value in given.items()
        if value is None and name in parameters and parameters[name].default is not kinds.empty
    }
    return {
        name: value
        for name, value in given.items()
        if (name in parameters or (open_ended and name != "input_shape")) and name not in unknown
    } | options


def _check_output_types(name: str, model: keras.Model, x_spec: Any) -> None:
    """Raises ConfigError if the last layer gives float16 or bfloat16, as the loss takes exponentials, or integers,
    which have no gradient."""
    with own_code("model", name):
        output = outputs_of(model, x_spec)
    types = {keras.backend.standardize_dtype(tensor.dtype) for tensor in keras.tree.flatten(output)}
    if not any("float" in dtype for dtype in types):
        raise ConfigError(
            f"--model={name} returns {', '.join(sorted(types)) or 'nothing'}, which has no gradient: let it return"
            " floats."
        )
    if halves := types & {"float16", "bfloat16"}:
        raise ConfigError(f'--model={name} returns {", ".join(sorted(halves))}: give its last layer dtype="float32".')
