"""Models and data that tfdist.fit and its kin refuse, and why."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.compat import keras_layers, keras_trainer
from tfdist.control.exit_codes import ConfigError
from tfdist.models.nested_functions import refuse_batch_norm


def refuse_unsupported(model: keras.Model) -> None:
    """Raises ConfigError with the reason if the model cannot be spread."""
    if keras_trainer.built_under_a_strategy(model):
        raise ConfigError(
            "The model was built inside a tf.distribute strategy's scope, which Keras 3 cannot train over workers:"
            " build it without a strategy; tfdist.fit spreads it itself."
        )
    if keras_layers.has_no_call(model) and not inner_models(model):
        raise ConfigError(
            f"{type(model).__name__} has no call(), and no keras.Model inside it that tfdist could spread in its place:"
            " give the class a call() that its train_step uses, or make models of what the train_step calls."
        )
    refuse_batch_norm(model)
    if layer := keras_layers.stateful_layer(model):
        raise ConfigError(
            f"The layer {layer.name} is stateful: it carries the state of row i of a batch over to row i of the"
            " next, which tfdist.fit does not keep when it divides the rows over workers. Use stateful=False, or"
            " train it in one process."
        )
    if isinstance(getattr(model, "optimizer", None), list):
        raise ConfigError("The model was compiled with several optimizers: tfdist.fit needs one.")


def inner_models(model: keras.Model) -> list[keras.Model]:
    """The inner models, at any depth, that can be called."""
    layers = keras_layers.all_layers(model, include_self=False)
    return [layer for layer in layers if isinstance(layer, keras.Model) and not keras_layers.has_no_call(layer)]


def refuse_no_rows(purpose: str, x: Any) -> None:
    """Raises ConfigError for arrays without rows, with which Keras' predict fails."""
    shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(x)]
    if any(shape is not None and len(shape) and shape[0] == 0 for shape in shapes):
        raise ConfigError(f"tfdist.{purpose} was given arrays without a row: give it at least one.")


def refuse_lists(purpose: str, model: keras.Model | None = None, **data: Any) -> None:
    """Raises ConfigError for rows in Python lists of numbers or texts, which Keras does not accept. A model whose `fit`
    (`evaluate`, `predict`) is not Keras' own may accept them: KerasHub's models make datasets of lists of texts."""
    if model is not None and getattr(type(model), purpose) is not getattr(keras.Model, purpose):
        return
    for name, value in data.items():
        leaf = value
        while isinstance(leaf, (list, tuple)) and leaf:
            leaf = leaf[0]
        if leaf is not value and isinstance(leaf, (bool, int, float, str)):
            wanted = "numpy.array(x), numpy.array(y)" if name == "validation_data" else f"numpy.array({name})"
            raise ConfigError(
                f"tfdist.{purpose}: {name} has its rows in a Python {type(value).__name__}, which Keras does not"
                f" accept: give {'arrays' if name == 'validation_data' else 'an array'}, {wanted}."
            )
