"""A server of S3 for cases that go on from an object store, or whose data are in one: one for the fuzzer's process,
from the first of them on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import uuid
from collections.abc import Mapping
from typing import Any

_starting = threading.Lock()
_environment: dict[str, str] = {}


def reachable(case: Mapping[str, Any]) -> dict[str, Any]:
    """The case with the variables by which workers reach the server, if it needs one."""
    if not case.get("stored") and "data_in_store" not in case:
        return dict(case)
    with _starting:
        if not _environment:
            from tests.stores.s3_server import s3_server  # whose libraries a machine with a GPU may not have

            opened = contextlib.ExitStack()
            _environment.update(opened.enter_context(s3_server()).environment())
            atexit.register(opened.close)
    return {**case, "store": dict(_environment)}


def new_place(case: Mapping[str, Any]) -> str:
    """In a worker: a URL that nobody has used; this process reaches it from now on."""
    from tests.stores.s3_server import BUCKET

    reach(case)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def reach(case: Mapping[str, Any]) -> None:
    """In a worker: this process reaches the server from now on."""
    os.environ.update(case["store"])
