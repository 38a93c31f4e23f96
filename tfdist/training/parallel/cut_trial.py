"""Tests whether a user's own model still computes the same once its layers are cut.

tensor.py and expert.py cut layers by name. They assume that everything between two cut layers treats every channel
separately, as in the models of tfdist. A softmax, a norm or a gate between the `mlp_up` and the `mlp_down` of another
model sees only a part of the channels, and silently computes something else. So the model is called with some rows
while it is whole, and again once it is cut: outputs, added losses and gradients must be the same up to rounding
(trial_results.py). It runs once as in inference and once as in training, where constants replace random draws, and
moving moments replace batch moments. It computes in float32, with perturbed weights (trial_attempts.py).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_state
from tfdist.compat import keras_layers
from tfdist.compat.keras_draws import constant_draws
from tfdist.compat.keras_layers import in_float32
from tfdist.compat.tensorflow_graphs import draws, kinds_of_operations
from tfdist.compat.tensorflow_variables import values_kept
from tfdist.control.exit_codes import ConfigError
from tfdist.control.user_errors import what_in_text, without_internals
from tfdist.runtime.decisions import any_worker, every_worker
from tfdist.runtime.errors import message_of
from tfdist.runtime.host import known_dims
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.parallel.tensor import VariablePart, share
from tfdist.training.parallel.trial_attempts import Attempt, attempts
from tfdist.training.parallel.trial_results import HALF, NEARBY, RANDOM, Comparison, Results, inverse_of_largest
from tfdist.training.row_checks.calm_layers import moving_moments_taken
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import nearly

ROWS = 2


class _Tried(NamedTuple):
    """The results of the whole model, and the attempt that gave them."""

    attempt: Attempt
    comparison: Comparison


class CutTrial:
    """Records what a whole model computes, at construction; `check` compares the cut model. Both are collective calls.

    Args:
      rows: (number) -> x of so many samples, the same on all workers.
      micro_batch: number of rows the model is trained with; some models run with no other number.
      sequence_parallel: whether positions are divided among workers, too.

    Raises ConfigError on all workers if the model cannot be tried.
    """

    def __init__(
        self,
        runtime: MeshRuntime,
        model: keras.Model,
        rows: Callable[[int], Any],
        *,
        micro_batch: int,
        sequence_parallel: bool,
    ):
        self._runtime, self._model = runtime, model
        self._also = " with --sequence_parallel" if sequence_parallel else ""
        self._variables = list(model.trainable_variables)
        tried = attempts(model, *(keras.tree.map_structure(tf.convert_to_tensor, rows(n)) for n in (ROWS, micro_batch)))
        # training -> results of the whole model; no entry if it is random: then it is not compared
        self._whole: dict[bool, _Tried] = {}
        for training in (False, True):
            if whole := self._first_usable(training, tried):
                self._whole[training] = whole

    def _first_usable(self, training: bool, tried: Sequence[Attempt]) -> _Tried | None:
        """Returns the results of the first attempt that gives the same numbers twice, or None if the model is random.
        Raises ConfigError on all workers if the model cannot be run.
        """
        problem = ""
        for all_finite in (True, False):
            for attempt in tried:
                whole, is_random = None, False
                try:
                    whole = self._repeatable(training, attempt, all_finite)
                    is_random = whole is None
                except Exception as error:  # noqa: BLE001 - raised by the user's own code
                    problem = _said(error)
                if any_worker(self._runtime, is_random):
                    return None
                if every_worker(self._runtime, whole is not None):
                    return whole
                if not any(attempt is each.attempt for each in self._whole.values()):
                    attempt.give_up()
        raise ConfigError(
            f"--mesh={self._runtime.mesh.describe()} cuts layers of {self._model.name} by their names, but whether it"
            f" then computes the same{_when(training)} cannot be tried ({problem or 'on another worker'}): let it run"
            f" with the {len(keras.tree.flatten(tried[-1].rows)[0])} rows of a micro-batch, rename its layers, or"
            " give the workers to data=."
        )

    def _repeatable(self, training: bool, attempt: Attempt, all_finite: bool) -> _Tried | None:
        """Returns None if the model is random. Raises the model's errors, and ValueError if its numbers are useless."""
        traced = self._traced(training, attempt)
        whole = self._computed(traced, attempt, {})
        if not whole.is_usable(all_finite):
            raise ValueError("its outputs or gradients are not finite")
        comparison = Comparison(whole, self._variables, self._own)
        comparison.allow(self._computed(traced, attempt, {}, NEARBY))
        if any(map(draws, kinds_of_operations(traced.graph)[0])):
            traced = self._traced(training, attempt, other_seeds=True)
        again = self._computed(traced, attempt, {})
        if comparison.difference(again, {}, RANDOM):
            return None
        comparison.allow(again)
        return _Tried(attempt, comparison)

    def check(self, parts: Mapping[int, VariablePart], partial: frozenset[int]) -> int | None:
        """Returns the last dim of the one output if each worker has a part of it, 0 if it is whole, and None if the
        model could not be tried.

        parts: id of a variable -> the part that is here; partial: ids of whole variables of whose gradients only a part
        is here. Raises ConfigError on all workers if the cut model computes something else than the whole one.
        """
        found = None
        for training, (attempt, comparison) in self._whole.items():
            computed = self._cut(training, attempt, parts)
            # On all workers, whatever each of them finds afterwards: the sum is a collective call.
            summed = computed._replace(
                gradients=self._with_sums(computed.gradients, parts, partial),
                gradients_of_added=self._with_sums(computed.gradients_of_added, parts, partial),
            )
            self._refuse(comparison.difference(summed, parts), _when(training))
            if not training:
                shape, part = comparison.whole.outputs[0].shape, computed.outputs[0].shape
                found = shape[-1] if shape != part else 0
        return found

    def _cut(self, training: bool, attempt: Attempt, parts: Mapping[int, VariablePart]) -> Results:
        """The results of the cut model. Raises ConfigError on all workers if it cannot be called."""
        traced, problem = None, ""
        try:
            traced = self._traced(training, attempt)
        except ConfigError:  # from a layer that is refused on all workers
            raise
        except Exception as error:  # noqa: BLE001 - from Keras, where a shape does not fit
            problem = f"its layers no longer fit ({_said(error)})"
        self._refuse(problem, _when(training))
        assert traced is not None
        try:
            return self._computed(traced, attempt, parts)
        except Exception as error:  # no vote: others may wait for this worker inside the model, not in a collective
            if isinstance(error, tf.errors.OpError) and not isinstance(error, tf.errors.InvalidArgumentError):
                raise  # the error that waiting workers get when another one ends
            raise self._refusal(f"it fails ({_said(error)})", _when(training)) from error

    # -- running the model -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _disturbed(self, attempt: Attempt, parts: Mapping[int, VariablePart], nearby: float) -> Iterator[None]:
        """Context manager that perturbs the weights and restores all variables at exit. parts: see `check`. nearby:
        relative size of an additional perturbation of each weight."""
        with values_kept([*self._model.variables, *hidden_state(self._model)]) as states:
            for variable, value in states:
                if (change := attempt.changes.get(id(variable))) is not None:
                    part = parts.get(id(variable))
                    value = value + (part.cut(change) if part and change.shape != value.shape else change)
                    variable.assign(nearly(value, nearby))
            yield

    def _traced(self, training: bool, attempt: Attempt, other_seeds: bool = False) -> Any:
        """Traces the model's forward and backward pass into a graph. Nothing runs yet, so no worker waits for one that
        fails. Constants replace draws by keras.random; layers compute in float32. other_seeds: see constant_draws.
        """

        def forward_and_backward() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                outputs = keras.tree.flatten(self._model(attempt.rows, training=training))
                total: Any = sum(
                    tf.reduce_sum(
                        tf.cast(leaf, tf.float32) * inverse_of_largest(leaf) * self._upstream(place, leaf, training)
                    )
                    for place, leaf in enumerate(outputs)
                    if leaf.dtype.is_floating
                )
                losses = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in self._model.losses]
                added: Any = sum(loss * inverse_of_largest(loss) for loss in losses)
            of_added = self._gradients(tape, added) if losses else []
            return outputs, losses, self._gradients(tape, total), of_added

        layers = keras_layers.all_layers(self._model)
        function = tf.function(forward_and_backward, autograph=False)
        with (
            generators_kept(),
            constant_draws(int(other_seeds)),
            moving_moments_taken(layers),
            in_float32(layers),
        ):
            return function.get_concrete_function()

    def _gradients(self, tape: tf.GradientTape, target: Any) -> list[tf.Tensor]:
        sources = [variable.value for variable in self._variables]
        found: Any = tape.gradient(target, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in found]

    def _computed(
        self, traced: Any, attempt: Attempt, parts: Mapping[int, VariablePart], nearby: float = 0.0
    ) -> Results:
        with self._disturbed(attempt, parts, nearby), generators_kept():
            outputs, added, gradients, of_added = traced()

        def numbers(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
            return [tf.cast(each, tf.float32).numpy() for each in tensors]

        half = any(tensor.dtype in HALF for node in traced.graph.get_operations() for tensor in node.outputs)
        return Results(numbers(outputs), numbers(added), numbers(gradients), numbers(of_added), half)

    def _upstream(self, place: int, output: tf.Tensor, training: bool) -> tf.Tensor:
        """Random weights for the elements of an output, or for those of the part that is here."""
        own_shape = known_dims(output.shape)
        whole = self._whole.get(training)
        shape = whole.comparison.whole.outputs[place].shape if whole else own_shape
        drawn = np.random.default_rng(place).normal(size=shape).astype(np.float32)
        return tf.constant(self._own(drawn, own_shape))

    # -- comparing -------------------------------------------------------------------------------------------------

    def _own(self, whole: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The part of `whole` that is here and has this shape; its last dim may be cut over `model`."""
        if list(whole.shape) == list(shape):
            return whole
        first, last = share(whole.shape[-1], self._runtime.group("model"))
        return whole[..., first:last]

    def _with_sums(
        self, gradients: Sequence[np.ndarray], parts: Mapping[int, VariablePart], partial: frozenset[int]
    ) -> list[np.ndarray]:
        """Combines gradients as the update does: sums over `model` for `partial`, means over `expert` for all variables
        of no expert, as each member has the gradient through its own experts. A collective call."""

        def summed(variable: keras.Variable, gradient: np.ndarray) -> np.ndarray:
            if id(variable) in partial:
                gradient = self._sum(gradient, "model")
            part = parts.get(id(variable))
            experts = self._runtime.mesh.degree("expert")
            return (
                gradient
                if experts == 1 or (part and part.axis == "expert")
                else self._sum(gradient, "expert") / experts
            )

        return [summed(*pair) for pair in zip(self._variables, gradients, strict=True)] if gradients else []

    def _sum(self, gradient: np.ndarray, axis: str) -> np.ndarray:
        return self._runtime.group(axis).all_reduce(tf.constant(gradient, tf.float32)).numpy()

    def _refuse(self, problem: str, when: str) -> None:
        """Raises ConfigError on all workers if one of them has a problem. when: the end of a phrase in the message."""
        if any_worker(self._runtime, bool(problem)):
            raise self._refusal(problem, when)

    def _refusal(self, problem: str, when: str) -> ConfigError:
        why = (
            "Everything between two layers that are cut must treat each channel separately, as in"
            " tfdist/models/blocks.py, and logits that are cut must be the outputs, with nothing after them that uses"
            " several of them: rename the other layers, or give the workers to data=."
        )
        if self._also:
            why = "Your own layers would have some of the positions on each worker: drop --sequence_parallel."
        return ConfigError(
            f"--mesh={self._runtime.mesh.describe()}{self._also} cuts layers of {self._model.name} by their names, but"
            f" then it computes something else{when} than whole: {problem or 'another worker reported it'}. {why}"
        )


def _when(training: bool) -> str:
    """The end of a phrase in a message."""
    return " in training" if training else ""


def _said(error: Exception) -> str:
    """The line of an error message that says what is wrong. Keras prints it in bold, after the location; TensorFlow
    puts it before the operations that it names."""
    if isinstance(error, tf.errors.OpError):
        return next(reversed(message_of(error).partition("[[")[0].strip().splitlines()), type(error).__name__)
    if "in user code:" in str(error):  # of a tf.function, behind the places in the code
        return without_internals(what_in_text(str(error))).splitlines()[0]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    starred = [line for line in lines if line.startswith("\033[1m") or line.endswith("\033[0m")]
    return re.sub(r"\033\[\d+m", "", (starred or lines)[0]).strip()
