"""Where the chief keeps the backup of a tfdist.fit: one file in a folder, or two objects in an object store.

Not every store replaces an object atomically, so epochs are written to two objects in turn, and the newest intact one
is read: a job that is killed while it sends still has the epoch before.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tfdist.artifacts import backup_file
from tfdist.control.exit_codes import ConfigError
from tfdist.control.lease import held as lease_of_folder
from tfdist.control.own_files import check_owner
from tfdist.control.run_address import check_address, is_url
from tfdist.control.terminal import say
from tfdist.keras_fit.backup_content import BackupContent
from tfdist.storage.object_store import ObjectStore
from tfdist.storage.store_errors import StoreError
from tfdist.storage.store_lease import StoreLease

FILE = "tfdist-backup"
_NAMES = (f"{FILE}-even", f"{FILE}-odd")  # for even and odd epochs
_leases: dict[str, StoreLease] = {}  # held by this process, by URL
_left_over: set[str] = set()  # URLs of backups that finished fits of this process could not remove


class BackupPlace(Protocol):
    """A place for a backup. `name`: of the backup, for messages."""

    name: str

    def held(self, job: str) -> contextlib.AbstractContextManager[None]:
        """Context manager in which no other job has its backup here. Raises ConfigError if one has, OSError."""
        ...

    def read(self) -> bytes:
        """Returns the newest backup, b"" if there is none. Raises ValueError if all are damaged, OSError."""
        ...

    def write(self, content: BackupContent) -> bool:
        """Replaces the backup. Raises OSError in a folder; if a store cannot be reached, this is logged, and training
        continues. Returns whether the backup was written."""
        ...

    def remove(self) -> None:
        """Removes the backup, if there is one. Raises OSError in a folder; if a store cannot be reached, this is
        logged, and the next `read` of this process removes it."""
        ...


def backup_place(place: str | Path) -> BackupPlace:
    """Returns the place for BackupAndRestore's backup_dir. Raises ConfigError for an invalid URL, StoreError."""
    try:
        check_address("backup_dir", str(place))
    except ConfigError as error:
        raise ConfigError(str(error).replace("--backup_dir", "BackupAndRestore's backup_dir")) from None
    return _Objects(str(place)) if is_url(str(place)) else _Folder(Path(place))


class _Folder:
    def __init__(self, folder: Path):
        self._folder, self._path, self.name = folder, folder / FILE, str(folder / FILE)

    @contextlib.contextmanager
    def held(self, job: str) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        check_owner(self._folder)
        with lease_of_folder(self._folder, job, name=f"BackupAndRestore's folder {self._folder}"):
            yield

    def read(self) -> bytes:
        if not self._path.exists():
            return b""
        data = self._path.read_bytes()
        BackupContent.from_bytes(data)
        return data

    def write(self, content: BackupContent) -> bool:
        backup_file.write(self._path, content.to_dict())
        return True

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class _Objects:
    def __init__(self, url: str):
        self._url, self.name = url.rstrip("/"), f"{url.rstrip('/')}/{FILE}"

    @functools.cached_property
    def _objects(self) -> ObjectStore:
        """The object store, opened by the chief only: the others need neither access nor the packages for it."""
        return ObjectStore(self._url)

    @contextlib.contextmanager
    def held(self, job: str) -> Iterator[None]:
        lease = StoreLease(self._objects, job, name=f"BackupAndRestore's folder {self._url}")
        lease.take()
        _leases[self._url] = lease
        try:
            yield
        finally:
            del _leases[self._url]
            lease.give_back()

    def read(self) -> bytes:
        if self._url in _left_over:  # not of the fit that begins
            self._remove_all()
        newest, epoch, damage = b"", -1, ""
        self._objects.remove_half_sent(FILE)
        for name in _NAMES:
            if (size := self._objects.size(name)) is None:
                continue
            try:
                data = self._objects.piece(name, 0, size)
                found = BackupContent.from_bytes(data).epoch
            except FileNotFoundError:
                continue
            except ValueError as error:
                damage = f"{name}: {error}"
                continue
            if found > epoch:
                newest, epoch = data, found
        if damage and not newest:
            raise ValueError(damage)
        return newest

    def write(self, content: BackupContent) -> bool:
        name = _NAMES[content.epoch % 2]
        try:
            if self._url in _leases:
                self._objects.allowed = _leases[self._url].confirm
                self._objects.allowed()
            with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
                file = Path(folder, name)
                backup_file.write(file, content.to_dict())
                self._objects.send(file, name)
        except OSError as error:  # also from the local disk
            say(
                f"THE BACKUP OF EPOCH {content.epoch} WAS NOT SENT: {error}. Training continues; the next epoch tries"
                " again."
            )
            return False
        return True

    def remove(self) -> None:
        try:
            self._remove_all()
        except StoreError as error:
            _left_over.add(self._url)
            say(
                f"THE BACKUP WAS NOT REMOVED: {error}. The next fit of this program with the same place removes it"
                " before it begins; if there is none, remove it yourself: a program that is started anew would find"
                " its epochs done."
            )

    def _remove_all(self) -> None:
        """Raises StoreError."""
        for name in _NAMES:
            self._objects.remove(name)
        _left_over.discard(self._url)
