"""The step, with clock readings between its stages (phase_marks.py). Its results are the same."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.runtime.host import onto_gpu
from tfdist.training import phase_marks
from tfdist.training.dtypes import values_of
from tfdist.training.phase_marks import Marks, MarkSums, MarkTimes
from tfdist.training.replica_gradients import ones_of
from tfdist.training.step import TrainStep
from tfdist.training.step_output import NOTHING, Reduced, Requests, Results, StepOutput, Totals
from tfdist.training.total_loss import Total


class MeasuredStep(TrainStep):
    """A step that measures its phases (seconds): once in `phase_every` calls, or in each call where that is cheaper."""

    # Tensors of the call being traced.
    _mark: Marks
    _sums: MarkSums  # of the marks so far
    _end: tf.Tensor
    # Marks of the step, or micro-batch, being traced.
    _start: tf.Tensor
    _data: tf.Tensor
    _device: tf.Tensor
    _forward: tf.Tensor | None
    _local: tf.Tensor
    _reduced: tf.Tensor
    # Values of the current call.
    _base = 0.0  # Unix seconds; 0: the call is not sampled
    _times: tf.Tensor

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        # These marks never read the clock: they are for code that is traced apart from the steps.
        self._mark = Marks(tf.constant(0.0, tf.float64), tf.constant(0), False, self._copies_batches)
        if self.splits:
            self.replica.begin_backward = self._begin_backward
        self._function = tf.function(self._marked_steps, autograph=False)

    def __call__(self, iterators: Sequence, n: int, requests: Requests = NOTHING) -> StepOutput:
        always = self._calls > 0 and not self.options.deterministic and not self._copies_batches
        sampled = always or phase_marks.is_sampled(self._calls, self.options.phase_every)
        self._base = time.time() if sampled else 0.0
        output = super().__call__(iterators, n, requests)
        if not sampled or output.call is None:
            return output
        phases_s = phase_marks.in_step(MarkTimes(*self._times.numpy().tolist()), output.call.sync_s)
        return dataclasses.replace(output, call=dataclasses.replace(output.call, phases_s=phases_s))

    def _run(self, iterators: list, n: tf.Tensor, signals: tf.Tensor) -> Results:
        base, sampled = tf.constant(self._base, tf.float64), tf.constant(int(self._base > 0))
        results, self._times = self._function(iterators, n, signals, base, sampled)
        return results

    # -- inside the tf.function ------------------------------------------------------------------------------------

    def _marked_steps(
        self, iterators: list, n: tf.Tensor, signals: tf.Tensor, base: tf.Tensor, sampled: tf.Tensor
    ) -> tuple[Results, tf.Tensor]:
        """Returns the results of n steps, and `MarkTimes` as a tensor."""
        self._mark, self._sums = (
            Marks(base, sampled, not self.options.deterministic, self._copies_batches),
            MarkSums.none(),
        )
        begin = self._mark([n])
        with tf.control_dependencies([begin]):  # otherwise the first START may be taken before
            results = self._steps(iterators, n, signals)
        return results, tf.concat([*self._sums, (self._end - begin)[None]], 0)

    def _repeat(self, start: int, stop: int | tf.Tensor, body: Callable[[tf.Tensor, Any], Any], carry: Any) -> Any:
        def marked(i: tf.Tensor, both: tuple[Any, MarkSums]) -> tuple[Any, MarkSums]:
            carry, self._sums = both
            return body(i, carry), self._sums

        carry, self._sums = super()._repeat(start, stop, marked, (carry, self._sums))
        return carry

    def _begin(self, step: tf.Tensor) -> tf.Tensor:
        self._start = self._mark([step])
        if self._mark.always:
            return self._start
        with tf.control_dependencies([self._start]):
            return tf.identity(super()._begin(step))

    def _differentiate(self, iterators: list, after: tf.Tensor, compute: Callable, arguments: tuple) -> Any:
        self._forward = None
        accumulated = super()._differentiate(iterators, after, compute, arguments)
        before = self._device if self._forward is None else self._forward
        backward = self._mark([before, *phase_marks.gradients_last(self.runtime.local(accumulated))])
        forward = backward if self._forward is None else self._forward
        times = self._mark.relative([self._data, self._device, forward, backward])
        self._sums = self._sums._replace(of_micro_batches=self._sums.of_micro_batches + times)
        return accumulated

    def _next_batches(self, iterators: list, after: tf.Tensor) -> list[list]:
        batches = super()._next_batches(iterators, after)
        self._data = self._mark([self._sums.of_micro_batches, *tf.nest.flatten(batches)])
        with tf.control_dependencies([self._data]):
            return tf.nest.map_structure(onto_gpu if self._copies_batches else tf.identity, batches)

    def _on_devices(self, batches: list[list]) -> list:
        placed = super()._on_devices(batches)
        last = [self.runtime.local(batch)[::-1] for batch in placed]
        self._device = self._mark([self._data, *tf.nest.flatten(last)]) if self._copies_batches else self._data
        return placed

    def _begin_backward(self, total: Total) -> tf.Tensor:
        self._forward = self._mark([self._device, total.differentiated, total.sums])
        with tf.control_dependencies([self._forward]):
            return ones_of(total)

    def _seconds_since(self, begun: tf.Tensor, accumulated: Any) -> tf.Tensor:
        last = phase_marks.gradients_last(self.runtime.local(accumulated))
        self._local = self._mark([self._sums.of_micro_batches, *last])
        return self._local - begun if self._mark.always else super()._seconds_since(begun, accumulated)

    def _reduce(self, accumulated: Any, signals: tf.Tensor) -> Reduced:
        reduced = super()._reduce(accumulated, signals)
        values = map(values_of, reduced.gradients)
        self._reduced = self._mark([self._local, *values, reduced.sums, reduced.signals])
        times = self._mark.relative([self._start, self._local, self._reduced])
        self._sums = self._sums._replace(of_steps=self._sums.of_steps + times)
        return reduced

    def _apply(self, reduced: Reduced, factor: tf.Tensor, finite: tf.Tensor, before: Any) -> None:
        with tf.control_dependencies([self._reduced]):
            super()._apply(reduced, factor, finite, before)

    def _results(self, totals: Totals) -> Results:
        self._end = self._mark([totals.sums])
        return super()._results(totals)
