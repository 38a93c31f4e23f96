"""State that is spread over a mesh, as whole arrays, and back: a snapshot knows nothing of the mesh that wrote it.

`SpreadState` gives the variables of a run the keys, shapes and types that they have in a data-parallel run
(artifacts/state.py), whatever they look like here: whole, a part along `model` (tensor.py), a shard along `data`
(zero.py), a shard of a part, or on another stage of a pipeline. What every replica has of its own goes in as the sum over replicas and comes
back as equal parts of it. So a snapshot of any mesh resumes on any other, or on none.
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
from tfdist.control.exit_codes import CheckpointError
from tfdist.runtime.mesh import REPLICA_AXES
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.parallel.mesh_update import MeshUpdate
from tfdist.training.parallel.tensor import Part


@dataclass(frozen=True)
class Piece:
    """What this worker holds of one variable."""

    holder: Any  # keras.Variable or tf.Variable
    shape: tuple[int, ...]  # of the whole
    part: Part | None  # along `model`
    is_shard: bool  # along the replica axes
    stages: tuple[int, ...] | None = None  # of the pipeline that hold it; None: all
    is_term: bool = False  # every replica has its own, and only the sum over them matters (errors of compression.py)

    @property
    def part_shape(self) -> tuple[int, ...]:
        return self.part.local_shape if self.part else self.shape

    @property
    def name(self) -> str:
        return getattr(self.holder, "path", self.holder.name)


class SpreadState:
    """The state of a run on a mesh. All methods but `table` are collectives: every worker must call them."""

    def __init__(self, runtime: MeshRuntime, model: keras.Model, optimizer: keras.Optimizer, train: Mapping[str, Any],
                 update: MeshUpdate, parts: Mapping[int, Part]):
        self.runtime, self.update = runtime, update
        number = {id(variable): index for index, variable in enumerate(update.all)}
        held = {id(variable): index for index, variable in enumerate(update.trainable)}
        sharded = update.shards is not update.trainable
        self.pieces: dict[str, Piece] = {}
        for key, variable in state.collect(model, optimizer, train).items():
            owner = update.owners.get(id(variable), number.get(id(variable)))
            if owner is None:
                self.pieces[key] = Piece(variable, tuple(variable.shape), None, False, update.stages.get(id(variable)), "compression_error" in key)
                continue
            parameter = update.all[owner]
            part, place = parts.get(id(parameter)), held.get(id(parameter))
            is_parameter = id(variable) in number
            is_shard = sharded and (not is_parameter or id(parameter) in update.holders_of_weights())
            holder = update.shards[place] if is_parameter and is_shard and place is not None else variable
            self.pieces[key] = Piece(holder, part.shape if part else tuple(parameter.shape), part, is_shard, update.stages[id(parameter)])
        self._replicas, self._parts, self._stages = runtime.group(*REPLICA_AXES), runtime.group("model"), runtime.group("pipe")
        self._from_stage = tf.function(lambda x, stage: self._stages.broadcast(x, self._stages.ranks[stage]))
        self._gather = tf.function(lambda x, group: (self._replicas if group == "replicas" else self._parts).all_gather(x))

    def table(self) -> dict[str, tuple[str, list[int], str]]:
        """key -> (name, whole shape, dtype), as artifacts.state.table gives for a data-parallel run."""
        return {key: (piece.name, list(piece.shape), tf.as_dtype(piece.holder.dtype).name) for key, piece in self.pieces.items()}

    def to_host(self, wanted: bool = True) -> dict[str, np.ndarray]:
        """key -> whole array on the chief; {} on the others. One variable at a time is whole on every worker."""
        whole = {}
        for key, piece in self.pieces.items():
            array = self._whole(piece) if self._is_here(piece) else np.zeros(piece.shape, tf.as_dtype(piece.holder.dtype).as_numpy_dtype)
            if piece.stages is not None and 0 not in piece.stages:
                array = self._from_stage(tf.constant(array), piece.stages[0]).numpy()
            if self.runtime.rank == 0:
                whole[key] = array
        return whole

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Gives every variable its piece of the whole arrays, which every worker must have. Raises CheckpointError if they do not fit."""
        for key, (name, shape, dtype) in self.table().items():
            if key not in arrays or list(arrays[key].shape) != shape or str(arrays[key].dtype) != dtype:
                found = f"{arrays[key].dtype} {arrays[key].shape}" if key in arrays else "absent"
                raise CheckpointError(f"The checkpoint does not fit: {name} is {dtype} {tuple(shape)} here, {found} there: use the model flags of the run that wrote it.")
        for key, piece in self.pieces.items():
            if self._is_here(piece):
                _value(piece.holder).assign(self._own(piece, arrays[key]))
        self.update.collect()

    def _is_here(self, piece: Piece) -> bool:
        return piece.stages is None or self._stages.index in piece.stages

    def _whole(self, piece: Piece) -> np.ndarray:
        value = tf.convert_to_tensor(_value(piece.holder))
        if piece.is_shard:
            value = self._gather(value, "replicas")[:math.prod(piece.part_shape)]
            value = tf.reshape(value, piece.part_shape)
        if piece.is_term:
            value = tf.reduce_sum(tf.reshape(self._gather(value[tf.newaxis], "replicas"), [-1, *piece.shape]), 0)
        if piece.part is None or self._parts.size == 1:
            return value.numpy()
        padded = self._gather(tf.constant(piece.part.padded(value.numpy())), "parts").numpy()
        return piece.part.join(np.split(padded, self._parts.size))

    def _own(self, piece: Piece, whole: np.ndarray) -> np.ndarray:
        own = piece.part.cut(whole) if piece.part else whole
        if piece.is_term:
            return own / self._replicas.size
        if not piece.is_shard:
            return own
        n = self._replicas.size
        length = -(-own.size // n)
        return np.pad(own.reshape(-1), (0, length * n - own.size))[self._replicas.index * length:(self._replicas.index + 1) * length]


def _value(holder: Any) -> tf.Variable:
    return holder.value if isinstance(holder, keras.Variable) else holder
