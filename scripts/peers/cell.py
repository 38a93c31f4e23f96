"""One worker of one measurement, as seen from inside: what it is told, which core it has, what it notes down.

Every engine of scripts/bench_peers.py is measured in the same way: it trains windows of `steps` steps and, at the end
of each, when the mean loss of the window is a number on the host, notes the time. Where snapshots are measured it
writes one after the note of every BLOCK-th window; where going on from one is, it restores that first. Import before
anything that starts threads.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from workloads import WORKLOADS, batches

BLOCK = 4  # windows from one snapshot to the next: one that is slowed, one into which writing may last, two to compare


class Cell:
    """This worker's part of a measurement, from the environment that bench_peers.py sets.

    BENCH_CELL: JSON of {"workload", "batch", "steps", "windows", "world", "cores", "variant", "folder", "save",
    "resume"}: `save`: whether to write snapshots; `resume`: the folder of a job that did, from whose newest to go on,
    or "". The rank is BENCH_RANK, or HOROVOD_RANK under horovodrun.
    """

    def __init__(self) -> None:
        told = json.loads(os.environ["BENCH_CELL"])
        self.workload = WORKLOADS[told["workload"]]
        self.batch, self.steps, self.windows = told["batch"], told["steps"], told["windows"]
        self.world, self.variant, self.folder = told["world"], told["variant"], Path(told["folder"])
        self.save, self.resume = told["save"], told["resume"]
        self.snapshots = Path(self.resume or told["folder"], "snapshots")
        self.restored = 0  # steps of the snapshot that was restored
        self.rank = int(os.environ.get("BENCH_RANK") or os.environ.get("HOROVOD_RANK") or 0)
        os.sched_setaffinity(0, {told["cores"][self.rank % len(told["cores"])]})
        self.ends: list[float] = []
        self.losses: list[float] = []

    def batches(self) -> tuple:
        """(x, y), each [S, B, ...]: the ready batches of this worker."""
        return batches(self.workload, self.batch, self.rank, self.world)

    def global_batches(self) -> tuple:
        """(x, y), each [S, B x workers, ...]: those of all workers."""
        return batches(self.workload, self.batch * self.world, 0, 1)

    def window(self, loss: float) -> None:
        """Ends a window. `loss`: its mean, a Python number, so that the work is known to be done."""
        self.ends.append(time.time())
        self.losses.append(float(loss))

    def due(self) -> bool:
        """Whether to write a snapshot, after a window."""
        return self.save and len(self.ends) % BLOCK == 0

    def finish(self, *, parameters: int, flops: int, versions: str) -> None:
        """Writes rank-K.json. `flops`: forward, of one whole batch, counted after the last window."""
        result = {
            "ends": self.ends,
            "losses": self.losses,
            "parameters": int(parameters),
            "flops": int(flops) // self.batch,
            "versions": versions,
            "restored": int(self.restored),
        }
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(result))
