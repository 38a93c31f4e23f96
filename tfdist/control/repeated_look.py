"""A look at something again and again, by a thread, while something else is done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def repeatedly(look: Callable[[], float | None], name: str) -> Iterator[None]:
    """A context in which `look` is called in a thread of that name, and once more at its end. It returns the seconds
    until the next look; None: the thread has seen enough."""
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
