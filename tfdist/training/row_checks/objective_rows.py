"""Finds out, by trying, whether a user's objective mixes samples: whether its result for a sample depends on the other
samples of the batch. row_mixing.py does the same for models, whose outputs an objective sees.

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

from tfdist.compat.tensorflow_functions import always_traced
from tfdist.compat.tensorflow_variables import writes_undone
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime import batch_norm
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import any_worker
from tfdist.runtime.host import known_dims
from tfdist.training.row_checks.added_losses import take_rows
from tfdist.training.row_checks.model_probe import ROWS
from tfdist.training.row_checks.row_proof import Proofs, rows_tried
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import any_differ, differ, differ_beyond_noise, nearly, spread
from tfdist.training.scores import Scores

_TOLERANCE = 1e-4  # relative to the largest number of the sample itself
# Relative changes of outputs, to see how a result is rounded, and by how much more a difference must exceed that.
_CHANGES, _BEYOND_ROUNDING = (1e-6, -1e-6, 2e-6, 3e-6), 10
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
            f" negatives) or on their number, but {reason}, so they would compute something else than one process: make"
            " losses, weights and metrics depend on each sample only, train on one device with --accumulation=1, or let"
            " it see the samples of its micro-batch only with --row_mixing=replica. (tfdist.fit gives compute_loss the"
            " outputs of all samples.)"
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
    # In a graph, as in the step: an `if` on a tensor becomes part of the graph there. And in one graph only, which
    # draws different random numbers when it runs again.
    traced = always_traced(objective)
    part = min(proofs.part, max(ROWS, _MOST_NUMBERS // max(width, 1)))
    numbers = dict.fromkeys((ROWS, part, rows_tried(proofs.many, part, width)))
    targets = _with_more(targets, further, max(numbers))
    for number in numbers:
        with contextlib.suppress(Exception):  # user code may raise anything, also because there are few samples
            drawn, given = _drawn(like, number), _repeated(targets, number)
            if any(_mixes(traced, _of_scales(drawn, largest, number), *given) for largest in _LARGEST_SCALES):
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


def _mixes(objective: Callable[..., Scores], outputs: Any, y: Any, w: tf.Tensor) -> bool:
    def scores(places: Sequence[int], outputs: Any = outputs) -> list[np.ndarray]:
        found = objective(*take_rows((outputs, y, w), places))
        return [leaf.numpy() for leaf in keras.tree.flatten((found.losses, found.weights, found.metrics))]

    number: int = known_dims(w.shape)[0]
    every, last = range(number), number - 1
    together = scores(every)
    # (a sample, the samples among which it stands, its place there); the last in a smaller batch, and in another place.
    # Not alone: for a single row a matrix product has a kernel of its own, which rounds otherwise.
    fewer = [last, *range(max(1, number // 2 - 1))]
    others = ((0, [0] * number, 0), (last, [last] * number, last), (last, fewer, 0))
    differing = [
        (score, sample, other[at])
        for sample, places, at in others
        for score, other in enumerate(scores(places))
        if differ(together[score][sample], other[at], _TOLERANCE)
    ]
    # If the objective draws random numbers, a difference tells nothing.
    if not differing or any_differ(together, scores(every), _TOLERANCE):
        return False
    nearby = [scores(every, _changed(outputs, by)) for by in _CHANGES]
    return any(
        differ_beyond_noise(
            one := together[score][sample],
            other,
            _TOLERANCE,
            _BEYOND_ROUNDING * max(_largest_difference(one, near[score][sample]) for near in nearby),
        )
        for score, sample, other in differing
    )


def _changed(outputs: Any, by: float) -> Any:
    return keras.tree.map_structure(
        lambda leaf: tf.constant(nearly(leaf.numpy(), by)) if leaf.dtype.is_floating else leaf, outputs
    )


def _largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    apart = np.abs(np.subtract(one, other, out=np.zeros(np.shape(one)), where=np.isfinite(one) & np.isfinite(other)))
    return float(np.max(apart, initial=0.0))
