"""Keeps variables equal on all workers."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.artifacts.hidden_state import hidden_variables
from tfdist.compat.keras_random import is_seed_state
from tfdist.control.terminal import say
from tfdist.runtime import first_values
from tfdist.runtime.base import PeerRuntime


def take_the_chiefs(runtime: PeerRuntime, variables: Sequence[keras.Variable | tf.Variable]) -> list[str]:
    """Gives every worker the chief's values, bit for bit, also for seed generators. Returns the names of those that
    differed.

    Raises ConfigError if the workers' shapes differ.
    """
    differed = first_values.take_the_chiefs(runtime, [state.tf_variable(variable) for variable in variables])
    return [getattr(variables[place], "path", variables[place].name) for place in differed]


def reconcile(runtime: PeerRuntime, model: keras.Model) -> None:
    """Compares the weights; if they have drifted apart (through a layer that keeps statistics of its batch), all
    workers take the chief's.
    """
    weights = [variable for variable in model.variables if not is_seed_state(variable)]
    differed = take_the_chiefs(runtime, [*weights, *hidden_variables(model)])
    if differed and runtime.rank == 0:
        more = f" and {len(differed) - 3} more" if len(differed) > 3 else ""
        say(
            f"the workers' weights had drifted apart in this epoch ({', '.join(differed[:3])}{more}); all took the"
            " chief's. Does a layer keep statistics of its rows? It sees only its worker's rows: compute them in"
            " train_step, from the outputs of all rows. Or does a callback set weights to its own numbers?"
        )
