"""The names of the objectives, and what makes them of a ModelConfig. No TensorFlow: an unknown name is told at once."""

from __future__ import annotations

OBJECTIVES = {
    "classification": "tfdist.training.objectives:of_classes",
    "next_token": "tfdist.training.objectives:of_classes",
    "regression": "tfdist.training.objectives:of_values",
}
