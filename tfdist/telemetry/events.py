"""The events by which a run tells about itself, and the observers that receive them.

start    once per attempt: message, parameters, config_digest, replicas, workers, flags, data/*; seconds since the
         process began: startup_s, of which import_s, build_s, restore_s
restore  after resuming: message
train    every --log_every steps: train/loss, train/METRIC, train/learning_rate, train/gradient_norm, train/loss_scale,
         train/skipped_steps, perf/steps_per_s, perf/samples_per_s, perf/compute_s, perf/slowest_compute_s,
         perf/slowest_rank, perf/tokens_per_s, perf/model_flops_per_s, perf/mfu, perf/scaling_efficiency (those that are
         known, see rates.py), data/consumed_samples, data/epoch, memory/host_bytes, memory/host_peak_bytes,
         memory/device_bytes, memory/device_peak_bytes, pause/evaluation_s, pause/saving_s (training stood still for it
         since the last); with parameter servers staleness/mean, staleness/max, staleness/dropped and updates by
         staleness, staleness/0, staleness/1, ...
phases   at a log line, if a call was sampled since (--phase_every): seconds per step since the last: phase/NAME_s,
         which add up to the wall time (phases.py); overlap/gradient_sync_s: reduction that the backward pass hid;
         phase_steps: how many steps
verdict  when it is new or has changed, and at the end: message: what holds the run up (verdict.py); final
eval     after an evaluation: eval/loss, eval/METRIC, eval/samples
save     when a snapshot has been written: message, save/bytes, save/write_s, save/step
backup   when a backup has been written: save/bytes, save/write_s, save/step
trace    when a trace has been written: message, trace/first_step, trace/folder
warning  when something needs attention: message
regroup  instead of end, when workers come or go without a restart (--elastic): message
end      once, unless killed: stopped, train_s, eval/*
error    instead of end, if there was time: message
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tfdist.control.terminal import say


@dataclass(frozen=True)
class Event:
    """Something that happened at a step. `time`: Unix seconds."""

    kind: str
    step: int
    values: Mapping[str, Any]
    time: float = field(default_factory=time.time)


# May also have close(), and, to follow what the worker is doing, enter(section) and leave(section, failed).
Observer = Callable[[Event], None]


class FanOut:
    """Passes events on to several observers. One that fails, or wants to end the program, is switched off, loudly:
    training goes on without it. Each has values of its own, which it may change.
    """

    def __init__(self, observers: Iterable[Observer]):
        self.observers = list(observers)

    def __call__(self, event: Event) -> None:
        for observer in list(self.observers):
            try:
                observer(replace(event, values=dict(event.values)))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker's failure must not end the training
                self._switch_off(observer, error)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Tells the observers that want to know of a section of the run (control/sections.py)."""
        self._each("enter", name)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._each("leave", name, failed)

    def close(self) -> None:
        for observer in self.observers:
            try:
                getattr(observer, "close", lambda: None)()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - see __call__
                _tell_of_failure(observer, error)  # and not closed again: it may have taken its time already
        self.observers.clear()

    def _each(self, method: str, *args: Any) -> None:
        for observer in list(self.observers):
            try:
                getattr(observer, method, lambda *_: None)(*args)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - see __call__
                self._switch_off(observer, error)

    def _switch_off(self, observer: Observer, error: BaseException) -> None:
        self.observers.remove(observer)
        with contextlib.suppress(Exception, SystemExit):  # it has failed already; this only frees what it holds
            getattr(observer, "close", lambda: None)()
        _tell_of_failure(observer, error)


def _tell_of_failure(observer: Observer, error: BaseException) -> None:
    name = getattr(observer, "__qualname__", type(observer).__name__)
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed, or its disk full
        say(f"WARNING: {name} failed ({type(error).__name__}: {error}) and is switched off; training goes on.")
