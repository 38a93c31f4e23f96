"""The manifest of a snapshot: its content, and whether it can be trusted.

It is a file like any other: it may be cut off, written by another program, or forged. Whatever it contains, reading it
returns entries of the right types, or raises one CheckpointError that says it is damaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist.control.exit_codes import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
CRC, SHA = "crc32c", "sha256"  # checksums of a file, in hexadecimal digits: an entry has one of them
_NUMBER = (int, float)
# The entries that are read when a run resumes; entries that a writer has left out are not required.
_TYPES: dict[str, Any] = {
    "format": int,
    "step": int,
    "files": dict,
    "consumed": int,
    "skipped_samples": int,
    "passed_over": int,
    "rollbacks": int,
    "samples": dict,
    "config_digest": str,
    "identity": dict,
    "workers": int,
    "replicas": int,
    "stream_cut": int,
    "strategy": str,
    "versions": dict,
    "variables": dict,
    "generators": dict,
    "clock": dict,
    "metrics": dict,
    "learning_rate": _NUMBER,
    "losses": list,
    "time": _NUMBER,
    "run_id": str,
    "epoch": int,
    "batch": int,
}
_LARGEST = 2**63 - 1  # the largest value of a TensorFlow counter


def self_digest(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of the manifest without its own checksum."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sealed(manifest: Mapping[str, Any]) -> str:
    """The manifest as text, with its own checksum."""
    return json.dumps({**manifest, "sha256": self_digest(manifest)}, indent=1)


def parse(text: str, path: str, step: int, required: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the entries of the manifest at `path`, of the snapshot of `step`; those `required` are present.

    Raises CheckpointError.
    """
    manifest = _unsealed(text, path)
    if manifest.get("format") != FORMAT or manifest.get("step") != step:
        raise CheckpointError(
            f"{path} has format {_shown(manifest.get('format'))}, step {_shown(manifest.get('step'))}; expected format"
            f" {FORMAT}, step {step}."
        )
    if missing := [name for name in required if manifest.get(name) is None]:
        raise CheckpointError(f'{path} is damaged: it lacks "{missing[0]}".')
    if wrong := next(_wrong_entries(manifest, step), ""):
        raise CheckpointError(f"{path} is damaged: its {wrong}.")
    return manifest


def run_of(text: str) -> str:
    """The id of the run that a manifest belongs to; "" if it is damaged, or does not say."""
    try:
        run_id = _unsealed(text, MANIFEST).get("run_id")
    except CheckpointError:
        return ""
    return run_id if isinstance(run_id, str) else ""


def _unsealed(text: str, path: str) -> dict[str, Any]:
    """The inverse of `sealed`. Raises CheckpointError."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is not JSON, or is truncated.") from None
    if not isinstance(manifest, dict) or "sha256" not in manifest:
        raise CheckpointError(f"{path} is damaged: it has no checksum.")
    if manifest.pop("sha256") != self_digest(manifest):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its contents.")
    return manifest


def _wrong_entries(manifest: Mapping[str, Any], step: int) -> Iterator[str]:
    """Yields the errors in a manifest, as the ends of a sentence."""
    for name, kind in _TYPES.items():
        value = manifest.get(name)
        if name in manifest and (
            not isinstance(value, kind) or isinstance(value, bool)
        ):  # a bool is an int, but never meant
            yield f'"{name}" is {_shown(value)}'
        if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
            yield f'"{name}" is {_shown(value)}'
    yield from _wrong_files(manifest.get("files"), step)
    for name, values in (("losses", manifest.get("losses", ())), ("metrics", manifest.get("metrics", {}).values())):
        if not all(isinstance(value, _NUMBER) for value in values):
            yield f'"{name}" are not numbers'
    clock = manifest.get("clock")
    if clock is not None and not (
        isinstance(clock.get("seconds"), _NUMBER)
        and isinstance(clock.get("pauses"), dict)
        and all(isinstance(pause, _NUMBER) for pause in clock["pauses"].values())
    ):
        yield '"clock" is not a clock'
    generators = manifest.get("generators")
    if generators is not None and not (
        _is_list(generators.get("python"), 3)
        and _is_list(generators["python"][1])
        and _is_list(generators.get("numpy"), 5)
        and _is_list(generators["numpy"][1])
    ):
        yield '"generators" are not states of generators'
    if manifest.get("identity") is not None and type(manifest["identity"].get("global_batch")) is not int:
        yield '"identity" has no global batch'


def _wrong_files(files: Any, step: int) -> Iterator[str]:
    if not isinstance(files, dict):
        yield '"files" are missing'
        return
    for name, entry in files.items():
        if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
            yield f'"files" name {_shown(name)}, which is not a file of this folder'
        elif not (
            isinstance(entry, dict)
            and type(entry.get("bytes")) is int
            and isinstance(entry.get(SHA, entry.get(CRC)), str)
        ):
            yield f'"files" have no size and checksum of {_shown(name)}'
    if f"state-{step}.index" not in files or not any(name.startswith(f"state-{step}.data-") for name in files):
        yield f'"files" lack state-{step}.index or its data'


def _is_list(value: Any, length: int | None = None) -> bool:
    return isinstance(value, list) and length in (None, len(value))


def _shown(value: Any) -> str:
    """The value as a short text without control characters for a terminal."""
    return ascii(value)[:60]
