"""Gradients over all workers: what `tf.GradientTape.gradient` returns while a model is distributed.

Outside of the forward pass over own rows, every worker computes the same numbers and differentiates the same loss L.
For a weight, its tape then finds a part of dL: the contribution of its own rows, and the direct dependence of L on the
weight. This module adds up these parts, so that a train_step or loop holds the gradients that it would hold in one
process: it may clip them, look at their norm, differentiate them once more, or apply them with any optimizer.

The arithmetic. Let L be the mean of the workers' L_r, all equal. Then
    tape.gradient begins with 1/R, R workers
    gather (own rows -> all rows, rows.py)      adjoint: R times the own rows of the upstream gradient
    own rows (all rows -> own rows, rows.py)    adjoint: 1/R times the rows that all workers found
    weights                                     the sum over workers; its adjoint: R times the upstream gradient
    tensors outside of the forward pass         hold 1/R of the true gradient, the same on all workers
so no intermediate number is larger than in one process, which matters in float16. Each adjoint is made of the others,
so derivatives of any order are right.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.compat import tensorflow_autograph, tensorflow_vectorized
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.compat.tensorflow_graphs import has_gradient
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import used_outside
from tfdist.keras_fit.lookups import Lookup, judged, lookups
from tfdist.keras_fit.rows import every_row, total
from tfdist.keras_fit.worker_dependence import is_worker_dependent, mark_same_on_all
from tfdist.runtime.base import PeerRuntime
from tfdist.runtime.scopes import Once, ThreadScope
from tfdist.training.dtypes import Gradient, at_least_float32, scaled
from tfdist.training.table_rows import rows_once

if TYPE_CHECKING:
    from tfdist.keras_fit.forward import DistributedCall


class Gradients:
    """Takes gradients over all workers; one object for all models of a runtime.

    Attributes: installed, a context in which tf.GradientTape takes gradients over all workers; of_own_rows, one in
    which a forward pass over own rows is traced: a tape inside belongs to this pass, and its gradients cover its rows
    only; alone, one in which each worker computes all rows itself, whatever models it calls; without_losses, one in
    which nobody needs the losses that layers add; share, the weight of this worker's loss in the mean while a step sees
    own rows only, else None; called, how often models have been called over the workers; taken, how often gradients
    with respect to weights have been taken; of_values, whether a model has been called with values for its weights, so
    that gradients may be with respect to these; calls, the calls of all models (forward.py).
    """

    def __init__(self, runtime: PeerRuntime):
        self._runtime = runtime
        self.of_own_rows = ThreadScope()
        self.alone = ThreadScope()
        self.without_losses = ThreadScope()
        self.share: tf.Tensor | None = None
        self.called = self.taken = 0
        self.of_values = False
        self.calls: weakref.WeakSet[DistributedCall] = weakref.WeakSet()
        self._inside_vectorized: weakref.WeakSet[tf.GradientTape] = weakref.WeakSet()
        self.installed = Once(self._installed)

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, ours in (
                ("gradient", self._gradient),
                ("jacobian", self._jacobian),
                ("batch_jacobian", self._jacobian),
                ("__enter__", self._entered),
            ):
                # In the class itself, as programs may have imported it under other names.
                stack.enter_context(
                    attribute_replaced(tf.GradientTape, name, _method(ours, getattr(tf.GradientTape, name)))
                )
            yield

    @contextlib.contextmanager
    def of_a_share(self, share: tf.Tensor) -> Iterator[None]:
        """Context manager for a step that sees own rows only; its loss is this share of the mean (own_rows.py)."""
        self.share = share
        try:
            yield
        finally:
            self.share = None

    def _gradient(
        self,
        original: Callable,
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        if self.of_own_rows.is_here or _asked_by_tensorflow():
            return original(tape, target, sources, output_gradients, unconnected_gradients)
        # Not as a decorator: its frame would stand between this one and TensorFlow's.
        with used_outside.allowed():
            spread = self._vectorized if tensorflow_vectorized.is_here() else self._spread
            return spread(original, tape, target, sources, output_gradients, unconnected_gradients)

    def _spread(
        self,
        original: Callable,
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any,
        unconnected_gradients: tf.UnconnectedGradients,
    ) -> Any:
        share = 1.0 / self._runtime.size if self.share is None else self.share
        targets = tf.nest.flatten(target)
        given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
        seeds = [_seed(one, gradient, share) for one, gradient in zip(targets, given, strict=True)]
        found = tf.nest.flatten(
            original(tape, target, sources, tf.nest.pack_sequence_as(target, seeds), unconnected_gradients)
        )
        flat = tf.nest.flatten(sources)
        weights = [index for index, source in enumerate(flat) if _is_variable(source) and found[index] is not None]
        self.taken += bool(weights) or (self.of_values and any(gradient is not None for gradient in found))
        for index, gradient in enumerate(found):
            if gradient is not None and index not in set(weights):
                found[index] = _of_all_rows(scaled(gradient, 1.0 / share), flat[index])
        for index, gradient in zip(
            weights, self._summed([found[index] for index in weights], [flat[index] for index in weights]), strict=True
        ):
            found[index] = gradient
        return tf.nest.pack_sequence_as(sources, found)

    def _entered(self, original: Callable, tape: tf.GradientTape) -> tf.GradientTape:
        if tensorflow_vectorized.is_here():
            self._inside_vectorized.add(tape)
        return original(tape)

    def _vectorized(self, original: Callable, tape: tf.GradientTape, *args: Any) -> Any:
        """Takes a gradient inside tf.vectorized_map, where every worker computes all rows (forward.py)."""
        if tape not in self._inside_vectorized:
            raise ConfigError(
                "tape.gradient inside tf.vectorized_map, with a tape that was created outside of it, cannot be spread"
                " over workers: compute it in a Python loop, or with tf.map_fn(..., parallel_iterations=1)."
            )
        self.taken += 1
        return original(tape, *args)

    @used_outside.allowed()
    def _jacobian(
        self,
        original: Callable,
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Replaces tape.jacobian and tape.batch_jacobian."""
        if not self.of_own_rows.is_here and not tensorflow_vectorized.is_here():
            if any(map(_is_variable, tf.nest.flatten(sources))):
                raise ConfigError(
                    "tape.jacobian with respect to weights cannot be spread over workers: compute tape.gradient of each"
                    " element, or train in one process."
                )
            # TensorFlow's pfor converts operations, and loses the gradients of ours. And messages between workers have
            # one order only if the iterations run one after the other.
            experimental_use_pfor, parallel_iterations = False, 1
        try:
            found = original(tape, target, sources, unconnected_gradients, parallel_iterations, experimental_use_pfor)
        except RuntimeError as error:
            if "persistent=True" not in str(error):
                raise
            raise ConfigError(
                "A Jacobian over workers with run_eagerly=True needs tf.GradientTape(persistent=True)."
            ) from error
        return tf.nest.map_structure(_of_all_rows, found, sources)

    def _summed(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """The sum over workers of each gradient.

        Rows of a table stay rows: those that one process would have (lookups.py).
        """
        parts_of = [
            [judged(lookup, variable, self.calls) for lookup in lookups(gradient)]
            if isinstance(gradient, tf.IndexedSlices)
            else []
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        dense = [gradient for gradient in gradients if isinstance(gradient, tf.Tensor)]
        shared = [lookup.values for parts in parts_of for lookup in parts if not lookup.is_worker_dependent]
        sums = total(self._runtime, [*dense, *shared])
        of_dense, of_shared = iter(sums[: len(dense)]), iter(sums[len(dense) :])
        return [
            self._rows_of_all(gradient, parts, of_shared) if isinstance(gradient, tf.IndexedSlices) else next(of_dense)
            for gradient, parts in zip(gradients, parts_of, strict=True)
        ]

    def _rows_of_all(
        self, gradient: tf.IndexedSlices, parts: Sequence[Lookup], sums: Iterator[tf.Tensor]
    ) -> tf.IndexedSlices:
        """Returns the rows of all workers. `sums`: for the rows that all workers have looked up alike."""
        found = []
        for lookup in parts:
            rows = tf.IndexedSlices(
                *every_row(self._runtime, [lookup.values, lookup.numbers])
                if lookup.is_worker_dependent
                else (next(sums), lookup.numbers)
            )
            found.append(rows_once(rows) if lookup.has_each_row_once else rows)
        values, numbers = _joined([rows.values for rows in found]), _joined([rows.indices for rows in found])
        shape = gradient.dense_shape
        shape = None if shape is None else mark_same_on_all(shape)
        return tf.IndexedSlices(mark_same_on_all(values), mark_same_on_all(numbers), shape)


def _seed(target: Any, given: tf.Tensor | None, share: float | tf.Tensor) -> tf.Tensor | None:
    if not isinstance(target, tf.Tensor):
        raise ConfigError(
            f"tape.gradient of {type(target).__name__} cannot be spread over workers: differentiate a tensor."
        )
    if not has_gradient(target):
        return given
    whole = tf.ones_like(target) if given is None else tf.convert_to_tensor(given)
    # In bfloat16 1/3 is too large by 0.2 %, and so would be all gradients that are given.
    return tf.cast(tf.convert_to_tensor(scaled(at_least_float32(whole), share)), target.dtype)


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat(tensors, 0) if len(tensors) > 1 else tensors[0]


def _of_all_rows(gradient: Any, source: Any) -> Any:
    """Marks a gradient with respect to a tensor that all workers hold as one that all hold, too."""
    is_of_own_rows = isinstance(source, tf.Tensor) and hasattr(source, "graph") and is_worker_dependent(source)
    return gradient if is_of_own_rows else mark_same_on_all(gradient)


def _is_variable(source: Any) -> bool:
    return isinstance(source, (keras.Variable, tf.Variable))


def _asked_by_tensorflow() -> bool:
    """Whether TensorFlow's own code asked for the gradient, such as tf.recompute_grad in a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals["__name__"].startswith((__name__, tensorflow_autograph.MODULES)):
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"].startswith("tensorflow.")


def _method(ours: Callable, original: Callable) -> Callable:
    @tf.autograph.experimental.do_not_convert
    def method(tape: tf.GradientTape, *args: Any, **kwargs: Any) -> Any:
        return ours(original, tape, *args, **kwargs)

    return method
