"""Finds out, by trying, whether a user's objective mixes samples: whether its result for a sample depends on the other
samples of the batch. row_mixing.py does the same for models, whose outputs an objective sees.

Losses with in-batch negatives (CLIP, SimCLR) mix samples: a worker, or a micro-batch, has fewer negatives than one
process. So do losses that divide by the largest of all samples, or by their number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
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
from tfdist.training.row_checks.trial_values import any_differ, differ, spread
from tfdist.training.scores import Scores

_TOLERANCE = 1e-4  # relative to the largest number of the sample itself
# Largest scales of the outputs; the smallest is 1 over it, so that a limit of the objective lies between two samples.
_LARGEST_SCALES = (1.0, 1e2)


def refuse(
    runtime: Runtime,
    name: str,
    objective: Callable[..., Scores],
    model: keras.Model,
    batch: Callable[[], Any],
    proofs: Proofs,
    reason: str,
) -> None:
    """Raises ConfigError on all workers if one finds that the objective called `name` mixes the samples of (x, y, w) =
    `batch()`. A collective call. proofs: of the model. reason: why mixing is not allowed, one of the reasons in
    row_mixing.py.

    An objective that cannot be tried is not refused: the step itself will report why it fails.
    """
    found = False
    with generators_kept(), contextlib.suppress(Exception):  # user code may raise anything
        found = mixes(objective, model, batch(), proofs)
    if any_worker(runtime, found):
        raise ConfigError(
            f"--objective={name}: its result for a sample depends on the other samples of its batch (in-batch"
            f" negatives) or on their number, but {reason}, so they would compute something else than one process: make"
            " losses, weights and metrics depend on each sample only, train on one device with --accumulation=1, or let"
            " it see the samples of its micro-batch only with --row_mixing=replica. (tfdist.fit gives compute_loss the"
            " outputs of all samples.)"
        )


def mixes(objective: Callable[..., Scores], model: keras.Model, batch: Any, proofs: Proofs) -> bool:
    """Returns whether the scores of a sample change with the other samples: of a few, of as many as the objective sees
    at a time in training, and of more (the hardest 8 of all samples are all of them, if these are few). Samples of the
    batch may be repeated, as each gets outputs of its own. Does not change the model."""
    first: Any = keras.tree.map_structure(lambda leaf: leaf[:ROWS], batch)
    x, y, w = first
    with writes_undone(), batch_norm.each_alone():
        like = model(x, training=False)
    width = sum(math.prod(known_dims(leaf.shape)[1:]) for leaf in keras.tree.flatten(like))
    # In a graph, as in the step: an `if` on a tensor becomes part of the graph there. And in one graph only, which
    # draws different random numbers when it runs again.
    traced = always_traced(objective)
    for number in dict.fromkeys((ROWS, proofs.part, rows_tried(proofs.many, proofs.part, width))):
        with contextlib.suppress(Exception):  # user code may raise anything, also because there are few samples
            outputs, *given = take_rows((like, y, w), [place % ROWS for place in range(number)])
            if any(_mixes(traced, _outputs(outputs, largest), *given) for largest in _LARGEST_SCALES):
                return True
    return False


def _outputs(like: Any, largest: float) -> Any:
    """Returns random outputs in the shapes of a model's, different for each sample, whatever the model's weights are
    now."""
    random = np.random.default_rng(3)

    def of(leaf: tf.Tensor) -> tf.Tensor:
        if not leaf.dtype.is_floating:
            return leaf
        dims = known_dims(leaf.shape)
        drawn = tf.cast(random.standard_normal(dims, np.float32), leaf.dtype)
        return spread(drawn, np.geomspace(1 / largest, largest, dims[0]))

    return keras.tree.map_structure(of, like)


def _mixes(objective: Callable[..., Scores], outputs: Any, y: Any, w: tf.Tensor) -> bool:
    def scores(places: Sequence[int]) -> list[np.ndarray]:
        found = objective(*take_rows((outputs, y, w), places))
        return [leaf.numpy() for leaf in keras.tree.flatten((found.losses, found.weights, found.metrics))]

    number: int = known_dims(w.shape)[0]
    every, last = range(number), number - 1
    together = scores(every)
    # (a sample, the samples among which it stands, its place there); the last in a smaller batch, and in another place
    others = ((0, [0] * number, 0), (last, [last] * number, last), (last, [last, *range(number // 2 - 1)], 0))
    found = any(
        differ(one[sample], other[at], _TOLERANCE)
        for sample, places, at in others
        for one, other in zip(together, scores(places), strict=True)
    )
    # If the objective draws random numbers, a difference tells nothing.
    return found and not any_differ(together, scores(every), _TOLERANCE)
