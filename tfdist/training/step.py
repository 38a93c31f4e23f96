"""The step: accumulate -> reduce -> unscale -> finite? -> clip -> apply, and n of them inside one tf.function.

What is added up locally over micro-batches and then, once, over all replicas:
  gradients   of  scale * sum_i w_i * loss_i / E    with E = global batch x weights per sample, a constant
  sums        [sum w*loss, sum w, regularization, sum w*metric_1, ..., and what workers tell each other] (step_output.py)
With W = sum w over all replicas and micro-batches, the gradient of the mean loss is (E / W) * gradients / scale:
exactly the one-device value however samples, padding and weights fall on the workers. Dividing by E at once, not by W
at the end, keeps float16 gradients in range; E / W is exactly 1 when no sample is weighted.

What layers add (regularizers, `add_loss`) has no weights: of n of the N rows of a global batch it counts n / N (sums
were made means before, see added_losses.py). Where samples are weighted and it depends on them it is differentiated by
itself, to be multiplied by W / E, once W is known, before the reduction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.runtime.base import Runtime
from tfdist.runtime.layer_records import separate_replicas
from tfdist.telemetry.phases import Call
from tfdist.training import phase_marks
from tfdist.training.added_losses import SumsAsMeans
from tfdist.training.backward_order import weights_first
from tfdist.training.dtypes import as_summands
from tfdist.training.forward_state import ForwardState
from tfdist.training.objectives import Objective, scores_spec
from tfdist.training.phase_marks import Marks
from tfdist.training.precision import SMALLEST_SCALE, LossScale
from tfdist.training.requests import NOTHING, Requests
from tfdist.training.seeds import reseed, seed_states
from tfdist.training.step_output import Layout, StepOutput
from tfdist.training.total_loss import Total, TotalLoss, expected_weight, rows_of
from tfdist.training.update import DataParallel, Update, compiled, scaled


@dataclass(frozen=True)
class StepOptions:
    """What the step needs of the configuration."""

    plan: BatchPlan
    seed: int
    clip_norm: float = 0.0
    jit_compile: bool = False
    skip_non_finite: bool = False
    timed: bool = (
        True  # measure compute seconds; TensorFlow refuses to look at the clock where operations must be deterministic
    )
    phase_every: int = 0  # of as many calls one measures the phases of its steps; 0: none
    small_gradients: bool = False  # they travel as bfloat16
    weighted: bool = True  # False: every weight is known to be 1, which saves a pass over the gradients


class TrainStep:
    """n optimizer steps as one call. Owns the step counter.

    `batch_spec`: the spec of a micro-batch (x, y, w), a dataset's `element_spec`. `update`: what becomes of gradients.
    `pipeline`: makes the gradients of all micro-batches of a step at once, instead of one after the other
    (parallel/pipeline_stages.py). `added`: makes means over rows of what layers add; None: all are means already.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: keras.Model,
        optimizer: keras.Optimizer,
        objective: Objective,
        loss_scale: LossScale,
        options: StepOptions,
        batch_spec: tuple,
        update: Update | None = None,
        pipeline: Callable | None = None,
        added: SumsAsMeans | None = None,
    ):
        spec = scores_spec(model, objective, batch_spec)
        self.metric_names = tuple(sorted(spec.metrics))
        self.layout = Layout(self.metric_names, runtime.size)
        self._expected_weight = expected_weight(options.plan, spec)
        self.total = TotalLoss(
            model, objective, self.metric_names, options.plan.global_batch, self._expected_weight, options.weighted
        )
        self.runtime, self.model, self.optimizer, self.objective = runtime, model, optimizer, objective
        self.loss_scale, self.options, self.added = loss_scale, options, added or SumsAsMeans(())
        self._copies = bool(tf.config.list_logical_devices("GPU"))  # batches, to a device
        self.update, self.pipeline = (
            update
            or DataParallel(
                runtime,
                model,
                optimizer,
                slices=options.plan.accumulation == 1 and not self._copies,
                small=options.small_gradients,
            ),
            pipeline,
        )
        self.seeds, self._forward_state = seed_states(model), ForwardState(runtime, model)
        if runtime.local_replicas > 1:
            separate_replicas(model)
        self._compute_s = self._wall_s = 0.0  # per step, in the last call; told to all with the next
        self._calls = 0
        self._mark = Marks(tf.constant(0.0, tf.float64), on=False)  # of what is being traced
        self.splits = not (
            options.jit_compile or pipeline
        )  # else one operation, or an interleaved schedule, holds forward and backward pass
        self._needs_norm = bool(options.clip_norm) or loss_scale.dynamic or options.skip_non_finite
        with runtime.scope():
            self.counter = tf.Variable(
                0, trainable=False, dtype=tf.int64, name="step", aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )
        # Without AutoGraph: rewriting what is below took two thirds of the time to the first step.
        self._function = tf.function(self._steps, autograph=False)
        self._differentiate = compiled(self._gradients, self.update) if options.jit_compile else self._gradients

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """What must be saved beside model and optimizer."""
        return {"step": self.counter, **self.loss_scale.variables, **self.update.variables}

    def __call__(self, iterators: Sequence, n: int, signals: Requests = NOTHING) -> StepOutput:
        """Makes n optimizer steps.

        Args:
          iterators: one tf.data iterator of (x, y, w) micro-batches per local replica.
          n: how many; a new value does not trace again.
          signals: what this worker asks for.
        """
        told = self.layout.told_by(self.runtime.rank, signals, self._wall_s, self._compute_s)
        sampled = self._mark.always or phase_marks.is_sampled(self._calls, self.options.phase_every)
        before, begun = self.runtime.reduction_s(), time.monotonic()
        step, packed, times = self._function(
            list(iterators), tf.constant(n), tf.constant(told), tf.constant(time.time() if sampled else 0.0, tf.float64)
        )
        packed = packed.numpy()
        wall_s = time.monotonic() - begun
        self._calls += 1
        if self._calls > 1:  # the first call traces
            self._wall_s, self._compute_s = wall_s / n, self.layout.packed.of(packed, "compute_s") / n
        travel_s, wait_s = (None, None) if before is None else np.subtract(self.runtime.reduction_s(), before).tolist()
        return self.layout.output(
            int(step),
            packed,
            n,
            Call(n, wall_s, wait_s, phase_marks.in_step(times.numpy(), wait_s) if sampled else None, travel_s),
        )

    # -- inside the tf.function ------------------------------------------------------------------------------------

    def _steps(
        self, iterators: list, n: tf.Tensor, signals: tf.Tensor, base: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """n steps. Returns the counter, float64 `layout.packed`, and, if `base` is above 0, the sums of the marks and
        the seconds of all steps."""
        size = len(self.layout.batch.names) + len(self.layout.told.names)
        self._mark = mark = Marks(base, self.options.timed, self.options.phase_every > 0, self._copies)
        begin = mark([n])

        def one(i, totals, norm, compute_s, skipped, bad, times):
            sums, norm, finite, seconds, more = self._one_step(iterators, signals, last=tf.equal(i, n - 1))
            overflow = tf.logical_not(finite)
            skipped += tf.cast(overflow, tf.int32) if self._may_skip else 0
            # A step that was skipped did no harm; but if no loss scale is small enough, the model itself produces NaN.
            bad = tf.logical_or(bad, tf.less(self.loss_scale.value(), SMALLEST_SCALE) if self._may_skip else overflow)
            return i + 1, totals + tf.cast(sums, tf.float64), norm, compute_s + seconds, skipped, bad, times + more

        zero = tf.constant(0.0, tf.float64)
        nothing = (
            tf.constant(0),
            tf.zeros([size], tf.float64),
            tf.constant(0.0),
            zero,
            tf.constant(0),
            tf.constant(False),
            tf.zeros([phase_marks.COUNT], tf.float64),
        )
        _, totals, norm, compute_s, skipped, bad, times = tf.while_loop(lambda i, *_: i < n, one, nothing)
        times = tf.concat([times, (mark([totals]) - begin)[None]], 0)
        # An activation such as ReLU hides NaN weights: the loss stays finite and nothing is learned any more. Once a
        # call.
        bad = tf.logical_or(bad, tf.logical_not(tf.math.is_finite(self.update.weight_norm())))
        head = [norm, self.loss_scale.value(), tf.cast(skipped, tf.float32), tf.cast(bad, tf.float32)]
        return (
            tf.identity(self.counter),
            tf.concat([tf.cast(tf.stack(head), tf.float64), compute_s[None], totals], 0),
            times,
        )

    @property
    def _may_skip(self) -> bool:
        return self.loss_scale.dynamic or self.options.skip_non_finite

    def _one_step(self, iterators: list, signals: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns (sums, norm, finite, compute seconds: from asking for the batch to the last gradient, marks)."""
        step, scale, mark = tf.identity(self.counter), self.loss_scale.value(), self._mark
        before = self._forward_state.read() if self._may_skip else None
        start = mark([step])
        with tf.control_dependencies([start]):
            begun = start if mark.always else self._now()
        if self.pipeline:
            carry, times = self._marked(iterators, start, self._pipelined, step, scale)
        else:
            carry, times = self._marked(iterators, start, self._micro, step, tf.constant(0), scale)
            if self.options.plan.accumulation > 1:

                def add(micro, carry, times):
                    with tf.control_dependencies(
                        tf.nest.flatten(self.runtime.local(carry))
                    ):  # else TensorFlow may take the second batch first
                        carry, more = self._marked(
                            iterators, tf.identity(step), self._accumulate, step, micro, scale, carry=carry
                        )
                    return micro + 1, carry, times + more

                _, carry, times = tf.while_loop(
                    lambda micro, *_: micro < self.options.plan.accumulation, add, (tf.constant(1), carry, times)
                )
        local = mark(phase_marks.gradients_last(self.runtime.local(carry)))
        # Of each replica the gradient that comes last; a stage without variables has none.
        with tf.control_dependencies([(gradients or rest)[0] for gradients, *rest in self.runtime.local(carry)]):
            seconds = (local if mark.always else self._now()) - begun
        reduced = self.runtime.run(self._reduce, (carry, signals))
        gradients, sums = self.runtime.local(reduced)[0]
        at_reduced = mark([*gradients, sums])
        batch, told = tf.split(sums, [len(self.layout.batch.names), len(self.layout.told.names)])
        norm, finite, factor = self._judge(gradients, batch, scale, last)
        with tf.control_dependencies([at_reduced]):
            if self._may_skip:
                tf.cond(finite, lambda: self._apply(reduced, factor), lambda: self._forward_state.put_back(before))
            else:
                self._apply(reduced, factor)
        self.loss_scale.update(finite)
        self.counter.assign_add(1)
        # A step that did not take place is not part of what is shown.
        names = self.layout.batch.names
        batch *= tf.stack(
            [self.layout.batch.of(batch, "weight") if name == "regularization" else 1.0 for name in names]
        )  # as all others
        batch = tf.where(tf.logical_or(finite, not self._may_skip), batch, tf.zeros_like(batch))
        return (
            tf.concat([batch, told], 0),
            norm,
            finite,
            seconds,
            tf.concat([times, mark.relative([start, local, at_reduced])], 0),
        )

    def _marked(
        self, iterators: list, after: tf.Tensor, function: Callable, *args: tf.Tensor, carry: tuple | None = None
    ) -> tuple[tuple, tf.Tensor]:
        """`function` of the next micro-batch (a pipeline: of all of a step): (its result, the marks from DATA to
        BACKWARD).
        """
        with tf.control_dependencies([after]):
            batches = [
                [iterator.get_next() for iterator in iterators]
                for _ in range(self.options.plan.accumulation if self.pipeline else 1)
            ]
        times = [self._mark(tf.nest.flatten(batches))]
        with tf.control_dependencies(times):
            batches = [self.runtime.per_replica(batch) for batch in tf.nest.map_structure(tf.identity, batches)]
        if self._copies:
            batches = [
                self.runtime.run(lambda batch: tf.nest.map_structure(tf.identity, batch), (batch,)) for batch in batches
            ]
            times.append(self._mark(tf.nest.flatten([self.runtime.local(batch)[::-1] for batch in batches])))
        self._at_forward = None
        carry = self.runtime.run(
            function, (*([carry] if carry is not None else []), batches if self.pipeline else batches[0], *args)
        )
        at_backward = self._mark(phase_marks.gradients_last(self.runtime.local(carry)))
        return carry, self._mark.relative(
            [times[0], times[-1], at_backward if self._at_forward is None else self._at_forward, at_backward]
        )

    def _now(self) -> tf.Tensor:
        return tf.timestamp() if self.options.timed else tf.constant(0.0, tf.float64)

    def _judge(
        self, gradients: list, batch: tf.Tensor, scale: tf.Tensor, last: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """From reduced values, so that all replicas conclude the same: (norm, finite, factor for the gradients or None
        for 1).
        """
        weight = self.layout.batch.of(batch, "weight")
        factor = self._expected_weight / tf.maximum(weight, 1e-30) / scale if self.options.weighted else 1.0 / scale
        factor = tf.where(weight > 0, factor, 0.0)
        finite = tf.math.is_finite(self.layout.batch.of(batch, "loss"))
        if not self._needs_norm:
            # Only shown, so computed once a loop: a pass over all gradients is not free.
            norm = tf.cond(last, lambda: self.update.norm(gradients) * factor, lambda: tf.constant(0.0))
            return norm, finite, factor if self.options.weighted else None
        norm = self.update.norm(gradients) * factor  # finite exactly if every element is
        finite = tf.math.is_finite(norm) if self.loss_scale.dynamic else tf.logical_and(finite, tf.math.is_finite(norm))
        if self.options.clip_norm:
            factor *= self.options.clip_norm / tf.maximum(norm, self.options.clip_norm)
        return norm, finite, factor

    def _apply(self, reduced: tuple, factor: tf.Tensor | None) -> None:
        def apply(gradients: list, _: tf.Tensor) -> None:
            if factor is not None:
                gradients = [scaled(gradient, factor) for gradient in gradients]
            self.update.apply(gradients)

        self.runtime.run(apply, reduced)

    # -- on one replica --------------------------------------------------------------------------------------------

    def _micro(self, batch: tuple, step: tf.Tensor, micro: tf.Tensor, scale: tf.Tensor) -> tuple[list, tf.Tensor]:
        """(gradients, sums) of one micro-batch. See `_gradients`."""
        reseed(self.seeds, self.options.seed, step, micro, self.runtime.replica_id())
        gradients, sums = self._differentiate(*batch, scale)
        count = len(self.update.sources())
        kept = (
            [self.update.keep(gradients[start : start + count]) for start in range(0, len(gradients), count)]
            if count
            else []
        )
        return [piece for part in kept for piece in part], sums

    def _accumulate(
        self, carry: tuple, batch: tuple, step: tf.Tensor, micro: tf.Tensor, scale: tf.Tensor
    ) -> tuple[list, tf.Tensor]:
        gradients, sums = self._micro(batch, step, micro, scale)
        return [a + b for a, b in zip(carry[0], gradients, strict=True)], carry[1] + sums

    def _pipelined(self, batches: list[tuple], step: tf.Tensor, scale: tf.Tensor) -> tuple[list, tf.Tensor]:
        replica = self.runtime.replica_id()
        with self.added.counting(self.options.plan.global_batch / rows_of(batches[0][2])):
            gradients, sums = self.pipeline(
                batches,
                lambda micro: reseed(self.seeds, self.options.seed, step, tf.constant(micro), replica),
                lambda outputs, y, w, losses: self._of_pipeline(self.total(outputs, y, w, scale, losses)),
                lambda w, losses: self._of_pipeline(self.total.of_added(w, scale, losses)),
                len(self.layout.batch.names),
            )
        return self.update.keep(gradients), sums

    def _of_pipeline(self, total: Total) -> tuple[tf.Tensor, tf.Tensor]:
        if total.added is not None:
            raise ConfigError(
                "Losses that layers add, and regularizers, do not go with weighted samples, or an --objective of your"
                " own, on a mesh with pipe= yet, whose stages differentiate once: drop one of them."
            )
        return total.differentiated, total.sums

    def _reduce(self, carry: tuple, signals: tf.Tensor) -> tuple[list, tf.Tensor]:
        kept, sums = carry
        parts = len(kept) // max(1, len(self.update.sources()))
        if parts > 1:
            # What is reduced will be multiplied by E / W, which is only for the loss.
            weight = self.runtime.all_reduce([self.layout.batch.of(sums, "weight")])[0] / self._expected_weight
            half = len(kept) // 2
            kept = [
                tf.convert_to_tensor(of_loss) + tf.convert_to_tensor(of_added) * tf.cast(weight, of_added.dtype)
                for of_loss, of_added in zip(kept[:half], kept[half:], strict=True)
            ]
        return self.update.reduce(kept, sums, signals)

    def _gradients(self, x, y, w: tf.Tensor, scale: tf.Tensor) -> tuple[list, tf.Tensor]:
        """(gradients, sums) of a micro-batch; where added losses need a factor of their own, their gradients follow
        those of the loss.
        """
        with self.added.counting(self.options.plan.global_batch / rows_of(w)):
            with tf.GradientTape(persistent=True) as tape:
                total = self.total(self.model(x, training=True), y, w, scale)
            seed = tf.ones_like(total.differentiated)
            if self.splits:
                self._at_forward = self._mark([total.differentiated, total.sums])
                with tf.control_dependencies([self._at_forward]):
                    seed = tf.ones_like(total.differentiated)
            gradients, sources, connected = [], self.update.sources(), False
            for part in (total.differentiated, total.added):
                if part is not None:
                    found = tape.gradient(part, sources, seed)  # None: it does not depend on that source
                    connected |= any(gradient is not None for gradient in found)
                    found = [
                        tf.zeros_like(source) if one is None else one
                        for one, source in zip(found, sources, strict=True)
                    ]
                    gradients += as_summands(found, sources)
            del tape
        if not connected:  # whole numbers, a stop_gradient: the run would go on and learn nothing
            raise ConfigError(
                "The loss depends on none of the model's trainable variables: let --model and --objective compute it from"
                " them in floats, without stop_gradient."
            )
        if not self.options.jit_compile:
            weights_first(gradients[: len(sources)], seed)
        return gradients, total.sums
