"""Keras callbacks on many workers: all run on every worker, with the same logs; those that write files run only on the
chief.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.compat import keras_optimizers
from tfdist.control.exit_codes import ConfigError
from tfdist.keras_fit import epoch_backup
from tfdist.keras_fit.fit_callback import FitCallback
from tfdist.keras_fit.joining import has_peers
from tfdist.keras_fit.model import DistributedModel
from tfdist.runtime.base import PeerRuntime, Runtime

_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "TensorBoard", "CSVLogger", "RemoteMonitor", "ProgbarLogger", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def arrange(callbacks: Any, runtime: Runtime, model: keras.Model) -> list[keras.callbacks.Callback]:
    """The callbacks of this worker, between our own: the first makes logs equal, the last makes decisions equal."""
    given = epoch_backup.replace(_listed(callbacks), runtime)
    if not has_peers(runtime):
        return given
    last = [callback for callback in given if isinstance(callback, epoch_backup.EpochBackup)]  # after the decisions
    given = [callback for callback in given if callback not in last]
    deciding = [callback for callback in given if not isinstance(callback, _WRITERS)]
    kind = (
        SameDecisionsEachBatch
        if any(_overrides(callback, hook) for callback in deciding for hook in _BATCH_HOOKS)
        else SameDecisions
    )
    return [
        SameLogs(runtime),
        *(given if runtime.rank == 0 else deciding),
        kind(runtime, DistributedModel.of(model, runtime)),
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


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    return hook in callback.__dict__ or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)


class SameLogs(FitCallback):
    """Puts the chief's numbers into the logs of an epoch: they could differ in the last bit between unlike machines."""

    def __init__(self, runtime: PeerRuntime):
        super().__init__()
        self._runtime = runtime

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        assert logs is not None  # Keras passes them
        logs.update(self._runtime.broadcast_object(dict(logs), "epoch logs"))


class SameDecisions(FitCallback):
    """Makes decisions equal after the callbacks of an epoch: if one worker stops, all do; the learning rate is the
    chief's."""

    def __init__(self, runtime: PeerRuntime, distributed: DistributedModel):
        super().__init__()
        self._runtime, self._distributed = runtime, distributed

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._agree()

    def on_test_begin(self, logs: dict | None = None) -> None:
        self._distributed.check_weights()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._distributed.check_weights()
        self._agree()

    def _agree(self) -> None:
        rate = None
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # for a schedule, which has no rate to set
            rate = np.asarray(keras_optimizers.learning_rate_variable(self.fitted.optimizer).value)
        mine = np.array([bool(self.fitted.stop_training), np.nan if rate is None else rate], np.float64)
        votes = self._runtime.all_gather(mine)
        self.fitted.stop_training = bool(votes[:, 0].any())
        if rate is not None and votes[0, 1] != mine[1]:
            self.fitted.optimizer.learning_rate = float(votes[0, 1])


class SameDecisionsEachBatch(SameDecisions):
    """Also agrees after each batch; used only if a callback could decide there, as it costs a message."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._agree()
