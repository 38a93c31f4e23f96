"""The step: accumulate -> reduce -> unscale -> finite? -> clip -> apply, and n of them inside one tf.function.

Added up locally over micro-batches and then, once, over all replicas:
  gradients   of  scale * sum_i w_i * loss_i / E    with E = global batch x weights per sample, a constant
  sums        [sum w*loss, sum w, regularization, sum w*metric_1, ..., and the workers' signals] (step_output.py)
With W = sum w over all replicas and micro-batches, the gradient of the mean loss is (E / W) * gradients / scale:
exactly the one-device value, however samples, padding and weights are spread over the workers. Dividing by E early,
instead of by W at the end, keeps float16 gradients in range; E / W is exactly 1 when no sample is weighted.

Losses that layers add (regularizers, `add_loss`) have no weights: for n of the N rows of a global batch they count
n / N (sums were turned into means before, see row_checks/sums_as_means.py). If samples are weighted and added losses
depend on them, those losses are differentiated separately, and their gradients are multiplied by W / E, once W is
known, before the reduction.

`_one_step` calls the stages in the order of the first line. Their times, except the compute seconds, which the workers
tell each other, are measured by MeasuredStep, the usual one: it overrides `_begin`, `_run` and others to read clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.runtime.base import Runtime
from tfdist.runtime.host import onto_gpu, timestamp
from tfdist.runtime.layer_records import separate_replicas
from tfdist.telemetry.phases import Call
from tfdist.training import unsaved_state_checks
from tfdist.training.dtypes import Gradient, scaled
from tfdist.training.forward_state import ForwardState
from tfdist.training.objectives import Objective, scores_spec
from tfdist.training.precision import SMALLEST_SCALE, LossScale
from tfdist.training.replica_gradients import Accumulated, ReplicaGradients
from tfdist.training.seeds import updating
from tfdist.training.step_options import ALL_ON_EVERY_REPLICA, Parallelism, StepOptions
from tfdist.training.step_output import NOTHING, Reduced, Requests, Results, StepLayout, StepOutput, Totals, shown_sums
from tfdist.training.total_loss import SummedLoss, TotalLoss, expected_weight
from tfdist.training.update import DataParallel, Update, clipping, in_xla, unscaling


class TrainStep:
    """Makes n optimizer steps in one call. Owns the step counter. batch_spec: a dataset's `element_spec`, (x, y, w)."""

    def __init__(
        self,
        runtime: Runtime,
        model: keras.Model,
        optimizer: keras.Optimizer,
        objective: Objective,
        loss_scale: LossScale,
        options: StepOptions,
        batch_spec: tuple,
        parallelism: Parallelism = ALL_ON_EVERY_REPLICA,
    ):
        spec = scores_spec(model, objective, batch_spec)
        self.metric_names = tuple(sorted(spec.metrics))
        self.layout = StepLayout(self.metric_names, runtime.size, runtime.local_replicas)
        self._expected_weight = expected_weight(options.plan, spec)
        self.runtime, self.loss_scale, self.options = runtime, loss_scale, options
        self.model, self.optimizer = model, optimizer
        self._copies_batches = bool(tf.config.list_logical_devices("GPU"))  # to a device
        # A single worker has nobody to compare its seconds with, and on a GPU it would have to wait for the device.
        self._timed = not options.deterministic and not (self._copies_batches and runtime.size == 1)
        slices = options.plan.accumulation == 1 and not self._copies_batches
        self.update: Update = parallelism.update or DataParallel(
            runtime, model, optimizer, slices=slices, bfloat16=options.bfloat16_gradients
        )
        summed = SummedLoss(objective, self.metric_names, options.plan.global_batch)
        total = TotalLoss(model, summed, self._expected_weight, options.weighted)
        self.replica = ReplicaGradients(runtime, model, total, self.update, options, parallelism)
        self.added = self.replica.added
        self._gradient_norm, self._apply_gradients = self.update.norm, self._scale_and_apply
        if options.compiled_update:
            self._gradient_norm, self._apply_gradients = in_xla(self._gradient_norm), in_xla(self._apply_gradients)
        self._forward_state = ForwardState(runtime, model)
        if runtime.local_replicas > 1:
            separate_replicas(model)
        self._compute_s = self._wall_s = 0.0  # per step, in the last call; sent as a signal of the next call
        self._calls = 0
        self._saved_variables: list[Any] = []  # variables that snapshots hold
        self._messages: list[str] = []  # for the user
        # Otherwise one operation, or an interleaved schedule, contains both the forward and the backward pass.
        self.splits = not (options.jit_compile or parallelism.pipeline)
        self._may_skip = loss_scale.dynamic or options.skip_non_finite
        self._needs_norm = bool(options.clip_norm) or self._may_skip
        with runtime.scope():
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self.counter = tf.Variable(tf.constant(0, tf.int64), trainable=False, name="step", aggregation=first)
        # Without AutoGraph: its rewriting of all the code below took two thirds of the time to the first step.
        self._function = tf.function(self._steps, autograph=False)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """Variables that must be saved beside model and optimizer."""
        return {"step": self.counter, **self.loss_scale.variables, **self.update.variables}

    def __call__(self, iterators: Sequence, n: int, requests: Requests = NOTHING) -> StepOutput:
        """Makes n optimizer steps.

        Args:
          iterators: one tf.data iterator of (x, y, w) micro-batches per local replica.
          n: number of steps; a new value does not cause a retrace.
          requests: the requests of this worker.
        """
        if not self._calls:  # variables that the first call creates are in no snapshot
            self._saved_variables = list(state.collect(self.model, self.optimizer, self.variables).values())
        signals = self.layout.signals_of(self.runtime.rank, requests, self._wall_s, self._compute_s)
        before, begun = self.runtime.reduction_s(), time.monotonic()
        step, vector = self._run(list(iterators), tf.constant(n), tf.constant(signals))
        vector = vector.numpy()
        wall_s, after = time.monotonic() - begun, self.runtime.reduction_s()
        self._calls += 1
        if self._calls > 1:  # the first call traces
            self._wall_s, self._compute_s = wall_s / n, self.layout.whole.of(vector, "compute_s") / n
        travel_s, wait_s = (after[0] - before[0], after[1] - before[1]) if before and after else (None, None)
        call = Call(n, wall_s, wait_s, None, travel_s)
        return self.layout.output(int(step), vector, call, self._messages_of_call())

    def _messages_of_call(self) -> tuple[str, ...]:
        messages, self._messages = self._messages, []
        return (*self.update.connected.news(), *messages)

    def _run(self, iterators: list, n: tf.Tensor, signals: tf.Tensor) -> Results:
        return self._function(iterators, n, signals)

    # -- inside the tf.function ------------------------------------------------------------------------------------

    def _steps(self, iterators: list, n: tf.Tensor, signals: tf.Tensor) -> Results:
        """Makes n steps."""

        def one(i: tf.Tensor, totals: Totals) -> Totals:
            return totals.plus(self._one_step(iterators, signals, last=tf.equal(i, n - 1)))

        results = self._results(self._repeat(0, n, one, Totals.of_no_step(self.layout)))
        kept = [*self._saved_variables, *self.update.pieces_of_weights()]
        kept += [*self.replica.seeds, *self.runtime.order_tokens()]
        self._messages = unsaved_state_checks.check(self.model, kept, self.options.deterministic)
        return results

    def _repeat(self, start: int, stop: int | tf.Tensor, body: Callable[[tf.Tensor, Any], Any], carry: Any) -> Any:
        """Runs carry = body(i, carry) for each i, in the graph; returns the last carry."""
        return tf.while_loop(
            lambda i, _: i < stop, lambda i, carry: (i + 1, body(i, carry)), (tf.constant(start), carry)
        )[1]

    def _one_step(self, iterators: list, signals: tf.Tensor, last: tf.Tensor) -> Totals:
        step, scale = tf.identity(self.counter), self.loss_scale.value()
        before = self._forward_state.read() if self._may_skip else None
        begun = self._begin(step)
        accumulated = self._accumulate(iterators, step, scale, begun)
        compute_s = self._seconds_since(begun, accumulated)
        reduced = self._reduce(accumulated, signals)
        factor = self._unscaling(reduced, scale)
        norm = self._norm(reduced, factor, last)
        finite = self._is_finite(reduced, norm)
        if self.options.clip_norm:
            factor *= clipping(norm, self.options.clip_norm)
        self._apply(reduced, factor, finite, before)
        self.loss_scale.update(finite)
        self.counter.assign_add(1)
        return self._totals(reduced, norm, compute_s, finite)

    def _begin(self, step: tf.Tensor) -> tf.Tensor:
        """float64 []: the time at which the step begins. Does not wait for `step`, as a batch may arrive while the last
        update is applied."""
        return self._now()

    # Accumulate

    def _accumulate(self, iterators: list, step: tf.Tensor, scale: tf.Tensor, begun: tf.Tensor) -> Any:
        """Returns for each replica the `Accumulated` of its micro-batches."""
        if self.replica.pipeline:
            return self._differentiate(iterators, begun, self.replica.of_pipeline, (step, scale))

        def add(micro: tf.Tensor, accumulated: Any) -> Any:
            # Otherwise TensorFlow may take the second batch first.
            with tf.control_dependencies(tf.nest.flatten(self.runtime.local(accumulated))):
                return self._differentiate(
                    iterators, tf.identity(step), self.replica.plus_micro_batch, (accumulated, step, micro, scale)
                )

        first = (step, tf.constant(0), scale)
        accumulated = self._differentiate(iterators, begun, self.replica.of_micro_batch, first)
        count = self.options.plan.accumulation
        return self._repeat(1, count, add, accumulated) if count > 1 else accumulated

    def _differentiate(self, iterators: list, after: tf.Tensor, compute: Callable, arguments: tuple) -> Any:
        """Runs `compute` on each replica with the next micro-batch, or with all of a step's in a pipeline."""
        batches = self._on_devices(self._next_batches(iterators, after))
        return self.runtime.run(compute, (*arguments, *batches))

    def _next_batches(self, iterators: list, after: tf.Tensor) -> list[list]:
        """Returns, for each micro-batch of one `_differentiate`, a batch for each local replica."""
        with tf.control_dependencies([after]):
            return [
                [iterator.get_next() for iterator in iterators]
                for _ in range(self.options.plan.accumulation if self.replica.pipeline else 1)
            ]

    def _on_devices(self, batches: list[list]) -> list:
        """Returns the batches as per-replica values, on the devices."""
        batches = [self.runtime.per_replica(batch) for batch in batches]
        if not self._copies_batches:
            return batches
        return [self.runtime.run(lambda batch: tf.nest.map_structure(onto_gpu, batch), (each,)) for each in batches]

    def _seconds_since(self, begun: tf.Tensor, accumulated: Any) -> tf.Tensor:
        """float64 []: seconds until each replica has its last gradient (sums, if its stage has no variables)."""
        last = [(each.gradients or [each.sums])[0] for each in self.runtime.local(accumulated)]
        with tf.control_dependencies(last):
            return self._now() - begun

    def _now(self) -> tf.Tensor:
        return timestamp() if self._timed else tf.constant(0.0, tf.float64)

    # Reduce

    def _reduce(self, accumulated: Any, signals: tf.Tensor) -> Reduced:
        per_replica = self.runtime.run(self._reduce_replica, (accumulated, signals))
        gradients, sums = self.runtime.local(per_replica)[0]
        return Reduced(
            per_replica, gradients, *tf.split(sums, [len(self.layout.sums.names), len(self.layout.signals.names)])
        )

    def _reduce_replica(self, accumulated: Accumulated, signals: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
        gradients, of_added, sums = accumulated
        if of_added:
            # The reduced gradients will be multiplied by E / W, which applies only to the loss.
            weight = self.runtime.all_reduce([self.layout.sums.of(sums, "weight")])[0] / self._expected_weight
            gradients = [
                tf.convert_to_tensor(of_loss) + tf.convert_to_tensor(added) * tf.cast(weight, added.dtype)
                for of_loss, added in zip(gradients, of_added, strict=True)
            ]
        return self.update.reduce(gradients, sums, signals)

    # Unscale, finite? Computed from reduced values, so that all replicas reach the same conclusion

    def _unscaling(self, reduced: Reduced, scale: tf.Tensor) -> tf.Tensor:
        if not self.options.weighted:
            return 1.0 / scale
        return unscaling(self.layout.sums.of(reduced.sums, "weight"), self._expected_weight, scale)

    def _norm(self, reduced: Reduced, factor: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        """float32 []: the norm of the gradient of the mean loss."""
        if self._needs_norm:
            return self._gradient_norm(reduced.gradients) * factor
        # The norm is only shown, so it is computed once per call: a pass over all gradients is not free.
        return tf.cond(last, lambda: self._gradient_norm(reduced.gradients) * factor, lambda: tf.constant(0.0))

    def _is_finite(self, reduced: Reduced, norm: tf.Tensor) -> tf.Tensor:
        """bool []: whether the step is finite. A norm is finite exactly if every element of the gradient is."""
        loss = tf.math.is_finite(self.layout.sums.of(reduced.sums, "loss"))
        if not self._needs_norm:
            return loss
        return tf.math.is_finite(norm) if self.loss_scale.dynamic else tf.logical_and(loss, tf.math.is_finite(norm))

    # Apply

    def _apply(self, reduced: Reduced, factor: tf.Tensor, finite: tf.Tensor, before: Any) -> None:
        """Applies the update. before: the values of the forward state, which a skipped step restores."""

        def update() -> None:
            self.runtime.run(lambda gradients, _: self._apply_gradients(gradients, factor), reduced.per_replica)

        if self._may_skip:
            tf.cond(finite, update, lambda: self._forward_state.put_back(before))
        else:
            update()

    def _scale_and_apply(self, gradients: list, factor: tf.Tensor) -> None:
        if self.options.weighted or self._needs_norm:  # else the factor is 1
            gradients = [scaled(gradient, factor) for gradient in gradients]
        with updating():
            self.update.apply(gradients)

    # Results

    def _totals(self, reduced: Reduced, norm: tf.Tensor, compute_s: tf.Tensor, finite: tf.Tensor) -> Totals:
        """Returns what one step adds to the call's totals."""
        sums = shown_sums(self.layout, reduced.sums)
        overflow = tf.logical_not(finite)
        if self._may_skip:
            # A skipped step is not shown. If no loss scale is small enough, the model itself produces NaN.
            sums = tf.where(finite, sums, tf.zeros_like(sums))
            skipped, bad = tf.cast(overflow, tf.int32), tf.less(self.loss_scale.value(), SMALLEST_SCALE)
        else:
            skipped, bad = tf.constant(0), overflow
        return Totals(tf.cast(tf.concat([sums, reduced.signals], 0), tf.float64), norm, compute_s, skipped, bad)

    def _results(self, totals: Totals) -> Results:
        # An activation such as ReLU hides NaN weights: the loss stays finite and nothing is learned any more. Checked
        # once per call.
        bad = tf.logical_not(tf.math.is_finite(self.update.weight_norm()))
        return Results(tf.identity(self.counter), totals.vector(self.layout, self.loss_scale.value(), bad))
