"""scripts/walkthrough.ipynb runs from top to bottom, as a reader would run it; its cells hold their own checks."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.job import ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
NOTEBOOK = Path("scripts/walkthrough.ipynb")


@pytest.mark.timeout(600)  # a minute or two on two idle cores
def test_all_cells_run(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own, which makes pictures of plots
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 6
    assert len(nbformat.writes(notebook)) < 1_000_000
    assert not [
        output
        for output in outputs
        if output.output_type == "stream" and output.name == "stderr" and "Warning" in output.text
    ]


def test_it_is_kept_without_outputs():
    nbformat.validate(notebook := nbformat.read(NOTEBOOK, as_version=4))
    assert not [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]
