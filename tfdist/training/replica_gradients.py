"""The part of a step that a replica computes: the gradients and sums of its micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.compat.keras_random import global_seed_generator
from tfdist.compat.tensorflow_random import seeds_moved
from tfdist.control.exit_codes import ConfigError
from tfdist.models import missing_rows
from tfdist.models.compiled_functions import in_steps
from tfdist.runtime.base import Runtime
from tfdist.training.backward_order import weights_first
from tfdist.training.dtypes import as_summands, with_zeros
from tfdist.training.row_checks.sums_as_means import SumsAsMeans
from tfdist.training.seeds import draw_from, drawing, reseed, reseed_for_part, seed_states
from tfdist.training.step_options import Parallelism, StepOptions
from tfdist.training.total_loss import Total, TotalLoss, rows_of
from tfdist.training.update import Gradient, Update, compiled


class Accumulated(NamedTuple):
    """The values that a replica adds up over micro-batches; they are then summed, once, over all replicas (step.py)."""

    gradients: list[Gradient]
    of_added: list[Gradient]  # gradients of the losses that layers add, if differentiated separately; else []
    sums: tf.Tensor


def ones_of(total: Total) -> tf.Tensor:
    """Returns the gradient of the loss itself, all ones, with which the backward pass begins."""
    return tf.ones_like(total.differentiated)


class ReplicaGradients:
    """Computes gradients of micro-batches on one replica. All methods are for `Runtime.run`.

    begin_backward: called once the forward pass is done; returns the gradient with which the backward pass begins.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: keras.Model,
        total: TotalLoss,
        update: Update,
        options: StepOptions,
        parallelism: Parallelism,
    ):
        self.runtime, self.model, self.total, self.update, self.options = runtime, model, total, update, options
        self.pipeline, self.added = parallelism.pipeline, parallelism.added or SumsAsMeans(())
        self.seeds, self._without_one = seed_states(model), global_seed_generator()
        self.begin_backward: Callable[[Total], tf.Tensor] = ones_of
        self._lookups_are_silent = missing_rows.are_silent(options.jit_compile)
        self._differentiate = compiled(self._gradients, update) if options.jit_compile else self._gradients

    def of_micro_batch(self, step: tf.Tensor, micro: tf.Tensor, scale: tf.Tensor, batch: tuple) -> Accumulated:
        self._reseed(step, micro, self.runtime.replica_id())
        x, y, w = batch
        gradients, of_added, sums = self._differentiate(x, y, w, scale)
        return Accumulated(self._kept(gradients), self._kept(of_added), sums)

    def plus_micro_batch(
        self, accumulated: Accumulated, step: tf.Tensor, micro: tf.Tensor, scale: tf.Tensor, batch: tuple
    ) -> Accumulated:
        """Returns `accumulated` plus the result of one more micro-batch. The loop over these is a graph of its own, in
        which TensorFlow gives the seeds of the first micro-batch again."""
        with seeds_moved(self.runtime.replicas):
            more = self.of_micro_batch(step, micro, scale, batch)
        return tf.nest.map_structure(lambda a, b: a + b, accumulated, more)

    def of_pipeline(self, step: tf.Tensor, scale: tf.Tensor, *batches: tuple) -> Accumulated:
        """Returns the gradients and sums of all micro-batches of a step at once, computed by the pipeline."""
        assert self.pipeline is not None
        replica, seeds_of_pass = self.runtime.replica_id(), contextlib.ExitStack()

        def begin(micro: int, part: int) -> None:
            self._reseed(step, tf.constant(micro), replica)
            reseed_for_part(self._without_one, part)
            seeds_of_pass.close()
            forward_pass = part * self.options.plan.accumulation + micro
            seeds_of_pass.enter_context(seeds_moved(forward_pass * self.runtime.replicas))

        with self._counting(batches[0][2]), self._tracing(), seeds_of_pass:
            gradients, sums = self.pipeline(
                batches,
                begin,
                lambda outputs, y, w, losses: _in_one_pass(self.total(outputs, y, w, scale, losses)),
                lambda w, losses: _in_one_pass(self.total.of_added(w, scale, losses)),
                self.total.sums_count,
            )
        return Accumulated(self.update.keep(gradients), [], sums)

    def _reseed(self, step: tf.Tensor, micro: tf.Tensor, replica: tf.Tensor) -> None:
        draw_from(self._without_one)
        reseed(self.seeds, self.options.seed, step, micro, replica)

    def _kept(self, gradients: list[Gradient]) -> list[Gradient]:
        return self.update.keep(gradients) if gradients else []

    def _counting(self, w: tf.Tensor):
        """Context manager that scales the losses that layers add, for a micro-batch with weights `w`; see
        SumsAsMeans."""
        return self.added.counting(self.options.plan.global_batch / rows_of(w))

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Context manager in which the model is called and its outputs are processed."""
        with missing_rows.as_nan(self._lookups_are_silent), in_steps(), drawing(self.model, self.runtime):
            yield

    def _gradients(self, x, y, w: tf.Tensor, scale: tf.Tensor) -> Accumulated:
        """Returns the gradients of a micro-batch, as the tape gives them, and its sums."""
        sources = self.update.sources()
        with self._counting(w), self._tracing():
            with tf.GradientTape(persistent=True) as tape:
                total = self.total(missing_rows.poisoned(self.model(x, training=True)), y, w, scale)
            begin = missing_rows.poisoned(self.begin_backward(total))
            found = [
                [] if part is None else tape.gradient(part, sources, [begin])  # None: does not depend on that source
                for part in (total.differentiated, total.added)
            ]
            del tape
            sums = missing_rows.poisoned(total.sums)
        _check_connected([*found[0], *found[1]])
        self.update.connected.note(*found)
        gradients, of_added = (as_summands(with_zeros(part, sources), sources) if part else [] for part in found)
        if not self.options.jit_compile:
            weights_first(gradients, begin)
        return Accumulated(gradients, of_added, sums)


def _check_connected(gradients: list[Gradient | None]) -> None:
    """Raises ConfigError if no variable has a gradient (integers, stop_gradient): the run would learn nothing."""
    if all(gradient is None for gradient in gradients):
        raise ConfigError(
            "The loss depends on none of the model's trainable variables: let --model and --objective compute it from"
            " them in floats, without stop_gradient."
        )


def _in_one_pass(total: Total) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (the tensor that a pipeline differentiates, the sums)."""
    assert total.added is None, "composition_checks.check_weighted has refused it"
    return total.differentiated, total.sums
