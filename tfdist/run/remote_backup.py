"""The backup of a run in an object store (--backup_dir=URL), as the chief sees it.

It is written to a folder in this machine's cache, as without a store. A thread sends the newest one as it sends
snapshots (artifacts/remote_snapshots.py): the previous backup is removed when the next one's manifest has arrived. An
unavailable store is reported, but ends neither training nor the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tfdist.artifacts import manifest
from tfdist.artifacts.backup_folder import BackupFolder
from tfdist.artifacts.remote_snapshots import RemoteSnapshots
from tfdist.artifacts.run_identity import run_of_snapshot
from tfdist.artifacts.upload_thread import sent_within
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.control.lease import this_job
from tfdist.control.run_address import SNAPSHOTS
from tfdist.control.status_file import STATUS_FILE
from tfdist.control.terminal import say
from tfdist.control.time_limit import for_at_most
from tfdist.run.store_alarm import SILENT_SECONDS, StoreAlarm
from tfdist.storage.object_store import PATIENCE_SECONDS, ObjectStore
from tfdist.storage.store_errors import StoreError, as_sentence
from tfdist.storage.store_lease import StoreLease

_GIVE_BACK_SECONDS = 10.0


class RemoteBackup:
    """Brings and sends `backup`. run_id: that of the run that begins, if it has one.

    Raises TfdistError if the URL cannot be used as a store.
    """

    def __init__(self, config: Config, backup: BackupFolder, run_id: str):
        self._url, self._timeout = config.checkpoint.backup_dir.rstrip("/"), config.run.store_timeout
        self._store, self._run_id = backup.store, run_id
        self._brought = self._sends = False
        with as_sentence("backup_dir"):
            self._objects = ObjectStore(self._url, min(self._timeout, PATIENCE_SECONDS))
        self._lease = StoreLease(self._objects, this_job(), name=f"--backup_dir={self._url}")
        self._remote = RemoteSnapshots(self._objects, self._store, backup.retention, self._lease.confirm)
        self._alarm = StoreAlarm("the backup: ")
        self._held = contextlib.ExitStack()
        self._last_deed: Callable[[], None] = lambda: None

    def bring(self) -> list[str]:
        """Takes the place for this job, and brings the newest backup, if none here is as new; once. Returns why others
        were passed over. Raises TfdistError."""
        if self._brought:
            return []
        with as_sentence("backup_dir"):
            self._lease.take()
            self._objects.allowed = self._lease.confirm
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self._give_back)
                # The snapshots of a run must not be removed as old backups.
                if self._objects.text(STATUS_FILE) is not None:
                    raise ConfigError(f"--backup_dir={self._url} contains a run: use a separate place for the backup.")
                self._store.clean()
                self._forget_other_runs()
                messages = self._remote.bring_newest()
                self._held = on_failure.pop_all()
        self._brought = True
        return messages

    def start(self) -> None:
        """Starts sending; once. Call after `bring`, when something is chosen to resume from: damaged backups are set
        aside. Raises TfdistError."""
        if not self._sends:
            with as_sentence("backup_dir"):
                self._remote.start()
            self._sends = True

    def _forget_other_runs(self) -> None:
        """Deletes local backups that may be of a run that has ended on another machine: kept are only those of the run
        whose backup is in the store, or of the run that begins."""
        wanted = {self._run_id}
        for step in self._remote.steps()[-1:]:
            wanted.add(manifest.run_of(self._objects.text(f"{SNAPSHOTS}/step-{step:08d}/{manifest.MANIFEST}") or ""))
        for step in self._store.steps():
            run_id = run_of_snapshot(self._store.path(step))
            if not run_id or run_id not in wanted:
                self._store.delete(step)

    def messages(self) -> Iterator[str]:
        """Yields a sentence when the store becomes unusable, and again while that lasts."""
        yield from self._alarm.messages(self._remote.sender.trouble() or self._objects.waiting(SILENT_SECONDS))

    def send_rest(self, seconds: float | None = None) -> None:
        """Waits until the last backup is sent, for at most `seconds`; by default --store_timeout."""
        sender, seconds = self._remote.sender, self._timeout if seconds is None else seconds
        if self._sends and sent_within(sender, self._url, time.monotonic() + seconds):
            say(f"THE LAST BACKUP WAS NOT SENT to {self._url} ({sender.trouble() or 'it takes too long'}).")

    def end_with(self, deletion: bool) -> None:
        """Sets what `close` does first. deletion: the run has finished, and nothing will resume from the backup."""
        self._last_deed = self._delete if deletion else self.send_rest

    def _delete(self) -> None:
        failed = [f"{self._url} does not answer"]

        def remove() -> None:
            try:
                for step in self._remote.all_steps():
                    self._remote.remove(step)
                self._objects.remove(f"{SNAPSHOTS}/checkpoint")
                failed.clear()
            except StoreError as error:
                failed[:] = [str(error)]

        if self._sends:
            self._remote.sender.end(self._timeout)
            self._objects.patience = min(self._timeout, _GIVE_BACK_SECONDS)
            for_at_most(self._timeout, remove)
            if failed:
                say(f"THE BACKUP WAS NOT DELETED ({failed[0]}); the run has finished, and no longer needs it.")

    def close(self) -> None:
        """Stops sending, and gives back the lease."""
        self._last_deed()
        self._remote.sender.end()
        self._held.close()

    def _give_back(self) -> None:
        self._objects.patience = _GIVE_BACK_SECONDS / 2
        for_at_most(_GIVE_BACK_SECONDS, self._lease.give_back)
