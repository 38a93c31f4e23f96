"""Lists the files of a folder of texts: each file once, however many links lead to it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from tfdist.control.exit_codes import DataError

_NOT_DATA = "lost+found"  # made by the file system; only root may read it


class _Folder(NamedTuple):
    inside: str  # relative to the root, with /
    path: str


def plain_files(root: str, accepts: Callable[[str], bool], enters: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Returns (relative path with /, path) of each accepted file in or below `root`, sorted by the former.

    Links are followed. A file with several names is listed under the name where it lies; if all names are links, under
    one of them, always the same. A dead link is returned as well; anything else that is neither file nor folder (a
    pipe, say) is not. accepts, enters: whether to list a file, or search a folder, of this name. Raises DataError for a
    folder that cannot be read.
    """
    found: dict[str, tuple[str, str]] = {}  # by the real path
    entered: set[str] = set()  # real paths of folders
    folders = [_Folder("", root)]
    while folders:  # first everything below the root, then the targets of links there, then those of links in these
        links: list[tuple[str, str]] = []
        while folders:
            folder = folders.pop()
            real = os.path.realpath(folder.path)
            if real in entered:
                continue
            entered.add(real)
            for entry in _entries(folder.path):
                inside = f"{folder.inside}/{entry.name}".lstrip("/")
                if entry.is_symlink():
                    links.append((inside, entry.path))
                elif entry.is_dir():
                    folders += [_Folder(inside, entry.path)] if enters(entry.name) and entry.name != _NOT_DATA else []
                elif accepts(entry.name) and entry.is_file():
                    found.setdefault(os.path.join(real, entry.name), (inside, entry.path))
        for inside, path in sorted(links):
            name, kind = os.path.basename(path), _kind(path)
            if kind == stat.S_IFDIR and enters(name):
                folders.insert(0, _Folder(inside, path))  # the first by name is taken first
            elif kind in (stat.S_IFREG, None) and accepts(name):
                found.setdefault(os.path.realpath(path), (inside, path))
    return sorted(found.values())


def _entries(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:  # removed in the meantime
        return []
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be read ({error.strerror}): make it readable, or keep it elsewhere."
        ) from None


def _kind(link: str) -> int | None:
    """Returns the type of a link's target; None if there is no target, or it cannot be determined."""
    try:
        return stat.S_IFMT(os.stat(link).st_mode)
    except OSError:
        return None
