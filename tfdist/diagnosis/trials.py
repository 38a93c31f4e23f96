"""Runs tests that may crash or hang (trial.py) in a separate process, and reports how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.diagnosis.findings import Finding, fine, wrong
from tfdist.diagnosis.gpus import Build

_NAME = "arithmetic"
TRIAL = (sys.executable, "-m", "tfdist.diagnosis.trial")
SECONDS = 300.0  # for each GPU: twelve functions, six of which XLA compiles


def arithmetic(command: Sequence[str] = TRIAL, seconds: float = SECONDS) -> tuple[Build | None, list[Finding]]:
    """Tries arithmetic. Returns TensorFlow's build (None: it could not be asked), and findings on how it computes."""
    output, end = _run(command, seconds)
    records = [line for line in map(_as_dict, output.splitlines()) if line]
    cudnn = next((str(line["cudnn"]) for line in records if "cudnn" in line), "")
    build = next((Build.from_dict({**line["build"], "cudnn": cudnn}) for line in records if "build" in line), None)
    tried = [line for line in records if "name" in line]
    failed = [
        wrong(_NAME, f"{line['name']}: {line['error']}", "see docs/gpus.md, known traps.")
        for line in tried
        if "error" in line
    ]
    if end:
        last = tried[-1]["name"] if tried else "the import of TensorFlow"
        words = [line for line in output.splitlines() if line and not _as_dict(line)]
        failed.append(
            wrong(
                _NAME,
                f"{end} after {last}. Its last output: {words[-1][:200] if words else 'nothing'}",
                "try `python -m tfdist.diagnosis.trial`; if a driver hangs, nvidia-smi -r or a reboot.",
            )
        )
    if not failed:
        slowest = max((line["seconds"] for line in tried), default=0.0)
        failed = [fine(_NAME, f"{len(tried)} trials are right; the slowest took {1e3 * slowest:.1f} ms")]
    return build, failed


def all_reduce(workers: int, communication: str = "nccl", seconds: float = SECONDS) -> Finding:
    """Tries an all-reduce between processes on this machine, each with its own GPU, as in training."""
    name, size = f"all-reduce by {communication}", 16 * 2**20
    with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as folder:
        flags = [f"--workers={workers}", f"--runtimes=multi_worker:{communication}", "--collectives=all_reduce"]
        flags += [f"--smallest={size // 16}", f"--largest={size}", "--factor=16", "--repeats=3", f"--out={folder}"]
        output, end = _run([sys.executable, "-m", "tfdist.comm", *flags], seconds)
    if end:
        last = [line for line in output.splitlines() if line.strip()][-1:]
        return wrong(
            name,
            f"{end}. Its last output: {last[0][:300] if last else 'nothing'}",
            "set NCCL_DEBUG=INFO and look for the interface that it takes (NCCL_SOCKET_IFNAME), and at /dev/shm.",
        )
    return fine(name, f"{workers} processes on this machine")


def _as_dict(line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(line), dict):
            return found
    return {}


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Returns (output, how the command ended; "" if well). No process of it remains, even if SIGTERM ends this one."""

    def end(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with _killed(process):
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired as error:
                said = error.stdout or b""
                return said.decode(errors="replace") if isinstance(said, bytes) else said, f"it hung for {seconds:g} s"
    finally:
        signal.signal(signal.SIGTERM, before)
    code = process.returncode
    if code < 0:
        return output, f"it was killed by signal {-code} ({signal.Signals(-code).name})"
    return output, f"it ended with exit code {code}" if code else ""


@contextlib.contextmanager
def _killed(process: subprocess.Popen) -> Iterator[None]:
    """Kills the process and everything that it has started, at the end."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
