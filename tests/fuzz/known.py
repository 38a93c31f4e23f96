"""Differences that were found, whose causes are known and not mended yet: such cases are not drawn, so that others are seen.

Remove a line when its cause is mended; --with_known draws them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz import space

Case = Mapping[str, Any]
ADDED = {"mean_loss", "activity_loss"}


def _blocks(case: Case) -> set[str]:
    return set(space.flat_blocks(case))


def _weighted(case: Case) -> bool:
    return case["data"]["weights"] != "none"


def _dynamic_sequences(case: Case) -> bool:
    options = case.get("options", {})
    return case["model"]["inputs"] in ("steps", "both") and bool(options) and "data:uneven" in space.features(case)


KNOWN: dict[str, Callable[[Case], bool]] = {
    "variables of several dtypes": lambda case: bool(_blocks(case) & {"float64", "bfloat16", "float16"}),
    "recompute and several outputs": lambda case: "recompute" in case.get("options", {}) and case["model"]["head"] == "dict",
    "gradients without static shape": lambda case: case["runtime"].startswith(("mesh", "horovod")) and _dynamic_sequences(case),
    "masks across cuts": lambda case: ("recompute" in case.get("options", {}) or "pipe" in case.get("options", {}).get("mesh", "")) and case["model"].get("embedding") == "embedding_masked",
    "added sums": lambda case: case["kind"] == "fit" and "sum_loss" in _blocks(case),
    # Here the oracle is wrong: it counts what layers add by weights and not by rows, and sums as means.
    "added losses of micro-batches": lambda case: case["kind"] == "train" and case["options"].get("accumulation", 1) > 1
                                     and ("sum_loss" in _blocks(case) or (_weighted(case) and bool(_blocks(case) & ADDED))),
    "added losses on meshes": lambda case: "pipe" in case.get("options", {}).get("mesh", "") and bool(_blocks(case) & ADDED),
    "state of rows": lambda case: "running_mean" in _blocks(case),
    "decay exclusions on shards": lambda case: "weight_decay_exclude" in case.get("options", {}) and "zero" in case.get("options", {}),
    "masked BatchNormalization": lambda case: case["kind"] == "fit" and "batch_norm" in _blocks(case) and case["model"].get("embedding") == "embedding_masked",
    "large offsets": lambda case: case["kind"] == "fit" and "offset" in case["data"] and "batch_norm" in _blocks(case),
    "clipping of repeated rows": lambda case: case["kind"] == "fit" and "embedding" in case["model"] and bool({"clipnorm", "global_clipnorm", "clipvalue"} & set(case["compile"])),
    "repeated rows of constants": lambda case: case["kind"] == "fit" and "positions" in _blocks(case),
    "own rows": lambda case: case["kind"] == "fit" and "large" in case["fit"],
    "train_steps": lambda case: "class" in case["model"],
}


def why(case: Case) -> str:
    """Which known difference a case would show; "" for none."""
    return next((name for name, shows in KNOWN.items() if shows(case)), "")
