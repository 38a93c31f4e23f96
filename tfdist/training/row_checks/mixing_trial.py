"""One attempt to find out whether a model mixes rows: whether its output for a row depends on other rows of the batch.

The model is called with some rows, and again with a part of them kept in place and all others replaced by copies of one
kept row: the outputs for the kept rows must not change. The same shapes run the same kernels, so there is no difference
by rounding. The output must also stay the same if the row stands in another place of a smaller batch: a layer that
divides by the number of rows would divide by a worker's number. This comparison allows for rounding. Rows of different
sizes show mixing that begins above some value, gradients show mixing in the backward pass (row_gradients.py), and many
runs show mixing that happens only now and then (random_mixing.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import tensorflow_random
from tfdist.compat.keras_tensors import mask_of
from tfdist.training.row_checks import random_mixing, row_gradients
from tfdist.training.row_checks.model_probe import ROWS, Conditions, Probe
from tfdist.training.row_checks.random_mixing import Draws, of_rows
from tfdist.training.row_checks.trial_values import ROUNDED, TOLERANCE, any_differ, differ, shortened, sound, spread


class Attempt(NamedTuple):
    """One way to try a model. disturbed: how much the weights are perturbed. kept: factor of the rows' values. noise:
    how much noise is added to the rows. spread: whether rows then get different sizes. by_halves: whether every other
    row is kept, or only the first or the last row."""

    disturbed: float
    kept: float
    noise: float
    spread: bool
    training: bool
    by_halves: bool

    @property
    def moves(self) -> bool:
        """Whether this attempt also moves rows, uses as many rows as a whole batch, and checks gradients: doing this in
        one kind of attempt is enough."""
        return 0.0 < self.disturbed < 1.0 and not self.spread


ATTEMPTS = [
    Attempt(*how, training, by_halves=(number + training) % 2 == 1)
    for number, how in enumerate(
        ((0.0, 1.0, 0.0, False), (0.3, 1.0, 1.0, False), (0.3, 1.0, 1.0, True), (1.0, 0.0, 1.0, False))
    )
    for training in (False, True)
]
_SMALLEST, _LARGEST = 1e-3, 1e3  # scales of rows of different sizes


class Trial(NamedTuple):
    """A model with one attempt to try on it. draws: what it draws at random under these conditions; None: unknown."""

    attempt: Attempt
    probe: Probe
    weights: Sequence[tf.Tensor]
    draws: Draws | None

    def finds_mixing(self, many: int, part: int) -> bool:
        """Returns whether the attempt shows that rows are mixed, in batches of `many` rows or of `part`. If the model
        fails with a few rows, or outside of a graph, it is tried with as many rows as a batch has, and in a graph, as
        it will be trained. A model that fails there, too, cannot be trained: this tells nothing.
        """
        attempt = self.attempt
        # Rows without noise: use all available rows, as something that only one of them holds, such as a token, may
        # change the others.
        few = many if attempt.moves else max(ROWS, min(many, self.probe.count)) if not attempt.noise else ROWS
        for number, in_graph in dict.fromkeys([(few, False), (many, False), (many, True)]):
            try:
                found = self._found_with(number, in_graph)
            except Exception:  # noqa: BLE001, S112 - user code may raise anything
                continue
            if found:
                return True
            break
        return attempt.moves and (self._found_in_a_part(part, {few, many}) or self._found_by_many_runs(many))

    def _found_in_a_part(self, part: int, tried: Collection[int]) -> bool:
        if part < 2 or part in tried:
            return False
        try:
            return self._found_with(part, in_graph=False)
        except Exception:  # noqa: BLE001 - user code may raise anything
            return False

    def _found_by_many_runs(self, number: int) -> bool:
        if self.draws is not None and not self.draws.some:
            return False

        def outputs(x: Any, draw: tf.Tensor) -> list[tf.Tensor]:
            return _in_float64(self._outputs(x, draw))

        try:
            return random_mixing.mixes(outputs, self.probe.take, self._rows(number), number, TOLERANCE)
        except Exception:  # noqa: BLE001 - user code may raise anything
            return False

    def _outputs(self, x: Any, draw: Any) -> list[tf.Tensor]:
        """Returns the model's outputs for x, and their masks."""
        conditions = Conditions(self.attempt.training, draw, self.attempt.disturbed)
        leaves = keras.tree.flatten(self.probe.outputs(x, self.weights, conditions))
        return [*leaves, *(mask for leaf in leaves if (mask := mask_of(leaf)) is not None)]

    def _rows(self, number: int) -> Any:
        attempt = self.attempt
        draw = None if attempt.moves else 2 * attempt.spread + attempt.training
        x = self.probe.some_rows(number)
        return keras.tree.map_structure(lambda leaf: sound(leaf, attempt.kept, attempt.noise, draw), x)

    def _found_with(self, number: int, in_graph: bool) -> bool:
        """Returns whether outputs depend on other rows, in a batch of `number` rows."""
        attempt, rows = self.attempt, self._rows(number)

        def outputs(places: list[int], draw: int = 0) -> list[np.ndarray]:
            x = self.probe.take(rows, places)

            def compute() -> list[tf.Tensor]:
                return _in_float64(self._outputs(x, draw))

            with self._drawn_again(draw):
                # The tf.function itself is not called: TensorFlow would warn of functions that are retraced often.
                function: Any = tf.function(compute, autograph=False).get_concrete_function() if in_graph else compute
                return of_rows(function(), len(places))

        kept = (
            [range(0, number, 2), range(1, number, 2)] if attempt.by_halves else [range(1), range(number - 1, number)]
        )
        tolerance = max(ROUNDED, self.probe.tolerance)
        if attempt.spread:
            sizes = np.geomspace(_SMALLEST, _LARGEST, number)
            rows = keras.tree.map_structure(lambda leaf: shortened(spread(leaf, sizes), number), rows)
            mixed = _depends_on_others(outputs, outputs(list(range(number))), number, kept, tolerance)
        else:
            together = outputs(list(range(number)))
            mixed = _depends_on_others(outputs, together, number, kept) or (
                attempt.moves
                and (_depends_on_its_place(outputs, together, number, tolerance) or self._found_in_gradients())
            )
        if mixed and in_graph and self.draws is not None and self.draws.in_loops:
            raise _Unrepeatable  # the iterations of a loop draw in any order
        return mixed

    @contextlib.contextmanager
    def _drawn_again(self, draw: int) -> Iterator[None]:
        """Context manager in which the same `draw` gives the same random numbers; they differ between attempts."""
        if self.draws is not None and not self.draws.some:
            yield
            return
        seed = 2 * ATTEMPTS.index(self.attempt) + draw
        with tensorflow_random.repeated(seed), tensorflow_random.draws_undone(by=draw):
            yield

    def _found_in_gradients(self) -> bool:
        """Returns whether gradients depend on other rows. False if they fail for a few rows: that tells nothing."""
        try:
            return self.attempt.training and row_gradients.mix(self.probe, self.weights, self.attempt.disturbed)
        except Exception:  # noqa: BLE001 - user code may raise anything
            return False


def _in_float64(leaves: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.cast(leaf, tf.float64) for leaf in leaves]


def _depends_on_others(
    outputs: Callable[[list[int]], list[np.ndarray]],
    together: list[np.ndarray],
    number: int,
    kept: Iterable[Sequence[int]],
    of_row: float | None = None,
) -> bool:
    """Returns whether the output for a kept row changes if all other rows become copies of the first kept row.

    kept: several choices of rows to keep, tried in turn.
    of_row: the tolerance relative to the largest value of the row itself, if rows are of different sizes.

    Raises _Unrepeatable if the output changes even with the same rows.
    """
    found = any(
        differ(one[place], other[place], *(of_row, one[place]) if of_row else (TOLERANCE, one))
        for places in kept
        for one, other in zip(
            together, outputs([row if row in places else places[0] for row in range(number)]), strict=True
        )
        for place in places
    )
    if not found:
        return False
    # Checked only if something differs: most models do not mix rows.
    repeated = outputs(list(range(number)))
    if any_differ(together, repeated, TOLERANCE):
        raise _Unrepeatable
    return True


class _Unrepeatable(Exception):
    """The model draws different random numbers each time."""


def _depends_on_its_place(
    outputs: Callable[..., list[np.ndarray]], together: list[np.ndarray], number: int, tolerance: float
) -> bool:
    """Returns whether the output for a row changes if the row stands in another place of a smaller batch. False for a
    model that draws random numbers, which belong to places."""
    places = [number - 1, 0]
    moved = outputs(places)
    if len(moved) != len(together) or not any(
        differ(a[places], b, tolerance, a) for a, b in zip(together, moved, strict=True)
    ):
        return False
    redrawn = (outputs(list(range(number)), draw) for draw in random_mixing.REDRAWN)
    return not any(any_differ(together, each, TOLERANCE) for each in redrawn)
