"""The piece of one state variable that a worker holds, and its place in the whole array. No communication here.

A piece is boxes of the whole: a shard is a range of a flattened part, and a part is some indices along one dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.artifacts.checkpoint_files import SUFFIX
from tfdist.artifacts.sharded_snapshots import Shard, boxes_of_range, read_shards, runs
from tfdist.compat.checkpoint_index import Box
from tfdist.runtime.collectives import Group
from tfdist.training.parallel.shards import ShardLayout
from tfdist.training.parallel.tensor import VariablePart


class _Region(NamedTuple):
    """The place of this worker's part in the whole array: its shape, and the boxes that form it."""

    lengths: tuple[int, ...]
    boxes: list[Box]  # of the whole array; concatenated along `dim` they form the part
    dim: int


@dataclass(frozen=True)
class Piece:
    """The part of one variable of the state that this worker holds."""

    variable: keras.Variable | tf.Variable  # the variable that holds the part
    shape: tuple[int, ...]  # of the whole
    group: Group  # the replicas; for experts, the replicas among them that hold the same experts
    part: VariablePart | None  # along `model` or `expert`
    is_shard: bool = False  # over `group`
    stages: tuple[int, ...] | None = None  # pipeline stages that hold it; None: all
    is_row: bool = False  # every replica has its own value; the whole array has one row for each

    @property
    def part_shape(self) -> tuple[int, ...]:
        return self.part.local_shape if self.part else self.shape

    @property
    def shard_length(self) -> int:
        """Number of elements of a shard, including the padding of the last."""
        return -(-math.prod(self.part_shape) // self.group.size)

    @property
    def name(self) -> str:
        return state.name_of(self.variable)

    @property
    def dtype(self) -> tf.DType:
        return tf.as_dtype(self.variable.dtype)

    @property
    def value(self) -> tf.Variable:
        return state.tf_variable(self.variable)

    def own(self, whole: np.ndarray) -> np.ndarray:
        """Returns this worker's piece of a whole array."""
        if self.is_row:
            return whole[self.group.index]
        cut = self.part.cut(whole) if self.part else whole
        if not self.is_shard:
            return cut
        return ShardLayout([cut.shape], self.group).cut(cut, 0)

    def to_shards(self, key: str) -> list[Shard]:
        """Returns the piece as boxes of the array called `key`."""
        array = np.asarray(self.value.numpy())  # a copy, so that later steps do not change it
        array = array[np.newaxis] if self.is_row else array
        shards, offset = [], 0
        for region in self._regions():
            size = math.prod(region.lengths)
            content = array.reshape(-1)[offset : offset + size].reshape(region.lengths) if self.is_shard else array
            offset += size
            ends = np.cumsum([box[region.dim][1] for box in region.boxes])[:-1] if len(region.boxes) > 1 else []
            contents = np.split(content, ends, region.dim) if len(ends) else [content]
            shards += [Shard(key, self.shape, box, part) for box, part in zip(region.boxes, contents, strict=True)]
        return shards

    def wanted(self, key: str, rows: int) -> list[Shard]:
        """The boxes that `read` reads. rows: number of rows in the stored array, if every replica has its own."""
        if not self.is_row:
            return [Shard(key, self.shape, box) for region in self._regions() for box in region.boxes]
        which = [self.group.index] if rows == self.group.size else range(rows)
        whole = (rows, *self.shape[1:])
        return [Shard(key, whole, ((row, 1), *((0, length) for length in whole[1:]))) for row in which]

    def read(self, prefix: str, key: str) -> np.ndarray:
        """Reads the piece's content from TensorFlow's checkpoint `prefix`, and nothing more."""
        if self.is_row:
            return self._read_row(prefix, key)
        regions = self._regions()
        contents = iter(read_shards(prefix, self.wanted(key, 0), self.dtype))
        joined = [
            (
                next(contents)
                if len(region.boxes) == 1
                else np.concatenate([next(contents) for _ in region.boxes], region.dim)
            )
            for region in regions
        ]
        if not self.is_shard:
            return joined[0]
        flat = [array.reshape(-1) for array in joined]
        vector = np.concatenate(flat) if flat else np.zeros(0, self.dtype.as_numpy_dtype)
        return np.pad(vector, (0, self.shard_length - vector.size))

    def _read_row(self, prefix: str, key: str) -> np.ndarray:
        count = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()[key + SUFFIX][0]
        rows = np.concatenate(read_shards(prefix, self.wanted(key, count), self.dtype))
        return rows[0] if count == self.group.size else shared_out(rows, self.group.size)[0]

    def _regions(self) -> list[_Region]:
        local = self.part_shape
        if self.is_row:
            box = ((self.group.index, 1), *((0, length) for length in local[1:]))
            return [_Region((1, *local[1:]), [box], 0)]
        boxes: list[Box] = [tuple((0, length) for length in local)]
        if self.is_shard:
            start, length = self.group.index * self.shard_length, self.shard_length
            if length:
                boxes = boxes_of_range(local, start, min(start + length, math.prod(local)))
            elif self.group.index:  # an empty variable: only the first member reports it
                boxes = []
        regions = []
        for box in boxes:
            lengths = tuple(length for _, length in box)
            if self.part:
                dim, places = self.part.dim, self.part.places[self.part.index]
                inside = runs(places[box[dim][0] : sum(box[dim])])
                regions.append(_Region(lengths, [(*box[:dim], run, *box[dim + 1 :]) for run in inside], dim))
            else:
                regions.append(_Region(lengths, [box], 0))
        return regions


def shared_out(rows: np.ndarray, count: int) -> np.ndarray:
    """[n, ...] -> [count, ...] with the same sum: the same rows if n is `count`, otherwise equal parts of the sum."""
    if len(rows) == count:
        return rows
    return np.broadcast_to(rows.sum(0) / np.asarray(count, rows.dtype), (count, *rows.shape[1:]))
