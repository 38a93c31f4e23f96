"""Writing, locking and removing files in a folder that others may have written to as well: a symbolic link that they
have put there must not lead a process of ours to a file elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_OWN = 0o666  # less the umask, as `open` has it


@contextlib.contextmanager
def written_whole(
    path: Path, form: str = "w", *, flushed: bool = False, newline: str | None = None, mode: int = _OWN, aside: str = ""
) -> Iterator[IO[Any]]:
    """A file that has the name `path` at the end of the body, if that does not fail.

    Args: form, as `open` takes it: "w" for text, "wb" for bytes. flushed, whether its bytes are on the disk before it
    has the name. mode, aside: see `replaced`. Raises OSError.
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
    """A new, empty file beside `path`, which has that name at the end of the body; if that fails it is removed. Raises
    OSError.

    Args: mode, who may use it, less the umask. aside, its name until then, which the next writer takes again if this
    one is killed; by default one of this thread's own.
    """
    temporary = path.with_name(aside or f".{path.name}.{os.getpid()}.{threading.get_ident()}.writing")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))  # O_EXCL: not where a link leads
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush_to_disk(path: str | Path) -> None:
    """Brings a file, or a folder's list of names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(path: Path, how: int) -> int:
    """A descriptor that holds a lock, until it is closed or the process ends. `how`: as fcntl.flock takes it. Raises
    OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def lock(path: Path, wait: bool) -> Iterator[bool]:
    """Whether this process alone has the lock; if it does not `wait`, another may have it. Raises OSError."""
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
    """A descriptor to write at the end of a file, which is made if need be. Raises OSError, also for a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, _OWN)


def remove_tree(path: str | Path) -> None:
    """Removes a folder with all in it, of links the links alone. Raises OSError."""
    if os.path.islink(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)
