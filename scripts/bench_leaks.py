"""Does a long run leak? Shows threads, file descriptors and resident memory of the chief, on each runtime.

    python scripts/bench_leaks.py --steps=500,5000 [--runtimes="mesh;sockets"]

The model is tiny, so that there are many steps and a leak per step becomes visible. Every step is a separate call. A
line is logged every 50 steps; a snapshot is written and the model is evaluated every 500 steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import CLUSTERS, ENVIRONMENT  # noqa: E402
from tests.e2e.usage import measured  # noqa: E402

FIT_SCRIPT = str(Path(__file__).resolve().parent.parent / "tests" / "e2e" / "fit_scripts" / "long.py")
FITS = {"tfdist.fit": "socket", "tfdist.fit, TensorFlow's ring": "ring"}  # their communication
RUNTIMES = {
    "one_device": (["--workers=1"], ["--strategy=one_device"]),
    "mirrored, 2 replicas": (["--workers=1"], ["--strategy=mirrored", "--virtual_devices=2"]),
    "multi_worker, our ring": (["--workers=2"], ["--strategy=multi_worker"]),
    "multi_worker, TensorFlow's ring": (["--workers=2"], ["--strategy=multi_worker", "--communication=ring"]),
    "sockets": (["--workers=2"], ["--strategy=sockets"]),
    "mesh": (["--workers=2"], ["--strategy=mesh"]),
    "mesh, ZeRO-3": (["--workers=2"], ["--strategy=mesh", "--zero=3"]),
    "horovod": (["--workers=2"], ["--strategy=horovod"]),
    "parameter_server, async": (["--workers=2", "--ps=1"], ["--strategy=parameter_server"]),
    "parameter_server, sync": (["--workers=2", "--ps=1"], ["--strategy=parameter_server", "--ps_mode=sync"]),
    **{name: (["--workers=2"], []) for name in FITS},
}


def run(name: str, steps: int, run_dir: Path, timeout: float = 900.0) -> dict[int, dict[str, float]]:
    """Returns step -> resource usage of the chief. Raises RuntimeError if the run fails."""
    launch, flags = RUNTIMES[name]
    command = [sys.executable, "-m", "tfdist.launch", *launch, "--"]
    command += [FIT_SCRIPT, str(run_dir), str(steps), FITS[name]] if name in FITS else _training(flags, steps, run_dir)
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)
    if result.returncode:
        raise RuntimeError(f"{name} ended with {result.returncode}:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return measured(run_dir)


def _training(flags: list[str], steps: int, run_dir: Path) -> list[str]:
    """Returns the arguments of tfdist.train."""
    return [
        *CLUSTERS,
        *flags,
        f"--steps={steps}",
        "--steps_per_loop=1",
        "--log_every=50",
        "--save_every=500",
        "--eval_every=500",
        "--progress=none",
        "--trackers=tests.e2e.usage:track",
        f"--run_dir={run_dir}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", default="500,5000", help="steps at which to measure; the last is the length of the run"
    )
    parser.add_argument("--runtimes", default="", help="those whose names contain one of these words (default: all)")
    arguments = parser.parse_args()
    looks = sorted(map(int, arguments.steps.split(",")))
    words = [word for word in arguments.runtimes.split(";") if word]
    columns = [f"{what} at {step:,}" for what in ("threads", "descriptors", "resident MiB") for step in looks]
    print(f"| runtime | {' | '.join(columns)} |")
    print("|" + "---|" * (1 + 3 * len(looks)), flush=True)
    for name in RUNTIMES:
        if not words or any(word in name for word in words):
            with tempfile.TemporaryDirectory(prefix="tfdist-leaks-") as folder:
                found = run(name, looks[-1], Path(folder) / "run")
            cells = [
                f"{found[step][what]:.0f}" for what in ("threads", "descriptors", "resident_mib") for step in looks
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
