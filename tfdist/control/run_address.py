"""Where a run lives: in a folder, or in an object store (a URL) of which each machine has a working copy.

Everything that a run writes goes first to the working copy, on a local disk; storage/ then uploads it.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from tfdist.control.exit_codes import ConfigError

SNAPSHOTS = "checkpoints"  # name of the snapshots' folder in a run folder, and in a backup's folder in a store
_LONGEST_BYTES = 800  # of a URL without its scheme: S3 allows names of 1024 bytes, and file names are appended
# scheme -> (package of its file system, description). pyproject.toml has extras for them.
STORES = {
    "s3": ("s3fs", "Amazon S3, and stores with the same protocol"),
    "gs": ("gcsfs", "Google Cloud Storage"),
    "abfs": ("adlfs", "Azure"),
    "webhdfs": ("requests", "HDFS over HTTP"),
    "hdfs": ("pyarrow", "HDFS with its native library"),
}


def is_url(place: str) -> bool:
    """Returns whether a place is a URL, not a folder of this machine."""
    return "://" in place


def is_below(place: str, other: str) -> bool:
    """Returns whether `place` is the same as `other`, or lies below it."""
    if is_url(place) != is_url(other):
        return False
    if not is_url(place):
        place, other = os.path.realpath(place), os.path.realpath(other)
    return f"{place.rstrip('/')}/".startswith(f"{other.rstrip('/')}/")


def working_folder(run_dir: str, cache_dir: str) -> Path:
    """Returns the folder of a run on this machine: `run_dir` itself, or the working copy of a URL."""
    if not is_url(run_dir):
        return Path(run_dir)
    return cache_folder(cache_dir) / "runs" / folder_name(run_dir)


def backup_folder(backup_dir: str, cache_dir: str) -> str:
    """Returns the folder of a backup on this machine: `backup_dir` itself, or the local copy of a URL."""
    if not is_url(backup_dir):
        return backup_dir
    return str(cache_folder(cache_dir) / "backups" / folder_name(backup_dir) / SNAPSHOTS)


def folder_name(url: str) -> str:
    """Returns the name of a URL's folder on this machine, different for each URL."""
    address = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", address.rpartition("/")[2])[:60]
    return f"{name}-{hashlib.sha256(address.encode()).hexdigest()[:12]}"


def cache_folder(cache_dir: str) -> Path:
    """Returns `cache_dir`, or if that is empty the folder according to the XDG Base Directory Specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache_dir) if cache_dir else (Path(base) if base else Path.home() / ".cache") / "tfdist"


def check_address(flag: str, place: str) -> None:
    """Raises ConfigError if a URL is not a valid place in a store that tfdist supports. flag: the URL's flag."""
    meant = place.strip()
    if mistyped := re.fullmatch(rf"({'|'.join(STORES)})(?::/?|//)([^/].*)", meant):
        meant = f"{mistyped[1]}://{mistyped[2]}"
    if is_url(meant) and meant != place:
        raise ConfigError(f"--{flag}={ascii(place)[1:-1]} is not a URL: write {meant}.")
    if not is_url(place):
        return
    scheme, _, rest = place.partition("://")
    bucket = rest.partition("/")[0]
    if "@" in bucket and scheme != "abfs":  # abfs://container@account.dfs.core.windows.net/...
        raise ConfigError(
            f"--{flag}: a user or password does not belong in the URL, where it would be logged: use the store's own"
            " environment variables or files."
        )
    if scheme not in STORES:
        known = ", ".join(f"{name}:// ({what})" for name, (_, what) in STORES.items())
        raise ConfigError(
            f"--{flag}={place}: {scheme}:// is not a store that tfdist knows: use a folder, or one of {known}."
        )
    if not bucket or not rest.partition("/")[2].strip("/"):
        raise ConfigError(f"--{flag}={place} names no place in a store: write {scheme}://BUCKET/FOLDER.")
    if found := re.search(r"[?#*\[\]\s\\\x00-\x1f\x7f\ud800-\udfff]|/\.\.?(/|$)|//|::", rest):
        what = found.group(0)
        raise ConfigError(f"--{flag}={ascii(place)[1:-1]}: {what!r} may not be in the URL: choose another name.")
    if len(rest.encode("utf-8", "surrogateescape")) > _LONGEST_BYTES:
        raise ConfigError(f"--{flag}={place[:60]}... is too long for a store: at most {_LONGEST_BYTES} bytes.")
