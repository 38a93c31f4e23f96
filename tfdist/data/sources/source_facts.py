"""Facts about built-in sources that are known before a source is opened. No TensorFlow: the planner needs them, too."""

from __future__ import annotations

# The digits source.
DIGIT_SHAPE = (8, 8, 1)
DIGITS = 10  # classes
DIGITS_TO_TRAIN = 1442  # samples: four fifths of each class, rounded up

BYTES = 256  # vocabulary size of the text source

SYNTHETIC = {  # options of the synthetic source
    "task": "image",
    "shape": (224, 224, 3),
    "classes": 1000,
    "samples": 1_281_167,
    "eval_samples": 50_000,
    "vocab": 50_257,
    "fixed": False,
}
