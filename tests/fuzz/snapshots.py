"""Stops and resumes a job in a worker, through the snapshots of a run, on the same runtime or on another one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import stores
from tfdist.control.cluster import Cluster
from tfdist.control.run_address import is_url


@contextlib.contextmanager
def recovery_of(job, place: str) -> Iterator[Any]:
    """Yields what saves and restores the state of a job, below a folder or in an object store. With a store, each rank
    has its own working copy, empty at first, as if each rank were on a machine of its own, and on a new one each time.
    """
    from tfdist.config.run_options import RunConfig
    from tfdist.control.faults import Faults
    from tfdist.run.recovery import Recovery
    from tfdist.run.remote_run import remote_run
    from tfdist.telemetry.timer import Clock

    with contextlib.ExitStack() as held:
        folder = Path(place)
        if is_url(place):
            copy = tempfile.TemporaryDirectory(prefix="tfdist-fuzz-", ignore_cleanup_errors=True)
            folder = Path(held.enter_context(copy))
        options = RunConfig(run_dir=place, store_timeout=60.0)
        stored = held.enter_context(remote_run(options, folder, _cluster(job.runtime), job="fuzz"))
        yield Recovery(job, folder, Clock(), Faults({}, folder / "faults"), stored=stored, memory=None)


def place_of(case, runtime) -> str:
    """Returns a new place for the snapshots of a case: a folder, or the URL of one in an object store. The same on all
    ranks.
    """
    return shared(runtime, stores.new_place(case) if case.get("stored") else tempfile.mkdtemp(prefix="tfdist-fuzz-"))


def _cluster(runtime) -> Cluster:
    """Returns a cluster in which no two ranks see a common folder."""
    addresses = [f"127.0.0.{rank + 1}:1" for rank in range(runtime.size)]
    return Cluster.of_workers(addresses, runtime.rank) if runtime.size > 1 else Cluster()


def shared(runtime, place: str) -> str:
    """Returns the chief's folder or URL on all ranks."""
    return runtime.broadcast([np.frombuffer(place.encode().ljust(200), np.uint8)])[0].tobytes().decode().strip()


@contextlib.contextmanager
def saving(job, place: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that saves a snapshot. Snapshots are written, or sent, when this context ends on all ranks; a
    store also gets one of the start. Raises AssertionError if one could not be written.
    """
    with recovery_of(job, place) as recovery:
        recovery.run_id = "fuzz"

        def save(step: int) -> None:
            recovery.save(step)
            failure = recovery.files.finish()
            assert not failure, failure

        if is_url(place):
            recovery.restore()  # finds nothing, but from now on snapshots are sent
            save(0)
        yield save
    job.runtime.barrier()


def restore(job, place: str, expected: int) -> list:
    """Returns the iterators of a job that resumes from the newest snapshot, which must be of step `expected`."""
    with recovery_of(job, place) as recovery:
        _, step = recovery.restore()
        assert step == expected, f"resumed from step {step} of {place}, not from {expected}"
    return job.iterators(recovery.progress.consumed(step), recovery.stream_cut)


def revert(job, state, arrays: Mapping[str, np.ndarray]) -> None:
    """Sets all state to the chief's `arrays`, as Recovery.restore does. A collective call."""
    if job.runtime.rank == 0:
        arrays = state.fitted(arrays)
    else:
        arrays = {key: np.zeros(shape, dtype) for key, (_, shape, dtype) in state.table().items()}
    keys = sorted(arrays)
    state.assign(dict(zip(keys, job.runtime.broadcast([arrays[key] for key in keys]), strict=True)))


def unlike(first: Mapping[str, np.ndarray], second: Mapping[str, Any]) -> list[str]:
    """Returns the names of the variables that are not bit for bit the same."""
    return [
        name
        for name, value in first.items()
        if name.startswith(("model/", "optimizer/")) and not np.array_equal(value, second[name], equal_nan=True)
    ]
