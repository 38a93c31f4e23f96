"""The digits source: 1797 real images of handwritten digits that scikit-learn ships, so it needs no network.

x float32 [8, 8, 1] in 0..1, y int32 in 0..9. Alpaydin and Kaynak 1998, doi 10.24432/C50P49 (its test set, by 13
writers). No options.
"""

from __future__ import annotations

import numpy as np

from tfdist.config import DataConfig
from tfdist.control.exit_codes import UnsupportedError
from tfdist.data.sources.base import Split, array_split, read_options


def load(config: DataConfig, split: str) -> Split:
    """Every fifth image of each class, in the file's order, is for evaluation: 355 of 1797. Independent of the seed."""
    read_options(config, {})
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UnsupportedError("--source=digits needs scikit-learn: run `pip install scikit-learn`.") from error
    data = load_digits()
    held_out = np.zeros(len(data.target), bool)
    for digit in range(10):
        held_out[np.flatnonzero(data.target == digit)[4::5]] = True
    rows = held_out if split == "eval" else ~held_out
    images = (data.images[rows] / 16.0).astype(np.float32)[..., None]
    return array_split(f"digits/{split}", (images, data.target[rows].astype(np.int32)), num_classes=10)
