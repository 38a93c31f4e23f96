"""The data of a case: made from its description, the same in every process, and offered as each kind of source that
tfdist accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.fuzz.models import LENGTH, ONLY, SIDE, TWO, VOCABULARY, WIDTH

EVAL_SIZE = 13
EVAL_BATCH = 4  # of one replica


def arrays(case: Mapping[str, Any], split: str = "train", rank: int = 0) -> tuple:
    """Returns (x, y) or (x, y, w) of a split, as a rank holds it."""
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
    named = model.get("named", ())
    parts = [
        x if model["inputs"] in TWO or "input" in named else next(iter(x.values())),
        {ONLY: y} if "output" in named else y,
    ]
    if data["weights"] != "none":
        shape = (size, LENGTH) if data["weights"].startswith("token") else (size,)
        w = random.uniform(0.2, 3.0, shape).astype("float32")
        if data["weights"].endswith("zeros"):
            w *= random.random(shape) < 0.6
        parts.append(w)
    if data.get("mixed"):
        parts[1] = _mapped(
            parts[1], lambda values: np.where(_mixed(values), np.rint(values), values).astype(values.dtype)
        )
    if split == "train" and rank and "differs" in data:
        parts = _changed(parts, data["differs"], data.get("differs_at", 0))
    return tuple(parts)


def _changed(parts: list, what: str, row: int) -> list:
    """Returns what the workers other than the chief hold in a case whose data differ between workers."""
    if what == "order":
        return [_mapped(part, lambda values: np.roll(values, 1, axis=0)) for part in parts]
    number = {"input": 0, "target": 1, "weight": 2}[what]
    part = _mapped(parts[number], np.copy)
    values = part if isinstance(part, np.ndarray) else next(iter(part.values()))
    place = (row, *[0] * (values.ndim - 1))
    values[place] = values[place] + 0.25 if values.dtype.kind == "f" else (values[place] + 1) % 3
    return [*parts[:number], part, *parts[number + 1 :]]


def _mapped(part: Any, function: Callable[[np.ndarray], np.ndarray]) -> Any:
    return {name: function(values) for name, values in part.items()} if isinstance(part, dict) else function(part)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Marks the items for which a user's object returns another type: item 0, and every third one after it."""
    return (np.arange(len(values)) % 3 == 0).reshape(-1, *[1] * (values.ndim - 1))


def _inputs(
    kind: str, size: int, table: int, data: Mapping[str, Any], random: np.random.Generator
) -> dict[str, np.ndarray]:
    x = {}
    if kind in ("rows", *TWO):
        x["a"] = random.normal(size=(size, WIDTH))
    elif kind == "grid":
        x["a"] = random.normal(size=(size, SIDE, SIDE, 2))
    if "a" in x:
        if data.get("constant"):
            x["a"][..., 0] = 0.5
        x["a"] = (x["a"] + data.get("offset", 0)).astype("float32")
    if kind in ("steps", *TWO):
        ids = random.integers(1, table, (size, LENGTH))
        if data.get("padded"):
            ids[np.arange(LENGTH) >= random.integers(1, LENGTH + 1, size)[:, None]] = 0
        if data.get("negative"):  # as in Keras, -1 is the last row of a table
            ids[:, ::3] -= np.where(ids[:, ::3] > 0, table, 0)
        x["ids"] = ids.astype("int32")
    return x


def _targets(model: Mapping[str, Any], size: int, random: np.random.Generator) -> Any:
    kind = random.integers(0, 3, size).astype("int32")
    kind[:3] = [0, 1, 2][:size]  # so that both splits have all classes
    head = model["head"]
    if head == "tokens":
        return random.integers(0, 4, (size, LENGTH)).astype("int32")
    if head == "values":
        return random.normal(size=(size, 2)).astype("float32")
    return {"kind": kind, "size": random.normal(size=(size, 1)).astype("float32")} if head == "dict" else kind


class Items:
    """A user's object with __getitem__. mixed: its targets have several types."""

    def __init__(self, parts: tuple, mixed: bool = False):
        self.parts, self.mixed = parts, mixed

    def __len__(self) -> int:
        targets = self.parts[1]
        return len(next(iter(targets.values())) if isinstance(targets, dict) else targets)

    def __getitem__(self, index: int) -> tuple:
        x, y, *w = (_mapped(part, lambda values: values[index]) for part in self.parts)
        if self.mixed:
            whole = index % 3 == 0
            y = _mapped(
                y, lambda value: value.astype("uint8" if value.dtype.kind == "i" else "int32") if whole else value
            )
        return (x, y, *w)


def as_source(case: Mapping[str, Any], split: str, rank: int = 0) -> Any:
    """Returns what a user's source function returns on a rank."""
    parts, kind = arrays(case, split, rank), case["data"]["source"]
    if kind == "object":
        return Items(parts, bool(case["data"].get("mixed")))
    if kind == "dataset":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(parts)
    return parts
