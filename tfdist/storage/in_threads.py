"""Runs several transfers at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

AT_A_TIME = 4


def in_threads(function: Callable[..., None], arguments: Iterable[tuple]) -> None:
    """Calls `function` with each of the arguments, in daemon threads: unlike those of concurrent.futures, they do not
    delay the end of the process. If a call fails, raises its error; calls that have not begun by then are skipped.
    """
    left, failures = queue.SimpleQueue[tuple](), list[BaseException]()
    for each in arguments:
        left.put(each)

    def work() -> None:
        try:
            while not failures:
                function(*left.get_nowait())
        except queue.Empty:
            return
        except BaseException as error:  # on any error, the caller must not believe that all was done
            failures.append(error)

    count = min(left.qsize(), AT_A_TIME)
    threads = [threading.Thread(target=work, name="tfdist-store", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
