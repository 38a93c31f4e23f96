"""Shards: each variable is flattened, padded, and cut into n equal parts; member i of a group holds part i.

Legend. n: members. size: elements of a variable. length = ceil(size / n): elements of its shard; the last shards may
end in padding, which stays 0 under element-wise updates with zero gradients, and is cut off when the variable is
reassembled.

Variables are cut one by one, not as one long vector: so an optimizer built on shards has one slot per variable, in the
order of a data-parallel run, and paths (for --weight_decay_exclude) still match. Several shards travel together as the
columns of a matrix [n, sum of lengths], whose row i is for member i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_optimizers, keras_variables
from tfdist.runtime.collectives import Group
from tfdist.training.dtypes import of_each_dtype


class ShardLayout:
    """How tensors of these shapes are laid out in the matrix of a group, and how they travel."""

    def __init__(self, shapes: Sequence[Sequence[int]], group: Group):
        self.group, self.shapes = group, [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.lengths = [-(-size // group.size) for size in self.sizes]

    def scatter_sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums whole tensors over members; returns this member's shards [length] of the sums."""
        return of_each_dtype(self._scatter_sum, tensors)

    def _scatter_sum(self, tensors: Sequence[tf.Tensor], places: Sequence[int]) -> list[tf.Tensor]:
        n, lengths = self.group.size, [self.lengths[place] for place in places]
        ends = [length * n - self.sizes[place] for place, length in zip(places, lengths, strict=True)]
        columns = [
            tf.reshape(_padded(tf.reshape(tensor, [-1]), end), [n, length])
            for tensor, end, length in zip(tensors, ends, lengths, strict=True)
        ]
        row = self.group.reduce_scatter(tf.concat(columns, 1))
        return tf.split(row[0], lengths)

    def gather(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the whole tensors; `shards`: this member's shards. The gradient is `scatter_sum`."""
        return of_each_dtype(self._gather, [tf.convert_to_tensor(shard) for shard in shards])

    def _gather(self, shards: Sequence[tf.Tensor], places: Sequence[int]) -> list[tf.Tensor]:
        rows = self.group.all_gather(tf.concat(list(shards), 0)[tf.newaxis])
        columns = tf.split(rows, [self.lengths[place] for place in places], 1)
        flat = [tf.reshape(column, [-1]) for column in columns]
        sizes = [self.sizes[place] for place in places]
        return [
            tf.reshape(tensor if tensor.shape[0] == size else tensor[:size], self.shapes[place])
            for tensor, size, place in zip(flat, sizes, places, strict=True)
        ]

    def cut(self, array: np.ndarray, which: int) -> np.ndarray:
        """Cuts this member's shard out of a whole array; `which`: the number of its shape in the layout."""
        length = self.lengths[which]
        flat = np.pad(array.reshape(-1), (0, length * self.group.size - self.sizes[which]))
        return flat[self.group.index * length : (self.group.index + 1) * length]


def _padded(vector: tf.Tensor, end: int) -> tf.Tensor:
    return tf.pad(vector, [[0, end]]) if end else vector  # avoids a copy without padding


def shard_variables(variables: Sequence[keras.Variable], groups: Sequence[Group]) -> list[keras.Variable]:
    """Makes a variable [length] for each, which holds this member's shard of its value in its group.

    The paths stay the same: by these --weight_decay_exclude and some optimizers choose, and slots get their names.
    """
    return [
        keras_variables.like(variable, ShardLayout([variable.shape], group).cut(variable.numpy(), 0))
        for variable, group in zip(variables, groups, strict=True)
    ]


def empty_like(variable: keras.Variable) -> keras.Variable:
    """Makes a variable without elements, with the same path and number of dims: some optimizers choose by these."""
    return keras_variables.like(variable, np.zeros([0] * len(variable.shape), variable.dtype))


def build_optimizer(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> dict[int, int]:
    """Builds the optimizer on `variables`. Returns id of a slot -> the index of the variable that it belongs to."""
    number = {id(variable): index for index, variable in enumerate(variables)}
    slots = keras_optimizers.built_with_slots(optimizer, variables)
    return {id(slot): number[id(variable)] for slot, variable, _ in slots}
