"""lease.json in an object store: which job trains in a run there. The counterpart of control/lease.py for a folder.

A store has no locks. A lease is created by a write that fails if one exists (if the store supports this), and is
renewed every 15 seconds. An owner is dead when its process on this machine is gone or has given the lease back, when it
belongs to the same job on another machine (whoever restarts a job has ended its earlier attempt), or when it has not
renewed the lease for 60 seconds of the observer's clock. If two take over a dead owner's lease at the same moment, they
notice when they renew it: one ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from tfdist.control.lease_owner import Owner, Patience, Watched, ending
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError

FILE = "lease.json"
_RENEW_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_PATIENCE = Patience(dead=60.0, damaged=_LOOK_SECONDS)


class StoreLease:
    """The lease of a run in `objects`, as its chief sees it.

    on_loss: called in a thread with a sentence, in place of what ends the process, when somebody has taken the lease
    over. name: the user's name for what is leased.
    """

    def __init__(self, objects: ObjectStore, job: str, on_loss: Callable[[str], None] | None = None, name: str = ""):
        self._objects, self._on_loss, self.owner = objects, on_loss, Owner.myself(job)
        self._name = name or f"--run_dir={objects.url}"
        self._released, self._confirmed = threading.Event(), 0.0  # when it was last known to be ours (time.monotonic())
        self._thread = threading.Thread(target=self._keep, name="tfdist-store-lease", daemon=True)

    def take(self) -> None:
        """Takes the lease. Raises ConfigError if another job holds it, StoreError."""
        self._objects.allowed = lambda: None  # not an earlier lease's `confirm`
        watched = Watched(f"{self._objects.url}/{FILE}", self._name, self.owner, _PATIENCE)
        while not self._objects.create_text(FILE, self.owner.lease()):
            text = self._objects.text(FILE)
            if text is None:  # given back just now
                continue
            if watched.is_free(text):
                self._objects.remove(FILE)
            else:
                time.sleep(_LOOK_SECONDS)
        self._confirmed = time.monotonic()
        self._thread.start()

    def _keep(self) -> None:
        while not self._released.wait(_RENEW_SECONDS):
            with contextlib.suppress(StoreError):  # it is tried again later
                if not self._look():
                    return
                if not self._released.is_set():
                    self._objects.put_text(FILE, self.owner.lease())

    def confirm(self) -> None:
        """Confirms the lease before anything in the store is changed: a process that was stopped or cut off so long
        that another job took over must not touch that job's files, nor a thread that outlives this lease those of the
        next group of workers. Raises StoreError."""
        if self._released.is_set():
            if not self._is_ours():
                raise StoreError(f"{self._objects.url}: this process has given its lease back")
        elif time.monotonic() - self._confirmed > 2 * _RENEW_SECONDS:
            self._look()

    def _look(self) -> bool:
        """Whether the lease is still ours; if not, ends the process. Raises StoreError."""
        owner = Owner.read(self._objects.text(FILE) or "")
        if self._released.is_set() or owner and owner.id == self.owner.id:
            self._confirmed = time.monotonic()
            return True
        who = f"taken over by {owner.describe()}" if owner else "taken over by another job which has ended, or emptied"
        end = self._on_loss or ending(owner, self.owner.job)
        end(
            f"{self._objects.url} has been {who}, because this process was stopped or cut off and seemed dead: it ends,"
            " and changes nothing there."
        )
        return False

    def give_back(self) -> None:
        """Removes the lease, if it is still ours."""
        self._released.set()
        self.owner.give_back()
        if self._thread.is_alive():
            self._thread.join(_RENEW_SECONDS)
        with contextlib.suppress(StoreError):
            if self._is_ours():
                self._objects.remove(FILE)

    def _is_ours(self) -> bool:
        owner = Owner.read(self._objects.text(FILE) or "")
        return owner is not None and owner.id == self.owner.id


class FollowedLease:
    """A lease as the chief's other workers see it: they write in the store as long as the chief holds it.

    owner: the chief's id. job: the identity of the job. When another one holds the lease, the process ends.
    """

    def __init__(self, objects: ObjectStore, owner: str, job: str):
        self._objects, self._id, self._job = objects, owner, job
        self._confirmed = time.monotonic()

    def confirm(self) -> None:
        """Confirms the lease as StoreLease.confirm does. Raises StoreError."""
        if time.monotonic() - self._confirmed <= 2 * _RENEW_SECONDS:
            return
        owner = Owner.read(self._objects.text(FILE) or "")
        if owner is None:
            raise StoreError(f"{self._objects.url}: the chief of this job has released its lease")
        if owner.id != self._id:
            ending(owner, self._job)(
                f"{self._objects.url} has been taken over by {owner.describe()}, because the chief of this job seemed"
                " dead: this worker ends, and changes nothing there."
            )
        self._confirmed = time.monotonic()
