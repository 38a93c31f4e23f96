"""The digits source: 1797 real images of handwritten digits that scikit-learn ships, so it needs no network.

x float32 [8, 8, 1] in 0..1, y int32 in 0..9. Alpaydin and Kaynak 1998, doi 10.24432/C50P49 (its test set, by 13
writers). No options.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tfdist.config import DataConfig
from tfdist.control.exit_codes import UnsupportedError
from tfdist.data.sources.source_facts import DIGIT_SHAPE, DIGITS
from tfdist.data.sources.split import Split, array_split, read_options


def load(config: DataConfig, split: str) -> Split:
    """Holds out every fifth image of each class, in file order, for evaluation: 355 of 1797, whatever the seed."""
    read_options(config, {})
    images, digits = _read()
    held_out = np.zeros(len(digits), bool)
    for digit in range(DIGITS):
        held_out[np.flatnonzero(digits == digit)[4::5]] = True
    rows = held_out if split == "eval" else ~held_out
    return array_split(f"digits/{split}", (images[rows], digits[rows]), num_classes=DIGITS)


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Reads the file itself, because importing scikit-learn takes a second."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UnsupportedError("--source=digits needs scikit-learn: run `pip install scikit-learn`.")
    table = np.loadtxt(
        Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz",
        delimiter=",",
        dtype=np.float32,
    )
    return (table[:, :-1] / 16).reshape(-1, *DIGIT_SHAPE), table[:, -1].astype(np.int32)
