"""Differences that were found, whose causes are known and not mended yet: such cases are not drawn, so that others are seen.

Remove a line when its cause is mended; --with_known draws them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz import space

Case = Mapping[str, Any]


def _blocks(case: Case) -> set[str]:
    return set(space.flat_blocks(case))


KNOWN: dict[str, Callable[[Case], bool]] = {
    "recompute and several outputs": lambda case: "recompute" in case.get("options", {}) and case["model"]["head"] == "dict",
    "masks across cuts": lambda case: ("recompute" in case.get("options", {}) or "pipe" in case.get("options", {}).get("mesh", "")) and case["model"].get("embedding") == "embedding_masked",
    "summed losses in tfdist.fit": lambda case: case["kind"] == "fit" and "sum_loss" in _blocks(case),
    "weights that are assigned in the forward pass": lambda case: "spectral" in _blocks(case) and "zero" in case.get("options", {}),
    "state of rows": lambda case: "running_mean" in _blocks(case),
}


def why(case: Case) -> str:
    """Which known difference a case would show; "" for none."""
    return next((name for name, shows in KNOWN.items() if shows(case)), "")
