"""Writing and removing files in a folder that others may have written to as well: a symbolic link that they have put
there must not lead a process of ours to a file elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_OWN = 0o666  # less the umask, as `open` has it


@contextlib.contextmanager
def written_whole(path: Path, *, flushed: bool = False, newline: str | None = None) -> Iterator[TextIO]:
    """A text file that has the name `path` at the end of the body, if that does not fail.

    Args: flushed, whether its bytes are on the disk before it has the name. Raises OSError.
    """
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8", newline=newline) as file:
        yield file
        if flushed:
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`, which has that name at the end of the body; if that fails it is removed. Raises
    OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.writing")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN))  # O_EXCL: not where a link leads
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def appended_to(path: Path) -> int:
    """A descriptor to write at the end of a file, which is made if need be. Raises OSError, also for a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, _OWN)


def remove_tree(path: str | Path) -> None:
    """Removes a folder with all in it, of links the links alone. Raises OSError."""
    if os.path.islink(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)
