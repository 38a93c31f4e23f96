"""Calls a function repeatedly in a thread while other code runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def repeatedly(look: Callable[[], float | None], name: str) -> Iterator[None]:
    """Context manager: calls `look` repeatedly in a thread with this name, and once more at exit. `look` returns the
    seconds until its next call; None ends the thread."""
    done = threading.Event()

    def repeat() -> None:
        while (pause := look()) is not None and not done.wait(pause):
            pass

    watcher = threading.Thread(target=repeat, name=name, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        look()
