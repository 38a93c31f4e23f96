"""Lists the files below a folder of a store, and tells which names are plain ones."""

from __future__ import annotations

from typing import Any


def found_below(system: Any, folder: str) -> dict[str, dict[str, Any]]:
    """path -> the entry from fsspec's `system`, for all files below a folder. Raises the errors of its `ls`.

    fsspec's own `find` leaves out folders that it cannot list (a lost connection, no permission): then existing files
    would count as gone.
    """
    found: dict[str, dict[str, Any]] = {}
    folders = [folder.rstrip("/")]
    while folders:
        here = folders.pop()
        try:
            listing = system.ls(here, detail=True)
        except FileNotFoundError:  # it never existed, or has been removed meanwhile
            continue
        for entry in listing:
            path = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[path] = {**entry, "name": path}
            elif path != here:
                folders.append(path)
    return found


def is_plain(name: str) -> bool:
    """Whether an object's name stays inside its folder and has no hidden part."""
    return bool(name) and not any(part in ("", "..") or part.startswith(".") for part in name.split("/"))
