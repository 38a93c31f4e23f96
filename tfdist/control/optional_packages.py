"""Packages that may be missing: a sentence says how to install them. Most are needed by some features only.

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

# Packages that draw how long they wait for a server, mostly in threads.
_OF_STORES = ("aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3")
_OF_TELEMETRY = ("mlflow", "opentelemetry", "wandb")
_OWN_GENERATOR = random.Random()
_ALWAYS = ("absl",)  # what every command needs; TensorFlow and Keras, and so NumPy, have their sentences in versions.py


def end_without_packages() -> None:
    """Ends the process if no command can run in it. For modules of commands only, before they import the rest."""
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
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{feature} needs the Python package {error.name}, which is not installed: pip install {packages}"
        ) from error
    isolate_random()
    return found


def isolate_random() -> None:
    """Packages that talk to servers draw from a generator of their own from now on. From Python's global one, the user
    must get what he has seeded: Keras shuffles a PyDataset with it, and seeds layers. To be called again when one of
    them has imported more.
    """
    for name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", {})  # asked directly: some modules import what they are asked for
        if name.partition(".")[0] in _OF_STORES + _OF_TELEMETRY and held.get("random") is random:
            held["random"] = _OWN_GENERATOR
    backoff: Any = getattr(sys.modules.get("botocore.retries.standard"), "ExponentialBackoff", None)
    if backoff:  # which keeps the function itself
        kept = backoff.__init__.__defaults__
        backoff.__init__.__defaults__ = tuple(_OWN_GENERATOR.random if each == random.random else each for each in kept)


def pyplot(feature: str) -> ModuleType:
    """matplotlib.pyplot, for files without a display. Raises UnsupportedError."""
    optional_module("matplotlib", feature, "matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")
