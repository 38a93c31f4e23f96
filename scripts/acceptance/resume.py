"""python scripts/acceptance/resume.py OUT [--rehearse]: compares a run that is killed between two snapshots and
restarted with the same run undisturbed: all arrays of the last snapshot, bit for bit.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from scripts.acceptance.training import IMAGES, TEXT, TRANSFORMER, fail, train, train_well, write_rows
from tests.e2e.job import snapshot

STEPS = 30
RUNS = {
    "cnn, float16": (*IMAGES, "--model=cnn", "--precision=float16", "--global_batch=32"),
    "transformer, bfloat16": (*TEXT, *TRANSFORMER, "--precision=bfloat16", "--global_batch=16"),
}


def main(out: Path) -> None:
    rows = []
    for name, flags in RUNS.items():
        # Faults strike between two calls of the step: each is a call of its own, so that step 16 is one.
        flags = (*flags, f"--steps={STEPS}", "--save_every=10", "--steps_per_loop=1", "--deterministic")
        flags = (*flags, "--strategy=one_device")
        undisturbed, disturbed = out / "undisturbed", out / "disturbed"
        train_well(flags, undisturbed)
        shutil.rmtree(disturbed, ignore_errors=True)
        if (code := train(flags, disturbed, TFDIST_FAULTS="0:16:kill")) != -signal.SIGKILL:
            fail(f"{name}: the run that should have been killed ended with {code}")
        if code := train(flags, disturbed):
            fail(f"{name}: the restarted run ended with {code}")
        one, other = (snapshot(folder, STEPS) for folder in (undisturbed, disturbed))
        differ = [key for key in one if not np.array_equal(one[key], other.get(key), equal_nan=True)]
        rows.append({"run": name, "arrays": len(one), "that differ": len(differ)})
        write_rows(out, rows)
        if differ or set(one) != set(other):
            fail(f"{name}: {len(differ)} of {len(one)} arrays differ, for example {differ[:3]}")
    print(f"{sum(row['arrays'] for row in rows)} arrays of {len(rows)} runs are bitwise those of undisturbed ones")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
