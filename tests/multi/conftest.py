"""Workers start warm; a test of the start itself asks for `real_start`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_start) -> None: ...
