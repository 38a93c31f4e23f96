"""Transformers and vision transformers as shapes.py describes them.

A block saves for its backward pass, in bytes a sample, as TensorFlow runs it (no fused attention, no XLA):
    2 norms       2 (8 T D + s T D + 12 T)          float32 input and normalised values, and what they were made from
    attention     4 s T D + H T T (4 + s if s < 4)  queries, keys, values, output; softmax in float32, then cast
    mlp           5 s T F                           the projection and what the tanh form of GELU is made of
    dropout       + 2 T D + H T T (1 + s if s = 4)  masks, and the attention weights once more
Compare Korthikanti et al. 2022 (arXiv:2205.05198), section 4: their 16-bit block with dropout keeps 34 T D + 5 H T T.
Legend: T tokens, D width, F = 4 D, H heads, s bytes of the compute type.
"""

from __future__ import annotations

from tfdist.planner.shapes import ModelShape, Part, Sample, Weight

TRANSFORMERS = {"tiny": (2, 64, 4), "small": (6, 384, 6), "gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16)}
VITS = {"tiny": (12, 192, 3), "small": (12, 384, 6), "base": (12, 768, 12)}


def _stack(
    sizes: dict[str, tuple[int, int, int]], size: str, layers: int | None, width: int | None, heads: int | None
) -> tuple[int, int, int]:
    named_layers, named_width, named_heads = sizes[size]
    return layers or named_layers, width or named_width, heads or named_heads


def block(layers: int, tokens: int, width: int, heads: int, s: int, dropout: float) -> Part:
    """All blocks of a stack, one part with `repeat`. See the file's first lines."""
    row, wide, scores = tokens * width, 4 * tokens * width, heads * tokens * tokens
    attention = 4 * s * row + scores * (4 + (s if s < 4 or dropout else 0) + (1 if dropout else 0))
    mlp_saved = 5 * s * wide
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
        *(Weight(f"norm_{index}/{name}", (width,)) for index in (1, 2) for name in ("gamma", "beta")),
    )
    return Part(
        "block",
        weights,
        flops=2.0 * tokens * 12 * width**2 + 4.0 * tokens * tokens * width,
        saved=2 * ((8 + s) * row + 12 * tokens) + attention + mlp_saved + (2 * row if dropout else 0),
        divided=attention - s * row + mlp_saved,
        largest=max(s * wide, 4 * scores),
        fixed=12 * width**2 * s if s < 4 else 0,
        output=s * row,
        block=True,
        repeat=layers,
    )


def transformer(
    sample: Sample,
    s: int,
    size: str = "tiny",
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    dropout: float = 0.0,
    context: int | None = None,
    vocabulary: int | None = None,
    tied: bool = True,
) -> ModelShape:
    """models/transformer.py."""
    count, wide, head_count = _stack(TRANSFORMERS, size, layers, width, heads)
    tokens, vocabulary = sample.shape[0], vocabulary or sample.outputs
    embed = Part(
        "embed",
        (
            Weight("embed_tokens/embeddings", (vocabulary, wide), "model"),
            Weight("embed_positions/embeddings", (context or tokens, wide)),
        ),
        saved=4 * tokens + (tokens * wide if dropout else 0),
        output=s * tokens * wide,
    )
    head = Part(
        "head",
        (
            Weight("final_norm/gamma", (wide,)),
            Weight("final_norm/beta", (wide,)),
            *(() if tied else (Weight("embed_tokens/reverse", (wide, vocabulary), "model"),)),
        ),
        flops=2.0 * tokens * wide * vocabulary,
        saved=(8 + s) * tokens * wide + 20 * tokens + 4 * tokens * vocabulary,
        divided=4 * tokens * vocabulary,
        largest=4 * tokens * vocabulary,
        fixed=s * vocabulary * wide if tied or s < 4 else 0,
    )
    return ModelShape(
        "transformer", (embed, block(count, tokens, wide, head_count, s, dropout), head), tokens, head_count
    )


def vit(
    sample: Sample,
    s: int,
    size: str = "tiny",
    patch: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    dropout: float = 0.0,
    pool: str = "mean",
) -> ModelShape:
    """models/vit.py."""
    count, wide, head_count = _stack(VITS, size, layers, width, heads)
    side = min(sample.shape[:2])
    patch = patch or (16 if side >= 128 else 4 if side >= 16 else 2)
    pixels, channels = sample.shape[0] * sample.shape[1], sample.shape[2]
    tokens = pixels // patch**2 + (pool == "class")
    inner = patch * patch * channels
    embed = Part(
        "embed",
        (
            Weight("embed_patches/kernel", (patch, patch, channels, wide)),
            Weight("embed_patches/bias", (wide,)),
            Weight("embed_positions/embeddings", (tokens, wide)),
            *((Weight("embed_class/embeddings", (1, wide)),) if pool == "class" else ()),
        ),
        flops=2.0 * (pixels // patch**2) * inner * wide,
        saved=s * pixels * channels + (tokens * wide if dropout else 0),
        output=s * tokens * wide,
    )
    head = Part(
        "head",
        (
            Weight("final_norm/gamma", (wide,)),
            Weight("final_norm/beta", (wide,)),
            Weight("logits/kernel", (wide, sample.outputs)),
            Weight("logits/bias", (sample.outputs,)),
        ),
        flops=2.0 * wide * sample.outputs,
        saved=(8 + s) * tokens * wide + 12 * tokens + 4 * wide + 4 * sample.outputs,
    )
    return ModelShape("vit", (embed, block(count, tokens, wide, head_count, s, dropout), head), 1, head_count)
