"""A fit with BackupAndRestore that is killed between epochs and restarted, compared with an uninterrupted one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tests.fuzz import fit_case
from tests.fuzz.snapshots import place_of


class Killed(Exception):
    """Raised in place of killing the process."""


class KilledBefore(keras.callbacks.Callback):
    """Ends the program when this epoch begins; -1: never."""

    def __init__(self, epoch: int):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise Killed


def run(case: Mapping[str, Any], functions: Any, runtime: Any) -> dict[str, Any]:
    """Returns the arrays of the resumed run; a problem if they are not bit for bit those of the uninterrupted one."""
    place = place_of(case, runtime)
    [whole] = fit_case.run(case, functions)

    def program(killed: int) -> dict[str, np.ndarray]:
        callbacks = [KilledBefore(killed), keras.callbacks.BackupAndRestore(place)]
        [found] = fit_case.run(case, functions, more=callbacks)
        return found

    with contextlib.suppress(Killed):
        program(case["fit"]["backup"])
    again = program(-1)
    problem = unlike(whole, again)
    return {"arrays": again, "replicas": [], "problems": [problem] if problem else []}


def unlike(whole: Mapping[str, np.ndarray], again: Mapping[str, np.ndarray]) -> str:
    """Returns which arrays of a resumed run are not those of the uninterrupted one; "" if all are."""
    found = [
        name for name, value in whole.items() if not np.array_equal(value, again.get(name, np.nan), equal_nan=True)
    ]
    sentence = f"killed and started again, not bit for bit those of an uninterrupted run: {', '.join(found[:4])}"
    return sentence if found else ""
