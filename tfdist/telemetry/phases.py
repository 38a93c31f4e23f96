"""The phases of a step, in seconds per worker: means over the steps since the last "phases" event.

data_wait       waiting for the next batch
host_to_device  copying it to the device; 0 on a CPU
forward         forward pass and loss (with tensor parallelism, pipelines and synchronized BatchNorm: including their
                communication)
backward        until the last gradient is there
gradient_sync   from then until all gradients are reduced: reduction not hidden by the backward pass, and waiting for
                slower workers
optimizer       until the weights are updated
other           entering and leaving the training function, logging, everything else between its calls
checkpoint      training paused for a snapshot or a backup
evaluation      training paused for an evaluation

The phases are consecutive and add up to the wall time. Reduction hidden by the backward pass is no phase; it is
reported separately as overlap. Checkpoint, evaluation and, where our own ring reduces, gradient_sync are always
measured, the others in sampled calls of the training function; other calls are assumed to divide in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tfdist.telemetry.timer import Clock


class Phase(IntEnum):
    """A phase; its value is its index in arrays of phases."""

    DATA_WAIT = 0
    HOST_TO_DEVICE = 1
    FORWARD = 2
    BACKWARD = 3
    GRADIENT_SYNC = 4
    OPTIMIZER = 5
    OTHER = 6
    CHECKPOINT = 7
    EVALUATION = 8


PHASES = tuple(phase.name.lower() for phase in Phase)  # names used in events
IN_CALL = (  # phases measured inside the training function, in the order of `Call.phases_s`
    Phase.DATA_WAIT,
    Phase.HOST_TO_DEVICE,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.GRADIENT_SYNC,
    Phase.OPTIMIZER,
)
_PAUSES = {Phase.CHECKPOINT: "saving", Phase.EVALUATION: "evaluation"}  # names of the clock's pauses


@dataclass(frozen=True)
class Call:
    """The times of one call of the training function, in seconds, summed over its steps."""

    steps: int
    wall_s: float
    sync_s: float | None  # gradient synchronization; None: known in sampled calls only
    phases_s: np.ndarray | None  # float64 [len(IN_CALL)]; None: not sampled
    travel_s: float | None  # time in which gradients traveled, hidden or not; None: unknown


class PhaseMeter:
    """Adds up calls, and the pauses of the run's clock, which must be running."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.begin()

    def begin(self, ago_s: float = 0.0) -> None:
        """Forgets everything before `ago_s` seconds ago; there must have been no pause since then."""
        self.clock_s, self.pauses = self.clock.seconds - ago_s, dict(self.clock.pauses)
        self._all: list[Call] = []

    def add(self, call: Call) -> None:
        self._all.append(call)

    @property
    def overlap_s(self) -> float | None:
        """Reduction hidden behind the backward pass, per step; None: unknown, or there is none to hide."""
        known = [
            (call.travel_s, call.sync_s) for call in self._all if call.travel_s is not None and call.sync_s is not None
        ]
        if len(known) < len(self._all) or not any(travel_s for travel_s, _ in known):
            return None
        return max(0.0, sum(travel_s - sync_s for travel_s, sync_s in known)) / sum(call.steps for call in self._all)

    def seconds(self) -> np.ndarray | None:
        """Returns float64 [len(PHASES)]: seconds per step since `begin`; None if no call was sampled."""
        sampled = [(call.wall_s, call.phases_s) for call in self._all if call.phases_s is not None]
        if not sampled:
            return None
        steps, calls_s = sum(call.steps for call in self._all), sum(call.wall_s for call in self._all)
        found = np.zeros(len(PHASES))
        found[list(IN_CALL)] = np.maximum(sum(phases_s for _, phases_s in sampled), 0.0)
        found[Phase.OTHER] = max(0.0, sum(wall_s for wall_s, _ in sampled) - found.sum())
        reduced = [call.sync_s for call in self._all if call.sync_s is not None]
        if len(reduced) < len(self._all):
            found *= calls_s / max(found.sum(), 1e-12)
        else:
            sync_s = min(sum(reduced), calls_s)
            found[Phase.GRADIENT_SYNC] = 0.0
            found *= (calls_s - sync_s) / max(found.sum(), 1e-12)
            found[Phase.GRADIENT_SYNC] = sync_s
        found[Phase.OTHER] += max(0.0, self.clock.seconds - self.clock_s - calls_s)
        for phase, name in _PAUSES.items():
            found[phase] = self.clock.pauses.get(name, 0.0) - self.pauses.get(name, 0.0)
        return found / steps


def values(seconds: np.ndarray, overlap_s: float | None, split: bool) -> dict[str, float]:
    """Returns the values of a "phases" event. split: whether forward and backward pass can be told apart."""
    named = dict(zip(PHASES, seconds.tolist(), strict=True))
    if not split:
        named = {
            ("forward_backward" if name == "forward" else name): (
                value + (named["backward"] if name == "forward" else 0.0)
            )
            for name, value in named.items()
            if name != "backward"
        }
    found = {
        f"phase/{name}_s": value for name, value in named.items() if value or name in ("data_wait", "gradient_sync")
    }
    return found | ({"overlap/gradient_sync_s": overlap_s} if overlap_s is not None else {})
