"""Writes, locks and removes files in a folder to which others may have written as well: a symbolic link that they have
put there must not lead our process to a file elsewhere. Checks whether a folder is another user's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_OWN = 0o666  # less the umask, as in `open`
_USERS = Path("/proc/self/uid_map")  # the users that the system knows here, and who they are outside
_UNKNOWN_USER = Path("/proc/sys/kernel/overflowuid")  # the number that all others have here


def check_owner(folder: str | Path) -> None:
    """Raises PermissionError if a folder belongs to another user, who could put files of his own in the place of ours;
    OSError if no file can be made there.

    The folder may belong to root, as volumes do; in some containers nothing tells root from users who are unknown
    there. A network file system may give our files another owner than this process. In a container, root works in
    folders of its user.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        ours = os.fstat(file.fileno()).st_uid
    if os.geteuid() and os.stat(folder).st_uid not in (ours, 0, _root_outside()):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))


def _root_outside() -> int:
    """The number that the machine's root has here: another than 0 in a container that does not know him."""
    try:
        is_known = any(line.split()[:2] == ["0", "0"] for line in _USERS.read_text().splitlines())
        return 0 if is_known else int(_UNKNOWN_USER.read_text())
    except OSError:  # a system without such containers
        return 0


@contextlib.contextmanager
def written_whole(
    path: Path, form: str = "w", *, flushed: bool = False, newline: str | None = None, mode: int = _OWN, aside: str = ""
) -> Iterator[IO[Any]]:
    """Context manager that opens a new file, which gets the name `path` at the end of the body unless that fails.

    Args: form: mode as in `open`: "w" for text, "wb" for bytes. flushed: whether its bytes are on the disk before it
    gets the name. mode, aside: see `replaced`. Raises OSError.
    """
    encoding = None if "b" in form else "utf-8"
    with (
        replaced(path, mode=mode, aside=aside) as temporary,
        open(temporary, form, encoding=encoding, newline=newline, opener=_not_by_a_link) as file,
    ):
        yield file
        if flushed:
            file.flush()
            os.fsync(file.fileno())


def _not_by_a_link(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT | os.O_NOFOLLOW)


@contextlib.contextmanager
def replaced(path: Path, *, mode: int = _OWN, aside: str = "") -> Iterator[Path]:
    """Context manager that makes a new, empty file beside `path`. At the end of the body it is renamed to `path`; if
    the body fails, it is removed. Raises OSError.

    Args: mode: permissions, less the umask. aside: temporary name, which the next writer reuses if this one is killed;
    by default a name that only this thread uses.
    """
    temporary = path.with_name(aside or f".{path.name}.{os.getpid()}.{threading.get_ident()}.writing")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))  # O_EXCL: follows no link
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush_to_disk(path: str | Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(path: Path, how: int) -> int:
    """Locks a file, and returns the descriptor that holds the lock until it is closed or the process ends. how: as in
    fcntl.flock. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def lock(path: Path, wait: bool) -> Iterator[bool]:
    """Context manager that locks a file. Yields whether this process has the lock: always if `wait`, else False if
    another has it. Raises OSError."""
    try:
        descriptor = locked(path, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)


def appended_to(path: Path) -> int:
    """Opens a file for appending, creates it if needed, and returns the descriptor. Raises OSError, also for a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, _OWN)


def remove_tree(path: str | Path) -> None:
    """Removes a folder and its contents; of links, only the links themselves. Raises OSError."""
    if os.path.islink(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)
