"""Keras' train_function, test_function and predict_function for a distributed model: a step over the global batch.

The first batch decides from which rows a step computes loss and metrics. This is kept until the model is compiled
again: see `Rows`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_trainer
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import say
from tfdist.keras_fit import own_rows, unsaved_state, used_outside
from tfdist.keras_fit.batches import END, Batches
from tfdist.keras_fit.forward import DistributedCall
from tfdist.keras_fit.gradients import Gradients
from tfdist.keras_fit.loops import Loop
from tfdist.keras_fit.random_numbers import RandomNumbers
from tfdist.keras_fit.rows import OwnRows
from tfdist.models import missing_rows
from tfdist.runtime.base import PeerRuntime


class Rows(enum.Enum):
    """The rows from which a worker computes loss and metrics."""

    ALL = "the outputs of all rows are gathered, and loss and metrics are the same everywhere"
    OWN = "loss and metrics are of this worker's rows, and sums are reduced (own_rows.py)"


@dataclasses.dataclass(frozen=True)
class Replacements:
    """The parts that replace those of Keras and TensorFlow while a model is distributed."""

    model: keras.Model
    runtime: PeerRuntime
    call: DistributedCall
    gradients: Gradients
    random_numbers: RandomNumbers


@dataclasses.dataclass(frozen=True)
class _Traced:
    """The state of the model for which a step was traced."""

    compiled: tuple
    trainable: tuple
    other: tuple

    def has_another_side_in(self, later: _Traced) -> bool:
        """Whether a variable has become trainable, or is no longer; variables that were made since do not count."""
        frozen, freed = set(map(id, later.other)), set(map(id, later.trainable))
        return any(id(one) in frozen for one in self.trainable) or any(id(one) in freed for one in self.other)


def _refuse_toggled(*_: Any) -> Any:
    raise ConfigError(
        "A layer's `trainable` was changed after the model had been compiled and trained, which has no effect in Keras:"
        " call model.compile(...) again before tfdist.fit."
    )


def _are_the_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


class StepFunction:
    """Replaces one of the three functions of a model. `prepare`: called with every batch before its step."""

    def __init__(self, loop: Loop, replacements: Replacements, prepare: Callable[[Any], None]):
        self.loop, self._prepare, self._with = loop, prepare, replacements
        self._batches = Batches(replacements.runtime, self.loop.call_name)
        self._function: Callable | None = None
        self._traced_for: _Traced | None = None
        self._has_run = False
        self._rows: Rows | None = None  # not known yet

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which this is the model's function, for a new loop over data. A loop in whose callbacks
        the new one runs goes on with its own batches."""
        model, around = self._with.model, self._batches
        self._batches = Batches(self._with.runtime, self.loop.call_name)
        try:
            with (
                attribute_replaced(model, self.loop.function_name, self._for_the_model_as_it_is()),
                attribute_replaced(model, self.loop.maker_name, self._again),
            ):
                yield
        finally:
            self._batches = around

    def _for_the_model_as_it_is(self) -> Callable:
        """Returns the function, traced again if the model was compiled again."""
        model = self._with.model
        wanted = _Traced(
            keras_trainer.traced_for(model),
            tuple(model.trainable_variables),
            tuple(model.non_trainable_variables),
        )
        known = self._traced_for
        if self._function is not None and known is not None and _are_the_same(known.compiled, wanted.compiled):
            if _are_the_same(known.trainable, wanted.trainable):
                return self._function
            if self.loop is Loop.TRAIN and self._has_run and known.has_another_side_in(wanted):
                return _refuse_toggled
        self._rows, self._traced_for, self._function, self._has_run = None, wanted, self._make(), False
        return self._function

    def _again(self, force: bool = False) -> Callable:
        """Replaces Keras' method that makes the function; Keras calls it when the loop runs over data again."""
        assert self._function is not None
        self._batches.begin()
        return self._function

    def _make(self) -> Callable:
        model = self._with.model

        @tf.autograph.experimental.do_not_convert
        def one_step(data: Any) -> Any:
            with self._with.random_numbers.in_lockstep(), missing_rows.as_nan(missing_rows.are_silent()):
                return missing_rows.poisoned(self._step(data))

        functions: list[tuple[Any, Callable]] = []  # each with the spec of the iterator that it is for

        def function_for(spec: Any) -> Callable:
            """Returns the function for a spec, traced once for each spec as Keras traces it: with the batch dim unknown
            if it varies. Some results depend on that (the displayed loss of each of several outputs), so a batch must
            not take the function of another spec that happens to have as many rows.
            """
            if model.run_eagerly:
                return one_step
            for known, function in functions:
                if spec == known:
                    return function
            function = tf.function(one_step, reduce_retracing=True)
            functions.append((spec, function))
            if spec is not None:
                function.get_concrete_function(
                    keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec)
                )
            return function

        def step(batch: Any, spec: Any = None) -> Any:
            self._prepare(batch)
            self._has_run = True
            self._with.call.example.inputs = _inputs(batch)
            if self._rows is None and self.loop is not Loop.PREDICT:
                self._rows = self._choose_rows(batch)
            return function_for(spec)(batch)

        def over_iterator(iterator: Any) -> Any:
            logs = END
            for _ in range(model.steps_per_execution):
                batch = self._batches.next(iterator)
                if batch is END:
                    break
                logs = step(batch, getattr(iterator, "element_spec", None))  # none: train_on_batch, test_on_batch
            if logs is END:
                raise StopIteration
            return logs

        def over_list(batches: list) -> Any:
            parts = [step(self._batches.agree(batch)) for batch in batches]
            return keras.tree.map_structure(lambda *outputs: tf.concat(outputs, 0), *parts)

        return over_list if self.loop is Loop.PREDICT else over_iterator

    def _choose_rows(self, batch: Any) -> Rows:
        model, call = self._with.model, self._with.call
        if model.run_eagerly:
            return Rows.ALL
        with call.alone():
            suits = own_rows.suits(model, batch) and all(call.of_the_batch(((_inputs(batch),), {})))
        if suits and self._with.runtime.rank == 0:
            say(
                f"{self.loop.value}: the outputs of a batch are more than {own_rows.LARGEST >> 20} MiB, so each"
                " worker computes loss and metrics of its own rows, and sums are reduced."
            )
        return Rows.OWN if suits else Rows.ALL

    def _step(self, batch: Any) -> Any:
        """Computes a step; called while the step is traced."""
        step = self.loop.step_of(self._with.model)
        if self.loop is not Loop.PREDICT:
            step = unsaved_state.looked_for(self._with.model, step)
        if self._rows is Rows.OWN:
            return self._step_of_own_rows(step, batch)
        if self.loop is Loop.PREDICT:
            with self._with.gradients.without_losses():
                logs = step(batch)
        else:
            logs = self._checked_train_step(step, batch) if self.loop is Loop.TRAIN else step(batch)
        used_outside.refuse()
        return logs

    def _checked_train_step(self, train_step: Callable[[Any], Any], batch: Any) -> Any:
        """Raises ConfigError if the step bypasses the replacements."""
        model, gradients = self._with.model, self._with.gradients
        called, taken = gradients.called, gradients.taken
        logs = train_step(batch)
        if gradients.called == called or (gradients.taken == taken and model.trainable_variables):
            missing = (
                "calls the model itself, or a keras.Model inside it"
                if gradients.called == called
                else "takes a gradient with tf.GradientTape"
            )
            raise ConfigError(
                f"The train_step of {type(model).__name__} never {missing}, so its work cannot be spread: let it"
                " use self(x) and tape.gradient, or train it in one process."
            )
        return logs

    def _step_of_own_rows(self, step: Callable[[Any], Any], batch: Any) -> Any:
        part = OwnRows(self._with.runtime, _inputs(batch))
        with self._with.gradients.of_a_share(tf.cast(part.count, tf.float64) / tf.cast(part.n, tf.float64)):
            return own_rows.step(self._with.runtime, self._with.model, part, step, batch)


def _inputs(batch: Any) -> Any:
    """The inputs with which the model is called."""
    return keras.utils.unpack_x_y_sample_weight(batch)[0]
