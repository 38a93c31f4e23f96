"""An S3 server for cases that resume from an object store or have their data in one. The fuzzer's process starts one
server when it meets the first such case.
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
    """Returns the case with the environment variables through which workers reach the server, if it needs one."""
    if not case.get("stored") and "data_in_store" not in case:
        return dict(case)
    with _starting:
        if not _environment:
            from tests.stores.s3_server import s3_server  # a machine with a GPU may lack its libraries

            opened = contextlib.ExitStack()
            _environment.update(opened.enter_context(s3_server()).environment())
            atexit.register(opened.close)
    return {**case, "store": dict(_environment)}


def new_place(case: Mapping[str, Any]) -> str:
    """In a worker: returns a URL that nobody has used, which this process can reach from now on."""
    from tests.stores.s3_server import BUCKET

    reach(case)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def reach(case: Mapping[str, Any]) -> None:
    """In a worker: makes the server reachable for this process from now on."""
    os.environ.update(case["store"])
