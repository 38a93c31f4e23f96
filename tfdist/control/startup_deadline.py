"""Sets a time limit for the whole start: from the first probe of a peer until all workers are connected.

A peer that has answered its probe may die or stop before TensorFlow (or Horovod, or our own rendezvous) has connected
to it. The wait is then in C++ code, which has no time limit or starts its own from zero. So a thread checks the clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ExitCode, end_process
from tfdist.control.preflight import answers

_PROBES_AT_ONCE = 32
_MARGIN_SECONDS = 0.5  # so that code with the same limit, which knows better what it waits for, ends first


@contextlib.contextmanager
def connecting(cluster: Cluster, timeout: float, began: float | None) -> Iterator[None]:
    """Context manager whose body connects all workers. If it has not ended `timeout` seconds after `began`
    (time.monotonic(); None: now), this process ends with exit code STARTUP and a sentence.

    Does nothing if there is nobody to wait for, or if the process can continue without missing workers (--elastic).
    """
    if cluster.size < 2 or cluster.is_broken is not None:
        yield
        return
    ended = threading.Event()
    left = max(0.0, timeout - (time.monotonic() - began if began is not None else 0.0)) + _MARGIN_SECONDS

    def watch() -> None:
        if not ended.wait(left):
            sentence = too_late(cluster, timeout)
            if not ended.is_set():
                end_process(sentence, ExitCode.STARTUP)

    threading.Thread(target=watch, name="tfdist-connecting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def too_late(cluster: Cluster, timeout: float) -> str:
    """Returns the error sentence, which names the workers that no longer answer, if there are any."""
    others = [rank for rank in range(len(cluster.peers)) if rank != cluster.rank]
    with ThreadPoolExecutor(_PROBES_AT_ONCE, "tfdist-probe") as probes:
        answered = list(probes.map(answers, [cluster.peers[rank] for rank in others]))
    silent = [rank for rank, answers_now in zip(others, answered, strict=True) if not answers_now]
    who = (
        f"{', '.join(map(cluster.name, silent))} answered once, but not since"
        if silent
        else "all ports answer, but a process behind one of them is stopped or stuck, is not a worker of this job, or"
        " was started with another --strategy or --communication"
    )
    return (
        f"The workers were not connected within --startup_timeout={timeout:g} s: {who}. Look at the logs of the others,"
        " start all workers again, or raise --startup_timeout."
    )
