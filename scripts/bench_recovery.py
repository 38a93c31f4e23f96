"""Measures what saving costs, and how long it takes to resume after a kill.

    python scripts/bench_recovery.py saves [--repeats=3] [--width=5000] [--steps=80]
    python scripts/bench_recovery.py restarts [--repeats=5] [--workers=2]

saves: one worker trains an MLP with 100 MB of weights (about 305 MB with Adam's slots; the moving average is off) with
no saves, with asynchronous and with synchronous saves every 20 steps, in turn. Prints training time lost per save, and
throughput.

restarts: sends SIGKILL to a worker of a small job, and prints the seconds until the first new step: detect (until the
launcher restarts the job, backoff included), import, build (cluster, data, model), restore, trace (first step); with
and without --standby.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import CLUSTERS, ENVIRONMENT, records, start  # noqa: E402

SAVE_EVERY = 20


def saves(arguments: argparse.Namespace) -> None:
    kinds = {
        "no saves": ["--save_every=0"],
        "asynchronous": [f"--save_every={SAVE_EVERY}"],
        "synchronous": [f"--save_every={SAVE_EVERY}", "--noasync_save"],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    size = wait_s = 0.0
    for repeat in range(arguments.repeats):
        print(f"repeat {repeat + 1} of {arguments.repeats} ...", file=sys.stderr, flush=True)
        for kind, flags in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(
                    [
                        sys.executable,
                        "-m",
                        "tfdist.train",
                        "--source=digits",
                        "--model=mlp",
                        f"--model_args=widths=({arguments.width},{arguments.width})",
                        "--global_batch=16",
                        f"--steps={arguments.steps}",
                        "--log_every=20",
                        "--export=none",
                        "--noplot",
                        "--save_minutes=0",
                        "--nosave_final",
                        "--eval_every=-1",
                        "--keep=1",
                        "--progress=none",
                        "--trackers=none",
                        f"--run_dir={folder}",
                        *flags,
                    ],
                    env=ENVIRONMENT,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                times = [
                    datetime.fromisoformat(record["time"]).timestamp() for record in records(Path(folder), kind="train")
                ]
                summary = json.loads((Path(folder) / "summary.json").read_text())
                seconds[kind].append(times[-1] - times[0])  # from step 20 on: the first steps trace
                if kind == "asynchronous":
                    size, wait_s = (
                        summary["snapshots"]["bytes"] / summary["snapshots"]["saves"],
                        wait_s + summary["snapshots"]["wait_s"],
                    )
    count = (arguments.steps - 20) // SAVE_EVERY  # at 20, 40, ...; the one at the last step ends after the last record
    lost = {
        kind: [
            (with_saves - without) / count
            for with_saves, without in zip(seconds[kind], seconds["no saves"], strict=True)
        ]
        for kind in kinds
    }
    print(
        f"\nsnapshot {size / 1e6:.0f} MB, {count} saves in {arguments.steps - 20} steps; medians (smallest to largest)"
        f" of {arguments.repeats}\n"
    )
    for kind in kinds:
        ratio = [without / own for without, own in zip(seconds["no saves"], seconds[kind], strict=True)]
        print(
            f"  {kind:13s} {spread(seconds[kind])} s   lost per save {spread(lost[kind])} s   throughput"
            f" {spread(ratio)}"
        )
    print(
        "  asynchronous / synchronous time lost:"
        f" {statistics.median(lost['asynchronous']) / statistics.median(lost['synchronous']):.2f}"
    )


def restarts(arguments: argparse.Namespace) -> None:
    for standby in (False, True):
        found: dict[str, list[float]] = {}
        for _ in range(arguments.repeats):
            for name, value in one_restart(arguments.workers, standby).items():
                found.setdefault(name, []).append(value)
        print(
            f"\n{arguments.workers} workers, {'with' if standby else 'without'} --standby: seconds, median (smallest to"
            f" largest) of {arguments.repeats}"
        )
        for name, values in found.items():
            print(f"  {name:8s} {spread(values)}")


def one_restart(workers: int, standby: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(
            workers,
            [
                *CLUSTERS,
                "--steps=1000000",
                "--save_every=20",
                "--log_every=1",
                "--steps_per_loop=1",
                "--progress=none",
                "--trackers=none",
                f"--run_dir={folder}",
            ],
            ("--max_restarts=3", *(["--standby"] if standby else [])),
            {"TFDIST_FAULTS": "armed"},
        )
        (folder / "faults").mkdir(parents=True)
        (folder / "faults" / "pace").write_text("0.05")
        try:
            wait(lambda: sum(record["kind"] == "train" for record in attempt(folder, 0)) > 30)
            if standby:
                time.sleep(30)  # until the spares have done their imports
            victim = [pid for pid in children(process.pid) if "TFDIST_STANDBY" not in environment_of(pid)][-1]
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            wait(lambda: any(record["kind"] == "train" for record in attempt(folder, 1)))
        finally:
            process.terminate()
            process.communicate(timeout=60)
        started = next(record for record in attempt(folder, 1) if record["kind"] == "start")
        first = next(record for record in attempt(folder, 1) if record["kind"] == "train")
        at = {record["kind"]: datetime.fromisoformat(record["time"]).timestamp() for record in (started, first)}
        values = started["values"]
        import_s = 0.0 if standby else values["import_s"]
        detect = at["start"] - killed - import_s - values["build_s"] - values["restore_s"]
        return {
            "detect": detect,
            "import": import_s,
            "build": values["build_s"],
            "restore": values["restore_s"],
            "trace": at["train"] - at["start"],
            "total": at["train"] - killed,
        }


def attempt(folder: Path, number: int) -> list[dict]:
    return [record for record in records(folder) if record["attempt"] == number]


def children(pid: int) -> list[int]:
    return [
        int(text)
        for text in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout.split()
    ]


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


def wait(condition, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("timed out")
        time.sleep(0.05)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("saves", "restarts"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    {"saves": saves, "restarts": restarts}[arguments.part](arguments)


if __name__ == "__main__":
    main()
