"""How the sides of an image decide what the cnn model does with it. No TensorFlow: the planner asks too."""

from __future__ import annotations

from collections.abc import Sequence


def first_stride(sides: Sequence[int]) -> int:
    """The stride of the first convolution: 2 of larger images, which divides the work of all that follows by 4."""
    return 2 if min(sides) >= 16 else 1


def pools(sides: Sequence[int]) -> bool:
    """Whether a feature map with these sides is pooled."""
    return min(sides) >= 2


def flattens(sides: Sequence[int]) -> bool:
    """Whether the last feature map keeps its places; a larger one is averaged."""
    return max(sides) <= 4
