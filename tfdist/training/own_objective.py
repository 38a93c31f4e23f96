"""A user's own objective, --objective=package.module:function: called, and checked, while the step is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.code_origin import module_of, package_of
from tfdist.compat.tensorflow_autograph import translated
from tfdist.control.exit_codes import ConfigError
from tfdist.plugins import check_takes, own_code
from tfdist.training.scores import Scores
from tfdist.training.step_output import FIRST_SUMS, HEAD, REQUESTS

_WANTED = (
    "a function (outputs, y, w) that returns Scores(losses, weights, metrics): losses of single samples [n] or tokens"
    " [n, T], not reduced (tfdist/training/scores.py)"
)

_WRAPPED = "write one that returns Scores(loss(y, outputs), w, {}), where a Keras loss has reduction=None"

# Names beside those of metrics in the vectors of a step, and in "train" and "eval" events.
_TAKEN = {*FIRST_SUMS, *HEAD, *REQUESTS, "step_s", "learning_rate", "skipped_steps", "samples"}

_NUMBERS = "give a float32 tensor with one number for each sample, or token"


def own_objective(name: str, function: Callable) -> Callable[[Any, Any, tf.Tensor], Scores]:
    """Makes an objective of a user's function. Raises ConfigError at once if it takes other arguments, and, when it is
    traced, if it fails or returns something else."""
    if isinstance(function, keras.losses.Loss) or package_of(module_of(function)) == "keras":
        raise ConfigError(
            f"--objective={name} is a loss of Keras, which takes (y_true, y_pred), but an objective is {_WANTED}:"
            f" {_WRAPPED}."
        )
    check_takes("objective", name, function, ("outputs", "y", "w"), f"an objective is {_WANTED}; {_WRAPPED}")
    # The step is traced without AutoGraph; a user's function may have an `if` on a tensor.
    converted = translated(function)

    def objective(outputs: Any, y: Any, w: tf.Tensor) -> Scores:
        with own_code("objective", name):
            scores = converted(outputs, y, w)
        if not isinstance(scores, tuple) or len(scores) != 3 or not isinstance(scores[2], Mapping):
            raise ConfigError(f"--objective={name} returned {type(scores).__name__}: an objective is {_WANTED}.")
        for metric in scores[2]:
            if not isinstance(metric, str) or not (metric and metric.isprintable()):
                raise ConfigError(f"--objective={name} has a metric called {metric!r}: give each a name.")
            if metric in _TAKEN:
                raise ConfigError(
                    f"--objective={name} has a metric called {metric!r}, a name that tfdist uses itself: give it"
                    " another name."
                )
        scores = Scores(
            _numbers(name, "losses", scores[0], learnable=True),
            _not_negative(_numbers(name, "weights", scores[1])),
            {metric: _numbers(name, f"the metric {metric!r}", values) for metric, values in scores[2].items()},
        )
        if scores.losses.shape.rank == 0:
            raise ConfigError(f"--objective={name} returned one loss for the whole batch: an objective is {_WANTED}.")
        for what, values in {"weights": scores.weights, **scores.metrics}.items():
            if not values.shape.is_compatible_with(scores.losses.shape):
                raise ConfigError(
                    f"--objective={name} returned losses of shape {scores.losses.shape}, but {what} of shape"
                    f" {values.shape}: they must be of one shape."
                )
        return scores

    return objective


def _not_negative(weights: tf.Tensor) -> tf.Tensor:
    """Replaces negative weights by minus infinity: the run then ends with a message about negative weights
    (training/step_output.py), and an evaluation gives NaN. Weights of the data are checked earlier."""
    return tf.where(weights < 0, float("-inf"), weights)


def _numbers(name: str, what: str, values: Any, learnable: bool = False) -> tf.Tensor:
    """Returns values from the objective called `name` as float32. Raises ConfigError if they are not numbers."""
    try:
        tensor = tf.convert_to_tensor(values)
    except (TypeError, ValueError):
        raise ConfigError(f"--objective={name} returned {type(values).__name__} for {what}: {_NUMBERS}.") from None
    usable = tensor.dtype.is_floating or not learnable and (tensor.dtype.is_integer or tensor.dtype.is_bool)
    if not usable:
        why = ", which have no gradient" if learnable and tensor.dtype != tf.string else ""
        raise ConfigError(f"--objective={name} returned {tensor.dtype.name} for {what}{why}: {_NUMBERS}.")
    return tf.cast(tensor, tf.float32)
