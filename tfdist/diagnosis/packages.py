"""Checks Python and packages: are they versions with which tfdist has been shown to work?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata

from tfdist.control import versions
from tfdist.control.exit_codes import UnsupportedError
from tfdist.diagnosis.findings import Finding, fine, wrong

_SHOWN = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "nvidia-cudnn-cu12", "nvidia-nccl-cu12")


def packages(
    python: tuple[int, int] = sys.version_info[:2], installed: Callable[[str], str] = metadata.version
) -> Finding:
    """Checks the versions. installed: name -> version; raises PackageNotFoundError."""
    found = {name: version for name in _SHOWN if (version := version_of(name, installed))}
    try:
        versions.check(python, installed)
    except UnsupportedError as error:
        what, _, fix = str(error).rpartition(": ")
        return wrong("versions", f"{what}.", fix)
    words = [f"Python {python[0]}.{python[1]}", *(f"{name} {version}" for name, version in found.items())]
    return fine("versions", ", ".join(words))


def version_of(name: str, installed: Callable[[str], str] = metadata.version) -> str:
    """Returns the version of a package, "" if it is not installed."""
    try:
        return installed(name)
    except metadata.PackageNotFoundError:
        return ""
