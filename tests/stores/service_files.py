"""Lets botocore read its files about S3 once for all tests of a process. Each connection read them anew, which was
three quarters of its start (0.1 s of a core), and tests make hundreds of connections.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import botocore.session
import pytest

_one_loader = functools.cache(botocore.session.create_loader)


@pytest.fixture(autouse=True, scope="module")
def service_files_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(botocore.session, "create_loader", _one_loader)
        yield
