"""RUN_DIR/lease.json: which job trains in a run folder. A second job there is refused; a dead owner's lease is taken
over. The same in the folder of a run's backup (--backup_dir).

Two jobs in one folder would write each other's snapshots and logs and both end well. So the chief holds a lease while
it trains. It says who holds it (host, process, since when) and is renewed every two seconds. An owner is dead

    on the same machine     when no process of its number was started when it says, or it ends within 5 s
    on another              when it has not renewed the lease for 20 seconds of the observer's own clock

An owner of the same job (one launcher with its restarts, one Slurm step with its requeues, one list of addresses) has
been ended by whoever starts the job again: on another machine too its lease is taken over without a wait; should it be
alive it finds that out when it next renews, and ends. Works on shared file systems: a lease comes to be by link(2),
which is atomic on NFS too.
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
from tfdist.control.lease_owner import Owner, Patience, Watched, end_worker, in_use
from tfdist.control.run_address import is_url
from tfdist.control.terminal import say

FILE = "lease.json"
JOB_VARIABLE = "TFDIST_JOB_ID"  # the launcher's name for all attempts of a job
_WRITTEN = re.compile(rf"\.{re.escape(FILE)}\.[0-9a-f]{{32}}")  # a lease before it gets its name
_RENEW_SECONDS = 2.0
_PATIENCE = Patience(dead=20.0, damaged=_RENEW_SECONDS)
_LOOK_SECONDS = 0.1


def job_identity(environ: Mapping[str, str], cluster: Cluster) -> str:
    """A text that tells attempts of one job from another job; "" if nothing does."""
    if environ.get(JOB_VARIABLE):
        return f"launcher {environ[JOB_VARIABLE]}"
    if environ.get("SLURM_JOB_ID"):
        return f"slurm {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    if any(not address.startswith(("127.", "localhost:", "[::1]")) for address in cluster.peers):
        return f"addresses {hashlib.sha256(' '.join(cluster.peers).encode()).hexdigest()[:16]}"
    return ""


@contextlib.contextmanager
def held(folder: Path, job: str, name: str = "") -> Iterator[None]:
    """The lease of `folder` for the time of the context. Raises ConfigError if another job holds it."""
    lease = Lease(folder, job, name=name)
    lease.take()
    try:
        yield
    finally:
        lease.give_back()


def refuse_if_held(folder: Path) -> None:
    """Raises ConfigError if a process that lives on this machine trains in `folder`. Only looks."""
    begun = time.monotonic()
    with contextlib.suppress(OSError):  # its workers will say
        while (owner := Owner.read(_read(folder / FILE) or "")) and owner.is_here() and owner.runs_here():
            if time.monotonic() - begun > _PATIENCE.to_end:
                raise in_use(_name(folder), owner)
            time.sleep(_LOOK_SECONDS)


class Lease:
    """The lease of one folder, as its chief has it.

    on_loss: called in a thread when another has taken it over; ends the process. name: how the user knows the folder.
    """

    def __init__(self, folder: Path, job: str, on_loss: Callable[[str], None] | None = None, name: str = ""):
        self._folder, self._path, self.owner, self._name = (
            folder,
            folder / FILE,
            Owner.myself(job),
            name or _name(folder),
        )
        self._on_loss, self._released = on_loss or end_worker, threading.Event()
        self._thread = threading.Thread(target=self._keep, name="tfdist-lease", daemon=True)

    @property
    def is_taken(self) -> bool:
        return self._thread.is_alive()

    def take(self) -> None:
        """Raises ConfigError if another job holds it, or if the folder cannot be written."""
        watched = Watched(str(self._path), self._name, self.owner, _PATIENCE)
        try:
            while not self._put():
                text = _read(self._path)
                if text is not None and watched.is_free(text):  # "": not yet written, or never
                    self._remove(text)
                elif text is None and self._path.is_symlink():  # one that leads nowhere
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
        """Removes what others left that were killed in the middle of `_put`; one that is there now gets over it."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _put(self) -> bool:
        """Makes the lease ours, if there is none. Raises OSError."""
        written = self._folder / f".{FILE}.{self.owner.id}"
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _write(descriptor, self.owner.lease())
            try:
                os.link(written, self._path)
                return True
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # who holds the lease has removed it
                    return os.stat(written).st_nlink == 2  # NFS: the answer to a link that was made may get lost
                return False
            except OSError:  # a file system without links
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
        """Takes a dead owner's lease away; if somebody else was faster, and it is another's now, puts that back."""
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
                say(f"{self._name} HAS BEEN REMOVED: what is written now is in a new folder, and what was is lost.")
            with contextlib.suppress(OSError):  # a full disk, a file server that is away: then later
                if not self._renew() and not self._released.is_set():
                    owner = Owner.read(_read(self._path) or "")
                    self._on_loss(
                        f"{self._folder} has been taken over by {owner.describe() if owner else 'another job'}, since"
                        " this process, which was stopped or cut off, seemed dead: it ends, the other goes on."
                    )
                    return

    def _renew(self) -> bool:
        """Writes the time, in place. False: the lease is another's. Raises OSError."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:  # somebody cleaned up
            return self._put()
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link, where ours was: nothing is written where it leads
                self._path.unlink(missing_ok=True)
                return self._put()
            raise
        try:
            owner = Owner.read(os.pread(descriptor, 1 << 16, 0).decode(errors="replace"))
            if owner is not None and owner.id != self.owner.id:
                return False
            _write(descriptor, self.owner.lease())  # as long as before
            return True
        finally:
            os.close(descriptor)

    def give_back(self) -> None:
        """Removes the lease, if it is still ours."""
        self._released.set()
        if self._thread.is_alive():
            self._thread.join(_RENEW_SECONDS)
        with contextlib.suppress(OSError):
            owner = Owner.read(_read(self._path) or "")
            if owner and owner.id == self.owner.id:
                self._path.unlink()


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A context that only one of all who look at a folder is in; on file systems that lock no folders (NFS) this holds
    nobody up, and two who remove the same lease at once find out when they renew theirs."""
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
    """None if there is none. Raises OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))  # a pipe would be waited for
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except FileNotFoundError:
        return None
