"""Lists all below a folder of a store that has folders. fsspec's own `find` leaves out the folders that it cannot list
(a lost connection, no permission): then what is there would count as gone."""

from __future__ import annotations

from typing import Any


def files_below(system: Any, folder: str) -> dict[str, dict[str, Any]]:
    """path -> what fsspec's `system` says of it, of all files. Raises what its `ls` raises."""
    found: dict[str, dict[str, Any]] = {}
    folders = [folder.rstrip("/")]
    while folders:
        here = folders.pop()
        try:
            listing = system.ls(here, detail=True)
        except FileNotFoundError:  # it never was there, or has been removed meanwhile
            continue
        for entry in listing:
            path = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[path] = {**entry, "name": path}
            elif path != here:
                folders.append(path)
    return found
