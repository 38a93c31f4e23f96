"""Failures and snapshots: how often to save, and what saves and failures cost. Seconds and bytes.

Terms: delta, seconds that training pauses for a save; M, mean time between failures of the whole job; tau, seconds of
training between two saves; R, seconds from a failure until training continues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_COPY_GBS = 10.0  # rate of copying to host memory (assumed)


def young_interval(delta: float, mtbf: float) -> float:
    """tau = sqrt(2 delta M) (Young 1974)."""
    return math.sqrt(2 * delta * mtbf)


def daly_interval(delta: float, mtbf: float) -> float:
    """Daly 2006, equation 37: Young's formula with the next terms of the series, minus the save itself; M if a save
    takes 2 M or longer.
    """
    if delta >= 2 * mtbf:
        return mtbf
    ratio = delta / (2 * mtbf)
    return math.sqrt(2 * delta * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta


@dataclass(frozen=True)
class Reliability:
    """The expected failures and saves of a job."""

    mtbf: float  # of the job, seconds
    checkpoint: float  # bytes
    write: float  # seconds until a snapshot is on disk
    stall: float  # seconds that training waits for it
    interval: float  # best seconds of training between saves (Daly)
    young: float  # the same by Young's formula
    saving: float  # fraction of the time spent waiting for saves
    lost: float  # fraction of the time spent on work lost in failures, and on restarts

    @property
    def availability(self) -> float:
        """Fraction of the time that is training which counts."""
        return max(0.0, 1.0 - self.saving - self.lost)


def reliability(
    checkpoint: float,
    devices: int,
    mtbf_hours: float,
    storage_gbs: float,
    *,
    asynchronous: bool,
    restart: float = 180.0,
) -> Reliability:
    """Describes a job on `devices`, each of which fails (with its share of all else) every `mtbf_hours`.

    asynchronous: training waits only for the copy to host memory (at _COPY_GBS), but saves cannot be closer together
    than a write takes. restart: seconds to start again (assumed).
    """
    mtbf = mtbf_hours * 3600 / devices
    write = checkpoint / (storage_gbs * 1e9)
    stall = checkpoint / (_COPY_GBS * 1e9) if asynchronous else write
    interval = max(daly_interval(stall, mtbf), write if asynchronous else 0.0)
    return Reliability(
        mtbf=mtbf,
        checkpoint=checkpoint,
        write=write,
        stall=stall,
        interval=interval,
        young=young_interval(stall, mtbf),
        saving=stall / (interval + stall),
        lost=min(1.0, (interval / 2 + restart) / mtbf),
    )
