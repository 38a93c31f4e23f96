"""Compares training data in an object store with the same files in a folder: TFRecord, read by one and two workers.

    python scripts/bench_stored_data.py [--turns=3] [--megabytes_per_second=50] [--step_ms=40]

The store is moto's S3 server behind a proxy that sends a body no faster than --megabytes_per_second. Each worker reads
its files once from front to back and sleeps for --step_ms after each batch of 4 MB, like a training step. `cold` starts
with an empty cache, `warm` with the cache of the run before. Workers of a run share the cache. Runs take turns. The
speed is measured from the first batch on. The wait is how much later the first batch arrives from a store than from the
folder; it is compared with the time that one file takes on one connection.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

FILES, RECORDS, BYTES, BATCH = 32, 128, 1 << 16, 64
FILE_BYTES = RECORDS * BYTES  # 8 MB each
SOURCE_ARGS = f"x=x:uint8[{BYTES}],y=y:int32,classes=2,stream=True"


def write(folder: Path) -> None:
    import tensorflow as tf

    for number in range(FILES):
        for kind, count in (("train", RECORDS), *([("test", 1)] if not number else [])):
            with tf.io.TFRecordWriter(str(folder / f"{kind}-{number:02d}.tfrecord")) as writer:
                for _ in range(count):
                    x = tf.train.Feature(bytes_list=tf.train.BytesList(value=[os.urandom(BYTES)]))
                    y = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
                    features = tf.train.Features(feature={"x": x, "y": y})
                    writer.write(tf.train.Example(features=features).SerializeToString())


def read(place: str, cache: str, rank: int, workers: int, step_ms: float) -> None:
    """Runs one worker's pass; prints the seconds from the start, without imports, to the first batch and to the end."""
    from tfdist.config import Config
    from tfdist.data.sources.load_split import data_here, load_split

    print("ready", flush=True)
    sys.stdin.readline()
    begun, first = time.monotonic(), 0.0
    config = Config().replace(source="tfrecord", source_args=SOURCE_ARGS, data_dir=place, cache_dir=cache)
    split = load_split(data_here(config), "train")
    for _ in split.stream(rank, workers).batch(BATCH).prefetch(2):
        first = first or time.monotonic() - begun
        time.sleep(step_ms / 1000)
    print(json.dumps([first, time.monotonic() - begun]), flush=True)


def run(place: str, cache: str, workers: int, step_ms: float) -> tuple[float, float]:
    """Returns (seconds to the first batch, seconds to the end), each of the slowest worker."""
    command = [sys.executable, __file__, f"--read={place}", f"--cache={cache}", f"--workers={workers}"]
    processes = [
        subprocess.Popen(
            [*command, f"--rank={rank}", f"--step_ms={step_ms}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(workers)
    ]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]
    return max(first for first, _ in told), max(end for _, end in told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--megabytes_per_second", type=float, default=50.0)
    parser.add_argument("--step_ms", type=float, default=40.0)
    for name, kind in (("read", str), ("cache", str), ("rank", int), ("workers", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(given.read, given.cache, given.rank, given.workers, given.step_ms)
        return
    from tests.stores.faulty_proxy import faulty_proxy
    from tests.stores.s3_server import BUCKET, s3_server

    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    with s3_server() as server, faulty_proxy(server.port) as proxy, tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        write(data)
        for path in data.iterdir():
            server.change(f"data/{path.name}", path.read_bytes())
        proxy.bytes_per_second = given.megabytes_per_second * 1e6
        os.environ.update(server.environment(proxy.port))
        url = f"s3://{BUCKET}/data"
        for turn in range(given.turns):
            for workers in (1, 2):
                cache = f"{folder}/cache-{turn}-{workers}"
                for name, place in (("folder", str(data)), ("store, cold", url), ("store, warm", url)):
                    found.setdefault((workers, name), []).append(run(place, cache, workers, given.step_ms))
                    first, end = found[workers, name][-1]
                    print(
                        f"{workers} workers, {name}: first {first:.2f} s, all {end:.2f} s", file=sys.stderr, flush=True
                    )
    medians = {key: [statistics.median(part) for part in zip(*values, strict=True)] for key, values in found.items()}
    megabytes = FILE_BYTES / 1e6
    shard = megabytes / given.megabytes_per_second
    print(
        f"one file: {megabytes:.1f} MB, {shard:.2f} s\n\n"
        "| workers | data in | first batch, s | wait, s | wait / one file | from there, s | speed beside the folder |\n"
        "|---|---|---|---|---|---|---|"
    )
    for (workers, name), (first, end) in medians.items():
        before, whole = medians[workers, "folder"]
        rest = end - first
        wait = first - before
        print(
            f"| {workers} | {name} | {first:.2f} | {wait:.2f} | {wait / shard:.1f} | {rest:.2f} |"
            f" {(whole - before) / rest:.2f} |"
        )


if __name__ == "__main__":
    main()
