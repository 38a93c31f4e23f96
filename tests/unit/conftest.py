"""What the tests of one module at a time have in common: they trace many small functions and run each a few times."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def graphs_as_traced(request: pytest.FixtureRequest) -> Iterator[None]:
    """TensorFlow's rewriting of graphs is off: a fifth of the time of these tests. It is on in those that ask for
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
    """Graphs are rewritten, as they are for users: for what rewriting could undo."""
