"""Replaces keras.callbacks.BackupAndRestore: Keras' own would write on every worker, and start a new history.

After each epoch the chief writes one file: all variables of the model and optimizer, the history, and the plain
attributes and variables of the other callbacks (patience counters, best values, best weights). If the program is
started again unchanged, it continues after the last complete epoch, on all workers, with the data at the same position
(artifacts/data_position.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist.artifacts import backup_checks
from tfdist.artifacts import state as host_state
from tfdist.artifacts.data_order import no_order, other_seeds, shuffled_by
from tfdist.artifacts.data_position import RunningFit
from tfdist.artifacts.fit_state import FitState, storable_history
from tfdist.artifacts.generators_again import DataCalls, GeneratorsAgain
from tfdist.artifacts.hidden_state import variables_of_model
from tfdist.artifacts.other_readers import refuse_other_readers
from tfdist.compat import keras_trainer
from tfdist.compat.keras_random import global_seed_generator, made_global_seed_generator
from tfdist.control import backup_count
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.lease import this_job
from tfdist.control.terminal import say
from tfdist.keras_fit import data_identity
from tfdist.keras_fit.backup_content import BackupContent
from tfdist.keras_fit.backup_place import backup_place
from tfdist.keras_fit.fit_callback import FitCallback
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import of_the_chief
from tfdist.runtime.host import host_view


def replace(callbacks: Sequence[keras.callbacks.Callback], runtime: Runtime) -> list[keras.callbacks.Callback]:
    """Returns the callbacks, with Keras' BackupAndRestore replaced by an EpochBackup, at the end.

    Called by all workers.
    """
    found = _backup_among(callbacks)
    if found is None:
        return list(callbacks)
    others = [callback for callback in callbacks if callback is not found]
    folder = found.backup_dir
    if runtime.rank == 0:
        often, not_so = found.save_freq, ""
        if often != "epoch":
            not_so = f" (save_freq={often} is ignored: a killed run resumes from the last epoch)"
        say(
            f"BackupAndRestore is replaced by the one of tfdist.fit: one file in {folder} after each epoch, written by"
            f" the chief{not_so}."
        )
    backup = EpochBackup(folder, runtime, others, delete=found.delete_checkpoint)
    if backup.epoch:
        for callback in others:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # otherwise it would drop the rows of earlier epochs
    return [*others, backup]


@contextlib.contextmanager
def held(callbacks: Sequence[keras.callbacks.Callback], runtime: Runtime) -> Iterator[None]:
    """Context manager in which the chief holds the lease of the backup's folder, if there is a backup: two jobs would
    resume from each other's epochs. Called by all workers. Raises ConfigError, on all, if another job holds the lease.
    """
    found = _backup_among(callbacks)
    with contextlib.ExitStack() as holding:

        def hold(folder: str) -> None:
            try:
                holding.enter_context(backup_place(folder).held(this_job()))
            except OSError as error:
                raise ConfigError(
                    f"BackupAndRestore's folder {folder} cannot be used ({error.strerror or error}): choose another."
                ) from error

        if found is not None:
            of_the_chief(runtime, functools.partial(hold, found.backup_dir))
        yield


def _backup_among(callbacks: Sequence[keras.callbacks.Callback]) -> keras.callbacks.BackupAndRestore | None:
    found = [callback for callback in callbacks if isinstance(callback, keras.callbacks.BackupAndRestore)]
    if len(found) > 1:
        raise ConfigError(
            "tfdist.fit keeps one backup, but callbacks=[...] contains BackupAndRestore for"
            f" {', '.join(str(each.backup_dir) for each in found)}: give it once."
        )
    return found[0] if found else None


class EpochBackup(FitCallback):
    """Saves after each epoch, and restores what an earlier run of the program has saved.

    Attributes: epoch, the number of epochs already done; order, the seed with which tfdist shuffles arrays, if it does.
    """

    def __init__(
        self, place: str | Path, runtime: Runtime, others: Sequence[keras.callbacks.Callback], delete: bool = True
    ):
        super().__init__()
        self._place, self._runtime, self._delete = backup_place(place), runtime, delete
        self._backup = self._read()
        self._data: data_identity.Identity = {}  # on the chief
        self._shuffled_by: list = []
        self._data_calls = DataCalls()
        self._beside = FitState(others, says=runtime.rank == 0)
        self._at_first: list = []  # the variables of the model when training began
        self.epoch = self._backup.epoch if self._backup else 0
        self.order = self._backup.order if self._backup else None

    def _read(self) -> BackupContent | None:
        """Returns on all workers the backup that the chief finds."""

        def read() -> bytes:
            try:
                return self._place.read()
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{self._place.name} cannot be read ({error}): remove it to start from the beginning."
                ) from error

        received = of_the_chief(self._runtime, read)
        backup = BackupContent.from_bytes(received) if received else None
        if backup is not None:
            backup_checks.refuse_backup_of_later(self._place.name, backup.fit, not self._delete)
        return backup

    def must_have_its_data(self, given: Mapping[str, Any]) -> None:
        """Raises CheckpointError, on all workers, if the backup was written by a fit to other data. A collective call.

        given: the arguments of `fit`.
        """
        before = self._backup.data if self._backup else {}

        def compare() -> None:
            self._data = data_identity.identity_of(given)
            if changed := data_identity.what_changed(before, self._data):
                raise CheckpointError(
                    f"The data have changed since {self._place.name} was written ({changed}): restore the data of the"
                    " fit (seed all drawing, shuffling and splitting), or remove the backup to start from the"
                    " beginning."
                )

        of_the_chief(self._runtime, compare)

    def _variables(self) -> list:
        return [*self._at_first, *self.fitted.optimizer.variables]

    def on_train_begin(self, logs: dict | None = None) -> None:
        if len(keras_trainer.optimizers_of(self.fitted)) > 1:
            raise ConfigError(
                "BackupAndRestore keeps the optimizer that the model was compiled with, but"
                f" {type(self.fitted).__name__} has others beside it, which would start from the beginning: train"
                " without it."
            )
        backup_checks.refuse_unbuilt(self.fitted)
        self._look_at_the_order()
        self._at_first = variables_of_model(self.fitted)
        backup = self._backup
        self._beside.begin(self.fitted, None if backup is None else backup.to_dict())
        if backup is None:
            return
        if not self.fitted.optimizer.built:
            self.fitted.optimizer.build(self.fitted.trainable_variables)
        variables = self._variables()
        if len(variables) != len(backup.variables) or not all(
            host_state.tf_variable(variable).shape.is_compatible_with(value.shape)  # a dim may be None
            for variable, value in zip(variables, backup.variables, strict=True)
        ):
            raise CheckpointError(
                f"{self._place.name} belongs to another model or optimizer: remove it, or give BackupAndRestore another"
                " folder."
            )
        for variable, value in zip(variables, backup.variables, strict=True):
            variable.assign(value)
        keras_trainer.begin_an_epoch_of_metrics(self.fitted)
        drawn = backup.drawn_without_one
        made = None if drawn is None else made_global_seed_generator()
        self._beside.restore(self.fitted, backup.to_dict())
        self.fitted.history.history = dict(backup.history)
        # A run that had been stopped has no epochs left.
        keras_trainer.begin_at(self.fitted, self.epochs if backup.stopped else self.epoch)
        if self._runtime.rank == 0:
            say(f"resumed after epoch {self.epoch} from {self._place.name}.")
        self._find_the_place_in_the_data(backup)
        if made is not None:  # not earlier: data that are read again may draw from it
            made.state.assign(drawn)

    def _look_at_the_order(self) -> None:
        fit, backup = RunningFit.of(self.fitted), self._backup
        within = fit.saves_within_a_pass("epoch")
        backup_checks.refuse_data_in_use(self._place.name, fit, backup is not None, within)
        backup_checks.note_data_in_use(self._place.name, fit)
        refuse_other_readers(fit)
        adapter = fit.iterator.data_adapter
        self._shuffled_by, self._data_calls = shuffled_by(adapter), DataCalls.of(adapter)
        if self._runtime.rank or backup is None or backup.stopped:
            return
        if (other := no_order(adapter) or other_seeds(backup.shuffled_by, self._shuffled_by)) is not None:
            backup_checks.tell_another_order(other, fit, backup.epoch, backup.ends)

    def _find_the_place_in_the_data(self, backup: BackupContent) -> None:
        iterator = RunningFit.of(self.fitted).iterator
        calls = self._data_calls
        drawn_elsewhere = calls.repeat(backup.data_calls or {})
        generators = GeneratorsAgain(backup.generators, None if iterator.steps_per_epoch else backup.generators, calls)
        with generators.reading_earlier_epochs():  # of a fit that was stopped, too: a later one may read the same data
            reads = RunningFit.of(self.fitted).go_to(self.epoch, backup.ends)
        if reads and self._runtime.rank == 0:
            say(
                "the data of these epochs was read again, as later batches may depend on it (repeat, cache, a"
                " PyDataset, a generator)."
            )
            if self.epoch < self.epochs and not backup.stopped:
                backup_checks.tell_another_first_order(drawn_elsewhere)
        generators.restore()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._restore_epochs()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        backup_checks.refuse_later_variables(self.fitted, self._at_first)
        if self._runtime.rank:
            return
        history = self.fitted.history
        without_one = global_seed_generator()  # for layers without a generator of their own
        values, epochs = dict(history.history), list(history.epoch)
        if epochs[-1:] != [epoch]:  # Keras' own History comes after this callback; a user's has come before
            values |= {name: [*values.get(name, []), value] for name, value in (logs or {}).items()}
            epochs.append(epoch)
        content = BackupContent(
            variables=[host_view(host_state.tf_variable(each)).copy() for each in self._variables()],
            drawn_without_one=None if without_one is None else np.asarray(without_one.state.value),
            epoch=epoch + 1,
            data=self._data,
            fit=backup_checks.number(self._place.name),
            stopped=bool(self.fitted.stop_training),
            history=storable_history(values),
            epochs=epochs,
            order=self.order,
            shuffled_by=self._shuffled_by,
            ends=RunningFit.of(self.fitted).ends(),
            generators=host_state.generator_states(),
            data_calls=self._data_calls.fields(),
            **self._beside.fields(self.fitted),
        )
        if self._place.write(content):
            backup_count.count_one()

    def on_train_end(self, logs: dict | None = None) -> None:
        self._restore_epochs()
        keras_trainer.begin_at(self.fitted, None)
        backup_checks.end(self._place.name)
        if self._delete and self._runtime.rank == 0:
            self._place.remove()

    def _restore_epochs(self) -> None:
        """Restores what Keras' History has cleared when training began."""
        if self._backup is not None:
            self.fitted.history.epoch = list(self._backup.epochs)
            self._backup = None
