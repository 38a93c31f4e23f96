"""Data sources of the end-to-end tests, given to tfdist as `tests.e2e.sources:NAME`."""

from __future__ import annotations

import numpy as np

CLASSES = 4


def _samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, count).astype("int32")
    return (np.eye(CLASSES, 8)[y] + random.normal(scale=0.5, size=(count, 8))).astype("float32"), y


def clean(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Four noisy clusters."""
    return _samples(600 if split == "train" else 101, seed=split == "train")


def with_overflow(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same, with one sample (number 70) that overflows in float16."""
    x, y = clean(split)
    if split == "train":
        x[70] = 1e30
    return x, y


def with_nan(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same, with one sample (number 70) that is not a number."""
    x, y = clean(split)
    if split == "train":
        x[70] = np.nan
    return x, y


def empty(split: str) -> tuple[np.ndarray, np.ndarray]:
    """No samples."""
    return np.zeros([0, 8], "float32"), np.zeros([0], "int32")
