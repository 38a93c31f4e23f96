"""Checks the target of a restored backup: a model that is built, in the fit that wrote the backup, and data in the same
order.

A program may call fit several times with one folder. If it is killed in its second fit and started again, its first fit
would find the backup of the second. If backups are kept, this is intended: each fit resumes from what is there.
"""

from __future__ import annotations

import collections
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from tfdist.artifacts.data_order import NoOrder, no_order, other_seeds, seeded_shuffles
from tfdist.artifacts.data_position import RunningFit
from tfdist.artifacts.hidden_state import metric_variables, state_of_other_optimizers, variables_of_model
from tfdist.artifacts.state import name_of, shape_of, tf_variable
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.terminal import say

_ended: collections.Counter[str] = collections.Counter()  # finished fits of this process, by name of their backup
# The fits with a backup that have read a shuffled dataset: name of the backup, number of the fit -> its iterator.
_readers: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def number(backup: str) -> int:
    """The number of the next fit with this backup in the process: 1, 2, ... An interrupted fit does not count, since it
    may be resumed."""
    return _ended[backup] + 1


def end(backup: str) -> None:
    """Counts a fit with this backup as finished."""
    _ended[backup] += 1


def refuse_backup_of_later(backup: str, written_by: int, is_kept: bool) -> None:
    """Raises CheckpointError if the fit that wrote the backup comes after the one that begins.

    is_kept: whether fits leave the backup in place when they end (`delete_checkpoint=False`)."""
    if written_by > number(backup) and not is_kept:
        raise CheckpointError(
            f"{backup} was written by fit number {written_by} of a program with this folder, but this is number"
            f" {number(backup)}, which would resume from the other's epochs: give each fit a BackupAndRestore with its"
            " own folder, or remove the backup to start from the beginning."
        )


def refuse_between_executions(backup: str, batch: int, steps_per_execution: int) -> None:
    """Raises CheckpointError if the backup was saved after a batch between two executions: Keras would count the
    execution in which it goes on as a whole one, and leave out batches at the end of the epoch."""
    if batch % steps_per_execution:
        raise CheckpointError(
            f"{backup} was saved after {batch} batches of an epoch, which is not a multiple of"
            f" compile(steps_per_execution={steps_per_execution}): resume with the previous value, or with 1."
        )


def refuse_lost_order(
    backup: str, manifest: Mapping[str, Any] | None, fit: RunningFit, save_freq: int | str, seeds: list
) -> NoOrder | None:
    """Raises CheckpointError or ConfigError if the order of the data is not known where this fit is to go on, or would
    save, within an epoch. Returns why it is not known. manifest: that of the backup to be restored, if there is one.
    seeds: `shuffled_by` of the data."""
    order = no_order(fit.iterator.data_adapter)
    if manifest is not None:
        other = order or other_seeds(manifest.get("order_seeds"), seeds)
        if other is not None and manifest["batch"]:
            refuse_another_order(backup, other, manifest["batch"])
        if other is not None:
            tell_another_order(other, fit, manifest["epoch"], manifest["ends"])
    goes_on = manifest is not None and manifest["batch"] > 0
    refuse_data_in_use(backup, fit, manifest is not None, goes_on or fit.saves_within_a_pass(save_freq))
    if order is not None and fit.saves_within_an_epoch(save_freq):
        raise ConfigError(
            f"BackupAndRestore(save_freq={save_freq}) saves within an epoch, but the data {order.why}: a resumed fit"
            f' would take some samples twice and others never: {order.fix}, or give save_freq="epoch".'
        )
    return order


def tell_another_order(order: NoOrder, fit: RunningFit, epoch: int, ends: Mapping[str, int | None]) -> None:
    """Says so if epoch `epoch`, with which the fit is to go on, continues a pass over data that come in another order
    now. Only said, since nobody may care for passes over a stream. ends: see RunningFit.go_to."""
    if fit.begins_within_a_pass(epoch, ends):
        say(
            f"the data {order.why}: the rest of the interrupted pass comes in another order, so its samples may come"
            f" twice or not at all: {order.fix}."
        )


def refuse_later_variables(model: keras.Model, at_first: Iterable[Any]) -> None:
    """Raises ConfigError if the model has other variables than `at_first`, when the fit began: a resumed fit would not
    have them when it is restored. Metrics may make theirs late: Keras resets them at each epoch."""
    known = {id(tf_variable(each)) for each in (*at_first, *metric_variables(model))}
    present = [*variables_of_model(model), *(one for each in state_of_other_optimizers(model) for one in each)]
    later = [each for each in present if id(tf_variable(each)) not in known]
    if later:
        raise ConfigError(
            f"The variable {name_of(later[0])} of {type(model).__name__} was made after fit had begun (by a layer that"
            " is used only in training, by a loss that is called, or by an optimizer beside the compiled one), so that"
            " a resumed fit could not restore it: make it before fit (build all layers, for example by"
            " model(x, training=True), and such an optimizer by its build(variables); or in a constructor), or train"
            " without BackupAndRestore."
        )


def refuse_another_order(backup: str, order: NoOrder, batch: int) -> None:
    """Raises CheckpointError: the epoch, after `batch` batches of which the backup was saved, would go on in another
    order."""
    again = f"{order.again}, or " if order.again else ""
    raise CheckpointError(
        f"{backup} was saved after {batch} batches of an epoch, but the data {order.why}, so the other batches of it"
        f" cannot be found again: {again}remove the backup to start from the beginning."
    )


def tell_another_first_order(whose: Sequence[str]) -> None:
    """Says so if the data drew their first order by other random numbers than in the fit that wrote the backup. whose:
    result of DataCalls.repeat."""
    if whose:
        say(
            f"the data draw in on_epoch_end from {' and '.join(whose)} global generator, which began in another state"
            " in the fit that wrote the backup (no seed, or another one): they may come in another order than in a fit"
            " that was not interrupted. Call keras.utils.set_random_seed(1) before the data are made, or let them draw"
            " from random numbers of their own (np.random.default_rng(1))."
        )


def metrics_of(model: keras.Model) -> list[list[Any]]:
    """What tells the variables of the model's metrics from those of others: name and shape, as JSON to be saved. Keras
    numbers names by what the process has made before: they count without numbers."""
    return [[re.sub(r"_\d+", "", name_of(each)), shape_of(each)] for each in model.metrics_variables]


def refuse_other_metrics(backup: str, manifest: Mapping[str, Any], model: keras.Model) -> None:
    """Raises CheckpointError if the backup, saved within an epoch, is of other metrics: the sums of one would count as
    those of another. Call when the metrics have their variables."""
    before, now = manifest.get("metric_variables"), metrics_of(model)  # an earlier version did not write them
    if before not in (None, now):
        raise CheckpointError(
            f"{backup} was saved after {manifest['batch']} batches of an epoch, with other metrics (their variables"
            f" were {_in_text(before)}, and now are {_in_text(now)}): compile the model with the same metrics, or"
            " remove the backup to start from the beginning."
        )


def _in_text(metrics: Iterable[Any]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" if shape else name for name, shape in metrics)


def refuse_data_in_use(backup: str, fit: RunningFit, resumes: bool, is_within_a_pass: bool) -> None:
    """Raises ConfigError if a fit that was interrupted in this process has read the same object, which draws the next
    order for each iterator made of it, where the order counts.

    resumes: whether this fit goes on from a backup; otherwise only a fit with the same backup counts, since others,
    such as trials of a search, may be interrupted in each process. is_within_a_pass: whether this fit saves, or goes
    on, in the middle of a pass over the data."""
    for dataset in seeded_shuffles(fit.iterator.data_adapter):
        interrupted = [
            name
            for (name, at), iterator in _readers.get(dataset, {}).items()
            if number(name) == at
            and iterator() is not fit.iterator  # a fit may have several backups
            and (resumes or name == backup)
        ]
        if interrupted and is_within_a_pass:
            raise ConfigError(
                f"A fit with a backup in {interrupted[0]} was interrupted, and its dataset now comes in another order"
                " than it would in a new process, so that a resumed fit would take some samples twice and others never:"
                " make the dataset anew (run the lines again that call shuffle) before fit."
            )


def note_data_in_use(backup: str, fit: RunningFit) -> None:
    """Call when a fit with a backup is about to read its data: see `refuse_data_in_use`."""
    for dataset in seeded_shuffles(fit.iterator.data_adapter):
        _readers.setdefault(dataset, {})[backup, number(backup)] = weakref.ref(fit.iterator)


def refuse_unbuilt(model: keras.Model) -> None:
    """Raises ConfigError as Keras does, when a fit begins: else a killed run would fail only when it is resumed."""
    if not model.built:
        raise ConfigError(
            f"BackupAndRestore needs a built model to restore a backup into, which {type(model).__name__} is not: give"
            " it an Input, or call it on a batch, before fit; without a call(), set built = True once all its layers"
            " are built."
        )
