"""Damages files: operations on a path below a folder, as plain data so that a case can be printed and repeated.

("remove",) ("truncate", share) ("flip", share) ("append", text) ("write", text) ("folder",) ("copy", path) ("rename",
path) ("json", keys, value) sets an entry, ("drop", keys) removes it; ("sealed", keys, value) and ("sealed_drop", keys)
do the same and recompute the checksum of a manifest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.artifacts.manifest import sealed


def apply(folder: Path, damage: Sequence[Any]) -> None:
    """Applies (operation, path, *its arguments). Except for "write" and "folder", does nothing if the path does not
    exist.
    """
    operation, name, *arguments = damage
    path = folder / name
    if operation in ("write", "folder"):
        _remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if operation == "folder" else path.write_bytes(arguments[0].encode("utf-8", "surrogateescape"))
    elif not path.exists():
        return
    elif operation == "remove":
        _remove(path)
    elif operation in ("copy", "rename"):
        _remove(folder / arguments[0])
        (folder / arguments[0]).parent.mkdir(parents=True, exist_ok=True)
        if operation == "rename":
            path.rename(folder / arguments[0])
        else:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / arguments[0])
    elif path.is_file():
        _change(path, operation, arguments)


def _change(path: Path, operation: str, arguments: Sequence[Any]) -> None:
    data = bytearray(path.read_bytes())
    if operation == "truncate":
        path.write_bytes(data[: int(len(data) * arguments[0])])
    elif operation == "append":
        path.write_bytes(data + arguments[0].encode("utf-8", "surrogateescape"))
    elif operation == "flip":
        at = min(int(len(data) * arguments[0]), len(data) - 1)
        if at >= 0:
            data[at] ^= 0x5A
        path.write_bytes(data)
    else:
        document = json.loads(data)
        changed = _with(document, arguments[0], arguments[1:])
        if operation.startswith("sealed"):
            changed.pop("sha256", None)
            path.write_text(sealed(changed))
        else:
            path.write_text(json.dumps(changed))


def _with(document: Any, keys: Sequence[str], value: Sequence[Any]) -> Any:
    """Returns the document with the entry at `keys` set to value[0], or removed if `value` is empty."""
    if not keys:
        return value[0] if value else {}
    inner, *rest = keys
    if isinstance(document, list):
        if not inner.lstrip("-").isdigit():  # an earlier damage has put a list there
            return document
        at = int(inner) % len(document) if document else 0
        if rest or value:
            return [*document[:at], _with(document[at] if document else {}, rest, value), *document[at + 1 :]]
        return [*document[:at], *document[at + 1 :]]
    if not isinstance(document, dict):
        return document
    if rest or value:
        return {**document, inner: _with(document.get(inner, {}), rest, value)}
    return {key: item for key, item in document.items() if key != inner}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
