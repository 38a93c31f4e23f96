"""Transformers and vision transformers in the terms of shapes.py.

A block saves for its backward pass, in bytes per sample, as TensorFlow runs it (no fused attention, no XLA):
    2 norms       2 (8 T D + s T D + 12 T)          float32 input and normalized values, and what they are made from
    attention     4 s T D + H T T (4 + s if s < 4)  queries, keys, values, output; softmax in float32, then cast
    mlp           5 s T F                           the projection and the intermediates of GELU's tanh form
    dropout       + 2 T D + H T T (1 + s if s = 4)  masks, and the attention weights a second time
Compare Korthikanti et al. 2022 (arXiv:2205.05198), section 4: their 16-bit block with dropout keeps 34 T D + 5 H T T.
Terms: T tokens, D width, F = 4 D, H heads, s bytes of the compute type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tfdist.models.transformer_sizes import TRANSFORMERS, VITS, Size, usual_patch
from tfdist.planner.shapes import ModelPart, ModelShape, Sample, Weight


def blocks(size: Size, tokens: int, s: int, dropout: float) -> ModelPart:
    """Returns all blocks of a stack as one part with `repeat`. See the module docstring."""
    width = size.width
    row, wide, scores = tokens * width, 4 * tokens * width, size.heads * tokens * tokens
    norms = 2 * ((8 + s) * row + 12 * tokens)
    attention = 4 * s * row + scores * (4 + (s if s < 4 or dropout else 0) + (1 if dropout else 0))
    mlp = 5 * s * wide
    # Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) divides attention by heads and the mlp by columns.
    weights = (
        Weight("attention_qkv/kernel", (width, 3 * width), "model"),
        Weight("attention_qkv/bias", (3 * width,), "model"),
        Weight("attention_out/kernel", (width, width), "model"),
        Weight("attention_out/bias", (width,)),
        Weight("mlp_up/kernel", (width, 4 * width), "model"),
        Weight("mlp_up/bias", (4 * width,), "model"),
        Weight("mlp_down/kernel", (4 * width, width), "model"),
        Weight("mlp_down/bias", (width,)),
        *_norm("norm_1", width),
        *_norm("norm_2", width),
    )
    return ModelPart(
        "block",
        weights,
        flops=2.0 * tokens * 12 * width**2 + 4.0 * tokens * tokens * width,
        saved=norms + attention + mlp + (2 * row if dropout else 0),
        divided=attention - s * row + mlp,
        largest=max(s * wide, 4 * scores),
        fixed=12 * width**2 * s if s < 4 else 0,
        output=s * row,
        block=True,
        repeat=size.layers,
    )


def _norm(name: str, width: int) -> list[Weight]:
    return [Weight(f"{name}/gamma", (width,)), Weight(f"{name}/beta", (width,))]


@dataclass(frozen=True)
class Transformer:
    """The formulas of models/transformer.py."""

    sample_rank: ClassVar[int | None] = 1
    size: str = "tiny"
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    dropout: float = 0.0
    context: int | None = None
    vocabulary: int | None = None
    tied: bool = True

    def shape(self, sample: Sample, s: int) -> ModelShape:
        size = TRANSFORMERS[self.size].with_own(self.layers or None, self.width or None, self.heads or None)
        (tokens,), width, vocabulary = sample.shape, size.width, self.vocabulary or sample.outputs
        logits = 4 * tokens * vocabulary
        embed = ModelPart(
            "embed",
            (
                Weight("embed_tokens/embeddings", (vocabulary, width), "model"),
                Weight("embed_positions/embeddings", (self.context or tokens, width)),
            ),
            saved=4 * tokens + (tokens * width if self.dropout else 0),
            output=s * tokens * width,
        )
        head = ModelPart(
            "head",
            (
                *_norm("final_norm", width),
                *(() if self.tied else (Weight("embed_tokens/reverse", (width, vocabulary), "model"),)),
            ),
            flops=2.0 * tokens * width * vocabulary,
            saved=(8 + s) * tokens * width + 20 * tokens + logits,
            divided=logits,
            largest=logits,
            fixed=s * vocabulary * width if self.tied or s < 4 else 0,
        )
        parts = (embed, blocks(size, tokens, s, self.dropout), head)
        return ModelShape("transformer", parts, tokens, size.heads)


@dataclass(frozen=True)
class VisionTransformer:
    """The formulas of models/vit.py."""

    sample_rank: ClassVar[int | None] = 3
    size: str = "tiny"
    patch: int | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    dropout: float = 0.0
    pool: str = "mean"

    def shape(self, sample: Sample, s: int) -> ModelShape:
        size = VITS[self.size].with_own(self.layers or None, self.width or None, self.heads or None)
        (rows, columns, channels), width = sample.shape, size.width
        patch = self.patch or usual_patch((rows, columns))
        patches = rows * columns // patch**2
        tokens = patches + (self.pool == "class")
        embed = ModelPart(
            "embed",
            (
                Weight("embed_patches/kernel", (patch, patch, channels, width)),
                Weight("embed_patches/bias", (width,)),
                Weight("embed_positions/embeddings", (tokens, width)),
                *((Weight("embed_class/embeddings", (1, width)),) if self.pool == "class" else ()),
            ),
            flops=2.0 * patches * patch * patch * channels * width,
            saved=s * rows * columns * channels + (tokens * width if self.dropout else 0),
            output=s * tokens * width,
        )
        head = ModelPart(
            "head",
            (
                *_norm("final_norm", width),
                Weight("logits/kernel", (width, sample.outputs)),
                Weight("logits/bias", (sample.outputs,)),
            ),
            flops=2.0 * width * sample.outputs,
            saved=(8 + s) * tokens * width + 12 * tokens + 4 * width + 4 * sample.outputs,
        )
        parts = (embed, blocks(size, tokens, s, self.dropout), head)
        return ModelShape("vit", parts, 1, size.heads)
