"""A model that is run on a few rows without leaving a trace in it, to see what the losses that its layers add, and its
outputs, have to do with rows; see added_losses.py and row_mixing.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_state, metrics_held
from tfdist.compat import keras_layers, keras_random, keras_variables, tensorflow_random
from tfdist.compat.keras_random import is_seed_state
from tfdist.compat.tensorflow_variables import writes_undone
from tfdist.training.row_checks.calm_layers import calmed
from tfdist.training.row_checks.trial_values import APART, disturbed, shortened, sound, spread, with_rows_apart
from tfdist.training.seeds import states_beside
from tfdist.training.stateless_call import stateless_call

MEAN, SUM = "mean", "sum"
UNKNOWN, _WEAK, OTHER = "0 on all rows", "the same on all rows", "other"
ROWS = 4  # that are tried, each alone and all together
_DRAWS = 64  # of what is random
_LEAST_TOLERANCE = 1e-4
# Factors of weights, and of rows, of which some are 25 times as large as others.
_SIZES = (*((1.0, of) for of in (0.01, 0.1, 1.0, 10.0, 100.0)), *((of, 1.0) for of in (0.1, 0.3, 3.0, 10.0, 50.0)))
_CLEAR = 0.15  # a random mean must be known as well as that

Key = tuple[
    int, int
]  # (place of a layer among all of the model, which of the losses that it adds in a call of the model)
Take = Callable[[Any, Sequence[int]], Any]


class Probe:
    """A model that is run on a few rows without leaving a trace in it."""

    def __init__(self, model: keras.Model, x: Any, take: Take, count: int):
        self.model, self.layers = model, list(keras_layers.all_layers(model))
        self.take = take
        self._x, self.count = x, count
        self.weights = [variable.numpy() for variable in model.trainable_variables]
        self.states = [variable.numpy() for variable in model.non_trainable_variables]
        types = {tf.as_dtype(layer.compute_dtype) for layer in self.layers if layer.compute_dtype}
        self.tolerance = max(
            [
                _LEAST_TOLERANCE,
                *(
                    8 * float(np.finfo(each.name).eps) if each != tf.bfloat16 else 2**-4
                    for each in types
                    if each.is_floating
                ),
            ]
        )
        self._states_off: dict[float, Sequence[np.ndarray]] = {0.0: self.states}
        self._added: list[tuple[Key, tf.Tensor]] = []
        self._seeds_met: list[keras.Variable] = []  # of generators that no layer holds
        # Under TensorFlow's strategies a metric adds up all workers' values when it is read, but not all try the same.
        self._of_metrics = [
            (variable, keras_variables.value_here(variable))
            for metric in metrics_held(model)
            for variable in metric.variables
        ]

    def some_rows(self, number: int = ROWS) -> Any:
        """The first of x, and if there are fewer than `number` from the first on again."""
        return self.take(self._x, [row % self.count for row in range(number)])

    # -- running the model -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which `add_loss` reports to this probe, and Keras' own layers draw no random numbers and look at
        no other rows."""
        kept = [(variable, variable.numpy()) for variable in hidden_state(self.model)]
        try:
            with calmed(self.layers, self._record), writes_undone():
                yield
        finally:
            for variable, value in kept:
                variable.assign(value)

    def _record(self, number: int, loss: Any) -> None:
        place = sum(key[0] == number for key, _ in self._added)
        self._added.append(((number, place), tf.reduce_sum(loss)))  # one value for each row is their sum, as in Keras

    def outputs(
        self, x: Any, weights: Sequence[np.ndarray | tf.Tensor], draw: Any, training: bool, states_off: float = 0.0
    ) -> Any:
        """The model's outputs; `draw`: of its random numbers, an int or uint32 []. Weights that are tensors are not
        copied.

        states_off: by how much variables that are not trained are larger than they are: what fades in with one that a
        callback sets is not there yet.
        """
        states = [
            value + tf.cast(draw, value.dtype) if is_seed_state(variable) else value
            for variable, value in zip(self.model.non_trainable_variables, self._states(states_off), strict=True)
        ]
        self._added = []
        given = [*map(tf.constant, weights)], [*map(tf.convert_to_tensor, states)]
        seeds = [(state, state.value + tf.cast(draw, state.dtype)) for state in (*states_beside(), *self._seeds_met)]
        beside = [*seeds, *((variable, tf.constant(value)) for variable, value in self._of_metrics)]
        redrawn = tensorflow_random.redrawn(draw if isinstance(draw, int) else 0)
        with redrawn, keras_random.asked_before_draws(self._meet):
            return stateless_call(self.model, *given, x, training, beside).outputs

    def _meet(self, generator: keras.random.SeedGenerator) -> None:
        """Notes a generator before the model draws from it. One that no layer holds is moved in later calls."""
        known = (*self.model.variables, *states_beside(), *self._seeds_met)
        if not any(generator.state is one for one in known):
            self._seeds_met.append(generator.state)

    def _states(self, off: float) -> Sequence[np.ndarray]:
        if off not in self._states_off:
            self._states_off[off] = [
                # Larger: a variance must not become negative.
                value + abs(disturbed([value], off)[0] - value) if tf.as_dtype(value.dtype).is_floating else value
                for value in self.states
            ]
        return self._states_off[off]

    def added(self, x: Any, weights: Sequence[np.ndarray | tf.Tensor], *how: Any) -> list[tuple[Key, tf.Tensor]]:
        """The losses that layers add. how: as for `outputs`."""
        self.outputs(x, weights, *how)
        return self._added

    def values(self, x: Any, weights: Sequence[np.ndarray | tf.Tensor], *how: Any) -> dict[Key, float]:
        """The values of the losses. how: as for `outputs`."""
        return {key: float(loss) for key, loss in self.added(x, weights, *how)}

    def depends_on_rows(self, key: Key, training: bool) -> bool:
        """Whether it is made of the rows at all; if not it is what weights, or nothing, give."""
        rows = self.some_rows()
        with tf.Graph().as_default() as graph:
            x = keras.tree.map_structure(lambda leaf: tf.compat.v1.placeholder(leaf.dtype, leaf.shape), rows)
            inputs = {leaf.op for leaf in keras.tree.flatten(x)}
            waiting = [
                loss.op
                for at, loss in self.added(x, self.weights, 0, training)
                if at == key and getattr(loss, "graph", None) is graph
            ]
            seen = set(waiting)
            while waiting:
                operation = waiting.pop()
                if operation in inputs:
                    return True
                more = {tensor.op for tensor in operation.inputs} - seen
                seen |= more
                waiting += more
        return False

    # -- judging what it adds --------------------------------------------------------------------------------------

    def judged(self, training: bool) -> dict[Key, str]:
        """For each added loss: MEAN, SUM, or why it is neither."""
        found: dict[Key, str] = {}
        rows = self.some_rows()
        if not any(self.values(rows, self.weights, draw, training) for draw in range(2)):
            return {}  # as of most models; twice, as some add none in their first call
        for by, kept, noise in (
            (0.0, 1.0, 0.0),
            (0.3, 1.0, 0.0),
            (1.0, 1.0, 1.0),
            # Rows far from 0 may all drive a layer to the same limit: then its largest value is its mean.
            (1.0, 0.0, 1.0),
        ):
            judged = self._judged(disturbed(self.weights, by), kept, noise, (training, by))
            for key, scales in judged.items():
                before = found.get(key, UNKNOWN)
                settled = {scales, before} - {UNKNOWN, _WEAK} or ({_WEAK} & {scales, before}) or {UNKNOWN}
                found[key] = settled.pop() if len(settled) == 1 else OTHER
            if not {UNKNOWN, _WEAK} & set(found.values()):
                break
        return {key: MEAN if scales == _WEAK else scales for key, scales in found.items()}

    def tried_apart(self, found: dict[Key, str], training: bool) -> dict[Key, str]:
        """`found`, after a try with rows of different sizes: what is cut off after the mean (`maximum(mean, limit)`, as
        for free bits) is a mean on one side of the limit only, and what begins at a limit was 0 before.
        """
        left = {key: {SUM, MEAN} if scales == UNKNOWN else {scales} for key, scales in found.items()}
        x = keras.tree.map_structure(lambda leaf: sound(leaf, 1.0, 1.0), self.some_rows())
        others = disturbed(self.weights, 0.3)
        for of_weights, of_rows in _SIZES:
            weights = [
                tf.constant(with_rows_apart(each, of_weights)) for each in others
            ]  # copied once, not at each call
            rows = keras.tree.map_structure(functools.partial(spread, scales=of_rows * np.geomspace(*APART, ROWS)), x)
            claims = [(key, scales) for key, kinds in left.items() for scales in kinds & {SUM, MEAN}]
            for key, scales in self._refuted(claims, rows, ROWS, weights, training, 0.3):
                left[key] = left[key] - {scales}
        return {key: found[key] if len(kinds) > 1 else next(iter(kinds), OTHER) for key, kinds in left.items()}

    def tried_whole(self, found: dict[Key, str], number: int, training: bool) -> dict[Key, str]:
        """`found`, after a try with as many rows as a batch has: what takes the first of them takes all of a few."""
        number -= number % 2
        x = keras.tree.map_structure(lambda leaf: shortened(sound(leaf, 1.0, 1.0), number), self.some_rows(number))
        weights = [tf.constant(each) for each in disturbed(self.weights, 0.3)]
        claims = [(key, scales) for key, scales in found.items() if scales in (SUM, MEAN)]
        return found | {key: OTHER for key, _ in self._refuted(claims, x, number, weights, training)}

    def _refuted(
        self, claims: Sequence[tuple[Key, str]], x: Any, number: int, weights: Sequence[tf.Tensor], *how: Any
    ) -> list[tuple[Key, str]]:
        """The claims (SUM or MEAN) about losses that the halves of x, of an even number of rows, contradict. Random
        losses tell nothing. how: as for `outputs`, without the draw."""
        half = number // 2
        batches = [self.take(x, each) for each in (range(number), range(half), range(half, number))]
        whole, *halves = (self.values(batch, weights, 0, *how) for batch in batches)
        wrong = [
            (key, scales)
            for key, scales in claims
            if all(key in one for one in (whole, *halves))
            and self._is_not(scales, whole[key], [one[key] for one in halves])
        ]
        redrawn = self.values(batches[0], weights, 1, *how) if wrong else {}
        return [(key, scales) for key, scales in wrong if redrawn.get(key) == whole[key]]

    def _is_not(self, scales: str, whole: float, halves: Sequence[float]) -> bool:
        largest = max(map(abs, (whole, *halves)))
        expected = sum(halves) / (len(halves) if scales == MEAN else 1)
        return bool(np.isfinite(largest)) and abs(whole - expected) > self.tolerance * largest

    def _judged(
        self, weights: Sequence[np.ndarray], kept: float, noise: float, how: tuple[bool, float]
    ) -> dict[Key, str]:
        x = keras.tree.map_structure(lambda leaf: sound(leaf, kept, noise), self.some_rows())
        batches = [[place] for place in range(ROWS)] + [list(range(ROWS)), [0, 0, 1]]
        batches = [self.take(x, batch) for batch in batches]

        def look(draw: int) -> list[dict[Key, float]]:
            return [self.values(batch, weights, draw, *how) for batch in batches]

        first, redrawn = look(0), self.values(batches[ROWS], weights, 1, *how)
        keys = first[ROWS].keys()
        if any(one.keys() != keys for one in first):
            return dict.fromkeys(keys, OTHER)
        result = {key: _verdict([one[key] for one in first], self.tolerance) for key in keys}
        random = [key for key in keys if redrawn.get(key) != first[ROWS][key] and result[key] == OTHER]
        if random:
            draws = [first, *(look(draw) for draw in range(1, _DRAWS))]
            result |= {
                key: _verdict_of_draws(np.array([[one[key] for one in draw] for draw in draws])) for key in random
            }
        return result


def _verdict(values: Sequence[float], tolerance: float) -> str:
    """SUM, MEAN or neither. `values`: the loss of each row, of all of them, and of rows 0, 0, 1."""
    rows, whole, three = np.array(values[:ROWS]), values[ROWS], values[ROWS + 1]
    scale = max(map(abs, values))
    if not np.isfinite(scale) or scale == 0:
        return UNKNOWN  # what is not finite says as little
    total, of_three = rows.sum(), 2 * rows[0] + rows[1]
    if max(abs(whole - total), abs(three - of_three)) <= tolerance * scale:
        return SUM
    if max(abs(whole - total / ROWS), abs(three - of_three / 3)) <= tolerance * scale:
        return _WEAK if np.ptp(rows) <= tolerance * scale else MEAN
    return OTHER


def _verdict_of_draws(draws: np.ndarray) -> str:
    """The verdict on a random loss, [draws, values], by its means, if they are known well enough to tell."""
    means, errors = draws.mean(0), draws.std(0) / np.sqrt(len(draws))
    for scales, parts in ((SUM, 1), (MEAN, ROWS)):
        expected, uncertain = means[:ROWS].sum() / parts, np.hypot(errors[ROWS], np.linalg.norm(errors[:ROWS]) / parts)
        if abs(means[ROWS] - expected) <= 4 * uncertain and uncertain <= _CLEAR * abs(expected):
            return scales
    return OTHER
