"""Fixtures of the tests of single modules, which trace many small functions and run each a few times."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def graphs_as_traced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turns off TensorFlow's rewriting of graphs: a fifth of the time of these tests. It is on in tests that ask for
    `rewritten_graphs`, and in all that start processes: parity, conformance, whole jobs, drawn combinations.
    """
    if (tensorflow := sys.modules.get("tensorflow")) is None:  # importing it takes seconds
        yield
        return
    options = tensorflow.config.optimizer.set_experimental_options
    options({"disable_meta_optimizer": "rewritten_graphs" not in request.fixturenames})
    yield
    options({"disable_meta_optimizer": False})


@pytest.fixture
def rewritten_graphs() -> None:
    """Leaves the rewriting of graphs on, as it is for users: for tests of what rewriting could undo."""
