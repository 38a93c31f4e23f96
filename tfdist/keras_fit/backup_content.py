"""The content of a backup of tfdist.fit, and the names of its entries (backup_file.py writes and reads the file)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.artifacts import backup_file
from tfdist.keras_fit import data_identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackupContent:
    """The state of a fit after an epoch. In the file the entries have these names and this order; entries with a
    default are missing from files of earlier versions.

    Attributes: drawn_without_one, the state of Keras' global generator, which layers use that have no generator of
    their own; epoch, the number of epochs that are done; data, the identity of the data of the fit; fit, its number in
    the program; epochs, those of the history; callbacks, for each the attributes that have changed; deleted, for each
    the attributes that it no longer has; shared, see callback_state.shared_in; attributes, those of the model that have
    changed, see plain_attributes.py; order, the seed with which tfdist shuffles arrays, if it does; shuffled_by, see
    data_order.py; ends, see RunningFit.ends; generators, the states of the process's random generators; data_calls, see
    DataCalls.fields.
    """

    variables: list[np.ndarray]
    drawn_without_one: np.ndarray | None = None
    epoch: int
    data: data_identity.Identity = dataclasses.field(default_factory=dict)
    fit: int = 1
    stopped: bool
    history: dict[str, list]
    epochs: list[int]
    callbacks: list[dict[str, Any]]
    deleted: Sequence[Sequence[str]] = ()
    callback_names: Sequence[str] = ()
    shared: Sequence[Sequence[Any]] = ()
    attributes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    order: int | None
    shuffled_by: list | None = None
    ends: dict[str, int | None]
    generators: dict[str, Any]
    data_calls: Mapping[str, Any] | None = None

    @classmethod
    def from_bytes(cls, data: bytes) -> BackupContent:
        """Reads the content of a file. Raises ValueError if it is not a backup, or is damaged."""
        return cls.from_dict(backup_file.parse(data))

    @classmethod
    def from_dict(cls, entries: Any) -> BackupContent:
        """The inverse of `to_dict`. Raises ValueError if the entries are not those of a backup."""
        held = entries if isinstance(entries, dict) else {}
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            content = cls(**{name: held[name] for name in names if name in held})
        except TypeError:  # an entry that has no default is missing
            content = None
        if content is None or not content._has_its_kinds():
            raise ValueError("it has unexpected contents")
        return content

    def to_dict(self) -> dict[str, Any]:
        """The entries of the file."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _has_its_kinds(self) -> bool:
        """Whether the entries that every version writes have the right types: others may have written the file."""
        kinds = (
            (self.variables, list),
            (self.epoch, int),
            (self.stopped, bool),
            (self.history, dict),
            (self.epochs, list),
            (self.callbacks, list),
            (self.order, (int, type(None))),
        )
        return all(isinstance(value, kind) for value, kind in kinds)
