"""Packages that may be missing: a sentence says how to install them. Most are needed by some features only.

pyproject.toml has an extra for each.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from tfdist.control import exit_codes
from tfdist.control.exit_codes import UnsupportedError

_ALWAYS = ("absl",)  # what every command needs; TensorFlow and Keras, and so NumPy, have their sentences in versions.py


def end_without_packages() -> None:
    """For modules of commands only, before they import the rest: ends the process if it cannot run any command."""
    missing = [name for name in _ALWAYS if importlib.util.find_spec(name) is None]
    if not missing:
        return

    def tell(_: list[str]) -> int:
        raise UnsupportedError(
            f"{sys.executable} has no package {missing[0]}, which tfdist needs: activate the environment that tfdist is"
            ' installed in, or install what it needs with `pip install ".[digits,plots]"` in the folder of its'
            " README.md."
        )

    exit_codes.run_command(tell, [])


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
