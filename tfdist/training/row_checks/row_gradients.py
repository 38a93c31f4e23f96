"""Finds out whether the gradients of a batch are the sums of its rows' gradients. A user's own `tf.custom_gradient` may
break this without an effect on outputs: for example, one that clips the incoming gradient by the norm of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import tensorflow_tapes
from tfdist.runtime.host import known_dims
from tfdist.training.row_checks.model_probe import ROWS, Conditions, LossKey, Probe
from tfdist.training.row_checks.random_mixing import REDRAWN
from tfdist.training.row_checks.reductions import MEAN, SUM, Reduction
from tfdist.training.row_checks.trial_values import ROUNDED, differ_beyond_noise, nearly, sound, spread

_SCALES = np.geomspace(1e-3, 1e3, ROWS)  # of the rows' gradients, so that limits lie between two of them
# The noise of a gradient that is 0 except for rounding (as of a bias that a softmax cancels) is estimated from the same
# rows in another order, and is at least _LEAST_NOISE of the largest of all gradients.
_LEAST_NOISE, _NOISES = 1e-6, 100.0
# A smaller gradient may still be a real one, as behind a limit far below the others. A real gradient stays nearly the
# same if the weights change a little, which rounding errors do not; and only a large relative difference of it counts.


class _Small(NamedTuple):
    moved: float  # relative change of each weight
    stays: float  # relative change of a real gradient that this may cause
    says: float  # relative difference of the gradient from which on it counts


_SMALL, _SMALL_IN_HALF_PRECISION = _Small(1e-4, 0.05, 0.2), _Small(0.02, 0.25, 0.5)
_LARGEST = 10_000_000  # elements; gradients of larger tables are not compared


def mix(
    probe: Probe, weights: Sequence[tf.Tensor], off: float, added: Mapping[LossKey, Reduction] | None = None
) -> bool:
    """Returns whether, in training, the gradients (with respect to the weights) of a few rows together differ from the
    sum of the gradients of their first and last half. off: how much weights and states are perturbed. added: checks
    these losses, each a SUM or a MEAN over the rows, in place of the outputs.
    """
    # Integers stay as they are: made-up ones are all the same within a row, which can hide mixing.
    rows = keras.tree.map_structure(tf.convert_to_tensor, probe.some_rows())
    for kept in (1.0, 0.0):  # large rows may drive a layer to its limit, where no gradient comes back, mixed or not
        x = keras.tree.map_structure(
            lambda leaf, kept=kept: sound(leaf, kept, 1.0) if leaf.dtype.is_floating else sound(leaf, 1.0, 0.0), rows
        )
        found = _mixed(probe, weights, off, x, added)
        if found is not None:
            return found
    return False


def _mixed(
    probe: Probe, weights: Sequence[tf.Tensor], off: float, x: Any, added: Mapping[LossKey, Reduction] | None
) -> bool | None:
    """Returns whether the gradients of these rows are mixed; None if not, but some weights have too small a gradient to
    tell, or gradients are not finite."""
    half, every = ROWS // 2, range(ROWS)

    def of_outputs(places: Sequence[int], draw: int, weights: Sequence[tf.Tensor]) -> Any:
        outputs = keras.tree.flatten(probe.outputs(probe.take(x, list(places)), weights, Conditions(True, draw, off)))
        return sum(
            tf.reduce_sum(tf.cast(leaf, tf.float32) * tf.gather(_upstream(leaf), list(places)))
            for leaf in outputs
            if leaf.dtype.is_floating and leaf.shape.rank and leaf.shape[0] == len(places)
        )

    def of_added(places: Sequence[int], draw: int, weights: Sequence[tf.Tensor]) -> Any:
        found = dict(probe.added(probe.take(x, list(places)), weights, Conditions(True, draw, off)))
        parts = {SUM: 1.0, MEAN: float(len(places))}
        return sum(tf.cast(found[key], tf.float32) * parts[reduction] for key, reduction in (added or {}).items())

    def gradients(places: Sequence[int], draw: int = 0, weights: Sequence[tf.Tensor] = weights) -> list[np.ndarray]:
        with tensorflow_tapes.recording(), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            total = (of_outputs if added is None else of_added)(places, draw, weights)
        return _numbers(tape.gradient(total, list(weights), unconnected_gradients=tf.UnconnectedGradients.ZERO))

    together, first, last = gradients(every), gradients(every[:half]), gradients(every[half:])
    sizes = [np.max(np.abs(each), initial=0.0) for each in together]
    largest = max(sizes, default=0.0)
    if not np.isfinite(largest):
        return None
    sums = [a + b for a, b in zip(first, last, strict=True)]
    rounded = max(ROUNDED, probe.tolerance)
    small = [index for index, size in enumerate(sizes) if size <= _LEAST_NOISE * largest]
    if not _differ(together, sums, rounded, [_LEAST_NOISE * largest] * len(sums)):  # as for most models
        limits = _SMALL if rounded == ROUNDED else _SMALL_IN_HALF_PRECISION
        doubtful = [index for index in small if _gap(together, sums, index) > limits.says * sizes[index]]
        if doubtful:
            nearby = [
                tf.constant(nearly(weight.numpy(), limits.moved)) if weight.dtype.is_floating else weight
                for weight in weights
            ]
            moved = gradients(every, weights=nearby)
            redrawn = [gradients(every, draw) for draw in REDRAWN]
            if any(
                all(_gap(together, other, index) <= limits.stays * sizes[index] for other in (moved, *redrawn))
                for index in doubtful
            ):
                return True
        return None if small else False
    noises = [np.max(np.abs(a - b), initial=0.0) for a, b in zip(together, gradients(every[::-1]), strict=True)]
    # The noise has an upper limit: gradients that depend on the place of a row count as mixed.
    known = [max(_LEAST_NOISE * largest, min(_NOISES * noise, probe.tolerance * largest)) for noise in noises]
    # If gradients are random, a difference tells nothing.
    return _differ(together, sums, rounded, known) and not any(
        _differ(together, gradients(every, draw), rounded, known) for draw in REDRAWN
    )


def _gap(some: Sequence[np.ndarray], others: Sequence[np.ndarray], index: int) -> float:
    return float(np.max(np.abs(some[index] - others[index]), initial=0.0))


def _numbers(gradients: Any) -> list[np.ndarray]:
    small = [gradient for gradient in gradients if gradient.shape.num_elements() <= _LARGEST]
    return [tf.cast(tf.convert_to_tensor(gradient), tf.float64).numpy() for gradient in small]


def _upstream(output: tf.Tensor) -> tf.Tensor:
    """Returns a random gradient of an output for all rows, always the same."""
    drawn = np.random.default_rng(2).normal(size=(ROWS, *known_dims(output.shape)[1:]))
    return spread(tf.constant(drawn, tf.float32), _SCALES)


def _differ(some: Sequence[np.ndarray], others: Sequence[np.ndarray], rounded: float, known: Sequence[float]) -> bool:
    return any(
        differ_beyond_noise(one, other, rounded, noise) for one, other, noise in zip(some, others, known, strict=True)
    )
