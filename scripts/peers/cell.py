"""One worker of one measurement, from inside: its settings, its core, and the results that it records.

Every engine of scripts/bench_peers.py is measured in the same way: it trains windows of `steps` steps. At the end of
each window, once the mean loss is a number on the host, it records the time. To measure snapshots, it writes one after
recording every BLOCK-th window; to measure resuming, it restores a snapshot first. Import this module before anything
that starts threads.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from workloads import WORKLOADS, batches

BLOCK = 4  # windows between snapshots: one that is slowed, one in which writing may continue, two to compare with


class Cell:
    """This worker's part of a measurement, from the environment that bench_peers.py sets.

    BENCH_CELL: JSON of {"workload", "batch", "steps", "windows", "world", "cores", "variant", "folder", "save",
    "resume"}: `save`: whether to write snapshots; `resume`: the folder of a job that did, from whose newest snapshot to
    resume, or "". The rank is BENCH_RANK, or HOROVOD_RANK under horovodrun.
    """

    def __init__(self) -> None:
        told = json.loads(os.environ["BENCH_CELL"])
        self.workload = WORKLOADS[told["workload"]]
        self.batch, self.steps, self.windows = told["batch"], told["steps"], told["windows"]
        self.world, self.variant, self.folder = told["world"], told["variant"], Path(told["folder"])
        self.save, self.resume = told["save"], told["resume"]
        self.snapshots = Path(self.resume or told["folder"], "snapshots")
        self.restored = 0  # step of the restored snapshot
        self.rank = int(os.environ.get("BENCH_RANK") or os.environ.get("HOROVOD_RANK") or 0)
        os.sched_setaffinity(0, {told["cores"][self.rank % len(told["cores"])]})
        self.ends: list[float] = []
        self.losses: list[float] = []

    def batches(self) -> tuple:
        """Returns the prepared batches of this worker: (x, y), each [S, B, ...]."""
        return batches(self.workload, self.batch, self.rank, self.world)

    def global_batches(self) -> tuple:
        """Returns the batches of all workers: (x, y), each [S, B x workers, ...]."""
        return batches(self.workload, self.batch * self.world, 0, 1)

    def window(self, loss: float) -> None:
        """Ends a window. `loss`: its mean loss, as a Python number, which proves that the work is done."""
        self.ends.append(time.time())
        self.losses.append(float(loss))

    def due(self) -> bool:
        """Returns whether to write a snapshot after this window."""
        return self.save and len(self.ends) % BLOCK == 0

    def finish(self, *, parameters: int, flops: int, versions: str) -> None:
        """Writes rank-K.json. `flops`: of the forward pass of one whole batch, counted after the last window."""
        result = {
            "ends": self.ends,
            "losses": self.losses,
            "parameters": int(parameters),
            "flops": int(flops) // self.batch,
            "versions": versions,
            "restored": int(self.restored),
        }
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(result))
