"""Packages that may be missing: the error says how to install them. Most are needed by some features only.

pyproject.toml has an extra for each.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from types import ModuleType
from typing import Any

from tfdist.control import exit_codes
from tfdist.control.exit_codes import UnsupportedError

# Packages that draw random waiting times for a server, mostly in threads.
_OF_STORES = ("aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3")
_OF_TELEMETRY = ("mlflow", "opentelemetry", "wandb")
_OWN_GENERATOR = random.Random()
_ALWAYS = ("absl",)  # needed by every command; for TensorFlow and Keras (and so NumPy) see versions.py


def end_without_packages() -> None:
    """Ends the process if a package that every command needs is missing. Only for the commands' modules, before they
    import the rest."""
    missing = [name for name in _ALWAYS if importlib.util.find_spec(name) is None]
    if not missing:
        return

    def tell(_: list[str]) -> int:
        raise UnsupportedError(
            f"{sys.executable} has no package {missing[0]}, which tfdist needs: activate the environment that tfdist is"
            ' installed in, or install its dependencies with `pip install ".[digits,plots]"` in the folder of its'
            " README.md."
        )

    exit_codes.run_command(tell, [])


def optional_module(module: str, feature: str, packages: str) -> ModuleType:
    """Imports a package that only `feature` needs. Raises UnsupportedError, which says how to install the package."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{feature} needs the Python package {error.name}, which is not installed: pip install {packages}"
        ) from error
    isolate_random()
    return found


def isolate_random() -> None:
    """Makes packages that talk to servers use a separate random generator from now on. Python's global generator must
    give users the sequence that they have seeded: Keras shuffles a PyDataset with it, and seeds layers. Must be called
    again when one of these packages has imported more modules.
    """
    for name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", {})  # not getattr(module, "random"): some import on access
        if name.partition(".")[0] in _OF_STORES + _OF_TELEMETRY and held.get("random") is random:
            held["random"] = _OWN_GENERATOR
    backoff: Any = getattr(sys.modules.get("botocore.retries.standard"), "ExponentialBackoff", None)
    if backoff:  # its default argument is the function itself
        kept = backoff.__init__.__defaults__
        backoff.__init__.__defaults__ = tuple(_OWN_GENERATOR.random if each == random.random else each for each in kept)


def pyplot(feature: str) -> ModuleType:
    """Returns matplotlib.pyplot, set up to write files without a display. Raises UnsupportedError."""
    optional_module("matplotlib", feature, "matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")
