"""What tfdist is given as --model and --source: those of the case that this process runs at the moment."""

from __future__ import annotations

from tests.fuzz import data, models

case: dict = {}
rank = 0  # of this process


def model():
    return models.build(case["model"])


def source(split: str):
    return data.as_source(case, split, rank)
