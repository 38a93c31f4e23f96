"""A Keras model distributed over workers, while one of Keras' own loops runs over it.

Three things are replaced during that time, and restored afterwards:

- `model.call` takes the global batch, computes this worker's rows, and returns all rows (forward.py);
- `tf.GradientTape.gradient` returns the gradients over the rows of all workers (gradients.py); everything after it
  (clipping, loss scale, accumulation, averages of weights) is Keras' own, on the same values everywhere;
- the moments of BatchNormalization are those over the rows of all workers.

Every worker computes loss and metrics from all rows, so they mean what they mean in one process, whatever their
formula, and are the same everywhere. `train_step`, `test_step` and `compute_loss` stay as they are, overridden or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts.hidden_state import variables_of_model
from tfdist.compat import keras_batch_norm, keras_epochs, keras_layers, keras_optimizers, keras_tensors, keras_trainer
from tfdist.compat.kept_attributes import kept_on
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.data.tuning import untuned
from tfdist.keras_fit import variables
from tfdist.keras_fit.forward import DistributedCall
from tfdist.keras_fit.gradients import Gradients
from tfdist.keras_fit.loops import Loop
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.keras_fit.refusals import inner_models
from tfdist.keras_fit.step_function import Replacements, StepFunction
from tfdist.keras_fit.worker_dependence import mark_same_on_all
from tfdist.models.nested_functions import traced_anew
from tfdist.runtime import batch_norm
from tfdist.runtime.base import PeerRuntime
from tfdist.training.optimizer import updates_rows
from tfdist.training.table_rows import rows_once, subtracting_rows, takes_repeated_rows


@functools.cache
def _of_process(runtime: PeerRuntime) -> tuple[Gradients, RandomNumbers]:
    """The objects that all models of a process share."""
    return Gradients(runtime), RandomNumbers(runtime)


@dataclasses.dataclass
class _Use:
    """One use of a distributed model, in a `fit` or the like."""

    training: bool
    optimizer: keras.Optimizer | None
    is_prepared: bool = False  # everything is built, and all workers hold the chief's variables


class DistributedModel:
    """The parts that belong to one model: its replacements, and the functions traced with them."""

    def __init__(self, model: keras.Model, runtime: PeerRuntime):
        gradients, random_numbers = _of_process(runtime)
        self._model, self._runtime, self._gradients, self._random_numbers = model, runtime, gradients, random_numbers
        self._call = DistributedCall(model, runtime, gradients, random_numbers)
        replacements = Replacements(model, runtime, self._call, gradients, random_numbers)
        self._functions = [StepFunction(loop, replacements, functools.partial(self._prepare, loop)) for loop in Loop]
        self._inner: dict[int, tuple[keras.Model, DistributedCall]] = {}
        self._calls_inner_models: bool | None = None  # not known yet
        self._may_call_inner_models = False
        self._inside = contextlib.ExitStack()  # of the replacements
        self._use = _Use(training=False, optimizer=None)

    @classmethod
    def of(cls, model: keras.Model, runtime: PeerRuntime) -> DistributedModel:
        """Returns the DistributedModel of this model, made at the first call."""
        return kept_on(model, "_tfdist_distributed", lambda: cls(model, runtime))

    @contextlib.contextmanager
    def installed(self, training: bool, optimizer: keras.Optimizer | None = None) -> Iterator[None]:
        """Context manager in which the replacements are in place, and all workers hold the chief's variables. A use in
        whose callbacks this one is goes on as it was.

        `optimizer`: by default the model's own.
        """
        around = self._use, self._inside
        optimizer = optimizer or getattr(self._model, "optimizer", None)  # a model that was never compiled has none
        self._use = _Use(training, optimizer)
        try:
            if self._model.built:
                self._start()
            with self._replacements():
                yield
            if training:
                self.take_the_chiefs_variables()
            self._runtime.end_call()
        finally:
            self._use, self._inside = around

    @contextlib.contextmanager
    def _replacements(self) -> Iterator[None]:
        """Context manager in which the replacements are in place."""
        model = self._model
        with contextlib.ExitStack() as stack:
            self._inside = stack
            if self._steps_call_inner_models or self._may_call_inner_models:
                self._spread_inner_models()
            if not keras_layers.has_no_call(model):
                stack.enter_context(self._call.installed())
            stack.enter_context(self._gradients.installed())
            stack.enter_context(self._random_numbers.installed())
            for each in self._optimizers():
                stack.enter_context(rows_in_one_order(each))
                stack.enter_context(every_row_checked(each))
            for layer in keras_layers.all_layers(model):
                if layer is not model and (anew := traced_anew(layer.call)):
                    stack.enter_context(attribute_replaced(layer, "call", anew))
                if isinstance(layer, keras.layers.BatchNormalization):
                    stack.enter_context(attribute_replaced(layer, keras_batch_norm.MOMENTS, self._moments_of(layer)))
            stack.enter_context(keras_tensors.argmax_within_gpus())
            stack.enter_context(keras_epochs.data_changed(untuned))
            for function in self._functions:
                stack.enter_context(function.installed())
            yield

    @property
    def _steps_call_inner_models(self) -> bool:
        """Whether steps call inner models instead of the model itself."""
        return keras_layers.has_no_call(self._model) or bool(self._calls_inner_models)

    def _spread_inner_models(self) -> None:
        """Distributes inner models; an inner model inside another one computes plainly there."""
        for inner in inner_models(self._model):
            if id(inner) not in self._inner:
                call = DistributedCall(inner, self._runtime, self._gradients, self._random_numbers, self._model)
                self._inner[id(inner)] = inner, call
        for _, call in self._inner.values():
            self._inside.enter_context(call.installed())

    def _look_for_inner_calls(self, batch: Any) -> None:
        """Finds out, before the first training step, whether the user's train_step calls inner models."""
        model = self._model
        if self._calls_inner_models is None and not keras_layers.has_no_call(model):
            is_own = type(model).train_step is not keras.Model.train_step
            may, asked = is_own and bool(inner_models(model)), self._call.asked
            knows = may and keras_trainer.step_on_symbols(model, batch, "train_step")
            self._calls_inner_models = knows and self._call.asked == asked
            # A step that does not run on symbols may call either: inner models compute plainly inside the model.
            self._may_call_inner_models = may and not knows
            if self._calls_inner_models or self._may_call_inner_models:
                self._spread_inner_models()

    def _optimizers(self) -> list[keras.Optimizer]:
        """The optimizer of this use, and the model's own."""
        of_model = keras_trainer.optimizers_of(self._model)
        given = self._use.optimizer
        return of_model if given is None or any(given is one for one in of_model) else [given, *of_model]

    def _moments_of(self, layer: keras.layers.BatchNormalization) -> Callable:
        def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> list[tf.Tensor]:
            found = batch_norm.moments(self._runtime, inputs, keras_batch_norm.reduction_axes(layer), mask=mask)
            return [mark_same_on_all(each) for each in found]

        return moments

    # -- the same variables everywhere -----------------------------------------------------------------------------

    def _prepare(self, loop: Loop, batch: Any) -> None:
        """Builds, before the first step of a loop, what Keras would build inside the step, where the workers could no
        longer agree."""
        if loop is Loop.TRAIN:
            with self._call.alone():
                self._look_for_inner_calls(batch)
        if self._use.is_prepared:
            return
        with self._call.alone():
            if loop is not Loop.PREDICT and (self._use.training or self._model.compiled):
                keras_trainer.build_for(self._model, batch, loop.step_name, not self._steps_call_inner_models)
            elif not self._steps_call_inner_models:
                keras_trainer.build_for_inputs(self._model, keras.utils.unpack_x_y_sample_weight(batch)[0])
        self._start()
        self._use.is_prepared = True  # a layer that is never used is never built

    def _start(self) -> None:
        layers = keras_layers.all_layers(self._model)
        self._use.is_prepared = keras_layers.all_built(self._model)
        if self._use.optimizer is not None:
            build_optimizer(self._model)
        self.take_the_chiefs_variables()
        self._random_numbers.hold_the_chiefs(
            generator for layer in layers for generator in keras_layers.own_seed_generators(layer)
        )

    def take_the_chiefs_variables(self) -> None:
        """Gives every worker the chief's values, bit for bit."""
        of_optimizers = [variable for one in self._optimizers() for variable in one.variables]
        variables.take_the_chiefs(self._runtime, [*variables_of_model(self._model), *of_optimizers])

    def check_weights(self) -> None:
        """Compares weights; if any have drifted apart, all workers take the chief's."""
        variables.reconcile(self._runtime, self._model)


def build_optimizer(model: keras.Model) -> None:
    """Builds the optimizer if the model is built. Keras does this inside the first traced step. There, workers cannot
    agree on variables, and values that an optimizer copies from the weights are lost: ScheduleFreeAdamW then starts
    with zeros."""
    optimizer: Any = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and keras_layers.all_built(model):
        optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def rows_in_one_order(optimizer: keras.Optimizer) -> Iterator[None]:
    """Context manager in which an optimizer that updates only the rows of a table that were looked up combines
    duplicates in one order; otherwise the workers would drift apart. This comes last: clipping before it sees the
    duplicates, as in plain Keras."""
    with_xla = not tf.config.list_logical_devices("GPU")

    def once(update: Callable) -> Callable:
        def update_step(
            gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable, learning_rate: tf.Tensor
        ) -> None:
            if isinstance(gradient, tf.IndexedSlices) and not (with_xla and takes_repeated_rows(variable)):
                gradient = rows_once(gradient)
            update(gradient, variable, learning_rate)

        return update_step

    with contextlib.ExitStack() as stack:
        for each in filter(updates_rows, keras_optimizers.with_inner(optimizer)):
            stack.enter_context(attribute_replaced(each, "update_step", once(each.update_step)))
            if with_xla:
                stack.enter_context(attribute_replaced(each, "assign_sub", subtracting_rows(each)))
        yield


@contextlib.contextmanager
def every_row_checked(optimizer: keras.Optimizer) -> Iterator[None]:
    """Context manager in which a LossScaleOptimizer skips a step if the gradient of any row of a table overflows. If a
    row was looked up several times, Keras checks only the last gradient, and with several workers another one is last.
    """
    check: Any = getattr(type(optimizer), "check_finite", None)
    if check is not keras.optimizers.LossScaleOptimizer.check_finite:
        yield
        return

    def check_finite(gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> tf.Tensor:
        return check(optimizer, [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients])

    with attribute_replaced(optimizer, "check_finite", check_finite):
        yield
