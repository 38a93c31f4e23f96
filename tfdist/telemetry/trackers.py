"""Trackers: observers of the chief that write for tools which compare runs. --trackers lists them.

A tracker is made by a function `Run -> Observer`. A user's own is given as package.module:function. It may return any
function of an Event, or an object with some of the methods of an `Observer` (events.py).

An attempt after a restart continues the same run: `Run.run_id` is the same, and `Run.resumed_step` says where training
resumed. Tools that cannot delete values (MLflow, Weights & Biases) get each value once. Values that an earlier attempt
had no time to send come from the JSONL log (`Run.replay`). So a curve has each step once, whatever was killed when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, cast

import numpy as np

from tfdist.control.exit_codes import ConfigError, TfdistError
from tfdist.control.terminal import say
from tfdist.plugins import check_takes, own_code, resolve
from tfdist.telemetry.events import Event, Observer, Tell, observer_of
from tfdist.telemetry.jsonl import replay
from tfdist.telemetry.tracker_names import TRACKERS, names_in


@dataclass(frozen=True)
class Run:
    """The facts about the run that observers get."""

    folder: Path
    run_id: str  # the same over all restarts
    attempt: int = 0  # number of earlier starts of the run
    resumed_step: int = 0  # the step from which this attempt continues
    rank: int = 0
    local_rank: int = 0  # among the workers of this machine
    flags: Mapping[str, Any] = field(default_factory=dict)  # flag name -> value, resolved
    weights: Callable[[], Mapping[str, np.ndarray]] = dict  # returns the trainable variables by path, as of now
    step: Callable[[], int] = int  # returns the current step counter

    @property
    def log(self) -> Path:
        """The path of this rank's JSONL log."""
        return self.folder / "logs" / f"rank-{self.rank}.jsonl"

    def replay(self, after: Mapping[str, int] | None = None) -> Iterator[Event]:
        """Yields the train and eval events of earlier attempts up to `resumed_step`, each step once.

        after: kind -> step; events of that kind up to this step are left out.
        """
        return (
            event for event in replay(self.log, self.resumed_step) if event.step > (after or {}).get(event.kind, -1)
        )


def by_path(variables: Iterable[Any]) -> dict[str, np.ndarray]:
    """Returns path -> value. If variables share a path, as in two towers of one function, the second gets "_2"."""
    found: dict[str, np.ndarray] = {}
    for variable in variables:
        name, number = variable.path, 2
        while name in found:
            name, number = f"{variable.path}_{number}", number + 1
        found[name] = variable.numpy()
    return found


def make_trackers(names: str, run: Run, may_fail: bool = False) -> list[Observer]:
    """Makes the trackers of --trackers. may_fail: one that cannot be made is left out, which the terminal shows.

    Otherwise raises ConfigError for an unknown name or a function that makes no observer, UnsupportedError for a
    missing package.
    """
    made = []
    for name in names_in(names):
        try:
            made.append(_made(name, run))
        except TfdistError as error:
            if not may_fail:
                raise
            say(f"WARNING: {str(error).rstrip('.')}. It is switched off, which does not end the run.")
    return made


def _made(name: str, run: Run) -> Observer:
    function = resolve("trackers", name, TRACKERS)
    what = "a tracker is a function (run) that returns a function of an Event (tfdist/telemetry/trackers.py)"
    check_takes("trackers", name, function, ("run",), what)
    with own_code("trackers", name):
        observer = function(replace(run, flags=dict(run.flags)))  # its own copy, which it may change
    if not callable(observer):
        raise ConfigError(f"--trackers={name} returned {observer!r}: {what}.")
    found = observer_of(cast(Tell, observer))
    if found is not observer:  # an Observer has the name of its class
        found.name = f"--trackers={name}"
    return found


def numbers(event: Event) -> dict[str, float]:
    """Returns the values of an event that are numbers."""
    return {
        name: float(value)
        for name, value in event.values.items()
        if isinstance(value, Real) and not isinstance(value, bool)
    }
