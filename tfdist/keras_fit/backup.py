"""keras.callbacks.BackupAndRestore, replaced: Keras' own would write on every worker, and begin a new history.

After each epoch the chief writes one file: all variables of model and optimizer, the history, and the plain attributes
of the other callbacks (patience counters, best values, best weights). A program that is started again unchanged goes on
after the last complete epoch, on all workers, with the order of data it would have had.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.control.exit_codes import CheckpointError
from tfdist.runtime.encoding import Malformed, decode, encode
from tfdist.runtime.one_device import OneDevice
from tfdist.runtime.sockets import Sockets

FILE = "tfdist-backup.state"  # runtime/encoding.py's form: reading it executes nothing, whoever wrote it
_ENTRIES = {"variables": list, "epoch": int, "stopped": bool, "history": dict, "epochs": list, "callbacks": list}
_NOT_STATE = ("model", "params", "validation_data", "append_header")  # the last: whether a CSV file has its header yet


def replace(callbacks: Sequence[keras.callbacks.Callback], runtime: OneDevice) -> list[keras.callbacks.Callback]:
    """The callbacks, with a BackupAndRestore of Keras' replaced by an EpochBackup, at the end. Called by all workers."""
    found = [callback for callback in callbacks if isinstance(callback, keras.callbacks.BackupAndRestore)]
    if not found:
        return list(callbacks)
    others = [callback for callback in callbacks if callback not in found]
    folder = Path(found[0].backup_dir)
    if runtime.rank == 0:
        print(f"tfdist: BackupAndRestore of Keras is replaced by tfdist's: one file in {folder} after each epoch, written by the chief.", file=sys.stderr, flush=True)
    backup = EpochBackup(folder, runtime, others, delete=found[0].delete_checkpoint)
    if backup.epoch:
        for callback in others:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # or it would drop the rows of the epochs before
    return [*others, backup]


class EpochBackup(keras.callbacks.Callback):
    """Saves after each epoch, and restores what an earlier run of the program has left.

    Attributes: epoch, the epochs that are already done.
    """

    def __init__(self, folder: Path, runtime: OneDevice, others: Sequence[keras.callbacks.Callback], delete: bool = True):
        super().__init__()
        self._path, self._runtime, self._others, self._delete = folder / FILE, runtime, others, delete
        self._state = self._read()
        self.epoch = self._state["epoch"] if self._state else 0

    def _read(self) -> dict[str, Any] | None:
        state: Any = None
        if self._runtime.rank == 0 and self._path.exists():
            try:
                state = decode(self._path.read_bytes())
                if not isinstance(state, dict) or any(not isinstance(state.get(name), kind) for name, kind in _ENTRIES.items()):
                    raise Malformed("it holds something else")
            except (OSError, Malformed) as error:  # all must hear of it
                state = f"{self._path} cannot be read ({error}): remove it to begin anew."
        if isinstance(self._runtime, Sockets):
            state = self._runtime.broadcast_object(state)
        if isinstance(state, str):
            raise CheckpointError(state)
        return state

    def _variables(self) -> list:
        return [*self.model.variables, *self.model.optimizer.variables]

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self._state is None:
            return
        if not self.model.built:
            raise CheckpointError(f"{self._path} cannot be restored into a model that is not built: give the model an Input, or call model.build, before fit.")
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        variables = self._variables()
        shapes = [tuple(variable.shape) for variable in variables]
        if shapes != [value.shape for value in self._state["variables"]]:
            raise CheckpointError(f"{self._path} is of another model or optimizer: remove it, or give BackupAndRestore another folder.")
        for variable, value in zip(variables, self._state["variables"], strict=True):
            variable.assign(value)
        for callback, state in zip(self._others, self._state["callbacks"], strict=False):
            _restore_plain_state(callback, state)
        # Keras' own way for a callback to say where to begin; a run that had been stopped has no epochs left.
        self.model._initial_epoch = self.params["epochs"] if self._state["stopped"] else self.epoch
        if self._runtime.rank == 0:
            print(f"tfdist: resumed after epoch {self.epoch} from {self._path}.", file=sys.stderr, flush=True)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._restore_history()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._runtime.rank:
            return
        history = self.model.history
        # Keras' History comes after this callback: the present epoch is not in it yet.
        values = {name: [*history.history.get(name, []), value] for name, value in (logs or {}).items()}
        state = {"variables": [np.asarray(variable.value) for variable in self._variables()], "epoch": epoch + 1, "stopped": bool(self.model.stop_training),
                 "history": {**history.history, **values}, "epochs": [*history.epoch, epoch], "callbacks": [_plain_state(callback) for callback in self._others]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(encode(state))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def on_train_end(self, logs: dict | None = None) -> None:
        self._restore_history()
        self.model._initial_epoch = None
        if self._delete and self._runtime.rank == 0:
            self._path.unlink(missing_ok=True)

    def _restore_history(self) -> None:
        if self._state is not None:
            self.model.history.history, self.model.history.epoch = dict(self._state["history"]), list(self._state["epochs"])
            self._state = None


def skip(x: Any, validation_data: Any, initial_epoch: int, epoch: int, steps_per_epoch: int | None, validation_freq: int | Sequence[int]) -> Any:
    """The training data as it would be after the epochs from `initial_epoch` to before `epoch`.

    A shuffle draws its next order whenever a dataset that contains it is iterated anew, so these iterations are made,
    those of validation too, as it may share the shuffle. Nothing is read, unless one iterator goes through all epochs.
    """
    epochs = range(initial_epoch, epoch)
    if not epochs:
        return x
    for number in epochs:
        if not steps_per_epoch:
            _iterate(x)
        if (number + 1) % validation_freq == 0 if isinstance(validation_freq, int) else number + 1 in validation_freq:
            _iterate(validation_data)
    if steps_per_epoch and isinstance(x, tf.data.Dataset):
        return x.skip(len(epochs) * steps_per_epoch)
    if steps_per_epoch and hasattr(x, "__next__"):
        next(itertools.islice(x, len(epochs) * steps_per_epoch - 1, None), None)
    return x


def _iterate(data: Any) -> None:
    """What Keras' loop does to its data in an epoch, without reading it."""
    if isinstance(data, tf.data.Dataset):
        iter(data)
        if data.cardinality() >= 0:
            iter(data)  # if it knows the length it asks for the next iterator at the end of the epoch, and drops it
    elif isinstance(data, keras.utils.PyDataset):
        data.on_epoch_end()


def _plain_state(callback: keras.callbacks.Callback) -> dict[str, dict[str, Any]]:
    """The attributes that are plain values (counters, best values, lists of arrays), and the names of those that are operations
    of Keras: `monitor_op`, without which `min_delta` would change its sign once more."""
    attributes = {name: value for name, value in callback.__dict__.items() if not name.startswith("_") and name not in _NOT_STATE}
    return {"values": {name: value for name, value in attributes.items() if _is_plain(value)},
            "operations": {name: value.__name__ for name, value in attributes.items() if inspect.isfunction(value) and _operation(value.__name__) is value}}


def _restore_plain_state(callback: keras.callbacks.Callback, state: dict[str, dict[str, Any]]) -> None:
    callback.__dict__.update(state["values"])
    callback.__dict__.update({name: _operation(operation) for name, operation in state["operations"].items()})


def _operation(name: str) -> Any:
    found = getattr(keras.ops, name, None)
    return found if inspect.isfunction(found) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list) or type(value) is tuple:
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return value is None or type(value) in (bool, int, float, str) or (isinstance(value, (np.ndarray, np.generic)) and value.dtype != object)
