"""Decides which tensors travel together in one bucket."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def in_buckets(
    sizes: Sequence[int], most: int, kinds: Sequence[Hashable] | None = None, align: int = 1
) -> list[list[int]]:
    """Groups indices into buckets of one kind and of size `most` at most, but with at least one tensor each.

    Starts from the last index, since the backward pass computes the last variables' gradients first. align: each tensor
    occupies a multiple of it. Sizes may be in bytes or elements.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        other = kinds is not None and bool(buckets) and kinds[buckets[-1][-1]] != kinds[index]
        if not buckets or other or filled + sizes[index] > most:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += -(-sizes[index] // align) * align
    return buckets
