"""What is given so long and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Of any option: three years. Beyond it TensorFlow, Python's locks and the kernel, each at a number of its own, count no
# further.
MOST_SECONDS = 1e8


def for_at_most(seconds: float, function: Callable[[], None]) -> None:
    """Does something in a thread, which is left alone after some time: a store that is silent, or a pipe that is full
    and not read, holds nobody else up."""
    thread = threading.Thread(target=function, name="tfdist-for-at-most", daemon=True)
    thread.start()
    thread.join(seconds)
