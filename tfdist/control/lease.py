"""RUN_DIR/lease.json: which job trains in a run folder. A second job is refused; a dead owner's lease is taken over.
The folder of a run's backup (--backup_dir) has such a lease too.

Two jobs in one folder would overwrite each other's snapshots and logs, and both would end without an error. So the
chief holds a lease while it trains. The lease names its owner (host, process, since when) and is renewed every two
seconds. An owner is dead

    on the same machine     if no process with its id and start time exists, or if that process ends within 5 s, or has
                            given the lease back
    on another machine      if it has not renewed the lease for 20 seconds of the observer's own clock

An owner of the same job (one launcher with its restarts, one Slurm step with its requeues, one list of addresses) has
been ended by whoever restarts the job. So its lease is taken over without a wait, even from another machine; should the
owner still be alive, it notices at its next renewal, and ends. On the same machine, where it is seen to be alive, it is
waited for whether it renews the lease. This works on shared file systems: a lease is created by
link(2), which is atomic on NFS too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.lease_owner import Owner, Patience, Watched, ending, in_use
from tfdist.control.resolvers import resolve_cluster
from tfdist.control.run_address import is_url
from tfdist.control.terminal import say

FILE = "lease.json"
JOB_VARIABLE = "TFDIST_JOB_ID"  # set by the launcher: the same for all attempts of a job
_WRITTEN = re.compile(rf"\.{re.escape(FILE)}\.[0-9a-f]{{32}}")  # a lease file before it gets its final name
_RENEW_SECONDS = 2.0
_PATIENCE = Patience(dead=20.0, damaged=_RENEW_SECONDS)
_LOOK_SECONDS = 0.1


def job_identity(environ: Mapping[str, str], cluster: Cluster) -> str:
    """Returns a text that is the same for all attempts of a job and differs between jobs; "" if there is none."""
    if environ.get(JOB_VARIABLE):
        return f"launcher {environ[JOB_VARIABLE]}"
    if environ.get("SLURM_JOB_ID"):
        return f"slurm {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    if any(not address.startswith(("127.", "localhost:", "[::1]")) for address in cluster.peers):
        return f"addresses {hashlib.sha256(' '.join(cluster.peers).encode()).hexdigest()[:16]}"
    return ""


def this_job() -> str:
    """`job_identity` of this process."""
    return job_identity(os.environ, resolve_cluster(os.environ))


@contextlib.contextmanager
def held(folder: Path, job: str, name: str = "", even_if_full: bool = False) -> Iterator[None]:
    """Context manager that holds the lease of `folder`, see Lease.take. Raises ConfigError if another job holds it."""
    lease = Lease(folder, job, name=name)
    lease.take(even_if_full)
    try:
        yield
    finally:
        lease.give_back()


def refuse_if_held(folder: Path) -> None:
    """Raises ConfigError if a running process of this machine trains in `folder`. Changes nothing."""
    begun = time.monotonic()
    with contextlib.suppress(OSError):  # the job's workers will report the error
        while (owner := Owner.read(_read(folder / FILE) or "")) and owner.is_here() and owner.runs_here():
            if time.monotonic() - begun > _PATIENCE.to_end:
                raise in_use(_name(folder), owner)
            time.sleep(_LOOK_SECONDS)


class Lease:
    """The lease of one folder, held by the chief.

    on_loss: called in a thread, in place of what ends the process, when somebody has taken the lease over. name: the
    user's name for the folder.
    """

    def __init__(self, folder: Path, job: str, on_loss: Callable[[str], None] | None = None, name: str = ""):
        self._folder, self._path, self.owner, self._name = (
            folder,
            folder / FILE,
            Owner.myself(job),
            name or _name(folder),
        )
        self._on_loss, self._released = on_loss, threading.Event()
        self._thread = threading.Thread(target=self._keep, name="tfdist-lease", daemon=True)

    @property
    def is_taken(self) -> bool:
        return self._thread.is_alive()

    def take(self, even_if_full: bool = False) -> None:
        """Takes the lease. Raises ConfigError if another job holds it, or if the folder cannot be written.

        even_if_full: a lease that nobody holds counts as taken though the disk is full; it is written when there is
        room. For a process whose job goes on without the disk.
        """
        watched = Watched(str(self._path), self._name, self.owner, _PATIENCE)
        try:
            while not self._is_put(even_if_full):
                text = _read(self._path)
                if text is not None and watched.is_free(text):  # "": not yet written, or never will be
                    self._remove(text)
                elif text is None and self._path.is_symlink():  # a dangling link
                    self._path.unlink(missing_ok=True)
                else:
                    time.sleep(_LOOK_SECONDS)
        except OSError as error:
            place = "another --cache_dir" if is_url(self._name) else "a folder that can be read and written"
            raise ConfigError(
                f"{self._name} cannot be used ({error.strerror}: {error.filename or self._path}): choose {place}, or"
                " make room there."
            ) from None
        self._remove_left_overs()
        self._thread.start()

    def _remove_left_overs(self) -> None:
        """Removes files left by processes that were killed within `_put`; a process within `_put` now can cope."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _is_put(self, even_if_full: bool) -> bool:
        try:
            return self._put()
        except OSError as error:
            if not even_if_full or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return _read(self._path) is None  # `_keep` tries again

    def _put(self) -> bool:
        """Creates our lease if there is none; returns whether it did. Raises OSError."""
        written = self._folder / f".{FILE}.{self.owner.id}"
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _write(descriptor, self.owner.lease())
            try:
                os.link(written, self._path)
                return True
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # the owner of the lease has removed it
                    return os.stat(written).st_nlink == 2  # on NFS the reply to a successful link may get lost
                return False
            except OSError:  # a file system without hard links
                return self._put_exclusively()
        finally:
            os.close(descriptor)
            written.unlink(missing_ok=True)

    def _put_exclusively(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            _write(descriptor, self.owner.lease())
        finally:
            os.close(descriptor)
        return True

    def _remove(self, text: str) -> None:
        """Removes a dead owner's lease. If another process was faster and its lease is there now, restores that."""
        aside = self._folder / f".{FILE}.{self.owner.id}.dead"
        with _one_at_a_time(self._folder):
            try:
                if _read(self._path) != text:
                    return
                os.rename(self._path, aside)
            except FileNotFoundError:
                return
            with contextlib.suppress(OSError):
                if Owner.read(_read(aside) or "") != Owner.read(text):
                    os.link(aside, self._path)
            os.unlink(aside)

    def _keep(self) -> None:
        has_warned = False
        while not self._released.wait(_RENEW_SECONDS):
            if not (has_warned or self._folder.exists()):
                has_warned = True
                say(f"{self._name} HAS BEEN REMOVED: new files go to a new folder, and the old ones are lost.")
            with contextlib.suppress(OSError):  # for example a full disk, or an unreachable file server: retried later
                if not self._renew() and not self._released.is_set():
                    owner = Owner.read(_read(self._path) or "")
                    end = self._on_loss or ending(owner, self.owner.job)
                    end(
                        f"{self._folder} has been taken over by {owner.describe() if owner else 'another job'}, because"
                        " this process was stopped or cut off and seemed dead: it ends, the other continues."
                    )
                    return

    def _renew(self) -> bool:
        """Renews the lease in place. Returns False if it now belongs to another owner. Raises OSError."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:  # somebody removed it
            return self._put()
        except OSError as error:
            if error.errno == errno.ELOOP:  # our file was replaced by a link: its target must not be written
                self._path.unlink(missing_ok=True)
                return self._put()
            raise
        try:
            owner = Owner.read(os.pread(descriptor, 1 << 16, 0).decode(errors="replace"))
            if owner is not None and owner.id != self.owner.id:
                return False
            _write(descriptor, self.owner.lease())  # has the same length as before
            return True
        finally:
            os.close(descriptor)

    def give_back(self) -> None:
        """Removes the lease, if it is still ours."""
        self._released.set()
        self.owner.give_back()
        if self._thread.is_alive():
            self._thread.join(_RENEW_SECONDS)
        with contextlib.suppress(OSError):
            owner = Owner.read(_read(self._path) or "")
            if owner and owner.id == self.owner.id:
                self._path.unlink()


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Context manager: a lock on the folder, held by one process at a time. On file systems that cannot lock folders
    (NFS) it has no effect, and two processes that remove the same lease at once notice when they renew theirs."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _name(folder: Path) -> str:
    return f"--run_dir={folder}"


def _write(descriptor: int, text: str) -> None:
    data = text.encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
    os.fsync(descriptor)


def _read(path: Path) -> str | None:
    """Reads a lease; None if there is none. Raises OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))  # reading a pipe would block
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except FileNotFoundError:
        return None
