"""The local folder of a run's backups (--backup_dir; if that is a URL, the copy on this machine)."""

from __future__ import annotations

import os
from pathlib import Path

from tfdist.artifacts import restore
from tfdist.artifacts.backup_folder import BackupFolder
from tfdist.artifacts.manifest import CRC, SHA
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.control.lease import Lease, this_job
from tfdist.control.own_files import check_owner
from tfdist.control.run_address import SNAPSHOTS, backup_folder, is_url
from tfdist.control.status_file import STATUS_FILE


def folder(config: Config, writes: bool) -> BackupFolder:
    """Returns the backups of a run. Raises ConfigError if their folder cannot be used."""
    options = config.checkpoint
    place = backup_folder(options.backup_dir, config.run.cache_dir)
    if writes:
        if os.path.exists(os.path.join(place, os.pardir, STATUS_FILE)) and os.path.basename(place) == SNAPSHOTS:
            raise ConfigError(f"--backup_dir={place} contains the snapshots of a run: use a separate folder.")
        _make(place, options.backup_dir)
    return BackupFolder(
        place,
        two=options.double_backup,
        delete_at_end=options.delete_backup,
        writes=writes,
        required=restore.REQUIRED,
        checksum=SHA if is_url(config.run.run_dir) or is_url(options.backup_dir) else CRC,
    )


def lease(place: str, run_folder: Path) -> Lease | None:
    """The lease that keeps other jobs from the folder of backups; None if it is the run folder, which has its own."""
    if os.path.realpath(place) == os.path.realpath(run_folder):
        return None
    return Lease(Path(place), this_job(), name=f"--backup_dir={place}")


def _make(name: str, place: str) -> None:
    """Raises ConfigError if it cannot be made or written: else each backup would fail, unnoticed at the start; and if
    it belongs to another user."""
    try:
        os.makedirs(name, 0o700, exist_ok=True)
        check_owner(name)
    except OSError as error:
        if is_url(place):
            raise ConfigError(
                f"--backup_dir={place}: its copy on this machine, {name}, cannot be used ({error.strerror}): choose"
                " another --cache_dir, or make room there."
            ) from None
        raise ConfigError(
            f"--backup_dir={name} cannot be used ({error.strerror}): name a folder of your own that can be written."
        ) from None
