"""The built-in models in the terms of shapes.py: weights, work and activations by formula, without TensorFlow.

There is one dataclass per model; its fields are the options of `--model_args`. A test compares each formula with the
model's graph (training/model_cost.py): parameters exactly, activations and work closely. Term: s, bytes of the compute
type. Transformers are in transformer_formulas.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from tfdist.config import Config, parse_args
from tfdist.control.exit_codes import ConfigError
from tfdist.models import cnn_sizes
from tfdist.planner.shapes import ModelPart, ModelShape, Sample, Weight
from tfdist.planner.transformer_formulas import Transformer, VisionTransformer
from tfdist.plugins import check_switches


class Formula(Protocol):
    """A built-in model with its options."""

    sample_rank: ClassVar[int | None]  # rank of the samples that it takes; None: any

    def shape(self, sample: Sample, s: int) -> ModelShape: ...


def shape_of(config: Config, sample: Sample) -> ModelShape | None:
    """Returns the built-in model of `--model` with `--model_args`; None if the model is not a built-in one.

    Raises ConfigError for an option that the model lacks, or for samples that it cannot take.
    """
    formula = FORMULAS.get(config.model.model)
    if formula is None:
        return None
    size = 4 if config.precision.precision == "float32" else 2
    options = parse_args("model_args", config.model.model_args)
    check_switches("model_args", options, formula)
    if options.get("experts"):
        return None  # models with experts are measured from their graph
    if "num_outputs" in options:
        sample = dataclasses.replace(sample, outputs=options.pop("num_outputs"))
    if len(sample.shape) != (formula.sample_rank or len(sample.shape)):
        raise ConfigError(
            f"--model={config.model.model} does not take samples of shape {sample.shape}: use another --model, --source"
            " or --input_shape."
        )
    try:
        return formula(**options).shape(sample, size)
    except (TypeError, KeyError, ZeroDivisionError) as error:
        reason = re.sub(r"^[\w.]+\(\) ", "", str(error))  # without the name of a Python function
        raise ConfigError(
            f"--model_args={config.model.model_args} does not fit --model={config.model.model}: {reason}."
        ) from None


@dataclass(frozen=True)
class Mlp:
    """The formulas of models/mlp.py."""

    sample_rank: ClassVar[int | None] = None
    widths: tuple[int, ...] = (128, 128)
    dropout: float = 0.0

    def shape(self, sample: Sample, s: int) -> ModelShape:
        parts, inner = [], math.prod(sample.shape)
        for index, width in enumerate(self.widths):
            parts.append(
                ModelPart(
                    f"dense_{index:02d}",
                    (Weight("kernel", (inner, width)), Weight("bias", (width,))),
                    flops=2.0 * inner * width,
                    saved=width * s + (width * (s + 1) if self.dropout else 0),
                    largest=width * s,
                    fixed=inner * width * s if s < 4 else 0,
                    output=s * width,
                )
            )
            inner = width
        return ModelShape("mlp", (*parts, _logits(inner, sample.outputs)))


def _logits(inner: int, outputs: int, saved: float = 0.0) -> ModelPart:
    return ModelPart(
        "logits",
        (Weight("logits/kernel", (inner, outputs)), Weight("logits/bias", (outputs,))),
        flops=2.0 * inner * outputs,
        saved=saved + 4 * outputs + 4,
        largest=4 * outputs,
    )


class Pixels(NamedTuple):
    """The size of an image."""

    height: int
    width: int

    def halved(self) -> Pixels:
        """The size after a stride of two, with padding."""
        return Pixels(-(-self.height // 2), -(-self.width // 2))

    def bytes(self, channels: int, s: int, border: int = 0) -> int:
        """The bytes of an image with `channels` channels and `border` additional rows and columns."""
        return (self.height + border) * (self.width + border) * channels * s


@dataclass(frozen=True)
class Convolution:
    """A convolution to `output` pixels, and the batch norm after it, which saves its input."""

    name: str
    output: Pixels
    kernel: int
    inner: int
    outer: int
    bias: bool
    norm: bool = True
    saved: float = 0.0  # number of tensors of this size that other operations save

    def part(self, s: int) -> ModelPart:
        size = self.output.height * self.output.width * self.outer
        weights = [Weight(f"{self.name}/kernel", (self.kernel, self.kernel, self.inner, self.outer))]
        if self.bias:
            weights.append(Weight(f"{self.name}/bias", (self.outer,)))
        if self.norm:
            weights += [Weight(f"{self.name}/{name}", (self.outer,)) for name in ("gamma", "beta")]
        return ModelPart(
            self.name,
            tuple(weights),
            constants=2 * self.outer if self.norm else 0,
            flops=2.0 * size * self.kernel * self.kernel * self.inner,
            saved=size * s * (self.norm + self.saved),
            largest=size * s,
            fixed=(12 * self.outer if self.norm else 0) + (weights[0].elements * s if s < 4 else 0),
            output=size * s,
        )


@dataclass(frozen=True)
class Cnn:
    """The formulas of models/cnn.py; norm=group is counted like batch, which is about right."""

    sample_rank: ClassVar[int | None] = 3
    widths: tuple[int, ...] = (32, 64)
    dropout: float = 0.0
    norm: str = "batch"

    def shape(self, sample: Sample, s: int) -> ModelShape:
        height, width, inner = sample.shape
        parts, side = [], Pixels(height, width)
        for index, outer in enumerate(self.widths):
            if index == 0 and cnn_sizes.first_stride(side) == 2:
                side = side.halved()
            pooled = cnn_sizes.pools(side)
            normed = self.norm != "none"
            convolution = Convolution(
                f"conv_{index:02d}",
                side,
                kernel=3,
                inner=inner,
                outer=outer,
                bias=not normed,
                norm=normed,
                saved=1.25 if pooled else 1.0,
            )
            parts.append(convolution.part(s))
            side, inner = Pixels(side.height // 2, side.width // 2) if pooled else side, outer
        flat = side.height * side.width * inner if cnn_sizes.flattens(side) else inner
        return ModelShape("cnn", (*parts, _logits(flat, sample.outputs, (s + 1) * flat if self.dropout else 0.0)))


@dataclass(frozen=True)
class ResNet50:
    """models/applications.py: ResNet-50 as in keras.applications (the stride is in the first 1x1 convolution;
    biases).
    """

    sample_rank: ClassVar[int | None] = 3
    stages: ClassVar = ((64, 3), (128, 4), (256, 6), (512, 3))  # (width, blocks)

    def shape(self, sample: Sample, s: int) -> ModelShape:
        height, width, channels = sample.shape
        image = Pixels(height, width)
        padded, side = image.bytes(channels, s, border=6), image.halved()
        parts = [
            ModelPart("conv1_pad", saved=padded, output=padded),
            Convolution("conv1", side, kernel=7, inner=channels, outer=64, bias=True, saved=1).part(s),
        ]
        padded, side = side.bytes(64, s, border=2), side.halved()
        pooled = side.bytes(64, s)
        parts.append(ModelPart("pool1", saved=padded + pooled, largest=padded, output=pooled))
        inner = 64
        for stage, (width, count) in enumerate(self.stages, 2):
            side = side if stage == 2 else side.halved()
            for index in range(count):
                block = Bottleneck(f"conv{stage}_block{index + 1}", side, inner, width, shortcut=index == 0)
                parts.append(block.part(s))
                inner = 4 * width
        return ModelShape("resnet50", (*parts, _logits(inner, sample.outputs, s * inner)))


@dataclass(frozen=True)
class Bottleneck:
    """A block of a ResNet: three convolutions, and with `shortcut` a fourth one in parallel."""

    name: str
    side: Pixels
    inner: int
    width: int
    shortcut: bool

    def part(self, s: int) -> ModelPart:
        side, inner, width = self.side, self.inner, self.width
        convolutions = [
            Convolution(f"{self.name}_1", side, kernel=1, inner=inner, outer=width, bias=True, saved=1),
            Convolution(f"{self.name}_2", side, kernel=3, inner=width, outer=width, bias=True, saved=1),
            Convolution(f"{self.name}_3", side, kernel=1, inner=width, outer=4 * width, bias=True, saved=1),
        ]
        if self.shortcut:
            convolutions.append(Convolution(f"{self.name}_0", side, kernel=1, inner=inner, outer=4 * width, bias=True))
        pieces = [convolution.part(s) for convolution in convolutions]
        last = pieces[2]
        return ModelPart(
            self.name,
            tuple(weight for piece in pieces for weight in piece.weights),
            constants=sum(piece.constants for piece in pieces),
            flops=sum(piece.flops for piece in pieces),
            saved=sum(piece.saved for piece in pieces),
            largest=last.largest,
            fixed=sum(piece.fixed for piece in pieces),
            output=last.output,
        )


FORMULAS: dict[str, type[Formula]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "resnet50": ResNet50,
    "transformer": Transformer,
    "vit": VisionTransformer,
}
