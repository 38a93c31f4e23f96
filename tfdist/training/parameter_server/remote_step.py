"""A worker's part of a parameter-server run, as one tf.function that the chief sends to it. The function reads the
weights, fetches its samples by position, and differentiates; then it either updates the weights itself (asynchronous)
or returns the gradients (synchronous).

Nothing is captured from the chief except handles of variables on parameter servers: data in memory becomes constants of
the function, which travel to each worker once. Since samples are found by position, a call that is repeated on another
worker sees the same samples. *staleness* of an update: the number of updates of the weights since they were read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras_random import global_seed_generator, is_seed_state, states_beside
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.models import missing_rows
from tfdist.training import unsaved_state_checks
from tfdist.training.connected import Connected
from tfdist.training.dtypes import as_summands, global_norm, scaled, with_zeros
from tfdist.training.objectives import Objective, scores_spec
from tfdist.training.parameter_server.contained_batch import ContainedBatch
from tfdist.training.parameter_server.parameters import Parameters
from tfdist.training.parameter_server.slice_values import SliceValues
from tfdist.training.row_checks.sums_as_means import SumsAsMeans
from tfdist.training.seeds import draw_from, only_known_draws, seed_values
from tfdist.training.stateless_call import stateless_call
from tfdist.training.step_output import FIRST_SUMS, Fields
from tfdist.training.total_loss import SummedLoss, expected_weight, rows_of
from tfdist.training.update import clipping, unscaling


@dataclass(frozen=True)
class RemoteOptions:
    """The configuration options that a worker needs."""

    plan: BatchPlan
    seed: int
    clip_norm: float = 0.0
    max_staleness: int = -1
    staleness_scaling: bool = False
    weighted: bool = True  # False: every weight is known to be 1


class Result(NamedTuple):
    """The result for a batch, or for one slice of it."""

    version: int  # of the weights: number of updates before they were read
    staleness: int  # asynchronous: updates between reading and updating
    applied: bool  # asynchronous: False if the update was too stale or not finite
    finite: bool
    norm: float  # of the gradient, before clipping
    sums: np.ndarray  # float64: see RemoteStep.sums
    values: tuple[np.ndarray, ...]  # synchronous: gradients and states, see SliceValues


class RemoteStep:
    """The functions, each traced on first use; `batch`: positions int64 [n] -> (x, y, w)."""

    def __init__(
        self,
        parameters: Parameters,
        model: keras.Model,
        objective: Objective,
        batch: Callable,
        batch_spec: tuple,
        options: RemoteOptions,
        added: SumsAsMeans | None,
    ):
        spec = scores_spec(model, objective, batch_spec)
        self.parameters, self.model, self.objective, self.batch, self.options = (
            parameters,
            model,
            objective,
            ContainedBatch(batch),
            options,
        )
        metrics = tuple(sorted(spec.metrics))
        self.sums, self.added = Fields((*FIRST_SUMS, *metrics)), added or SumsAsMeans(())
        self.connected = Connected(parameters.weights)
        self._summed = SummedLoss(objective, metrics, options.plan.global_batch)
        self._expected_weight = expected_weight(options.plan, spec)
        plan = options.plan
        bounds = [
            [plan.slice(micro, replica) for replica in range(plan.replicas)] for micro in range(plan.accumulation)
        ]
        self._bounds = np.array(bounds, np.int64)  # [accumulation, replicas, 2]
        self._seeds = [is_seed_state(variable) for variable in model.non_trainable_variables]
        self._without_one = global_seed_generator()
        self._values = SliceValues(parameters.weights, parameters.states)

    @functools.cached_property
    def update(self) -> tf.types.experimental.ConcreteFunction:
        """(step, position) -> see `_update`; `result` reads it."""
        return tf.function(self._update, autograph=False).get_concrete_function(*[tf.TensorSpec([], tf.int64)] * 2)

    @functools.cached_property
    def differentiate(self) -> tf.types.experimental.ConcreteFunction:
        """(step, position, slice) -> see `_differentiate`; `result` reads it."""
        return tf.function(self._differentiate, autograph=False).get_concrete_function(
            *[tf.TensorSpec([], tf.int64)] * 3
        )

    @functools.cached_property
    def apply(self) -> Callable[[tuple, Any, Any], tuple[tf.Tensor, tf.Tensor]]:
        """(the result of `combine`, loss, weight) -> see `_apply`. After `differentiate`, which tells what travels."""
        signature = [self._values.specs(), tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.float32)]
        return tf.function(self._apply, autograph=False, input_signature=signature)

    def result(self, fetched: tuple) -> Result:
        """Reads the fetched result of `update` or `differentiate`."""
        numbers, *values = fetched
        version, staleness, applied, finite, norm = numbers[:5]
        return Result(
            int(version),
            int(staleness),
            bool(applied),
            bool(finite),
            float(norm),
            numbers[5:],
            tuple(values),
        )

    # -- on a worker -----------------------------------------------------------------------------------------------

    def _update(self, step: tf.Tensor, position: tf.Tensor) -> tuple[tf.Tensor]:
        """Makes an update from batch number `step`, which begins at `position`; asynchronous."""
        parameters, options = self.parameters, self.options
        version, gradients, states, sums = self._gradients(step, position, tf.constant(0, tf.int64))
        gradients, norm, finite = self._finish(gradients, self.sums.of(sums, "loss"), self.sums.of(sums, "weight"))
        with tf.control_dependencies([*gradients, norm]):
            staleness = parameters.counter.read_value() - version
        fresh = tf.less_equal(staleness, options.max_staleness) if options.max_staleness >= 0 else tf.constant(True)
        factor = 1.0 / (1.0 + tf.cast(staleness, tf.float32)) if options.staleness_scaling else None

        def update() -> tf.Tensor:
            # Counted before the update: a worker that reads in the middle of it must not count as fresh.
            with tf.control_dependencies([parameters.counter.assign_add(1)]):
                parameters.update(self.connected.only(gradients), factor)
                parameters.set_states(self._values.of_states(states))
            return tf.constant(True)

        applied = tf.cond(tf.logical_and(fresh, finite), update, lambda: tf.constant(False))
        return (_numbers(version, staleness, applied, finite, norm, sums),)

    def _differentiate(self, step: tf.Tensor, position: tf.Tensor, replica: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The gradients and states of slice `replica` of batch number `step`; synchronous."""
        version, gradients, states, sums = self._gradients(step, position, replica)
        return _numbers(version, 0, False, True, 0.0, sums), *self._values.packed(gradients, states)

    def _gradients(self, step: tf.Tensor, position: tf.Tensor, replica: tf.Tensor) -> tuple:
        """Returns (version, gradients, statistics, sums) of a slice, added up over its micro-batches."""
        version = self.parameters.counter.read_value()
        with tf.control_dependencies([version]):
            weights, states = self.parameters.read()
        data = self.batch.constants()
        gradients, states, sums = self._micro(weights, states, data, step, position, tf.constant(0, tf.int64), replica)
        if self.options.plan.accumulation > 1:

            def add(micro, gradients, states, sums):
                more, states, added = self._micro(weights, states, data, step, position, micro, replica)
                return micro + 1, [a + b for a, b in zip(gradients, more, strict=True)], states, sums + added

            _, gradients, states, sums = tf.while_loop(
                lambda micro, *_: micro < self.options.plan.accumulation,
                add,
                (tf.constant(1, tf.int64), gradients, states, sums),
            )
        return version, gradients, states, sums

    def _micro(
        self,
        weights: list,
        states: list,
        data: dict,
        step: tf.Tensor,
        position: tf.Tensor,
        micro: tf.Tensor,
        replica: tf.Tensor,
    ) -> tuple:
        start, stop = tf.unstack(tf.gather_nd(self._bounds, tf.stack([micro, replica])[None])[0])
        x, y, w = self.batch(position + tf.range(start, stop, dtype=tf.int64), data)
        draw_from(self._without_one)
        beside = states_beside()
        seeds = iter(seed_values(sum(self._seeds) + len(beside), self.options.seed, step, micro, replica))
        others = iter(states)
        non_trainable = [next(seeds) if is_seed else next(others) for is_seed in self._seeds]
        share = rows_of(w) / self.options.plan.global_batch
        silent = missing_rows.are_silent()  # on any worker: the devices of the whole cluster are listed here
        with (
            self.added.counting(1.0 / share),
            missing_rows.as_nan(silent),
            only_known_draws(self.model),
            tf.GradientTape() as tape,
        ):
            tape.watch(weights)
            given = zip(beside, seeds, strict=True)  # what is left of the seeds
            outputs, updated, losses = stateless_call(self.model, weights, non_trainable, x, True, [*given])
            summed = self._summed(outputs, y, w, losses)
            # For a whole batch, or one without weights, this is the same as on one device.
            total = missing_rows.poisoned(summed.weighted_mean(self._expected_weight))
            sums = missing_rows.poisoned(summed.sums)
        self._check(losses)
        unsaved_state_checks.check_on_servers(self.model, self.parameters.counter)
        found = tape.gradient(total, weights)
        self.connected.note(found)
        gradients = as_summands(with_zeros(found, weights), weights)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]  # embeddings give IndexedSlices
        updated = [new for new, is_seed in zip(updated, self._seeds, strict=True) if not is_seed]
        self._values.note(states, updated)
        return gradients, [tf.cast(new, old.dtype) for new, old in zip(updated, states, strict=True)], sums

    def _check(self, losses: Sequence[tf.Tensor]) -> None:
        plan = self.options.plan
        regularizers = sum(variable.regularizer is not None for variable in self.model.trainable_variables)
        if self.options.weighted and len(losses) > regularizers and plan.replicas * plan.accumulation > 1:
            raise ConfigError(
                "--strategy=parameter_server cannot combine losses that layers add and weighted samples, where a batch"
                " is cut into parts: use --strategy=multi_worker, or --ps_mode=async with --accumulation=1."
            )

    def _finish(self, gradients: list, loss: tf.Tensor, weight: tf.Tensor) -> tuple[list, tf.Tensor, tf.Tensor]:
        """Clips gradients of the weighted mean: (gradients, norm before, finite). The same arithmetic as TrainStep."""
        factor = unscaling(weight, self._expected_weight)
        norm = global_norm(gradients) * factor
        if self.options.clip_norm:
            factor *= clipping(norm, self.options.clip_norm)
        return (
            [scaled(gradient, factor) for gradient in gradients],
            norm,
            tf.logical_and(tf.math.is_finite(norm), tf.math.is_finite(loss)),
        )

    # -- on the chief ----------------------------------------------------------------------------------------------

    def _apply(self, flat: tuple[tf.Tensor, ...], loss: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Makes one update with the sum of all slices; synchronous.

        `loss`, `weight`: sums over samples of the weighted losses and of the weights. Returns (norm, finite).
        """
        summed, states = self._values.unpacked(flat)
        gradients, norm, finite = self._finish(summed, loss, weight)

        def update() -> None:
            self.parameters.update(self.connected.only(gradients))
            self.parameters.set_states(states)

        tf.cond(finite, update, lambda: None)
        self.parameters.counter.assign_add(1)
        return norm, finite

    def combine(self, results: list[Result]) -> tuple[tf.Tensor, ...]:
        """Combines the results of all slices, in order: see SliceValues.combined."""
        step = results[0].version + 1
        return tuple(map(tf.constant, self._values.combined([result.values for result in results], step)))


def _numbers(version, staleness, applied, finite, norm, sums: tf.Tensor) -> tf.Tensor:
    """The numbers of a result as one float64 vector, which takes only one message."""
    head = [tf.cast(number, tf.float64) for number in (version, staleness, applied, finite, norm)]
    return tf.concat([tf.stack(head), tf.cast(sums, tf.float64)], 0)
