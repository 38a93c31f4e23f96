"""A plain `model.fit` with tfdist's BackupAndRestore, killed at any moment and started again, compared with an
uninterrupted one.

"plain_backup": {"save_freq": "epoch" or a number, "double": two backups, "kills": [moment, ...], "kills_first",
"place": "first" or "last"}     a moment is the number of a call of a callback, modulo the number of all of them;
                                kills_first: the process ends before the other callbacks see that moment
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tests.fuzz import fit_case
from tests.fuzz.fit_resumed import Killed, unlike
from tests.fuzz.snapshots import place_of


class Moments(keras.callbacks.Callback):
    """Counts the calls of a fit's callbacks, and ends the program at one of them; -1: at none."""

    def __init__(self, killed: int):
        super().__init__()
        numbers = itertools.count()
        self.seen = 0

        def moment(*_: Any, logs: Any = None) -> None:
            # A backup restores `seen`, but not what a function holds.
            self.seen = next(numbers)
            if self.seen == killed:
                raise Killed

        for name in ("epoch_begin", "epoch_end", "train_batch_begin", "train_batch_end", "test_batch_end", "train_end"):
            setattr(self, f"on_{name}", moment)


class AtTheEnd(keras.callbacks.Callback):
    """Notes the state of the optimizer, which the result of fit_case.run does not have."""

    def __init__(self):
        super().__init__()
        self.arrays = {}

    def on_train_end(self, logs=None):
        optimizer = enumerate(self.model.optimizer.variables)
        self.arrays = {f"optimizer/{index:04d}": np.asarray(variable.value) for index, variable in optimizer}
        self.arrays["stop_training"] = np.array(self.model.stop_training)


def run(case: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    """Returns the arrays of the resumed fit; a problem if they are not bit for bit those of the uninterrupted one."""
    from tfdist.artifacts.backup import BackupAndRestore

    plain, place = case["fit"]["plain_backup"], place_of(case, runtime)

    def program(killed: int, backed_up: bool = True) -> tuple[dict[str, np.ndarray], int]:
        moments, end = Moments(killed), AtTheEnd()
        backup = [BackupAndRestore(place, save_freq=plain["save_freq"], double_checkpoint=plain["double"])]
        backup = backup if backed_up else []
        before, after = (backup, []) if plain["place"] == "first" else ([], backup)
        before, after = ([moments, *before], after) if plain["kills_first"] else (before, [*after, moments])
        [found] = fit_case.run(case, keras.Model, before=before, more=[*after, end])
        return found | end.arrays, moments.seen

    whole, last = program(-1, backed_up=False)
    again = None
    for killed in [*(each % (last + 1) for each in plain["kills"]), -1]:
        with contextlib.suppress(Killed):
            again, _ = program(killed)  # a resumed fit may end before the moment comes
            break
    assert again is not None
    problem = unlike(whole, again)
    kept = {name: value for name, value in again.items() if not name.startswith(("optimizer/", "stop_training"))}
    return {"arrays": kept, "replicas": [], "problems": [problem] if problem else []}
