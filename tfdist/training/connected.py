"""Finds the trainable variables on which the loss depends. The others have no gradient. As in Keras, they and their
optimizer slots stay unchanged, and they are not decayed.

On the way to the optimizer such a variable has a gradient of zeros, so that the gradients that are accumulated,
reduced, clipped and measured have the same shapes for every model. If operations with custom gradients hide it
(recomputation, shards of --zero=3, stages of a pipeline), the model is traced once more, before it is spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_optimizers
from tfdist.config import Config
from tfdist.models.model_names import MODELS
from tfdist.runtime.base import Runtime
from tfdist.training.objectives import Objective
from tfdist.training.row_checks.trial_scope import trace

_NAMED = 5


class Connected:
    """Knows which of `variables`, in the order of differentiation, have a gradient. Until `note` is called: all."""

    def __init__(self, variables: Sequence[keras.Variable]):
        self._paths = [variable.path for variable in variables]
        self._ids = [id(variable) for variable in variables]
        self._found: set[int] | None = None
        self._fixed = self._has_warned = False

    def note(self, *gradients: Sequence[Any]) -> None:
        """Records, while a step is traced, which gradients are not None. A gradient in any trace counts."""
        if not self._fixed:
            found = {place for part in gradients for place, gradient in enumerate(part) if gradient is not None}
            self._found = found | (self._found or set())

    def fix(self, idle: Sequence[keras.Variable], count: int) -> list[str]:
        """Marks every variable except `idle` as connected, whatever `note` records. Returns messages for the user.
        count: trainable variables of the whole model; this object may know only a part of them.
        """
        left_out = set(map(id, idle))
        self._found = {place for place, own in enumerate(self._ids) if own not in left_out}
        self._fixed = self._has_warned = True
        return [sentence([variable.path for variable in idle], count)] if idle else []

    def only(self, pieces: Sequence[Any]) -> list[Any]:
        """Returns the pieces of gradients, with None for variables that are not connected."""
        return [piece if self._found is None or place in self._found else None for place, piece in enumerate(pieces)]

    def news(self) -> tuple[str, ...]:
        """Returns the message for the user about variables that are not connected, once."""
        missing = [] if self._found is None else [place for place in range(len(self._ids)) if place not in self._found]
        if self._has_warned or not missing:
            return ()
        self._has_warned = True
        return (sentence([self._paths[place] for place in missing], len(self._ids)),)


def sentence(paths: Sequence[str], count: int) -> str:
    """Returns the message that names the variables that are not connected, by their paths. count: number of all
    trainable variables."""
    names = ", ".join(paths[:_NAMED]) + (", ..." if len(paths) > _NAMED else "")
    return (
        f"The loss does not depend on {len(paths)} of the {count} trainable variables ({names}): they stay as they are,"
        " without weight decay, as in Keras' fit."
    )


def apply_connected(optimizer: keras.Optimizer, pieces: Sequence[Any], variables: Sequence[Any]) -> None:
    """Updates the variables whose piece is not None, and the moving averages of all. Keras would do the same, but warn
    each time, and refuse a call in which no variable has a piece."""
    pairs = [(piece, variable) for piece, variable in zip(pieces, variables, strict=True) if piece is not None]
    if pairs:
        optimizer.apply([piece for piece, _ in pairs], [variable for _, variable in pairs])
    else:  # it still counts as an update
        keras_optimizers.update_moving_averages(optimizer)
        iterations: Any = optimizer.iterations
        iterations.assign_add(1)


def unconnected(
    config: Config, runtime: Runtime, model: keras.Model, objective: Objective, spec: Any
) -> list[keras.Variable] | None:
    """Returns the trainable variables on which the loss does not depend; None if the step itself will find them. To be
    called before the model is spread. spec: of a micro-batch (x, y, w)."""
    pipe = runtime.mesh and runtime.mesh.degree("pipe") > 1
    hidden = config.parallel.recompute != "none" or config.parallel.zero == 3 or pipe
    is_own = config.model.model not in MODELS or ":" in config.model.objective  # built-in ones use all their variables
    if not (hidden and is_own):
        return None
    found: list[Any] = []

    def differentiate(x: Any, y: Any, w: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scores = objective(model(x, training=True), y, w)
            targets = [tf.reduce_sum(scores.losses * scores.weights), *model.losses]
        found[:] = tape.gradient(targets, [variable.value for variable in model.trainable_variables])

    trace(model, differentiate, *spec)
    return [variable for variable, gradient in zip(model.trainable_variables, found, strict=True) if gradient is None]
