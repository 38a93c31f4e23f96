"""Calls a model with given values in place of its variables, which stay unchanged.

Keras' own `model.stateless_call` runs the model's `call`, not the model itself: inner layers, which learn from the
surrounding call whether it is training, then assume inference. A Dropout in a subclassed model drops nothing there.
A call of the same model that is under way is neither notified nor ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tfdist.compat import keras_layers
from tfdist.compat.tensorflow_functions import functions_inline


class Arguments(NamedTuple):
    """All arguments of a model's call except `training`, in place of x. All are tensors."""

    args: tuple
    kwargs: dict[str, Any]


class Called(NamedTuple):
    """outputs: as the model returned them. states: new values of non-trainable variables. losses: `model.losses`."""

    outputs: Any
    states: list[Any]
    losses: list[Any]


def stateless_call(
    model: keras.Model,
    trainable: Sequence[Any],
    non_trainable: Sequence[Any],
    x: Any,
    training: bool,
    beside: Sequence[tuple[keras.Variable, Any]] = (),
) -> Called:
    """Calls the model. trainable, non_trainable: tensors for the variables of these lists. x: the first argument, or
    Arguments. beside: tensors for other variables that the model reads.

    Raises ValueError if there are other variables.
    """
    args, kwargs = x if isinstance(x, Arguments) else ((x,), {})
    mapping = [
        *zip(model.trainable_variables, trainable, strict=True),
        *zip(model.non_trainable_variables, non_trainable, strict=True),
        *beside,
    ]
    scope = keras.StatelessScope(state_mapping=mapping, collect_losses=True)
    # A tf.function that a layer holds would otherwise keep the tensors, and use them again in its next call.
    with keras_layers.outside_the_call(), functions_inline(), scope:
        outputs, losses = model(*args, **kwargs, training=training), model.losses
    return Called(outputs, [scope.get_current_value(variable) for variable in model.non_trainable_variables], losses)
