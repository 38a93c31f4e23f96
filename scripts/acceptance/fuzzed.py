"""python scripts/acceptance/fuzzed.py OUT [--rehearse]: compares random combinations on the GPU with plain Keras.

One fuzzer per four cores, in parallel, since XLA compiles most of the time; each draws other cases.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.acceptance.stages import REPOSITORY
from scripts.acceptance.training import fail, gpus, leave_out, write_rows

MINUTES, MOST = 3.0, 4
COUNTS = re.compile(r"^(\d+) cases, of .*: (\d+) with a difference, (\d+) refused .*, (\d+) too rough", re.MULTILINE)


def main(out: Path, rehearse: bool) -> None:
    if not gpus() and not rehearse:
        leave_out("there is no GPU: on the CPU the test suite fuzzes.")
    out.mkdir(parents=True, exist_ok=True)
    minutes = 0.2 if rehearse else MINUTES
    command = [sys.executable, str(REPOSITORY / "scripts" / "fuzz.py"), "--gpu", "--runtimes=one_device,fit:1"]
    command += [f"--minutes={minutes}", "--again=3", "--shrink_seconds=0"]
    logs = [out / f"fuzz-{seed}.log" for seed in range(1, 1 + max(1, min(MOST, (os.cpu_count() or 1) // 4)))]
    under_way = []
    for seed, log in enumerate(logs, 1):
        with log.open("w") as file:
            under_way.append(subprocess.Popen([*command, f"--seed={seed}"], stdout=file, stderr=subprocess.STDOUT))
    for each in under_way:
        each.wait()
    rows, wrong = [], []
    for log in logs:
        counts = COUNTS.search(text := log.read_text())
        if not counts:
            fail(f"The fuzzer ended early: {text.strip()[-300:]}")
        cases, different, refused, rough = map(int, counts.groups())
        rows.append({"log": log.name, "cases": cases, "different": different, "refused": refused, "too rough": rough})
        wrong += [log.name] if different else []
    write_rows(out, rows)
    if wrong:
        fail(f"{sum(row['different'] for row in rows)} graphs differ from plain Keras: see {', '.join(wrong)}")
    print(f"{sum(row['cases'] for row in rows)} cases are what plain Keras makes of them")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rehearse" in sys.argv)
