"""Converts state that is distributed over a mesh to whole arrays, and back: snapshots do not depend on the mesh.

`ShardedState` gives the variables of a run the keys, shapes and dtypes that they have in a data-parallel run
(artifacts/state.py), however they are held here: whole, as a part along `model` (tensor.py) or `expert` (expert.py), as
a shard along `data` (zero.py), as a shard of a part, or on another stage of a pipeline. State that differs between
replicas (the errors that compression.py carries) is stored as one row per replica; if the number of replicas has
changed, each gets an equal part of the sum. So a snapshot of any mesh resumes on any other, or on none.

There are two ways: the chief holds everything, or (artifacts/sharded_snapshots.py) every worker writes and reads its
own part, which consists of boxes of each whole array (state_piece.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts import state
from tfdist.artifacts.sharded_snapshots import Shard
from tfdist.config.mesh_degrees import AXES
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.mesh import REPLICA_AXES
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.runtime.weight_check import Held, is_compared
from tfdist.training.parallel.mesh_update import MeshUpdate
from tfdist.training.parallel.state_piece import Piece, shared_out
from tfdist.training.parallel.tensor import VariablePart


class ShardedState:
    """The state of a run on a mesh. All methods except `table`, `wanted` and `read` are collective calls: every worker
    must make them.
    """

    def __init__(
        self,
        runtime: MeshRuntime,
        model: keras.Model,
        optimizer: keras.Optimizer,
        train: Mapping[str, Any],
        update: MeshUpdate,
        parts: Mapping[int, VariablePart],
    ):
        self.runtime, self.update = runtime, update
        self._replicas = runtime.group(*REPLICA_AXES)
        self._number = {id(variable): index for index, variable in enumerate(update.all)}
        self._held = {id(variable): index for index, variable in enumerate(update.trainable)}
        self.pieces = {
            key: self._piece(key, variable, parts) for key, variable in state.collect(model, optimizer, train).items()
        }
        self._stages = runtime.group("pipe")
        self._from_stage = tf.function(
            lambda x, stage: self._stages.broadcast(x, self._stages.ranks[stage]), autograph=False
        )
        self._gather = tf.function(lambda x, ranks: runtime.group_of(ranks).all_gather(x), autograph=False)

    def _piece(self, key: str, variable: keras.Variable | tf.Variable, parts: Mapping[int, VariablePart]) -> Piece:
        update, replicas = self.update, self._replicas
        owner = update.owners.get(id(variable), self._number.get(id(variable)))
        if owner is None:
            if not tf.TensorShape(variable.shape).is_fully_defined():
                raise ConfigError(
                    f"The variable {state.name_of(variable)} has no fixed shape, and a mesh (--mesh, --zero) stores"
                    " each variable as parts of one shape: give it a fixed shape, or train without a mesh."
                )
            is_row, frozen = state.CARRIED in key, parts.get(id(variable))
            shape: Any = (replicas.size, *variable.shape) if is_row else frozen.shape if frozen else variable.shape
            same = self.runtime.group("data") if frozen and frozen.axis == "expert" else replicas
            stages = update.stages.get(id(variable))
            return Piece(variable, tuple(shape), same, frozen, stages=stages, is_row=is_row)
        parameter = update.all[owner]
        part, place = parts.get(id(parameter)), self._held.get(id(parameter))
        is_parameter, sharded = id(variable) in self._number, update.is_sharded
        is_shard = sharded and (not is_parameter or id(parameter) in update.storage_variables())
        return Piece(
            update.optimized[place] if is_parameter and is_shard and place is not None else variable,
            part.shape if part else tuple(parameter.shape),
            replicas if place is None else update.groups[place],
            part,
            is_shard,
            update.stages[id(parameter)],
        )

    def table(self) -> dict[str, tuple[str, list[int], str]]:
        """key -> (name, whole shape, dtype), as artifacts.state.table returns for a data-parallel run."""
        return {key: (piece.name, list(piece.shape), piece.dtype.name) for key, piece in self.pieces.items()}

    def to_host(
        self, wanted: bool = True, into: Mapping[str, np.ndarray] | None = None, only: str | tuple[str, ...] = ""
    ) -> dict[str, np.ndarray]:
        """Returns key -> whole array on the chief, for keys that begin with (one of) `only`; {} on other workers.

        Only one variable at a time is whole on every worker.
        """
        whole = {}
        for key, piece in self.pieces.items():
            if not key.startswith(only):
                continue
            is_here = self._is_here(piece)
            array = self._whole(piece) if is_here else np.zeros(piece.shape, piece.dtype.as_numpy_dtype)
            if piece.stages is not None and 0 not in piece.stages:
                array = self._from_stage(tf.constant(array), piece.stages[0]).numpy()
            if self.runtime.rank == 0:
                whole[key] = array
        return whole

    def held(self) -> list[Held]:
        """The pieces of the model's weights and states, for runtime/weight_check.py."""
        return [
            Held(piece.name, piece.value if self._is_here(piece) else None, self._which(piece))
            for key, piece in self.pieces.items()
            if key.startswith(state.COMPARED) and is_compared(piece.variable)
        ]

    def first_of_stage(self) -> int:
        """The first rank on this stage of the pipeline."""
        return self.runtime.mesh.rank({"pipe": self._stages.index})

    def _which(self, piece: Piece) -> int:
        """The number of the piece within the whole variable; several workers may hold the same piece."""
        return (piece.part.index if piece.part else 0) * self.runtime.size + (
            piece.group.index if piece.is_shard else 0
        )

    def check(self, stored: Mapping[str, tuple]) -> None:
        """Raises CheckpointError if a stored table does not fit. The stored number of rows (replicas) may differ."""
        rows = {
            key: (name, [stored[key][0][0], *shape[1:]], dtype)
            for key, (name, shape, dtype) in self.table().items()
            if self.pieces[key].is_row and key in stored
        }
        state.check(self.table() | rows, stored)

    def fitted(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Returns the stored arrays with as many rows as there are replicas now."""
        return {
            key: shared_out(array, self.pieces[key].group.size) if self.pieces[key].is_row else array
            for key, array in arrays.items()
        }

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets every variable to its piece of the whole arrays, which every worker must have.

        Raises CheckpointError if they do not fit.
        """
        state.check_arrays(self.table(), arrays)
        for key, piece in self.pieces.items():
            if self._is_here(piece):
                piece.value.assign(piece.own(arrays[key]))
        self.update.refresh_shards()

    # -- in parts --------------------------------------------------------------------------------------------------

    def to_shards(self) -> list[Shard]:
        """Returns the boxes that this worker writes: every element of the state is written by exactly one worker."""
        shards = []
        for key, piece in self.pieces.items():
            if self._is_here(piece) and self._writes(piece):
                shards += piece.to_shards(key)
        return shards

    def wanted(self, stored: Mapping[str, Sequence]) -> list[Shard]:
        """The boxes that `read` reads. stored: a snapshot's table, key -> (name, shape, dtype)."""
        return [
            shard
            for key, piece in self.pieces.items()
            if self._is_here(piece)
            for shard in piece.wanted(key, stored[key][1][0] if piece.is_row else 0)
        ]

    def read(self, prefix: str) -> None:
        """Sets every variable to its piece of the arrays in TensorFlow's checkpoint `prefix`. This worker reads only
        its pieces.
        """
        for key, piece in self.pieces.items():
            if self._is_here(piece):
                piece.value.assign(piece.read(prefix, key))
        self.update.refresh_shards()

    def _writes(self, piece: Piece) -> bool:
        """Whether this worker writes the piece: the first of the workers that hold the same piece writes it."""
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
        value = tf.convert_to_tensor(piece.value)
        if piece.is_shard:
            if piece.shard_length:  # an empty array would make TensorFlow's collective divide by 0
                value = self._gather(value, piece.group.ranks)[: math.prod(piece.part_shape)]
            value = tf.reshape(value, piece.part_shape)
        if piece.is_row:
            value = self._gather(value[tf.newaxis], piece.group.ranks)
        if piece.part is None:
            return value.numpy()
        parts = self.runtime.group(piece.part.axis)
        padded = self._gather(tf.constant(piece.part.padded(value.numpy())), parts.ranks).numpy()
        return piece.part.join(np.split(padded, parts.size))
