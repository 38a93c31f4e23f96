"""The events that a run emits, and the observers that receive them.

start    once per attempt: message, parameters, config_digest, replicas, workers, flags, data/*; in seconds since the
         process began: startup_s; its parts: import_s, build_s, restore_s
placement  with parameter servers, once per attempt: message: how batches and weights are divided
restore  after resuming: message
train    every --log_every steps: train/loss, train/METRIC, train/learning_rate (of the next step),
         train/gradient_norm, train/loss_scale, train/skipped_steps, perf/steps_per_s, perf/samples_per_s,
         perf/compute_s, perf/slowest_compute_s, perf/slowest_rank, perf/tokens_per_s, perf/model_flops_per_s,
         perf/mfu, perf/scaling_efficiency (those that are known, see rates.py), data/consumed_samples, data/epoch,
         memory/host_bytes, memory/host_peak_bytes, memory/device_bytes, memory/device_peak_bytes, pause/evaluation_s,
         pause/saving_s (how long training paused for it since the last train event); with parameter servers
         staleness/mean, staleness/max, staleness/dropped, and the number of updates by
         staleness: staleness/0, staleness/1, ...
phases   at a log line, if a call was sampled since the last one (--phase_every): seconds per step since then:
         phase/NAME_s, which add up to the wall time (phases.py); overlap/gradient_sync_s: reduction hidden behind the
         backward pass; phase_steps: number of steps
verdict  when it is new or has changed, and at the end: message: what slows the run down (verdict.py); final
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


Tell = Callable[[Event], None]  # a receiver of events: an observer, or any function


class Observer:
    """Follows a run. Each method does nothing until it is overridden.

    A user's own observer need not inherit from this class: `observer_of` accepts any function of an event, and objects
    that also have some of the other methods.
    """

    name = ""  # shown in messages; "": the name of its class

    def __call__(self, event: Event) -> None:
        """Receives an event."""

    def enter(self, name: str) -> None:
        """The worker enters a section of the run (control/sections.py)."""

    def leave(self, name: str, failed: bool) -> None:
        """The worker leaves the section. failed: by an exception."""

    def close(self) -> None:
        """Called when no more events follow."""


class _Own(Observer):
    """Wraps a user's own observer, with those methods that it has."""

    def __init__(self, own: Tell):
        self._own = own
        self.name = getattr(own, "__qualname__", type(own).__name__)

    def __call__(self, event: Event) -> None:
        self._own(event)

    def enter(self, name: str) -> None:
        self._if_there("enter", name)

    def leave(self, name: str, failed: bool) -> None:
        self._if_there("leave", name, failed)

    def close(self) -> None:
        self._if_there("close")

    def _if_there(self, method: str, *args: Any) -> None:
        getattr(self._own, method, lambda *_: None)(*args)


def observer_of(tell: Tell) -> Observer:
    """Returns `tell` itself if it is an Observer, else an Observer that calls it and whichever methods it has."""
    return tell if isinstance(tell, Observer) else _Own(tell)


class FanOut(Observer):
    """Passes events and sections on to several observers. An observer that fails, or tries to end the program, is
    switched off with a warning, which does not end the run. Each gets its own copy of the values, which it may change.
    """

    def __init__(self, observers: Iterable[Tell]):
        self.observers = [observer_of(each) for each in observers]

    def __call__(self, event: Event) -> None:
        self._each(lambda observer: observer(replace(event, values=dict(event.values))))

    def enter(self, name: str) -> None:
        self._each(lambda observer: observer.enter(name))

    def leave(self, name: str, failed: bool) -> None:
        self._each(lambda observer: observer.leave(name, failed))

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Context manager for a section of the run."""
        self.enter(name)
        failed = True
        try:
            yield
            failed = False
        finally:
            self.leave(name, failed)

    def close(self) -> None:
        while self.observers:
            observer = self.observers[-1]  # last to first: what it reports at its end reaches those before it
            try:
                observer.close()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - see _each
                _report_failure(observer, error)  # not closed again: that may have taken its time already
            self.observers = [each for each in self.observers if each is not observer]

    def _each(self, do: Callable[[Observer], None]) -> None:
        for observer in list(self.observers):
            try:
                do(observer)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker's failure must not end the training
                self.observers.remove(observer)
                with contextlib.suppress(Exception, SystemExit):  # it has failed; this only frees its resources
                    observer.close()
                _report_failure(observer, error)


def _report_failure(observer: Observer, error: BaseException) -> None:
    name = observer.name or type(observer).__name__
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed, or its disk full
        say(
            f"WARNING: {name} failed ({type(error).__name__}: {error}) and is switched off, which does not end the run."
        )
