"""Traces with tf.profiler, for TensorBoard's profile plugin: the steps of --profile_steps, and the next call of the
training function after SIGUSR2, on the ranks of --profile_ranks.

A trace is written to RUN_DIR/tensorboard (rank 0) or RUN_DIR/tensorboard/rank-K. One call of the training function is
one step of the plugin, named "train" with the number of its first optimizer step. With --profile_steps a call is one
optimizer step (see training/loop_hooks.py); on demand it has as many as the loop makes in a call. Evaluations and saves
appear under their names.
"""

from __future__ import annotations

import os
import signal
import threading

from tfdist.control import sections
from tfdist.telemetry.events import Event, Observer, Tell
from tfdist.telemetry.trackers import Run


class Profiler(Observer):
    """Follows the sections of a run, and traces some of them.

    Args:
      steps: (first, last): trace from step `first` to step `last`, where the loop has boundaries; None: on demand only.
      tell: receives the event that says where the trace is.
    """

    def __init__(self, steps: tuple[int, int] | None, run: Run, tell: Tell):
        self._steps, self._run, self._tell = steps, run, tell
        self.folder = run.folder / "tensorboard" / (f"rank-{run.rank}" if run.rank else "")
        self._asked = False
        self._since: int | None = None  # the step at which the current trace began
        self._until = 0
        self._open: list = []
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._on_signal)

    def _on_signal(self, *_) -> None:
        self._asked = True
        os.write(
            2, b"tfdist: SIGUSR2: the next call of the training function is traced.\n"
        )  # print() may deadlock in a handler

    def enter(self, name: str) -> None:
        if name in sections.STEPS and self._since is None:
            self._maybe_start(self._run.step())
        if self._since is None:
            self._open.append(None)
            return
        import tensorflow as tf

        trace = tf.profiler.experimental.Trace
        scope = trace("train", step_num=self._run.step(), _r=1) if name in sections.STEPS else trace(name)
        self._open.append(scope)
        scope.__enter__()

    def leave(self, name: str, failed: bool) -> None:
        if scope := self._open.pop():
            scope.__exit__(None, None, None)
        if self._since is not None and name in sections.STEPS and self._run.step() >= self._until:
            self._stop()

    def _maybe_start(self, step: int) -> None:
        planned = self._steps if self._steps and self._steps[0] <= step < self._steps[1] else None
        if not planned and not self._asked:
            return
        import tensorflow as tf

        # Python's own calls would hide everything else, so python_tracer_level is 0.
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
        )
        tf.profiler.experimental.start(str(self.folder), options)
        self._asked, self._since = False, step
        self._until = planned[1] if planned else step + 1

    def _stop(self) -> None:
        import tensorflow as tf

        since, self._since = self._since, None
        tf.profiler.experimental.stop()
        step = self._run.step()
        self._tell(
            Event(
                "trace",
                step,
                {
                    "message": (
                        f"steps {since} to {step} traced; to view the trace: pip install tensorboard-plugin-profile;"
                        f" tensorboard --logdir={self.folder}"
                    ),
                    "trace/first_step": since,
                    "trace/folder": str(self.folder),
                },
            )
        )

    def close(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if self._since is not None:
            self._stop()


def ignore_signal() -> None:
    """Makes SIGUSR2 do nothing on ranks that do not trace; by default it would end the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
