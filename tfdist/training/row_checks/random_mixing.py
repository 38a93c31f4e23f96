"""Finds out whether a model mixes rows at random, now and then: a swap of 5 % of the rows, a shuffle in one step of
ten.

One run does not show it. So the model is traced three times with the same seeds, and the graphs are run side by side
many times: the n-th runs of all three draw the same numbers, from any source (`keras.random` with and without a
generator, `tf.random`, a `tf.random.Generator`). Two graphs get the same rows; the third gets the same kept rows, but
different rows beside them. Numbers drawn by NumPy or Python differ between the graphs; then the trial tells nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow_graphs import draws, kinds_of_operations
from tfdist.compat.tensorflow_random import draws_undone, moved, seeded_graphs
from tfdist.training.row_checks.trial_values import any_differ, differ

REDRAWN = (1, 2, 3)  # more than one: two tosses of a coin may give the same
_MOST_RUNS, _FEWEST_RUNS = 200, 8  # what happens in one step of fifty shows in 200 runs with a chance of 98 %
_SECONDS = 4.0  # CPU time over all cores; a large model gets fewer runs
_TOLD_IN_LOOPS = 8  # runs that must differ: a single one may, by the order in which iterations of a loop draw


class Draws(NamedTuple):
    """Whether a graph draws random numbers. in_loops: whether also in loops, whose iterations run in parallel."""

    some: bool
    in_loops: bool


def what_is_drawn(graph: tf.Graph) -> Draws:
    return Draws(*(any(map(draws, kinds)) for kinds in kinds_of_operations(graph)))


def mixes(
    outputs: Callable[[Any, tf.Tensor], list[tf.Tensor]],
    take: Callable[[Any, Sequence[int]], Any],
    rows: Any,
    number: int,
    tolerance: float,
) -> bool:
    """Returns whether `outputs` for a row change with the other rows in one of the runs.

    Args:
      outputs: (`number` rows, uint32 []: by how much the seeds are advanced) -> tensors.
      take: (rows, numbers of rows) -> a nest of these rows.
    """
    every = list(range(number))
    with draws_undone() as states:
        whole = take(rows, every)
        functions = [_traced(outputs, whole) for _ in range(3)]
    drawn = what_is_drawn(functions[0].graph)
    if not drawn.some:
        return False
    found, enough, begun = 0, _TOLD_IN_LOOPS if drawn.in_loops else 1, time.process_time()
    for run in range(_MOST_RUNS):
        if run >= _FEWEST_RUNS and (found >= enough or time.process_time() - begun > _SECONDS):
            break
        kept = every[run % 2 :: 2]
        given = [whole, whole, take(rows, [row if row in kept else kept[0] for row in every])]
        turned = functions[run % 3 :] + functions[: run % 3]  # each may order the iterations of a loop differently
        one, same, other = (
            of_rows(_run(function, rows_given, states, run), number)
            for function, rows_given in zip(turned, given, strict=True)
        )
        if any_differ(one, same, tolerance):
            return False
        found += any(differ(a[kept], b[kept], tolerance, a) for a, b in zip(one, other, strict=True))
    return found >= enough


def _traced(outputs: Callable, rows: Any) -> Any:
    with seeded_graphs(1):
        return tf.function(outputs, autograph=False).get_concrete_function(rows, tf.zeros([], tf.uint32))


def _run(function: Any, rows: Any, states: Sequence[tf.Variable], run: int) -> list[tf.Tensor]:
    with moved(states, run):
        return function(rows, tf.constant(run, tf.uint32))


def of_rows(tensors: Sequence[tf.Tensor], number: int) -> list[np.ndarray]:
    """Returns the tensors that have `number` rows, as arrays."""
    return [leaf.numpy() for leaf in tensors if leaf.shape.rank and leaf.shape[0] == number]
