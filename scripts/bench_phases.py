"""What does it cost to measure the phases of a step? Runs the same job with and without it, side by side.

    python scripts/bench_phases.py [--workload=transformer|cnn|mlp] [--workers=1] [--steps=5] [--rounds=12]

In each worker process (one core each), three copies of a job take turns, in blocks of ten calls: without marks, with
--phase_every=10 (the default) as the loop uses it, accounting included, and with --phase_every=1. In each round, the
seconds of a block are divided by those of the block without marks. Prints the median of this ratio over the rounds, and
its spread: by the clock, and by the processor time of the process, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

CALLS = 10  # calls in a block
EVERY = (0, 10, 1)
WORKLOADS = {
    "transformer": {
        "source": "text",
        "source_args": "max_bytes=500000",
        "sequence_length": 64,
        "model": "transformer",
        "model_args": "size=tiny,layers=4,width=128",
        "objective": "next_token",
        "micro_batch": 8,
    },
    "cnn": {"source": "digits", "model": "cnn", "micro_batch": 32},
    "mlp": {"source": "digits", "model": "mlp", "micro_batch": 32},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="transformer")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="of a call")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    root = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, root)
    if arguments.child:
        measure(arguments)
        return
    from tests.e2e.job import ENVIRONMENT
    from tfdist.launcher.local_job import LocalJob

    output = io.StringIO()
    with TemporaryDirectory() as folder:
        job = LocalJob(
            [sys.executable, __file__, *sys.argv[1:], "--child"],
            arguments.workers,
            Path(folder),
            output=output,
            environment=ENVIRONMENT,
        )
        job.start()
        result = job.wait()
    if result.code:
        raise SystemExit(f"{result.cause}\n{output.getvalue()}")
    seconds = next(
        json.loads(line.partition("measured ")[2]) for line in output.getvalue().splitlines() if "measured " in line
    )
    print(
        f"{arguments.workload}, {arguments.workers} worker(s), calls of {arguments.steps} steps,"
        f" {1000 * statistics.median(wall for wall, _ in seconds['0']) / CALLS / arguments.steps:.2f} ms a step without"
        " marks"
    )
    for every in EVERY[1:]:
        for kind, name in enumerate(("time", "processor time")):
            ratios = sorted(
                mine[kind] / none[kind] for mine, none in zip(seconds[str(every)], seconds["0"], strict=True)
            )
            print(
                f"  --phase_every={every:<3d} {statistics.median(ratios):.4f} of the {name} without, median of"
                f" {len(ratios)} rounds ({ratios[len(ratios) // 4]:.4f} to {ratios[-1 - len(ratios) // 4]:.4f} for the"
                " middle half)"
            )
        more = [
            (mine[1] - none[1]) / CALLS / arguments.steps
            for mine, none in zip(seconds[str(every)], seconds["0"], strict=True)
        ]
        print(
            f"  --phase_every={every:<3d} {1e6 * statistics.median(more):.0f} microseconds of processor time more a"
            " step, median"
        )


def measure(arguments: argparse.Namespace) -> None:
    import keras

    from tfdist import build
    from tfdist.config import Config
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.telemetry.timer import Clock
    from tfdist.training.log_interval import Interval, Watch

    base = Config().replace(**WORKLOADS[arguments.workload], steps=100_000)
    runtime = build.start_runtime(base, resolve_cluster(os.environ))
    blocks = {}
    for every in EVERY:
        keras.backend.clear_session()
        job = build.compose(base.replace(phase_every=every), runtime)
        iterators, clock = job.iterators(0), Clock()
        clock.start()
        interval = Interval(
            clock,
            job.plan.global_batch,
            lambda step: step,
            watch=Watch(clock, runtime.rank, runtime.all_gather),
            rates=None,
        )

        def block(job=job, iterators=iterators, interval=interval) -> tuple[float, float]:
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(CALLS):
                out = job.step(iterators, arguments.steps)
                interval.add(out, arguments.steps)
            interval.events(out.step, {})
            return time.perf_counter() - begin, time.process_time() - used

        blocks[every] = block
    seconds: dict[int, list[tuple[float, float]]] = {every: [] for every in EVERY}
    for turn in range(arguments.rounds + 1):
        for every in EVERY[turn % 3 :] + EVERY[: turn % 3]:
            seconds[every].append(blocks[every]())
    if runtime.rank == 0:
        print("measured " + json.dumps({every: found[1:] for every, found in seconds.items()}), flush=True)
    runtime.barrier()


if __name__ == "__main__":
    main()
