"""Trackers: the chief's observers that write for tools which compare runs. --trackers lists them.

A tracker is made by a function `Run -> Observer`. A user's own is given as package.module:function, and may return any
function of an Event, or an object with some of the methods of an `Observer` (events.py).

An attempt after a restart goes on with the same run: `Run.run_id` is the same, and `Run.resumed_step` says where
training went on. What a tool cannot take back (MLflow, Weights & Biases) is not told twice; what an earlier attempt had
no time to tell is taken from the JSONL log (`Run.replay`). So a curve has each step once, whatever was killed when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, cast

import numpy as np

from tfdist.control.exit_codes import ConfigError
from tfdist.plugins import check_takes, own_code, resolve
from tfdist.telemetry.events import Event, Observer, Tell, observer_of
from tfdist.telemetry.jsonl import replay
from tfdist.telemetry.tracker_names import TRACKERS, names_in


@dataclass(frozen=True)
class Run:
    """The facts about the run that an observer is told."""

    folder: Path
    run_id: str  # one over all restarts
    attempt: int = 0  # how often the run was started before
    resumed_step: int = 0  # the step from which this attempt goes on
    rank: int = 0
    local_rank: int = 0  # among the workers of this machine
    flags: Mapping[str, Any] = field(default_factory=dict)  # flag name -> value, resolved
    weights: Callable[[], Mapping[str, np.ndarray]] = dict  # the trainable variables now, by path
    step: Callable[[], int] = int  # the step counter now

    @property
    def log(self) -> Path:
        """The path of this rank's JSONL log."""
        return self.folder / "logs" / f"rank-{self.rank}.jsonl"

    def replay(self, after: Mapping[str, int] | None = None) -> Iterator[Event]:
        """The train and eval events of earlier attempts up to `resumed_step`, each step once.

        after: kind -> step; events of that kind up to this step are left out.
        """
        return (
            event for event in replay(self.log, self.resumed_step) if event.step > (after or {}).get(event.kind, -1)
        )


def by_path(variables: Iterable[Any]) -> dict[str, np.ndarray]:
    """Path -> value; of those that share one, as in two towers made by one function, the second has "_2" behind it."""
    found: dict[str, np.ndarray] = {}
    for variable in variables:
        name, number = variable.path, 2
        while name in found:
            name, number = f"{variable.path}_{number}", number + 1
        found[name] = variable.numpy()
    return found


def make_trackers(names: str, run: Run) -> list[Observer]:
    """The trackers of --trackers. Raises ConfigError for an unknown name or a function that makes no observer,
    UnsupportedError for a missing package.
    """
    return [_made(name, run) for name in names_in(names)]


def _made(name: str, run: Run) -> Observer:
    function = resolve("trackers", name, TRACKERS)
    what = "a tracker is a function (run) that returns another one, of an Event (tfdist/telemetry/trackers.py)"
    check_takes("trackers", name, function, ("run",), what)
    with own_code("trackers", name):
        observer = function(replace(run, flags=dict(run.flags)))  # which it may change for itself
    if not callable(observer):
        raise ConfigError(f"--trackers={name} returned {observer!r}: {what}.")
    found = observer_of(cast(Tell, observer))
    if found is not observer:  # else its class has a name
        found.name = f"--trackers={name}"
    return found


def numbers(event: Event) -> dict[str, float]:
    """The values of an event that are numbers."""
    return {
        name: float(value)
        for name, value in event.values.items()
        if isinstance(value, Real) and not isinstance(value, bool)
    }
