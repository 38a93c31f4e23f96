"""Marks: at what time the phases of a step end, seen from inside the training function, in calls that are sampled.

A mark looks at the clock when some tensors are there. What comes after waits for it (an executor with one thread would
else look when all is done), but never where that would take away an overlap: gradients travel while the backward pass
goes on, marks or not. There is one traced function, so measuring costs no second trace, and cannot change a result.

Where TensorFlow's clock tells the truth, looking at it costs less than asking whether to look: every call has its
marks. On a GPU an operation counts as done when it has been handed to the device. There a mark copies one element of
the last tensor to the host, which waits for all that the device was given before; so the marks sleep in calls that are
not sampled. So they do with deterministic operations, which bar TensorFlow's clock: Python's is slower.
Whether they sleep must be known to the host without asking the device, or it would wait all the same: it is an int32,
which TensorFlow keeps in the host's memory, and its comparison as well.

The marks of a step, in order; with several micro-batches those from DATA to BACKWARD come once for each:

    START  data wait  DATA  host to device  DEVICE  forward  FORWARD  backward  BACKWARD
    LOCAL (= the last BACKWARD)  gradient synchronisation  REDUCED  optimizer  START of the next step

Each waits for the mark before it, too: two that wait for the same tensors would be looked at in any order, and by
Python's clock milliseconds apart on a busy machine.
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
      base: float64 [], Unix seconds near to the call's begin: differences from it stay exact.
      sampled: int32 [], 1 if the call is, else 0.
      timed: whether TensorFlow's own clock may be used.
      on_device: whether the tensors are on a GPU.
    """

    def __init__(self, base: tf.Tensor, sampled: tf.Tensor, timed: bool, on_device: bool):
        self.base, self.sampled, self.timed, self.on_device = base, sampled, timed, on_device
        self.always = timed and not on_device

    def __call__(self, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """float64 []: Unix seconds when all of `after` are there (on a GPU: when the last one is); anything in calls
        that are not sampled.
        """
        with tf.control_dependencies(after):
            if self.always:
                return timestamp()
            sampled = tf.greater(self.sampled, 0)  # in every graph anew: as an argument it would go to the device

        def look() -> tf.Tensor:
            there = tf.constant(0.0, tf.float64)
            if self.on_device:
                first = tf.reshape(after[-1], [-1])[:1]
                with on_host():
                    there = tf.reduce_sum(tf.cast(first, tf.float64))
            with tf.control_dependencies([there]):
                now = timestamp() if self.timed else _time_of_python()
            # Always 0, which TensorFlow does not see: it would drop a copy that nobody uses.
            return now + tf.cast(tf.logical_and(there > 0, there < 0), tf.float64)

        return tf.cond(sampled, look, lambda: tf.constant(0.0, tf.float64))

    def relative(self, times: Sequence[tf.Tensor]) -> tf.Tensor:
        """float64 [n]: the marks as seconds since the base."""
        return tf.stack(times) - self.base


def is_sampled(number: int, every: int) -> bool:
    """Whether call `number` is: one in each row of `every` calls, the same on all workers; not always the same one of a
    row, since that might be just the one which follows a save. Of the first row it is the second: the first call
    traces.
    """
    if every < 1:
        return False
    row, at = divmod(number, every)
    return at == (min(1, every - 1) if row == 0 else random.Random(row).randrange(every))


def gradients_last(local: Sequence[Accumulated]) -> list[tf.Tensor]:
    """All that the replicas hold after their backward pass; what is computed last, the first variable's gradient, is
    last.
    """
    return [values_of(tensor) for each in local for tensor in (each.sums, *each.of_added[::-1], *each.gradients[::-1])]


def in_step(times: MarkTimes, wait_s: float | None) -> np.ndarray:
    """float64 [len(IN_CALL)]: the seconds of the phases of `IN_CALL`.

    `wait_s`: gradient synchronisation, where the runtime knows it better; None: it does not.
    """
    # Every micro-batch but the first begins where the one before it ends.
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
    """Python's clock, for deterministic runs, in which TensorFlow refuses to tell the time."""
    with on_host():
        return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
