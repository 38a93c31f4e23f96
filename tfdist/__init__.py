"""tfdist: a distributed trainer for Keras 3 models on TensorFlow. Importing it imports no TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.keras_fit.api import barrier, evaluate, fit, init, is_chief, predict, spread

__version__ = "0.1.0"
__all__ = ["barrier", "evaluate", "fit", "init", "is_chief", "predict", "spread"]


def __getattr__(name: str) -> Any:
    """Imports the functions for Keras scripts at their first use."""
    if name not in __all__:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    from tfdist.keras_fit import api

    return getattr(api, name)
