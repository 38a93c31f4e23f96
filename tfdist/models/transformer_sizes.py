"""The named sizes of the transformer and vit models, and the side of a patch. Imports no TensorFlow, because the
planner uses it, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Size(NamedTuple):
    """The size of a stack of blocks."""

    layers: int
    width: int
    heads: int

    def with_own(self, layers: int | None, width: int | None, heads: int | None) -> Size:
        """Returns the size with the given values in place of its own; None: not given."""
        return Size(
            self.layers if layers is None else layers,
            self.width if width is None else width,
            self.heads if heads is None else heads,
        )


TRANSFORMERS = {
    "tiny": Size(layers=2, width=64, heads=4),
    "small": Size(layers=6, width=384, heads=6),
    "gpt2": Size(layers=12, width=768, heads=12),
    "gpt2-medium": Size(layers=24, width=1024, heads=16),
}
VITS = {  # the names and sizes of Touvron et al. 2020, arXiv:2012.12877
    "tiny": Size(layers=12, width=192, heads=3),
    "small": Size(layers=12, width=384, heads=6),
    "base": Size(layers=12, width=768, heads=12),
}


def usual_patch(sides: Sequence[int]) -> int:
    """Returns the default side of a patch, in pixels, for an image with these sides."""
    return 16 if min(sides) >= 128 else 4 if min(sides) >= 16 else 2
