"""Makes a copy of the repository with a deliberate fault in it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def faulty_copy(file: str = "", text: str = "", other: str = "") -> Iterator[Path]:
    """Yields the folder of a copy in which `text`, in `file` below tfdist, is replaced by `other`. Without `file`, the
    copy is unchanged.

    Raises ValueError if the file does not hold `text` exactly once.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-fault-") as folder:
        copy = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", "runs")
        shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=ignored)
        if file:
            path = copy / "tfdist" / file
            before = path.read_text()
            if before.count(text) != 1:
                raise ValueError(f"tfdist/{file} does not hold this text exactly once any more: {text!r}")
            path.write_text(before.replace(text, other))
        yield copy
