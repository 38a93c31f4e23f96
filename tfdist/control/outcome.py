"""How the processes of a job ended: which one is the cause, and that in words."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tfdist.control.exit_codes import MEANING, ExitCode


class Process(Protocol):
    """What is known of a process that has ended."""

    name: str
    rank: int | None  # None: the evaluator
    code: int | None  # negative: the signal that killed it
    killed: bool  # by us, since it did not end when asked to
    error: str  # the last line with which it named an error
    last_lines: Sequence[str]


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    code: int  # what the launcher exits with
    cause: str  # a sentence; "" if all went well
    exit_codes: dict[str, int]  # by worker name; negative: the signal that killed it
    last_lines: tuple[str, ...] = ()  # what the worker that is the cause wrote last, if its output was not shown
    rank: int | None = None  # of the worker that is the cause


def guilt(worker: Process) -> int:
    """0: it surely failed by itself; the higher, the more likely because a peer was gone or we ended it."""
    if worker.killed or worker.rank is None:
        return 3
    if worker.code in (ExitCode.PEER_LOST, ExitCode.PREEMPTED, -signal.SIGTERM, 128 + signal.SIGTERM):
        return 2
    return 1 if worker.code == -signal.SIGABRT else 0  # TensorFlow aborts some processes whose peers are gone


def describe(worker: Process) -> str:
    """How a worker failed: "worker 1 was killed by signal 9 (SIGKILL)", with what it last said about it."""
    code = worker.code
    if worker.killed:
        return f"{worker.name} did not end when asked to (SIGTERM) and was killed"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "a real-time signal"
        return f"{worker.name} was killed by signal {-code} ({name})"
    known = f" ({ExitCode(code).name}: {MEANING[ExitCode(code)]})" if code in set(ExitCode) else ""
    said = worker.error or next((line.strip() for line in reversed(worker.last_lines) if line.strip()), "")
    said = "" if code == ExitCode.PREEMPTED else re.sub(r" \(exit code \d+, \w+\)$", "", said)
    return f"{worker.name} ended with exit code {code}{known}{': ' + said if said else ''}"
