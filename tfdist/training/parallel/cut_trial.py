"""Whether a model of the user's own computes the same once its layers are cut, found out by trying.

tensor.py and expert.py cut layers by their names. They count on what stands between two of them in the models of
tfdist: what treats every channel on its own. A softmax, a norm or a gate between the `mlp_up` and the `mlp_down` of
somebody else sees a part of the channels, and computes another number, without a word. So the model is called with
some rows while it is whole, and once it is cut: outputs, added losses and gradients must be the same, but for rounding
(trial_results.py); in inference, and as in training, where constants take the place of what is drawn, and moving
moments of a batch's. It computes in float32, with weights that are disturbed (trial_attempts.py).
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
from tfdist.control.exit_codes import ConfigError
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
    """What a model gives while it is whole, and by which attempt."""

    attempt: Attempt
    comparison: Comparison


class CutTrial:
    """Looks at a model while it is whole, when made, and once it is cut, in `check`. Both are collectives.

    Args:
      rows: (number) -> x of so many samples, the same on all workers.
      micro_batch: how many rows the model is trained with. Some run with no other number.
      sequence_parallel: whether positions are shared out, too.

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
        # training -> of the whole model; none if it is random: it is not tried
        self._whole: dict[bool, _Tried] = {}
        for training in (False, True):
            if whole := self._first_usable(training, tried):
                self._whole[training] = whole

    def _first_usable(self, training: bool, tried: Sequence[Attempt]) -> _Tried | None:
        """By the first of the attempts that gives the same numbers again; None if the model is random. Raises
        ConfigError on all workers if it cannot be run.
        """
        problem = ""
        for all_finite in (True, False):
            for attempt in tried:
                whole, is_random = None, False
                try:
                    whole = self._repeatable(training, attempt, all_finite)
                    is_random = whole is None
                except Exception as error:  # noqa: BLE001 - of the user's own making
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
        """None if the model is random. Raises whatever it raises, and ValueError if its numbers tell nothing."""
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
        """The last dim of the one output if workers have a part of it each, 0 if it is whole; None if the model could
        not be tried.

        parts: id of a variable -> what is here of it; partial: ids of whole variables, of whose gradients a part is
        here. Raises ConfigError on all workers if the model computes something else than it did.
        """
        found = None
        for training, (attempt, comparison) in self._whole.items():
            computed = self._cut(training, attempt, parts)
            # On all workers, whatever each of them finds then: the sum is a collective.
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
        except ConfigError:  # of a layer that is refused on all workers
            raise
        except Exception as error:  # noqa: BLE001 - of Keras, where a shape does not fit
            problem = f"its layers no longer fit ({_said(error)})"
        self._refuse(problem, _when(training))
        assert traced is not None
        try:
            return self._computed(traced, attempt, parts)
        except Exception as error:  # alone: others may wait for this worker inside the model, and not in a collective
            if isinstance(error, tf.errors.OpError) and not isinstance(error, tf.errors.InvalidArgumentError):
                raise  # as on those others, when this one ends
            raise self._refusal(f"it fails ({_said(error)})", _when(training)) from error

    # -- running the model -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _disturbed(self, attempt: Attempt, parts: Mapping[int, VariablePart], nearby: float) -> Iterator[None]:
        """A context in which weights are disturbed; all variables are restored at the end. parts: see `check`. nearby:
        by so much of itself each is another, too."""
        states = [(variable, variable.numpy()) for variable in (*self._model.variables, *hidden_state(self._model))]
        try:
            for variable, value in states:
                if (change := attempt.changes.get(id(variable))) is not None:
                    part = parts.get(id(variable))
                    value = value + (part.cut(change) if part and change.shape != value.shape else change)
                    variable.assign(nearly(value, nearby))
            yield
        finally:
            for variable, value in states:
                variable.assign(value)

    def _traced(self, training: bool, attempt: Attempt, other_seeds: bool = False) -> Any:
        """The model's forward and backward pass, as a graph: all workers fail to make it, or none waits for another.
        Layers draw nothing by keras.random, and compute in float32. other_seeds: see constant_draws.
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
        """The weights of an output's numbers; where there is a part of it here, theirs."""
        own_shape = known_dims(output.shape)
        whole = self._whole.get(training)
        shape = whole.comparison.whole.outputs[place].shape if whole else own_shape
        drawn = np.random.default_rng(place).normal(size=shape).astype(np.float32)
        return tf.constant(self._own(drawn, own_shape))

    # -- comparing -------------------------------------------------------------------------------------------------

    def _own(self, whole: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The part of `whole` that is here, of this shape; its last dim may be cut over `model`."""
        if list(whole.shape) == list(shape):
            return whole
        first, last = share(whole.shape[-1], self._runtime.group("model"))
        return whole[..., first:last]

    def _with_sums(
        self, gradients: Sequence[np.ndarray], parts: Mapping[int, VariablePart], partial: frozenset[int]
    ) -> list[np.ndarray]:
        """The gradients as the update has them: of those in `partial` the sums over `model`, and of what is no expert's
        the means over `expert`, where each has what comes back through its own experts. A collective."""

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
        """Raises ConfigError on all workers if one of them has a problem. when: the end of a phrase."""
        if any_worker(self._runtime, bool(problem)):
            raise self._refusal(problem, when)

    def _refusal(self, problem: str, when: str) -> ConfigError:
        why = (
            "What stands between two layers that are cut must treat every channel on its own, as in"
            " tfdist/models/blocks.py, and logits that are cut must be the outputs, with nothing behind them that looks"
            " at several of them: rename layers that are not so, or give the workers to data=."
        )
        if self._also:
            why = "Layers of your own would have some of the positions on each worker: drop --sequence_parallel."
        return ConfigError(
            f"--mesh={self._runtime.mesh.describe()}{self._also} cuts layers of {self._model.name} by their names, but"
            f" then it computes something else{when} than whole: {problem or 'another worker has found out'}. {why}"
        )


def _when(training: bool) -> str:
    """The end of a phrase."""
    return " in training" if training else ""


def _said(error: Exception) -> str:
    """The line of an error that says what is wrong: Keras puts it between stars, behind where, TensorFlow in front of
    the operations that it names."""
    if isinstance(error, tf.errors.OpError):
        return next(reversed(message_of(error).partition("[[")[0].strip().splitlines()), type(error).__name__)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    starred = [line for line in lines if line.startswith("\033[1m") or line.endswith("\033[0m")]
    return re.sub(r"\033\[\d+m", "", (starred or lines)[0]).strip()
