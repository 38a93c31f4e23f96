"""Checks what a backup is restored into: a model that is built, in the fit of a program that wrote the backup.

A program may fit several times with one folder. Killed in its second fit and started again, its first one would find
the backup of the second. Where backups are kept, that is as it should be: each fit goes on from what was there.
"""

from __future__ import annotations

import collections

import keras

from tfdist.control.exit_codes import CheckpointError, ConfigError

_ended: collections.Counter[str] = collections.Counter()  # fits of this process with a backup, by its name


def number(backup: str) -> int:
    """The number of a fit that begins with this backup in the process: 1, 2, ... One that was broken off does not
    count: it may go on."""
    return _ended[backup] + 1


def end(backup: str) -> None:
    """Counts a fit with this backup that has come to its end."""
    _ended[backup] += 1


def refuse_backup_of_later(backup: str, written_by: int, is_kept: bool) -> None:
    """Raises CheckpointError if the fit that wrote the backup comes after the one that begins.

    is_kept: whether fits leave it where it is when they end (`delete_checkpoint=False`)."""
    if written_by > number(backup) and not is_kept:
        raise CheckpointError(
            f"{backup} was written by fit number {written_by} of a program with this folder, and this is number"
            f" {number(backup)}, which would go on from the other's epochs: give each fit a BackupAndRestore with a"
            " folder of its own, or remove the backup to begin anew."
        )


def refuse_unbuilt(model: keras.Model) -> None:
    """Raises ConfigError as Keras does, when a fit begins: else one that is killed finds out when it is to go on."""
    if not model.built:
        raise ConfigError(
            "BackupAndRestore needs a model that is built, into which a backup can be restored:"
            f" {type(model).__name__} is not. Give it an Input, or call it on a batch, before fit; of one without"
            " call(), set built = True when all layers in it are."
        )
