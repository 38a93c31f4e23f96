"""In which order pytest-xdist hands out the files of tests: of those that mostly wait, for a time-out or a store, there
is one at a time, so that two cores always have something to compute. All others are in the order of folders.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

# Measured one by one: they need the processor for less than half of their time.
WAITING = frozenset(
    f"tests/{name}.py"
    for name in (
        "e2e/test_horovod",
        "e2e/test_long_runs",
        "e2e/test_object_store",
        "e2e/test_phases",
        "e2e/test_ray",
        "e2e/test_recovery",
        "e2e/test_slurm",
        "e2e/test_telemetry",
        "multi/test_collectives",
        "multi/test_farewell",
        "multi/test_parameter_server",
        "multi/test_start",
        "unit/artifacts/test_stored_parts",
        "unit/artifacts/test_stored_snapshots",
        "unit/control/test_elastic_job",
        "unit/control/test_launcher",
        "unit/control/test_lease",
        "unit/control/test_preflight",
        "unit/diagnosis/test_trials",
        "unit/run/test_stored_backup",
        "unit/run/test_stored_run",
        "unit/runtime/test_rendezvous",
        "unit/runtime/test_ring",
        "unit/storage/test_object_store",
    )
)


class Turns(LoadFileScheduling):
    """Files as a whole, each to a process that has little left to do."""

    def _assign_work_unit(self, node) -> None:
        self.workqueue.move_to_end(self._next(), last=False)
        super()._assign_work_unit(node)

    def _next(self) -> str:
        """Of the files that nobody has: one that waits if no other such is under way, else one that computes."""
        under_way = (
            file for files in self.assigned_work.values() for file, tests in files.items() if False in tests.values()
        )
        is_waited = not WAITING.isdisjoint(under_way)
        return next((file for file in self.workqueue if (file in WAITING) != is_waited), next(iter(self.workqueue)))
