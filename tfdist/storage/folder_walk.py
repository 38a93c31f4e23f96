"""What is below a folder of a store, and which names there are a file's of ours."""

from __future__ import annotations

from typing import Any


def found_below(system: Any, folder: str) -> dict[str, dict[str, Any]]:
    """path -> what fsspec's `system` says of it, of all files below a folder. Raises what its `ls` raises.

    fsspec's own `find` leaves out the folders that it cannot list (a lost connection, no permission): then what is
    there would count as gone.
    """
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


def is_plain(name: str) -> bool:
    """Whether an object's name is a file's that stays in its folder, and no hidden one's."""
    return bool(name) and not any(part in ("", "..") or part.startswith(".") for part in name.split("/"))
