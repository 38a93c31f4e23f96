"""Time limits: the largest that an option may set, and running a function for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable

# The largest value of any option: three years. Larger times overflow in TensorFlow, Python's locks or the kernel, each
# at a different limit.
MOST_SECONDS = 1e8


def for_at_most(seconds: float, function: Callable[[], None]) -> None:
    """Runs `function` in a thread and waits for at most `seconds`; then the thread is left running. So a silent store,
    or a full pipe that nobody reads, does not block the caller."""
    thread = threading.Thread(target=function, name="tfdist-for-at-most", daemon=True)
    thread.start()
    thread.join(seconds)
