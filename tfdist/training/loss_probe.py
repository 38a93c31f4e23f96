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

from tfdist.artifacts import state
from tfdist.compat import keras_layers, tensorflow_random
from tfdist.compat.tensorflow_variables import writes_undone
from tfdist.training.calm_layers import calmed
from tfdist.training.stateless_call import stateless_call

MEAN, SUM = "mean", "sum"
UNKNOWN, _WEAK, OTHER = "0 on all rows", "the same on all rows", "other"
ROWS = 4  # that are tried, each alone and all together
_DRAWS = 64  # of what is random
_LEAST_TOLERANCE = 1e-4
_NOISE = 100_003  # numbers drawn at most for a weight, then again from the first; prime: rows next to each other differ
# Of weights, and of rows, of which some are 25 times as large as others.
_SIZES = (*((1.0, of) for of in (0.01, 0.1, 1.0, 10.0, 100.0)), *((of, 1.0) for of in (0.1, 0.3, 3.0, 10.0, 50.0)))
_APART = (0.2, 5.0)  # the smallest and the largest of rows, of batches and of tables
_CLEAR = 0.15  # a random mean must be known as well as that

Key = tuple[
    int, int
]  # (place of a layer among all of the model, which of the losses that it adds in a call of the model)
Take = Callable[[Any, Sequence[int]], Any]


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """What is drawn inside from Python's, NumPy's and TensorFlow's global generators is not missed later. To be entered
    by all workers, also by those that try nothing: a layer may draw from them when the step is traced.
    """
    before = state.generator_states()
    try:
        with tensorflow_random.state_kept():
            yield
    finally:
        state.restore_generator_states(before)


class Probe:
    """A model that is run on a few rows without leaving a trace in it."""

    def __init__(self, model: keras.Model, x: Any, take: Take, count: int):
        self.model, self.layers = model, list(keras_layers.all_layers(model))
        self.take = take
        self._x, self._count = x, count
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

    def some_rows(self, number: int = ROWS) -> Any:
        """The first of x, and if there are fewer than `number` from the first on again."""
        return self.take(self._x, [row % self._count for row in range(number)])

    # -- running the model -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, what layers add comes here, and Keras' own layers do not draw random numbers nor look at other
        rows.
        """
        kept = [
            (variable, variable.numpy())
            for variable in tf.train.TrackableView(self.model).descendants()
            if isinstance(variable, tf.Variable)
        ]
        try:
            with calmed(self.layers, self._record), writes_undone():
                yield
        finally:
            for variable, value in kept:
                variable.assign(value)

    def _record(self, number: int, loss: Any) -> None:
        place = sum(key[0] == number for key, _ in self._added)
        self._added.append(((number, place), loss))

    def outputs(
        self, x: Any, weights: Sequence[np.ndarray | tf.Tensor], draw: int, training: bool, states_off: float = 0.0
    ) -> Any:
        """What the model returns; `draw`: of its random numbers. Tensors as weights are not copied.

        states_off: by how much variables that are not trained are larger than they are: what fades in with one that a
        callback sets is not there yet.
        """
        states = [
            value + draw if variable.path.endswith("seed_generator_state") else value
            for variable, value in zip(self.model.non_trainable_variables, self._states(states_off), strict=True)
        ]
        self._added = []
        given = [*map(tf.constant, weights)], [*map(tf.constant, states)]
        return stateless_call(self.model, *given, x, training).outputs

    def _states(self, off: float) -> Sequence[np.ndarray]:
        if off not in self._states_off:
            self._states_off[off] = [
                # Larger: a variance must not become negative.
                value + abs(disturbed([value], off)[0] - value) if tf.as_dtype(value.dtype).is_floating else value
                for value in self.states
            ]
        return self._states_off[off]

    def _run(self, x: Any, weights: Sequence[np.ndarray], *how: Any) -> list[tuple[Key, tf.Tensor]]:
        self.outputs(x, weights, *how)
        return self._added

    def values(self, x: Any, weights: Sequence[np.ndarray], *how: Any) -> dict[Key, float]:
        """Of the losses. how: as for `outputs`."""
        return {key: float(loss) for key, loss in self._run(x, weights, *how)}

    def depends_on_rows(self, key: Key) -> bool:
        """Whether it is made of the rows at all; if not it is what weights, or nothing, give."""
        rows = self.some_rows()
        with tf.Graph().as_default() as graph:
            x = keras.tree.map_structure(lambda leaf: tf.compat.v1.placeholder(leaf.dtype, leaf.shape), rows)
            inputs = {leaf.op for leaf in keras.tree.flatten(x)}
            waiting = [
                loss.op
                for at, loss in self._run(x, self.weights, 0, True)
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
        """Of each added loss MEAN, SUM, or why it is neither."""
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

    def bent(self, found: dict[Key, str], training: bool) -> set[Key]:
        """Which of the losses that were found to be means or sums are none where rows are of different sizes: what is
        cut off after the mean (`maximum(mean, limit)`, as for free bits) is one on one side of the limit only.
        """
        half, result = ROWS // 2, set()
        x = keras.tree.map_structure(lambda leaf: sound(leaf, 1.0, 1.0), self.some_rows())
        for of_weights, of_rows in _SIZES:
            weights = [_with_rows_apart(each, of_weights) for each in disturbed(self.weights, 0.3)]
            scales = of_rows * np.geomspace(*_APART, ROWS)
            rows = keras.tree.map_structure(functools.partial(spread, scales=scales), x)
            batches = [self.take(rows, each) for each in (range(ROWS), range(half), range(half, ROWS))]
            whole, first, last = (self.values(batch, weights, 0, training, 0.3) for batch in batches)
            if not whole.keys() == first.keys() == last.keys():
                continue
            for key, value in whole.items():
                expected = (first[key] + last[key]) / (2 if found.get(key) == MEAN else 1)
                largest = max(abs(value), abs(first[key]), abs(last[key]))
                if np.isfinite(largest) and abs(value - expected) > self.tolerance * largest:
                    result.add(key)
            if result:
                redrawn = self.values(batches[0], weights, 1, training, 0.3)
                result = {key for key in result if redrawn.get(key) == whole[key]}  # what is random tells nothing
        return result & found.keys()

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
    """`values`: of each row, of all of them, and of rows 0, 0, 1."""
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
    """The same of what is random, [draws, values]: of its means, if they are known well enough to tell."""
    means, errors = draws.mean(0), draws.std(0) / np.sqrt(len(draws))
    for scales, parts in ((SUM, 1), (MEAN, ROWS)):
        expected, uncertain = means[:ROWS].sum() / parts, np.hypot(errors[ROWS], np.linalg.norm(errors[:ROWS]) / parts)
        if abs(means[ROWS] - expected) <= 4 * uncertain and uncertain <= _CLEAR * abs(expected):
            return scales
    return OTHER


def disturbed(weights: Sequence[np.ndarray], by: float) -> Sequence[np.ndarray]:
    """Other weights: an initial 0 can hide what a loss depends on. The same if `by` is 0."""
    if not by:
        return weights
    random = np.random.default_rng(0)
    result = []
    for weight in weights:
        scale = by * (float(np.std(_some_of(weight), dtype=np.float64)) or 0.1)
        noise = np.float32(scale) * random.standard_normal(min(weight.size, _NOISE), np.float32)
        result.append((weight + np.resize(noise, weight.shape)).astype(weight.dtype))
    return result


def _some_of(weight: np.ndarray) -> np.ndarray:
    """Enough of its numbers to know their spread."""
    return weight.reshape(-1)[:: weight.size // _NOISE | 1]  # odd, so as not to stay in one column


def _with_rows_apart(weight: np.ndarray, size: float) -> np.ndarray:
    """So many times a weight; a table with rows of different sizes, which batches of whole numbers have by it alone."""
    if weight.ndim < 2:
        return np.asarray(size * weight, weight.dtype)
    rows = np.random.default_rng(4).permutation(np.geomspace(*_APART, len(weight)))
    return np.asarray(size * weight * rows.reshape(-1, *[1] * (weight.ndim - 1)), weight.dtype)


def spread(leaf: tf.Tensor, scales: Sequence[float] | np.ndarray) -> tf.Tensor:
    """Rows of numbers times a scale each: between the smallest and the largest lie the limits at which a layer turns to
    something else. What has another number of rows stands beside a batch, and stays as it is.
    """
    if not leaf.dtype.is_floating or leaf.shape.rank == 0 or leaf.shape[0] != len(scales):
        return leaf
    return leaf * tf.cast(tf.reshape(tf.constant(scales), [-1, *[1] * (leaf.shape.rank - 1)]), leaf.dtype)


def sound(leaf: Any, kept: float, noise: float) -> tf.Tensor:
    """`kept` of a tensor without its NaN, and, with `noise`, other values in each row: of whole numbers, which may be
    places in a table, some that were there."""
    leaf = tf.convert_to_tensor(leaf)
    if leaf.dtype.is_floating:
        values = kept * tf.where(tf.math.is_finite(leaf), leaf, tf.zeros_like(leaf))
        drawn = tf.constant(np.random.default_rng(1).normal(size=leaf.shape), leaf.dtype)
        return values + noise * drawn * (tf.math.reduce_std(values) + tf.ones([], leaf.dtype))
    numbers = leaf.numpy()
    if leaf.dtype.is_integer and noise and numbers.ndim > 1 and numbers.size:
        rows, places = numbers.reshape(len(numbers), -1), np.arange(len(numbers))
        one_each = rows[places, places % rows.shape[1]]
        return tf.constant(np.broadcast_to(one_each.reshape(-1, *[1] * (numbers.ndim - 1)), numbers.shape))
    return leaf
