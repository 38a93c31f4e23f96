"""The forward pass of a model over the workers: what replaces `model.call` while the model is distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import metrics_in_layers
from tfdist.compat import keras_layers, keras_stateless, tensorflow_vectorized
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.compat.tensorflow_variables import writes_undone
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import lookups, unsaved_state, used_outside, worker_dependence
from tfdist.keras_fit.batch_inputs import Returned, of_the_batch, with_other_rows
from tfdist.keras_fit.example_batch import ExampleBatch, taking
from tfdist.keras_fit.gradients import Gradients
from tfdist.keras_fit.kept_tensors import KeptTensors
from tfdist.keras_fit.losses_inside import Combinations, recorded
from tfdist.keras_fit.metrics_inside import Additions, refuse_without_rows
from tfdist.keras_fit.pass_traces import PassTraces
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.keras_fit.rows import Forward, OwnRows, together, used_by_all
from tfdist.keras_fit.structures import compiled, tensors_of, with_tensors
from tfdist.models import missing_rows
from tfdist.models.compiled_functions import in_steps
from tfdist.models.nested_functions import traced_anew
from tfdist.runtime import batch_norm
from tfdist.runtime.base import PeerRuntime
from tfdist.training.row_checks import row_mixing
from tfdist.training.row_checks.model_probe import LossKey
from tfdist.training.row_checks.reductions import SUM
from tfdist.training.row_checks.row_proof import Proofs
from tfdist.training.row_checks.trial_scope import attributes_kept, generators_kept
from tfdist.training.stateless_call import Arguments


class DistributedCall:
    """Takes the global batch, computes this worker's rows, returns all rows.

    Args: compiled_as, the model that tells whether XLA compiles, if it is another one, around this one.
    Attributes: alone, see Gradients; asked, how often it was called in any way; example, a batch for trying the model;
    counts, the known numbers of own rows -> of all rows, where these are others.
    """

    def __init__(
        self,
        model: keras.Model,
        runtime: PeerRuntime,
        gradients: Gradients,
        random_numbers: RandomNumbers,
        compiled_as: keras.Model | None = None,
    ):
        self._model, self._runtime, self._gradients, self._random_numbers = model, runtime, gradients, random_numbers
        self._call: Callable = traced_anew(model.call) or model.call
        self.alone, self.asked, self.counts = gradients.alone, 0, dict[int, int]()
        self._compiled_as = model if compiled_as is None else compiled_as
        self._kept = KeptTensors(model)
        self.example = ExampleBatch()
        self._combinations = Combinations(model, runtime, self.example)
        self._may_mix = row_mixing.may_mix(model)
        self._tried: list[tuple] = []  # kinds of calls that have been checked
        self._of_the_batch: dict[str, list[bool]] = {}  # by the arguments of a call
        self._traces: dict[str, PassTraces] = {}  # by the inputs of a pass; of its latest trace
        gradients.calls.add(self)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which this is the model's call."""
        try:
            with attribute_replaced(self._model, "call", self):
                yield
        finally:
            self._kept.show()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        if self.alone.is_here or self._gradients.of_own_rows.is_here:  # the latter: in another distributed model
            with self._kept.visible():
                return self._call(*args, **kwargs)
        self._gradients.called += 1
        if tensorflow_vectorized.is_here():  # pfor would lose the gradients of what workers exchange
            with self.alone(), batch_norm.each_alone(), self._kept.visible():
                return self._call(*args, **kwargs)
        args, kwargs = with_tensors((args, kwargs))  # of callbacks' NumPy arrays; Keras converts them inside the call
        with keras_layers.in_the_call_as_it_is():
            self._refuse_mixed_rows(args, kwargs)
        with used_outside.allowed(is_a_pass=True), keras_stateless.float_values(self._values_for_own_rows):
            outputs, losses = self._over_workers(args, kwargs)
        for number, layer in enumerate(keras_layers.all_layers(self._model)):
            keras_layers.record_losses(layer, [loss for key, loss in losses.items() if key.layer == number])
        return outputs

    def _values_for_own_rows(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Values of a stateless scope (fast weights), held by all workers: gradients with respect to them cover all
        rows."""
        self._gradients.of_values = True
        return used_by_all(self._runtime, values)

    def _over_workers(self, args: tuple, kwargs: dict) -> tuple[Any, dict[LossKey, tf.Tensor]]:
        """Computes over all workers. Returns (outputs, losses)."""
        if self._gradients.share is not None:
            return self._with_own_rows(args, kwargs, self._gradients.share)
        cut = self.of_the_batch((args, kwargs))
        part = OwnRows(self._runtime, (args, kwargs), cut)
        if part.known_count:
            self.counts[part.known_count] = part.n
        own_args, own_kwargs = part.take((args, kwargs))
        return together(self._runtime, part, lambda: self._forward(own_args, own_kwargs, cut, part.known_count))

    def _refuse_mixed_rows(self, args: tuple, kwargs: dict) -> None:
        """At the first call of a kind, raises ConfigError on all workers if the model mixes the rows of its batch."""
        if not self._may_mix:
            return
        given = Arguments(args, {name: value for name, value in kwargs.items() if name not in ("training", "mask")})
        if not all(isinstance(leaf, tf.Tensor) for leaf in keras.tree.flatten(given)):
            return
        with self.alone():
            cut = self.of_the_batch(given)
        kind = (len(args), sorted(given.kwargs), cut)
        if kind in self._tried:
            return
        # A tape inside the trial takes gradients of just the rows that the trial is given.
        with tf.init_scope(), self._tried_alone(), self._gradients.of_own_rows():
            x = self.example.like(args[0] if len(args) == 1 and not given.kwargs else given, cut)
            take, count = taking(x, cut)
            many = self.example.rows(count, count)  # a made-up batch has few
            proofs = Proofs(self._model, many, -(-many // self._runtime.size))
            if row_mixing.found_together(self._runtime, self._model, lambda: x, take, count, proofs):
                fix = (
                    "mix them in compute_loss or train_step, which see the outputs of all rows, take statistics over"
                    " rows with keras.layers.BatchNormalization, or train in one process"
                )
                raise keras_layers.keep_message(ConfigError(row_mixing.sentence(self._model, fix)))
        self._tried.append(kind)  # not earlier: a script may catch the error, and train again

    @contextlib.contextmanager
    def _tried_alone(self) -> Iterator[None]:
        """Context manager in which this worker may try the model on some rows."""
        with self.alone(), keras_stateless.left(), self._kept.visible(in_a_trial=True):
            yield

    def _with_own_rows(self, args: tuple, kwargs: dict, share: tf.Tensor) -> tuple[Any, dict[LossKey, tf.Tensor]]:
        """Returns (outputs, losses) for arguments that are already this worker's rows, `share` of all: no gathering."""
        computed = self._forward(args, kwargs, self.of_the_batch((args, kwargs)))
        as_mean = tf.math.reciprocal_no_nan(share)  # all rows / own rows
        losses = {
            key: loss * tf.cast(as_mean, loss.dtype) if computed.combinations[key].reduction == SUM else loss
            for key, loss in computed.losses.items()
        }
        return computed.outputs, losses

    def of_the_batch(self, arguments: tuple[tuple, dict]) -> list[bool]:
        """For each tensor with rows among the arguments of a call, whether its rows are those of the batch."""
        tensors, rebuild = tensors_of(arguments)
        forward = self._on_tensors(rebuild)
        dims = [tensor.shape[0] for tensor in tensors if tensor.shape.rank != 0]

        def specs_of(dims: Sequence[int | None]) -> list[tf.TensorSpec]:
            rows = iter(dims)
            return [
                tf.TensorSpec([next(rows), *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)
                for tensor in tensors
            ]

        def runs(dims: Sequence[int]) -> bool:
            specs = specs_of(dims)
            if not all(spec.shape.is_fully_defined() for spec in specs):
                return True
            try:
                with tf.init_scope(), self._state_restored(traced=False), writes_undone():
                    forward([tf.zeros(spec.shape, spec.dtype) for spec in specs])
            except Exception:  # noqa: BLE001 - whatever Keras and TensorFlow raise for shapes that do not fit
                return False
            return True

        def returned(dims: Sequence[int | None]) -> Returned:
            def trace(tensors: list[tf.Tensor]) -> list:
                return [output for output in keras.tree.flatten(forward(tensors)) if isinstance(output, tf.Tensor)]

            try:
                with self._state_restored():
                    traced = tf.function(trace, autograph=False).get_concrete_function(specs_of(dims))
            except Exception:  # noqa: BLE001 - whatever Keras and TensorFlow raise for shapes that do not fit
                return None
            return tuple(output.shape[0] if output.shape.rank != 0 else 0 for output in traced.structured_outputs)

        key = str(rebuild([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]))
        if key not in self._of_the_batch:
            self._of_the_batch[key] = of_the_batch(dims, returned, runs)
        return self._of_the_batch[key]

    @contextlib.contextmanager
    def _state_restored(self, traced: bool = True) -> Iterator[None]:
        """Context manager in which the forward pass is traced, or else run by all workers, just to learn from it."""
        layers = keras_layers.all_layers(self._model)
        with keras_stateless.left(), keras_layers.in_the_call_as_it_is():
            losses = [keras_layers.recorded_losses(layer) for layer in layers]
            try:
                with (
                    self._gradients.of_own_rows(),
                    self._random_numbers.of_own_rows(),
                    batch_norm.each_alone(),
                    self._kept.visible(in_a_trial=True),
                    attributes_kept(layers, traced=traced),
                    generators_kept(traced=traced),
                ):
                    yield
            finally:
                for layer, before in zip(layers, losses, strict=True):
                    keras_layers.record_losses(layer, before)

    def _forward(self, args: tuple, kwargs: dict, cut: Sequence[bool], count: int | None = None) -> Forward:
        """Computes this worker's rows. cut: see of_the_batch. count: see KeptTensors."""
        tensors, rebuild = tensors_of((args, kwargs))
        layers = keras_layers.all_layers(self._model)
        training = keras_layers.is_training(kwargs.get("training"))
        if training and not all(tensor.shape[:1].is_fully_defined() for tensor in tensors):
            where, fix = "as the last one may be smaller", "give a dataset made with batch(..., drop_remainder=True)"
            row_mixing.refuse_unknown_rows(self._model, where, fix)
        metrics = metrics_in_layers(self._model)
        additions = Additions(metrics if self._gradients.share is None else [])  # else own_rows.py adds them up

        def forward(tensors: list[tf.Tensor]) -> tuple[Any, dict, list]:
            args, kwargs = rebuild(tensors)
            with (
                self._gradients.of_own_rows(),
                self._random_numbers.of_own_rows(),
                worker_dependence.over_own_rows(own.sizes),
                additions.collected(),
                missing_rows.as_nan(missing_rows.are_silent(compiles)),
                in_steps(),
                self._kept.visible(),
            ):
                outputs = missing_rows.poisoned(self._call(*args, **kwargs))
            losses = recorded(layers)
            for layer in layers:
                keras_layers.record_losses(layer, [])  # these cover own rows only
            return outputs, losses, additions.values

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        if (key := str(rebuild(specs))) not in self._traces and self._gradients.share is None:
            refuse_without_rows(metrics, lambda rows: self._trace(rebuild, with_other_rows(specs, cut, rows)))
        again, size, all_rows = self._as_in_steps(rebuild), self._runtime.size, self.counts.get(count or 0)
        own = PassTraces(again, specs, cut, self._state_restored, self.example, size, all_rows)
        self._traces[key] = own = self._traces.get(key, own) if tf.executing_eagerly() else own
        compiles = self._compiles(kwargs, own)
        refused = unsaved_state.refused_in_own_rows({self._model, self._compiled_as}, self._random_numbers)
        with refused, self._kept.hidden_afterwards(count):
            outputs, losses, additions.values = (compiled(forward) if compiles else forward)(tensors)
        additions.add(self._runtime)
        if self._gradients.without_losses.is_here:
            return Forward(outputs, {}, {})
        with self._tried_alone(), keras_layers.in_the_call_as_it_is():
            combinations = self._combinations.of(list(losses), args, kwargs, cut, training)
        return Forward(outputs, losses, combinations)

    def uses_of(self, handle: tf.Tensor, rows: int | None = None) -> list[list[lookups.Use]]:
        """For each forward pass so far, how it uses the table with this handle. rows: another number of own rows."""
        return [lookups.uses_in(traces.facts, handle, rows) for traces in self._traces.values()]

    def _on_tensors(self, rebuild: Callable) -> Callable[[list[tf.Tensor]], Any]:
        """The forward pass as a function of tensors."""

        def forward(tensors: list[tf.Tensor]) -> Any:
            args, kwargs = rebuild(tensors)
            return self._call(*args, **kwargs)

        return forward

    def _as_in_steps(self, rebuild: Callable) -> Callable[[list[tf.Tensor]], Any]:
        """The forward pass as a function of tensors, with the operations that it has in a step, by the same names."""
        forward = self._on_tensors(rebuild)

        def in_a_step(tensors: list[tf.Tensor]) -> Any:
            with in_steps(), missing_rows.as_nan(missing_rows.are_silent(False)):
                return forward(tensors)

        return in_a_step

    def _trace(self, rebuild: Callable, specs: list[tf.TensorSpec]) -> None:
        """Traces the forward pass just for what happens in the trace."""
        with self._state_restored():
            tf.function(self._on_tensors(rebuild), autograph=False).get_concrete_function(specs)

    def _compiles(self, kwargs: dict, traces: PassTraces) -> bool:
        """Whether XLA compiles the pass over own rows. Not if it has collectives, nor if its gradient needs values from
        inside it: those that loops or branches compute, and lookups that do not depend on the batch, which could no
        longer be told from other lookups."""
        # A stateless scope keeps the values that the pass updates; they must belong to the graph around it.
        if not self._compiled_as.jit_compile or tf.executing_eagerly() or keras_stateless.is_here():
            return False
        layers = keras_layers.all_layers(self._model)
        if kwargs.get("training") and any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
            return False
        uses, branches = traces.facts(None)
        return not any(use.is_shared for use in uses) and not (branches and kwargs.get("training") is not False)
