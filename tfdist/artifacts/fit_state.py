"""The state of a running fit beside its variables: the other callbacks, and plain attributes of the model.

Both backups hold it: BackupAndRestore of a plain fit (backup.py), and that of tfdist.fit (keras_fit/epoch_backup.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.artifacts import backup_file, callback_state, plain_attributes
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


class FitState:
    """Collects and restores the state.

    others: the callbacks whose state is held. says: whether this process logs what is not held.
    """

    def __init__(self, others: Sequence[keras.callbacks.Callback], *, says: bool = True):
        self._others, self._says = others, says
        self._reported: list[str] = []  # attributes
        self._at_first: list[callback_state.Facts] = []  # of each other callback
        self._model_at_first: plain_attributes.Values = []
        self._model_before: plain_attributes.Values = []  # at the last call of `fields`

    def begin(self, model: keras.Model) -> None:
        """Notes what everything is like at first: `fields` has the attributes that change. Call before `restore`, when
        all callbacks have begun."""
        states, shared = self._states(), callback_state.shared_in(self._others)
        self._at_first = callback_state.facts_of(self._others, states, shared)
        self._model_at_first = plain_attributes.values_of(model)

    def fields(self, model: keras.Model) -> dict[str, Any]:
        """Returns the state: values that backup_file.py can store. Their names are those of BackupContent."""
        states, shared = self._states(), callback_state.shared_in(self._others)
        now = callback_state.facts_of(self._others, states, shared, self._at_first)
        return {
            "callbacks": list(map(callback_state.changed, states, now, self._at_first)),
            "deleted": callback_state.deleted(self._others, self._at_first),
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
        names = fields["callback_names"] or callback_state.names_of(self._others)
        held = dict(zip(names, fields["callbacks"], strict=False))
        without = dict(zip(names, fields["deleted"], strict=False))
        callback_state.restore(self._others, held, fields["shared"], without)
        plain_attributes.restore(model, fields["attributes"])

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
        now, before = plain_attributes.values_of(model), self._model_before
        changed, self._model_before = plain_attributes.changed(now, self._model_at_first), now
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
