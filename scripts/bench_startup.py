"""Seconds from the start of the command to the end of the first step: tfdist against a bare TensorFlow script.

    python scripts/bench_startup.py [--repeats=5] [--model=mlp|transformer]

The bare script imports TensorFlow and Keras, builds the same model and optimizer, traces one training function and
calls it on one batch of random numbers: nothing that does the same arithmetic can start faster. In addition, tfdist
resolves its cluster, estimates memory, builds a deterministic pipeline, and opens its logs. Both get one core and one
thread, and take turns. Prints medians with their spread.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tests.e2e.job import ENVIRONMENT  # noqa: E402

BATCH, CLASSES, TOKENS = 16, 10, 64
SAID = "first step done"  # printed by the bare script
SOURCES = {
    "mlp": "task=image,shape=(28,28,1),classes=10,samples=1024",
    "transformer": "task=text,vocab=256,samples=1024",
}
SIZES = {"mlp": {}, "transformer": {"layers": 4, "width": 128, "heads": 4}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", choices=SOURCES, default="transformer")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.model)
        return
    seconds: dict[str, list[float]] = {"bare TensorFlow": [], "tfdist": []}
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "bare TensorFlow": [sys.executable, str(HERE / "bench_startup.py"), "--bare", f"--model={arguments.model}"],
            "tfdist": [
                sys.executable,
                "-m",
                "tfdist.train",
                f"--model={arguments.model}",
                f"--model_args={','.join(f'{name}={value}' for name, value in SIZES[arguments.model].items())}",
                "--source=synthetic",
                f"--source_args={SOURCES[arguments.model]}",
                *([f"--sequence_length={TOKENS}"] if arguments.model == "transformer" else []),
                f"--global_batch={BATCH}",
                "--steps=1",
                "--log_every=1",
                "--eval_every=-1",
                "--save_minutes=0",
                "--nosave_final",
                "--export=none",
                "--noplot",
                f"--run_dir={folder}/run",
            ],
        }
        for repeat in range(arguments.repeats + 1):  # the first repeat fills the file cache
            print(
                f"{'warm-up' if repeat == 0 else f'repeat {repeat} of {arguments.repeats}'} ...",
                file=sys.stderr,
                flush=True,
            )
            for name, command in commands.items():
                shutil.rmtree(Path(folder) / "run", ignore_errors=True)
                taken = until_first_step(command)
                if repeat:
                    seconds[name].append(taken)
    print(
        f"\n{arguments.model}: seconds to the end of the first step, median (smallest to largest) of"
        f" {arguments.repeats}\n"
    )
    for name, values in seconds.items():
        print(f"  {name:16s} {statistics.median(values):6.2f}  ({min(values):.2f} to {max(values):.2f})")
    print(
        f"  {'tfdist / bare':16s}"
        f" {statistics.median(seconds['tfdist']) / statistics.median(seconds['bare TensorFlow']):6.2f}"
    )


def until_first_step(command: list[str]) -> float:
    """Runs the command to its end; returns the seconds until it reported the end of the first step."""
    environment = {**ENVIRONMENT, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    core = {min(os.sched_getaffinity(0))}
    begun, said = time.perf_counter(), 0.0
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    ) as process:
        for line in process.stdout:
            if not said and (SAID in line or "step 1/1" in line):
                said = time.perf_counter() - begun
    if process.returncode or not said:
        raise SystemExit(
            f"{' '.join(command)} ended with exit code {process.returncode}, or without reporting its first step."
        )
    return said


def bare(name: str) -> None:
    import keras
    import tensorflow as tf

    if name == "mlp":
        from tfdist.models.mlp import mlp

        model = mlp(x_spec=tf.TensorSpec([28, 28, 1]), num_outputs=CLASSES)
    else:
        from tfdist.models.transformer import transformer

        model = transformer(x_spec=tf.TensorSpec([TOKENS], tf.int32), num_outputs=256, **SIZES[name])
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = crossentropy(y, model(x, training=True))
        optimizer.apply(
            tape.gradient(loss, [variable.value for variable in model.trainable_variables]), model.trainable_variables
        )
        return loss

    if name == "mlp":
        batch = tf.random.uniform([BATCH, 28, 28, 1]), tf.random.uniform([BATCH], maxval=CLASSES, dtype=tf.int32)
    else:
        batch = tuple(tf.random.uniform([BATCH, TOKENS], maxval=256, dtype=tf.int32) for _ in range(2))
    float(step(*batch))
    print(SAID, flush=True)


if __name__ == "__main__":
    main()
