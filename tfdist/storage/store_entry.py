"""The entry of an object in a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Names in fsspec's file systems of an Entry's version.
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "modificationTime", "mtime", "LastModified", "last_modified")


@dataclass(frozen=True)
class Entry:
    """version: changes with the object's content, or at least whenever it is written."""

    size: int
    version: str

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Entry:
        return cls(
            attributes["size"], str(next((attributes[name] for name in _VERSIONS if name in attributes), "")).strip('"')
        )
