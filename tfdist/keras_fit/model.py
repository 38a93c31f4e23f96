"""A Keras model spread over workers, while one of Keras' own loops runs over it.

Three things are replaced for that time, and put back afterwards:
  model.call                    takes the global batch, computes this worker's rows, returns all rows (forward.py)
  tf.GradientTape.gradient      returns the gradients over the rows of all workers (gradients.py); what follows (clipping,
                                loss scale, accumulation, averages of weights) is Keras' own, on the same values
                                everywhere
  the moments of BatchNormalization   are over the rows of all workers
Loss and metrics are computed by every worker from all rows, so they mean what they mean in one process, whatever their
formula, and are the same everywhere. `train_step`, `test_step` and `compute_loss` stay as they are, overridden or not.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_batch_norm, keras_epochs, keras_layers, keras_trainer
from tfdist.control.exit_codes import ConfigError
from tfdist.data.tuning import untuned
from tfdist.keras_fit import own_rows, variables
from tfdist.keras_fit.batches import END, Batches
from tfdist.keras_fit.forward import SpreadCall
from tfdist.keras_fit.gradients import Gradients
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.keras_fit.rows import Part
from tfdist.keras_fit.temporary_attributes import replaced
from tfdist.runtime import batch_norm
from tfdist.runtime.sockets import Sockets
from tfdist.training.optimizer import updates_rows
from tfdist.training.update import rows_once

_LOOPS = {"train": "train_function", "test": "test_function", "predict": "predict_function"}  # Keras' names
_KEPT_AS = "_tfdist_distributed"  # on the model itself: what was traced lives as long as it


@functools.cache
def _of_process(runtime: Sockets) -> tuple[Gradients, RandomNumbers]:
    """What all models of a process share."""
    return Gradients(runtime), RandomNumbers(runtime)


class DistributedModel:
    """What belongs to one model: its replacements, and the functions traced with them."""

    def __init__(self, model: keras.Model, runtime: Sockets):
        self._model, self._runtime = model, runtime
        self._functions: dict[str, tuple[tuple, Callable]] = {}
        self._batches: dict[str, Batches] = {}
        self._training = False
        self._ready = False
        self._gradients, self._random_numbers = _of_process(runtime)
        self._call = SpreadCall(model, runtime, self._gradients, self._random_numbers)
        self._own_rows: dict[str, bool] = {}  # by kind: see own_rows.py

    @classmethod
    def of(cls, model: keras.Model, runtime: Sockets) -> DistributedModel:
        """The one of this model."""
        if _KEPT_AS not in model.__dict__:
            object.__setattr__(model, _KEPT_AS, cls(model, runtime))
        return model.__dict__[_KEPT_AS]

    @contextlib.contextmanager
    def installed(self, training: bool, optimizer: keras.Optimizer | None = None) -> Iterator[None]:
        """The replacements are in place inside; all workers hold the chief's variables.

        `optimizer`: the model's own if not given.
        """
        model = self._model
        self._optimizer = optimizer = optimizer or model.optimizer
        self._batches = {kind: Batches(self._runtime) for kind in _LOOPS}
        self._training, self._ready = training, False
        if model.built:
            self._start()
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(model, "call", self._call))
            stack.enter_context(self._gradients.installed())
            stack.enter_context(self._random_numbers.installed())
            if optimizer is not None:
                stack.enter_context(rows_are_added_once(optimizer))
            for layer in keras_layers.all_layers(model):
                if isinstance(layer, keras.layers.BatchNormalization):
                    stack.enter_context(replaced(layer, keras_batch_norm.MOMENTS, self._moments_of(layer)))
            data = keras_epochs.data_changed(untuned)
            stack.enter_context(replaced(keras_epochs.EpochIterator, keras_epochs.DATA, data))
            for kind, name in _LOOPS.items():
                stack.enter_context(replaced(model, name, self._function(kind)))
            yield
        if training:
            self.take_the_chiefs_variables()

    def _moments_of(self, layer: keras.layers.BatchNormalization) -> Callable:
        return lambda inputs, mask: batch_norm.moments(
            self._runtime, inputs, keras_batch_norm.reduction_axes(layer), mask=mask
        )

    # -- Keras' step functions -------------------------------------------------------------------------------------

    def _function(self, kind: str) -> Callable:
        """Keras' train_function, test_function or predict_function; traced again when the model was compiled again."""
        model = self._model
        holds = (
            keras_trainer.compile_identity(model),
            model.run_eagerly,
            bool(model.jit_compile),
            *model.trainable_variables,
        )
        known, function = self._functions.get(kind, ((), None))
        if function is None or len(known) != len(holds) or any(a is not b for a, b in zip(known, holds, strict=True)):
            self._own_rows.pop(kind, None)
            self._functions[kind] = (holds, self._make_function(kind))
        return self._functions[kind][1]

    def _make_function(self, kind: str) -> Callable:
        @tf.autograph.experimental.do_not_convert
        def one_step(data: Any) -> Any:
            with self._random_numbers.in_lockstep():
                return getattr(self, f"_{kind}_step")(data)

        if not self._model.run_eagerly:
            one_step = tf.function(one_step, reduce_retracing=True)

        known = []

        def step(batch: Any, spec: Any = None) -> Any:
            self._prepare(batch)
            self._call.scales.example = keras.utils.unpack_x_y_sample_weight(batch)[0]
            if kind not in self._own_rows and kind != "predict":
                self._own_rows[kind] = self._chooses_own_rows(kind, batch)
            if spec is not None and spec not in known and not self._model.run_eagerly:
                known.append(spec)
                # Traced as Keras traces it, with the batch dim unknown if it varies: some of its numbers depend on
                # that.
                one_step.get_concrete_function(
                    keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec)
                )
            return one_step(batch)

        def over_iterator(iterator: Iterator) -> Any:
            logs = END
            for _ in range(self._model.steps_per_execution):
                batch = self._batches[kind].next(iterator)
                if batch is END:
                    break
                logs = step(batch, iterator.element_spec)
            if logs is END:
                raise StopIteration
            return logs

        def over_list(batches: list) -> Any:
            parts = [step(self._batches[kind].agree(batch)) for batch in batches]
            return keras.tree.map_structure(lambda *outputs: tf.concat(outputs, 0), *parts)

        return over_list if kind == "predict" else over_iterator

    def _train_step(self, batch: Any) -> Any:
        if self._own_rows["train"]:
            return self._step_of_own_rows(self._model.train_step, batch)
        calls, taken = self._call.calls, self._gradients.taken
        logs = self._model.train_step(batch)
        if self._call.calls == calls or (self._gradients.taken == taken and self._model.trainable_variables):
            missing = "calls the model itself" if self._call.calls == calls else "takes a gradient with tf.GradientTape"
            raise ConfigError(
                f"The train_step of {type(self._model).__name__} never {missing}, so its work cannot be spread: let it"
                " use self(x) and tape.gradient, or train it in one process."
            )
        return logs

    def _test_step(self, batch: Any) -> Any:
        return (
            self._step_of_own_rows(self._model.test_step, batch)
            if self._own_rows["test"]
            else self._model.test_step(batch)
        )

    def _step_of_own_rows(self, one_step: Callable, batch: Any) -> Any:
        part = Part(self._runtime, keras.utils.unpack_x_y_sample_weight(batch)[0])
        self._gradients.share = tf.cast(part.count, tf.float32) / tf.cast(part.n, tf.float32)
        try:
            return own_rows.step(self._runtime, self._model, part, one_step, batch)
        finally:
            self._gradients.share = None

    def _predict_step(self, batch: Any) -> Any:
        return self._model.predict_step(batch)

    # -- the same variables everywhere -----------------------------------------------------------------------------

    def _prepare(self, batch: Any) -> None:
        """Before the first step: builds what Keras would build inside it, where the workers could not agree any
        more.
        """
        if self._ready:
            return
        with self._call.alone():
            if self._training or self._model.compiled:
                keras_trainer.build_for(self._model, batch)
            else:
                keras_trainer.build_for_inputs(self._model, keras.utils.unpack_x_y_sample_weight(batch)[0])
        self._start()
        self._ready = True  # a layer that is never used is never built

    def _chooses_own_rows(self, kind: str, batch: Any) -> bool:
        if self._model.run_eagerly:
            return False
        with self._call.alone():
            chosen = own_rows.suits(self._model, batch) and all(
                self._call.of_the_batch(((keras.utils.unpack_x_y_sample_weight(batch)[0],), {}))
            )
        if chosen and self._runtime.rank == 0:
            print(
                f"tfdist: {kind}: the outputs of a batch are more than {own_rows.LARGEST >> 20} MiB, so each worker"
                " computes loss and metrics of its own rows, and sums are reduced.",
                file=sys.stderr,
                flush=True,
            )
        return chosen

    def _start(self) -> None:
        model = self._model
        self._ready = all(layer.built for layer in keras_layers.all_layers(model))
        if self._ready and self._optimizer is not None and not self._optimizer.built:
            self._optimizer.build(model.trainable_variables)
        self.take_the_chiefs_variables()
        self._random_numbers.hold_the_chiefs(
            generator
            for layer in keras_layers.all_layers(model)
            for generator in keras_layers.own_seed_generators(layer)
        )

    def take_the_chiefs_variables(self) -> None:
        """Every worker holds the chief's bits."""
        optimizer = self._optimizer.variables if self._optimizer is not None else []
        variables.take_the_chiefs(self._runtime, [*self._model.variables, *optimizer])

    def check_weights(self) -> None:
        """If something drifted apart all take the chief's."""
        variables.reconcile(self._runtime, self._model)


def rows_are_added_once(optimizer: keras.Optimizer) -> contextlib.AbstractContextManager:
    """An optimizer that updates only the rows of a table that were looked up adds up their duplicates first, in one
    order, or the workers would drift apart. As the last thing: clipping before it sees the duplicates, as in plain
    Keras."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not updates_rows(inner):
        return contextlib.nullcontext()
    update = inner.update_step

    def update_step(gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
        update(rows_once(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient, variable, learning_rate)

    return replaced(inner, "update_step", update_step)
