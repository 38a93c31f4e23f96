"""The built-in models as shapes.py describes them: weights, work and activations by formula, without TensorFlow.

A test holds each formula against the model's graph (training/model_cost.py): parameters exactly, activations and work
closely. Legend: s bytes of the compute type. Transformers are in transformer_formulas.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tfdist.config import Config, parse_args
from tfdist.control.exit_codes import ConfigError
from tfdist.planner.shapes import ModelShape, Part, Sample, Weight
from tfdist.planner.transformer_formulas import transformer, vit


def shape_of(config: Config, sample: Sample) -> ModelShape | None:
    """The built-in model of `--model` with `--model_args`; None if it is no built-in one.

    Raises ConfigError for an option that it lacks, or samples that it cannot take.
    """
    formula = FORMULAS.get(config.model.model)
    if formula is None:
        return None
    size = 4 if config.precision.precision == "float32" else 2
    options = parse_args("model_args", config.model.model_args)
    if options.get("experts"):
        return None  # counted in the graph
    if "num_outputs" in options:
        sample = Sample(sample.shape, options.pop("num_outputs"))
    rank = 1 if formula is transformer else len(sample.shape) if formula is mlp else 3
    if len(sample.shape) != rank:
        raise ConfigError(
            f"--model={config.model.model} does not take samples of shape {sample.shape}: use another --model, --source"
            " or --input_shape."
        )
    try:
        return formula(sample, size, **options)
    except (TypeError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(
            f"--model_args={config.model.model_args} does not fit --model={config.model.model}:"
            f" {str(error).removeprefix(formula.__name__ + '() ')}."
        ) from None


def mlp(sample: Sample, s: int, widths: tuple[int, ...] = (128, 128), dropout: float = 0.0) -> ModelShape:
    """models/mlp.py."""
    parts, inner = [], math.prod(sample.shape)
    for index, width in enumerate(widths):
        parts.append(
            Part(
                f"dense_{index:02d}",
                (Weight("kernel", (inner, width)), Weight("bias", (width,))),
                flops=2.0 * inner * width,
                saved=width * s + (width * (s + 1) if dropout else 0),
                largest=width * s,
                fixed=inner * width * s if s < 4 else 0,
                output=s * width,
            )
        )
        inner = width
    return ModelShape("mlp", (*parts, _logits(inner, sample.outputs)))


def _logits(inner: int, outputs: int, saved: float = 0.0) -> Part:
    return Part(
        "logits",
        (Weight("logits/kernel", (inner, outputs)), Weight("logits/bias", (outputs,))),
        flops=2.0 * inner * outputs,
        saved=saved + 4 * outputs + 4,
        largest=4 * outputs,
    )


def _conv(
    name: str,
    side: tuple[int, int],
    kernel: int,
    inner: int,
    outer: int,
    s: int,
    *,
    bias: bool = False,
    saved: float = 0.0,
    norm: bool = True,
) -> Part:
    """A convolution to `side` pixels, and the batch norm after it, which keeps its input; `saved`: tensors of its size
    that others keep.
    """
    size = side[0] * side[1] * outer
    weights = [
        Weight(f"{name}/kernel", (kernel, kernel, inner, outer)),
        *([Weight(f"{name}/bias", (outer,))] if bias else []),
    ]
    weights += [Weight(f"{name}/gamma", (outer,)), Weight(f"{name}/beta", (outer,))] if norm else []
    return Part(
        name,
        tuple(weights),
        constants=2 * outer if norm else 0,
        flops=2.0 * size * kernel * kernel * inner,
        saved=size * s * (norm + saved),
        largest=size * s,
        fixed=(12 * outer if norm else 0) + (kernel * kernel * inner * outer * s if s < 4 else 0),
        output=size * s,
    )


def cnn(
    sample: Sample, s: int, widths: tuple[int, ...] = (32, 64), dropout: float = 0.0, norm: str = "batch"
) -> ModelShape:
    """models/cnn.py; with norm=group about what batch takes."""
    parts, (height, width, inner) = [], sample.shape
    for index, outer in enumerate(widths):
        if index == 0 and min(height, width) >= 16:
            height, width = -(-height // 2), -(-width // 2)
        pooled = 0.25 if min(height, width) >= 2 else 0.0
        parts.append(
            _conv(
                f"conv_{index:02d}",
                (height, width),
                3,
                inner,
                outer,
                s,
                bias=norm == "none",
                saved=1 + pooled,
                norm=norm != "none",
            )
        )
        height, width, inner = (height // 2, width // 2, outer) if pooled else (height, width, outer)
    flat = height * width * inner if max(height, width) <= 4 else inner
    return ModelShape("cnn", (*parts, _logits(flat, sample.outputs, (s + 1) * flat if dropout else 0.0)))


def resnet50(sample: Sample, s: int) -> ModelShape:
    """models/applications.py: ResNet-50 as in keras.applications (the stride is in the first 1x1 convolution;
    biases).
    """

    def halve(side: tuple[int, int]) -> tuple[int, int]:
        return -(-side[0] // 2), -(-side[1] // 2)

    side = halve(sample.shape[:2])
    padded = (sample.shape[0] + 6) * (sample.shape[1] + 6) * sample.shape[2] * s
    parts = [
        Part("conv1_pad", saved=padded, output=padded),
        _conv("conv1", side, 7, sample.shape[2], 64, s, bias=True, saved=1),
    ]
    padded = (side[0] + 2) * (side[1] + 2) * 64 * s
    side = halve(side)
    parts.append(
        Part("pool1", saved=padded + side[0] * side[1] * 64 * s, largest=padded, output=side[0] * side[1] * 64 * s)
    )
    inner = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        side = side if stage == 2 else halve(side)
        for index in range(count):
            parts.append(_bottleneck(f"conv{stage}_block{index + 1}", side, inner, width, s, shortcut=index == 0))
            inner = 4 * width
    return ModelShape("resnet50", (*parts, _logits(inner, sample.outputs, s * inner)))


def _bottleneck(name: str, side: tuple[int, int], inner: int, width: int, s: int, shortcut: bool) -> Part:
    pieces = [
        _conv(f"{name}_1", side, 1, inner, width, s, bias=True, saved=1),
        _conv(f"{name}_2", side, 3, width, width, s, bias=True, saved=1),
        _conv(f"{name}_3", side, 1, width, 4 * width, s, bias=True, saved=1),
    ]
    pieces += [_conv(f"{name}_0", side, 1, inner, 4 * width, s, bias=True)] if shortcut else []

    def total(field: str) -> Any:
        return sum(getattr(piece, field) for piece in pieces)

    return Part(
        name,
        tuple(weight for piece in pieces for weight in piece.weights),
        constants=total("constants"),
        flops=total("flops"),
        saved=total("saved"),
        largest=pieces[2].largest,
        fixed=total("fixed"),
        output=pieces[2].output,
        block=True,
    )


FORMULAS: dict[str, Callable[..., ModelShape]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet50": resnet50,
    "transformer": transformer,
    "vit": vit,
}
