"""Judges by values whether each loss that the layers of a model add is a mean or a sum over the rows of a batch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.row_checks.model_probe import ROWS, Conditions, LossKey, Probe
from tfdist.training.row_checks.trial_values import APART, disturbed, shortened, sound, spread, with_rows_apart

_DRAWS = 64  # draws of a random loss
# Factors (of weights, of rows); among the rows some are 25 times as large as others.
_SIZES = (*((1.0, of) for of in (0.01, 0.1, 1.0, 10.0, 100.0)), *((of, 1.0) for of in (0.1, 0.3, 3.0, 10.0, 50.0)))
_CLEAR = 0.15  # largest relative uncertainty of the mean of a random loss


class Reduction(enum.StrEnum):
    """How a loss is computed from the rows of a batch."""

    MEAN = "mean"
    SUM = "sum"
    CONSTANT = "constant"  # a mean whose values are the same for all tried rows, or do not depend on them
    ZERO = "zero"  # 0 in every trial: may be a mean or a sum
    NEITHER = "neither"


MEAN, SUM, CONSTANT, ZERO, NEITHER = Reduction
_DECIDED = (MEAN, SUM)


class LossValues:
    """Computes the losses that layers add, in training or else in evaluation, and judges their reductions."""

    def __init__(self, probe: Probe, training: bool):
        self._probe, self._training = probe, training

    def judged(self) -> dict[LossKey, Reduction]:
        """Returns the reduction of each added loss, judged by a few rows; never CONSTANT."""
        found: dict[LossKey, Reduction] = {}
        probe, rows = self._probe, self._probe.some_rows()
        if not any(self._of(rows, probe.weights, Conditions(self._training, draw)) for draw in range(2)):
            return {}  # as for most models; tried twice, as some add no loss in their first call
        for by, kept, noise in (
            (0.0, 1.0, 0.0),
            (0.3, 1.0, 0.0),
            (1.0, 1.0, 1.0),
            # Rows far from 0 may all drive a layer to the same limit: then its maximum equals its mean.
            (1.0, 0.0, 1.0),
        ):
            x = keras.tree.map_structure(lambda leaf, kept=kept, noise=noise: sound(leaf, kept, noise), rows)
            judged = self._judged(x, disturbed(probe.weights, by), states_off=by)
            for key, reduction in judged.items():
                found[key] = _agreed(found.get(key, ZERO), reduction)
            if not {ZERO, CONSTANT} & set(found.values()):
                break
        return {key: MEAN if reduction == CONSTANT else reduction for key, reduction in found.items()}

    def tried_apart(self, found: dict[LossKey, Reduction]) -> dict[LossKey, Reduction]:
        """Returns `found`, corrected by trials with rows of different sizes: a loss that is cut off after the mean
        (`maximum(mean, limit)`, as for free bits) is a mean on one side of the limit only, and a loss that begins at a
        limit is 0 below it.
        """
        left = {key: {SUM, MEAN} if reduction == ZERO else {reduction} for key, reduction in found.items()}
        x = keras.tree.map_structure(lambda leaf: sound(leaf, 1.0, 1.0), self._probe.some_rows())
        others = disturbed(self._probe.weights, 0.3)
        for of_weights, of_rows in _SIZES:
            weights = [
                tf.constant(with_rows_apart(each, of_weights)) for each in others
            ]  # copied once, not at each call
            rows = keras.tree.map_structure(functools.partial(spread, scales=of_rows * np.geomspace(*APART, ROWS)), x)
            claims = [(key, reduction) for key, kinds in left.items() for reduction in _DECIDED if reduction in kinds]
            for key, reduction in self._refuted(claims, rows, ROWS, weights, states_off=0.3):
                left[key] = left[key] - {reduction}
        return {key: found[key] if len(kinds) > 1 else next(iter(kinds), NEITHER) for key, kinds in left.items()}

    def tried_whole(self, found: dict[LossKey, Reduction], number: int) -> dict[LossKey, Reduction]:
        """Returns `found`, corrected by a trial with as many rows as a batch has: a loss that uses only the first rows
        of a batch uses all rows if there are few."""
        number -= number % 2
        rows = self._probe.some_rows(number)
        x = keras.tree.map_structure(lambda leaf: shortened(sound(leaf, 1.0, 1.0), number), rows)
        weights = [tf.constant(each) for each in disturbed(self._probe.weights, 0.3)]
        claims = [(key, reduction) for key, reduction in found.items() if reduction in _DECIDED]
        return found | {key: NEITHER for key, _ in self._refuted(claims, x, number, weights)}

    def _of(self, x: Any, weights: Sequence[np.ndarray | tf.Tensor], conditions: Conditions) -> dict[LossKey, float]:
        return {key: float(loss) for key, loss in self._probe.added(x, weights, conditions)}

    def _refuted(
        self,
        claims: Sequence[tuple[LossKey, Reduction]],
        x: Any,
        number: int,
        weights: Sequence[tf.Tensor],
        states_off: float = 0.0,
    ) -> list[tuple[LossKey, Reduction]]:
        """Returns the claims (SUM or MEAN) about losses that the two halves of x, an even number of rows, contradict.
        Random losses tell nothing."""
        half = number // 2
        batches = [self._probe.take(x, each) for each in (range(number), range(half), range(half, number))]
        plain, redrawing = (Conditions(self._training, draw, states_off) for draw in range(2))
        whole, *halves = (self._of(batch, weights, plain) for batch in batches)
        wrong = [
            (key, reduction)
            for key, reduction in claims
            if all(key in one for one in (whole, *halves))
            and self._is_not(reduction, whole[key], [one[key] for one in halves])
        ]
        redrawn = self._of(batches[0], weights, redrawing) if wrong else {}
        return [(key, reduction) for key, reduction in wrong if redrawn.get(key) == whole[key]]

    def _is_not(self, reduction: Reduction, whole: float, halves: Sequence[float]) -> bool:
        largest = max(map(abs, (whole, *halves)))
        expected = sum(halves) / (len(halves) if reduction == MEAN else 1)
        return bool(np.isfinite(largest)) and abs(whole - expected) > self._probe.tolerance * largest

    def _judged(self, x: Any, weights: Sequence[np.ndarray], states_off: float) -> dict[LossKey, Reduction]:
        batches = [[place] for place in range(ROWS)] + [list(range(ROWS)), [0, 0, 1]]
        batches = [self._probe.take(x, batch) for batch in batches]

        def look(draw: int, batches: Sequence[Any] = batches) -> list[dict[LossKey, float]]:
            return [self._of(batch, weights, Conditions(self._training, draw, states_off)) for batch in batches]

        first, (redrawn,) = look(0), look(1, batches[ROWS : ROWS + 1])
        keys = first[ROWS].keys()
        if any(one.keys() != keys for one in first):
            return dict.fromkeys(keys, NEITHER)
        result = {key: _verdict([one[key] for one in first], self._probe.tolerance) for key in keys}
        random = [key for key in keys if redrawn.get(key) != first[ROWS][key] and result[key] == NEITHER]
        if random:
            draws = [first, *(look(draw) for draw in range(1, _DRAWS))]
            result |= {
                key: _verdict_of_draws(np.array([[one[key] for one in draw] for draw in draws])) for key in random
            }
        return result


def _agreed(one: Reduction, other: Reduction) -> Reduction:
    """Returns the joint result of two trials: ZERO tells nothing, CONSTANT little."""
    for said in ({one, other} - {ZERO, CONSTANT}, {one, other} - {ZERO}):
        if said:
            return said.pop() if len(said) == 1 else NEITHER
    return ZERO


def _verdict(values: Sequence[float], tolerance: float) -> Reduction:
    """Judges a loss. values: the loss of each row, of all of them, and of rows 0, 0, 1."""
    rows, whole, three = np.array(values[:ROWS]), values[ROWS], values[ROWS + 1]
    scale = max(map(abs, values))
    if not np.isfinite(scale) or scale == 0:
        return ZERO  # a value that is not finite tells as little as 0
    total, of_three = rows.sum(), 2 * rows[0] + rows[1]
    if max(abs(whole - total), abs(three - of_three)) <= tolerance * scale:
        return SUM
    if max(abs(whole - total / ROWS), abs(three - of_three / 3)) <= tolerance * scale:
        return CONSTANT if np.ptp(rows) <= tolerance * scale else MEAN
    return NEITHER


def _verdict_of_draws(draws: np.ndarray) -> Reduction:
    """Judges a random loss, [draws, values], by its means, if they are known precisely enough."""
    means, errors = draws.mean(0), draws.std(0) / np.sqrt(len(draws))
    for reduction, parts in ((SUM, 1), (MEAN, ROWS)):
        expected, uncertain = means[:ROWS].sum() / parts, np.hypot(errors[ROWS], np.linalg.norm(errors[:ROWS]) / parts)
        if abs(means[ROWS] - expected) <= 4 * uncertain and uncertain <= _CLEAR * abs(expected):
            return reduction
    return NEITHER
