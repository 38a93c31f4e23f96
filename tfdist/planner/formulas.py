"""The built-in models as shapes.py describes them: weights, work and activations by formula, without TensorFlow.

A test holds each formula against the model's graph (training/count.py): parameters exactly, activations and work
closely. Legend: T tokens, D width, F = 4 D, H heads, V vocabulary, s bytes of the compute type.

A block saves for its backward pass, in bytes a sample, as TensorFlow runs it (no fused attention, no XLA):
    2 norms       2 (8 T D + s T D + 12 T)          float32 input and normalised values, and what they were made from
    attention     4 s T D + H T T (4 + s if s < 4)  queries, keys, values, output; softmax in float32, then cast
    mlp           5 s T F                           the projection and what the tanh form of GELU is made of
    dropout       + 2 T D + H T T (1 + s if s = 4)  masks, and the attention weights once more
Compare Korthikanti et al. 2022 (arXiv:2205.05198), section 4: their 16-bit block with dropout keeps 34 T D + 5 H T T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tfdist.config import Config, parse_args
from tfdist.control.exit_codes import ConfigError
from tfdist.planner.shapes import ModelShape, Part, Sample, Weight

TRANSFORMERS = {"tiny": (2, 64, 4), "small": (6, 384, 6), "gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16)}
VITS = {"tiny": (12, 192, 3), "small": (12, 384, 6), "base": (12, 768, 12)}


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
        raise ConfigError(f"--model={config.model.model} does not take samples of shape {sample.shape}: use another --model, --source or --input_shape.")
    try:
        return formula(sample, size, **options)
    except (TypeError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(f"--model_args={config.model.model_args} does not fit --model={config.model.model}: {str(error).removeprefix(formula.__name__ + '() ')}.") from None


def _stack(sizes: dict[str, tuple[int, int, int]], size: str, layers: int | None, width: int | None, heads: int | None) -> tuple[int, int, int]:
    named_layers, named_width, named_heads = sizes[size]
    return layers or named_layers, width or named_width, heads or named_heads


def block(layers: int, tokens: int, width: int, heads: int, s: int, dropout: float) -> Part:
    """All blocks of a stack, one part with `repeat`. See the file's first lines."""
    row, wide, scores = tokens * width, 4 * tokens * width, heads * tokens * tokens
    attention = 4 * s * row + scores * (4 + (s if s < 4 or dropout else 0) + (1 if dropout else 0))
    mlp_saved = 5 * s * wide
    # Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) divides attention by heads and the mlp by columns.
    weights = (
        Weight("attention_qkv/kernel", (width, 3 * width), "model"), Weight("attention_qkv/bias", (3 * width,), "model"),
        Weight("attention_out/kernel", (width, width), "model"), Weight("attention_out/bias", (width,)),
        Weight("mlp_up/kernel", (width, 4 * width), "model"), Weight("mlp_up/bias", (4 * width,), "model"),
        Weight("mlp_down/kernel", (4 * width, width), "model"), Weight("mlp_down/bias", (width,)),
        *(Weight(f"norm_{index}/{name}", (width,)) for index in (1, 2) for name in ("gamma", "beta")))
    return Part(
        "block", weights, 0, 2.0 * tokens * 12 * width**2 + 4.0 * tokens * tokens * width,
        2 * ((8 + s) * row + 12 * tokens) + attention + mlp_saved + (2 * row if dropout else 0), attention - s * row + mlp_saved,
        max(s * wide, 4 * scores), 12 * width**2 * s if s < 4 else 0, s * row, True, layers)


def transformer(sample: Sample, s: int, size: str = "tiny", layers: int | None = None, width: int | None = None, heads: int | None = None,
                dropout: float = 0.0, context: int | None = None, vocabulary: int | None = None, tied: bool = True) -> ModelShape:
    """models/transformer.py."""
    count, wide, head_count = _stack(TRANSFORMERS, size, layers, width, heads)
    tokens, vocabulary = sample.shape[0], vocabulary or sample.outputs
    embed = Part("embed", (Weight("embed_tokens/embeddings", (vocabulary, wide), "model"), Weight("embed_positions/embeddings", (context or tokens, wide))),
                 saved=4 * tokens + (tokens * wide if dropout else 0), output=s * tokens * wide)
    head = Part("head", (Weight("final_norm/gamma", (wide,)), Weight("final_norm/beta", (wide,)), *(() if tied else (Weight("embed_tokens/reverse", (wide, vocabulary), "model"),))),
                flops=2.0 * tokens * wide * vocabulary, saved=(8 + s) * tokens * wide + 20 * tokens + 4 * tokens * vocabulary,
                divided=4 * tokens * vocabulary, largest=4 * tokens * vocabulary, fixed=s * vocabulary * wide if tied or s < 4 else 0)
    return ModelShape("transformer", (embed, block(count, tokens, wide, head_count, s, dropout), head), tokens, head_count)


def vit(sample: Sample, s: int, size: str = "tiny", patch: int | None = None, layers: int | None = None, width: int | None = None,
        heads: int | None = None, dropout: float = 0.0, pool: str = "mean") -> ModelShape:
    """models/vit.py."""
    count, wide, head_count = _stack(VITS, size, layers, width, heads)
    side = min(sample.shape[:2])
    patch = patch or (16 if side >= 128 else 4 if side >= 16 else 2)
    pixels, channels = sample.shape[0] * sample.shape[1], sample.shape[2]
    tokens = pixels // patch**2 + (pool == "class")
    inner = patch * patch * channels
    embed = Part("embed", (Weight("embed_patches/kernel", (patch, patch, channels, wide)), Weight("embed_patches/bias", (wide,)), Weight("embed_positions/embeddings", (tokens, wide)),
                           *((Weight("embed_class/embeddings", (1, wide)),) if pool == "class" else ())),
                 flops=2.0 * (pixels // patch**2) * inner * wide, saved=s * pixels * channels + (tokens * wide if dropout else 0), output=s * tokens * wide)
    head = Part("head", (Weight("final_norm/gamma", (wide,)), Weight("final_norm/beta", (wide,)), Weight("logits/kernel", (wide, sample.outputs)), Weight("logits/bias", (sample.outputs,))),
                flops=2.0 * wide * sample.outputs, saved=(8 + s) * tokens * wide + 12 * tokens + 4 * wide + 4 * sample.outputs)
    return ModelShape("vit", (embed, block(count, tokens, wide, head_count, s, dropout), head), 1, head_count)


def mlp(sample: Sample, s: int, widths: tuple[int, ...] = (128, 128), dropout: float = 0.0) -> ModelShape:
    """models/mlp.py."""
    parts, inner = [], math.prod(sample.shape)
    for index, width in enumerate(widths):
        parts.append(Part(f"dense_{index:02d}", (Weight("kernel", (inner, width)), Weight("bias", (width,))), 0, 2.0 * inner * width,
                          width * s + (width * (s + 1) if dropout else 0), 0.0, width * s, inner * width * s if s < 4 else 0, s * width))
        inner = width
    return ModelShape("mlp", (*parts, _logits(inner, sample.outputs)))


def _logits(inner: int, outputs: int, saved: float = 0.0) -> Part:
    return Part("logits", (Weight("logits/kernel", (inner, outputs)), Weight("logits/bias", (outputs,))), 0, 2.0 * inner * outputs, saved + 4 * outputs + 4, 0.0, 4 * outputs)


def _conv(name: str, side: tuple[int, int], kernel: int, inner: int, outer: int, s: int, *, bias: bool = False, saved: float = 0.0, norm: bool = True) -> Part:
    """A convolution to `side` pixels, and the batch norm after it, which keeps its input; `saved`: tensors of its size that others keep."""
    size = side[0] * side[1] * outer
    weights = [Weight(f"{name}/kernel", (kernel, kernel, inner, outer)), *([Weight(f"{name}/bias", (outer,))] if bias else [])]
    weights += [Weight(f"{name}/gamma", (outer,)), Weight(f"{name}/beta", (outer,))] if norm else []
    return Part(name, tuple(weights), 2 * outer if norm else 0, 2.0 * size * kernel * kernel * inner, size * s * (norm + saved), 0.0, size * s,
                (12 * outer if norm else 0) + (kernel * kernel * inner * outer * s if s < 4 else 0), size * s)


def cnn(sample: Sample, s: int, widths: tuple[int, ...] = (32, 64), dropout: float = 0.0, norm: str = "batch") -> ModelShape:
    """models/cnn.py; with norm=group about what batch takes."""
    parts, (height, width, inner) = [], sample.shape
    for index, outer in enumerate(widths):
        if index == 0 and min(height, width) >= 16:
            height, width = -(-height // 2), -(-width // 2)
        pooled = 0.25 if min(height, width) >= 2 else 0.0
        parts.append(_conv(f"conv_{index:02d}", (height, width), 3, inner, outer, s, bias=norm == "none", saved=1 + pooled, norm=norm != "none"))
        height, width, inner = (height // 2, width // 2, outer) if pooled else (height, width, outer)
    flat = height * width * inner if max(height, width) <= 4 else inner
    return ModelShape("cnn", (*parts, _logits(flat, sample.outputs, (s + 1) * flat if dropout else 0.0)))


def resnet50(sample: Sample, s: int) -> ModelShape:
    """models/applications.py: ResNet-50 as in keras.applications (the stride is in the first 1x1 convolution; biases)."""
    def halve(side: tuple[int, int]) -> tuple[int, int]:
        return -(-side[0] // 2), -(-side[1] // 2)

    side = halve(sample.shape[:2])
    padded = (sample.shape[0] + 6) * (sample.shape[1] + 6) * sample.shape[2] * s
    parts = [Part("conv1_pad", saved=padded, output=padded), _conv("conv1", side, 7, sample.shape[2], 64, s, bias=True, saved=1)]
    padded = (side[0] + 2) * (side[1] + 2) * 64 * s
    side = halve(side)
    parts.append(Part("pool1", saved=padded + side[0] * side[1] * 64 * s, largest=padded, output=side[0] * side[1] * 64 * s))
    inner = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        side = side if stage == 2 else halve(side)
        for index in range(count):
            parts.append(_bottleneck(f"conv{stage}_block{index + 1}", side, inner, width, s, shortcut=index == 0))
            inner = 4 * width
    return ModelShape("resnet50", (*parts, _logits(inner, sample.outputs, s * inner)))


def _bottleneck(name: str, side: tuple[int, int], inner: int, width: int, s: int, shortcut: bool) -> Part:
    pieces = [_conv(f"{name}_1", side, 1, inner, width, s, bias=True, saved=1), _conv(f"{name}_2", side, 3, width, width, s, bias=True, saved=1),
              _conv(f"{name}_3", side, 1, width, 4 * width, s, bias=True, saved=1)]
    pieces += [_conv(f"{name}_0", side, 1, inner, 4 * width, s, bias=True)] if shortcut else []

    def total(field: str) -> Any:
        return sum(getattr(piece, field) for piece in pieces)

    return Part(name, tuple(weight for piece in pieces for weight in piece.weights), total("constants"), total("flops"), total("saved"), 0.0,
                pieces[2].largest, total("fixed"), pieces[2].output, True)


FORMULAS: dict[str, Callable[..., ModelShape]] = {"mlp": mlp, "cnn": cnn, "resnet50": resnet50, "transformer": transformer, "vit": vit}
