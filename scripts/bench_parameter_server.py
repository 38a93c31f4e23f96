"""Parameter servers with one worker that is ten times as slow as the others: steps per second in each mode.

    python scripts/bench_parameter_server.py [--workers=3] [--ps=1] [--seconds=30] [--out=DIR]

Worker 0 is really slowed down: it is stopped (SIGSTOP) for nine tenths of every 0.2 s. Each row is a separate job,
measured from the start of the slowdown, after the first steps. The global batch is the same in every row, so that a
step is the same amount of work. Fully synchronous steps divide it into one slice per worker; with one backup worker
there is one slice less.
Prints a table with ratios to the fully synchronous job with the slow worker; writes DIR/bench_parameter_server.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tfdist.telemetry.jsonl import read_jsonl  # noqa: E402

FLAGS = [
    "--strategy=parameter_server",
    "--source=digits",
    "--model=cnn",
    "--model_args=widths=(64,128),norm=none",
    "--global_batch=384",
    "--steps=1000000",
    "--optimizer=sgd",
    "--learning_rate=0.01",
    "--log_every=1",
    "--eval_every=-1",
    "--save_minutes=0",
    "--export=none",
    "--noplot",
    "--trackers=none",
]
ROWS = {  # name -> (slowed, flags)
    "sync, none slow": (False, ["--ps_mode=sync"]),
    "sync, one slow": (True, ["--ps_mode=sync"]),
    "sync, one slow, 1 backup worker": (True, ["--ps_mode=sync", "--backup_workers=1"]),
    "async, one slow": (True, ["--ps_mode=async"]),
}
PERIOD, RUNNING = 0.2, 0.1  # seconds; fraction of them in which the slow worker runs
WARM_UP_STEPS = 5


def slow_down(pid: int, until: threading.Event) -> None:
    """Lets a process run for a tenth of the time, until the event is set."""
    while not until.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PERIOD * (1 - RUNNING))
        os.kill(pid, signal.SIGCONT)
        time.sleep(PERIOD * RUNNING)


def process_of(run_dir: Path, role: str, index: int) -> int:
    """Returns the process id of a task of the job in `run_dir`."""
    for entry in Path("/proc").iterdir():
        try:
            found = re.search(r"TF_CONFIG=([^\0]*)", (entry / "environ").read_text())
            if (
                found
                and f"--run_dir={run_dir}\0" in (entry / "cmdline").read_text()
                and json.loads(found.group(1))["task"] == {"type": role, "index": index}
            ):
                return int(entry.name)
        except (OSError, UnicodeDecodeError):
            continue
    raise SystemExit(f"no {role} {index} found")


def steps(run_dir: Path) -> list[tuple[float, dict]]:
    """Returns (Unix time, values) of every step so far."""
    return [
        (datetime.fromisoformat(record["time"]).timestamp(), record["values"])
        for record in read_jsonl(run_dir / "logs" / "rank-0.jsonl")
        if record["kind"] == "train"
    ]


def measure(run_dir: Path, options: argparse.Namespace, slowed: bool, flags: list[str]) -> dict[str, float]:
    job = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdist.launch",
            f"--workers={options.workers}",
            f"--ps={options.ps}",
            "--",
            *FLAGS,
            *flags,
            f"--run_dir={run_dir}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    over, slowing = threading.Event(), None
    try:
        while len(steps(run_dir)) < WARM_UP_STEPS:
            if job.poll() is not None:
                raise SystemExit(f"the job ended with {job.returncode}: see {run_dir}/logs")
            time.sleep(0.1)
        begun = time.time()
        if slowed:
            slowing = threading.Thread(target=slow_down, args=(process_of(run_dir, "worker", 0), over))
            slowing.start()
        time.sleep(options.seconds)
        seen = [values for at, values in steps(run_dir) if begun < at <= begun + options.seconds]
    finally:
        over.set()
        if slowing:
            slowing.join()
        job.send_signal(signal.SIGTERM)
        job.wait()
    result = {
        "steps_per_s": len(seen) / options.seconds,
        "dropped": sum(values.get("staleness/dropped", 0) for values in seen),
    }
    if any("staleness/mean" in values for values in seen):
        stale = [values for values in seen if "staleness/mean" in values]
        result |= {
            "staleness_mean": sum(values["staleness/mean"] for values in stale) / len(stale),
            "staleness_max": max(values["staleness/max"] for values in stale),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="measured per row")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the runs and the result (default: a temporary one)"
    )
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="tfdist-ps-"))
    out.mkdir(parents=True, exist_ok=True)
    table: dict[str, dict[str, float]] = {}
    print(
        f"| {options.workers} workers, {options.ps} ps | steps/s | against sync, one slow | dropped | staleness mean,"
        " max |\n|---|---|---|---|---|"
    )
    for number, (name, (slowed, flags)) in enumerate(ROWS.items()):
        table[name] = measure(out / f"run-{number}-{int(time.time())}", options, slowed, flags)
    base = table["sync, one slow"]["steps_per_s"]
    for name, row in table.items():
        stale = f"{row['staleness_mean']:.2f}, {row['staleness_max']:.0f}" if "staleness_mean" in row else ""
        print(
            f"| {name} | {row['steps_per_s']:.2f} | {row['steps_per_s'] / base if base else float('inf'):.1f} |"
            f" {row['dropped']:.0f} | {stale} |"
        )
    (out / "bench_parameter_server.json").write_text(
        json.dumps({"workers": options.workers, "ps": options.ps, "seconds": options.seconds, "rows": table}, indent=1)
    )
    print(f"written to {out}/bench_parameter_server.json")


if __name__ == "__main__":
    main()
