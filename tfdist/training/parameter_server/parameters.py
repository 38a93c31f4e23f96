"""The weights, statistics and optimizer state of a model on parameter servers: where each is, how they are read and
updated, and how they are copied to and from the chief's model, which evaluation, snapshots and exports use.

A weight whose pieces would have at least --ps_piece_kb is cut along its first dim, one piece per server; each other
weight is placed whole on the server with the smallest load so far. Each server has its own optimizer for its pieces, so
that an update is computed where the weights are; workers only send gradients. Optimizers that need a weight as a whole
(lamb, adafactor, muon) get whole weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.hidden_state import hidden_variables
from tfdist.compat import keras_optimizers
from tfdist.compat.keras_random import is_seed_state
from tfdist.control.exit_codes import ConfigError
from tfdist.training.connected import apply_connected
from tfdist.training.parallel.assigned_weights import ON_SERVERS, refuse_assigned, refuse_rules_with_state


@dataclass(frozen=True)
class Piece:
    """Rows start..stop-1 of weight number `weight` (all of it if it is a scalar), on server `server`."""

    weight: int
    start: int
    stop: int
    server: int


def place(shapes: Sequence[tuple[int, ...]], servers: int, piece_bytes: float) -> list[Piece]:
    """Divides the rows of float32 weights over servers: large weights in equal pieces, others where load is least.

    piece_bytes: the minimum size of a piece; 0: nothing is cut. The result is ordered by weight, then by row.
    """
    load = [0] * servers
    pieces = []
    for weight, shape in sorted(enumerate(shapes), key=lambda item: -math.prod(item[1])):
        rows, size = (shape[0] if shape else 1), 4 * math.prod(shape)
        parts = min(servers, rows, int(size / piece_bytes)) if piece_bytes else 1
        for part in range(max(parts, 1)):
            start, stop = part * rows // max(parts, 1), (part + 1) * rows // max(parts, 1)
            server = min(range(servers), key=lambda index: load[index])
            load[server] += size * (stop - start) // max(rows, 1)
            pieces.append(Piece(weight, start, stop, server))
    return sorted(pieces, key=lambda piece: (piece.weight, piece.start))


class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule times `factor`, which the code that traces an update sets to a tensor."""

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule):
        super().__init__()
        self.schedule = schedule
        self.factor: tf.Tensor | None = None

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        rate = self.schedule(step)
        return rate if self.factor is None else rate * self.factor

    def get_config(self) -> dict:
        return self.schedule.get_config()


class Parameters:
    """The weights, statistics and optimizer state on parameter servers, as described above.

    Args:
      model, optimizer: the chief's, built.
      make_optimizer: learning-rate schedule -> an optimizer like the chief's.
      devices: TensorFlow's names of the parameter servers' devices.
      piece_bytes: see `place`.
      on_step: called with each step to which the chief is set.
    Raises ConfigError for a model whose weights have constraints, which an update of pieces cannot keep; and, when the
    model is called, if it sets its trainable weights itself, or variables unknown to Keras.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.Optimizer,
        schedule: keras.optimizers.schedules.LearningRateSchedule,
        make_optimizer: Callable[[keras.optimizers.schedules.LearningRateSchedule], keras.Optimizer],
        devices: Sequence[str],
        piece_bytes: float,
        on_step: Callable[[int], Any],
    ):
        self.model, self.optimizer, self.devices, self.on_step = model, optimizer, list(devices), on_step
        self.weights = list(model.trainable_variables)
        if any(variable.constraint is not None for variable in self.weights):
            raise ConfigError(
                "--strategy=parameter_server does not keep weight constraints (kernel_constraint and the like): remove"
                " them from the model, or use another strategy."
            )
        refuse_rules_with_state(model, "--strategy=parameter_server", ON_SERVERS)
        refuse_assigned(model, [*self.weights, *hidden_variables(model)], "--strategy=parameter_server", ON_SERVERS)
        self.states = [variable for variable in model.non_trainable_variables if not is_seed_state(variable)]
        self.schedule = ScaledSchedule(schedule)
        self.pieces = place([tuple(variable.shape) for variable in self.weights], len(devices), piece_bytes)
        self._values = [self._make_piece(piece) for piece in self.pieces]
        with tf.device(self.devices[0]):
            self.counter = tf.Variable(tf.constant(0, tf.int64), trainable=False, name="updates")
            self._states = [
                tf.Variable(variable.numpy(), trainable=False, dtype=variable.dtype) for variable in self.states
            ]
        self._slots: list[tuple[Piece, str, keras.Variable]] = []  # (piece, name of the slot, the server's variable)
        self._optimizers = {
            server: self._build_optimizer(server, make_optimizer)
            for server in sorted({piece.server for piece in self.pieces})
        }
        self._local = self._local_slots()
        self._iterations: Any = optimizer.iterations  # exists since the optimizer was built
        self.skipped = 0  # steps without an update; the optimizer does not count them

    def _make_piece(self, piece: Piece) -> keras.Variable:
        whole = self.weights[piece.weight]
        *folders, name = whole.path.split("/")
        with contextlib.ExitStack() as scopes:
            for folder in folders:  # the path as in the model, which --weight_decay_exclude and some optimizers use
                scopes.enter_context(keras.name_scope(folder))
            scopes.enter_context(tf.device(self.devices[piece.server]))
            return keras.Variable(_rows(whole.numpy(), piece), name=name, dtype=whole.dtype)

    def _build_optimizer(self, server: int, make_optimizer: Callable) -> keras.Optimizer:
        own_weights = {
            id(value): piece for piece, value in zip(self.pieces, self._values, strict=True) if piece.server == server
        }
        with tf.device(self.devices[server]):
            optimizer = make_optimizer(self.schedule)
            slots = keras_optimizers.built_with_slots(
                optimizer, [value for value in self._values if id(value) in own_weights]
            )
        self._slots += [(own_weights[id(value)], name, slot) for slot, value, name in slots]
        keras_optimizers.count_steps_atomically(optimizer)
        return optimizer

    # -- inside a tf.function --------------------------------------------------------------------------------------

    def read(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns (whole weights, statistics), in the order of the model's variables."""
        rows: list[list[tf.Tensor]] = [[] for _ in self.weights]
        for piece, value in zip(self.pieces, self._values, strict=True):
            rows[piece.weight].append(value.value.read_value())
        return [parts[0] if len(parts) == 1 else tf.concat(parts, 0) for parts in rows], [
            state.read_value() for state in self._states
        ]

    def update(self, gradients: Sequence[tf.Tensor | None], factor: tf.Tensor | None = None) -> None:
        """Updates the weights by whole gradients; None leaves a weight unchanged. `factor` multiplies the learning
        rate."""
        self.schedule.factor = factor
        for server, optimizer in self._optimizers.items():
            with tf.device(self.devices[server]):
                own_pieces = [
                    (piece, value)
                    for piece, value in zip(self.pieces, self._values, strict=True)
                    if piece.server == server
                ]
                whole = [gradients[piece.weight] for piece, _ in own_pieces]
                rows = [
                    None if gradient is None else _rows(gradient, piece)
                    for gradient, (piece, _) in zip(whole, own_pieces, strict=True)
                ]
                apply_connected(optimizer, rows, [value for _, value in own_pieces])
        self.schedule.factor = None

    def set_states(self, values: Mapping[int, tf.Tensor]) -> None:
        """Sets new statistics (of BatchNormalization, for example), by place."""
        for place, value in values.items():
            self._states[place].assign(tf.cast(value, self._states[place].dtype))

    # -- between steps ---------------------------------------------------------------------------------------------

    def pull(self, step: int) -> None:
        """Copies the servers' values to the chief's model and optimizer, whose step becomes `step`.

        Call it only while no update is under way.
        """
        arrays = [np.empty(variable.shape, variable.dtype) for variable in self.weights]
        for piece, value in zip(self.pieces, self._values, strict=True):
            _rows(arrays[piece.weight], piece)[...] = value.numpy()
        for variable, array in zip(self.weights, arrays, strict=True):
            variable.assign(array)
        for variable, state in zip(self.states, self._states, strict=True):
            variable.assign(state.numpy())
        slots = {key: np.empty(local.shape, local.dtype) for key, local in self._local.items()}
        for piece, name, value in self._slots:
            array = slots[piece.weight, name]
            (_rows(array, piece) if tuple(array.shape) == tuple(self.weights[piece.weight].shape) else array)[...] = (
                value.numpy()
            )
        for key, array in slots.items():
            self._local[key].assign(array)
        for local, remote in self._others(min(self._optimizers)):
            local.assign(remote.numpy())
        self.set_local_step(step)
        self.set_step(step)

    def push(self, step: int) -> None:
        """Copies the chief's values to the servers: the inverse of `pull`."""
        self.skipped = step - int(self._iterations.numpy())
        for piece, value in zip(self.pieces, self._values, strict=True):
            value.assign(_rows(self.weights[piece.weight].numpy(), piece))
        for variable, state in zip(self.states, self._states, strict=True):
            state.assign(variable.numpy())
        for piece, name, value in self._slots:
            array = self._local[piece.weight, name].numpy()
            value.assign(
                _rows(array, piece) if tuple(array.shape) == tuple(self.weights[piece.weight].shape) else array
            )
        for server in self._optimizers:
            for local, remote in self._others(server):
                remote.assign(local.numpy())
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Sets the number of steps, and of updates, on every server.

        An update that a dying worker began may have been counted, and be made again.
        """
        self.counter.assign(step)
        for optimizer in self._optimizers.values():
            iterations: Any = optimizer.iterations
            iterations.assign(step - self.skipped)

    def set_local_step(self, step: int) -> None:
        """Sets the chief's step, and its number of updates, which its learning rate follows."""
        self._iterations.assign(step - self.skipped)
        self.on_step(step)

    def _local_slots(self) -> dict[tuple[int, str], keras.Variable]:
        """(number of a weight, name of a slot) -> the chief's slot, found by the name that Keras gives it.

        Weights may share a path, as in two towers made by one function: their slots are in the order of the weights.
        """
        named: dict[str, list[keras.Variable]] = {}
        for variable in self.optimizer.variables:
            named.setdefault(variable.name, []).append(variable)
        return {
            (weight, name): named[f"{self.weights[weight].path.replace('/', '_')}_{name}"].pop(0)
            for weight, name in sorted({(piece.weight, name) for piece, name, _ in self._slots})
        }

    def _others(self, server: int) -> list[tuple[keras.Variable, keras.Variable]]:
        """(the chief's, the server's) optimizer variables that belong to no weight, except for the iterations."""
        slots = {id(value) for _, _, value in self._slots}
        taken = {id(variable) for variable in self._local.values()}
        local = [
            variable
            for variable in self.optimizer.variables
            if id(variable) not in taken and variable is not self._iterations
        ]
        optimizer = self._optimizers[server]
        remote = [
            variable
            for variable in optimizer.variables
            if id(variable) not in slots and variable is not optimizer.iterations
        ]
        return list(zip(local, remote, strict=True))

    def describe(self) -> str:
        """One line about the placement of the weights."""
        load = [0] * len(self.devices)
        for piece, value in zip(self.pieces, self._values, strict=True):
            load[piece.server] += 4 * math.prod(value.shape)
        cut = len({piece.weight for piece in self.pieces if piece.start})
        return (
            f"{len(self.weights)} weights on {len(self.devices)} parameter servers"
            f" ({', '.join(f'{size / 1e6:.3g} MB' for size in load)}), {cut} of them in pieces"
        )


def _rows(array, piece: Piece):
    """The rows of a piece; a scalar has no rows, and is returned whole."""
    return array[piece.start : piece.stop] if len(array.shape) else array
