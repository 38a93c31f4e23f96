"""Weights that a layer sets in its own forward pass, as keras.layers.SpectralNormalization does.

Where a weight lies in shards, in parts, on two stages or on parameter servers, or is computed with again, the layer
would set a copy that nobody looks at: the run would go on with other weights than it should, and nothing would tell. So
such a layer is refused, by name, when it first sets one of them, which is while the step is traced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from tfdist.compat import keras_layers
from tfdist.control.exit_codes import ConfigError

WHOLE = "must be whole, and set once, for that: drop the flag, or the layer"
ON_SERVERS = (
    "a worker would set in its own copy only, not on the servers: use another strategy, such as multi_worker, or drop"
    " the layer"
)


def refuse_assigned(
    model: keras.Model, variables: Iterable[keras.Variable], flag: str, why_and_fix: str = WHOLE
) -> None:
    """From now on a layer of `model` that sets one of its trainable `variables` while it is called is a ConfigError,
    which names `flag`.
    """
    for variable in variables:
        owners = [
            layer.name
            for layer in keras_layers.all_layers(model, include_self=False)
            if any(own is variable for own in keras_layers.own_trainable_variables(layer))
        ]
        variable.assign = _refusing(
            variable.assign,
            f"{flag}, but layer {owners[0] if owners else model.name} sets its weight {variable.path} in the forward"
            f" pass (as SpectralNormalization does), which {why_and_fix}.",
        )


def _refusing(assign: Any, sentence: str) -> Any:
    def refusing(value: Any) -> Any:
        if keras_layers.is_inside_a_call():
            raise keras_layers.keep_message(ConfigError(sentence))
        return assign(value)

    return refusing
