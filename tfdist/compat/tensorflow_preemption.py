"""TensorFlow's own watchers of a platform's notices (TensorFlow 2.21)."""

from __future__ import annotations


def google_announces_termination() -> bool:
    """Whether Google Compute Engine's metadata server says that this machine will end. Relies on tensorflow.python's
    `termination_watcher_function_gce`; without it a run there first hears of its end by SIGTERM. Raises OSError where
    the server does not answer.
    """
    from tensorflow.python.distribute.failure_handling import failure_handling_util

    return failure_handling_util.termination_watcher_function_gce()
