"""Runs many cases at the same time: groups of processes work side by side, while this process computes the oracle."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from tests.fuzz.pool import Pool
from tests.fuzz.verdict import Verdict, answers_of, conclude

AHEAD = 3  # cases that run in groups at the same time


def judge_all(cases: Iterable[dict[str, Any]], pool: Pool, at_a_time: int = AHEAD) -> Iterator[Verdict]:
    """Yields the verdicts in the order in which the groups finish. The oracle runs in the caller's thread."""
    from tests.fuzz import fit_case, oracle  # noqa: F401 - imported before gc.freeze()

    gc.collect()
    gc.freeze()  # so that a collection does not scan all of TensorFlow
    waiting: queue.Queue = queue.Queue(at_a_time)
    done: queue.Queue = queue.Queue()

    def work() -> None:
        while (case := waiting.get()) is not None:
            try:
                done.put((case, answers_of(case, pool)))
            except BaseException as error:  # noqa: BLE001 - reported by the caller
                done.put((case, [{"failed": f"{type(error).__name__}: {error}"}]))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(at_a_time)]
    for thread in threads:
        thread.start()
    under_way, source, more = 0, iter(cases), True
    try:
        while under_way or more:
            while more and under_way < 2 * at_a_time:
                case = next(source, None)
                more = case is not None
                if more:
                    waiting.put(case)
                    under_way += 1
            if under_way:
                case, answers = done.get()
                under_way -= 1
                yield conclude(case, answers)
    finally:
        for _ in threads:
            waiting.put(None)
