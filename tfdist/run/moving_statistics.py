"""Synchronizes moving statistics that each worker has computed from its own samples only."""

from __future__ import annotations

import keras
import numpy as np

from tfdist.artifacts.state import WholeState
from tfdist.runtime.base import Runtime
from tfdist.training.parallel.sharded_state import ShardedState


def sync_moving_statistics(model: keras.Model, state: WholeState | ShardedState, runtime: Runtime) -> None:
    """Sets all workers' moving statistics to those of the first worker. A collective call."""
    variables = [variable.value for variable in model.non_trainable_variables if variable.dtype == "float32"]
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
