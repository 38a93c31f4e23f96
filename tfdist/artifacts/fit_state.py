"""The state of a running fit beside its variables: the other callbacks, and plain attributes of the model.

Both backups hold it: BackupAndRestore of a plain fit (backup.py), and that of tfdist.fit (keras_fit/epoch_backup.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.artifacts import backup_file, callback_state, plain_attributes
from tfdist.compat.kept_attributes import kept_on
from tfdist.control.terminal import say


def storable_history(history: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Returns the history of a fit as values that a backup can store; names with other values are left out."""
    found = {}
    for name, values in history.items():
        try:
            plain = [value if backup_file.is_storable(value) else np.asarray(value) for value in values]
        except Exception:  # noqa: BLE001, S112 - whatever a callback puts there
            continue
        if all(map(backup_file.is_storable, plain)):
            found[name] = plain
    return found


@dataclasses.dataclass
class _Known:
    """What the fits of this process know of the attributes of a callback, or of the model. It is kept there: another
    backup of the same fit, or the fit that resumes an interrupted one, may get the same objects.

    first: facts that tell whether they have changed since the last fit began. state: the names of those that a fit has
    changed or restored: they are state, whatever their values are later. The others are settings.
    """

    first: Any
    state: set = dataclasses.field(default_factory=set)


class FitState:
    """Collects and restores the state.

    others: the callbacks whose state is held. says: whether this process logs what is not held.
    """

    def __init__(self, others: Sequence[keras.callbacks.Callback], *, says: bool = True):
        self._others, self._says = others, says
        self._reported: list[str] = []  # attributes
        self._known: list[_Known] = []  # of each other callback
        self._known_model = _Known([])
        self._model_before: plain_attributes.Values = []  # at the last call of `fields`

    def begin(self, model: keras.Model, restored: Mapping[str, Any] | None = None) -> None:
        """Notes what everything is like at first: `fields` has the attributes that change. Call before `restore`, when
        all callbacks have begun. restored: what `restore` will be given."""
        self._known = [kept_on(each, callback_state.KNOWN, lambda: _Known({})) for each in self._others]
        self._known_model = kept_on(model, callback_state.KNOWN, lambda: _Known([]))
        if restored is not None:
            self._put_back(model, restored)
        states, shared = self._states(), callback_state.shared_in(self._others)
        for known, facts in zip(self._known, callback_state.facts_of(self._others, states, shared), strict=True):
            known.first = facts
        self._known_model.first = plain_attributes.values_of(model)

    def _put_back(self, model: keras.Model, restored: Mapping[str, Any]) -> None:
        """What the backup holds is state from now on. Other state had not changed when the backup was written: gives it
        the value that it had when the interrupted fit began."""
        held, without = self._by_name(restored)
        states, later, shared = {}, {}, []
        for known, name in zip(self._known, callback_state.names_of(self._others), strict=True):
            in_backup = {*held.get(name, ()), *without.get(name, ())}
            missing, known.state = known.state - in_backup, known.state | in_backup
            states[name], places = callback_state.values_in(known.first, missing)
            later[name] = list(missing - known.first.keys())
            shared += places
        callback_state.restore(self._others, states, shared, later)
        known, in_backup = self._known_model, plain_attributes.keys(restored["attributes"])
        plain_attributes.restore(model, plain_attributes.those(known.first, known.state - in_backup))
        known.state |= in_backup

    def look(self, model: keras.Model) -> None:
        """Notes which attributes have changed, between two calls of `fields`."""
        self.fields(model)

    def fields(self, model: keras.Model) -> dict[str, Any]:
        """Returns the state: values that backup_file.py can store. Their names are those of BackupContent."""
        states, shared = self._states(), callback_state.shared_in(self._others)
        first, known = [each.first for each in self._known], [each.state for each in self._known]
        now = callback_state.facts_of(self._others, states, shared, first)
        changed = list(map(callback_state.changed, states, now, first, known))
        before = [sorted(facts.keys() | names) for facts, names in zip(first, known, strict=True)]
        deleted = callback_state.deleted(self._others, before)
        for names, there, gone in zip(known, changed, deleted, strict=True):
            names.update(there, gone)
        return {
            "callbacks": changed,
            "deleted": deleted,
            "callback_names": callback_state.names_of(self._others),
            "shared": shared,
            "attributes": self._changed_attributes(model),
        }

    def whole(self) -> dict[str, Any]:
        """Returns the entries of `fields` about callbacks, with all attributes in place of those that have changed."""
        return {
            "callbacks": self._states(),
            "callback_names": callback_state.names_of(self._others),
            "shared": callback_state.shared_in(self._others),
        }

    def restore(self, model: keras.Model, fields: Mapping[str, Any]) -> None:
        """Restores what `fields` returned, perhaps in an earlier version without some of the entries."""
        held, without = self._by_name(fields)
        callback_state.restore(self._others, held, fields["shared"], without)
        plain_attributes.restore(model, fields["attributes"])

    def _by_name(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns (attributes, names of deleted attributes), both by the name of their callback."""
        names = fields["callback_names"] or callback_state.names_of(self._others)
        held = dict(zip(names, fields["callbacks"], strict=False))
        return held, dict(zip(names, fields["deleted"], strict=False))

    def _states(self) -> list[dict[str, Any]]:
        """Returns the state of each other callback; logs once which attributes are not held."""
        states = [callback_state.state_of(callback) for callback in self._others]
        found = [
            f"{type(callback).__name__}.{name}"
            for callback, state in zip(self._others, states, strict=True)
            for name in callback_state.not_held(callback, state)
        ]
        if names := self._unreported(found):
            say(
                f"BackupAndRestore does not save {', '.join(names)}: in a resumed fit they start from their initial"
                " values. Keep numbers, arrays of numbers, strings and containers of them, or variables as attributes."
            )
        return states

    def _changed_attributes(self, model: keras.Model) -> dict[str, dict[str, Any]]:
        """Returns the plain attributes of the model that have changed; logs once that a compiled step does not see
        them."""
        now, before, known = plain_attributes.values_of(model), self._model_before, self._known_model
        changed, self._model_before = plain_attributes.changed(now, known.first, known.state), now
        known.state |= plain_attributes.keys(changed)
        # The first time layers may have set them while they were traced.
        since = plain_attributes.names(model, plain_attributes.changed(now, before)) if before else []
        if not model.run_eagerly and (names := self._unreported(since)):
            say(
                f"BackupAndRestore: {', '.join(names)} changed during the fit. A compiled step uses the value that it"
                " was traced with, and a resumed fit is traced with another one. If the step uses it, keep it in a"
                " variable: keras.Variable(0.0, trainable=False)."
            )
        return changed

    def _unreported(self, found: Sequence[str]) -> list[str]:
        names = [name for name in dict.fromkeys(found) if name not in self._reported]
        self._reported.extend(names)
        return names if self._says else []
