"""Whether the gradients of a batch are the sums of its rows' gradients. A `tf.custom_gradient` of the user's own may
see to it that they are not, where outputs tell nothing: one that clips what comes back by the norm of all rows, say.
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
from tfdist.training.row_checks.trial_values import ROUNDED, differ_beyond_noise, sound, spread

_SCALES = np.geomspace(1e-3, 1e3, ROWS)  # of the rows' gradients, so that limits lie between two of them
# What is 0 but for rounding, as of a bias that a softmax does away with, is known as well as the same rows in another
# order show, and never better than so much of the largest of all gradients.
_LEAST_NOISE, _NOISES = 1e-6, 100.0
# What is smaller than that may still be a gradient, as behind a limit far below the others. Then it stays nearly as it
# is where the weights are moved a little, which rounding does not; and only a large part of it says something.


class _Small(NamedTuple):
    moved: float  # of each weight, relative
    stays: float  # of the gradient, which may change by so much then
    says: float  # of the gradient, a difference


_SMALL, _SMALL_IN_HALF_PRECISION = _Small(1e-4, 0.05, 0.2), _Small(0.02, 0.25, 0.5)
_LARGEST = 10_000_000  # numbers of a table that are looked at


def mix(
    probe: Probe, weights: Sequence[tf.Tensor], off: float, added: Mapping[LossKey, Reduction] | None = None
) -> bool:
    """Whether, in training, the gradients of a few rows together differ from the sum of the gradients of the first
    and of the last half of them, each by the weights. off: by how much weights and states are disturbed. added: look at
    these losses in place of the outputs, of which each is a SUM or a MEAN over the rows.
    """
    # Whole numbers as they are: made-up ones are alike in a row, and rows that are alike can hide it.
    rows = keras.tree.map_structure(tf.convert_to_tensor, probe.some_rows())
    for kept in (1.0, 0.0):  # behind what large rows drive to its limit nothing comes back, mixed or not
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
    """Whether the gradients of these rows are mixed; None if not, but some weights have no gradient to tell."""
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
    if not _differ(together, sums, rounded, [_LEAST_NOISE * largest] * len(sums)):  # as of most models
        limits = _SMALL if rounded == ROUNDED else _SMALL_IN_HALF_PRECISION
        doubtful = [index for index in small if _gap(together, sums, index) > limits.says * sizes[index]]
        if doubtful:
            moved = gradients(every, weights=[_moved(weight, limits.moved) for weight in weights])
            redrawn = [gradients(every, draw) for draw in REDRAWN]
            if any(
                all(_gap(together, other, index) <= limits.stays * sizes[index] for other in (moved, *redrawn))
                for index in doubtful
            ):
                return True
        return None if small else False
    noises = [np.max(np.abs(a - b), initial=0.0) for a, b in zip(together, gradients(every[::-1]), strict=True)]
    # No more than so much: what depends on the place of a row is mixed.
    known = [max(_LEAST_NOISE * largest, min(_NOISES * noise, probe.tolerance * largest)) for noise in noises]
    # What is random tells nothing.
    return _differ(together, sums, rounded, known) and not any(
        _differ(together, gradients(every, draw), rounded, known) for draw in REDRAWN
    )


def _gap(some: Sequence[np.ndarray], others: Sequence[np.ndarray], index: int) -> float:
    return float(np.max(np.abs(some[index] - others[index]), initial=0.0))


def _moved(weight: tf.Tensor, part: float) -> tf.Tensor:
    if not weight.dtype.is_floating:
        return weight
    drawn = np.random.default_rng(3).normal(size=known_dims(weight.shape))
    return weight * tf.cast(1 + part * tf.constant(drawn), weight.dtype)


def _numbers(gradients: Any) -> list[np.ndarray]:
    small = [gradient for gradient in gradients if gradient.shape.num_elements() <= _LARGEST]
    return [tf.cast(tf.convert_to_tensor(gradient), tf.float64).numpy() for gradient in small]


def _upstream(output: tf.Tensor) -> tf.Tensor:
    """A random gradient of an output for all of the rows, always the same."""
    drawn = np.random.default_rng(2).normal(size=(ROWS, *known_dims(output.shape)[1:]))
    return spread(tf.constant(drawn, tf.float32), _SCALES)


def _differ(some: Sequence[np.ndarray], others: Sequence[np.ndarray], rounded: float, known: Sequence[float]) -> bool:
    return any(
        differ_beyond_noise(one, other, rounded, noise) for one, other, noise in zip(some, others, known, strict=True)
    )
