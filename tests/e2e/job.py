"""Starts `tfdist.launch` and `tfdist.train` as a user would, for the end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.warm_start import ZYGOTE
from tfdist.telemetry.jsonl import read_jsonl

_CHANCE = random.SystemRandom()  # processes of tests may share a seed
# One thread each: the tests share few cores.
ENVIRONMENT = {
    **os.environ,
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]),
}
ENVIRONMENT.pop("TF_CONFIG", None)

CLUSTERS = [
    "--source=tests.e2e.sources:clean",
    "--model=mlp",
    "--model_args=widths=(16,),dropout=0.1",
    "--global_batch=24",
    "--learning_rate=0.01",
    "--log_every=10",
    "--export=none",
    "--noplot",
    "--save_minutes=0",
]
# The same without evaluations, phases and TensorBoard, for tests that do not look at them: what is traced for these
# takes a third of a short worker's time.
TRAINED = [*CLUSTERS, "--eval_every=-1", "--phase_every=0", "--trackers=none"]
# The records of this job show which samples were in each global batch.
IDENTIFIED = [
    *TRAINED,
    "--source=tests.e2e.sources:identified",
    "--objective=tests.e2e.sources:identifying",
    "--model_args=widths=(16,),num_outputs=2",
    "--optimizer=momentum",
]


def start(
    workers: int, flags: list[str], launch_flags: tuple[str, ...] = (), environment: dict | None = None
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist.launch", f"--workers={workers}", *launch_flags, "--", *flags],
        env={**ENVIRONMENT, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(
    workers: int, flags: list[str], *, code: int = 0, launch_flags: tuple[str, ...] = (), timeout: float = 240
) -> str:
    """Runs a job that must end with `code`. Returns its output."""
    process = start(workers, flags, launch_flags)
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, f"exit code {process.returncode} instead of {code}:\n{output}"
    return output


def train(flags: list[str], environment: dict | None = None, timeout: float = 240) -> subprocess.CompletedProcess:
    """Runs one `tfdist.train` without a launcher."""
    return subprocess.run(
        [sys.executable, "-m", "tfdist.train", *flags],
        env={**ENVIRONMENT, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def records(run_dir: Path, rank: int = 0, kind: str | None = None) -> list[dict]:
    return [record for record in read_jsonl(run_dir / "logs" / f"rank-{rank}.jsonl") if kind in (None, record["kind"])]


def snapshot(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Returns all that a snapshot holds."""
    from tfdist.artifacts.snapshot_folder import SnapshotFolder

    store = SnapshotFolder(str(run_dir / "checkpoints"))
    return store.read(store.verify(step))


def wait_for(condition, timeout: float = 120, pause: float = 0.1) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(pause)


def workers_training(run_dir: Path) -> int:
    """Returns how many workers the current attempt has, once it trains; 0 before."""
    workers = 0
    for record in read_jsonl(run_dir / "logs" / "rank-0.jsonl"):
        if record["kind"] == "start":
            started, workers = record["values"]["workers"], 0
        elif record["kind"] == "train":
            workers = started
    return workers


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, the oldest first. (Process ids are not in this order, once they
    have started again at the lowest.)
    """
    found = []
    for other in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since, and was waited for
            name, _, rest = Path(f"/proc/{other}/stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            if int(fields[1]) == pid and name != ZYGOTE:
                found.append((int(fields[19]), int(other)))  # when it was started
    return [child for _, child in sorted(found)]


def batches(run_dir: Path) -> dict[int, tuple]:
    """Step -> checksums of the samples of its global batch.

    A step that was repeated must have seen the same samples.
    """
    seen: dict[int, tuple] = {}
    for record in records(run_dir, kind="train"):
        values = (
            record["values"]["train/first_checksum"],
            record["values"]["train/second_checksum"],
            record["values"]["data/consumed_samples"],
        )
        assert seen.setdefault(record["step"], values) == values, (
            f"step {record['step']} was done again with other samples"
        )
    return seen


def free_ports(count: int) -> int:
    """Returns the first of `count` free ports in a row, below the range from which the system assigns ports: it might
    assign them to others before they are used.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = _CHANCE.randrange(10_000, lowest - count) if lowest > 11_000 else _CHANCE.randrange(20_000, 60_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
            return first
        except OSError:
            continue
