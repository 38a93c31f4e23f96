"""Measures the overhead of tfdist's loop, and how it scales to two workers.

    python scripts/bench_loop.py [--repeats=5] [--steps=8] [--workload=transformer|cnn] [--jit] [--out=FILE.json]

1. Loop overhead: tfdist against a minimal hand-written TensorFlow loop with the same model, data and optimizer. Blocks
   of both alternate in one process pinned to one core. A ratio of 1 means that tfdist costs nothing.
2. Weak scaling: steps per second of one worker against two (each with its own core and the same micro-batch), for
   every kind of communication: auto (memory read in place, as both are on one host), socket (our TCP ring), ring
   (TensorFlow's, over gRPC). 1 is perfect. The speed of two workers that do not communicate at all is what this
   machine's shared caches and memory allow. The repeats take turns, so that slow drifts of the machine affect all.

Prints medians with their spread over the repeats. Needs two cores that are otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import ENVIRONMENT  # noqa: E402

WORKLOADS = {
    "transformer": {
        "source": "text",
        "source_args": "max_bytes=2000000",
        "sequence_length": 128,
        "model": "transformer",
        "model_args": "size=small",
        "objective": "next_token",
        "micro_batch": 8,
        "optimizer": "adamw",
        "learning_rate": 1e-4,
        "clip_norm": 0.0,
    },
    "cnn": {"source": "digits", "model": "cnn", "micro_batch": 64, "optimizer": "adamw", "learning_rate": 1e-3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps in a timed block")
    parser.add_argument("--workload", choices=WORKLOADS, default="transformer")
    parser.add_argument("--jit", action="store_true", help="compile forward and backward pass with XLA")
    parser.add_argument("--out", default="")
    parser.add_argument("--child", choices=["overhead", "scaling"])
    parser.add_argument("--communication", default="auto")
    arguments = parser.parse_args()
    if arguments.child:
        {"overhead": child_overhead, "scaling": child_scaling}[arguments.child](arguments)
        return

    results: dict[str, list[float]] = {}
    for repeat in range(arguments.repeats):
        print(f"repeat {repeat + 1} of {arguments.repeats} ...", file=sys.stderr, flush=True)
        measured = start(arguments, "overhead", 1)[0]
        measured["one worker"] = start(arguments, "scaling", 1)[0]["steps_per_s"]
        measured["two that do not talk"] = min(
            worker["steps_per_s"] for worker in start(arguments, "scaling", 2, together=False)
        )
        measured["efficiency, no talk"] = measured["two that do not talk"] / measured["one worker"]
        for communication in ("auto", "socket", "ring"):
            measured[f"two workers, {communication}"] = min(
                worker["steps_per_s"] for worker in start(arguments, "scaling", 2, communication)
            )
            measured[f"efficiency, {communication}"] = (
                measured[f"two workers, {communication}"] / measured["one worker"]
            )
        measured["tfdist / hand-written"] = measured["tfdist"] / measured["hand-written"]
        for name, value in measured.items():
            results.setdefault(name, []).append(value)
    print(
        f"\n{arguments.workload}{', XLA' if arguments.jit else ''}: median (smallest to largest) of"
        f" {arguments.repeats}\n"
    )
    for name, values in results.items():
        unit = "" if "/" in name or "efficiency" in name else " steps/s"
        print(f"  {name:28s} {statistics.median(values):8.3f}{unit}  ({min(values):.3f} to {max(values):.3f})")
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump({"workload": arguments.workload, "jit": arguments.jit, "results": results}, file, indent=1)


def start(
    arguments: argparse.Namespace, child: str, workers: int, communication: str = "auto", together: bool = True
) -> list[dict]:
    """Runs `workers` children side by side, one core each; returns the JSON that each prints in its last line.

    together: whether they form one cluster; otherwise each is a cluster of its own.
    """
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    processes = []
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(workers):
        environment = dict(ENVIRONMENT)
        if workers > 1 and together:
            environment["TF_CONFIG"] = json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            )
        command = [
            sys.executable,
            os.path.abspath(__file__),
            f"--child={child}",
            f"--steps={arguments.steps}",
            f"--workload={arguments.workload}",
            f"--communication={communication}",
            *(["--jit"] if arguments.jit else []),
        ]
        core = {cores[rank % len(cores)]}
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda core=core: os.sched_setaffinity(0, core),
            )
        )
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a child failed; its error is above")
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def compose(arguments: argparse.Namespace):
    """Composes a job of the workload on the cluster of TF_CONFIG."""
    from tfdist import build
    from tfdist.config import Config
    from tfdist.control.resolvers import resolve_cluster

    config = Config().replace(
        **WORKLOADS[arguments.workload],
        steps=100_000,
        jit_compile=arguments.jit,
        communication=arguments.communication,
        sync_batchnorm=not arguments.jit,
    )
    return build.compose(config, build.start_runtime(config, resolve_cluster(os.environ)))


def blocks_per_second(block, steps: int, warm: int = 2, blocks: int = 3) -> float:
    """Returns the median rate of `block(steps)` calls, in steps per second."""
    for _ in range(warm):
        block(max(steps // 4, 1))
    rates = []
    for _ in range(blocks):
        begin = time.perf_counter()
        block(steps)
        rates.append(steps / (time.perf_counter() - begin))
    return statistics.median(rates)


def child_scaling(arguments: argparse.Namespace) -> None:
    job = compose(arguments)
    iterators = job.iterators(0)
    rate = blocks_per_second(lambda n: job.step(iterators, n), arguments.steps)
    job.runtime.barrier()
    print(json.dumps({"steps_per_s": rate}), flush=True)


def child_overhead(arguments: argparse.Namespace) -> None:
    """Measures tfdist and the hand-written loop in turn."""
    import keras
    import tensorflow as tf

    job = compose(arguments)
    iterators = job.iterators(0)

    # The hand-written loop: what one would write from the TensorFlow guide, with the samples in memory.
    model = keras.models.clone_model(job.model)
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(model.trainable_variables)
    samples = next(
        iter(
            tf.data.Dataset.range(2048)
            .batch(2048)
            .map(lambda index: job.train_split.fetch(index % job.train_split.size))
        )
    )[:2]
    batches = iter(
        tf.data.Dataset.from_tensor_slices(samples)
        .shuffle(2048)
        .repeat()
        .batch(job.plan.micro_batch, drop_remainder=True)
        .prefetch(2)
    )
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        return loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    differentiate = tf.function(gradients, jit_compile=True) if arguments.jit else gradients

    @tf.function
    def hand_written(n):
        total = 0.0
        for _ in tf.range(n):
            loss, grads = differentiate(*next(batches))
            optimizer.apply(grads, model.trainable_variables)
            total += loss
        return total

    by_hand = lambda n: hand_written(tf.constant(n)).numpy()  # noqa: E731
    ours = lambda n: job.step(iterators, n)  # noqa: E731
    rates: dict[str, list[float]] = {"tfdist": [], "hand-written": []}
    for _ in range(3):
        for name, loop in (("hand-written", by_hand), ("tfdist", ours)):
            rates[name].append(blocks_per_second(loop, arguments.steps, warm=1, blocks=1))
    print(json.dumps({name: statistics.median(values) for name, values in rates.items()}), flush=True)


if __name__ == "__main__":
    main()
