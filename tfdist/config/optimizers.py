"""The registry of optimizers: which class each is, and what must be known of it before TensorFlow is imported.

A new optimizer is an entry here; its name then works with --optimizer, and the planner and ZeRO know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

Shape = tuple[int, ...]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Optimizer:
    """The meaning of --optimizer=NAME.

    slots: (shape of a variable, its path, --optimizer_args) -> how many numbers Keras 3.15 keeps for it.
    elementwise: whether every number of a variable is treated separately, so that a part of a variable is updated
    exactly like the same numbers of the whole: then shards of --zero and of --mesh can be updated alone.
    """

    rule: str  # "module:class" of a Keras optimizer
    slots: Callable[[Shape, str, Options], int]
    elementwise: bool = False
    arguments: Options = field(default_factory=dict)  # of the class, besides those of flags


def _momentum(shape: Shape, path: str, options: Options) -> int:
    return prod(shape) * (options["momentum"] != 0)


def _per_number(count: int) -> Callable[[Shape, str, Options], int]:
    return lambda shape, path, options: prod(shape) * (count + bool(options.get("amsgrad")))


def _adafactor(shape: Shape, path: str, options: Options) -> int:
    """Factors of rows and columns, and the full second moment, which Keras also keeps."""
    size = prod(shape)
    return size + (size // shape[-1] + size // shape[-2] if len(shape) >= 2 else 2)


def _muon(shape: Shape, path: str, options: Options) -> int:
    """Uses Adam for embeddings and for everything that is not a matrix."""
    adam = len(shape) != 2 or (options.get("exclude_embeddings", True) and "embedding" in path.lower())
    return prod(shape) * (1 + adam)


_SGD, _ADAM = "keras.optimizers:SGD", "tfdist.training.optimizer:FusedAdam"
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(_SGD, _momentum, elementwise=True, arguments={"momentum": 0.0}),
    "momentum": Optimizer(_SGD, _momentum, elementwise=True, arguments={"momentum": 0.9}),
    "adam": Optimizer(_ADAM, _per_number(2), elementwise=True),
    # Keras' AdamW is its Adam, but refuses to be without weight decay.
    "adamw": Optimizer(_ADAM, _per_number(2), elementwise=True),
    "lion": Optimizer("keras.optimizers:Lion", _per_number(1), elementwise=True),
    "lamb": Optimizer("keras.optimizers:Lamb", _per_number(2)),
    "adafactor": Optimizer("keras.optimizers:Adafactor", _adafactor),
    "muon": Optimizer("keras.optimizers:Muon", _muon),
}
ELEMENTWISE_OPTIMIZERS = tuple(name for name, optimizer in OPTIMIZERS.items() if optimizer.elementwise)
ELEMENTWISE_WORDS = f"{', '.join(ELEMENTWISE_OPTIMIZERS[:-1])} or {ELEMENTWISE_OPTIMIZERS[-1]}"  # for messages
