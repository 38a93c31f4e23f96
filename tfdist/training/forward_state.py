"""The state that a forward pass changes in a model (moving statistics of BatchNormalization, counters of a user's
layers). A skipped step restores it: otherwise one NaN sample would make a moving average NaN for good."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_state
from tfdist.compat.keras_random import is_seed_state
from tfdist.runtime.base import Runtime


class ForwardState:
    """Reads and restores all variables of a model that are not trained, except the states of seed generators, which the
    step itself sets.
    """

    def __init__(self, runtime: Runtime, model: keras.Model):
        self.runtime = runtime
        self._variables = [
            *(variable.value for variable in model.non_trainable_variables if not is_seed_state(variable)),
            *hidden_state(model),
        ]

    def read(self) -> Any:
        """Returns the values on every local replica, inside a tf.function. TensorFlow copies only variables that are
        written later."""
        return self.runtime.run(lambda: [tf.identity(variable) for variable in self._variables])

    def put_back(self, values: Any) -> None:
        """Restores the values that `read` returned."""
        for place, variable in enumerate(self._variables):
            self.runtime.assign(
                variable, self.runtime.per_replica([replica[place] for replica in self.runtime.local(values)])
            )
