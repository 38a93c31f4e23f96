"""Runs jobs of several workers in forks of one process that has imported TensorFlow and not used it: a worker's start
costs nothing.

    python tests/e2e/forks.py JOBS.json      [{"name": ..., "workers": 2, "servers": 0, "arguments": [...]}, ...]

The arguments are those of tfdist.train, or a script and its own, as after the `--` of tfdist.launch. The output of each
worker is written to NAME-RANK.log. Prints {"name": [exit codes]}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from tfdist.control import exit_codes, versions
from tfdist.control.preflight import PortReservation
from tfdist.control.tf_config import worker_environment


def work(job: dict, rank: int, addresses: list[str]) -> None:
    """A worker, to its end."""
    output = os.open(f"{job['name']}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(worker_environment(addresses, rank, 0, os.environ, job.get("servers", 0)))
    command = "script" if job["arguments"][0].endswith(".py") else "train"
    exit_codes.run_command(importlib.import_module(f"tfdist.{command}").main, job["arguments"])


def main(jobs: list[dict]) -> None:
    versions.quiet()
    versions.import_keras()
    for name in ("train", "script", "run.session", "run.parameter_server_run", "keras_fit.api"):
        importlib.import_module(f"tfdist.{name}")
    importlib.import_module("sklearn.datasets")
    ended = {}
    for job in jobs:
        ports = PortReservation(job["workers"] + (1 + job["servers"] if job.get("servers") else 0))
        children = []
        for rank in range(len(ports.addresses)):
            children.append(os.fork())
            if not children[-1]:
                return work(job, rank, ports.addresses)
        ended[job["name"]] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        ports.close()
    print(json.dumps(ended))
    return None


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
