"""Keras callbacks on many workers: all run on every worker, with the same logs; those that write files run only on the
chief.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.compat import keras_optimizers, keras_trainer
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import epoch_backup
from tfdist.keras_fit.fit_callback import FitCallback
from tfdist.keras_fit.joining import has_peers
from tfdist.keras_fit.model import DistributedModel
from tfdist.runtime.base import PeerRuntime, Runtime
from tfdist.runtime.encoding import encode

_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "TensorBoard", "CSVLogger", "RemoteMonitor", "ProgbarLogger", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)
# What Keras calls around each batch of training -> the hooks of a callback that are called by it.
_AROUND_A_BATCH = {
    "on_train_batch_begin": ("on_batch_begin", "on_train_batch_begin"),
    "on_train_batch_end": ("on_batch_end", "on_train_batch_end"),
}


def arrange(callbacks: Any, runtime: Runtime, model: keras.Model) -> list[keras.callbacks.Callback]:
    """The callbacks of this worker, between our own: the first makes logs equal, the last makes decisions equal.

    Called by all workers.
    """
    given = epoch_backup.replace(_listed(callbacks), runtime)
    if not has_peers(runtime):
        return given
    last = [callback for callback in given if isinstance(callback, epoch_backup.EpochBackup)]  # after the decisions
    given = [callback for callback in given if callback not in last]
    everywhere = [callback for callback in given if not isinstance(callback, _WRITERS)]
    deciding = [
        any(_may_decide(callback, hook) for callback in given for hook in called) for called in _AROUND_A_BATCH.values()
    ]
    of_all = runtime.all_gather(np.array(deciding))  # a worker may have been given other callbacks
    hooks = [hook for hook, of_each in zip(_AROUND_A_BATCH, of_all.T, strict=True) if of_each.any()]
    return [
        SameLogs(runtime),
        *(given if runtime.rank == 0 else everywhere),
        SameDecisions(runtime, DistributedModel.of(model, runtime), hooks),
        *last,
    ]


def backup_of(
    arranged: Sequence[keras.callbacks.Callback], given: Mapping[str, Any]
) -> epoch_backup.EpochBackup | None:
    """The backup among callbacks that `arrange` has returned. If there is one, this is a collective call.

    given: the arguments of `fit`. Raises CheckpointError, on all workers, if the backup is from a fit to other data.
    """
    backup = next((callback for callback in arranged if isinstance(callback, epoch_backup.EpochBackup)), None)
    if backup is not None:
        backup.must_have_its_data(given)
    return backup


def backup_held(callbacks: Any, runtime: Runtime) -> contextlib.AbstractContextManager[None]:
    """Context manager in which no other job keeps its backup there. Called by all workers, before `arrange`."""
    return epoch_backup.held(_listed(callbacks), runtime)


def _listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    given = keras.tree.flatten(callbacks) if callbacks else []
    if wrong := [one for one in given if not isinstance(one, keras.callbacks.Callback)]:
        raise ConfigError(
            f"callbacks=[...] contains {wrong[0]!r:.80}, which is not a keras.callbacks.Callback: give objects, such as"
            " keras.callbacks.EarlyStopping()."
        )
    return given


def _may_decide(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether the callback may decide in this hook. Keras' own that write do not, but a user's subclass may."""
    base = next((kind for kind in _WRITERS if isinstance(callback, kind)), keras.callbacks.Callback)
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(base, hook)


class SameLogs(FitCallback):
    """Puts the chief's numbers into the logs of an epoch: they could differ in the last bit between unlike machines."""

    def __init__(self, runtime: PeerRuntime):
        super().__init__()
        self._runtime = runtime

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        assert logs is not None  # Keras passes them
        logs.update(self._runtime.broadcast_object(dict(logs), "epoch logs"))


class SameDecisions(FitCallback):
    """Makes decisions equal after the callbacks of an epoch: if one worker stops, all do; learning rates, and what
    callbacks have put into the logs, are the chief's.

    hooks: those around a batch in which all agree, too, as some callback could decide there; each costs a message.
    """

    def __init__(self, runtime: PeerRuntime, distributed: DistributedModel, hooks: Sequence[str]):
        super().__init__()
        self._runtime, self._distributed = runtime, distributed
        self._optimizers: list[keras.Optimizer] = []
        for hook in hooks:
            setattr(self, hook, lambda batch, logs=None: self._agree())

    def on_train_begin(self, logs: dict | None = None) -> None:
        found = keras_trainer.optimizers_of(self.fitted)
        self._optimizers = [one for each in found for one in keras_optimizers.with_inner(each)]

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._agree()

    def on_test_begin(self, logs: dict | None = None) -> None:
        self._distributed.check_weights()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._distributed.check_weights()
        self._agree()
        assert logs is not None  # Keras passes them
        sent = {name: value for name, value in logs.items() if _can_be_sent(value)}
        names, chiefs = self._runtime.broadcast_object([list(logs), sent], "epoch logs")
        for name in set(logs).difference(names):
            del logs[name]
        logs.update(chiefs)

    def _agree(self) -> None:
        rates = list(map(keras_optimizers.learning_rate_variable, self._optimizers))
        here = [np.nan if rate is None else np.asarray(rate.value) for rate in rates]
        votes = self._runtime.all_gather(np.array([bool(self.fitted.stop_training), *here], np.float64))
        self.fitted.stop_training = bool(votes[:, 0].any())
        for rate, mine, chiefs in zip(rates, here, votes[0, 1:], strict=True):
            if rate is not None and chiefs != mine:
                rate.assign(float(chiefs))


def _can_be_sent(value: Any) -> bool:
    try:
        encode(value)
    except ConfigError:
        return False
    return True
