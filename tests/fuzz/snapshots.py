"""Stopped and resumed, in a worker: through the snapshots that a run leaves, on the same runtime or on another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def recovery_of(job, folder: str):
    """What saves and restores the state of a job below `folder`."""
    from tfdist.control.faults import Faults
    from tfdist.run.recovery import Recovery
    from tfdist.telemetry.timer import Clock

    return Recovery(job, Path(folder), Clock(), Faults({}, Path(folder) / "faults"))


def shared(runtime, folder: str) -> str:
    """The chief's folder, on all ranks."""
    return runtime.broadcast([np.frombuffer(folder.encode().ljust(200), np.uint8)])[0].tobytes().decode().strip()


def save(job, folder: str, step: int) -> None:
    """A snapshot, written when this returns on all ranks. Raises AssertionError if it could not be."""
    recovery = recovery_of(job, folder)
    recovery.save(step)
    failure = recovery.files.finish()
    assert not failure, failure
    job.runtime.barrier()


def restore(job, folder: str) -> list:
    """The iterators of a job that goes on from the newest snapshot."""
    recovery = recovery_of(job, folder)
    _, step = recovery.restore()
    assert step, f"nothing to resume from in {folder}"
    return job.iterators(recovery.position(step))


def revert(job, state, arrays: Mapping[str, np.ndarray]) -> None:
    """All state as the chief's `arrays` have it, as Recovery.restore does it. A collective."""
    if job.runtime.rank == 0:
        arrays = state.fitted(arrays)
    else:
        arrays = {key: np.zeros(shape, dtype) for key, (_, shape, dtype) in state.table().items()}
    keys = sorted(arrays)
    state.assign(dict(zip(keys, job.runtime.broadcast([arrays[key] for key in keys]), strict=True)))


def unlike(first: Mapping[str, np.ndarray], second: Mapping[str, Any]) -> list[str]:
    """The names of what is not bit for bit the same."""
    return [
        name
        for name, value in first.items()
        if name.startswith(("model/", "optimizer/")) and not np.array_equal(value, second[name], equal_nan=True)
    ]
