"""Whether what an objective of the user's own gives for a sample depends on the other samples of its batch, found out
by trying: as for models (row_mixing.py), of which it sees the outputs.

In-batch negatives (CLIP, SimCLR) are such a loss: a worker, or a micro-batch, has fewer of them than one process. So
is one that divides by the largest of all samples, or by their number.
"""

from __future__ import annotations

import contextlib
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
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import any_differ, differ, spread
from tfdist.training.scores import Scores

_TOLERANCE = 1e-4  # of the largest number of a sample's own
# Scales of the outputs of each sample: limits lie between two of them.
_SCALES = (np.ones(ROWS), np.geomspace(1e-2, 1e2, ROWS))


def refuse(
    runtime: Runtime,
    name: str,
    objective: Callable[..., Scores],
    model: keras.Model,
    batch: Callable[[], Any],
    reason: str,
) -> None:
    """Raises ConfigError on all workers if one finds that the objective called `name` mixes the samples of (x, y, w) =
    `batch()`, of which the first ROWS are looked at. A collective. reason: why not, one of row_mixing.py.

    What cannot be tried is not refused: the step says itself why it fails.
    """
    found = False
    with generators_kept(), contextlib.suppress(Exception):  # of the user's own making
        found = mixes(objective, model, batch())
    if any_worker(runtime, found):
        raise ConfigError(
            f"--objective={name}: what it gives for a sample depends on the other samples of its batch (in-batch"
            f" negatives) or on their number, but {reason}, so that they"
            " would compute something else than one process: make losses, weights and metrics of each sample alone,"
            " train on one device with --accumulation=1, or let it see the samples of its micro-batch only with"
            " --row_mixing=replica. (tfdist.fit gives compute_loss the outputs of all samples.)"
        )


def mixes(objective: Callable[..., Scores], model: keras.Model, batch: Any) -> bool:
    """Whether the scores of a sample change with the other samples. Leaves the model as it is."""
    first: Any = keras.tree.map_structure(lambda leaf: leaf[:ROWS], batch)
    x, y, w = first
    with writes_undone(), batch_norm.each_alone():
        like = model(x, training=False)
    return any(_mixes(objective, _outputs(like, scales), y, w) for scales in _SCALES)


def _outputs(like: Any, scales: np.ndarray) -> Any:
    """Random outputs shaped as a model's, different for each sample, whatever the model's weights are now."""
    random = np.random.default_rng(3)

    def of(leaf: tf.Tensor) -> tf.Tensor:
        if not leaf.dtype.is_floating:
            return leaf
        return spread(tf.constant(random.normal(size=known_dims(leaf.shape)), leaf.dtype), scales)

    return keras.tree.map_structure(of, like)


def _mixes(objective: Callable[..., Scores], outputs: Any, y: Any, w: Any) -> bool:
    # In a graph, as the step does: an `if` on a tensor becomes one of the graph there. And in one, which draws other
    # random numbers when it runs again.
    traced = always_traced(objective)

    def scores(places: Sequence[int]) -> list[np.ndarray]:
        found = traced(*take_rows((outputs, y, w), places))
        return [leaf.numpy() for leaf in keras.tree.flatten((found.losses, found.weights, found.metrics))]

    every, last = list(range(ROWS)), ROWS - 1
    together = scores(every)
    others = [(place, scores([place] * ROWS), place) for place in (0, last)]
    others.append((last, scores([last, 0]), 0))  # among fewer, and in another place
    found = any(
        differ(one[place], other[at], _TOLERANCE)
        for place, those, at in others
        for one, other in zip(together, those, strict=True)
    )
    # What draws random numbers tells nothing.
    return found and not any_differ(together, scores(every), _TOLERANCE)
