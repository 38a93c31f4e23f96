"""How the cnn model depends on the sides of an image. Imports no TensorFlow, because the planner uses it, too."""

from __future__ import annotations

from collections.abc import Sequence


def first_stride(sides: Sequence[int]) -> int:
    """Returns the stride of the first convolution: 2 for larger images, which divides the work of all later layers by
    4."""
    return 2 if min(sides) >= 16 else 1


def pools(sides: Sequence[int]) -> bool:
    """Returns whether a feature map with these sides is pooled."""
    return min(sides) >= 2


def flattens(sides: Sequence[int]) -> bool:
    """Returns whether the last feature map is flattened, which keeps its places; a larger one is averaged."""
    return max(sides) <= 4
