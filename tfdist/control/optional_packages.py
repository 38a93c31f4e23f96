"""Packages that only some features need: one that is missing is a sentence which says how to install it.

pyproject.toml has an extra for each.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from tfdist.control.exit_codes import UnsupportedError


def optional_module(module: str, feature: str, packages: str) -> ModuleType:
    """Imports a package that only `feature` needs. Raises UnsupportedError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{feature} needs the Python package {error.name}, which is not installed: pip install {packages}"
        ) from error


def pyplot(feature: str) -> ModuleType:
    """matplotlib.pyplot, for files without a display. Raises UnsupportedError."""
    optional_module("matplotlib", feature, "matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")
