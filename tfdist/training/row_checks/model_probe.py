"""Runs a model on a few rows without changing it, to see how its outputs, and the losses that its layers add, depend on
rows; see row_mixing.py and reductions.py."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_state, hidden_variables, metrics_held
from tfdist.compat import keras_draws, keras_layers, keras_variables, tensorflow_random
from tfdist.compat.keras_random import is_seed_state, states_beside
from tfdist.compat.tensorflow_graphs import function_graph, operations_behind
from tfdist.compat.tensorflow_variables import values_kept, writes_undone
from tfdist.training.row_checks.calm_layers import calmed
from tfdist.training.row_checks.trial_scope import attributes_kept
from tfdist.training.row_checks.trial_values import disturbed
from tfdist.training.stateless_call import stateless_call

ROWS = 4  # rows in a trial, each alone and all together
_MOST_HIDDEN = 1_000_000  # numbers in a variable that is set before each call: a counter, not a table
_LEAST_TOLERANCE = 1e-4

Take = Callable[[Any, Sequence[int]], Any]


class Values(enum.Enum):
    """Whether an added loss has more values for more rows."""

    AS_MANY = "as many"
    ROWS = "rows"  # more, along the first dim
    ELSEWHERE = "elsewhere"  # more, along another dim


class LossKey(NamedTuple):
    """Identifies a loss that a layer adds.

    layer: the place of the layer among all layers of the model. place: the place of the loss among those that the layer
    adds in a call of the model.
    """

    layer: int
    place: int


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a model is run.

    training: as in Keras.
    draw: selects its random numbers, an int or uint32 [].
    states_off: how much larger than their values non-trainable variables are made: an effect that fades in with a
      variable set by a callback would not show yet.
    """

    training: bool
    draw: Any = 0
    states_off: float = 0.0


class Probe:
    """Runs a model on a few rows without changing it."""

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
        self._hidden = [
            (variable, variable.numpy())
            for variable in hidden_variables(model)
            if (variable.shape.num_elements() or 0) <= _MOST_HIDDEN
        ]
        self._states_off: dict[float, Sequence[np.ndarray]] = {0.0: self.states}
        self._added: list[tuple[LossKey, tf.Tensor]] = []
        self._shapes: dict[LossKey, set[tuple[int, ...]]] = {}  # that an added loss has had
        self._seeds_met: list[keras.Variable] = []  # states of generators that no layer holds
        # Under TensorFlow's strategies reading a metric adds up the values of all workers, but not all make the same
        # trials.
        self._of_metrics = [
            (variable, keras_variables.value_here(variable))
            for metric in metrics_held(model)
            for variable in metric.variables
        ]

    def some_rows(self, number: int = ROWS) -> Any:
        """Returns the first `number` rows of x; if there are fewer, they are repeated from the first."""
        return self.take(self._x, [row % self.count for row in range(number)])

    # -- running the model -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager in which `add_loss` reports to this probe, and Keras' own layers draw no random numbers and
        do not mix rows."""
        kept = values_kept(hidden_state(self.model))
        with kept, calmed(self.layers, self._record), writes_undone(), attributes_kept(self.layers):
            yield

    def _record(self, number: int, loss: Any) -> None:
        key = LossKey(number, sum(key.layer == number for key, _ in self._added))
        self._shapes.setdefault(key, set()).add(tuple(loss.shape))
        self._added.append((key, tf.reduce_sum(loss)))  # values for each row count as their sum, as in Keras

    def values_of(self, key: LossKey) -> Values:
        """Returns whether the loss had more values the more rows were tried."""
        shapes = self._shapes.get(key, set()) - {()}
        if len({shape[1:] for shape in shapes}) > 1:
            return Values.ELSEWHERE
        return Values.ROWS if len(shapes) > 1 else Values.AS_MANY

    def outputs(self, x: Any, weights: Sequence[np.ndarray | tf.Tensor], conditions: Conditions) -> Any:
        """Returns the model's outputs. Weights that are tensors are not copied."""
        draw = conditions.draw
        states = [
            value + tf.cast(draw, value.dtype) if is_seed_state(variable) else value
            for variable, value in zip(
                self.model.non_trainable_variables, self._states(conditions.states_off), strict=True
            )
        ]
        for variable, value in self._hidden:  # Keras does not track them: a call would change them for the next one
            variable.assign(value, read_value=False)
        self._added = []
        given = [*map(tf.constant, weights)], [*map(tf.convert_to_tensor, states)]
        seeds = [(state, state.value + tf.cast(draw, state.dtype)) for state in (*states_beside(), *self._seeds_met)]
        beside = [*seeds, *((variable, tf.constant(value)) for variable, value in self._of_metrics)]
        redrawn = tensorflow_random.redrawn(draw if isinstance(draw, int) else 0)
        with redrawn, keras_draws.asked_before_draws(self._meet):
            return stateless_call(self.model, *given, x, conditions.training, beside).outputs

    def _meet(self, generator: keras.random.SeedGenerator) -> None:
        """Records a generator before the model draws from it. If no layer holds it, later calls shift its state."""
        known = (*self.model.variables, *states_beside(), *self._seeds_met)
        if not any(generator.state is one for one in known):
            self._seeds_met.append(generator.state)

    def _states(self, off: float) -> Sequence[np.ndarray]:
        if off not in self._states_off:
            self._states_off[off] = [
                # Only larger, because a variance must not become negative.
                value + abs(disturbed([value], off)[0] - value) if tf.as_dtype(value.dtype).is_floating else value
                for value in self.states
            ]
        return self._states_off[off]

    def added(
        self, x: Any, weights: Sequence[np.ndarray | tf.Tensor], conditions: Conditions
    ) -> list[tuple[LossKey, tf.Tensor]]:
        """Returns the losses that layers add."""
        self.outputs(x, weights, conditions)
        return self._added

    def depends_on_rows(self, key: LossKey, training: bool) -> bool:
        """Returns whether the loss depends on the rows at all, and not only on weights or on nothing."""
        rows = self.some_rows()
        with function_graph("added_losses").as_default() as graph:  # the call may set variables of its own
            x = keras.tree.map_structure(lambda leaf: tf.compat.v1.placeholder(leaf.dtype, leaf.shape), rows)
            inputs = {leaf.op for leaf in keras.tree.flatten(x)}
            added = [
                loss.op
                for at, loss in self.added(x, self.weights, Conditions(training))
                if at == key and getattr(loss, "graph", None) is graph
            ]
        return not inputs.isdisjoint(operations_behind(added))
