"""A process of a job, how it ended, and whether it is the cause of the job's failure."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections import deque
from dataclasses import dataclass, field

from tfdist.control.exit_codes import MEANING, PASSED_ON, ExitCode
from tfdist.control.processes import send_signal

_LAST_LINES = 20
# Lines that do not explain a failure: empty lines; indented ones (source lines of tracebacks and warnings); warnings of
# Python itself.
_NO_CAUSE = re.compile(r"\s|$|\S+:\d+: \w*Warning: ")


@dataclass
class Worker:
    """A process of the job."""

    name: str  # "worker 0"
    rank: int | None  # None: the evaluator
    shown: bool
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    error: str = ""  # the last line in which it named an error
    ended_at: float = 0.0
    killed: bool = False  # by us, since it did not end when asked to
    lost: str = ""  # set if the node or actor that it ran on is gone: a phrase that says how
    relay: threading.Thread = field(init=False)  # copies its output; set before the worker is added to the job

    @property
    def code(self) -> int | None:
        """The exit code. None: still running; negative: the signal that killed it."""
        raise NotImplementedError

    @property
    def exit_code(self) -> int:
        """The exit code of a worker that has ended."""
        assert self.code is not None, self.name
        return self.code

    @property
    def slot(self) -> int:
        """The rank of a worker that trains."""
        assert self.rank is not None, self.name
        return self.rank

    def signal(self, number: int) -> None:
        """Sends a signal to the process, and SIGKILL to its child processes too."""
        raise NotImplementedError


@dataclass
class LocalWorker(Worker):
    """A process of this machine."""

    process: subprocess.Popen = field(kw_only=True)

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def signal(self, number: int) -> None:
        send_signal(self.process, number)


@dataclass(frozen=True)
class JobResult:
    """The result of a job."""

    code: int  # exit code of the launcher
    cause: str  # a sentence; "" if the job succeeded
    exit_codes: dict[str, int]  # by worker name; negative: the signal that killed it
    last_lines: tuple[str, ...] = ()  # last output of the worker that caused the failure, if not shown
    rank: int | None = None  # of the worker that caused the failure; None also if it is the evaluator
    trained: bool = False  # all workers have ended with 0, and only the evaluator has failed


def root_cause_order(worker: Worker) -> int:
    """Sort key: 0 if the worker surely failed by itself; the higher, the more likely a peer was gone or we ended it."""
    if worker.killed or worker.rank is None:
        return 3
    if worker.lost:
        return 0
    consequences = (ExitCode.PEER_LOST, ExitCode.PREEMPTED, -signal.SIGTERM, 128 + signal.SIGTERM)
    if worker.code in consequences or worker.error.endswith(f", {PASSED_ON})"):
        return 2
    return 1 if worker.code == -signal.SIGABRT else 0  # TensorFlow aborts some processes whose peers are gone


def describe(worker: Worker) -> str:
    """Returns a phrase that says how a worker failed, with its last message about it if there is one.

    For example: "worker 1 was killed by signal 9 (SIGKILL)".
    """
    if worker.killed:
        return f"{worker.name} did not end when asked to (SIGTERM) and was killed"
    if worker.lost:
        return f"{worker.name} {worker.lost}"
    code = worker.exit_code
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "a real-time signal"
        return f"{worker.name} was killed by signal {-code} ({name})"
    known = f" ({_meaning(code, worker.error)})" if code in set(ExitCode) else ""
    causes = (line.strip() for line in reversed(worker.last_lines) if not _NO_CAUSE.match(line))
    said = worker.error or next(causes, "")
    said = "" if code == ExitCode.PREEMPTED else re.sub(rf" \(exit code \d+, \w+(, {PASSED_ON})?\)$", "", said)
    return f"{worker.name} ended with exit code {code}{known}{': ' + said if said else ''}"


def _meaning(code: int, error: str) -> str:
    """Returns the meaning of an exit code in tfdist. error: the last error sentence of tfdist that the process has
    written. Such a sentence ends with tfdist's code; if it does not, the code may be that of a user's script."""
    meaning = f"{ExitCode(code).name}: {MEANING[ExitCode(code)]}"
    by_tfdist = f"(exit code {code}, " in error or code in (ExitCode.INTERNAL, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
    return meaning if by_tfdist else f"the script's own, or {meaning}"
