"""Checks the target of a restored backup: a model that is built, in the fit that wrote the backup.

A program may call fit several times with one folder. If it is killed in its second fit and started again, its first fit
would find the backup of the second. If backups are kept, this is intended: each fit resumes from what is there.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tfdist.artifacts.hidden_state import (
    metrics_held,
    state_of_other_optimizers,
    variables_of_metrics,
    variables_of_model,
)
from tfdist.artifacts.state import name_of, tf_variable
from tfdist.compat import keras_trainer
from tfdist.control.exit_codes import CheckpointError, ConfigError

_ended: collections.Counter[str] = collections.Counter()  # finished fits of this process, by name of their backup


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


def refuse_without_seed(backup: str, batch: int, save_freq: int | str, steps: int | None) -> None:
    """For a fit to data that are shuffled without a seed: raises CheckpointError if the backup to be restored was saved
    after `batch` batches of an epoch, and ConfigError if a backup would be: the resumed fit would draw another order.

    steps: the number of batches of an epoch, if it is known."""
    if batch:
        raise CheckpointError(
            f"{backup} was saved after {batch} batches of an epoch, but the data are shuffled without a seed, so that"
            " the other batches of this epoch cannot be found again: set the seed of the fit that wrote it, or remove"
            " the backup to start from the beginning."
        )
    if isinstance(save_freq, int) and (not steps or save_freq % steps):
        raise ConfigError(
            f"BackupAndRestore(save_freq={save_freq}) saves within an epoch, but the data are shuffled without a seed,"
            " so that a resumed fit would take some samples twice and others never: call"
            " keras.utils.set_random_seed(1) before the data are made (a dataset can have its own,"
            ' shuffle(n, seed=1)), or give save_freq="epoch".'
        )


def refuse_later_variables(model: keras.Model, at_first: Iterable[Any]) -> None:
    """Raises ConfigError if the model has other variables than `at_first`, when the fit began: a resumed fit would not
    have them when it is restored. Metrics may make theirs late: Keras resets them at each epoch."""
    metrics = [*model.metrics, *metrics_held(model), *keras_trainer.compiled_metrics(model)]
    known = {id(tf_variable(each)) for each in (*at_first, *variables_of_metrics(metrics))}
    present = [*variables_of_model(model), *state_of_other_optimizers(model)]
    later = [each for each in present if id(tf_variable(each)) not in known]
    if later:
        raise ConfigError(
            f"The variable {name_of(later[0])} of {type(model).__name__} was made after fit had begun (by a layer that"
            " is used only in training, by a loss that is called, or by an optimizer beside the compiled one), so that"
            " a resumed fit could not restore it: make it before fit (build all layers, for example by"
            " model(x, training=True), and such an optimizer by its build(variables); or in a constructor), or train"
            " without BackupAndRestore."
        )


def refuse_another_order(backup: str, manifest: Mapping[str, Any], shuffled_by: list) -> None:
    """Raises CheckpointError if the backup was saved within an epoch, of data that were shuffled by other numbers than
    `shuffled_by`, those of the running fit: the other batches of that epoch could not be found again."""
    batch, before = manifest["batch"], manifest.get("shuffled_by", shuffled_by)  # earlier versions did not write it
    if batch and before != shuffled_by:
        raise CheckpointError(
            f"{backup} was saved after {batch} batches of an epoch, whose data were shuffled with another seed, so that"
            " the other batches of this epoch cannot be found again: set the seed of the fit that wrote it"
            " (keras.utils.set_random_seed before the data are made), or remove the backup to start from the beginning."
        )


def refuse_unbuilt(model: keras.Model) -> None:
    """Raises ConfigError as Keras does, when a fit begins: else a killed run would fail only when it is resumed."""
    if not model.built:
        raise ConfigError(
            f"BackupAndRestore needs a built model to restore a backup into, which {type(model).__name__} is not: give"
            " it an Input, or call it on a batch, before fit; without a call(), set built = True once all its layers"
            " are built."
        )
