"""Buckets: gradients of one dtype that travel together over one group of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import keras
import tensorflow as tf

from tfdist.runtime.bucketing import in_buckets
from tfdist.runtime.collectives import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """A subset of a list of variables. The methods take and fill lists in the order of all variables."""

    places: tuple[int, ...]  # indices in that list, from the last
    shapes: tuple[tuple[int, ...], ...]
    group: Group

    def take(self, values: Sequence[T]) -> list[T]:
        """Returns the values at this bucket's places."""
        return [values[place] for place in self.places]

    def put(self, values: Sequence[T], into: dict[int, T]) -> None:
        """Puts each of the bucket's `values` at its place."""
        into.update(zip(self.places, values, strict=True))

    def all_reduce(self, tensors: Sequence[tf.Tensor], over: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        """Applies `over` to the concatenation of the bucket's tensors, given in its order; splits the result again."""
        total = over(tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0))
        parts = tf.split(total, [math.prod(shape) for shape in self.shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]


def make_buckets(variables: Sequence[keras.Variable], groups: Sequence[Group], most: int) -> list[Bucket]:
    """Divides all variables into buckets of about `most` elements, each summed over its group. Variables of one group
    and dtype are put together starting from the last, because the backward pass computes the last gradients first.
    """
    kinds = [(group, variable.dtype) for group, variable in zip(groups, variables, strict=True)]
    shapes = [tuple(variable.shape) for variable in variables]
    buckets: list[Bucket] = []
    for kind in dict.fromkeys(kinds):
        of_kind = [place for place, other in enumerate(kinds) if other == kind]
        for members in in_buckets([math.prod(shapes[place]) for place in of_kind], most):
            places = tuple(of_kind[member] for member in members)
            buckets.append(Bucket(places, tuple(shapes[place] for place in places), kind[0]))
    return buckets
