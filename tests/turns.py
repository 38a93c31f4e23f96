"""The order in which pytest-xdist hands out test files: files that mostly wait, for a time-out or a store, run one at a
time, so that two cores always have something to compute. All others run in the order of folders.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

# Measured: they need the processor for less than four tenths of their time. The longest come first, so that none is
# left at the end.
WAITING = tuple(
    f"tests/{name}.py"
    for name in (
        "e2e/test_object_store",
        "unit/artifacts/test_shard_upload",
        "unit/storage/test_object_store",
        "e2e/test_attackers",
        "unit/artifacts/test_remote_snapshots",
        "e2e/test_ray",
        "e2e/test_horovod",
        "e2e/test_long_runs",
        "e2e/test_slurm",
        "e2e/test_bad_inputs",
        "unit/run/test_remote_backup",
        "multi/test_start",
        "multi/test_collectives",
        "mistakes/test_mistakes",
        "e2e/test_phases",
        "unit/control/test_preflight",
        "unit/runtime/ring/test_rendezvous",
        "e2e/test_doctor",
        "e2e/test_stored_backup",
        "e2e/test_plan_memory",
        "unit/diagnosis/test_store_speed",
        "unit/control/test_lease",
        "e2e/test_telemetry",
        "unit/diagnosis/test_trials",
    )
)


class Turns(LoadFileScheduling):
    """Hands out whole files, each to a process that has little left to do."""

    def _assign_work_unit(self, node) -> None:
        self.workqueue.move_to_end(self._next(), last=False)
        super()._assign_work_unit(node)

    def _next(self) -> str:
        """Returns a file that no process has: one that waits if no other such file is running, else one that
        computes.
        """
        under_way = (
            file for files in self.assigned_work.values() for file, tests in files.items() if False in tests.values()
        )
        is_waited = not set(WAITING).isdisjoint(under_way)
        waiting = [file for file in WAITING if file in self.workqueue]
        computing = [file for file in self.workqueue if file not in WAITING]
        return [*computing, *waiting][0] if is_waited else [*waiting, *computing][0]
