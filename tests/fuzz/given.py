"""The functions for --model and --source: they return the model and the data of the case that this process runs."""

from __future__ import annotations

from tests.fuzz import data, models

case: dict = {}
rank = 0  # of this process


def model():
    return models.build(case["model"])


def source(split: str):
    return data.as_source(case, split, rank)
