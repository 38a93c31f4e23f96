"""Finds out, by trying, whether a user's objective mixes samples: whether its result for a sample, or the gradient with
respect to the sample's outputs, depends on the other samples of the batch. row_mixing.py does the same for models,
whose outputs an objective sees.

Losses with in-batch negatives (CLIP, SimCLR) mix samples: a worker, or a micro-batch, has fewer negatives than one
process. So do losses that divide by the largest of all samples, or by their number.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import tensorflow_random
from tfdist.compat.tensorflow_functions import always_traced
from tfdist.compat.tensorflow_random import seeded_graphs
from tfdist.compat.tensorflow_variables import values_kept, writes_undone
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime import batch_norm
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import any_worker
from tfdist.runtime.host import known_dims
from tfdist.training.row_checks.added_losses import take_rows
from tfdist.training.row_checks.model_probe import ROWS
from tfdist.training.row_checks.random_mixing import what_is_drawn
from tfdist.training.row_checks.row_proof import Proofs, rows_tried
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import any_differ, differ, differ_beyond_noise, nearly, spread
from tfdist.training.scores import Scores

_TOLERANCE = 1e-4  # relative to the largest number of the sample itself
# Relative changes of outputs, in units of their last digit, to see how a result is rounded, and by how much more a
# difference must exceed that.
_CHANGES, _BEYOND_ROUNDING = (8, -8, 16, 24), 10
# With as many draws of each, results of one distribution lie in two ranges apart once in 300 million times.
_MANY_RUNS = 16
_MOST_NUMBERS = 100_000_000  # in the outputs of a trial, if that is more than ROWS rows: some copies are on the host
_READING_S = 0.3  # time for reading targets and weights of more than ROWS samples; then those that are read repeat
# Largest scales of the outputs; the smallest is 1 over it, so that a limit of the objective lies between two samples.
_LARGEST_SCALES = (1.0, 1e2)


def refuse(
    runtime: Runtime,
    name: str,
    objective: Callable[..., Scores],
    model: keras.Model,
    read: Callable[[], tuple[Any, Iterator[Any]]],
    proofs: Proofs,
    reason: str,
) -> None:
    """Raises ConfigError on all workers if one finds that the objective called `name` mixes samples. A collective call.

    Args:
      read: returns the first samples (x, y, w), ROWS of them, and an iterator over further ROWS of them.
      proofs: of the model.
      reason: why mixing is not allowed, one of the reasons in row_mixing.py.

    An objective that cannot be tried is not refused: the step itself will report why it fails.
    """
    found = False
    with generators_kept(), contextlib.suppress(Exception):  # user code may raise anything
        found = mixes(objective, model, *read(), proofs)
    if any_worker(runtime, found):
        raise ConfigError(
            f"--objective={name}: its result for a sample depends on the other samples of its batch (in-batch"
            f" negatives) or on their number, or its gradient does, but {reason}, so they would compute something else"
            " than one process: make losses, weights and metrics depend on each sample only, train on one device with"
            " --accumulation=1, or let it see the samples of its micro-batch only with --row_mixing=replica."
            " (tfdist.fit gives compute_loss the outputs of all samples.)"
        )


def mixes(
    objective: Callable[..., Scores], model: keras.Model, first: Any, further: Iterator[Any], proofs: Proofs
) -> bool:
    """Returns whether the scores of a sample change with the other samples: of a few, of as many as the objective sees
    at a time in training, and of more (the hardest 8 of all samples are all of them, if these are few). If reading
    takes long, samples are repeated, but each gets outputs of its own. Does not change the model. first, further: as
    `read` of `refuse` returns them."""
    x, *targets = first
    with writes_undone(), batch_norm.each_alone():
        like = model(x, training=False)
    width = sum(math.prod(known_dims(leaf.shape)[1:]) for leaf in keras.tree.flatten(like))
    # In a graph, as in the step: an `if` on a tensor becomes part of the graph there.
    traced = always_traced(_with_gradients(objective))
    part = min(proofs.part, max(ROWS, _MOST_NUMBERS // max(width, 1)))
    numbers = dict.fromkeys((ROWS, part, rows_tried(proofs.many, part, width)))
    targets = _with_more(targets, further, max(numbers))
    for number in numbers:
        with contextlib.suppress(Exception):  # user code may raise anything, also because there are few samples
            drawn, given = _drawn(like, number), _repeated(targets, number)
            rows = ((_of_scales(drawn, largest, number), *given) for largest in _LARGEST_SCALES)
            if any(_mixes(_Runs(traced, each)) for each in rows):
                return True
    return False


def _with_more(targets: Any, further: Iterator[Any], number: int) -> Any:
    """Returns the targets and weights with those of further samples, `number` in all if these are read in time."""
    found, begun = [targets], time.monotonic()
    for _, *more in itertools.islice(further, math.ceil(number / ROWS) - 1):
        found.append(more)
        if time.monotonic() - begun > _READING_S:
            break
    return keras.tree.map_structure(lambda *leaves: tf.concat(leaves, 0), *found)


def _repeated(rows: Any, number: int) -> Any:
    """Returns the first `number` rows; once there are no more, they repeat."""
    return keras.tree.map_structure(lambda leaf: tf.gather(leaf, np.arange(number) % leaf.shape[0]), rows)


def _drawn(like: Any, number: int) -> Any:
    """Returns random outputs for that many samples, in the shapes of a model's, different for each sample, whatever the
    model's weights are now."""
    random = np.random.default_rng(3)

    def of(leaf: tf.Tensor) -> tf.Tensor:
        if not leaf.dtype.is_floating:
            return _repeated(leaf, number)
        shape = (number, *known_dims(leaf.shape)[1:])
        return tf.cast(random.standard_normal(shape, np.float32), leaf.dtype)

    return keras.tree.map_structure(of, like)


def _of_scales(drawn: Any, largest: float, number: int) -> Any:
    scales = np.geomspace(1 / largest, largest, number)
    return keras.tree.map_structure(lambda leaf: spread(leaf, scales), drawn)


def _with_gradients(objective: Callable[..., Scores]) -> Callable[..., list[tf.Tensor]]:
    """Returns a function of the same arguments that returns what must depend on each sample alone: losses, weights,
    metrics, and the gradients with respect to the outputs (only of the first and the last sample, which are compared).
    """

    def values(outputs: Any, y: Any, w: tf.Tensor) -> list[tf.Tensor]:
        trained = [leaf for leaf in keras.tree.flatten(outputs) if leaf.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trained)
            found = objective(outputs, y, w)
            total = tf.reduce_sum(found.losses * found.weights)
        gradients = tape.gradient(total, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        ends = [tf.gather(gradient, [0, known_dims(w.shape)[0] - 1]) for gradient in gradients]
        return [*keras.tree.flatten((found.losses, found.weights, found.metrics)), *ends]

    return values


class _Runs:
    """Runs an objective, as `_with_gradients` of it. traced: the tf.function. rows: all samples (outputs, y, w).

    Attributes: number: of samples. drawn: what it draws at random.
    """

    def __init__(self, traced: Any, rows: tuple[Any, Any, tf.Tensor]):
        self._traced, self._rows = traced, rows
        self.number: int = known_dims(rows[-1].shape)[0]
        self.drawn = what_is_drawn(self._function(rows).graph)

    def _function(self, rows: Any) -> Any:
        with seeded_graphs(1):
            return self._traced.get_concrete_function(*rows)

    def values(self, places: Sequence[int], runs: int, changed: int = 0) -> list[np.ndarray]:
        """Returns the values of the samples at these places, [runs, ...] each. The n-th runs of two calls draw the same
        numbers. changed: of `_CHANGES`, or 0."""
        outputs, *others = self._rows
        rows = take_rows((_changed(outputs, changed) if changed else outputs, *others), places)
        function = self._function(rows)
        with _undone(function.variables) if self.drawn.some else contextlib.nullcontext():
            found = [[leaf.numpy() for leaf in function(*rows)] for _ in range(runs)]
        return [np.stack(leaves) for leaves in zip(*found, strict=True)]


@contextlib.contextmanager
def _undone(states: Sequence[tf.Variable]) -> Iterator[None]:
    """Context manager in which the first numbers are drawn, and which restores the states of generators at exit."""
    with values_kept(states), tensorflow_random.repeated(1):
        yield


def _mixes(run: _Runs) -> bool:
    every, last = range(run.number), run.number - 1
    # (a sample, the samples among which it stands, its place there); the last in a smaller batch, and in another place.
    # Not alone: for a single row a matrix product has a kernel of its own, which rounds otherwise.
    fewer = [last, *range(max(1, run.number // 2 - 1))]
    others = ((0, [0] * run.number, 0), (-1, [last] * run.number, -1), (-1, fewer, 0))
    many = _MANY_RUNS if run.number <= ROWS else 0  # 0: no comparison, as it would take too long
    # (Runs with as many samples, where each draws the same numbers again; runs with fewer, where it may draw others.)
    # The second way is for draws that cannot be repeated, as in a loop, whose iterations draw in any order.
    ways = [(1, many if run.drawn.some else 1), (many, many)]
    for counts in ways[run.drawn.in_loops :]:
        together = {count: run.values(every, count) for count in counts if count}
        differing = [
            (count, score, sample, pair)
            for sample, places, at in others
            if (count := counts[len(places) < run.number])
            for score, (one, other) in enumerate(zip(together[count], run.values(places, count), strict=True))
            if differ(*(pair := _nearest(one[:, sample], other[:, at])), _TOLERANCE)
        ]
        if not differing:
            return False
        if counts[0] == 1 and any_differ(together[1], run.values(every, 1), _TOLERANCE):
            continue
        nearby = [{count: run.values(every, count, by) for count in together} for by in _CHANGES]
        return any(
            differ_beyond_noise(*pair, _TOLERANCE, _BEYOND_ROUNDING * _rounding(together, nearby, *where))
            for *where, pair in differing
        )
    return False


def _rounding(together: Any, nearby: Sequence[Any], count: int, score: int, sample: int) -> float:
    """Returns by how much a value of a sample changes with small changes of outputs."""
    value, *others = (found[count][score][:, sample] for found in (together, *nearby))
    return max(_largest_difference(*_nearest(value, other)) for other in others)


def _nearest(some: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the closest numbers of the two ranges in which the values of the runs lie: equal ones if they overlap."""
    one = np.clip(others.min(0), some.min(0), some.max(0))
    return one, np.clip(one, others.min(0), others.max(0))


def _changed(outputs: Any, by: int) -> Any:
    def of(leaf: tf.Tensor) -> tf.Tensor:
        if not leaf.dtype.is_floating:
            return leaf
        digit = max(float(np.spacing(each(1))) for each in (leaf.dtype.as_numpy_dtype, np.float32))
        return tf.constant(nearly(leaf.numpy(), by * digit))

    return keras.tree.map_structure(of, outputs)


def _largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    apart = np.abs(np.subtract(one, other, out=np.zeros(np.shape(one)), where=np.isfinite(one) & np.isfinite(other)))
    return float(np.max(apart, initial=0.0))
