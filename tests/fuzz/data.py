"""The data of a case: made from its description, alike in every process; and as each kind of source that tfdist
takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fuzz.models import LENGTH, SIDE, VOCABULARY, WIDTH

EVAL_SIZE = 13


def arrays(case: Mapping[str, Any], split: str = "train") -> tuple:
    """(x, y) or (x, y, w) of a split."""
    data, model = case["data"], case["model"]
    random = np.random.default_rng([case["seed"], split == "train", data.get("draw", 0)])
    size = data["size"] if split == "train" else EVAL_SIZE
    table = 300 if model.get("embedding") == "embedding_large" else VOCABULARY
    x = _inputs(model["inputs"], size, table, data, random)
    if data.get("duplicates"):
        x = {name: values[random.integers(0, max(2, size // 4), size)] for name, values in x.items()}
    if data.get("nan") is not None and split == "train" and "a" in x:
        x["a"][data["nan"] % size] = np.nan
    y = _targets(model, size, random)
    parts = [x if model["inputs"] == "both" else next(iter(x.values())), y]
    if data["weights"] != "none":
        shape = (size, LENGTH) if data["weights"].startswith("token") else (size,)
        w = random.uniform(0.2, 3.0, shape).astype("float32")
        if data["weights"].endswith("zeros"):
            w *= random.random(shape) < 0.6
        parts.append(w)
    return tuple(parts)


def _inputs(
    kind: str, size: int, table: int, data: Mapping[str, Any], random: np.random.Generator
) -> dict[str, np.ndarray]:
    x = {}
    if kind in ("rows", "both"):
        x["a"] = random.normal(size=(size, WIDTH))
    elif kind == "grid":
        x["a"] = random.normal(size=(size, SIDE, SIDE, 2))
    if "a" in x:
        if data.get("constant"):
            x["a"][..., 0] = 0.5
        x["a"] = (x["a"] + data.get("offset", 0)).astype("float32")
    if kind in ("steps", "both"):
        ids = random.integers(1, table, (size, LENGTH))
        if data.get("padded"):
            ids[np.arange(LENGTH) >= random.integers(1, LENGTH + 1, size)[:, None]] = 0
        x["ids"] = ids.astype("int32")
    return x


def _targets(model: Mapping[str, Any], size: int, random: np.random.Generator) -> Any:
    kind = random.integers(0, 3, size).astype("int32")
    kind[:3] = [0, 1, 2][:size]  # so that both splits have all
    head = model["head"]
    if head == "tokens":
        return random.integers(0, 4, (size, LENGTH)).astype("int32")
    if head == "values":
        return random.normal(size=(size, 2)).astype("float32")
    return {"kind": kind, "size": random.normal(size=(size, 1)).astype("float32")} if head == "dict" else kind


class Items:
    """An object with __getitem__."""

    def __init__(self, parts: tuple):
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts[1]) if not isinstance(self.parts[1], dict) else len(self.parts[1]["kind"])

    def __getitem__(self, index: int) -> tuple:
        return tuple(
            {name: value[index] for name, value in part.items()} if isinstance(part, dict) else part[index]
            for part in self.parts
        )


def as_source(case: Mapping[str, Any], split: str) -> Any:
    """What a user's source function returns."""
    parts, kind = arrays(case, split), case["data"]["source"]
    if kind == "object":
        return Items(parts)
    if kind == "dataset":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(parts)
    return parts
