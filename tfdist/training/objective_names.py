"""Objective names, and the functions that make objectives of a ModelConfig. Imports no TensorFlow, so that an unknown
name is reported at once."""

from __future__ import annotations

OBJECTIVES = {
    "classification": "tfdist.training.objectives:of_classes",
    "next_token": "tfdist.training.objectives:of_classes",
    "regression": "tfdist.training.objectives:of_values",
}
