"""Whether a model of the user's own computes the same once its layers are cut, found out by trying.

tensor.py and expert.py cut layers by their names. They count on what stands between two of them in the models of
tfdist: what treats every channel on its own. A softmax, a norm or a gate between the `mlp_up` and the `mlp_down` of
somebody else sees a part of the channels, and computes another number, without a word. So the model is called with a
few rows while it is whole, and once it is cut: outputs, added losses and gradients must be the same, but for rounding;
in inference, and as in training, where constants take the place of what is drawn, and moving moments of a batch's. It
computes in float32, with weights that are disturbed: behind an initial 0 nothing would be seen.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
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
from tfdist.runtime.host import known_dims
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.parallel.tensor import VariablePart, share
from tfdist.training.row_checks.calm_layers import moving_moments_taken
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import differ_beyond_noise, disturbed

ROWS = 2
_HALF = (tf.float16, tf.bfloat16)
_DISTURBED = 1.0  # by as much as the spread of each weight
# What is right is summed in another order. Of the largest number of an output, or of a variable's gradient; of half
# precision where a layer asks for it in spite of its policy.
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.2
_NOISE, _NOISE_HALF = 1e-5, 1e-2  # of the largest number of all gradients: one may be 0 but for rounding


class Computed(NamedTuple):
    """The results of a model for a few rows."""

    outputs: Sequence[np.ndarray]
    added: np.ndarray  # the sum of the losses that layers add, []
    gradients: Sequence[np.ndarray]  # of the outputs, all numbers weighted at random, by the trainable variables
    gradients_of_added: Sequence[np.ndarray]  # none if nothing is added
    half: bool  # whether some of it was computed in half precision


class CutTrial:
    """Looks at a model while it is whole, when made, and once it is cut, in `check`. Both are collectives.

    Args:
      rows: x of a few samples, the same on all workers.
      sequence_parallel: whether positions are shared out, too.
    """

    def __init__(self, runtime: MeshRuntime, model: keras.Model, rows: Any, *, sequence_parallel: bool):
        self._runtime, self._model = runtime, model
        self._also = " with --sequence_parallel" if sequence_parallel else ""
        self._rows = keras.tree.map_structure(tf.convert_to_tensor, rows)
        self._variables = list(model.trainable_variables)
        self._changes = _changes(model)
        # training -> results of the whole model; none if it cannot be run here, or is random: it is not tried
        self._whole: dict[bool, Computed] = {}
        for training in (False, True):
            whole = self._repeatable(training)
            if every_worker(runtime, whole is not None) and whole:
                self._whole[training] = whole

    def _repeatable(self, training: bool) -> Computed | None:
        with contextlib.suppress(Exception):
            traced = self._traced(training)
            whole = self._computed(traced, {})
            if any(map(draws, kinds_of_operations(traced.graph)[0])):  # with other seeds
                traced = self._traced(training, moved=1)
            repeated = self._computed(traced, {})
            if not self._difference(whole, repeated, {}):
                return whole
        return None

    def check(self, parts: Mapping[int, VariablePart], partial: frozenset[int]) -> int | None:
        """The last dim of the one output if workers have a part of it each, 0 if it is whole; None if the model could
        not be tried.

        parts: id of a variable -> what is here of it; partial: ids of whole variables, of whose gradients a part is
        here. Raises ConfigError on all workers if the model computes something else than it did.
        """
        found = None
        for training, whole in self._whole.items():
            computed = self._cut(training, parts)
            # On all workers, whatever each of them finds then: the sum is a collective.
            summed = computed._replace(
                gradients=self._with_sums(computed.gradients, partial),
                gradients_of_added=self._with_sums(computed.gradients_of_added, partial),
            )
            self._refuse(self._difference(whole, summed, parts), " in training" if training else "")
            if not training:
                shape, part = whole.outputs[0].shape, computed.outputs[0].shape
                found = shape[-1] if shape != part else 0
        return found

    def _cut(self, training: bool, parts: Mapping[int, VariablePart]) -> Computed:
        """The results of the cut model. Raises ConfigError on all workers if it cannot be called."""
        traced, problem = None, ""
        try:
            traced = self._traced(training)
        except ConfigError:  # of a layer that is refused on all workers
            raise
        except Exception as error:  # noqa: BLE001 - of Keras, where a shape does not fit
            problem = f"its layers no longer fit ({_said(error)})"
        self._refuse(problem, " in training" if training else "")
        assert traced is not None
        return self._computed(traced, parts)

    # -- running the model -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _disturbed(self, parts: Mapping[int, VariablePart]) -> Iterator[None]:
        """A context in which weights are disturbed; all variables are restored at the end. parts: see `check`."""
        states = [(variable, variable.numpy()) for variable in (*self._model.variables, *hidden_state(self._model))]
        try:
            for variable, value in states:
                if (change := self._changes.get(id(variable))) is not None:
                    part = parts.get(id(variable))
                    variable.assign(value + (part.cut(change) if part and change.shape != value.shape else change))
            yield
        finally:
            for variable, value in states:
                variable.assign(value)

    def _traced(self, training: bool, moved: int = 0) -> Any:
        """The model's forward and backward pass, as a graph: all workers fail to make it, or none waits for another.
        Layers draw nothing by keras.random, and compute in float32. moved: see constant_draws.
        """

        def forward_and_backward() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                outputs = keras.tree.flatten(self._model(self._rows, training=training))
                total: Any = sum(
                    tf.reduce_sum(tf.cast(leaf, tf.float32) * self._upstream(place, leaf, training))
                    for place, leaf in enumerate(outputs)
                    if leaf.dtype.is_floating
                )
                added: Any = tf.constant(0.0)
                for loss in self._model.losses:
                    added += tf.reduce_sum(tf.cast(loss, tf.float32))
            of_added = self._gradients(tape, added) if self._model.losses else []
            return outputs, added, self._gradients(tape, total), of_added

        layers = keras_layers.all_layers(self._model)
        function = tf.function(forward_and_backward, autograph=False)
        with (
            generators_kept(),
            constant_draws(moved),
            moving_moments_taken(layers),
            in_float32(layers),
        ):
            return function.get_concrete_function()

    def _gradients(self, tape: tf.GradientTape, target: Any) -> list[tf.Tensor]:
        sources = [variable.value for variable in self._variables]
        found: Any = tape.gradient(target, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in found]

    def _computed(self, traced: Any, parts: Mapping[int, VariablePart]) -> Computed:
        with self._disturbed(parts), generators_kept():
            outputs, added, gradients, of_added = traced()

        def numbers(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
            return [tf.cast(each, tf.float64).numpy() for each in tensors]

        half = any(tensor.dtype in _HALF for node in traced.graph.get_operations() for tensor in node.outputs)
        return Computed(numbers(outputs), numbers([added])[0], numbers(gradients), numbers(of_added), half)

    def _upstream(self, place: int, output: tf.Tensor, training: bool) -> tf.Tensor:
        """The weights of an output's numbers; where there is a part of it here, theirs."""
        own_shape = known_dims(output.shape)
        whole = self._whole.get(training)
        shape = whole.outputs[place].shape if whole else own_shape
        drawn = np.random.default_rng(place).normal(size=shape).astype(np.float32)
        return tf.constant(self._own(drawn, own_shape))

    # -- comparing -------------------------------------------------------------------------------------------------

    def _own(self, whole: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The part of `whole` that is here, of this shape; its last dim may be cut over `model`."""
        if list(whole.shape) == list(shape):
            return whole
        first, last = share(whole.shape[-1], self._runtime.group("model"))
        return whole[..., first:last]

    def _difference(self, whole: Computed, computed: Computed, parts: Mapping[int, VariablePart]) -> str:
        """What differs between the whole and the cut model, as a phrase; "" if nothing does. No collective."""
        half = whole.half or computed.half
        tolerance, relative_noise = (_TOLERANCE_HALF, _NOISE_HALF) if half else (_TOLERANCE, _NOISE)

        def differ(one: np.ndarray, other: np.ndarray, noise: float = 0.0) -> bool:
            return one.shape != other.shape or differ_beyond_noise(one, other, tolerance, noise)

        cut = [a.shape != b.shape for a, b in zip(whole.outputs, computed.outputs, strict=True)]
        if any(cut) and len(cut) > 1:
            return "one of its several outputs comes in parts"
        for a, b in zip(whole.outputs, computed.outputs, strict=True):
            expected = self._own(a, b.shape)
            if expected.shape != b.shape:
                return f"its outputs have another shape, {b.shape} in place of {a.shape}"
            if differ(expected, b):
                return "its outputs are other numbers"
        if differ(whole.added, computed.added):
            return "the losses that its layers add are other numbers"
        of_what = {"": (whole.gradients, computed.gradients)}
        of_what[" of the losses that layers add"] = (whole.gradients_of_added, computed.gradients_of_added)
        for words, (before, after) in of_what.items():
            noise = relative_noise * max((np.max(np.abs(each), initial=0.0) for each in before), default=0.0)
            for variable, a, b in zip(self._variables, before, after, strict=False):
                part = parts.get(id(variable))
                if part is not None and part.axis != "model":
                    continue  # the sum over what all of them have sent there
                if differ(part.cut(a) if part else a, b, noise):
                    return f"the gradient{words} of {variable.path} is another"
        return ""

    def _with_sums(self, gradients: Sequence[np.ndarray], partial: frozenset[int]) -> list[np.ndarray]:
        """The gradients, of those in `partial` the sums over `model`."""
        group = self._runtime.group("model")
        return [
            group.all_reduce(tf.constant(each, tf.float32)).numpy() if id(variable) in partial else each
            for variable, each in zip(self._variables, gradients, strict=False)
        ]

    def _refuse(self, problem: str, when: str) -> None:
        """Raises ConfigError on all workers if one of them has a problem. when: the end of a phrase."""
        if not any_worker(self._runtime, bool(problem)):
            return
        why = (
            "What stands between two layers that are cut must treat every channel on its own, as in"
            " tfdist/models/blocks.py, and logits that are cut must be the outputs, with nothing behind them that looks"
            " at several of them: rename layers that are not so, or give the workers to data=."
        )
        if self._also:
            why = "Layers of your own would have some of the positions on each worker: drop --sequence_parallel."
        raise ConfigError(
            f"--mesh={self._runtime.mesh.describe()}{self._also} cuts layers of {self._model.name} by their names, but"
            f" then it computes something else{when} than whole: {problem or 'another worker has found out'}. {why}"
        )


def _changes(model: keras.Model) -> dict[int, np.ndarray]:
    """id of a variable -> what is added to it in a trial; to those that are not trained something above 0, as a
    variance must not become negative."""
    floating = [each for each in model.variables if tf.as_dtype(each.dtype).is_floating]
    values = [each.numpy() for each in floating]
    changes = [other - value for value, other in zip(values, disturbed(values, _DISTURBED), strict=True)]
    return {id(each): change if each.trainable else abs(change) for each, change in zip(floating, changes, strict=True)}


def _said(error: Exception) -> str:
    """The line of an error that says what is wrong: Keras puts it between stars, behind where."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    starred = [line for line in lines if line.startswith("\033[1m") or line.endswith("\033[0m")]
    return re.sub(r"\033\[\d+m", "", (starred or lines)[0]).strip()
