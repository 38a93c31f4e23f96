"""Results of calls that TensorFlow's ClusterCoordinator has made."""

from __future__ import annotations

from typing import Any


def wait_for(value: Any) -> None:
    """Returns when the call is done; raises its error. Relies on `RemoteValueImpl._wait_and_maybe_error`; without it an
    error of the call cannot be told from one of fetching its result, and a batch that was trained on might be made
    again.
    """
    value._wait_and_maybe_error()
