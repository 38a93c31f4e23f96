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
from typing import Any

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
from tfdist.training.parallel.trial_results import HALF, NEARBY, Comparison, Results, inverse_of_largest
from tfdist.training.row_checks.calm_layers import moving_moments_taken
from tfdist.training.row_checks.trial_scope import generators_kept
from tfdist.training.row_checks.trial_values import disturbed, nearly

ROWS = 2
_DISTURBED = 1.0  # by as much as the spread of each weight


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
        # training -> of the whole model; none if it cannot be run here, or is random: it is not tried
        self._whole: dict[bool, Comparison] = {}
        for training in (False, True):
            whole = self._repeatable(training)
            if every_worker(runtime, whole is not None) and whole:
                self._whole[training] = whole

    def _repeatable(self, training: bool) -> Comparison | None:
        with contextlib.suppress(Exception):
            traced = self._traced(training)
            near = self._computed(traced, {}, NEARBY)
            whole = Comparison(self._computed(traced, {}), near, self._variables, self._own)
            if any(map(draws, kinds_of_operations(traced.graph)[0])):  # with other seeds
                traced = self._traced(training, moved=1)
            if not whole.difference(self._computed(traced, {}), {}):
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
            self._refuse(whole.difference(summed, parts), " in training" if training else "")
            if not training:
                shape, part = whole.whole.outputs[0].shape, computed.outputs[0].shape
                found = shape[-1] if shape != part else 0
        return found

    def _cut(self, training: bool, parts: Mapping[int, VariablePart]) -> Results:
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
    def _disturbed(self, parts: Mapping[int, VariablePart], moved: float) -> Iterator[None]:
        """A context in which weights are disturbed; all variables are restored at the end. parts: see `check`. moved:
        by so much of itself each is another, too."""
        states = [(variable, variable.numpy()) for variable in (*self._model.variables, *hidden_state(self._model))]
        try:
            for variable, value in states:
                if (change := self._changes.get(id(variable))) is not None:
                    part = parts.get(id(variable))
                    value = value + (part.cut(change) if part and change.shape != value.shape else change)
                    variable.assign(nearly(value, moved))
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
            constant_draws(moved),
            moving_moments_taken(layers),
            in_float32(layers),
        ):
            return function.get_concrete_function()

    def _gradients(self, tape: tf.GradientTape, target: Any) -> list[tf.Tensor]:
        sources = [variable.value for variable in self._variables]
        found: Any = tape.gradient(target, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in found]

    def _computed(self, traced: Any, parts: Mapping[int, VariablePart], moved: float = 0.0) -> Results:
        with self._disturbed(parts, moved), generators_kept():
            outputs, added, gradients, of_added = traced()

        def numbers(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
            return [tf.cast(each, tf.float64).numpy() for each in tensors]

        half = any(tensor.dtype in HALF for node in traced.graph.get_operations() for tensor in node.outputs)
        return Results(numbers(outputs), numbers(added), numbers(gradients), numbers(of_added), half)

    def _upstream(self, place: int, output: tf.Tensor, training: bool) -> tf.Tensor:
        """The weights of an output's numbers; where there is a part of it here, theirs."""
        own_shape = known_dims(output.shape)
        whole = self._whole.get(training)
        shape = whole.whole.outputs[place].shape if whole else own_shape
        drawn = np.random.default_rng(place).normal(size=shape).astype(np.float32)
        return tf.constant(self._own(drawn, own_shape))

    # -- comparing -------------------------------------------------------------------------------------------------

    def _own(self, whole: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The part of `whole` that is here, of this shape; its last dim may be cut over `model`."""
        if list(whole.shape) == list(shape):
            return whole
        first, last = share(whole.shape[-1], self._runtime.group("model"))
        return whole[..., first:last]

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
