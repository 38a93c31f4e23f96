"""Works out, without tfdist, where a run with --on_nan=rollback goes: which samples its steps consist of in the end.

case["rolled"] has the periods of the run in steps: "save_every", "log_every", "eval_every" with --keep_best, and
"backup_every" if there are backups; a run does not roll back to a backup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Case = Mapping[str, Any]


class Path(NamedTuple):
    """samples: of the steps that count, one after the other. rollbacks: how often the run went back. is_ended: the run
    has ended, since it needed one rollback more than --max_rollbacks allows."""

    samples: np.ndarray
    rollbacks: int
    is_ended: bool


def saved_every(case: Case) -> list[int]:
    """Returns the periods of the snapshots that every run of the case leaves, wherever it is stopped."""
    rolled = case["rolled"]
    return [rolled["save_every"], *([rolled["eval_every"]] if rolled.get("eval_every") else [])]


def longest(case: Case) -> int:
    """Returns how many samples the run reads at most, including those that it skips."""
    return (case["rolled"]["max_rollbacks"] + 1) * sum(case["calls"]) * case["options"]["global_batch"]


def path(case: Case, samples: np.ndarray) -> Path:
    """Simulates a run. samples: as many as the run may read, in the order of the data. NaN is noticed at the end of a
    call of the training function; the run then skips all samples that were read until that point."""
    rolled, batch, target, data = case["rolled"], case["options"]["global_batch"], sum(case["calls"]), case["data"]
    bad = data["nan"] % data["size"] if "nan" in data else -1
    step = past = rollbacks = 0
    starts: list[int] = []  # position of the first sample of each step that counts
    while step < target:
        backed_up = [rolled["backup_every"]] if "backup_every" in rolled else []
        periods = (rolled["log_every"], *saved_every(case), *backed_up)
        end = min(target, *((step // period + 1) * period for period in periods))
        first = step * batch + past
        if bad in samples[first : first + (end - step) * batch]:
            if rollbacks == rolled["max_rollbacks"]:
                return Path(samples[:0], rollbacks, True)
            rollbacks += 1
            back = max(step // period * period for period in saved_every(case))
            past += (end - back) * batch
            step = back
            del starts[back:]
        else:
            starts += range(first, first + (end - step) * batch, batch)
            step = end
    return Path(np.concatenate([samples[start : start + batch] for start in starts]), rollbacks, False)


def kept_wrongly(case: Case, kept: set[int], evaluated: Mapping[int, Mapping[str, float]]) -> str:
    """Returns what is wrong with the snapshots that a finished run has kept; "" if nothing is. kept: their steps.
    evaluated: step -> values of its evaluation."""
    rolled, target = case["rolled"], sum(case["calls"])
    order, _, metric = rolled.get("keep_best", "").partition(":")
    scores = {step: values[metric] for step, values in evaluated.items() if metric and np.isfinite(values[metric])}
    best = (min if order == "min" else max)(scores.values(), default=None)
    bests = {step for step, score in scores.items() if score == best}
    regular = max(target // period * period for period in saved_every(case))
    if bests and not bests & kept:
        return f"the best snapshot, of step {min(bests)}, is gone: {sorted(kept)} are left of {scores}"
    more = kept - {target, regular} - bests
    if more or target not in kept or len(bests & kept - {target, regular}) > 1:
        return (
            f"the snapshots that are left are of steps {sorted(kept)}; the best of {scores} should be {sorted(bests)}"
        )
    return ""
