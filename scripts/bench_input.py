"""Compares the speed of the input pipeline with that of training, side by side in one process on one core.

    python scripts/bench_input.py [--repeats=5] [--only=cnn,digits]       about 2 minutes on an idle core

For the workloads of bench_peers.py (without transformer50m), and for digits from its source, measures in turns: batches
per second of the pipeline alone, and steps per second of training. The ratio shows how far reading is from being the
bottleneck. The pipeline also takes a share of the core that computes; the last column shows this share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tests.e2e.job import ENVIRONMENT  # noqa: E402

WORKLOADS = {
    "digits, mlp": ["--source=digits", "--model=mlp", "--global_batch=64", "--optimizer=momentum"],
    "digits, cnn": ["--source=digits", "--model=cnn", "--global_batch=64"],
    **{
        name: [
            f"--source_args=workload={name}",
            "--source=tfdist_job:source",
            "--model=tfdist_job:model",
            f"--model_args=workload={name}",
            "--objective=classification",
        ]
        for name in ("cnn", "resnet", "embedding", "transformer10m")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="parts of names of workloads, separated by commas")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.repeats)))
        return
    parts = [part for part in arguments.only.split(",") if part]
    print(
        "| workload | batch | pipeline alone, batches/s | training, steps/s | pipeline / training | reading takes of a"
        " step |\n|---|---|---|---|---|---|"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(HERE / "peers")])}
    core = {min(os.sched_getaffinity(0))}
    for name in WORKLOADS:
        if parts and not any(part in name for part in parts):
            continue
        done = subprocess.run(
            [sys.executable, __file__, f"--child={name}", f"--repeats={arguments.repeats}"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, core),
        )
        found = json.loads(done.stdout.splitlines()[-1])
        alone, training = statistics.median(found["alone"]), statistics.median(found["training"])
        print(
            f"| {name} | {found['batch']} | {alone:.0f} ({min(found['alone']):.0f} to {max(found['alone']):.0f}) |"
            f" {training:.1f} ({min(found['training']):.1f} to {max(found['training']):.1f}) | {alone / training:.0f} |"
            f" {training / alone:.1%} |",
            flush=True,
        )


def measure(name: str, repeats: int) -> dict:
    """Measures batches per second of the pipeline and steps per second of training, in turns."""
    import tensorflow as tf

    from tfdist import build
    from tfdist.control.cluster import Cluster
    from tfdist.flags import parse

    own = WORKLOADS[name]
    if "tfdist_job" in " ".join(own):
        from workloads import WORKLOADS as OF_PEERS

        workload = OF_PEERS[name]
        own = [*own, f"--global_batch={workload.batch}", f"--optimizer={workload.optimizer}"]
    config = parse([*own, "--strategy=one_device", "--accumulation=1", "--steps=1000000", "--run_dir=unused"]).config
    job = build.compose(config, build.start_runtime(config, Cluster()))
    found: dict = {"batch": config.batch.global_batch, "alone": [], "training": []}
    trains, reads = job.iterators(0), job.iterators(0)[0]
    steps = batches = 4

    @tf.function
    def read(n: tf.Tensor) -> None:  # in a graph, as in the step
        for _ in tf.range(n):
            next(reads)

    read(tf.constant(1))
    for repeat in range(repeats + 1):
        begun = time.perf_counter()
        read(tf.constant(batches))
        middle = time.perf_counter()
        job.step(trains, steps)
        ended = time.perf_counter()
        if repeat:
            found["alone"].append(batches / (middle - begun))
            found["training"].append(steps / (ended - middle))
        else:  # the first turn traces; the others take about a second each
            batches = max(4, int(batches / (middle - begun)))
            begun = time.perf_counter()
            job.step(trains, steps)
            steps = max(2, int(steps / (time.perf_counter() - begun)))
    return found


if __name__ == "__main__":
    main()
