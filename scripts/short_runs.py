"""Many short runs of several workers: checks how they end, and what they print meanwhile.

    python scripts/short_runs.py --runs=300 [--workers=3] [--train="--strategy=mesh --zero=3"]

The end of a run is a race among processes: a worker that exits too early takes something away from those still
running. So every worker of every run must exit with 0 and print nothing but the expected lines. Workers are forked from
a process that has done its imports; otherwise they are those of `tfdist.train`. Exit code 0 if all runs ended well;
keeps the output of those that did not.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tfdist.control import exit_codes, versions  # noqa: E402
from tfdist.control.preflight import PortReservation  # noqa: E402
from tfdist.control.tf_config import worker_environment  # noqa: E402

FLAGS = [
    "--source=digits",
    "--model=mlp",
    "--model_args=widths=(16,),dropout=0.1",
    "--global_batch=48",
    "--steps=5",
    "--eval_samples=48",
    "--noplot",
    "--export=none",
    "--progress=none",
    "--trackers=none",
]
RUN_SECONDS = 120.0
# What TensorFlow prints at every start (launcher/job.py keeps it off the terminal), and our own summary.
EXPECTED = re.compile(
    r"All log messages before absl|cudart_stub|cuda_platform|cpu_feature_guard|rebuild TensorFlow|oneDNN|^  \w|^\s*$"
)


def start_worker(rank: int, addresses: list[str], flags: list[str], output: Path) -> int:
    """Forks one worker. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(worker_environment(addresses, rank, 1, os.environ))
    from tfdist import train

    exit_codes.run_command(train.main, flags)
    raise AssertionError("run_command does not return")


def run_once(workers: int, flags: list[str], folder: Path) -> list[str]:
    """Makes one run. Returns what was wrong; [] is expected."""
    folder.mkdir()
    ports = PortReservation(workers)
    outputs = [folder / f"worker-{rank}.log" for rank in range(workers)]
    left = {
        start_worker(rank, ports.addresses, [*flags, f"--run_dir={folder / 'run'}"], outputs[rank]): rank
        for rank in range(workers)
    }
    deadline, wrong = time.monotonic() + RUN_SECONDS, []
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = left.pop(pid), os.waitstatus_to_exitcode(status)
            if code:
                wrong.append(f"worker {rank} ended with {code}")
        elif time.monotonic() > deadline:
            wrong.append(f"worker {', '.join(map(str, left.values()))} did not end in {RUN_SECONDS:g} s")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    ports.close()
    for rank, output in enumerate(outputs):
        wrong += [
            f"worker {rank} logged: {line}"
            for line in output.read_text(errors="replace").splitlines()
            if not EXPECTED.search(line)
        ]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--train", default="", help="more flags of the runs")
    arguments = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    versions.quiet()
    versions.import_keras()
    from tfdist.run import session  # noqa: F401 - so that no worker has to import it

    folder, found = Path(tempfile.mkdtemp(prefix="tfdist-short-runs-")), collections.Counter()
    for number in range(1, arguments.runs + 1):
        run_folder = folder / f"{number:04d}"
        wrong = run_once(arguments.workers, [*FLAGS, *arguments.train.split()], run_folder)
        if wrong:
            found[re.sub(r"\d[\d:. ]*\d", "N", wrong[0])] += 1
            print(f"run {number}: {'; '.join(wrong[:3])[:600]}; see {run_folder}", flush=True)
        else:
            shutil.rmtree(run_folder)
    print(
        f"{arguments.runs} runs of {arguments.workers} workers: {sum(found.values())} not in order"
        + "".join(f"\n  {count:4d} times: {text[:300]}" for text, count in found.most_common())
    )
    if not found:
        folder.rmdir()
    raise SystemExit(bool(found))


if __name__ == "__main__":
    try:
        main()
    except Exception:  # a forked worker must never continue in this program
        traceback.print_exc()
        os._exit(1)
