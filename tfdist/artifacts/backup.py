"""`BackupAndRestore`: a frequent, short-lived backup in addition to long-lived snapshots.

A subclass of the Keras callback with the same arguments and meaning. But it saves the full state (weights, optimizer
slots, seed generators, metrics, the position in the epoch, the state of the other callbacks, the history) at step
granularity, in the format of snapshot_folder.py: checksummed, committed by one rename. With several workers only the
chief (`writes=True`) writes.

    model.fit(..., callbacks=[BackupAndRestore("/dev/shm/backup", save_freq=100)])

resumes in the middle of an epoch, at the exact batch: the first batches of that epoch are read but not trained on
again, and the data is advanced through the earlier epochs (data_position.py). The data must come in the same order as
before; if they are shuffled without a seed, or read with deterministic=False, backups within an epoch are refused.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdist.artifacts import backup_checks, backup_file, state
from tfdist.artifacts.backup_folder import BackupFolder
from tfdist.artifacts.data_order import NoOrder, shuffled_by
from tfdist.artifacts.data_position import RunningFit
from tfdist.artifacts.fit_state import FitState, storable_history
from tfdist.artifacts.generators_again import DataCalls, GeneratorsAgain
from tfdist.artifacts.optimizer_backup import OptimizerBackup
from tfdist.artifacts.other_readers import refuse_other_readers
from tfdist.artifacts.resumed_epoch import AfterOthers
from tfdist.compat import keras_trainer
from tfdist.compat.keras_random import global_seed_generator, made_global_seed_generator
from tfdist.control import backup_count
from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import say

_METRIC = "metric/"
_DRAWN_WITHOUT_ONE = "drawn_without_one"
_OF_EPOCH = "generators_of_epoch"
_SLOW_SECONDS = 1.0
_FIT_STATE, _DATA_CALLS = "fit_state", "data_calls"  # arrays of bytes: FitState and the history; DataCalls.fields


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Backs up the full training state and restores it when training begins.

    Args:
      backup_dir: a folder for this run alone; preferably on a fast local disk or a memory file system.
      save_freq: "epoch", or a number of batches. Within an epoch, shuffled data need a seed.
      double_checkpoint: also keep the backup before the last one.
      delete_checkpoint: delete all backups when training has finished.
      writes: whether this process writes; only one may.

    Raises ConfigError (a ValueError, as Keras does) on wrong arguments; CheckpointError on a backup of another model.
    """

    def __init__(
        self,
        backup_dir: str,
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        writes: bool = True,
    ):
        if isinstance(save_freq, bool) or (save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0)):
            raise ConfigError(
                f'BackupAndRestore(save_freq={save_freq!r}) must be "epoch" or a number of batches of at least 1.'
            )
        if not backup_dir:
            raise ConfigError("BackupAndRestore(backup_dir=...) is empty: name a folder for the backup of this run.")
        frequency: Any = save_freq  # Keras declares str, but accepts a number
        super().__init__(str(backup_dir), frequency, double_checkpoint, delete_checkpoint)
        self._period = save_freq if isinstance(save_freq, int) else 0  # in batches; 0: every epoch
        self.writes = writes
        self._backups = BackupFolder(
            str(backup_dir),
            two=double_checkpoint,
            delete_at_end=delete_checkpoint,
            writes=writes,
            required=("epoch", "batch", "generators", "ends"),  # 0.1.0 did not write the last one
        )
        self.store = self._backups.store
        self._step = 0  # batches trained in all
        self._seen = 0  # batches of the current epoch
        self._epoch = 0
        self._since = 0  # batches since the last backup
        self._to_skip = 0
        self._is_slow = False  # which has been said
        self._no_order: NoOrder | None = None
        self._order_seeds, self._data_calls = [], DataCalls()
        self._optimizers: Any = None  # OptimizerBackup, once training has begun
        self._is_checked = False  # what the first batch has made
        self._fit_state, self._others = FitState([]), AfterOthers(self)
        self._restored: dict[str, Any] | None = None  # as `FitState.fields`, with the history
        self._assign_again: Callable[[], None] = lambda: None  # assigns all variables once more
        self.generators = GeneratorsAgain()

    @property
    def _trained(self) -> Any:
        """The model; Keras sets it before the first callback."""
        return self.model

    def on_train_begin(self, logs: Mapping | None = None) -> None:
        self._backups.begin()
        model = self._trained
        backup_checks.refuse_unbuilt(model)
        self._optimizers, self._is_checked = OptimizerBackup(model), False
        self._restored, self.generators, self._others = None, GeneratorsAgain(), AfterOthers(self)
        fit = RunningFit.of(model)
        callbacks = fit.values["callbacks"]
        may_restore = self._others.join(callbacks)
        backups = [each for each in callbacks.callbacks if isinstance(each, BackupAndRestore) and each is not self]
        newest = self._backups.newest([each._backups for each in backups])
        self._step = 0 if newest is None else newest.step  # also if another backup is restored: new ones come after it
        snapshot = newest if may_restore else None
        adapter = fit.iterator.data_adapter
        self._order_seeds, self._data_calls = shuffled_by(adapter), DataCalls.of(adapter)
        written_by = 1 if snapshot is None else snapshot.manifest.get("fit", 1)
        backup_checks.refuse_backup_of_later(self.backup_dir, written_by, not self.delete_checkpoint)
        manifest = None if snapshot is None else snapshot.manifest
        self._no_order = backup_checks.refuse_lost_order(
            self.backup_dir, manifest, fit, self.save_freq, self._order_seeds
        )
        if snapshot is None:
            return
        self._others.has_restored = True
        backup_checks.refuse_between_executions(self.backup_dir, snapshot.manifest["batch"], model.steps_per_execution)
        left_out = self._optimizers.begin_from(self.backup_dir, snapshot.manifest)
        arrays = self.store.read(snapshot)
        metrics = [arrays.pop(key) for key in sorted(arrays) if key.startswith(_METRIC)]
        drawn_elsewhere = self._data_calls.repeat(backup_file.value_in(arrays.pop(_DATA_CALLS, None)) or {})
        held = arrays.pop(_FIT_STATE, None)  # earlier versions did not write it
        if held is not None and written_by == backup_checks.number(self.backup_dir):  # else of an earlier fit
            self._restored = backup_file.value_in(held)
        if has_drawn := f"train/{_DRAWN_WITHOUT_ONE}" in arrays:
            made_global_seed_generator()
        self._assign_again = functools.partial(
            state.assign, state.collect(model, model.optimizer, self._train(left_out, has_drawn)), arrays
        )
        self._assign_again()
        self._epoch = snapshot.manifest["epoch"]
        saved, is_within = snapshot.manifest["generators"], snapshot.manifest["batch"] or fit.iterator.steps_per_epoch
        of_epoch = snapshot.manifest.get(_OF_EPOCH) if is_within else saved
        self.generators = GeneratorsAgain(saved, of_epoch, self._data_calls)
        with self.generators.reading_earlier_epochs():
            if fit.go_to(self._epoch, snapshot.manifest["ends"]):
                self._assign_again()  # reading may have drawn from Keras' global generator
        if not snapshot.manifest["batch"]:
            keras_trainer.begin_an_epoch_of_metrics(model)
        if self._restored and self._restored["stopped"]:
            say(f"the fit that wrote {self.backup_dir} had been stopped: no epoch is left.")
            keras_trainer.begin_at(model, fit.values["epochs"])
            return
        if self._epoch < fit.values["epochs"]:
            backup_checks.tell_another_first_order(drawn_elsewhere)
        keras_trainer.begin_at(model, self._epoch)
        if count := snapshot.manifest["batch"]:
            self._to_skip = count
            check = functools.partial(backup_checks.refuse_other_metrics, self.backup_dir, snapshot.manifest, model)
            self._others.pass_over(count, metrics, check)

    def on_epoch_begin(self, epoch: int, logs: Mapping | None = None) -> None:
        self._epoch, self._seen, self._to_skip = epoch, self._to_skip, 0

    def on_train_batch_end(self, batch: int, logs: Mapping | None = None) -> None:
        """Nothing: see after_batch."""

    def on_epoch_end(self, epoch: int, logs: Mapping | None = None) -> None:
        """Nothing: see after_epoch."""

    def on_train_end(self, logs: Mapping | None = None) -> None:
        """Nothing: see after_all."""

    def begin_with(self, others: Sequence[keras.callbacks.Callback]) -> None:
        """Restores the state of the other callbacks, and the history, once all of them have begun."""
        fit = RunningFit.of(self._trained)
        backup_checks.note_data_in_use(self.backup_dir, fit)
        refuse_other_readers(fit)
        self._fit_state = FitState(others, says=self.writes)
        self._fit_state.begin(self._trained, self._restored)
        if self._restored is not None:
            self._restore_fit_state()
            if self._to_skip:  # for after_skipping; a copy, as callbacks change what they hold
                self._restored |= backup_file.parse(backup_file.to_bytes(self._fit_state.whole()))
        if not self._to_skip:
            self.generators.begin_epoch()
            self.generators.restore()
            self._forget()

    def after_batch(self, batch: int) -> None:
        """Saves, when all other callbacks have seen the end of the batch."""
        steps = (self.params or {}).get("steps")
        seen = int(batch) + 1  # which may be a number of NumPy's
        seen = seen if steps is None else min(seen, steps)  # Keras counts the last execution as a whole one
        batches = seen - self._seen  # more than one with steps_per_execution
        self._step, self._seen, self._since = self._step + batches, seen, self._since + batches
        if not self._is_checked:  # the first step makes what there was not before; do not wait for a backup
            self._optimizers.refuse_what_cannot_be_restored()
            self._is_checked = True
        is_last = seen == steps  # then the end of the epoch comes first
        if self._is_due() and not is_last and self._no_order is None and not self._trained.stop_training:
            self._save(self._epoch, self._seen)

    def after_skipping(self) -> None:
        """Restores everything once more: callbacks have seen the beginning of the resumed epoch twice."""
        self.generators.after_reading()
        self.generators.restore()
        self._assign_again()
        if self._restored is not None:
            self._restore_fit_state()
        self._trained.stop_training = False
        self._forget()

    def _forget(self) -> None:
        """Frees the memory for what was restored: a whole model."""
        self._restored, self.generators, self._assign_again = None, GeneratorsAgain(), lambda: None

    def after_epoch(self, epoch: int) -> None:
        """As after_batch, for the end of an epoch."""
        self._seen = 0
        if not self._period or self._is_due():
            self._save(epoch + 1, 0)
        else:
            self._fit_state.look(self._trained)

    def after_all(self) -> None:
        """Removes the backup, when all other callbacks have seen the end of training."""
        backup_checks.end(self.backup_dir)
        keras_trainer.begin_at(self._trained, None)
        self._backups.delete()

    def _is_due(self) -> bool:
        return bool(self._period) and self._since >= self._period

    def _restore_fit_state(self) -> None:
        assert self._restored is not None
        self._fit_state.restore(self._trained, self._restored)
        history = self._trained.history
        history.history = {name: list(values) for name, values in self._restored["history"].items()}
        history.epoch = list(self._restored["epochs"])

    def _fit_fields(self) -> dict[str, Any]:
        history = self._trained.history
        held = {
            "history": storable_history(history.history),
            "epochs": list(history.epoch),
            "stopped": bool(self._trained.stop_training),
        }
        return {**self._fit_state.fields(self._trained), **held}

    def _save(self, epoch: int, batch: int) -> None:
        self._since, fit = 0, RunningFit.of(self._trained)
        begun = time.monotonic()
        held, calls = backup_file.as_array(self._fit_fields()), self._data_calls.fields()
        beside = {_FIT_STATE: held, **({_DATA_CALLS: backup_file.as_array(calls)} if calls else {})}
        if (seconds := time.monotonic() - begun) > _SLOW_SECONDS and not self._is_slow:
            self._is_slow = True
            say(
                f"BackupAndRestore: collecting the state of other callbacks took {seconds:.1f} s ({len(held):,} bytes):"
                " keep less in their attributes, or save less often."
            )
        self._backups.back_up(
            self._step,
            {**state.to_host(self._variables()), **beside},
            {
                "epoch": epoch,
                "batch": batch,
                "order_seeds": self._order_seeds,
                "metric_variables": backup_checks.metrics_of(self._trained),
                **self._optimizers.fields(),
                "fit": backup_checks.number(self.backup_dir),
                "generators": state.generator_states(),
                **({_OF_EPOCH: self._others.generators_of_epoch} if batch and not fit.iterator.steps_per_epoch else {}),
                "ends": fit.ends(),
            },
        )
        writer = self._backups.writer
        writer.wait()  # a script that is killed a moment later must find the backup
        for kind, values in writer.messages():
            if kind == "warning":
                say(values["message"])
        if self.writes and not writer.last_failure:
            backup_count.count_one()

    def _variables(self) -> dict[str, Any]:
        model = self._trained
        self._optimizers.refuse_what_cannot_be_restored()
        metrics = {f"{_METRIC}{index:04d}": variable for index, variable in enumerate(model.metrics_variables)}
        return {**state.collect(model, model.optimizer, self._train(self._optimizers.idle())), **metrics}

    def _train(self, left_out: Sequence[int], with_drawn: bool = True) -> dict[str, Any]:
        """What OptimizerBackup adds, and the state of Keras' global generator, if there is one."""
        generator = global_seed_generator() if with_drawn else None
        held = self._optimizers.variables(left_out)
        return held if generator is None else {**held, _DRAWN_WITHOUT_ONE: generator.state}
