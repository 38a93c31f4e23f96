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


def _dynamic_sequences(case: Case) -> bool:
    options = case.get("options", {})
    return case["model"]["inputs"] in ("steps", "both") and bool(options) and "data:uneven" in space.features(case)


KNOWN: dict[str, Callable[[Case], bool]] = {
    "variables of several dtypes": lambda case: bool(_blocks(case) & {"float64", "bfloat16", "float16"}),
    "gradients without static shape": lambda case: case["runtime"].startswith(("mesh", "horovod")) and _dynamic_sequences(case),
    "summed losses in tfdist.fit": lambda case: case["kind"] == "fit" and "sum_loss" in _blocks(case),
    "state of rows": lambda case: "running_mean" in _blocks(case),
}


def why(case: Case) -> str:
    """Which known difference a case would show; "" for none."""
    return next((name for name, shows in KNOWN.items() if shows(case)), "")
