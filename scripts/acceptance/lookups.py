"""python scripts/acceptance/lookups.py OUT [--rehearse]: looking up rows that do not exist gives NaN or an error.

Checked with XLA and without. Also shows what plain TensorFlow gives: zeros on a GPU, another row with XLA.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from scripts.acceptance.training import fail, gpus, write_rows


def main(out: Path, rehearse: bool) -> None:
    if not gpus() and not rehearse:
        fail("TensorFlow sees no GPU here: without one it finds such rows by itself.")
    from tests.unit.models.test_missing_rows import INSIDE, LOOKUPS, NOT_TOLD_IN, NOT_TOLD_THERE, computing

    there, missing = (np.array([[0, 9, 3], [5, number, 2]], np.int32) for number in (2, 12))
    rows: list[dict[str, Any]] = []
    for lookup in LOOKUPS:
        for xla in (False, True):
            row = {"looked up by": lookup, "XLA": "yes" if xla else "no"}
            for inside in INSIDE:
                plain, ours = (computing(lookup, inside, wanted, xla) for wanted in (False, True))
                if inside == "the model":
                    row["TensorFlow"] = _named(plain, missing)
                if inside not in NOT_TOLD_IN or lookup not in NOT_TOLD_THERE:
                    row[f"in {inside}"] = _named(ours, missing)
                if not np.array_equal(plain(there), ours(there)):
                    row[f"in {inside}"] = "other bits of rows that are there"
            rows.append(row)
            write_rows(out, rows)
    wrong = {
        row["looked up by"]
        for row in rows
        for name, found in row.items()
        if name.startswith("in ") and found not in ("NaN", "an error")
    }
    silent = sum(row["TensorFlow"] == "a number" for row in rows)
    if wrong:
        fail(f"{len(wrong)} of {len(LOOKUPS)} kinds of lookup are silent: {', '.join(sorted(wrong))}")
    print(f"{len(rows)} lookups of a row that does not exist are NaN or an error; {silent} are silent in TensorFlow")


def _named(compute: Any, numbers: np.ndarray) -> str:
    import tensorflow as tf

    try:
        return "NaN" if np.isnan(compute(numbers)).any() else "a number"
    except (tf.errors.InvalidArgumentError, ValueError):
        return "an error"


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rehearse" in sys.argv)
