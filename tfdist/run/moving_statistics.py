"""Synchronizes the statistics of BatchNormalization that each worker has computed from its own samples only."""

from __future__ import annotations

import keras
import numpy as np

from tfdist.artifacts.state import WholeState
from tfdist.compat import keras_layers
from tfdist.runtime.base import Runtime
from tfdist.training.parallel.sharded_state import ShardedState


def sync_moving_statistics(model: keras.Model, state: WholeState | ShardedState, runtime: Runtime) -> None:
    """Sets all workers' statistics of BatchNormalization, of any type, to those of the first worker. A collective call.

    Other variables that are not trained stay as they are: a frozen weight may be a part, which differs by rank, and the
    state of another layer must not drift apart (runtime/weight_check.py).
    """
    variables = [
        variable.value
        for layer in keras_layers.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.non_trainable_variables
    ]
    values = _of_the_first([variable.numpy() for variable in variables], state, runtime)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _of_the_first(arrays: list[np.ndarray], state: WholeState | ShardedState, runtime: Runtime) -> list[np.ndarray]:
    """Returns the chief's arrays; for another pipeline stage, which holds other layers, those of its first rank."""
    first = state.first_of_stage()
    firsts = runtime.all_gather(np.array([first], np.int64))[:, 0]
    if not firsts.any():
        return runtime.broadcast(arrays)
    return [runtime.all_gather(array)[first] for array in arrays]
