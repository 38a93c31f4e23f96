"""The workloads of scripts/bench_peers.py, the same for every engine: sizes, data, initial weights, and FLOPs.

This module uses NumPy only, so that every environment can import it. The models are implemented twice, in
keras_models.py and torch_models.py; `Workload.parameters` and `Workload.flops` give, by separate formulas, the values
that both must have.

Legend: B batch of one worker, T tokens, D width, V vocabulary, L layers. FLOPs are those of the matrix products and
convolutions of one forward pass (a multiplication and an addition are two), per sample.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

CLASSES = 10
STAGES = (16, 32, 64)  # channels of the three stages of ResNet-20 (He et al. 2015, arXiv:1512.03385, section 4.2)
BLOCKS = 3  # in each stage


@dataclass(frozen=True)
class Workload:
    """One model with its data. `batch`: samples of one worker in a step. `steps`: steps in one timed window;
    `save_steps`: the same where snapshots are measured (0: they are not)."""

    name: str
    kind: str  # which builder of keras_models.py and torch_models.py
    batch: int
    steps: int
    parameters: int
    flops: int
    optimizer: str = "adam"
    learning_rate: float = 1e-4
    sizes: dict[str, int] = field(default_factory=dict)
    windows: int = 5
    save_steps: int = 0


def _transformer(
    name: str,
    batch: int,
    steps: int,
    *,
    layers: int,
    width: int,
    heads: int,
    length: int = 128,
    vocabulary: int = 256,
    windows: int = 5,
    save_steps: int = 0,
) -> Workload:
    """The decoder of GPT-2 with an untied head: each block has 12 D^2 weights, 9 D biases and 4 D of LayerNorm."""
    parameters = 2 * vocabulary * width + length * width + layers * (12 * width**2 + 13 * width) + 2 * width
    flops = length * (layers * (24 * width**2 + 4 * length * width) + 2 * vocabulary * width)
    sizes = {"layers": layers, "width": width, "heads": heads, "length": length, "vocabulary": vocabulary}
    return Workload(
        name,
        "transformer",
        batch,
        steps,
        parameters,
        flops,
        sizes=sizes,
        windows=windows,
        save_steps=save_steps or steps,
    )


def _cnn(name: str, batch: int, steps: int) -> Workload:
    """Two 3x3 convolutions (32, 64) with 2x2 max-pooling, a dense layer of 128, 10 classes; images of 28 x 28."""
    weights = [9 * 32 + 32, 9 * 32 * 64 + 64, 7 * 7 * 64 * 128 + 128, 128 * CLASSES + CLASSES]
    flops = 2 * (28 * 28 * 9 * 32 + 14 * 14 * 9 * 32 * 64 + 7 * 7 * 64 * 128 + 128 * CLASSES)
    return Workload(name, "cnn", batch, steps, sum(weights), flops, sizes={"side": 28, "channels": 1})


def _resnet(name: str, batch: int, steps: int) -> Workload:
    """ResNet-20 on 32 x 32 x 3, with BatchNorm and 1x1 projections where the shape changes."""
    parameters, flops, side, width = 27 * STAGES[0] + 2 * STAGES[0], 2 * 32 * 32 * 27 * STAGES[0], 32, STAGES[0]
    for stage, channels in enumerate(STAGES):
        side //= 2 if stage else 1
        for _ in range(BLOCKS):
            kernels = 9 * width * channels + 9 * channels**2 + (width * channels if width != channels else 0)
            parameters += kernels + 2 * channels * (3 if width != channels else 2)
            flops += 2 * side * side * kernels
            width = channels
    return Workload(
        name,
        "resnet",
        batch,
        steps,
        parameters + width * CLASSES + CLASSES,
        flops + 2 * width * CLASSES,
        optimizer="sgd",
        learning_rate=1e-2,
        sizes={"side": 32, "channels": 3},
    )


def _embedding(name: str, batch: int, steps: int, *, rows: int, width: int, features: int = 26) -> Workload:
    """A table looked up `features` times, then dense layers of 256 and 64.

    SGD, since its updates are the same for sparse and dense gradients.
    """
    layers = [features * width, 256, 64, CLASSES]
    pairs = list(zip(layers, layers[1:], strict=False))
    parameters = rows * width + sum(a * b + b for a, b in pairs)
    return Workload(
        name,
        "embedding",
        batch,
        steps,
        parameters,
        2 * sum(a * b for a, b in pairs),
        optimizer="sgd",
        learning_rate=1e-2,
        sizes={"rows": rows, "width": width, "features": features},
        save_steps=4 * steps,
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        _transformer("transformer10m", 8, 2, layers=6, width=384, heads=6),
        _cnn("cnn", 64, 25),
        _resnet("resnet", 32, 6),
        _embedding("embedding", 1024, 10, rows=2_000_000, width=16),
        # Windows of two steps: tfdist computes two norms per log line (4 to 8 % of a step); nobody logs each step.
        _transformer("transformer50m", 4, 2, layers=10, width=640, heads=10, save_steps=1),
    )
}


def arrays(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Returns (x, y), the same in every process: 16 global batches of two full workers, in memory."""
    random, samples, sizes = np.random.default_rng(1), 32 * workload.batch, workload.sizes
    if workload.kind == "transformer":
        tokens = random.integers(0, sizes["vocabulary"], (samples, sizes["length"] + 1), dtype=np.int32)
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    y = random.integers(0, CLASSES, samples, dtype=np.int32)
    if workload.kind == "embedding":
        return random.integers(0, sizes["rows"], (samples, sizes["features"]), dtype=np.int32), y
    return random.random((samples, sizes["side"], sizes["side"], sizes["channels"]), dtype=np.float32), y


def batches(workload: Workload, batch: int, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns S prepared batches of one worker: (x [S, B, ...], y [S, B, ...]).

    Global batch s starts at sample s * B * world and is divided by rank.
    """
    return tuple(array.reshape(-1, world, batch, *array.shape[1:])[:, rank] for array in arrays(workload))


def initial(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the initial float32 value of a kernel in Keras' layout: normal, standard deviation fan_in^-1/2 (0.02 for
    tables), the random numbers a function of the name alone.
    """
    fan_in = 2500 if name.startswith("embed") else int(np.prod(shape[:-1]))
    random = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    return random.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)
