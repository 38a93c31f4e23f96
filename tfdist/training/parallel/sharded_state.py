"""State that is spread over a mesh, as whole arrays, and back: a snapshot knows nothing of the mesh that wrote it.

`ShardedState` gives the variables of a run the keys, shapes and types that they have in a data-parallel run
(artifacts/state.py), whatever they look like here: whole, a part along `model` (tensor.py) or `expert` (expert.py), a
shard along `data` (zero.py), a shard of a part, or on another stage of a pipeline. What every replica has of its own
(the errors that compression.py carries) goes in as one row a replica; other replicas than those that wrote them get
equal parts of the sum. So a snapshot of any mesh resumes on any other, or on none.

It does so in two ways: the chief holds all, or (artifacts/parts.py) every worker writes and reads its own part, which
is some boxes of each whole array: a shard is a range of a flattened part, and a part is some places along one dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.artifacts.parts import Box, Shard, boxes_of_range, read_shards, runs
from tfdist.artifacts.store import SUFFIX
from tfdist.control.exit_codes import CheckpointError
from tfdist.runtime.collectives import Group
from tfdist.runtime.mesh import AXES, REPLICA_AXES
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.runtime.weight_check import Held
from tfdist.training.parallel.mesh_update import MeshUpdate
from tfdist.training.parallel.shards import Layout
from tfdist.training.parallel.tensor import Part


@dataclass(frozen=True)
class Piece:
    """What this worker holds of one variable."""

    holder: Any  # keras.Variable or tf.Variable
    shape: tuple[int, ...]  # of the whole
    part: Part | None  # along `model` or `expert`
    is_shard: bool  # over `group`
    group: Group  # the replicas, or, of experts, those among them that hold the same
    stages: tuple[int, ...] | None = None  # of the pipeline that hold it; None: all
    is_row: bool = False  # every replica has its own; the whole has one row for each

    @property
    def part_shape(self) -> tuple[int, ...]:
        return self.part.local_shape if self.part else self.shape

    @property
    def name(self) -> str:
        return getattr(self.holder, "path", self.holder.name)


class ShardedState:
    """The state of a run on a mesh. All methods but `table` and `read` are collectives: every worker must call them."""

    def __init__(
        self,
        runtime: MeshRuntime,
        model: keras.Model,
        optimizer: keras.Optimizer,
        train: Mapping[str, Any],
        update: MeshUpdate,
        parts: Mapping[int, Part],
    ):
        self.runtime, self.update = runtime, update
        replicas = runtime.group(*REPLICA_AXES)
        number = {id(variable): index for index, variable in enumerate(update.all)}
        held = {id(variable): index for index, variable in enumerate(update.trainable)}
        sharded = update.shards is not update.trainable
        self.pieces: dict[str, Piece] = {}
        for key, variable in state.collect(model, optimizer, train).items():
            owner = update.owners.get(id(variable), number.get(id(variable)))
            if owner is None:
                is_row = "compression_error" in key
                shape = (replicas.size, *variable.shape) if is_row else tuple(variable.shape)
                self.pieces[key] = Piece(
                    variable, shape, None, False, replicas, update.stages.get(id(variable)), is_row
                )
                continue
            parameter = update.all[owner]
            part, place = parts.get(id(parameter)), held.get(id(parameter))
            is_parameter = id(variable) in number
            is_shard = sharded and (not is_parameter or id(parameter) in update.storage_variables())
            holder = update.shards[place] if is_parameter and is_shard and place is not None else variable
            group = replicas if place is None else update.groups[place]
            self.pieces[key] = Piece(
                holder,
                part.shape if part else tuple(parameter.shape),
                part,
                is_shard,
                group,
                update.stages[id(parameter)],
            )
        self._stages = runtime.group("pipe")
        self._from_stage = tf.function(lambda x, stage: self._stages.broadcast(x, self._stages.ranks[stage]))
        self._gather = tf.function(lambda x, ranks: runtime.group_of(ranks).all_gather(x))

    def table(self) -> dict[str, tuple[str, list[int], str]]:
        """key -> (name, whole shape, dtype), as artifacts.state.table gives for a data-parallel run."""
        return {
            key: (piece.name, list(piece.shape), tf.as_dtype(piece.holder.dtype).name)
            for key, piece in self.pieces.items()
        }

    def to_host(
        self, wanted: bool = True, into: Mapping[str, np.ndarray] | None = None, only: str = ""
    ) -> dict[str, np.ndarray]:
        """key -> whole array on the chief, of keys that begin with `only`; {} on the others.

        One variable at a time is whole on every worker.
        """
        whole = {}
        for key, piece in self.pieces.items():
            if not key.startswith(only):
                continue
            array = (
                self._whole(piece)
                if self._is_here(piece)
                else np.zeros(piece.shape, tf.as_dtype(piece.holder.dtype).as_numpy_dtype)
            )
            if piece.stages is not None and 0 not in piece.stages:
                array = self._from_stage(tf.constant(array), piece.stages[0]).numpy()
            if self.runtime.rank == 0:
                whole[key] = array
        return whole

    def held(self) -> list[Held]:
        """The pieces of the model's weights and moving statistics, for runtime/weight_check.py."""
        return [
            Held(piece.name, _value(piece.holder) if self._is_here(piece) else None, self._number(piece))
            for key, piece in self.pieces.items()
            if key.startswith("model/") and tf.as_dtype(piece.holder.dtype).is_floating
        ]

    def first_of_stage(self) -> int:
        """The first rank on this stage of the pipeline."""
        return self.runtime.mesh.rank({"pipe": self._stages.index})

    def _number(self, piece: Piece) -> int:
        """Which piece of the whole it is; several workers may hold the same."""
        return (piece.part.index if piece.part else 0) * self.runtime.size + (
            piece.group.index if piece.is_shard else 0
        )

    def check(self, stored: Mapping[str, tuple]) -> None:
        """Raises CheckpointError if a stored table does not fit. There may be rows of another number of replicas."""
        rows = {
            key: (name, [stored[key][0][0], *shape[1:]], dtype)
            for key, (name, shape, dtype) in self.table().items()
            if self.pieces[key].is_row and key in stored
        }
        state.check(self.table() | rows, stored)

    def fitted(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Stored arrays with as many rows as there are replicas now."""
        return {
            key: shared_out(array, self.pieces[key].group.size) if self.pieces[key].is_row else array
            for key, array in arrays.items()
        }

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Gives every variable its piece of the whole arrays, which every worker must have.

        Raises CheckpointError if they do not fit.
        """
        for key, (name, shape, dtype) in self.table().items():
            if key not in arrays or list(arrays[key].shape) != shape or str(arrays[key].dtype) != dtype:
                found = f"{arrays[key].dtype} {arrays[key].shape}" if key in arrays else "absent"
                raise CheckpointError(
                    f"The checkpoint does not fit: {name} is {dtype} {tuple(shape)} here, {found} there: use the model"
                    " flags of the run that wrote it."
                )
        for key, piece in self.pieces.items():
            if self._is_here(piece):
                _value(piece.holder).assign(self._own(piece, arrays[key]))
        self.update.collect()

    # -- in parts --------------------------------------------------------------------------------------------------

    def to_shards(self) -> list[Shard]:
        """What this worker writes: every element of the state is written by exactly one."""
        shards = []
        for key, piece in self.pieces.items():
            if self._is_here(piece) and self._writes(piece):
                array = np.asarray(_value(piece.holder).numpy())
                shards += self._shards(key, piece, array[np.newaxis] if piece.is_row else array)
        return shards

    def read(self, prefix: str) -> None:
        """Gives every variable its piece of the arrays in TensorFlow's checkpoint `prefix`, of which this worker reads
        no more.
        """
        for key, piece in self.pieces.items():
            if self._is_here(piece):
                _value(piece.holder).assign(self._read_piece(prefix, key, piece))
        self.update.collect()

    def _read_piece(self, prefix: str, key: str, piece: Piece) -> np.ndarray:
        if piece.is_row:
            return self._read_row(prefix, key, piece)
        regions = self._regions(piece)
        contents = iter(
            read_shards(
                prefix,
                [Shard(key, piece.shape, box) for _, boxes in regions for box in boxes],
                tf.as_dtype(piece.holder.dtype),
            )
        )
        joined = [
            next(contents) if len(boxes) == 1 else np.concatenate([next(contents) for _ in boxes], piece.part.dim)
            for _, boxes in regions
        ]
        if piece.is_shard:
            flat = (
                np.concatenate([array.reshape(-1) for array in joined])
                if joined
                else np.zeros(0, tf.as_dtype(piece.holder.dtype).as_numpy_dtype)
            )
            return np.pad(flat, (0, piece.holder.shape[0] - flat.size))
        return joined[0]

    def _read_row(self, prefix: str, key: str, piece: Piece) -> np.ndarray:
        count, *shape = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()[key + SUFFIX]
        wanted = [piece.group.index] if count == piece.group.size else range(count)
        shards = [Shard(key, (count, *shape), ((row, 1), *((0, length) for length in shape))) for row in wanted]
        rows = np.concatenate(read_shards(prefix, shards, tf.as_dtype(piece.holder.dtype)))
        return rows[0] if count == piece.group.size else shared_out(rows, piece.group.size)[0]

    def _shards(self, key: str, piece: Piece, array: np.ndarray) -> list[Shard]:
        shards, offset = [], 0
        for lengths, boxes in self._regions(piece):
            size = math.prod(lengths)
            content = array.reshape(-1)[offset : offset + size].reshape(lengths) if piece.is_shard else array
            offset += size
            contents = (
                [content]
                if len(boxes) == 1
                else np.split(content, np.cumsum([box[piece.part.dim][1] for box in boxes])[:-1], piece.part.dim)
            )
            with tf.device("CPU:0"):  # as a tensor it is saved without another copy
                shards += [
                    Shard(key, piece.shape, box, tf.constant(part)) for box, part in zip(boxes, contents, strict=True)
                ]
        return shards

    def _regions(self, piece: Piece) -> list[tuple[tuple[int, ...], list[Box]]]:
        """What this worker holds of a piece, as (lengths of a box of its part, the boxes of the whole that make it up
        along the part's dim).
        """
        local = piece.part_shape
        if piece.is_row:
            box = ((piece.group.index, 1), *((0, length) for length in local[1:]))
            return [((1, *local[1:]), [box])]
        boxes: list[Box] = [tuple((0, length) for length in local)]
        if piece.is_shard:
            length = -(-math.prod(local) // piece.group.size)
            boxes = boxes_of_range(
                local, piece.group.index * length, min((piece.group.index + 1) * length, math.prod(local))
            )
        regions = []
        for box in boxes:
            lengths = tuple(length for _, length in box)
            if piece.part:
                dim, places = piece.part.dim, piece.part.places[piece.part.index]
                wholes = [(*box[:dim], run, *box[dim + 1 :]) for run in runs(places[box[dim][0] : sum(box[dim])])]
            else:
                wholes = [box]
            regions.append((lengths, wholes))
        return regions

    def _writes(self, piece: Piece) -> bool:
        """Of all workers that hold the same, the first writes it."""
        members = [
            self.runtime.mesh.coordinates(rank)
            for rank in (piece.group.ranks if piece.is_shard or piece.is_row else ())
        ]
        different = {
            *(axis for axis in AXES if len({at[axis] for at in members}) > 1),
            *([piece.part.axis] if piece.part else []),
        }
        return self._stages.index == (piece.stages[0] if piece.stages else 0) and not any(
            self.runtime.coordinates[axis] for axis in AXES if axis not in {"pipe", *different}
        )

    # -- one variable ----------------------------------------------------------------------------------------------

    def _is_here(self, piece: Piece) -> bool:
        return piece.stages is None or self._stages.index in piece.stages

    def _whole(self, piece: Piece) -> np.ndarray:
        value = tf.convert_to_tensor(_value(piece.holder))
        if piece.is_shard:
            value = self._gather(value, piece.group.ranks)[: math.prod(piece.part_shape)]
            value = tf.reshape(value, piece.part_shape)
        if piece.is_row:
            value = self._gather(value[tf.newaxis], piece.group.ranks)
        if piece.part is None:
            return value.numpy()
        parts = self.runtime.group(piece.part.axis)
        padded = self._gather(tf.constant(piece.part.padded(value.numpy())), parts.ranks).numpy()
        return piece.part.join(np.split(padded, parts.size))

    def _own(self, piece: Piece, whole: np.ndarray) -> np.ndarray:
        if piece.is_row:
            return whole[piece.group.index]
        own = piece.part.cut(whole) if piece.part else whole
        if not piece.is_shard:
            return own
        return Layout([own.shape], piece.group).cut(own, 0)


def shared_out(rows: np.ndarray, count: int) -> np.ndarray:
    """[n, ...] -> [count, ...] with the same sum: the same, or equal parts of it."""
    return (
        rows
        if len(rows) == count
        else np.broadcast_to(rows.sum(0) / np.asarray(count, rows.dtype), (count, *rows.shape[1:]))
    )


def _value(holder: Any) -> tf.Variable:
    return holder.value if isinstance(holder, keras.Variable) else holder
