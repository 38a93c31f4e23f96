"""Predicted against measured step time: calibrates with runs of one and two workers, predicts other worker counts.

    python scripts/bench_planner.py [FOLDER]        about 3 minutes on two idle cores; prints one line a run

Runs with 1 and 2 workers (two batch sizes each) calibrate the planner. Then it predicts other batch sizes, and 3 and 4
workers, which share the processors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import ENVIRONMENT  # noqa: E402
from tfdist.planner.calibrate import read_run  # noqa: E402

# A job that does nothing but training steps.
BARE = [
    "--source=synthetic",
    "--source_args=task=text,vocab=256,samples=4096,eval_samples=32,fixed=True",
    "--model=transformer",
    "--eval_every=-1",
    "--export=none",
    "--noplot",
    "--save_minutes=0",
    "--nosave_final",
    "--trackers=none",
    "--progress=none",
    "--resume=never",
]
TRAIN = [*BARE, "--sequence_length=64", "--model_args=layers=4,width=192,heads=6", "--steps=60", "--log_every=10"]
CALIBRATE = ((1, 8), (1, 24), (2, 16), (2, 48))
PREDICT = ((2, 32), (3, 24), (4, 24))  # workers, global batch


def train(folder: str | Path, workers: int, batch: int, flags: list[str]) -> tuple[str, float]:
    """Runs a training. Returns (run folder, seconds per step)."""
    run_dir = f"{folder}/{workers}-{batch}"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tfdist.launch",
            f"--workers={workers}",
            "--",
            *flags,
            f"--global_batch={batch}",
            f"--run_dir={run_dir}",
        ],
        env=ENVIRONMENT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return run_dir, read_run(run_dir).step_s


def main(folder: str) -> None:
    calibration = [train(folder, *run, TRAIN) for run in CALIBRATE]
    for (workers, batch), (_, seconds) in zip(CALIBRATE, calibration, strict=True):
        print(f"calibrates: {workers} workers, global batch {batch}: {seconds * 1e3:.1f} ms", flush=True)
    for workers, batch in PREDICT:
        _, measured = train(folder, workers, batch, TRAIN)
        command = [
            sys.executable,
            "-m",
            "tfdist.plan",
            f"--devices={workers}",
            f"--mesh=data={workers}",
            "--zero=0",
            "--recompute=none",
            "--algorithm=ring",
            f"--hardware=cpu,memory_gb=64,shared={len(os.sched_getaffinity(0))}",
            *(f"--calibrate={run_dir}" for run_dir, _ in calibration),
            "--json=-",
            "--",
            *TRAIN,
            f"--global_batch={batch}",
            "--micro_batch=0",
            "--accumulation=1",
        ]
        predicted = json.loads(
            subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
        )["plans"][0]["step_s"]["total"]
        print(
            f"predicts:   {workers} workers, global batch {batch}: measured {measured * 1e3:.1f} ms, predicted"
            f" {predicted * 1e3:.1f} ms, {predicted / measured - 1:+.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
