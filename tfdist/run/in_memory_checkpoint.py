"""The state that a worker's process keeps while it leaves one group of workers and joins another (elastic.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.artifacts.policy import TimePolicy
from tfdist.control.membership import Member
from tfdist.control.signals import SignalRequests


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """The state of a run at a step, in host memory; the counterpart of a snapshot on disk."""

    step: int
    arrays: Mapping[str, np.ndarray]
    manifest: Mapping[str, Any]


@dataclass
class WorkerMemory:
    """Objects of a worker's process that outlive a group of workers."""

    member: Member
    signals: SignalRequests
    groups: int = 0  # that it has been in
    checkpoint: InMemoryCheckpoint | None = None
    time_policy: TimePolicy | None = None  # kept, so that a new group does not start counting again


def has_state(memory: WorkerMemory | None) -> bool:
    """Whether this process holds a state to go on from. Then a full disk must not end it."""
    return memory is not None and memory.checkpoint is not None
