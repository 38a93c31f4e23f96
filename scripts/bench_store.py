"""Compares a run in an object store with one in a folder: how long training pauses for a snapshot.

    python scripts/bench_store.py [--turns=3] [--megabytes_per_second=50]

The store is moto's S3 server behind a proxy that accepts bodies no faster than --megabytes_per_second. The model has 11
million weights, so that a snapshot with Adam's slots has about 130 MB. Runs take turns; medians and their ratio are
printed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import ENVIRONMENT, records  # noqa: E402
from tests.stores.faulty_proxy import faulty_proxy  # noqa: E402
from tests.stores.s3_server import BUCKET, s3_server  # noqa: E402
from tfdist.control.run_address import is_url, working_folder  # noqa: E402

SAVES, EVERY = 5, 40
FLAGS = [
    "--source=digits",
    "--model=mlp",
    "--model_args=widths=(3300,3300)",
    "--global_batch=64",
    "--strategy=one_device",
    f"--steps={SAVES * EVERY}",
    f"--save_every={EVERY}",
    f"--log_every={EVERY}",
    "--nosave_final",
    "--save_minutes=0",
    "--export=none",
    "--noplot",
    "--progress=none",
    "--trackers=none",
]


def pauses(run_dir: str, cache: Path, environment: dict[str, str]) -> list[float]:
    """Returns the seconds that training paused for each snapshot but the first, which allocates the copy's arrays."""
    command = [sys.executable, "-m", "tfdist.train", *FLAGS, f"--run_dir={run_dir}", f"--cache_dir={cache}"]
    done = subprocess.run(command, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{run_dir} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    folder = working_folder(run_dir, str(cache)) if is_url(run_dir) else Path(run_dir)
    told = [record["values"].get("pause/saving_s", 0.0) for record in records(folder, kind="train")]
    return told[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--megabytes_per_second", type=float, default=50.0)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"folder": [], "store": []}
    with s3_server() as server, faulty_proxy(server.port) as proxy, tempfile.TemporaryDirectory() as folder:
        proxy.bytes_per_second = arguments.megabytes_per_second * 1e6
        environment = server.environment(proxy.port)
        for turn in range(arguments.turns):
            for name in found:
                place = f"s3://{BUCKET}/runs/{turn}" if name == "store" else f"{folder}/run-{turn}"
                found[name] += pauses(place, Path(folder) / "cache", environment)
                print(f"turn {turn + 1}: {name}: {found[name][-1]:.3f} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    print("| run in | seconds that a snapshot stalls training, median (spread) |\n|---|---|")
    for name, values in found.items():
        print(f"| {name} | {medians[name]:.3f} ({min(values):.3f} to {max(values):.3f}) |")
    print(f"ratio {medians['store'] / medians['folder']:.2f}")


if __name__ == "__main__":
    main()
