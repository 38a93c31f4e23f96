"""Announces the start of a run: what was composed, what it resumes from, and how long that took."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfdist import flags
from tfdist.build import Job
from tfdist.control.cluster import Cluster
from tfdist.control.run_address import is_url
from tfdist.planner.communication import Link, ring_all_reduce
from tfdist.run.in_memory_checkpoint import WorkerMemory
from tfdist.run.results import source_info
from tfdist.telemetry.events import Event
from tfdist.telemetry.timer import process_seconds


class Announcement:
    """Measures time from its construction. xla: what was found about XLA; "": nothing.

    memory: if this process was in a group of workers before, nothing was imported for this start.
    """

    def __init__(self, memory: WorkerMemory | None = None) -> None:
        is_first = memory is None or memory.groups == 1
        self._began, self._import_s = time.monotonic(), process_seconds() if is_first else 0.0
        self._restoring = self._restored = self._began
        self._messages: Sequence[str] = ()
        self.xla = ""

    def built(self) -> None:
        """Notes that everything is composed; restoring begins."""
        self._restoring = time.monotonic()

    def restored(self, messages: Sequence[str]) -> None:
        """Notes the end of restoring. messages: about what was restored."""
        self._restored, self._messages = time.monotonic(), messages

    def events(self, cluster: Cluster, job: Job, folder: Path, first_step: int) -> Iterator[Event]:
        """The "start" event, and further events about restoring and warnings."""
        runtime, parameters = job.runtime, job.parameters
        stored = f"{job.config.run.run_dir}, working copy " if is_url(job.config.run.run_dir) else ""
        xla = self.xla or ("XLA compiles steps (--nojit_compile: off)" if job.config.model.jit_compile else "")
        message = (
            f"{cluster.describe()}; {runtime.name}; {job.plan.describe()}; {parameters:,} parameters;"
            f"{_gradient_path(job)} run folder {stored}{folder}{xla and '; '}{xla}"
        )
        values = {
            "message": message,
            "parameters": parameters,
            "config_digest": job.config.digest(),
            "replicas": runtime.replicas,
            "workers": runtime.size * runtime.compute_workers,
            "import_s": self._import_s,
            "build_s": self._restoring - self._began,
            "restore_s": self._restored - self._restoring,
            "startup_s": self._import_s + time.monotonic() - self._began,
            "flags": (folder / flags.FLAGS_FILE).read_text() if runtime.rank == 0 else "",
        }
        yield Event("start", first_step, values | source_info(job) | _evaluated(job))
        for message in self._messages:
            yield Event("restore", first_step, {"message": message})
        for message in job.warnings:
            yield Event("warning", first_step, {"message": message})


def _evaluated(job: Job) -> dict[str, int | bool | None]:
    """The number of samples to compare an evaluation's sum of weights with, and whether samples are weighted."""
    if not (split := job.eval_split):
        return {}
    count = split.size and min(split.size, job.config.data.eval_samples or split.size)
    return {"evaluated_samples": count, "eval_weighted": len(split.element_spec) == 3}


def _gradient_path(job: Job) -> str:
    """Describes how gradients travel, and how long that takes according to the planner."""
    path = job.runtime.gradient_path()
    if not path:
        return ""
    planned = ""
    if link := path.link:
        size = sum(4 * math.prod(variable.shape) for variable in job.model.trainable_variables)
        seconds = ring_all_reduce(job.runtime.size, size, Link(link.latency_s, link.bytes_per_second))
        planned = f" ({1e6 * link.latency_s:.0f} us, {link.bytes_per_second / 1e9:.2g} GB/s: planned"
        planned += f" {1000 * seconds:.2g} ms a step)"
    return f" gradients {path.words}{planned};"
