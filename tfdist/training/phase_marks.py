"""Marks: the times at which the phases of a step end, taken inside the training function, in calls that are sampled.

A mark reads the clock once some tensors are ready. Later operations wait for it (an executor with one thread would
otherwise read the clock after everything else), except where that would prevent overlap: gradients travel while the
backward pass continues, with or without marks. There is only one traced function, so measuring costs no second trace,
and cannot change a result.

Where TensorFlow's clock can be trusted, reading it costs less than testing whether to read it: every call has marks. On
a GPU an operation counts as done as soon as it has been handed to the device. There a mark copies one element of the
last tensor to the host, which waits for everything that the device was given before; so marks are inactive in calls
that are not sampled. The same holds with deterministic operations, which forbid TensorFlow's clock: Python's is slower.
The host must know without asking the device whether marks are active, or it would have to wait anyway. So the flag is
an int32, which TensorFlow keeps in the host's memory, together with its comparison.

The marks of a step, in order; those from DATA to BACKWARD come once for each micro-batch:

    START  data wait  DATA  host to device  DEVICE  forward  FORWARD  backward  BACKWARD
    LOCAL (= the last BACKWARD)  gradient synchronisation  REDUCED  optimizer  START of the next step

Each mark also waits for the mark before it: two marks that wait for the same tensors would read the clock in any order,
and, with Python's clock, milliseconds apart on a busy machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.runtime.host import on_host, timestamp
from tfdist.telemetry.phases import IN_CALL, Phase
from tfdist.training.dtypes import values_of
from tfdist.training.replica_gradients import Accumulated


class MarkSums(NamedTuple):
    """The marks of a call, each added up over its steps (and micro-batches): seconds since the base."""

    of_micro_batches: tf.Tensor  # float64: DATA, DEVICE, FORWARD, BACKWARD
    of_steps: tf.Tensor  # float64: START, LOCAL, REDUCED

    @classmethod
    def none(cls) -> MarkSums:
        return cls(tf.zeros([4], tf.float64), tf.zeros([3], tf.float64))


class MarkTimes(NamedTuple):
    """The times of the marks of a step on the host, in seconds since the base, summed as in `MarkSums`."""

    data: float
    device: float
    forward: float
    backward: float
    start: float
    local: float
    reduced: float
    total: float  # seconds from the first START to the end of the last step


class Marks:
    """The marks of one call.

    Args:
      base: float64 [], Unix seconds near the start of the call: differences from it stay exact.
      sampled: int32 [], 1 if the call is sampled, else 0.
      timed: whether TensorFlow's own clock may be used.
      on_device: whether the tensors are on a GPU.
    """

    def __init__(self, base: tf.Tensor, sampled: tf.Tensor, timed: bool, on_device: bool):
        self.base, self.sampled, self.timed, self.on_device = base, sampled, timed, on_device
        self.always = timed and not on_device

    def __call__(self, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """float64 []: Unix seconds when all of `after` are ready (on a GPU: when the last one is). The value is
        arbitrary in calls that are not sampled.
        """
        with tf.control_dependencies(after):
            if self.always:
                return timestamp()
            sampled = tf.greater(self.sampled, 0)  # made in every graph: as an argument it would go to the device

        def look() -> tf.Tensor:
            there = tf.constant(0.0, tf.float64)
            if self.on_device:
                first = tf.reshape(after[-1], [-1])[:1]
                with on_host():
                    there = tf.reduce_sum(tf.cast(first, tf.float64))
            with tf.control_dependencies([there]):
                now = timestamp() if self.timed else _time_of_python()
            # Adds 0 in a way that TensorFlow cannot see: otherwise it would drop the copy as unused.
            return now + tf.cast(tf.logical_and(there > 0, there < 0), tf.float64)

        return tf.cond(sampled, look, lambda: tf.constant(0.0, tf.float64))

    def relative(self, times: Sequence[tf.Tensor]) -> tf.Tensor:
        """float64 [n]: marks as seconds since the base."""
        return tf.stack(times) - self.base


def is_sampled(number: int, every: int) -> bool:
    """Returns whether call `number` is sampled: one in each group of `every` calls, the same on all workers. Its place
    in the group varies, since a fixed one might always follow a save. In the first group it is the second call: the
    first one traces.
    """
    if every < 1:
        return False
    row, at = divmod(number, every)
    return at == (min(1, every - 1) if row == 0 else random.Random(row).randrange(every))


def gradients_last(local: Sequence[Accumulated]) -> list[tf.Tensor]:
    """Returns all tensors that the replicas hold after their backward pass. The one that is computed last, the first
    variable's gradient, comes last.
    """
    return [values_of(tensor) for each in local for tensor in (each.sums, *each.of_added[::-1], *each.gradients[::-1])]


def in_step(times: MarkTimes, wait_s: float | None) -> np.ndarray:
    """float64 [len(IN_CALL)]: the seconds of the phases of `IN_CALL`.

    wait_s: seconds of gradient synchronization, if the runtime knows them more exactly; None: it does not.
    """
    # Every micro-batch except the first begins where the previous one ends.
    begins = times.start + times.backward - times.local
    backward, local = times.backward, times.local
    if wait_s is not None:
        backward, local = backward + times.reduced - wait_s - local, times.reduced - wait_s
    seconds = {
        Phase.DATA_WAIT: times.data - begins,
        Phase.HOST_TO_DEVICE: times.device - times.data,
        Phase.FORWARD: times.forward - times.device,
        Phase.BACKWARD: backward - times.forward,
        Phase.GRADIENT_SYNC: times.reduced - local,
        Phase.OPTIMIZER: times.total - (times.reduced - times.start),
    }
    return np.array([seconds[phase] for phase in IN_CALL])


def _time_of_python() -> tf.Tensor:
    """Reads Python's clock, for deterministic runs, in which TensorFlow refuses to tell the time."""
    with on_host():
        return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
