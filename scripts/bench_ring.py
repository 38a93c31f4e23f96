"""All-reduce between workers on this machine: our ring, with memory read in place (auto) and over TCP (socket),
against TensorFlow's collectives over gRPC (ring).

    python scripts/bench_ring.py [--workers=2] [--sizes_mb=0.02,1,4,16,64] [--repeats=7]

Two workers have a core each; more workers share the cores. A size consists of one float32 tensor per MB, since
gradients are several tensors. Prints the median milliseconds of an all-reduce inside a tf.function, for packs of 1 MB
and of 4 MB.
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

ROWS = [("auto", 1.0), ("auto", 4.0), ("socket", 1.0), ("socket", 4.0), ("ring", 1.0), ("ring", 4.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes_mb", default="0.02,1,4,16,64")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--child", nargs=2, metavar=("COMMUNICATION", "PACK_MB"))
    arguments = parser.parse_args()
    sizes = [float(size) for size in arguments.sizes_mb.split(",")]
    if arguments.child:
        print(
            "measured " + json.dumps(measure(arguments.child[0], float(arguments.child[1]), sizes, arguments.repeats)),
            flush=True,
        )
        return
    root = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, root)
    from tfdist.launcher.local_job import LocalJob

    print(f"{'MB':>24}" + "".join(f"{size:>9g}" for size in sizes))
    for communication, pack in ROWS:
        output = io.StringIO()
        with TemporaryDirectory() as folder:
            job = LocalJob(
                [
                    sys.executable,
                    __file__,
                    f"--sizes_mb={arguments.sizes_mb}",
                    f"--repeats={arguments.repeats}",
                    "--child",
                    communication,
                    str(pack),
                ],
                arguments.workers,
                Path(folder),
                output=output,
                environment={**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
            job.start()
            result = job.wait()
        if result.code:
            raise SystemExit(f"{result.cause}\n{output.getvalue()}")
        milliseconds = next(
            json.loads(line.partition("measured ")[2]) for line in output.getvalue().splitlines() if "measured " in line
        )
        print(
            f"{f'{communication}, packs of {pack:g} MB':>24}"
            + "".join(f"{value:9.1f}" for value in milliseconds)
            + "  ms",
            flush=True,
        )


def measure(communication: str, pack_mb: float, sizes: list[float], repeats: int) -> list[float]:
    import tensorflow as tf

    from tfdist import build
    from tfdist.config import Config
    from tfdist.control.resolvers import resolve_cluster

    config = Config().replace(communication=communication, pack_mb=pack_mb)
    runtime = build.start_runtime(config, resolve_cluster(os.environ))
    results = []
    for size in sizes:
        tensors = [tf.ones([256, 1024]) for _ in range(int(size))] or [tf.ones([1, int(size * 2**18)])]

        @tf.function
        def rounds(n, tensors=tensors):
            values = tensors
            for _ in tf.range(n):
                values = runtime.run(
                    lambda values: [value / runtime.replicas for value in runtime.all_reduce(list(values))], (values,)
                )
            return values[0][0, 0]

        rounds(tf.constant(2))
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            rounds(tf.constant(4))
            seconds.append((time.perf_counter() - begin) / 4)
        results.append(1000 * statistics.median(seconds))
    runtime.barrier()
    return results


if __name__ == "__main__":
    main()
