"""Runs tests/gpu/mesh_worker.py and fit_worker.py, and collects what all ranks found."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.e2e.job import ENVIRONMENT
from tests.gpu.graph_audit import Audit
from tfdist.launcher.local_job import LocalJob
from tfdist.runtime.launch_order import Launch


class MeshReport(NamedTuple):
    """The findings on one mesh, for each rank."""

    audits: Sequence[Audit]
    launches: Mapping[int, Sequence[Launch]]


def of_meshes(workers: int, folder: Path, rows: Sequence[str] = ()) -> dict[str, MeshReport]:
    """row -> what its ranks found. rows: which of the rows for this number of workers; empty: all. Raises RuntimeError
    with the output of workers that failed.
    """
    return _reports("tests.gpu.mesh_worker", workers, folder, ",".join(rows))


def of_fits(workers: int, folder: Path, rows: Sequence[str] = ()) -> dict[str, MeshReport]:
    """The same for tfdist.fit."""
    return _reports("tests.gpu.fit_worker", workers, folder, ";".join(rows))


def _reports(module: str, workers: int, folder: Path, rows: str) -> dict[str, MeshReport]:
    output = io.StringIO()
    command = [sys.executable, "-m", module, str(folder), *([rows] if rows else [])]
    job = LocalJob(command, workers, folder / "logs", pin=False, environment=ENVIRONMENT, output=output)
    job.start()
    if job.wait().code:
        raise RuntimeError(output.getvalue())
    names = sorted({file.stem.rpartition("-")[0] for file in folder.glob("*.json")})
    return {
        name: _report([json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(workers)])
        for name in names
    }


def _report(of_ranks: Sequence[dict]) -> MeshReport:
    return MeshReport(
        [Audit.from_dict(report["audit"]) for report in of_ranks],
        {
            rank: [Launch(group, number, tuple(ranks), kind) for group, number, ranks, kind in report["launches"]]
            for rank, report in enumerate(of_ranks)
        },
    )
