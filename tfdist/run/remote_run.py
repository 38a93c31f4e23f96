"""A run in an object store, as one worker sees it: what it brings before it begins, and what it sends during the run
and at the end. Not used if --run_dir is a folder.

    before      the chief takes the lease, compares the working copy with the store, brings the logs, and the newest
                snapshot if its own is older
    meanwhile   the chief sends snapshots; every worker sends its own files every 20 seconds
    at the end  all that is left, for some minutes if need be; status.json last; then the chief gives back the lease
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from tfdist.artifacts.policy import Retention
from tfdist.artifacts.remote_snapshots import RemoteSnapshots
from tfdist.artifacts.run_folder import is_evaluators
from tfdist.artifacts.run_identity import run_of
from tfdist.artifacts.shard_upload import PARTS
from tfdist.artifacts.snapshot_folder import SnapshotFolder
from tfdist.artifacts.upload_thread import UploadThread, sent_within
from tfdist.config.run_options import RunConfig
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.run_address import SNAPSHOTS, is_url
from tfdist.control.status_file import STATUS_FILE, parse_status
from tfdist.control.terminal import say
from tfdist.control.time_limit import for_at_most
from tfdist.flags import FLAGS_FILE
from tfdist.run.store_alarm import SILENT_SECONDS, StoreAlarm
from tfdist.storage.mirror import FolderMirror, bring_files
from tfdist.storage.object_store import PATIENCE_SECONDS, ObjectStore
from tfdist.storage.store_errors import StoreError, as_sentence
from tfdist.storage.store_lease import FILE as LEASE
from tfdist.storage.store_lease import FollowedLease, StoreLease
from tfdist.telemetry.jsonl import read_jsonl

_AFTER_AN_ERROR_SECONDS = 10.0  # time to send the rest after an error
_GIVE_BACK_SECONDS = 5.0
_OF_A_RANK = re.compile(r"^logs/(?:rank|worker)-(\d+)\D")
_SET_ASIDE = "set-aside-"
# What may be there before the first status: files of an evaluator or of tfdist.doctor, snapshots put there by a user.
_WITHOUT_STATUS = ("logs/", "tensorboard/", "faults/", "doctor-", f"{SNAPSHOTS}/")


@contextlib.contextmanager
def remote_run(options: RunConfig, folder: Path, cluster: Cluster, job: str) -> Iterator[RemoteRun | None]:
    """Context manager: a worker's run in an object store; None if --run_dir is a folder."""
    if not is_url(options.run_dir):
        yield None
        return
    with RemoteRun(options, folder, cluster, job) as stored:
        yield stored


class RemoteRun:
    """A run in an object store, entered before a worker's session and left after it.

    job: identity by which attempts of one job are told from another job (control/lease.py).
    """

    def __init__(self, options: RunConfig, folder: Path, cluster: Cluster, job: str):
        self.folder, self._rank, self._is_chief = folder, max(cluster.rank, 0), cluster.is_chief
        self._leads_machine = cluster.local_rank == 0
        with as_sentence():
            self.objects = ObjectStore(options.run_dir, min(options.store_timeout, PATIENCE_SECONDS))
        self._timeout = options.store_timeout
        self._job, self._lease = job, StoreLease(self.objects, job) if self._is_chief else None
        allowed = self._lease.confirm if self._lease else lambda: None
        self._mirror = FolderMirror(self.objects, folder, self._owns, STATUS_FILE, self._note_trouble, allowed)
        self._senders: list[UploadThread] = []  # of snapshots, and of their parts
        self._trouble: StoreError | None = None
        self._alarm = StoreAlarm()

    def __enter__(self) -> Self:
        if self._lease:
            with as_sentence():
                self._lease.take()
            self.objects.allowed = self._lease.confirm
            try:
                with as_sentence():
                    self._adopt()
                    self._bring(lambda name: not name.startswith((f"{SNAPSHOTS}/", "faults/")))
            except BaseException:
                self._lease.give_back()
                raise
        return self

    def _adopt(self) -> None:
        """Sets local files of another run aside: the store decides which run this is."""
        here, status = run_of(self.folder), self.objects.text(STATUS_FILE)
        if status is None:
            self._must_hold_nothing_else()
        there = parse_status(status or "").get("run_id")
        if here and here != there:
            # Except logs that the launcher has already begun, and the lease that was just taken.
            entries = [*self.folder.iterdir(), *(self.folder / "logs").glob("*.jsonl")]
            aside = self._set_aside(
                entry
                for entry in entries
                if entry.name not in ("logs", LEASE) and not entry.name.startswith((_SET_ASIDE, "."))
            )
            what = "another run" if there else "no run"
            say(
                f"{self.objects.url} contains {what}: the contents of its working copy {self.folder} are set aside in"
                f" {aside} there."
            )

    def _set_aside(self, entries: Iterable[Path]) -> str:
        """Moves entries of the working copy to a folder in it, and returns that folder's name."""
        aside = self.folder / f"{_SET_ASIDE}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        aside.mkdir()
        for entry in entries:
            entry.rename(aside / entry.name)
        return aside.name

    def _must_hold_nothing_else(self) -> None:
        """Raises ConfigError on other files: all below a run's URL is brought, and some replaced. Also StoreError."""
        for name in self.objects.names():
            if name != LEASE and not name.startswith(_WITHOUT_STATUS):
                raise ConfigError(
                    f"--run_dir={self.objects.url} contains {name}, which is not part of a run: choose an empty place,"
                    " or one with a run."
                )

    def bring_own(self, run_id: str) -> None:
        """Brings the logs that this worker wrote on another machine, before it appends to them. Sets its files of
        another run aside, since the chief sees only its own working copy. Raises TfdistError."""
        if self._is_chief:
            return
        log, events = self.folder / "logs" / f"rank-{self._rank}.jsonl", self.folder / "tensorboard"
        with as_sentence():
            (last,) = deque(read_jsonl(log), maxlen=1) or [{}]
            if last.get("run_id", run_id) != run_id:
                own = [log, events] if self._leads_machine and events.exists() else [log]
                aside = self._set_aside(own)
                say(f"{log} is of another run than {self.objects.url}: it is set aside in {self.folder / aside}.")
            self._bring(self._owns)

    def _bring(self, wanted) -> None:
        """Brings files that are missing here, or shorter than in the store: they were written elsewhere meanwhile."""
        bring_files(self.objects, self.folder, wanted, longer=True)

    def start(self) -> None:
        """Begins to send files. The status, which marks this place as a run, is sent at once: a working copy whose run
        is not in the store counts as another run's. The flags come next, as readers need them; a place that has flags
        and no status would be refused by the next start."""
        if self._is_chief:
            with as_sentence():
                self.objects.send(self.folder / STATUS_FILE, STATUS_FILE)
                self._mirror.send(lambda name: name == FLAGS_FILE)
        self._mirror.start()

    def sends(self, store: SnapshotFolder, retention: Retention) -> RemoteSnapshots:
        """Makes the object that brings and sends the chief's snapshots."""
        assert self._lease  # only the chief sends snapshots
        # Whoever resumes from a snapshot finds the logs up to it.
        snapshots = RemoteSnapshots(
            self.objects, store, retention, allowed=self._lease.confirm, before=self._mirror.send
        )
        self._senders.append(snapshots.sender)
        return snapshots

    @property
    def snapshots(self) -> str:
        """The place of the run's snapshots, for messages."""
        return f"{self.objects.url}/{SNAPSHOTS}"

    @property
    def lease_id(self) -> str:
        """The id of the chief's lease, which the other workers check."""
        assert self._lease
        return self._lease.owner.id

    def follow(self, lease_id: str) -> Callable[[], None]:
        """Returns a function that a worker must call before it writes anything but its log to the store."""
        if not self._lease:
            self.objects.allowed = FollowedLease(self.objects, lease_id, self._job).confirm
        return self.objects.allowed

    def sends_parts(self, *senders: UploadThread | None) -> None:
        """Registers the senders of this worker's parts, and, on the chief, the sender of snapshots made of parts."""
        self._senders += filter(None, senders)

    def _owns(self, name: str) -> bool:
        if match := _OF_A_RANK.match(name):
            return int(match.group(1)) == self._rank
        if (
            name.startswith((f"{SNAPSHOTS}/", f"{PARTS}/", _SET_ASIDE, "faults/"))
            or is_evaluators(name)
            or name == LEASE
        ):
            return False
        # Event files and profiles are named after their host and process.
        return self._is_chief or self._leads_machine and name.startswith("tensorboard/")

    def _note_trouble(self, trouble: StoreError | None) -> None:
        self._trouble = trouble

    def messages(self) -> Iterator[str]:
        """Yields a sentence when the store becomes unusable, and again while that lasts."""
        trouble = self._trouble or self._sending_trouble() or self.objects.waiting(SILENT_SECONDS)
        yield from self._alarm.messages(trouble)

    def _sending_trouble(self) -> StoreError | None:
        return next(filter(None, (sender.trouble() for sender in self._senders)), None)

    # -- the end ---------------------------------------------------------------------------------------------------

    def __exit__(self, kind, error, trace) -> None:
        patience = self._timeout if error is None else min(self._timeout, _AFTER_AN_ERROR_SECONDS)
        missing = [f"{self.objects.url} does not answer"]

        def send() -> None:
            missing[:] = [self._send_the_rest(patience)]

        # A store that does not answer blocks only this thread.
        for_at_most(patience + _GIVE_BACK_SECONDS, send)
        if self._lease:
            self.objects.patience = _GIVE_BACK_SECONDS
            for_at_most(2 * _GIVE_BACK_SECONDS, self._lease.give_back)
        if missing[0] and error is None:
            raise CheckpointError(
                f"Not all of the run could be sent: {missing[0]}. It is in the working copy {self.folder}: start again"
                " on this machine when the store can be reached."
            )

    def _send_the_rest(self, seconds: float) -> str:
        """Sends all that is left. Returns what is still missing, or ""."""
        deadline, unsent = time.monotonic() + seconds, []
        for sender in self._senders:
            unsent += sent_within(sender, self.objects.url, deadline)
        for sender in self._senders:
            sender.end()
        self.objects.patience = max(deadline - time.monotonic(), 1.0)
        try:
            self._mirror.finish(with_last=not unsent)
        except StoreError as error:
            return str(error)
        steps = ", ".join(map(str, sorted(set(unsent))))
        return f"the snapshots of steps {steps} ({self._sending_trouble() or 'it takes too long'})" if unsent else ""
